"""Who is alive: a container's init decides about its lease, and the tenant writes that program."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from gpushare import procs

FIRST_THREAD_ENDS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
print("ready", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_process_whose_first_thread_has_ended_lives_until_its_last() -> None:
    """Its stat line says "Z" from then on; taken for dead, it would keep its memory without a lease."""
    with subprocess.Popen([sys.executable, "-ISsc", FIRST_THREAD_ENDS], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            while (found := procs.find(process.pid)) is not None and found.state != "Z":
                pass
            assert found is not None and found.threads == 2
            assert procs.alive(process.pid, found.start)
        finally:
            process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie with nothing left in it
        assert procs.find(process.pid) is None


def test_name_of_a_cgroup_cannot_name_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a newline cannot be in its name; a tenant that may make cgroups chooses the rest."""
    monkeypatch.setattr(procs, "_read", lambda path: "0::/mine/a\r0::\x850::\u20280::/other\n".encode())
    assert procs.cgroup_of(1) == "/mine/a\r0::\x850::\u20280::/other"
