"""Fixtures of the simulator's own tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from simulator.ledger import Ledger
from tests.support.remote import Remote


@pytest.fixture
def start(simhost: Path) -> Iterator[Callable[..., Remote]]:
    """start() -> another process with the simulated driver of `simhost`."""
    with ExitStack() as stack:

        def make(root: Path = simhost, **arguments: Any) -> Remote:
            return stack.enter_context(Remote(root, **arguments))

        yield make


@pytest.fixture
def ledger(simhost: Path) -> Iterator[Ledger]:
    with Ledger(str(simhost / "dev" / "nvidia0")) as opened:
        yield opened
