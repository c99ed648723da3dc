"""One line of logfmt for each decision about a container, to the journal or to a file (start path).

    granted    who got what, and in whose words          released   a share that ended, and who saw it
    refused    who got nothing, and what kind of reason  withheld   devices taken from a privileged container
    changed    who has other limits now, or is paused    exceeded   who uses more than its limit, as the driver says
    ignored    what the search for containers that outlived the state directory left out

    decision=granted id=web dialect=own devices=GPU-1 memory=4294967296 compute=30 ... way=runtime ms=21.4

Of a container's environment a line has the names that the request was made with, and amounts as they were understood;
no other value, also not in a refusal: its whole text is in `gpushare inspect`. Values that come from outside are
quoted, so none can end the line or add a field. Nothing here raises, and nothing waits: what the other end does not
take at once is lost, because a start must not hang on a log.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional

from ..core.errors import GpushareError
from ..core.model import Lease, Request
from ..core.quoting import quoted

SYSLOG, NOWHERE = "syslog", "none"  # of the key log.decisions; anything else is a path
SOCKET = "/dev/log"
IDENTIFIER = "gpushare"
INFO, WARNING = 30, 28  # RFC 3164: facility daemon (3) * 8 + severity
_MAX_VALUE = 512  # characters of one value from outside
_SAFE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.,:/@+-")
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./-")
_KINDS = {78: "config", 64: "request", 77: "policy", 75: "capacity", 69: "device", 71: "kernel"}  # errors.py
_began_ns = time.monotonic_ns()


def begin() -> None:
    """Times count from here."""
    global _began_ns
    _began_ns = time.monotonic_ns()


class Sink(NamedTuple):
    """Where lines go; opened early by who leaves the host's namespaces. fd -1: nowhere."""

    fd: int
    is_syslog: bool = False


def open_sink(where: str) -> Sink:
    """`where` as in the configuration. A path that is a socket is spoken to as /dev/log is."""
    if where in (NOWHERE, ""):
        return Sink(-1)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        if where != SYSLOG:
            return Sink(os.open(where, flags, 0o640))
    except OSError as error:
        if error.errno != errno.ENXIO:
            return Sink(-1)
    from ..system import syscalls

    try:
        return Sink(syscalls.connect_datagram(SOCKET if where == SYSLOG else where), True)
    except GpushareError:
        return Sink(-1)


def _write(sink: Sink, level: int, text: str) -> None:
    """One line, and the end of `sink`."""
    if sink.fd < 0:
        return
    text = f"{text} ms={(time.monotonic_ns() - _began_ns) / 1e6:.1f}"
    if sink.is_syslog:
        line = f"<{level}>{time.strftime('%b %e %H:%M:%S')} {IDENTIFIER}[{os.getpid()}]: {text}"
    else:
        line = f"time={time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}\n"
    try:
        os.write(sink.fd, line.encode("utf-8", "backslashreplace"))
    except OSError:
        pass
    os.close(sink.fd)


def value(text: str) -> str:
    """`text` behind the = of a field: as it is when that is harmless, else in quotes; cut when it is long."""
    if text and len(text) <= _MAX_VALUE and _SAFE.issuperset(text):
        return text
    return quoted(text if len(text) <= _MAX_VALUE else text[: _MAX_VALUE - 1] + "…")


def facts(lease: Lease) -> str:
    """What a lease says: limits in the order of its devices, memory in bytes, compute in percent."""
    shares = lease.shares
    memory = ",".join("none" if s.memory_limit_bytes is None else str(s.memory_limit_bytes) for s in shares)
    if any(s.virtual_bytes for s in shares):
        memory += " virtual=" + ",".join(str(s.virtual_bytes) for s in shares)
    compute = ",".join("none" if s.compute_percent is None else str(s.compute_percent) for s in shares)
    backend = "+".join(sorted({name for s in shares for name in (s.memory_backend, s.compute_backend)}))
    mode = "soft" if any(s.soft for s in shares) else "hard"
    return (
        f"id={value(lease.id)} dialect={value(lease.dialect)} devices={','.join(s.device.uuid for s in shares)} "
        f"memory={memory} compute={compute} mode={mode} backend={backend}"
    )


def granted(sink: Sink, container_id: str, lease: Optional[Lease], asked: Request, way: str, *more: str) -> None:
    """`lease` None: driver files, no device. `more`: fields."""
    what = facts(lease) if lease else f"id={value(container_id)} dialect={value(asked.dialect)} devices=none"
    names = value(",".join(dict.fromkeys(name for name, _ in asked.sources)))
    _write(sink, INFO, " ".join([f"decision=granted {what} way={way} names={names}", *more]))


def rebuilt(where: str, container_id: str, lease: Optional[Lease]) -> None:
    """The state directory was lost, and this container lives on; without a lease it is unknown what it has."""
    what = facts(lease) if lease else f"id={value(container_id)} devices=unknown"
    _write(open_sink(where), WARNING, f"decision=granted {what} way=rebuild")


def searched(where: str, remark: str) -> None:
    """What the search for containers that outlived the state directory left out."""
    _write(open_sink(where), WARNING, f"decision=ignored way=rebuild why={value(remark)}")


def details(key: str, texts: Sequence[str]) -> tuple[str, ...]:
    """A field, unless there is nothing to say."""
    return (f"{key}={value('; '.join(texts))}",) if texts else ()


def refused(where: str, container_id: str, way: str, error: BaseException) -> None:
    """The kind of error, and the name that it begins with if that is one of a request."""
    kind = _KINDS.get(error.exit_code, "other") if isinstance(error, GpushareError) else "internal"
    name = _name_in(error.message) if isinstance(error, GpushareError) else ""
    fields = f"decision=refused id={value(container_id)} way={way} reason={kind}"
    _write(open_sink(where), WARNING, f"{fields} names={name}" if name else fields)


def _name_in(message: str) -> str:
    from ..core import constants
    from ..request import request

    name = message.partition(":")[0].partition("=")[0]
    is_ours = name.upper().startswith(request.TRIGGERS) or constants.ANNOTATION_PREFIX in name
    return name if is_ours and len(name) <= 128 and _NAME.issuperset(name) else ""


def released(where: str, lease: Lease, by: str) -> None:
    """`by`: poststop, delete, start (of another container) or prune."""
    _write(open_sink(where), INFO, f"decision=released {facts(lease)} by={by}")


def changed(where: str, lease: Lease) -> None:
    """What a container that runs has from now on: `gpushare limit set`, pause, resume."""
    paused = "yes" if any(share.paused for share in lease.shares) else "no"
    _write(open_sink(where), INFO, f"decision=changed {facts(lease)} paused={paused} way=cli")


def exceeded(where: str, lease: Lease, uuid: str, physical_bytes: int, limit_bytes: int, action: str) -> None:
    """`gpushare export`: the driver counts more on a device than the container's limit (0: it has no share of it)."""
    what = f"id={value(lease.id)} dialect={value(lease.dialect)} devices={uuid} used={physical_bytes}"
    fields = f"decision=exceeded {what} memory={limit_bytes} action={action} way=export"
    _write(open_sink(where), WARNING, fields)


def ending(where: str, by: str) -> Callable[[Lease], None]:
    """leases.Ended"""
    return lambda lease: released(where, lease, by)


def withheld(where: str, container_id: str, taken: Sequence[str]) -> None:
    """A privileged container that asked for nothing, and gets none of NVIDIA's devices."""
    fields = f"decision=withheld id={value(container_id)} way=runtime reason=policy devices=all"
    _write(open_sink(where), WARNING, " ".join([fields, *details("taken_out", taken)]))
