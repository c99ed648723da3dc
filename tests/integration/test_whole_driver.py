"""All parts of the driver in real containers: capabilities, sockets, features, IMEX, MIG, image requirements."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from simulator import simhost
from tests.integration import ns_util
from tests.shim.inside import PRELUDE
from tests.support import driverhost
from tests.support.host import PYTHON, Node, python_mounts
from tests.support.runc import Container, RuntimeFailed

MakeContainer = Callable[..., Container]
SHARE = {"GPUSHARE_MEMORY": "2Gi"}
ALL = {"NVIDIA_VISIBLE_DEVICES": "all"}
LIBDIR = ns_util.LIBDIR
V = simhost.VERSION


def output(container: MakeContainer, node: Node, script: str, env: dict[str, str], way: str = "hook") -> list[str]:
    """Return the lines that a shell in the container prints."""
    one = container(["sh", "-c", script], env=env, **node.way(way))
    assert one.run() == 0, one.stderr
    lines = one.stdout.splitlines()
    one.close()
    return lines


def refused(container: MakeContainer, node: Node, env: dict[str, str], way: str = "hook") -> str:
    with pytest.raises(RuntimeFailed) as failed:
        container(["true"], env=env, **node.way(way)).create()
    assert node.leases() == []
    return failed.value.last_line.replace('\\"', '"')  # runc quotes again


LOOK = f"""
ls {LIBDIR} | grep -E 'nvidia|GLX' | sort
ldconfig -p | grep -c 'libGLX_nvidia.so.0'
ls /dev/nvidia-modeset /lib/firmware/nvidia/{V}
cat /{driverhost.VENDOR_FILES[0]}
touch /{driverhost.VENDOR_FILES[0]} 2>&1 || true
"""


def test_all_capabilities_give_graphics_and_video(
    container: MakeContainer, simhost: Path, node: Node, way: str
) -> None:
    driverhost.add_graphics(simhost)
    lines = output(container, node, LOOK, {**SHARE, "NVIDIA_DRIVER_CAPABILITIES": "all"}, way)
    for name in (f"libGLX_nvidia.so.{V}", "libGLX_nvidia.so.0", "libGLX_indirect.so.0", "libnvidia-encode.so.1"):
        assert name in lines
    assert "1" in lines and "/dev/nvidia-modeset" in lines and "gsp_tu10x.bin" in lines
    assert '{"ICD": {"library_path": "libGLX_nvidia.so.0"}}' in "".join(lines)
    assert "Permission denied" in lines[-1]  # from a file system that hides owners


def test_graphics_needs_a_request(container: MakeContainer, simhost: Path, node: Node) -> None:
    driverhost.add_graphics(simhost)
    lines = output(container, node, f"ls /dev {LIBDIR} /usr/share", SHARE)
    assert f"libcuda.so.{V}" in lines
    assert not {f"libGLX_nvidia.so.{V}", f"libnvidia-encode.so.{V}", "nvidia-modeset"} & set(lines)


def test_compat32_gives_32_bit_libraries(container: MakeContainer, simhost: Path, node: Node, way: str) -> None:
    """In the directory of the image's own 32-bit glibc. libcuda only without a limit, which it would ignore."""
    driverhost.add_32_bit(simhost, "libcuda", "libGLX_nvidia", "libnvidia-ml")
    graphics = {"libGLX_nvidia.so.0", "libGLX_indirect.so.0"}
    env = {"NVIDIA_DRIVER_CAPABILITIES": "compat32,graphics,compute,utility"}
    for request, libraries in ((ALL, {"libcuda.so.1", "libnvidia-ml.so.1", *graphics}),
                               (SHARE, graphics)):  # fmt: skip
        script = "ls /usr/lib/i386-linux-gnu; ldconfig -p"
        one = container(["sh", "-c", script], env={**env, **request}, **node.way(way))
        libc = one.rootfs / "usr/lib/i386-linux-gnu/libc.so.6"
        libc.parent.mkdir(parents=True, exist_ok=True)
        libc.write_bytes(driverhost.elf32())
        assert one.run() == 0, one.stderr
        listed = one.stdout.splitlines()
        assert {name for name in listed if name.startswith("lib") and name.endswith((".so.0", ".so.1"))} == libraries
        assert "\tlibGLX_nvidia.so.0 (libc6) => /usr/lib/i386-linux-gnu/libGLX_nvidia.so.0" in listed
        one.close()


