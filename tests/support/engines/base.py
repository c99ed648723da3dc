"""The common interface of the engines.

    with_engine.run(Want(env={"GPUSHARE_MEMORY": "2Gi"}))      -> Result of the image's program, or of the refusal
    with with_engine.start(Want(args=SLEEP, ...)) as one:      -> Running; Refused when it does not start
        one.exec(PROBE)

An engine belongs to one simulated host (`node`); nothing else starts containers there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from ..host import Node
from ..spec import Mount
from .image import PROBE

SLEEP = ("sleep", "inf")


class Want(NamedTuple):
    """A container to request from an engine."""

    args: tuple[str, ...] = (PROBE,)
    env: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    mounts: tuple[Mount, ...] = ()
    tmpfs: tuple[str, ...] = ()
    user: str = "0:0"
    read_only: bool = False


class Result(NamedTuple):
    """The output of a program, or of a container that did not start, as the engine's user sees it."""

    code: int
    out: str
    err: str

    def answer(self) -> dict[str, Any]:
        """The probe's JSON; raises AssertionError with all output if it printed none."""
        try:
            answer: dict[str, Any] = json.loads(self.out)
        except ValueError:
            raise AssertionError(f"no answer, exit code {self.code}\n{self.out}\n{self.err}") from None
        assert "failed" not in answer, f"{answer}\n{self.err}"
        return answer


class Refused(Exception):
    """The container did not start."""

    def __init__(self, result: Result) -> None:
        super().__init__(f"exit code {result.code}\n{result.out}\n{result.err}")
        self.result = result


class Running(Protocol):
    """A container whose program runs. As a context: removed at the end."""

    @property
    def id(self) -> str:
        """The container's whole id, which is also its lease's."""

    @property
    def pid(self) -> int:
        """The pid of its first process on the host."""

    def exec(self, *args: str, user: str = "") -> Result: ...

    def stop(self) -> None:
        """End the program and wait for its end; the container stays."""

    def restart(self) -> None:
        """Start the stopped container again. Raises Refused like start()."""

    def remove(self) -> None:
        """Delete the container, running or not; a second call does nothing."""

    def __enter__(self) -> Running: ...

    def __exit__(self, *error: object) -> None: ...


class Engine(Protocol):
    """One engine on one host."""

    node: Node
    name: str
    way: str  # "hook" or "runtime": the program of gpushare that it calls
    annotates: bool  # Want.annotations reach config.json
    shows_reason: bool  # the user sees the reason of a refusal; otherwise only `gpushare inspect` shows it
    restarts: bool  # Running.restart is possible

    def run(self, want: Want, timeout_s: float = 60) -> Result:
        """Run until the program ends; the container is deleted afterwards."""

    def start(self, want: Want) -> Running:
        """Raises Refused."""

    def close(self) -> None:
        """Remove every process, mount and file of the engine."""
