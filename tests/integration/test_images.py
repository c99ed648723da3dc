"""Images of every layout: the driver's place, the limit's effect, and that driver files in the image cannot bypass
it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from gpushare.core.ops import Cover, ImageFile, Mount

from simulator import hostfiles, simhost
from tests.integration import ns_util
from tests.support import driverhost
from tests.support.host import PYTHON, TREE, Node, python_mounts
from tests.support.runc import Container, RuntimeFailed
from tests.support.tenant import PROGRAM
from tools.nvidia_userland import Userland

MakeContainer = Callable[..., Container]
LIMIT = {"GPUSHARE_MEMORY": "2Gi"}
V = simhost.VERSION
NEWER = "550.54.15"
STORE = "/nix/store/0123456789abcdfghijklmnpqrsvwxyz-glibc-2.36/lib"
GRAB = TREE / "tests/integration/programs/grab.py"
RO = ("ro", "nosuid", "nodev")


def store_image(root: Path) -> list[str]:
    """Make a Nix-like image: no library outside the store, no cache. Return the command that runs nvidia-smi in it."""
    ns_util.make_image(root)
    libraries = root / STORE[1:]
    libraries.mkdir(parents=True)
    for path in (*(root / ns_util.LIBDIR[1:]).iterdir(), *(root / "usr/lib64").iterdir()):
        path.rename(libraries / path.name)
    (root / "etc/ld.so.cache").unlink()
    for name in ("lib", "lib64"):
        (root / name).unlink()
    shutil.rmtree(root / "usr/lib")
    shutil.rmtree(root / "usr/lib64")
    loader = f"{STORE}/ld-linux-x86-64.so.2"
    return [loader, "--library-path", f"{STORE}:/run/opengl-driver/lib", "/usr/bin/nvidia-smi"]


def distroless_image(root: Path) -> list[str]:
    """glibc and nothing else: no shell, no ldconfig, no cache."""
    ns_util.make_image(root)
    (root / "etc/ld.so.cache").unlink()
    shutil.rmtree(root / "usr/bin")
    shutil.rmtree(root / "usr/sbin")
    return ["/usr/bin/nvidia-smi"]


def made(layout: str) -> Callable[[Path], list[str]]:
    return lambda root: [str(ns_util.make_image(root, layout)) and "/usr/bin/nvidia-smi"]


LAYOUTS = {
    "multiarch": (made("multiarch"), ns_util.LIBDIR),
    "lib64": (made("lib64"), "/usr/lib64"),
    "distroless": (distroless_image, ns_util.LIBDIR),
    "store": (store_image, "/run/opengl-driver/lib"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_limit_is_visible_in_each_image_layout(
    container: MakeContainer, node: Node, tmp_path: Path, layout: str, way: str
) -> None:
    make, libdir = LAYOUTS[layout]
    root = tmp_path / "rootfs"
    root.mkdir()
    one = container(make(root), env=LIMIT, rootfs=root, **node.way(way))
    assert f"{libdir}/libcuda.so.{V} <-" in node.cli("explain", str(one.bundle)).stdout
    assert one.run() == 0, one.stderr
    assert " 2048MiB" in one.stdout and "16384MiB" not in one.stdout


def musl_image(root: Path) -> Path:
    """No glibc in a library directory; the test's shell runs with private libraries."""
    ns_util.make_image(root)
    private = root / "opt/private"
    private.mkdir(parents=True)
    for path in (*(root / ns_util.LIBDIR[1:]).iterdir(), *(root / "usr/lib64").iterdir()):
        path.rename(private / path.name)
    (root / "etc/ld.so.cache").unlink()
    (root / "usr/lib/ld-musl-x86_64.so.1").write_bytes(b"")
    return root


def test_musl_image_gets_devices_and_limits_are_refused(
    container: MakeContainer, node: Node, tmp_path: Path, way: str
) -> None:
    root = musl_image(tmp_path / "rootfs")
    shell = ["/opt/private/ld-linux-x86-64.so.2", "--library-path", "/opt/private", "/usr/bin/ls", "/dev"]
    one = container(shell, env={"NVIDIA_VISIBLE_DEVICES": "0"}, rootfs=root, **node.way(way))
    assert one.run() == 0, one.stderr
    assert {"nvidia0", "nvidiactl"} <= set(one.stdout.split())
    one.close()
    with pytest.raises(RuntimeFailed) as failed:
        container(shell, env=LIMIT, rootfs=root, **node.way(way)).create()
    assert "this image has no glibc (libc.so.6)" in failed.value.last_line


