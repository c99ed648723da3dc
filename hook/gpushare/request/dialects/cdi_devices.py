"""Devices that other software put into config.json before us: CDI, DRA, NVIDIA's own runtime, a device plugin.

    read(bundle, inventory)                 -> Request | None      names the devices, sets no limit
    facts(spec, sys_admin)                  -> dict                fields of Bundle: minors, injected, volumes
    allows_everything(spec)                 -> bool                --privileged: a rule for all devices
    allows_every_device(rule)               -> bool                whether it is that rule
    reaches(rule)                           -> bool                whether a rule could open NVIDIA's devices
    rules_reach(spec)                       -> bool                whether any rule of a spec does
    rule_for_nvidia(rules)                  -> str                 "195:0" of a rule that names NVIDIA's major

Often with NVIDIA_VISIBLE_DEVICES=void, which then only means that the devices are there already. A privileged container
with access to every device has the host's whole list in its spec; that is not a request. Runs on the start path.
"""

from __future__ import annotations

from typing import Any, Optional

from ...core import constants
from ...core.errors import DeviceError
from ...core.model import Bundle, Device, Inventory, Request, Selection
from ...gpu import mig
from .. import speckeys
from . import nvidia

_CAPABILITY = "/dev/nvidia-caps/nvidia-cap"
_IMEX = "imex/"  # directory of channels among the mounts that request devices
_MODESET_MINOR = 254  # 254 and 255 are control nodes


def allows_every_device(rule: Any) -> bool:
    """A device rule without a type, as --privileged makes it. Numbers beside it mean nothing: runc and the kernel
    look no further (security/device_cgroup.c)."""
    return isinstance(rule, dict) and rule.get("allow") is True and rule.get("type") in (None, "", "a")


def allows_everything(spec: dict[str, Any]) -> bool:
    return any(map(allows_every_device, speckeys.items(spec, "linux", "resources", "devices")))


def reaches(rule: Any) -> bool:
    """Whether a device rule lets a program open devices that could be NVIDIA's: the first of their majors is fixed, the
    others are above it. False for the rules that engines and runtimes always write: majors below it, and `c *:* m`,
    which only makes nodes. scan.c decides the same from the text and may only err towards True."""
    if not isinstance(rule, dict) or rule.get("allow") is not True:
        return False
    kind, major = rule.get("type"), rule.get("major")
    if kind == "b" or (kind == "c" and rule.get("access") == "m"):
        return False
    return kind != "c" or type(major) is not int or not 0 <= major < constants.NVIDIA_MAJOR


def rules_reach(spec: dict[str, Any]) -> bool:
    return any(map(reaches, speckeys.items(spec, "linux", "resources", "devices")))


def rule_for_nvidia(rules: list[Any]) -> str:
    """Return the numbers of the first rule that names NVIDIA's major; "" if there is none."""
    found = (rule for rule in rules if reaches(rule) and not allows_every_device(rule))
    rule = next((rule for rule in found if rule.get("major") == constants.NVIDIA_MAJOR), None)
    if rule is None:
        return ""
    minor = rule.get("minor")
    return f"{constants.NVIDIA_MAJOR}:{minor if type(minor) is int and minor >= 0 else '*'}"


def _minor_of(path: object) -> int:
    """7 for /dev/nvidia7; -1 for anything else."""
    target = nvidia.target_of(path)
    if not target.startswith(nvidia.DEVICE_PREFIX):
        return -1
    number = target[len(nvidia.DEVICE_PREFIX) :]
    return int(number) if number.isascii() and number.isdigit() and len(number) <= 3 else -1


def _minor_of_device(device: dict[str, Any]) -> int:
    """Also of a node that was given another name (`--device /dev/nvidia0:/dev/gpu`): its numbers are what opens."""
    major, minor = device.get("major"), device.get("minor")
    if (
        type(major) is int
        and major == constants.NVIDIA_MAJOR
        and device.get("type") in ("c", "u")
        and isinstance(minor, int)
    ):
        return minor
    return _minor_of(device.get("path"))


