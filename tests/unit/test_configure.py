"""gpushare runtime configure: real files below a temporary root, through the command line. Docker stands for all
engines; test_engines.py tests what is specific to one."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
from gpushare.cli import main
from gpushare.cli.runtime import remove_broken_snapshot
from gpushare.config import profiles
from gpushare.core.errors import GpushareError
from gpushare.engines import containerd, crio, docker, record
from gpushare.engines.base import Change, Settings
from gpushare.engines.host import Host
from gpushare.integrations import uninstall

from tests.unit import configurehost
from tests.unit.configurehost import HAND, tree

root, programs = configurehost.root, configurehost.programs
cli, daemon_json = configurehost.cli, configurehost.daemon_json


def test_configure_creates_file_and_undo_removes_it(cli: Callable[..., Any], root: Path, programs: Path) -> None:
    before = tree(root)
    code, text, error = cli("docker")
    assert (code, text) == (0, "create /etc/docker/daemon.json\n")
    assert error == "gpushare: now run: systemctl reload docker\n"
    wanted = {"runtimes": {"gpushare": {"path": str(programs / "gpushare-runtime"), "runtimeArgs": []}}}
    assert json.loads((root / "etc/docker/daemon.json").read_text()) == wanted
    after = tree(root)
    assert cli("docker") == (0, "nothing to do\n", "")
    assert tree(root) == after
    assert cli("docker", "--undo")[:2] == (0, "remove /etc/docker/daemon.json\n")
    left = tree(root)
    assert {name for name in left if "docker" in name} == set() and before.items() <= left.items()
    assert cli("docker", "--undo") == (0, "nothing to do\n", "")


def test_configure_edits_only_its_entry_and_undo_restores_every_byte(
    cli: Callable[..., Any], daemon_json: Path, programs: Path
) -> None:
    daemon_json.chmod(0o640)
    os.chown(daemon_json, 12, 34)
    before = tree(daemon_json.parent)
    assert cli("docker", "--default")[0] == 0
    program = programs / "gpushare-runtime"
    lines = HAND.replace('"runc"\n', '"gpushare",\n').splitlines()[:-1]
    lines += ['  "runtimes": {', '    "gpushare": {', f'      "path": "{program}",', '      "runtimeArgs": []']
    assert daemon_json.read_text().splitlines() == [*lines, "    }", "  }", "}"]
    status = daemon_json.stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (0o640, 12, 34)
    assert cli("docker", "--undo")[0] == 0
    assert tree(daemon_json.parent) == before


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be"])
def test_byte_order_mark_of_daemon_json_stays(cli: Callable[..., Any], daemon_json: Path, encoding: str) -> None:
    """shared/cases/engines/11; dockerd 28.5.2 starts with such a file."""
    for hand in (HAND, "{}", ""):
        before = f"\ufeff{hand}".encode(encoding)
        daemon_json.write_bytes(before)
        assert cli("docker")[0] == 0
        text = daemon_json.read_bytes().decode(encoding)
        assert text[0] == "\ufeff" and "gpushare" in json.loads(text[1:])["runtimes"]
        daemon_json.write_bytes(text.replace("}", "}\n").encode(encoding))  # edited, so --undo removes only the entry
        assert cli("docker", "--default")[0] == 0 and cli("docker", "--undo")[0] == 0
        text = daemon_json.read_bytes().decode(encoding)
        assert text[0] == "\ufeff" and json.loads(text[1:]) == json.loads(hand or "{}")


def test_undo_after_edit_removes_only_gpushare_entries(cli: Callable[..., Any], daemon_json: Path) -> None:
    cli("docker", "--default")
    value = json.loads(daemon_json.read_text())
    value["runtimes"]["kata"] = {"path": "/bin/kata"}
    value["debug"] = True
    daemon_json.write_text(json.dumps(value))
    assert cli("docker", "--undo")[0] == 0
    left = json.loads(daemon_json.read_text())
    assert left == {**json.loads(HAND), "runtimes": {"kata": {"path": "/bin/kata"}}, "debug": True}
    assert left["default-runtime"] == "runc"


def test_second_configure_keeps_edit(cli: Callable[..., Any], daemon_json: Path) -> None:
    cli("docker")
    daemon_json.write_text(daemon_json.read_text().replace("8.8.8.8", "9.9.9.9"))
    assert cli("docker", "--default")[0] == 0
    assert cli("docker", "--undo")[0] == 0
    assert daemon_json.read_text() == HAND.replace("8.8.8.8", "9.9.9.9")


def test_undo_works_without_record(cli: Callable[..., Any], daemon_json: Path, root: Path) -> None:
    cli("docker", "--default")
    (root / record.path_of("docker").lstrip("/")).unlink()
    assert cli("docker", "--undo")[0] == 0
    assert json.loads(daemon_json.read_text()) == {
        key: value for key, value in json.loads(HAND).items() if key != "default-runtime"
    }


def test_lost_record_is_rebuilt_without_gpushare_entries(
    cli: Callable[..., Any], daemon_json: Path, root: Path
) -> None:
    cli("docker")
    (root / record.path_of("docker").lstrip("/")).unlink()
    cli("docker", "--default")
    cli("docker", "--undo")
    assert daemon_json.read_text() == HAND


@pytest.mark.parametrize(
    ("engine", "first", "second"),
    [
        ("containerd", ("--engine-version=2.2", "--require-nri"), ("--engine-version=2.2",)),
        ("crio", ("--engine-version=1.34", "--require-nri"), ()),
        ("crio", ("--hook-only",), ()),
        ("podman", ("--hook-only",), ()),
    ],
)
def test_lost_record_of_an_entry_without_runtime_is_rebuilt(
    cli: Callable[..., Any], root: Path, engine: str, first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    """The requirement of the NRI plugin, and a list of directories with hooks."""
    cli(engine, *first)
    (root / record.path_of(engine).lstrip("/")).unlink()
    assert cli(engine, *second)[0] == 0
    assert cli(engine, "--undo")[0] == 0
    left = {name: found[3] for name, found in tree(root).items() if found[3] is not None}
    assert not any(b"gpushare" in name.encode() + text for name, text in left.items()), left


def test_damaged_record_is_reported(cli: Callable[..., Any], daemon_json: Path, root: Path) -> None:
    cli("docker")
    path = root / record.path_of("docker").lstrip("/")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for text in ("{", "[]", '{"version": 2}', '{"version": 1, "files": [{"path": 1}], "folders": []}'):
        path.write_text(text)
        before = daemon_json.read_text()
        code, out, error = cli("docker", "--undo")
        assert (code, out) == (78, "") and "is damaged" in error and "move it away" in error
        assert daemon_json.read_text() == before


class Systemd:
    """The engine's unit of systemd: when it was started and reloaded, and its state."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.at: dict[str, int] = dict.fromkeys(("ExecMainStart", "StateChange"), time.monotonic_ns() // 1000)
        self.state = "inactive"  # "": systemctl fails

    def does(self, event: str) -> None:
        self.at[event] = time.monotonic_ns() // 1000 + 1  # whole microseconds; later than what was marked before

    def ask(self, *command: str) -> Optional[str]:
        if command[0] != "systemctl" or not self.state:
            return None
        verb, properties, unit = command[1:]
        assert (verb, unit, properties[:11]) == ("show", self.engine, "--property=")
        values = {f"{name}TimestampMonotonic": str(time) for name, time in self.at.items()}
        values["ActiveState"] = self.state
        return "".join(f"{name}={values[name]}\n" for name in properties[11:].split(","))


