"""The mounts that the hook makes in a container: their targets when the root changes after config.json was written, and
the container's content when no hook runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpushare.system import mountns

from tests.integration.programs.interrupted_hook import points, write_adopt, write_before, write_runtime
from tests.integration.test_adopt import ALL, MakeContainer, calls, upper
from tests.support import driverhost
from tests.support.host import PYTHON, Node, python_mounts
from tests.support.rootfs import run
from tests.support.runc import Container, RuntimeFailed

SMI = "/usr/bin/nvidia-smi"
LIBRARY = "/usr/lib/x86_64-linux-gnu/libnvidia-opencl.so.535.261.03"
PEER = "mnt"


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A host directory on a tmpfs, whose files are not in the image, which is the host's root."""
    path = tmp_path / "volume"
    path.mkdir()
    run("mount", "-t", "tmpfs", "gpushare-test", path)
    (path / "inner").mkdir()
    yield path
    run("umount", "--lazy", path)


@pytest.fixture
def make(container: MakeContainer, node: Node, tmp_path: Path) -> Callable[..., Container]:
    """make(before, env={}) -> a container whose hook begins with the shell commands `before`."""

    def new(before: str, env: dict[str, str] | None = None) -> Container:
        hook = tmp_path / "hook"
        runtime = node.runtime(write_runtime(tmp_path, hook=hook))
        one = container(["true"], env={**ALL, **(env or {})}, runtime=runtime)
        words = {"root": one.rootfs, "volume": tmp_path / "volume", "up": "../" * 30}
        named = "".join(f"{name}={value}\n" for name, value in words.items())
        write_before(hook, write_adopt(tmp_path), named + before)
        return one

    return new


def mounted(one: Container) -> list[str]:
    """Mount points in the container before its start, from the host's root."""
    prefix = str(one.rootfs)
    points = [entry.point for entry in mountns.read_mounts(str(one.pid))]
    return [point[len(prefix) :] if point.startswith(prefix) else point for point in points]


def test_hook_mounts_in_plan_order(make: Callable[..., Container], node: Node, tmp_path: Path) -> None:
    """config.json has the mounts that enforce the limit, the hook makes the others, and the device is last."""
    one = make("")
    one.create()
    of_spec = [mount["destination"] for mount in json.loads((one.bundle / "config.json").read_text())["mounts"]]
    ours = [path for path in of_spec if "nvidia" in path or "libcuda" in path or "gpushare" in path]
    assert [os.path.basename(path).partition(".")[0] for path in ours] == ["gpushare", "libcuda", "libnvidia-ml"]
    sources = [call.split('"')[1] for call in calls(tmp_path) if call.startswith("open_tree(")]
    devices = [Path(source).parent.name == "dev" for source in sources]
    assert sources[0].endswith("/rw") and devices == sorted(devices) and devices.count(True) == 4
    flags = {line.split()[4]: set(line.split()[5].split(",")) for line in mountinfo(one)}
    assert flags["/usr/lib/gpushare/rw"] >= {"rw", "nosuid", "nodev", "noexec"}
    assert flags[LIBRARY] >= {"ro", "nosuid", "nodev"} and "noexec" not in flags[LIBRARY]
    assert flags["/dev/nvidia0"] >= {"rw", "nosuid", "noexec"}


def mountinfo(one: Container) -> list[str]:
    return Path(f"/proc/{one.pid}/mountinfo").read_text().splitlines()


# A target changes after config.json was written

