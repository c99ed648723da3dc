"""A clean Debian of any release that runs beside this machine, with its own files, processes, network and host name.

    with Debian("trixie", "docker", DOCKER["trixie"], directory) as debian:
        debian.run("dpkg", "--install", "/srv/x.deb")       must succeed; returns the standard output
        debian.call("gpushare", "list")                     runs to its end, whatever its exit code
        debian.start("munged", "--foreground")              runs until the end of the block
        with Docker(debian): ...                            its docker daemon, on loopback only

build/debian/SUITE is made with debootstrap once, as the roots of tools/matrix.py are, and build/debian/SUITE-NAME is a
copy of it with the packages. Both are kept. Each block works on an overlay of that, so nothing stays. Needs a private
mount namespace (host.py).
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from tools.matrix import Root, locked, say

from .host import BUILD
from .rootfs import run, unmount_below

FOLDER = BUILD / "debian"
RELEASES = {"bookworm": "12", "trixie": "13"}
# docker's client is a package of its own from Debian 13 on
DOCKER = {"bookworm": ("docker.io",), "trixie": ("docker.io", "docker-cli")}
_MARK = "etc/packages-of-the-test"
_INSTALL = "apt-get update -qq\napt-get install -y -qq --no-install-recommends "
_READY_S = 60
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def base(suite: str) -> Root:
    """Return the kept root of a release without further packages, after making it if it is missing."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    root = Root(FOLDER, suite, included="ca-certificates")
    root.logs.mkdir(exist_ok=True)
    with locked(root.lock, str(root.path)):
        root.make()
    return root


def with_packages(suite: str, name: str, packages: tuple[str, ...], more: str = "") -> Root:
    """Return the kept root with these packages, after making it if it is missing."""
    root = Root(FOLDER, suite, f"-{name}")
    source = base(suite)
    root.logs.mkdir(exist_ok=True)
    with locked(root.lock, str(root.path)):
        mark, wanted = root.path / _MARK, "\n".join((*packages, more))
        if mark.exists() and mark.read_text() == wanted:
            return root
        say(f"installing {' '.join(packages)} in {root.path}; {root.logs}/install.log")
        shutil.rmtree(root.path, ignore_errors=True)
        run("cp", "--archive", "--reflink=auto", source.path, root.path)
        root.copy_settings()
        if root.call("install", f"{_INSTALL}{' '.join(packages)}\napt-get clean\n{more}", network=True):
            raise AssertionError(f"the packages of {root.path.name} were not installed: {root.logs}/install.log")
        mark.write_text(wanted)
    return root


class Debian:
    """`path` is its root as seen from here; its /run, /tmp and /dev are visible only inside. `more` is a script that
    runs once with the network, after the packages are installed."""

    def __init__(self, suite: str, name: str, packages: tuple[str, ...], directory: Path, more: str = "") -> None:
        self.suite, self.directory = suite, directory
        self._base = with_packages(suite, name, packages, more)
        self._root = Root(directory, "root")
        self.path = self._root.path
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Debian:
        for name in ("root", "upper", "work"):
            (self.directory / name).mkdir(parents=True)
        options = f"lowerdir={self._base.path},upperdir={self.directory}/upper,workdir={self.directory}/work"
        run("mount", "-t", "overlay", "-o", options, "gpushare-test", self.path)
        try:
            (self.path / _MARK).unlink()
            self.put("/etc/hosts", "127.0.0.1 localhost gpushare-matrix\n")
            words = self._root.words("echo ready; exec sleep infinity", network=False)
            self._inside = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
            assert self._inside.stdout and self._inside.stdout.readline() == "ready\n"
            children = Path(f"/proc/{self._inside.pid}/task/{self._inside.pid}/children").read_text()
            self.pid = int(children.split()[0])
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        """End all processes inside: the first one of their namespace dies with its parent."""
        inside = getattr(self, "_inside", None)
        if inside is not None:
            end = os.pidfd_open(self.pid) if hasattr(self, "pid") else None
            inside.kill()
            inside.communicate()
            if end is not None:
                select.select([end], [], [], _READY_S)
                os.close(end)
        for one in self._started:
            one.communicate()
        unmount_below(self.path)
        shutil.rmtree(self.directory / "work")
        shutil.rmtree(self.directory / "upper")

    def words(self, *command: str, **variables: str) -> list[str]:
        """The command line, on this machine, that runs `command` inside."""
        spaces = ("--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wd")
        fixed = {"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive", **variables}
        environment = [f"{name}={value}" for name, value in fixed.items()]
        return ["nsenter", "--target", str(self.pid), *spaces, "--", "env", "-i", *environment, *command]

    def call(self, *command: str, timeout_s: float = 120, **variables: str) -> subprocess.CompletedProcess[str]:
        options: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
        return subprocess.run(self.words(*command, **variables), timeout=timeout_s, **options)

    def run(self, *command: str, timeout_s: float = 120, **variables: str) -> str:
        done = self.call(*command, timeout_s=timeout_s, **variables)
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def start(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        """Its output goes to the file `/var/log/PROGRAM.log` inside."""
        log = self.path / "var/log" / f"{Path(command[0]).name}.log"
        with open(log, "a") as output:
            one = subprocess.Popen(
                self.words(*command, **variables), stdin=subprocess.DEVNULL, stdout=output, stderr=output, text=True
            )
        self._started.append(one)
        return one

    def put(self, path: str, text: str, mode: int = 0o644) -> Path:
        target = self.path / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)
        return target

    def files(self, *folders: str) -> dict[str, bytes | str]:
        return files_below(self.path, *folders)

    def until(self, true: Callable[[], bool], what: str, seconds: float = 60) -> None:
        """Poll a program that offers no event."""
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, f"{what} has not come within {seconds:.0f} s"
            time.sleep(0.1)


