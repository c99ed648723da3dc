"""The warm-up of the cgroup lock (hook/launcher/cgroup_lock_warmup.c). Here cgroup.procs is a FIFO."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from gpushare.config import oci_runtime
from gpushare.core.model import Config

from tests.support import host, processes
from tests.support.host import Node
from tests.support.runc import Container

ASKS, DOES_NOT = '{"env": "GPUSHARE_MEMORY=1Gi"}', "{}"
WAIT_S = 30
MakeContainer = Callable[..., Container]


class Scene(NamedTuple):
    """A launcher with scripts as its Python and low-level runtime, on a host with its own cgroups."""

    directory: Path
    procs: Path  # the FIFO

    def script(self, name: str, text: str) -> None:
        path = self.directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def start(
        self, config: str, stdout: int | None = None, before: str = "", ignored: int | None = None
    ) -> subprocess.Popen[bytes]:
        """Start the launcher. `before`: shell commands before its exec; `ignored`: a signal that it ignores."""
        (self.directory / "bundle" / "config.json").write_text(config)
        own = [f"--gpushare-config={self.directory / 'config.yaml'}", f"--gpushare-state={self.directory / 'state'}"]
        create = ["create", "--bundle", str(self.directory / "bundle"), "a"]
        there = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
        mount = before or f'mount --bind {self.directory / "cgroup"} /sys/fs/cgroup && exec "$@"'
        program = str(self.directory / "bin" / "gpushare-runtime")

        def prepare() -> None:
            if ignored:
                signal.signal(ignored, signal.SIG_IGN)

        return subprocess.Popen([*there, mount, "sh", program, *own, *create], stdout=stdout, preexec_fn=prepare)


def own_cgroups() -> list[str]:
    """Our directory in each hierarchy of /sys/fs/cgroup."""
    parts = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    return [f"{controllers.removeprefix('name=')}/{path}" for _, controllers, path in parts]


@pytest.fixture(params=["first", "last"])
def scene(tmp_path: Path, request: pytest.FixtureRequest) -> Scene:
    processes.become_subreaper()
    procs = tmp_path / "cgroup" / own_cgroups()[0 if request.param == "first" else -1].lstrip("/") / "cgroup.procs"
    procs.parent.mkdir(parents=True)
    os.mkfifo(procs)
    for name in ("bin", "state", "state/containers", "bundle"):
        (tmp_path / name).mkdir()
    shutil.copy(host.BIN / "gpushare-runtime", tmp_path / "bin")
    (tmp_path / "config.yaml").write_text("version: 1\n")
    one = Scene(tmp_path, procs)
    one.script("low", "exit 43")
    oci_runtime.remember(str(tmp_path / "config.yaml"), str(tmp_path / "state"), Config(runtime=str(tmp_path / "low")))
    return one


def children() -> list[int]:
    return [int(pid) for pid in Path("/proc/thread-self/children").read_text().split()]


@pytest.mark.parametrize("ignored", [None, signal.SIGCHLD])
def test_warmup_writes_until_the_start_ends(scene: Scene, ignored: int | None) -> None:
    """It writes the pid of an ended process repeatedly, and stops with the start. A user locks what all can read."""
    ask = f'exec <{scene.procs} && read a && read b && test "$a" = "$b" && grep "^State:.Z" /proc/$a/status && exit 42'
    scene.script("libexec/gpushare-runtime", ask)
    before = children()
    with open(scene.directory / "state" / oci_runtime.FILE) as readable:
        fcntl.flock(readable, fcntl.LOCK_EX)
        start = scene.start(ASKS, ignored=ignored)
        assert start.wait(WAIT_S) == 42
    for pid in set(children()) - set(before):
        assert processes.wait_exit(pid, WAIT_S) is not None


def test_warmup_keeps_no_descriptor_of_the_engine(scene: Scene) -> None:
    """An engine reads its runtime's output until every writer has closed the pipe."""
    scene.script("libexec/gpushare-runtime", "echo said")
    before = children()
    start = scene.start(ASKS, subprocess.PIPE)
    try:
        assert start.communicate(timeout=WAIT_S)[0] == b"said\n"  # the warm-up still waits for a reader of the FIFO
        (waits,) = set(children()) - set(before)
    finally:
        reader = os.open(scene.procs, os.O_RDONLY | os.O_NONBLOCK)
    assert processes.wait_exit(waits, WAIT_S) is not None
    os.close(reader)


