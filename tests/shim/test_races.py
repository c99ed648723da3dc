"""Threads and processes that get into each other's way."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.shim.box import GIB, TREE, Box
from tests.shim.launches import BUSY
from tests.shim.tenants import boxes, tenants
from tests.support import host

BUILD = TREE / "build"


@pytest.fixture(scope="module")
def races(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("races") / "races"
    driver = next((BUILD / "sim").glob("libcuda.so.*"))
    flags = ("-O1", "-Wall", "-Wextra", "-Werror", f"-I{BUILD}/include/cuda")
    subprocess.run(["gcc", *flags, "-o", out, TREE / "tests/shim/races.c", driver, "-lpthread"], check=True)
    return out


def number(box: Box, *command: str | Path) -> int:
    done = box.run([str(word) for word in command])
    assert done.returncode == 0 and not done.stderr, done.stderr
    return int(done.stdout)


def test_bounds_of_others_are_waited_for(races: Path) -> None:
    """A call on a pool holds far more than it takes, for a moment; what fits besides is hardly ever refused."""
    with Box([2 * GIB]) as box:
        assert number(box, races, "bounds") < 100


def test_references_released_at_once(races: Path) -> None:
    host.make("shim-asan")
    names = ("libasan.so", "libubsan.so")
    preload = [subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip() for name in names]
    with Box([GIB], shim=BUILD / "shim-asan") as box:
        environment = ("env", f"LD_PRELOAD={' '.join(preload)}", "ASAN_OPTIONS=detect_leaks=0")
        assert number(box, *environment, races, "release") == 0


def test_threads_cancelled_while_they_launch(races: Path) -> None:
    """Where they read what a neighbour says, they hold their context's law."""
    with boxes(50, 50) as (box, other), tenants((other, BUSY)):
        assert number(box, races, "cancel") == 0


def test_taking_all_while_others_put_and_take(tmp_path: Path) -> None:
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
    # without address randomisation: ThreadSanitizer finds its shadow on every kernel
    done = subprocess.run(["setarch", "-R", str(out)], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
