"""Fixtures of the attacks; the rest is in tests/conftest.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.simhost import make_simhost


@pytest.fixture(params=["hook", "runtime"])
def way(request: pytest.FixtureRequest) -> str:
    """The ways into a container, hook and runtime, for Node.way."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def simhost(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One host for all attacks: each attack is judged by the changes it leaves."""
    return make_simhost(tmp_path_factory.mktemp("attacked"), gpus=1, memory_bytes=16 << 30)
