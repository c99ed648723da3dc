"""Every end-to-end test looks for what it left behind."""

import pytest


@pytest.fixture(autouse=True)
def _nothing_is_left(no_leaks: None) -> None:
    """`no_leaks` for all tests in this directory."""
