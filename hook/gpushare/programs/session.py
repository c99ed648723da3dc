"""The pipeline of a start (start path): resolve, reserve, probe the image, plan, carry out, hold; or undo all of it.

    resolve(bundle, load)         -> Start     None: the container requests nothing
    give(start, way, then)                     run the whole pipeline; any failure, of `then` too, undoes it
    place(start, way)             -> Placed    the pipeline for a caller that undoes it itself
    preview(start, way)           -> Preview   without effects
    keep_refusal(...)                          store why a start was refused

The programs hook, runtime and run differ in the bundle that they bring and in their Way, which carries the plan out.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Optional, Union

from ..allocation import limit_update, placement, quotas, reservation
from ..config import node
from ..core import constants
from ..core.errors import KernelError
from ..core.model import Bundle, Lease, Node, Request
from ..core.ops import Plan
from ..gpu import driverfiles
from ..inject import plan, rootfs
from ..request import lending, oci, policy
from ..request import request as requests
from ..state import audit_log, journal, leases, log, storage
from ..system import inroot, procs
from . import deadline, system_variables, why
from .why import Reason


class Start(NamedTuple):
    """A container with a request."""

    bundle: Bundle
    request: Request
    host: Node


class Placed(NamedTuple):
    """`lease` None: driver files only, without a device."""

    lease: Optional[Lease]
    plan: Plan


class Preview(NamedTuple):
    """The result of a start if it happened now. `placed`: reasons for these devices; `held`: for these backends."""

    plan: Plan
    placed: tuple[Reason, ...]
    held: tuple[str, ...]


class Way:
    """How a plan is carried out: one object for each start. `taken`: what was removed from config.json; `warnings`:
    what the container may lose later."""

    name = ""  # in the audit log
    taken: Sequence[str] = ()
    warnings: Sequence[str] = ()

    def image(self, start: Start, lease: Optional[Lease]) -> "AbstractContextManager[Union[inroot.Root, str]]":
        """Return the container's root, for probing."""
        raise NotImplementedError

    def needed(self, steps: Plan) -> Plan:
        return steps

    def check(self, steps: Plan) -> None:
        """Raise the errors of `carry_out` that can be known without effects. The image is open."""

    def carry_out(self, start: Start, placed: Placed) -> bool:
        """Carry out the plan. Return False if the same hook did so in an earlier stage. The image is open."""
        raise NotImplementedError

    def holder(self) -> Optional[procs.Process]:
        """Return the process that gets the lease; None: it does not exist yet, and the adopt hook sets it."""
        return None

    def undo(self) -> None:
        """Undo what was carried out so far."""


def load(config: str, state_dir: str) -> Node:
    """Return the node for a start that may write, and create the state directory."""
    storage.prepare(state_dir)
    return node.load_node(config, state_dir)


def resolve(
    bundle: Bundle, load: Callable[[], Node], with_injected: bool = False, on_host: bool = False
) -> Optional[Start]:
    """Return the Start of a container; `load` is called only if it has a variable or annotation of gpushare's. Raise
    RequestError, PolicyError, DeviceError or KernelError."""
    if not on_host and not requests.mentions(bundle):
        return None
    host = load()
    if any(name.startswith(constants.OF_PLUGINS) for name, _ in bundle.env) and bundle.container_type != "sandbox":
        system_variables.require(bundle, host.config)
    request = requests.resolve(bundle, host, with_injected=with_injected, on_host=on_host)
    return Start(bundle, request, host) if request is not None else None


def give(start: Start, way: Way, then: Callable[[], object]) -> None:
    """Run the pipeline. Raise GpushareError; then nothing is left. `then` runs last and may become another program."""
    state_dir = start.host.config.state_dir
    sink = audit_log.open_sink(start.host.config.log)  # before the host's files are out of reach
    book = journal.opened(start.host.config)
    begun: Optional[Lease] = None
    try:
        placed = place(start, way)
        if placed is None:
            return
        init = way.holder()
        if placed.lease is not None and init is not None:
            leases.hold(state_dir, placed.lease, init, procs.cgroup_of(init.pid))
        _log_grant(sink, way, start, placed)
        if placed.lease is not None:
            begun = placed.lease
            journal.started(book, begun)
        then()
    except BaseException:
        deadline.ignore_signals()
        if begun is not None:
            journal.undone(book, begun)
        deadline.undo(state_dir, start.bundle.id, way.undo)
        raise
    finally:
        if book >= 0:
            os.close(book)


