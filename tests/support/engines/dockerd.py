"""A docker daemon for one test: its containerd, images, sockets and cgroups are below one short directory, and are
removed with it.

    daemon = Dockerd(directory, {"runtimes": {...}})      daemon.json; nothing runs yet
    daemon.start("--live-restore")                        returns when the daemon answers
    daemon.docker("run", "--rm", "image", "true")         the client -> Result
    daemon.close()

`directory`/bin comes first in its PATH, then the folder of dockerd, which this process finds in its own PATH
(tools/engines.py). /etc/docker, /run/docker and /run/containerd of the host are not used: a tmpfs
covers the last one, where docker's containerd-shim always puts its sockets. Needs a private mount namespace (host.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

from .. import processes
from ..rootfs import run, unmount_below
from .base import Result

PROGRAM = shutil.which("dockerd") or "dockerd"
FOLDER = os.path.dirname(PROGRAM)
# From the daemon's package: a client in PATH may be too new or too old for the daemon
CLIENT = next(filter(os.path.exists, (f"{FOLDER}/docker", "/usr/bin/docker")), "docker")
_BUILDX = f"{FOLDER}/docker-buildx"  # without it a newer client builds no images
_SHIM_SOCKETS = Path("/run/containerd")
_CGROUPS = Path("/sys/fs/cgroup")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"
_READY_S = 60
NO_NETWORK = ("--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false")


class Dockerd:
    """One daemon; it can be restarted with the same containers and images."""

    def __init__(self, directory: Path, config: dict[str, Any] | None = None) -> None:
        processes.become_subreaper()
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.config_file = directory / "daemon.json"
        # docker 20.10 would write this one file to /etc/docker
        key = {"deprecated-key-path": str(directory / "key.json")}
        self.config_file.write_text(json.dumps({**key, **(config or {})}, indent=4) + "\n")
        if os.path.exists(_BUILDX):
            (directory / "client/cli-plugins").mkdir(parents=True)
            (directory / "client/cli-plugins/docker-buildx").symlink_to(_BUILDX)
        self.cgroup = "-".join(directory.parts[-2:])  # unique if the directory is
        self._process: subprocess.Popen[bytes] | None = None
        self._covered = False

    @property
    def pid(self) -> int:
        assert self._process, "the daemon does not run"
        return self._process.pid

    @property
    def log(self) -> str:
        path = self.directory / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self, *options: str) -> None:
        """Start the daemon and wait; raises AssertionError with its log if it fails."""
        if not self._covered:
            _SHIM_SOCKETS.mkdir(exist_ok=True)
            run("mount", "-t", "tmpfs", "-o", "mode=711", "gpushare-test", _SHIM_SOCKETS)
            self._covered = True
        notify = self.directory / "notify"
        notify.unlink(missing_ok=True)
        (self.directory / "pid").unlink(missing_ok=True)  # a killed daemon leaves it
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as ready:
            ready.bind(str(notify))
            notify.chmod(0o666)  # a rootless daemon reports to it, too
            with open(self.directory / "log", "ab") as log:
                self._process = subprocess.Popen(
                    [*self.command_line(), *options],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**self.environment(), "NOTIFY_SOCKET": str(notify)},
                )
            self._wait_ready(ready)

    def environment(self) -> dict[str, str]:
        return {"PATH": f"{self.directory}/bin:{FOLDER}:{_PATH}"}

    def command_line(self) -> list[str]:
        below = self.directory
        return [
            PROGRAM,
            f"--config-file={self.config_file}",
            f"--data-root={below / 'data'}",
            f"--exec-root={below / 'exec'}",
            f"--pidfile={below / 'pid'}",
            f"--host=unix://{below / 'socket'}",
            f"--cgroup-parent=/{self.cgroup}",
            "--storage-driver=overlay2",
            *NO_NETWORK,
        ]

    def _wait_ready(self, ready: socket.socket) -> None:
        """Wait for sd_notify(3), which the daemon sends once its socket answers."""
        end = os.pidfd_open(self.pid)
        try:
            poll = select.poll()
            poll.register(end, select.POLLIN)
            poll.register(ready, select.POLLIN)
            while events := dict(poll.poll(_READY_S * 1000)):
                if end in events:
                    break
                if b"READY=1" in ready.recv(4096):
                    return
        finally:
            os.close(end)
        raise AssertionError(f"dockerd does not come up:\n{self.log[-4000:]}")

    def command(self, *args: str) -> list[str]:
        """The command line of the client, without any user's configuration."""
        words = ("--config", str(self.directory / "client"), "-H", f"unix://{self.directory / 'socket'}")
        return [CLIENT, *words, *args]

    def docker(self, *args: str, timeout_s: float = 60, **variables: str) -> Result:
        """Run a client command; `variables` are added to its environment."""
        done = subprocess.run(
            self.command(*args),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={"PATH": "/usr/bin:/bin", **variables},
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def must(self, *args: str, timeout_s: float = 60) -> str:
        """The output of a client command that must succeed."""
        done = self.docker(*args, timeout_s=timeout_s)
        assert done.code == 0, f"docker {' '.join(args)}: {done.code}\n{done.out}\n{done.err}"
        return done.out.strip()

    def reload(self) -> None:
        """Reload daemon.json; an event reports completion."""
        os.kill(self.pid, signal.SIGHUP)

    def end(self, number: int = signal.SIGTERM) -> None:
        """End only the daemon. Processes that it started end or keep running, as docker decides."""
        if not self._process:
            return
        containerd = self._containerd()
        self._process.send_signal(number)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        if containerd:
            # It dies with its parent. Until it is reaped, the next daemon considers it alive.
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                if processes.wait_exit(containerd, 10) is None:
                    processes.kill_and_reap(containerd)

    def _containerd(self) -> int:
        path = self.directory / "exec" / "containerd" / "containerd.pid"
        return int(path.read_text()) if path.exists() else 0

    def close(self) -> None:
        """Remove everything, however the daemon ended."""
        if self._process and self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                ids = self.docker("ps", "-aq").out.split()
                if ids:
                    self.docker("rm", "-f", *ids)
        self.end(signal.SIGKILL)  # nothing of it stays, and an orderly end takes a second
        self._end_others()
        unmount_below(self.directory)
        self._remove_cgroups()
        if self._covered:
            run("umount", _SHIM_SOCKETS)
            self._covered = False
        shutil.rmtree(self.directory, ignore_errors=True)

    def _end_others(self) -> None:
        """End containerd, its shims and their containers, which become children of this process (a subreaper) when a
        daemon is killed. They have this directory in their command line or are in this cgroup."""
        while mine := [pid for pid, words in processes.children().items() if self._is_mine(pid, words)]:
            for pid in mine:
                processes.kill_and_reap(pid)

    def _is_mine(self, pid: int, words: str) -> bool:
        try:
            groups = Path(f"/proc/{pid}/cgroup").read_text()
        except OSError:
            return False
        return f"{self.directory}/" in words or f"/{self.cgroup}/" in groups

    def _remove_cgroups(self) -> None:
        for top in (*_CGROUPS.glob(f"*/{self.cgroup}"), *_CGROUPS.glob(self.cgroup)):
            for path in sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True):
                path.rmdir()
            top.rmdir()
