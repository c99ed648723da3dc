"""Run small programs against the driver in a box, and read from the ledger what they held."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

from gpushare.state.usage_reader import Usage, read_usage

from simulator.ledger import Ledger
from tests.shim.box import Box
from tests.support.host import BUILD, TREE

MIB = 1 << 20
PRELUDE = """
import ctypes, os, subprocess, sys, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # since Python 3.12 for a fork while threads run
from ctypes import byref, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
cuda = ctypes.CDLL("libcuda.so.1")
MIB, GIB = 1 << 20, 1 << 30
SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED = 0, 1, 2, 3

def ok(result):
    assert result == 0, result

def start(device=0):
    ok(cuda.cuInit(0))
    context = c_void_p()
    ok(cuda.cuDevicePrimaryCtxRetain(byref(context), device))
    ok(cuda.cuCtxSetCurrent(context))
    return context

def alloc(size, out=None):
    address = c_uint64()
    result = cuda.cuMemAlloc_v2(byref(address), c_size_t(size))
    return result if result else (out.append(address) if out is not None else None) or SUCCESS

def alloc_async(size, out=None, pool=None):
    address = c_uint64()
    if pool is None:
        result = cuda.cuMemAllocAsync(byref(address), c_size_t(size), None)
    else:
        result = cuda.cuMemAllocFromPoolAsync(byref(address), c_size_t(size), pool, None)
    if result == 0 and out is not None:
        out.append(address)
    return result

def fill(step=2 * MIB):
    "Take what is left of the limit."
    n = 0
    while alloc(step) == SUCCESS:
        n += 1
    return n * step

def apart(work, *args):
    "Do it in a child process, which must be the first here to start the driver: this process does not."
    if os.fork() == 0:
        work(*args)
        sys.stdout.flush()
        os._exit(0)
    os.wait()

def info():
    free, total = c_size_t(), c_size_t()
    ok(cuda.cuMemGetInfo_v2(byref(free), byref(total)))
    return free.value, total.value
"""


def run(box: Box, program: str, *args: str, helpers: str = "", timeout_s: float = 60) -> list[str]:
    """Run the program and return the words that it printed."""
    done = box.run(["python3", "-c", PRELUDE + helpers + textwrap.dedent(program), *args], timeout_s=timeout_s)
    assert done.returncode == 0 and not done.stderr, done.stderr + done.stdout
    return done.stdout.split()


def peak(box: Box, slot: int = 0) -> int:
    """Return the most bytes that any run in the box held at a time: physical memory, contexts included."""
    with Ledger(box.device(slot)) as ledger:
        return max(group.peak_bytes for group in ledger.groups())


def compile_c(directory: Path, source: str, *options: str | Path) -> Path:
    """Compile tests/shim/`source` into `directory`."""
    out = directory / Path(source).with_suffix(".so" if "-shared" in options else "").name
    flags = ("-O1", "-Wall", "-Wextra", "-Werror", f"-I{BUILD}/include/nvml", f"-I{BUILD}/include/cuda")
    subprocess.run(["gcc", *flags, "-o", out, TREE / "tests/shim" / source, *options, "-ldl"], check=True)
    return out


def usage(box: Box) -> Usage:
    """Return what the box's usage file has of its first device."""
    return read_usage(box.usage.read_bytes(), 1)


def on_device(box: Box) -> int:
    """Return the bytes that all processes hold on the box's first device, by its own account."""
    with Ledger(box.device()) as ledger:
        return ledger.used_bytes
