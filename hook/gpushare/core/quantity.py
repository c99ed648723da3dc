"""Parse and format amounts: `4Gi`, `1.5GiB`, `512M`, `25%`, `4Gi..12Gi`, and per slot `0=4Gi,1=8Gi`.

    size_bytes(name, value)    -> int                                  "4Gi" -> 4294967296
    percent(name, value)       -> float                                "12.5%" -> 12.5
    whole_percent(name, value) -> int                                  "30%" -> 30
    amount(name, value)        -> Amount                               size or percentage
    amount_or_range(name, value) -> Amount                             also "4Gi..12Gi"
    spanning(name, value, request, limit) -> Amount                    request and limit, "4Gi" and "12Gi"
    amounts(name, value)       -> ((slot or None, Amount), ...)        also "4Gi..12Gi"
    single_amounts(name, value) -> the same without ranges
    percents(name, value)      -> ((slot or None, int), ...)
    bytes_of(amount, total_bytes, granularity_bytes) -> int            percentages round down to whole blocks
    unrounded(size_bytes)      -> str                                  "1536Mi", exact
    human(size_bytes)          -> str                                  "4 GiB", exact or with two digits
    described(amount, size_bytes) -> str            "4 GiB", "25% (4 GiB)", "4 GB (3.73 GiB)", "4 GiB..12 GiB"

Every parser raises RequestError with `name`, `value` and a valid example. Powers follow the International
System and IEC 80000-13, as Kubernetes quantities do: `G` is 10^9, `Gi` is 2^30; a final `B` changes nothing.
Runs on the start path, so it imports only the standard library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional, TypeVar

from .errors import RequestError
from .model import Amount
from .quoting import setting, shown, shown_name

MAX_BYTES = (1 << 63) - 1
MAX_SLOTS = 16  # GS_MAX_DEVICES
_MAX_DIGITS = 20  # more cannot be a size; checked before int(), which is quadratic
_PERCENT_SCALE = 10**6  # six decimals of a percent: more than the bytes of any GPU need

UNITS = {
    "": 1,
    "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15,
    "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50,
}  # fmt: skip

_SIZE_HINT = "write a size such as 4Gi, 1.5GiB or 512M, or a percentage such as 25%"
_PERCENT_HINT = "write a percentage above 0% and up to 100%, such as 25%"
_WHOLE_HINT = "write a whole percentage from 1% to 100%, such as 30%"
_SLOT_HINT = "write one amount for every device, or one for each slot such as 0=4Gi,1=8Gi"

T = TypeVar("T")


def wrong(name: str, value: str, reason: str, hint: str) -> RequestError:
    """The error for a variable or annotation `name` with an invalid value."""
    return RequestError(f"{setting(name, value)}: {reason}", hint)


def _decimal(text: str) -> Optional[tuple[int, int]]:
    """`12.5` as (125, 10): exact, ASCII digits only, no sign and no exponent. None for any other text."""
    whole, dot, part = text.partition(".")
    digits = whole + part
    if not digits.isascii() or not whole.isdigit() or len(digits) > _MAX_DIGITS or (dot and not part.isdigit()):
        return None
    return int(digits), 10 ** len(part)


def _negative(text: str) -> str:
    """The reason if a text is a number below zero, else ""."""
    return "below zero" if text[:1] in "-\u2212" and text[1:2].isdigit() else ""


def _unit_hint(number: str, unit: str) -> str:
    """The unit that a user meant who wrote "4gb", else all of them."""
    known = (one + end for one in UNITS if one for end in ("", "B"))
    meant = [one for one in known if one.lower() == unit.lower()]
    return f"did you mean {number.strip()}{meant[-1]}?" if meant else f"use {', '.join(one for one in UNITS if one)}"


def size_bytes(name: str, value: str) -> int:
    """Bytes of a size. Fractions of a byte are dropped. Zero is refused: it could mean "none" or "no limit"."""
    text = value.strip()
    end = len(text)
    while end and not (text[end - 1].isdigit() or text[end - 1] == "."):
        end -= 1
    unit = text[end:].strip()
    if unit.endswith("B"):
        unit = unit[:-1]
    number = _decimal(text[:end])
    if number is None:
        raise wrong(name, value, _negative(text) or "not an amount of memory", _SIZE_HINT)
    if unit not in UNITS:
        raise wrong(
            name, value, f"unknown unit {shown(text[end:].strip())}", _unit_hint(text[:end], text[end:].strip())
        )
    size = number[0] * UNITS[unit] // number[1]
    if size == 0:
        no_gpu = ", GPUSHARE_DEVICES=none for no GPU" if name.startswith("GPUSHARE_") or "gpushare.io/" in name else ""
        raise wrong(name, value, "zero is not a limit", f"leave it out for no limit{no_gpu}, or {_SIZE_HINT}")
    if size > MAX_BYTES:
        raise wrong(name, value, "larger than any device", _SIZE_HINT)
    return size


def percent(name: str, value: str) -> float:
    """A percentage above 0 and up to 100, with at most six decimals; the `%` is required."""
    text = value.strip()
    number = _decimal(text[:-1].strip()) if text.endswith("%") else None
    if number is None or number[1] > _PERCENT_SCALE:
        raise wrong(name, value, _negative(text) or "not a percentage", _PERCENT_HINT)
    if not 0 < number[0] <= 100 * number[1]:
        raise wrong(name, value, "out of range", _PERCENT_HINT)
    return number[0] / number[1]


def whole_percent(name: str, value: str) -> int:
    """A whole percentage from 1 to 100; the `%` is optional because no other unit is possible."""
    text = value.strip()
    number = _decimal(text[:-1].strip() if text.endswith("%") else text)
    if number is None or number[0] % number[1]:
        raise wrong(name, value, _negative(text) or "not a whole percentage", _WHOLE_HINT)
    if not 1 <= number[0] // number[1] <= 100:
        raise wrong(name, value, "out of range", _WHOLE_HINT)
    return number[0] // number[1]


def amount(name: str, value: str) -> Amount:
    """A size or a percentage of the device."""
    text = value.strip()
    if text.endswith("%"):
        return Amount(None, percent(name, value), text)
    return Amount(size_bytes(name, value), None, text)


def spanning(name: str, value: str, request: Amount, limit: Amount) -> Amount:
    """Return a memory request with its limit. Raise RequestError if the limit is below it."""
    if (request.percent is None) != (limit.percent is None):
        raise wrong(
            name,
            value,
            f"{shown(request.text)} and {shown(limit.text)} are a size and a percentage",
            "write request and limit both as sizes, or both as percentages",
        )
    if (request.limit_bytes or 0, request.percent or 0) > (limit.limit_bytes or 0, limit.percent or 0):
        raise wrong(
            name,
            value,
            f"the memory limit {shown(limit.text)} is below the memory request {shown(request.text)}",
            "write request..limit, such as 4Gi..12Gi",
        )
    if request[:2] == limit[:2]:
        return request
    return request._replace(text=f"{request.text}..{limit.text}", ceiling=limit)


def _part(name: str, value: str, text: str, parse: Callable[[str, str], T]) -> T:
    """Parse a part of `value`. The error quotes all of it."""
    try:
        return parse(name, text)
    except RequestError as error:
        wrong_item = error.message[len(shown_name(name)) + 1 :]
        raise RequestError(f"{setting(name, value)}: in {wrong_item}", error.hint) from None


def amount_or_range(name: str, value: str) -> Amount:
    """Parse an amount, or a memory request and its limit as `4Gi..12Gi`."""
    low, dots, high = value.partition("..")
    if not dots:
        return amount(name, value)
    return spanning(name, value, _part(name, value, low, amount), _part(name, value, high, amount))


def _by_slot(name: str, value: str, parse: Callable[[str, str], T]) -> tuple[tuple[Optional[int], T], ...]:
    """`0=A,1=B` as ((0, A), (1, B)); a single amount as ((None, A),)."""
    if "=" not in value:
        if "," in value:
            raise wrong(name, value, "several amounts without slots", _SLOT_HINT)
        return ((None, parse(name, value)),)
    found: dict[int, T] = {}
    if value.count(",") >= MAX_SLOTS:
        raise wrong(name, value, f"more than {MAX_SLOTS} slots", _SLOT_HINT)
    for item in value.split(","):
        key, equals, text = item.partition("=")
        key = key.strip()
        if not equals or not (key.isascii() and key.isdigit()) or len(key) > 3 or int(key) >= MAX_SLOTS:
            raise wrong(name, value, f"{shown(item)} does not begin with a slot from 0 to {MAX_SLOTS - 1}", _SLOT_HINT)
        if int(key) in found:
            raise wrong(name, value, f"slot {int(key)} occurs twice", _SLOT_HINT)
        found[int(key)] = _part(name, value, text, parse)
    return tuple(sorted(found.items()))


def amounts(name: str, value: str) -> tuple[tuple[Optional[int], Amount], ...]:
    """Parse memory amounts, or requests with their limits, for every device or for each slot."""
    return _by_slot(name, value, amount_or_range)


def single_amounts(name: str, value: str) -> tuple[tuple[Optional[int], Amount], ...]:
    """Parse memory amounts without ranges, for every device or for each slot."""
    return _by_slot(name, value, amount)


def percents(name: str, value: str) -> tuple[tuple[Optional[int], int], ...]:
    """Parse compute percentages, for every device or for each slot."""
    return _by_slot(name, value, whole_percent)


def bytes_of(wanted: Amount, total_bytes: int, granularity_bytes: int) -> int:
    """Bytes of an amount on a device of `total_bytes`. Percentages round down to whole blocks, so that four
    quarters always fit. Zero when the device is too small or its size is not known."""
    if wanted.limit_bytes is not None:
        return wanted.limit_bytes
    assert wanted.percent is not None
    scaled = round(wanted.percent * _PERCENT_SCALE)  # exact: the parser allows six decimals at most
    size = total_bytes * scaled // (100 * _PERCENT_SCALE)
    return size - size % granularity_bytes


def unrounded(size: int) -> str:
    """Return bytes as GPUSHARE_MEMORY would have them, exactly: `4Gi`, `1536Mi`."""
    unit = next(unit for unit in ("Gi", "Mi", "Ki", "") if size % UNITS[unit] == 0)
    return f"{size // UNITS[unit]}{unit}"


def human(size: int) -> str:
    """Bytes for a person: the largest binary unit, exact when it is whole, else with two digits."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size // factor} {unit}" if size % factor == 0 else f"{size / factor:.2f} {unit}"
    return f"{size} B"


def described(wanted: Amount, size: Optional[int] = None) -> str:
    """An amount for a person, with the units of `human`, so that no message mixes `8Gi` with `6 GiB`. `size`: its bytes
    on the device, which are added to a percentage and to a size in powers of ten."""
    text = "..".join(map(_spaced, wanted.text.split("..")))
    if size is None or "(" in text or text.endswith(("iB", " B")):
        return text
    return f"{text} ({human(size)})"


def _spaced(text: str) -> str:
    """`4 GiB` for `4096Mi`, `3000 MiB` where two digits of a GiB cannot express it; any other text stays."""
    try:
        size = size_bytes("", text)
    except RequestError:
        return text
    if 100 * size % UNITS[human(size).partition(" ")[2].rstrip("B")] == 0:
        return human(size)
    number = text.strip().rstrip("BKkMGTPi").strip()
    return f"{number} {text.strip()[len(number) :].strip().rstrip('B')}B"
