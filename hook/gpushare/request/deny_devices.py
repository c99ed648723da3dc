"""Deny NVIDIA devices that a container was not granted but that its device rules allow (start path, for such
containers only).

    numbers(root, granted)      -> [(major, minor)]    to deny; minor -1: all of a major
    narrower(rule, majors)      -> [rule] or None      a rule without them; None: unchanged
    majors(root)                -> {major}             of NVIDIA's devices on this host
    is_there(root)              -> bool                whether this host has such devices
    applies(bundle, config)     -> bool                whether a container without a request loses them
    rules_open(spec, majors)    -> bool                whether device rules open devices of these majors
    refuse(bundle, config)                             the same for the hook: raises PolicyError

`--privileged` is a rule for all devices, so it is not enough to leave out nodes: mknod creates them again. Rules of a
spec apply in order, so the deny rules come after it. They name single minors, since cgroup v1 has no exception of an
exception: `195:0` cannot allow again what `195:*` denies (kernel: security/device_cgroup.c; runc refuses to try). For
the same reason no rule can deny anything after `c *:* rwm`, which becomes a rule for each other major.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import Any, Optional

from ..core import constants
from ..core.errors import PolicyError
from ..core.model import Bundle, Config
from ..gpu.driverroot import below, listing, short_read
from . import policy, speckeys
from .dialects import cdi_devices, nvidia

ALL_MINORS = -1
_GPUS = 64  # minors for GPUs that are added later
_CONTROL = (254, 255)  # nvidia-modeset, nvidiactl
_DIRECTORIES = ("", "nvidia-caps", "nvidia-caps-imex-channels")  # below dev
_MAX_BYTES = 1 << 16
_CHARACTER_MAJORS = 512  # CHRDEV_MAJOR_MAX, include/linux/fs.h
_MAJORS = 1 << 12  # include/linux/kdev_t.h; a runtime may truncate larger numbers
_EVERY_MAJOR = -1


def _has_nodes(bundle: Bundle) -> bool:
    """Return whether the spec of a --privileged container has NVIDIA's nodes or files."""
    return bundle.sys_admin and bool(nvidia.conflicts(bundle.spec))


def may_apply(bundle: Bundle) -> bool:
    """Check the part of `applies` that needs no configuration."""
    return cdi_devices.rules_reach(bundle.spec) or _has_nodes(bundle)


def applies(bundle: Bundle, config: Config) -> bool:
    """Return whether a container without a share has a rule, or if privileged a node, for NVIDIA's devices."""
    if policy.listed(bundle, config.policy) or not is_there(config.dev_root):
        return False
    if _has_nodes(bundle):
        return True
    return rules_open(bundle.spec, majors(config.dev_root))


def rules_open(spec: dict[str, Any], majors: set[int]) -> bool:
    """Return whether device rules let a program open devices of these majors. Pure."""
    rules = speckeys.items(spec, "linux", "resources", "devices")
    return cdi_devices.allows_everything(spec) or any(narrower(rule, majors) is not None for rule in rules)


def refuse(bundle: Bundle, config: Config) -> None:
    """Raise PolicyError for the hook, which runs after the device rules exist. Accept --privileged containers: they can
    change their own cgroup anyway, and many system containers of a host are privileged."""
    everything = bundle.sys_admin and cdi_devices.allows_everything(bundle.spec)
    if everything or not cdi_devices.rules_reach(bundle.spec) or not applies(bundle, config):
        return
    rules = speckeys.items(bundle.spec, "linux", "resources", "devices")
    rule = cdi_devices.rule_for_nvidia(rules) or "devices of every major"
    raise PolicyError(
        f"linux.resources.devices in config.json allows {rule}, so this container could open any GPU",
        "start the container through gpushare-runtime, which denies them, or leave out that device rule",
    )


def _majors(root: str) -> set[int]:
    """Return the majors of the driver's loaded modules. Source: proc(5), /proc/devices."""
    text = short_read(os.path.join(root, "proc/devices"), _MAX_BYTES) or short_read("/proc/devices", _MAX_BYTES) or ""
    lines = (line.split() for line in text.partition("Block devices:")[0].splitlines())
    return {
        int(words[0]) for words in lines if len(words) == 2 and words[1].startswith("nvidia") and words[0].isdigit()
    }


def _nodes(root: str) -> set[tuple[int, int]]:
    """Return (major, minor) of the host's nodes with NVIDIA's name."""
    found = set()
    for directory in _DIRECTORIES:
        folder = below(root, os.path.join("dev", directory))
        for name in listing(folder):
            try:
                status = os.lstat(os.path.join(folder, name))
            except OSError:
                continue
            if stat.S_ISCHR(status.st_mode) and (directory or name.startswith("nvidia")):
                found.add((os.major(status.st_rdev), os.minor(status.st_rdev)))
    return found


def is_there(root: str) -> bool:
    nodes = listing(below(root, "dev"))
    return bool(_majors(root)) or any(name.startswith("nvidia") for name in nodes)


def majors(root: str) -> set[int]:
    return {constants.NVIDIA_MAJOR, *_majors(root), *(major for major, _ in _nodes(root))}


def narrower(rule: Any, majors: set[int]) -> Optional[list[dict[str, Any]]]:
    """Return a rule without NVIDIA's devices. None: it stays, because it does not reach them, or because it covers all
    devices and `numbers` are denied after it. Pure."""
    if not cdi_devices.reaches(rule) or cdi_devices.allows_every_device(rule):
        return None
    major = rule.get("major", _EVERY_MAJOR)
    if major not in (None, _EVERY_MAJOR):
        known = type(major) is int and 0 <= major < _MAJORS
        return [] if not known or major in majors else None
    return [{**rule, "major": other} for other in range(_CHARACTER_MAJORS) if other not in majors]


def numbers(root: str, granted: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the devices to deny, sorted. A major without a grant is denied as a whole. The other majors are denied
    minor by minor: the minors that GPUs have or may get, and the minors of existing nodes."""
    kept, nodes = set(granted), _nodes(root)
    majors = {constants.NVIDIA_MAJOR, *_majors(root)}
    whole = majors - {major for major, _ in kept}
    single = {number for number in nodes if number[0] not in whole}
    if constants.NVIDIA_MAJOR not in whole:
        single |= {(constants.NVIDIA_MAJOR, minor) for minor in (*range(_GPUS), *_CONTROL)}
    return sorted({(major, ALL_MINORS) for major in whole} | (single - kept))
