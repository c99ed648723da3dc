"""The simulation is built once."""

from __future__ import annotations

import subprocess

import pytest

from tests.throttle.cells import TREE


@pytest.fixture(scope="session", autouse=True)
def built() -> None:
    subprocess.run(["make", "-s", "vt", "vt-asan"], cwd=TREE, check=True)