def test_driver_files_baked_into_the_image_are_covered(container: MakeContainer, node: Node, way: str) -> None:
    """An image made on a host with another driver, with all of that driver's files, links and programs."""
    script = f"ldconfig && {PYTHON} /opt/grab.py && nvidia-smi && readlink -f {ns_util.LIBDIR}/libnvidia-nvvm.so.4"
    one = container(["sh", "-c", script], env=LIMIT, mounts=python_mounts(PROGRAM, GRAB), **node.way(way))
    libdir = one.rootfs / ns_util.LIBDIR[1:]
    empty = (simhost.BUILT / "libempty.so").read_bytes()
    for stem, suffix in {"libcuda": "1", "libnvidia-ml": "1", "libnvidia-nvvm": "4"}.items():
        (libdir / f"{stem}.so.470.82.01").write_bytes(hostfiles.placeholder(empty, f"{stem}.so.{suffix}"))
        (libdir / f"{stem}.so.{suffix}").symlink_to(f"{stem}.so.470.82.01")
    (one.rootfs / "usr/bin/nvidia-smi").write_text("#!/bin/false\n")
    (one.rootfs / "usr/bin/nvidia-smi").chmod(0o755)
    assert one.run() == 0, one.stderr
    grabbed, *rest = one.stdout.splitlines()
    assert '"total_bytes": 2147483648' in grabbed and "2048MiB" in "".join(rest)


# Forward compatibility


def compat(one: Container, directory: str = "compat", version: str = NEWER) -> Path:
    """Add a newer driver to the image, as in CUDA images. Its libcuda works and differs from the host's."""
    path = one.rootfs / "usr/local/cuda-12.4" / directory
    path.mkdir(parents=True)
    link = one.rootfs / "usr/local/cuda"  # of the host, if it has CUDA
    link.unlink(missing_ok=True)
    link.symlink_to("cuda-12.4")
    newer = (simhost.BUILT / f"libcuda.so.{V}").read_bytes() + b"from the image"
    (path / f"libcuda.so.{version}").write_bytes(newer)
    (path / "libcuda.so.1").symlink_to(f"libcuda.so.{version}")
    empty = (simhost.BUILT / "libempty.so").read_bytes()
    ptx = hostfiles.placeholder(empty, "libnvidia-ptxjitcompiler.so.1")
    (path / f"libnvidia-ptxjitcompiler.so.{version}").write_bytes(ptx + b"from the image")
    return path


LOOK = f"""
set -e
{PYTHON} /opt/grab.py
tail -c 14 /usr/lib/gpushare/driver/libcuda-real.so.1; echo
tail -c 14 {ns_util.LIBDIR}/libnvidia-ptxjitcompiler.so.1; echo
readlink {ns_util.LIBDIR}/libcuda.so.1
ls {ns_util.LIBDIR}
"""


@pytest.mark.parametrize("directory", ["compat", "compat/lib.real"])
@pytest.mark.parametrize("path", ["", "/usr/local/cuda/compat:/usr/local/cuda/compat/lib"])
def test_newer_driver_in_the_image_runs_behind_the_shim(
    container: MakeContainer, node: Node, directory: str, path: str, way: str
) -> None:
    """The newer driver runs behind the shim however a program finds it, without files of the older one."""
    env = {**LIMIT, **({"LD_LIBRARY_PATH": path} if path else {})}
    script = LOOK if directory == "compat" else f"ln -s lib.real /usr/local/cuda/compat/lib\n{LOOK}"
    one = container(["sh", "-c", script], env=env, mounts=python_mounts(PROGRAM, GRAB), **node.way(way))
    compat(one, directory)
    assert one.run() == 0, one.stderr
    grabbed, cuda, ptx, link, *names = one.stdout.splitlines()
    assert '"total_bytes": 2147483648' in grabbed
    assert (cuda, ptx, link) == ("from the image", "from the image", f"libcuda.so.{NEWER}")
    mixed = {f"{stem}.so.{V}" for stem in ("libcuda", "libnvidia-ptxjitcompiler", "libnvidia-nvvm", "libcudadebugger")}
    assert not mixed & set(names)
    assert f"libnvidia-ml.so.{V}" in names


def test_older_driver_in_the_image_is_covered(container: MakeContainer, node: Node, way: str) -> None:
    env = {**LIMIT, "LD_LIBRARY_PATH": "/usr/local/cuda/compat"}
    one = container(["sh", "-c", LOOK], env=env, mounts=python_mounts(PROGRAM, GRAB), **node.way(way))
    compat(one, version="525.60.13")
    assert one.run() == 0, one.stderr
    grabbed, cuda, _, link, *_ = one.stdout.splitlines()
    assert '"total_bytes": 2147483648' in grabbed
    assert cuda != "from the image" and link == f"libcuda.so.{V}"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    root = ns_util.make_image(tmp_path / "rootfs")
    directory = root / "usr/local/cuda-12.4/compat"
    directory.mkdir(parents=True)
    (directory / f"libcuda.so.{NEWER}").write_text("the image's driver")
    return root


COMPAT = f"/usr/local/cuda-12.4/compat/libcuda.so.{NEWER}"
TARGET = f"{ns_util.LIBDIR}/libcuda.so.{NEWER}"


