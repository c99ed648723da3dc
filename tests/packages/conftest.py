"""Fixtures for `make test-packages`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.host import BUILD

from .cleanroot import CleanRoot

PACKAGES = BUILD / "packages"


@pytest.fixture(autouse=True)
def _nothing_is_left(no_leaks: None) -> None:
    """`no_leaks` for all tests in this directory."""


@pytest.fixture
def clean_root(tmp_path: Path) -> Iterator[CleanRoot]:
    root = CleanRoot(tmp_path / "debian")
    try:
        yield root
    finally:
        root.close()