STREAMS = (
    PRELUDE
    + """
start()
before, stream = info()[0], c_void_p()
for _ in range(10):
    ok(cuda.cuStreamCreate(byref(stream), 1))
print((before - info()[0]) // MIB, *(name for name in os.listdir(sys.argv[1]) if name == "libnvidia-ml.so.1"))
"""
)


@pytest.mark.parametrize(("asked", "seen"), [("compute", []), ("compute,utility", ["libnvidia-ml.so.1"])])
def test_memory_is_counted_without_utility(
    container: MakeContainer, node: Node, way: str, asked: str, seen: list[str]
) -> None:
    """The streams of this simulated device take nothing. Where the shim finds no NVML, it charges 2 MiB for each."""
    env = {**SHARE, "NVIDIA_DRIVER_CAPABILITIES": asked}
    one = container([PYTHON, "-c", STREAMS, LIBDIR], env=env, mounts=python_mounts(), **node.way(way))
    assert one.run() == 0, one.stderr
    assert one.stdout.split() == ["0", *seen]


CONNECT = """
import os, socket, sys
path = "{path}"
client = socket.socket(socket.AF_UNIX)
client.connect(path)
client.send(b"hello")
flags = os.statvfs(path).f_flag
print(bool(flags & os.ST_RDONLY), bool(flags & os.ST_NOSUID), bool(flags & os.ST_NODEV), bool(flags & os.ST_NOEXEC))
"""


@pytest.mark.parametrize("daemon", ["nvidia-persistenced", "nvidia-fabricmanager"])
def test_requested_daemon_sockets_are_reachable(
    container: MakeContainer, simhost: Path, node: Node, way: str, daemon: str
) -> None:
    with driverhost.listening(simhost, f"run/{daemon}/socket") as listener:
        program = CONNECT.format(path=f"/run/{daemon}/socket")
        one = container([PYTHON, "-c", program], env=SHARE, mounts=python_mounts(), **node.way(way))
        assert one.run() == 0, one.stderr
        assert one.stdout.split() == ["False", "True", "True", "True"]
        client, _ = listener.accept()
        with client:
            assert client.recv(16) == b"hello"


GATED = {
    "NVIDIA_GDS": {"nvidia-fs0", "nvidia-fs1", "cufile.json", "udev"},
    "NVIDIA_MOFED": {"uverbs0", "rdma_cm"},
    "NVIDIA_GDRCOPY": {"gdrdrv"},
    "NVIDIA_NVSWITCH": {"nvidia-nvswitchctl"},
}
LIST = "ls /dev /dev/infiniband /dev/nvidia-caps-imex-channels /dev/nvidia-caps /etc/cufile.json /run 2>/dev/null; true"


@pytest.mark.parametrize("variable", [*GATED, ""])
def test_gated_feature_needs_its_variable(
    container: MakeContainer, simhost: Path, node: Node, variable: str, way: str
) -> None:
    driverhost.add_features(simhost)
    env = {**SHARE, variable or "NVIDIA_GDS": "enabled" if variable else "1"}
    lines = output(container, node, LIST, env, way)
    seen = {os.path.basename(line) for line in lines}
    for name, things in GATED.items():
        assert (things <= seen) if name == variable else not things & seen, (name, seen)


def test_requested_imex_channels_are_given(container: MakeContainer, simhost: Path, node: Node, way: str) -> None:
    driverhost.add_features(simhost)
    assert "channel1" in output(container, node, LIST, {**SHARE, "NVIDIA_IMEX_CHANNELS": "all"}, way)
    seen = output(container, node, LIST, {**SHARE, "NVIDIA_IMEX_CHANNELS": "0"}, way)
    assert "channel0" in seen and "channel1" not in seen


