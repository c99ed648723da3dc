"""Pods and their containers, created and removed over CRI like kubelet does. Used by containerd.py and crio.py."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import processes
from ..rootfs import run, unmount_below
from .base import Refused, Result, Want
from .cri import Cri, CriError
from .image import IMAGE

HANDLER = "gpushare"
NAME = "main"  # of a pod's only container
RUNNING = 1  # ContainerState in cri.proto
CGROUP_PARENT = f"/gpushare-test-{os.getpid()}"  # parallel test runs must not end each other's containers
_READY_S = 60
_numbers = itertools.count(1)


class Daemon:
    """containerd or CRI-O, with directories of its own. `process_name`: part of the command line of the processes that
    it leaves."""

    cri: Cri
    process_name = ""
    log: Path

    def __init__(self, directory: Path) -> None:
        processes.become_subreaper()
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.pid = 0
        self.cri = Cri(directory / "sock")

    def start_program(self, *words: str) -> None:
        """Start the daemon, and wait until it is ready (sd_notify). Raises AssertionError."""
        ready = self.directory / "notify"
        ready.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify, open(self.log, "ab") as log:
            notify.bind(str(ready))
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": os.environ["PATH"], "NOTIFY_SOCKET": str(ready)},
            )
            self.pid = process.pid
            process.returncode = 0  # kill() waits for the pid, so Popen must not
            pidfd = os.pidfd_open(self.pid)
            try:
                poll = select.poll()
                poll.register(notify, select.POLLIN)
                poll.register(pidfd, select.POLLIN)
                came = dict(poll.poll(_READY_S * 1000))
            finally:
                os.close(pidfd)
            assert notify.fileno() in came, f"{words[0]} did not start\n{self.log.read_text()[-3000:]}"

    def exec_as(self, user: str, container: str, *args: str) -> subprocess.CompletedProcess[str]:
        """Run a program in a container as another user, which CRI cannot request."""
        raise NotImplementedError

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End the daemon; containers and their monitors keep running."""
        if self.pid:
            os.kill(self.pid, number)
            if processes.wait_exit(self.pid, 20) is None:
                processes.kill_and_reap(self.pid)
            self.pid = 0

    def stop(self) -> None:
        """End the daemon as systemd does."""
        self.kill(signal.SIGTERM)

    def close(self) -> None:
        """Remove daemon, monitors, mounts, cgroups and files."""
        if self.pid:
            remove_pods(self.cri)
        self.cri.close()
        self.stop()
        for pid, command in processes.children().items():
            if self.process_name in command and str(self.directory) in command:
                processes.kill_and_reap(pid)
        unmount_below(self.directory)
        remove_cgroups()
        run("rm", "-rf", self.directory)


class PodEngine:
    """The common part of containerd and CRI-O. See base.Engine."""

    daemon: Daemon
    directory: Path
    annotates = True
    shows_reason = True
    restarts = True  # as kubelet does: the next attempt is a new container in the same pod

    def pod(self, annotations: Mapping[str, str] = {}, handler: str = HANDLER) -> Pod:
        return Pod(self.daemon, self.directory / "pods", dict(annotations), handler)

    def start(self, want: Want) -> PodContainer:
        """Scope the annotations to the one container, as a pod's author would."""
        pod = self.pod({re.sub("^gpushare.io/", f"{NAME}.gpushare.io/", k): v for k, v in want.annotations.items()})
        try:
            one = pod.container(want)
            one.ends_pod = True
            one.start()
        except CriError as error:
            pod.remove()
            raise Refused(Result(error.code, "", error.detail)) from None
        except BaseException:
            pod.remove()
            raise
        return one

    def run(self, want: Want, timeout_s: float = 60) -> Result:
        try:
            one = self.start(want)
        except Refused as refused:
            return refused.result
        with one:
            return one.wait(timeout_s)


