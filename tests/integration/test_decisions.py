"""The log of decisions from hook, runtime and `run`: one line for each granted, refused or released share, and no line
without a decision."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.host import BIN, Node, logfmt
from tests.support.runc import RuntimeFailed

MakeContainer = Callable[..., Any]
SHARE = {"GPUSHARE_MEMORY": "4Gi", "GPUSHARE_COMPUTE": "30%", "PASSWORD": "hunter2"}
WITHOUT_POSTSTOP = r"""#!/bin/sh
for word; do
    [ "$before" = --bundle ] && sed -i 's/"poststop": *\[/"poststopped": [/' "$word/config.json"
    before=$word
done
exec runc "$@"
"""


def decisions(node: Node, *keys: str) -> list[tuple[str | None, ...]]:
    """Without those on containers of other tests: the first start searches the whole kernel for its own."""
    lines = [line for line in node.decisions() if line["decision"] != "ignored"]
    return [tuple(line.get(key) for key in keys) for line in lines]


def test_only_shares_are_logged_as_granted_and_released(container: MakeContainer, node: Node, way: str) -> None:
    one = container(["true"], env=SHARE, **node.way(way))
    assert one.run() == 0
    assert container(["true"], env={"PASSWORD": "hunter2"}, **node.way(way)).run() == 0
    one.delete()
    lines = node.decisions()
    granted, released = [line for line in lines if line["decision"] != "ignored"]  # a search may be cut short
    what = {"id": one.id, "memory": "4294967296", "compute": "30", "dialect": "own", "backend": "shim"}
    for line, outcome in ((granted, "granted"), (released, "released")):
        assert line.items() >= {"decision": outcome, **what}.items()
        assert float(line["ms"]) > 0 and line["devices"].startswith("GPU-")
    assert (granted["way"], granted["names"]) == (way, "GPUSHARE_MEMORY,GPUSHARE_COMPUTE")
    assert released["by"] == "poststop"
    assert "hunter2" not in (node.config.parent / "decisions").read_text()


def test_delete_logs_one_release_when_no_hook_ran(
    container: MakeContainer, make_node: Callable[..., Node], simhost: Path, tmp_path: Path
) -> None:
    """If the low-level runtime calls no poststop hook (crun after a failed create, `run --keep`), `delete` logs the
    release, once."""
    program = tmp_path / "low-level"
    program.write_text(WITHOUT_POSTSTOP)
    program.chmod(0o755)
    node = make_node(simhost, runtime={"path": str(program)})
    one = container(["sleep", "inf"], env=SHARE, **node.way("runtime")).start()
    one.close()
    assert decisions(node, "decision", "by", "memory") == [
        ("granted", None, "4294967296"),
        ("released", "delete", "4294967296"),
    ]
    assert node.leases() == []


def test_failed_start_after_the_grant_logs_a_release(container: MakeContainer, node: Node) -> None:
    one = container(["/not/there"], env=SHARE, **node.way("runtime"))
    with pytest.raises(RuntimeFailed):
        one.create()
    one.close()
    assert [outcome for (outcome,) in decisions(node, "decision")] == ["granted", "released"]


def test_release_of_a_dead_share_names_the_command(container: MakeContainer, node: Node, way: str) -> None:
    first, second = (node.cli("run", "--name", name, "--memory", "1Gi", "true") for name in ("first", "second"))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert node.cli("prune").returncode == 0
    assert decisions(node, "decision", "id", "way", "by") == [
        ("granted", "first", "run", None),
        ("released", "first", None, "start"),
        ("granted", "second", "run", None),
        ("released", "second", None, "prune"),
    ]


def test_gpushare_run_logs_a_refusal_in_one_line(node: Node) -> None:
    assert node.cli("run", "--name", "web", "--memory", "1000Gi", "true").returncode == 75
    assert node.cli("run", "--name", "web", "/not/there").returncode == 127  # no decision about a share
    assert decisions(node, "decision", "id", "way", "reason") == [("refused", "web", "run", "capacity")]


def test_invalid_configuration_is_logged_to_the_journal(
    container: MakeContainer, node: Node, way: str, tmp_path: Path
) -> None:
    """The log file is unknown then. /dev/log is a link, as systemd makes it, in the test's own mount namespace."""
    node.config.write_text("version: 1\nnonsense: true\n")
    path = tmp_path / "journal"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(str(path))
        journal.settimeout(10)
        one = container(["true"], env=SHARE, prefix=own_dev(tmp_path, path), **node.way(way))
        with pytest.raises(RuntimeFailed):
            one.create()
        head, text = journal.recv(8192).decode().split(": ", 1)
    assert head.startswith("<28>") and " gpushare[" in head
    line = logfmt(text)
    assert (line["decision"], line["id"], line["reason"]) == ("refused", one.id, "config")


@pytest.mark.parametrize("way", ["hook", "runtime", "run"])
def test_journal_records_a_share_from_grant_to_release(
    container: MakeContainer, make_node: Callable[..., Node], simhost: Path, tmp_path: Path, way: str
) -> None:
    """Also for `gpushare run`, which logs after it has left the host's mount namespace."""
    node = make_node(simhost, log={"decisions": "syslog"})
    assert node.cli("refresh").returncode == 0  # mounts the state directory outside that namespace
    path = tmp_path / "journal"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(str(path))
        journal.settimeout(10)
        prefix = own_dev(tmp_path, path)
        if way == "run":
            for words in (["run", "--name", "web", "--memory", "1Gi", "true"], ["prune"]):
                command = [*prefix, BIN / "gpushare", "--config", node.config, "--state", node.state, *words]
                subprocess.run([str(word) for word in command], check=True, timeout=60)
        else:
            one = container(["true"], env=SHARE, prefix=prefix, **node.way(way))
            assert one.run() == 0
            one.delete()
        lines = [journal.recv(8192).decode() for _ in range(2)]
    assert all(line.startswith("<30>") and " gpushare[" in line and "\n" not in line for line in lines)
    granted, released = (logfmt(line.split(": ", 1)[1]) for line in lines)
    assert (granted["decision"], granted["way"], released["decision"]) == ("granted", way, "released")
    assert released["by"] == ("prune" if way == "run" else "poststop")


def own_dev(tmp_path: Path, journal: Path) -> tuple[str, ...]:
    """The prefix that runs a command with its own /dev/log."""
    upper, work = tmp_path / "dev", tmp_path / "work"
    upper.mkdir()
    work.mkdir()
    (upper / "log").symlink_to(journal)
    mount = f"mount -t overlay -o lowerdir=/dev,upperdir={upper},workdir={work} dev /dev"
    return ("unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh")
