"""Processes that use a GPU without gpushare's library: which are found, and what is done with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpushare.core import constants
from gpushare.core.model import Lease
from gpushare.gpu.nvml_usage import Gpu, Process
from gpushare.monitor import overuse
from gpushare.monitor import unlimited as watching
from gpushare.state import leftover, unlimited
from gpushare.system import procs

from tests.support.host import logfmt
from tests.unit import pure

# Opens and maps what the arguments name, prints its pid, and waits for the end of its input. `fork`: so does a child
PROGRAM = """
import mmap, os, sys
kept = []
for word in sys.argv[1:]:
    what, _, path = word.partition("=")
    if what == "open":
        kept.append(os.open(path, os.O_RDWR))
    elif what == "map":
        with open(path, "rb") as file:
            kept.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    elif what == "fork":
        os.fork()
    elif what == "exec":
        os.execvp("sleep", ["sleep", "inf"])
os.write(1, b"%d\\n" % os.getpid())
sys.stdin.read()
"""
Run = Callable[..., int]


class Host:
    """A host with nodes, and a container's files at their usual paths below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        (folder / "dev").mkdir()
        for name in ("nvidia-uvm", "nvidia0", "nvidiactl"):
            (folder / "dev" / name).touch()
        self.usage = folder / constants.USAGE.lstrip("/")
        self.usage.parent.mkdir(parents=True)
        self.cuda = folder / "conda/lib/libcuda.so.1"
        self.cuda.parent.mkdir(parents=True)
        for path in (self.usage, self.cuda):
            path.write_bytes(bytes(4096))

    def node(self, name: str) -> str:
        return f"open={self.root / 'dev' / name}"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """run(*words) -> the pid of a process of container c1."""
    running: list[subprocess.Popen[str]] = []
    pids: list[int] = []

    def start(*words: str) -> int:
        one = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        running.append(one)
        assert one.stdout is not None
        if "exec" in words:
            while procs.name(one.pid) != "sleep":
                pass
        else:
            pids.extend(int(one.stdout.readline()) for _ in range(2 if "fork" in words else 1))
        pids.append(one.pid)
        return one.pid

    monkeypatch.setattr(leftover, "pids", lambda lease: pids)
    yield start
    for one in running:
        one.kill()
        one.communicate()
        one.wait()


def lease() -> Lease:
    return pure.lease(pure.share(0, 0, 1 << 30))


def found(listed: Any = None) -> list[int]:
    return sorted(one.process.pid for one in unlimited.find([lease()], listed or {}))


def test_process_with_another_libcuda_is_found(host: Host, run: Run) -> None:
    pid = run(host.node("nvidia-uvm"), f"map={host.cuda}")
    (one,) = unlimited.find([lease()])
    assert (one.id, one.process.pid, one.library) == ("c1", pid, str(host.cuda))
    assert one.text == (
        f'process {pid} ("{procs.name(pid)}") uses the GPU without a limit: it loaded "{host.cuda}"; take that '
        "directory out of its LD_LIBRARY_PATH"
    )


def test_text_of_the_container_is_quoted(host: Host, run: Run) -> None:
    library = host.cuda.with_name("libcuda.so.1\n$(reboot)\udcff")
    library.write_bytes(bytes(4096))
    run(host.node("nvidia-uvm"), f"map={library}")
    (one,) = unlimited.find([lease()])
    assert "\n" not in one.text and "$" not in one.text
    one.text.encode()


def test_process_without_libcuda_is_found(host: Host, run: Run) -> None:
    """As OpenCL and Vulkan reach the driver."""
    run(host.node("nvidia-uvm"))
    (one,) = unlimited.find([lease()])
    assert one.library == "" and one.text.endswith("uses the GPU without a limit: it does not use libcuda")


@pytest.mark.parametrize("case", ["nvidia-smi", "before cuInit", "with the shim", "forked", "after exec", "in cuInit"])
def test_other_processes_are_not_found(host: Host, run: Run, case: str) -> None:
    """`in cuInit`: the shim maps the file before it calls the driver."""
    usage = f"map={host.usage}"
    words = {
        "nvidia-smi": (host.node("nvidiactl"), host.node("nvidia0")),  # nvidia-persistenced opens the same
        "before cuInit": (f"map={host.cuda}",),
        "with the shim": (usage, f"map={host.cuda}", host.node("nvidia-uvm"), host.node("nvidia0")),
        "forked": (usage, host.node("nvidia-uvm"), "fork"),
        "after exec": (host.node("nvidia-uvm"), "exec"),
        "in cuInit": (usage, host.node("nvidia-uvm")),
    }
    run(*words[case])
    assert found() == []


def test_process_of_the_driver_s_list_is_found(host: Host, run: Run) -> None:
    """Only if it has a node of the driver open: the list can be old, and its pids be reused."""
    zero = run("open=/dev/zero")
    assert found({"c1": {zero}}) == []
    shimmed = run(f"map={host.usage}", host.node("nvidia-uvm"))
    assert found({"c1": {shimmed}}) == []
    closed = run(host.node("nvidia-uvm"))
    assert found({"c1": {closed}}) == [closed]


