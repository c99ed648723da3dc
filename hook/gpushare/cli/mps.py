"""gpushare mps start, stop, status."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import click

from ..allocation import backends
from ..allocation.backends.mps import daemon as mps_daemon
from ..allocation.backends.mps import state as mps
from ..allocation.backends.mps import status as mps_status
from ..core import constants, quantity
from ..core.errors import RequestError
from ..core.model import Device, Node
from ..core.quantity import human
from ..core.quoting import shown
from ..gpu.selectors import device_name, find_devices
from ..state import leases
from ..system import servicenotify
from . import facts
from .options import Paths, given, with_format
from .output import Column, Progress, state_style, write_json, write_line, write_table

_HELP = "Index or uuid; can be repeated.  [default: all]"
_DEVICE = click.option("--device", "wanted", multiple=True, metavar="DEVICE", help=_HELP)


class Row(NamedTuple):
    """One row of `gpushare mps status`."""

    device: Device
    seen: mps_status.DaemonStatus


@click.group(name="mps")
def mps_group() -> None:
    """Manage NVIDIA's MPS daemons for containers.

    There is one daemon for each GPU. Containers with GPUSHARE_BACKEND=mps use it, once its limits are set.
    """


def _uid(text: str) -> int:
    if text == "any":
        return mps.ANY_UID
    if text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < mps.ANY_UID:
        return int(text)
    raise RequestError(f"--uid {shown(text)} is not a user id", "use a number, or any")


def _devices(host: Node, wanted: tuple[str, ...]) -> list[Device]:
    """The devices of --device, or all GPUs if there is none."""
    if not wanted:
        return list(host.inventory.devices)
    found = {one.uuid: one for name in wanted for one in find_devices("--device", name, name, host.inventory)}
    return list(found.values())


def _most(host: Node, device: Device, compute: Optional[str], memory: Optional[str]) -> tuple[int, int]:
    """The daemon's limits (percent, bytes), from the options or else from policy."""
    rules = host.config.policy
    percent = rules.max_compute_percent if compute is None else quantity.whole_percent("--compute", compute)
    text = memory or rules.max_memory
    size = device.memory_bytes
    if text:
        size = quantity.bytes_of(quantity.amount("--memory", text), device.memory_bytes, device.granularity_bytes)
    return percent, size


@mps_group.command()
@_DEVICE
@click.option(
    "--compute", callback=given, metavar="PERCENT", help="Limit of each container.  [default: policy.max_compute]"
)
@click.option(
    "--memory", callback=given, metavar="SIZE", help="Limit of each process.  [default: policy.max_memory, or all]"
)
@click.option("--uid", default="0", show_default=True, metavar="UID|any", help="The user whose processes it serves.")
@click.option(
    "--shm",
    type=click.Choice([mps.SHM_OWN, mps.SHM_HOST]),
    default=mps.SHM_OWN,
    show_default=True,
    help="/dev/shm of containers. own: the daemon's own; host: unchanged, for containers that use the host's.",
)
@with_format
@click.pass_obj
def start(
    paths: Paths,
    wanted: tuple[str, ...],
    compute: Optional[str],
    memory: Optional[str],
    uid: str,
    shm: str,
    output: str,
) -> None:
    """Start or adopt the control daemon of each device.

    Containers can use a daemon as soon as its limits were set and read back. A daemon that already runs with these
    limits stays as it is.
    """
    host, number = facts.host(paths), _uid(uid)
    done = []
    with Progress() as progress:
        for device in _devices(host, wanted):
            progress.say(f"starting MPS on {device.uuid}")
            wish = mps_daemon.DaemonSettings(*_most(host, device, compute, memory), number, shm)
            done.append((device, mps_daemon.start(host, device, wish)))
    if len(done) == 1:  # systemd watches one process of a unit
        (one, (_, new)) = done[0]
        servicenotify.notify(new.pid, f"MPS on {device_name(one)}, at most {_limits(new)}")
    if output == "json":
        write_json(
            [{"device": device_name(one), "uuid": one.uuid, "how": how, "pid": new.pid} for one, (how, new) in done]
        )
        return
    for one, (how, new) in done:
        what = {"running": "runs already", "adopted": "was running and is used now"}.get(how, "runs")
        write_line(f"MPS {what} on {device_name(one)} ({one.uuid}): pid {new.pid}, at most {_limits(new)}")
    rules = host.config.policy
    if done and not backends.allows(rules, mps.NAME):
        allowed = ", ".join(rules.allowed_backends)
        write_line(f"No container uses it until {mps.NAME} is in policy.allowed_backends (now: {allowed})")


