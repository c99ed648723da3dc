"""The shared files have the same layout in Python and C, and hostile bytes from a tenant are harmless to the host."""

from __future__ import annotations

import os
import random
import struct
from typing import Any

import pytest
from gpushare.core.model import Device, Share
from gpushare.state import shm_abi, usage_reader

UUID = "GPU-00112233-4455-6677-8899-aabbccddeeff"


def device(index: int = 0, **changes: Any) -> Device:
    uuid = UUID[:-2] + f"{index:02x}"
    return Device(index, uuid, index, f"0000:0{index}:00.0", "Test GPU", 16 << 30, 300 << 20)._replace(**changes)


def with_rows(*rows: tuple[int, int, int], used: int = 1) -> usage_reader.Usage:
    """A usage file of two devices with these rows and two processes in slots 0 and 1, both of generation 5."""
    data = bytearray(shm_abi.pack_usage(1, 2))
    for slot in range(2):
        at = shm_abi.offset("gs_usage", "slot") + slot * shm_abi.SLOT_SIZE
        charged = (10 << 20, 0, *[0] * (shm_abi.MAX_DEVICES - 2))
        data[at : at + shm_abi.SLOT_SIZE] = shm_abi.packer("gs_slot").pack(7 + slot, 7 + slot, 5, 1, 1, *charged)
    for number, row in enumerate(rows):
        size = shm_abi.packer("gs_share").size
        at = shm_abi.offset("gs_usage", "share") + number * size
        data[at : at + size] = shm_abi.packer("gs_share").pack(*row)
    at = shm_abi.offset("gs_usage", "shares_used")
    data[at : at + 8] = used.to_bytes(8, "little")
    return usage_reader.read_usage(bytes(data), 2)


def test_freed_memory_with_importers_counts_as_used() -> None:
    bytes_ = 1 << 56 | 64 << 20  # of device 1
    exported, freed, dead = 0 | 5 << 32, 0 | 5 << 32 | usage_reader.SHARE_ORPHAN, 0 | 4 << 32
    opened, closed = 1 | 5 << 32 | usage_reader.SHARE_IMPORT, 1 | 4 << 32 | usage_reader.SHARE_IMPORT
    for owner, opener, used, counted in (
        (exported, opened, 1, 0),  # charged to its process
        (freed, opened, 1, 64 << 20),
        (dead, opened, 1, 64 << 20),
        (freed, closed, 1, 0),
        (freed, closed, usage_reader.SHARES_LOST, 64 << 20),
        (freed, opened, 0, 0),
    ):
        usage = with_rows((9, owner, bytes_), (9, opener, 0), used=used)
        assert (usage.used_bytes(0), usage.used_bytes(1)) == (20 << 20, counted), (owner, opener)
    assert with_rows((9, freed, 7 << 56 | 1), (9, opened, 0)).orphans == (0, 0)  # of a device that was not granted


def test_unordered_slots_are_refused() -> None:
    with pytest.raises(shm_abi.RegionError, match=r"slots \[0, 2\]"):
        shm_abi.pack_limits((Share(0, device(0), 1), Share(2, device(1), 1)), 1)
    with pytest.raises(shm_abi.RegionError, match="at most 16"):
        shm_abi.pack_limits(tuple(Share(i, device(i), 1) for i in range(17)), 1)
    with pytest.raises(shm_abi.RegionError, match="GPU-nonsense"):
        shm_abi.pack_limits((Share(0, device(0, uuid="GPU-nonsense"), 1),), 1)


def usage_with(slots: dict[int, tuple[int, int, int, tuple[int, ...]]], n_devices: int = 2) -> bytearray:
    """A usage file with (owner, live, pid, bytes) in the given slots."""
    data = bytearray(shm_abi.pack_usage(99, n_devices))
    for index, (owner, live, pid, charged) in slots.items():
        at = shm_abi.offset("gs_usage", "slot") + index * shm_abi.SLOT_SIZE
        charged = charged + (0,) * (shm_abi.MAX_DEVICES - len(charged))
        data[at : at + shm_abi.SLOT_SIZE] = shm_abi.packer("gs_slot").pack(owner, live, 1, pid, 5, *charged)
    return data


def test_only_live_slots_count() -> None:
    waiters = 0x80000000  # FUTEX_WAITERS is not part of the identity
    data = usage_with(
        {
            0: (100, 100, 7, (10, 1)),
            1: (usage_reader.OWNER_DIED, 100, 8, (1 << 40,)),  # the kernel found the owner dead
            2: (101, 0, 9, (1 << 40,)),  # taken, bytes not zeroed yet
            3: (0, 0, 9, (1 << 40,)),  # released
            1023: (102 | waiters, 102, 10, (5, 2)),  # above slots_high, which is not trusted
        }
    )
    usage = usage_reader.read_usage(bytes(data))
    assert [(slot.number, slot.pid, slot.bytes) for slot in usage.slots] == [(0, 7, (10, 1)), (1023, 10, (5, 2))]
    assert (usage.used_bytes(0), usage.used_bytes(1), usage.nonce) == (15, 3, 99)


