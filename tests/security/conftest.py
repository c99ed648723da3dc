"""Fixtures of the attacks; the rest is in tests/conftest.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.simhost import make_simhost


@pytest.fixture(params=["hook", "runtime"])
def way(request: pytest.FixtureRequest) -> str:
    """Both ways into a container, for Node.way."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def simhost(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all attacks: each is judged by what it left of it."""
    return make_simhost(tmp_path_factory.mktemp("attacked"), gpus=1, memory_bytes=16 << 30)