def _limits(found: mps.MpsState) -> str:
    memory = human(found.memory_bytes) if found.memory_bytes else "all memory"
    return f"{found.thread_percent}% and {memory}"


@mps_group.command()
@_DEVICE
@click.option("--force", is_flag=True, help="Stop it even if containers use it; their programs fail.")
@with_format
@click.pass_obj
def stop(paths: Paths, wanted: tuple[str, ...], force: bool, output: str) -> None:
    """Stop the control daemon of each device, and its servers."""
    mps_daemon.require_root()
    known = mps_status.known(paths.state_dir)
    done = []
    if wanted or known:  # where no daemon was started, the command also succeeds on a host without a driver
        host = facts.host(paths)
        uuids = [one.uuid for one in _devices(host, wanted)] if wanted else known
        done = [(uuid, mps_daemon.stop(host, uuid, force)) for uuid in uuids]
    if output == "json":
        write_json([{"uuid": uuid, "stopped": was_there} for uuid, was_there in done])
        return
    for uuid, was_there in done:
        write_line(f"MPS on {uuid} {'has ended' if was_there else 'was not running'}")
    if not done:
        write_line("MPS was not running")


@mps_group.command()
@_DEVICE
@with_format
@click.pass_obj
def status(paths: Paths, wanted: tuple[str, ...], output: str) -> None:
    """Show the daemons, their limits and their containers.

    The exit code is 1 if a daemon has died, its limits were changed, or containers need a restart; these are named.
    """
    mps_daemon.require_root()
    host = facts.host(paths)
    live = leases.view(paths.state_dir).live
    rows = [Row(device, mps_status.query(host, device, live)) for device in _devices(host, wanted)]
    if output == "json":
        write_json([_plain(row) for row in rows])
    else:
        write_table(_COLUMNS, [_cells(row) for row in rows])
        for row in rows:
            if row.seen.affected:
                which = ", ".join(constants.short(one.id) for one in row.seen.affected)
                name = device_name(row.device)
                write_line(f"MPS on {name} is a newer daemon than these containers started with; restart them: {which}")
    if any(row.seen.state in ("dead", "changed") or row.seen.affected for row in rows):
        raise SystemExit(1)


_COLUMNS = (
    Column("device", right=True),
    Column("state", style=state_style),
    Column("pid", right=True),
    Column("user", right=True),
    Column("compute", right=True),
    Column("memory", right=True),
    Column("clients", right=True),
    Column("containers", folds=True),
    Column("note", folds=True),
)


def _cells(row: Row) -> tuple[str, ...]:
    seen = row.seen
    found, runs = seen.found, seen.state in ("running", "changed")
    return (
        device_name(row.device),
        seen.state,
        str(found.pid) if runs else "-",
        ("any" if found.uid == mps.ANY_UID else str(found.uid)) if runs else "-",
        f"{found.thread_percent}%" if runs else "-",
        (human(found.memory_bytes) if found.memory_bytes else "all") if runs else "-",
        f"{len(seen.clients)}/{found.clients}" if runs else "-",
        ", ".join(constants.short(one.id) for one in seen.containers) or "-",
        seen.note or "-",
    )


def _plain(row: Row) -> dict[str, Any]:
    seen = row.seen
    found, runs = seen.found, seen.state in ("running", "changed")
    return {
        "device": device_name(row.device),
        "uuid": row.device.uuid,
        "state": seen.state,
        "note": seen.note,
        "pid": found.pid if runs else None,
        "uid": found.uid if runs and found.uid != mps.ANY_UID else None,
        "compute_percent": found.thread_percent if runs else None,
        "memory_bytes": found.memory_bytes or None if runs else None,
        "clients": list(seen.clients),
        "clients_max": found.clients if runs else None,
        "servers": list(seen.servers),
        "containers": [one.id for one in seen.containers],
        "restart": [one.id for one in seen.affected],
    }
