"""Sum what containers were granted and used in a period, from the usage journal and the leases of running containers.

    collect(config, state_dir, since_s, by) -> Report

A container's entries are points of its account in time. Its use in the period is the account at the end of the period
minus the account at the beginning; between two points the account grows evenly. Within one boot all times are those of
CLOCK_BOOTTIME, so a change of the host's clock does not change durations. The last entry of a boot converts its times
to unix time, because by then the clock was most likely right."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Optional

from ..core.model import Config, Lease
from ..state import accounts, journal, leases, shm_abi, storage
from ..state.accounts import Account
from ..state.journal import Entry
from ..system import procs

USER, NAMESPACE, IMAGE = "user", "namespace", "image"
BY: dict[str, Callable[[Entry], str]] = {
    USER: lambda entry: "" if entry.uid < 0 else str(entry.uid),
    NAMESPACE: lambda entry: entry.namespace,
    IMAGE: lambda entry: entry.image,
}


class Total(NamedTuple):
    """The sum of accounts. None in one of them counts as 0."""

    granted_ns: int = 0
    granted_byte_ns: int = 0
    used_ns: int = 0
    used_byte_ns: int = 0
    refused: int = 0
    throttled_ns: int = 0
    suspended_ns: int = 0


class Group(NamedTuple):
    """All containers of one user, namespace or image. `name`: a uid for users; "" if it is not known."""

    name: str
    containers: int
    running: int
    unreported: int  # ended, at a time that was not reported
    unmeasured: int  # at least one of their shares has no known use
    peak_bytes: int  # of one share
    total: Total


class Report(NamedTuple):
    """`first_s`: the oldest entry, unix seconds; None without one. `unreadable`: lines of the journal."""

    since_s: float
    until_s: float
    groups: tuple[Group, ...]
    path: str
    first_s: Optional[float]
    unreadable: int


class _Point(NamedTuple):
    at_ns: int
    total: Total


class _Life(NamedTuple):
    """One container, from its first to its last point."""

    last: Entry
    points: tuple[_Point, ...]
    running: bool
    unreported: bool


def collect(config: Config, state_dir: str, since_s: float, by: str) -> Report:
    """Return the sums since `since_s`, unix seconds. Raise OSError if the journal cannot be read, and the errors of
    leases.view."""
    path = journal.path_of(config)
    found, unreadable = journal.entries(path) if path else ([], 0)
    until_s = time.time()
    running = _running(state_dir)
    offsets = {entry.boot: entry.time_s - entry.up_ns / 1e9 for entry in found}
    offsets[procs.boot_id()] = until_s - accounts.now_ns() / 1e9
    groups: dict[str, list[tuple[_Life, Total]]] = {}
    for life in _lives(found, running):
        from_ns = int((since_s - offsets[life.last.boot]) * 1e9)
        if life.points[-1].at_ns >= from_ns or life.running:
            used = _difference(life.points[-1].total, _at(life.points, from_ns))
            groups.setdefault(BY[by](life.last), []).append((life, used))
    first = min((entry.time_s for entry in found), default=None)
    rows = (_group(name, members) for name, members in groups.items())
    ordered = sorted(rows, key=lambda one: (-one.total.granted_ns, -one.total.granted_byte_ns, one.name))
    return Report(since_s, until_s, tuple(ordered), path, first, unreadable)


def _running(state_dir: str) -> list[Entry]:
    """Return the accounts of running containers up to now."""
    found = []
    for lease in leases.view(state_dir).live if storage.is_ready(state_dir) else ():
        usage = None
        try:
            usage = storage.read_usage(state_dir, lease.id, len(lease.shares))
        except shm_abi.RegionError:
            pass
        found.append(_of_lease(lease, accounts.accounts(lease, usage, accounts.now_ns()), accounts.now_ns()))
    return found


def _of_lease(lease: Lease, books: tuple[Account, ...], now: int) -> Entry:
    held = tuple(
        journal.Held(
            share.device.uuid,
            accounts.held_bytes(share),
            shm_abi.NO_PERCENT if share.compute_percent is None else share.compute_percent,
            account,
        )
        for share, account in zip(lease.shares, books)
    )
    began = accounts.began_ns(lease)
    whose = (lease.uid, lease.namespace, lease.pod, lease.container, lease.image)
    return Entry(journal.SO_FAR, time.time(), lease.boot_id, now, lease.id, began, now, True, *whose, "", held)


def _lives(found: Iterable[Entry], running: Iterable[Entry]) -> list[_Life]:
    of: dict[tuple[str, str, int], list[Entry]] = {}
    sighted: dict[str, int] = {}  # boot -> last start of any container; a start finds dead containers
    for entry in found:
        of.setdefault((entry.boot, entry.id, entry.began_ns), []).append(entry)
        if entry.what == journal.START:
            sighted[entry.boot] = max(sighted.get(entry.boot, 0), entry.began_ns)
    live = {(entry.boot, entry.id, entry.began_ns): entry for entry in running}
    lives = []
    for key in {**of, **live}:
        known = of.get(key, [])
        if key in live:
            last = live[key]
            lives.append(_Life(last, _points([*known, last]), True, False))
            continue
        end = next((entry for entry in reversed(known) if entry.what == journal.END), None)
        if end is not None:
            lives.append(_Life(end, _points([*(one for one in known if one is not end), end]), False, not end.known))
            continue
        last = _extended(known[-1], sighted.get(key[0], 0))
        lives.append(_Life(last, _points([*known, last]), False, True))
    return lives


def _extended(entry: Entry, until_ns: int) -> Entry:
    """Extend the last entry of a container whose end no entry reports: add what it was granted until the last start of
    any container. If it had been dead then, that start would have reported its end."""
    took = max(0, until_ns - entry.end_ns)
    held = tuple(
        one._replace(
            account=one.account._replace(
                granted_ns=one.account.granted_ns + took * one.compute_percent // shm_abi.NO_PERCENT,
                granted_byte_ns=one.account.granted_byte_ns + took * one.memory_bytes,
            )
        )
        for one in entry.shares
    )
    return entry._replace(end_ns=entry.end_ns + took, shares=held)


def _points(known: list[Entry]) -> tuple[_Point, ...]:
    """Return the points in order of time, from the start on; values never decrease."""
    points = [_Point(known[0].began_ns, Total())]
    for entry in sorted(known, key=lambda one: one.end_ns):
        total = Total(*(max(pair) for pair in zip(points[-1].total, _total(entry))))
        points.append(_Point(max(points[-1].at_ns, entry.end_ns), total))
    return tuple(points)


def _total(entry: Entry) -> Total:
    return Total(*(sum(getattr(one.account, name) or 0 for one in entry.shares) for name in Total._fields))


def _at(points: tuple[_Point, ...], at_ns: int) -> Total:
    """Return the account at a time."""
    if at_ns <= points[0].at_ns:
        return Total()
    before = max((point for point in points if point.at_ns <= at_ns), key=lambda point: point.at_ns)
    after = next((point for point in points if point.at_ns > at_ns), None)
    if after is None:
        return points[-1].total
    passed, whole = at_ns - before.at_ns, after.at_ns - before.at_ns
    return Total(*(low + (high - low) * passed // whole for low, high in zip(before.total, after.total)))


def _difference(later: Total, earlier: Total) -> Total:
    return Total(*(max(0, one - other) for one, other in zip(later, earlier)))


def _group(name: str, members: list[tuple[_Life, Total]]) -> Group:
    shares = [one.account for life, _ in members for one in life.last.shares]
    return Group(
        name,
        len(members),
        sum(life.running for life, _ in members),
        sum(life.unreported for life, _ in members),
        sum(any(one.account.used_byte_ns is None for one in life.last.shares) for life, _ in members),
        max((one.peak_bytes or 0 for one in shares), default=0),
        Total(*(sum(values) for values in zip(*(total for _, total in members)))),
    )
