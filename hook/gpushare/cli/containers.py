"""gpushare list, gpushare inspect."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple, Optional

import click

from ..core import constants
from ..core.errors import GpushareError, RequestError
from ..core.model import Lease
from ..core.quantity import human
from ..core.quoting import printable, shown
from ..gpu.selectors import device_name
from ..state import accounts, log, storage
from ..state.names import Names
from . import facts
from .ids import complete_ids
from .options import Paths, with_format
from .output import (
    BAR,
    Column,
    age,
    bar,
    is_tty,
    state_style,
    user_name,
    write_json,
    write_line,
    write_table,
    write_text,
)

_HOST, _BORROWED, _DRIVER = (Column(name, right=True) for name in ("on host", "borrowed", "driver part"))
_ACCOUNT = tuple(
    Column(title, right=True)
    for title in ("slot", "gpu granted", "gpu used", "memory granted", "memory used", "peak", "refused", "throttled")
)


# key of --filter -> whether a container has the value
_FILTERS: dict[str, Callable[[facts.Container, str], bool]] = {
    "id": lambda one, value: one.id.startswith(value),
    "name": lambda one, value: value in one.name.shown or one.name.matches(value),
    "status": lambda one, value: one.state == value,
    "device": lambda one, value: any(
        value in (device_name(use.share.device), use.share.device.uuid) for use in one.uses
    ),
}


def _filters(context: click.Context, option: click.Parameter, words: tuple[str, ...]) -> dict[str, list[str]]:
    """The values for each key. Raises BadParameter."""
    found: dict[str, list[str]] = {}
    for word in words:
        key, _, value = word.partition("=")
        if not word.strip():
            raise click.BadParameter("it is empty", param=option)
        if key not in _FILTERS or not value:
            keys = ", ".join(_FILTERS)
            raise click.BadParameter(f"{shown(word)} is not KEY=VALUE with one of the keys {keys}", param=option)
        found.setdefault(key, []).append(value)
    return found


@click.command("list")
@click.option("-q", "--quiet", is_flag=True, help="Print IDs only.")
@click.option("--no-trunc", is_flag=True, help="Print full IDs.")
@click.option(
    "-f",
    "--filter",
    "filters",
    multiple=True,
    callback=_filters,
    metavar="KEY=VALUE",
    help="Only containers with this id, name, status or device. A repeated key means any of its values.",
)
@with_format
@click.pass_obj
def list_(paths: Paths, quiet: bool, no_trunc: bool, filters: dict[str, list[str]], output: str) -> None:
    """List the containers that have a share of a GPU.

    Prints one line for each device of a container, the oldest container first. NAME is the name in docker or podman,
    or NAMESPACE/POD/CONTAINER in Kubernetes. `ls` and `ps` are other names of this command.
    """
    if quiet and output == "json":
        raise RequestError("--quiet prints IDs, not JSON", "leave out one of the options")
    everything = facts.with_unlimited(facts.containers(paths.state_dir))
    found = [
        one for one in everything if all(any(_FILTERS[key](one, value) for value in filters[key]) for key in filters)
    ]
    if output == "json":
        write_json([plain(one) for one in found])
        return
    if quiet:
        for one in found:
            write_line(_id(one, no_trunc))
        return
    if not found and is_tty():
        write_line("no container matches" if everything else facts.none())
        return
    facts.warn_of_hidden_shares()
    write_table(*_table([one._replace(id=_id(one, no_trunc)) for one in found]))
    notes = [f"{_id(one, no_trunc)}: {one.note}" for one in found if one.note] if is_tty() else []
    for line in ["", *notes] if notes else ():  # a note is too long for a table on a terminal
        write_line(line)


def _command(one: facts.Container) -> str:
    """The command line of a program that `gpushare run` started; "" for a container."""
    return one.lease.bundle if one.lease and one.lease.dialect == constants.RUN_DIALECT else ""


def _id(one: facts.Container, full: bool) -> str:
    return one.id if full else constants.short(one.id)


def limit_text(use: facts.Use) -> str:
    """The memory limit; where memory is lent, the request and the limit: "4 GiB..12 GiB"."""
    request = use.share.memory_limit_bytes
    if request is None:
        return "unlimited"
    return f"{human(request)}..{human(use.share.virtual_bytes)}" if use.share.lending else human(request)


def host_text(use: Optional[facts.Use]) -> str:
    """An oversubscribed share's memory on the host and its maximum: "1 GiB of 4 GiB"; that of a suspended one."""
    if use is not None and not use.share.counts:
        return human(use.host_bytes)
    if use is None or not use.share.virtual_bytes or use.share.lending:
        return "-"
    most = use.share.virtual_bytes - (use.share.memory_limit_bytes or 0)
    return f"{human(use.host_bytes)} of {human(most)}"


