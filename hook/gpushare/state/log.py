"""Report a refusal: one line on stderr, the same line in STATE_DIR/errors/<id>, and for internal errors the traceback
in errors/<id>~trace (start path).

Engines print different parts of a hook's output (crun none), so `gpushare inspect` reads the file.
"""

from __future__ import annotations

import json
import os

from ..core.errors import GpushareError, reported
from ..core.quoting import printable, quoted

_KEPT = 256  # files in errors/: a crash loop with new names must not fill the state directory
_MAX_BYTES = 16 << 10
_MAX_TEXT = 512  # characters of an unexpected exception's text
TRACE = "~trace"  # no container id has a ~


def line_of(error: BaseException) -> tuple[str, int]:
    """Return (one line, exit code). An unexpected exception becomes its type, its text, quoted because an image may
    have chosen it, and the place where it was raised."""
    error = reported(error)
    if isinstance(error, GpushareError):
        return f"gpushare: {error}", error.exit_code
    place, trace = "", error.__traceback__
    while trace is not None:
        place = f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}"
        trace = trace.tb_next
    text = quoted(str(error)[:_MAX_TEXT])
    return f"gpushare: internal error: {type(error).__name__}: {text} (at {place}); please report it", 1


def to_stderr(line: str) -> None:
    """Write a line; ignore a failing write, so that the exit code is not lost."""
    try:
        os.write(2, line.encode("utf-8", "backslashreplace") + b"\n")
    except OSError:
        pass


def record(state_dir: str, container_id: str, line: str, error: BaseException) -> None:
    """Store the refusal for `gpushare inspect`. Never raise: the refusal itself counts."""
    folder = os.path.join(state_dir, "errors")
    try:
        _write(folder, container_id, line + "\n")
        if not isinstance(error, GpushareError):
            import traceback  # only for an internal error

            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            _write(folder, container_id + TRACE, "".join(printable(part) + "\n" for part in text.splitlines()))
        _forget_oldest(folder)
    except OSError:
        pass


def _write(folder: str, name: str, text: str) -> None:
    path = os.path.join(folder, name)
    temporary = os.path.join(folder, f"{os.getpid()}~new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(fd, text.encode("utf-8", "backslashreplace")[:_MAX_BYTES])
    finally:
        os.close(fd)
    os.rename(temporary, path)


def _forget_oldest(folder: str) -> None:
    names = os.listdir(folder)
    if len(names) <= _KEPT:
        return
    paths = [os.path.join(folder, name) for name in names]
    for path in sorted(paths, key=lambda path: os.stat(path).st_mtime_ns)[: len(paths) - _KEPT]:
        os.unlink(path)


def to_runtime_log(path: str, log_format: str, line: str) -> None:
    """Write an error to the file of the runtime's --log, the only place that docker and containerd read. The format is
    runc's (logrus): JSON or text. Never raise."""
    if not path:
        return
    import time

    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    if log_format == "json":
        text = json.dumps({"level": "error", "msg": line, "time": stamp})
    else:
        text = f'time="{stamp}" level=error msg={json.dumps(line)}'
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        try:
            os.write(fd, text.encode("utf-8", "backslashreplace") + b"\n")
        finally:
            os.close(fd)
    except OSError:
        pass


def read(state_dir: str, container_id: str) -> str:
    """Return the last refusal of a container, without "gpushare: "; "" if there was none."""
    try:
        fd = os.open(os.path.join(state_dir, "errors", container_id), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return ""
    try:
        text = os.read(fd, _MAX_BYTES).decode("utf-8", "replace").strip()
    finally:
        os.close(fd)
    return text[len("gpushare: ") :] if text.startswith("gpushare: ") else text


def forget(state_dir: str, container_id: str) -> None:
    """Remove what `record` wrote."""
    for name in (container_id, container_id + TRACE):
        try:
            os.unlink(os.path.join(state_dir, "errors", name))
        except OSError:
            pass


def refusals(state_dir: str) -> list[tuple[str, int]]:
    """Return (id, time in nanoseconds) of the stored refusals."""
    found = []
    for name in known(state_dir):
        try:
            found.append((name, os.stat(os.path.join(state_dir, "errors", name)).st_mtime_ns))
        except OSError:  # forgotten meanwhile
            pass
    return found


def known(state_dir: str) -> list[str]:
    """Return the ids with a stored refusal."""
    try:
        names = os.listdir(os.path.join(state_dir, "errors"))
    except OSError:
        return []
    return sorted(name for name in names if "~" not in name)
