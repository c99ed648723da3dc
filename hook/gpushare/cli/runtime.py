"""gpushare runtime configure, gpushare runtime status: configure container engines to use gpushare."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any, Optional

import click

from ..config import oci_runtime, profiles
from ..config.config import load_config, parse_config
from ..config.keys import effective
from ..core.errors import ConfigError
from ..core.model import Config
from ..core.quoting import shown
from ..engines import base
from ..engines import configure as engines
from ..engines.base import Change, Settings
from ..engines.configure import CRI_ENGINES, ENGINES, Outcome, State
from ..engines.host import Host, broken_snapshot, check_program, foreign_owners
from ..state import leases, log
from .node import make_links
from .options import Paths, given, require_config, with_format
from .output import Column, state_style, write_json, write_line, write_table


@click.group()
def runtime() -> None:
    """Configure container engines to use gpushare."""


@runtime.command("configure")
@click.argument("engine", required=False, type=click.Choice(sorted(ENGINES)), metavar=f"[{'|'.join(sorted(ENGINES))}]")
@click.option(
    "--profile", type=click.Choice(profiles.NAMES), help="Also write gpushare's configuration file for this use."
)
@click.option("--default", is_flag=True, help="Make gpushare the default runtime (docker).")
@click.option("--hook-only", is_flag=True, help="Keep the engine's runtime and add gpushare's hook.")
@click.option(
    "--require-nri",
    is_flag=True,
    help="Keep the engine's runtime; refuse containers while `gpushare nri` does not run (containerd 2.2, CRI-O 1.34).",
)
@click.option("--dry-run", is_flag=True, help="Print the changes as a diff, change nothing.")
@click.option("--undo", is_flag=True, help="Remove gpushare's entries.")
@click.option("--force", is_flag=True, help="With --profile: replace a configuration file that was edited.")
@click.option(
    "--config-file",
    callback=given,
    default="",
    metavar="FILE",
    help="The engine's configuration file, if not the usual one.",
)
@click.option(
    "--program",
    callback=given,
    default="",
    metavar="FILE",
    help="Path of gpushare-runtime, if it is not in the directory of this program.",
)
@click.option(
    "--engine-version",
    callback=given,
    default="",
    metavar="N.N",
    help="The version of containerd or CRI-O.  [default: reported by the engine]",
)
@click.option("--dump", type=click.File(), help="Output of `containerd config dump`.  [default: run it]")
@click.option(
    "--root", callback=given, default="/", metavar="DIR", help="Change files below DIR, for example to build an image."
)
@with_format
@click.pass_obj
def configure_(
    paths: Paths, /, engine: Optional[str], profile: Optional[str], dump: Any, root: str, output: str, **given: Any
) -> None:
    """Configure an engine to use gpushare.

    Writes the engine's configuration and prints the command that makes the engine reload it. Running it again changes
    nothing; until the engine has read the files, it prints that command again. Without an engine, lists engines.
    """
    host = Host(root)
    if host.root == "/" and profile is None and not given["undo"]:
        require_config(paths)
    settings = settings_of(paths, given["program"])._replace(
        config_file=os.path.abspath(given["config_file"]) if given["config_file"] else "",
        default=given["default"],
        hook_only=given["hook_only"],
        require_nri=given["require_nri"],
        engine_version=given["engine_version"],
        dump=dump.read() if dump else "",
    )
    _check_options(settings, engine, profile, given["undo"])
    if engine is None and profile is None:
        _status(settings, host, output)
        return
    more = [] if profile is None else profile_changes(profile, paths.config, host, given["force"])
    low_level = _low_level(paths) if host.root == "/" and not given["dry_run"] else ""
    if engine is None:
        outcome = Outcome("", tuple(more), "", ())
        if not given["dry_run"]:
            host.write(more)
    elif given["undo"]:
        outcome = engines.undo(ENGINES[engine], settings, host, given["dry_run"])
    else:
        outcome = _configured(paths, engine, settings, host, given["dry_run"], more)
    if low_level:
        outcome = outcome._replace(notes=(*outcome.notes, *_left_behind(paths, low_level)))
    report(outcome, given["dry_run"], output)


def _check_options(settings: Settings, engine: Optional[str], profile: Optional[str], undo: bool) -> None:
    """Raise UsageError for options that do not go together."""
    if settings.require_nri and (engine not in CRI_ENGINES or settings.hook_only or undo):
        raise click.UsageError("--require-nri is for containerd and crio, without --hook-only and --undo")
    if engine is None and (undo or settings.default or settings.hook_only or settings.config_file):
        raise click.UsageError(f"name an engine: {', '.join(sorted(ENGINES))}")
    if undo and profile is not None:
        raise click.UsageError("--undo leaves the configuration file alone: leave out --profile")


def _configured(
    paths: Paths, engine: str, settings: Settings, host: Host, dry_run: bool, more: Sequence[Change]
) -> Outcome:
    """Configure an engine of this host, or of an image below another root."""
    checked = settings._replace(program=check_program(settings.program), hook=check_program(settings.hook))
    if engine in CRI_ENGINES and not checked.hook_only:
        check_program(checked.cri_program)
    here = host.root == "/"
    removed = remove_broken_snapshot(checked.program, dry_run) if here else []
    outcome = engines.configure(ENGINES[engine], checked, host, dry_run, more)
    owners = foreign_owners([checked.program, checked.hook]) if outcome.changes else []
    notes = [*outcome.notes, *owners, *removed]
    if here and not dry_run:
        with contextlib.suppress(ConfigError):  # an invalid configuration is reported by the next start and doctor
            config = load_config(paths.config)
            make_links(config.dev_root)
            oci_runtime.remember(paths.config, paths.state_dir, config)  # perhaps another one than before
            notes += _no_low_level(config)
    return outcome._replace(notes=tuple(notes))


def _low_level(paths: Paths) -> str:
    """The low-level runtime that gpushare runs; empty without one, or with an invalid configuration."""
    try:
        return oci_runtime.find(load_config(paths.config))
    except ConfigError:
        return ""


def _left_behind(paths: Paths, former: str) -> list[str]:
    """One line if containers run that another low-level runtime started: runc and crun do not know each other's."""
    present = _low_level(paths)
    live = len(leases.view(paths.state_dir).live) if present != former else 0
    if not live:
        return []
    what = f"gpushare now runs {present or 'no low-level runtime'}, and {former} started {live} running container(s)"
    return [f"{what}: to stop or enter them, set runtime.path to {former} until they have ended"]


