"""Generate the files that `gpushare runtime configure` writes on a host without engine configuration.

usage: PYTHONPATH=hook:. build/venv/bin/python -m tools.engine_snippets     writes config/engines
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any, Optional

from gpushare.engines.base import Settings
from gpushare.engines.configure import ENGINES

from tests.support.host import TREE

FOLDER = TREE / "config" / "engines"
SETTINGS = Settings("/usr/bin/gpushare-runtime", "/usr/bin/gpushare-hook")
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # folder -> engine, options
    "docker": ("docker", {}),
    "containerd": ("containerd", {"engine_version": "2.1"}),
    "containerd-before-2.1": ("containerd", {"engine_version": "1.7"}),
    "containerd-hook-only": ("containerd", {"engine_version": "2.1", "hook_only": True}),
    "crio": ("crio", {}),
    "crio-hook-only": ("crio", {"hook_only": True}),
    "podman": ("podman", {}),
}


class Tree:
    """A stand-in for the host: files are texts in a dict, and each program prints a fixed text."""

    def __init__(
        self,
        files: dict[str, str],
        answers: Optional[dict[str, str]] = None,
        running: Sequence[list[str]] = (),
        complaints: Optional[dict[str, str]] = None,
    ) -> None:
        self.files = files
        self.answers = answers or {}
        self.running = running  # command lines
        self.complaints = complaints or {}

    def read(self, path: str) -> Optional[str]:
        return self.files.get(path)

    def read_linked(self, path: str) -> Optional[str]:
        return self.read(path)

    def glob(self, pattern: str) -> list[str]:
        return sorted(path for path in self.files if fnmatch(path, pattern))

    def files_below(self, folder: str) -> list[str]:
        return sorted((path for path in self.files if path.startswith(f"{folder}/")), key=lambda path: path.split("/"))

    def look(self, path: str) -> str:
        return self.files.get(path, "")

    def has(self, path: str) -> bool:
        return path in self.files

    def program(self, name: str) -> str:
        return next((path for path in self.files if path.endswith(f"/bin/{name}")), "")

    def processes(self, program: str) -> list[tuple[int, list[str]]]:
        found = enumerate(self.running, 100)
        return [(pid, words) for pid, words in found if words[0].rpartition("/")[2] == program]

    def complaint(self, *command: str) -> str:
        return self.complaints.get(" ".join(command), "")

    def ask(self, *command: str) -> Optional[str]:
        return self.answers.get(" ".join(command))


def texts() -> dict[str, str]:
    """Map each path below config/engines to its text."""
    found = {}
    for folder, (engine, more) in CASES.items():
        for change in ENGINES[engine].propose(SETTINGS._replace(**more), Tree({})).changes:
            assert change.after is not None
            found[f"{folder}{change.path}"] = change.after
    return found


def main() -> None:
    for name, text in texts().items():
        path = FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
