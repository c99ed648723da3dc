"""What the driver takes beyond a program's allocations: each cost alone, and the measured ones of the H100."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from simulator import models, simhost
from simulator.ledger import Ledger
from simulator.simhost import LIBDIR, Costs
from tests.simulator.test_ledger import CONTEXT, MIB
from tests.support.remote import Remote

Start = Callable[..., Remote]
MakeHost = Callable[..., Path]
H100 = "NVIDIA H100 80GB HBM3"

LIST = """
import pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
print([(p.pid, p.usedGpuMemory) for p in n.nvmlDeviceGetComputeRunningProcesses(h)])
"""


def listed(root: Path, *wrapper: str) -> list[tuple[int, int]]:
    """Return the processes that NVML lists, as (pid, bytes)."""
    env = {**os.environ, "LD_LIBRARY_PATH": str(root / LIBDIR)}
    command = [*wrapper, sys.executable, "-c", LIST]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    return sorted(eval(done.stdout))


def opened(root: Path) -> Ledger:
    return Ledger(str(root / "dev/nvidia0"))


def test_default_model_has_no_costs(start: Start, simhost: Path) -> None:
    p = start()
    with opened(simhost) as ledger:
        p.do("cuda.init()")
        assert ledger.clients() == ()
        p.do("cuda.context()")
        assert ledger.used_bytes == CONTEXT and listed(simhost) == [(p.pid, CONTEXT)]


def test_context_of_the_h100_is_the_measured_one(start: Start, make_host: MakeHost) -> None:
    root = make_host(model=H100)
    p = start(root)
    with opened(root) as ledger:
        p.do("cuda.init()")
        assert ledger.used_bytes == 3407872 and listed(root) == []
        p.do("cuda.context()")
        assert ledger.used_bytes == 552402944 and listed(root) == [(p.pid, 543162368)]
        p.do("second = cuda.out('cuCtxCreate_v2', 0, 0)")
        assert ledger.used_bytes == 552402944 + 548995072 and listed(root) == [(p.pid, 2 * 543162368)]
        p.do("cuda.ok('cuCtxDestroy_v2', second); cuda.ok('cuDevicePrimaryCtxReset_v2', 0)")
        assert ledger.used_bytes == 3407872 and listed(root) == []
        (client,) = ledger.clients()
        assert client.unlisted_bytes == 3407872


def test_cuinit_takes_memory_of_each_device(start: Start, make_host: MakeHost) -> None:
    root = make_host(gpus=2, costs=Costs(init_bytes=MIB))
    start(root).do("cuda.init()")
    for minor in range(2):
        with Ledger(str(root / f"dev/nvidia{minor}")) as ledger:
            assert ledger.used_bytes == MIB


def test_cuinit_fails_on_a_full_device(start: Start, make_host: MakeHost) -> None:
    root = make_host(memory_bytes=CONTEXT, costs=Costs(init_bytes=MIB))
    with pytest.raises(Exception, match="cuDevicePrimaryCtxRetain gave 2"):
        start(root).do("cuda.context()")
    full = make_host("full", memory_bytes=2 * MIB, costs=Costs(init_bytes=3 * MIB))
    with pytest.raises(Exception, match="cuInit gave 2"):
        start(full).do("cuda.init()")


def test_managed_memory_is_listed_for_no_process(start: Start, simhost: Path) -> None:
    p = start()
    p.do("cuda.context(); from ctypes import c_uint; a = cuda.out('cuMemAllocManaged', 6 << 20, c_uint(1))")
    with opened(simhost) as ledger:
        p.do("cuda.ok('cuMemPrefetchAsync', a, 6 << 20, 0, 0); cuda.synchronize()")
        (client,) = ledger.clients()
        assert client.bytes == CONTEXT + 6 * MIB and client.managed_bytes == 6 * MIB
    assert listed(simhost) == [(p.pid, CONTEXT)]


def test_command_sets_single_costs(tmp_path: Path) -> None:
    command = [sys.executable, simhost.__file__, str(tmp_path / "h"), "--model", H100, "--init-bytes", "5"]
    subprocess.run(command, check=True)
    with opened(tmp_path / "h") as ledger:
        assert ledger.costs == models.MODELS[H100].costs._replace(init_bytes=5)


CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
HERE = """
import subprocess, sys
def listed(script):
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return sorted(eval(done.stdout))
"""


def tenant(start: Start, root: Path) -> Remote:
    """A process with a context in its own pid namespace, where its pid is 1."""
    p = start(root, wrapper=CONTAINER, env={"LD_LIBRARY_PATH": str(root / LIBDIR)})
    p.do(HERE)
    p.do("cuda.context()")
    return p


def host_pid(ledger: Ledger) -> int:
    """Return the host pid of the only tenant."""
    (pid,) = (c.host_pid for c in ledger.clients() if c.pid == 1)
    return pid


def test_processes_have_the_pids_of_the_caller(start: Start, simhost: Path) -> None:
    a, outside = tenant(start, simhost), start()
    outside.do("cuda.context()")
    with opened(simhost) as ledger:
        assert listed(simhost) == sorted([(host_pid(ledger), CONTEXT), (outside.pid, CONTEXT)])
    assert a.get(f"listed({LIST!r})") == [(1, CONTEXT)]


def test_process_that_the_caller_cannot_see_is_not_listed(start: Start, simhost: Path) -> None:
    tenant(start, simhost)
    assert listed(simhost, *CONTAINER) == []


def test_process_is_listed_twice_in_a_container(start: Start, make_host: MakeHost) -> None:
    root = make_host(costs=Costs(duplicates=True))
    p = tenant(start, root)
    assert p.get(f"listed({LIST!r})") == [(1, CONTEXT)] * 2
    assert len(listed(root)) == 1


def test_old_driver_lists_host_pids_in_a_container(start: Start, make_host: MakeHost) -> None:
    root = make_host(costs=Costs(host_pids=True, duplicates=True))
    p = tenant(start, root)
    ((unseen, size),) = p.get(f"listed({LIST!r})")
    assert unseen >= 1 << 22 and size == CONTEXT  # no process of the host has seen it yet
    with opened(root) as ledger:
        expected = [(host_pid(ledger), CONTEXT)]
    assert listed(root) == expected and p.get(f"listed({LIST!r})") == expected
    assert listed(root, *CONTAINER) == expected
