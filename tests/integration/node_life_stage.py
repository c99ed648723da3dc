"""A node of a cluster: a real engine, a simulated GPU, and the installer's image, which runs as in its pod.

    with Stage("crio", image_root) as stage:                the engine has its image, and does not run
        with stage.booted() as node:                        a node without gpushare, on which the engine runs
            pod = node.install(stage.release("1"))          and wait until it is ready
            with node.pod() as one: one.run(Want(SLEEP, SHARE))

/etc, /opt, /run, /usr/local/sbin and /var/lib of this process's mount namespace are the node's. `systemctl restart
containerd` on the node restarts the engine of the test.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shlex
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from simulator.simhost import make_simhost
from tests.integration.node_engines import ENGINES, NodeEngine
from tests.support import processes
from tests.support.engines.places import DefaultPlaces
from tests.support.engines.pods import PodEngine, remove_cgroups, remove_pods
from tests.support.host import BUILD
from tests.support.installer import FOLDER, Pod
from tests.support.rootfs import mount_tmpfs, run, unmount_below

GIB = 1 << 30
OPT, PROGRAMS = Path("/opt/gpushare"), Path("/usr/local/sbin")
# gpushare of a release that breaks the engine
_BREAKING = f"""#!/bin/sh
{OPT}/current/libexec/gpushare "$@" || exit
case "$*" in "runtime configure "*) sed -i {{words}} ;; esac
"""
_SYSTEMCTL = """#!/usr/bin/python3 -ISE
import socket, sys
with socket.socket(socket.AF_UNIX) as there:
    there.connect({socket!r})
    there.sendall("\\0".join(sys.argv[1:]).encode())
    there.shutdown(socket.SHUT_WR)
    code, _, text = there.makefile().read().partition(" ")
print(text, end="")
sys.exit(int(code))
"""
# The pod's mount namespace: the node at /host, with its mounts (mountPropagation: Bidirectional), and its processes
_SETUP = """mount --rbind / {image}/host
mount --rbind /dev {image}/dev
mount --rbind /proc {image}/proc
mount -t overlay -o lowerdir={release}:{bundle} gpushare-test {image}/gpushare"""


class Systemctl:
    """The node's systemctl. `restart` returns whether the engine has started."""

    def __init__(self, path: Path, engine: str, restart: Callable[[], bool]) -> None:
        self.started = 0  # microseconds of the monotonic clock
        self._engine, self._restart = engine, restart
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            # While CRI-O restarts, it calls systemctl itself
            threading.Thread(target=self._serve_client, args=(client,)).start()

    def _serve_client(self, client: socket.socket) -> None:
        with client, client.makefile() as file, contextlib.suppress(BrokenPipeError):
            client.sendall(self._answer(file.read().split("\0")).encode())

    def _answer(self, words: list[str]) -> str:
        if words[0] == "show":
            return f"0 ActiveState=active\nExecMainStartTimestampMonotonic={self.started}\n"
        return "1 " if words != ["restart", self._engine] or not self._restart() else "0 "

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


class Node(PodEngine):
    """A node on which the engine runs."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.engine, self.directory = stage, stage.engine, stage.directory
        self.daemon = self.engine.daemon
        self.restarts = 0
        self.fails: str | None = None  # the engine does not start while its entry contains this text
        self.during_restart: Callable[[], object] = lambda: None
        self._pods: list[Pod] = []

    # The engine

    @property
    def entry(self) -> str:
        """The program in gpushare's entry; "" without an entry."""
        return self.engine.entry

    def start_engine(self) -> bool:
        """Start the engine, and return whether it has started."""
        self.stage.systemctl.started = time.monotonic_ns() // 1000
        try:
            self.engine.start(self.fails is not None and self.fails in self.entry)
        except AssertionError:
            return False
        return True

    def restart_engine(self) -> bool:
        self.restarts += 1
        self.daemon.stop()
        self.during_restart()
        return self.start_engine()

    # gpushare

    def begin(self, verb: str, release: Path, **variables: str) -> Pod:
        """Start the installer's pod with the image of a release."""
        image = Path(tempfile.mkdtemp(dir=self.directory, prefix="image-"))
        for name in ("gpushare", "dev", "proc", "host"):
            (image / name).mkdir()
        # The node's first process is that of the tests, whose mounts the engine has
        text, first = (FOLDER / "install.py").read_text(), 'FIRST = "1"'
        assert first in text
        (image / "install.py").write_text(text.replace(first, f'FIRST = "{os.getpid()}"'))
        words = {"image": image, "release": release, "bundle": BUILD / "dist/gpushare"}
        setup = _SETUP.format_map({name: shlex.quote(str(path)) for name, path in words.items()})
        pod = Pod(image, setup, verb, **{"GPUSHARE_ENGINE": self.engine.name, **variables})
        self._pods.append(pod)
        return pod

    def install(self, release: Path) -> Pod:
        """Start the installer's pod, and wait until it is ready."""
        pod = self.begin("install", release)
        pod.until("ready")
        return pod

    def settle(self, release: Path) -> None:
        """Start the installer's pod once more, which removes what nothing uses, and end it."""
        assert self.install(release).stop() == 0

    def tidy(self) -> None:
        """Remove the versions that nothing uses, as the installer's pod does every five minutes."""
        here()["tidy"]()

    @property
    def current(self) -> str:
        """The version that new containers get; "" without one."""
        return os.readlink(OPT / "current") if (OPT / "current").is_symlink() else ""

    @property
    def versions(self) -> set[str]:
        return {one.name for one in OPT.iterdir() if one.is_dir() and not one.is_symlink()} if OPT.exists() else set()

    def shares(self) -> list[str]:
        """The ids of containers with a share."""
        found: list[dict[str, Any]] = json.loads(run(OPT / "current/bin/gpushare", "list", "--format", "json"))
        return sorted(one["id"] for one in found)

    def power_off(self) -> None:
        """Every process of the node ends, and /run is empty when it starts again."""
        for pod in self._pods:
            pod.kill()
        self.daemon.kill()
        self.stage.end_processes()
        remove_cgroups()
        self.engine.unmount()
        self.stage.empty_run()


