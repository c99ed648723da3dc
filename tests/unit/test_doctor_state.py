"""gpushare doctor: the state directory, leases, containers, refusals."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpushare.core.errors import CapacityError
from gpushare.doctor import FAIL, OK, WARN, Machine, Result
from gpushare.state import agentlock, leaseend, log, storage

from tests.unit import pure
from tests.unit.clihost import GIB
from tests.unit.doctorhost import ask, machine, root

__all__ = ["machine", "root"]  # fixtures


def test_faults_of_state_directory_are_reported(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask("state", machine).result == OK
    assert "yet" in ask("state", machine._replace(state_dir=str(tmp_path / "none"))).detail
    (tmp_path / "plain").mkdir()
    assert ask("state", machine._replace(state_dir=str(tmp_path / "plain"))).result == OK
    (tmp_path / "plain" / "file").write_text("")
    assert ask("state", machine._replace(state_dir=str(tmp_path / "plain"))).result == FAIL
    status = os.statvfs(machine.state_dir)
    for full in (
        (*status[:4], status.f_blocks // 10, *status[5:]),
        (*status[:7], status.f_files // 10, *status[8:]),  # of file names
    ):
        monkeypatch.setattr(os, "statvfs", lambda _, full=full: os.statvfs_result(full))
        result = ask("state", machine)
        assert result.result == WARN and "9" in result.detail.rpartition(" is ")[2]


def test_read_only_state_directory_fails(machine: Machine, cli: Callable[..., Any], state: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", state], check=True)
    assert ask("state", machine).result == FAIL
    code, _, error = cli("prune")
    assert code and error.endswith('/lock": Read-only file system; make it writable: mount -o remount,rw\n')


RECORDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda path: None, ""),
    "a file": (lambda path: path.touch(), ""),
    "a link": (lambda path: path.symlink_to("/data/usage.log"), 'a link to "/data/usage.log", which is not followed'),
    "a directory": (lambda path: path.mkdir(), "not a regular file"),
    "in a file": (lambda path: (path.parent.rmdir(), path.parent.touch()), "Not a directory"),
}


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("key", ["usage_journal", "log"])
def test_journal_or_log_that_cannot_be_written_is_reported(
    machine: Machine, tmp_path: Path, key: str, kind: str
) -> None:
    assert machine.config is not None
    path = tmp_path / "records" / "one"
    path.parent.mkdir()
    make, why = RECORDS[kind]
    make(path)
    result = ask("records", machine._replace(config=machine.config._replace(**{key: str(path)})))
    assert (result.result, why in result.detail, str(path) in result.detail) == (WARN if why else OK, True, True)


def test_journal_creates_its_directory_and_the_log_does_not(machine: Machine, tmp_path: Path) -> None:
    assert machine.config is not None
    path = str(tmp_path / "a/b/c")
    assert ask("records", machine._replace(config=machine.config._replace(usage_journal=path))).result == OK
    result = ask("records", machine._replace(config=machine.config._replace(log=path)))
    assert (result.result, f"there is no directory {tmp_path}/a/b" in result.detail) == (WARN, True)


def test_journal_on_a_read_only_disk_is_reported(machine: Machine, tmp_path: Path) -> None:
    assert machine.config is not None
    config = machine.config._replace(usage_journal=str(tmp_path / "usage.log"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "test", tmp_path], check=True)
    try:
        result = ask("records", machine._replace(config=config))
        assert result.result == WARN and f"{tmp_path} cannot be written" in result.detail
    finally:
        subprocess.run(["umount", tmp_path], check=True)


AGENT = "systemctl enable --now gpushare-agent"
CANNOT = "driver 535.261.03 cannot suspend a process: that needs 570 or later"


@pytest.mark.parametrize(
    ("policy", "without", "beside"),
    [
        ({}, Result(OK, "policy.lending is off"), Result(OK, "policy.lending is off")),
        (
            {"lending": "evict"},
            Result(WARN, "policy.lending is evict and no agent runs: no memory is lent", AGENT),
            Result(OK, "policy.lending is evict"),
        ),
        (
            {"lending": "suspend"},
            Result(WARN, "policy.lending is suspend and no agent runs: no memory is lent", AGENT),
            Result(OK, f"policy.lending is suspend, and borrowers are ended as with evict: {CANNOT}"),
        ),
        (
            {"suspend_idle_s": 60},
            Result(WARN, "policy.suspend.idle is set and no agent runs: no idle container is suspended", AGENT),
            Result(WARN, f"policy.suspend.idle is set, and no container can be suspended: {CANNOT}"),
        ),
    ],
)
def test_lending_and_suspending_need_an_agent_and_a_driver(
    machine: Machine, policy: dict[str, Any], without: Result, beside: Result
) -> None:
    assert machine.config is not None
    config = machine.config._replace(policy=machine.config.policy._replace(**policy))
    one = machine._replace(config=config)
    assert ask("lending", one) == without
    lock = agentlock.take(machine.state_dir)
    assert ask("lending", one) == beside
    os.close(lock)


def test_suspended_container_without_an_agent_is_reported(machine: Machine, start: Callable[..., Path]) -> None:
    start("one", pure.share(0, 0, GIB)._replace(phase="suspended"))
    what = "one: suspended, and no agent runs that resumes it at its next call"
    assert ask("lending", machine) == Result(WARN, what, AGENT)


def test_leases_are_counted_and_dead_ones_reported(machine: Machine, start: Callable[..., Path], state: Path) -> None:
    assert ask("leases", machine).detail == "0 containers hold a share"
    start("live", pure.share(0, 0, GIB))
    assert ask("leases", machine) == Result(OK, "1 container holds a share")
    start("gone", pure.share(0, 0, GIB))
    path = state / "containers" / "gone" / "lease.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot_id": "x"}))
    usual = {"dialect": "run", "state": "held"}  # a program under `gpushare run` ended
    path.write_text(json.dumps({**json.loads(path.read_text()), **usual}))
    assert ask("leases", machine) == Result(OK, "1 container holds a share")
    path.write_text(json.dumps({**json.loads(path.read_text()), "dialect": "own"}))
    (state / "containers" / "half").mkdir()
    result = ask("leases", machine)
    assert result == Result(WARN, "1 container holds a share; left behind: gone, half", "gpushare prune")
    (state / "changing").write_text("live")
    assert "gone, half, a change of limits of live" in ask("leases", machine).detail
    (state / "changing").unlink()
    path.write_text("{")
    result = ask("leases", machine)
    assert result.result == FAIL and "gone: lease.json is damaged" in result.detail and "--assume-free" in result.hint
    leaseend.sweep(str(state), assume_free=True)
    assert "2 released shares are not removed" in ask("leases", machine).detail
    storage.empty_trash(str(state))
    assert ask("leases", machine).result == OK


def test_containers_of_another_driver_are_reported(machine: Machine, start: Callable[..., Path]) -> None:
    assert ask("containers", machine) == Result(OK, "no container runs")
    start("c1", pure.share(0, 0, GIB))
    assert ask("containers", machine).result == OK
    assert machine.inventory
    newer = machine.inventory._replace(driver_version="550.1")
    result = ask("containers", machine._replace(inventory=newer))
    assert result.result == WARN and f"c1 was started with driver {pure.VERSION}" in result.detail
    other = machine.inventory._replace(devices=(pure.device(1),))
    assert f"c1 has {pure.UUIDS[0]}, which is gone" in ask("containers", machine._replace(inventory=other)).detail


def test_recent_refusals_are_reported(machine: Machine) -> None:
    folder = Path(machine.state_dir) / "errors"
    assert ask("refusals", machine).result == OK
    log.record(machine.state_dir, "old", "gpushare: no room", CapacityError("no room"))
    os.utime(folder / "old", (0, 0))
    assert ask("refusals", machine).result == OK
    log.record(machine.state_dir, "c1", "gpushare: no room; wait", CapacityError("no room"))
    result = ask("refusals", machine)
    assert result == Result(WARN, "1 container was refused in the last day; c1: no room; wait", "gpushare inspect c1")
    log.record(machine.state_dir, "c2", "gpushare: internal error", ZeroDivisionError("x"))
    result = ask("refusals", machine)
    assert result.detail.startswith("2 containers were refused") and "report" in result.hint
