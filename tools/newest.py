#!/usr/bin/env python3
"""Unpack container runtimes of another release of Debian for the tests, with their libraries.

    newest.py DIR [SUITE [SET]]     fills DIR once, from sid by default; the programs are in DIR/bin

They need a newer C library than this machine may have, so patchelf gives them the archive's loader and libraries.
Nothing is installed. See nvidia_userland.py for the sources.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.nvidia_userland import Source, UserlandError, fetch

SUITE = "sid"
# Set -> (packages, programs)
SETS = {
    "runtimes": (("runc", "crun", "containerd"), ("runc", "crun", "containerd", "containerd-shim-runc-v2", "ctr")),
    "engines": (("docker.io", "podman"), ("dockerd", "podman")),
    "etcd": (("etcd-server",), ("etcd",)),
}
_LOADER = "ld-linux-x86-64.so.2"
_PATCHELF = Path(__file__).resolve().parents[1] / "build" / "venv" / "bin" / "patchelf"


def unpack(directory: Path, suite: str = SUITE, kind: str = "runtimes") -> Path:
    """Fill `directory` unless it is already filled, and return the directory of the programs."""
    directory = directory.resolve()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{directory}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            with tempfile.TemporaryDirectory(dir=directory.parent, prefix=directory.name + ".") as name:
                work = Path(name)
                fetch(work, Source(suite, "", SETS[kind][0]), libraries=True)
                _patch(work / "root", directory, suite, *SETS[kind])
                (work / "root").rename(directory)
    return directory / "bin"


def _patch(root: Path, target: Path, suite: str, packages: Sequence[str], programs: Sequence[str]) -> None:
    """Write the programs to root/bin, with paths as they are once `root` is called `target`."""
    (loader,) = (path for path in root.rglob(_LOADER) if not path.is_symlink())
    folders = sorted({path.parent for path in root.rglob("lib*.so*")})
    rpath = ":".join(str(target / folder.relative_to(root)) for folder in folders)
    (root / "bin").mkdir()
    for name in programs:
        found = sorted(path for path in root.glob(f"usr/*bin/{name}") if path.is_file())
        if not found:
            raise UserlandError(f"the packages {' '.join(packages)} of {suite} have no program {name}")
        new = root / "bin" / name
        words = ["--set-interpreter", str(target / loader.relative_to(root)), "--force-rpath", "--set-rpath", rpath]
        subprocess.run([str(_PATCHELF), *words, "--output", str(new), str(found[0])], check=True)
        new.chmod(0o755)


def main() -> int:
    if not 2 <= len(sys.argv) <= 4:
        print("usage: newest.py DIR [SUITE [SET]]", file=sys.stderr)
        return 64
    try:
        print(unpack(Path(sys.argv[1]), *sys.argv[2:]))
    except UserlandError as error:
        print(f"newest: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
