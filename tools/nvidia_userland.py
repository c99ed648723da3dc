#!/usr/bin/env python3
"""Unpack the user-space part of a real NVIDIA driver (libraries, no kernel module) for the tests.

    nvidia_userland.py DIR [BRANCH]      fills DIR once and prints the driver's version

BRANCH is a row of DRIVERS, by default 535. The packages come from the distribution's own non-free section. apt uses
private lists and a private cache, so the machine's package state does not change. Updates are not used, so the driver
changes only with a point release. Nothing is installed, and nothing in DIR may be redistributed. Standard library only.
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

SIMULATED = "535"  # the branch whose exports the simulator has, with all packages

_DEBIAN = ("libcuda1", "libnvidia-ml1", "nvidia-cuda-mps", "nvidia-smi")
_DEBIAN_MORE = ("libnvidia-nvvm4", "libnvidia-ptxjitcompiler1", "nvidia-persistenced")
_UBUNTU = ("libnvidia-compute-{}", "nvidia-compute-utils-{}", "nvidia-utils-{}")


class Source(NamedTuple):
    """Where a distribution has a branch of the driver. `suite`: "" for the release of this machine."""

    suite: str
    sections: str
    packages: tuple[str, ...]


# Distribution (ID in os-release) -> branch -> source. Ubuntu names its packages after the branch.
DRIVERS = {
    "debian": {
        "535": Source("bookworm", "contrib non-free", (*_DEBIAN, *_DEBIAN_MORE)),
        "550": Source("trixie", "contrib non-free", _DEBIAN),
        "555": Source("experimental", "contrib non-free", _DEBIAN),
    },
    "ubuntu": {
        branch: Source("", "restricted", tuple(name.format(branch) for name in _UBUNTU)) for branch in ("535", "550")
    },
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


def branches() -> dict[str, Source]:
    """Return the branches of this machine's distribution."""
    text = Path("/etc/os-release").read_text() if Path("/etc/os-release").exists() else ""
    fields = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    return DRIVERS.get(fields.get("ID", "").strip('"'), DRIVERS["debian"])


def unpack(root: Path, branch: str = SIMULATED) -> Userland:
    """Fill `root` unless it is already filled. Concurrent callers wait for each other."""
    root = root.resolve()  # apt does not resolve relative directories against the working directory
    root.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{root}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            with tempfile.TemporaryDirectory(dir=root.parent, prefix=root.name + ".") as work:
                fetch(Path(work), branches()[branch])
                (Path(work) / "root").rename(root)
        return find(root)


def fetch(work: Path, source: Source, libraries: bool = False) -> None:
    """Download into `work`/debs and unpack into `work`/root. `libraries`: with all libraries that the packages need."""
    if platform.machine() != "x86_64":
        raise UserlandError(f"the driver packages are for x86_64, this machine is {platform.machine()}")
    if not shutil.which("apt-get"):
        raise UserlandError("no apt-get: the real driver's libraries come from Debian's or Ubuntu's packages")
    for name in ("lists/partial", "cache/archives/partial", "debs", "root"):
        (work / name).mkdir(parents=True)
    lines = [f"deb {line} main {source.sections}\n" for line in _sources(work, source.suite)]
    (work / "sources.list").write_text("".join(lines))
    private = (f"Dir::Etc::sourcelist={work}/sources.list", "Dir::Etc::sourceparts=/dev/null", *_private_dirs(work))
    # The exit code of update does not matter: a suite without the section is no failure, a missing package is.
    updated = _apt(private, "update", check=False)
    try:
        names = (*source.packages, *(_libraries(private, source) if libraries else ()))
        _apt(private, "download", *names, cwd=work / "debs")
    except UserlandError as error:
        failed = [line for line in updated.splitlines() if line.startswith(("E:", "W:", "Err:"))]
        raise UserlandError("; ".join([str(error), *failed[:2]])) from None
    for deb in sorted((work / "debs").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(deb), str(work / "root")], check=True)


def _libraries(private: tuple[str, ...], source: Source) -> list[str]:
    """Return the names of the libraries that the packages depend on."""
    kinds = ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")
    words = ("depends", "--recurse", *(f"--no-{kind}" for kind in kinds), *source.packages)
    lines = _apt(private, *words, program="apt-cache").splitlines()
    return sorted({line for line in lines if line.startswith("lib")} - set(source.packages))


def _private_dirs(work: Path) -> tuple[str, ...]:
    """Options for package lists of our own, as if no package were installed."""
    return (
        f"Dir::State::Lists={work}/lists", "Dir::State::status=/dev/null", f"Dir::Cache={work}/cache",
        "APT::Sandbox::User=root",
    )  # fmt: skip


def _sources(work: Path, suite: str) -> list[str]:
    """Return ["[options] URI SUITE", ...] of the distribution's archive, as this machine configures it."""
    fields = ("ORIGIN", "COMPONENT", "REPO_URI", "BASE_URI", "SIGNED_BY", "TRUSTED")
    query = ("indextargets", "--format", "\t".join(f"$({f})" for f in fields), "Created-By: Packages")
    text = _apt((), *query)
    if not text.strip():  # this machine has no package lists: read the Release files privately
        _apt(_private_dirs(work), "update", check=False)
        text = _apt(_private_dirs(work), *query)
    rows = [dict(zip(fields, line.split("\t"))) for line in text.splitlines()]
    rows = [r for r in rows if r["ORIGIN"].lower() in DRIVERS and r["COMPONENT"] == "main"]
    if not rows:
        raise UserlandError("apt knows no Debian or Ubuntu repository here (apt-get indextargets is empty)")
    release = min((_suite(row) for row in rows), key=len)  # bookworm, not bookworm-updates or -security
    return list(dict.fromkeys(_source(row, suite or release) for row in rows if _suite(row) == release))


def _suite(row: dict[str, str]) -> str:
    return row["BASE_URI"].rstrip("/").rpartition("/dists/")[2]


def _source(row: dict[str, str], suite: str) -> str:
    """Format a repository with this suite like a sources.list line, without its type and components."""
    options = [("signed-by", row["SIGNED_BY"]), ("trusted", row["TRUSTED"])]
    text = " ".join(f"{k}={v}" for k, v in options if v and not v.startswith("$("))
    return f"{f'[{text}] ' if text else ''}{row['REPO_URI']} {suite}"


def _apt(
    options: tuple[str, ...], *args: str, check: bool = True, cwd: Path | None = None, program: str = "apt-get"
) -> str:
    """Run apt-get and return what it prints; UserlandError with its last line when it fails."""
    command = [program, "-q"] + [word for option in options for word in ("-o", option)] + list(args)
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if check and done.returncode:
        last = [line for line in done.stdout.splitlines() if line.strip()][-1:] or ["no message"]
        raise UserlandError(f"{program} {args[0]} failed: {last[0]}")
    return done.stdout


def main() -> int:
    if len(sys.argv) not in (2, 3) or not set(sys.argv[2:]) <= set(branches()):
        print(f"usage: nvidia_userland.py DIR [{'|'.join(branches())}]", file=sys.stderr)
        return 64
    try:
        print(unpack(Path(sys.argv[1]), *sys.argv[2:]).version)
    except UserlandError as error:
        print(f"nvidia_userland: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
