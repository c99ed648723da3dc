"""gpushare refresh, gpushare version."""

from __future__ import annotations

from importlib import metadata

import click

from .. import node, region, storage
from ..quantity import human
from .options import Paths, with_format
from .output import write_json, write_line


@click.command()
@with_format
@click.pass_obj
def refresh(paths: Paths, output: str) -> None:
    """Read configuration and driver anew, so that no container start has to."""
    storage.prepare(paths.state_dir)
    host = node.compile_node(paths.config, paths.state_dir)
    inventory = host.inventory
    if output == "json":
        value = {"driver_version": inventory.driver_version, "root": inventory.root, "simulated": inventory.simulated}
        write_json({**value, "devices": [device._asdict() for device in inventory.devices]})
        return
    write_line(f"driver {inventory.driver_version} in {inventory.root}, {len(inventory.devices)} device(s)")
    for device in inventory.devices:
        size = human(device.memory_bytes) if device.memory_bytes else "memory size not known"
        write_line(f"  {device.index} {device.uuid} {device.model}, {size}")


@click.command()
@with_format
def version(output: str) -> None:
    """The version of gpushare and of the memory layout that it shares with the shim."""
    try:
        number = metadata.version("gpushare")
    except metadata.PackageNotFoundError:
        number = "(source tree)"
    if output == "json":
        write_json({"version": number, "abi": region.ABI_VERSION})
    else:
        write_line(f"gpushare {number}, ABI {region.ABI_VERSION}")
