"""The files of each capability, by NVIDIA's own lists, so that a lost row is noticed."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from gpushare.core.model import Inventory, Request, Selection
from gpushare.gpu import driverfiles

from tests.support.driverhost import elf_header

V = "535.261.03"
LIBDIR = "usr/lib64"
# capability -> libraries that libnvidia-container and nvidia-container-toolkit list, the name a loader requests,
# programs and device nodes
LIBRARIES: dict[str, dict[str, str]] = {
    "utility": {"libnvidia-ml": "so.1", "libnvidia-cfg": "so.1", "libnvidia-nscq": "so.2"},
    "compute": {
        "libcuda": "so.1", "libcudadebugger": "so.1", "libnvidia-opencl": "so.1", "libnvidia-gpucomp": "",
        "libnvidia-ptxjitcompiler": "so.1", "libnvidia-fatbinaryloader": "", "libnvidia-allocator": "so.1",
        "libnvidia-compiler": "", "libnvidia-pkcs11": "", "libnvidia-pkcs11-openssl3": "", "libnvidia-nvvm": "so.4",
        "libnvidia-tileiras": "",
    },
    "video": {
        "libvdpau_nvidia": "so.1", "libnvidia-encode": "so.1", "libnvidia-opticalflow": "so.1", "libnvcuvid": "so.1",
    },
    "graphics": {
        "libnvidia-eglcore": "", "libnvidia-glcore": "", "libnvidia-tls": "", "libnvidia-glsi": "",
        "libnvidia-fbc": "so.1", "libnvidia-ifr": "so.1", "libnvidia-rtcore": "", "libnvoptix": "so.1",
        "libGLX_nvidia": "so.0", "libEGL_nvidia": "so.0", "libGLESv2_nvidia": "so.2", "libGLESv1_CM_nvidia": "so.1",
        "libnvidia-glvkspirv": "", "libnvidia-cbl": "",
    },
    "ngx": {"libnvidia-ngx": "so.1"},
    "display": {},
}  # fmt: skip
SHARED = {"libnvidia-gpucomp", "libnvidia-allocator"}  # of both compute and graphics
PROGRAMS = {
    "utility": {"nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nv-fabricmanager"},
    "compute": {"nvidia-cuda-mps-control", "nvidia-cuda-mps-server"},
}
NODES = {"compute": {"nvidia-uvm", "nvidia-uvm-tools"}, "display": {"nvidia-modeset"}}
SOCKETS = {"utility": {"/run/nvidia-persistenced/socket", "/run/nvidia-fabricmanager/socket"}}
VENDOR_FILES = {
    "graphics": {
        "/usr/share/vulkan/icd.d/nvidia_icd.json", "/usr/share/glvnd/egl_vendor.d/10_nvidia.json",
        "/usr/share/egl/egl_external_platform.d/10_nvidia_wayland.json",
        "/usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json",
        "/etc/vulkan/implicit_layer.d/nvidia_layers.json",
    },
    "compute": {"/etc/OpenCL/vendors/nvidia.icd"},
}  # fmt: skip
MORE_LINKS = {
    "compute": {"libcuda.so": "libcuda.so.1"},
    "video": {"libnvidia-opticalflow.so": "libnvidia-opticalflow.so.1"},
    "graphics": {"libGLX_indirect.so.0": f"libGLX_nvidia.so.{V}"},
}
# variable's feature -> device nodes and files
GATED = {
    "gds": {"nvidia-fs0", "nvidia-fs15", "/run/udev", "/etc/cufile.json"},
    "mofed": {"infiniband/uverbs0", "infiniband/uverbs3", "infiniband/rdma_cm"},
    "gdrcopy": {"gdrdrv"},
    "nvswitch": {"nvidia-nvswitchctl", "nvidia-nvswitch0", "nvidia-nvswitch11"},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A host with every file of a driver, and unrelated files beside them."""
    base = tmp_path_factory.mktemp("driver")

    def touch(name: str) -> None:
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_bytes(elf_header())

    for stem in (*(stem for row in LIBRARIES.values() for stem in row), "libnvidia-unheard-of"):
        touch(f"{LIBDIR}/{stem}.so.{V}")
    for name in (*(name for row in PROGRAMS.values() for name in row), "nvidia-installer"):
        touch(f"usr/bin/{name}")
    for name in (*(name for row in NODES.values() for name in row), "nvidiactl", "nvidia-fsx", "nvidia-nvswitch"):
        touch(f"dev/{name}")
    for row in VENDOR_FILES.values():
        for name in row:
            touch(name[1:])
    for name in (one for row in GATED.values() for one in row if not one.startswith("/")):
        touch(f"dev/{name}")
    touch("etc/cufile.json")
    touch("run/udev/data/x")
    for name in (one for row in SOCKETS.values() for one in row):
        (base / name[1:]).parent.mkdir(parents=True)
        directory = os.open((base / name[1:]).parent, os.O_PATH)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{directory}/socket")  # the whole path can exceed a socket address
        os.close(directory)
    return str(base)


def found(root: str, *capabilities: str) -> driverfiles.DriverFiles:
    return driverfiles.find(root, V, capabilities, simulated=True)


def libraries(files: driverfiles.DriverFiles) -> dict[str, dict[str, str]]:
    """Stem -> links of each library that a container gets."""
    asked = [*([files.cuda] if files.asked_cuda else []), *([files.nvml] if files.asked_nvml else [])]
    return {one.stem: dict(one.links) for one in (*asked, *files.libraries)}


@pytest.mark.parametrize("capability", LIBRARIES)
def test_capability_selects_exactly_its_files(root: str, capability: str) -> None:
    files = found(root, capability)
    links = libraries(files)
    own = LIBRARIES[capability]
    shared = SHARED if capability == "graphics" else set()
    assert set(links) == set(own) | shared
    for stem, ending in own.items():
        if ending:
            assert links[stem][f"{stem}.{ending}"] == f"{stem}.so.{V}"
    every = {name: text for one in links.values() for name, text in one.items()}
    assert MORE_LINKS.get(capability, {}).items() <= every.items()
    assert {name for name, _ in files.programs} == PROGRAMS.get(capability, set())
    assert {node.name for node in files.nodes} == {"nvidiactl"} | NODES.get(capability, set())
    assert {target for target, _ in files.sockets} == SOCKETS.get(capability, set())
    assert {one.target for one in files.data} == VENDOR_FILES.get(capability, set())


@pytest.mark.parametrize("feature", ["", *GATED])
def test_feature_selects_exactly_its_files(root: str, feature: str) -> None:
    asked = Request("own", Selection("all"), ("utility",), features=(feature,) if feature else ())
    files = driverfiles.for_request(Inventory(root, V, (), simulated=True), asked, ())
    seen = {node.name for node in files.nodes} | {one.target for one in files.data}
    assert seen == {"nvidiactl"} | GATED.get(feature, set())


def test_fabric_manager_socket_is_a_socket(root: str) -> None:
    assert Path(f"{root}/run/nvidia-fabricmanager/socket").is_socket()
