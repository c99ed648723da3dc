"""The command line with a prepared state directory. Only the inventory of devices is made up."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpushare.cli import facts, main, output
from gpushare.cli.main import ALIASES, COMMANDS, GROUPS
from gpushare.config import node, oci_runtime
from gpushare.core import constants
from gpushare.core.errors import CapacityError, DeviceError
from gpushare.core.model import Node
from gpushare.engines import configure
from gpushare.gpu import charlinks
from gpushare.state import leases, log, shm_abi
from gpushare.system import rootless

from tests.unit import pure
from tests.unit.clihost import GIB


def test_prune_without_state_directory_removes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--state", str(tmp_path / "none"), "prune"]) == 0
    assert capfd.readouterr().out == "nothing to remove\n"
    assert not (tmp_path / "none").exists()


def test_config_check_reports_errors(tmp_path: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    bad.write_text("version: 1\nmemory_overcomit: 1.5\n")
    good.write_text("version: v1\nflags: {migStrategy: none}\n")
    note = f"gpushare: {good}: flags: no effect, only NVIDIA's device plugin uses it\n"
    assert cli("config", "check", str(good)) == (0, f"{good}: valid\n", note)
    good.write_text("version: 1\nmemory_overcommit: 1.5\n")
    assert cli("config", "check", str(good)) == (0, f"{good}: valid\n", "")
    value = json.loads(cli("config", "check", str(good), "--format", "json")[1])
    assert value["valid"] and value["config"]["memory_overcommit"] == 1.5
    assert value["config"]["policy"]["accept"]["env"] == "always"
    for command in ("check", "show"):
        code, text, error = cli("config", command, str(bad))
        assert (code, text) == (78, "") and f"{bad}:2: memory_overcomit" in error
        assert cli("config", command, "/none.yaml")[0] == 78
    monkeypatch.setattr(constants, "CONFIG_PATH", "/none.yaml")
    assert "defaults apply" in cli("--config", "/none.yaml", "config", "check")[1]


@pytest.mark.parametrize("command", [*COMMANDS, "ls"])
def test_missing_config_file_is_an_error_of_every_command(
    cli: Callable[..., Any], command: str, tmp_path: Path
) -> None:
    """A misspelt path must not mean "no policy", not even for a command that happens to read no configuration."""
    words = {"runtime": ["status"], "config": ["show"], "limit": ["show", "x"], "cdi": ["generate"], "mps": ["status"]}
    more = words.get(command, ["x"] if command in ("inspect", "pause", "resume", "run") else [])
    more = {"completion": ["bash"], "explain": ["/"]}.get(command, more)
    code, text, error = cli("--config", str(tmp_path / "missing.yaml"), command, *more)
    assert (code, text) == (78, "")
    assert error == f"gpushare: {tmp_path}/missing.yaml: no such file; create it, or leave out --config\n"


def test_aliases_are_the_same_command(cli: Callable[..., Any], state: Path) -> None:
    for alias, name in ALIASES.items():
        more = ["--once"] if name == "top" else []
        assert cli(alias, *more, "-o", "json")[0] == 0
        assert cli(alias, "--help")[1].replace(f"gpushare {alias}", f"gpushare {name}") == cli(name, "--help")[1]
    assert cli("list", "-o", "json") == cli("list", "--format", "json") == (0, "[]\n", "")


def test_help_of_a_command(cli: Callable[..., Any]) -> None:
    for words in ([], ["list"], ["limit"], ["limit", "set"], ["ps"]):
        assert cli("help", *words)[1].partition("\n")[2] == cli(*words, "--help")[1].partition("\n")[2]
    for words in (["nothing"], ["limit", "nothing"], ["list", "more"]):
        code, text, error = cli("help", *words)
        assert (code, text) == (2, "") and "no such command" in error and error.count("\n") == 1


def test_help_lists_each_command_once_below_a_heading(cli: Callable[..., Any]) -> None:
    text = cli("--help")[1]
    for heading, commands in GROUPS.items():
        section = text.partition(f"{heading}:\n")[2].partition("\n\n")[0]
        assert [line.split()[0] for line in section.splitlines() if line.startswith("  ") and line[2] != " "] == [
            *commands
        ]


def test_ordinary_user_learns_what_is_hidden(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("devices", "status", "list"):
        assert cli(command)[2] == ""
    monkeypatch.setattr(rootless, "is_rootless", lambda: True)
    for command in ("devices", "status", "list"):
        code, text, error = cli(command)
        assert code == 0 and text and "not the shares of root and of other users" in error and error.count("\n") == 1
    assert "not the shares of root" in cli("inspect", "x")[2]


def test_limit_set_names_the_real_cause(
    cli: Callable[..., Any], start: Callable[..., Path], state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names what became of the container, also on a host whose driver cannot be read."""

    def no_driver(*_: Any, **__: Any) -> Any:
        raise DeviceError("no NVIDIA driver is loaded")

    start("gone", pure.share(0, 0, GIB))
    log.record(str(state), "late", "gpushare: device 0: no room", CapacityError("device 0: no room"))
    monkeypatch.setattr(leases, "why_dead", lambda *_: "its init (pid 12) is gone")
    for text, cause in (("gone", "has ended: its init (pid 12) is gone"), ("late", "was refused: device 0: no room")):
        for command in (["limit", "set", text, "--memory", "1Gi"], ["pause", text], ["resume", text]):
            code, _, error = cli(*command)
            assert code == 64 and cause in error, command
    monkeypatch.setattr(facts, "host", no_driver)
    assert "was refused" in cli("limit", "set", "late", "--memory", "1Gi")[2]
    assert 'no container "x"' in cli("limit", "set", "x", "--memory", "1Gi")[2]