def files_below(root: Path, *folders: str) -> dict[str, bytes | str]:
    """Path -> content, or link target."""
    found: dict[str, bytes | str] = {}
    for top in folders:
        for path in sorted((root / top.lstrip("/")).rglob("*")):
            shown = "/" + str(path.relative_to(root))
            if path.is_symlink():
                found[shown] = os.readlink(path)
            elif path.is_file():
                found[shown] = path.read_bytes()
    return found


class Docker:
    """The docker daemon of a Debian. No systemd runs there, so a script stands in for `systemctl reload docker` and
    `systemctl restart docker`."""

    OPTIONS = ("--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false")
    SYSTEMCTL = """\
#!/bin/bash
set -euo pipefail
case "$*" in
"reload docker")
    since=$(date +%s.%N)
    kill -HUP "$(cat /run/docker.pid)"
    exec 3< <(exec docker events --since "$since" --filter event=reload)
    read -r _ <&3
    kill $!
    ;;
"restart docker")
    pid=$(cat /run/docker.pid)
    mapfile -d "" -t words <"/proc/$pid/cmdline"
    kill "$pid"
    tail --pid="$pid" -f /dev/null
    setsid "${words[@]}" </dev/null >>/var/log/dockerd.log 2>&1 &
    until docker version >/dev/null 2>&1; do sleep 0.1; done
    ;;
*)
    echo "systemctl: no systemd in here, only docker can be reloaded and restarted" >&2
    exit 1
    ;;
esac
"""

    def __init__(self, debian: Debian) -> None:
        self.debian, self.cgroup = debian, f"gpushare-debian-{os.getpid()}-{debian.suite}"

    def __enter__(self) -> Docker:
        debian, notify = self.debian, self.debian.path / "notify"
        (debian.path / "usr/bin/systemctl").unlink(missing_ok=True)
        debian.put("/usr/bin/systemctl", self.SYSTEMCTL, 0o755)
        debian.run("sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward")  # or docker warns
        (debian.path / "var/lib/docker").mkdir(exist_ok=True)
        debian.run("mount", "-t", "tmpfs", "gpushare-test", "/var/lib/docker")  # overlay2 needs no overlay below it
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as ready:
            ready.bind(str(notify))
            words = ("dockerd", *self.OPTIONS, f"--cgroup-parent=/{self.cgroup}")
            self._daemon = debian.start(*words, NOTIFY_SOCKET="/notify")
            end = os.pidfd_open(self._daemon.pid)
            try:
                while True:
                    found, _, _ = select.select([ready, end], [], [], _READY_S)
                    assert ready in found, f"dockerd does not come up:\n{self.log[-4000:]}"
                    if b"READY=1" in ready.recv(4096):
                        break
            finally:
                os.close(end)
        notify.unlink()
        return self

    @property
    def log(self) -> str:
        return (self.debian.path / "var/log/dockerd.log").read_text()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        debian = self.debian
        ids = debian.call("docker", "ps", "-aq").stdout.split()
        if ids:
            debian.call("docker", "rm", "-f", *ids)
        debian.run("sh", "-c", "kill $(cat /run/docker.pid)")
        debian.until(lambda: debian.call("test", "-e", "/run/docker.pid").returncode == 1, "the end of dockerd")
        self._daemon.wait(_READY_S)
        self._remove_cgroups()

    def _remove_cgroups(self) -> None:
        groups = Path("/sys/fs/cgroup")
        for top in (*groups.glob(f"*/{self.cgroup}"), *groups.glob(self.cgroup)):
            for path in sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True):
                path.rmdir()
            top.rmdir()
