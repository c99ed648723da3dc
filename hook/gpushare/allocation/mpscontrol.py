"""Talking to an nvidia-cuda-mps-control that runs, and which one that is. Not on the start path.

    program(root)                -> str | None     where the driver has it
    listening(pipe)              -> Daemon | None  who listens at a pipe directory: pid and uid, as the kernel says
    Control(program, pipe, ...).ask(command)  -> str       one command of its own, and what it answered

Commands and what they answer were tried on driver 535.261.03: an unknown one and a value that is not taken are no
error, so whoever sets something reads it back. Sizes are whole numbers with G or M, and are printed in whole G from
1 G on (1500M reads back as 1G).
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
from typing import NamedTuple, Optional

from ..core.errors import DeviceError, KernelError
from ..core.model import Node
from ..core.quoting import shown
from ..gpu import driverroot
from ..gpu.drivertable import PROGRAM_DIRS
from . import mpswords

NAME, SERVER = "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"
DEADLINE_S = 10.0
GIB, MIB = 1 << 30, 1 << 20
_PEERCRED = struct.Struct("3i")


class Daemon(NamedTuple):
    """The process behind a control socket."""

    pid: int
    uid: int


class Control(NamedTuple):
    """One daemon: its program, its pipe directory, the environment that program needs, and how it is spoken to."""

    program: str
    pipe: str
    env: dict[str, str]
    protocol: int = 2

    @property
    def words(self) -> mpswords.Words:
        return mpswords.WORDS[self.protocol]

    def ask(self, command: str, deadline_s: float = DEADLINE_S) -> str:
        """The answer, without white space around it. Raises DeviceError when the daemon is gone or does not answer."""
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
        """Its answer when that is a list of pids; () where it says that there is none."""
        return mpswords.pids_in(self.ask(command))


def program(root: str) -> Optional[str]:
    """The host path of the control program of the driver in `root`."""
    for directory in PROGRAM_DIRS:
        found = driverroot.in_root(root, f"{directory}/{NAME}")
        if found is not None and os.access(found, os.X_OK):
            return found
    return None


def environment(host: Node, program: str) -> dict[str, str]:
    """Nothing of ours. The server is found by PATH, and its libcuda by the loader, or where the driver is elsewhere by
    LD_LIBRARY_PATH."""
    root = host.inventory.root.rstrip("/")
    env = {"PATH": ":".join([os.path.dirname(program), *(f"{root}/{one}" for one in PROGRAM_DIRS)])}
    if root:
        from ..gpu import driverfiles

        library = driverfiles.cuda_library(host.inventory.root, host.inventory.driver_version)
        env["LD_LIBRARY_PATH"] = os.path.dirname(library)
        env["PATH"] += ":/usr/sbin:/usr/bin:/sbin:/bin"  # of a program that is a script
    return env


def listening(pipe: str) -> Optional[Daemon]:
    """Who accepts connections at `pipe`/control; None when nobody does. A path may be longer than a socket address has
    room for, so it is reached by a descriptor."""
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
    """A limit that is not below `size_bytes`, as the daemon takes it and prints it again."""
    if size_bytes >= GIB:
        return f"{-(-size_bytes // GIB)}G"
    return f"{max(1, -(-size_bytes // MIB))}M"


def max_clients(driver_version: str) -> int:
    """Processes that one server takes. Source: NVIDIA's documentation, 48 since Volta, 60 since driver 580."""
    major = driver_version.partition(".")[0]
    return 60 if major.isdigit() and int(major) >= 580 else 48


def protocol_of(pid: int) -> int:
    """The protocol of a daemon that runs; 2 where nobody can say."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as words, open(f"/proc/{pid}/environ", "rb") as environ:
            pairs = (entry.partition("=") for entry in os.fsdecode(environ.read()).split("\0"))
            return mpswords.protocol_in(
                os.fsdecode(words.read()).split("\0"), {name: value for name, _, value in pairs}
            )
    except OSError:
        return 2