def test_config_show_of_a_file_with_a_default_value(tmp_path: Path, cli: Callable[..., Any], state: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("version: 1\nplacement:\n  strategy: binpack\n")
    lines = [line.split() for line in cli("config", "show", str(file))[1].splitlines()]
    assert ["placement.strategy", '"binpack"'] in lines  # so the column DEFAULT is empty
    value = json.loads(cli("config", "show", str(file), "--format", "json")[1])
    assert (value["file"], value["state"], value["changed"]) == (str(file), str(state), [])


def test_version_prints_program_and_abi(cli: Callable[..., Any]) -> None:
    assert re.fullmatch(r"gpushare \S.*, ABI 1\n", cli("version")[1])
    assert cli("--version")[1].strip() == cli("version")[1].partition(",")[0]
    assert json.loads(cli("version", "--format", "json")[1])["abi"] == shm_abi.ABI_VERSION


def test_help_fits_80_columns(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for group in ((), ("config",)):
        code, text, _ = cli(*group, "--help")
        commands = re.findall(
            r"^  [a-z][a-z0-9-]* .*", text.partition("To begin:")[0].partition("--help")[2], re.MULTILINE
        )
        assert code == 0 and commands and all(line.endswith(".") and "..." not in line for line in commands), text


def test_help_ends_with_first_steps(cli: Callable[..., Any]) -> None:
    """Each line below "To begin:" is one command that exists, without a description."""
    lines = [line.split() for line in cli("--help")[1].partition("To begin:\n")[2].splitlines()]
    assert [line[0] for line in lines] == ["gpushare", "gpushare", "docker"]
    for line in lines[:2]:
        code, text, _ = cli(*line[1:], "--help")
        assert code == 0 and text.startswith(f"Usage: {' '.join(line[:3])} ")


def test_refresh_that_cannot_write_fails(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "compile_node", lambda config, directory, **_: pure.node())
    assert cli("refresh")[0] == 0
    monkeypatch.setattr(node, "read_node", lambda config, directory: None)
    code, text, error = cli("refresh")
    assert (code, text) == (1, "") and "node.json; run as root" in error


def test_refresh_links_device_nodes_for_systemd(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "dev/char").mkdir(parents=True)
    os.mknod(tmp_path / "dev/nvidia0", 0o666 | stat.S_IFCHR, os.makedev(195, 0))
    host = pure.node()
    host = host._replace(inventory=host.inventory._replace(root=str(tmp_path)))
    monkeypatch.setattr(node, "compile_node", lambda config, directory, **_: host)
    monkeypatch.setattr(node, "read_node", lambda config, directory, **_: host)
    monkeypatch.setattr(charlinks, "DIRECTORY", str(tmp_path / "dev/char"))
    assert f"created links in {tmp_path}/dev/char: 195:0\n" in cli("refresh")[1]
    assert os.readlink(tmp_path / "dev/char/195:0") == f"{tmp_path}/dev/nvidia0"
    assert "linked" not in cli("refresh")[1]
    (tmp_path / "dev/char/195:0").unlink()
    monkeypatch.setattr(os, "symlink", lambda *args: (_ for _ in ()).throw(OSError(13, "Permission denied")))
    code, _, error = cli("refresh")
    assert code == 0 and "cannot create links in " in error and "Permission denied" in error


@pytest.fixture
def refreshed(
    cli: Callable[..., Any], state: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Node], tuple[str, dict[str, Any]]]:
    """refreshed(node) runs `refresh` on a host that compiles to `node`, and returns its output as text and as JSON."""

    def refresh(now: Node) -> tuple[str, dict[str, Any]]:
        monkeypatch.setattr(node, "compile_node", lambda config, directory, **_: now)
        monkeypatch.setattr(node, "read_node", lambda config, directory: now)
        text, value = cli("refresh")[1], json.loads(cli("refresh", "--format", "json")[1])
        (state / node.FILE).write_text(json.dumps(node.node_json(now, [], [])))
        return text, value

    return refresh


def test_refresh_lists_changes(refreshed: Callable[..., Any]) -> None:
    before = pure.node(devices=2)
    text, value = refreshed(before)
    assert value["changes"] is None and "changed" not in text  # no earlier node is recorded
    text, value = refreshed(before)
    assert value["changes"] == [] and text.endswith("\nnothing has changed\n")
    inventory = before.inventory._replace(
        driver_version="550.1", devices=(pure.device(0, memory_bytes=24 * GIB), pure.device(1, uuid="GPU-new"))
    )
    config = before.config._replace(memory_overcommit=1.5, policy=before.config.policy._replace(require_limits=True))
    text, value = refreshed(Node(config, inventory))
    assert [line for line in text.splitlines() if line.startswith("changed: ")] == [
        "changed: driver: 535.261.03 -> 550.1",
        f"changed: device {pure.UUIDS[1]} (1, Test GPU, 16 GiB) is gone",
        "changed: device GPU-new (1, Test GPU, 16 GiB) is new",
        f"changed: device {pure.UUIDS[0]} memory_bytes: {16 * GIB} -> {24 * GIB}",
        "changed: memory_overcommit: 1.0 -> 1.5",
        "changed: policy.require_limits: False -> True",
    ]
    assert {"what": "driver", "before": "535.261.03", "after": "550.1"} in value["changes"]


def test_refresh_names_containers_of_another_driver(refreshed: Callable[..., Any], start: Callable[..., Path]) -> None:
    start("c1", pure.share(0, 0, GIB))
    start("c2", pure.share(0, 1, GIB))
    host = pure.node(devices=2)
    text, value = refreshed(host)
    assert value["outdated"] == [] and "start it again" not in text
    text, value = refreshed(host._replace(inventory=host.inventory._replace(devices=(pure.device(0),))))
    assert value["outdated"] == [{"id": "c2", "why": f"has {pure.UUIDS[1]}, which is gone"}]
    text, value = refreshed(host._replace(inventory=host.inventory._replace(driver_version="550.1")))
    assert "container c1 was started with driver 535.261.03: start it again\n" in text
    assert [one["id"] for one in value["outdated"]] == ["c1", "c2"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 2}', '{"schema": 2, "config": 1, "inventory": {}}'])
def test_refresh_replaces_damaged_file(refreshed: Callable[..., Any], state: Path, content: str) -> None:
    (state / node.FILE).write_text(content)
    assert refreshed(pure.node())[1]["changes"] is None


def test_internal_error_is_one_line(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: str) -> Any:
        raise ZeroDivisionError("x")

    monkeypatch.setattr(facts, "containers", broken)
    code, text, error = cli("list")
    assert (code, text) == (1, "") and error.count("\n") == 1 and "ZeroDivisionError" in error


def test_table_escapes_control_characters(capfd: pytest.CaptureFixture[str]) -> None:
    output.write_table((output.Column("name"),), [("\x1b[31mred\n",)])
    assert capfd.readouterr().out == "NAME\n\\x1b[31mred\\x0a\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "0s"), (59, "59s"), (60, "1m"), (3599, "59m"), (3600, "1h"), (90000, "1d")]
)
def test_age_is_rounded_to_largest_unit(seconds: float, text: str) -> None:
    assert output.age(seconds) == text


