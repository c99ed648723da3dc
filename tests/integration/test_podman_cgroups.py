"""Containers without their own cgroup: no start has a share, and no device rule is written into the caller's cgroup,
where it would stay."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpushare.core.errors import KernelError
from gpushare.system import bpf, cgroup

from tests.integration.device_matrix import GRANTED, View
from tests.integration.engines import runtime_path
from tests.integration.podman_host import TWO_GIB
from tests.support.engines.base import Result, Want
from tests.support.engines.podman import IMAGE, Podman
from tests.support.host import Node
from tests.support.rootfs import run
from tests.support.runc import Container, RuntimeFailed

VIEWS = {
    "v1": "umount /sys/fs/cgroup/unified",
    "hybrid": "mountpoint -q /sys/fs/cgroup/unified",
    "v2": "umount -R /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup",
}
DEVICES = Path("/sys/fs/cgroup/devices")
ORDINARY = ("c 1:* rwm", "c 5:* rwm", "c 136:* rwm", "c *:* m", "b *:* m")  # nothing of NVIDIA's


@pytest.fixture(params=sorted(VIEWS))
def view(request: pytest.FixtureRequest) -> Iterator[View]:
    made = View(VIEWS[request.param])
    yield made
    made.close()


def rules_of(v1: str, v2: str) -> Any:
    """All device rules of these two directories."""
    ids: Any = bpf._attached(os.open(v2, os.O_RDONLY | os.O_CLOEXEC), v2)[0] if v2 else None
    return [Path(v1, "devices.list").read_text() if v1 else None, ids]


@pytest.mark.parametrize("above", [False, True], ids=["its caller's", "one above its caller's"])
def test_caller_s_cgroup_gets_no_rule(view: View, above: bool) -> None:
    """The process is in the caller's cgroup, or the caller is in a cgroup below it."""

    def body() -> list[Any]:
        v1, v2 = cgroup.find_cgroups(os.getpid())
        outer = [f"{one}/gs-outer-{os.getpid()}" for one in (v1, v2) if one]
        inner = [f"{one}/inner" for one in outer] if above else outer
        child = os.fork()
        if child == 0:
            signal.pause()
        try:
            for made in dict.fromkeys([*outer, *inner]):
                os.mkdir(made)
            for directory, pid in (*((one, child) for one in outer), *((one, os.getpid()) for one in inner)):
                Path(directory, "cgroup.procs").write_text(str(pid))
            for one in outer if v1 else ():
                if Path(one, "devices.deny").exists():
                    Path(one, "devices.deny").write_text("c 195:* rwm")
            theirs = cgroup.find_cgroups(child)
            before = rules_of(*theirs)
            try:
                cgroup.allow_devices(child, GRANTED)
                said = "allowed"
            except KernelError as error:
                said = str(error)
            return [said, before, rules_of(*theirs)]
        finally:
            for directory in (v1, v2):
                if directory:
                    Path(directory, "cgroup.procs").write_text(str(os.getpid()))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            for made in dict.fromkeys([*inner, *outer]):
                os.rmdir(made)

    said, before, after = view.run(body)
    assert "no cgroup of its own" in said and "--cgroups=disabled" in said
    assert before == after


@contextlib.contextmanager
def caller(podman: Podman) -> Iterator[Path]:
    """A cgroup that allows no GPU, like a session's or a service's; podman starts containers in it."""
    directory = DEVICES / f"gs-caller-{os.getpid()}"
    directory.mkdir()
    try:
        (directory / "devices.deny").write_text("a")
        for rule in ORDINARY:
            (directory / "devices.allow").write_text(rule)
        yield directory
    finally:
        directory.rmdir()


def run_in(directory: Path, podman: Podman, *options: str) -> Result:
    words = podman.words("run", "--rm", *options, *podman.options(Want(env=TWO_GIB), "shared"), IMAGE, "true")
    script = f'echo $$ >{directory}/cgroup.procs; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        env=podman.environment(),
    )
    podman.remove("shared")
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def without_cgroups(podman: Podman) -> Iterator[Podman]:
    """A podman whose runtime is named crun: podman starts containers without a cgroup with no other name."""
    file = podman._directory / "containers.conf"
    before = file.read_text()
    if podman.way == "runtime":
        lines = [line for line in before.splitlines() if not line.startswith("crun = ")]
        text = "\n".join(lines).replace('runtime = "gpushare"', 'runtime = "crun"').replace("gpushare = [", "crun = [")
        file.write_text(text + "\n")
    yield podman
    file.write_text(before)


@pytest.mark.parametrize("_podman", ["podman with crun, hook", "podman with crun, runtime"], indirect=True)
def test_podman_without_cgroups_is_refused(without_cgroups: Podman) -> None:
    podman = without_cgroups
    with caller(podman) as directory:
        before = (directory / "devices.list").read_text()
        done = run_in(directory, podman, "--cgroups=disabled")
        assert (directory / "devices.list").read_text() == before
        assert done.code != 0, "it has started"
        kept = max((podman.node.state / "errors").iterdir(), key=lambda path: path.stat().st_mtime_ns).read_text()
        assert "no cgroup of its own" in kept and "Traceback" not in kept
        podman.node.cli("prune")
        assert podman.node.leases() == []


@pytest.fixture
def only_v1() -> Iterator[None]:
    """Hide cgroup v2: crun refuses a host with both versions."""
    unified = "/sys/fs/cgroup/unified"
    hybrid = os.path.ismount(unified)
    if hybrid:
        run("umount", unified)
    yield
    if hybrid:
        run("mount", "-t", "cgroup2", "none", unified)


@pytest.mark.parametrize("way", ["hook", "runtime"])
def test_container_in_the_caller_s_cgroup_is_refused(
    only_v1: None, make_node: Callable[..., Node], simhost: Path, tmp_path: Path, way: str
) -> None:
    """crun makes no cgroup when told so, with hook or runtime."""
    node = make_node(simhost, runtime=runtime_path("crun"))
    words = node.way(way)
    low = words.pop("runtime", ("crun",))
    one = Container(tmp_path, ["true"], env=TWO_GIB, runtime=(*low, "--cgroup-manager=disabled"), **words)
    with one, pytest.raises(RuntimeFailed):
        one.start()
    assert "no cgroup of its own" in (node.state / "errors" / one.id).read_text()
