"""The limits of an MPS daemon, set and read back. Not on the start path.

put(control, percent, memory_bytes)    what no client can exceed
"""

from __future__ import annotations

from ..core.errors import DeviceError
from ..core.quoting import shown
from . import mpscontrol, mpswords
from .mpscontrol import Control


def put(control: Control, percent: int, memory_bytes: int) -> None:
    """Sets both, and reads them back with the daemon's own commands; `memory_bytes` 0: no limit. Also of servers that
    an adopted daemon has, which keep what they began with. Raises DeviceError."""
    words, memory = control.words, mpscontrol.memory_text(memory_bytes)
    if words.prepare and not _servers(control):
        for command in words.prepare:
            control.ask(command)
    control.ask(words.set_percent.format(percent))
    _require_percent(percent, control.ask(words.get_percent))
    if memory_bytes:
        control.ask(words.set_memory.format(memory))
        said = control.ask(words.get_memory)
        if said != memory:
            raise DeviceError(f"MPS did not take a limit of {memory} of memory: it says {shown(said)}")
    for server in _servers(control) if words.set_server_percent else ():
        control.ask(words.set_server_percent.format(percent, server=server))
        if memory_bytes:
            control.ask(words.set_server_memory.format(memory, server=server))
        said = control.ask(words.get_server_percent.format(server=server))
        if server in _servers(control):  # it has not ended meanwhile
            _require_percent(percent, said)


def _servers(control: Control) -> tuple[int, ...]:
    """() where a message says that there is none."""
    try:
        return control.numbers(control.words.servers)
    except DeviceError:
        if control.protocol == 2:  # which has no such message: nobody answers
            raise
        return ()


def _require_percent(percent: int, said: str) -> None:
    if mpswords.percent_in(said) != percent:
        raise DeviceError(f"MPS did not take a limit of {percent}%: it says {shown(said)}")
