"""Parse the usage that a container reports: the usage file of shim/include/gpushare_abi.h.

The tenant owns the file and can write anything. For any bytes, `read_usage` returns bounded numbers or raises
RegionError, and nothing else. Not on the start path.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from typing import NamedTuple

from .shm_abi import (
    MAX_DEVICES,
    MAX_SHARES,
    MAX_SLOTS,
    SLOT_SIZE,
    USAGE_MAGIC,
    USAGE_SIZE,
    check,
    host_part,
    offset,
    packer,
)

RECENT_NS = 125_000_000  # GS_RECENT_NS: length of a window
RECENT = 10  # windows that a bucket stores
_LAST_SECOND = 8  # windows
SHARE_ANY = (1 << 64) - 1  # an id
SHARE_IMPORT = 1 << 30
SHARE_ORPHAN = 1 << 31
SHARE_SLOT = 0xFFFF
SHARES_LOST = 2
DOES_WAIT, DOES_MANAGE, DOES_EXCHANGE = 1 << 0, 1 << 1, 1 << 2  # enum gs_does
TID_MASK = 0x3FFFFFFF
OWNER_DIED = 0x40000000

# enum gs_warning: bit -> text
WARNINGS = (
    (1 << 0, "the driver has a newer function that allocates or launches: it is withheld, update gpushare"),
    (1 << 1, f"more than {MAX_SLOTS} processes: no slot left"),
    (1 << 2, "the driver shows a device that was not granted"),
    (1 << 3, "the driver has newer functions than this version of gpushare knows: they are not limited"),
)

# Computed once: `gpushare export` reads the usage files of all containers at each scrape
_USAGE, _SLOT, _BUCKET, _ACCOUNT = packer("gs_usage"), packer("gs_slot"), packer("gs_bucket"), packer("gs_account")
_SLOTS_AT, _BUCKETS_AT = offset("gs_usage", "slot"), offset("gs_usage", "bucket")
_ACCOUNTS_AT = offset("gs_usage", "account")
COUNTERS_SIZE = _SLOTS_AT  # bytes at the beginning, without the processes
_WORD, _WANTS_AT = struct.Struct("<Q"), offset("gs_slot", "wants")
_DOES_AT, _CALLED_AT, _ASKS_AT = (offset("gs_usage", name) for name in ("does", "called_ns", "asks"))
_DRIVER, _DRIVER_AT = struct.Struct("<12H"), offset("gs_slot", "driver_mib")


class Slot(NamedTuple):
    """One live process of a container. `pid` is what the process reports, and not trusted."""

    number: int
    pid: int
    started_ns: int  # CLOCK_MONOTONIC
    bytes: tuple[int, ...]  # per device of the container
    host: tuple[int, ...] = ()  # the same in host memory, of oversubscribed shares
    wants: tuple[int, int] = (0, 0)  # (device, bytes) that it waits for, see gpushare_abi.h
    driver_mib: tuple[int, ...] = ()  # of `bytes`: what the driver takes beyond allocations, of the first 12 devices
    does: int = 0  # enum gs_does


class Bucket(NamedTuple):
    """Compute of a container on one device in nanoseconds, as the container reports it."""

    waited_ns: int  # throttled, summed over its threads
    busy_ns: int  # device time charged
    recent: tuple[int, ...]  # of the last windows, see recent_percent


class Memory(NamedTuple):
    """Memory of a container on one device since its start, as the container reports it."""

    until_ns: int  # CLOCK_MONOTONIC; `byte_ns` is complete up to here; 0: it has used none
    byte_ns: int
    peak_bytes: int

    def since_ns(self, now_ns: int) -> int:
        """Return the time that `byte_ns` lacks."""
        return max(0, now_ns - self.until_ns) if self.until_ns else 0


class Usage(NamedTuple):
    """The usage that a container reports: for display only, never the basis of a grant."""

    nonce: int
    n_devices: int
    slots: tuple[Slot, ...]
    refused: tuple[int, ...]  # refused allocations, per device
    warnings: tuple[str, ...]
    buckets: tuple[Bucket, ...]  # per device
    # Per device: bytes that no live process holds: exported bytes that are open after their owner freed them or exited,
    # and those of dead processes whose forked children live
    orphans: tuple[int, ...] = ()
    memory: tuple[Memory, ...] = ()  # per device
    called_ns: int = 0  # CLOCK_MONOTONIC of its last call of the driver, to a second; 0: none
    asks: bool = False  # to be suspended until its next call

    @property
    def calls(self) -> bool:
        """Whether a process of this suspended container waits in a call."""
        return any(slot.wants[1] for slot in self.slots)

    def used_bytes(self, device: int) -> int:
        """Return the bytes of all live processes on one device slot."""
        orphans = self.orphans[device] if device < len(self.orphans) else 0
        return orphans + sum(slot.bytes[device] for slot in self.slots if device < len(slot.bytes))

    def host_bytes(self, device: int) -> int:
        """Return the same for the host part of an oversubscribed share."""
        return sum(slot.host[device] for slot in self.slots if device < len(slot.host))

    def driver_bytes(self, device: int) -> int:
        """Return the part of `used_bytes` that the driver takes for contexts, code, streams and graphs."""
        return sum(slot.driver_mib[device] << 20 for slot in self.slots if device < len(slot.driver_mib))

    def wanted_bytes(self, device: int) -> int:
        """Return what processes wait for that containers borrowed from this one's request; 0: none waits."""
        return sum(slot.wants[1] for slot in self.slots if slot.wants[0] == device)


