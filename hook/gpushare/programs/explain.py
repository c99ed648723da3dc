"""The output of `gpushare explain`: the request, the plan and the notes. Stable text, compared by golden tests.

explain_text(request, plan, placed, held) -> str     lines, each ended by a newline
explain_json(request, plan, placed, held) -> dict    the same as plain JSON values

`placed` is the result of why.placed, `held` of why.held.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from ..core.model import Request, Selection
from ..core.ops import DeviceNode, Op, Plan, WriteLimits, needs
from ..core.quantity import human
from ..core.quoting import printable, setting
from ..gpu.selectors import device_name
from .why import Reason

NOTHING = "nothing requested: gpushare does not change this container\n"


def selection_text(selection: Selection) -> str:
    """Return `any:2` with its conditions, `all`, `none`, or the list as written."""
    if selection.kind == "any":
        return ",".join([f"any:{selection.count}", *(condition.text for condition in selection.conditions)])
    return ",".join(selection.names) if selection.kind == "list" else selection.kind


def _by_slot(pairs: tuple[tuple[Optional[int], str], ...]) -> str:
    return ",".join(text if slot is None else f"{slot}={text}" for slot, text in pairs) or "no limit"


def _beyond(request: Request) -> str:
    """Describe a request of memory on device and host together."""
    if not request.scalings:
        return ""
    times = _by_slot(tuple((slot, f"{scaling:g}") for slot, scaling in request.scalings))
    return f"memory is that of device and host together, {times} times its part on the device"


def _facts(request: Request) -> list[tuple[str, str]]:
    """Return the parsed request as (label, text)."""
    soft = f", {request.compute_mode}" if request.compute and request.compute_mode != "hard" else ""
    facts = [
        ("dialect", request.dialect),
        ("devices", selection_text(request.selection)),
        ("memory", _by_slot(tuple((slot, amount.text) for slot, amount in request.memory))),
        ("compute", _by_slot(tuple((slot, f"{percent}%") for slot, percent in request.compute)) + soft),
        ("capabilities", ",".join(request.capabilities)),
    ]
    optional = (
        ("priority", "high" if request.priority else ""),
        ("oversubscribe", "yes" if request.oversubscribe else _beyond(request)),
        ("backend", request.backend.replace("auto", "")),
        ("features", ",".join(request.features)),
        ("imex", ",".join(request.imex_channels)),
        ("mig rights", ",".join(request.mig_access)),
    )
    return facts + [(label, text) for label, text in optional if text]


def _gets(plan: Plan) -> list[str]:
    """Return one line for each device that the container gets, and how much of it."""
    shares = [share for op in plan.ops if isinstance(op, WriteLimits) for share in op.shares]
    lines = []
    for share in shares:
        device, limit = share.device, share.memory_limit_bytes
        whole = human(device.memory_bytes) if device.memory_bytes else "an unknown size"
        much = f"all of {whole}" if limit is None else f"{human(limit)} of {whole}"
        if share.lending:
            much += f", up to {human(share.virtual_bytes)} while memory is free ({share.lending})"
        elif share.virtual_bytes:
            much += f" and {human(share.virtual_bytes - (limit or 0))} in host memory"
        over = f", clamped from {share.clamped}" if share.clamped else ""
        if share.compute_percent is not None:
            much += f", {share.compute_percent}% of compute{' (soft)' if share.soft else ''}"
        much += ", high priority" if share.priority else ""
        lines.append(f"device {device_name(device)}, {much}, {device.model}, {device.uuid}" + over)
    nodes = [op.target for op in plan.ops if isinstance(op, DeviceNode)]  # an image without glibc has no limits
    return (
        lines or [f"{node}, without limit" for node in nodes if node[len("/dev/nvidia") :].isdigit()] or ["no device"]
    )


def explain_text(
    request: Optional[Request], plan: Optional[Plan], placed: Sequence[Reason] = (), held: Sequence[str] = ()
) -> str:
    """Return the whole explanation. Control characters in the container's values are escaped."""
    if request is None or plan is None:
        return NOTHING
    lines = [f"{label:<12} {text}" for label, text in _facts(request)]
    lines += [f"{'from':<12} {setting(name, value)}" for name, value in request.sources]
    lines += [f"{'requires':<12} {setting(name, value)}" for name, value in request.requirements]
    lines += [f"{'ignored':<12} {text}" for text in request.ignored]
    lines += [f"{'gets':<12} {text}" for text in _gets(plan)]
    lines += [f"{'held':<12} {text}" for text in held]
    for reason in placed:
        lines.append(f"{'placed' if reason.chosen else 'not':<12} {reason.device}: {reason.text}")
    lines += ["", f"plan for {plan.container_id}:"]
    lines += [f"{number:>3} {op.describe()}" for number, op in enumerate(plan.ops, 1)]
    notes = [f"note: {note}" for note in plan.notes if note not in request.ignored]
    lines += ["", *notes] if notes else []
    return "".join(printable(line) + "\n" for line in lines)


def _plain(value: Any) -> Any:
    """Return NamedTuples as objects, tuples as lists."""
    if hasattr(value, "_asdict"):
        return {key: _plain(item) for key, item in value._asdict().items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _op(op: Op) -> dict[str, Any]:
    return {"op": type(op).__name__, "needs": needs(op), **_plain(op), "text": op.describe()}


def explain_json(
    request: Optional[Request], plan: Optional[Plan], placed: Sequence[Reason] = (), held: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the same as JSON values; {"request": null} if the container requests nothing."""
    if request is None or plan is None:
        return {"request": None, "placed": [], "held": [], "plan": None}
    return {
        "request": {**_plain(request), "selection": selection_text(request.selection)},
        "placed": [_plain(reason) for reason in placed],
        "held": list(held),
        "plan": {"container_id": plan.container_id, "ops": [_op(op) for op in plan.ops], "notes": list(plan.notes)},
    }
