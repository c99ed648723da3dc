"""What a container that may use every device must not use: NVIDIA's devices that it was not granted (start path, for
such containers only).

    sees_everything(bundle)     -> bool                whether the engine gave it all devices, or NVIDIA's
    numbers(root, granted)      -> [(major, minor)]    to deny; minor -1 stands for all of a major
    narrower(rule, majors)      -> [rule] or None      a rule for other devices and NVIDIA's, without those
    majors(root)                -> {major}             of NVIDIA's devices on this host
    is_there(root)              -> bool                whether this host has such devices at all
    applies(bundle, config)     -> bool                whether a container that asks for nothing loses them

`--privileged` is a rule for all devices, so leaving nodes out is not enough: mknod makes them again. Rules of a spec
count in their order, so these come after that one. They name single minors, since cgroup v1 knows no exception of an
exception: what `195:*` denies, `195:0` cannot allow again (kernel: security/device_cgroup.c; runc refuses to try).
For the same reason nothing can be denied behind `c *:* rwm`: that becomes a rule for each other major.
"""

from __future__ import annotations

import os
import stat

from . import oci, policy
from .dialects import injected, nvidia
from .driverroot import listing, short_read
from .light import Any, Iterable, Optional
from .model import Bundle, Config

ALL_MINORS = -1
_GPUS = 64  # minors that a GPU added later could get
_CONTROL = (254, 255)  # nvidia-modeset, nvidiactl
_DIRECTORIES = ("", "nvidia-caps", "nvidia-caps-imex-channels")  # below dev
_MAX_BYTES = 1 << 16
_CHARACTER_MAJORS = 512  # CHRDEV_MAJOR_MAX, include/linux/fs.h


def sees_everything(bundle: Bundle) -> bool:
    return (
        injected.allows_everything(bundle.spec) or injected.reaches(bundle.spec) or bool(nvidia.conflicts(bundle.spec))
    )


def may_apply(bundle: Bundle) -> bool:
    """The part of `applies` that needs no configuration."""
    return oci.has_sys_admin(bundle.spec) and bundle.container_type != "sandbox" and sees_everything(bundle)


def applies(bundle: Bundle, config: Config) -> bool:
    return may_apply(bundle) and not policy.listed(bundle, config.policy) and is_there(config.driver_root)


def _majors(root: str) -> set[int]:
    """Of the driver's modules that are loaded. Source: proc(5), /proc/devices."""
    text = short_read(os.path.join(root, "proc/devices"), _MAX_BYTES) or short_read("/proc/devices", _MAX_BYTES) or ""
    lines = (line.split() for line in text.partition("Block devices:")[0].splitlines())
    return {
        int(words[0]) for words in lines if len(words) == 2 and words[1].startswith("nvidia") and words[0].isdigit()
    }


def _nodes(root: str) -> set[tuple[int, int]]:
    """(major, minor) of the host's nodes that carry NVIDIA's name."""
    found = set()
    for directory in _DIRECTORIES:
        folder = os.path.join(root, "dev", directory)
        for name in listing(folder):
            try:
                status = os.lstat(os.path.join(folder, name))
            except OSError:
                continue
            if stat.S_ISCHR(status.st_mode) and (directory or name.startswith("nvidia")):
                found.add((os.major(status.st_rdev), os.minor(status.st_rdev)))
    return found


def is_there(root: str) -> bool:
    return bool(_majors(root) or _nodes(root))


def majors(root: str) -> set[int]:
    return {nvidia.MAJOR, *_majors(root), *(major for major, _ in _nodes(root))}


def narrower(rule: Any, majors: set[int]) -> Optional[list[dict[str, Any]]]:
    """None: it has nothing to do with NVIDIA's devices. Pure."""
    major = injected.major_of(rule)
    if major is None or (major >= 0 and major not in majors):
        return None
    rest = range(_CHARACTER_MAJORS) if major < 0 else ()
    return [{**rule, "major": other} for other in rest if other not in majors]


def numbers(root: str, granted: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted. A major of which nothing is granted is denied as a whole, the others minor by minor: those that GPUs
    have or may get, and the nodes that are there."""
    kept, nodes = set(granted), _nodes(root)
    majors = {nvidia.MAJOR, *_majors(root)}
    whole = majors - {major for major, _ in kept}
    single = {number for number in nodes if number[0] not in whole}
    if nvidia.MAJOR not in whole:
        single |= {(nvidia.MAJOR, minor) for minor in (*range(_GPUS), *_CONTROL)}
    return sorted({(major, ALL_MINORS) for major in whole} | (single - kept))
