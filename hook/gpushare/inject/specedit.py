"""Write a plan into config.json: the second way to carry out a plan (start path).

    Editor(spec, leased)                          one edit: remove the work of other tools, then add the plan
        .take_out_foreign(why)                    -> lines
        .narrow(root)                             remove NVIDIA's devices from rules that also cover other devices
        .deny(numbers)                            deny devices that --privileged would allow
        .put_in(plan, tree, hook_words, stderr, shim_dir) -> Spec   a new value; unknown fields are kept
    write(path, spec)                             temporary file and rename; owner and mode stay

Operations that a spec cannot hold are recorded for our hook; spec_record.py reads the record and reverts the edit. Most
mounts are recorded too, because a runtime takes ten times as long for each. The mounts that enforce limits stay in the
spec: a runtime that runs no hooks then gives no device without the shim.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Sequence
from typing import Any

from ..core import constants
from ..core.errors import KernelError, what_to_do
from ..core.ops import (
    DEVICE_FLAGS,
    DeviceNode,
    Mount,
    Plan,
    call,
)
from ..core.quoting import shown
from ..request import deny_devices, speckeys
from ..request.dialects import cdi_devices, nvidia
from ..system import syscalls
from . import spec_record
from .spec_record import KERNEL_LIMITS, NONCE_ENV, PLACES, STAGES, UNIFIED, Record, Spec, place, rule
from .spectree import SpecTree

HOOK_PROGRAM = "gpushare-hook"
HOOK_ENV = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HOOK_TIMEOUT_S = 30


class Editor:
    """One edit of one copy of a spec, and the record of it. `leased`: the container has a share of a device."""

    def __init__(self, spec: Spec, leased: bool) -> None:
        self.spec: Spec = json.loads(json.dumps(spec))
        self.record = Record(os.urandom(16).hex(), [], [], [], [], {}, leased, [], [], [], [], [])
        for path, empty in PLACES:
            above = place(self.spec, path[:-1])
            read = speckeys.items if isinstance(empty, list) else speckeys.section
            read(self.spec, *path)  # raises for any other type
            if above.get(path[-1]) is None:
                self.record.made[".".join(path)] = path[-1] in above
                above[path[-1]] = type(empty)()
        for stage in self.spec["hooks"]:
            speckeys.items(self.spec, "hooks", stage)

    def take_out_foreign(self, why: Callable[[Any], str] = lambda hook: "no limit is granted") -> list[str]:
        """Remove what other tools added for the same purpose: NVIDIA's hooks, driver libraries, nodes and rules. Also
        remove our own hook, which would do all this again. The plan adds everything that the container was granted.
        `why` returns the reason to remove a hook for memory limits; "" if it stays. Return one line for each."""
        devices = self._take_out("linux.devices", nvidia.is_device)
        numbers = [(device.get("major"), device.get("minor")) for device in devices]  # of both types
        taken = [f"device {device['path']}" for device in devices]
        self._take_out("linux.resources.devices", lambda rule: _is_rule_for(rule, numbers))
        for stage in list(self.spec["hooks"]):
            hooks = self._take_out(f"hooks.{stage}", lambda hook: _is_unwanted(hook, why))
            taken += [f"{stage} hook {hook['path']}{_detail(hook, why)}" for hook in hooks]
        mounts = self._take_out("mounts", lambda mount: nvidia.is_driver_mount(mount) or nvidia.is_node_mount(mount))
        return taken + [f"mount at {mount['destination']}" for mount in mounts]

    def narrow(self, root: str) -> None:
        """Remove NVIDIA's devices from wider rules, after `take_out_foreign` and before `deny`; see deny_devices.py."""
        if not cdi_devices.rules_reach(self.spec):
            return
        rules, majors = self.spec["linux"]["resources"]["devices"], deny_devices.majors(root)
        for index in range(len(rules) - 1, -1, -1):
            others = deny_devices.narrower(rules[index], majors)
            if others is not None:
                self.record.narrowed.append([index, len(others), rules[index]])
                rules[index : index + 1] = others

    def deny(self, numbers: Sequence[tuple[int, int]]) -> None:
        """Add deny rules after the existing rules and before those of the plan; see deny_devices.py."""
        for major, minor in numbers:
            self.spec["linux"]["resources"]["devices"].append(spec_record.denial(major, minor))
            self.record.denied.append([major, minor])

    def put_in(
        self,
        plan: Plan,
        tree: SpecTree,
        hook_words: Sequence[str],
        stderr_path: str,
        shim_dir: str = "",
        shown: Callable[[Mount], str] = lambda op: op.source,
    ) -> Spec:
        """Return the spec with all of `plan` that a spec can hold, and our hook for the rest.

        `hook_words`: the hook's absolute path and options. `stderr_path`: where crun sends the output of hooks.
        `shim_dir`: if set, the hook makes the mounts that enforce no limit (see `stays`). `shown`: the source to use
        for a read-only mount (idmap.py). Raise KernelError if a target is not safe.
        """
        self._tree, self._shim_dir, self._shown = tree, shim_dir, shown
        call(plan.ops, "edit_spec", self)
        key = constants.HOOK_OUTPUT_ANNOTATIONS[1]
        if stderr_path and key not in self.spec["annotations"]:
            self.spec["annotations"][key] = stderr_path
            self.record.annotations.append(key)
        return self.finish(hook_words)

    def _take_out(self, where: str, unwanted: Callable[[Any], bool]) -> list[Any]:
        """Remove and record every item of a list for which `unwanted(item)`; `stripped` restores them."""
        items = place(self.spec, where.split(".")) or []
        taken = []
        for index in range(len(items) - 1, -1, -1):
            if unwanted(items[index]):
                self.record.removed.append([where, index, items[index]])
                taken.append(items.pop(index))
        return taken[::-1]

    def _mount(self, source: str, target: str, flags: Sequence[str]) -> None:
        options = ["bind", "rprivate", *flags]
        self.spec["mounts"].append({"destination": target, "type": "bind", "source": source, "options": options})
        self.record.mounts.append([target, source])

    def leave(self, kind: str, *fields: Any) -> None:
        """Leave an operation for our hook. `kind`: see ops.RECORDED."""
        self.record.ops.append([kind, *fields])

    def add_mount(self, op: Mount) -> None:
        target = self._tree.place(op.target, op.kind)
        self._tree.add(target, op.source)
        if not self._shim_dir or stays(op, self._shim_dir):
            self._mount(self._shown(op), target, op.flags)
            self.leave("Mount", target, op.source, op.kind)
        else:
            self.leave("Bind", target, op.source, op.kind, list(op.flags))

    def add_rule(self, major: int, minor: int) -> None:
        self.spec["linux"]["resources"]["devices"].append(rule(major, minor))
        self.record.rules.append([major, minor])

    def add_device(self, op: DeviceNode) -> None:
        """Add a real device at its own path as a device of the spec, and any other as a mount of a file."""
        if op.simulated or op.source != op.target:
            target = self._tree.place(op.target, "file" if op.simulated else "device")
            self._tree.add(target, op.source)
            if self._shim_dir:
                self.leave("Device", *op._replace(target=target))
            else:
                self._mount(op.source, target, DEVICE_FLAGS[op.simulated])
            return
        self._tree.require_place(op.target)
        mode = stat.S_IMODE(os.stat(op.source).st_mode)
        numbers = {"type": "c", "major": op.major, "minor": op.minor}
        owner = {"fileMode": mode, "uid": 0, "gid": 0}
        self.spec["linux"]["devices"].append({"path": op.target, **numbers, **owner})
        self.record.devices.append(op.target)

    def add_kernel_limit(self, region: str, limit_bytes: int, soft_bytes: int) -> None:
        """Let the runtime write the first limit when it makes the cgroup; our hook writes and checks all. Newer kernels
        take one region a write, and a runtime writes a file once, so the spec cannot hold them all."""
        if self.record.unified:
            return
        unified = self.spec["linux"]["resources"]
        if unified.get("unified") is None:
            self.record.made[".".join(UNIFIED)] = "unified" in unified
            unified["unified"] = {}
        for name, size in zip(KERNEL_LIMITS, (limit_bytes, soft_bytes)):
            there = speckeys.section(self.spec, *UNIFIED)
            self.record.unified.append([name, name in there, there.get(name)])
            self.spec["linux"]["resources"]["unified"][name] = f"{region} {size}"

    def finish(self, hook_words: Sequence[str]) -> Spec:
        """Add our hooks and the record, and return the spec."""
        for stage, action in STAGES.items():
            path, *words = hook_words
            args = [os.path.basename(path), *words, action]
            env = [HOOK_ENV, NONCE_ENV + self.record.nonce]
            self.spec["hooks"][stage].append({"path": path, "args": args, "env": env, "timeout": HOOK_TIMEOUT_S})
        self.record.annotations.append(constants.APPLIED_ANNOTATION)
        text = json.dumps({"version": spec_record.VERSION, **self.record._asdict()}, separators=(",", ":"))
        self.spec["annotations"][constants.APPLIED_ANNOTATION] = text
        return self.spec


