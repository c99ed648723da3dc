"""What checks are made of: plain values, and what they all look at."""

from __future__ import annotations

from typing import Callable, NamedTuple, Optional

from ..core.errors import GpushareError
from ..core.model import Config, Inventory, Node
from ..engines.base import Settings
from ..engines.host import Host

OK, WARN, FAIL, SKIP = "ok", "warn", "fail", "skip"


class Result(NamedTuple):
    """`hint`: what to do, of what is not ok. SKIP: cannot be known here, and `detail` says why."""

    result: str
    detail: str
    hint: str = ""


class Machine(NamedTuple):
    """This host as the next container would find it. What is None could not be read: `config_error`, `driver_error`."""

    config_path: str
    state_dir: str
    settings: Settings
    files: Host
    config: Optional[Config] = None
    inventory: Optional[Inventory] = None
    config_error: Optional[GpushareError] = None
    driver_error: Optional[GpushareError] = None

    @property
    def node(self) -> Optional[Node]:
        return Node(self.config, self.inventory) if self.config and self.inventory else None


class Check(NamedTuple):
    """One row. `ask` may raise GpushareError and OSError: that is a failure of what was asked about."""

    name: str
    meaning: str  # for docs/cli.md: when it is ok
    ask: Callable[[Machine], Result]


def failed(error: GpushareError) -> Result:
    return Result(FAIL, error.message, error.hint)


def no_driver(machine: Machine) -> Result:
    """Of a check that needs what another one has found missing."""
    return Result(SKIP, "not without a configuration" if machine.config is None else "not without a driver")
