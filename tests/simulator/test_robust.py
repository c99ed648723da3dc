"""Invalid calls return an error code; the simulated driver never crashes on a NULL or a zero."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from simulator.simhost import LIBDIR
from tests.simulator.test_exports import LISTS, listed

# Calls every function named on stdin with zeros only, and prints each name before the call.
CALL = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
prepare = sys.argv[2]
if prepare == "cuda":
    from tests.conformance.driver import Driver
    Driver(sys.argv[1]).context()
if prepare == "nvml":
    assert library.nvmlInit_v2() == 0
for name in sys.stdin.read().split():
    print(name, flush=True)
    library[name](*[ctypes.c_uint64(0)] * 12)
print("end")
"""


@pytest.mark.parametrize("order", [1, -1], ids=["forwards", "backwards"])
@pytest.mark.parametrize(
    ("stem", "prepare"),
    [("libcuda", "cuda"), ("libcuda", "nothing"), ("libnvidia-ml", "nvml"), ("libnvidia-ml", "nothing")],
)
def test_zeros_never_crash(simhost: Path, stem: str, prepare: str, order: int) -> None:
    names = [name for name, size in listed(LISTS[stem]).items() if not size][::order]
    command = [sys.executable, "-c", CALL, str(simhost / LIBDIR / f"{stem}.so.1"), prepare]
    done = subprocess.run(command, input="\n".join(names), capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("end\n"), f"{done.returncode} in {done.stdout.split()[-1]}"
