"""The annotations gpushare.io/memory-request and gpushare.io/memory-limit: the two ends of GPUSHARE_MEMORY.

Runs on the start path, only if there is one of them.

    read(request, limit, whole) -> as Request.memory

One of them alone is both. GPUSHARE_MEMORY or gpushare.io/memory beside them must have the same amounts.
"""

from __future__ import annotations

from typing import Optional

from ...core.errors import RequestError
from ...core.model import Amount
from ...core.quantity import amounts, single_amounts, spanning
from ...core.quoting import setting, shown_name

Said = Optional[tuple[str, str]]  # (name, value)
BySlot = tuple[tuple[Optional[int], Amount], ...]


def _sizes(found: BySlot) -> list[tuple[Optional[int], object, object]]:
    """Return what the amounts mean, without their texts."""
    return [(slot, one[:2], one.ceiling and one.ceiling[:2]) for slot, one in found]


def _both(request: tuple[str, str], limit: tuple[str, str]) -> BySlot:
    low, high = dict(single_amounts(*request)), dict(single_amounts(*limit))
    numbers = sorted({slot for slot in (*low, *high) if slot is not None})
    slots: list[Optional[int]] = [*numbers] or [None]
    for (name, value), ends, (other, _) in ((request, low, limit), (limit, high, request)):
        missing = next((slot for slot in slots if slot not in ends and None not in ends), None)
        if missing is not None:
            raise RequestError(
                f"{setting(name, value)}: no amount for slot {missing}, which {shown_name(other)} has",
                "give both the same slots",
            )
    return tuple(
        (slot, spanning(*limit, low[slot if slot in low else None], high[slot if slot in high else None]))
        for slot in slots
    )


def read(request: Said, limit: Said, whole: Said) -> BySlot:
    """Return the amounts by slot. Raise RequestError if they are malformed or contradict."""
    one = request or limit
    assert one is not None
    found = _both(request, limit) if request is not None and limit is not None else single_amounts(*one)
    if whole is not None and _sizes(amounts(*whole)) != _sizes(found):
        said = " and ".join(setting(*pair) for pair in (request, limit) if pair is not None)
        raise RequestError(f"{setting(*whole)} and annotation {said} contradict", "keep one of them")
    return found
