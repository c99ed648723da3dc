"""A state directory with known content, for tests of the command line. Devices are values; everything else is real."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpushare.cli import main
from gpushare.config import node
from gpushare.core.model import Share
from gpushare.core.ops import TenantTmpfs, WriteLimits
from gpushare.gpu import driverfiles
from gpushare.state import accounts, leasefile, leases, shm_abi, storage, usage_reader
from gpushare.system import procs

from tests.unit import pure

GIB = 1 << 30
MIB = 1 << 20
LONG = "0123456789abcdef" * 4


@pytest.fixture
def state(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    storage.prepare(str(state_dir))
    monkeypatch.setattr(node, "read_node", lambda config, directory: pure.node())
    monkeypatch.setattr(driverfiles, "require_usable", lambda inventory: None)  # its driver has no files
    return state_dir


@pytest.fixture
def init() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "inf"]) as process:
        yield process
        process.kill()


@pytest.fixture
def cli(state: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """cli(*args) -> (exit code, standard output, standard error)."""
    config = state.parent / "cli.yaml"
    config.write_text("version: 1\n")

    def run(*args: str) -> tuple[int, str, str]:
        code = main(["--config", str(config), "--state", str(state), *args])
        return (code, *capfd.readouterr())

    return run


@pytest.fixture
def start(state: Path, init: subprocess.Popen[bytes]) -> Callable[..., Path]:
    """start(id, shares) -> the usage file of a "container" whose init is a sleeping process."""

    def make(container_id: str, *shares: Share, created: float = 0.0) -> Path:
        me = procs.myself()
        lease = pure.lease(*shares, container_id=container_id)._replace(
            boot_id=procs.boot_id(),
            creator_pid=me.pid,
            creator_start=me.start,
            created=created or time.time(),
            dialect="own",
            driver_version="535.261.03",
        )
        folder = Path(storage.container_dir(str(state), container_id))
        folder.mkdir()
        (folder / "lease.json").write_bytes(leasefile.to_json(lease))
        share = storage.make_share_dir(str(state), container_id, lease.shares)
        storage.execute(WriteLimits(lease.shares, f"{share}/limits", round_ms=20))
        storage.execute(TenantTmpfs(str(folder / "rw"), storage.TENANT_BYTES, storage.TENANT_INODES))
        found = procs.find(init.pid)
        assert found is not None
        leases.hold(str(state), lease, found, procs.cgroup_of(init.pid))
        return folder / "rw" / "usage"

    return make


def charge(page: Path, number: int, pid: int, *charged: int, refused: int = 0, driver_mib: int = 0) -> None:
    """Write a slot as a process of the container would. `driver_mib`: the driver's part of the first device."""
    data = bytearray(page.read_bytes())
    at = shm_abi.offset("gs_usage", "slot") + number * shm_abi.SLOT_SIZE
    tid = 1000 + number
    padded = (*charged, *(0,) * (shm_abi.MAX_DEVICES - len(charged)))
    data[at : at + shm_abi.SLOT_SIZE] = shm_abi.packer("gs_slot").pack(tid, tid, 1, pid, 1, *padded)
    at += shm_abi.offset("gs_slot", "driver_mib")
    data[at : at + 2] = driver_mib.to_bytes(2, "little")
    at = shm_abi.offset("gs_usage", "refused")
    data[at : at + 8] = refused.to_bytes(8, "little")
    page.write_bytes(data)


def compute(page: Path, device: int, percent: float, waited_ns: int = 0, busy_ns: int = 0) -> None:
    """Write the compute use that the shim would write: `percent` of the last windows and of the next ones."""
    window = time.monotonic_ns() // usage_reader.RECENT_NS
    cells = [0] * usage_reader.RECENT
    for one in range(window - 9, window + 1):
        cells[one % usage_reader.RECENT] = ((one << 40) | int(usage_reader.RECENT_NS * percent / 100)) & ((1 << 64) - 1)
    bucket = shm_abi.packer("gs_bucket")
    data = bytearray(page.read_bytes())
    at = shm_abi.offset("gs_usage", "bucket") + device * bucket.size
    data[at : at + bucket.size] = bucket.pack(0, 0, 0, waited_ns, busy_ns, *cells, 0)
    page.write_bytes(data)


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """CLOCK_MONOTONIC and CLOCK_BOOTTIME stand still."""
    monkeypatch.setattr(time, "monotonic_ns", lambda: 987_654_321_012_345)
    monkeypatch.setattr(accounts, "now_ns", lambda: 987_654_321_012_345)