def here() -> dict[str, Any]:
    """install.py in this process: the engine has its mounts, which the tests unshare from those of the host."""
    install = runpy.run_path(str(FOLDER / "install.py"))
    install["on_node"].__globals__.update(HOST="", FIRST="self")
    return install


class Stage:
    """The directories of all nodes of a module, and the engine with its image. `engine`: a key of ENGINES."""

    engine: NodeEngine

    def __init__(self, engine: str, image_root: Path) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="gs-"))
        self._closing = contextlib.ExitStack()
        self._closing.callback(run, "rm", "-rf", self.directory)
        try:
            self._places(engine, image_root)
        except BaseException:
            self._closing.close()
            raise

    def _places(self, engine: str, image_root: Path) -> None:
        make_simhost(self.directory / "gpu", gpus=1, memory_bytes=16 * GIB, late_return_ms=0)
        self._closing.callback(DefaultPlaces(self.directory / "places").close)
        for place in (OPT.parent, PROGRAMS):  # in memory: the installer writes each program to the disk
            mount_tmpfs(place, "mode=755")
            self._closing.callback(run, "umount", "--lazy", place)
        self.engine = ENGINES[engine](self.directory / "d")
        self._closing.callback(self.engine.close)
        for name in self.engine.programs:
            (PROGRAMS / name).symlink_to(Path(shutil.which(name) or name).resolve())
        self.systemctl = Systemctl(self.directory / "systemctl", self.engine.name, lambda: self._node.restart_engine())
        self._closing.callback(self.systemctl.close)
        (PROGRAMS / "systemctl").write_text(_SYSTEMCTL.format(socket=str(self.directory / "systemctl")))
        (PROGRAMS / "systemctl").chmod(0o755)
        self._run_folders()
        self._write_configuration()
        self.engine.load(image_root)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._closing.close()

    def release(self, name: str) -> Path:
        """The image of a release: files over those of build/dist/gpushare."""
        folder = self.directory / f"release-{name}"
        folder.mkdir(exist_ok=True)
        (folder / "release").write_text(f"{name} {self.directory}")  # another test run has other versions
        return folder

    def breaking_release(self) -> Path:
        """The image of a release with which the engine cannot start containers."""
        folder = self.release("breaking")
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin/gpushare").write_text(_BREAKING.format(words=shlex.join(map(str, self.engine.breaking))))
        (folder / "bin/gpushare").chmod(0o755)
        return folder

    def _run_folders(self) -> None:
        run("mount", "--make-shared", "/run")
        Path("/run/systemd/system").mkdir(parents=True)  # sd_booted(3)
        self.engine.make_run_folders()

    def empty_run(self) -> None:
        run("umount", "--lazy", "/run")
        run("mount", "-t", "tmpfs", "-o", "size=64m,mode=755", "gpushare-test", "/run")
        self._run_folders()

    def _write_configuration(self) -> None:
        """An administrator's files, which the installer keeps."""
        self.engine.put_configuration()
        shutil.rmtree("/etc/gpushare", ignore_errors=True)
        Path("/etc/gpushare").mkdir()
        own = {"version": 1, "driver": {"root": str(self.directory / "gpu")}, "log": {"decisions": "/run/decisions"}}
        Path("/etc/gpushare/config.yaml").write_text(json.dumps(own))

    def end_processes(self) -> None:
        """End monitors and containers, whose processes become children of this one when their parents have ended."""
        name = self.engine.daemon.process_name
        mine = {pid for pid, command in processes.children().items() if name in command}
        for pid in mine:
            below = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
            for one in (pid, *below):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
            for one in (pid, *below):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(one, 0)

    @contextlib.contextmanager
    def booted(self) -> Iterator[Node]:
        self.empty_run()
        self._write_configuration()
        self._node = Node(self)
        try:
            assert self._node.start_engine()
            yield self._node
        finally:
            self._close_node()

    def _close_node(self) -> None:
        for pod in self._node._pods:
            pod.close()
        daemon = self.engine.daemon
        if daemon.pid:
            remove_pods(daemon.cri)
        daemon.stop()
        self.end_processes()
        remove_cgroups()
        self.engine.unmount()
        unmount_below(Path("/run/gpushare"))
        shutil.rmtree(OPT, ignore_errors=True)
        shutil.rmtree("/var/lib/gpushare", ignore_errors=True)
