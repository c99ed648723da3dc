"""Data types for configuring engines, and the interface of an engine module. Pure."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from typing import NamedTuple, Optional, Protocol

from ..core import constants
from ..core.errors import ConfigError
from ..core.quoting import shown

RUNTIME = "gpushare"  # the runtime's name for `docker run --runtime` and for a RuntimeClass's handler
RUNTIME_PROGRAM = "gpushare-runtime"
CRI_PROGRAM = "gpushare-runtime-cri"  # the same program; under this name it trusts annotations that name the pod
HOOK_PROGRAM = "gpushare-hook"
CDI_FILES = tuple(f"/etc/cdi/gpushare.{ending}" for ending in ("yaml", "json"))  # the file that the docs recommend
UNKNOWN = ""  # `before` of a file whose previous content is not recorded


class Settings(NamedTuple):
    """Options of the command. Paths are absolute, as the engine will see them."""

    program: str  # gpushare-runtime
    hook: str  # gpushare-hook
    config: str = constants.CONFIG_PATH
    state_dir: str = constants.STATE_DIR
    config_file: str = ""  # the engine's own file; empty: its default path
    default: bool = False  # make gpushare the default runtime
    hook_only: bool = False  # the engine's own runtime with gpushare's hook
    engine_version: str = ""  # empty: query the engine's program
    dump: str = ""  # text of `containerd config dump`; empty: query the program
    cri: bool = False  # the engine is a CRI
    require_nri: bool = False  # containerd, CRI-O: no runtime, only the requirement of gpushare's NRI plugin

    @property
    def cri_program(self) -> str:
        """Path of gpushare-runtime under its CRI name, in the same directory."""
        return os.path.join(os.path.dirname(self.program), CRI_PROGRAM)

    def given_version(self) -> tuple[int, int]:
        """(major, minor) of engine_version. Raises ConfigError."""
        match = re.fullmatch(r"v?(\d+)\.(\d+)(?:[.~+-].*)?", self.engine_version)
        if match is None:
            raise ConfigError(
                f"--engine-version {shown(self.engine_version)} is not a version", "write it as 1.7 or 2.1"
            )
        return int(match[1]), int(match[2])

    def runtime_args(self) -> list[str]:
        """Arguments of gpushare-runtime that differ from its defaults."""
        return self._args("--gpushare-config", "--gpushare-state")

    def hook_args(self) -> list[str]:
        """Arguments of gpushare-hook that differ from its defaults."""
        return self._args("--config", "--state") + ([constants.CRI_FLAG] if self.cri else [])

    def _args(self, config_flag: str, state_flag: str) -> list[str]:
        config = [] if self.config == constants.CONFIG_PATH else [config_flag, self.config]
        return config + ([] if self.state_dir == constants.STATE_DIR else [state_flag, self.state_dir])


class Change(NamedTuple):
    """A change of one file: its present text (None: no such file) and its new text (None: remove it). `mode` is for a
    new file."""

    path: str
    before: Optional[str]
    after: Optional[str]
    mode: int = 0o644

    @property
    def action(self) -> str:
        return "create" if self.before is None else "remove" if self.after is None else "change"

    def describe(self) -> str:
        """The change in one line, as in `create /etc/docker/daemon.json`."""
        return f"{self.action} {self.path}"

    def refuse_foreign(self, sign: str) -> None:
        """Raise ConfigError if the present file is not gpushare's: gpushare's files contain `sign`."""
        if self.before and self.before.strip() and sign not in self.before:
            raise ConfigError(
                f"{shown(self.path)} exists and was not written by gpushare", "move it away, or name another file"
            )

    def diff(self) -> str:
        """A unified diff for patch(1)."""

        def lines(text: Optional[str]) -> list[str]:
            return [] if text is None else text.splitlines(keepends=True)

        def name(text: Optional[str], side: str) -> str:
            return "/dev/null" if text is None else f"{side}{self.path}"

        parts = difflib.unified_diff(
            lines(self.before), lines(self.after), name(self.before, "a"), name(self.after, "b")
        )
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in parts)


class Proposal(NamedTuple):
    """Changes that are not made yet."""

    changes: Sequence[Change] = ()
    notes: Sequence[str] = ()  # for the user, one line each
    # Path of the default handler's program, if it is a low-level runtime with a path of its own; "": it is not.
    # None: not known, as when gpushare itself is the default, so the recorded path stays.
    low_level: Optional[str] = None


class Refusal(ConfigError):
    """The engine itself does not accept its files."""


class Files(Protocol):
    """Read access of an engine module to the host."""

    def read(self, path: str) -> Optional[str]:
        """The text of a file; None: no such file. Raises ConfigError if it is no regular file, or not text."""

    def read_linked(self, path: str) -> Optional[str]:
        """The same of a file that gpushare does not change, or of the file that a link names: engines follow links."""

    def glob(self, pattern: str) -> list[str]:
        """Paths that match, sorted."""

    def files_below(self, folder: str) -> list[str]:
        """Paths of all files below a directory, in the order of the names of each directory."""

    def look(self, path: str) -> str:
        """The text of a file that gpushare does not change, through links; empty if it cannot be read."""

    def has(self, path: str) -> bool:
        """Whether a path exists."""

    def program(self, name: str) -> str:
        """The path of a program in PATH; empty: none."""

    def processes(self, program: str) -> list[tuple[int, list[str]]]:
        """(pid, command line) of the running processes of a program on this host."""

    def ask(self, *command: str) -> Optional[str]:
        """Standard output of a program of the engine; None: not installed, or it failed."""

    def complaint(self, *command: str) -> str:
        """Standard error of a program that failed; empty: it did not, or is not installed."""


class Engine(Protocol):
    """Interface of an engine module of this package. The modules are pure and use the host only through `files`."""

    NAME: str
    PROGRAMS: tuple[str, ...]  # if one of them is installed, the engine is

    def located(self, settings: Settings, files: Files) -> Settings:
        """Settings with the file that the daemon reads, as it was started, unless the command names a file."""

    def reload(self, settings: Settings, files: Files) -> str:
        """The command that makes the engine read its files; empty: it always reads them."""

    def forget(self, settings: Settings, files: Files, changed: Sequence[str]) -> str:
        """The same after removing gpushare's entries from the files `changed`."""

    def verify(self, settings: Settings, files: Files) -> None:
        """Let the engine check the files that were written. Raises Refusal if it would not start with them, ConfigError
        if they lack the entry."""

    def ignored(self, settings: Settings, files: Files, paths: Sequence[str]) -> str:
        """Why the daemon does not read gpushare's entries, which are in `paths`; empty: it does."""

    def propose(self, settings: Settings, files: Files) -> Proposal:
        """The changes that add gpushare's entries. Raises ConfigError."""

    def paths(self, settings: Settings, files: Files) -> tuple[str, ...]:
        """Files that can contain gpushare's entries."""

    def withdraw(self, path: str, text: str, before: Optional[str]) -> Optional[str]:
        """`text` without gpushare's entries and otherwise unchanged; None: remove the file. `before` is the content
        before the first change (None: no file, UNKNOWN: not recorded)."""

    def lacks_cri(self, path: str, text: str) -> bool:
        """Whether gpushare's entry in `text` is of a version that did not mark the engine as a CRI."""

    def entry(self, path: str, text: str) -> str:
        """The program in gpushare's entry in `text`; empty when there is no entry."""
