"""Changing limits: readers see a change whole or not at all, and the published grant is never below the limit."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gpushare.allocation import limit_request, limit_update
from gpushare.core.errors import CapacityError, DeviceError, KernelError, RequestError
from gpushare.core.model import Lease
from gpushare.state import activity_files, leases, rebuild, shm_abi, storage
from gpushare.system import mountns, syscalls

from tests.unit import limithost, pure
from tests.unit.limithost import GIB, UUID, change, fd_of, limits, reserve, share, use

state, init, held = limithost.state, limithost.init, limithost.held


# The published grants


def published_grant(state: str) -> int:
    at = activity_files.granted_at(0)
    return int.from_bytes(Path(activity_files.directory(state, UUID), "index").read_bytes()[at : at + 8], "little")


def test_changed_grant_is_published(state: str, held: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch) -> None:
    """Together with the limits, and by the next command after a change that was killed before it published."""
    activity_files.prepare(state, UUID)
    held(share(GIB, 30))
    activity_files.settle(state, UUID, {0: 30})
    limit_update.change(state, "c1", lambda *_: (share(GIB, 50, paused=True),))
    assert published_grant(state) == 50 | shm_abi.DEVICE_PAUSED << 8
    with monkeypatch.context() as killed:
        killed.setattr(limit_update, "_publish", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        pid = os.fork()
        if pid == 0:
            limit_update.change(state, "c1", lambda *_: (share(GIB, 70),))
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert published_grant(state) == 50 | shm_abi.DEVICE_PAUSED << 8
    with leases.locked(state):
        limit_update.finish(state)
    assert published_grant(state) == 70


# The limits file


def test_reader_sees_whole_change_or_none(tmp_path: Path) -> None:
    """Another process reads memory, compute and flags of two devices at once, by the header's protocol."""
    sizes = (GIB, 7 * GIB)
    both = [
        tuple(
            pure.share(n, n, size)._replace(compute_percent=size // GIB, paused=size > GIB, virtual_bytes=2 * size)
            for n in range(2)
        )
        for size in sizes
    ]
    fd = fd_of(tmp_path / "limits", *both[0])
    base, size = shm_abi.offset("gs_limits", "device"), shm_abi.DEVICE_SIZE
    at = shm_abi.offset("gs_limits", "generation") // 8
    copies = [[(base + n * size + shm_abi.offset("gs_device_limit", p + f)) // 8
               for n in range(2) for f in ("memory_limit_bytes", "compute_percent", "weight", "memory_virtual_bytes")]
              for p in ("next_", "")]  # fmt: skip
    wanted = {tuple(word for _, word in shm_abi.stores(shares, "")) for shares in both}
    ready, stop = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        seen, code = set(), 1
        try:
            os.set_blocking(stop[0], False)
            os.close(stop[1])
            words = memoryview(mmap.mmap(fd, shm_abi.LIMITS_SIZE, prot=mmap.PROT_READ)).cast("Q")
            os.write(ready[1], b"x")
            for n in range(1 << 40):
                before = words[at]
                values = tuple(words[i] for i in copies[before % 2])
                if words[at] == before:
                    seen.add(values)
                if n % 1000 == 0:
                    try:
                        os.read(stop[0], 1)
                        break
                    except BlockingIOError:
                        pass
            code = 0 if seen == wanted else 2
        finally:
            os._exit(code)
    assert os.read(ready[0], 1) == b"x"
    end = time.monotonic() + 2
    while time.monotonic() < end:
        for shares in reversed(both):
            limit_update.store(fd, shares)
    for one in (*stop, *ready, fd):
        os.close(one)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_constant_fields_are_not_written(tmp_path: Path) -> None:
    fd = fd_of(tmp_path / "limits", share(GIB, 30, page=9))
    before = bytearray((tmp_path / "limits").read_bytes())
    limit_update.store(fd, (share(2 * GIB, 40, page=9, paused=True, priority=1, soft=True),))
    after = (tmp_path / "limits").read_bytes()
    found = shm_abi.read_limits(after)
    assert (found.generation, found.nonce) == (2, 1)
    flags = shm_abi.DEVICE_COMPUTE_SOFT | shm_abi.DEVICE_PAUSED
    assert found.devices[0][1:] == (2 * GIB, 16 * GIB, 40, 1, flags, 9, 0, 0)
    for at, word in shm_abi.stores((share(2 * GIB, 40, paused=True, priority=1, soft=True),), "next_"):
        before[at : at + 8] = struct.pack("<Q", word)
    at = shm_abi.offset("gs_limits", "generation")
    before[at : at + 8] = struct.pack("<Q", 2)
    assert bytes(before) == after
    limit_update.store(fd, (share(2 * GIB, 40, paused=True, priority=1, soft=True),))
    assert (tmp_path / "limits").read_bytes() == after  # nothing changed, so no process is woken
    os.close(fd)


def test_limits_file_of_other_devices_is_kept(tmp_path: Path) -> None:
    fd = fd_of(tmp_path / "limits", share(GIB))
    for data in (shm_abi.pack_limits((pure.share(0, 1, GIB),), 1), b"short", b"x" * shm_abi.LIMITS_SIZE):
        (tmp_path / "limits").write_bytes(data)
        with pytest.raises(shm_abi.RegionError):
            limit_update.store(fd, (share(2 * GIB),))
        assert (tmp_path / "limits").read_bytes() == data
    os.close(fd)


# Memory that the container still uses


def test_memory_in_use_is_not_free_after_decrease(held: Callable[..., Lease], state: str) -> None:
    held(share(10 * GIB))
    use(state, 9 * GIB)
    changed = change(state, limit_request.LimitRequest("4Gi"))
    assert changed.used_bytes == (9 * GIB,) and changed.after.shares[0].draining_bytes == 9 * GIB
    with pytest.raises(CapacityError, match="7 GiB free of 16 GiB, held by c1 \\(9 GiB\\)"):
        reserve(state, 12 * GIB)
    use(state, 5 * GIB)
    before = leases.find(state, "c1")
    assert before is not None
    (shown,) = limit_update.settled(state, (before,), keep=False)
    assert shown.shares[0].draining_bytes == 5 * GIB and leases.find(state, "c1") == before  # only in the view
    with pytest.raises(CapacityError, match="11 GiB free"):
        reserve(state, 12 * GIB)
    use(state, 8 * GIB)  # freed memory is not granted again
    with pytest.raises(CapacityError, match="11 GiB free"):
        reserve(state, 12 * GIB)
    use(state, 4 * GIB)
    reserve(state, 12 * GIB)
    lease = leases.find(state, "c1")
    assert lease is not None and lease.shares[0].draining_bytes == 0
    assert limits(state).devices[0].draining_bytes == 0


def test_draining_memory_survives_lost_lease(held: Callable[..., Lease], state: str) -> None:
    """A lost lease is rebuilt from the limits file."""
    held(share(10 * GIB))
    use(state, 9 * GIB)
    change(state, limit_request.LimitRequest("4Gi"))
    (limit,) = limits(state).devices
    assert rebuild._share(0, limit, pure.device(0)) == share(4 * GIB, draining_bytes=9 * GIB)
    use(state, GIB)
    change(state, limit_request.LimitRequest("5Gi"))
    assert limits(state).devices[0].draining_bytes == 0


def test_damaged_usage_file_frees_nothing(held: Callable[..., Lease], state: str) -> None:
    held(share(10 * GIB))
    page = Path(storage.container_dir(state, "c1"), "rw", "usage")
    os.truncate(page, 100)
    changed = change(state, limit_request.LimitRequest("4Gi"))
    assert changed.used_bytes is None
    with pytest.raises(CapacityError, match="6 GiB free"):
        reserve(state, 7 * GIB)


# Containers that can be changed


def test_only_running_container_can_be_changed(held: Callable[..., Lease], state: str) -> None:
    with pytest.raises(RequestError, match='no running container "c1"'):
        change(state, limit_request.LimitRequest("1Gi"))
    reserve(state, GIB, "c1")
    with pytest.raises(CapacityError, match="is starting"):
        change(state, limit_request.LimitRequest("2Gi"))
    leases.undo(state, "c1")
    held(share(GIB))
    Path(storage.container_dir(state, "c1"), "share", "limits").unlink()
    with pytest.raises(DeviceError, match="no glibc"):
        change(state, limit_request.LimitRequest("2Gi"))
    Path(storage.container_dir(state, "c1"), "lease.json").write_text("x")
    with pytest.raises(CapacityError, match="cannot be read"):
        change(state, limit_request.LimitRequest("2Gi"))


def test_no_mount_table_is_read_under_the_lock(
    held: Callable[..., Lease], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant can make mount tables long. Those of a container without a limits file are searched before."""
    searched = []

    def search(directory: str, container_id: str) -> int:
        with open(f"{directory}/lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        searched.append(container_id)
        return -1

    monkeypatch.setattr(rebuild, "open_limits", search)
    held(share(GIB, 50))
    monkeypatch.setattr(mountns, "read_mounts", lambda *of: pytest.fail(f"the mount table of {of} is read"))
    assert change(state, limit_request.LimitRequest(compute=60)).after.shares[0].compute_percent == 60
    Path(storage.container_dir(state, "c1"), "share", "limits").unlink()
    with pytest.raises(DeviceError, match="no glibc"):
        change(state, limit_request.LimitRequest("2Gi"))
    assert searched == ["c1"]


def test_wake_without_system_call_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "_FUTEX", -1)
    fd = fd_of(tmp_path / "limits", share(GIB))
    with pytest.raises(KernelError, match="no system call number"):
        limit_update.store(fd, (share(2 * GIB),))
    os.close(fd)
