"""Check gpushare as container engines use it: real containers, started with gpushare-runtime and runc.

A container's file system is this machine's own below an overlay, so nothing is downloaded. All mounts are in a private
mount namespace, with a private configuration and state directory, and end with it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.hardware import checks_compute as compute
from tests.hardware import checks_memory as memory
from tests.hardware import processes
from tests.hardware.checks_product import has_torch
from tests.hardware.place import TREE
from tests.hardware.session import Result, Session, verdict

CARRIED = TREE / "build" / "gpu"  # where runc and libseccomp.so.2 can be carried to
BUNDLED = TREE / "build" / "dist" / "gpushare" / "bin" / "gpushare-runtime"
PERCENTS = (30, 70)
OWN_DIRECTORIES = ("/tmp/", "/run/", "/dev/")  # of a container
END_S = 10.0
CAPABILITIES = [
    *("CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD"),
    *("CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT"),
]
_numbers = itertools.count(1)


def runc() -> str:
    """Return the path of runc: in PATH, or carried here. Raises Absent."""
    found = shutil.which("runc") or shutil.which("runc", path=str(CARRIED))
    if not found:
        raise processes.Absent("no runc, neither in PATH nor in build/gpu")
    return found


def runtime_program() -> tuple[str, bool]:
    """Return (gpushare-runtime, whether its configuration must name the shim). Raises Absent.

    It is the program built here, otherwise the bundle of `make dist`, which tests/hardware/start unpacks.
    """
    built = TREE / "build" / "bin" / "gpushare-runtime"
    if (TREE / "build" / ".setup").exists() and built.exists():
        return str(built), True
    if not BUNDLED.exists():
        raise processes.Absent("no gpushare-runtime: make dist makes the archive that can be carried here")
    return str(BUNDLED), False


def mounted_apart(paths: tuple[str, ...]) -> list[str]:
    """Return the paths that a container cannot see: an overlay over / lacks other file systems, and /tmp is its own."""
    there = {os.path.realpath(path) for path in paths}
    return sorted(
        path
        for path in there
        if path != "/" and (os.stat(path).st_dev != os.stat("/").st_dev or f"{path}/".startswith(OWN_DIRECTORIES))
    )


def mount(kind: str, target: str, *options: str) -> dict[str, Any]:
    return {"type": kind, "source": kind, "destination": target, "options": list(options)}


def spec(root: Path, args: list[str], env: dict[str, str], name: str) -> dict[str, Any]:
    """Return a config.json like that of a container engine."""
    visible = mounted_apart((str(TREE), sys.prefix, sys.base_prefix))
    return {
        "ociVersion": "1.0.2",
        "hostname": name,
        "root": {"path": str(root)},
        "process": {
            "args": args,
            "cwd": str(TREE),
            "env": [f"{key}={value}" for key, value in env.items()],
            "user": {"uid": 0, "gid": 0},
            "noNewPrivileges": True,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), CAPABILITIES),
        },
        "mounts": [
            mount("proc", "/proc", "nosuid", "noexec", "nodev"),
            mount("tmpfs", "/dev", "nosuid", "mode=755", "size=64k"),
            mount("devpts", "/dev/pts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"),
            mount("tmpfs", "/dev/shm", "nosuid", "nodev", "mode=1777", "size=1g"),
            mount("sysfs", "/sys", "nosuid", "noexec", "nodev", "ro"),
            mount("tmpfs", "/tmp", "nosuid", "nodev", "mode=1777", "size=1g"),
            mount("tmpfs", "/run", "nosuid", "nodev", "mode=755", "size=16m"),
            *({"type": "bind", "source": path, "destination": path, "options": ["rbind", "ro"]} for path in visible),
        ],
        "linux": {
            "cgroupsPath": f"/{name}",
            "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")],
            "resources": {"devices": [{"allow": False, "access": "rwm"}]},
        },
    }


class Engine:
    """Starts containers in a private mount namespace. Use as a context."""

    def __init__(self, session: Session, directory: Path) -> None:
        if os.geteuid() != 0:
            raise processes.Absent("needs root")
        self.session, self.directory = session, directory
        low_level, (self.program, of_tree) = runc(), runtime_program()
        self.env = dict(os.environ)
        if low_level.startswith(str(CARRIED)) and (CARRIED / "libseccomp.so.2").exists():
            self.env["LD_LIBRARY_PATH"] = ":".join(filter(None, (self.env.get("LD_LIBRARY_PATH"), str(CARRIED))))
        content: dict[str, Any] = {"version": 1, "runtime": {"path": low_level}}
        if session.machine.simhost:
            content["driver"] = {"root": str(session.machine.simhost)}
        if of_tree:
            content["shim_dir"] = str(session.machine.shim)
        self.config = directory / "config.yaml"
        self.config.write_text(json.dumps(content))
        (directory / "state").mkdir()
        command = ["unshare", "-m", "sh", "-c", "echo; exec sleep inf"]
        self.holder = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        assert self.holder.stdout
        self.holder.stdout.readline()  # wait until it is in its namespace
        self.made: list[Container] = []

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for container in self.made:
                container.delete()
        finally:
            processes.end(self.holder)
            if self.holder.stdout:
                self.holder.stdout.close()

    def inside(self, *words: str) -> list[str]:
        """Return the command line that runs `words` in the mount namespace."""
        return ["nsenter", "-t", str(self.holder.pid), "-m", "--", *words]

    def run(self, *words: str, seconds: float = END_S) -> tuple[int, str, str]:
        return processes.run(self.inside(*words), time.monotonic() + seconds, self.env)

    def runtime(self, *words: str) -> list[str]:
        """Return the command line of gpushare-runtime with this engine's configuration."""
        where = ("--gpushare-config", str(self.config), "--gpushare-state", str(self.directory / "state"))
        return self.inside(self.program, *where, "--root", str(self.directory / "runc"), *words)

    def container(self, **request: str) -> Container:
        """Return a container that will run one program. `request`: its GPUSHARE_ variables."""
        made = Container(self, {f"GPUSHARE_{key.upper()}": value for key, value in request.items()})
        self.made.append(made)
        return made


