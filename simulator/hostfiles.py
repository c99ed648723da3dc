"""The text files and placeholder libraries of a simulated host, in the real driver's formats."""

from __future__ import annotations

from typing import NamedTuple

# Library stem -> soname suffix: the libraries that a 535 driver ships for "utility" and "compute", except the two that
# are simulated.
PLACEHOLDERS = {
    "libnvidia-ptxjitcompiler": "1",
    "libnvidia-nvvm": "4",
    "libnvidia-opencl": "1",
    "libnvidia-cfg": "1",
    "libnvidia-allocator": "1",
    "libcudadebugger": "1",
    "libnvidia-pkcs11": "",
    "libnvidia-pkcs11-openssl3": "",
}
PLACEHOLDER_SONAME = b"libgpushare-sim-placeholder.so.000000000000"

VERSION_TEXT = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Tue Jun 10 20:09:46 UTC 2025
GCC version:  gcc version 12.2.0 (Debian 12.2.0-14+deb12u1)
"""

PARAMS_TEXT = """\
ResmanDebugLevel: 4294967295
RmLogonRC: 1
ModifyDeviceFiles: 1
DeviceFileUID: 0
DeviceFileGID: 0
DeviceFileMode: 438
InitializeSystemMemoryAllocations: 1
UsePageAttributeTable: 4294967295
EnableMSI: 1
EnablePCIeGen3: 0
MemoryPoolSize: 0
KMallocHeapMaxSize: 0
VMallocHeapMaxSize: 0
IgnoreMMIOCheck: 0
EnableStreamMemOPs: 0
EnableUserNUMAManagement: 1
NvLinkDisable: 0
RmProfilingAdminOnly: 1
PreserveVideoMemoryAllocations: 0
EnableS0ixPowerManagement: 0
S0ixPowerManagementVideoMemoryThreshold: 256
DynamicPowerManagement: 3
DynamicPowerManagementVideoMemoryThreshold: 200
RegisterPCIDriver: 1
EnablePCIERelaxedOrderingMode: 0
EnableResizableBar: 0
EnableGpuFirmware: 18
EnableGpuFirmwareLogs: 2
EnableDbgBreakpoint: 0
OpenRmEnableUnsupportedGpus: 0
DmaRemapPeerMmio: 1
RegistryDwords: ""
RegistryDwordsPerDevice: ""
RmMsg: ""
GpuBlacklist: ""
TemporaryFilePath: ""
ExcludedGpus: ""
"""

INFORMATION_TEXT = """\
Model: \t\t {model}
IRQ:   \t\t {irq}
GPU UUID: \t {uuid}
Video BIOS: \t 90.02.2e.00.0c
Bus Type: \t PCIe
DMA Size: \t 47 bits
DMA Mask: \t 0x7fffffffffff
Bus Location: \t {bus_id}
Device Minor: \t {minor}
GPU Firmware: \t {version}
GPU Excluded:\t No
"""


class Gpu(NamedTuple):
    """One simulated device."""

    index: int  # type: ignore[assignment]  # deliberately hides tuple.index
    minor: int
    uuid: str  # "GPU-..."
    model: str
    bus: int
    memory_bytes: int
    context_bytes: int
    reserved_bytes: int = 0
    compute_mode: int = 0

    @property
    def bus_id(self) -> str:
        """Return the PCI address as in /proc/driver/nvidia/gpus (NVML prints a domain of eight digits)."""
        return f"0000:{self.bus:02x}:00.0"


def information(gpu: Gpu, version: str) -> str:
    return INFORMATION_TEXT.format(
        model=gpu.model, irq=40 + gpu.index, uuid=gpu.uuid, bus_id=gpu.bus_id, minor=gpu.minor, version=version
    )


def placeholder(empty: bytes, soname: str) -> bytes:
    """Return the empty shared library with another soname, written over the reserved one in its string table."""
    name = soname.encode()
    if empty.count(PLACEHOLDER_SONAME) != 1 or len(name) > len(PLACEHOLDER_SONAME):
        raise ValueError(f"cannot give the placeholder library the soname {soname!r}")
    return empty.replace(PLACEHOLDER_SONAME, name.ljust(len(PLACEHOLDER_SONAME), b"\0"))