def borrowed_text(use: Optional[facts.Use]) -> str:
    """The memory that a container borrowed."""
    return human(use.borrowed_bytes) if use is not None and use.share.lending else "-"


def compute_text(use: facts.Use) -> str:
    """The device time that a container used in the last second, and its limit: "27% of 30%"."""
    used = "-" if use.compute is None else f"{use.compute.recent_percent:.0f}%"
    percent = use.share.compute_percent
    return used if percent is None else f"{used} of {percent}%{' soft' if use.share.soft else ''}"


class _Cell(NamedTuple):
    """A column of the list. `text` gets a container, and one of its shares or None. An optional column is shown only if
    a container has another text than "-" in it."""

    column: Column
    text: Callable[[facts.Container, Optional[facts.Use]], str]
    optional: bool = False


def _of_share(text: Callable[[facts.Use], str], without: str = "-") -> Callable[[Any, Optional[facts.Use]], str]:
    return lambda _, use: without if use is None else text(use)


_LIST = (
    _Cell(Column("container"), lambda one, _: one.id),
    _Cell(Column("name", leaves=1), lambda one, _: one.name.shown or "-", True),  # `gpushare run` gives none
    _Cell(Column("device", right=True), _of_share(lambda use: device_name(use.share.device))),
    _Cell(Column("memory used", right=True), _of_share(lambda use: human(use.used_bytes))),
    _Cell(Column("limit", right=True), _of_share(limit_text)),
    _Cell(_HOST, lambda _, use: host_text(use), True),
    _Cell(_BORROWED, lambda _, use: borrowed_text(use), True),
    _Cell(BAR, _of_share(lambda use: bar(use.used_bytes, use.limit_bytes), "")),
    _Cell(Column("compute", right=True), _of_share(compute_text)),
    _Cell(Column("processes", right=True, leaves=3), lambda one, _: str(len(one.slots))),
    _Cell(Column("state", style=state_style), lambda one, _: one.state),
    _Cell(
        Column("age", right=True, leaves=2), lambda one, _: age(time.time() - one.lease.created) if one.lease else "-"
    ),
    # why it is dead, damaged or over its limit; below the table on a terminal
    _Cell(Column("note"), lambda one, _: "-" if is_tty() else one.note or "-", True),
    _Cell(Column("command", leaves=4), lambda one, _: _command(one) or "-", True),
)


def _table(found: Sequence[facts.Container]) -> tuple[list[Column], list[list[str]]]:
    """The columns that are shown, and a row for each share, or for a container without one."""
    lines = [(one, use) for one in found for use in one.uses or (None,)]
    texts = [[cell.text(*line) for line in lines] for cell in _LIST]
    kept = [at for at, cell in enumerate(_LIST) if not cell.optional or set(texts[at]) - {"-"}]
    return [_LIST[at].column for at in kept], [list(row) for row in zip(*(texts[at] for at in kept))]


