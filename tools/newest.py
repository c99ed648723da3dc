#!/usr/bin/env python3
"""Unpack container runtimes of another release of Debian for the tests, with their libraries.

    newest.py DIR [SUITE]       fills DIR once, from sid by default; the programs are in DIR/bin

They need a newer C library than this machine may have, so patchelf gives them the archive's loader and libraries.
Nothing is installed. See nvidia_userland.py for the sources.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.nvidia_userland import Source, UserlandError, fetch

SUITE = "sid"
PACKAGES = ("runc", "crun", "containerd")
PROGRAMS = ("runc", "crun", "containerd", "containerd-shim-runc-v2", "ctr")
_LOADER = "ld-linux-x86-64.so.2"
_PATCHELF = Path(__file__).resolve().parents[1] / "build" / "venv" / "bin" / "patchelf"


def unpack(directory: Path, suite: str = SUITE) -> Path:
    """Fill `directory` unless it is already filled, and return the directory of the programs."""
    directory = directory.resolve()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{directory}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            with tempfile.TemporaryDirectory(dir=directory.parent, prefix=directory.name + ".") as name:
                work = Path(name)
                fetch(work, Source(suite, "", PACKAGES), libraries=True)
                _patch(work / "root", directory, suite)
                (work / "root").rename(directory)
    return directory / "bin"


def _patch(root: Path, target: Path, suite: str) -> None:
    """Write the programs to root/bin, with paths as they are once `root` is called `target`."""
    (loader,) = (path for path in root.rglob(_LOADER) if not path.is_symlink())
    folders = sorted({path.parent for path in root.rglob("lib*.so*")})
    rpath = ":".join(str(target / folder.relative_to(root)) for folder in folders)
    (root / "bin").mkdir()
    for name in PROGRAMS:
        found = sorted(path for path in root.glob(f"usr/*bin/{name}") if path.is_file())
        if not found:
            raise UserlandError(f"the packages {' '.join(PACKAGES)} of {suite} have no program {name}")
        new = root / "bin" / name
        words = ["--set-interpreter", str(target / loader.relative_to(root)), "--force-rpath", "--set-rpath", rpath]
        subprocess.run([str(_PATCHELF), *words, "--output", str(new), str(found[0])], check=True)
        new.chmod(0o755)


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print("usage: newest.py DIR [SUITE]", file=sys.stderr)
        return 64
    try:
        print(unpack(Path(sys.argv[1]), *sys.argv[2:]))
    except UserlandError as error:
        print(f"newest: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
