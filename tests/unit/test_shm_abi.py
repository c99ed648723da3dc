"""The shared files have the same layout in Python and C, and hostile bytes from a tenant are harmless to the host."""

from __future__ import annotations

import os
import random
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from gpushare.core.model import Device, Share
from gpushare.state import shm_abi, usage_reader

HEADER = Path(__file__).resolve().parents[2] / "shim" / "include" / "gpushare_abi.h"
UUID = "GPU-00112233-4455-6677-8899-aabbccddeeff"
CONSTANTS = {
    "GS_ABI_VERSION": shm_abi.ABI_VERSION,
    "GS_LIMITS_MAGIC": shm_abi.LIMITS_MAGIC,
    "GS_USAGE_MAGIC": shm_abi.USAGE_MAGIC,
    "GS_PAGES_MAGIC": shm_abi.PAGES_MAGIC,
    "GS_PEERS_MAGIC": shm_abi.PEERS_MAGIC,
    "GS_MAX_DEVICES": shm_abi.MAX_DEVICES,
    "GS_MAX_PAGES": shm_abi.MAX_PAGES,
    "GS_MAX_PEERS": shm_abi.MAX_PEERS,
    "GS_MAX_SLOTS": shm_abi.MAX_SLOTS,
    "GS_UNLIMITED": shm_abi.UNLIMITED,
    "GS_NO_PERCENT": shm_abi.NO_PERCENT,
    "GS_RECENT": usage_reader.RECENT,
    "GS_RECENT_NS": usage_reader.RECENT_NS,
    "GS_MAX_SHARES": shm_abi.MAX_SHARES,
    "GS_SHARE_ANY": usage_reader.SHARE_ANY,
    "GS_SHARE_IMPORT": usage_reader.SHARE_IMPORT,
    "GS_SHARE_ORPHAN": usage_reader.SHARE_ORPHAN,
    "GS_SHARE_SLOT": usage_reader.SHARE_SLOT,
    "GS_SHARES_LOST": usage_reader.SHARES_LOST,
    "GS_TID_MASK": usage_reader.TID_MASK,
    "GS_OWNER_DIED": usage_reader.OWNER_DIED,
    "GS_DEVICE_COMPUTE_SOFT": shm_abi.DEVICE_COMPUTE_SOFT,
    "GS_DEVICE_OVERSUBSCRIBE": shm_abi.DEVICE_OVERSUBSCRIBE,
    "GS_DEVICE_PAUSED": shm_abi.DEVICE_PAUSED,
    "GS_WARN_UNKNOWN_PROC": usage_reader.WARNINGS[0][0],
    "GS_WARN_NO_SLOT": usage_reader.WARNINGS[1][0],
    "GS_WARN_UNGRANTED": usage_reader.WARNINGS[2][0],
    "GS_WARN_PASSED_PROC": usage_reader.WARNINGS[3][0],
}


def device(index: int = 0, **changes: Any) -> Device:
    uuid = UUID[:-2] + f"{index:02x}"
    return Device(index, uuid, index, f"0000:0{index}:00.0", "Test GPU", 16 << 30, 300 << 20)._replace(**changes)


def c_fields() -> dict[str, list[str]]:
    """Field names of each struct, parsed from the header, so that a new field cannot be missed."""
    fields: dict[str, list[str]] = {}
    current = None
    for line in HEADER.read_text().splitlines():
        words = line.strip().split()
        if line.startswith("struct ") and line.endswith("{"):
            current = words[1]
            fields[current] = []
        elif line.startswith("}"):
            current = None
        elif current and words and words[0] != "/*":
            declared = line.split(";")[0].split("[")[0].split()
            fields[current].append(declared[-1])
    return fields


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """The C compiler's values of every offsetof, sizeof and constant."""
    folder = tmp_path_factory.mktemp("abi")
    lines = []
    for struct_name, fields in c_fields().items():
        lines.append(f'P("sizeof {struct_name}", sizeof(struct {struct_name}));')
        lines += [f'P("{struct_name}.{f}", offsetof(struct {struct_name}, {f}));' for f in fields]
    lines += [f'P("{name}", {name});' for name in CONSTANTS]
    source = folder / "abi.c"
    source.write_text(
        '#include <stdio.h>\n#include "gpushare_abi.h"\n'
        '#define P(n, v) printf("%s=%llu\\n", n, (unsigned long long)(v))\n'
        "int main(void) {\n" + "\n".join(lines) + "\nreturn 0; }\n"
    )
    program = folder / "abi"
    subprocess.run(["gcc", "-std=c11", f"-I{HEADER.parent}", "-o", program, source], check=True)
    output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in (line.split("=") for line in output.splitlines())}


