"""Build and run programs under the shim's sanitized builds, among them programs that look for races.

    python -m tests.shim.sanitized [--seconds N] [--build shim-tsan]        make test-tsan

AddressSanitizer and UBSan run in `make test` (test_sanitized.py); `make test-asan` runs all tests of the shim with that
build. The long run uses ThreadSanitizer: sixteen threads in each process allocate, free, launch, wait and fork, under a
compute limit that keeps changing. The simulated driver is not instrumented: its internals are not checked, and its
locks are seen as those of the C library. There are no suppressions.
"""

from __future__ import annotations

import argparse
import functools
import json
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tests.shim.box import Box

TREE = Path(__file__).resolve().parents[2]
BUILD = TREE / "build"
GIB = 1 << 30


class Sanitizer(NamedTuple):
    """`libraries` must be preloaded into a program built without the sanitizer; `options` are its variables."""

    flags: tuple[str, ...]
    libraries: tuple[str, ...]
    options: tuple[str, ...]


# Test programs may leak, and may use memory in ways a sanitizer does not expect (dlmopen, their own loader).
SANITIZERS = {
    "shim-asan": Sanitizer(
        ("-fsanitize=address,undefined", "-fno-omit-frame-pointer"),
        ("libasan.so", "libubsan.so"),
        ("ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0", "UBSAN_OPTIONS=print_stacktrace=1"),
    ),
    # die_after_fork=0: the mill's processes are forks with threads of their own
    "shim-tsan": Sanitizer(("-fsanitize=thread", "-Wno-tsan"), ("libtsan.so",), ("TSAN_OPTIONS=die_after_fork=0",)),
}


@functools.cache
def around(shim: str) -> tuple[str, ...]:
    """Return the words to put before a command that runs over build/<shim>; none for the plain build."""
    sanitizer = SANITIZERS.get(shim)
    if sanitizer is None:
        return ()
    found = [_library(name) for name in sanitizer.libraries]
    return ("env", f"LD_PRELOAD={' '.join(found)}", *sanitizer.options)


def _library(name: str) -> str:
    return subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip()


def build_shim(shim: str) -> Path:
    from tests.support import host

    host.make(shim)
    return BUILD / shim


def build_program(shim: str, source: Path, out: Path, *more: str) -> Path:
    """Compile a C program with the same sanitizer, linked against libcuda.so.1 by name."""
    flags = ("-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{BUILD}/include/cuda")
    driver = next((BUILD / "sim").glob("libcuda.so.*"))
    command: list[str | Path] = ["gcc", *flags, *SANITIZERS[shim].flags, *more, "-o", out, source, driver, "-lpthread"]
    subprocess.run(command, check=True)
    return out


class Mill(NamedTuple):
    """The mill's report (tests/soak/mill.c), the sanitizer's output, and the peak memory on the device."""

    report: dict[str, Any]
    reports: str
    peak_bytes: int


LONGEST_S = 200
PREFETCHES = "-DPLACES=CU_MEM_LOCATION_TYPE_DEVICE,CU_MEM_LOCATION_TYPE_HOST"


def mill(
    shim: str,
    seconds: float = LONGEST_S,
    enough: int = 0,
    kill_ms: int = 0,
    processes: int = 2,
    planted: bool = False,
    whole: int = 0,
) -> Mill:
    """Run sixteen threads in each process, for some seconds or until there were `enough` allocations.

    A process is killed every `kill_ms`. `planted`: add a race. `whole`: of an oversubscribed share, whose residency
    boundary also moves.
    """
    from simulator.ledger import Ledger
    from tests.shim.box import Box

    build_shim(shim)
    with Box([2 * GIB], shim=BUILD / shim, compute=[60], whole=[whole] if whole else None) as box:
        defined = [*["-DPLANTED"] * planted, *[PREFETCHES] * bool(whole)]
        program = build_program(shim, TREE / "tests/soak/mill.c", box.directory / "mill", *defined)
        # no address randomisation, so that ThreadSanitizer finds room for its shadow on every kernel
        words = ["setarch", "-R", str(program), str(processes), "16", "1", str(kill_ms), str(enough)]
        with open(box.directory / "said", "w+") as said:
            pipe = subprocess.PIPE
            with box.popen(words, stdin=pipe, stdout=pipe, stderr=said) as running:
                try:
                    line = _report(running, box, seconds, whole)
                    running.communicate(timeout=LONGEST_S)
                finally:
                    running.kill()
            said.seek(0)
            with Ledger(box.device()) as ledger:
                peak_bytes = max(group.peak_bytes for group in ledger.groups())
            return Mill(json.loads(line) if line else {}, said.read(), peak_bytes)


def _report(running: subprocess.Popen[str], box: Box, seconds: float, whole: int) -> str:
    """Return the mill's report, or "" if it died. Change limits until then."""
    assert running.stdin is not None and running.stdout is not None
    end, percent = time.monotonic() + seconds, 60
    while not select.select([running.stdout], [], [], 0.1 if whole else 0.5)[0]:
        percent = 90 - percent
        border = {"memory_limit_bytes": GIB * percent // 30, "memory_virtual_bytes": whole} if whole else {}
        box.set_limit(compute_percent=percent, **border)
        if time.monotonic() > end and not running.stdin.closed:
            try:
                running.stdin.write("x")
                running.stdin.flush()
            except BrokenPipeError:
                pass
            end += LONGEST_S
    return running.stdout.readline()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make test-tsan", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--build", choices=SANITIZERS, default="shim-tsan")
    options = parser.parse_args(arguments)
    wrong = 0
    rows = (("all live", 0, 0), ("one is killed every 500 ms", 500, 0), ("oversubscribed", 500, 3 * GIB))
    for what, kill_ms, whole in rows:
        did = mill(options.build, options.seconds / len(rows), kill_ms=kill_ms, whole=whole)
        fine = did.reports == "" and did.report.get("wrong") == ""
        print(f"{options.build}, {what}: {json.dumps(did.report)}; {'nothing reported' if fine else did.reports}")
        wrong += not fine
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