@pytest.mark.parametrize(
    ("used", "limit", "text"),
    [(0, 10, "░░░░░░░░░░   0%"), (99, 100, "█████████░  99%"), (100, 100, "██████████ 100%"), (1, 0, "")],
)
def test_bar_is_full_only_at_the_limit(used: int, limit: int, text: str) -> None:
    assert output.bar(used, limit) == text


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("limit", "set", "c1"), 64, "nothing to change; give --memory, --compute, --compute-mode or --priority"),
        (("limit", "set", "c1", "--device", "0"), 64, "nothing to change"),
        (("limit", "set", "c1", "--compute", "80"), 75, "80% of compute requested, 50% free of 100%, held by c2 (50%)"),
        (("limit", "set", "c1", "--compute", "80"), 75, "or set --compute-mode soft"),
        (("limit", "set", "c3", "--compute", "8"), 64, 'no container "c3"'),
        (("limit", "set", "c1", "--compute", "8", "--device", ""), 2, "'--device': it is empty"),
        (("limit", "set", "c1", "--compute", "8", "--memory", " "), 2, "'--memory': it is empty"),
        (("pause", "c3"), 64, 'no container "c3"'),
        (("limit", "show", "c3"), 64, 'no container "c3"'),
    ],
)
def test_refusal_names_flags(
    cli: Callable[..., Any], start: Callable[..., Path], words: tuple[str, ...], code: int, said: str
) -> None:
    start("c1", pure.share(0, 0, GIB)._replace(compute_percent=10))
    start("c2", pure.share(0, 0, GIB)._replace(compute_percent=50))
    found, out, err = cli(*words)
    assert (found, out) == (code, "") and said in err and "GPUSHARE_" not in err, err


