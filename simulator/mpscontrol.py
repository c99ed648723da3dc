"""A simulated nvidia-cuda-mps-control and server without a GPU, for the simulated libcuda (cuda/mps.c).

    install(root, MULTIUSER=True, ...)   installs it in a simulated host, with other values of its constants

Its answers to commands, its files and their modes, and the commands that need control_privileged are as recorded from
535.261.03 (tests/integration/test_mps_daemon.py runs the real daemon). The limits of clients follow the documentation:
at most 48 clients, the smaller of two limits, one user at a time, and a server keeps the limits that it started with.
Protocol 3 is documented as well. It uses only the standard library, because it runs as a program of the simulated host.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import sys
import threading
from pathlib import Path
from typing import Optional

NAME = "nvidia-cuda-mps-control"
MAX_CLIENTS = 48
MULTIUSER = False  # whether the program has the option --multiuser
PROTOCOL_3 = False  # whether the program has protocol 3
MPS_MAX_CLIENTS_REACHED = 808  # CUresult
HELLO, CRED = b"OUTBHELL\0", b"OUTBCRED\0"
CLIENT, UI = 2, 4
ASKED, ANSWER = struct.Struct("<dQ"), struct.Struct("<IIdQ64s")
UNITS = {"G": 1 << 30, "M": 1 << 20}
FAILED = "\1"  # precedes the message of a protocol 3 command that failed


def install(root: Path, **constants: object) -> Path:
    """Replace the control program of a simulated host."""
    path = root / "usr/bin" / NAME
    path.unlink(missing_ok=True)
    lines = Path(__file__).read_text().splitlines()
    for name, value in constants.items():
        (at,) = (number for number, line in enumerate(lines) if line.startswith(f"{name} = "))
        lines[at] = f"{name} = {value}"
    path.write_text("\n".join([f"#!{sys.executable} -IS", *lines, ""]))
    path.chmod(0o755)
    return path


def pipe() -> str:
    return os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")


class Daemon:
    """The control daemon and its server in one process."""

    def __init__(self, multiuser: bool) -> None:
        self.multiuser = multiuser
        self.default = Limits()
        self.server: Optional[Limits] = None  # from the first client on; in protocol 3 from its creation on
        self.change = threading.Condition()
        self.clients: dict[socket.socket, tuple[int, int]] = {}  # connection -> (pid, uid)
        self.shared = f"cuda.shm.0.{os.getpid():x}.1"
        os.close(os.open(f"/dev/shm/{self.shared}", os.O_CREAT | os.O_RDWR, 0o666))
        os.chmod(f"/dev/shm/{self.shared}", 0o666)

    def serve(self, listener: socket.socket, privileged: bool) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self.talk, args=(connection, privileged), daemon=True).start()

    def talk(self, connection: socket.socket, privileged: bool) -> None:
        with connection:
            pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            try:
                connection.send(HELLO)
                if connection.recv(64) != CRED:
                    return
                (kind,) = struct.unpack("<I", connection.recv(4))
                self.client(connection, pid, uid) if kind == CLIENT else self.commands(connection, privileged)
            except (OSError, struct.error):
                pass  # the client has disconnected

    def client(self, connection: socket.socket, pid: int, uid: int) -> None:
        percent, memory = ASKED.unpack(connection.recv(ASKED.size))
        with self.change:
            while not self.multiuser and any(other != uid for _, other in self.clients.values()):
                self.change.wait()  # wait until the server's current user has disconnected
            full = len(self.clients) >= MAX_CLIENTS
            if not full:
                self.clients[connection] = (pid, uid)
            server = self.server = self.server or Limits(self.default.percent, self.default.memory_text)
        limits = [size for size in (memory, size_of(server.memory_text)) if size]
        result = MPS_MAX_CLIENTS_REACHED if full else 0
        shared = f"/{self.shared}".encode()
        try:
            answer = ANSWER.pack(result, 0, min(percent, server.percent), min(limits, default=0), shared)
            connection.send(answer)
            connection.recv(1)  # returns when the client disconnects
        finally:
            with self.change:
                if not full:
                    del self.clients[connection]
                self.change.notify_all()

    def commands(self, connection: socket.socket, privileged: bool) -> None:
        while True:
            (size,) = struct.unpack("<Q", connection.recv(8))
            if not size:
                break
            words = connection.recv(size).rstrip(b"\0\n").decode().split()
            if words[:1] in (["quit"], ["--quit"]) and privileged:
                connection.send(struct.pack("<Iq", 1, 0))
                os.unlink(f"/dev/shm/{self.shared}")
                os._exit(0)
            text = self.answer(words)
            if text:
                connection.send(struct.pack("<I", 0) + text.encode())
        connection.send(struct.pack("<Iq", 1, 0)[:8])

    def answer(self, words: list[str]) -> str:
        if PROTOCOL_3 and words[0] in ("server", "namespace", "client"):
            return self.answer_3(words)
        command, values = words[0], words[1:]
        if command == "quit":
            return "Not enough privilege to execute quit command"
        limits = self.default
        if not command.startswith(("set_default_", "get_default_")) and values and self.server:
            limits, values = self.server, values[1:]
        if command.endswith("_active_thread_percentage"):
            if values and 0 < float(values[0]) <= 100:
                limits.percent = float(values[0])
            return f"{limits.percent:.1f}"
        if command.startswith("set_") and command.endswith("_pinned_mem_limit"):
            if len(values) == 2 and size_of(values[1]):
                limits.memory_text = values[1]
            return ""
        if command == "get_default_device_pinned_mem_limit":
            return shown(limits.memory_text)
        if command == "start_server":
            self.server = self.server or Limits(self.default.percent, self.default.memory_text)
            return ""
        if command == "get_server_list":
            return str(os.getpid()) if self.server else ""
        if command == "get_client_list":
            return "\n".join(str(pid) for pid, _ in sorted(self.clients.values()))
        return f'Unknown command "{command}"'

    def answer_3(self, words: list[str]) -> str:
        """Answer a command of protocol 3 about the only server."""
        options = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
        (module, verb, *names) = [word for word in words if not word.startswith("--")]
        if (module, verb) == ("server", "create"):
            if self.server or (self.multiuser and options.get("uid", "0") != "0"):
                return FAILED + "cannot create it"
            self.server = Limits()
            os.mkdir(f"{pipe()}/{names[0]}")
            self.listen(f"{names[0]}/control", 0o666)
            os.mkfifo(f"{pipe()}/{names[0]}/log", 0o777)
            return ""
        if self.server is None:
            return FAILED + "no such server"
        if verb == "set":
            self.server.percent = float(options.get("active-thread-percentage", self.server.percent))
            self.server.memory_text = options.get("pinned-memory-limit", self.server.memory_text)
            return ""
        if verb == "list":
            return "\n".join(f"{pid},{options['server']},0,default,program" for pid, _ in sorted(self.clients.values()))
        fields = {
            "pid": str(os.getpid()),
            "active-thread-percentage": f"{self.server.percent:.0f}",
            "pinned-memory-limit": shown(self.server.memory_text),
        }
        return fields[names[-1]]

    def listen(self, name: str, mode: int) -> threading.Thread:
        path = f"{pipe()}/{name}"
        if os.path.lexists(path):
            os.unlink(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(path)
        os.chmod(path, mode)
        listener.listen(64)
        thread = threading.Thread(target=self.serve, args=(listener, "privileged" in name))
        thread.start()
        return thread


class Limits:
    """The limits that the daemon or a server imposes on each client."""

    def __init__(self, percent: float = 100.0, memory_text: str = "") -> None:
        self.percent, self.memory_text = percent, memory_text


def shown(memory_text: str) -> str:
    size = size_of(memory_text)
    return f"{size >> 30}G" if size >= 1 << 30 else memory_text


def size_of(text: str) -> int:
    return int(text[:-1]) * UNITS[text[-1]] if text[:-1].isdigit() and text[-1] in UNITS else 0


def run_daemon(multiuser: bool) -> int:
    """Start the daemon in the background. Return in the calling process once the daemon listens."""
    os.umask(0)
    lock = os.open(f"{pipe()}/control_lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("An instance of this daemon is already running")
        return 1
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        os.close(lock)
        return 0 if os.read(reader, 1) else 1
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    daemon = Daemon(multiuser)
    if not os.path.lexists(f"{pipe()}/log"):
        os.mkfifo(f"{pipe()}/log", 0o777)
    threads = [daemon.listen(name, mode) for name, mode in (("control", 0o666), ("control_privileged", 0o755))]
    os.write(writer, b"1")
    os.close(writer)
    threads[0].join()
    return 0


def run_ui(words: list[str]) -> int:
    """Send the commands on standard input; in protocol 3 the single command in `words`."""
    connection: Optional[socket.socket] = None
    for name in ("control_privileged", "control"):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(f"{pipe()}/{name}")
            break
        except OSError:
            connection = None
    if connection is None:
        print("Cannot find MPS control daemon process", file=sys.stderr)
        return 1
    connection.recv(64)
    connection.send(CRED)
    connection.send(struct.pack("<I", UI))
    for line in [" ".join(words)] if words else sys.stdin:
        text = line.encode() + b"\0"
        connection.send(struct.pack("<Q", len(text)))
        connection.send(text)
    connection.send(struct.pack("<Q", 0))
    while True:
        said = connection.recv(65536)
        if len(said) < 4 or said[:4] == struct.pack("<I", 1):
            return 0
        text = said[4:].decode()
        print(text.removeprefix(FAILED), flush=True)
        if text.startswith(FAILED):
            return 1


def main(words: list[str]) -> int:
    if "-h" in words:
        options = [(MULTIUSER, "-m, --multiuser"), (PROTOCOL_3, "-p, --protocol <2|3>")]
        print("\n  ".join(["CUDA MPS Control, simulated.", *(text for there, text in options if there)]))
        return 0
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if "-d" in words:
        return run_daemon("--multiuser" in words and MULTIUSER)
    return run_ui(words if PROTOCOL_3 else [])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
