"""Send commands to a running nvidia-cuda-mps-control, in either of its protocols. Not on the start path.

    program(inventory)           -> str | None     path of the control program of the driver
    listening(pipe)              -> Daemon | None  pid and uid of the process that listens at a pipe directory
    Control(program, pipe, ...).ask(command) -> str     run one command and return its output
    put_limits(control, percent, memory_bytes)     set the limits that no client can exceed, and read them back
    COMMANDS[protocol]                             2: commands on standard input; 3: "MPS v3", command-line arguments
    protocol_in(words, env)      -> int            the protocol that a daemon was started with
    several_users(help_text)     -> options        that admit clients of all users; () if the program has none

Source: for protocol 2, the behaviour of driver 535.261.03 (tests/integration/test_mps_daemon.py); for 3 and the
options, NVIDIA's documentation (deploy/mps: mpsv3-interface, architecture), which simulator/mpscontrol.py implements.
535.261.03 reports no error for an unknown command or a refused value, so every value is read back. Sizes are whole
numbers with G or M; from 1 G on they are printed in whole G (1500M reads back as 1G). In COMMANDS, {} is a value and
{server} a server's pid.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional

from ....core.errors import DeviceError, KernelError
from ....core.model import Inventory, Node
from ....core.quoting import shown
from ....gpu import driverfiles
from ....gpu.drivertable import PROGRAM_DIRS

NAME, SERVER = "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"
DEADLINE_S = 10.0
GIB, MIB = 1 << 30, 1 << 20
_PEERCRED = struct.Struct("3i")
# Where the loader of the host searches libraries: with LD_LIBRARY_PATH as well, the server would find nothing more
_SEARCHED = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")
_NAME_OF_OURS = "gpushare"  # protocol 3 gives servers names; this one serves all clients of its directory
DEVICE = "0"  # as the daemon counts: it sees only this device
PROTOCOL_VARIABLE = "CUDA_MPS_PROTOCOL_VERSION"
_MULTIUSER = re.compile(r"(?<![\w-])(--?multiuser(?:-server)?)(?![\w-])")
_PROTOCOL = re.compile(r"(?<![\w-])(--protocol)(?![\w-])")


class Commands(NamedTuple):
    """The commands of one protocol. `set_percent`, `set_memory`: for servers that start later; `set_server_*`: for a
    running one."""

    prepare: tuple[str, ...]
    set_percent: str
    get_percent: str
    set_memory: str
    get_memory: str
    set_server_percent: str  # "": servers have no limit of their own
    get_server_percent: str
    set_server_memory: str
    servers: str
    clients: str  # of one server
    quit: str  # {}: seconds for its servers
    folder: str  # below its pipe directory: where clients connect


COMMANDS = {
    2: Commands(
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
    3: Commands(
        prepare=(f"server create {_NAME_OF_OURS} --uid=0",),
        set_percent=f"server set {_NAME_OF_OURS} --active-thread-percentage={{}}",
        get_percent=f"namespace get default {_NAME_OF_OURS} active-thread-percentage",
        set_memory=f"server set {_NAME_OF_OURS} --pinned-memory-limit={{}}",
        get_memory=f"namespace get default {_NAME_OF_OURS} pinned-memory-limit",
        set_server_percent="",
        get_server_percent="",
        set_server_memory="",
        servers=f"server get {_NAME_OF_OURS} pid",
        clients=f"client list --server={_NAME_OF_OURS} --format=csv,noheader",
        quit="--quit",
        folder=_NAME_OF_OURS,
    ),
}


def protocol_in(words: Sequence[str], env: Mapping[str, str]) -> int:
    """Return the protocol of a daemon with this command line and environment; the environment wins."""
    said = env.get(PROTOCOL_VARIABLE) or next(
        (value for option, value in zip(words, words[1:]) if option in ("-p", "--protocol")), ""
    )
    return 3 if said == "3" else 2


def several_users(help_text: str) -> tuple[str, ...]:
    """Return the options for several users, with protocol 3 if the program has it, as documented there."""
    found = _MULTIUSER.search(help_text)
    if not found:
        return ()
    return (*(("--protocol", "3") if _PROTOCOL.search(help_text) else ()), found.group(1))


def percent_in(text: str) -> Optional[float]:
    """Parse a percentage as either protocol prints it; None for a message."""
    try:
        return float(text.removesuffix("%"))
    except ValueError:
        return None


def pids_in(text: str) -> tuple[int, ...]:
    """Parse the pid at the beginning of each line; () for a message that there is none."""
    firsts = (re.split(r"[\s,]", line, maxsplit=1)[0] for line in text.splitlines())
    return tuple(int(word) for word in firsts if word.isascii() and word.isdigit())


class Daemon(NamedTuple):
    """The process behind a control socket."""

    pid: int
    uid: int


class Control(NamedTuple):
    """One daemon: its program, its pipe directory, the environment of the program, and the protocol."""

    program: str
    pipe: str
    env: dict[str, str]
    protocol: int = 2

    @property
    def commands(self) -> Commands:
        return COMMANDS[self.protocol]

    def ask(self, command: str, deadline_s: float = DEADLINE_S) -> str:
        """Return the output, stripped. Raise DeviceError if the daemon is gone or does not answer."""
        try:
            done = subprocess.run(
                [self.program, *(command.split() if self.protocol == 3 else ())],
                input="" if self.protocol == 3 else command + "\n",
                env={**self.env, "CUDA_MPS_PIPE_DIRECTORY": self.pipe},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=deadline_s,
                cwd="/",
            )
        except subprocess.TimeoutExpired:
            raise DeviceError(
                f"{NAME} in {shown(self.pipe)} does not answer {shown(command)}", "`gpushare mps stop`"
            ) from None
        except OSError as error:
            raise KernelError(f"{shown(self.program)}: {error.strerror}") from None
        if done.returncode:
            said = (done.stdout + done.stderr).strip().splitlines()[-1:] or ["no message"]
            raise DeviceError(f"{NAME} in {shown(self.pipe)}: {said[0]}", "start it again: `gpushare mps start`")
        return done.stdout.strip()

    def numbers(self, command: str) -> tuple[int, ...]:
        """Return the pids in the output; () if there is none."""
        return pids_in(self.ask(command))


def program(inventory: Inventory) -> Optional[str]:
    """Return the host path of the driver's control program; None if it has none."""
    return driverfiles.host_program(inventory, NAME) or None


