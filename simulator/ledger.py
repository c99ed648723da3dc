"""Read what a simulated device holds: the ground truth for tests of limits.

    ledger.py DEVICE [--format table|json] [--reset-peaks]

Reads the device file (dev/nvidia<N> of a simulated host root) without taking the device's lock. A client is alive
while its process holds the record lock on its byte. Do not use this class in a process that runs the simulated driver
on the same file: closing the file would drop that process's locks. Run it as a command from such a program.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import struct
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

if __package__:
    from . import layout, models
else:
    import layout  # type: ignore[no-redef]
    import models  # type: ignore[no-redef]

FLOCK = struct.Struct("hhqqi4x")
RETRIES = 2000


class Client(NamedTuple):
    """One process on the device (more exactly: one loaded driver)."""

    index: int  # type: ignore[assignment]  # deliberately hides tuple.index
    pid: int  # in its own pid namespace
    host_pid: int  # in this reader's pid namespace; 0 when dead or not visible
    pidns: int
    mntns: int
    alive: bool
    bytes: int  # physical, including context overhead
    peak_bytes: int
    contexts: int
    generation: int
    allocations: int
    busy_ns: int  # device time held: work, switches to this client, spinning kernels
    work_ns: int
    switch_ns: int
    programmatic: int  # launches that may overlap with the preceding kernel
    parted: int  # of those, launches prevented from overlapping by an event in between
    managed_bytes: int  # part of `bytes`: managed memory, which other processes may evict
    unlisted_bytes: int  # part of `bytes`: what else NVML lists for no process


class Group(NamedTuple):
    """All clients of one pid namespace. `current_bytes` counts live clients; the times include dead ones."""

    pidns: int
    current_bytes: int
    peak_bytes: int
    refused: int
    busy_ns: int = 0
    work_ns: int = 0
    switch_ns: int = 0


class History(NamedTuple):
    """Device time that one pid namespace held, in bins of 10 ms. It covers the last ten seconds."""

    until_ns: int  # the device was simulated up to this time (CLOCK_MONOTONIC)
    busy_ns: dict[int, int]  # key: start of the bin / 10 ms; a missing bin is 0

    def shares(self, start_ns: int, end_ns: int, window_ns: int) -> list[float]:
        """Return the share of the device in each whole window (a multiple of 10 ms) from start to end.

        ValueError: the history does not cover that time.
        """
        first, last, width = -(-start_ns // layout.BIN_NS), end_ns // layout.BIN_NS, window_ns // layout.BIN_NS
        if last * layout.BIN_NS > self.until_ns:
            raise ValueError(f"the history ends at {self.until_ns}, before {end_ns}")
        if self.until_ns // layout.BIN_NS - first >= layout.BINS:
            raise ValueError(f"{start_ns} is before the start of the history")
        windows = range(first, last - width + 1, width)
        return [sum(self.busy_ns.get(n, 0) for n in range(w, w + width)) / (width * layout.BIN_NS) for w in windows]


class Snapshot(NamedTuple):
    """One consistent copy of the whole ledger."""

    total_bytes: int
    context_bytes: int
    used_bytes: int  # held by live clients
    unreturned_bytes: int  # of dead clients, still counted by the device; it stays if no client is left to reap it
    deaths: int
    busy_ns: int
    clients: tuple[Client, ...]
    groups: tuple[Group, ...]


class Ledger:
    """Read-only view of one device file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        head = os.pread(self._fd, layout.CONFIG.size, 0)
        config = layout.CONFIG.unpack(head.ljust(layout.CONFIG.size, b"\0"))
        if config[:3] != (layout.MAGIC, layout.VERSION, layout.STATE_BYTES):
            os.close(self._fd)
            raise ValueError(f"{path}: not a simulated device of version {layout.VERSION}; rebuild it with simhost.py")
        self.total_bytes: int = config[5]
        self.context_bytes: int = config[6]
        self.costs = models.Costs(*config[layout.COSTS_FIRST :])

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _host_pid(self, index: int) -> int:
        """Return the pid that holds the client's lock; -1 when none does, 0 when the process is not visible."""
        query = FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, layout.LIFE_OFFSET + index, 1, 0)
        kind, _, _, _, pid = FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_GETLK, query))
        return -1 if kind == fcntl.F_UNLCK else int(pid)

    def _copy(
        self, size: int = layout.CLIENTS_OFFSET + layout.MAX_CLIENTS * layout.CLIENT.size, offset: int = 0
    ) -> bytes:
        """Return a part of the file, consistent unless a writer hangs for longer than RETRIES."""
        data = b""
        for _ in range(RETRIES):
            before = os.pread(self._fd, 8, layout.COUNTERS_OFFSET)
            data = os.pread(self._fd, size, offset)
            if not before[0] & 1 and before == os.pread(self._fd, 8, layout.COUNTERS_OFFSET):
                break
            time.sleep(0)
        return data

    def snapshot(self) -> Snapshot:
        data = self._copy()
        counters = layout.COUNTERS.unpack_from(data, layout.COUNTERS_OFFSET)
        clients = []
        current: dict[int, int] = {}
        for index in range(counters[6]):
            row = layout.CLIENT.unpack_from(data, layout.CLIENTS_OFFSET + index * layout.CLIENT.size)
            if layout.STATES[row[0]] == "free":
                continue
            holder = self._host_pid(index)
            alive = layout.STATES[row[0]] == "live" and holder >= 0
            clients.append(
                Client(
                    *(index, row[1], max(holder, 0), row[2], row[3], alive, row[6], row[10], row[8], row[4]),
                    *(*row[11:18], row[19]),
                )
            )
            if alive:
                current[row[9]] = current.get(row[9], 0) + row[6]
        groups = []
        for index in range(layout.MAX_GROUPS):
            row = layout.GROUP.unpack_from(data, layout.GROUPS_OFFSET + index * layout.GROUP.size)
            if row[0]:
                groups.append(Group(row[0], current.get(index, 0), *row[2:4], *row[5:]))
        used = sum(current.values())
        return Snapshot(
            *(self.total_bytes, self.context_bytes, used, counters[1] - used, counters[4], counters[9]),
            *(tuple(clients), tuple(groups)),
        )

    def history(self, pidns: int) -> History:
        """Return what a pid namespace held in the last ten seconds. KeyError: it never was a client."""
        rows = layout.BINS * layout.BIN.size
        data = self._copy()
        until_ns = layout.COUNTERS.unpack_from(data, layout.COUNTERS_OFFSET)[8]
        oldest = until_ns // layout.BIN_NS - layout.BINS
        for index in range(layout.MAX_GROUPS):
            if layout.GROUP.unpack_from(data, layout.GROUPS_OFFSET + index * layout.GROUP.size)[0] != pidns:
                continue
            bins = self._copy(rows, layout.HISTORY_OFFSET + index * rows)
            return History(until_ns, {n: busy for n, busy, _ in layout.BIN.iter_unpack(bins) if n > oldest})
        raise KeyError(pidns)

    @property
    def used_bytes(self) -> int:
        """Return the bytes that live clients hold. `snapshot().unreturned_bytes` is the memory of dead ones."""
        return self.snapshot().used_bytes

    def clients(self) -> tuple[Client, ...]:
        return self.snapshot().clients

    def groups(self) -> tuple[Group, ...]:
        return self.snapshot().groups

    def reset_peaks(self) -> None:
        """Set every group's peak to 0; the next charge sets it again. Call while no client is allocating."""
        fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for index in range(layout.MAX_GROUPS):
                os.pwrite(fd, bytes(8), layout.GROUPS_OFFSET + index * layout.GROUP.size + 16)
        finally:
            os.close(fd)


