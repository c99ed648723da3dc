"""Containers with compute limits enforced by MPS, with simulated driver and daemon: a client's settings in any
environment, containers that are refused, and the daemon's death. Real daemon: test_mps_daemon.py."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.mps_stage import (
    CLIENT,
    CONNECTION_FAILED,
    GIB,
    OUT_OF_MEMORY,
    PIPE,
    RAISED,
    UUID,
    client,
    make_mps_containers,
    make_mps_host,
    start,
    status,
)
from tests.support.doctor import finding
from tests.support.host import Node
from tests.support.processes import reap_zombies
from tests.support.runc import Container, RuntimeFailed


@pytest.fixture
def host(make_host: Callable[..., Path], make_node: Callable[..., Node]) -> Iterator[Node]:
    yield from make_mps_host(make_host, make_node)


@pytest.fixture
def container(tmp_path: Path, host: Node) -> Iterator[Callable[..., Container]]:
    yield from make_mps_containers(tmp_path, host)


def test_clients_get_their_shares_whatever_their_environment(
    host: Node, container: Callable[..., Container], way: str
) -> None:
    start(host)
    one = container(way, "4Gi", "30%", RAISED).start()
    two = container(way, "2Gi", "50%").start()
    said = client(one, str(3 * GIB), str(1 * GIB), env=RAISED)
    assert (said["cuInit"], said["multiprocessors"], said["PIPE_DIRECTORY"]) == (0, 15, PIPE)  # 30% of 48
    assert (said["ACTIVE_THREAD_PERCENTAGE"], said["PINNED_DEVICE_MEM_LIMIT"]) == ("30", "0=4096M")
    assert said["allocations"] == [0, OUT_OF_MEMORY]  # a context uses some
    said = client(two, str(GIB), str(2 * GIB))
    assert (said["multiprocessors"], said["PINNED_DEVICE_MEM_LIMIT"]) == (24, "0=2048M")
    assert said["allocations"] == [0, OUT_OF_MEMORY]
    lower = client(two, env={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "12.5"})
    assert (lower["multiprocessors"], lower["ACTIVE_THREAD_PERCENTAGE"]) == (6, "12.5"), "less is its own affair"
    assert sorted(status(host)["containers"]) == sorted((one.id, two.id))


def test_sum_over_processes_stays_within_the_limit(host: Node, container: Callable[..., Container]) -> None:
    """MPS limits each process; the shim still enforces the container's total."""
    start(host)
    one = container("runtime", "4Gi").start()
    command = ["runc", "--root", str(one.bundle / "runtime"), "exec", one.id, *CLIENT, "hold", str(2 * GIB)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdin and first.stdout
        assert json.loads(first.stdout.readline())["allocations"] == [0]
        assert len(status(host)["clients"]) == 1
        assert client(one, str(2 * GIB))["allocations"] == [OUT_OF_MEMORY]
        first.stdin.close()
    assert client(one, str(2 * GIB))["allocations"] == [0]


def test_daemon_death_is_an_error_and_gives_no_unlimited_client(
    host: Node, container: Callable[..., Container], way: str
) -> None:
    pid = start(host)
    one = container(way).start()
    assert client(one)["cuInit"] == 0
    os.kill(pid, signal.SIGKILL)
    reap_zombies()
    said = client(one, env={"CUDA_MPS_PIPE_DIRECTORY": "/none"})
    assert said["cuInit"] == CONNECTION_FAILED and said["PIPE_DIRECTORY"] == "/none"
    row = status(host, 1)
    assert (row["state"], row["restart"]) == ("dead", [one.id])
    found = finding(host, "MPS")
    assert found.result == "fail" and f"(pid {pid}) has died; programs get errors in {one.id}" in found.detail
    with pytest.raises(RuntimeFailed, match=f"control daemon .pid {pid}. has died"):
        container(way).create()
    start(host)
    assert client(one)["multiprocessors"] == 15, "programs that begin now find the new one"
    row = status(host, 1)
    assert (row["state"], row["restart"]) == ("running", [one.id])
    found = finding(host, "MPS")
    assert found.result == "warn" and f"is not the one that {one.id} began with" in found.detail
    one.delete()
    assert finding(host, "MPS").detail == "runs on GPU 0, at most 100%, for 0 containers"


def test_driver_initialised_without_the_daemon_stays_refused(host: Node, container: Callable[..., Container]) -> None:
    """The daemon dies between the shim's check and the driver's. The driver continues without it and never checks
    again, so a daemon that is there at the next attempt changes nothing."""
    pid = start(host)
    one = container("runtime").start()
    os.kill(pid, signal.SIGKILL)
    reap_zombies()
    control = host.state / "mps" / UUID / "share" / "control"
    control.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(control))
    listener.listen(0)  # room for the shim, which checks first; the driver waits outside
    command = ["runc", "--root", str(one.bundle / "runtime"), "exec", one.id, *CLIENT, "again"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdin and program.stdout
        assert select.select([listener], [], [], 30)[0]
        listener.close()
        assert json.loads(program.stdout.readline()) == CONNECTION_FAILED
        start(host)
        program.stdin.write("\n")
        program.stdin.close()
        assert json.loads(program.stdout.readline())["cuInit"] == CONNECTION_FAILED
    assert client(one)["multiprocessors"] == 15


WORDLESS = ("0x1E", "1e1", " 12", "12 ", "12.", "nan", "inf", "-1", "0", "0.5", "+12", "30.5", "31", "0012", "", "12,5")
SPELLINGS = {**dict.fromkeys(WORDLESS, "30"), "30.0": "30.0", "12.5": "12.5"}


def test_ambiguous_percentage_is_not_passed_on(host: Node, container: Callable[..., Container]) -> None:
    start(host)
    one = container("hook").start()
    script = 'for own in "$@"; do CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$own ' + " ".join(CLIENT) + "; done"
    done = one.exec("sh", "-c", script, "sh", *SPELLINGS)
    said = [json.loads(line)["ACTIVE_THREAD_PERCENTAGE"] for line in done.stdout.splitlines()]
    assert dict(zip(SPELLINGS, said)) == SPELLINGS


def test_leftovers_of_tenants_do_not_block_the_daemon_s_start(
    host: Node, container: Callable[..., Container], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leftovers in the /dev/shm that stays, forged identities, and the variable in an administrator's shell."""
    pid, folder = start(host), host.state / "mps" / UUID
    one = container("hook").start()
    assert one.exec("mkdir", "-p", "/dev/shm/a/b", "/dev/shm/empty").returncode == 0
    assert one.exec("ln", "-s", "/", "/dev/shm/root").returncode == 0
    os.kill(pid, signal.SIGKILL)
    reap_zombies()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(folder / "pipe"))
    words = ["runc", "--root", str(one.bundle / "runtime"), "exec", "--env", f"CUDA_MPS_PIPE_DIRECTORY={folder}/pipe"]
    name = "/tmp/nvidia-cuda-mps-control"
    words += [one.id, "sh", "-c", f"ln -s /bin/sh {name}; exec {name} -c 'echo; read line' -d"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as forger:
        assert forger.stdin and forger.stdout
        assert forger.stdout.readline() == b"\n"
        start(host)
        assert forger.poll() is None
        forger.stdin.close()
        assert forger.wait(30) == 1  # end of file, not a signal
    assert [name for name in os.listdir(folder / "shm") if not name.startswith("cuda.shm.")] == []
    assert client(one)["multiprocessors"] == 15


def test_other_users_of_the_host_cannot_connect_to_the_daemon(host: Node, container: Callable[..., Container]) -> None:
    """A user that connects could set the daemon's defaults. A strict umask must not exclude a container's user."""
    folder = host.state / "mps" / UUID
    code = "import socket, sys; socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(sys.argv[1])"

    def reaches(name: str) -> bool:
        words = ["/usr/bin/python3", "-c", code, str(folder / name / "control")]
        return subprocess.run(words, user=1000, group=1000, extra_groups=[], capture_output=True).returncode == 0

    start(host)
    assert not reaches("pipe") and not reaches("share")
    assert host.cli("mps", "stop").returncode == 0
    umask = os.umask(0o077)
    try:
        start(host, "--uid", "1000")
    finally:
        os.umask(umask)
    assert reaches("pipe"), "where its server has to"
    assert client(container("hook", user=(1000, 1000)).start())["multiprocessors"] == 15


def test_only_granted_containers_see_the_pipe_directory(
    host: Node, container: Callable[..., Container], way: str
) -> None:
    """A container of GPU 1 cannot use GPU 0's pipe; containers with a pipe cannot use root's socket."""
    start(host)
    other = {"GPUSHARE_DEVICES": "1", "GPUSHARE_BACKEND": "shim", "CUDA_MPS_PIPE_DIRECTORY": PIPE}
    stranger = container(way, env=other).start()
    mine = container(way).start()
    assert stranger.exec("ls", "-A", "/usr/lib/gpushare/mps").stdout == ""
    assert client(stranger)["multiprocessors"] == 48
    assert mine.exec("ls", "-A", PIPE).stdout.split() == ["control", "log"]
    assert mine.exec("rm", f"{PIPE}/control").returncode != 0
    files = [one.exec("ls", "/dev/shm").stdout.split() for one in (mine, stranger)]
    assert len(files[0]) == 1 and files[0][0].startswith("cuda.shm.") and files[1] == []


def test_containers_of_a_second_user_are_refused(host: Node, container: Callable[..., Container]) -> None:
    """Clients of another user would wait for this user's to end, so they get an error instead."""
    start(host, "--uid", "1000")
    with pytest.raises(RuntimeFailed, match="serves one user at a time, uid 1000, and this container runs as uid 0"):
        container("hook").create()
    one = container("hook", user=(1000, 1000)).start()
    assert client(one)["multiprocessors"] == 15
    assert client(one, user="1001")["cuInit"] == CONNECTION_FAILED


def test_stop_with_containers_is_refused_unless_forced(host: Node, container: Callable[..., Container]) -> None:
    start(host)
    one = container("runtime").start()
    ready = host.state / "mps" / UUID / "ready"
    for text in (ready.read_text(), '{"version": 2}', ""):
        ready.write_text(text)  # with any content: the daemon runs and serves
        refused = host.cli("mps", "stop")
        assert refused.returncode == 75 and one.id in refused.stderr
        assert client(one)["cuInit"] == 0
    assert host.cli("mps", "stop", "--force").returncode == 0
    assert client(one)["cuInit"] == CONNECTION_FAILED
    start(host)
    assert client(one)["cuInit"] == 0


def test_changed_limit_applies_to_new_programs(host: Node, container: Callable[..., Container]) -> None:
    """MPS reads a client's percentage once: later programs have the new one."""
    start(host)
    one = container("hook").start()
    command = ["runc", "--root", str(one.bundle / "runtime"), "exec", one.id, *CLIENT, "child"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin and parent.stdout and parent.stdout.readline() == "0\n"
        assert host.cli("limit", "set", one.id, "--compute", "50").returncode == 0
        parent.stdin.write("\n")
        parent.stdin.close()
        assert json.loads(parent.stdout.readline())["multiprocessors"] == 24, "a child has its own percentage"
    assert client(one)["multiprocessors"] == 24
    assert host.cli("limit", "set", one.id, "--compute-mode", "soft").returncode != 0
