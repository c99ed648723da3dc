"""Describe devices for engines that support CDI: document(node, settings) -> a CDI specification. Has no side effects.

    podman run --device gpushare.io/share=any -e GPUSHARE_MEMORY=4Gi IMAGE

Each device adds gpushare's hooks and a variable that names the device. The container's own variables set the limits, as
without CDI. The device's name is part of the variable's name: if two devices set the same variable, the engine would
keep only the last value, and a container that requested two devices would get one.
A device with a uuid adds its nodes, too. Their rules are then in config.json, so the engine passes them to systemd.
`any` has no nodes, because the hook chooses the device and gives systemd its rules (systemdscope.py).

Source: CDI specification (SPEC.md of cncf-tags/container-device-interface), 0.3.0 and later.
Not on the start path.
"""

from __future__ import annotations

import re
from typing import Any

from ..core import constants
from ..core.model import Node
from ..engines import hookfiles
from ..engines.base import Settings
from ..gpu.drivernodes import of_cdi_device
from ..gpu.driverroot import HostNode
from ..gpu.selectors import is_among, usable_devices

KIND = "gpushare.io/share"
ANY = "any"
FOLDERS = ("/etc/cdi", "/var/run/cdi")  # where engines look
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")  # "CDI JSON specification": names of devices
_FOR_BUILDS = "org.mobyproject.buildkit.device.autoallow"  # BuildKit, docs/cdi.md
_EARLIEST = "0.3.0"  # the oldest version; all engines with CDI support it
_DIGIT_FIRST = "0.5.0"  # "Released versions": names may begin with a digit; hostPath
_ANNOTATED = "0.6.0"  # annotations of devices


def device_names(node: Node) -> tuple[list[str], list[str]]:
    """(names of the CDI devices, uuids that are no valid CDI names). Devices that policy forbids are in neither."""
    allowed = node.config.policy.allowed_devices
    uuids = [one.uuid for one in usable_devices(node.inventory) if not allowed or is_among(one, allowed)]
    writable = [uuid for uuid in uuids if _NAME.fullmatch(uuid)]
    return [ANY, *writable], [uuid for uuid in uuids if uuid not in writable]


def minimum_version(found: list[str], root: str = "/") -> str:
    """The oldest version of the specification that supports everything in our document: variables, hooks, nodes of
    this driver root, these names."""
    return _DIGIT_FIRST if root != "/" or any(name[0].isdigit() for name in found) else _EARLIEST


def variable(name: str) -> str:
    """The variable that requests this device. Its value has the syntax of GPUSHARE_DEVICES."""
    return constants.ENV_CDI_PREFIX + re.sub(r"\W", "_", name)


def document(node: Node, settings: Settings, for_builds: bool = False) -> dict[str, Any]:
    """The CDI specification of all devices. `settings.hook` is the path of the hook. `for_builds`: BuildKit gives a
    device to each step that names it (`RUN --device`), without `--allow device` of the build."""
    found, _ = device_names(node)
    hooks = [{"hookName": stage, **hookfiles.entry_of(settings, stage)} for stage in hookfiles.STAGES]
    by_uuid = {device.uuid: device for device in usable_devices(node.inventory)}
    devices = []
    with_nodes = False
    for name in found:
        edits: dict[str, Any] = {"env": [f"{variable(name)}={name}"], "hooks": hooks}
        nodes = [described(one) for one in of_cdi_device(node.inventory, by_uuid[name])] if name in by_uuid else []
        if nodes:
            edits["deviceNodes"] = nodes
            with_nodes = True
        allowed = {"annotations": {_FOR_BUILDS: "true"}} if for_builds else {}
        devices.append({"name": name, **allowed, "containerEdits": edits})
    version = _ANNOTATED if for_builds else minimum_version(found, node.inventory.root if with_nodes else "/")
    return {"cdiVersion": version, "kind": KIND, "devices": devices}


def described(node: HostNode) -> dict[str, str]:
    """The node without its numbers: engines read them at each start, and those of nvidia-uvm change."""
    path = f"/dev/{node.name}"
    return {"path": path, **({} if node.source == path else {"hostPath": node.source}), "permissions": "rw"}
