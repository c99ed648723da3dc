"""Check that frameworks stop at the memory limit and go on, and that NCCL works in a share."""

from __future__ import annotations

import contextlib
from typing import Any

from tests.hardware import processes
from tests.hardware.checks_memory import limit_of
from tests.hardware.session import Result, Session, size, verdict

# Bytes of its limit that a framework may leave unused: it requests 32 MiB at last, rounds up, loads more code
SLACK = 128 << 20


TITLES = {"cupy": "CuPy", "numba": "Numba", "jax": "JAX", "triton": "Triton"}


def judge(seen: dict[str, Any], limit: int, device_bytes: int) -> Result:
    """Return whether a framework got its limit, no more and no less, and went on."""
    wrong = []
    if seen["total_bytes"] > limit:
        wrong.append(f"it sees {size(seen['total_bytes'])}, not the limit of {size(limit)}")
    if not seen["refused"] or seen["got_bytes"] > limit:
        wrong.append(f"got {size(seen['got_bytes'])} of a limit of {size(limit)}")
    if device_bytes > limit:
        wrong.append(f"the device counts {size(device_bytes)}, {size(device_bytes - limit)} over the limit")
    if seen["got_bytes"] < seen["free_bytes"] - SLACK:
        wrong.append(f"got only {size(seen['got_bytes'])} of {size(seen['free_bytes'])} free")
    failed = [f"{what}: {why}" for what, why in seen["trials"].items() if why]
    if failed:
        wrong.append(f"after the refusal it did not go on as before ({'; '.join(failed)})")
    note = f"limit {size(limit)}: got {size(seen['got_bytes'])}, device counts {size(device_bytes)}, then refused; "
    note += f"before, {size(seen['used_bytes'])} were used and {size(seen['charged_bytes'])} charged"
    values = {**seen, "limit_bytes": limit, "device_bytes": device_bytes}
    return verdict(wrong, note, values)


def limit(session: Session, name: str) -> Result:
    """Fill a share with one framework."""
    most = limit_of(session)
    before = session.idle_bytes()
    with (
        session.place(most) as place,
        processes.Tenant("framework", session.deadline, place, name=name, most_bytes=most + most // 4) as tenant,
    ):
        seen = tenant.receive()
        if "broken" in seen:
            return broken(session, name, most, seen["broken"])
        seen["used_bytes"] = session.used_bytes() - before
        seen["charged_bytes"] = place.charged_bytes()
        tenant.go()
        seen.update(tenant.receive())
        taken = session.used_bytes() - before
        tenant.go()
        seen.update(tenant.receive())
        return judge(seen, most, taken)


def broken(session: Session, name: str, most: int, why: str) -> Result:
    """Return the result for a framework that cannot work in a share: natively it may not work either."""
    native = processes.ask("framework", session.deadline, name=name, most_bytes=most)
    title = TITLES.get(name, "PyTorch")
    if "broken" in native:
        return Result("not run", f"{title} does not work here: {native['broken']}", {"native": native})
    raise processes.Failed(f"{title} works natively, but not in a share: {why}")


def all_reduce(session: Session, worlds: int, name: str) -> list[dict[str, Any]]:
    """Run NCCL in processes of one share at the same time, each as the only rank of its own world."""
    with session.place(limit_of(session)) as place, contextlib.ExitStack() as stack:
        tenants = [
            stack.enter_context(
                processes.Tenant(
                    "nccl",
                    session.deadline,
                    place,
                    file=str(session.work / f"{name}-{world}"),
                    rank=0,
                    ranks=1,
                )
            )
            for world in range(worlds)
        ]
        return [tenant.receive() for tenant in tenants]


def nccl(session: Session) -> Result:
    """Let each of two processes sum with NCCL, alone in its world: NCCL refuses two ranks on one GPU, also natively."""
    alone = all_reduce(session, worlds=2, name="one-rank")
    wrong = [f"a rank of its own: {one['error'] or one['sum']}" for one in alone if one["sum"] != one["right"]]
    return verdict(wrong, "two processes with a rank each work", {"alone": alone})
