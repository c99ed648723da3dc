"""Describe devices for engines that support CDI: document(node, settings) -> a CDI specification. Changes nothing.

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

import os
import re
from itertools import chain
from typing import Any, NamedTuple, Optional

from ..core import constants
from ..core.errors import ConfigError
from ..core.model import Device, Node
from ..core.quoting import shown
from ..engines import hookfiles
from ..engines.base import Settings
from ..engines.host import Host
from ..gpu.drivernodes import of_cdi_device
from ..gpu.driverroot import HostNode
from ..gpu.selectors import device_name, is_among, usable_devices

KIND = "gpushare.io/share"
NVIDIA_KIND = "nvidia.com/gpu"  # of nvidia-ctk's files, and the kind that `podman run --gpus` requests
NVIDIA_FILES = tuple(f"/etc/cdi/gpushare-nvidia.{ending}" for ending in ("yaml", "json"))  # as the docs recommend
ANY, ALL = "any", "all"
_NVIDIA = re.compile(r"""^[ \t{]*["']?kind["']?\s*:\s*["']?nvidia\.com/gpu(?![\w.-])""", re.MULTILINE)
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


class _Entry(NamedTuple):
    """One device of a specification. Without `devices` it is any device that has room."""

    name: str
    devices: tuple[Device, ...] = ()


def _entries(node: Node, nvidia: bool) -> list[_Entry]:
    names, _ = device_names(node)
    devices = [one for one in usable_devices(node.inventory) if one.uuid in names]
    by_uuid = [_Entry(one.uuid, (one,)) for one in devices]
    if not nvidia:
        return [_Entry(ANY), *by_uuid]
    return [_Entry(ALL, tuple(devices)), *(_Entry(device_name(one), (one,)) for one in devices), *by_uuid]


def document(node: Node, settings: Settings, for_builds: bool = False, nvidia: bool = False) -> dict[str, Any]:
    """The CDI specification of all devices. `settings.hook` is the path of the hook. `for_builds`: BuildKit gives a
    device to each step that names it (`RUN --device`), without `--allow device` of the build. `nvidia`: the names of
    NVIDIA's own specification, nvidia.com/gpu=all, =0 and =UUID."""
    hooks = [{"hookName": stage, **hookfiles.entry_of(settings, stage)} for stage in hookfiles.STAGES]
    devices = []
    with_nodes = False
    found = _entries(node, nvidia)
    for name, some in found:
        selectors = [one.uuid for one in some] or [ANY]  # a request names uuids, which an image cannot know
        edits: dict[str, Any] = {"env": [f"{variable(one)}={one}" for one in selectors], "hooks": hooks}
        each = [of_cdi_device(node.inventory, one) for one in some]
        if each and all(each):
            edits["deviceNodes"] = [described(one) for one in dict.fromkeys(chain.from_iterable(each))]
            with_nodes = True
        allowed = {"annotations": {_FOR_BUILDS: "true"}} if for_builds else {}
        devices.append({"name": name, **allowed, "containerEdits": edits})
    root = node.inventory.dev_root if with_nodes else "/"
    version = _ANNOTATED if for_builds else minimum_version([one.name for one in found], root)
    return {"cdiVersion": version, "kind": NVIDIA_KIND if nvidia else KIND, "devices": devices}


def refuse_other_nvidia(host: Host, path: Optional[str]) -> None:
    """Raise ConfigError if a file of this host other than `path` has devices of NVIDIA_KIND. Two files with the same
    device make it unusable: CDI specification, "Conflicts"."""
    real = os.path.realpath(path) if path else ""
    for other in (
        file for folder in FOLDERS for ending in ("yaml", "json") for file in host.glob(f"{folder}/*.{ending}")
    ):
        if _NVIDIA.search(host.look(other)) and os.path.realpath(host.at(other)) != real:
            raise ConfigError(
                f"{shown(other)} has devices of {NVIDIA_KIND} already",
                "use these, with gpushare's runtime, or remove that file and what writes it (nvidia-ctk cdi generate)",
            )


def described(node: HostNode) -> dict[str, str]:
    """The node without its numbers: engines read them at each start, and those of nvidia-uvm change."""
    path = f"/dev/{node.name}"
    return {"path": path, **({} if node.source == path else {"hostPath": node.source}), "permissions": "rw"}