def test_refusals_and_warnings_are_named() -> None:
    data = usage_with({})
    struct.pack_into("<I", data, shm_abi.offset("gs_usage", "warnings"), 0b1110)
    struct.pack_into("<QQ", data, shm_abi.offset("gs_usage", "refused"), 3, 4)
    usage = usage_reader.read_usage(bytes(data))
    assert usage.refused == (3, 4)
    assert [text for _, text in usage_reader.WARNINGS[1:]] == list(usage.warnings)


def with_bucket(data: bytearray, device: int, *recent: int, waited_ns: int = 0, busy_ns: int = 0) -> bytearray:
    bucket = shm_abi.packer("gs_bucket")
    at = shm_abi.offset("gs_usage", "bucket") + device * bucket.size
    cells = (*recent, *(0,) * (usage_reader.RECENT - len(recent)))
    data[at : at + bucket.size] = bucket.pack(1, 2, 3, waited_ns, busy_ns, *cells, 4)
    return data


def recent_of(windows: dict[int, int]) -> list[int]:
    """Cells as the shim writes them: {window: nanoseconds charged in it}."""
    cells = [0] * usage_reader.RECENT
    for window, charged_ns in windows.items():
        cells[window % usage_reader.RECENT] = ((window << 40) | charged_ns) & ((1 << 64) - 1)
    return cells


def percent(windows: dict[int, int], now_ns: int) -> float:
    data = with_bucket(usage_with({}), 1, *recent_of(windows), waited_ns=77, busy_ns=88)
    nothing, bucket = usage_reader.read_usage(bytes(data)).buckets[:2]
    assert (bucket.waited_ns, bucket.busy_ns) == (77, 88)
    assert (nothing.waited_ns, nothing.busy_ns, usage_reader.recent_percent(nothing, now_ns)) == (0, 0, 0.0)
    return usage_reader.recent_percent(bucket, now_ns)


@pytest.mark.parametrize("first", [1, 4_000, (1 << 24) - 4, 1 << 24, (1 << 30) + 5])  # 24 days of windows, and more
def test_last_second_is_eight_complete_windows(first: int) -> None:
    third = usage_reader.RECENT_NS // 4
    now = (first + 9) * usage_reader.RECENT_NS + 1  # window first + 9 has begun
    windows = {window: third for window in range(first, first + 10)}
    assert percent(windows, now) == 25.0
    assert percent({first + 9: third, first: third}, now) == 0.0  # incomplete or too old
    assert percent({first + 1: third}, now) == percent({first + 8: third}, now) == 25.0 / 8
    assert percent(windows, now + 4 * usage_reader.RECENT_NS) == 25.0 * 5 / 8  # idle since then
    assert percent(windows, now + 1000 * usage_reader.RECENT_NS) == 0.0
    assert percent({first + 8: 1 << 39}, now) == 100.0  # a long kernel is charged at its end
    assert percent({}, 0) == 0.0


def test_device_count_is_bounded_by_grant() -> None:
    data = usage_with({0: (1, 1, 1, (5, 6, 7))}, n_devices=2)
    struct.pack_into("<I", data, shm_abi.offset("gs_usage", "n_devices"), 0xFFFFFFFF)
    assert usage_reader.read_usage(bytes(data), n_devices=1).slots[0].bytes == (5,)
    assert usage_reader.read_usage(bytes(data)).n_devices == shm_abi.MAX_DEVICES


@pytest.mark.parametrize("size", [0, 1, 4095, shm_abi.USAGE_SIZE - 1, shm_abi.USAGE_SIZE + 1])
def test_file_of_wrong_size_is_damaged(size: int) -> None:
    with pytest.raises(shm_abi.RegionError, match=f"damaged: {size} bytes"):
        usage_reader.read_usage((shm_abi.pack_usage(1, 1) + b"x")[:size].ljust(size, b"\0"))


def test_file_of_other_version_is_not_damaged() -> None:
    for data, read in (
        (shm_abi.pack_usage(1, 1), usage_reader.read_usage),
        (b"\0" * shm_abi.LIMITS_SIZE, shm_abi.read_limits),
    ):
        magic = data[:8] if read is usage_reader.read_usage else struct.pack("<Q", shm_abi.LIMITS_MAGIC)
        with pytest.raises(
            shm_abi.RegionError, match=f"is of version 9, and this gpushare uses version {shm_abi.ABI_VERSION}; use"
        ):
            read(magic + struct.pack("<I", 9) + data[12:])


def test_noise_raises_only_damaged() -> None:
    rng = random.Random(20240611)
    header = shm_abi.pack_usage(1, 1)[:16]
    for _ in range(40):
        noise = rng.randbytes(shm_abi.USAGE_SIZE)
        with pytest.raises(shm_abi.RegionError, match="damaged"):
            usage_reader.read_usage(noise)
        usage = usage_reader.read_usage(header + noise[16:])  # a valid header before noise
        assert usage.n_devices <= shm_abi.MAX_DEVICES
        assert all(0 <= used < 1 << 64 for slot in usage.slots for used in slot.bytes)
        assert len(usage.buckets) == usage.n_devices
        for bucket in usage.buckets:
            cells = {(cell >> 40) * usage_reader.RECENT_NS + 1 for cell in bucket.recent}
            assert all(0.0 <= usage_reader.recent_percent(bucket, now) <= 100.0 for now in (0, (1 << 63) - 1, *cells))
        with pytest.raises(shm_abi.RegionError, match="damaged"):
            shm_abi.read_limits(os.urandom(shm_abi.LIMITS_SIZE))