def test_files_that_a_container_serves_itself_are_not_waited_for(
    host: Host, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """stat() of a file in its FUSE file system would wait until the container answers."""
    pid = run(host.node("nvidia-uvm"))

    def stat(*_: object, **__: object) -> None:
        raise AssertionError("stat")

    with monkeypatch.context() as patched:
        for name in ("stat", "lstat", "fstat"):
            patched.setattr(os, name, stat)
        assert [one.process.pid for one in unlimited.find([lease()])] == [pid]


def test_container_with_very_many_processes_takes_a_bounded_time(
    host: Host, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        run(host.node("nvidia-uvm"))
    examined, now_s = unlimited._examined, [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: now_s[0])

    def slow(*arguments: Any) -> Any:
        one = examined(*arguments)
        now_s[0] += 0.3
        return one

    monkeypatch.setattr(unlimited, "_examined", slow)
    assert len(unlimited.find([lease()])) == 1


def test_process_with_very_many_files_takes_a_bounded_time(
    host: Host, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = run(host.node("nvidia-uvm"))
    assert unlimited._is_open(pid, False, time.thread_time() + 9) and not unlimited._is_open(pid, False, 0.0)


def test_mappings_are_read_in_bounded_memory(host: Host, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container chooses the number and length of the paths; gigabytes are possible."""
    run(host.node("nvidia-uvm"), f"map={host.cuda}")
    assert len(found()) == 1
    monkeypatch.setattr(unlimited, "_MAX_MAPS_BYTES", 100)
    assert found() == []


def test_container_that_makes_a_reader_wait_delays_the_others_briefly(
    host: Host, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page fault that the container does not answer holds the lock of its mappings."""
    pid, library = run(host.node("nvidia-uvm")), unlimited._other_library
    answered, readers = threading.Event(), []

    def blocked(pid: int) -> Any:
        if not answered.is_set():
            readers.append(pid)
            answered.wait(60)
        return library(pid)

    monkeypatch.setattr(unlimited, "_other_library", blocked)
    monkeypatch.setattr(unlimited, "_LONGEST_WAIT_S", 0.01)
    first, second = lease(), lease()._replace(id="c2")
    assert unlimited.find([first]) == unlimited.find([first]) == () and readers == [pid], "one reader waits"
    waiting = unlimited._waiting["c1"]
    answered.set()
    monkeypatch.setattr(unlimited, "_LONGEST_WAIT_S", 60)
    assert "c2" in {one.id for one in unlimited.find([first, second])}
    waiting.join()
    assert {one.id for one in unlimited.find([first, second])} == {"c1", "c2"}


def test_many_containers_that_make_a_reader_wait_share_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = [0.0]

    class Waiting:
        def __init__(self, **_: object) -> None: ...
        def start(self) -> None: ...

        def join(self, timeout: float) -> None:
            clock_s[0] += timeout

        def is_alive(self) -> bool:
            return True

    monkeypatch.setattr(threading, "Thread", Waiting)
    monkeypatch.setattr(time, "monotonic", lambda: clock_s[0])
    monkeypatch.setattr(unlimited, "_waiting", {})
    assert unlimited.find([lease()._replace(id=f"c{number}") for number in range(100)]) == ()
    assert clock_s[0] < 2 * 100 / 10


def test_pids_of_the_driver_belong_to_their_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overuse, "Owners", lambda leases: {1: "c1", 2: "c1", 3: None}.get)
    gpu = Gpu(None, None, None, None, None, (Process(1, 5), Process(2, None), Process(3, 5)))
    assert watching.of_driver([lease()], {"a": gpu, "b": gpu}) == {"c1": {1, 2}, "": {3}}
    assert watching.of_driver([lease()], None) == {}


def test_unlimited_process_is_logged_once_and_only_it_is_killed(host: Host, run: Run, tmp_path: Path) -> None:
    other = run(f"map={host.usage}", host.node("nvidia-uvm"))
    pid = run(host.node("nvidia-uvm"), f"map={host.cuda}")
    log, watch = tmp_path / "log", watching.Watch()

    def round_(action: str = overuse.REPORT) -> None:
        watch.follow([lease()], unlimited.find([lease()]), str(log), action)

    round_()
    assert not log.exists(), "it may be on its way to another program"
    for _ in range(3):
        round_()
    (line,) = log.read_text().splitlines()
    fields = logfmt(line)
    assert fields["decision"] == "unlimited" and fields["pid"] == str(pid) and fields["action"] == "report"
    assert fields["library"] == str(host.cuda)
    round_(overuse.STOP)
    assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT).si_status == signal.SIGKILL  # type: ignore[union-attr]
    assert procs.find(other) is not None


def test_pids_of_a_container_are_those_of_its_cgroups(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "cgroup.procs").write_text("1\n2\n")
    (tmp_path / "below/cgroup.procs").write_text("3\n")
    own = lease()._replace(cgroup_dir=str(tmp_path), cgroup_id=tmp_path.stat().st_ino)
    assert leftover.pids(own) == [1, 2, 3]
    for other in (own._replace(cgroup_id=own.cgroup_id + 1), own._replace(cgroup_id=0), own._replace(cgroup_dir="/x")):
        assert leftover.pids(other) == []