class Pod:
    """A sandbox, and the containers in it. As a context: removed at the end."""

    def __init__(self, daemon: Daemon, directory: Path, annotations: dict[str, str], handler: str) -> None:
        self.daemon = daemon
        name = f"pod{next(_numbers)}"
        self.directory = directory / name
        (self.directory / "log").mkdir(parents=True)
        self.config: dict[str, Any] = {
            "metadata": {"name": name, "uid": f"uid-{name}", "namespace": "default"},
            "log_directory": str(self.directory / "log"),
            "annotations": annotations,
            "labels": {"io.kubernetes.pod.name": name, "io.kubernetes.pod.namespace": "default"},
            "linux": {
                "cgroup_parent": CGROUP_PARENT,
                "security_context": {"namespace_options": {"network": "NODE", "pid": "CONTAINER"}},
            },
        }
        self.id = ""
        self._containers: list[PodContainer] = []
        try:
            self.id = self.daemon.cri.call("RunPodSandbox", config=self.config, runtime_handler=handler).pod_sandbox_id
        except BaseException:
            self.remove()
            raise

    def info(self) -> dict[str, Any]:
        """The engine's facts about the sandbox: pid, runtimeSpec and more. CRI-O has no process for most sandboxes."""
        status = self.daemon.cri.call("PodSandboxStatus", pod_sandbox_id=self.id, verbose=True)
        info: dict[str, Any] = json.loads(status.info["info"])
        return info

    def container(self, want: Want, name: str = NAME, attempt: int = 0, **config: Any) -> PodContainer:
        """Create a container without starting it; `config` has further fields of CRI's ContainerConfig."""
        one = PodContainer(self, want, name, attempt, config)
        self._containers.append(one)
        one.create()
        return one

    def run(self, want: Want, name: str = NAME, attempt: int = 0, **config: Any) -> PodContainer:
        """Create and start a container. Raises CriError."""
        one = self.container(want, name, attempt, **config)
        one.start()
        return one

    def remove(self) -> None:
        """Remove the pod as kubelet does, and wait for its shim; a second call does nothing."""
        if self.id:
            try:
                shim = _pidfd_of_parent(self.info().get("pid", 0))
            except CriError:  # CRI-O removes the pods of the last boot
                shim = -1
            remove_pod(self.daemon.cri, self.id)
            self.id = ""
            wait_gone(shim)
        unmount_below(self.directory)
        run("rm", "-rf", self.directory)

    def __enter__(self) -> Pod:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


class PodContainer:
    """See base.Running."""

    def __init__(self, pod: Pod, want: Want, name: str, attempt: int, config: Mapping[str, Any]) -> None:
        self.pod = pod
        self.id = ""
        self.ends_pod = False
        self._cri = pod.daemon.cri
        self._name = name
        self._attempt = attempt
        uid, _, gid = want.user.partition(":")
        self._config: dict[str, Any] = {
            "image": {"image": IMAGE},
            "labels": {**pod.config["labels"], "io.kubernetes.container.name": name},
            "command": list(want.args),
            "envs": [{"key": key, "value": value} for key, value in want.env.items()],
            "mounts": [*_mounts(want), *self._tmpfs(want.tmpfs)],
            "linux": {
                "resources": {"cpu_shares": 100},
                "security_context": {
                    "namespace_options": {"network": "NODE", "pid": "CONTAINER"},
                    "run_as_user": {"value": int(uid)},
                    "run_as_group": {"value": int(gid or uid)},
                    "readonly_rootfs": want.read_only,
                },
            },
            **config,
        }

    def _tmpfs(self, points: Sequence[str]) -> list[dict[str, Any]]:
        """CRI has no tmpfs: kubelet mounts one on the host (an emptyDir of medium Memory)."""
        made = []
        for point in points:
            host = self.pod.directory / f"tmpfs{next(_numbers)}"
            host.mkdir()
            run("mount", "-t", "tmpfs", "-o", "size=16m", "gpushare-test", host)
            made.append({"container_path": point, "host_path": str(host)})
        return made

    @property
    def pid(self) -> int:
        return int(self.info()["pid"])

    @property
    def _log(self) -> Path:
        return self.pod.directory / "log" / f"{self._name}-{self._attempt}"

    def info(self) -> dict[str, Any]:
        """The engine's facts about the container: pid, runtimeSpec and more."""
        status = self._cri.call("ContainerStatus", container_id=self.id, verbose=True)
        info: dict[str, Any] = json.loads(status.info["info"])
        return info

    def create(self) -> None:
        own = {"metadata": {"name": self._name, "attempt": self._attempt}, "log_path": self._log.name}
        self.id = self._cri.call(
            "CreateContainer",
            pod_sandbox_id=self.pod.id,
            config={**self._config, **own},
            sandbox_config=self.pod.config,
        ).container_id

    def start(self) -> None:
        self._cri.call("StartContainer", container_id=self.id)

    def wait(self, timeout_s: float = 60) -> Result:
        """Wait until the program ends."""
        pid = self.pid
        if pid:
            with contextlib.suppress(ProcessLookupError):
                wait_gone(os.pidfd_open(pid), timeout_s)
        self._settled()
        status = self._cri.call("ContainerStatus", container_id=self.id).status
        streams = read_log(self._log)
        return Result(status.exit_code, streams["stdout"], streams["stderr"] + status.message)

    def _settled(self) -> None:
        """Poll, like kubelet, until the engine knows that the program has ended and has deleted its task. A stop can
        return earlier, and then finds no shim if the shim is ending by itself."""
        try:
            self._cri.call("StopContainer", container_id=self.id, timeout=30)
        except CriError as error:
            if "ttrpc: closed" not in str(error):
                raise
        self._until_exited()

    def _until_exited(self) -> None:
        deadline = time.monotonic() + 30
        while self._cri.call("ContainerStatus", container_id=self.id).status.state == RUNNING:
            assert time.monotonic() < deadline, f"{self.id} still runs for the engine"
            time.sleep(0.02)

    def exec(self, *args: str, user: str = "") -> Result:
        if user:
            done = self.pod.daemon.exec_as(user, self.id, *args)
            return Result(done.returncode, done.stdout, done.stderr)
        answer = self._cri.call("ExecSync", container_id=self.id, cmd=list(args), timeout=60)
        return Result(answer.exit_code, answer.stdout.decode(), answer.stderr.decode())

    def stop(self) -> None:
        self._cri.call("StopContainer", container_id=self.id, timeout=0)
        self._until_exited()

    def restart(self) -> None:
        """Start the next attempt. kubelet keeps the ended one for a while; this removes it first."""
        self._cri.call("RemoveContainer", container_id=self.id)
        self.id = ""
        self._attempt += 1
        try:
            self.create()
            self.start()
        except CriError as error:
            raise Refused(Result(error.code, "", error.detail)) from None

    def remove(self) -> None:
        if self.id:
            self.stop()
            self._cri.call("RemoveContainer", container_id=self.id)
            self.id = ""
        if self.ends_pod:
            self.pod.remove()

    def __enter__(self) -> PodContainer:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def _mounts(want: Want) -> list[dict[str, Any]]:
    return [
        {"container_path": mount.target, "host_path": str(mount.source), "readonly": "ro" in mount.options}
        for mount in want.mounts
    ]