def _no_low_level(config: Config) -> list[str]:
    """One line if no container could start, because there is no low-level runtime."""
    try:
        oci_runtime.find(config)
        return []
    except ConfigError as error:
        return [f"{error.message}: containers with the runtime gpushare do not start; {error.hint}"]


@runtime.command("status")
@click.option("--root", callback=given, default="/", metavar="DIR", help="Read files below DIR.")
@with_format
@click.pass_obj
def status(paths: Paths, root: str, output: str) -> None:
    """List engines, and whether they are installed and configured."""
    if root == "/":
        require_config(paths)
    _status(settings_of(paths, ""), Host(root), output)


def settings_of(paths: Paths, program: str) -> Settings:
    """Settings with the paths of gpushare's programs: beside `program`, or beside this program."""
    program = os.path.abspath(program) if program else os.path.join(_programs(), base.RUNTIME_PROGRAM)
    hook = os.path.join(os.path.dirname(os.path.realpath(program)), base.HOOK_PROGRAM)
    return Settings(program, hook, paths.config, paths.state_dir)


def _programs() -> str:
    """The directory of the launchers: this program's directory, or in the bundle bin/ instead of libexec/. The programs
    in libexec/ would start Python for each container, even for one without a request."""
    here = os.path.dirname(os.path.realpath(sys.argv[0]))
    launchers = os.path.join(os.path.dirname(here), "bin")
    return launchers if os.path.basename(here) == "libexec" and os.path.isdir(launchers) else here


def remove_broken_snapshot(program: str, dry_run: bool) -> list[str]:
    """Remove the snapshot if it does not run on this host, and return lines for the user. An archive or wheel runs no
    script at installation, so its snapshot is tried here; packaging/scripts/postinstall tries that of a .deb or .rpm.
    Raises ConfigError."""
    path = broken_snapshot(program)
    if not path:
        return []
    try:
        if not dry_run:
            os.unlink(path)
    except OSError as error:
        raise ConfigError(
            f"Python does not start from {shown(path)}, and that file cannot be removed: {error.strerror}", f"rm {path}"
        ) from error
    done = "would be" if dry_run else "was"
    return [f"Python does not start from {shown(path)}, so it {done} removed: containers start some 30 ms later"]


def profile_changes(profile: str, path: str, host: Host, force: bool) -> list[Change]:
    """The change that writes the profile's configuration file. Raises ConfigError if the file was edited, unless
    `force`."""
    wanted, there = profiles.text(profile), host.read(path)
    if there == wanted:
        return []
    written = [profiles.text(name) for name in profiles.NAMES]
    if there is not None and not force and there not in written and not profiles.says_nothing(there):
        try:
            now, then = effective(parse_config(there, path)), effective(parse_config(wanted, path))
            other = [f"{key} {shown(now[key])} (profile: {shown(then[key])})" for key in now if now[key] != then[key]]
        except ConfigError as error:
            other = [str(error)]
        what = ", ".join(other) or "only in its comments"
        raise ConfigError(
            f"{path} was edited and differs: {what}", "leave out --profile to keep it, or add --force to replace it"
        )
    return [Change(path, there, wanted)]


def report(outcome: Outcome, dry_run: bool, output: str) -> None:
    """Print what was done, or what would be done."""
    if output == "json":
        changes = [{"path": change.path, "action": change.action, "diff": change.diff()} for change in outcome.changes]
        value = {"engine": outcome.engine or None, "dry_run": dry_run, "changes": changes}
        write_json({**value, "next": outcome.next or None, "notes": list(outcome.notes)})
        return
    for change in outcome.changes:
        if dry_run:
            sys.stdout.write(change.diff())
        else:
            write_line(change.describe())
    if not outcome.changes:
        write_line("nothing to do")
    sys.stdout.flush()  # so that the next command is the last line, even if both streams go to one pipe or file
    for note in outcome.notes:
        log.to_stderr(f"gpushare: {note}")
    if outcome.next:
        log.to_stderr(f"gpushare: {'then' if dry_run else 'now'} run: {outcome.next}")


def _status(settings: Settings, host: Host, output: str) -> None:
    found = [engines.state(ENGINES[name], settings, host) for name in ENGINES]
    if output == "json":
        write_json([one._asdict() for one in found])
        return
    columns = (Column("engine"), Column("found"), Column("gpushare", style=state_style), Column("files"))
    write_table(columns, [(one.engine, one.found or "no", _word(one), ", ".join(one.files) or "-") for one in found])
    for one in found:
        if one.problem:
            log.to_stderr(f"gpushare: {one.engine}: {one.problem}")


def _word(one: State) -> str:
    """`incomplete`: the entry is there, but has no effect yet, as before a restart; a line below the table has more."""
    words = {(False, False): "not configured", (False, True): "damaged", (True, False): "configured"}
    return words.get((one.configured, bool(one.problem)), "incomplete")
