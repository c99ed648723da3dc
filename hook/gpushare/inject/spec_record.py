"""What an earlier start put into a config.json, and taking it out again (start path).

    record_of(spec)   -> Record   None when nothing is in it
    stripped(spec)    -> Spec     as it was before; a new value, or `spec` itself when there is nothing to take out
    remaining(record) -> ops      what is left for our hook: most mounts, links, the loader's cache, the mask over /proc

The annotation gpushare.io/applied says what was added and what was taken out. An annotation can come from an image or a
pod, so it is believed only when our own hook is in the spec as well with the same random number in its environment:
nobody but the engine's administrator can put a hook there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

from ..core import constants
from ..core.ops import RECORDED, Op
from ..request import oci

Spec = dict[str, Any]
VERSION = 1
NONCE_ENV = "GPUSHARE_APPLIED="
STAGES = {"createRuntime": "adopt", "poststop": "poststop"}  # of the hook that we add -> what it is told to do
# places in the spec that we may have to make: path -> the empty value
PLACES: tuple[tuple[tuple[str, ...], Any], ...] = (
    (("annotations",), {}),
    (("mounts",), []),
    (("hooks",), {}),
    *((("hooks", stage), []) for stage in STAGES),
    (("linux",), {}),
    (("linux", "devices"), []),
    (("linux", "resources"), {}),
    (("linux", "resources", "devices"), []),
)


UNIFIED = ("linux", "resources", "unified")  # made only where something goes into it
KERNEL_LIMITS = ("dmem.max", "dmem.min")


class Record(NamedTuple):
    """What gpushare.io/applied holds, as plain JSON values."""

    nonce: str
    mounts: list[list[str]]  # [destination, source]
    devices: list[str]  # paths
    rules: list[list[int]]  # [major, minor]
    annotations: list[str]  # keys, the record's own among them
    made: dict[str, bool]  # places that were absent (false) or null (true)
    leased: bool  # the container holds a part of a device
    removed: list[list[Any]]  # [place, index, value], in the order in which they were taken out
    ops: list[list[Any]]  # what is left for the hook, see `remaining`
    denied: list[list[int]] = []  # [major, minor]; this and those below are absent in earlier records
    narrowed: list[list[Any]] = []  # [index, number of rules there now, the rule that was there]; in this order
    unified: list[list[Any]] = []  # [key of linux.resources.unified, whether it was there, its value]


def place(spec: Spec, path: Sequence[str]) -> Any:
    here: Any = spec
    for key in path:
        here = here.get(key) if isinstance(here, dict) else None
    return here


def _nonces(spec: Spec) -> set[str]:
    """The random numbers of our own hooks in this spec."""
    found = set()
    for stage in STAGES:
        for hook in oci.items(spec, "hooks", stage):
            found.add(_nonce_of(hook))
    return found - {""}


def _nonce_of(hook: Any) -> str:
    env = hook.get("env") if isinstance(hook, dict) else None
    lines = env if isinstance(env, list) else []
    return next((e[len(NONCE_ENV) :] for e in lines if isinstance(e, str) and e.startswith(NONCE_ENV)), "")


def record_of(spec: Spec) -> Optional[Record]:
    """The record of an earlier start, if it is truly ours."""
    text = oci.section(spec, "annotations").get(constants.APPLIED_ANNOTATION)
    if not isinstance(text, str):
        return None
    nonces = _nonces(spec)
    try:
        value = json.loads(text) if nonces else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or value.pop("version", 0) != VERSION or value.get("nonce") not in nonces:
        return None
    try:
        return Record(**value)
    except TypeError:
        return None


def remaining(record: Record) -> tuple[Op, ...]:
    """The operations of the plan that are left for our hook, and the mounts that config.json makes."""
    return tuple(RECORDED[kind](*fields) for kind, *fields in record.ops if kind in RECORDED)


def stripped(spec: Spec) -> Spec:
    """`spec` as it was before we came; a record that is not ours goes too. Never changes its argument."""
    annotations = oci.section(spec, "annotations")
    if constants.APPLIED_ANNOTATION not in annotations:
        return spec
    record = record_of(spec)
    spec = json.loads(json.dumps(spec))
    if record is None:
        del spec["annotations"][constants.APPLIED_ANNOTATION]
        return spec
    for destination, source in record.mounts:
        _drop_last(place(spec, ("mounts",)), {"destination": destination, "source": source})
    for device in record.devices:
        _drop_last(place(spec, ("linux", "devices")), {"path": device})
    for major, minor in record.rules:
        _drop_last(place(spec, ("linux", "resources", "devices")), rule(major, minor))
    for major, minor in record.denied:
        _drop_last(place(spec, ("linux", "resources", "devices")), denial(major, minor))
    rules = place(spec, ("linux", "resources", "devices"))  # an empty list too: it was the only rule
    for index, count, value in reversed(record.narrowed if rules is not None else []):
        rules[index : index + count] = [value]
    for key, was_there, value in reversed(record.unified):
        unified = place(spec, UNIFIED)
        if was_there:
            unified[key] = value
        else:
            unified.pop(key, None)
    for stage in STAGES:
        hooks = place(spec, ("hooks", stage)) or []
        hooks[:] = [hook for hook in hooks if _nonce_of(hook) != record.nonce]
    for key in record.annotations:
        spec["annotations"].pop(key, None)
    for where, index, value in reversed(record.removed):
        place(spec, where.split("."))[index:index] = [value]
    for path, empty in reversed((*PLACES, (UNIFIED, {}))):
        name = ".".join(path)
        if name in record.made and place(spec, path) == empty:
            above = place(spec, path[:-1])
            if record.made[name]:
                above[path[-1]] = None
            else:
                del above[path[-1]]
    return spec


def _drop_last(items: Any, like: dict[str, Any]) -> None:
    for index in range(len(items or ()) - 1, -1, -1):
        item = items[index]
        if isinstance(item, dict) and all(item.get(key) == value for key, value in like.items()):
            del items[index]
            return


def rule(major: int, minor: int) -> dict[str, Any]:
    return {"allow": True, "type": "c", "major": major, "minor": minor, "access": "rw"}


def denial(major: int, minor: int) -> dict[str, Any]:
    """A negative minor stands for all."""
    what = {"major": major, "minor": minor} if minor >= 0 else {"major": major}
    return {"allow": False, "type": "c", **what, "access": "rwm"}