def test_image_file_is_mounted_elsewhere_before_it_is_covered(image: Path, tmp_path: Path) -> None:
    shim = tmp_path / "shim"
    shim.write_text("the shim")
    from gpushare.core.ops import Plan

    plan = Plan("test", (ImageFile(COMPAT, TARGET, RO, "real"), Cover(str(shim), COMPAT, RO, "shim")))
    before = ns_util.snapshot(image)
    with ns_util.sandbox(image) as box:
        box.apply(plan)
        assert box.enter(lambda: [Path(path).read_text() for path in (TARGET, COMPAT)]) == [
            "the image's driver",
            "the shim",
        ]
    (image / TARGET[1:]).unlink()
    assert ns_util.snapshot(image) == before


@pytest.mark.parametrize("swap", ["link", "absolute link", "parent", "gone", "fifo", "magic"])
def test_swapped_source_is_refused(image: Path, swap: str) -> None:
    """A source that changes between check and use is never mounted, least of all a host file."""
    path = image / COMPAT[1:]
    if swap == "parent":
        path.parent.rename(image / "elsewhere")
        os.symlink("/elsewhere", path.parent)
    else:
        path.unlink()
    if swap in ("link", "absolute link", "magic"):
        os.symlink({"link": "../../../../etc/passwd", "magic": "/proc/self/exe"}.get(swap, "/etc/passwd"), path)
    if swap == "fifo":
        os.mkfifo(path)
    with ns_util.sandbox(image) as box:
        message = box.refuses(ImageFile(COMPAT, TARGET, RO, "real"))
    assert "was changed while the container was being started" in message


def test_covered_source_is_not_used_as_the_image_s_file(image: Path, tmp_path: Path) -> None:
    shim = tmp_path / "shim"
    shim.write_text("the shim")
    with ns_util.sandbox(image) as box:
        message = box.refuses(Mount(str(shim), COMPAT, "file", RO, "shim"), ImageFile(COMPAT, TARGET, RO, "real"))
    assert "covered already" in message


# The real driver


CUDA_VERSION = {"535": "12.2", "550": "12.4", "555": "12.5"}  # of each branch of tools/nvidia_userland.py
CONTROL = "echo get_default_active_thread_percentage | /usr/bin/nvidia-cuda-mps-control"


@pytest.mark.every_driver
def test_real_driver_answers_through_the_shim(
    container: MakeContainer, make_host: Callable[..., Path], make_node: Callable[..., Node], userland: Userland
) -> None:
    """The driver root has NVIDIA's real files: all capabilities work, libcuda and NVML answer through the shim, to
    nvidia-smi as well, and the control program of MPS starts its daemon."""
    root = make_host("real")
    shutil.rmtree(root / "usr")
    for path in [path for path in userland.root.iterdir() if path.name in ("usr", "etc", "lib")]:
        subprocess.run(["cp", "-a", "--no-clobber", path, str(root)], check=True)
    for path in root.rglob("*"):
        if path.name in ("version", "information") and path.is_file():
            path.write_text(path.read_text().replace(driverhost.VERSION, userland.version))
    cuda = CUDA_VERSION[userland.version.partition(".")[0]]
    script = (
        "import ctypes, subprocess; cuda = ctypes.CDLL('libcuda.so.1'); version = ctypes.c_int();"
        "print(cuda.cuDriverGetVersion(ctypes.byref(version)), version.value);"
        "nvml = ctypes.CDLL('libnvidia-ml.so.1');"
        "print(subprocess.run('nvidia-smi', capture_output=True, text=True).stdout.splitlines()[0]);"
        f"print(subprocess.run('nvidia-cuda-mps-control -d; {CONTROL}; echo quit | nvidia-cuda-mps-control', "
        "shell=True, capture_output=True, text=True).stdout.split());"
        "print(open('/proc/self/maps').read())"
    )
    env = {**LIMIT, "NVIDIA_DRIVER_CAPABILITIES": "all", "NVIDIA_REQUIRE_CUDA": f"cuda>={cuda},cuda<={cuda}"}
    node = make_node(root, name="real-node")
    one = container([PYTHON, "-c", script], env=env, hook=node.hook(), mounts=python_mounts())
    explained = node.cli("explain", str(one.bundle)).stdout
    stems = ("libnvidia-ptxjitcompiler", "libnvidia-nvvm", "libnvidia-ml")
    for stem in [stem for stem in stems if userland.library(stem).exists()]:
        assert f"{ns_util.LIBDIR}/{stem}.so.{userland.version} <-" in explained
    for program in ("nvidia-smi", "nvidia-cuda-mps-control"):
        assert f"/usr/bin/{program} <-" in explained
    assert one.run() == 0, one.stderr
    version, smi, mps, *maps = one.stdout.splitlines()
    assert version == f"0 {cuda.replace('.', '0')}0"
    assert smi == "Failed to initialize NVML: GPU access blocked by the operating system"  # no driver behind the node
    assert mps == "['100.0']"
    for name in ("libcuda-real.so.1", "libnvidia-ml-real.so.1"):
        assert f"/usr/lib/gpushare/driver/{name}" in "".join(maps)
