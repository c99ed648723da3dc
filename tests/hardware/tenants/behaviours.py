"""Run the behaviours of tests/conformance, each in a process of its own that is forked from this one."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import traceback
from typing import NoReturn

from tests.hardware.place import TREE
from tests.hardware.tenant import say

sys.path.insert(0, str(TREE / "hook"))  # the behaviours use gpushare's own access to NVML

from tests.conformance.behaviours import BEHAVIOURS
from tests.conformance.driver import Driver

MOST_TEXT = 300


def behaviours(library: str, names: list[str], one_s: float) -> None:
    """Report for each behaviour "" if the driver has it, otherwise what it did instead; `one_s`: time limit of each.

    This process never uses the driver, so its children can.
    """
    for name in names:
        say(name=name, other=outcome(library, name, one_s))


def outcome(library: str, name: str, one_s: float) -> str:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _child(library, name, writer)
    os.close(writer)
    try:
        text = _read(reader, time.monotonic() + one_s)
    finally:
        os.close(reader)
    if text is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return f"did not end within {one_s:.0f} s"
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return text or ("" if code == 0 else f"ended with {code}")


def _read(fd: int, deadline: float) -> str | None:
    """Return all that a child writes until it ends; None if it does not end in time."""
    data = b""
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not select.select([fd], [], [], left_s)[0]:
            return None
        part = os.read(fd, 4096)
        if not part:
            return data.decode(errors="replace")
        data += part


def _child(library: str, name: str, writer: int) -> NoReturn:
    text = ""
    try:
        next(one.check for one in BEHAVIOURS if one.check.__name__ == name)(Driver(library))
    except BaseException as error:  # the parent's code must not run in the child
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{os.path.basename(place.filename)}:{place.lineno}: {type(error).__name__}: {error}".rstrip(": ")
    os.write(writer, text[:MOST_TEXT].encode())
    os._exit(0)
