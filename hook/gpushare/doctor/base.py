"""The types of checks and results, and what all checks read."""

from __future__ import annotations

from typing import Callable, NamedTuple, Optional

from ..core.errors import GpushareError
from ..core.model import Config, Inventory, Node
from ..engines.base import Settings
from ..engines.host import Host

OK, WARN, FAIL, SKIP = "ok", "warn", "fail", "skip"


class Result(NamedTuple):
    """The result of a check. `hint`: what the user can do if it is not ok. `more`: further lines below `detail`. SKIP:
    the check cannot run here, for which `detail` gives the reason."""

    result: str
    detail: str
    hint: str = ""
    more: tuple[str, ...] = ()


class Machine(NamedTuple):
    """This host as the next container would find it. A part that could not be read is None, and `config_error` or
    `driver_error` gives the reason."""

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
    """One check. If `ask` raises GpushareError or OSError, the check has failed."""

    name: str
    meaning: str  # the condition for OK, for docs/cli.md
    ask: Callable[[Machine], Result]


def failed(error: GpushareError) -> Result:
    return Result(FAIL, error.message, error.hint)


def no_driver(machine: Machine) -> Result:
    """SKIP of a check that needs a configuration or a driver; another check reports that it is missing."""
    return Result(SKIP, "needs a configuration" if machine.config is None else "needs a driver")
