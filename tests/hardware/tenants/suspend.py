"""A program whose memory is taken away and given back, and the one that does it with the checkpoint API."""

from __future__ import annotations

import struct
import time
from ctypes import c_uint

from tests.conformance.driver import SUCCESS, Driver
from tests.hardware.tenant import absent, listen, say

PIECE = 64 << 20
STATES = ("running", "locked", "checkpointed", "failed", "checkpointing", "restoring")


def pattern(number: int) -> int:
    """Return the 32-bit word that fills a piece: another one for each."""
    return (number * 2654435761 + 12345) & 0xFFFFFFFF


def patterned(library: str, pieces: int) -> None:
    """Fill memory with a pattern; on a line compare all of it and report how many pieces differ."""
    cuda = Driver(library)
    cuda.context()
    address = cuda.alloc(pieces * PIECE)
    for number in range(pieces):
        cuda.ok("cuMemsetD32_v2", address + number * PIECE, c_uint(pattern(number)), PIECE // 4)
    cuda.synchronize()
    say(bytes=pieces * PIECE)
    listen()
    wrong = 0
    for number in range(pieces):
        wrong += cuda.read(address + number * PIECE, PIECE) != struct.pack("<I", pattern(number)) * (PIECE // 4)
    say(wrong_pieces=wrong, address=address)
    listen()


def checkpointer(library: str) -> None:
    """Call the checkpoint API: each line has `operation`, `pid` and `timeout_ms`."""
    cuda = Driver(library)
    cuda.init()
    if not hasattr(cuda.library, "cuCheckpointProcessLock"):
        absent("the driver has no checkpoint API, which is in drivers from 570 on")
    say(ready=True)
    while True:
        asked = listen()
        arguments = struct.pack("<I", asked["timeout_ms"]) if "timeout_ms" in asked else None
        began = time.monotonic()
        code = cuda.checkpoint(asked["operation"], asked["pid"], arguments)
        seconds = time.monotonic() - began
        state = STATES[cuda.process_state(asked["pid"])] if code == SUCCESS else ""
        say(code=code, seconds=seconds, state=state)
