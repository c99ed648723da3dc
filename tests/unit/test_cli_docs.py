"""docs/cli.md and the manual pages match the commands."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from gpushare import doctor
from gpushare.allocation import suspension
from gpushare.allocation.backends.mps import daemon as mps_daemon
from gpushare.allocation.backends.mps import state as mps
from gpushare.cli import cdi as cli_cdi
from gpushare.cli import main as cli_main
from gpushare.cli import runtime
from gpushare.cli import suspend as cli_suspend
from gpushare.cli.main import COMMANDS, group
from gpushare.config import keys as config_keys
from gpushare.config import node
from gpushare.core import errors
from gpushare.core.errors import CapacityError
from gpushare.gpu import driverfiles
from gpushare.programs import commandline, hook
from gpushare.state import log

from tests.unit import pure
from tests.unit.clihost import GIB, charge
from tools import man_pages
from tools.commands import EXAMPLES, EXIT_CODES, JSON, Command, walk

EVERYTHING = list(walk())
LEAVES = [command for command in EVERYTHING if not command.subcommands()]
# Commands without a table: exec of another program, a script, the Prometheus format, kubelet's protocol
WITHOUT_FORMAT = {"run", "completion", "help", "export", "agent", "k8s-plugin", "nri", "dra"}


def test_walk_finds_all_commands() -> None:
    assert {command.words[0] for command in EVERYTHING if command.words} == set(COMMANDS)
    assert {"runtime configure", "config show"} <= {command.name for command in LEAVES}


@pytest.mark.parametrize("command", LEAVES, ids=lambda command: command.name)
def test_every_command_has_the_common_options(command: Command) -> None:
    options = {option for one in command.click.params for option in one.opts}
    assert ({"--format", "--no-color"} <= options) == (command.name not in WITHOUT_FORMAT)
    assert (command.name in JSON) == (command.name not in WITHOUT_FORMAT)


@pytest.mark.parametrize("command", EVERYTHING, ids=lambda command: command.name or "gpushare")
def test_every_help_fits_80_columns(command: Command, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli_main([*command.words, "--help"]) == 0
    text, error = capfd.readouterr()
    assert error == "" and max(map(len, text.splitlines())) <= 80 and "..." not in text.replace("]...", "")
    assert command.paragraphs()[0].endswith(".") and all(text for _, text in command.options())


def test_examples_are_command_lines_that_parse() -> None:
    assert set(EXAMPLES) <= {command.name for command in LEAVES}
    for name, lines in EXAMPLES.items():
        for line, what in lines:
            words = shlex.split(line)
            assert words[0] == "gpushare" and line.startswith(f"gpushare {name}") and what
            parse(group, words[1:], None)


def parse(command: click.Command, words: list[str], parent: click.Context | None) -> None:
    """Parse the words without running the command; raises UsageError."""
    context = command.make_context("x", list(words), parent)
    if isinstance(command, click.Group):
        first = vars(context).get("_protected_args") or context.protected_args  # click 8.1 has no underscore
        name, found, rest = command.resolve_command(context, [*first, *context.args])
        assert found is not None and name is not None
        parse(found, rest, context)


def keys(value: Any, documented: set[str], prefix: str = "") -> Iterator[str]:
    """Keys of all objects; also keys of nested objects that are documented with their keys."""
    for one in value if isinstance(value, list) else [value]:
        for key, item in one.items() if isinstance(one, dict) else ():
            yield prefix + key
            if any(known.startswith(f"{prefix}{key}.") for known in documented):
                yield from keys(item, documented, f"{prefix}{key}.")


@pytest.fixture
def world(
    cli: Callable[..., Any], start: Callable[..., Path], state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """A host on which every command has output: world(words) -> its JSON."""
    charge(start("c1", pure.share(0, 0, GIB)), 0, 1, GIB)
    (state / "containers" / "half").mkdir()
    log.record(str(state), "gone", "gpushare: no room", CapacityError("no room"))
    monkeypatch.setattr(driverfiles, "require_usable", lambda inventory: None)
    monkeypatch.setattr(node, "compile_node", lambda config, directory, write=True, **_: pure.node())
    monkeypatch.setattr(doctor, "CHECKS", doctor.CHECKS[:1])
    root = tmp_path / "root"
    (root / "usr/bin").mkdir(parents=True)
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "config.json").write_text('{"root": {"path": "x"}, "process": {"env": []}}')
    (tmp_path / "config.yaml").write_text("version: 1\n")
    for module in (cli_cdi, runtime):
        monkeypatch.setattr(module, "check_program", lambda path: path)
        monkeypatch.setattr(module, "foreign_owners", lambda paths: [])
    moved = suspension.Outcome("c1", True, GIB, 1, 0.5)
    monkeypatch.setattr(cli_suspend, "_site", lambda *_: SimpleNamespace(suspend=lambda *_: moved))
    monkeypatch.setattr(mps_daemon, "start", lambda *_: mps_daemon.Started("started", mps.MpsState(pid=7)))
    more = {
        "top": ["--once"],
        "inspect": ["c1"],
        "limit show": ["c1"],
        "limit set": ["c1", "--memory", "512Mi"],
        "pause": ["c1"],
        "suspend": ["c1"],
        "resume": ["c1"],
        "explain": [str(bundle)],
        "prune": ["--dry-run"],
        "labels": ["--dry-run"],
        "mps stop": ["--device", "0"],
        "uninstall": ["--dry-run", "--force", "--root", str(root)],
        "runtime status": ["--root", str(root)],
        "runtime configure": ["docker", "--dry-run", "--root", str(root)],
    }

    def ask(name: str) -> Any:
        words = [*name.split(), *more.get(name, [])]
        code, text, error = cli("--config", str(tmp_path / "config.yaml"), *words, "--format", "json")
        assert code == 0, error
        return json.loads(text)

    return ask


@pytest.mark.parametrize("name", JSON)
def test_json_keys_match_documentation(world: Callable[..., Any], name: str) -> None:
    """In both directions: every documented key is printed, and every printed key is documented."""
    documented = set(JSON[name][1])
    found = set(keys(world(name), documented))
    bases = {
        "inspect": [("", "list")],
        "top": [("containers.", "list"), ("devices.", "devices")],
        "limit set": [("", "limit show")],
    }
    inherited = {f"{prefix}{key}" for prefix, base in bases.get(name, []) for key in JSON[base][1]}
    if name == "explain":  # nothing is requested here, so there is no plan
        documented -= {key for key in documented if key.startswith("plan.")}
    if name == "config check":  # this file is valid; tests/golden/cli/config.txt has an invalid one
        documented.remove("errors")
    if name == "limit set":
        inherited.remove("state")
    if name == "inspect":
        found -= {key for key in found if key.startswith("shares.")}
    assert found - inherited == documented, sorted(found ^ documented)


def test_every_exit_code_is_documented() -> None:
    codes = {value.exit_code for value in vars(errors).values() if isinstance(value, type)}
    assert codes | {0, 2, 126, 127, 128} == {code for code, _, _ in EXIT_CODES}


# Manual pages


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return man_pages.write(tmp_path_factory.mktemp("man"))


def test_every_command_has_manual_page(pages: list[Path]) -> None:
    """The page of a program takes the place of a group of commands with its name."""
    found = {f"{page.parent.name}/{page.name}" for page in pages}
    commands = {"-".join(("gpushare", *command.words)) for command in EVERYTHING}
    programs = {"gpushare-hook", "gpushare-runtime"}
    assert found == {
        *(f"man1/{name}.1" for name in commands - programs),
        *(f"man8/{name}.8" for name in programs),
        "man5/gpushare.yaml.5",
    }


def test_pages_of_programs_describe_their_command_lines(pages: list[Path]) -> None:
    texts = {page.name: page.read_text().replace("\\-", "-") for page in pages}
    for flag in (*commandline.OWN, commandline.OWN_CRI):
        assert f".B --{flag}" in texts["gpushare-runtime.8"]
    assert hook._SYNOPSIS.partition(" ")[2] in texts["gpushare-hook.8"]
    for key in config_keys.KEYS:
        assert f".B {key.path}\n" in texts["gpushare.yaml.5"]


def test_other_pages_named_in_a_page_exist(pages: list[Path]) -> None:
    ours = {(page.stem, page.suffix[1:]) for page in pages}
    for page in pages:
        named = re.findall(r"\b(gpushare[\w.-]*?) ?\((\d)\)", page.read_text().replace("\\-", "-"))
        assert set(named) <= ours, page.name


def test_groff_prints_no_warnings(pages: list[Path]) -> None:
    for page in pages:
        done = subprocess.run(["groff", "-man", "-Tutf8", "-ww", "-z", page], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), page.name


def test_manual_page_names_are_found_by_apropos(pages: list[Path]) -> None:
    for page in pages:
        done = subprocess.run(["lexgrog", page], capture_output=True, text=True)
        assert done.returncode == 0 and f'"{page.stem} - ' in done.stdout, done


def test_man_renders_sections(pages: list[Path]) -> None:
    def shown(name: str) -> str:
        (page,) = (page for page in pages if page.stem == name)
        environment = {"PATH": "/usr/bin:/bin", "MANWIDTH": "100", "LC_ALL": "C.UTF-8"}
        done = subprocess.run(["man", "--warnings", "-l", page], capture_output=True, text=True, env=environment)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def lines(text: str) -> list[str]:
        return [
            line.strip() for line in text.splitlines() if line.startswith(" ")
        ]  # versions of groff indent otherwise

    text = shown("gpushare-run")
    assert {"gpushare run [OPTIONS] [--] COMMAND [ARG]...", "--memory SIZE"} <= set(lines(text))
    assert "gpushare run --memory 4Gi --compute 30% -- python train.py" in text
    text = shown("gpushare")
    for command in LEAVES:
        assert (
            any(line.startswith(command.name) for line in lines(text))
            and f"gpushare-{'-'.join(command.words)}(1)" in text
        )


def test_pages_of_removed_commands_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "man1").mkdir()
    for name in ("gpushare-old.1", "other.1"):
        (tmp_path / "man1" / name).write_text("")
    man_pages.write(tmp_path)
    names = {path.name for path in (tmp_path / "man1").iterdir()}
    assert "gpushare-old.1" not in names and {"other.1", "gpushare-list.1"} <= names


def test_text_is_escaped_for_groff() -> None:
    assert man_pages.escaped(".TH x") == "\\&.TH x"
    assert man_pages.escaped("'so /etc/passwd").startswith("\\(aq") and man_pages.escaped("a\\b") == "a\\eb"
    assert man_pages.items([('"path": "/x"', "a")]).splitlines()[1] == ".B \\(dqpath\\(dq: \\(dq/x\\(dq"
