"""Run one command under the shim and the simulated driver, without a hook or a container runtime.

    python3 tests/shim/box.py --memory 4Gi [--gpus N] [--simhost DIR] -- COMMAND...

A box is a directory with a limits file, a usage file and a simulated host. Each `run` gives its command private mount
and pid namespaces, in which /usr/lib/gpushare, <libdir>/libcuda.so.1 and /dev are as in a container. All runs of a box
share its limits, like the processes of a container. /usr is an overlay with a tmpfs on top: the host does not change,
and the mounts end with the last process.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    from gpushare.core.model import Device

    from simulator.models import Costs

TREE = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(TREE), str(TREE / "hook")]

GIB = 1 << 30
CONTEXT_BYTES = 300 << 20  # memory of a context in the simulated driver
LIBDIR = "/usr/lib/x86_64-linux-gnu"
PRIVATE = "/usr/lib/gpushare"
VERSION = "535.261.03"
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
HOST_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


def host_devices(simhost: Path, memory_bytes: int, context_bytes: int) -> list[Device]:
    """List the devices of a simulated host in PCI order; the arguments replace what NVML would report."""
    from gpushare.core.model import Device

    devices = []
    for index, path in enumerate(sorted(simhost.glob("proc/driver/nvidia/gpus/*/information"))):
        lines = (line.partition(":") for line in path.read_text().splitlines())
        facts = {key.strip(): value.strip() for key, _, value in lines}
        uuid, minor, bus_id = facts["GPU UUID"], int(facts["Device Minor"]), path.parent.name
        devices.append(Device(index, uuid, minor, bus_id, facts["Model"], memory_bytes, context_bytes))
    return devices


class Box:
    """A container without a runtime: limits, usage and simulated devices.

    `memory`: bytes per device in slot order; None = unlimited. A device without an entry is not granted.
    `shim`: build directory of the shim; default build/shim, or its sibling named GPUSHARE_TEST_SHIM (make test-asan).
    `compute`: percent per device. The box then has activity files in the directory `company`, which the boxes of one
    simulated host can share; by default it has its own.
    `whole`: bytes per device on device and host together, for oversubscribed shares.
    `lending`: how memory from `memory` up to `whole` is lent: movable or evict.
    `costs`: of the simulated driver, when the box makes the host (simulator/models.py).
    `round_ms`: of turns on all devices; 0: time slices.
    `migration_slice`: its length in microseconds, and the bytes of each device reserved for the tenant that has it.
    """

    def __init__(
        self,
        memory: Sequence[Optional[int]] = (4 * GIB,),
        gpus: int = 1,
        gpu_bytes: int = 16 * GIB,
        simhost: Optional[Path] = None,
        shim: Optional[Path] = None,
        driver: Optional[Path] = None,
        compute: Optional[Sequence[int]] = None,
        company: Optional[Path] = None,
        whole: Optional[Sequence[int]] = None,
        migration_slice: tuple[int, int] = (0, 0),
        lending: str = "",
        costs: Optional[Costs] = None,
        round_ms: int = 0,
    ) -> None:
        from gpushare.core.model import Share
        from gpushare.state.shm_abi import pack_limits, pack_usage

        from simulator.simhost import make_simhost
        from tests.shim.company import join

        self._temporary = tempfile.TemporaryDirectory(prefix="box-", dir=TREE / "build")
        self.directory = Path(self._temporary.name)
        self.simhost = simhost or make_simhost(self.directory / "host", gpus=gpus, memory_bytes=gpu_bytes, costs=costs)
        self.shim = shim or TREE / "build" / os.environ.get("GPUSHARE_TEST_SHIM", "shim")
        self.driver = driver or (self.simhost / LIBDIR[1:] / "libcuda.so.1").resolve()
        beside = self.driver.with_name("libnvidia-ml.so.1")  # of another machine
        self.nvml = beside if driver and beside.exists() else self.simhost / LIBDIR[1:] / "libnvidia-ml.so.1"
        self.devices = host_devices(self.simhost, gpu_bytes, CONTEXT_BYTES)
        self.nonce = int.from_bytes(os.urandom(8), "little")
        percent = [*(compute or ()), *(100,) * len(self.devices)]
        shares = [
            Share(
                *(slot, device, limit, None if percent[slot] == 100 else percent[slot]),
                virtual_bytes=whole[slot] if whole else 0,
                lending=lending,
            )
            for slot, (device, limit) in enumerate(zip(self.devices, memory))
        ]
        self.limits = self.directory / "limits"
        self.usage = self.directory / "rw" / "usage"
        self.usage.parent.mkdir()
        self.usage.parent.chmod(0o1777)
        self.limits.write_bytes(
            pack_limits(
                shares,
                self.nonce,
                turn_us=migration_slice[0],
                turn_mib=[migration_slice[1] >> 20] * len(shares),
                round_ms=round_ms,
            )
        )
        self.usage.write_bytes(pack_usage(self.nonce, len(shares)))
        self.limits.chmod(0o444)
        self.usage.chmod(0o666)
        self.company = company or self.directory / "company"
        self.page = [join(self.company, share.device.uuid) for share in shares] if compute else []
        for slot, number in enumerate(self.page):
            self.set_limit(slot, page=number)
            self._tell(slot)

    def __enter__(self) -> Box:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self._temporary.cleanup()

    def set_limit(self, slot: int = 0, **fields: int) -> None:
        """Change fields of a device's limits while processes run, as the host does: see gpushare_abi.h.

        Unlike the other fields, `page` has no second copy in the file.
        """
        from gpushare.state.shm_abi import DEVICE_SIZE, LAYOUTS, offset
        from gpushare.system.syscalls import futex_wake

        known = {name for name, _ in LAYOUTS["gs_device_limit"]}
        start = offset("gs_limits", "device") + slot * DEVICE_SIZE
        at = offset("gs_limits", "generation")
        with self.limits.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            for prefix in ("next_", ""):
                for name, value in fields.items():
                    field = prefix + name if prefix + name in known else name
                    place, size = start + offset("gs_device_limit", field), 8 if field.endswith("_bytes") else 4
                    # not pack_into, which writes zeros first
                    data[place : place + size] = value.to_bytes(size, "little")
                data[at : at + 8] = (int.from_bytes(data[at : at + 8], "little") + 1).to_bytes(8, "little")
            futex_wake(data, at)
        if self.page:
            self._tell(slot)

    def _tell(self, slot: int) -> None:
        """Publish what the limits file grants to the other containers: see limit_update.py."""
        from gpushare.state.shm_abi import DEVICE_SIZE, offset

        from tests.shim.company import grant

        device, limits = offset("gs_limits", "device") + slot * DEVICE_SIZE, self.limits.read_bytes()
        percent, priority, weight, flags = (
            struct.unpack_from("<I", limits, device + offset("gs_device_limit", name))[0]
            for name in ("compute_percent", "priority", "weight", "flags")
        )
        word = percent | flags << 8 | priority << 16 | weight << 32
        grant(self.company, self.devices[slot].uuid, self.page[slot], word)

    def pages(self, slot: int = 0) -> Path:
        """Return the box's own activity file of a device."""
        return self.company / self.devices[slot].uuid / str(self.page[slot])

    def device(self, slot: int = 0) -> str:
        """Return the path of the simulated device's file, for the ledger."""
        return str(self.simhost / "dev" / f"nvidia{self.devices[slot].minor}")

    def command(self, args: Sequence[str]) -> list[str]:
        """Return the command line that runs `args` inside the box."""
        from tests.shim.sanitized import around

        inside = {
            "scratch": str(self.directory),
            "simhost": str(self.simhost),
            "shim": str(self.shim),
            "driver": str(self.driver),
            "nvml": str(self.nvml),
            "company": str(self.company) if self.page else "",
            "pages": " ".join(f"{self.devices[slot].uuid}:{number}" for slot, number in enumerate(self.page)),
        }
        spread = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private", "--"]
        return [*spread, sys.executable, "-I", "-S", __file__, "--inside", json.dumps(inside), "--"] + [
            *around(self.shim.name),
            *map(str, args),
        ]

    def popen(self, args: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(self.command(args), text=True, **options)

    def run(self, args: Sequence[str], timeout_s: float = 100, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run the command to its end and capture its output."""
        return subprocess.run(self.command(args), text=True, timeout=timeout_s, capture_output=True, **options)


# ---- inside the namespaces: standard library only ------------------------------------------------------------------


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2); OSError names the target."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), kind.encode() or None, flags, data.encode() or None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source}: {os.strerror(number)}", target)


def bind(source: str, target: str, read_only: bool = True) -> None:
    """Bind-mount a file or directory onto a target, which is created if it is missing."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.lexists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        open(target, "xb").close()
    mount(source, target, flags=MS_BIND)
    if read_only:
        mount(source, target, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def make_devices(simhost: str, scratch: str) -> None:
    """Fill /dev with some ordinary devices and the simulated ones."""
    stage = os.path.join(scratch, "dev")
    mount("tmpfs", stage, "tmpfs", MS_NOSUID, "mode=755")
    for name in HOST_DEVICES:
        bind(f"/dev/{name}", f"{stage}/{name}", read_only=False)
    os.makedirs(f"{stage}/shm", exist_ok=True)
    mount("tmpfs", f"{stage}/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    os.symlink("/proc/self/fd", f"{stage}/fd")
    for name in os.listdir(f"{simhost}/dev"):
        bind(f"{simhost}/dev/{name}", f"{stage}/{name}", read_only=False)
    mount(stage, "/dev", flags=MS_BIND | MS_REC)


def enter(inside: dict[str, str]) -> None:
    """Give this process a container's view of the file system. On the host `scratch` only gains empty directories."""
    scratch, simhost = inside["scratch"], inside["simhost"]
    for name in ("over", "dev"):
        os.makedirs(os.path.join(scratch, name), exist_ok=True)
    over = os.path.join(scratch, "over")
    mount("tmpfs", over, "tmpfs", 0, "mode=755")
    for name in ("upper", "work"):
        os.mkdir(f"{over}/{name}")
    mount("overlay", "/usr", "overlay", 0, f"lowerdir=/usr,upperdir={over}/upper,workdir={over}/work")
    for stem in ("libcuda", "libnvidia-ml"):
        bind(f"{inside['shim']}/{stem}.so", f"{LIBDIR}/{stem}.so.{VERSION}")
        for link, text in ((f"{stem}.so.1", f"{stem}.so.{VERSION}"), (f"{stem}.so", f"{stem}.so.1")):
            if os.path.lexists(f"{LIBDIR}/{link}"):
                os.unlink(f"{LIBDIR}/{link}")
            os.symlink(text, f"{LIBDIR}/{link}")
    for source, stem in ((inside["driver"], "libcuda"), (inside["nvml"], "libnvidia-ml")):
        bind(source, f"{PRIVATE}/driver/{stem}-real.so.1")
    if os.path.exists(f"{scratch}/limits"):
        bind(f"{scratch}/limits", f"{PRIVATE}/limits")
    bind(f"{scratch}/rw", f"{PRIVATE}/rw", read_only=False)
    if inside["company"]:
        bind(inside["company"], f"{PRIVATE}/peers")
    for word in inside["pages"].split():
        uuid, _, number = word.partition(":")
        bind(f"{inside['company']}/{uuid}/{number}", f"{PRIVATE}/pages/{uuid}", read_only=False)
    make_devices(simhost, scratch)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def quantity(text: str) -> int:
    """Parse "4Gi", "512Mi" or a plain number into bytes."""
    units = {"Ki": 10, "Mi": 20, "Gi": 30}
    return int(text[:-2]) << units[text[-2:]] if text[-2:] in units else int(text)


def main() -> int:
    if sys.argv[1] == "--inside":
        enter(json.loads(sys.argv[2]))
        os.execvp(sys.argv[4], sys.argv[4:])
    parser = argparse.ArgumentParser(description="Run a command with a limited, simulated GPU.")
    parser.add_argument("--memory", type=quantity, default=4 * GIB, help="of each device, like 4Gi")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--compute", type=int, help="percent of each device")
    parser.add_argument("--simhost", type=Path, help="use this simulated host instead of a fresh one")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    compute = [options.compute] * options.gpus if options.compute else None
    box = Box([options.memory] * options.gpus, gpus=options.gpus, simhost=options.simhost, compute=compute)
    with box, box.popen(options.command) as process:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command handles SIGINT
        return process.wait()


if __name__ == "__main__":
    sys.exit(main())
