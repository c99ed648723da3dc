"""Each limit holds with every backend that promises it, and a backend refuses unsupported requests with its reason.

Each row of the table of backends has a stage, which runs every kind of limit. The supported limits and the reasons of
refusals come from the table. Features of single backends: test_mps.py, test_mps_daemon.py, test_oversubscribe.py.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from gpushare.allocation import backends
from gpushare.gpu import inventory

from bench.compute import PROGRAM as BUSY
from bench.compute import wait_for_work
from simulator.ledger import Ledger
from simulator.simhost import LIBDIR, default_uuid, make_simhost
from tests.integration.backend_stage import COMPUTE, GIB, MEMORY, ROWS, TAKER, Driver, Kernel, Stage, must
from tests.support import busy
from tests.support.host import Node
from tests.support.processes import wait_exit
from tests.support.rootfs import run
from tests.support.runc import Container, RuntimeFailed
from tests.support.spec import Mount

MULTIPROCESSORS = 48  # of a simulated device
LAST_BYTES = 2 << 20  # the driver's own block
OUT_OF_MEMORY = 2  # CUresult
RAISED: dict[str, Any] = {
    "GPUSHARE_MEMORY": "16Gi",
    "GPUSHARE_COMPUTE": "100%",
    "GPUSHARE_BACKEND": "shim",
    "GPUSHARE_OVERSUBSCRIBE": "1",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100",
    "CUDA_MPS_PIPE_DIRECTORY": "/tmp",
    "NVIDIA_VISIBLE_DEVICES": "all",
}

STAGES: dict[str, tuple[str, str, type[Kernel], str]] = {  # (row, way, enforcer below gpushare, low-level runtime)
    "shim": ("shim", "runtime", Kernel, "runc"),
    "mps": ("mps", "hook", Kernel, "runc"),
    "dmem": ("dmem", "hook", Kernel, "runc"),
    "dmem by NVML": ("dmem", "runtime", Driver, "runc"),
    "oversubscribe": ("oversubscribe", "runtime", Kernel, "runc"),
    **{f"{row} under crun": (row, "runtime", Kernel, "crun") for row in ROWS if row != "dmem"},  # test_dmem_runtimes.py
}


def test_each_row_has_a_stage() -> None:
    assert {row for row, *_ in STAGES.values()} == set(ROWS)


@contextmanager
def without_hybrid_cgroups() -> Iterator[None]:
    """The fixture of the same name, for the lifetime of a stage."""
    unified = Path("/sys/fs/cgroup/unified")
    hybrid = os.path.ismount(unified)
    if hybrid:
        run("umount", unified)
    try:
        yield
    finally:
        if hybrid:
            run("mount", "-t", "cgroup2", "none", unified)


@pytest.fixture(scope="module", params=STAGES)
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    row, way, kernel, low = STAGES[request.param]
    with ExitStack() as stack:
        # A socket's path must be short
        state = stack.enter_context(tempfile.TemporaryDirectory(prefix="gs-", dir="/tmp"))
        if low == "crun":
            stack.enter_context(without_hybrid_cgroups())
        made = Stage(tmp_path_factory.mktemp("stage"), Path(state), request.param, row, way, kernel, low)
        stack.callback(made.close)
        yield made


# The shim limits compute as a percentage of the device's time, judged by its ledger and by a clock. First in this file,
# since the last stage keeps its view of cgroups until the end of the file.

SHARES = {"shim": 30, "dmem": 50}
RUN_S, POINTS, TRIES = 1.0, 5.0, 8


def test_compute_limit_holds_with_each_memory_backend(tmp_path: Path, make_node: Callable[..., Node]) -> None:
    """Two containers side by side, each with a different enforcer of memory."""
    root = make_simhost(tmp_path / "host", gpus=1, memory_bytes=16 * GIB)
    node = make_node(root, policy={"allowed_backends": list(backends.BACKENDS)})
    kernel = Kernel(root, [one.bus_id for one in inventory.read_inventory(str(root)).devices])
    assert all(backends.COMPUTE not in ROWS[name].enforces or name == backends.SHIM for name in SHARES)
    with ExitStack() as stack:
        ledger = stack.enter_context(Ledger(str(root / "dev" / "nvidia0")))
        spaces = []
        for name, percent in SHARES.items():
            env = {"GPUSHARE_MEMORY": "2Gi", "GPUSHARE_COMPUTE": f"{percent}%", "GPUSHARE_BACKEND": name}
            mounts = [Mount(busy.build(), BUSY)]
            one = Container(
                tmp_path / "c",
                [BUSY, *busy.words(seconds=60, kernel=50)],
                env=env,
                mounts=mounts,
                **node.way("runtime"),
            )
            stack.enter_context(one)
            kernel.make(one)
            one.start()
            spaces.append(os.stat(f"/proc/{one.pid}/ns/pid").st_ino)
            wait_for_work(ledger, one, spaces[-1])
        seen: list[list[float]] = []
        for _ in range(TRIES):
            begin = time.monotonic_ns()
            time.sleep(RUN_S)  # the device's own time is measured
            end = begin + int(RUN_S * 1e9) - 50_000_000
            each = [100 * statistics.fmean(ledger.history(space).shares(begin, end, 10_000_000)) for space in spaces]
            seen.append(each)
            limits = list(SHARES.values())
            assert all(got < limit + POINTS for got, limit in zip(each, limits)) or len(seen) == 1, seen
            if len(seen) > 1 and all(got > limit - POINTS for got, limit in zip(each, limits)):
                return
        pytest.fail(f"{seen} instead of {SHARES}")


# Kinds of limits


def whole(stage: Stage, device: int) -> int:
    """The memory that a container sees: with oversubscription, twice as much."""
    return device * (2 if backends.VIRTUAL in stage.row.enforces else 1)


def reached_and_enforced(stage: Stage) -> None:
    said, size = stage.take(), whole(stage, MEMORY)
    assert (said["cuda_total_bytes"], said["nvml_total_bytes"], said["refusal"]) == (size, size, OUT_OF_MEMORY)
    slack = LAST_BYTES * (2 if size > MEMORY else 1)  # of each part
    assert said["free_bytes"] - slack < said["got_bytes"] <= said["free_bytes"] < size
    assert min(said["got_bytes"], MEMORY - slack) <= stage.peak_bytes() <= MEMORY
    below = {f"{stage.kernel.regions[0]} {MEMORY}"} if stage.enforcer(backends.MEMORY) == "dmem" else set()
    assert stage.kernel.limits(stage.main) == below


def of_all_processes(stage: Stage) -> None:
    command = [
        stage.low,
        "--root",
        str(stage.main.bundle / "runtime"),
        "exec",
        stage.main.id,
        *TAKER,
        "hold",
        str(GIB // 2),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdin and first.stdout
        try:
            assert json.loads(first.stdout.readline())["got_bytes"] == GIB // 2
            beside = stage.take()["got_bytes"]
        finally:
            first.stdin.close()
    assert 0 < beside <= stage.take()["got_bytes"] - GIB // 2
    assert stage.peak_bytes() <= MEMORY


def in_exec(stage: Stage) -> None:
    """With any environment, and without one."""
    said = stage.take("1", **RAISED)
    assert said == stage.take("1", clear=True)
    assert (said["cuda_total_bytes"], said["multiprocessors"]) == (
        whole(stage, MEMORY),
        multiprocessors(stage, COMPUTE),
    )


def multiprocessors(stage: Stage, percent: int) -> int:
    """Return the visible multiprocessors. A percentage reduces them, except with the shim, which limits time instead
    (test_compute_...)."""
    by_mps = stage.enforcer(backends.COMPUTE) == "mps"
    return math.ceil(MULTIPROCESSORS * percent / 100) if by_mps else MULTIPROCESSORS


def live(stage: Stage) -> None:
    """Change both limits for programs that begin later; test_live_limits.py changes them for running ones."""
    for size, text, percent in ((GIB, "1Gi", 50), (MEMORY, "2Gi", COMPUTE)):
        must(stage.node, "limit", "set", stage.main.id, "--memory", text, "--compute", str(percent))
        said = stage.take()
        assert said["multiprocessors"] == multiprocessors(stage, percent)
        beyond = backends.VIRTUAL in stage.row.enforces  # the residency boundary moves, the total stays
        assert said["cuda_total_bytes"] == said["nvml_total_bytes"] == (whole(stage, MEMORY) if beyond else size)
        assert said["free_bytes"] - 2 * LAST_BYTES < said["got_bytes"] < said["cuda_total_bytes"]
        if stage.enforcer(backends.MEMORY) == "dmem":
            assert stage.kernel.limits(stage.main) == {f"{stage.kernel.regions[0]} {size}"}


def released(stage: Stage) -> None:
    """Assert that poststop releases the limits, that prune does for a lost container, and that the next container gets
    them."""
    before = stage.node.left(), stage.node.leases()
    for poststop in (True, False):
        with stage.one() as one:
            one.start()
            assert one.id in stage.node.leases()
            if poststop:
                one.delete()
            else:
                os.kill(one.pid, signal.SIGKILL)
                one.exit_code = wait_exit(one.pid, 30)
                must(stage.node, "prune")
            assert (stage.node.left(), stage.node.leases()) == before
    if stage.enforcer(backends.COMPUTE) == "mps":
        (row,) = json.loads(must(stage.node, "mps", "status", "--device", "0", "--format", "json"))
        assert row["containers"] == [stage.main.id]


KINDS: dict[str, Callable[[Stage], None]] = {
    "memory": reached_and_enforced,
    "processes": of_all_processes,
    "exec": in_exec,
    "live": live,
    "end": released,
}


@pytest.mark.parametrize("kind", KINDS)
def test_limit_holds_with_each_backend(stage: Stage, kind: str) -> None:
    KINDS[kind](stage)


# Features that a host may lack: how to remove them for a container, and the message


@contextmanager
def away(path: Path) -> Iterator[None]:
    path.rename(f"{path}.away")
    yield
    Path(f"{path}.away").rename(path)


@contextmanager
def there(path: Path, text: str) -> Iterator[None]:
    path.write_text(text)
    yield
    path.unlink()


@contextmanager
def less_promised(stage: Stage) -> Iterator[None]:
    stage.allow(*backends.BACKENDS, host_memory="5Gi")
    yield
    stage.allow(*backends.BACKENDS)


Lack = Callable[[Stage, Container], AbstractContextManager[None]]
LACKING: dict[str, tuple[tuple[Lack, str], ...]] = {
    "shim": (),
    "mps": (
        (
            lambda stage, one: away(stage.node.state / "mps" / default_uuid(0) / "ready"),
            "mps cannot: its control daemon is not running .*set GPUSHARE_BACKEND=shim",
        ),
    ),
    "dmem": (
        (
            lambda stage, one: away(stage.kernel.tree / "dmem.capacity"),
            "dmem cannot: the kernel has no dmem controller .*set GPUSHARE_BACKEND=shim",
        ),
        (
            lambda stage, one: away(stage.kernel.leaf(one) / "dmem.max"),
            r"dmem\.max.* does not exist: .*write \+dmem",
        ),
    ),
    "dmem by NVML": (
        (
            lambda stage, one: there(stage.root / LIBDIR / "broken", "4"),
            "nvmlDeviceSetMemoryLimits_v1 returned 4; use the backend shim",
        ),
    ),
    "oversubscribe": (
        (
            lambda stage, one: less_promised(stage),
            "host memory of oversubscribed shares: 4 GiB requested, 1 GiB free of 5 GiB",
        ),
    ),
}


def test_missing_host_feature_refuses_the_container(stage: Stage) -> None:
    held = stage.node.leases()
    for lack, said in LACKING[stage.name.removesuffix(" under crun")]:
        with stage.one() as one, lack(stage, one), pytest.raises(RuntimeFailed, match=said):
            one.create()
        assert stage.node.leases() == held
