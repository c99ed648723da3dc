"""Activity files in devices/<uuid>: ownership, damage by tenants and reuse."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpushare.allocation import reservation
from gpushare.core.errors import CapacityError, KernelError
from gpushare.core.model import Amount, Request, Selection
from gpushare.state import activity_files, leases, shm_abi

from tests.unit import activityhost, pure
from tests.unit.activityhost import GIB, INDEX_SIZE, NODE, UUID, files, granted, index, reserve

state = activityhost.state


def test_first_allocation_mounts_private_tmpfs_of_exact_size(state: str) -> None:
    subprocess.run(["mount", "--make-rshared", "/"], check=True)  # as systemd leaves it; only in this mount namespace
    try:
        reserve(state, "c1")
    finally:
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    place = activity_files.directory(state, UUID)
    (line,) = (line for line in Path("/proc/self/mountinfo").read_text().splitlines() if line.split(" ")[4] == place)
    assert "nosuid,nodev,noexec" in line and f"- tmpfs {place} " in line
    assert "shared:" not in line and "master:" not in line
    space = os.statvfs(place)
    assert space.f_blocks * space.f_frsize == shm_abi.MAX_PEERS * activity_files.PAGE_SIZE + INDEX_SIZE
    modes = [stat.S_IMODE(os.stat(path).st_mode) for path in (os.path.dirname(place), place, f"{place}/index")]
    assert modes == [0o700, 0o755, 0o444]
    assert not os.path.exists(activity_files.directory(state, pure.UUIDS[1]))
    assert files(state) == {"index", "0"}


def test_new_activity_file_is_complete_and_unowned(state: str) -> None:
    lease = reserve(state, "c1")
    path = Path(activity_files.path(state, UUID, lease.shares[0].page))
    status = path.stat()
    assert (status.st_size, status.st_blocks * 512) == (activity_files.PAGE_SIZE, activity_files.PAGE_SIZE)
    assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (
        0o666,
        activity_files.OWNER,
        activity_files.OWNER,
    )
    header = shm_abi.packer("gs_pages").unpack(path.read_bytes())[:5]
    assert header == (shm_abi.PAGES_MAGIC, shm_abi.ABI_VERSION, activity_files.PAGE_SIZE, shm_abi.MAX_PAGES, 0)
    assert not any(path.read_bytes()[24:])
    assert os.stat(Path(path.parent, "index")).st_uid == activity_files.OWNER


def test_released_number_is_reused(state: str) -> None:
    first, second, third = (reserve(state, name) for name in ("c1", "c2", "c3"))
    assert [lease.shares[0].page for lease in (first, second, third)] == [0, 1, 2]
    assert index(state) == (frozenset({0, 1, 2}), 4)
    leases.undo(state, "c2")
    assert index(state) == (frozenset({0, 2}), 5) and files(state) == {"index", "0", "2"}
    assert reserve(state, "c4").shares[0].page == 1
    assert [lease.shares[0].page for lease in leases.view(state).live] == [0, 2, 1]  # the number is also in lease.json


def test_numbers_are_assigned_per_device(state: str) -> None:
    reserve(state, "c1")
    lease = reserve(state, "c2", count=2)
    assert [share.page for share in lease.shares] == [1, 0]
    assert (index(state)[0], index(state, pure.UUIDS[1])[0]) == ({0, 1}, {0})
    leases.undo(state, "c2")
    assert (index(state)[0], index(state, pure.UUIDS[1])[0]) == ({0}, frozenset())


def test_limits_contain_activity_file_number(state: str) -> None:
    reserve(state, "c1")
    lease = reserve(state, "c2")
    assert shm_abi.read_limits(shm_abi.pack_limits(lease.shares, 1)).devices[0].page == 1


def test_one_container_over_maximum_is_refused(state: str) -> None:
    one = pure.node(1)
    for number in range(shm_abi.MAX_PEERS):
        reserve(state, f"c{number}", node=one)
    assert index(state)[0] == frozenset(range(shm_abi.MAX_PEERS))
    assert os.statvfs(activity_files.directory(state, UUID)).f_bfree == 0
    with pytest.raises(CapacityError, match="device 0 serves 128 containers already") as refused:
        reserve(state, "more", node=one)
    assert refused.value.hint and not Path(state, "containers", "more").exists()
    assert reserve(state, "more").shares[0].device.uuid == pure.UUIDS[1]  # `any` takes the next device that fits
    leases.undo(state, "c77")
    assert reserve(state, "again", node=one).shares[0].page == 77


def test_reused_number_gets_new_file(state: str) -> None:
    """A process that still has the old file open or mapped neither sees nor changes the new one."""
    path = Path(activity_files.path(state, UUID, reserve(state, "c1").shares[0].page))
    with open(path, "r+b", buffering=0) as old:
        old.write(b"x" * activity_files.PAGE_SIZE)
        leases.undo(state, "c1")
        assert os.fstat(old.fileno()).st_blocks == 0  # the removed file uses no memory
        assert reserve(state, "c2").shares[0].page == 0
        old.write(b"y" * 100)
    header = shm_abi.packer("gs_pages").unpack(path.read_bytes())
    assert header[0] == shm_abi.PAGES_MAGIC and not any(path.read_bytes()[24:])


def test_file_of_a_killed_start_is_replaced(state: str) -> None:
    activity_files.prepare(state, UUID)
    activity_files.take(state, UUID, 0, {})
    with open(activity_files.path(state, UUID, 0)) as old:
        activity_files.take(state, UUID, 0, {})
        assert os.fstat(old.fileno()).st_nlink == 0


def test_file_without_room_leaves_no_descriptor(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    activity_files.prepare(state, UUID)
    monkeypatch.setattr(os, "posix_fallocate", full)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(CapacityError):
        activity_files.take(state, UUID, 0, {})
    assert os.listdir("/proc/self/fd") == before and files(state) == {"index"}


# Attacks by a tenant, which may write its own file but not the directory
def _grow(page: Path) -> None:
    try:
        with open(page, "ab") as file:
            while True:
                file.write(b"x" * 4096)
                file.flush()
    except OSError as error:
        assert error.errno == errno.ENOSPC


def _grow_behind_the_end(page: Path) -> None:
    for length in (1 << 23, 1 << 20, 1 << 16, 1 << 12):
        while subprocess.run(["fallocate", "-n", "-o", str(room(page)), "-l", str(length), page]).returncode == 0:
            pass


def _attributes(page: Path) -> None:
    """Extended attributes use the space of inodes."""
    for size in (60000, 6000, 500, 1):
        try:
            for number in range(10_000):
                os.setxattr(page, f"user.{size}.{number}", b"x" * size)
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP:  # Linux before 6.6 has none on tmpfs
                _grow(page)
                return
            assert error.errno == errno.ENOSPC


def room(page: Path) -> int:
    """The end of the file's allocated blocks, if it has no hole."""
    return page.stat().st_blocks * 512


