"""One line of logfmt for each decision about a container, to the journal or to a file (start path).

    granted    a share, and who requested it             released   a share ended, and by what
    refused    no share, and the kind of reason          withheld   devices denied to a privileged container
    changed    new limits, or paused                     exceeded   more use than the limit, as the driver counts
    evicted    a borrower that was ended for another container's request
    ended      a borrower that ended by itself after its line with `evicted`
    ignored    containers that the search after a lost state directory left out

    decision=granted id=web dialect=own devices=GPU-1 memory=4294967296 compute=30 ... way=runtime ms=21.4

A line has the names of the variables that made the request, and parsed amounts. It has no other value of the
container's environment, not even in a refusal; `gpushare inspect` has the full text. Values from outside are quoted, so
none can end the line or add a field. Nothing here raises or waits: a line that the receiver does not accept at once is
lost, because a start must not hang on a log."""

import errno
import os
import time
from collections.abc import Sequence
from typing import NamedTuple, Optional

from ..core import constants
from ..core.errors import GpushareError
from ..core.model import Lease, Request, Share
from ..core.quoting import quoted
from ..request import request
from ..system import syscalls
from .accounts import Closed, began_ns

SYSLOG, NOWHERE = "syslog", "none"  # of the key log.decisions; anything else is a path
SOCKET = "/dev/log"
IDENTIFIER = "gpushare"
INFO, WARNING = 30, 28  # RFC 3164: facility daemon (3) * 8 + severity
_MAX_VALUE = 512  # characters of one value from outside
_SAFE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.,:/@+-")
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./-")
_TOTALS = ("gpu_granted", "gpu_used", "byte_seconds_granted", "byte_seconds_used", "peak", "refusals", "throttled")
_KINDS = {78: "config", 64: "request", 77: "policy", 75: "capacity", 69: "device", 71: "kernel"}  # errors.py
_began_ns = time.monotonic_ns()


def begin() -> None:
    """Start the clock of the `ms` field."""
    global _began_ns
    _began_ns = time.monotonic_ns()


class Sink(NamedTuple):
    """The open destination of lines. A program opens it before it leaves the host's namespaces. fd -1: none."""

    fd: int
    is_syslog: bool = False


def open_sink(where: str) -> Sink:
    """Open `where` (log.decisions). A path that is a socket gets the protocol of /dev/log."""
    if where in (NOWHERE, ""):
        return Sink(-1)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        if where != SYSLOG:
            return Sink(os.open(where, flags, 0o640))
    except OSError as error:
        if error.errno != errno.ENXIO:
            return Sink(-1)
    try:
        return Sink(syscalls.connect_datagram(SOCKET if where == SYSLOG else where), True)
    except GpushareError:
        return Sink(-1)


def _write(sink: Sink, level: int, text: str) -> None:
    """Write one line and close `sink`."""
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
    """Return `text` as the value of a field: plain if harmless, else quoted; truncated if long."""
    if text and len(text) <= _MAX_VALUE and _SAFE.issuperset(text):
        return text
    return quoted(text if len(text) <= _MAX_VALUE else text[: _MAX_VALUE - 1] + "…")


def facts(lease: Lease) -> str:
    """Return the fields of a lease: limits in the order of its devices, memory in bytes, compute in percent."""
    shares = lease.shares
    memory = ",".join("none" if s.memory_limit_bytes is None else str(s.memory_limit_bytes) for s in shares)
    if any(s.lending for s in shares):
        memory += " limit=" + ",".join(str(s.ceiling_bytes) for s in shares)
        memory += " lending=" + ",".join(s.lending or "no" for s in shares)
    elif any(s.virtual_bytes for s in shares):
        memory += " virtual=" + ",".join(str(s.virtual_bytes) for s in shares)
    compute = ",".join("none" if s.compute_percent is None else str(s.compute_percent) for s in shares)
    backend = "+".join(sorted({name for s in shares for name in (s.memory_backend, s.compute_backend)}))
    mode = "soft" if any(s.soft for s in shares) else "hard"
    return (
        f"id={value(lease.id)} dialect={value(lease.dialect)} devices={','.join(s.device.uuid for s in shares)} "
        f"memory={memory} compute={compute} mode={mode} backend={backend}"
    )


def granted(sink: Sink, container_id: str, lease: Optional[Lease], request: Request, way: str, *more: str) -> None:
    """Log a grant. `lease` None: driver files, no device. `more`: additional fields."""
    what = facts(lease) if lease else f"id={value(container_id)} dialect={value(request.dialect)} devices=none"
    names = value(",".join(dict.fromkeys(name for name, _ in request.sources)))
    _write(sink, INFO, " ".join([f"decision=granted {what} way={way} names={names}", *more]))


def rebuilt(where: str, container_id: str, lease: Optional[Lease]) -> None:
    """Log a container that was running when the state directory was lost; without a lease its share is unknown."""
    what = facts(lease) if lease else f"id={value(container_id)} devices=unknown"
    _write(open_sink(where), WARNING, f"decision=granted {what} way=rebuild")


def searched(where: str, remark: str) -> None:
    """Log what was left out of the search for containers that were running when the state directory was lost."""
    _write(open_sink(where), WARNING, f"decision=ignored way=rebuild why={value(remark)}")


