"""Containers for tests of single effects: a root file system made of the host's files, and a process in its own mount
namespace (or a real runc container). `enter` runs code as the process sees it. Each context manager removes all it
made."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import subprocess
import uuid
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable, Optional

from gpushare.core.errors import GpushareError
from gpushare.core.model import Bundle
from gpushare.core.ops import Op, Plan
from gpushare.inject import apply
from gpushare.system import cgroup, syscalls

LIBDIR = f"/usr/lib/{os.uname().machine}-linux-gnu"
LDCONFIG = "/sbin/ldconfig.real" if os.path.exists("/sbin/ldconfig.real") else "/sbin/ldconfig"  # Ubuntu has a wrapper
TOOLS = ("sh", "cat", "ls", "stat", "mknod", "sleep", "head", "rm", "dd")


EMPTY = hashlib.sha256(b"").hexdigest()  # how `snapshot` shows an empty file


class ChildDied(Exception):
    """The child of `in_child` was killed before it returned a result."""


def in_child(body: Callable[[], Any]) -> Any:
    """Return the JSON-able result of `body` in a child process, which may change namespaces or its root. Its failures
    are raised here."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside pytest's timer thread: the child starts none
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reader)
            try:
                message = {"result": body()}
            except BaseException as error:
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
    if not text:
        raise ChildDied
    answer = json.loads(text)
    if "error" in answer:
        raise AssertionError(answer["error"])
    return answer["result"]


def host_mounts() -> list[str]:
    """The mount table of this process without ids, which must not change."""
    with open("/proc/self/mountinfo") as table:
        return sorted(" ".join(line.split(" ")[2:]) for line in table)


def bundle(rootfs: str, identity: str = "test", spec: Optional[dict[str, Any]] = None) -> Bundle:
    return Bundle(identity, 0, os.path.dirname(rootfs), rootfs, (), {}, "", "", "", False, spec or {})


def snapshot(root: Path) -> dict[str, tuple[int, int, str]]:
    """Every path below `root` on the same mount: mode, owner and content."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            status = os.lstat(path)
            content = ""
            if stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(status.st_mode):
                with open(path, "rb") as file:
                    content = hashlib.sha256(file.read()).hexdigest()
            found[path[len(str(root)) :]] = (status.st_mode, status.st_uid, content)
    return found


def started(command: Sequence[str]) -> subprocess.Popen[str]:
    """Start a process and wait for its "ready"."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        ended(process)
        raise AssertionError(f"{command} did not start")
    return process


def ended(process: Optional[subprocess.Popen[str]]) -> None:
    if process is not None:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


class Sandbox:
    """A process in its own mount namespace, where `rootfs` is a mount point as a runtime leaves it before pivot_root,
    and in its own cgroup.

    `setup`: shell commands to run there first. `propagates`: the rootfs stays a shared peer of the host's. `mapped`: in
    a user namespace whose root is this host uid."""

    def __init__(self, rootfs: Path, setup: str = "", propagates: bool = False, mapped: int = 0) -> None:
        self.rootfs = rootfs
        steps = [] if propagates else ["mount --make-rprivate /", f"mount --bind {rootfs} {rootfs}"]
        script = " && ".join([*steps, *([setup] if setup else []), "echo ready", "exec sleep 1000"])
        self._holder = self._user_namespace(mapped) if mapped else None
        users = ["nsenter", "-U", "-t", str(self._holder.pid), "-S", "0", "-G", "0"] if self._holder else []
        self._cgroups = [Path(one, f"gpushare-box-{uuid.uuid4()}") for one in cgroup.find_cgroups(os.getpid()) if one]
        self.process = started([*users, "unshare", "-m", "--propagation", "unchanged", "sh", "-c", script])
        for one in self._cgroups:
            one.mkdir()
            (one / "cgroup.procs").write_text(str(self.process.pid))

    @staticmethod
    def _user_namespace(mapped: int) -> subprocess.Popen[str]:
        holder = started(["unshare", "-U", "sh", "-c", "echo ready; exec sleep 1000"])
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{holder.pid}/{name}", "w") as table:
                table.write(f"0 {mapped} 1000")
        return holder

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def bundle(self) -> Bundle:
        return bundle(str(self.rootfs))

    def enter(self, body: Callable[[], Any], chroot: bool = True) -> Any:
        """Run `body` as a process of the container: in its mount namespace, with its root."""

        def inside() -> Any:
            fd = os.open(f"/proc/{self.pid}/ns/mnt", os.O_RDONLY)
            syscalls.setns(fd, "sandbox")
            if chroot:
                os.chroot(self.rootfs)
                os.chdir("/")
            return body()

        return in_child(inside)

    def mounts(self) -> list[str]:
        """Mount points below the root, from inside the container."""
        with open(f"/proc/{self.pid}/mountinfo") as table:
            points = [line.split(" ")[4] for line in table]
        prefix = str(self.rootfs)
        return sorted(p[len(prefix) :] for p in points if p.startswith(prefix + "/"))

    def apply(self, plan: Plan, then: Callable[[apply.Applied], Any] = lambda applied: None) -> Any:
        """Apply `plan` to this container in a separate process, like the hook's, then call `then` there."""

        def body() -> Any:
            applied = apply.apply(plan, self.bundle, self.pid)
            result = then(applied)
            applied.close()
            return result

        return in_child(body)

    def refuses(self, *ops: Op) -> str:
        """Return the one-line error of a plan that must fail, and assert that it left nothing."""
        before, tree, host = self.mounts(), snapshot(self.rootfs), host_mounts()

        def body() -> str:
            try:
                apply.apply(Plan("test", ops), self.bundle, self.pid)
            except GpushareError as error:
                return str(error)
            raise AssertionError("the plan was applied")

        message = str(in_child(body))
        assert "\n" not in message
        assert (self.mounts(), snapshot(self.rootfs), host_mounts()) == (before, tree, host)
        return message

    def close(self) -> None:
        ended(self.process)
        ended(self._holder)
        for one in self._cgroups:
            one.rmdir()


