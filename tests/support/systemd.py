"""A real systemd as the first process of a pid namespace, with gpushare's units and few others.

Systemd(directory, etc)    boots it: /usr/bin/gpushare is the tree's, /etc/gpushare is `etc`, /run is empty. Mounts,
                           network and cgroups that it sees are its own, so nothing reaches the machine.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from . import host
from .rootfs import run

UNITS = host.TREE / "packaging" / "systemd"
PROGRAM = "/lib/systemd/systemd"
_TARGETS = ("basic", "sysinit", "shutdown", "umount", "final", "multi-user", "paths")
_BOOT_S = 30.0
_numbers = itertools.count(1)
# "$1": the directory. A tmpfs for whatever is written; overlays only read, so that nothing is written to the machine
_ENTER = """
set -e
mount -t tmpfs -o mode=755 gpushare-test /run
mount -t tmpfs -o mode=755 gpushare-test /var/lib
mount -t proc proc /proc
mount -t cgroup2 gpushare-test /sys/fs/cgroup
mount -t tmpfs -o mode=755 gpushare-test "$1/dev"
mkdir "$1/dev/shm"
for name in null zero full random urandom tty; do
    : >"$1/dev/$name"
    mount --bind "/dev/$name" "$1/dev/$name"
done
mount --rbind "$1/dev" /dev
mount -t tmpfs -o mode=1777 gpushare-test /dev/shm
mount -t overlay -o "lowerdir=$1/bin:/usr/bin" gpushare-test /usr/bin
mount -t overlay -o "lowerdir=$1/etc:/etc" gpushare-test /etc
mount --bind "$2" /etc/gpushare
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin container=gpushare-test NOTIFY_SOCKET="$1/ready" \\
    SYSTEMD_UNIT_PATH="$1/units:/run/systemd/transient" SYSTEMD_GENERATOR_PATH=/nonexistent \\
    "$3" --system --unit=basic.target --log-target=console --log-level=notice --show-status=0
"""


class Systemd:
    """`pid`: the systemd's, in this pid namespace."""

    def __init__(self, directory: Path, etc: Path) -> None:
        self._cgroups = directory / "cgroups"
        self._cgroup = self._cgroups / f"gpushare-systemd-{os.getpid()}-{next(_numbers)}"
        self.log = directory / "log"
        self.pid = 0
        for name in ("bin", "etc/gpushare", "dev", "units", "cgroups"):
            (directory / name).mkdir(parents=True)
        (directory / "bin" / "gpushare").symlink_to(host.BIN / "gpushare")
        for unit in UNITS.iterdir():
            shutil.copy(unit, directory / "units")
        self.units = directory / "units"
        for target in _TARGETS:
            self.unit(f"{target}.target", "[Unit]\nDefaultDependencies=no\n")
        run("mount", "-t", "cgroup2", "gpushare-test", self._cgroups)
        self._cgroup.mkdir()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready, open(self.log, "w") as log:
            ready.bind(str(directory / "ready"))
            ready.settimeout(_BOOT_S)
            words = ["sh", "-c", 'echo 0 >"$0/cgroup.procs"; exec "$@"', str(self._cgroup), "unshare"]
            words += ["--cgroup", "--mount", "--uts", "--net", "--ipc", "--pid", "--fork", "--kill-child"]
            words += ["--propagation", "private", "sh", "-c", _ENTER, "sh", str(directory), str(etc), PROGRAM]
            self._outside = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            try:
                while b"READY=1" not in ready.recv(4096).splitlines():
                    pass
            except BaseException as error:
                self.close()
                raise RuntimeError(f"systemd has not come up: {self.log.read_text()}") from error
        self.pid = self._child()

    def unit(self, name: str, text: str) -> None:
        """Write a unit file, or a drop-in if `name` is in its directory."""
        path = self.units / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def bus(self) -> None:
        """Start D-Bus, by which crun asks systemd for a cgroup. runc also does without. In a mount of its own: the
        file system of pinned programs, where crun puts a container's device rules."""
        head = "[Unit]\nDefaultDependencies=no\n"
        program = "/usr/bin/dbus-daemon --system --address=systemd: --nofork --nopidfile --systemd-activation"
        self.unit("dbus.socket", f"{head}[Socket]\nListenStream=/run/dbus/system_bus_socket\n")
        self.unit("dbus.service", f"{head}[Service]\nType=notify\nNotifyAccess=main\nExecStart={program}\n")
        self.run("mount", "-t", "bpf", "gpushare-test", "/sys/fs/bpf")
        self.run("systemctl", "daemon-reload")
        if os.path.exists(program.split()[0]):
            self.run("systemctl", "start", "dbus.socket", "dbus.service")

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of this host inside."""
        inside = ["nsenter", "--target", str(self.pid), *("--mount", "--uts", "--net", "--ipc", "--pid", "--cgroup")]
        return subprocess.run(
            [*inside, "--", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"},
        )

    def run(self, *words: str) -> str:
        """Standard output of a command that must succeed."""
        done = self.call(*words)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}{self.log.read_text()}"
        return done.stdout

    def show(self, unit: str, *names: str) -> tuple[str, ...]:
        """Current properties of a unit."""
        text = self.run("systemctl", "show", unit, *(f"--property={name}" for name in names))
        found = dict(line.split("=", 1) for line in text.splitlines())
        return tuple(found[name] for name in names)

    def until(self, true: Callable[[], bool], seconds: float = 20) -> None:
        """Poll systemd: without a bus it sends no signals."""
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, self.run("systemctl", "list-units", "--all", "gpushare*")

    def _child(self) -> int:
        """The only child of unshare: the first process inside."""
        pid = self._outside.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def close(self) -> None:
        """End it with all of its processes."""
        if self._outside.poll() is None:
            try:
                os.kill(self._child(), 9)
            except (IndexError, OSError):
                self._outside.kill()
            self._outside.wait(30)
        for folder, _, _ in os.walk(self._cgroup, topdown=False):
            os.rmdir(folder)
        run("umount", self._cgroups)
