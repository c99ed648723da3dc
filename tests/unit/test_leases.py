"""Leases: concurrent changes are atomic, a dead owner frees its lease, and nothing else does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpushare.allocation import reservation
from gpushare.core.errors import CapacityError, GpushareError, KernelError
from gpushare.core.model import Amount, Bundle, Lease, Node, Request, Selection
from gpushare.core.ops import WriteLimits
from gpushare.state import activity_files, leaseend, leasefile, leases, shm_abi, storage
from gpushare.system import procs

from tests.unit import pure

GIB = 1 << 30
ONE_GPU = pure.node(1)


@pytest.fixture
def state(state_dir: Path) -> str:
    storage.prepare(str(state_dir))
    return str(state_dir)


@pytest.fixture
def init() -> Iterator[subprocess.Popen[bytes]]:
    """A process in place of a container's init."""
    with subprocess.Popen(["sleep", "inf"]) as process:
        yield process
        process.kill()


def bundle(container_id: str) -> Bundle:
    return pure.bundle(container_id=container_id)


def asks(memory_bytes: int, devices: int = 1) -> Request:
    amount = Amount(memory_bytes, None, str(memory_bytes))
    return Request("own", Selection("any", devices), ("compute",), memory=((None, amount),))


def reserve(state: str, container_id: str, memory_bytes: int = GIB, node: Node = ONE_GPU, **how: int) -> Lease:
    return reservation.reserve(state, bundle(container_id), asks(memory_bytes, **how), node)


