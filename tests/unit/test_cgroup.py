"""Cgroups that hold one container only, and the device rules that they have."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from gpushare.system import cgroup


@pytest.mark.parametrize(
    ("directory", "other", "holds"),
    [
        ("/sys/fs/cgroup/a", "/sys/fs/cgroup/a", True),
        ("/sys/fs/cgroup/a", "/sys/fs/cgroup/a/b", True),
        ("/sys/fs/cgroup/a", "/sys/fs/cgroup/a1", False),
        ("/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a", False),
        ("/", "/a", True),
        ("", "/a", False),
    ],
)
def test_cgroup_holds_itself_and_those_below(directory: str, other: str, holds: bool) -> None:
    assert cgroup.holds(directory, other) is holds


@pytest.mark.parametrize(
    ("rule", "allowed"),
    [
        ("a *:* rwm", True),
        ("c 195:* rwm", True),
        ("c 195:0 rw", True),
        ("c *:0 rw", True),
        ("c 195:0 r", False),  # the rest is missing, so the whole rule is added, and taken back at an undo
        ("c 195:0 m", False),
        ("b 195:0 rwm", False),
        ("c 195:1 rw", False),
        ("c 1:0 rw", False),
    ],
)
def test_rule_of_cgroup_v1_that_is_there_is_neither_added_nor_undone(tmp_path: Path, rule: str, allowed: bool) -> None:
    for name in ("devices.allow", "devices.deny"):
        (tmp_path / name).touch()
    (tmp_path / "devices.list").write_text(f"c 1:3 rwm\n{rule}\n")
    undo = cgroup._allow_v1(str(tmp_path), [(195, 0)])
    undo()
    written = [(tmp_path / name).read_text() for name in ("devices.allow", "devices.deny")]
    assert written == (["", ""] if allowed else ["c 195:0 rw"] * 2)


@pytest.mark.parametrize(
    ("stat", "room"),
    [
        ("anon 5\ninactive_file 30\nactive_file 7", 40),
        ("inactive_file 1\ntotal_cache 50\ntotal_inactive_file 30", 40),
        ("", 10),
    ],
)
def test_contents_of_files_leave_room_in_a_cgroup(monkeypatch: pytest.MonkeyPatch, stat: str, room: int) -> None:
    """They fill each cgroup whose container reads much, up to its limit; the kernel drops them when it must."""
    files = {"memory.max": ["100", "max"], "memory.current": ["90", "500"], "memory.stat": [stat, ""]}
    monkeypatch.setattr(cgroup, "_values", lambda pid, controller, v1_name, v2_name: files[v2_name])
    assert cgroup.memory_room(1) == room


def test_cgroup_of_many_processes_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "inf"]) as one, subprocess.Popen(["sleep", "inf"]) as other:
        read: list[int] = []

        def values(pid: int, *_: str) -> list[str]:
            read.append(pid)
            return ["THAWED"]

        monkeypatch.setattr(cgroup, "_values", values)
        try:
            assert cgroup.first_frozen([one.pid, other.pid]) == 0
            assert read == [one.pid]
            other.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WNOWAIT)
            assert cgroup.first_frozen([one.pid, other.pid]) == other.pid
        finally:
            one.kill()
            other.kill()
