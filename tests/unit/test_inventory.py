"""Devices from the driver's /proc tree; memory sizes from NVML in a child process with a deadline."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gpushare.core.errors import DeviceError
from gpushare.core.model import Device
from gpushare.gpu import contexts, inventory
from gpushare.gpu.nvml import Answer, ask

from simulator import models, simhost
from tests.support.driverhost import elf_header

# The programs fork with one thread; a test runner may have more, which Python 3.12 warns about.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
V = "535.261.03"
LIBRARY_DIR = "usr/lib64"

# A library with the NVML functions that an inventory calls, compiled for each test. The child process, the load by path
# and the deadline are under test, so a C library is closer than a Python fake.
NVML = r"""
#include <stdio.h>
#include <string.h>
#include <unistd.h>
struct memory { unsigned long long total, free, used; };
int nvmlInit_v2(void) { BEHAVIOUR; return 0; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return nvmlInit_v2(); }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(long)(index + 1); return 0; }
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    snprintf(uuid, length, "GPU-%08ld-0000-0000-0000-000000000000", (long)device - 1);
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory) {
    memory->total = (unsigned long long)(long)device << 30;
    return 0;
}
"""


def uuid(index: int) -> str:
    return f"GPU-{index:08d}-0000-0000-0000-000000000000"


def gpu(root: Path, bus: str, index: int, text: str = "") -> None:
    directory = root / "proc/driver/nvidia/gpus" / bus
    directory.mkdir(parents=True)
    facts = f"Model: \t\t NVIDIA Test\nIRQ:   \t\t 16\nGPU UUID: \t {uuid(index)}\nDevice Minor: \t {index}\n"
    (directory / "information").write_text(text or facts)


def host(root: Path, devices: int = 2) -> str:
    (root / "sys/module/nvidia").mkdir(parents=True)
    (root / "sys/module/nvidia/version").write_text(V + "\n")
    (root / "proc/driver/nvidia").mkdir(parents=True)
    for index in range(devices):
        gpu(root, f"0000:{0x0A - 8 * index:02x}:00.0", index)  # PCI order differs from the order of minors
    return str(root)


def nvml_library(root: Path, behaviour: str = "") -> str:
    library = root / LIBRARY_DIR / f"libnvidia-ml.so.{V}"
    library.parent.mkdir(parents=True)
    compiler = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-x", "c", "-", "-o", str(library)]
    subprocess.run(compiler, input=NVML.replace("BEHAVIOUR", behaviour).encode(), check=True)
    return str(library)


def test_driver_version_is_read(tmp_path: Path) -> None:
    assert inventory.driver_version(host(tmp_path)) == V
    (tmp_path / "sys/module/nvidia/version").unlink()
    (tmp_path / "proc/driver/nvidia/version").write_text(
        f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {V}  Thu Jun 12 2025\nGCC version:  gcc 12.2.0\n"
    )
    assert inventory.driver_version(str(tmp_path)) == V
    open_kernel = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {V}  Release Build\n"
    (tmp_path / "proc/driver/nvidia/version").write_text(open_kernel)
    assert inventory.driver_version(str(tmp_path)) == V


def test_missing_driver_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DeviceError, match=r"no NVIDIA driver is loaded .*; load it, or set driver.libraries in place of driver.root$"
    ):
        inventory.read_inventory(str(tmp_path))


WSL = ("dev/dxg", "usr/lib/wsl/lib/libcuda.so.1")
JETSON = ("dev/nvmap", "etc/nv_tegra_release")
MODULE = "sys/module/nvidia/version"


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (WSL, "WSL2 is not supported: .*; use a Linux host"),
        (JETSON, "Jetson .Tegra. is not supported: .*; use a Linux host"),
        ((*JETSON, MODULE), "Jetson .Tegra. is not supported"),  # since JetPack 6 with a module of that name
        ((JETSON[0], MODULE), "Jetson .Tegra. is not supported"),
        (("sys/module/nvidia_vgpu_vfio/version",), "a vGPU host is not supported: .*; install gpushare in the virtual"),
        ((), "no NVIDIA driver is loaded"),
    ],
)
def test_unsupported_kind_of_host_is_named(tmp_path: Path, files: tuple[str, ...], why: str) -> None:
    """shared/cases/engines/13, and vGPU hosts."""
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{V}\n")
    with pytest.raises(DeviceError, match=f"^{why}") as caught:
        inventory.read_inventory(str(tmp_path))
    assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)


def test_supported_gpu_beside_files_of_another_kind_of_host_is_used(tmp_path: Path) -> None:
    """Such as a discrete GPU in a machine with Tegra."""
    root = host(tmp_path)
    for name in (*JETSON, *WSL):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert len(inventory.read_inventory(root).devices) == 2


@pytest.mark.parametrize(("version", "refused"), [("450.248.02", True), ("469.99", True), ("470.57.02", False)])
def test_driver_that_is_too_old_is_refused(tmp_path: Path, version: str, refused: bool) -> None:
    root = host(tmp_path)
    (tmp_path / MODULE).write_text(version)
    if refused:
        with pytest.raises(DeviceError, match=f"^driver {version} is not supported; install driver 470 or newer$"):
            inventory.read_inventory(root)
    else:
        assert inventory.read_inventory(root).driver_version == version


def put(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(elf_header())


LIBCUDA = f"usr/lib64/libcuda.so.{V}"
DRIVER = "run/nvidia/driver"  # the root file system of the GPU Operator's driver container


@pytest.mark.parametrize(
    ("files", "libraries", "dev"),
    [
        ((LIBCUDA, "dev/nvidiactl"), "", ""),
        ((f"{DRIVER}/{LIBCUDA}", "dev/nvidiactl"), DRIVER, ""),
        ((f"{DRIVER}/{LIBCUDA}", f"{DRIVER}/dev/nvidiactl"), DRIVER, DRIVER),
        ((LIBCUDA, f"{DRIVER}/{LIBCUDA}", f"{DRIVER}/dev/nvidiactl"), "", ""),  # a driver of the host comes first
        ((f"{DRIVER}/{LIBCUDA}", "dev/nvidiactl", f"{DRIVER}/dev/nvidiactl"), DRIVER, ""),
        ((), "", ""),
    ],
)
def test_driver_container_is_used_for_missing_parts(
    tmp_path: Path, files: tuple[str, ...], libraries: str, dev: str
) -> None:
    root = host(tmp_path)
    put(tmp_path, *files)
    found = inventory.read_inventory(root)
    assert (found.root, found.libraries, found.dev) == (
        root,
        *(f"{root}/{one}" if one else "" for one in (libraries, dev)),
    )
    assert (found.files_root, found.dev_root) == (found.libraries or root, found.dev or root)
    configured = inventory.read_inventory(root, libraries="/a", dev="/b")
    assert (configured.files_root, configured.dev_root) == ("/a", "/b")


def test_devices_are_in_pci_order_without_nvml(tmp_path: Path) -> None:
    found = inventory.read_inventory(host(tmp_path))
    assert found.driver_version == V and not found.simulated
    assert found.devices == (
        Device(0, uuid(1), 1, "0000:02:00.0", "NVIDIA Test", 0, contexts.DEFAULT_BYTES),
        Device(1, uuid(0), 0, "0000:0a:00.0", "NVIDIA Test", 0, contexts.DEFAULT_BYTES),
    )


def test_pci_order_is_hexadecimal_and_by_domain(tmp_path: Path) -> None:
    root = host(tmp_path, devices=0)
    for index, bus in enumerate(("10000:01:00.0", "0000:e1:00.0", "0000:1f:00.0", "0001:00:00.0")):
        gpu(tmp_path, bus, index)
    assert inventory.bus_ids(root) == ("0000:1f:00.0", "0000:e1:00.0", "0001:00:00.0", "10000:01:00.0")


def test_simulated_host_is_read(make_host: Callable[..., Path]) -> None:
    """The simulated driver's NVML answers for its root through its own device files."""
    root = make_host(gpus=2, memory_bytes=6 << 30)
    reserved = models.MODELS[models.DEFAULT].reserved_bytes
    found = inventory.read_inventory(str(root))
    assert found.simulated and found.driver_version == simhost.VERSION
    assert [device.uuid for device in found.devices] == [simhost.default_uuid(0), simhost.default_uuid(1)]
    assert [(device.memory_bytes, device.reserved_bytes) for device in found.devices] == [(6 << 30, reserved)] * 2
    assert [device.context_bytes for device in found.devices] == [simhost.DEFAULT_CONTEXT_MIB << 20] * 2