def place(start: Start, way: Way) -> Optional[Placed]:
    """Place and carry out; None: an earlier stage did so. The caller undoes a failure."""
    bundle, request, host = start
    lease: Optional[Lease] = None
    if request.selection.kind != "none":
        state_dir = host.config.state_dir
        lease = reservation.reserve(state_dir, bundle, request, host, journal.ending(host.config, state_dir, "start"))
        storage.empty_trash(state_dir)
        storage.make_share_dir(state_dir, bundle.id, lease.shares)
    return _planned(start, way, lease, lambda placed: way.carry_out(start, placed))


def _planned(
    start: Start, way: Way, lease: Optional[Lease], use: Callable[[Placed], Optional[bool]]
) -> Optional[Placed]:
    """Make the plan and `use` it while the image is open; None if `use` returns False."""
    bundle, request, host = start
    files = driverfiles.for_request(host.inventory, request, lease.shares if lease else ())
    with inroot.budget(), way.image(start, lease) as root:
        image = rootfs.probe(root, bundle.env)
        placed = Placed(lease, way.needed(plan.make_plan(bundle, request, host, lease, image, files)))
        return None if use(placed) is False else placed


def preview(start: Start, way: Way) -> Preview:
    """Return what a start would get, without effects. A live lease of this bundle is ignored. Raise like a start."""
    bundle, request, host = start
    lease: Optional[Lease] = None
    reasons: tuple[tuple[Reason, ...], tuple[str, ...]] = ((), ())
    if request.selection.kind != "none":
        state_dir = host.config.state_dir
        seen = leases.view(state_dir)
        live = limit_update.settled(state_dir, seen.live, keep=False)
        others = tuple(one for one in live if one.bundle != bundle.path)
        policy.refuse_second(request, bundle, others)
        ledger = placement.ledger_of(others, host.config.policy, seen.blocked(host))
        shares = placement.grant(request, host, ledger)
        if host.config.policy.quotas:
            quotas.require(request.uid, oci.pod_namespace(bundle.annotations), shares, others, host.config.policy)
        lease = Lease(bundle.id, "reserved", procs.boot_id(), bundle.path, shares, 0, 0, created=time.time())
        reasons = why.placed(request, host, ledger, shares), why.held(request, host, ledger, shares)
    placed = _planned(start, way, lease, lambda placed: way.check(placed.plan))
    assert placed is not None
    taken = tuple(f"taken out of config.json: {line}" for line in way.taken)
    return Preview(placed.plan._replace(notes=(*placed.plan.notes, *taken)), *reasons)


# Messages and the audit log


def _log_grant(sink: audit_log.Sink, way: Way, start: Start, placed: Placed) -> None:
    """Log what the container got, and everything that differs from its request."""
    lease, steps = placed
    request, config = start.request, start.host.config
    shares = lease.shares if lease else ()
    clamped = [f"slot {share.slot}: {share.clamped}" for share in shares if share.clamped]
    said = steps.notes[len(plan.request_notes(request, shares)) :]
    audit_log.granted(
        sink,
        steps.container_id,
        lease,
        request,
        way.name,
        *audit_log.details("clamped", clamped),
        *audit_log.details("notes", (*lending.notes(request, config), *said, *way.warnings)),
        *audit_log.details("taken_out", way.taken),
    )


def keep_refusal(config: str, state_dir: str, container_id: str, way: str, line: str, error: BaseException) -> None:
    """Store the line for `inspect`, unless the state directory hangs, and log the refusal. Without memory for that, as
    with a container's RLIMIT_AS under crun, the caller's line is all."""
    try:
        deadline.give_up_later()
        storage.prepare(state_dir)
        log.record(state_dir, container_id, line, error)
    except (KernelError, deadline.Interrupted, MemoryError):
        pass
    try:
        deadline.give_up_later()
        if way:
            audit_log.refused(node.log_target(config, state_dir), container_id, way, error)
    except (deadline.Interrupted, MemoryError):
        pass
    finally:
        signal.alarm(0)
