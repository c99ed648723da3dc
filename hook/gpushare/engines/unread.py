"""Find changes that an engine has not read: a command was killed before it named the engine's restart, or the user has
not restarted the engine.

mark(engine, command, host, files) -> [Change]     written before the files; `command` makes the engine read them
unmark(engine, host) -> [Change]
paths(engine, host) -> paths                       marked files that the engine has not read

A mark is below /run, so it goes when the host starts again. It has the time of the engine's last start or reload: as
long as systemd reports no later time, the engine has not read the files. Where systemd's answer leaves the time open,
the mark has the present time, and the files count as not read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Optional

from .base import Change, Engine
from .host import Host

# And the name of the engine. The first line is the command and a time; each other line is a path.
_MARK = "/run/gpushare-unread."
_UNKNOWN = -1


def mark(engine: Engine, command: str, host: Host, files: Sequence[str]) -> list[Change]:
    """If the engine does not run, it reads its files when it starts: then no mark is left."""
    last = _last_read(command, host)
    if last is None:
        return unmark(engine, host)
    path, then = _MARK + engine.NAME, time.monotonic_ns() // 1000 if last == _UNKNOWN else last
    lines = dict.fromkeys([f"{command} {then}", *files, *paths(engine, host)])
    return [Change(path, host.read(path), "".join(f"{line}\n" for line in lines))]


def unmark(engine: Engine, host: Host) -> list[Change]:
    path = _MARK + engine.NAME
    text = host.read(path)
    return [] if text is None else [Change(path, text, None)]


def paths(engine: Engine, host: Host) -> list[str]:
    text = host.read(_MARK + engine.NAME)
    if text is None:
        return []
    first, *found = text.splitlines() or [""]
    command, _, then = first.rpartition(" ")
    last = _last_read(command, host)
    return [] if last is None or (then.isdigit() and last > int(then)) else found


def _last_read(command: str, host: Host) -> Optional[int]:
    """When the engine last did what `command` makes it do, in microseconds of the monotonic clock; _UNKNOWN if
    systemd's answer leaves that open; None if the engine does not run, or not as that unit."""
    words = command.split()
    if len(words) < 3 or not host.runs_systemd():
        return None
    found = [_last_of(unit if words[0] != "snap" else f"snap.{unit}", words[1], host) for unit in words[2:]]
    return min((one for one in found if one is not None), default=None)


def _last_of(unit: str, action: str, host: Host) -> Optional[int]:
    event = "StateChange" if action == "reload" else "ExecMainStart"  # a reload changes the unit's state, and back
    stamp = f"{event}TimestampMonotonic"
    text = host.ask("systemctl", "show", f"--property=ActiveState,{stamp}", unit) or ""
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    if values.get("ActiveState") in ("inactive", "failed"):
        return None
    microseconds = values.get(stamp, "")
    return int(microseconds) if values.get("ActiveState") == "active" and microseconds.isdigit() else _UNKNOWN
