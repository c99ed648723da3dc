"""Build the simulation once."""

from __future__ import annotations

import pytest

from tests.support import host


@pytest.fixture(scope="session", autouse=True)
def built() -> None:
    host.make("vt", "vt-asan")
