"""The state of each container, from its lease and its usage file. The container can write its usage file, so numbers in
it are capped by what the device and the container's age allow."""

from __future__ import annotations

import os
import time
from typing import NamedTuple, Optional

from ..config import node
from ..core import constants
from ..core.errors import GpushareError, RequestError
from ..core.model import Device, Inventory, Lease, Node, Share
from ..core.quantity import human
from ..core.quoting import shown
from ..gpu import contexts
from ..state import accounts, leases, log, shm_abi, storage, usage_reader
from ..system import procs, rootless
from .options import Paths

NONE = "no container has a share of a GPU"
GONE = ("dead", "ended")  # states of containers whose share is free; ended: a program of `gpushare run` has exited
_STATES = {"reserved": "starting", "held": "running"}


class Compute(NamedTuple):
    """The device time that a container reports for one device."""

    recent_percent: float  # over the last second
    busy_ns: int
    waited_ns: int  # time that its compute limit held threads back, summed over threads


class Use(NamedTuple):
    """One share and the usage of it that the container reports."""

    share: Share
    used_bytes: int
    refused: int  # allocations refused since the start
    compute: Optional[Compute] = None  # None: the usage file cannot be read
    host_bytes: int = 0  # memory of an oversubscribed share that is on the host
    account: Optional[accounts.Account] = None  # None: its lease is damaged

    @property
    def limit_bytes(self) -> int:
        """The share's memory limit; for an unlimited share the size of the device (0: not known)."""
        limit = self.share.memory_limit_bytes
        return self.share.device.memory_bytes if limit is None else limit


class Container(NamedTuple):
    """One entry of the state directory."""

    id: str
    state: str  # starting | running | paused | ended | dead | damaged
    note: str  # why it is ended, dead or damaged, and warnings from its usage file
    lease: Optional[Lease]
    uses: tuple[Use, ...]
    slots: tuple[usage_reader.Slot, ...]


def _container(state_dir: str, lease: Lease, state: str, note: str) -> Container:
    slots: tuple[usage_reader.Slot, ...] = ()
    notes = [note] if note else []
    usage = None
    if state in ("running", "paused"):
        try:
            usage = storage.read_usage(state_dir, lease.id, len(lease.shares))
        except shm_abi.RegionError as error:
            notes.append(str(error))
    notes += [share.clamp_note for share in lease.shares if share.clamped]
    uses = []
    books = accounts.accounts(lease, usage, accounts.now_ns())
    for share in lease.shares:
        used = usage.used_bytes(share.slot) if usage else 0
        most = share.device.memory_bytes or used
        if used > most:
            notes.append(f"the usage page claims {used} bytes of device {share.device.index}, which has {most}")
        if share.memory_limit_bytes is not None and share.memory_limit_bytes < min(used, most):
            notes.append(
                f"slot {share.slot}: over its limit by {human(min(used, most) - share.memory_limit_bytes)}, "
                "new allocations fail until it is below"
            )
        refused_here = usage.refused[share.slot] if usage and share.slot < len(usage.refused) else 0
        on_host = min(usage.host_bytes(share.slot), share.virtual_bytes) if usage else 0
        compute = _compute(usage, share.slot, books[share.slot])
        uses.append(Use(share, min(used, most), refused_here, compute, on_host, books[share.slot]))
    if usage:
        slots = usage.slots
        notes.extend(usage.warnings)
    return Container(lease.id, state, "; ".join(notes), lease, tuple(uses), slots)


def _compute(usage: Optional[usage_reader.Usage], slot: int, account: accounts.Account) -> Optional[Compute]:
    """The container's compute usage. None if the usage file has no numbers for the slot."""
    if usage is None or account.used_ns is None or account.throttled_ns is None:
        return None
    recent = usage_reader.recent_percent(usage.buckets[slot], time.monotonic_ns())
    return Compute(recent, account.used_ns, account.throttled_ns)


def _state(lease: Lease) -> str:
    paused = lease.state == "held" and any(share.paused for share in lease.shares)
    return "paused" if paused else _STATES[lease.state]


def containers(state_dir: str, only: str = "") -> list[Container]:
    """All containers, the oldest first and damaged ones last. With `only`: just the container with this id, if any."""
    return containers_of(state_dir, leases.view(state_dir), only)


def containers_of(state_dir: str, seen: leases.View, only: str = "") -> list[Container]:
    """Like `containers`, for leases that the caller has read already."""
    found = [_container(state_dir, lease, _state(lease), "") for lease in seen.live if only in ("", lease.id)]
    found += [
        _container(state_dir, lease, GONE[leases.ends(lease)], reason)
        for lease, reason in seen.dead
        if only in ("", lease.id)
    ]
    found.sort(key=lambda one: (one.lease.created if one.lease else 0.0, one.id))
    damaged = [one for one in seen.damaged if only in ("", one.id)]
    return found + [Container(damage.id, "damaged", damage.reason, None, (), ()) for damage in damaged]


def one(state_dir: str, container_id: str) -> Optional[Container]:
    """The container with this id; None if it has no lease, as after a refused start."""
    return next(iter(containers(state_dir, container_id)), None)


def known(state_dir: str) -> list[str]:
    """Ids of all containers with a lease or a stored refusal."""
    seen = leases.view(state_dir)
    leased = {lease.id for lease in (*seen.live, *(lease for lease, _ in seen.dead))}
    return sorted(leased | {damage.id for damage in seen.damaged} | set(log.known(state_dir)))


def find(state_dir: str, text: str) -> str:
    """The id that is `text`, or the only id that starts with it. Raises RequestError, which lists the candidates."""
    everything = known(state_dir)
    if text in everything:
        return text
    matching = [name for name in everything if name.startswith(text)] if text else []
    if len(matching) == 1:
        return matching[0]
    if not matching:
        hint = "`gpushare list` shows containers with a share, by id and not by docker's name"
        raise RequestError(f"no container {shown(text)}", hint)
    candidates = ", ".join(
        constants.short(name) if constants.short(name) != constants.short(matching[0]) else name
        for name in matching[:8]
    )
    raise RequestError(
        f"ID prefix {shown(text)} is ambiguous ({len(matching)} matches): {candidates}", "type more characters"
    )


def none() -> str:
    """The message for a terminal when there is no container to show."""
    return "you have no share of a GPU; root sees the shares of all users" if rootless.is_rootless() else NONE


def context_source(device: Device, inventory: Inventory) -> str:
    """How the size of a context on this device is known."""
    return "measured" if contexts.is_measured(device, inventory) else "estimated"


def host(paths: Paths) -> Node:
    """The node as the next container would find it. Writes no file."""
    fresh = node.read_node(paths.config, paths.state_dir) if os.path.isdir(paths.state_dir) else None
    if fresh is not None:
        return fresh
    from .output import Progress

    with Progress() as progress:
        progress.say("asking the driver")
        return node.compile_node(paths.config, paths.state_dir, write=False)


def processes(one: Container) -> list[tuple[usage_reader.Slot, Optional[int]]]:
    """The container's process slots, each with its pid on this host or None if that cannot be found."""
    if one.lease is None or not one.slots:
        return []
    try:
        pids = procs.pids_by_container_pid(one.lease.cgroup)
    except (OSError, GpushareError):
        pids = {}
    return [(slot, pids.get(slot.pid)) for slot in one.slots]
