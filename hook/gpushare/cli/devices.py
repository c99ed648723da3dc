"""gpushare devices."""

from __future__ import annotations

from typing import Any

import click

from ..allocation import limit_update, placement
from ..core.model import Device, Node
from ..core.quantity import human
from ..gpu.selectors import device_name
from ..state import leases
from ..state.ledger import capacity_percent
from . import facts
from .options import Paths, with_format
from .output import Column, bar, bar_column, state_style, write_json, write_table

_COLUMNS = (
    Column("device", right=True),
    Column("model", leaves=4),
    Column("memory", right=True),
    Column("granted", right=True),
    bar_column("taken"),
    Column("free", right=True),
    Column("compute", right=True, leaves=1),
    Column("compute free", right=True, leaves=2),
    Column("containers", right=True, leaves=3),
    Column("state", style=state_style),
    Column("context", leaves=5),
    Column("uuid", leaves=6),
)


@click.command()
@with_format
@click.pass_obj
def devices(paths: Paths, output: str) -> None:
    """List GPUs and MIG devices, and how much of each is free."""
    host = facts.host(paths)
    seen = leases.view(paths.state_dir)
    live = limit_update.settled(paths.state_dir, seen.live, keep=False)
    ledger = placement.ledger_of(live, host.config.policy, seen.blocked(host))
    found = listed(host, ledger)
    if output == "json":
        write_json(found)
        return
    write_table(
        _COLUMNS,
        [
            (
                one["name"],
                one["model"],
                human(one["memory_bytes"]) if one["memory_bytes"] else "unknown",
                human(one["granted_bytes"]),
                bar(one["granted_bytes"], one["grantable_bytes"]),
                human(one["free_bytes"]),
                f"{one['compute_granted_percent']}%",
                f"{one['compute_free_percent']}%",
                str(one["containers"]),
                one["state"],
                f"{human(one['context_bytes'])} {one['context_source']}",
                one["uuid"],
            )
            for one in found
        ],
    )
    facts.warn_of_hidden_shares(facts.LESS_FREE)


def listed(host: Node, ledger: placement.Ledger) -> list[dict[str, Any]]:
    """All devices as JSON values, each GPU before its MIG devices."""
    everything = (*host.inventory.devices, *host.inventory.mig)
    in_order = sorted(everything, key=lambda device: (device.index, device.mig_index))
    return [_plain(device, host, ledger) for device in in_order]


def _plain(device: Device, host: Node, ledger: placement.Ledger) -> dict[str, Any]:
    """One device as JSON values. `grantable_bytes` is the total that may be granted (memory times memory_overcommit).
    Only hard limits count as granted compute."""
    grantable = placement.capacity_bytes(device, host.config)
    compute = sum(percent for _, percent in ledger.compute.get(device.uuid, ()))
    grantable_percent = capacity_percent(device, host.config)
    state = "open"
    granted = ledger.used.get(device.uuid, 0)
    if device.uuid in ledger.blocked:
        state, free = "unknown use", 0
    elif any(part.parent == device.uuid for part in host.inventory.mig):
        state, grantable, free = "divided", 0, 0
    elif device.uuid in ledger.exclusive:
        state, granted, free = "exclusive", grantable, 0
    else:
        free = max(0, grantable - granted)
    return {
        "name": device_name(device),
        "index": device.index,
        "uuid": device.uuid,
        "minor": device.minor,
        "bus_id": device.bus_id,
        "model": device.model,
        "memory_bytes": device.memory_bytes,
        "reserved_bytes": device.reserved_bytes,
        "context_bytes": device.context_bytes,
        "context_source": facts.context_source(device, host.inventory),
        "grantable_bytes": grantable,
        "granted_bytes": granted,
        "free_bytes": free,
        "compute_granted_percent": compute,
        "compute_grantable_percent": grantable_percent,
        "compute_free_percent": max(0, grantable_percent - compute) if state == "open" else 0,
        "containers": len(ledger.holders.get(device.uuid, ())),
        "state": state,
    }
