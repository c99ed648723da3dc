"""Containers for tests of single effects: a root file system made from the host's own files, a process in a mount namespace
of its own (or a real runc container), and `enter` to look at what it sees. Everything goes away with the context manager."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable, Optional

from gpushare import linux
from gpushare.model import Bundle

LIBDIR = f"/usr/lib/{os.uname().machine}-linux-gnu"
TOOLS = ("sh", "cat", "ls", "stat", "mknod", "sleep", "head", "rm", "dd")


def in_child(body: Callable[[], Any]) -> Any:
    """The JSON-able result of `body` in a child process, which may change namespaces or its root; failures come back."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reader)
            try:
                message = {"result": body()}
            except BaseException as error:  # noqa: BLE001  (it is reported to the parent)
                message = {"error": f"{type(error).__name__}: {error}"}
            with os.fdopen(writer, "w") as pipe:
                json.dump(message, pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    answer = json.loads(text)
    if "error" in answer:
        raise AssertionError(answer["error"])
    return answer["result"]


def host_mounts() -> list[str]:
    """The mount table of this process without ids: what must not change."""
    with open("/proc/self/mountinfo") as table:
        return sorted(" ".join(line.split(" ")[2:]) for line in table)


def bundle(rootfs: str, identity: str = "test", spec: Optional[dict[str, Any]] = None) -> Bundle:
    return Bundle(identity, 0, os.path.dirname(rootfs), rootfs, (), {}, "", "", "", False, spec or {})


class Sandbox:
    """A process in its own mount namespace in which `rootfs` is a mount point, as a runtime leaves it before pivot_root."""

    def __init__(self, rootfs: Path, setup: str = "") -> None:
        self.rootfs = rootfs
        script = f"mount --make-rprivate / && mount --bind {rootfs} {rootfs} && {setup or ':'} && echo ready && exec sleep 1000"
        self.process = subprocess.Popen(
            ["unshare", "-m", "--propagation", "unchanged", "sh", "-c", script], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", "the sandbox did not start"

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def bundle(self) -> Bundle:
        return bundle(str(self.rootfs))

    def enter(self, body: Callable[[], Any], chroot: bool = True) -> Any:
        """`body` as a process of the container would run it: in its mount namespace, with its root."""

        def inside() -> Any:
            fd = os.open(f"/proc/{self.pid}/ns/mnt", os.O_RDONLY)
            linux.setns(fd, "sandbox")
            if chroot:
                os.chroot(self.rootfs)
                os.chdir("/")
            return body()

        return in_child(inside)

    def mounts(self) -> list[str]:
        """Mount points below the root, as seen in the container."""
        with open(f"/proc/{self.pid}/mountinfo") as table:
            points = [line.split(" ")[4] for line in table]
        prefix = str(self.rootfs)
        return sorted(p[len(prefix) :] for p in points if p.startswith(prefix + "/"))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()


@contextlib.contextmanager
def sandbox(rootfs: Path, setup: str = "") -> Iterator[Sandbox]:
    box = Sandbox(rootfs, setup)
    try:
        yield box
    finally:
        box.close()


def needed_libraries(program: str) -> list[str]:
    """The files that the host's loader would map for `program`."""
    out = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    words = (word for line in out.splitlines() for word in line.split())
    return [word for word in words if word.startswith("/")]


def make_image(root: Path, layout: str = "multiarch", programs: Sequence[str] = TOOLS) -> Path:
    """A small glibc image from the host's files. "multiarch" is Debian's layout (/usr/lib/<triplet>, /lib a link); "lib64" is
    Fedora's (/usr/lib64). Its cache is made by ldconfig, which is in the image too."""
    libdir = LIBDIR if layout == "multiarch" else "/usr/lib64"
    for directory in ("usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "etc", "dev", "proc", "sys", "tmp", "run", libdir[1:]):
        (root / directory).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        os.symlink(f"usr/{name}", root / name)
    sources = [shutil.which(p) or p for p in programs] + ["/sbin/ldconfig"]
    files = {Path(os.path.realpath(library)) for p in sources for library in _libraries(p)}
    for file in files | {Path(os.path.realpath("/lib64/ld-linux-x86-64.so.2"))}:
        is_loader = file.name.startswith("ld-")
        shutil.copy2(file, root / ("usr/lib64" if is_loader else libdir[1:]) / file.name)
    for source in sources:
        shutil.copy2(os.path.realpath(source), root / ("usr/sbin" if source.endswith("ldconfig") else "usr/bin") / Path(source).name)
    (root / "etc/ld.so.conf").write_text("" if layout == "lib64" else f"{LIBDIR.replace('/usr', '', 1)}\n{LIBDIR}\n")
    (root / "etc/passwd").write_text("root:x:0:0:root:/:/bin/sh\n")
    subprocess.run(["ldconfig", "-r", str(root)], check=True)
    return root


def _libraries(program: str) -> list[str]:
    done = subprocess.run(["ldd", program], capture_output=True, text=True)
    return [word for word in done.stdout.split() if word.startswith("/") and not word.endswith(":")]


def runc_spec(rootfs: str, cgroup: str, args: Sequence[str] = ("sleep", "1000")) -> dict[str, Any]:
    """A config.json for runc: own mount, pid and ipc namespaces, /proc and a fresh /dev, no extra privileges."""
    capabilities = ["CAP_MKNOD", "CAP_DAC_OVERRIDE", "CAP_CHOWN", "CAP_SYS_CHROOT"]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": list(args),
            "env": ["PATH=/usr/sbin:/usr/bin"],
            "cwd": "/",
            "capabilities": {k: capabilities for k in ("bounding", "effective", "permitted")},
            "noNewPrivileges": True,
        },
        "root": {"path": rootfs, "readonly": False},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=65536k"]},
            {"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": ["newinstance", "ptmxmode=0666"]},
        ],
        "linux": {
            "cgroupsPath": cgroup,
            "namespaces": [{"type": t} for t in ("mount", "pid", "ipc", "uts")],
            "resources": {"devices": [{"allow": False, "access": "rwm"}]},
        },
    }


class Runc:
    """A real runc container that is created (not started) from a spec; `command` is runc with its state directory."""

    def __init__(self, directory: Path, spec: dict[str, Any], prefix: Sequence[str] = ()) -> None:
        self.id = f"gs-{uuid.uuid4().hex[:10]}"
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.command = [*prefix, "runc", "--root", str(directory / "state")]
        (directory / "config.json").write_text(json.dumps(spec))

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([*self.command, *arguments], capture_output=True, text=True, check=False, cwd=self.directory)
        assert not check or done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done

    def create(self) -> int:
        # The container's init inherits runc's streams, so they must not be pipes that somebody waits for.
        subprocess.run(
            [*self.command, "create", "--bundle", str(self.directory), self.id],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(self.directory / "stderr").open("w"),
        )
        return int(json.loads(self.run("state", self.id).stdout)["pid"])

    def delete(self) -> None:
        self.run("delete", "--force", self.id, check=False)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