def in_child(work: Callable[[], object]) -> None:
    """Run `work` in a process that then exits, as a start that was killed right after it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def lease_file(state: str, container_id: str) -> Path:
    return Path(state, "containers", container_id, "lease.json")


def edit(state_dir: str, container_id: str, /, **changes: object) -> None:
    path = lease_file(state_dir, container_id)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def process(pid: int) -> procs.Process:
    found = procs.find(pid)
    assert found is not None
    return found


# Life cycle


def test_lease_is_reserved_held_and_released(state: str, init: subprocess.Popen[bytes]) -> None:
    reserved = reserve(state, "c1", 4 * GIB)
    assert (reserved.state, reserved.creator_pid, reserved.shares[0].memory_limit_bytes) == (
        "reserved",
        os.getpid(),
        4 * GIB,
    )
    held = leases.hold(state, reserved, process(init.pid), "/c1")
    assert leases.view(state).live == (held,)
    assert leases.find(state, "c1") == held
    assert (held.init_pid, held.cgroup) == (init.pid, "/c1")
    assert "is alive" in leaseend.release(state, "c1")  # its init is alive
    init.kill()
    init.wait()
    assert leaseend.release(state, "c1") == ""
    assert leaseend.release(state, "c1") == ""  # idempotent
    assert leases.view(state) == leases.View((), (), (), ())


def test_lease_survives_a_round_trip_through_its_file() -> None:
    shares = (pure.share(0, 0, 4 * GIB), pure.share(1, 1, None)._replace(compute_percent=30, soft=True))
    lease = pure.lease(*shares)._replace(created=1.5, cgroup="/a b", bundle="/ü")
    assert leasefile.from_json(leasefile.to_json(lease), "c1") == lease


def test_second_create_of_live_id_is_refused(state: str) -> None:
    reserve(state, "c1")
    with pytest.raises(
        CapacityError, match=rf"\"c1\" already has a lease, reserved by pid {os.getpid()} for \"/bundle\""
    ):
        reserve(state, "c1")
    assert len(leases.view(state).live) == 1


def test_killed_start_frees_its_lease(state: str) -> None:
    in_child(lambda: reserve(state, "c1", 16 * GIB))
    assert lease_file(state, "c1").exists()
    assert [lease.id for lease, _ in leases.view(state).dead] == ["c1"]
    assert reserve(state, "c2", 16 * GIB).id == "c2"  # the whole device is free again
    assert not lease_file(state, "c1").exists()


def test_dead_lease_of_same_id_is_replaced(state: str) -> None:
    in_child(lambda: reserve(state, "c1", 16 * GIB))
    assert reserve(state, "c1", 8 * GIB).creator_pid == os.getpid()
    assert storage.empty_trash(state) == []


def test_start_killed_before_writing_lease_is_swept(state: str) -> None:
    Path(state, "containers", "half").mkdir()
    assert leases.view(state).partial == ("half",)
    reserve(state, "half")
    assert [lease.id for lease in leases.view(state).live] == ["half"]


def test_dead_init_frees_lease_even_as_zombie(state: str, init: subprocess.Popen[bytes]) -> None:
    leases.hold(state, reserve(state, "c1", 16 * GIB), process(init.pid), "")
    with pytest.raises(CapacityError, match="held by c1"):
        reserve(state, "c2")
    os.kill(init.pid, signal.SIGKILL)
    os.waitid(os.P_PID, init.pid, os.WEXITED | os.WNOWAIT)  # dead, and not reaped
    ((_, reason),) = leases.view(state).dead
    assert reason == f"its init (pid {init.pid}) is gone"
    assert reserve(state, "c2", 16 * GIB).id == "c2"


def test_reused_pid_is_not_owner(state: str, init: subprocess.Popen[bytes]) -> None:
    leases.hold(state, reserve(state, "c1"), process(init.pid), "")
    edit(state, "c1", init_start=process(init.pid).start - 1)
    assert [lease.id for lease, _ in leases.view(state).dead] == ["c1"]


@pytest.mark.parametrize("held", [False, True])
def test_lease_of_earlier_boot_is_dead(state: str, init: subprocess.Popen[bytes], held: bool) -> None:
    """Even if a process has the pid and start time of its owner."""
    lease = reserve(state, "c1", 16 * GIB)
    if held:
        leases.hold(state, lease, process(init.pid), "")
    edit(state, "c1", boot_id="00000000-0000-0000-0000-000000000000")
    assert [reason for _, reason in leases.view(state).dead] == ["of another boot"]
    assert reserve(state, "c1", 16 * GIB).boot_id == procs.boot_id()


def test_full_state_directory_keeps_the_earlier_lease(
    state: str, init: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full tmpfs writes less than it was given."""
    lease = reserve(state, "c1")
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) // 2]))
    with pytest.raises(KernelError, match="No space left"):
        leases.hold(state, lease, process(init.pid), "")
    assert leases.view(state).live == (lease,)