def _mounted_nodes(mounts: list[dict[str, Any]]) -> list[object]:
    """Return the targets of mounts of driver nodes. The source must be such a node too: an image chooses the target
    of a volume (VOLUME /dev/nvidia0), and the engine its source."""
    return [
        mount.get("destination")
        for mount in mounts
        if "nvidia" in str(mount.get("source"))
        and nvidia.target_of(mount.get("source")).rpartition("/")[2].startswith("nvidia")
    ]


def _objects(spec: dict[str, Any], *keys: str) -> list[dict[str, Any]]:
    return [one for one in speckeys.items(spec, *keys) if isinstance(one, dict)]


def facts(spec: dict[str, Any], sys_admin: bool) -> dict[str, Any]:
    """Return the fields of Bundle about devices, in the order of the spec. `volumes` are mounts of /dev/null at
    VOLUME_ROOT/<id>, which images cannot add. A container with access to every device has no other ones."""
    mounts, rules = _objects(spec, "mounts"), speckeys.items(spec, "linux", "resources", "devices")
    root = f"{nvidia.VOLUME_ROOT}/"
    requests = [mount.get("destination") for mount in mounts if mount.get("source") == "/dev/null"]
    volumes = [
        target[len(root) :].strip("/") for target in requests if isinstance(target, str) and target.startswith(root)
    ]
    everything = sys_admin and any(map(allows_every_device, rules))
    found: list[int] = []
    if not everything:
        found += map(_minor_of_device, _objects(spec, "linux", "devices"))
        found += map(_minor_of, _mounted_nodes(mounts))
    minors = tuple(dict.fromkeys(minor for minor in found if 0 <= minor < _MODESET_MINOR))
    rule = "" if minors or everything else rule_for_nvidia(rules)
    return {
        "minors": minors,
        "injected": f"{nvidia.DEVICE_PREFIX}{minors[0]}" if minors else f"a rule for devices {rule}" if rule else "",
        "volumes": tuple(name for name in volumes if not name.startswith(_IMEX)),
        "imex_volumes": tuple(name[len(_IMEX) :] for name in volumes if name.startswith(_IMEX)),
    }


def _capabilities(spec: dict[str, Any]) -> frozenset[int]:
    """21 for /dev/nvidia-caps/nvidia-cap21."""
    paths = [device.get("path") for device in _objects(spec, "linux", "devices")]
    paths += _mounted_nodes(_objects(spec, "mounts"))
    rests = [path[len(_CAPABILITY) :] for path in map(nvidia.target_of, paths) if path.startswith(_CAPABILITY)]
    return frozenset(int(rest) for rest in rests if rest.isascii() and rest.isdigit() and len(rest) <= 6)


def _uuids(gpu: Device, spec: dict[str, Any], inventory: Inventory) -> tuple[str, ...]:
    """The GPU's; of a divided one those of the MIG devices whose capability nodes are there, too. With its node alone
    it is meant as a whole."""
    parts = tuple(device for device in inventory.mig if device.parent == gpu.uuid)
    given = _capabilities(spec) if parts else frozenset()
    if not given:
        return (gpu.uuid,)
    opened = mig.opened_by(inventory.root, given, parts)
    return (gpu.uuid,) if opened is None else tuple(device.uuid for device in opened)


def read(bundle: Bundle, inventory: Inventory) -> Optional[Request]:
    """The devices, by uuid. Raises DeviceError for one that this host's driver does not have."""
    found = bundle.minors
    if not found:
        return None
    by_minor = {device.minor: device for device in inventory.devices}
    missing = next((minor for minor in found if minor not in by_minor), None)
    if missing is not None:
        raise DeviceError(
            f"config.json has {nvidia.DEVICE_PREFIX}{missing}, which the driver does not know", "run gpushare refresh"
        )
    text = ",".join(f"{nvidia.DEVICE_PREFIX}{minor}" for minor in found)
    uuids = tuple(uuid for minor in found for uuid in _uuids(by_minor[minor], bundle.spec, inventory))
    if not uuids:
        raise DeviceError(
            f"config.json has {text}, and nodes in {_CAPABILITY.rpartition('/')[0]} of no MIG device of this host",
            "run gpushare refresh",
        )
    return Request(
        "injected",
        Selection("list", names=uuids),
        sources=(("devices in config.json", text),),
    )