@contextlib.contextmanager
def sandbox(rootfs: Path, setup: str = "", propagates: bool = False, mapped: int = 0) -> Iterator[Sandbox]:
    box = Sandbox(rootfs, setup, propagates, mapped)
    try:
        yield box
    finally:
        box.close()


# Parts of glibc in every glibc image, which NVIDIA's driver needs
GLIBC = ("libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1")


def make_image(root: Path, layout: str = "multiarch", programs: Sequence[str] = TOOLS) -> Path:
    """Make a small glibc image of the host's files. "multiarch" is Debian's layout (/usr/lib/<triplet>, /lib is a
    link); "lib64" is Fedora's (/usr/lib64). ldconfig makes its cache and is part of the image."""
    libdir = LIBDIR if layout == "multiarch" else "/usr/lib64"
    for directory in (
        "usr/bin",
        "usr/sbin",
        "usr/lib",
        "usr/lib64",
        "etc",
        "dev",
        "proc",
        "sys",
        "tmp",
        "run",
        libdir[1:],
    ):
        (root / directory).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        os.symlink(f"usr/{name}", root / name)
    sources = [shutil.which(p) or p for p in programs] + [LDCONFIG]
    files = {Path(os.path.realpath(library)) for p in sources for library in _libraries(p)}
    files |= {Path(os.path.realpath(f"{LIBDIR}/{name}")) for name in GLIBC}
    for file in files | {Path(os.path.realpath("/lib64/ld-linux-x86-64.so.2"))}:
        is_loader = file.name.startswith("ld-")
        shutil.copy2(file, root / ("usr/lib64" if is_loader else libdir[1:]) / file.name)
    for source in sources:
        shutil.copy2(
            os.path.realpath(source),
            root
            / ("usr/sbin" if source == LDCONFIG else "usr/bin")
            / ("ldconfig" if source == LDCONFIG else Path(source).name),
        )
    (root / "etc/ld.so.conf").write_text(
        "/usr/lib64\n" if layout == "lib64" else f"{LIBDIR.replace('/usr', '', 1)}\n{LIBDIR}\n"
    )
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
            {
                "destination": "/dev",
                "type": "tmpfs",
                "source": "tmpfs",
                "options": ["nosuid", "mode=755", "size=65536k"],
            },
            {
                "destination": "/dev/pts",
                "type": "devpts",
                "source": "devpts",
                "options": ["newinstance", "ptmxmode=0666"],
            },
        ],
        "linux": {
            "cgroupsPath": cgroup,
            "namespaces": [{"type": t} for t in ("mount", "pid", "ipc", "uts")],
            "resources": {"devices": [{"allow": False, "access": "rwm"}]},
        },
    }


class Runc:
    """A real runc container, created (not started) from a spec; `command` is runc with its state directory."""

    def __init__(self, directory: Path, spec: dict[str, Any], prefix: Sequence[str] = ()) -> None:
        self.id = f"gs-{uuid.uuid4().hex[:10]}"
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.command = [*prefix, "runc", "--root", str(directory / "state")]
        (directory / "config.json").write_text(json.dumps(spec))

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*self.command, *arguments], capture_output=True, text=True, check=False, cwd=self.directory
        )
        assert not check or done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done

    def create(self) -> int:
        # The container's init inherits runc's streams: with pipes, a reader would wait for the container.
        with (self.directory / "stderr").open("w") as log:
            subprocess.run(
                [*self.command, "create", "--bundle", str(self.directory), self.id],
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        return int(json.loads(self.run("state", self.id).stdout)["pid"])

    def delete(self) -> None:
        self.run("delete", "--force", self.id, check=False)
