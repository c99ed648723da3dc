"""Processes and mounts that keep a share after the container's init has ended, found without a scan of the host."""

from __future__ import annotations

import array
import contextlib
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpushare.state import leases

from tests.integration.test_host_user import USER
from tests.support.host import PYTHON, TREE, Node, python_mounts
from tests.support.runc import Container, RuntimeFailed
from tests.support.spec import Mount
from tests.support.tenant import PROGRAM

MakeContainer = Callable[..., Container]
ALL = {"GPUSHARE_MEMORY": "16Gi"}
PROGRAMS = TREE / "tests" / "integration" / "programs"
USAGE = "/usr/lib/gpushare/rw/usage"
CLEAN = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "/opt"}


def host_pids(spec: dict[str, Any]) -> None:
    spec["linux"]["namespaces"] = [item for item in spec["linux"]["namespaces"] if item["type"] != "pid"]


def has_ended(pid: int) -> None:
    """Wait until the kernel has released all resources of a killed process."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


@pytest.fixture
def leftover(container: MakeContainer, node: Node, way: str) -> Iterator[tuple[Container, int]]:
    """A container in the host's pid namespace whose init has ended, and one of its processes with a CUDA context, which
    has left its root."""
    one = container(
        ["sh", "-c", f"setsid unshare -Urm {PYTHON} /opt/leave.py >/dev/null 2>/errors & echo $! >/pid; read go </end"],
        env={**ALL, **CLEAN},
        mounts=python_mounts(PROGRAM, PROGRAMS / "leave.py"),
        edit=host_pids,
        **node.way(way),
    )
    for name in ("left", "end"):
        os.mkfifo(one.rootfs / name)
    for name in ("pid", "errors"):
        (one.rootfs / name).touch()
    one.start()
    with open(one.rootfs / "left") as said:
        assert said.read() == "['old']\n", (one.rootfs / "errors").read_text()
    pid = int((one.rootfs / "pid").read_text())
    (one.rootfs / "end").write_text("\n")
    one.wait()
    yield one, pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    has_ended(pid)


def test_cuda_context_in_another_root_keeps_the_lease(
    leftover: tuple[Container, int], container: MakeContainer, node: Node, way: str
) -> None:
    one, pid = leftover
    with pytest.raises(RuntimeFailed, match=f"{one.id}|exit code: 75"):
        container(["true"], env=ALL, **node.way(way)).start()
    assert node.leases() == [one.id]
    os.kill(pid, signal.SIGKILL)
    has_ended(pid)
    following = container(["true"], env=ALL, **node.way(way))
    assert following.run() == 0, following.stderr
    assert node.leases() == [following.id]


@pytest.mark.parametrize(
    ("lock", "pids"),
    [("read", None), ("write", None), ("lease", None), ("read", host_pids)],
    ids=["read", "write", "lease", "pid namespace of the host"],
)
def test_passed_descriptor_does_not_keep_the_share(
    container: MakeContainer, node: Node, way: str, tmp_path: Path, lock: str, pids: Callable[..., None] | None
) -> None:
    """A process outside the container can hold a lock on its usage file for ever: the lock must not count."""
    program = tmp_path / "pass.py"
    program.write_text(
        "import fcntl, os, socket, struct, sys\n"
        f"fd = os.open({USAGE!r}, os.O_RDWR)\n"
        "kind = sys.argv[1]\n"
        "if kind == 'lease': fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n"
        "else: fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack('hhqqi4x', "
        "fcntl.F_RDLCK if kind == 'read' else fcntl.F_WRLCK, 0, 0, 0, 0))\n"
        "with socket.socket(socket.AF_UNIX) as to:\n"
        "    to.connect('/shared/socket')\n"
        "    socket.send_fds(to, [b'x'], [fd])\n"
    )
    shared = tmp_path / "shared"
    shared.mkdir()
    one = container(
        [PYTHON, "/opt/pass.py", lock],
        env=ALL,
        mounts=[*python_mounts(program), Mount(shared, "/shared")],
        edit=pids,
        **node.way(way),
    )
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(shared / "socket"))
        door.listen(1)
        one.start()
        with door.accept()[0] as connection:
            fds = array.array("i")
            _, ancillary, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(fds.itemsize))
            fds.frombytes(ancillary[0][2])
        assert one.wait() == 0, one.stderr
        try:
            assert os.fstat(fds[0]).st_size > 0
            following = container(["true"], env=ALL, **node.way(way))
            assert following.run() == 0, following.stderr
            following.delete()
            one.delete()
            assert node.leases() == []
        finally:
            os.close(fds[0])
    assert node.left() == []


def test_recreated_cgroup_does_not_keep_the_lease(container: MakeContainer, node: Node, way: str) -> None:
    """A cgroup is identified by its inode number."""
    one = container(["sleep", "inf"], env=ALL, edit=host_pids, **node.way(way)).start()
    lease = leases.find(str(node.state), one.id)
    assert lease is not None and not lease.first and lease.cgroup_id > 0
    os.kill(one.pid, signal.SIGKILL)
    one.wait()
    os.rmdir(lease.cgroup_dir)
    os.mkdir(lease.cgroup_dir)
    with subprocess.Popen(["sleep", "inf"]) as other:
        try:
            Path(lease.cgroup_dir, "cgroup.procs").write_text(str(other.pid))
            following = container(["true"], env=ALL, **node.way(way))
            assert following.run() == 0, following.stderr
        finally:
            other.kill()
    one.delete()


@pytest.mark.parametrize("who", ["a user of the host", "a container's root"])
def test_start_and_end_read_no_foreign_mounts_or_processes(
    container: MakeContainer, node: Node, way: str, tmp_path: Path, who: str
) -> None:
    """With any number of them: the test counts system calls, not time."""
    if who == "a user of the host":
        program = tmp_path / "crowd.py"
        program.write_text((PROGRAMS / "crowd.py").read_text())
        for folder in (tmp_path, *tmp_path.parents[:-1]):
            folder.chmod(folder.stat().st_mode | 0o055)
        words = (*USER, "unshare", "-Urm", "/usr/bin/python3", "-I", str(program), "65000", "60")
    else:
        den = container(["sleep", "inf"], mounts=python_mounts(PROGRAMS / "crowd.py")).start()
        words = (*den._runtime, "exec", den.id, "unshare", "-Urm", PYTHON, "/opt/crowd.py", "65000", "60")
    log = tmp_path / "calls"
    tracing = ("strace", "-D", "-A", "-f", "-qq", "-s", "256", "-e", "trace=%file", "-o", str(log))
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as crowd:
        assert crowd.stdin and crowd.stdout
        try:
            assert len(crowd.stdout.readline().split()) == 61
            for pids in (None, host_pids):
                dead = container(["sleep", "inf"], env=ALL, edit=pids, **node.way(way)).start()
                os.kill(dead.pid, signal.SIGKILL)
                dead.wait()
                one = container(["true"], env=ALL, edit=pids, prefix=tracing, **node.way(way))
                one.run()
                one.delete()
                calls = log.read_text()
                tables = re.findall(r'"/proc/(\d+)/(?:mountinfo|ns/mnt|root)"', calls)
                assert set(tables) <= {str(one.pid)} | set(re.findall(r"^(\d+)", calls, re.M)), tables
                assert f"/containers/{one.id}" in calls
                dead.delete()
                assert node.left() == []
        finally:
            crowd.stdin.close()
