"""gpushare k8s-plugin."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import click

from ..config import node
from ..core.errors import GpushareError, RequestError
from ..core.model import Node
from ..core.quantity import size_bytes
from ..core.quoting import shown
from . import facts
from .options import Paths, given, with_interval, with_no_color, with_xid_options, xids
from .output import write_now

FOLDER = "/var/lib/kubelet/device-plugins"
KINDS = ("memory", "compute", "gpu", "devices")  # offers.VARIABLES, which need not be imported to parse an option
_MIB = 1 << 20
# A qualified name, as Kubernetes requires it of an extended resource: DNS subdomain, slash, name
_LABEL = "[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_RESOURCE = re.compile(rf"{_LABEL}(\.{_LABEL})*/[A-Za-z0-9]([A-Za-z0-9_.-]{{0,53}}[A-Za-z0-9])?")


@click.command("k8s-plugin")
@click.option(
    "--kubelet",
    "folder",
    callback=given,
    default=FOLDER,
    show_default=True,
    metavar="DIR",
    help="Directory of kubelet's socket.",
)
@click.option(
    "--memory-unit",
    "unit",
    default="1Mi",
    show_default=True,
    metavar="SIZE",
    help="Unit of gpushare.io/memory-mib; another unit gives another resource name, such as memory-gib.",
)
@click.option(
    "--whole", multiple=True, metavar="DEVICE", help="Offer this device undivided, as gpushare.io/gpu; can be repeated."
)
@click.option(
    "--resource",
    "resources",
    multiple=True,
    metavar="KIND=NAME",
    help="KIND: memory, compute, gpu; or devices, a number of devices, offered only with this option. Can be repeated.",
)
@with_xid_options
@click.option("--check", is_flag=True, help="Fail unless a plugin runs that answers, for example as a probe.")
@with_interval(5.0, "Time between two checks of the devices.")
@with_no_color
@click.pass_obj
def k8s_plugin(
    paths: Paths,
    folder: str,
    unit: str,
    whole: tuple[str, ...],
    resources: tuple[str, ...],
    nvml: str,
    ignored: str,
    check: bool,
    interval: float,
) -> None:
    """Offer the devices of this node to kubelet, as a device plugin.

    Devices are offered as gpushare.io/memory-mib, which counts units of memory, and gpushare.io/compute, which counts
    percent of one device. Devices that are divided into equal shares (sharing in the configuration) and devices of
    --whole are offered as gpushare.io/gpu. A container gets the device that kubelet chooses. The plugin needs grpcio
    and protobuf: pip install 'gpushare[kubernetes]'.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # the plugin prints errors itself
    unit_mib, names = _unit_mib(unit), _names(resources)
    from ..integrations.kubelet import plugin  # imports gRPC, so only after the command line was parsed

    if check:
        plugin.require_answers(os.path.abspath(folder))
        return
    settings = plugin.Settings(os.path.abspath(folder), unit_mib, whole, interval, nvml, xids(ignored), names)
    plugin.run(_node(paths, whole), paths.state_dir, settings, write_now)


def _unit_mib(text: str) -> int:
    hint = "write 1Mi, 64Mi or 1Gi"
    try:
        size = size_bytes("--memory-unit", text)
    except RequestError as error:
        error.hint = hint  # size_bytes has a hint about limits
        raise
    if size % _MIB:
        raise RequestError(f"--memory-unit={shown(text)}: not whole MiB", hint)
    return size // _MIB


def _names(options: Sequence[str]) -> dict[str, str]:
    """Parse --resource. Raise RequestError."""
    found: dict[str, str] = {}
    for option in options:
        kind, _, name = option.partition("=")
        if kind not in KINDS or not _RESOURCE.fullmatch(name) or len(name) > 253:
            hint = f"write {', '.join(KINDS[:-1])} or {KINDS[-1]}, and a name such as memory=nvidia.com/gpumem"
            raise RequestError(f"--resource {shown(option)}: not KIND=DOMAIN/NAME", hint)
        if kind in found or name in found.values():
            raise RequestError(f"--resource {shown(option)}: given twice", "give each resource one name of its own")
        found[kind] = name
    return found


def _node(paths: Paths, whole: tuple[str, ...]) -> Node:
    """The node from node.json: to compile it again takes the driver's library, which a pod does not have. Raises
    RequestError for a device of --whole that does not exist."""
    from ..gpu.selectors import is_among, usable_devices

    found = node.last(paths.state_dir) or facts.host(paths)
    for name in whole:
        if not any(is_among(device, [name]) for device in usable_devices(found.inventory)):
            raise RequestError(f"--whole {shown(name)}: no such device", "see `gpushare devices`")
    if not found.inventory.devices:
        raise GpushareError("this host has no device", "load the driver")
    return found
