"""The mask that the hook mounts over /proc/driver/nvidia of real containers. A stand-in for the kernel's directory is
mounted on this run's /proc/driver, and in the container before the hook runs."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpushare.inject import proc_nvidia_mask
from gpushare.state import leases
from gpushare.system import mountns

from tests.integration.programs.interrupted_hook import write_adopt, write_before, write_runtime
from tests.integration.test_adopt import ALL, MakeContainer, calls, graphics, upper
from tests.integration.test_lifecycle import left
from tests.integration.test_procmask import GPUS, VERSION, files, make_driver_proc
from tests.support import driverhost
from tests.support.host import Node
from tests.support.kills import Kills
from tests.support.rootfs import run
from tests.support.runc import Container, RuntimeFailed

KERNELS = "/proc/driver"
GRANTED = "0000:01:00.0"  # the simulated host's GPU
EXPECTED = {
    "params": "ResmanDebugLevel: 4294967295\nDeviceFileMode: 438\nModifyDeviceFiles: 0\n",
    "version": VERSION,
    "registry": 'Binary: ""\n',
    f"gpus/{GRANTED}/information": f"Bus Location: {GRANTED}\n",
}
PEER = "mnt"
SHARED = f"""nsenter -t $pid -m mount --make-shared "$root/proc/driver" || exit 9
nsenter -t $pid -m mount --bind "$root/proc/driver" "$root/{PEER}" || exit 9
"""
NO_PROC = 'nsenter -t $pid -m umount "$root/proc/driver" || exit 9\n'


@pytest.fixture(autouse=True)
def driver() -> Iterator[None]:
    """Provide the kernel driver's directory with three GPUs."""
    run("mount", "-t", "tmpfs", "gpushare-test", KERNELS)
    try:
        make_driver_proc(Path(proc_nvidia_mask.PROC_DIR), GPUS)
        yield
    finally:
        run("umount", KERNELS)


@pytest.fixture
def make(container: MakeContainer, node: Node, tmp_path: Path) -> Callable[..., Container]:
    """make(at=0, before="", inject="", name="c", env={}) -> a container with the driver's /proc. Its adoption is killed
    at system call `at`, begins with the shell commands `before`, or has a failing system call."""

    def new(
        at: int = 0, before: str = "", inject: str = "", name: str = "c", env: dict[str, str] | None = None
    ) -> Container:
        adopt = write_adopt(tmp_path, at)
        if inject:
            adopt.write_text(adopt.read_text().replace("-qq ", f"-qq -e inject={inject} "))
        hook = tmp_path / f"with-driver-{name}"
        runtime = node.runtime(write_runtime(tmp_path, hook=hook))
        one = container(["true"], env={**ALL, **(env or {})}, name=name, runtime=runtime)
        mount = f'nsenter -t $pid -m mount --bind {KERNELS} "$root/proc/driver" || exit 9'
        write_before(hook, adopt, f"root={one.rootfs}\nstate={node.state}\n{mount}\n{before}")
        return one

    return new


def inside(one: Container, path: str = proc_nvidia_mask.PROC_DIR) -> str:
    return f"/proc/{one.pid}/root{path}"


def test_mask_shows_only_granted_gpus(make: Callable[..., Container], node: Node) -> None:
    """The container's /proc/driver is shared: a plain mount would propagate to every peer."""
    one = make(before=SHARED)
    one.create()
    assert files(inside(one)) == EXPECTED
    assert "suspend" in files(inside(one, f"/{PEER}/nvidia"))
    assert "suspend" in files(proc_nvidia_mask.PROC_DIR)
    with pytest.raises(OSError) as refused:
        open(f"{inside(one)}/new", "w")
    assert refused.value.errno == errno.EROFS
    lines = Path(f"/proc/{one.pid}/mountinfo").read_text().splitlines()
    (line,) = [line for line in lines if line.split()[4] == proc_nvidia_mask.PROC_DIR]
    assert set(line.split()[5].split(",")) >= {"ro", "nosuid", "nodev", "noexec"}
    assert line.split()[6] == "-"  # private
    lease = leases.find(str(node.state), one.id)
    assert lease is not None and lease.state == "held"
    assert not [path for path in upper(one) if path.endswith(".gpushare")]
    one.start()
    assert one.wait() == 0, one.stderr
    one.delete()
    assert left(node) == []


def test_container_without_the_drivers_proc_gets_no_mask(make: Callable[..., Container]) -> None:
    one = make(before=NO_PROC)
    one.create()
    assert not [entry for entry in mountns.read_mounts(str(one.pid)) if entry.point.startswith(KERNELS)]


@pytest.mark.parametrize("call", ["setns:when=1", "setns:when=2", "move_mount:when=4"])
def test_failing_system_call_refuses_the_container(make: Callable[..., Container], node: Node, call: str) -> None:
    """Entering the container's mount namespace, leaving it, or mounting there fails."""
    one = make(inject=call.replace(":", ":error=EPERM:"))
    with pytest.raises(RuntimeFailed, match="Operation not permitted"):
        one.create()
    assert left(node) == []
    assert not [path for path in upper(one) if path.endswith(".so.1")]


def test_failure_of_the_last_mount_leaves_the_image_unchanged(
    make: Callable[..., Container], simhost: Path, tmp_path: Path
) -> None:
    """The hook has already made links and their directories."""
    driverhost.add_graphics(simhost)
    env = {"NVIDIA_DRIVER_CAPABILITIES": "all"}
    probe = make(name="probe", env=env)
    graphics(probe)
    probe.create()
    last = len([call for call in calls(tmp_path) if call.startswith("move_mount(")])
    probe.delete()
    one = make(inject=f"move_mount:error=EPERM:when={last}", env=env)
    graphics(one)
    with pytest.raises(RuntimeFailed, match="Operation not permitted"):
        one.create()
    made = [call for call in calls(tmp_path) if call.startswith(("symlinkat(", "mkdirat("))]
    assert any("gbm" in call and call.startswith("mkdirat(") for call in made)
    assert not [path for path in upper(one) if path.endswith(("gbm", ".so.1", "_gbm.so"))]


def test_adoption_with_a_mask_killed_at_any_call_leaves_nothing(
    make: Callable[..., Container], node: Node, tmp_path: Path, kills: Kills
) -> None:
    probe = make()
    assert probe.run() == 0, probe.stderr
    probe.delete()
    made = calls(tmp_path)
    first = next(number for number, call in enumerate(made) if call.startswith("open_tree("))
    inner = next(number for number, call in enumerate(made) if call.startswith("setns("))
    for at in itertools.chain(kills.some(first, inner, 31), kills.some(inner, len(made), 37)):
        one = make(at, name=f"at{at}")
        with pytest.raises(RuntimeFailed):
            one.create()
        one.close()
        again = make(name=f"after{at}")
        assert again.run() == 0, f"call {at} of {len(made)}: {again.stderr}"
        assert node.leases() == [again.id]
        again.delete()
        assert left(node) == [], f"call {at} of {len(made)}"
        again.close()
    assert subprocess.run(["findmnt", "-n", proc_nvidia_mask.PROC_DIR], capture_output=True).returncode == 1
    assert os.path.exists(f"{proc_nvidia_mask.PROC_DIR}/suspend")
