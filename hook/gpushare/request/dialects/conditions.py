"""Conditions on the device that `any` chooses: `any:2,model=A100,free>=20Gi`. Pure; loaded only if a request has some.

    parse(name, value, words)                              -> tuple[Condition, ...]
    require(conditions, device)                               raises DeviceError: another model, too small, ...
    require_free(conditions, device, free_bytes, total_bytes) raises CapacityError: too little memory is free
    is_model(wanted, model)                                -> bool

A model is one or more whole words of the driver's device name. Case does not matter, spaces and hyphens are the same,
and * matches any text. A100 matches NVIDIA A100-SXM4-40GB, and L4 does not match L40S. NVIDIA-A100-SXM4-40GB, as in
Kubernetes labels, matches too. | separates alternatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ...core.errors import CapacityError, DeviceError, GpushareError, RequestError
from ...core.model import Amount, Condition, Device
from ...core.quantity import amount, bytes_of, described, human, size_bytes, wrong
from ...core.quoting import shown
from ...gpu.selectors import device_name

_HINT = "write any or any:2, then with commas model=A100, memory>=40Gi, free>=20Gi, mig=yes or mig=no"


def _words(text: str) -> str:
    return " ".join(text.lower().replace("-", " ").split())


def _glob(pattern: str, text: str) -> bool:
    """Return whether `pattern`, in which * matches any text, matches all of `text`. Linear time."""
    first, *rest = pattern.split("*")
    if not rest:
        return pattern == text
    *middle, last = rest
    if not text.startswith(first) or not text.endswith(last) or len(text) < len(first) + len(last):
        return False
    at, end = len(first), len(text) - len(last)
    for part in middle:
        at = text.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True


def is_model(wanted: str, model: str) -> bool:
    """Return whether one of `wanted` (A100|H100*) matches `model`."""
    padded = f" {_words(model)} "
    return any(_glob(f"* {_words(one)} *", padded) for one in wanted.split("|"))


def _model(name: str, text: str) -> str:
    if len(text) > 64 or not all(_words(one).strip("*") for one in text.split("|")):
        raise wrong(name, text, "not a model", "write a word of its name, such as A100 or L40*")
    return text


def _mig(name: str, text: str) -> bool:
    if text.lower() not in ("yes", "no"):
        raise wrong(name, text, "neither yes nor no", "write mig=yes for MIG devices only, mig=no for none")
    return text.lower() == "yes"


def _require_unit(name: str, text: str) -> None:
    """Refuse a number below 1 MiB without a unit. It was meant as GiB, and every device has that many bytes."""
    if text.isdigit() and int(text) < 1 << 20:
        raise wrong(name, text, "a number without a unit means bytes", f"did you mean {text}Gi?")


def _bytes(name: str, text: str) -> int:
    found = size_bytes(name, text)
    _require_unit(name, text)
    return found


def _amount(name: str, text: str) -> Amount:
    found = amount(name, text)
    _require_unit(name, text)
    return found


# condition -> (its sign, parser of what is behind that)
CONDITIONS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "model": ("=", _model),
    "memory": (">=", _bytes),
    "free": (">=", _amount),
    "mig": ("=", _mig),
}


def _one(word: str) -> Condition:
    """Parse one condition. Raise RequestError."""
    key, sign, text = word.partition(">=")
    if not sign:
        key, sign, text = word.partition("=")
    key, text = key.strip().lower(), text.strip()
    if not sign or key not in CONDITIONS:
        raise RequestError(f"{shown(word)} is not a condition for a device", _HINT)
    if sign != CONDITIONS[key][0]:
        raise RequestError(f"{shown(word)} has {sign} where only {CONDITIONS[key][0]} is allowed", _HINT)
    return Condition(key, f"{key}{sign}{text}", CONDITIONS[key][1](key, text))


def parse(name: str, value: str, words: Iterable[str]) -> tuple[Condition, ...]:
    """Parse the conditions behind `any`. `name` and `value`: the container's request, for messages."""
    found: dict[str, Condition] = {}
    for word in words:
        if word in CONDITIONS:  # what a shell leaves of free>=20Gi
            raise wrong(
                *(name, value, f"condition {word} has no value"),
                f"write '{word}{CONDITIONS[word][0]}...', in quotes for a shell, which takes a bare > for itself",
            )
        if "=" not in word and word.partition(">")[0].partition("<")[0].strip() in CONDITIONS:
            raise wrong(name, value, f"{shown(word)} is not a condition for a device", _HINT)
        if "=" not in word:
            raise wrong(name, value, "any cannot be combined with other devices", "write any, or any:2 for two")
        try:
            one = _one(word)
        except RequestError as error:
            raise wrong(name, value, error.message, error.hint) from None
        if one.name in found:
            raise wrong(name, value, f"{one.name} is given twice", "keep one; several models are model=A100|H100")
        found[one.name] = one
    return tuple(found.values())


def _unmet(condition: Condition, device: Device) -> str:
    """Return why the device does not meet the condition; "" if it does, or if the condition is `free`."""
    if condition.name == "model" and not is_model(condition.value, device.model):
        return f"model {shown(device.model)}"
    whole = device.memory_bytes + device.reserved_bytes  # as NVML and data sheets count
    if condition.name == "memory" and whole < condition.value:
        return f"has {human(whole)}" if whole else "of unknown size"
    if condition.name == "mig" and bool(device.parent) != condition.value:
        return "a MIG device" if device.parent else "a whole GPU"
    return ""


def _refusal(kind: type[GpushareError], condition: Condition, device: Device, reason: str, hint: str) -> GpushareError:
    text = condition.text
    if condition.name in ("memory", "free"):
        begin = condition.name + CONDITIONS[condition.name][0]
        text = begin + described(Amount(None, None, text[len(begin) :]))
    return kind(f"{text} requested, device {device_name(device)}: {reason}", hint, reason)


def require(conditions: Iterable[Condition], device: Device) -> None:
    """Check the conditions that do not depend on the device's use."""
    for condition in conditions:
        reason = _unmet(condition, device)
        if reason:
            raise _refusal(DeviceError, condition, device, reason, "`gpushare devices` shows what this host has")


def require_free(conditions: Iterable[Condition], device: Device, free_bytes: int, total_bytes: int) -> None:
    """Check the conditions on memory that is not granted. A device of unknown size has none."""
    for condition in conditions:
        if condition.name == "free":
            wanted: Amount = condition.value
            size = bytes_of(wanted, device.memory_bytes, device.granularity_bytes)
            if free_bytes < size or not device.memory_bytes:
                known = f"{human(free_bytes)} of {human(total_bytes)} free"
                reason = known if device.memory_bytes else "of unknown size"
                raise _refusal(CapacityError, condition, device, reason, "stop a container, or ask for less")
