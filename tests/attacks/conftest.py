"""Fixtures of the attacks; the rest is in tests/conftest.py."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["hook", "runtime"])
def way(request: pytest.FixtureRequest) -> str:
    """Both ways into a container, for Node.way."""
    name: str = request.param
    return name
