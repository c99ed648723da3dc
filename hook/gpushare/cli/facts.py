"""The state of each container, from its lease and its usage file. The container can write its usage file, so numbers in
it are capped by what the device and the container's age allow."""

from __future__ import annotations

import os
import time
from typing import Callable, NamedTuple, Optional

from ..config import node
from ..core import constants
from ..core.errors import GpushareError, RequestError
from ..core.model import Device, Inventory, Lease, Node, Share
from ..core.quantity import human
from ..core.quoting import shown
from ..gpu import contexts
from ..state import accounts, leases, log, shm_abi, storage, unlimited, usage_reader
from ..state.names import Name, Names
from ..system import procs, rootless
from .options import Paths

_OWN_ONLY = "without root you see only your own shares, not the shares of root and of other users"
LESS_FREE = ", so less may be free than this shows"
NONE = "no container has a share of a GPU"
GONE = ("dead", "ended")  # states of containers whose share is free; ended: a program of `gpushare run` has exited
_STATES = {"reserved": "starting", "held": "running"}
ALIVE = ("running", "paused", constants.SUSPENDING, constants.SUSPENDED, constants.RESUMING)  # states with processes


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
    borrowed_bytes: int = 0  # the part of used_bytes above the share's request
    driver_bytes: int = 0  # the part of used_bytes that the driver takes for contexts, code, streams and graphs

    @property
    def limit_bytes(self) -> int:
        """The share's memory limit; for an unlimited share the size of the device (0: not known)."""
        limit = self.share.ceiling_bytes
        return self.share.device.memory_bytes if limit is None else limit


class Container(NamedTuple):
    """One entry of the state directory."""

    id: str
    state: str  # starting | running | paused | suspending | suspended | resuming | ended | dead | damaged
    note: str  # why it is ended, dead or damaged, and warnings from its usage file
    lease: Optional[Lease]
    uses: tuple[Use, ...]
    slots: tuple[usage_reader.Slot, ...]
    name: Name = Name()


def _container(state_dir: str, lease: Lease, state: str, note: str, names: Names) -> Container:
    slots: tuple[usage_reader.Slot, ...] = ()
    notes = [note] if note else []
    usage = None
    if state in ALIVE:
        try:
            usage = storage.read_usage(state_dir, lease.id, len(lease.shares))
        except shm_abi.RegionError as error:
            notes.append(str(error))
    notes += [share.clamp_note for share in lease.shares if share.clamped]
    uses = []
    books = accounts.accounts(lease, usage, accounts.now_ns())
    for share in lease.shares:
        used = usage.used_bytes(share.slot) if usage else 0
        beyond = min(usage.host_bytes(share.slot), share.virtual_bytes) if usage else 0
        request = share.memory_limit_bytes or 0
        on_host, lent = (0, beyond) if share.lending else (beyond, 0)
        used += lent
        if not share.counts:
            on_host, used = on_host + share.suspended_bytes, 0
        borrowed = max(lent, used - request, 0) if share.lending else 0
        limit = share.ceiling_bytes
        most = share.device.memory_bytes or used
        if used > most:
            notes.append(f"the usage file reports {used} bytes of device {share.device.index}, which has {most}")
        driver = min(usage.driver_bytes(share.slot) if usage else 0, used, most)
        refused_here = usage.refused[share.slot] if usage and share.slot < len(usage.refused) else 0
        if limit is not None and limit < min(used, most):
            notes.append(
                f"slot {share.slot}: over its limit by {human(min(used, most) - limit)}, "
                f"new allocations fail until it is below{_of_it(driver, min(used, most))}"
            )
        elif limit is not None and refused_here and max(driver, share.device.context_bytes) > limit // 2:
            takes = human(driver) if driver else f"about {human(share.device.context_bytes)}"
            notes.append(
                f"slot {share.slot}: memory was refused, and the driver itself takes {takes} of {human(limit)} for "
                "contexts, code and streams (PyTorch needs about 0.7 GiB before its first tensor, in each process): "
                "request more memory or run fewer processes"
            )
        account = books[share.slot]
        compute = _compute(usage, share.slot, account)
        uses.append(Use(share, min(used, most), refused_here, compute, on_host, account, min(borrowed, most), driver))
    if usage:
        slots = usage.slots
        notes.extend(usage.warnings)
    return Container(lease.id, state, "; ".join(notes), lease, tuple(uses), slots, names.of(lease))


def _of_it(driver_bytes: int, used_bytes: int) -> str:
    if not driver_bytes:
        return ""
    return f"; of {human(used_bytes)} in use, {human(driver_bytes)} are the driver's contexts, code, streams and graphs"


def _compute(usage: Optional[usage_reader.Usage], slot: int, account: accounts.Account) -> Optional[Compute]:
    """The container's compute usage. None if the usage file has no numbers for the slot."""
    if usage is None or account.used_ns is None or account.throttled_ns is None:
        return None
    recent = usage_reader.recent_percent(usage.buckets[slot], time.monotonic_ns())
    return Compute(recent, account.used_ns, account.throttled_ns)


def _state(lease: Lease) -> str:
    if lease.state != "held":
        return _STATES[lease.state]
    phase = next((share.phase for share in lease.shares), "")
    return phase or ("paused" if any(share.paused for share in lease.shares) else _STATES[lease.state])


