"""Run a program that tries to exceed its compute limit, next to a program that is entitled to the rest."""

from __future__ import annotations

import select
import subprocess
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager

from simulator.ledger import Ledger
from tests.shim.box import Box
from tests.shim.inside import PRELUDE
from tests.shim.launches import HELPERS

LIMIT = 20
POINTS = 10.0  # a successful attack gains far more; other load on the machine takes some
READY_S = 60

TOOLS = """
def timed_launch(function, ns, stream=None, grid=1):
    "A kernel whose time is in its argument."
    value = c_uint64(ns)
    arguments = (c_void_p * 1)(ctypes.cast(byref(value), c_void_p))
    return cuda.cuLaunchKernel(function, grid, 1, 1, 1, 1, 1, 0, stream, arguments, None)

def flagged(function, stream, flag, value):
    values = (c_uint64 * 1)(flag.value), (c_uint64 * 1)(value)
    arguments = (c_void_p * 2)(*(ctypes.cast(v, c_void_p) for v in values))
    return cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments, None)

def new_flag():
    flag = c_uint64()
    ok(cuda.cuMemAlloc_v2(byref(flag), c_size_t(4096)))
    ok(cuda.cuMemsetD32_v2(flag, 0, c_size_t(1)))
    return flag

def asked(stream, call=cuda.cuStreamQuery):
    "Until it is done, without a call that blocks."
    while call(stream) == 600:
        os.sched_yield()

def taught(function, ns, stream, times=100):
    "It is expected to take so long from now on."
    for _ in range(times):
        ok(timed_launch(function, ns, stream))
        ok(cuda.cuCtxSynchronize())

def go():
    print("go", flush=True)
"""


@contextmanager
def attacker(box: Box, program: str) -> Iterator[subprocess.Popen[str]]:
    """Start the program, wait until it prints `go`, and kill it at the end."""
    text = PRELUDE + HELPERS + TOOLS + textwrap.dedent(program)
    process = box.popen(["python3", "-c", text], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], READY_S)[0], "it did not begin"
        said = process.stdout.readline()
        assert said == "go\n", said + process.stdout.read()
        yield process
    finally:
        process.kill()
        process.communicate()


def gets(box: Box, program: str, seconds: float) -> float:
    """Return the percentage of the device that a program holds after `go`. AssertionError: it ended."""
    with attacker(box, program) as process, Ledger(box.device()) as ledger:
        began, before = time.monotonic_ns(), ledger.snapshot().busy_ns
        assert process.stdout is not None
        ended = select.select([process.stdout], [], [], seconds)[0]
        after, end = ledger.snapshot().busy_ns, time.monotonic_ns()
        assert not ended, process.stdout.read()
    return 100 * (after - before) / (end - began)
