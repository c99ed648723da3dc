"""The setting of a soak: one simulated host, its containers, and helpers for all phases."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from simulator.simhost import make_simhost
from tests.support import processes
from tests.support.host import BUILD, TREE, Node
from tests.support.rootfs import unmount_below
from tests.support.runc import Container
from tests.support.spec import Mount

from .show import Show
from .traces import cgroups

GIB = 1 << 30
DEVICES, MEMORY_BYTES = 2, 40 * GIB  # each
MILL = "/opt/mill"  # in the container


class Stopped(Exception):
    """The soak was stopped; workers that catch this return."""


class Stage:
    """`wrong` collects one line for each mismatch; `close` leaves nothing in any case."""

    def __init__(self, directory: Path, show: Show, seed: int) -> None:
        self.directory, self.show, self.seed = directory, show, seed
        self.prefix = f"gpushare-soak-{os.getpid()}-"
        self.wrong: list[str] = []
        self.stopped = threading.Event()
        self._closing = ExitStack()
        self.node = Node(directory / "node", make_simhost(directory / "host", gpus=DEVICES, memory_bytes=MEMORY_BYTES))
        self._closing.callback(self.node.close)
        self.mill = build_mill(directory)

    def container(self, args: list[str], *, memory: str, way: str, device: int = 0, **more: Any) -> Container:
        env = {"GPUSHARE_MEMORY": memory, "GPUSHARE_DEVICES": str(device), **more.pop("env", {})}
        mounts = [Mount(self.mill, MILL), *more.pop("mounts", [])]
        return Container(
            self.directory / "bundles", args, env=env, name="soak", mounts=mounts, **self.node.way(way), **more
        )

    def record_error(self, line: str) -> None:
        self.wrong.append(line)
        self.show.note(line)

    def check_stopped(self) -> None:
        if self.stopped.is_set():
            raise Stopped

    def cli(self, *words: str) -> str:
        """Return the output of `gpushare`; a failure is a mismatch."""
        done = self.node.cli(*words, timeout_s=300)
        if done.returncode or done.stderr:
            self.record_error(f"gpushare {' '.join(words)} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def sweep(self, container_id: str = "") -> None:
        """Clean up after a killed runtime like an engine, for one container or all: end its processes, remove its
        cgroups."""
        for group in cgroups(container_id or f"{self.prefix}*"):
            try:
                pids = [int(line) for line in (group / "cgroup.procs").read_text().split()]
                for pid in pids:
                    end(pid)
                remove(group)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENODEV):  # missing, or removed after the open
                    raise

    def close(self) -> None:
        self.stopped.set()
        self.sweep()
        for pid in processes.children():
            processes.kill_and_reap(pid)
        processes.reap_zombies()
        self.sweep()
        self._closing.close()
        unmount_below(self.directory)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def end(pid: int) -> None:
    """SIGKILL and wait until it is dead; its parent may still have to reap it."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    os.close(fd)
    try:
        os.kill(pid, 9)
        processes.wait_exit(pid, 10)  # an orphan is our child
    except (ProcessLookupError, ChildProcessError):
        pass  # the child of a dying process, which reaps it or passes it on


def remove(group: Path, within_s: float = 10) -> None:
    """Remove a cgroup once its processes have ended: the kernel does not notify on cgroup v1."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def build_mill(directory: Path) -> Path:
    """tests/soak/mill.c, linked against libcuda.so.1 by name."""
    out = directory / "mill"
    flags = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{BUILD}/include/cuda")
    driver = next((BUILD / "sim").glob("libcuda.so.*"))
    subprocess.run(["gcc", *flags, "-o", out, TREE / "tests/soak/mill.c", driver, "-lpthread"], check=True)
    return out
