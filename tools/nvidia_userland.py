#!/usr/bin/env python3
"""Unpack the user-space part of a real NVIDIA driver (libraries, no kernel module) for the tests.

    nvidia_userland.py DIR      fills DIR once and prints the driver's version

The packages come from the distribution's own non-free section. apt uses private lists and a private cache, so the
machine's package state does not change. Updates are not used, so the driver changes only with a point release. Nothing
is installed, and nothing in DIR may be redistributed. Standard library only.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

# Origin in the repository's Release file -> (sections, packages). Ubuntu names its packages after the driver's branch.
PACKAGES = {
    "Debian": (
        "contrib non-free",
        (
            "libcuda1",
            "libnvidia-ml1",
            "libnvidia-nvvm4",
            "libnvidia-ptxjitcompiler1",
            "nvidia-cuda-mps",
            "nvidia-persistenced",
            "nvidia-smi",
        ),
    ),
    "Ubuntu": ("restricted", ("libnvidia-compute-535", "nvidia-compute-utils-535", "nvidia-utils-535")),
}


class UserlandError(Exception):
    """The machine cannot provide the driver; the message is one line with the reason."""


class Userland(NamedTuple):
    """An unpacked driver. `libdir` holds libcuda.so.<version> and the other libraries."""

    root: Path
    libdir: Path
    version: str

    def library(self, name: str) -> Path:
        """Return the path of `name`.so.<version>, for example for library("libcuda")."""
        return self.libdir / f"{name}.so.{self.version}"


def find(root: Path) -> Userland:
    """Return the driver unpacked below `root`; UserlandError when there is none."""
    found = [p for p in sorted(root.rglob("libcuda.so.*.*")) if p.is_file() and not p.is_symlink()]
    if not found:
        raise UserlandError(f"no libcuda.so.<version> below {root}; remove that directory and try again")
    return Userland(root, found[0].parent, found[0].name[len("libcuda.so.") :])


def unpack(root: Path) -> Userland:
    """Fill `root` unless it is already filled. Concurrent callers wait for each other."""
    root = root.resolve()  # apt does not resolve relative directories against the working directory
    root.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{root}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            with tempfile.TemporaryDirectory(dir=root.parent, prefix=root.name + ".") as work:
                _fetch(Path(work))
                (Path(work) / "root").rename(root)
        return find(root)


def _fetch(work: Path) -> None:
    """Download into `work`/debs and unpack into `work`/root."""
    if platform.machine() != "x86_64":
        raise UserlandError(f"the driver packages are for x86_64, this machine is {platform.machine()}")
    if not shutil.which("apt-get"):
        raise UserlandError("no apt-get: the real driver's libraries come from Debian's or Ubuntu's packages")
    for name in ("lists/partial", "cache/archives/partial", "debs", "root"):
        (work / name).mkdir(parents=True)
    origin, sources = _sources(work)
    sections, packages = PACKAGES[origin]
    (work / "sources.list").write_text("".join(f"deb {source} main {sections}\n" for source in sources))
    private = (f"Dir::Etc::sourcelist={work}/sources.list", "Dir::Etc::sourceparts=/dev/null", *_private_dirs(work))
    # The exit code of update does not matter: a suite without the section is no failure, a missing package is.
    _apt(private, "update", check=False)
    _apt(private, "download", *packages, cwd=work / "debs")
    for deb in sorted((work / "debs").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(deb), str(work / "root")], check=True)


def _private_dirs(work: Path) -> tuple[str, ...]:
    return (f"Dir::State::Lists={work}/lists", f"Dir::Cache={work}/cache", "APT::Sandbox::User=root")


def _sources(work: Path) -> tuple[str, list[str]]:
    """Return (origin, ["[options] URI SUITE", ...]) of the distribution's release, as this machine configures it."""
    fields = ("ORIGIN", "COMPONENT", "REPO_URI", "BASE_URI", "SIGNED_BY", "TRUSTED")
    query = ("indextargets", "--format", "\t".join(f"$({f})" for f in fields), "Created-By: Packages")
    text = _apt((), *query)
    if not text.strip():  # this machine has no package lists: read the Release files privately
        _apt(_private_dirs(work), "update", check=False)
        text = _apt(_private_dirs(work), *query)
    for origin in PACKAGES:
        rows = [dict(zip(fields, line.split("\t"))) for line in text.splitlines()]
        rows = [r for r in rows if r["ORIGIN"] == origin and r["COMPONENT"] == "main"]
        if rows:
            suite = min((_suite(row) for row in rows), key=len)  # bookworm, not bookworm-updates or -security
            return origin, list(dict.fromkeys(_source(row) for row in rows if _suite(row) == suite))
    raise UserlandError("apt knows no Debian or Ubuntu repository here (apt-get indextargets is empty)")


def _suite(row: dict[str, str]) -> str:
    return row["BASE_URI"].rstrip("/").rpartition("/dists/")[2]


def _source(row: dict[str, str]) -> str:
    """Format a repository like a sources.list line, without its type and components."""
    options = [("signed-by", row["SIGNED_BY"]), ("trusted", row["TRUSTED"])]
    text = " ".join(f"{k}={v}" for k, v in options if v and not v.startswith("$("))
    return f"{f'[{text}] ' if text else ''}{row['REPO_URI']} {_suite(row)}"


def _apt(options: tuple[str, ...], *args: str, check: bool = True, cwd: Path | None = None) -> str:
    """Run apt-get and return what it prints; UserlandError with its last line when it fails."""
    command = ["apt-get", "-q"] + [word for option in options for word in ("-o", option)] + list(args)
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if check and done.returncode:
        last = [line for line in done.stdout.splitlines() if line.strip()][-1:] or ["no message"]
        raise UserlandError(f"apt-get {args[0]} failed: {last[0]}")
    return done.stdout


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: nvidia_userland.py DIR", file=sys.stderr)
        return 64
    try:
        print(unpack(Path(sys.argv[1])).version)
    except UserlandError as error:
        print(f"nvidia_userland: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
