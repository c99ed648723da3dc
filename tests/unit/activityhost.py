"""The files of devices/<uuid>, created by leases and read as a container reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gpushare.allocation import reservation
from gpushare.core.model import Amount, Lease, Node, Request, Selection
from gpushare.state import activity_files, shm_abi, storage

from tests.unit import pure

GIB = 1 << 30
NODE = pure.node(2)
UUID = pure.UUIDS[0]
INDEX_SIZE = shm_abi.packer("gs_peers").size


@pytest.fixture
def state(state_dir: Path) -> Iterator[str]:
    storage.prepare(str(state_dir))
    yield str(state_dir)


def reserve(state: str, name: str, memory_bytes: int = 1 << 26, count: int = 1, node: Node = NODE) -> Lease:
    amount = Amount(memory_bytes, None, str(memory_bytes))
    request = Request("own", Selection("any", count), ("compute",), memory=((None, amount),))
    return reservation.reserve(state, pure.bundle(container_id=name), request, node)


def index(state: str, uuid: str = UUID) -> tuple[frozenset[int], int]:
    """(numbers, generation) as a container reads them, bit by bit."""
    data = Path(activity_files.directory(state, uuid), "index").read_bytes()
    fields = shm_abi.packer("gs_peers").unpack(data)
    assert fields[:3] == (shm_abi.PEERS_MAGIC, shm_abi.ABI_VERSION, len(data))
    used = int.from_bytes(b"".join(word.to_bytes(8, "little") for word in fields[4:6]), "little")
    return frozenset(n for n in range(shm_abi.MAX_PEERS) if used >> n & 1), fields[3]


def granted(state: str, number: int, uuid: str = UUID) -> int:
    """The grant of container `number`, as another container reads it."""
    data = Path(activity_files.directory(state, uuid), "index").read_bytes()
    at = shm_abi.offset("gs_peers", "granted") + 8 * number
    return int.from_bytes(data[at : at + 8], "little")


def files(state: str, uuid: str = UUID) -> set[str]:
    return {path.name for path in Path(activity_files.directory(state, uuid)).iterdir()}