REFUSED = {
    "link out of the libraries": (f"ln -s /etc/hostname $root{SMI}", r'is a link to \W*"/etc/hostname'),
    "link to nothing": (f"ln -s /nowhere $root{SMI}", "is a link to nothing"),
    "FIFO": (f"mkfifo $root{SMI}", "is a FIFO where a file must be"),
    "directory": (f"mkdir $root{LIBRARY}", "is a folder where a file must be"),
    "volume": ("nsenter -t $pid -m mount --bind $volume $root/usr/bin", "would be created in the volume"),
    "devices of the host": ("nsenter -t $pid -m mount --bind $volume $root/dev", "would be created in the volume"),
    "parent that leads out": (
        "mkdir -p $root/usr/lib/firmware; ln -s $up$volume/inner $root/usr/lib/firmware/nvidia",
        "is a link to nothing, or keeps changing",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_changed_target_is_refused_by_name(
    make: Callable[..., Container], node: Node, simhost: Path, volume: Path, name: str
) -> None:
    before, message = REFUSED[name]
    driverhost.add_graphics(simhost)
    one = make(f"{before} || exit 9", env={"NVIDIA_DRIVER_CAPABILITIES": "all"})
    with pytest.raises(RuntimeFailed, match=message):
        one.create()
    assert [*volume.iterdir(), *(volume / "inner").iterdir()] == [volume / "inner"]
    node.after_failed_create()
    assert node.left() == []
    left = {path for path in upper(one) if "nvidia" in os.path.basename(path) or "libcuda" in path}
    of_runc = {f"usr/lib/x86_64-linux-gnu/{name}.so.535.261.03" for name in ("libcuda", "libnvidia-ml")}
    of_test = {SMI[1:], LIBRARY[1:], "usr/lib/firmware/nvidia"}
    assert left - of_test == of_runc


def test_library_behind_a_link_is_covered(make: Callable[..., Container], tmp_path: Path) -> None:
    one = make(f"echo old >$root/usr/lib/libold.so; ln -s /usr/lib/libold.so $root{LIBRARY}")
    one.create()
    assert "/usr/lib/libold.so" in mounted(one) and LIBRARY not in mounted(one)


def test_file_mounted_over_the_target_is_covered(make: Callable[..., Container], tmp_path: Path) -> None:
    """The file itself belongs to the host and is not written."""
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    one = make(f"touch $root{SMI}; nsenter -t $pid -m mount --bind {theirs} $root{SMI} || exit 9")
    one.create()
    assert mounted(one).count(SMI) == 2 and theirs.read_text() == "theirs"
    assert "theirs" not in Path(f"/proc/{one.pid}/root{SMI}").read_text(errors="replace")


def test_mounts_do_not_propagate_to_peers(make: Callable[..., Container], tmp_path: Path) -> None:
    """The container's root and its /dev are shared: plain mounts would propagate to their peers."""
    one = make(f"""for place in "$root" "$root/dev"; do
    nsenter -t $pid -m mount --make-shared "$place" || exit 9
done
nsenter -t $pid -m mount --bind "$root" "$root/{PEER}" || exit 9
nsenter -t $pid -m mount --bind "$root/dev" "$root/{PEER}/dev" || exit 9""")
    one.create()
    points = mounted(one)
    assert SMI in points and "/dev/nvidia0" in points
    assert [point for point in points if point.startswith(f"/{PEER}/") and "nvidia" in point] == []


# No hooks


def test_runtime_without_hooks_gives_no_gpu(
    container: MakeContainer, node: Node, simhost: Path, tmp_path: Path
) -> None:
    """With config.json alone, including the device, under a runtime that ignores hooks: the only libcuda is the shim,
    which finds no driver."""
    for at in (0, 0, -1):  # the first start on a host does more work
        program = write_runtime(tmp_path, points(tmp_path) if at else 0)
        one = container(["sleep", "inf"], env=ALL, mounts=python_mounts(), runtime=node.runtime(program))
        if not at:
            one.create()
            one.delete()
    with pytest.raises(RuntimeFailed):
        one.create()
    path = one.bundle / "config.json"
    spec = json.loads(path.read_text())
    del spec["hooks"]
    for name in ("nvidia0", "nvidiactl"):
        spec["mounts"].append({"destination": f"/dev/{name}", "source": f"{simhost}/dev/{name}", "options": ["bind"]})
    path.write_text(json.dumps(spec))
    one._runtime = ("runc", *one._runtime[-2:])
    one.start()
    libraries = "ls /usr/lib/*/libcuda.so*; find /usr/lib/gpushare -type f -size +0"
    expected = ["/usr/lib/x86_64-linux-gnu/libcuda.so.535.261.03", "/usr/lib/gpushare/limits"]
    assert one.exec("sh", "-c", libraries).stdout.split() == expected
    load = "import ctypes; print(ctypes.CDLL('libcuda.so.535.261.03').cuInit(0))"
    loaded = one.exec(PYTHON, "-c", load)
    assert loaded.returncode == 1 and "libcuda-real.so.1: file too short" in loaded.stderr