def test_release_frees_the_activity_file_before_the_lease(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a release that is killed in between leaves a dead lease that names the number."""
    uuid = reserve(state, "c1").shares[0].device.uuid
    at_discard: list[frozenset[int]] = []
    discard = storage.discard

    def watched(*words: str) -> bool:
        at_discard.append(activity_files.numbers(state, uuid))
        return discard(*words)

    monkeypatch.setattr(storage, "discard", watched)
    leases.undo(state, "c1")
    assert at_discard == [frozenset()]


def test_hold_fails_after_lease_was_removed(state: str, init: subprocess.Popen[bytes]) -> None:
    lease = reserve(state, "c1")
    leases.undo(state, "c1")
    with pytest.raises(KernelError, match="was removed during its start"):
        leases.hold(state, lease, process(init.pid), "")
    assert not lease_file(state, "c1").exists()


def test_hold_fails_after_init_has_died(state: str, init: subprocess.Popen[bytes]) -> None:
    lease, owner = reserve(state, "c1"), process(init.pid)
    init.kill()
    init.wait()
    with pytest.raises(KernelError, match="died during its start"):
        leases.hold(state, lease, owner, "")


def test_undo_removes_only_own_lease(state: str) -> None:
    reserve(state, "c1")
    edit(state, "c1", creator_pid=1, creator_start=process(1).start)
    leases.undo(state, "c1")
    assert [lease.id for lease in leases.view(state).live] == ["c1"]


def test_refused_request_leaves_no_files(state: str) -> None:
    reserve(state, "c1", 10 * GIB)
    with pytest.raises(CapacityError, match=r"8 GiB requested|8589934592 requested") as refused:
        reserve(state, "c2", 8 * GIB)
    assert "6 GiB free of 16 GiB" in str(refused.value) and "held by c1 (10 GiB)" in str(refused.value)
    assert os.listdir(f"{state}/containers") == ["c1"]


def test_full_state_directory_fails_start_without_damage(state: str) -> None:
    """The lease cannot be written: neither a lease nor a partial file is left."""
    subprocess.run(["mount", "-o", "remount,size=64k", state], check=True)
    with open(f"{state}/filler", "wb", buffering=0) as filler, pytest.raises(OSError):
        while True:
            filler.write(b"x" * 4096)
    with pytest.raises(KernelError, match="[Nn]o space left"):
        reserve(state, "c1")
    assert leases.view(state) == leases.View((), (), (), ())
    os.unlink(f"{state}/filler")
    assert reserve(state, "c1").id == "c1"


def test_directory_that_fills_during_start_keeps_lease_whole(state: str, init: subprocess.Popen[bytes]) -> None:
    lease = reserve(state, "c1")
    subprocess.run(["mount", "-o", "remount,size=64k", state], check=True)
    with open(f"{state}/filler", "wb", buffering=0) as filler, pytest.raises(OSError):
        while True:
            filler.write(b"x" * 4096)
    with pytest.raises(KernelError, match="lease.json.*No space left on device; free space there"):
        leases.hold(state, lease, process(init.pid), "")
    assert leases.view(state).live == (lease,)


# Concurrency


def test_parallel_reserves_never_oversell_device(state: str) -> None:
    """32 concurrent starts request 1 GiB of 16 GiB and stay alive: 16 get it, 16 are refused with the numbers."""
    go_reader, go_writer = os.pipe()
    stay_reader, stay_writer = os.pipe()
    answer_reader, answer_writer = os.pipe()
    children = []
    for number in range(32):
        pid = os.fork()
        if pid == 0:
            try:
                os.close(go_writer)
                os.close(stay_writer)
                os.read(go_reader, 1)
                answer = b"wrong\n"
                try:
                    reserve(state, f"c{number}")
                    answer = b"granted\n"
                except CapacityError as error:
                    if "0 B free of 16 GiB" in str(error):
                        answer = b"refused\n"
                finally:
                    os.write(answer_writer, answer)
                os.read(stay_reader, 1)
            finally:
                os._exit(0)
        children.append(pid)
    for fd in (go_reader, stay_reader, answer_writer, go_writer):
        os.close(fd)
    text = b""
    while text.count(b"\n") < 32:
        part = os.read(answer_reader, 4096)
        assert part, f"a process died: {text!r}"
        text += part
    seen = leases.view(state)
    os.close(stay_writer)
    for pid in children:
        os.waitpid(pid, 0)
    os.close(answer_reader)
    assert (text.count(b"granted"), text.count(b"refused")) == (16, 16)
    assert sum(share.memory_limit_bytes or 0 for lease in seen.live for share in lease.shares) == 16 * GIB
    assert len(leases.view(state).dead) == 16  # their owners have exited


def test_killed_lock_owner_blocks_no_start(state: str) -> None:
    def take() -> None:
        leases.locked(state).__enter__()

    in_child(take)
    assert reserve(state, "c1").id == "c1"


# Damage


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"id": "c1"}', b"\xff\xfe", b"[" * 100_000, b"0" * 100_000],
    ids=["empty", "cut", "list", "null", "partial", "binary", "nested", "number"],
)
def test_damaged_lease_blocks_devices(state: str, content: bytes) -> None:
    reserve(state, "c1", GIB)
    lease_file(state, "c1").write_bytes(content)
    (damage,) = leases.view(state).damaged
    assert (damage.id, damage.uuids) == ("c1", None)
    for container_id in ("c1", "c2"):
        with pytest.raises(CapacityError, match="prune --assume-free"):
            reserve(state, container_id)
    leaseend.sweep(state)
    assert lease_file(state, "c1").exists()
    assert leaseend.sweep(state, assume_free=True) == ["c1"]
    assert reserve(state, "c1", 16 * GIB).id == "c1"


@pytest.mark.parametrize(
    "changes",
    [
        {"init_pid": "1"},
        {"created": None},
        {"shares": [1]},
        {"shares": [{}]},
        {"state": "free"},
        {"id": "c2"},
        {"more": 1},
        {"init_pid": True},
    ],
)
def test_lease_of_unknown_shape_is_damaged(state: str, changes: dict[str, object]) -> None:
    reserve(state, "c1")
    edit(state, "c1", **changes)
    assert [damage.id for damage in leases.view(state).damaged] == ["c1"]


@pytest.mark.parametrize(
    ("field", "number"),
    [(field, 10**400) for field in ("memory_limit_bytes", "granted_ns", "granted_byte_ns", "suspended_ns")]
    + [
        ("page", 128),
        ("page", -1),
        ("page", 1 << 31),
        ("compute_percent", 101),
        ("priority", -1),
        ("priority", 1 << 64),
    ],
)
def test_lease_with_a_number_out_of_range_is_damaged(state: str, field: str, number: int) -> None:
    """No number of it may grow the index of a device, or end `gpushare list` for all containers."""
    lease = reserve(state, "c1")
    edit(state, "c1", shares=[{**json.loads(lease_file(state, "c1").read_text())["shares"][0], field: number}])
    with pytest.raises(CapacityError, match="prune --assume-free"):
        reserve(state, "c2")
    index = Path(activity_files.directory(state, lease.shares[0].device.uuid), activity_files.INDEX)
    assert index.stat().st_size == shm_abi.packer("gs_peers").size


def test_damaged_lease_blocks_only_devices_of_its_limits(state: str) -> None:
    two = pure.node(2)
    lease = reserve(state, "c1", node=two)
    share = storage.make_share_dir(state, "c1", lease.shares)
    storage.execute(WriteLimits(lease.shares, f"{share}/limits"))
    lease_file(state, "c1").write_bytes(b"{")
    assert leases.view(state).blocked(two) == {pure.UUIDS[0]}
    assert reserve(state, "c2", 16 * GIB, two).shares[0].device.index == 1
    with pytest.raises(GpushareError):
        reserve(state, "c3", node=two, devices=2)


def test_files_without_lease_count_as_used(state: str) -> None:
    lease = reserve(state, "c1", GIB)
    share = storage.make_share_dir(state, "c1", lease.shares)
    storage.execute(WriteLimits(lease.shares, f"{share}/limits"))
    lease_file(state, "c1").unlink()
    (damage,) = leases.view(state).damaged
    assert damage == ("c1", "lease.json is missing", {pure.UUIDS[0]})
    with pytest.raises(CapacityError, match="prune --assume-free"):
        reserve(state, "c2")
    assert leaseend.sweep(state) == []


def test_link_in_place_of_lease_is_not_followed(state: str, tmp_path: Path) -> None:
    reserve(state, "c1")
    good = tmp_path / "lease.json"
    good.write_bytes(lease_file(state, "c1").read_bytes())
    lease_file(state, "c1").unlink()
    lease_file(state, "c1").symlink_to(good)
    assert [damage.id for damage in leases.view(state).damaged] == ["c1"]


def test_missing_state_directory_has_no_leases(tmp_path: Path) -> None:
    assert leases.view(str(tmp_path / "none")) == leases.View((), (), (), ())
    assert leaseend.release(str(tmp_path / "none"), "c1") == ""
