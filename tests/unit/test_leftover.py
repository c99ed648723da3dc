"""Find the remains of a container whose init has exited."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from gpushare.allocation import reservation
from gpushare.state import leftover, mounttables, rebuild, shm_abi, storage, usage_reader
from gpushare.system import filelock

from tests.unit import pure

ONE_GPU = pure.node(1)


def in_child(work: Callable[[], None]) -> tuple[int, int, int]:
    """(pid, descriptor that is readable once `work` is done, descriptor whose close ends the child)"""
    done, done_writer = os.pipe()
    waits, end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(end)
            work()
            os.write(done_writer, b".")
            os.read(waits, 1)
        finally:
            os._exit(0)
    os.close(done_writer)
    os.close(waits)
    assert os.read(done, 1) == b"."
    return child, done, end


def ended(child: tuple[int, int, int]) -> None:
    os.close(child[2])
    os.waitpid(child[0], 0)
    os.close(child[1])


def mapped(path: Path, start: int = 0, length: int = 0) -> mmap.mmap:
    """Lock, map and close the file, like shim/core/region.c."""
    fd = os.open(path, os.O_RDWR)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, start, length, 0))
    page = mmap.mmap(fd, 4096)
    os.close(fd)
    return page


def test_lock_lasts_until_last_mapping_ends(tmp_path: Path) -> None:
    path = tmp_path / "usage"
    path.write_bytes(bytes(4096))
    assert not filelock.is_locked(str(path))
    kept: list[mmap.mmap] = []

    def forks() -> None:
        kept.append(mapped(path))
        in_child(lambda: None)

    first = in_child(forks)
    assert filelock.is_locked(str(path))
    ended(first)  # its child reads end of file from a pipe, and so ends too
    while filelock.is_locked(str(path)):  # the kernel drops the mapping asynchronously
        pass


def test_memory_of_a_dead_process_counts_while_its_children_live(state_dir: Path) -> None:
    """The driver keeps it, so it must not count as freed. A tenant can write any number."""
    path = Path(storage.container_dir(str(state_dir), "c1"), "rw", "usage")
    path.parent.mkdir(parents=True)
    data = bytearray(shm_abi.pack_usage(1, 1))
    for index, started_ns in enumerate((1234567, 7654321, (1 << 64) - 1)):
        charged = (8 << 20, *[0] * (shm_abi.MAX_DEVICES - 1))
        slot = shm_abi.packer("gs_slot").pack(usage_reader.OWNER_DIED, 7, 1, 1, started_ns, *charged)
        at = shm_abi.offset("gs_usage", "slot") + index * shm_abi.SLOT_SIZE
        data[at : at + len(slot)] = slot
    path.write_bytes(data)
    kept: list[mmap.mmap] = []
    child = in_child(lambda: kept.append(mapped(path, 1234567, 1)))
    assert storage.read_usage(str(state_dir), "c1", 1).used_bytes(0) == 8 << 20
    ended(child)
    while storage.read_usage(str(state_dir), "c1", 1).used_bytes(0):  # the kernel drops the mapping asynchronously
        pass


@pytest.mark.parametrize(
    ("folders", "populated"), [(0, False), (20, False), (leftover._MAX_CGROUPS + 1, None)], ids=["none", "few", "many"]
)
def test_child_cgroups_are_searched_up_to_bound(tmp_path: Path, folders: int, populated: bool | None) -> None:
    (tmp_path / "cgroup.procs").touch()
    for number in range(folders):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "cgroup.procs").touch()
    assert leftover._populated_v1(str(tmp_path)) is populated
    if folders == 20:
        (tmp_path / "7" / "cgroup.procs").write_text("12\n")
        assert leftover._populated_v1(str(tmp_path)) is True
    deep = tmp_path.joinpath(*["d"] * (leftover._MAX_DEPTH + 1))
    deep.mkdir(parents=True)
    for folder in (deep, *list(deep.parents)[: leftover._MAX_DEPTH]):
        (folder / "cgroup.procs").touch()
    assert leftover._populated_v1(str(tmp_path)) is not False


def test_file_lease_on_the_usage_file_counts_as_in_use(tmp_path: Path) -> None:
    """A process of the container must have the file open for that; the kernel then refuses to open it at once."""
    path = tmp_path / "usage"
    path.touch()

    def hold() -> None:
        signal.signal(signal.SIGIO, signal.SIG_IGN)  # by which the kernel asks for the lease back
        fcntl.fcntl(os.open(path, os.O_RDWR), fcntl.F_SETLEASE, fcntl.F_WRLCK)

    child = in_child(hold)
    assert filelock.is_locked(str(path))
    ended(child)
    assert not filelock.is_locked(str(path))


def test_search_for_lost_containers_takes_no_lock(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts without lost containers do not wait for the search, however many mounts there are."""
    state = str(state_dir)
    storage.prepare(state)
    looks = []

    def read(last: int) -> mounttables.Found:
        with open(f"{state}/lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        looks.append(last)
        return mounttables.Found((), "12 mount tables were not read")

    monkeypatch.setattr(mounttables, "read", read)
    assert reservation.recover(state, ONE_GPU) == ()
    assert looks == [mounttables.ROOT]
    assert not (state_dir / storage.REBUILD).exists()


def test_directory_lost_during_search_is_searched_again(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = str(state_dir)
    storage.prepare(state)
    marker, looks = state_dir / storage.REBUILD, []

    def search(of: str, node: object) -> rebuild.SearchResult:
        status = marker.stat()
        looks.append(status.st_ino)
        if len(looks) == 1:
            marker.rename(state_dir / "rebuild.before")
            marker.touch()
        return rebuild.SearchResult((status.st_dev, status.st_ino), ())

    monkeypatch.setattr(rebuild, "search", search)
    assert reservation.recover(state, ONE_GPU) == ()
    assert len(looks) == 2 and not marker.exists()
