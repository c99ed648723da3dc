"""A container that runs demo/tenant.py, or a program with the same events, and the host's end of its two FIFOs."""

from __future__ import annotations

import json
import os
import select
from pathlib import Path
from typing import Any

from .host import PYTHON, TREE, Node, python_mounts
from .runc import Container
from .spec import Mount

PROGRAM = TREE / "demo" / "tenant.py"
CHANNEL_IN_CONTAINER = "/opt/channel"


class Tenant:
    """Request `env`, and control the program with expect("seen"), go(), expect("full"), go(), expect("freed")."""

    def __init__(
        self,
        directory: Path,
        name: str,
        env: dict[str, str],
        node: Node | None,
        extra_mounts: list[Mount] | None = None,
        way: str = "hook",
        program: Path = PROGRAM,
        words: tuple[str, ...] = (CHANNEL_IN_CONTAINER,),
        **arguments: Any,
    ) -> None:
        self.name = name
        self.channel = directory / f"{name}-channel"
        self.channel.mkdir(parents=True)
        self.channel.chmod(0o755)
        for fifo in ("events", "go"):
            os.mkfifo(self.channel / fifo)
            (self.channel / fifo).chmod(0o666)
        self._events = os.open(self.channel / "events", os.O_RDONLY | os.O_NONBLOCK)
        self._go = os.open(self.channel / "go", os.O_RDWR)  # reading too, so the open does not block
        self._unread = b""
        self.container = Container(
            directory,
            [PYTHON, f"/opt/{program.name}", *words],
            env=env,
            **(node.way(way) if node else {}),
            mounts=[
                *python_mounts(program),
                Mount(self.channel, CHANNEL_IN_CONTAINER, ("rw", "nosuid", "nodev")),
                *(extra_mounts or []),
            ],
            name=name,
            **arguments,
        )

    def expect(self, event: str, timeout_s: float = 60) -> dict[str, Any]:
        """The tenant's next event; AssertionError with its output if another event comes, the tenant ends, or none
        comes in time."""
        while b"\n" not in self._unread:
            self._wait(event, timeout_s)
            part = os.read(self._events, 1 << 16)
            assert part, f"{self.name} closed its channel before {event!r}\n{self._output()}"
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        assert answer.pop("event") == event, f"{self.name}: {line!r} instead of {event!r}"
        return answer

    def _wait(self, event: str, timeout_s: float) -> None:
        """Wait for input; fail at once if the tenant ends."""
        init = os.pidfd_open(self.container.pid)
        try:
            poll = select.poll()
            poll.register(self._events, select.POLLIN)
            poll.register(init, select.POLLIN)
            ready = dict(poll.poll(timeout_s * 1000))
        finally:
            os.close(init)
        if not ready.get(self._events, 0) & select.POLLIN:
            state = "ended" if ready else f"sent nothing for {timeout_s} s"
            raise AssertionError(f"{self.name} {state} before {event!r}\n{self._output()}")

    def _output(self) -> str:
        return self.container.stdout + self.container.stderr

    def go(self) -> None:
        """Let the tenant take its next step."""
        os.write(self._go, b"\n")

    def pid_namespace(self) -> int:
        """The inode of the container's pid namespace, which identifies its processes in the simulator's ledger."""
        return os.stat(f"/proc/{self.container.pid}/ns/pid").st_ino

    def close(self) -> None:
        self.container.close()
        for fd in (self._events, self._go):
            if fd >= 0:
                os.close(fd)
        self._events = self._go = -1