def systemd(monkeypatch: pytest.MonkeyPatch, engine: str, state: str = "active") -> Systemd:
    unit = Systemd(engine)
    unit.state = state
    monkeypatch.setattr(Host, "ask", lambda host, *command: unit.ask(*command))
    monkeypatch.setattr(Host, "runs_systemd", lambda host: True)
    return unit


MARK = "run/gpushare-unread."


@pytest.mark.parametrize("engine", ["docker", "containerd", "crio"])
def test_change_that_the_engine_refuses_is_undone(
    cli: Callable[..., Any], daemon_json: Path, root: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """The files, the record and the folders are as before."""
    before = tree(root)
    systemd(monkeypatch, engine)
    written: list[Any] = []
    real = Host.write
    monkeypatch.setattr(Host, "write", lambda host, changes: (written.append(1), real(host, changes)))
    complaint = "level=info\nbad value in line 3\n"
    monkeypatch.setattr(Host, "complaint", lambda host, *command: complaint if written else "")
    code, out, error = cli(engine)
    assert (code, out) == (78, "") and error.count("\n") == 1
    assert "refuses the change: bad value in line 3; nothing was changed; fix that, then run the command" in error
    after = tree(root)
    assert {name: after[name] for name in after if name != "run"} == before


@pytest.mark.parametrize("engine", ["docker", "containerd", "crio"])
def test_change_stays_if_the_engine_refused_its_files_before(
    cli: Callable[..., Any], root: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """A fault of the administrator's files is not one of the change."""
    systemd(monkeypatch, engine)
    monkeypatch.setattr(Host, "complaint", lambda host, *command: "bad value in line 3\n")
    code, out, error = cli(engine)
    assert code == 0 and "create" in out
    assert "bad value in line 3; it refused the files before the change, too" in error


UNKNOWN_STATES = ["", "activating", "reloading", "deactivating"]


@pytest.mark.parametrize(
    ("engine", "options", "file", "event", "action"),
    [
        ("containerd", ("--engine-version=2.1",), containerd.DROP_IN, "ExecMainStart", "restart"),
        ("containerd", ("--engine-version=2.2", "--require-nri"), containerd.DROP_IN, "ExecMainStart", "restart"),
        ("containerd", ("--engine-version=1.7", "--hook-only"), containerd.BASE_SPEC, "ExecMainStart", "restart"),
        ("crio", (), crio.FILE, "ExecMainStart", "restart"),
        ("crio", ("--engine-version=1.34", "--require-nri"), crio.FILE, "ExecMainStart", "restart"),
        ("docker", (), docker.FILE, "StateChange", "reload"),
    ],
)
def test_change_that_the_engine_has_not_read_is_named_again(
    cli: Callable[..., Any], root: Path, monkeypatch: pytest.MonkeyPatch,
    engine: str, options: tuple[str, ...], file: str, event: str, action: str,
) -> None:  # fmt: skip
    """A command that was killed before it named the engine's restart, and a user who forgot it. docker reads its file
    when it is reloaded, the others when they start."""
    unit = systemd(monkeypatch, engine, "inactive")

    def answer() -> str:
        code, text, error = cli(engine, *options)
        assert code == 0 and text == "nothing to do\n"
        return "".join(line for line in error.splitlines(True) if "has not read" in line or "now run" in line)

    cli(engine, *options)
    unit.state = "active"
    assert answer() == ""  # it did not run, so it has read the file when it started
    cli(engine, "--undo")
    cli(engine, *options)
    unit.does("ExecMainStart" if event == "StateChange" else "StateChange")
    assert f"{engine} has not read {file} yet" in answer() and f"now run: systemctl {action} {engine}\n" in answer()
    for unit.state in UNKNOWN_STATES:
        assert f"{engine} has not read {file} yet" in answer()
    unit.state = "inactive"
    assert answer() == ""
    unit.state = "active"
    assert file in answer()
    if not file.endswith(".json"):  # the administrator, who edited it since, will restart the engine
        edited = root / file[1:]
        before = edited.read_text()
        edited.write_text("# edited\n" + before)
        assert file not in answer()
        edited.write_text(before)
    unit.does(event)
    assert answer() == ""


def test_unread_files_of_an_earlier_change_stay_unread(
    cli: Callable[..., Any], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later command that changes another file replaces no mark."""
    unit = systemd(monkeypatch, "crio")
    cli("crio")
    cli("crio", "--hook-only")
    (root / record.path_of("crio")[1:]).unlink()
    error = cli("crio", "--undo")[2]
    marks = (root / f"{MARK}crio").read_text()
    assert "now run: systemctl restart crio" in error and crio.FILE in marks and crio.HOOKS in marks
    unit.does("ExecMainStart")
    assert cli("crio", "--undo")[2] == ""


@pytest.mark.parametrize("state", UNKNOWN_STATES)
def test_change_counts_as_unread_where_systemd_did_not_answer(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    unit = systemd(monkeypatch, "crio", state)
    cli("crio")
    unit.state = "active"
    assert "now run: systemctl restart crio" in cli("crio")[2]
    unit.state = state
    cli("crio", "--undo")
    unit.state = "active"
    assert "now run: systemctl restart crio" in cli("crio", "--undo")[2]
    unit.does("ExecMainStart")
    assert cli("crio", "--undo")[2] == ""
    cli("crio")
    unit.does("ExecMainStart")
    assert "now run" not in cli("crio")[2]


def test_no_mark_is_left_in_another_root_and_without_systemd(
    cli: Callable[..., Any], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "run/systemd/system").mkdir(parents=True)
    cli("crio")
    assert not list(root.glob(f"{MARK}*"))
    assert Host("/").runs_systemd() == os.path.isdir("/run/systemd/system") and not Host(str(root)).runs_systemd()


@pytest.mark.parametrize(
    ("engine", "options", "file"),
    [
        ("containerd", ("--engine-version=2.2", "--require-nri"), containerd.DROP_IN),
        ("containerd", ("--engine-version=2.1",), containerd.DROP_IN),
        ("crio", ("--engine-version=1.34", "--require-nri"), crio.FILE),
        ("docker", (), docker.FILE),
    ],
)
def test_removal_that_the_engine_has_not_read_is_named_again(
    cli: Callable[..., Any], root: Path, monkeypatch: pytest.MonkeyPatch,
    engine: str, options: tuple[str, ...], file: str,
) -> None:  # fmt: skip
    """By the next --undo and by `gpushare uninstall`, until the engine has been restarted."""
    unit, line = systemd(monkeypatch, engine), f"gpushare: now run: systemctl restart {engine}\n"
    cli(engine, *options)
    assert cli(engine, "--undo")[2] == line
    before = tree(root)
    code, _, error = cli(engine, "--undo", "--dry-run")
    assert (
        code == 0 and f"{engine} has not read yet that {file} was changed or removed" in error and tree(root) == before
    )
    for unit.state in ("active", *UNKNOWN_STATES, "active"):
        code, text, error = cli(engine, "--undo")
        assert (code, text) == (0, "nothing to do\n") and error.endswith(line) and file in error
    host, settings = Host(str(root)), Settings("/opt/gpushare-runtime", "/opt/gpushare-hook")
    plan = uninstall.plan(settings, host, purge=False, force=False)
    assert plan.next() == [line.partition("run: ")[2].rstrip()] and not any(file in one for one in plan.lines())
    unit.does("ExecMainStart")
    assert uninstall.plan(settings, host, purge=False, force=False).next() == []
    assert cli(engine, "--undo") == (0, "nothing to do\n", "")
    assert not list(root.glob(f"{MARK}*"))


def test_removal_that_was_killed_is_finished_and_named(
    cli: Callable[..., Any], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each write: the mark comes first."""
    unit = systemd(monkeypatch, "containerd")
    replace = Host._replace
    for last in range(1, 6):
        cli("containerd", "--engine-version=2.2", "--require-nri")
        unit.does("ExecMainStart")
        done: list[Change] = []

        def killed(host: Host, change: Change, done: list[Change] = done, last: int = last) -> None:
            if len(done) == last:
                raise KeyboardInterrupt
            done.append(change)
            replace(host, change)

        monkeypatch.setattr(Host, "_replace", killed)
        with contextlib.suppress(KeyboardInterrupt):
            cli("containerd", "--undo")
        monkeypatch.setattr(Host, "_replace", replace)
        assert (root / f"{MARK}containerd").exists()
        assert "now run: systemctl restart containerd" in cli("containerd", "--undo")[2]
        assert not (root / containerd.DROP_IN[1:]).exists()
    assert len(done) < last  # the last round was not killed


def test_engine_that_does_not_run_needs_no_restart(
    cli: Callable[..., Any], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    systemd(monkeypatch, "crio", "inactive")
    cli("crio")
    cli("crio", "--undo")
    assert not list(root.glob(f"{MARK}*")) and cli("crio", "--undo")[2] == ""


def test_podman_reads_its_files_always(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cli("podman")

    def ask(host: Host, *command: str) -> None:
        assert command[0] == "podman", "podman has no daemon"

    monkeypatch.setattr(Host, "ask", ask)
    assert cli("podman") == (0, "nothing to do\n", "")


@pytest.mark.parametrize("options", [(), ("--default",), ("--undo",)])
def test_dry_run_changes_nothing_and_prints_patch(
    cli: Callable[..., Any], daemon_json: Path, root: Path, options: tuple[str, ...]
) -> None:
    if options == ("--undo",):
        cli("docker")
    before = tree(root)
    code, diff, error = cli("docker", "--dry-run", *options)
    word = "restart" if options == ("--undo",) else "reload"
    assert code == 0 and tree(root) == before and f"then run: systemctl {word} docker" in error
    cli("docker", *options)
    wanted = daemon_json.read_text()
    daemon_json.write_bytes(before["etc/docker/daemon.json"][3])
    subprocess.run(["patch", "-p1", "-d", str(root)], input=diff, text=True, check=True, capture_output=True)
    assert daemon_json.read_text() == wanted


def test_program_not_owned_by_root_is_noted(cli: Callable[..., Any], programs: Path) -> None:
    os.chown(programs / "gpushare-hook", 12, 34)
    code, _, error = cli("docker")
    assert code == 0 and f"{programs / 'gpushare-hook'} belongs to uid 12" in error and "gpushare-runtime" not in error


def test_resolved_path_is_written(cli: Callable[..., Any], root: Path, programs: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(programs)
    code = main(
        ["runtime", "configure", "docker", "--root", str(root), "--program", str(tmp_path / "link/gpushare-runtime")]
    )
    assert code == 0
    assert docker.entry("", (root / "etc/docker/daemon.json").read_text()) == str(programs / "gpushare-runtime")


def test_bundle_writes_launcher_paths(
    root: Path, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundle's gpushare is in libexec, beside programs of the same names that start Python for every container."""
    shutil.copytree(programs, tmp_path / "libexec")
    (tmp_path / "libexec" / "gpushare").write_text("")
    (programs / "gpushare").symlink_to("../libexec/gpushare")
    monkeypatch.setattr("sys.argv", [str(programs / "gpushare")])
    assert main(["runtime", "configure", "docker", "--root", str(root)]) == 0
    assert docker.entry("", (root / "etc/docker/daemon.json").read_text()) == str(programs / "gpushare-runtime")
    assert main(["runtime", "configure", "podman", "--root", str(root)]) == 0
    hook = json.loads((root / "etc/containers/oci/hooks.d/gpushare.json").read_text())
    assert hook["hook"]["path"] == str(programs / "gpushare-hook")


@pytest.mark.parametrize("wheel", [False, True])
def test_snapshot_that_does_not_start_is_removed(wheel: bool, programs: Path, tmp_path: Path) -> None:
    """An archive or a wheel runs nothing before an engine is configured."""
    program = str(programs / "gpushare-runtime")
    if wheel:
        (programs / "gpushare-runtime.py").touch()
    snapshot = tmp_path / "libexec" / ("gpushare/snapshot" if wheel else "snapshot")
    snapshot.parent.mkdir(parents=True)
    assert remove_broken_snapshot(program, dry_run=False) == []
    snapshot.write_text("#!/bin/sh\nexit 0\n")
    snapshot.chmod(0o755)
    assert remove_broken_snapshot(program, dry_run=False) == [] and snapshot.exists()
    snapshot.write_text("#!/bin/sh\nkill -SEGV $$\n")
    (note,) = remove_broken_snapshot(program, dry_run=True)
    assert str(snapshot) in note and "would be removed" in note and snapshot.exists()
    (note,) = remove_broken_snapshot(program, dry_run=False)
    assert str(snapshot) in note and "was removed" in note and not snapshot.exists()


def test_unremovable_snapshot_is_reported(programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "libexec" / "snapshot"
    snapshot.parent.mkdir()
    snapshot.write_bytes(b"\x7fELF")

    def refused(path: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "unlink", refused)
    with pytest.raises(GpushareError, match="Read-only file system") as error:
        remove_broken_snapshot(str(programs / "gpushare-runtime"), dry_run=False)
    assert error.value.hint == f"rm {snapshot}"


def test_last_line_is_next_step(root: Path, programs: Path) -> None:
    program = str(programs / "gpushare-runtime")
    script = "import sys; from gpushare.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "runtime", "configure", "docker", "--dry-run"]
    done = subprocess.run(
        [*command, "--root", str(root), "--program", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        timeout=60,
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.splitlines()[-1] == "gpushare: then run: systemctl reload docker"


def test_non_default_paths_are_passed_to_runtime(root: Path, programs: Path) -> None:
    program = str(programs / "gpushare-runtime")
    args = ["--config", "/c.yaml", "--state", "/s", "runtime", "configure", "docker"]
    assert main([*args, "--root", str(root), "--program", program]) == 0
    value = json.loads((root / "etc/docker/daemon.json").read_text())
    wanted = ["--gpushare-config", "/c.yaml", "--gpushare-state", "/s"]
    assert value["runtimes"]["gpushare"]["runtimeArgs"] == wanted


def test_profile_never_replaces_edited_file(cli: Callable[..., Any], root: Path) -> None:
    path = root / "etc/gpushare/config.yaml"
    assert cli("--profile", "workstation")[:2] == (0, "create /etc/gpushare/config.yaml\n")
    assert path.read_text() == profiles.text("workstation")
    assert cli("--profile", "workstation")[1] == "nothing to do\n"
    assert cli("docker", "--profile", "cluster")[0] == 0  # the file is unedited
    assert path.read_text() == profiles.text("cluster")
    path.write_text("version: 1\nmemory_overcommit: 1.5\n")
    before = tree(root)
    code, _, error = cli("docker", "--default", "--profile", "cluster")
    assert (
        code == 78
        and "memory_overcommit 1.5 (profile: 1.0)" in error
        and error.endswith("; leave out --profile to keep it, or add --force to replace it\n")
    )
    assert tree(root) == before
    assert cli("--profile", "cluster", "--force")[0] == 0
    assert path.read_text() == profiles.text("cluster")


def test_undo_keeps_profile(cli: Callable[..., Any], root: Path) -> None:
    cli("docker", "--profile", "cluster")
    assert cli("docker", "--undo", "--profile", "cluster")[0] == 2
    assert cli("docker", "--undo")[0] == 0
    assert (root / "etc/gpushare/config.yaml").read_text() == profiles.text("cluster")


def test_without_engine_lists_engines(cli: Callable[..., Any], root: Path, daemon_json: Path) -> None:
    (root / "usr/sbin").mkdir(parents=True)
    (root / "usr/sbin/dockerd").touch()
    k3s = "/var/lib/rancher/k3s/data/current/bin"
    (root / k3s[1:]).mkdir(parents=True)
    (root / k3s[1:] / "containerd").touch()
    rows = {line.split()[0]: line.split()[1:] for line in cli()[1].splitlines()[1:]}
    assert rows["docker"] == ["/usr/sbin/dockerd", "not", "configured", "-"]
    assert rows["containerd"] == [f"{k3s}/containerd", "not", "configured", "-"]
    main = root / "var/lib/rancher/k3s/agent/etc/containerd/config.toml"
    main.parent.mkdir(parents=True)
    main.write_text("version = 3\n")
    cli("containerd", "--config-file", f"/{main.relative_to(root)}")
    code, text, error = cli()  # before k3s makes the file again
    assert code == 0 and f"{k3s}/containerd  incomplete " in text and "no entry of" in error
    cli("docker")
    rows = {line.split()[0]: line.split()[1:] for line in cli()[1].splitlines()[1:]}
    assert rows["docker"] == ["/usr/sbin/dockerd", "configured", "/etc/docker/daemon.json"]
    daemon_json.write_text("{")
    code, text, error = cli()
    assert code == 0 and "damaged" in text and "gpushare: docker: /etc/docker/daemon.json:1:2" in error
    assert cli("--undo")[0] == 2


def test_docker_has_no_hooks(cli: Callable[..., Any]) -> None:
    code, _, error = cli("docker", "--hook-only")
    assert code == 78 and "leave out --hook-only" in error


@pytest.mark.parametrize(
    ("engine", "version", "before_it", "made", "note"),
    [
        ("containerd", "2.2", "2.1", (containerd.DROP_IN, containerd.FILE), "containerd before 2.2 cannot require NRI"),
        ("crio", "1.34", "1.33", (crio.FILE,), "CRI-O before 1.34 cannot require NRI plugins"),
    ],
)
def test_required_nri_plugin_is_configured_and_undone(
    cli: Callable[..., Any], root: Path, engine: str, version: str, before_it: str, made: tuple[str, ...], note: str
) -> None:
    before, words = tree(root), (engine, "--require-nri", "--engine-version")
    wanted = "".join(f"create {path}\n" for path in made), f"gpushare: now run: systemctl restart {engine}\n"
    assert cli(*words, version) == (0, *wanted)
    assert "required_plugins" in (root / made[0][1:]).read_text()
    assert cli(*words, version)[1] == "nothing to do\n"
    assert cli(engine, "--undo")[0] == 0
    left = tree(root)
    assert {name: left[name] for name in left if not name.startswith("var")} == before
    code, text, error = cli(*words, before_it)
    assert (code, text) == (0, "nothing to do\n") and note in error


@pytest.mark.parametrize("words", [("docker",), ("containerd", "--hook-only"), ("crio", "--undo"), ()])
def test_only_cri_engines_require_nri_plugins(cli: Callable[..., Any], words: tuple[str, ...]) -> None:
    code, _, error = cli(*words, "--require-nri")
    assert code == 2 and "--require-nri is for containerd and crio" in error


def test_two_daemons_are_configured_and_undone_independently(
    cli: Callable[..., Any], daemon_json: Path, root: Path
) -> None:
    before = tree(root)
    second = root / "etc/docker/second.json"
    second.write_text("{}")
    cli("docker")
    assert cli("docker", "--config-file", "/etc/docker/second.json")[0] == 0
    configured = daemon_json.read_text()
    assert cli("docker", "--undo", "--config-file", "/etc/docker/second.json")[0] == 0
    assert second.read_text() == "{}" and daemon_json.read_text() == configured
    cli("docker", "--config-file", "/etc/docker/second.json")
    second.unlink()  # that daemon was removed; its record must not matter
    assert cli("docker", "--default")[0] == 0 and "second" not in (root / record.path_of("docker")[1:]).read_text()
    assert cli("docker", "--undo")[0] == 0
    after = tree(root)
    assert {name: after[name] for name in after if not name.startswith("var")} == before


def test_undo_of_a_second_containerd_leaves_nothing_and_the_first_one_s_handler(
    cli: Callable[..., Any], root: Path
) -> None:
    """shared/cases/engines/04."""
    second = root / "opt/second/config.toml"
    second.parent.mkdir(parents=True)
    second.write_text("version = 3\n")
    words = ("containerd", "--engine-version", "2.1")
    cli(*words)
    before = tree(root)
    assert cli(*words, "--config-file", "/opt/second/config.toml")[0] == 0
    assert (root / "opt/second/conf.d/gpushare.toml").exists()
    assert cli(*words, "--config-file", "/opt/second/config.toml", "--undo")[0] == 0
    after = tree(root)
    assert {name: after[name] for name in after if not name.startswith("var")} == {
        name: before[name] for name in before if not name.startswith("var")
    }


def test_unknown_profile_is_refused() -> None:
    with pytest.raises(GpushareError):
        profiles.text("other")
