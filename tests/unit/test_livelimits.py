"""Limits that change: whole or not at all for who reads them, and never more than what others are told."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from gpushare import (
    hook,
    leaseend,
    leasefile,
    leases,
    linux,
    livelimits,
    pages,
    placement,
    procs,
    rebuild,
    region,
    resize,
    storage,
)
from gpushare.errors import CapacityError, DeviceError, KernelError, RequestError
from gpushare.model import Amount, Lease, Request, Selection, Share
from gpushare.ops import TenantTmpfs, WriteLimits

from tests.unit import pure

GIB = 1 << 30
HOST = pure.node(1)
UUID = pure.UUIDS[0]
REFUSE_UNHELD = livelimits._refuse_unheld
WATCHED = tuple(f"gpushare/{name}.py" for name in ("livelimits", "leases", "storage"))


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
def held(state: str, init: int, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Lease]:
    """held(shares) -> the lease of a "container" whose init sleeps."""
    monkeypatch.setattr(livelimits, "_refuse_unheld", lambda *_: None)  # it has no mounts of its own

    def make(*shares: Share, container_id: str = "c1") -> Lease:
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

    return make


def use(state: str, used_bytes: int, container_id: str = "c1") -> None:
    """What a process of the container would write."""
    path = Path(storage.container_dir(state, container_id), "rw", "usage")
    data = bytearray(path.read_bytes())
    at = region.offset("gs_usage", "slot")
    packed = region.packer("gs_slot").pack(7, 7, 1, 1, 1, used_bytes, *[0] * (region.MAX_DEVICES - 1))
    data[at : at + len(packed)] = packed
    path.write_bytes(data)


def limits(state: str, container_id: str = "c1") -> region.Limits:
    return storage.read_limits(f"{storage.container_dir(state, container_id)}/share/limits")


def change(state: str, wish: resize.Wish, dry_run: bool = False, node: Any = HOST) -> livelimits.Changed:
    def decide(lease: Lease, live: tuple[Lease, ...], seen: leases.View) -> tuple[Share, ...]:
        return resize.shares(lease, wish, node, live, seen.blocked(node))

    return livelimits.change(state, "c1", decide, dry_run)


def reserve(state: str, memory_bytes: int, container_id: str = "c2") -> Lease:
    amount = Amount(memory_bytes, None, str(memory_bytes))
    request = Request("own", Selection("any", 1), ("compute",), memory=((None, amount),))
    return leases.reserve(state, pure.bundle(container_id=container_id), request, HOST, hook.grant)


def share(memory_bytes: Any, percent: Any = None, **more: Any) -> Share:
    return pure.share(0, 0, memory_bytes)._replace(compute_percent=percent, **more)


def fd_of(path: Path, *shares: Share) -> int:
    path.write_bytes(region.pack_limits(shares, 1))
    return os.open(path, os.O_RDWR)


# The others


def told(state: str) -> int:
    at = pages.granted_at(0)
    return int.from_bytes(Path(pages.directory(state, UUID), "index").read_bytes()[at : at + 8], "little")


def test_the_others_are_told_what_it_may_have_now(
    state: str, held: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the limit, and after a change that was killed before they were."""
    pages.prepare(state, UUID)
    held(share(GIB, 30))
    pages.settle(state, UUID, {0: 30})
    livelimits.change(state, "c1", lambda *_: (share(GIB, 50, paused=True),))
    assert told(state) == 50 | region.DEVICE_PAUSED << 8
    with monkeypatch.context() as killed:
        killed.setattr(livelimits, "_tell_others", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        pid = os.fork()
        if pid == 0:
            livelimits.change(state, "c1", lambda *_: (share(GIB, 70),))
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert told(state) == 50 | region.DEVICE_PAUSED << 8
    with leases.locked(state):
        livelimits.finish(state)
    assert told(state) == 70


# The file


def test_a_reader_sees_both_or_neither(tmp_path: Path) -> None:
    """Memory, compute and flags of two devices at once, by another process, as the header says to read them."""
    sizes = (GIB, 7 * GIB)
    both = [
        tuple(
            pure.share(n, n, size)._replace(compute_percent=size // GIB, paused=size > GIB, virtual_bytes=2 * size)
            for n in range(2)
        )
        for size in sizes
    ]
    fd = fd_of(tmp_path / "limits", *both[0])
    base, size = region.offset("gs_limits", "device"), region.DEVICE_SIZE
    at = region.offset("gs_limits", "generation") // 8
    copies = [[(base + n * size + region.offset("gs_device_limit", p + f)) // 8
               for n in range(2) for f in ("memory_limit_bytes", "compute_percent", "weight", "memory_virtual_bytes")]
              for p in ("next_", "")]  # fmt: skip
    wanted = {tuple(word for _, word in region.stores(shares, "")) for shares in both}
    ready, stop = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        seen, code = set(), 1
        try:
            os.set_blocking(stop[0], False)
            os.close(stop[1])
            words = memoryview(mmap.mmap(fd, region.LIMITS_SIZE, prot=mmap.PROT_READ)).cast("Q")
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
            livelimits.store(fd, shares)
    for one in (*stop, *ready, fd):
        os.close(one)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_nothing_that_cannot_change_is_touched(tmp_path: Path) -> None:
    fd = fd_of(tmp_path / "limits", share(GIB, 30, page=9))
    before = bytearray((tmp_path / "limits").read_bytes())
    livelimits.store(fd, (share(2 * GIB, 40, page=9, paused=True, priority=1, soft=True),))
    after = (tmp_path / "limits").read_bytes()
    found = region.read_limits(after)
    assert (found.generation, found.nonce) == (3, 1)
    flags = region.DEVICE_COMPUTE_SOFT | region.DEVICE_PAUSED
    assert found.devices[0][1:] == (2 * GIB, 16 * GIB, 40, 1, flags, 9, 0, 0)
    for prefix in ("", "next_"):
        for at, word in region.stores((share(2 * GIB, 40, paused=True, priority=1, soft=True),), prefix):
            before[at : at + 8] = struct.pack("<Q", word)
    at = region.offset("gs_limits", "generation")
    before[at : at + 8] = struct.pack("<Q", 3)
    assert bytes(before) == after
    livelimits.store(fd, (share(2 * GIB, 40, paused=True, priority=1, soft=True),))
    assert (tmp_path / "limits").read_bytes() == after  # nothing new: nobody is woken for it
    os.close(fd)


def test_a_file_of_other_devices_is_left_alone(tmp_path: Path) -> None:
    fd = fd_of(tmp_path / "limits", share(GIB))
    for data in (region.pack_limits((pure.share(0, 1, GIB),), 1), b"short", b"x" * region.LIMITS_SIZE):
        (tmp_path / "limits").write_bytes(data)
        with pytest.raises(region.RegionError):
            livelimits.store(fd, (share(2 * GIB),))
        assert (tmp_path / "limits").read_bytes() == data
    os.close(fd)


# Killed


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Runs `work` in a process that is killed before the `number`th line of ours; False when it ended before."""
    pid = os.fork()
    if pid == 0:
        left = number

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal left
            if not frame.f_code.co_filename.endswith(WATCHED):
                return None
            if event == "line":
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        try:
            sys.settrace(trace)
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def ended(state: str) -> None:
    leaseend.sweep(state)
    with leases.locked(state):
        livelimits.finish(state)


NEXT: dict[str, Callable[[str], object]] = {
    "start": lambda state: reserve(state, GIB),
    "prune": ended,
    "change": lambda state: change(state, resize.Wish(priority=1)),
}
CHANGES = {
    "more": (share(4 * GIB, 30), resize.wish("6Gi", "60"), (6 * GIB, 60)),
    "less": (share(8 * GIB, 60), resize.wish("6Gi", "30"), (6 * GIB, 30)),
    "less than it uses": (share(8 * GIB, 60), resize.wish("2Gi", "100", "soft"), (2 * GIB, None)),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("then", NEXT)
def test_who_is_killed_leaves_a_whole_change_or_none(
    held: Callable[..., Lease], state: str, what: str, then: str
) -> None:
    """Before each line of ours. The lease never names less memory than the container may take or holds, and whoever
    comes next makes both say the same."""
    before, wish, (memory_bytes, percent) = CHANGES[what]
    used = 5 * GIB if "uses" in what else GIB
    first, number, seen = held(before), 0, set()
    use(state, used)
    path = Path(storage.container_dir(state, "c1"), "share", "limits")
    whole = path.read_bytes()
    while True:
        number += 3 if then != "start" else 1
        if not killed_at(number, lambda: change(state, wish)):
            break
        lease = leases.find(state, "c1")
        assert lease is not None
        (limit,) = limits(state).devices
        had = limit.memory_limit_bytes, limit.compute_percent
        assert had in ((before.memory_limit_bytes, before.compute_percent), (memory_bytes, percent)), number
        counted = placement.ledger_of([lease], HOST.config.policy).used[UUID]
        assert counted >= max(had[0] or 0, used), number
        NEXT[then](state)
        lease = leases.find(state, "c1")
        assert lease is not None and livelimits.unfinished(state) is None, number
        (limit,) = limits(state).devices
        mine = lease.shares[0]
        assert (limit.memory_limit_bytes, limit.compute_percent or 100) == (
            mine.memory_limit_bytes,
            mine.compute_percent or 100,
        ), number
        assert limits(state).generation % 2 == 1
        seen.add(mine.memory_limit_bytes)
        if then == "start":
            assert leaseend.release(state, "c2") != ""  # it lives: this process
            leases.undo(state, "c2")
        leases.rewrite(state, first)
        path.write_bytes(whole)
    assert number > 100 and seen == {before.memory_limit_bytes, memory_bytes}


def test_a_change_that_cannot_be_finished_keeps_nobody_from_starting(held: Callable[..., Lease], state: str) -> None:
    lease = held(share(4 * GIB))
    Path(state, storage.CHANGING).write_text("c1")
    leases.rewrite(state, lease._replace(shares=(share(2 * GIB, draining_bytes=4 * GIB),)))
    limits_file = Path(storage.container_dir(state, "c1"), "share", "limits")
    data = limits_file.read_bytes()
    limits_file.write_bytes(b"damaged")
    with pytest.raises(CapacityError, match="12 GiB free"):  # what it may hold is counted
        reserve(state, 13 * GIB)
    reserve(state, 12 * GIB)
    assert livelimits.unfinished(state) == "c1"
    limits_file.write_bytes(data)
    ended(state)
    assert limits(state).devices[0].memory_limit_bytes == 2 * GIB


def test_no_room_for_a_lease_changes_nothing(
    held: Callable[..., Lease], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = held(share(4 * GIB))

    def full(*_: object) -> None:
        raise KernelError("no space")

    monkeypatch.setattr(storage, "write_lease", full)
    with pytest.raises(KernelError):
        change(state, resize.Wish("6Gi"))
    assert leases.find(state, "c1") == before and limits(state).devices[0].memory_limit_bytes == 4 * GIB


# At once with starts


def test_a_start_and_a_change_never_get_the_same_bytes(held: Callable[..., Lease], state: str) -> None:
    """Both want what only one can have, at the same moment, again and again."""
    first = held(share(4 * GIB))
    outcomes = set()
    for _ in range(60):
        gate = os.pipe()
        children = []
        for work in (lambda: reserve(state, 8 * GIB), lambda: change(state, resize.Wish("10Gi"))):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    os.read(gate[0], 1)
                    work()
                    code = 0
                except CapacityError:
                    code = 75
                finally:
                    os._exit(code)
            children.append(pid)
        os.write(gate[1], b"xx")
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        for fd in gate:
            os.close(fd)
        counted = placement.ledger_of(leases.view(state).live, HOST.config.policy).used.get(UUID, 0)
        assert counted <= 16 * GIB
        outcomes.add(tuple(codes))
        assert codes in ([0, 75], [75, 0], [0, 0]), codes  # both: the start's process was gone before the change
        leaseend.sweep(state)
        leases.rewrite(state, first)
    assert outcomes & {(0, 75), (0, 0)} and (75, 0) in outcomes, outcomes


# What is given back


def test_what_is_still_held_is_not_free(held: Callable[..., Lease], state: str) -> None:
    held(share(10 * GIB))
    use(state, 9 * GIB)
    changed = change(state, resize.Wish("4Gi"))
    assert changed.used_bytes == (9 * GIB,) and changed.after.shares[0].draining_bytes == 9 * GIB
    with pytest.raises(CapacityError, match="7 GiB free of 16 GiB, held by c1 \\(9 GiB\\)"):
        reserve(state, 12 * GIB)
    use(state, 5 * GIB)
    before = leases.find(state, "c1")
    assert before is not None
    (shown,) = livelimits.settled(state, (before,), keep=False)
    assert shown.shares[0].draining_bytes == 5 * GIB and leases.find(state, "c1") == before  # only shown
    with pytest.raises(CapacityError, match="11 GiB free"):
        reserve(state, 12 * GIB)
    use(state, 8 * GIB)  # what it once gave back it does not get again
    with pytest.raises(CapacityError, match="11 GiB free"):
        reserve(state, 12 * GIB)
    use(state, 4 * GIB)
    reserve(state, 12 * GIB)
    lease = leases.find(state, "c1")
    assert lease is not None and lease.shares[0].draining_bytes == 0
    assert limits(state).devices[0].draining_bytes == 0


def test_what_is_still_held_outlives_the_lease(held: Callable[..., Lease], state: str) -> None:
    """By the limits file a lost lease is rebuilt."""
    held(share(10 * GIB))
    use(state, 9 * GIB)
    change(state, resize.Wish("4Gi"))
    (limit,) = limits(state).devices
    assert rebuild._share(0, limit, pure.device(0)) == share(4 * GIB, draining_bytes=9 * GIB)
    use(state, GIB)
    change(state, resize.Wish("5Gi"))
    assert limits(state).devices[0].draining_bytes == 0


def test_a_page_that_cannot_be_read_gives_nothing_back(held: Callable[..., Lease], state: str) -> None:
    held(share(10 * GIB))
    page = Path(storage.container_dir(state, "c1"), "rw", "usage")
    os.truncate(page, 100)
    changed = change(state, resize.Wish("4Gi"))
    assert changed.used_bytes is None
    with pytest.raises(CapacityError, match="6 GiB free"):
        reserve(state, 7 * GIB)


# Who is asked


def test_only_what_runs_is_changed(held: Callable[..., Lease], state: str) -> None:
    with pytest.raises(RequestError, match="no running container 'c1'"):
        change(state, resize.Wish("1Gi"))
    reserve(state, GIB, "c1")
    with pytest.raises(CapacityError, match="is starting"):
        change(state, resize.Wish("2Gi"))
    leases.undo(state, "c1")
    held(share(GIB))
    Path(storage.container_dir(state, "c1"), "share", "limits").unlink()
    with pytest.raises(DeviceError, match="no glibc"):
        change(state, resize.Wish("2Gi"))
    Path(storage.container_dir(state, "c1"), "lease.json").write_text("x")
    with pytest.raises(CapacityError, match="cannot be read"):
        change(state, resize.Wish("2Gi"))


def test_without_pages_there_is_no_compute_limit(state: str, held: Callable[..., Lease], init: int) -> None:
    lease = held(share(GIB, 50))
    for after in (share(GIB, 60), share(GIB, 50, soft=True), share(GIB, None, soft=True)):
        with pytest.raises(DeviceError, match="/usr/lib/gpushare/pages/GPU-.*could not be held"):
            REFUSE_UNHELD(init, lease, lease._replace(shares=(after,)))
    for after in (share(2 * GIB, 50), share(GIB, None), share(GIB, 100), share(GIB, 50, paused=True)):
        REFUSE_UNHELD(init, lease, lease._replace(shares=(after,)))


def test_wake_needs_a_number_for_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "_FUTEX", {})
    fd = fd_of(tmp_path / "limits", share(GIB))
    with pytest.raises(KernelError, match="no system call number"):
        livelimits.store(fd, (share(2 * GIB),))
    os.close(fd)
