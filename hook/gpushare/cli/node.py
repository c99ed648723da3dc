"""gpushare refresh, gpushare version."""

from __future__ import annotations

import os
from importlib import metadata
from typing import Any

import click

from ..allocation import contextmeasuring, reservation
from ..config import node, node_diff, oci_runtime
from ..core.errors import GpushareError
from ..core.model import Node
from ..core.quantity import human
from ..gpu import charlinks, driverfiles
from ..gpu.selectors import device_name
from ..state import leases, log, shm_abi, storage
from . import facts
from .options import Paths, with_format
from .output import Progress, write_json, write_line


@click.command()
@click.option("--measure", is_flag=True, help="Measure CUDA contexts again.")
@with_format
@click.pass_obj
def refresh(paths: Paths, measure: bool, output: str) -> None:
    """Read the configuration and the driver now.

    Reports what has changed since the last refresh, and which containers were started with another driver. Measures the
    memory of a CUDA context on each kind of device, once for each driver. Creates the links in /dev/char by which
    systemd finds NVIDIA's devices. The exit code is not 0 if no container could start with a share.

    Run it after a change of the driver or the configuration. Otherwise the next container that starts reads them, so
    that its start takes longer, and context sizes are estimates.
    """
    storage.prepare(paths.state_dir)
    before = node.last(paths.state_dir)
    with Progress() as progress:
        progress.say("querying the driver")
        host = node.compile_node(
            paths.config,
            paths.state_dir,
            measure=lambda host, known: contextmeasuring.measured(host, known, measure),
        )
    if node.read_node(paths.config, paths.state_dir) != host:
        raise GpushareError(f"cannot write {os.path.join(paths.state_dir, node.FILE)}", "run as root")
    oci_runtime.remember_scopes(paths.config, paths.state_dir)
    recovered = reservation.recover(paths.state_dir, host)
    links = make_links(host.inventory.dev_root)
    found = None if before is None else node_diff.between(before, host)
    old = node_diff.outdated(leases.view(paths.state_dir).live, host)
    if output == "json":
        write_json(
            {
                **_plain(host),
                "recovered": list(recovered),
                "changes": None if found is None else [change._asdict() for change in found],
                "outdated": [{"id": name, "why": why} for name, why in old],
            }
        )
    else:
        _print(host)
        if links:
            write_line(f"created links in {charlinks.DIRECTORY}: {', '.join(map(os.path.basename, links))}")
        for change in found or ():
            write_line(f"changed: {change.text()}")
        if found == []:
            write_line("nothing has changed")
        for name, why in old:
            write_line(f"container {name} {why}: start it again")
        if recovered:
            write_line(f"{paths.state_dir} was lost; rebuilt the leases of running containers: {', '.join(recovered)}")
    driverfiles.require_usable(host.inventory)


def make_links(root: str) -> list[str]:
    """Make the links by which systemd knows the devices of this driver root. Report missing rights over /dev."""
    try:
        return charlinks.make(root, charlinks.DIRECTORY)
    except OSError as error:
        log.to_stderr(f"gpushare: cannot create links in {charlinks.DIRECTORY}: {error.strerror}")
        return []


def _plain(host: Node) -> dict[str, Any]:
    inventory = host.inventory
    return {
        "driver_version": inventory.driver_version,
        "cuda_version": inventory.cuda_version,
        "root": inventory.root,
        "libraries": inventory.files_root,
        "dev": inventory.dev_root,
        "simulated": inventory.simulated,
        "devices": [device._asdict() for device in inventory.devices],
        "mig": [device._asdict() for device in inventory.mig],
        "contexts": [one._asdict() for one in inventory.contexts],
    }


def _print(host: Node) -> None:
    inventory = host.inventory
    devices = "1 device" if len(inventory.devices) == 1 else f"{len(inventory.devices)} devices"
    cuda = f", CUDA {inventory.cuda_version}" if inventory.cuda_version else ""
    others = (("libraries", inventory.libraries), ("dev", inventory.dev))
    where = "".join(f" ({name} in {root})" for name, root in others if root)
    write_line(f"driver {inventory.driver_version}{cuda} in {inventory.root}{where}, {devices}")
    for device in (*inventory.devices, *inventory.mig):
        size = human(device.memory_bytes) if device.memory_bytes else "memory size not known"
        context = f"context {human(device.context_bytes)} {facts.context_source(device, inventory)}"
        write_line(f"  {device_name(device)}  {device.uuid}  {device.model}, {size}, {context}")


@click.command()
@with_format
def version(output: str) -> None:
    """Print the version.

    ABI is the version of the memory layout that gpushare shares with its library in containers.
    """
    number = installed()
    if output == "json":
        write_json({"version": number, "abi": shm_abi.ABI_VERSION})
    else:
        write_line(f"gpushare {number}, ABI {shm_abi.ABI_VERSION}")


def installed() -> str:
    """The version of this installation."""
    try:
        return metadata.version("gpushare")
    except metadata.PackageNotFoundError:
        return "(source tree)"
