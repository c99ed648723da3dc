"""Evaluate NVIDIA_REQUIRE_*: an image's constraints on driver and GPU. Pure (start path).

    parse(name, value)                    -> Alternatives   raises RequestError
    require(requirements, host, device)   -> None           raises RequestError with the first unmet one

A space separates alternatives, one of which must hold; a comma joins terms that must all hold: "cuda>=12.4
brand=tesla,driver>=535,driver<536". Terms: cuda and driver (versions), arch (compute capability), brand. A fact that
the host does not know (no answer from NVML) fails its term. Source: NVIDIA container toolkit, "Constraints"."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Optional

from ..core.errors import RequestError
from ..core.model import Device, Inventory
from ..core.quantity import wrong
from ..core.quoting import setting, shown

_Version = tuple[int, ...]
OPERATORS: dict[str, Callable[[_Version, _Version], bool]] = {  # longer operators first: ">=" begins with ">"
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    "!=": lambda a, b: a != b,
    "==": lambda a, b: a == b,
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
    "=": lambda a, b: a == b,
}
PROPERTIES: dict[str, Callable[[Inventory, Optional[Device]], str]] = {
    "cuda": lambda host, device: host.cuda_version,
    "driver": lambda host, device: host.driver_version,
    "arch": lambda host, device: device.arch if device else "",
    "brand": lambda host, device: device.brand if device else "",
}
_OF_DEVICE = ("arch", "brand")
_MAX_TERMS = 512  # CUDA's own images have about fifty
_HINT = "write terms like cuda>=12.2, driver>=535, brand=tesla, arch>=8.0; a comma means AND, a space means OR"


class Term(NamedTuple):
    """One comparison."""

    key: str  # of PROPERTIES
    operator: str  # of OPERATORS
    value: str


Alternatives = tuple[tuple[Term, ...], ...]


def _version(text: str) -> Optional[_Version]:
    """Parse 12.2 as (12, 2), without trailing zeros, so that 12 equals 12.0. None if it is no version."""
    parts = text.split(".")
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        return None
    numbers = [int(part) for part in parts]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _term(name: str, value: str, text: str) -> Term:
    key = next((key for key in PROPERTIES if text.startswith(key)), "")
    rest = text[len(key) :]
    operator = next((operator for operator in OPERATORS if rest.startswith(operator)), "")
    wanted = rest[len(operator) :]
    if not key or not operator or not wanted:
        raise wrong(name, value, f"{shown(text)} is not a term", _HINT)
    if key == "brand" and operator not in ("=", "==", "!="):
        raise wrong(name, value, f"{shown(text)}: brands cannot be compared with < or >", _HINT)
    if key != "brand" and _version(wanted) is None:
        raise wrong(name, value, f"{shown(text)}: {shown(wanted)} is not a version", _HINT)
    return Term(key, operator, wanted)


def parse(name: str, value: str) -> Alternatives:
    """Parse the constraint; () if it is empty."""
    words = value.split()
    if sum(word.count(",") + 1 for word in words) > _MAX_TERMS:
        raise wrong(name, value, f"more than {_MAX_TERMS} terms", _HINT)
    return tuple(tuple(_term(name, value, text) for text in word.split(",") if text) for word in words)


def _holds(term: Term, host: Inventory, device: Optional[Device]) -> bool:
    """Return whether a term holds. Without a device, terms about devices hold."""
    if device is None and term.key in _OF_DEVICE:
        return True
    found = PROPERTIES[term.key](host, device)
    if not found:
        return False
    if term.key == "brand":
        return (found.lower() == term.value.lower()) != (term.operator == "!=")
    version, wanted = _version(found), _version(term.value)
    return version is not None and wanted is not None and OPERATORS[term.operator](version, wanted)


def _facts(alternatives: Alternatives, host: Inventory, device: Optional[Device]) -> str:
    """Return the host's facts for the keys of the constraint."""
    keys = dict.fromkeys(term.key for terms in alternatives for term in terms)
    of = f" of device {device.index}" if device else ""
    return ", ".join(
        f"{key}{of if key in _OF_DEVICE else ''} is {PROPERTIES[key](host, device) or 'not known'}"
        for key in keys
        if device or key not in _OF_DEVICE
    )


def require(requirements: tuple[tuple[str, str], ...], host: Inventory, device: Optional[Device]) -> None:
    """Raise RequestError if the host with this device does not meet a requirement."""
    for name, value in requirements:
        alternatives = parse(name, value)
        if not alternatives or any(all(_holds(term, host, device) for term in terms) for terms in alternatives):
            continue
        raise RequestError(
            f"{setting(name, value)} is not met: {_facts(alternatives, host, device)}",
            "update the host's driver, use another image, or set NVIDIA_DISABLE_REQUIRE=1 to try anyway",
        )