def read_usage(
    data: bytes, n_devices: int = MAX_DEVICES, has_children: Callable[[int], bool] = lambda started_ns: False
) -> Usage:
    """Parse a usage file. `n_devices` is the number of granted devices; no more are read. `has_children`: of a process
    that has ended, as gs_has_children of region.c finds it.

    `slots_high` is ignored: a tenant could hide slots behind it. Raise RegionError for an invalid header.
    """
    check(data, "usage file", USAGE_MAGIC, USAGE_SIZE)
    fields = _USAGE.unpack(data)
    _, _, _, _, stated_devices, nonce, _, warnings = fields[:8]
    count = min(n_devices, stated_devices, MAX_DEVICES)
    slots = []
    generations: dict[int, int] = {}  # of live slots
    kept = [0] * count
    # The first field of each slot. Nearly all are 0; a loop over them would take half of a scrape
    words = memoryview(data)[_SLOTS_AT : _SLOTS_AT + MAX_SLOTS * SLOT_SIZE].cast("I")
    owners = words[:: SLOT_SIZE // 4].tolist()
    for index in itertools.compress(range(MAX_SLOTS), owners):
        owner = owners[index] & TID_MASK
        _, live, generation, pid, started_ns, *charged = _SLOT.unpack_from(data, _SLOTS_AT + index * SLOT_SIZE)
        if owner and live == owner:
            host = tuple(charged[host_part(device)] for device in range(count)) if count <= MAX_DEVICES // 2 else ()
            (wants,) = _WORD.unpack_from(data, _SLOTS_AT + index * SLOT_SIZE + _WANTS_AT)
            waits = (wants >> 56, wants & (1 << 56) - 1)
            driver = _DRIVER.unpack_from(data, _SLOTS_AT + index * SLOT_SIZE + _DRIVER_AT)[:count]
            does = data[_DOES_AT + index]
            slots.append(Slot(index, pid, started_ns, tuple(charged[:count]), host, waits, driver, does))
            generations[index] = generation
        elif any(charged[:count]) and not owner and has_children(started_ns):
            kept = [total + bytes_ for total, bytes_ in zip(kept, charged)]
    texts = tuple(text for bit, text in WARNINGS if warnings & bit)
    buckets = tuple(_bucket(data, index) for index in range(count))
    orphans = tuple(map(sum, zip(_orphans(data, generations, count), kept)))
    memory = tuple(_memory(data, index) for index in range(count))
    (called_ns,) = _WORD.unpack_from(data, _CALLED_AT)
    refused = tuple(fields[8 : 8 + count])
    asks = any(data[_ASKS_AT : _ASKS_AT + 4])
    return Usage(nonce, count, tuple(slots), refused, texts, buckets, orphans, memory, called_ns, asks)


def _orphans(data: bytes, generations: dict[int, int], count: int) -> tuple[int, ...]:
    """Return the exported memory whose owner freed it or exited while a live process has it open, as gs_export_orphans
    of exports.c counts it."""
    row = packer("gs_share")
    (used,) = struct.unpack_from("<Q", data, offset("gs_usage", "shares_used"))
    start = offset("gs_usage", "share")
    rows = [row.unpack_from(data, start + n * row.size) for n in range(MAX_SHARES)] if used else []

    def lives(owner: int) -> bool:
        return generations.get(owner & SHARE_SLOT) == owner >> 32

    def is_open(id_: int) -> bool:
        return bool(used & SHARES_LOST or id_ in opened or SHARE_ANY in opened or (opened and id_ == SHARE_ANY))

    opened = {id_ for id_, owner, _ in rows if id_ and owner & SHARE_IMPORT and lives(owner)}
    total = [0] * count
    for id_, owner, what in rows:
        is_orphan = owner and not owner & SHARE_IMPORT and (owner & SHARE_ORPHAN or not lives(owner))
        if id_ and is_orphan and what >> 56 < count and is_open(id_):
            total[what >> 56] += what & (1 << 56) - 1
    return tuple(total)


def _bucket(data: bytes, index: int) -> Bucket:
    _, _, _, waited, busy, *recent, _ = _BUCKET.unpack_from(data, _BUCKETS_AT + index * _BUCKET.size)
    return Bucket(waited, busy, tuple(recent))


def _memory(data: bytes, index: int) -> Memory:
    until_ns, held_gib_ns, peak_bytes = _ACCOUNT.unpack_from(data, _ACCOUNTS_AT + index * _ACCOUNT.size)
    return Memory(until_ns, held_gib_ns << 30, peak_bytes)


def recent_percent(bucket: Bucket, now_ns: int) -> float:
    """Return the percentage of the device's time over the last second, always 0 to 100. `now_ns` is CLOCK_MONOTONIC.
    Cell w % 10 belongs to window w = time / RECENT_NS if its upper 24 bits are those of w. The last eight complete
    windows count."""
    last = now_ns // RECENT_NS
    charged_ns = 0
    for window in range(max(0, last - _LAST_SECOND), last):
        cell = bucket.recent[window % RECENT]
        if cell >> 40 == window & 0xFFFFFF:
            charged_ns += cell & ((1 << 40) - 1)
    return min(100.0, 100 * charged_ns / (_LAST_SECOND * RECENT_NS))