def plain(one: facts.Container) -> dict[str, Any]:
    """A container as JSON values. Sizes are numbers of bytes; null stands for no limit."""
    return {
        "id": one.id,
        "name": one.name.shown or None,
        "service": one.name.service or None,
        "state": one.state,
        "note": one.note,
        "created": one.lease.created if one.lease else None,
        "init_pid": one.lease.init_pid if one.lease else None,
        "command": _command(one) or None,
        "process_count": len(one.slots),
        "shares": [
            {
                "slot": use.share.slot,
                "device": use.share.device.index,
                "uuid": use.share.device.uuid,
                "mig_index": use.share.device.mig_index if use.share.device.parent else None,
                "parent_uuid": use.share.device.parent or None,
                "memory_used_bytes": use.used_bytes,
                "memory_driver_bytes": use.driver_bytes,
                "memory_request_bytes": use.share.memory_limit_bytes,
                "memory_limit_bytes": use.share.ceiling_bytes,
                "memory_borrowed_bytes": use.borrowed_bytes,
                "lending": use.share.lending or None,
                "memory_virtual_bytes": None if use.share.lending else use.share.virtual_bytes or None,
                "memory_host_bytes": use.host_bytes,
                "compute_percent": use.share.compute_percent,
                "compute_mode": "soft" if use.share.soft else "hard",
                "priority": use.share.priority,
                "paused": use.share.paused,
                "memory_backend": use.share.memory_backend,
                "compute_backend": use.share.compute_backend,
                "compute_used_percent": round(use.compute.recent_percent, 1) if use.compute else None,
                "compute_busy_ns": use.compute.busy_ns if use.compute else None,
                "compute_throttled_ns": use.compute.waited_ns if use.compute else None,
                "page": use.share.page,
                "clamped_from": use.share.clamped or None,
                "refused": use.refused,
                "account": plain_account(use.account),
            }
            for use in one.uses
        ],
    }


def plain_account(account: Optional[accounts.Account]) -> Optional[dict[str, Any]]:
    """An account as JSON values; null stands for what is not known."""
    if account is None:
        return None
    return {
        "gpu_seconds_granted": round(account.granted_ns / 1e9, 3),
        "gpu_seconds_used": _seconds(account.used_ns),
        "memory_byte_seconds_granted": account.granted_byte_ns // 10**9,
        "memory_byte_seconds_used": None if account.used_byte_ns is None else account.used_byte_ns // 10**9,
        "memory_peak_bytes": account.peak_bytes,
        "refused": account.refused,
        "throttled_seconds": _seconds(account.throttled_ns),
        "suspended_seconds": _seconds(account.suspended_ns),
    }


def _seconds(ns: Optional[int]) -> Optional[float]:
    return None if ns is None else round(ns / 1e9, 3)


@click.command()
@click.argument("id", metavar="ID", shell_complete=complete_ids)
@with_format
@click.pass_obj
def inspect(paths: Paths, id: str, output: str) -> None:
    """Show a container, its processes and the last failed start.

    ID is an id, an unambiguous prefix of one, or a name: docker's or podman's, a Compose service, or a Kubernetes
    pod as POD, NAMESPACE/POD or NAMESPACE/POD/CONTAINER.
    """
    container_id = facts.find(paths.state_dir, id)
    one = next(iter(facts.with_unlimited(facts.containers(paths.state_dir, container_id))), None)
    refusal = log.read(paths.state_dir, container_id)
    round_ms = _round_ms(paths.state_dir, one.lease) if one and one.lease else None
    if output == "json":
        write_json(_details(container_id, one, refusal, round_ms))
    else:
        _print(container_id, one, refusal, round_ms)


def _round_ms(state_dir: str, lease: Lease) -> Optional[int]:
    """Return the round of its turns; 0: it takes none; None: unknown. Turns are for hard limits of the shim."""
    if all(share.compute_percent is None or share.soft for share in lease.shares):
        return 0
    try:
        limits = storage.read_limits(os.path.join(storage.container_dir(state_dir, lease.id), "share", "limits"))
    except (GpushareError, OSError):
        return None
    return 0 if limits.mps_device else limits.round_ms


def _details(
    container_id: str, one: Optional[facts.Container], refusal: str, round_ms: Optional[int]
) -> dict[str, Any]:
    value: dict[str, Any] = (
        {"id": container_id, "name": Names().of_id(container_id).shown or None, "state": "refused", "shares": []}
        if one is None
        else plain(one)
    )
    value["last_refusal"] = refusal or None
    if one is not None and one.lease is not None:
        lease = one.lease
        value.update(bundle=lease.bundle, cgroup=lease.cgroup, dialect=lease.dialect, driver=lease.driver_version)
        value.update(round_ms=round_ms, uid=None if lease.uid < 0 else lease.uid)
        value.update((name, getattr(lease, name) or None) for name in ("namespace", "pod", "container", "image"))
        value["processes"] = [
            {"pid": pid, "container_pid": slot.pid, "memory_used_bytes": list(slot.bytes)}
            for slot, pid in facts.processes(one)
        ]
    return value


