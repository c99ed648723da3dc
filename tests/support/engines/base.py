"""What a test can ask of an engine, whichever it is.

    with_engine.run(Want(env={"GPUSHARE_MEMORY": "2Gi"}))      -> Result of the image's program, or of the refusal
    with with_engine.start(Want(args=SLEEP, ...)) as one:      -> Running; Refused when it does not start
        one.exec(PROBE)

An engine belongs to one simulated host (`node`), on which nothing else starts containers.
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
    """A container, as somebody would ask an engine for it."""

    args: tuple[str, ...] = (PROBE,)
    env: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    mounts: tuple[Mount, ...] = ()
    tmpfs: tuple[str, ...] = ()
    user: str = "0:0"
    read_only: bool = False


class Result(NamedTuple):
    """What the engine's user sees of a program, or of a container that did not start."""

    code: int
    out: str
    err: str

    def answer(self) -> dict[str, Any]:
        """What the probe said; AssertionError with all there is to see when it said nothing."""
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
        """Its first process, as the host numbers it."""

    def exec(self, *args: str, user: str = "") -> Result: ...

    def stop(self) -> None:
        """End the program, and wait for that; the container itself stays."""

    def restart(self) -> None:
        """Start the stopped container again. Refused as in start()."""

    def remove(self) -> None:
        """Delete the container, running or not; a second call does nothing."""

    def __enter__(self) -> Running: ...

    def __exit__(self, *error: object) -> None: ...


class Engine(Protocol):
    """One engine on one host."""

    node: Node
    name: str
    way: str  # "hook" or "runtime": which of our programs it calls
    annotates: bool  # Want.annotations reach config.json
    shows_reason: bool  # the user sees why we refused; else only `gpushare inspect` tells
    restarts: bool  # Running.restart is possible

    def run(self, want: Want, timeout_s: float = 60) -> Result:
        """Until the program ends; the container is gone afterwards."""

    def start(self, want: Want) -> Running:
        """Raises Refused."""

    def close(self) -> None:
        """Nothing of the engine is left: process, mount, file."""
