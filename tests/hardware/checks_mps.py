"""Check NVIDIA's MPS as a backend: a program gets the daemon's limits, whatever limits it sets for itself.

The daemon and its clients run in a private mount namespace with a private state directory: this machine's gpushare and
the card's settings stay as they are. The multiprocessors that a client sees follow NVIDIA's documentation ("MPS",
CUDA_MPS_ACTIVE_THREAD_PERCENTAGE), as does the simulator (simulator/cuda/mps.c).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, Optional

from tests.hardware import processes
from tests.hardware.checks_memory import limit_of
from tests.hardware.checks_product import gpushare
from tests.hardware.place import TREE
from tests.hardware.session import Result, Session, size, verdict

PERCENT, MOST = 30, 60  # limit of the program; limit of the daemon
STOP_S = 30.0  # for stopping the daemon, even if the check has no time left
RAISED: dict[str, Any] = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100", "CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}


class Host:
    """`gpushare` with its own state directory in a mount namespace that exists as long as this object."""

    def __init__(self, session: Session, directory: str) -> None:
        self.session, self.state = session, f"{directory}/s"
        self.config, self.device = f"{directory}/config.yaml", session.machine.uuid
        root = str(session.machine.simhost or "/")
        content = {"version": 1, "driver": {"root": root}, "shim_dir": str(session.machine.shim)}
        with open(self.config, "w", encoding="utf-8") as file:
            json.dump({**content, "policy": {"allowed_backends": ["shim", "mps"]}}, file)
        command = ["unshare", "-m", "sh", "-c", "echo; exec sleep inf"]
        self.holder = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        assert self.holder.stdout
        self.holder.stdout.readline()  # wait until it is in its namespace

    def call(self, *words: str, deadline: Optional[float] = None, **env: str) -> tuple[int, str, str]:
        enter = ["nsenter", "-t", str(self.holder.pid), "-m", "--"]
        command = [*enter, *gpushare(), "--config", self.config, "--state", self.state, *words]
        return processes.run(command, deadline or self.session.deadline, {**os.environ, **env})

    def mps(self, *words: str) -> Any:
        """Run `gpushare mps`. Raises Failed with its error."""
        code, out, err = self.call("mps", *words, "--device", self.device, "--format", "json")
        if code:
            raise processes.Failed(f"gpushare mps {words[0]}: {(err or out).strip()[:200]}")
        return json.loads(out)[0]

    def run(self, memory: int, percent: int) -> tuple[int, str, str]:
        """Run a program that queries the device and sets MPS variables that would raise its limit."""
        limits = ("--devices", self.device, "--memory", str(memory), "--compute", f"{percent}%")
        program = (sys.executable, "-m", "tests.hardware.tenant", "device", json.dumps({"library": "libcuda.so.1"}))
        return self.call("run", *limits, "--", *program, GPUSHARE_BACKEND="mps", PYTHONPATH=str(TREE), **RAISED)

    def close(self) -> None:
        try:
            self.call("mps", "stop", "--force", deadline=time.monotonic() + STOP_S)
        finally:
            processes.end(self.holder)


@contextlib.contextmanager
def host(session: Session) -> Iterator[Host]:
    if os.geteuid() != 0:
        raise processes.Absent("needs root")
    session.need_shim()
    if session.machine.simhost:
        from simulator import mpscontrol

        mpscontrol.install(session.machine.simhost)
    with tempfile.TemporaryDirectory(prefix="gs-", dir="/tmp") as short:  # socket paths must be short
        made = Host(session, short)
        try:
            yield made
        finally:
            made.close()


def mps(session: Session) -> Result:
    """Run `gpushare mps start`, a program with 30 %, and a program without a daemon."""
    limit, all_of_it = limit_of(session), session.machine.multiprocessors
    wanted, wrong = math.ceil(all_of_it * PERCENT / 100), []
    with host(session) as made:
        try:
            pid = made.mps("start", "--compute", str(MOST))["pid"]
        except processes.Failed as error:
            if "no nvidia-cuda-mps-control in" in str(error):
                raise processes.Absent("this driver has no nvidia-cuda-mps-control") from None
            raise
        code, out, err = made.run(limit, PERCENT)
        if code or not out.startswith("{"):
            raise processes.Failed(f"a program under MPS: {(err or out).strip()[-200:]}")
        seen = json.loads(out)
        if "absent" in seen:
            raise processes.Failed(f"a program under MPS: {seen['absent']}")
        got = seen["multiprocessors"]
        if abs(got - wanted) > 1:
            wrong.append(f"it sees {got} multiprocessors of {all_of_it}, not {wanted}")
        if seen["total_bytes"] != limit:
            wrong.append(f"it sees {size(seen['total_bytes'])}, not the limit of {size(limit)}")
        status = made.mps("status")
        if (status["state"], status["pid"], status["compute_percent"]) != ("running", pid, MOST):
            wrong.append(f"afterwards the daemon is {status['state']}: {status['note']}")
        if "at most" not in made.run(limit, MOST + 1)[2]:
            wrong.append(f"a program with {MOST + 1} % was not refused")
        made.mps("stop")
        if "is not running on this device" not in made.run(limit, PERCENT)[2]:
            wrong.append("a program was started without a daemon")
    note = f"{PERCENT} % is {got} of {all_of_it} multiprocessors; refused beyond {MOST} %, and without a daemon"
    return verdict(wrong, note, {"multiprocessors": got, "of": all_of_it, "limit_bytes": limit})
