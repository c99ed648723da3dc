"""Run one command under the shim over this machine's driver, in a private mount namespace.

As in a container, /usr/lib/gpushare has the real libraries, the limits and the usage file, and the shim is mounted over
every libcuda and libnvidia-ml that a loader could find. Only the simulator needs more: its library and its /dev. A user
other than root gets a user namespace with root.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.shim.box import MS_BIND, MS_NODEV, MS_NOSUID, MS_RDONLY, MS_REC, MS_REMOUNT, bind, make_devices, mount

if TYPE_CHECKING:
    from gpushare.state.usage_reader import Usage

    from tests.hardware.machine import Machine

TREE = Path(__file__).resolve().parents[2]
PRIVATE = "/usr/lib/gpushare"
USR_LIB = "/usr/lib"
STEMS = ("libcuda", "libnvidia-ml")
CLONE_NEWNS, CLONE_NEWUSER, MS_SLAVE = 0x00020000, 0x10000000, 1 << 19
CANNOT = 97  # exit code: such a namespace cannot be created here; stderr has the reason in one line
SIM_LIBDIR = "x86_64-linux-gnu"


class Limit(NamedTuple):
    """Limits of the processes in a place on its device. None: no limit."""

    memory_bytes: Optional[int] = None
    compute_percent: Optional[int] = None
    slice_ns: int = 0  # the device's time slice and switch cost; 0: the rate limiter's default
    switch_ns: int = 0
    round_ms: int = 0  # of turns; 0: time slices


class Place:
    """One share. All commands started in it count together, like the processes of a container.

    `company`: the directory of activity files that places share; without one this place has no peers.
    """

    def __init__(self, machine: Machine, limit: Limit, company: Optional[Path] = None) -> None:
        from gpushare.core.model import Device, Share
        from gpushare.gpu.contexts import estimated_bytes
        from gpushare.state import shm_abi

        from tests.shim.company import grant, join

        self._temporary = tempfile.TemporaryDirectory(prefix="gpu-check-")
        self.directory = Path(self._temporary.name)
        nonce = int.from_bytes(os.urandom(8), "little")
        context = machine.context_bytes
        if context is None:  # not measured: what gpushare itself would assume
            context = estimated_bytes(machine.model, machine.arch, machine.multiprocessors)
        device = Device(0, machine.uuid, 0, machine.bus_id, machine.model, machine.total_bytes, context)
        share = Share(0, device, limit.memory_bytes, limit.compute_percent)
        for name in ("lower/gpushare", "rw", "dev"):
            (self.directory / name).mkdir(parents=True)
        company = company or self.directory / "company"
        number = join(company, machine.uuid)
        grant(company, machine.uuid, number, shm_abi.granted(share))
        limits = bytearray(shm_abi.pack_limits([share], nonce, round_ms=limit.round_ms))
        for name, value in (("page", number), ("slice_ns", limit.slice_ns), ("switch_ns", limit.switch_ns)):
            at = shm_abi.offset("gs_limits", "device") + shm_abi.offset("gs_device_limit", name)
            struct.pack_into("<I", limits, at, value)
        (self.directory / "limits").write_bytes(limits)
        (self.directory / "limits").chmod(0o444)
        usage = self.directory / "rw" / "usage"
        usage.write_bytes(shm_abi.pack_usage(nonce, 1))
        usage.chmod(0o666)
        if machine.simhost:
            self._sim_library(machine)
        self._inside = json.dumps(
            {
                "scratch": str(self.directory),
                "shim": str(machine.shim),
                "real": {stem: str(path) for stem, path in machine.real.items()},
                "covers": [(stem, str(path)) for stem, path in machine.covers],
                "simhost": str(machine.simhost or ""),
                "peers": str(company / machine.uuid),
                "pages": str(company / machine.uuid / str(number)),
                "uuid": machine.uuid,
            }
        )

    def _sim_library(self, machine: Machine) -> None:
        libdir = self.directory / "lower" / SIM_LIBDIR
        libdir.mkdir()
        for stem in STEMS:
            name = machine.real[stem].name
            (libdir / name).write_bytes((machine.shim / f"{stem}.so").read_bytes())
            (libdir / f"{stem}.so.1").symlink_to(name)

    def __enter__(self) -> Place:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self._temporary.cleanup()

    def command(self, args: list[str]) -> list[str]:
        """Return the command line that runs `args` inside."""
        return [sys.executable, "-I", "-S", __file__, self._inside, *args]

    def usage(self) -> Usage:
        """Return what the shim has written of this place into the usage file."""
        from gpushare.state import usage_reader

        return usage_reader.read_usage((self.directory / "rw" / "usage").read_bytes())

    def refused(self) -> int:
        """Return how many allocations the shim refused in this place."""
        return self.usage().refused[0]

    def charged_bytes(self) -> int:
        """Return the bytes that the shim has charged to the processes in this place."""
        return self.usage().used_bytes(0)


# ---- inside --------------------------------------------------------------------------------------------------------


def own_namespace() -> None:
    """Create a private mount namespace. OSError names the refused operation."""
    uid, gid, root = os.geteuid(), os.getegid(), os.geteuid() == 0
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS if root else CLONE_NEWNS | CLONE_NEWUSER) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "mount namespace" if root else "user and mount namespace")
    if not root:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            Path("/proc/self", name).write_text(text)
    mount("none", "/", flags=MS_SLAVE | MS_REC)


def lay_over_usr_lib(scratch: str) -> None:
    """Add `scratch`/lower to /usr/lib: with an overlay, or, if there are none, by bind-mounting every entry."""
    try:
        mount("overlay", USR_LIB, "overlay", 0, f"lowerdir={scratch}/lower:{USR_LIB}")
        return
    except OSError as error:
        if os.path.isdir(f"{scratch}/lower/{SIM_LIBDIR}"):
            raise error
    stage = os.path.join(scratch, "usr-lib")
    os.makedirs(stage, exist_ok=True)
    mount("tmpfs", stage, "tmpfs", 0, "mode=755")
    os.mkdir(f"{stage}/{os.path.basename(PRIVATE)}")
    for entry in os.scandir(USR_LIB):
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), f"{stage}/{entry.name}")
        elif entry.is_dir() or entry.is_file():
            bind(entry.path, f"{stage}/{entry.name}", read_only=False)
    mount(stage, USR_LIB, flags=MS_BIND | MS_REC)


def put_read_only(source: str, target: str) -> None:
    """Bind-mount read-only. If the kernel cannot (gVisor), the mount stays writable."""
    bind(source, target, read_only=False)
    try:
        mount(source, target, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    except OSError:
        pass


def enter(inside: dict[str, Any]) -> None:
    """Give this process a container's view of the file system. Needs its own namespace."""
    scratch, real, covers = inside["scratch"], inside["real"], inside["covers"]
    if inside["simhost"] or not os.path.isdir(PRIVATE):
        lay_over_usr_lib(scratch)
    mount("tmpfs", PRIVATE, "tmpfs", MS_NOSUID, "mode=755")
    for stem, path in real.items():
        put_read_only(path, f"{PRIVATE}/driver/{stem}-real.so.1")
    put_read_only(f"{scratch}/limits", f"{PRIVATE}/limits")
    bind(f"{scratch}/rw", f"{PRIVATE}/rw", read_only=False)
    put_read_only(inside["peers"], f"{PRIVATE}/peers/{inside['uuid']}")
    bind(inside["pages"], f"{PRIVATE}/pages/{inside['uuid']}", read_only=False)
    for stem, path in covers:
        bind(f"{inside['shim']}/{stem}.so", path, read_only=False)
    if inside["simhost"]:
        make_devices(inside["simhost"], scratch)


def main() -> NoReturn:
    try:
        own_namespace()
        enter(json.loads(sys.argv[1]))
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(CANNOT)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
