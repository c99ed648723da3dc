"""The record in config.json of an earlier edit, and its removal (start path).

    record_of(spec)   -> Record   None if there is no valid record
    stripped(spec)    -> Spec     the spec before the edit: a new value, or `spec` itself if there was no edit
    remaining(record) -> ops      operations left for our hook: most mounts, links, the loader's cache, the /proc mask

The annotation gpushare.io/applied lists what was added and removed. An image or a pod can set annotations, so the
record is valid only if the spec also has our own hook with the same nonce in its environment: only the engine's
administrator can add a hook."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

from ..core import constants
from ..core.ops import RECORDED, Op
from ..request import speckeys

Spec = dict[str, Any]
VERSION = 1
NONCE_ENV = "GPUSHARE_APPLIED="
STAGES = {"createRuntime": "adopt", "poststop": "poststop"}  # stage of a hook that we add -> its argument
# objects of the spec that may have to be created: path -> empty value
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


UNIFIED = ("linux", "resources", "unified")  # created only if something is put into it
KERNEL_LIMITS = ("dmem.max", "dmem.min")


class Record(NamedTuple):
    """The content of gpushare.io/applied, as plain JSON values."""

    nonce: str
    mounts: list[list[str]]  # [destination, source]
    devices: list[str]  # paths
    rules: list[list[int]]  # [major, minor]
    annotations: list[str]  # keys, including the record's own
    made: dict[str, bool]  # objects that were absent (false) or null (true)
    leased: bool  # the container has a share of a device
    removed: list[list[Any]]  # [place, index, value], in the order of removal
    ops: list[list[Any]]  # operations for the hook, see `remaining`
    denied: list[list[int]] = []  # [major, minor]; this and the fields below are absent in older records
    narrowed: list[list[Any]] = []  # [index, number of rules there now, the original rule]; in this order
    unified: list[list[Any]] = []  # [key of linux.resources.unified, whether it existed, its value]


def place(spec: Spec, path: Sequence[str]) -> Any:
    here: Any = spec
    for key in path:
        here = here.get(key) if isinstance(here, dict) else None
    return here


def _nonces(spec: Spec) -> set[str]:
    """Return the nonces of our own hooks in this spec."""
    found = set()
    for stage in STAGES:
        for hook in speckeys.items(spec, "hooks", stage):
            found.add(_nonce_of(hook))
    return found - {""}


def _nonce_of(hook: Any) -> str:
    env = hook.get("env") if isinstance(hook, dict) else None
    lines = env if isinstance(env, list) else []
    return next((e[len(NONCE_ENV) :] for e in lines if isinstance(e, str) and e.startswith(NONCE_ENV)), "")


def record_of(spec: Spec) -> Optional[Record]:
    """Return the record of an earlier edit; None if it is missing or not valid."""
    text = speckeys.section(spec, "annotations").get(constants.APPLIED_ANNOTATION)
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
    """Return `spec` as it was before the edit. An invalid record is removed too. `spec` itself never changes."""
    annotations = speckeys.section(spec, "annotations")
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
    rules = place(spec, ("linux", "resources", "devices"))  # may be an empty list: it was the only rule
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
    """Return a deny rule; a negative minor means all minors."""
    what = {"major": major, "minor": minor} if minor >= 0 else {"major": major}
    return {"allow": False, "type": "c", **what, "access": "rwm"}