def details(key: str, texts: Sequence[str]) -> tuple[str, ...]:
    """Return a field, or "" without a value."""
    return (f"{key}={value('; '.join(texts))}",) if texts else ()


def refused(where: str, container_id: str, way: str, error: BaseException) -> None:
    """Log a refusal: the kind of error, and the request variable that it begins with, if any."""
    kind = _KINDS.get(error.exit_code, "other") if isinstance(error, GpushareError) else "internal"
    name = _name_in(error.message) if isinstance(error, GpushareError) else ""
    fields = f"decision=refused id={value(container_id)} way={way} reason={kind}"
    _write(open_sink(where), WARNING, f"{fields} names={name}" if name else fields)


def _name_in(message: str) -> str:
    name = message.partition(":")[0].partition("=")[0]
    is_ours = name.upper().startswith(request.TRIGGERS) or constants.ANNOTATION_PREFIX in name
    return name if is_ours and len(name) <= 128 and _NAME.issuperset(name) else ""


def released(where: str, closed: Closed, by: str) -> None:
    """Log a release. `by`: poststop, delete, start (of another container) or prune."""
    _write(open_sink(where), INFO, f"decision=released {facts(closed.lease)} by={by} {_totals(closed)}")


def kept(where: str, container_id: str, why: str, by: str) -> None:
    """Log a lease that the end of its container did not release. `by`: poststop or delete."""
    _write(open_sink(where), WARNING, f"decision=kept id={value(container_id)} by={by} why={value(why)}")


def _totals(closed: Closed) -> str:
    """Return what the container was granted and used, in the order of its devices. Seconds, and bytes times seconds."""

    def seconds(ns: Optional[int]) -> str:
        return "-" if ns is None else f"{ns / 1e9:.3f}"

    def whole(value: Optional[int]) -> str:
        return "-" if value is None else str(value)

    def byte_seconds(byte_ns: Optional[int]) -> str:
        return whole(None if byte_ns is None else byte_ns // 10**9)

    rows = zip(
        *(
            (
                seconds(one.granted_ns),
                seconds(one.used_ns),
                byte_seconds(one.granted_byte_ns),
                byte_seconds(one.used_byte_ns),
                whole(one.peak_bytes),
                whole(one.refused),
                seconds(one.throttled_ns),
            )
            for one in closed.accounts
        )
    )
    took = seconds(max(0, closed.end_ns - began_ns(closed.lease)))
    totals = " ".join(f"{name}={','.join(texts)}" for name, texts in zip(_TOTALS, rows))
    return f"seconds={took} end={'recorded' if closed.known else 'found'} {totals}"


def changed(where: str, lease: Lease, way: str = "cli") -> None:
    """Log new limits of a running container: `gpushare limit set`, pause, suspend, resume."""
    paused = "yes" if any(share.paused for share in lease.shares) else "no"
    phase = next((f" phase={share.phase}" for share in lease.shares if share.phase), "")
    _write(open_sink(where), INFO, f"decision=changed {facts(lease)} paused={paused}{phase} way={way}")


def exceeded(where: str, lease: Lease, uuid: str, physical_bytes: int, limit_bytes: int, action: str) -> None:
    """Log that the driver counts more than the container's limit on a device (0: no share there)."""
    what = f"id={value(lease.id)} dialect={value(lease.dialect)} devices={uuid} used={physical_bytes}"
    fields = f"decision=exceeded {what} memory={limit_bytes} action={action} way=export"
    _write(open_sink(where), WARNING, fields)


def unlimited(where: str, lease: Lease, pid: int, command: str, library: str, action: str) -> None:
    """Log a process that uses the container's GPU without gpushare's library."""
    what = f"id={value(lease.id)} dialect={value(lease.dialect)} pid={pid} command={value(command)}"
    fields = f"decision=unlimited {what} library={value(library)} action={action} way=export"
    _write(open_sink(where), WARNING, fields)


def evicted(where: str, lease: Lease, share: Share, used_bytes: int, needed_by: str) -> None:
    """Log that the agent ends a container that borrowed memory, because container `needed_by` needs its request."""
    what = f"id={value(lease.id)} dialect={value(lease.dialect)} devices={share.device.uuid} used={used_bytes}"
    sizes = f"memory={share.memory_limit_bytes} limit={share.virtual_bytes}"
    _write(open_sink(where), WARNING, f"decision=evicted {what} {sizes} needed_by={value(needed_by)} way=agent")


def ended(where: str, lease: Lease, uuid: str) -> None:
    """Log that no process of a container ran any more when the agent was about to kill it, after `evicted`."""
    fields = f"decision=ended id={value(lease.id)} dialect={value(lease.dialect)} devices={uuid} way=agent"
    _write(open_sink(where), WARNING, fields)


def withheld(where: str, container_id: str, taken: Sequence[str]) -> None:
    """Log a privileged container without a request that gets none of NVIDIA's devices."""
    fields = f"decision=withheld id={value(container_id)} way=runtime reason=policy devices=all"
    _write(open_sink(where), WARNING, " ".join([fields, *details("taken_out", taken)]))
