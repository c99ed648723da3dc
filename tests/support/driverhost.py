"""Driver features that simulator/simhost.py lacks: graphics, sockets, gated features, IMEX, MIG."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from simulator import hostfiles, layout, models, simhost

VERSION = simhost.VERSION
LIBDIR = simhost.LIBDIR
GRAPHICS = {
    "libGLX_nvidia": "0",
    "libEGL_nvidia": "0",
    "libnvidia-glcore": "",
    "libnvidia-encode": "1",
    "libnvidia-allocator": "1",
    "libvdpau_nvidia": "1",
}
VENDOR_FILES = ("usr/share/vulkan/icd.d/nvidia_icd.json", "usr/share/glvnd/egl_vendor.d/10_nvidia.json")
MIG_UUIDS = ("MIG-0f000000-0000-4000-8000-000000000001", "MIG-0f000000-0000-4000-8000-000000000002")


def write(path: Path, content: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text(content)
    return path


def add_graphics(root: Path) -> None:
    """Libraries for graphics and video, vendor files, firmware, the modeset node."""
    empty = (simhost.BUILT / "libempty.so").read_bytes()
    for stem, suffix in GRAPHICS.items():
        library = hostfiles.placeholder(empty, f"{stem}.so.{suffix or VERSION}")
        (root / LIBDIR / f"{stem}.so.{VERSION}").write_bytes(library)
    for name in VENDOR_FILES:
        write(root / name, json.dumps({"ICD": {"library_path": "libGLX_nvidia.so.0"}}))
    write(root / f"lib/firmware/nvidia/{VERSION}/gsp_tu10x.bin", "firmware")
    write(root / "dev/nvidia-modeset")


def add_32_bit(root: Path, *stems: str) -> None:
    """The 32-bit set: only the headers are read."""
    for stem in stems:
        path = write(root / f"usr/lib/i386-linux-gnu/{stem}.so.{VERSION}")
        path.write_bytes(elf32())


def elf_header(kind: int = 3, bits: int = 64, machine: str = "") -> bytes:
    """The begin of a program (`kind` 2 or 3) or library (3), by default for this machine: what gpushare reads."""
    number = {"x86_64": 62, "aarch64": 183, "i386": 3}[machine or os.uname().machine]
    return (b"\x7fELF" + bytes([bits // 32, 1, 1])).ljust(16, b"\0") + struct.pack("<HHI", kind, number, 1)


def elf32() -> bytes:
    """The smallest shared object for i386 that has no dynamic section."""
    header = struct.pack("<HHIIIIIHHHHHH", 3, 3, 1, 0, 52, 0, 0, 52, 32, 0, 0, 0, 0)
    return b"\x7fELF\x01\x01\x01".ljust(16, b"\0") + header


def add_features(root: Path) -> None:
    for name in ("nvidia-fs0", "nvidia-fs1", "gdrdrv", "nvidia-nvswitchctl"):
        write(root / "dev" / name)
    for name in ("uverbs0", "rdma_cm"):
        write(root / "dev/infiniband" / name)
    for channel in range(2):
        write(root / f"dev/nvidia-caps-imex-channels/channel{channel}")
    write(root / "etc/cufile.json", "{}")
    write(root / "run/udev/data", "")


def add_mig(root: Path, minor: int = 0, memory_bytes: int = 4 << 30) -> None:
    """Two MIG devices on one GPU, as the kernel's directories and (in the marker) NVML describe them."""
    capabilities = root / "proc/driver/nvidia/capabilities"
    table = {"config": 1, "monitor": 2}
    devices = []
    for index, instance in enumerate((1, 2)):
        table[f"gpu{minor}/gi{instance}/access"] = 9 * instance + 3
        table[f"gpu{minor}/gi{instance}/ci0/access"] = 9 * instance + 4
        devices.append([minor, MIG_UUIDS[index], index, instance, 0, memory_bytes])
    for name, number in table.items():
        path = name.replace("/gi", "/mig/gi", 1) if "/" in name else f"mig/{name}"
        write(capabilities / path, f"DeviceFileMinor: {number}\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
        write(root / f"dev/nvidia-caps/nvidia-cap{number}")
    write(root / "proc/driver/nvidia-caps/mig-minors", "".join(f"{name} {n}\n" for name, n in table.items()))
    set_facts(root, mig=devices)


def divide(
    root: Path, minor: int = 0, memory_bytes: int = 4 << 30, profile: str = "", late_return_ms: float = 5.0
) -> tuple[Path, Path]:
    """Like add_mig, but with usable devices that the simulated NVML reports by itself; returns their device files, for
    the ledger. The GPU cannot be used as a whole then. `profile`: the name of a MIG device in simulator/models.py."""
    name = profile or f"{simhost.DEFAULT_MODEL} MIG 1g.{memory_bytes >> 30}gb"
    like = models.model_of(name)
    memory_bytes = like.memory_bytes if profile else memory_bytes
    add_mig(root, minor, memory_bytes)
    set_facts(root, mig=[])
    gpu = root / f"dev/nvidia{minor}"
    with open(gpu, "r+b") as file:
        index = layout.CONFIG.unpack(file.read(layout.CONFIG.size))[3]
        file.seek(layout.INDEX_OFFSET)
        file.write(struct.pack("<I", index | layout.DIVIDED))
    made = []
    for number, instance in enumerate((1, 2)):
        which = index | number + 1 << 8 | instance << 16
        sizes = memory_bytes, like.context_bytes, like.reserved_bytes
        part = hostfiles.Gpu(which, minor, MIG_UUIDS[number], name, index + 1, *sizes)
        made.append(root / f"dev/nvidia-caps/nvidia-cap{9 * instance + 4}")
        simhost.write_device(made[-1], part, late_return_ms)
    return made[0], made[1]


def set_facts(root: Path, **facts: object) -> None:
    """Facts that the simulated NVML does not report: brand, arch, mig."""
    marker = root / simhost.MARKER
    try:
        old = json.loads(marker.read_text())
    except (FileNotFoundError, ValueError):
        old = {}
    write(marker, json.dumps({**old, **facts}))


@contextmanager
def listening(root: Path, name: str) -> Iterator[socket.socket]:
    """The socket of a daemon below the root."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path.parent, os.O_PATH)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{fd}/{path.name}")  # the whole path can exceed a socket address
            listener.listen()
            path.chmod(0o666)
            yield listener
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)
