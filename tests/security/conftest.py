"""Fixtures of the attacks; the rest is in tests/conftest.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from simulator.simhost import make_simhost
from tests.support.host import Node
from tests.support.runc import Container

from . import proof


@pytest.fixture(params=["hook", "runtime"])
def way(request: pytest.FixtureRequest) -> str:
    """The ways into a container, hook and runtime, for Node.way."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def simhost(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One host for all attacks: each attack is judged by the changes it leaves."""
    return make_simhost(tmp_path_factory.mktemp("attacked"), gpus=1, memory_bytes=16 << 30)


@pytest.fixture(scope="module")
def node(simhost: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """One state directory for all attacks, which each of them leaves empty. After the last one the whole device is free
    for a container."""
    made = Node(tmp_path_factory.mktemp("node"), simhost)
    assert made.cli("refresh").returncode == 0
    yield made
    for way in ("hook", "runtime"):
        arguments = {"env": {"GPUSHARE_MEMORY": "16Gi"}, **made.way(way)}
        with Container(tmp_path_factory.mktemp("bundles"), ["true"], **arguments) as last:
            assert last.run() == 0, last.stderr
            last.delete()
        proof.require_nothing_left(made)
    made.close()
