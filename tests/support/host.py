"""A host for the tests: the paths of the programs, a configuration, and a private mount namespace."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpushare.config import node, oci_runtime
from gpushare.core.errors import GpushareError
from gpushare.state import storage

from tools import newest

from . import runc
from .rootfs import mount_points, run, unmount_below
from .spec import Hook, Mount

TREE = Path(__file__).resolve().parents[2]
BUILD = TREE / "build"
# make build SNAPSHOT=no, or another Python than hook/snapshot/make knows
WITHOUT_SNAPSHOT = (BUILD / "snapshot" / ".no").exists() or sys.version_info[:2] != (3, 11)
BIN = BUILD / "bin"  # these two: see use_programs
SHIM = BUILD / "shim"
VENV_IN_CONTAINER = "/opt/venv"
PYTHON = VENV_IN_CONTAINER + "/bin/python"  # in the container

_CLONE_NEWNS = 0x00020000


def make(*words: str) -> None:
    """Run `make` under a lock, so that parallel test workers neither build a target twice nor see it half built."""
    with open(BUILD / "make.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["make", "-s", *words], cwd=TREE, check=True)


def is_built() -> bool:
    """Return whether what the tests run is as the tree is. Programs in build/ have copies of Python code, too: the
    snapshot, and the tables of the launchers."""
    snapshot = "no" if (BUILD / "snapshot" / ".no").exists() else "yes"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--question", f"SNAPSHOT={snapshot}", "built"]
    return subprocess.run(command, cwd=TREE, env=environment, capture_output=True).returncode != 1  # 2: an error


def use_programs(directory: Path) -> None:
    """Use the programs and the shim of a bundle, such as build/dist/gpushare, or of build."""
    global BIN, SHIM
    if not (directory / "bin" / "gpushare-runtime").is_file():
        raise RuntimeError(f"no programs in {directory}: make dist makes build/dist/gpushare")
    BIN, SHIM = directory.resolve() / "bin", directory.resolve() / "shim"


def use_low_level(name: str) -> None:
    """Run containers with runc or crun, by hook and by runtime, unless a test names another. Call it in private mounts:
    crun refuses a host with both cgroup v1 and v2, so with crun this process sees only v1."""
    runc.LOW_LEVEL = name
    unified = "/sys/fs/cgroup/unified"
    if name == "crun" and os.path.ismount(unified):
        run("umount", unified)


def newest_crun() -> dict[str, Any]:
    """The configuration key of a Node for what only a newer crun than the installed one may have, if this run is with
    crun: `run --keep`, and pure cgroup v2 without CAP_SYS_RESOURCE (1.21)."""
    return {"runtime": {"path": str(newest.unpack(BUILD / "newest") / "crun")}} if runc.LOW_LEVEL == "crun" else {}


def enter_private_mounts(for_other_users: bool = True) -> None:
    """Make the mounts of this process private, so that they disappear with it. Needs root. `for_other_users`: make this
    tree reachable for them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare CLONE_NEWNS: " + os.strerror(ctypes.get_errno()))
    run("mount", "--make-rslave", "/")
    if for_other_users:
        _let_other_users_in()


def _let_other_users_in() -> None:
    """Make this tree reachable for other users, because tests run as some. If only root can reach it (in /root, say),
    open the path in this mount namespace."""
    closed = next((place for place in reversed(TREE.parents) if not place.stat().st_mode & stat.S_IXOTH), None)
    if closed is None:
        return
    aside = tempfile.mkdtemp(prefix="gs-")
    run("mount", "--bind", TREE, aside)
    run("mount", "-t", "tmpfs", "-o", "mode=755", "gpushare-test", closed)
    TREE.mkdir(parents=True)
    run("mount", "--move", aside, TREE)
    os.rmdir(aside)
    os.chdir(TREE)


def version() -> str:
    """The version of this tree, from pyproject.toml."""
    match = re.search(r'^version = "(.*)"$', (TREE / "pyproject.toml").read_text(), re.MULTILINE)
    assert match
    return match[1]