def test_sizes_come_from_nvml(tmp_path: Path) -> None:
    root = host(tmp_path)
    nvml_library(tmp_path)
    found = inventory.read_inventory(root)
    assert {device.uuid: device.memory_bytes for device in found.devices} == {uuid(0): 1 << 30, uuid(1): 2 << 30}


# CUDA's second device is NVML's first. Its total lacks the 64 MiB that the driver reserves, which NVML (v1) hides.
CUDA = r"""
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int cuInit(unsigned flags) { BEHAVIOUR; return flags; }
int cuDriverGetVersion(int *version) { *version = 11040; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int number) { *device = 1 - number; return 0; }
int cuDeviceGetUuid(unsigned char *uuid, int device) { memset(uuid, 0, 16); uuid[3] = device; return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = ((size_t)(device + 1) << 30) - (64 << 20); return 0; }
"""


def cuda_library(root: Path, behaviour: str = "") -> str:
    library = root / LIBRARY_DIR / f"libcuda.so.{V}"
    library.parent.mkdir(parents=True, exist_ok=True)
    compiler = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", str(library)]
    subprocess.run(compiler, input=CUDA.replace("BEHAVIOUR", behaviour).encode(), check=True)
    return str(library)


def test_cuda_total_counts_where_nvml_hides_what_the_driver_reserves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = ask(nvml_library(tmp_path), cuda_library(tmp_path), 20)
    sizes = {uuid: (one.memory_bytes, one.reserved_bytes) for uuid, one in found.gpus.items()}
    reserved = 64 << 20
    assert sizes == {uuid(0): ((1 << 30) - reserved, reserved), uuid(1): ((2 << 30) - reserved, reserved)}
    assert found.cuda_version == "11.4"