def read_log(path: Path) -> dict[str, str]:
    """stream -> text, from CRI's log format: "time stream F line", P instead of F where the line goes on."""
    streams = {"stdout": "", "stderr": ""}
    for line in path.read_text().split("\n")[:-1] if path.exists() else ():
        _, stream, tag, text = line.split(" ", 3)
        streams[stream] += text + "\n" * (tag == "F")
    return streams


def _pidfd_of_parent(pid: int) -> int:
    """A pidfd of the shim that is the parent of `pid`; -1 if either is gone."""
    try:
        return os.pidfd_open(processes.parent(pid))
    except OSError:
        return -1


def wait_gone(pidfd: int, timeout_s: float = 20) -> None:
    """Wait until that process, which need not be a child, has ended, and close the descriptor. -1 means that it has
    ended."""
    if pidfd < 0:
        return
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    came = poll.poll(timeout_s * 1000)
    os.close(pidfd)
    assert came, f"a process still runs after {timeout_s} s"


def remove_pod(cri: Cri, pod: str) -> None:
    """First its containers, as kubelet does: StopPodSandbox of CRI-O waits for programs that ignore SIGTERM."""
    for one in cri.call("ListContainers", filter={"pod_sandbox_id": pod, "state": {"state": RUNNING}}).containers:
        cri.call("StopContainer", container_id=one.id, timeout=0)
    cri.call("StopPodSandbox", pod_sandbox_id=pod)
    cri.call("RemovePodSandbox", pod_sandbox_id=pod)


def remove_pods(cri: Cri) -> None:
    """Remove all pods that a failed test has left."""
    with contextlib.suppress(CriError):
        for pod in cri.call("ListPodSandbox", timeout_s=5).items:
            remove_pod(cri, pod.id)


def remove_cgroups() -> None:
    top = Path("/sys/fs/cgroup")
    for folder in (*top.iterdir(), top):
        ours = folder / CGROUP_PARENT[1:]
        for one, _, _ in os.walk(ours, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(one)