@pytest.mark.parametrize("grow", [_grow, _grow_behind_the_end, _attributes])
def test_space_taken_by_tenant_is_reclaimed_for_next_start(state: str, grow: Callable[[Path], None]) -> None:
    first = Path(activity_files.path(state, UUID, reserve(state, "c1").shares[0].page))
    second = Path(activity_files.path(state, UUID, reserve(state, "c2").shares[0].page))
    with open(second, "r+b") as file:
        file.seek(5000)
        file.write(b"kept")
    grow(first)
    space = os.statvfs(first.parent)
    assert space.f_bfree == 0 or space.f_ffree == 0
    third = Path(activity_files.path(state, UUID, reserve(state, "c3").shares[0].page))
    assert third.name == "2"
    for path in (first, second, third):
        assert (path.stat().st_size, path.stat().st_blocks * 512) == (
            activity_files.PAGE_SIZE,
            activity_files.PAGE_SIZE,
        )
    assert second.read_bytes()[5000:5004] == b"kept"


@pytest.mark.parametrize("mapped", [False, True])
def test_space_taken_through_file_of_ended_container_is_reclaimed(state: str, mapped: bool) -> None:
    """A process can keep it open, also one without a share, and write to it after the end."""
    first = Path(activity_files.path(state, UUID, reserve(state, "c1").shares[0].page))
    fd, place = os.open(first, os.O_RDWR), first.parent
    memory = mmap.mmap(fd, activity_files.PAGE_SIZE) if mapped else None
    writer = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    leases.undo(state, "c1")
    assert not first.exists()
    with pytest.raises(OSError, match="No space left"):
        for at in range(0, 1 << 30, 1 << 16):
            os.pwrite(writer, bytes(1 << 16), at)
    for name in ("c2", "c3"):
        assert Path(activity_files.path(state, UUID, reserve(state, name).shares[0].page)).stat().st_blocks > 0
    os.close(writer)
    os.close(fd)
    if memory is not None:
        memory.close()
    activity_files._cut_back(str(place))
    assert sorted(os.listdir(place)) == ["0", "1", "index"]


