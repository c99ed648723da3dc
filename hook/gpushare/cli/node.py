"""gpushare refresh, gpushare version."""

from __future__ import annotations

import os
from importlib import metadata
from typing import Any

import click

from .. import leases, node, region, storage
from ..dialects import device_name
from ..errors import GpushareError
from ..quantity import human
from .options import Paths, with_format
from .output import write_json, write_line


@click.command()
@with_format
@click.pass_obj
def refresh(paths: Paths, output: str) -> None:
    """Read configuration and driver now.

    Else the first container to start after a change does, and takes longer.
    """
    storage.prepare(paths.state_dir)
    host = node.compile_node(paths.config, paths.state_dir)
    if node.read_node(paths.config, paths.state_dir) != host:
        raise GpushareError(f"cannot write {os.path.join(paths.state_dir, node.FILE)}", "run as root")
    recovered = leases.recover(paths.state_dir, host)
    inventory = host.inventory
    if output == "json":
        value: dict[str, Any] = {
            "driver_version": inventory.driver_version,
            "root": inventory.root,
            "simulated": inventory.simulated,
        }
        value["cuda_version"] = inventory.cuda_version
        lists = {"devices": inventory.devices, "mig": inventory.mig}
        value["recovered"] = list(recovered)
        write_json({**value, **{key: [device._asdict() for device in some] for key, some in lists.items()}})
        return
    devices = "1 device" if len(inventory.devices) == 1 else f"{len(inventory.devices)} devices"
    cuda = f", CUDA {inventory.cuda_version}" if inventory.cuda_version else ""
    write_line(f"driver {inventory.driver_version}{cuda} in {inventory.root}, {devices}")
    for device in (*inventory.devices, *inventory.mig):
        size = human(device.memory_bytes) if device.memory_bytes else "memory size not known"
        write_line(f"  {device_name(device)}  {device.uuid}  {device.model}, {size}")
    if recovered:
        write_line(f"{paths.state_dir} was lost; leases of live containers again: {', '.join(recovered)}")


@click.command()
@with_format
def version(output: str) -> None:
    """Print the version.

    ABI is that of the memory which gpushare shares with the library in the container.
    """
    number = installed()
    if output == "json":
        write_json({"version": number, "abi": region.ABI_VERSION})
    else:
        write_line(f"gpushare {number}, ABI {region.ABI_VERSION}")


def installed() -> str:
    """The version of this installation."""
    try:
        return metadata.version("gpushare")
    except metadata.PackageNotFoundError:
        return "(source tree)"
