"""The mount table with arbitrary names: any user who may mount chooses some of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from gpushare.system import mountns

NAMES = ["a\rb", "a\nb", "a b\tc", "a\\040b", "a\r36 35 0:1 / /proc rw - proc proc rw", "\N{SNOWMAN}\u2028\x85"]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_odd_mount_point_is_one_entry(tmp_path: Path, name: str) -> None:
    before = len(mountns.read_mounts())
    point = tmp_path / name.replace("/", "-")
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "gpushare-test", point], check=True)
    try:
        entries = mountns.read_mounts()
        assert len(entries) == before + 1
        assert [entry.fstype for entry in entries if entry.point == str(point)] == ["tmpfs"]
    finally:
        subprocess.run(["umount", point], check=True)


def interrupted_at(number: int, pid: int) -> int:
    """Work in the namespace of `pid`, interrupted by an exception at this bytecode of mountns.py, as by the handler of
    a signal. Return 0: interrupted, and back in our namespace, root and directory; 1: never interrupted; 2: elsewhere.
    """
    left = number
    namespace = mountns.Namespace(pid)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != mountns.__file__:
            return None
        frame.f_trace_opcodes = True
        left -= event == "opcode"
        if left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    def places() -> list[tuple[int, int]]:
        return [(one.st_dev, one.st_ino) for one in map(os.stat, ("/proc/self/ns/mnt", "/proc/self/root", "."))]

    ours, code = places(), 1
    sys.settrace(trace)
    try:
        namespace.inside(places)
    except KeyboardInterrupt:
        code = 0
    sys.settrace(None)
    return code if places() == ours else 2


def test_signal_at_any_bytecode_leaves_no_process_in_the_container(tmp_path: Path) -> None:
    words = ["unshare", "-m", "sh", "-c", "echo ready; read end"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tenant:
        assert tenant.stdin and tenant.stdout and tenant.stdout.readline()
        codes = [0]
        while codes[-1] == 0:
            child = os.fork()
            if child == 0:
                try:
                    os.chdir(tmp_path)
                    os._exit(interrupted_at(len(codes) - 1, tenant.pid))
                finally:
                    os._exit(3)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        tenant.stdin.close()
    assert codes[-1] == 1 and len(codes) > 40
