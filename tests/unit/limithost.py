"""A "container" whose limits change: its lease and files, without a runtime."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpushare.allocation import limit_request, limit_update, reservation
from gpushare.core.model import Amount, Lease, Request, Selection, Share
from gpushare.core.ops import TenantTmpfs, WriteLimits
from gpushare.state import leasefile, leases, shm_abi, storage
from gpushare.system import procs

from tests.unit import pure

GIB = 1 << 30
HOST = pure.node(1)
UUID = pure.UUIDS[0]


@pytest.fixture
def state(state_dir: Path) -> str:
    storage.prepare(str(state_dir))
    return str(state_dir)


@pytest.fixture
def init() -> Iterator[int]:
    with subprocess.Popen(["sleep", "inf"]) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def held(state: str, init: int) -> Callable[..., Lease]:
    """held(shares) -> the lease of a "container" whose init sleeps."""
    return lambda *shares, container_id="c1": hold(state, init, *shares, container_id=container_id)


def hold(state: str, init: int, *shares: Share, container_id: str) -> Lease:
    """Make the lease and the files of a "container" with this init."""
    me, found = procs.myself(), procs.find(init)
    assert found is not None
    lease = pure.lease(*shares, container_id=container_id)._replace(
        boot_id=procs.boot_id(), creator_pid=me.pid, creator_start=me.start, created=time.time()
    )
    folder = Path(storage.container_dir(state, container_id))
    folder.mkdir()
    (folder / "lease.json").write_bytes(leasefile.to_json(lease))
    path = storage.make_share_dir(state, container_id, lease.shares)
    storage.execute(WriteLimits(lease.shares, f"{path}/limits"))
    storage.execute(TenantTmpfs(str(folder / "rw"), storage.TENANT_BYTES, storage.TENANT_INODES))
    return leases.hold(state, lease, found, "")


def use(state: str, used_bytes: int, container_id: str = "c1") -> None:
    """Write the usage file as a process of the container would."""
    path = Path(storage.container_dir(state, container_id), "rw", "usage")
    data = bytearray(path.read_bytes())
    at = shm_abi.offset("gs_usage", "slot")
    packed = shm_abi.packer("gs_slot").pack(7, 7, 1, 1, 1, used_bytes, *[0] * (shm_abi.MAX_DEVICES - 1))
    data[at : at + len(packed)] = packed
    path.write_bytes(data)


def limits(state: str, container_id: str = "c1") -> shm_abi.Limits:
    return storage.read_limits(f"{storage.container_dir(state, container_id)}/share/limits")


def change(
    state: str, request: limit_request.LimitRequest, dry_run: bool = False, node: Any = HOST
) -> limit_update.Changed:
    def decide(lease: Lease, live: tuple[Lease, ...], seen: leases.View) -> tuple[Share, ...]:
        return limit_request.shares(lease, request, node, live, seen.blocked(node))

    return limit_update.change(state, "c1", decide, dry_run)


def reserve(state: str, memory_bytes: int, container_id: str = "c2") -> Lease:
    amount = Amount(memory_bytes, None, str(memory_bytes))
    request = Request("own", Selection("any", 1), ("compute",), memory=((None, amount),))
    return reservation.reserve(state, pure.bundle(container_id=container_id), request, HOST)


def share(memory_bytes: Any, percent: Any = None, **more: Any) -> Share:
    return pure.share(0, 0, memory_bytes)._replace(compute_percent=percent, **more)


def fd_of(path: Path, *shares: Share) -> int:
    path.write_bytes(shm_abi.pack_limits(shares, 1))
    return os.open(path, os.O_RDWR)