def test_python_and_c_agree_on_layout(compiled: dict[str, int]) -> None:
    ours: dict[str, int] = dict(CONSTANTS)
    for name, fields in shm_abi.LAYOUTS.items():
        ours[f"sizeof {name}"] = shm_abi.packer(name).size
        for field, _ in fields:
            ours[f"{name}.{field}"] = shm_abi.offset(name, field)
    assert ours == compiled


def test_c_reads_limits_written_by_python(tmp_path: Path) -> None:
    """Values, not only offsets: C reads every field of two different devices."""
    shares = (
        Share(0, device(0), 4 << 30, 30, soft=True, priority=1),
        Share(1, device(1, memory_bytes=8 << 30), 2 << 30, None, virtual_bytes=8 << 30),
    )
    data = shm_abi.pack_limits(shares, nonce=0x1122334455667788, generation=7)
    (tmp_path / "limits").write_bytes(data)
    (tmp_path / "read.c").write_text(
        """
        #include <stdio.h>
        #include <string.h>
        #include "gpushare_abi.h"
        int main(int c, char **v) {
            static struct gs_limits l; FILE *f = fopen(v[1], "rb");
            if (c != 2 || !f || fread(&l, sizeof l, 1, f) != 1 || fgetc(f) != EOF) return 1;
            printf("%llx %u %llx %llu\\n", (unsigned long long)l.magic, l.n_devices,
                   (unsigned long long)l.nonce, (unsigned long long)l.generation);
            for (unsigned i = 0; i < l.n_devices; i++) { struct gs_device_limit *d = &l.device[i];
                printf("%02x%02x %s %llu %llu %llu %llu %llu %u %u %u %u\\n", d->uuid[0], d->uuid[15], d->uuid_text,
                (unsigned long long)d->memory_limit_bytes, (unsigned long long)d->memory_total_bytes,
                (unsigned long long)d->context_bytes, (unsigned long long)d->granularity_bytes,
                (unsigned long long)d->memory_virtual_bytes, d->compute_percent, d->priority, d->weight, d->flags);
            }
            return 0;
        }"""
    )
    subprocess.run(["gcc", "-std=c11", f"-I{HEADER.parent}", "-o", tmp_path / "read", tmp_path / "read.c"], check=True)
    output = subprocess.run([tmp_path / "read", tmp_path / "limits"], check=True, capture_output=True, text=True)
    assert output.stdout.splitlines() == [
        f"{shm_abi.LIMITS_MAGIC:x} 2 1122334455667788 7",
        f"0000 {UUID[:-2]}00 {4 << 30} {16 << 30} {300 << 20} {2 << 20} 0 30 1 0 1",
        f"0001 {UUID[:-2]}01 {2 << 30} {8 << 30} {300 << 20} {2 << 20} {8 << 30} 100 0 0 2",
    ]
    back = shm_abi.read_limits(data)
    assert (back.nonce, back.generation) == (0x1122334455667788, 7)
    assert [(d.memory_limit_bytes, d.virtual_bytes) for d in back.devices] == [(4 << 30, 0), (2 << 30, 8 << 30)]
    assert [d.compute_percent for d in back.devices] == [30, None]


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


def test_file_without_second_copy_uses_first() -> None:
    """Such a file was never changed: its first copy is in force."""
    data = bytearray(shm_abi.pack_limits((Share(0, device(0), 4 << 30, 30),), nonce=1))
    at = shm_abi.offset("gs_limits", "device") + shm_abi.offset("gs_device_limit", "turn_mib")
    data[at : at + 44] = bytes(44)
    (limit,) = shm_abi.read_limits(bytes(data)).devices
    assert (limit.memory_limit_bytes, limit.compute_percent) == (4 << 30, 30)


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
