"""What the parts of configuration hand to each other: plain data, and the shape of an engine module. Pure."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from typing import NamedTuple, Optional, Protocol

from ..core import constants
from ..core.errors import ConfigError
from ..core.quoting import shown

RUNTIME = "gpushare"  # the name that `docker run --runtime` and a RuntimeClass's handler give
RUNTIME_PROGRAM = "gpushare-runtime"
CRI_PROGRAM = "gpushare-runtime-cri"  # the same program; under this name annotations say which pod a container is of
HOOK_PROGRAM = "gpushare-hook"
UNKNOWN = ""  # `before` of a file of which nobody wrote down what was in it


class Settings(NamedTuple):
    """What the person asked for. Paths are those that the engine will see, absolute."""

    program: str  # gpushare-runtime
    hook: str  # gpushare-hook
    config: str = constants.CONFIG_PATH
    state_dir: str = constants.STATE_DIR
    config_file: str = ""  # the engine's own file; empty: where it usually is
    default: bool = False  # for containers that name no runtime, too
    hook_only: bool = False  # stock runtime, our hook
    engine_version: str = ""  # empty: ask the engine's program
    dump: str = ""  # text of `containerd config dump`; empty: ask the program
    cri: bool = False  # for an engine that is a CRI

    @property
    def cri_program(self) -> str:
        """gpushare-runtime under its other name, beside it."""
        return os.path.join(os.path.dirname(self.program), CRI_PROGRAM)

    def runtime_args(self) -> list[str]:
        """Arguments of gpushare-runtime that are not what it takes anyway."""
        return self._args("--gpushare-config", "--gpushare-state")

    def hook_args(self) -> list[str]:
        """The same of gpushare-hook."""
        return self._args("--config", "--state") + ([constants.CRI_FLAG] if self.cri else [])

    def _args(self, config_flag: str, state_flag: str) -> list[str]:
        config = [] if self.config == constants.CONFIG_PATH else [config_flag, self.config]
        return config + ([] if self.state_dir == constants.STATE_DIR else [state_flag, self.state_dir])


class Change(NamedTuple):
    """One file: its text now (None: no such file) and then (None: removed). `mode` is that of a file which is new."""

    path: str
    before: Optional[str]
    after: Optional[str]
    mode: int = 0o644

    @property
    def action(self) -> str:
        return "create" if self.before is None else "remove" if self.after is None else "change"

    def describe(self) -> str:
        """As in `create /etc/docker/daemon.json`."""
        return f"{self.action} {self.path}"

    def refuse_foreign(self, sign: str) -> None:
        """Raises ConfigError where the file is there and somebody else's: ours have `sign` in them."""
        if self.before and self.before.strip() and sign not in self.before:
            raise ConfigError(
                f"{shown(self.path)} is there, and was not written by gpushare", "move it away, or name another file"
            )

    def diff(self) -> str:
        """Unified, as patch(1) takes it."""

        def lines(text: Optional[str]) -> list[str]:
            return [] if text is None else text.splitlines(keepends=True)

        def name(text: Optional[str], side: str) -> str:
            return "/dev/null" if text is None else f"{side}{self.path}"

        parts = difflib.unified_diff(
            lines(self.before), lines(self.after), name(self.before, "a"), name(self.after, "b")
        )
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in parts)


class Proposal(NamedTuple):
    """What would be done; nothing has been."""

    changes: Sequence[Change] = ()
    notes: Sequence[str] = ()  # what the person should know, one line each


class Files(Protocol):
    """What an engine module may look at."""

    def read(self, path: str) -> Optional[str]:
        """None: no such file. Raises ConfigError when it is no usual file, or not text."""

    def glob(self, pattern: str) -> list[str]:
        """Paths that match, sorted."""

    def ask(self, *command: str) -> Optional[str]:
        """Standard output of a program of the engine; None: not installed, or it failed."""


class Engine(Protocol):
    """A module of this package. All of it is pure: `files` is the only thing that it sees."""

    NAME: str
    PROGRAMS: tuple[str, ...]  # one of them is there when the engine is
    RELOAD: str  # the command after which the engine knows; empty: it reads its files each time
    FORGET: str  # the same after our entries were taken out

    def propose(self, settings: Settings, files: Files) -> Proposal:
        """Raises ConfigError."""

    def paths(self, settings: Settings) -> tuple[str, ...]:
        """Files in which our entries can be."""

    def withdraw(self, path: str, text: str, before: Optional[str]) -> Optional[str]:
        """`text` without our entries and nothing else changed; None: the file should go. `before` is what was there
        before us (None: no file, UNKNOWN: nobody knows)."""

    def lacks_cri(self, path: str, text: str) -> bool:
        """Whether our entry in `text` is of a version that did not say that the engine is a CRI."""

    def entry(self, path: str, text: str) -> str:
        """The program that our entry in `text` names; empty when there is none."""