@pytest.mark.parametrize("there", [True, False], ids=["may not be written", "is not there"])
def test_warmup_does_nothing_without_a_cgroup(scene: Scene, there: bool) -> None:
    scene.procs.unlink()
    if there:
        scene.procs.mkdir()
    scene.script("libexec/gpushare-runtime", "exit 42")
    before = children()
    assert scene.start(ASKS).wait(WAIT_S) == 42
    for pid in set(children()) - set(before):
        assert processes.wait_exit(pid, WAIT_S) is not None


def test_container_without_request_starts_no_warmup(scene: Scene) -> None:
    before = children()
    assert scene.start(DOES_NOT).wait(WAIT_S) == 43
    assert set(children()) == set(before)


def test_concurrent_starts_share_one_warmup(scene: Scene) -> None:
    """The lock also blocks forks, so one warm-up at a time must suffice."""
    scene.script("libexec/gpushare-runtime", "exit 42")
    before = children()
    reader = os.open(scene.procs, os.O_RDONLY | os.O_NONBLOCK)
    try:
        other = os.open(scene.directory / "state" / "containers", os.O_RDONLY)
        try:
            fcntl.flock(other, fcntl.LOCK_EX)
            assert scene.start(ASKS).wait(WAIT_S) == 42
            for pid in set(children()) - set(before):
                assert processes.wait_exit(pid, WAIT_S) == 0
        finally:
            os.close(other)
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)


@pytest.fixture
def own_group(tmp_path: Path) -> Iterator[Path]:
    """A cgroup of this test in cgroup2."""
    unified = tmp_path / "unified"
    unified.mkdir()
    subprocess.run(["mount", "-t", "cgroup2", "none", unified], check=True)
    group = unified / f"gpushare-warmup-{os.getpid()}"
    try:
        group.mkdir()
        yield group
    finally:
        group.rmdir()
        subprocess.run(["umount", unified], check=True)


def test_warmup_stays_in_its_own_cgroup(scene: Scene, own_group: Path) -> None:
    """In a cgroup namespace the own cgroup is "/", and the mount at /sys/fs/cgroup may have another root."""
    go = scene.directory / "go"
    os.mkfifo(go)
    scene.script("libexec/gpushare-runtime", f"read x <{go}; exit 42")
    before = children()
    enter = f"mount -t cgroup2 none /sys/fs/cgroup && echo $$ >/sys/fs/cgroup/{own_group.name}/cgroup.procs"
    start = scene.start(ASKS, before=f'{enter} && exec unshare --cgroup "$@"')
    try:
        with open(go, "w") as file:  # Python runs
            (helper,) = set(children()) - set(before) - {start.pid}
            os.waitid(os.P_PID, helper, os.WEXITED | os.WNOWAIT)
            seen = Path(f"/proc/{helper}/cgroup").read_text().splitlines()
            file.write("go\n")
    finally:
        assert start.wait(WAIT_S) == 42
    assert processes.wait_exit(helper, WAIT_S) == 0
    assert [line for line in seen if line.startswith("0::")] == [f"0::/{own_group.name}"]


def test_warmup_moves_no_process(container: MakeContainer, node: Node, tmp_path: Path) -> None:
    """A real start with this machine's cgroups: the written pid is that of an ended process of this start."""
    calls = tmp_path / "calls"
    strace = ("strace", "-D", "-ff", "-qq", "-e", "trace=write", "-y", "-o", str(calls))
    mine = own_cgroups()
    assert container(["true"], env={"GPUSHARE_MEMORY": "1Gi"}, runtime=node.runtime()).run() == 0  # makes the state
    with container(["true"], env={"GPUSHARE_MEMORY": "1Gi"}, prefix=strace, runtime=node.runtime()) as one:
        one.create()
    asked = [log.read_text(errors="replace") for log in tmp_path.glob("calls.*") if log.suffix[1:].isdigit()]
    form = r'write\(\d+<(.*)/cgroup.procs>, "(\d+)\\n", (\d+)\) = \3\b'
    (moves,) = [lines for log in asked if (lines := re.findall(form, log))]
    assert {os.path.normpath(path) for path, *_ in moves} < {os.path.normpath(f"/sys/fs/cgroup/{own}") for own in mine}
    ((who, _),) = {tuple(number) for _, *number in moves}
    assert (tmp_path / f"calls.{who}").read_text() == ""  # it made no write itself
