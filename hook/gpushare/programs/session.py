"""The one pipeline of a start (start path): resolve, reserve, probe the image, plan, carry out, hold; or nothing of it.

    resolve(bundle, load)         -> Start     None: the container asks for nothing
    give(start, way, then)                     with its effects; what fails, `then` included, undoes all of it
    place(start, way)             -> Placed    the same up to what is carried out, for a caller that keeps nothing
    preview(start, way)           -> Preview   without effects
    keep_refusal(...)                          what is left of a start that was refused

The programs hook, runtime and run differ in the bundle that they bring and in their Way, which carries the plan out.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Optional, Union

from ..core.errors import KernelError
from ..core.model import Bundle, Lease, Node, Request
from ..state import audit_log, log
from . import deadline

if TYPE_CHECKING:
    from ..core.ops import Plan
    from ..system import inroot, procs
    from .why import Reason


class Start(NamedTuple):
    """A container that asks for something."""

    bundle: Bundle
    asked: Request
    host: Node


class Placed(NamedTuple):
    """`lease` None: driver files alone, which hold no part of a device."""

    lease: Optional[Lease]
    plan: Plan


class Preview(NamedTuple):
    """What a start would get now; `placed` and `held`: why these devices, and who holds limits."""

    plan: Plan
    placed: tuple[Reason, ...]
    held: tuple[str, ...]


class Way:
    """How a plan reaches a container: one object for one start. `taken`: what it took out of config.json."""

    name = ""  # in the audit log
    taken: Sequence[str] = ()

    def image(self, start: Start, lease: Optional[Lease]) -> AbstractContextManager[Union[inroot.Root, str]]:
        """The container's root, to be looked at."""
        raise NotImplementedError

    def needed(self, steps: Plan) -> Plan:
        return steps

    def look(self, steps: Plan) -> None:
        """Raises what carrying out would, where that can be known without effects. The image is open."""

    def carry_out(self, start: Start, placed: Placed) -> bool:
        """False: it was carried out before, by the same hook in another stage. The image is open."""
        raise NotImplementedError

    def holder(self) -> Optional[procs.Process]:
        """The process that the lease is for; None: it is not there yet, and the adopt hook will say."""
        return None

    def undo(self) -> None:
        """Takes back what was carried out, as far as it went."""


def load(config: str, state_dir: str) -> Node:
    """The node, where a start may write: the state directory is there afterwards."""
    from ..config import node
    from ..state import storage

    storage.prepare(state_dir)
    return node.load_node(config, state_dir)


def resolve(
    bundle: Bundle, load: Callable[[], Node], with_injected: bool = False, on_host: bool = False
) -> Optional[Start]:
    """`load` is called for a container that has words of ours; see request.resolve for the others. Raises
    RequestError, PolicyError, DeviceError, KernelError."""
    from ..request import request

    if not on_host and not request.mentions(bundle):
        return None
    host = load()
    asked = request.resolve(bundle, host, with_injected=with_injected, on_host=on_host)
    return Start(bundle, asked, host) if asked is not None else None


def give(start: Start, way: Way, then: Callable[[], object]) -> None:
    """Raises GpushareError, leaving nothing. `then` is the last that can fail; it may become another program."""
    from ..state import leases
    from ..system import procs

    state_dir = start.host.config.state_dir
    sink = audit_log.open_sink(start.host.config.log)  # while the host's files are there
    try:
        placed = place(start, way)
        if placed is None:
            return
        init = way.holder()
        if placed.lease is not None and init is not None:
            leases.hold(state_dir, placed.lease, init, procs.cgroup_of(init.pid))
        _tell(sink, way, start.asked, placed)
        then()
    except BaseException:
        deadline.ignore_signals()
        deadline.undo(state_dir, start.bundle.id, way.undo)
        raise


