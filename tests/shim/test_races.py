"""Threads and processes that interfere with each other."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.shim.box import GIB, TREE, Box
from tests.shim.inside import compile_c
from tests.shim.launches import BUSY
from tests.shim.tenants import boxes, tenants
from tests.support import host

BUILD = TREE / "build"


@pytest.fixture(scope="module")
def races(tmp_path_factory: pytest.TempPathFactory) -> Path:
    driver = next((BUILD / "sim").glob("libcuda.so.*"))
    return compile_c(tmp_path_factory.mktemp("races"), "races.c", driver, "-lpthread")


def number(box: Box, *command: str | Path) -> int:
    done = box.run([str(word) for word in command])
    assert done.returncode == 0 and not done.stderr, done.stderr
    return int(done.stdout)


def test_allocation_waits_for_short_reservations_of_other_threads(races: Path) -> None:
    """A call on a pool reserves far more than it takes, for a moment; what fits besides is hardly ever refused."""
    with Box([2 * GIB]) as box:
        assert number(box, races, "bounds") < 100


def test_references_released_concurrently(races: Path) -> None:
    host.make("shim-asan")
    names = ("libasan.so", "libubsan.so")
    preload = [subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip() for name in names]
    with Box([GIB], shim=BUILD / "shim-asan") as box:
        environment = ("env", f"LD_PRELOAD={' '.join(preload)}", "ASAN_OPTIONS=detect_leaks=0")
        assert number(box, *environment, races, "release") == 0


def test_launches_continue_after_threads_are_cancelled(races: Path) -> None:
    """Threads are cancelled while they read a neighbour's activity with their context's limiter locked."""
    with boxes(50, 50) as (box, other), tenants((other, BUSY)):
        assert number(box, races, "cancel") == 0


def test_map_loses_no_change_under_concurrent_removal(tmp_path: Path) -> None:
    out = tmp_path / "map_race"
    flags = (
        "-std=gnu11",
        "-O1",
        "-g",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-tsan",
        "-fsanitize=thread",
        f"-I{TREE}/shim",
    )
    sources = (TREE / "tests/shim/map_race.c", TREE / "shim/core/map.c")
    subprocess.run(["gcc", *flags, "-o", out, *sources, "-lpthread"], check=True)
    # no address randomisation, so that ThreadSanitizer finds room for its shadow on every kernel
    done = subprocess.run(["setarch", "-R", str(out)], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
