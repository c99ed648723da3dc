"""The parsed values of another scheduler, before the devices of the container are known.

Limit, Beyond, ParsedRequest                plain data
memory, quantity, number, fraction, percent, flag    parse values of these systems; RequestError quotes both
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Union

from ...core.model import Selection
from ...core.quantity import MAX_BYTES, UNITS, wrong
from .registry import Value

BINARY = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
TRUE = ("1", "t", "true", "yes")
FALSE = ("0", "f", "false", "no")
_MAX_DIGITS = 20


class Limit(NamedTuple):
    """A limit on some devices. `device`: a slot, the uuid of a GPU, or None for every device. `size` is bytes of
    memory or percent of compute; `part` a fraction of the device as two integers. Neither: no limit. `ceiling`: the
    memory limit in bytes, where these are the memory request and the limit is larger."""

    source: Value
    device: Union[None, int, str] = None
    size: Optional[int] = None
    part: Optional[tuple[int, int]] = None
    beside: tuple[Value, ...] = ()  # other values that it depends on
    ceiling: Optional[int] = None

    @property
    def is_none(self) -> bool:
        """Whether it means "no limit"."""
        return self.size is None and self.part is None


class Beyond(NamedTuple):
    """Whether memory limits, of one GPU or (None) of all other GPUs, cover device and host together. `scaling`: the
    limit as a multiple of its device part. None: the node's value; 1.0 or less: device memory only."""

    source: Value
    device: Optional[str] = None
    scaling: Optional[float] = None


class ParsedRequest(NamedTuple):
    """The request of one dialect. `devices`: the devices that it names, by the value `named`."""

    dialect: str
    memory: tuple[Limit, ...] = ()
    compute: tuple[Limit, ...] = ()
    soft: bool = False
    priority: Optional[int] = None  # as Request's
    prioritised: Optional[Value] = None
    devices: Optional[Selection] = None
    named: Optional[Value] = None
    wanted: int = 0  # number of devices, if none are named
    alias: str = ""  # its NVIDIA_VISIBLE_DEVICES for these devices, which has another meaning
    off: tuple[tuple[Value, str], ...] = ()  # values that switch limits off: (value, memory | compute | everything)
    ignored: tuple[str, ...] = ()
    beyond: tuple[Beyond, ...] = ()

    @property
    def limits(self) -> list[Limit]:
        """Its limits, without values for "no limit"."""
        return [limit for limit in (*self.memory, *self.compute) if not limit.is_none]


def _split(text: str) -> tuple[str, str]:
    """Split a decimal number from its unit."""
    end = len(text)
    while end and not (text[end - 1].isdigit() or text[end - 1] == "."):
        end -= 1
    return text[:end], text[end:].strip()


def _fraction(text: str, decimals: bool) -> Optional[tuple[int, int]]:
    """Parse `1.5` as (15, 10). Refuse `010`, which C's strtoul parses as 8, signs and exponents."""
    whole, dot, part = text.partition(".")
    digits = whole + part
    if not digits.isascii() or not whole.isdigit() or len(digits) > _MAX_DIGITS:
        return None
    if (dot and not (decimals and part.isdigit())) or (len(whole) > 1 and whole[0] == "0"):
        return None
    return int(digits), 10 ** len(part)


def memory(item: Value, units: dict[str, int], decimals: bool = False, hint: str = "", value: str = "") -> int:
    """Parse bytes. Refuse zero: no system writes it on purpose, and it must not mean the whole device."""
    text, unit = _split((value or item.value).strip())
    amount = _fraction(text, decimals)
    if amount is None or unit.lower() not in units:
        raise wrong(item.name, item.value, "not an amount of memory as this system writes it", hint)
    size = amount[0] * units[unit.lower()] // amount[1]
    if size == 0:
        raise wrong(item.name, item.value, "zero is not a limit", "leave it out for no limit")
    if size > MAX_BYTES:
        raise wrong(item.name, item.value, "larger than any device", hint)
    return size


def quantity(item: Value, hint: str) -> int:
    """Parse a Kubernetes quantity of bytes."""
    unit = item.value.strip().lstrip("0123456789.")
    units = {unit.lower(): UNITS[unit]} if unit in UNITS else {}
    return memory(item, units, decimals=True, hint=hint)


def number(item: Value, low: int, high: int, what: str) -> int:
    """Parse a whole number in a range."""
    amount = _fraction(item.value.strip(), decimals=False)
    if amount is None or not low <= amount[0] <= high:
        raise wrong(item.name, item.value, f"not {what}", f"write a whole number from {low} to {high}")
    return amount[0]


def fraction(item: Value, what: str) -> tuple[int, int]:
    """Parse a number with decimals as two integers."""
    amount = _fraction(item.value.strip(), decimals=True)
    if amount is None or amount[0] == 0:
        raise wrong(item.name, item.value, f"not {what}", "write a number above 0 such as 0.5")
    return amount


def percent(item: Value, device: Union[None, int, str] = None) -> Limit:
    """Parse a percentage of compute; 0 and 100 are no limit."""
    size = number(item, 0, 100, "a percentage")
    return Limit(item, device, size if 0 < size < 100 else None)


def flag(item: Value) -> bool:
    """Parse a switch: true, false, 1, 0 and similar."""
    text = item.value.strip().lower()
    if text not in (*TRUE, *FALSE):
        raise wrong(item.name, item.value, "neither true nor false", "write true or false")
    return text in TRUE
