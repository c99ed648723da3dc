"""Writes a plan into config.json, or takes it out again: the second applier of the same plan (start path).

    stripped(spec)                               -> Spec      without what an earlier start put in; a new value
    edited(bundle, plan, tree, hook_words)       -> Spec      with the plan; a new value, unknown fields kept
    record_of(spec)                              -> Record    what an earlier start put in; None when nothing did
    write(path, spec)                            temporary file and rename, same owner and mode

The annotation gpushare.io/applied says what was added and what was taken out. An annotation can come from an image or a
pod, so it is believed only when our own hook is in the spec as well with the same random number in its environment:
nobody but the engine's administrator can put a hook there. What is left for our hook (links, the loader's cache, the
mask over /proc) is in the same record.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

from . import names, oci
from .errors import KernelError
from .model import Bundle, LdEntry
from .ops import DeviceNode, DeviceRule, LdCache, Link, Mount, Op, Plan, ProcMask
from .spectree import SpecTree

Spec = dict[str, Any]
VERSION = 1
HOOK_ENV = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HOOK_TIMEOUT_S = 30
_NONCE_ENV = "GPUSHARE_APPLIED="
_STAGES = {"createRuntime": "adopt", "poststop": "poststop"}
_HOST_DEV = "/dev/"
# places in the spec that we may have to make: path -> the empty value
_PLACES: tuple[tuple[tuple[str, ...], Any], ...] = (
    (("annotations",), {}),
    (("mounts",), []),
    (("hooks",), {}),
    *((("hooks", stage), []) for stage in _STAGES),
    (("linux",), {}),
    (("linux", "devices"), []),
    (("linux", "resources"), {}),
    (("linux", "resources", "devices"), []),
)


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


def _place(spec: Spec, path: Sequence[str]) -> Any:
    here: Any = spec
    for key in path:
        here = here.get(key) if isinstance(here, dict) else None
    return here


# The record


def _nonces(spec: Spec) -> set[str]:
    """The random numbers of our own hooks in this spec."""
    found = set()
    for stage in _STAGES:
        for hook in oci.items(spec, "hooks", stage):
            found.add(_nonce_of(hook))
    return found - {""}


def _nonce_of(hook: Any) -> str:
    env = hook.get("env") if isinstance(hook, dict) else None
    lines = env if isinstance(env, list) else []
    return next((e[len(_NONCE_ENV) :] for e in lines if isinstance(e, str) and e.startswith(_NONCE_ENV)), "")


def record_of(spec: Spec) -> Optional[Record]:
    """The record of an earlier start, if it is truly ours."""
    text = oci.section(spec, "annotations").get(names.APPLIED_ANNOTATION)
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
    """The ops of the plan as the hook needs them: mounts that are there already, links, the cache, the mask."""
    ops: list[Op] = []
    for kind, *fields in record.ops:
        if kind == "Mount":
            ops.append(Mount(fields[1], fields[0], fields[2], (), "in config.json"))
        elif kind == "Link":
            ops.append(Link(fields[0], fields[1], ""))
        elif kind == "LdCache":
            ops.append(LdCache(tuple(LdEntry(*entry) for entry in fields[0])))
        elif kind == "ProcMask":
            ops.append(ProcMask(tuple(fields[0])))
    return tuple(ops)


# Taking out


def stripped(spec: Spec) -> Spec:
    """`spec` as it was before we came; a record that is not ours goes too. Never changes its argument."""
    annotations = oci.section(spec, "annotations")
    if names.APPLIED_ANNOTATION not in annotations:
        return spec
    record = record_of(spec)
    spec = json.loads(json.dumps(spec))
    if record is None:
        del spec["annotations"][names.APPLIED_ANNOTATION]
        return spec
    for destination, source in record.mounts:
        _drop_last(_place(spec, ("mounts",)), {"destination": destination, "source": source})
    for device in record.devices:
        _drop_last(_place(spec, ("linux", "devices")), {"path": device})
    for major, minor in record.rules:
        _drop_last(_place(spec, ("linux", "resources", "devices")), _rule(major, minor))
    for stage in _STAGES:
        hooks = _place(spec, ("hooks", stage)) or []
        hooks[:] = [hook for hook in hooks if _nonce_of(hook) != record.nonce]
    for key in record.annotations:
        spec["annotations"].pop(key, None)
    for place, index, value in reversed(record.removed):
        _place(spec, place.split("."))[index:index] = [value]
    for path, empty in reversed(_PLACES):
        name = ".".join(path)
        if name in record.made and _place(spec, path) == empty:
            above = _place(spec, path[:-1])
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


# Putting in


class _Editor:
    """One edit of one copy of a spec, and the record of it."""

    def __init__(self, spec: Spec, leased: bool) -> None:
        self.spec: Spec = json.loads(json.dumps(spec))
        self.record = Record(os.urandom(16).hex(), [], [], [], [], {}, leased, [], [])
        for path, empty in _PLACES:
            above = _place(self.spec, path[:-1])
            (oci.items if isinstance(empty, list) else oci.section)(self.spec, *path)  # refuses any other type
            if above.get(path[-1]) is None:
                self.record.made[".".join(path)] = path[-1] in above
                above[path[-1]] = type(empty)()

    def take_out(self, place: str, unwanted: Any) -> list[Any]:
        """Removes every item of a list for which `unwanted(item)`; they come back with `stripped`."""
        items = _place(self.spec, place.split(".")) or []
        taken = []
        for index in range(len(items) - 1, -1, -1):
            if unwanted(items[index]):
                self.record.removed.append([place, index, items[index]])
                taken.append(items.pop(index))
        return taken[::-1]

    def mount(self, source: str, target: str, flags: Sequence[str]) -> None:
        options = ["bind", "rprivate", *flags]
        entry = {"destination": target, "type": "bind", "source": source, "options": options}
        self.spec["mounts"].append(entry)
        self.record.mounts.append([target, source])

    def device(self, node: DeviceNode) -> None:
        mode = stat.S_IMODE(os.stat(node.source).st_mode)
        entry = {"path": node.target, "type": "c", "major": node.major, "minor": node.minor, "fileMode": mode}
        self.spec["linux"]["devices"].append({**entry, "uid": 0, "gid": 0})
        self.record.devices.append(node.target)

    def rule(self, rule: DeviceRule) -> None:
        self.spec["linux"]["resources"]["devices"].append(_rule(rule.major, rule.minor))
        self.record.rules.append([rule.major, rule.minor])

    def annotate(self, key: str, value: str) -> None:
        if key not in self.spec["annotations"]:
            self.spec["annotations"][key] = value
            self.record.annotations.append(key)

    def finish(self, hook_words: Sequence[str]) -> Spec:
        """Adds the hooks and the record."""
        for stage, action in _STAGES.items():
            path, *words = hook_words
            args = [os.path.basename(path), *words, action]
            env = [HOOK_ENV, _NONCE_ENV + self.record.nonce]
            self.spec["hooks"][stage].append({"path": path, "args": args, "env": env, "timeout": HOOK_TIMEOUT_S})
        self.record.annotations.append(names.APPLIED_ANNOTATION)
        text = json.dumps({"version": VERSION, **self.record._asdict()}, separators=(",", ":"))
        self.spec["annotations"][names.APPLIED_ANNOTATION] = text
        return self.spec


def _rule(major: int, minor: int) -> dict[str, Any]:
    return {"allow": True, "type": "c", "major": major, "minor": minor, "access": "rw"}


def edited(
    bundle: Bundle, plan: Plan, tree: SpecTree, hook_words: Sequence[str], stderr_path: str, leased: bool
) -> Spec:
    """`bundle.spec` with everything of `plan` that a spec can carry, and our hook for the rest.

    `hook_words` is the hook's absolute path and its options; `stderr_path` is where crun sends what hooks print. Raises
    KernelError when a target is not safe.
    """
    editor = _Editor(bundle.spec, leased)
    for op in plan.ops:
        if isinstance(op, Mount):
            _edit_mount(editor, op, tree)
        elif isinstance(op, DeviceNode):
            _edit_device(editor, op, tree)
        elif isinstance(op, DeviceRule):
            editor.rule(op)
        elif isinstance(op, Link):
            editor.record.ops.append(["Link", op.target, op.text])
        elif isinstance(op, LdCache):
            editor.record.ops.append(["LdCache", [list(entry) for entry in op.entries]])
        elif isinstance(op, ProcMask):
            editor.record.ops.append(["ProcMask", list(op.bus_ids)])
    if stderr_path:
        editor.annotate(names.CRUN_STDERR_ANNOTATION, stderr_path)
    return editor.finish(hook_words)


def _edit_mount(editor: _Editor, op: Mount, tree: SpecTree) -> None:
    target = tree.place(op.target, op.kind)
    tree.add(target, op.source)
    editor.mount(op.source, target, op.flags)
    editor.record.ops.append(["Mount", target, op.source, op.kind])


def _edit_device(editor: _Editor, op: DeviceNode, tree: SpecTree) -> None:
    """A real device at its own path is a device of the spec; any other is a file to be mounted."""
    if not op.simulated and op.source == op.target and op.target.startswith(_HOST_DEV):
        tree.require_place(op.target)
        editor.device(op)
        return
    target = tree.place(op.target, "device" if not op.simulated else "file")
    tree.add(target, op.source)
    editor.mount(op.source, target, ("nosuid", "noexec", "nodev") if op.simulated else ("nosuid", "noexec"))


# The file


def write(path: str, spec: Spec) -> None:
    """Replaces config.json atomically; owner and mode stay. Raises KernelError."""
    temporary = f"{path}.gpushare-{os.getpid()}"
    try:
        status = os.stat(path)
        data = json.dumps(spec).encode("utf-8", "surrogatepass")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(temporary, flags, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fchown(fd, status.st_uid, status.st_gid)
            os.fchmod(fd, stat.S_IMODE(status.st_mode))
            os.rename(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        finally:
            os.close(fd)
    except OSError as error:
        raise KernelError(f"write {path!r}: {error.strerror}") from None
