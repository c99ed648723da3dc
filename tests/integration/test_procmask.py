"""A container's view of /proc/driver/nvidia, with a stand-in for the kernel's directory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from gpushare.core.ops import Plan, ProcMask
from gpushare.inject import proc_nvidia_mask

from tests.integration import ns_util, scene

base = scene.base
GPUS = ("0000:01:00.0", "0000:41:00.0", "0000:c1:00.0")
CAPABILITIES = {
    "mig/config": 1,
    "mig/monitor": 2,
    "gpu0/mig/gi1/access": 12,
    "gpu0/mig/gi1/ci0/access": 13,
    "gpu0/mig/gi2/access": 21,
    "gpu0/mig/gi2/ci0/access": 22,
}
PARAMS = "ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 1\nDeviceFileMode: 438\n"
VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03\n"


@pytest.fixture
def image(base: Path, tmp_path: Path) -> Path:
    root = Path(shutil.copytree(base, tmp_path / "rootfs", symlinks=True))
    make_driver_proc(root / "proc/driver/nvidia")
    return root


def make_driver_proc(proc: Path, gpus: tuple[str, ...] = GPUS) -> None:
    """Make the files that the kernel's driver shows."""
    proc.mkdir(parents=True)
    (proc / "params").write_text(PARAMS)
    (proc / "version").write_text(VERSION)
    (proc / "registry").write_text('Binary: ""\n')
    (proc / "suspend").write_text("suspend hibernate resume\n")
    for gpu in gpus:
        (proc / "gpus" / gpu).mkdir(parents=True)
        (proc / "gpus" / gpu / "information").write_text(f"Bus Location: {gpu}\n")
    for path, minor in CAPABILITIES.items():
        file = proc / "capabilities" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n")


def files(directory: str) -> dict[str, str]:
    """Path -> content of every file below the directory."""
    found = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            with open(f"{folder}/{name}") as file:
                found[f"{folder}/{name}"[len(directory) + 1 :]] = file.read()
    return found


def seen(box: ns_util.Sandbox) -> dict[str, str]:
    """The files of /proc/driver/nvidia in the container."""
    return dict(box.enter(lambda: files(proc_nvidia_mask.PROC_DIR)))


def test_mask_shows_only_granted_gpus(image: Path) -> None:
    with ns_util.sandbox(image) as box:
        assert len(seen(box)) == 4 + len(GPUS) + len(CAPABILITIES)
        box.apply(Plan("test", (ProcMask(GPUS[1:2]),)))
        assert seen(box) == {
            "params": "ResmanDebugLevel: 4294967295\nDeviceFileMode: 438\nModifyDeviceFiles: 0\n",
            "version": VERSION,
            "registry": 'Binary: ""\n',
            f"gpus/{GPUS[1]}/information": f"Bus Location: {GPUS[1]}\n",
        }


def test_bus_ids_compare_without_case(image: Path) -> None:
    with ns_util.sandbox(image) as box:
        box.apply(Plan("test", (ProcMask(("0000:C1:00.0",)),)))
        assert box.enter(lambda: os.listdir("/proc/driver/nvidia/gpus")) == [GPUS[2]]


def test_mask_without_granted_gpu_is_empty(image: Path) -> None:
    with ns_util.sandbox(image) as box:
        box.apply(Plan("test", (ProcMask(()),)))
        assert box.enter(lambda: os.listdir("/proc/driver/nvidia/gpus")) == []


def test_mask_shows_only_granted_mig_capabilities(image: Path) -> None:
    granted = ("gpu0/mig/gi2/access", "gpu0/mig/gi2/ci0/access", "gpu0/mig/gi7/access")  # the last one no longer exists
    with ns_util.sandbox(image) as box:
        box.apply(Plan("test", (ProcMask(GPUS[:1], granted),)))
        kept = {path: text for path, text in seen(box).items() if path.startswith("capabilities/")}
    text = "DeviceFileMinor: {}\nDeviceFileMode: 292\nDeviceFileModify: 0\n"
    assert kept == {f"capabilities/{path}": text.format(CAPABILITIES[path]) for path in granted[:2]}


def test_mask_is_read_only(image: Path) -> None:
    with ns_util.sandbox(image) as box:
        box.apply(Plan("test", (ProcMask(GPUS),)))

        def write() -> int:
            try:
                open("/proc/driver/nvidia/params", "w")
            except OSError as error:
                return error.errno or 0
            return 0

        assert box.enter(write) == 30  # EROFS


def test_undo_removes_the_mask_and_the_host_is_unchanged(image: Path) -> None:
    host = ns_util.host_mounts()
    with ns_util.sandbox(image) as box:
        before = seen(box)
        box.apply(Plan("test", (ProcMask(()),)), lambda applied: applied.undo())
        assert seen(box) == before
        assert ns_util.host_mounts() == host


def test_missing_proc_directory_mounts_nothing(image: Path) -> None:
    shutil.rmtree(image / "proc/driver")
    with ns_util.sandbox(image) as box:
        box.apply(Plan("test", (ProcMask(GPUS),)))
        assert box.mounts() == []


def test_procfs_without_the_driver_is_unchanged(image: Path) -> None:
    with ns_util.sandbox(image, f"mount -t proc proc {image}/proc") as box:
        box.apply(Plan("test", (ProcMask(GPUS),)))
        assert box.mounts() == ["/proc"]


def test_fifo_or_link_at_the_target_is_not_followed(image: Path) -> None:
    proc = image / "proc/driver/nvidia"
    (proc / "version").unlink()
    os.mkfifo(proc / "version")
    (proc / "registry").unlink()
    os.symlink("/etc/passwd", proc / "registry")
    with ns_util.sandbox(image) as box:
        box.apply(Plan("test", (ProcMask(()),)))
        assert sorted(seen(box)) == ["params"]


@pytest.mark.parametrize(
    ("content", "masked"),
    [
        (b"", b"ModifyDeviceFiles: 0\n"),
        (b"ModifyDeviceFiles: 1\n", b"ModifyDeviceFiles: 0\n"),
        (b"a: 1\nModifyDeviceFiles: 0", b"a: 1\nModifyDeviceFiles: 0\n"),
    ],
)
def test_params_are_masked(content: bytes, masked: bytes) -> None:
    assert proc_nvidia_mask.masked_params(content) == masked
