"""Whether a process is alive: a container's init decides about its lease, and the tenant controls that program."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gpushare.system import procs

from tests.support.processes import slow_to_exit

FIRST_THREAD_ENDS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
print("ready", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


@contextmanager
def ended_main_thread() -> Iterator[procs.Process]:
    """A process with two threads, of which the main thread has ended. It is killed at the end, and not reaped."""
    with subprocess.Popen([sys.executable, "-ISsc", FIRST_THREAD_ENDS], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            while (found := procs.find(process.pid)) is not None and found.state != "Z":
                pass
            assert found is not None
            yield found
        finally:
            process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie without threads
        assert procs.find(process.pid) is None


def test_process_with_ended_main_thread_is_alive_until_last_thread() -> None:
    """Its stat line then shows "Z"; if it counted as dead, it would use memory without a lease."""
    with ended_main_thread() as found:
        assert found.threads == 2 and procs.alive(found.pid, found.start)


def test_process_that_exits_is_alive_until_it_has_ended() -> None:
    with slow_to_exit() as (pid, let_end):
        found = procs.find(pid)
        assert found is not None and not procs.is_exiting(pid)
        os.kill(pid, signal.SIGKILL)
        while not procs.is_exiting(pid):
            pass
        assert procs.alive(pid, found.start)
        let_end()
        while procs.alive(pid, found.start):
            pass
        assert procs.is_exiting(pid)


def test_one_running_thread_keeps_a_process_from_exiting() -> None:
    with ended_main_thread() as found:
        assert not procs.is_exiting(found.pid)


def test_process_with_openshift_s_hidden_mounts_sees_the_same_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """CRI-O has a mount namespace of its own there, which root pins at a path."""
    command = ["unshare", "--mount", "sh", "-c", "echo; read x"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        assert not procs.sees_same_files(process.pid)
        monkeypatch.setattr(procs, "_SAME_FILES", ("/no/such", f"/proc/{process.pid}/ns/mnt"))
        assert procs.sees_same_files(process.pid)


def test_cgroup_name_cannot_forge_another_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cgroup's name may have any character but a newline, and a tenant that may create cgroups chooses it."""
    monkeypatch.setattr(procs, "_read", lambda path: "0::/mine/a\r0::\x850::\u20280::/other\n".encode())
    assert procs.cgroup_of(1) == "/mine/a\r0::\x850::\u20280::/other"


@pytest.mark.parametrize("name", ["x", ") R 1 1 (", "a) Z 2 (b", "((((", "a b c d e f g h"])
def test_process_name_cannot_forge_start_time(name: str) -> None:
    """A process chooses its comm (prctl PR_SET_NAME), up to 15 bytes."""
    reader, writer = os.pipe()
    end_reader, end_writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(end_writer)
            ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)
            os.write(writer, b"x")
            os.read(end_reader, 1)
        finally:
            os._exit(0)
    os.read(reader, 1)
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        assert name.encode()[:15] in stat
        found = procs.find(pid)
        assert found is not None
        assert (found.pid, found.state) == (pid, "S") or found.state == "R"
        ticks = os.sysconf("SC_CLK_TCK")
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        assert uptime - 60 < found.start / ticks <= uptime
    finally:
        os.close(end_writer)
        os.waitpid(pid, 0)
        for fd in (reader, writer, end_reader):
            os.close(fd)
    assert procs.find(pid) is None


@pytest.mark.parametrize("line", [b"", b"1", b"1 (x", b"1 (x) S", b"x (x) " + b"1 " * 30, b"1 (x) S " + b"a " * 30])
def test_invalid_stat_line_is_no_process(line: bytes) -> None:
    assert procs.parse_stat(line) is None


def test_invalid_pid_is_no_process() -> None:
    assert procs.find(0) is None
    assert procs.find(-1) is None
    assert procs.find(1 << 40) is None
    assert procs.cgroup_of(1 << 40) == ""
