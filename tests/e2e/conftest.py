"""End-to-end fixtures. Every test in this directory also looks for what it left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lib.host import Node
from tests.lib.tenant import Tenant


@pytest.fixture(autouse=True)
def _nothing_is_left(no_leaks: None) -> None:
    """`no_leaks` for all tests in this directory."""


@pytest.fixture
def tenant(tmp_path: Path, node: Node) -> Iterator[Callable[..., Tenant]]:
    """tenant(name, env, **arguments of lib.runc.Container) -> Tenant on the simulated host, closed at the end."""
    made: list[Tenant] = []

    def make(name: str, env: dict[str, str], **arguments: Any) -> Tenant:
        made.append(Tenant(tmp_path / "tenants", name, env, node, **arguments))
        return made[-1]

    yield make
    for one in reversed(made):
        one.close()