@pytest.mark.parametrize("changes", [True, False])
def test_other_low_level_runtime_under_running_containers_is_noted(
    cli: Callable[..., Any], start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: bool
) -> None:
    """The record of an engine can change what gpushare runs for the containers of all engines."""
    crun, folder = tmp_path / "engine/crun", tmp_path / "configured"
    for path, text in ((crun, "#!/bin/sh\n"), (folder / "docker.runtime", f"{crun}\n")):
        path.parent.mkdir()
        path.write_text(text)
    crun.chmod(0o755)
    monkeypatch.setattr(oci_runtime, "FOLDER", str(folder))
    monkeypatch.setattr(oci_runtime, "_DIRECTORIES", ())
    monkeypatch.setattr(oci_runtime, "_OF_ENGINES", ())

    def undo(*_: Any) -> configure.Outcome:
        if changes:
            (folder / "docker.runtime").unlink(missing_ok=True)
        return configure.Outcome("docker", (), "", ())

    monkeypatch.setattr(configure, "undo", undo)
    start("c1", pure.share(0, 0, GIB))
    code, _, error = cli("runtime", "configure", "docker", "--undo")
    note = (
        f"gpushare now runs no low-level runtime, and {crun} started 1 running container(s): to stop or enter them, "
        f"set runtime.path to {crun} until they have ended"
    )
    assert code == 0 and (note in error) is changes
    assert note not in cli("runtime", "configure", "docker", "--undo")[2]  # it is the same as before