@pytest.mark.parametrize("behaviour", ["return 100", "_exit(0)", "for (;;) pause()"])
def test_failing_cuda_leaves_nvmls_total(tmp_path: Path, behaviour: str) -> None:
    found = ask(nvml_library(tmp_path), cuda_library(tmp_path, behaviour), 0.8)
    assert {one.memory_bytes for one in found.gpus.values()} == {1 << 30, 2 << 30}


@pytest.mark.parametrize(
    "behaviour", ["return 9", "_exit(0)", "*(volatile int *)0 = 0", 'write(1, "x", 1); return 999']
)
def test_failing_nvml_leaves_sizes_unknown(tmp_path: Path, behaviour: str) -> None:
    assert ask(nvml_library(tmp_path, behaviour), "", 20) == Answer({})


def test_hanging_nvml_is_killed_at_deadline(tmp_path: Path) -> None:
    library = nvml_library(tmp_path, "for (;;) pause()")
    before = time.monotonic()
    assert ask(library, "", 0.3) == Answer({})
    assert time.monotonic() - before < 10
    with pytest.raises(ChildProcessError):  # the child was reaped
        os.waitpid(-1, os.WNOHANG)


def test_child_inherits_no_descriptors(tmp_path: Path) -> None:
    """A hung child must not keep a lock open, or the pipe that a runtime waits for."""
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    library = nvml_library(tmp_path, f'if (write({writer}, "x", 1) == 1) return 0; else return 9')
    assert ask(library, "", 20) == Answer({})  # the write failed, so NVML's init failed
    os.close(writer)
    assert os.read(reader, 1) == b""
    os.close(reader)


@pytest.mark.parametrize(
    "text", ["", "GPU UUID: GPU-????????-????-????-????-????????????\nDevice Minor: 0\n", f"GPU UUID: {uuid(0)}\n", "x"]
)
def test_uninitialized_gpu_is_refused(tmp_path: Path, text: str) -> None:
    root = host(tmp_path, devices=0)
    gpu(tmp_path, "0000:01:00.0", 0, text or "\n")
    with pytest.raises(DeviceError, match=r"not initialised the GPU at 0000:01:00.0 .*; run nvidia-smi once"):
        inventory.read_inventory(root)


@pytest.mark.parametrize(
    ("marker", "context_bytes"),
    [
        ('{"context_bytes": 123}', 123),
        ("", contexts.DEFAULT_BYTES),
        ("words for people", contexts.DEFAULT_BYTES),
        ('{"context_bytes": "x"}', contexts.DEFAULT_BYTES),
    ],
)
def test_marker_makes_root_simulated(tmp_path: Path, marker: str, context_bytes: int) -> None:
    root = host(tmp_path, devices=1)
    assert not inventory.read_inventory(root).simulated
    (tmp_path / ".gpushare-sim").write_text(marker)
    found = inventory.read_inventory(root)
    assert found.simulated and found.devices[0].context_bytes == context_bytes


# (model, compute capability, multiprocessors, threads, reported MiB): the sources are in gpu/contexts.py
REPORTED = (
    ("Tesla K80", "3.7", 13, 192, 93),
    ("NVIDIA GeForce RTX 4060 Ti", "8.9", 34, 128, 107),
    ("NVIDIA GeForce RTX 3090", "8.6", 82, 128, 256),
    ("NVIDIA RTX 6000 Ada Generation", "8.9", 142, 128, 426),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "12.0", 188, 128, 555),
)


@pytest.mark.parametrize(("model", "arch", "processors", "cores", "mib"), REPORTED)
def test_estimated_context_is_above_the_reported_one(
    model: str, arch: str, processors: int, cores: int, mib: int
) -> None:
    """An estimate that is too low lets a container exceed its limit, and one that is far too high wastes memory."""
    assert contexts.multiprocessors(arch, processors * cores) == processors
    assert mib < contexts.estimated_bytes(model, arch, processors) >> 20 < mib + 128


def test_context_of_unknown_hardware_is_not_too_low() -> None:
    assert contexts.estimated_bytes("Other", "", 0) == contexts.DEFAULT_BYTES > 616 << 20  # the largest report
    unknown = contexts.estimated_bytes("Other", "99.0", contexts.multiprocessors("99.0", 132 * 128))
    assert unknown >= contexts.estimated_bytes("NVIDIA H200", "9.0", 132)
    assert contexts.estimated_bytes(simhost.DEFAULT_MODEL, "8.6", 48) == simhost.DEFAULT_CONTEXT_MIB << 20


def test_container_with_a_share_cannot_divide_it(tmp_path: Path) -> None:
    root = simhost.make_simhost(tmp_path / "host")
    limits = root / "usr/lib/gpushare/limits"
    limits.parent.mkdir(parents=True)
    limits.touch()
    with pytest.raises(
        DeviceError, match="limits: this is a container with a share, and a share cannot be divided; st"
    ):
        inventory.read_inventory(str(root))
    limits.unlink()
    assert len(inventory.read_inventory(str(root)).devices) == 1