def as_json(snapshot: Snapshot) -> str:
    value = snapshot._asdict()
    value["clients"] = [c._asdict() for c in snapshot.clients]
    value["groups"] = [g._asdict() for g in snapshot.groups]
    return json.dumps(value, indent=2)


def as_table(snapshot: Snapshot) -> str:
    lines = [f"used {snapshot.used_bytes >> 20} of {snapshot.total_bytes >> 20} MiB"]
    lines.append(f"{'PID':>8} {'HOST PID':>8} {'ALIVE':>5} {'MIB':>8} {'CONTEXTS':>8}  PID NAMESPACE")
    for c in snapshot.clients:
        alive = "yes" if c.alive else "no"
        lines.append(f"{c.pid:>8} {c.host_pid:>8} {alive:>5} {c.bytes >> 20:>8} {c.contexts:>8}  {c.pidns}")
    for g in snapshot.groups:
        held = f"{g.busy_ns / 1e6:.0f} ms of the device ({g.switch_ns / 1e6:.0f} of them switches)"
        lines.append(f"namespace {g.pidns}: {g.current_bytes >> 20} MiB now, {g.peak_bytes >> 20} MiB at most, {held}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="What a simulated device holds, per client and container.")
    parser.add_argument("device", help="the device file, <host root>/dev/nvidia<N>")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--reset-peaks", action="store_true", help="forget the peaks after printing them")
    options = parser.parse_args(arguments)
    try:
        with Ledger(options.device) as ledger:
            print((as_json if options.format == "json" else as_table)(ledger.snapshot()))
            if options.reset_peaks:
                ledger.reset_peaks()
    except (OSError, ValueError) as error:
        print(f"ledger.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