def environment(host: Node, program: str) -> dict[str, str]:
    """Return an environment with nothing of gpushare's. PATH leads to the server, and LD_LIBRARY_PATH to its libcuda
    if the driver is not in the usual place."""
    root = host.inventory.files_root.rstrip("/")
    server = driverfiles.host_program(host.inventory, SERVER) or program
    folders = [os.path.dirname(server), os.path.dirname(program), *(f"{root}/{one}" for one in PROGRAM_DIRS)]
    env = {"PATH": ":".join(folders)}
    library = driverfiles.cuda_library(host.inventory.files_root, host.inventory.driver_version)
    if root or os.path.dirname(library) not in _SEARCHED:
        env["LD_LIBRARY_PATH"] = os.path.dirname(library)
    if root:
        env["PATH"] += ":/usr/sbin:/usr/bin:/sbin:/bin"  # the program may be a script
    return env


def listening(pipe: str) -> Optional[Daemon]:
    """Return the process that accepts connections at `pipe`/control, if any. The path may be longer than a socket
    address, so connect through a descriptor."""
    try:
        fd = os.open(pipe, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        probe.settimeout(DEADLINE_S)
        probe.connect(f"/proc/self/fd/{fd}/control")
        pid, uid, _ = _PEERCRED.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))
        return Daemon(pid, uid)
    except OSError:
        return None
    finally:
        probe.close()
        os.close(fd)


def memory_text(size_bytes: int) -> str:
    """Return a limit of at least `size_bytes` in the form that the daemon accepts and prints."""
    if size_bytes >= GIB:
        return f"{-(-size_bytes // GIB)}G"
    return f"{max(1, -(-size_bytes // MIB))}M"


def max_clients(driver_version: str) -> int:
    """Return how many processes one server accepts. Source: NVIDIA's documentation, 48 since Volta, 60 since driver
    580."""
    major = driver_version.partition(".")[0]
    return 60 if major.isdigit() and int(major) >= 580 else 48


def protocol_of(pid: int) -> int:
    """Return the protocol of a running daemon; 2 if /proc does not tell."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as words, open(f"/proc/{pid}/environ", "rb") as environ:
            pairs = (entry.partition("=") for entry in os.fsdecode(environ.read()).split("\0"))
            return protocol_in(os.fsdecode(words.read()).split("\0"), {name: value for name, _, value in pairs})
    except OSError:
        return 2


def put_limits(control: Control, percent: int, memory_bytes: int) -> None:
    """Set both limits and read them back with the daemon's own commands; `memory_bytes` 0: no limit. Also set those
    of running servers of an adopted daemon, which keep their first values otherwise. Raise DeviceError."""
    words, memory = control.commands, memory_text(memory_bytes)
    if words.prepare and not _servers(control):
        for command in words.prepare:
            control.ask(command)
    control.ask(words.set_percent.format(percent))
    _require_percent(percent, control.ask(words.get_percent))
    if memory_bytes:
        control.ask(words.set_memory.format(memory))
        said = control.ask(words.get_memory)
        if said != memory:
            raise DeviceError(f"MPS did not accept a limit of {memory} of memory: it reports {shown(said)}")
    for server in _servers(control) if words.set_server_percent else ():
        control.ask(words.set_server_percent.format(percent, server=server))
        if memory_bytes:
            control.ask(words.set_server_memory.format(memory, server=server))
        said = control.ask(words.get_server_percent.format(server=server))
        if server in _servers(control):  # it has not exited meanwhile
            _require_percent(percent, said)


def _servers(control: Control) -> tuple[int, ...]:
    """Return the pids of the servers; () if there is none."""
    try:
        return control.numbers(control.commands.servers)
    except DeviceError:
        if control.protocol == 2:  # protocol 2 has no such message: the daemon does not answer
            raise
        return ()


def _require_percent(percent: int, said: str) -> None:
    if percent_in(said) != percent:
        raise DeviceError(f"MPS did not accept a limit of {percent}%: it reports {shown(said)}")
