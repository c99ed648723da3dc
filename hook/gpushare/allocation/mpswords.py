"""What an nvidia-cuda-mps-control is told, in either of its protocols. Pure; not on the start path.

    WORDS[protocol]              2: commands on its standard input; 3: "MPS v3", arguments of its own
    protocol_in(words, env)      which one a daemon was started with
    several_users(help_text)     the options by which it lets clients of all users in; () when it has none

Source: for 2, what driver 535.261.03 did (tests/integration/test_mps_daemon.py); for 3 and the options, NVIDIA's
documentation (deploy/mps: mpsv3-interface, architecture), which simulator/mpscontrol.py plays. {}: a value, {server}:
a server's pid.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional

SERVER = "gpushare"  # of protocol 3: servers have names there, and ours serves whoever has its directory
DEVICE = "0"  # as the daemon counts: it sees this device only
PROTOCOL_VARIABLE = "CUDA_MPS_PROTOCOL_VERSION"
_MULTIUSER = re.compile(r"(?<![\w-])(--?multiuser(?:-server)?)(?![\w-])")
_PROTOCOL = re.compile(r"(?<![\w-])(--protocol)(?![\w-])")


class Words(NamedTuple):
    """One protocol. What a limit is set by for servers that begin later, and for one that is there."""

    prepare: tuple[str, ...]
    set_percent: str
    get_percent: str
    set_memory: str
    get_memory: str
    set_server_percent: str  # "": a server has none of its own
    get_server_percent: str
    set_server_memory: str
    servers: str
    clients: str  # of one server
    quit: str  # {}: seconds for its servers
    folder: str  # below its pipe directory: where clients connect


WORDS = {
    2: Words(
        prepare=(),
        set_percent="set_default_active_thread_percentage {}",
        get_percent="get_default_active_thread_percentage",
        set_memory=f"set_default_device_pinned_mem_limit {DEVICE} {{}}",
        get_memory=f"get_default_device_pinned_mem_limit {DEVICE}",
        set_server_percent="set_active_thread_percentage {server} {}",
        get_server_percent="get_active_thread_percentage {server}",
        set_server_memory=f"set_device_pinned_mem_limit {{server}} {DEVICE} {{}}",
        servers="get_server_list",
        clients="get_client_list {server}",
        quit="quit -t {}",
        folder="",
    ),
    3: Words(
        prepare=(f"server create {SERVER} --uid=0",),
        set_percent=f"server set {SERVER} --active-thread-percentage={{}}",
        get_percent=f"namespace get default {SERVER} active-thread-percentage",
        set_memory=f"server set {SERVER} --pinned-memory-limit={{}}",
        get_memory=f"namespace get default {SERVER} pinned-memory-limit",
        set_server_percent="",
        get_server_percent="",
        set_server_memory="",
        servers=f"server get {SERVER} pid",
        clients=f"client list --server={SERVER} --format=csv,noheader",
        quit="--quit",
        folder=SERVER,
    ),
}


def protocol_in(words: Sequence[str], env: Mapping[str, str]) -> int:
    """Of a daemon's command line and environment, of which the latter counts."""
    said = env.get(PROTOCOL_VARIABLE) or next(
        (value for option, value in zip(words, words[1:]) if option in ("-p", "--protocol")), ""
    )
    return 3 if said == "3" else 2


def several_users(help_text: str) -> tuple[str, ...]:
    """Protocol 3 where the program has that, as its several users are documented there."""
    found = _MULTIUSER.search(help_text)
    if not found:
        return ()
    return (*(("--protocol", "3") if _PROTOCOL.search(help_text) else ()), found.group(1))


def percent_in(text: str) -> Optional[float]:
    """A percentage as either protocol prints it; None for a message."""
    try:
        return float(text.removesuffix("%"))
    except ValueError:
        return None


def pids_in(text: str) -> tuple[int, ...]:
    """A pid at the beginning of each line; () where a message says that there is none."""
    firsts = (re.split(r"[\s,]", line, maxsplit=1)[0] for line in text.splitlines())
    return tuple(int(word) for word in firsts if word.isascii() and word.isdigit())