def place(start: Start, way: Way) -> Optional[Placed]:
    """None: it was carried out before. The caller undoes what fails here."""
    from ..allocation import reservation
    from ..state import storage

    bundle, asked, host = start
    lease: Optional[Lease] = None
    if asked.selection.kind != "none":
        state_dir = host.config.state_dir
        lease = reservation.reserve(state_dir, bundle, asked, host, audit_log.ending(host.config.log, "start"))
        storage.empty_trash(state_dir)
        storage.make_share_dir(state_dir, bundle.id, lease.shares)
    return _planned(start, way, lease, lambda placed: way.carry_out(start, placed))


def _planned(
    start: Start, way: Way, lease: Optional[Lease], use: Callable[[Placed], Optional[bool]]
) -> Optional[Placed]:
    """The plan, used while the image is open; None when `use` gives False."""
    from ..gpu import driverfiles
    from ..inject import plan, rootfs
    from ..system import inroot

    bundle, asked, host = start
    files = driverfiles.for_request(host.inventory, asked, lease.shares if lease else ())
    with inroot.budget(), way.image(start, lease) as root:
        image = rootfs.probe(root, bundle.env)
        placed = Placed(lease, way.needed(plan.make_plan(bundle, asked, host, lease, image, files)))
        return None if use(placed) is False else placed


def preview(start: Start, way: Way) -> Preview:
    """A lease of this bundle that runs does not stand in its way. Raises what a start would."""
    import time

    from ..allocation import limit_update, placement
    from ..request import policy
    from ..state import leases
    from ..system import procs
    from . import why

    bundle, asked, host = start
    lease: Optional[Lease] = None
    reasons: tuple[tuple[Reason, ...], tuple[str, ...]] = ((), ())
    if asked.selection.kind != "none":
        state_dir = host.config.state_dir
        seen = leases.view(state_dir)
        live = limit_update.settled(state_dir, seen.live, keep=False)
        others = tuple(one for one in live if one.bundle != bundle.path)
        policy.refuse_second(asked, bundle, others)
        ledger = placement.ledger_of(others, host.config.policy, seen.blocked(host))
        shares = placement.grant(asked, host, ledger)
        lease = Lease(bundle.id, "reserved", procs.boot_id(), bundle.path, shares, 0, 0, created=time.time())
        reasons = why.placed(asked, host, ledger, shares), why.held(asked, host, ledger, shares)
    placed = _planned(start, way, lease, lambda placed: way.look(placed.plan))
    assert placed is not None
    taken = tuple(f"taken out of config.json: {line}" for line in way.taken)
    return Preview(placed.plan._replace(notes=(*placed.plan.notes, *taken)), *reasons)


# What is left of it for people


def _tell(sink: audit_log.Sink, way: Way, asked: Request, placed: Placed) -> None:
    """What the container got, and each thing that is not as its words say."""
    from ..inject import plan

    lease, steps = placed
    shares = lease.shares if lease else ()
    clamped = [f"slot {share.slot}: {share.clamped}" for share in shares if share.clamped]
    said = steps.notes[len(plan.request_notes(asked, shares)) :]
    audit_log.granted(
        sink,
        steps.container_id,
        lease,
        asked,
        way.name,
        *audit_log.details("clamped", clamped),
        *audit_log.details("notes", said),
        *audit_log.details("taken_out", way.taken),
    )


def keep_refusal(config: str, state_dir: str, container_id: str, way: str, line: str, error: BaseException) -> None:
    """The line for `inspect`, unless the state directory is what hangs; and one that says that it was refused."""
    from ..state import storage

    try:
        deadline.give_up_later()
        storage.prepare(state_dir)
        log.record(state_dir, container_id, line, error)
    except (KernelError, deadline.Interrupted):
        pass
    try:
        deadline.give_up_later()
        if way:
            from ..config import node

            audit_log.refused(node.log_target(config, state_dir), container_id, way, error)
    except deadline.Interrupted:
        pass
    finally:
        signal.alarm(0)