def stays(op: Mount, shim_dir: str) -> bool:
    """Return whether the mount enforces a limit: the limits file, or the shim over a library."""
    return op.target == constants.PRIVATE_DIR or op.source.startswith(shim_dir.rstrip("/") + "/")


def _is_rule_for(rule: Any, numbers: list[tuple[Any, Any]]) -> bool:
    """Return whether a device rule allows one of these devices, or all of NVIDIA's."""
    if not isinstance(rule, dict) or rule.get("allow") is not True:
        return False
    return (rule.get("major"), rule.get("minor")) in numbers or rule.get("major") == constants.NVIDIA_MAJOR


def _is_unwanted(hook: Any, why: Callable[[Any], str]) -> bool:
    if nvidia.memory_hook_gpus(hook) is not None:
        return bool(why(hook))
    return nvidia.is_tool_hook(hook) or _is_our_hook(hook)


def _detail(hook: Any, why: Callable[[Any], str]) -> str:
    return f" {nvidia.MEMORY_HOOK} ({why(hook)})" if nvidia.memory_hook_gpus(hook) is not None else ""


def _is_our_hook(hook: Any) -> bool:
    path = hook.get("path") if isinstance(hook, dict) else None
    return isinstance(path, str) and os.path.basename(path) == HOOK_PROGRAM


# The file


def write(path: str, spec: Spec) -> None:
    """Replace config.json atomically; owner and mode stay. Raise KernelError."""
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
            _replace(path, temporary)
        except BaseException:
            os.unlink(temporary)
            raise
        finally:
            os.close(fd)
    except OSError as error:
        raise KernelError(f"write {shown(path)}: {error.strerror}", what_to_do(error)) from None


def _replace(path: str, new: str) -> None:
    """Do os.rename(new, path) without the wait of ext4 until the new file is allocated on disk."""
    try:
        syscalls.exchange(new, path)
    except syscalls.SyscallError:
        os.rename(new, path)
    else:
        os.unlink(new)  # the previous file
