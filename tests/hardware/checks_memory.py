"""Check memory limits by what the driver's own NVML, without the shim, reports of the device."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

from gpushare.gpu.contexts import estimated_bytes

from tests.hardware.processes import Inside
from tests.hardware.processes import ask as run_tenant
from tests.hardware.session import Result, Session, size, verdict

MIB = 1 << 20
GIB = 1 << 30
OUT_OF_MEMORY = 2
BLOCK = 2 * MIB
# what a process cannot allocate of a full share: the rest of the context's estimate and of the last block
SLACK = 4 * MIB
POOL_SLACK = 64 * MIB  # a pool grows in steps, and the last one may not fit
MOST_SHARE = 4  # a limit is at most a quarter of the free memory, so managed memory never fills the device


def limit_of(session: Session) -> int:
    """Return a limit to test with, in whole blocks."""
    most = 1 * GIB if session.short else 4 * GIB
    free = session.machine.total_bytes - session.idle_at_start_bytes
    return min(most, free // MOST_SHARE) // BLOCK * BLOCK


def context(session: Session) -> Result:
    """Measure the device memory that a context uses."""
    before = session.idle_bytes()
    with session.tenant("context") as tenant:
        tenant.receive()
        initialised = session.used_bytes()
        tenant.go()
        tenant.receive()
        first = session.used_bytes() - before
        listed = session.process_bytes(tenant.process.pid)
        with session.tenant("context") as other:
            other.receive()
            alone = session.used_bytes()
            other.go()
            other.receive()
            another = session.used_bytes() - alone
        tenant.go()
        second = tenant.receive()["second_bytes"]
    machine = session.machine
    values = {
        "first_bytes": first,
        "second_bytes": second,
        "other_process_bytes": another,
        "init_bytes": initialised - before,
        "process_bytes": listed,
        "estimate_bytes": estimated_bytes(machine.model, machine.arch, machine.multiprocessors),
    }
    note = f"the first takes {size(first)}, a second in the same process {size(second)}, "
    note += f"one in another process {size(another)}; "
    note += f"NVML lists the process with {'nothing' if listed is None else size(listed)}"
    return Result("measured", note, values)


def fill(session: Session, way: str) -> Result:
    """Fill a share from one process."""
    limit = limit_of(session)
    with session.place(limit) as place:
        return fill_in(session, place, way, limit)


class Counting(Inside, Protocol):
    """A Place or a container that knows how many allocations were refused."""

    def refused(self) -> int: ...


def fill_in(session: Session, place: Counting, way: str, limit: int) -> Result:
    """Fill a place, or a container, whose limit is known."""
    before = session.idle_bytes()
    with session.tenant("fill", place, way=way, most_bytes=limit + limit // 4) as tenant:
        seen = tenant.receive()
        tenant.go()
        seen.update(tenant.receive())
        taken = session.used_bytes() - before
    refused = place.refused()
    wrong = []
    if seen["total_bytes"] != limit:
        wrong.append(f"cuMemGetInfo shows {size(seen['total_bytes'])}, not the limit of {size(limit)}")
    if seen["got_bytes"] > limit:
        wrong.append(f"got {size(seen['got_bytes'])} of a limit of {size(limit)}")
    if seen["code"] != OUT_OF_MEMORY:
        wrong.append(f"was refused with {seen['code']}, not OUT_OF_MEMORY")
    if taken > limit and way != "managed":
        wrong.append(f"the device counts {size(taken)}, {size(taken - limit)} over the limit")
    if taken < seen["got_bytes"] and way != "managed":
        wrong.append(f"the device counts only {size(taken)}: another process freed memory meanwhile")
    if seen["got_bytes"] < seen["free_bytes"] - (POOL_SLACK if way == "async" else SLACK):
        wrong.append(f"got {size(seen['got_bytes'])} of {size(seen['free_bytes'])} reported as free")
    values = {**seen, "limit_bytes": limit, "device_bytes": taken, "refused": refused}
    return verdict(wrong, f"limit {size(limit)}: got {size(seen['got_bytes'])}, device counts {size(taken)}", values)


def plain(session: Session) -> Result:
    return fill(session, "plain")


def asynchronous(session: Session) -> Result:
    return fill(session, "async")


def virtual(session: Session) -> Result:
    return fill(session, "vmm")


def managed(session: Session) -> Result:
    """Managed memory is on the host until it is touched, so the device counts less."""
    return fill(session, "managed")


def processes(session: Session) -> Result:
    """Fill a share from two processes at the same time."""
    limit = limit_of(session)
    before = session.idle_bytes()
    with session.place(limit) as place, contextlib.ExitStack() as stack:
        both = [
            stack.enter_context(session.tenant("fill", place, way="plain", most_bytes=limit + limit // 4))
            for _ in range(2)
        ]
        for tenant in both:
            tenant.receive()
        for tenant in both:
            tenant.go()
        seen: list[dict[str, Any]] = [tenant.receive() for tenant in both]
        taken = session.used_bytes() - before
    got = sum(one["got_bytes"] for one in seen)
    wrong = []
    if got > limit:
        wrong.append(f"together they got {size(got)} of {size(limit)}")
    if taken > limit:
        wrong.append(f"the device counts {size(taken)}, {size(taken - limit)} over the limit")
    if taken < got:
        wrong.append(f"the device counts only {size(taken)}: another process freed memory meanwhile")
    # Contexts are the only other memory in the share
    if got < limit - 2 * (session.machine.context_bytes or 0) - 2 * SLACK:
        wrong.append(f"together they got only {size(got)} of {size(limit)}")
    if not all(one["code"] == OUT_OF_MEMORY for one in seen):
        wrong.append("one process was not refused")
    values = {"limit_bytes": limit, "got_bytes": [one["got_bytes"] for one in seen], "device_bytes": taken}
    return verdict(wrong, f"limit {size(limit)}: together {size(got)}, device counts {size(taken)}", values)


def nvml(session: Session) -> Result:
    """Check what NVML's clients see in a share."""
    if not (session.machine.shim / "libnvidia-ml.so").exists():
        return Result("absent", "there is no shim before NVML: it was compiled without nvml.h", {})
    limit = limit_of(session)
    with session.place(limit) as place:
        seen = run_tenant("nvml", session.deadline, place, uuid=session.machine.uuid)
    shown = {name: value for name, value in seen.items() if value is not None}
    note = ", ".join(f"{name} {size(value)}" for name, value in shown.items())
    wrong = [note] if set(shown.values()) != {limit} else []
    return verdict(wrong, note, {**seen, "limit_bytes": limit})


def pool(session: Session) -> Result:
    """Measure how a pool of this driver grows."""
    values = session.ask("pool")
    steps = ", ".join(f"{size(int(asked))}: {size(grown)}" for asked, grown in values["grows_bytes"].items())
    code = values["free_async_of_plain_code"]
    return Result("measured", f"{steps}; cuMemFreeAsync of plain memory gives {code}", values)
