"""gpushare doctor: MPS. Daemons are values here; integration/test_mps.py and test_mps_daemon.py run real ones."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpushare.allocation.backends.mps import control as mps_control
from gpushare.allocation.backends.mps import state as mps
from gpushare.allocation.backends.mps import status as mps_status
from gpushare.core.model import Policy
from gpushare.doctor import FAIL, OK, SKIP, WARN, Machine, Result
from gpushare.system import procs, rootless

from tests.unit import pure
from tests.unit.clihost import GIB
from tests.unit.doctorhost import ask, machine, root

__all__ = ["machine", "root"]  # fixtures

UUID = pure.device(0).uuid
PID = os.getpid()
ROOTS = mps_control.Daemon(PID, 0)


@pytest.fixture
def allowed(machine: Machine, root: Path) -> Machine:
    """A host whose policy and driver allow MPS."""
    program = root / "usr/bin/nvidia-cuda-mps-control"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert machine.config
    return machine._replace(config=machine.config._replace(policy=Policy(allowed_backends=("mps", "shim"))))


@pytest.fixture
def daemon(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """daemon(listens, said, **ready): the listening process, its reported limits, and its ready file."""

    def make(
        listens: mps_control.Daemon | None = ROOTS,
        said: str = "60.0%, 1G",
        is_ready: bool = True,
        log: str = "",
        **ready: Any,
    ) -> None:
        me, folder = procs.myself(), Path(mps.directory(machine.state_dir, UUID))
        (folder / "pipe").mkdir(parents=True, exist_ok=True)
        content: dict[str, Any] = {"version": 1, "pid": PID, "start": me.start, "boot_id": procs.boot_id()}
        content.update(driver_version=pure.VERSION, build="", thread_percent=60, memory_bytes=GIB, clients=48)
        content.update({"uid": 0, "shm": "own", **ready})
        (folder / "log").mkdir(exist_ok=True)
        (folder / "log" / "control.log").write_text(log)
        if is_ready:
            (folder / mps.READY).write_text(json.dumps(content))
        monkeypatch.setattr(mps_control, "listening", lambda pipe: listens)
        monkeypatch.setattr(mps_control.Control, "ask", lambda self, command: "")
        monkeypatch.setattr(mps_status, "limits_now", lambda control: said)

    return make


def test_unused_mps_is_ok(machine: Machine, allowed: Machine, root: Path) -> None:
    assert ask("MPS", machine) == Result(OK, "not in use")
    assert ask("MPS", allowed) == Result(
        WARN, "policy.allowed_backends has mps, and no GPU has a daemon", "gpushare mps start"
    )
    (root / "usr/bin/nvidia-cuda-mps-control").unlink()
    assert "has no nvidia-cuda-mps-control" in ask("MPS", allowed).detail


def test_rootless_user_skips_mps(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rootless, "is_rootless", lambda: True)
    assert ask("MPS", machine) == Result(SKIP, "needs root")


DIED = f"[2099-01-31 12:00:00.123 Control {PID:5}] Server 45 exited with status 1\n"
START, AGAIN = "gpushare mps start --device 0", "gpushare mps stop --force --device 0, start it again, then "
ABSENT, USERS, OTHER = None, mps_control.Daemon(1, 1000), mps_control.Daemon(9, 0)
DEAD = {"start": 1}
CASES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "well": ({}, OK, "runs on GPU 0, at most 60%, for 1 container", ""),
    "wrong user": (
        *({"listens": USERS}, FAIL, "the daemon of GPU 0 (pid 1) belongs to uid 1000, who can change its limits"),
        f"end that daemon, then {START}",
    ),
    "dead": (
        *({"listens": ABSENT, **DEAD}, FAIL, f"the daemon of GPU 0 (pid {PID}) has died; programs get errors in c1"),
        f"{START}, then start c1 again",
    ),
    "dead, another": ({"listens": OTHER, **DEAD}, FAIL, "(pid 9) whose limits are not set", START),
    "not offered": ({"is_ready": False}, FAIL, f"for GPU 0 (pid {PID}) whose limits are not set", START),
    "damaged": ({"uid": "me"}, FAIL, "whose limits are not set", START),
    "gone": ({"listens": ABSENT, "is_ready": False}, FAIL, "is gone; programs get errors in c1", START),
    "deaf": ({"listens": ABSENT}, FAIL, f"the daemon of GPU 0 (pid {PID}) no longer accepts connections", AGAIN),
    "other pid": ({"listens": OTHER}, FAIL, f"pid 9 listens for GPU 0, and pid {PID} was given", AGAIN),
    "limits changed": ({"said": "100.0%, 1G"}, FAIL, "its limits are 100.0%, 1G, not 60.0%, 1G", AGAIN),
    "server died": (
        *({"log": DIED}, WARN, "GPU 0: server 45 has died (status 1): programs that used it in c1 must be"),
        "start these programs again",
    ),
    "a server ended": ({"log": DIED.replace("1\n", "0\n")}, OK, "runs on GPU 0", ""),
    "a server of another daemon": ({"log": DIED.replace(f"{PID:5}", "    1")}, OK, "runs on GPU 0", ""),
    "upgrade": ({"driver_version": "1.2"}, WARN, f"was started with driver 1.2, not {pure.VERSION}", AGAIN),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_daemon_fault_is_reported(
    case: str,
    allowed: Machine,
    daemon: Callable[..., None],
    start: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments, result, detail, hint = CASES[case]
    start("c1", pure.share(0, 0, GIB)._replace(compute_backend="mps"))
    start("other", pure.share(0, 0, GIB))
    daemon(**arguments)
    token = mps.state(UUID, allowed.state_dir).token
    monkeypatch.setattr(mps_status, "_token", lambda state_dir, container_id: token)
    found = ask("MPS", allowed)
    assert found.result == result and detail in found.detail and found.hint.startswith(hint), found
    assert "other" not in found.detail and bool(found.hint) == (result != OK)


def test_pipe_directory_without_daemon_is_reported(allowed: Machine, daemon: Callable[..., None]) -> None:
    daemon(listens=None, is_ready=False)
    folder = mps.directory(allowed.state_dir, UUID)
    found = ask("MPS", allowed)
    assert found == Result(
        WARN, f"stale {folder}/pipe: no process listens there", f"{START}, or gpushare mps stop --device 0"
    )
    os.rmdir(f"{folder}/pipe")
    assert ask("MPS", allowed).detail == "policy.allowed_backends has mps, and no GPU has a daemon"


def test_container_of_previous_daemon_is_reported(
    allowed: Machine, daemon: Callable[..., None], start: Callable[..., Path]
) -> None:
    daemon()
    start("c1", pure.share(0, 0, GIB)._replace(compute_backend="mps"))
    assert ask("MPS", allowed) == Result(
        WARN, "the daemon of GPU 0 is not the one that c1 began with", "start these containers again"
    )


def test_worst_daemon_and_removed_gpu_are_reported(allowed: Machine, daemon: Callable[..., None]) -> None:
    daemon()
    Path(mps.directory(allowed.state_dir, "GPU-gone")).mkdir()
    found = ask("MPS", allowed)
    assert found.result == WARN and found.detail.endswith("mps/GPU-gone is of a GPU that is gone")
    daemon(said="100.0%, 1G")
    found = ask("MPS", allowed)
    assert found.result == FAIL and "its limits are" in found.detail and "GPU-gone" not in found.detail