class Node:
    """One host as gpushare sees it: a driver root, a configuration file, a state directory."""

    def __init__(self, directory: Path, driver_root: Path, **config: Any) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.driver_root = driver_root
        self.config = directory / "config.yaml"
        self.state = directory / "state"
        self.state.mkdir()
        write_config(self.config, driver_root, **config)

    def hook(self, stage: str = "prestart", cri: bool = False) -> Hook:
        return Hook(BIN / "gpushare-hook", self.config, self.state, stage, cri)

    def runtime(self, program: Path = BIN / "gpushare-runtime") -> tuple[str, ...]:
        """gpushare-runtime, or another program in its place, in front of the configured runtime or runc."""
        words = (program, "--gpushare-config", self.config, "--gpushare-state", self.state)
        return tuple(str(word) for word in words)

    def way(self, name: str, cri: bool = False) -> dict[str, Any]:
        """Arguments of runc.Container for "hook" or "runtime"; `cri`: as containerd and CRI-O call them."""
        if name == "hook":
            return {"hook": self.hook(cri=cri)}
        return {"runtime": self.runtime(BIN / ("gpushare-runtime-cri" if cri else "gpushare-runtime"))}

    def cli(self, *args: str, timeout_s: float = 60, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        """Run `gpushare` against this node, with `prefix` before its words."""
        command = [*prefix, BIN / "gpushare", "--config", self.config, "--state", self.state, *args]
        return subprocess.run(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"},
        )

    def decisions(self) -> list[dict[str, str]]:
        """The fields of each line of the decision log."""
        path = self.config.parent / "decisions"
        return [logfmt(line) for line in path.read_text().splitlines()] if path.exists() else []

    def leases(self) -> list[str]:
        """Ids of the containers in the state directory."""
        containers = self.state / "containers"
        return sorted(p.name for p in containers.iterdir()) if containers.is_dir() else []

    def left(self) -> list[str]:
        """Everything that containers could leave in the state directory, and mounts below it; not the files that all
        containers of a device share."""
        patterns = ("containers/*", "trash/*", "devices/*/[0-9]*", "devices/*/*.new")
        files = [str(path.relative_to(self.state)) for pattern in patterns for path in self.state.glob(pattern)]
        devices = [str(path) for path in self.state.glob("devices/*")]
        points = [point for point in mount_points() if point.startswith(f"{self.state}/")]
        twice = [point for point in devices if points.count(point) > 1]
        hidden = f"{self.state}/idmap/"  # belongs to the host, not to a container: see gpushare/system/idmap.py
        return files + twice + [point for point in points if point not in devices and not point.startswith(hidden)]

    def move(self, config: str, state: str) -> None:
        """Move configuration and state to other paths, such as the defaults, before any start."""
        Path(config).parent.mkdir(parents=True, exist_ok=True)
        Path(config).write_bytes(self.config.read_bytes())
        self.config, self.state = Path(config), Path(state)

    def compile(self) -> None:
        """Mount the state directory and write node.json, as far as possible. The first start does so otherwise, and
        takes 0.2 s for it in the ordinary program."""
        with contextlib.suppress(GpushareError):
            storage.prepare(str(self.state))
            node.load_node(str(self.config), str(self.state))

    def after_failed_create(self) -> None:
        """crun calls no poststop after a failed create, so remove its remains here; otherwise the next start does."""
        if runc.LOW_LEVEL == "crun":
            self.cli("prune")

    def close(self) -> None:
        unmount_below(self.state)


_FIELD = re.compile(r'([a-z_]+)=("(?:[^"\\]|\\.)*"|[^ "=]*)(?: |$)')


def logfmt(line: str) -> dict[str, str]:
    """The fields of one line; duplicate fields or other text are errors."""
    fields: dict[str, str] = {}
    at = 0
    while at < len(line):
        match = _FIELD.match(line, at)
        assert match, f"no field at {line[at:]!r}"
        key, value = match.groups()
        assert key not in fields, f"{key} twice in {line!r}"
        fields[key] = value
        at = match.end()
    return fields


def write_config(path: Path, driver_root: Path, **config: Any) -> Path:
    """Write a configuration file as JSON, which is YAML. `config` has further keys of config.schema.json."""
    content = {"version": 1, "driver": {"root": str(driver_root)}, "shim_dir": str(SHIM)}
    content["log"] = {"decisions": str(path.parent / "decisions")}  # not the journal of this machine
    low_level = shutil.which(runc.LOW_LEVEL)
    if low_level and (runc.LOW_LEVEL != "runc" or not oci_runtime.is_usual(low_level)):  # tools/engines.py
        content["runtime"] = {"path": low_level}
    content.update(config)
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def python_mounts(*programs: Path) -> list[Mount]:
    """The mounts with which a container runs `programs` (at /opt/<name>) with the packages of build/venv."""
    venv = Mount(BUILD / "venv", VENV_IN_CONTAINER)
    return [venv, *(Mount(program, f"/opt/{program.name}") for program in programs)]