def test_file_that_only_readers_have_open_is_removed(state: str) -> None:
    """Neighbours map it for reading."""
    first = Path(activity_files.path(state, UUID, reserve(state, "c1").shares[0].page))
    with open(first, "rb"):
        leases.undo(state, "c1")
        assert os.listdir(first.parent) == ["index"]


def test_unlistable_attributes_are_refused_with_container_name(state: str) -> None:
    first = Path(activity_files.path(state, UUID, reserve(state, "c1").shares[0].page))
    with pytest.raises(OSError, match="No space left|not supported") as failed:
        for number in range(100_000):
            os.setxattr(first, f"user.{number:0250}", b"")
    if failed.value.errno == errno.EOPNOTSUPP:  # Linux before 6.6 has none on tmpfs
        return
    with pytest.raises(CapacityError, match="is full, and c1 fills it again and again; stop c1"):
        reserve(state, "c2")
    leases.undo(state, "c1")
    assert reserve(state, "c2").shares[0].page == 0


def test_tenant_that_refills_space_is_named_in_refusal(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Path(activity_files.path(state, UUID, reserve(state, "c1").shares[0].page))
    cut = activity_files._cut_back

    def cut_and_lose(place: str) -> list[int]:
        found = cut(place)
        _grow(first)
        return found

    monkeypatch.setattr(activity_files, "_cut_back", cut_and_lose)
    _grow(first)
    with pytest.raises(CapacityError, match="is full, and c1 fills it again and again; stop c1"):
        reserve(state, "c2")
    assert index(state)[0] == {0} and files(state) == {"index", "0"}
    assert [lease.id for lease in leases.view(state).live] == ["c1"]


@pytest.mark.parametrize("change", ["truncate -s 0", "truncate -s 1T", "fallocate -p -o 0 -l 40960", "chmod 0"])
def test_damaged_file_is_replaced_for_next_container(state: str, change: str) -> None:
    lease = reserve(state, "c1")
    path = Path(activity_files.path(state, UUID, lease.shares[0].page))
    subprocess.run([*change.split(), path], check=True)
    assert reserve(state, "c2").shares[0].page == 1
    leases.undo(state, "c1")
    assert reserve(state, "c3").shares[0].page == 0
    status = path.stat()
    assert (status.st_size, status.st_blocks * 512, stat.S_IMODE(status.st_mode)) == (
        activity_files.PAGE_SIZE,
        activity_files.PAGE_SIZE,
        0o666,
    )


def test_tenant_cannot_take_file_lease(state: str) -> None:
    """F_SETLEASE delays an open by 45 s. Root in a container is root here, but without CAP_LEASE."""
    lease = reserve(state, "c1")
    without = ["setpriv", "--bounding-set=-lease", "--inh-caps=-lease"]
    for name, mode, kind in ((str(lease.shares[0].page), "r+b", "F_WRLCK"), ("index", "rb", "F_RDLCK")):
        path = Path(activity_files.directory(state, UUID), name)
        script = f"import fcntl; f = open('{path}', '{mode}'); fcntl.fcntl(f, fcntl.F_SETLEASE, fcntl.{kind})"
        done = subprocess.run([*without, sys.executable, "-c", script], capture_output=True, text=True)
        assert done.returncode == 1 and "Permission denied" in done.stderr, (name, done.stderr)


def test_file_lease_of_tenant_with_cap_lease_does_not_delay_release(state: str) -> None:
    lease = reserve(state, "c1")
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # the kernel asks for the lease back with SIGIO
    fd = os.open(activity_files.path(state, UUID, lease.shares[0].page), os.O_RDWR)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        leases.undo(state, "c1")
        assert index(state)[0] == frozenset()
        assert {name for name in files(state) if not name.startswith("gone-")} == {"index"}
        assert reserve(state, "c2").shares[0].page == 0
    finally:
        os.close(fd)
        signal.signal(signal.SIGIO, signal.SIG_DFL)


def test_mapped_index_shows_change(state: str) -> None:
    reserve(state, "c1")
    index_path = Path(activity_files.directory(state, UUID), "index")
    with open(index_path, "rb") as file, mmap.mmap(file.fileno(), INDEX_SIZE, prot=mmap.PROT_READ) as memory:
        at = shm_abi.offset("gs_peers", "generation")
        before = int.from_bytes(memory[at : at + 8], "little")
        reserve(state, "c2")
        assert int.from_bytes(memory[at : at + 8], "little") > before
        assert memory[shm_abi.offset("gs_peers", "used")] == 0b11
    assert activity_files.numbers(state, UUID) == {0, 1}


def test_grant_is_published_before_index_bit(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the new container would be limited by the grant of the number's previous owner."""
    seen: list[tuple[int, int]] = []
    write = os.pwrite

    def watched(fd: int, data: bytes, at: int) -> int:
        done = write(fd, data, at)
        if at == shm_abi.offset("gs_peers", "used"):
            seen.append((min(index(state)[0]), granted(state, min(index(state)[0]))))
        return done

    first = reserve(state, "c1")
    leases.undo(state, "c1")
    monkeypatch.setattr(os, "pwrite", watched)
    request = Request(
        "own", Selection("any", 1), ("compute",), memory=((None, Amount(1 << 26, None, "1")),), compute=((None, 30),)
    )
    lease = reservation.reserve(state, pure.bundle(container_id="c2"), request, NODE)
    assert lease.shares[0].page == first.shares[0].page == 0
    assert seen == [(0, 30)]
    assert shm_abi.granted(lease.shares[0]) == granted(state, 0) == 30


def test_index_changes_before_its_generation(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that sees the new generation would otherwise keep the old numbers."""
    order: list[int] = []
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: order.append(at) or write(fd, data, at))
    activity_files.prepare(state, UUID)
    order.clear()
    activity_files.settle(state, UUID, {3: 30})
    at = [shm_abi.offset("gs_peers", name) for name in ("used", "generation")]
    assert order == [activity_files.granted_at(3), *at]


@pytest.mark.parametrize(
    ("share", "word"),
    [
        ({"compute_percent": None}, 100),
        ({"compute_percent": 40}, 40),
        ({"compute_percent": 40, "soft": True, "priority": 1}, 40 | 1 << 8 | 1 << 16),
        ({"compute_percent": 1, "paused": True}, 1 | 4 << 8),
        ({"compute_percent": 40, "memory_backend": "dmem"}, 40),  # the enforcer flag is the host's, not a priority
    ],
)
def test_grant_is_encoded_in_one_word(share: dict[str, Any], word: int) -> None:
    assert shm_abi.granted(pure.share(0, 0, GIB)._replace(**share)) == word


@pytest.mark.parametrize("uuid", ["", ".", "..", "a/b", "../../etc", "a\0b"])
def test_invalid_uuid_is_refused_as_path(uuid: str) -> None:
    with pytest.raises(KernelError, match="cannot name a directory"):
        activity_files.directory("/state", uuid)