def with_unlimited(found: list[Container]) -> list[Container]:
    """Add notes about processes that use a GPU without gpushare's library."""
    leases_of = [one.lease for one in found if one.lease is not None and one.state in ALIVE]
    notes: dict[str, list[str]] = {}
    for process in unlimited.find(leases_of):
        notes.setdefault(process.id, []).append(process.text)
    return [
        one._replace(note="; ".join([*([one.note] if one.note else []), *notes[one.id]])) if one.id in notes else one
        for one in found
    ]


def containers(state_dir: str, only: str = "") -> list[Container]:
    """All containers, the oldest first and damaged ones last. With `only`: just the container with this id, if any."""
    return containers_of(state_dir, leases.view(state_dir), only)


def containers_of(state_dir: str, seen: leases.View, only: str = "", names: Optional[Names] = None) -> list[Container]:
    """Like `containers`, for leases that the caller has read already."""
    names = names or Names()
    found = [_container(state_dir, lease, _state(lease), "", names) for lease in seen.live if only in ("", lease.id)]
    found += [
        _container(state_dir, lease, GONE[leases.ends(lease)], reason, names)
        for lease, reason in seen.dead
        if only in ("", lease.id)
    ]
    found.sort(key=lambda one: (one.lease.created if one.lease else 0.0, one.id))
    damaged = [one for one in seen.damaged if only in ("", one.id)]
    return found + [
        Container(damage.id, "damaged", damage.reason, None, (), (), names.of_id(damage.id)) for damage in damaged
    ]


def one(state_dir: str, container_id: str) -> Optional[Container]:
    """The container with this id; None if it has no lease, as after a refused start."""
    return next(iter(containers(state_dir, container_id)), None)


class Known(NamedTuple):
    """The ids and names of containers with a lease, and the ids of refused starts."""

    leased: dict[str, Name]
    refused: tuple[str, ...]


def known(state_dir: str) -> Known:
    """All containers that commands accept."""
    seen, names = leases.view(state_dir), Names()
    leased = {lease.id: names.of(lease) for lease in (*seen.live, *(lease for lease, _ in seen.dead))}
    leased.update((damage.id, names.of_id(damage.id)) for damage in seen.damaged)
    return Known(dict(sorted(leased.items())), tuple(one for one in log.known(state_dir) if one not in leased))


def find(state_dir: str, text: str) -> str:
    """The id of the container that `text` means: a full id, else a name, else the start of an id. Containers with a
    share come before refused starts, which can be many. Raises RequestError, which lists the candidates."""
    everything = known(state_dir)
    if text in everything.leased or text in everything.refused:
        return text
    names = Names()
    matching = _matching(everything.leased, text)
    matching = matching or _matching({one: names.of_id(one) for one in everything.refused}, text)
    if len(matching) > 1:
        raise _ambiguous(text, matching)
    if matching:
        return next(iter(matching))
    hint = _OWN_ONLY if rootless.is_rootless() else "`gpushare list` shows containers with a share, by id and name"
    raise RequestError(f"no container {shown(text)}{_close(everything.leased, text)}", hint)


def _close(leased: dict[str, Name], text: str) -> str:
    """`, did you mean "serve"` for the most similar id or name of a container; "" if none is similar."""
    from difflib import get_close_matches

    ids = {constants.short(one): constants.short(one) for one in leased}
    words = {**ids, **{word: name.shown for name in leased.values() for word in name.words()}}
    close = get_close_matches(text, words, 1, 0.7)
    return f", did you mean {shown(words[close[0]])}" if close else ""


def running(state_dir: str, text: str) -> str:
    """Like `find`, for a command that needs a container with a share. Raises RequestError, which names the
    reason if the start was refused."""
    container_id = find(state_dir, text)
    refusal = log.read(state_dir, container_id)
    if refusal and leases.judged(state_dir, container_id) is None:
        raise RequestError(f"the start of container {shown(text)} was refused: {refusal}", "start it again")
    return container_id


def _matching(group: dict[str, Name], text: str) -> dict[str, Name]:
    """The containers that `text` can mean: those with this id as `gpushare list` shows it, else with this whole name,
    else with a part of it, else with an id that starts so. A user who chooses a name cannot take another's id."""
    tests: tuple[Callable[[str], bool], ...] = (
        lambda one: constants.short(one) == text,
        lambda one: group[one].shown == text,
        lambda one: group[one].matches(text),
        lambda one: one.startswith(text),
    )
    found = ({one: group[one] for one in group if test(one)} for test in tests if text)
    return next(filter(None, found), {})


def _ambiguous(text: str, matching: dict[str, Name]) -> RequestError:
    ids = list(matching)
    first = constants.short(ids[0])
    candidates = (
        (one if constants.short(one) == first and one != ids[0] else constants.short(one), matching[one].shown)
        for one in ids[:8]
    )
    listed = ", ".join(f"{one} ({name})" if name else one for one, name in candidates)
    more = f" and {len(ids) - 8} more" if len(ids) > 8 else ""
    what = "ID prefix" if all(one.startswith(text) for one in ids) else "name"
    hint = "type more characters" if what == "ID prefix" else "give an ID, or more of the name"
    return RequestError(f"{what} {shown(text)} is ambiguous ({len(ids)} matches): {listed}{more}", hint)


def none() -> str:
    """The message for a terminal when there is no container to show."""
    return "you have no share of a GPU; root sees the shares of all users" if rootless.is_rootless() else NONE


def warn_of_hidden_shares(result: str = "") -> None:
    """For an ordinary user, write a line on standard error about what the table does not have. `result`: what follows
    from that."""
    if rootless.is_rootless():
        log.to_stderr(f"gpushare: {_OWN_ONLY}{result}")


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
        progress.say("querying the driver")
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