class Container:
    """A container, in which a check runs one program as it does in a Place: through `command`."""

    def __init__(self, engine: Engine, request: dict[str, str]) -> None:
        self.engine, self.request = engine, request
        self.name = f"gpu-check-{os.getpid()}-{next(_numbers)}"
        self.bundle = engine.directory / self.name
        self.bundle.mkdir()
        code, _, err = engine.run("sh", "-ec", OVERLAY, "sh", str(self.bundle))
        if code:
            raise processes.Absent(f"no overlay over / here ({err.strip()[:150]})")

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *_: object) -> None:
        pass  # the engine deletes it

    def command(self, args: list[str]) -> list[str]:
        """Write the bundle, and return the command line that runs it in the foreground."""
        env = {"PATH": os.environ["PATH"], "HOME": "/tmp", "PYTHONPATH": str(TREE), "PYTHONDONTWRITEBYTECODE": "1"}
        content = json.dumps(spec(self.bundle / "disk" / "root", args, {**env, **self.request}, self.name))
        (self.bundle / "config.json").write_text(content)
        return self.engine.runtime("run", "--bundle", str(self.bundle), self.name)

    def refused(self) -> int:
        """Return 0: the usage file is not this program's here."""
        return 0

    def delete(self) -> None:
        with contextlib.suppress(processes.Failed):
            processes.run(
                self.engine.runtime("delete", "--force", self.name), time.monotonic() + END_S, self.engine.env
            )


# A bundle's disk: a tmpfs with a writable view of this machine's files
OVERLAY = """
mkdir "$1/disk"
mount -t tmpfs -o size=2g,mode=755 gpu-check "$1/disk"
cd "$1/disk"
mkdir root upper work
mount -t overlay -o lowerdir=/,upperdir=upper,workdir=work gpu-check root
"""


def shared(session: Session, engine: Engine, torch: str = "") -> Result:
    """Run a program in each of two containers at the same time, at 30 % and 70 %."""
    with contextlib.ExitStack() as stack:
        bench = compute.Bench(session, stack, torch)
        each = [
            engine.container(memory="25%", compute=f"{percent}%", devices=session.machine.uuid) for percent in PERCENTS
        ]
        return compute.side_by_side(bench, PERCENTS, each)


def containers(session: Session) -> Result:
    """Fill a container's memory, then run two containers at once, also with PyTorch if it is here."""
    limit = memory.limit_of(session)
    with (
        tempfile.TemporaryDirectory(prefix="gs-", dir="/tmp") as short,  # paths of sockets must be short
        Engine(session, Path(short)) as engine,
    ):
        request = engine.container(memory=str(limit), devices=session.machine.uuid)
        parts = {"memory": memory.fill_in(session, request, "plain", limit), "compute": shared(session, engine)}
        if has_torch() and not session.machine.simhost:
            parts["PyTorch"] = shared(session, engine, "torch_work")
    values = {name: {"verdict": part.verdict, "note": part.note, **part.values} for name, part in parts.items()}
    wrong = [f"{name}: {part.note}" for name, part in parts.items() if part.verdict == "missed"]
    return verdict(wrong, "; ".join(f"{name}: {part.note}" for name, part in parts.items()), values)
