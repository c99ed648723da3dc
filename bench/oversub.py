"""Measure the cost of using more memory than the device has.

Two tenants on one simulated device read all of their working set again and again; the result is how much they read.

    python -m bench.oversub       run all cases and print the slowdown of each

The slowdown is relative to a device on which both working sets fit, without context switches.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from simulator.simhost import make_simhost
from tests.shim.box import CONTEXT_BYTES, Box
from tests.support import host

MIB = 1 << 20
DEVICE_MIB = 4096
CONTEXT_MIB = CONTEXT_BYTES // MIB
ROOM_MIB = DEVICE_MIB // 2 - CONTEXT_MIB - 2  # what half of the device leaves for a tenant's working set
BLOCK_NS = 20_000  # kernel time per 2 MiB that it reads on the device
PROGRAM = """
import ctypes, json, sys, time
from ctypes import byref, c_uint64, c_void_p, c_size_t
cuda = ctypes.CDLL("libcuda.so.1")
working_mib, chunk_mib, block_ns, seconds = (int(word) for word in sys.argv[1:])
def ok(code):
    assert code == 0, code
context, module, function = c_void_p(), c_void_p(), c_void_p()
ok(cuda.cuInit(0))
ok(cuda.cuDevicePrimaryCtxRetain(byref(context), 0))
ok(cuda.cuCtxSetCurrent(context))
ok(cuda.cuModuleLoadData(byref(module), b"SIMMOD globals=0 code=1\\n"))
ok(cuda.cuModuleGetFunction(byref(function), module, b"sweep_ns_arg"))
chunks = []
for _ in range(working_mib // chunk_mib):
    chunks.append(c_uint64())
    ok(cuda.cuMemAlloc_v2(byref(chunks[-1]), c_size_t(chunk_mib << 20)))
def sweep(chunk):
    words = (c_uint64(block_ns * chunk_mib // 2), chunk, c_uint64(chunk_mib << 20))
    ok(cuda.cuLaunchKernel(function, 64, 1, 1, 1, 1, 1, 0, None,
                           (c_void_p * 3)(*(ctypes.addressof(word) for word in words)), None))
print("ready", flush=True)
sys.stdin.readline()
begin, read = time.monotonic(), 0
while time.monotonic() < begin + seconds:
    for chunk in chunks:
        sweep(chunk)
    ok(cuda.cuCtxSynchronize())
    read += working_mib
print(json.dumps(read / (time.monotonic() - begin)))
"""


class Case(NamedTuple):
    """The memory limits and the working set of each of the two tenants, in MiB."""

    working: int
    device: int
    whole: int
    slice_us: int = 0
    reserved: int = 0  # memory per device that is kept free for the tenant that has the migration slice


HALF = DEVICE_MIB // 2
CASES = {
    "oversub.slowdown_fit": Case(ROOM_MIB, HALF, 2 * HALF),
    "oversub.slowdown_1_5x": Case(ROOM_MIB * 3 // 2, HALF, 2 * HALF),
    "oversub.slowdown_1_5x_turns": Case(ROOM_MIB * 3 // 2, HALF // 2, 2 * HALF, 1_000_000, HALF),
}
CHUNK_MIB = 64


def slowdown(case: Case, directory: Path, seconds: int = 6) -> float:
    """Run a case once and return the slowdown."""
    simulated = make_simhost(directory / "host", gpus=1, memory_bytes=DEVICE_MIB * MIB)
    words = [str(n) for n in (case.working, CHUNK_MIB, BLOCK_NS, seconds)]
    with ExitStack() as stack:
        tenants: list[subprocess.Popen[str]] = []
        for _ in range(2):
            box = Box(
                [case.device * MIB],
                whole=[case.whole * MIB],
                gpu_bytes=DEVICE_MIB * MIB,
                simhost=simulated,
                compute=[100],
                company=directory / "company",
                migration_slice=(case.slice_us, case.reserved * MIB),
            )
            stack.enter_context(box)
            arguments = ["timeout", str(60 + seconds), "python3", "-c", PROGRAM, *words]
            tenants.append(box.popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            stack.callback(tenants[-1].kill)
        for one in tenants:
            if one.stdout is None or one.stdout.readline() != "ready\n":
                raise RuntimeError("a tenant of oversub did not get ready")
        for one in tenants:
            assert one.stdin is not None
            one.stdin.write("\n")
            one.stdin.flush()
        answers = [one.communicate()[0] for one in tenants]
        mib_per_s = sum(json.loads(answer) for answer in answers)
        return float(1e9 / (mib_per_s / 2 * BLOCK_NS))


def slowdowns(times: int = 3) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for key, case in CASES.items():
        for _ in range(times):
            with tempfile.TemporaryDirectory(prefix="oversub-", dir=host.BUILD) as directory:
                found.setdefault(key, []).append(slowdown(case, Path(directory)))
    return found


def main() -> int:
    for key, values in slowdowns(1).items():
        print(f"{key:<32} {values[0]:.2f}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
