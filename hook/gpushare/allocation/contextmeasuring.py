"""Measure what a CUDA context takes on each kind of device of this host (`gpushare refresh`).

    measured(node, known, again) -> tuple[Context, ...]     one for each kind, measured or with the reason why not

A kind is a model, driver, MIG profile, and with or without MPS. Devices of one kind are tried in turn until one of them
could be measured. A device that a container has as a whole is left alone, and so is one that is full or exclusive.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from ..core.model import Context, Device, Node
from ..gpu import contextprobe, contexts, driverfiles
from ..gpu.selectors import usable_devices
from ..state import leases
from ..state.ledger import ledger_of
from .backends.mps import state as mps

TOTAL_S = 30.0  # for all devices together
_NO_TIME = "measuring the other devices took all of the time"
_TAKEN = "a container has the whole device"


def measured(node: Node, known: tuple[Context, ...], again: bool = False) -> tuple[Context, ...]:
    """Return the contexts of all kinds of devices. `known` ones that have a size are measured only if `again`, and stay
    if that fails."""
    inventory = node.inventory
    files = (
        driverfiles.nvml_library(inventory.files_root, inventory.driver_version),
        driverfiles.cuda_library(inventory.files_root, inventory.driver_version),
    )
    seen = leases.view(node.config.state_dir)
    taken = ledger_of(seen.live, node.config.policy, seen.blocked(node))
    until = time.monotonic() + TOTAL_S
    kept = {one[:4]: one for one in known if one.context_bytes and one.driver == inventory.driver_version}
    found = {} if again else dict(kept)
    for device in usable_devices(inventory):
        for kind, daemon in _kinds(device, node):
            if kind in found and found[kind].context_bytes:
                continue
            left_s = min(contextprobe.DEADLINE_S, until - time.monotonic())
            if device.uuid in taken.exclusive | taken.blocked:
                size, why = 0, _TAKEN
            elif left_s <= 0:
                size, why = 0, _NO_TIME
            else:
                size, why = contextprobe.probe(*files, device.uuid, left_s, daemon)
            found[kind] = Context(*kind, contexts.rounded(size), why)
    return tuple(one if one.context_bytes else kept.get(kind, one) for kind, one in found.items())


def _kinds(device: Device, node: Node) -> Iterator[tuple[tuple[str, str, str, bool], contextprobe.MpsDaemon]]:
    """Yield the kinds of contexts of this device: a plain one, and one under gpushare's MPS daemon if that serves
    root."""
    driver = node.inventory.driver_version
    yield contexts.key(device, driver), contextprobe.NO_DAEMON
    daemon = mps.state(device.uuid, node.config.state_dir)
    if not daemon.problem and daemon.uid in (0, mps.ANY_UID) and daemon.driver_version == driver:
        pipe = f"{mps.directory(node.config.state_dir, device.uuid)}/pipe"
        yield contexts.key(device, driver, mps=True), contextprobe.MpsDaemon(pipe, daemon.pid)
