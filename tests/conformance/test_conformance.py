"""Each behaviour, in a separate process, on the simulator or on the libcuda in GPUSHARE_CONFORMANCE_LIB.

On hardware the checks of free memory need the device to themselves.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from simulator.simhost import CHECKPOINTS, LIBDIR, VERSION
from tests.conformance import (
    behaviours,
    checks_capture,
    checks_checkpoint,
    checks_memory,
    checks_pools,
    checks_time,
    checks_work,
)
from tests.support import gpumodels

REPOSITORY = Path(__file__).resolve().parents[2]
HELPERS = {
    *("begin", "captured_allocation", "end_code", "in_another_thread"),
    *("Attribute", "Config", "launch_with", "launch_extended", "elapsed_us", "beside_another_process"),
    *("Other", "since_first_driver", "act", "without_cuda"),
    *("with_memory", "with_objects", "with_endless_work", "with_managed_memory"),
}


@pytest.fixture(scope="module", params=gpumodels.NAMES)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return the path of a libcuda by the version of a simulated driver."""
    named = os.environ.get("GPUSHARE_CONFORMANCE_LIB")

    @functools.cache
    def path(driver: str) -> str:
        host = gpumodels.make(tmp_path_factory.mktemp("host"), request.param, late_return_ms=0, driver=driver)
        return str(host.root / LIBDIR / "libcuda.so.1")

    return lambda driver: named or path(driver)


def test_older_driver_lacks_the_checkpoint_api(library: Callable[[str], str]) -> None:
    command = [sys.executable, "-m", "tests.conformance.run", library(VERSION), "states_follow_the_calls"]
    subprocess.run(command, cwd=REPOSITORY, check=True)


@pytest.mark.parametrize("name", [b.check.__name__ for b in behaviours.BEHAVIOURS])
def test_behaviour_matches_the_driver(name: str, library: Callable[[str], str]) -> None:
    """Checks that use a real clock may fail under other load, but not three times in a row."""
    driver = CHECKPOINTS if hasattr(checks_checkpoint, name) else VERSION
    command = [sys.executable, "-m", "tests.conformance.run", library(driver), name]
    for _ in range(3 if hasattr(checks_time, name) else 1):
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stderr


def test_every_check_is_in_the_table() -> None:
    listed = {b.check.__name__ for b in behaviours.BEHAVIOURS}
    assert len(listed) == len(behaviours.BEHAVIOURS)
    written = {
        name
        for module in (checks_capture, checks_checkpoint, checks_memory, checks_pools, checks_time, checks_work)
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__
    }
    assert listed == written - HELPERS


def test_every_source_has_its_details() -> None:
    assert all(b.source in behaviours.SOURCES and b.detail for b in behaviours.BEHAVIOURS)
    assert all("driver" in b.detail for b in behaviours.BEHAVIOURS if b.source == "recorded")
