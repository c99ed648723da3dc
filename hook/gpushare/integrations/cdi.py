"""What engines that know the Container Device Interface hear: document(node, settings) -> a CDI specification. Pure.

    podman run --device gpushare.io/share=any -e GPUSHARE_MEMORY=4Gi IMAGE

Each device adds our hooks and a variable that names it; how much of it comes from the container's own words, as ever.
The variable's name has the device's in it: an engine that is given two devices keeps the last of two variables of one
name, and a container that asked for two would get one.

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
from ..gpu.selectors import is_among, usable_devices

KIND = "gpushare.io/share"
ANY = "any"
FOLDERS = ("/etc/cdi", "/var/run/cdi")  # where engines look
FILES = tuple(f"/etc/cdi/gpushare.{ending}" for ending in ("yaml", "json"))  # where docs have it written
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")  # "CDI JSON specification": names of devices
_EARLIEST = "0.3.0"  # what all engines that know CDI take
_DIGIT_FIRST = "0.5.0"  # "Released versions": names may begin with a digit


def device_names(node: Node) -> tuple[list[str], list[str]]:
    """(names that containers can be given, uuids that CDI has no way to write). Devices that policy forbids are in
    neither."""
    allowed = node.config.policy.allowed_devices
    uuids = [one.uuid for one in usable_devices(node.inventory) if not allowed or is_among(one, allowed)]
    writable = [uuid for uuid in uuids if _NAME.fullmatch(uuid)]
    return [ANY, *writable], [uuid for uuid in uuids if uuid not in writable]


def minimum_version(found: list[str]) -> str:
    """The oldest version of the specification that has all we write: environment, hooks, and these names."""
    return _DIGIT_FIRST if any(name[0].isdigit() for name in found) else _EARLIEST


def variable(name: str) -> str:
    """The one by which a device is asked for; its value is what GPUSHARE_DEVICES would be."""
    return constants.ENV_CDI_PREFIX + re.sub(r"\W", "_", name)


def document(node: Node, settings: Settings) -> dict[str, Any]:
    """`settings.hook` is the hook's path for the engine."""
    found, _ = device_names(node)
    hooks = [{"hookName": stage, **hookfiles.entry_of(settings, stage)} for stage in hookfiles.STAGES]
    devices = [
        {"name": name, "containerEdits": {"env": [f"{variable(name)}={name}"], "hooks": hooks}} for name in found
    ]
    return {"cdiVersion": minimum_version(found), "kind": KIND, "devices": devices}