def test_gpu_with_mig_devices_selects_all_of_them(
    container: MakeContainer, simhost: Path, node: Node, way: str
) -> None:
    driverhost.add_mig(simhost)
    seen = output(container, node, LIST, {"NVIDIA_VISIBLE_DEVICES": "0"}, way)
    assert {f"nvidia-cap{number}" for number in (12, 13, 21, 22)} <= set(seen)
    (simhost / "dev/nvidia-caps/nvidia-cap22").unlink()
    line = refused(container, node, {"NVIDIA_VISIBLE_DEVICES": "0:1"}, way)
    assert "/dev/nvidia-caps/nvidia-cap22 (gpu0/mig/gi2/ci0/access) is not on this host; run nvidia-modprobe" in line


def test_added_and_removed_mig_devices_are_detected(container: MakeContainer, simhost: Path, node: Node) -> None:
    assert "nvidia-cap12" not in output(container, node, LIST, ALL)
    driverhost.add_mig(simhost)
    assert "nvidia-cap12" in output(container, node, LIST, ALL)


def test_driver_s_own_files_are_used_before_others_of_their_names(
    container: MakeContainer, simhost: Path, node: Node, way: str
) -> None:
    """As on a real host: /usr/bin/nvidia-smi is a script that executes the program elsewhere."""
    own = simhost / "usr/local/nvidia/bin/nvidia-smi"
    own.parent.mkdir(parents=True)
    (simhost / "usr/bin/nvidia-smi").rename(own)
    driverhost.write(simhost / "usr/bin/nvidia-smi", '#!/bin/sh\nexec /usr/local/nvidia/bin/nvidia-smi "$@"\n').chmod(
        0o755
    )
    for name in ("libcuda", "libnvidia-ml"):
        library = simhost / driverhost.LIBDIR / f"{name}.so.{V}"
        moved = simhost / f"usr/local/nvidia/lib64/{library.name}"
        moved.parent.mkdir(exist_ok=True)
        library.rename(moved)
        driverhost.write(library, "/* GNU ld script */ INPUT(-lcuda)\n")
    assert "2048MiB" in "".join(output(container, node, "nvidia-smi", SHARE, way))
    (moved.parent / f"libcuda.so.{V}").unlink()
    line = refused(container, node, SHARE, way)
    assert (
        f"no usable libcuda.so.{V} below {simhost}: " in line and "is no ELF file (a linker script or damaged)" in line
    )
    assert f"install the libraries of driver {V} again" in line


def test_driver_upgrade_is_detected_at_the_next_start(container: MakeContainer, simhost: Path, node: Node) -> None:
    """Without refresh: first the module is new, then its libraries as well."""
    look = "ls -l /usr/lib/*/libcuda.so.1"
    assert V in output(container, node, look, SHARE)[0]
    new = "550.54.15"
    for path in (simhost / "sys/module/nvidia/version", simhost / "proc/driver/nvidia/version"):
        driverhost.write(path, path.read_text().replace(V, new))
    line = refused(container, node, SHARE)
    assert f"the loaded driver is {new}, the libraries below" in line and "finish the driver upgrade" in line
    for stem in ("libcuda", "libnvidia-ml"):
        (simhost / driverhost.LIBDIR / f"{stem}.so.{V}").rename(simhost / driverhost.LIBDIR / f"{stem}.so.{new}")
    assert new in output(container, node, look, SHARE)[0]


@pytest.mark.parametrize("damage", ["missing", "garbage", "of another driver"])
def test_missing_or_damaged_node_json_is_rebuilt(container: MakeContainer, node: Node, damage: str, way: str) -> None:
    """A start does not measure contexts."""
    output(container, node, "true", SHARE, way)
    file = node.state / "node.json"
    text = file.read_text()
    assert node.cli("refresh").returncode == 0
    measured = file.read_text()
    assert text != measured
    file.unlink()
    if damage != "missing":
        file.write_text("{" if damage == "garbage" else measured.replace(V, "470.1"))
    output(container, node, "true", SHARE, way)
    assert file.read_text() == text


def test_refresh_reports_the_driver(simhost: Path, node: Node) -> None:
    driverhost.add_mig(simhost)
    done = node.cli("refresh")
    assert done.returncode == 0, done.stderr
    first, gpu, *parts = done.stdout.splitlines()
    assert first.startswith(f"driver {V}, CUDA 12.2 in ") and gpu.split()[0] == "0"
    assert [line.split()[:2] for line in parts] == [["0:0", driverhost.MIG_UUIDS[0]], ["0:1", driverhost.MIG_UUIDS[1]]]