def _print(container_id: str, one: Optional[facts.Container], refusal: str, round_ms: Optional[int]) -> None:
    name = one.name if one else Names().of_id(container_id)
    pairs = [("id", container_id)]
    pairs += [("name", name.shown)] if name.shown else []
    pairs += [("service", name.service)] if name.service else []
    pairs += [("state", one.state if one else "refused")]
    if one is not None and one.lease is not None:
        lease = one.lease
        pairs += [
            ("age", age(time.time() - lease.created)),
            ("command" if _command(one) else "bundle", lease.bundle),
            ("cgroup", lease.cgroup or "-"),
            ("init pid", str(lease.init_pid or "-")),
            ("dialect", lease.dialect),
            ("driver", lease.driver_version),
            ("user", "-" if lease.uid < 0 else user_name(lease.uid)),
            *((name, text) for name in ("namespace", "pod", "container", "image") if (text := getattr(lease, name))),
        ]
    pairs += [("turns", f"in rounds of {round_ms} ms")] if round_ms else []
    pairs += [("note", one.note)] if one and one.note else []
    pairs += [("last refusal", refusal)] if refusal else []
    for label, text in pairs:
        write_text(printable(f"{label:<13} {text}"), 14)
    if one is not None and one.uses:
        _print_uses(one)


def account_cells(account: Optional[accounts.Account]) -> tuple[str, ...]:
    """The cells of an account: device time, memory multiplied by time, peak, refusals, throttled time."""
    if account is None:
        return ("-",) * (len(_ACCOUNT) - 1)
    return (
        _time_text(account.granted_ns),
        _time_text(account.used_ns),
        _byte_time_text(account.granted_byte_ns),
        _byte_time_text(account.used_byte_ns),
        "-" if account.peak_bytes is None else human(account.peak_bytes),
        "-" if account.refused is None else str(account.refused),
        _time_text(account.throttled_ns),
    )


def _time_text(ns: Optional[int]) -> str:
    return "-" if ns is None else f"{ns / 1e9:.1f} s"


def _byte_time_text(byte_ns: Optional[int]) -> str:
    return "-" if byte_ns is None else f"{byte_ns / 2**30 / 3.6e12:.3f} GiB h"


def _print_uses(one: facts.Container) -> None:
    write_line()
    virtual = any(host_text(use) != "-" for use in one.uses)
    lent = any(use.share.lending for use in one.uses)
    driver = any(use.driver_bytes for use in one.uses)
    columns = (
        *(Column("slot", True), Column("device", True), Column("memory used", True)),
        *((_DRIVER,) if driver else ()),
        Column("limit", True),
        *((_HOST,) if virtual else ()),
        *((_BORROWED,) if lent else ()),
        *(BAR, Column("refused", True), Column("compute", True), Column("throttled", True)),
        *(Column("activity file", True, leaves=1), Column("uuid", leaves=2)),
    )
    rows = [
        (
            str(use.share.slot),
            device_name(use.share.device),
            human(use.used_bytes),
            *((human(use.driver_bytes),) if driver else ()),
            limit_text(use),
            *((host_text(use),) if virtual else ()),
            *((borrowed_text(use),) if lent else ()),
            bar(use.used_bytes, use.limit_bytes),
            str(use.refused),
            compute_text(use) + (", high priority" if use.share.priority else ""),
            "-" if use.compute is None else f"{use.compute.waited_ns / 1e9:.1f} s",
            str(use.share.page),
            use.share.device.uuid,
        )
        for use in one.uses
    ]
    write_table(columns, rows)
    write_line()
    write_table(_ACCOUNT, [(str(use.share.slot), *account_cells(use.account)) for use in one.uses])
    found = facts.processes(one)
    if found:
        write_line()
        devices = [Column(f"slot {use.share.slot}", True) for use in one.uses]
        write_table(
            (Column("pid", True), Column("in container", True), *devices),
            [(str(pid or "-"), str(slot.pid), *(human(size) for size in slot.bytes)) for slot, pid in found],
        )
