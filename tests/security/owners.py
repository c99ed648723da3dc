"""Attacks by a container's root on mounted files: leases, and writes after `ro` is removed."""

from __future__ import annotations

import json
import subprocess
import textwrap
from collections.abc import Callable

from tests.support.host import PYTHON
from tests.support.runc import Container

from . import proof
from .scene import LIBDIR, Scene

OURS = "/usr/lib/gpushare"
SOON_S = 20  # the kernel breaks a lease after 45 s

FILES = f"""
import ctypes, fcntl, glob, json, os, signal, sys
files = ["{OURS}/limits", *glob.glob("{OURS}/driver/*.so*"), *glob.glob("{OURS}/peers/*/*")]
files += ["/{LIBDIR}/libcuda.so.1", "/{LIBDIR}/libnvidia-ml.so.1"]
own = ["{OURS}/rw/usage", *glob.glob("{OURS}/pages/*")]
"""

LEASES = (
    FILES
    + """
signal.signal(signal.SIGIO, signal.SIG_IGN)
granted, kept = [], []
for path in files + own:
    for uid in (0, os.stat(path).st_uid):
        for flags, lease in ((os.O_RDONLY, fcntl.F_RDLCK), (os.O_RDWR, fcntl.F_WRLCK)):
            try:
                os.seteuid(uid)
                try:
                    fd = os.open(path, flags | os.O_NONBLOCK)
                finally:
                    os.seteuid(0)
                os.setresuid(0, uid, 0)
                try:
                    fcntl.fcntl(fd, fcntl.F_SETLEASE, lease)
                finally:
                    os.setresuid(0, 0, 0)
            except OSError:
                continue
            kept.append(fd)
            granted.append(path)
print(json.dumps(sorted(set(granted) - set(own))), flush=True)
sys.stdin.read()
"""
)

WRITES = (
    FILES
    + """
libc = ctypes.CDLL(None, use_errno=True)
MS_REMOUNT, MS_BIND = 32, 4096
points = [line.split()[4] for line in open("/proc/self/mountinfo")]
above = lambda path: max((p for p in points if path == p or path.startswith(p.rstrip("/") + "/")), key=len)
done = []
for path in files:
    real = os.path.realpath(path)
    if libc.mount(None, above(real).encode(), None, MS_REMOUNT | MS_BIND, None):
        done.append(f"{path}: not made writable: {os.strerror(ctypes.get_errno())}")
    for name, act in (
        ("opened to be written", lambda: os.close(os.open(real, os.O_RDWR))),
        ("truncated", lambda: os.truncate(real, os.stat(real).st_size)),
        ("given another mode", lambda: os.chmod(real, os.stat(real).st_mode & 0o777)),
        ("touched", lambda: os.utime(real, (1, 1))),
        ("given an attribute", lambda: os.setxattr(real, "user.x", b"x")),
    ):
        try:
            act()
            done.append(f"{path}: {name}")
        except OSError:
            pass
print(json.dumps(done))
"""
)


def leases(scene: Scene) -> None:
    """A lease is refused on all files except the container's own two. With leases on those, the neighbour's CUDA
    starts, and the host pauses, changes and lists both containers, before the kernel would break a lease."""

    def attack(one: Container) -> None:
        with scene.container(["sleep", "inf"], name="other") as other:
            other.start()
            command = [*one._runtime, "exec", one.id, PYTHON, "-c", textwrap.dedent(LEASES)]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
                assert holder.stdout is not None and holder.stdin is not None
                leased = json.loads(holder.stdout.readline())
                assert leased == [], leased
                for who in (one, other):
                    for words in (
                        ("pause", who.id),
                        ("resume", who.id),
                        ("limit", "set", who.id, "--memory", "1Gi"),
                        ("limit", "set", who.id, "--memory", proof.LIMIT_WORD),
                        ("inspect", who.id),
                        ("list",),
                    ):
                        said = scene.node.cli(*words, timeout_s=SOON_S)
                        assert said.returncode == 0, (words, said.stderr)
                proof.require_share(scene.node, other)
                holder.stdin.close()
            other.kill()
            other.wait()
            other.delete()

    scene.inside.append(attack)


def writes(scene: Scene) -> None:
    """With CAP_SYS_ADMIN over the host, which policy allows here, each mount becomes writable, but no file in it. (Root
    of the host has other ways: chown, or a clone without the id map.)"""
    for kind in ("bounding", "effective", "permitted"):
        scene.spec["process"]["capabilities"][kind].append("CAP_SYS_ADMIN")
    scene.inside.append(no_writes())


def no_writes() -> Callable[[Container], None]:
    def attack(one: Container) -> None:
        done = one.exec(PYTHON, "-c", textwrap.dedent(WRITES))
        assert done.returncode == 0, done.stderr
        changed = json.loads(done.stdout)
        assert changed == [], changed

    return attack
