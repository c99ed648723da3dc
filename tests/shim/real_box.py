"""Run programs under the shim over a real NVIDIA user-space driver, as in a container but without one.

The private path (/usr/lib/gpushare) exists only in a mount namespace of the program: an overlay mounts it over
/usr/lib, the driver's own files are bind-mounted into it, and the shim is in the default library directory. Needs root.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpushare.core.model import Device, Share
from gpushare.state import shm_abi, usage_reader

from tests.support.host import BUILD, TREE
from tools.nvidia_userland import Userland

GIB = 1 << 30
NONCE = 0x5EED
SONAMES = {"libcuda": "libcuda.so.1", "libnvidia-ml": "libnvidia-ml.so.1"}
UUID = "GPU-00000000-0000-0000-0000-000000000001"

# $1 the overlay, $2 its writable directory, $3 an empty directory for a private /dev, where the driver creates nodes as
# root; then pairs of file and mount point, "--", the program
_ENTER = """
set -e
mount --make-rslave /
mount -t overlay overlay -o "lowerdir=$1:/usr/lib" /usr/lib
mount --bind "$2" /usr/lib/gpushare/rw
mount -t tmpfs -o mode=755 dev "$3"
for node in null zero full random urandom; do touch "$3/$node"; mount --bind "/dev/$node" "$3/$node"; done
mkdir "$3/shm"
mount --bind /dev/shm "$3/shm"
ln -s /proc/self/fd "$3/fd"
mount --move "$3" /dev
shift 3
while [ "$1" != -- ]; do mount --bind "$1" "$2"; shift 2; done
shift
exec "$@"
"""


class RealBox:
    """`run` starts a program in new namespaces; `limits` and `usage` are the two shared files as bytes."""

    def __init__(self, directory: Path, drivers: Userland | dict[str, Path], shim: Path = BUILD / "shim") -> None:
        """`drivers`: a real driver, or name ("libcuda", "libnvidia-ml") -> file to use as the driver's library."""
        self.lower = directory / "lower"
        self.private = self.lower / "gpushare"
        self.rw = directory / "rw"
        self.binds: list[tuple[Path, str]] = []
        self.libdir = self.lower / "x86_64-linux-gnu"
        self.dev = directory / "dev"
        for path in (self.private / "driver", self.private / "rw", self.rw, self.libdir, self.dev):
            path.mkdir(parents=True)
        version = "0" if isinstance(drivers, dict) else drivers.version
        files = drivers if isinstance(drivers, dict) else {name: drivers.library(name) for name in SONAMES}
        for name in files:
            soname = SONAMES[name]
            real = self.private / "driver" / f"{name}-real.so.1"
            real.touch()
            self.binds.append((files[name], f"/usr/lib/gpushare/driver/{real.name}"))
            file = self.libdir / f"{name}.so.{version}"
            shutil.copy(shim / f"{name}.so", file)
            (self.libdir / soname).symlink_to(file.name)
            (self.libdir / f"{name}.so").symlink_to(soname)
        self.set_limits(limits())
        (self.rw / "usage").write_bytes(shm_abi.pack_usage(NONCE, 1))
        (self.rw / "usage").chmod(0o666)

    def set_limits(self, data: bytes | None) -> None:
        """Replace the limits file; None removes it."""
        path = self.private / "limits"
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data)

    def usage(self) -> usage_reader.Usage:
        return usage_reader.read_usage((self.rw / "usage").read_bytes())

    def run(self, *program: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program in the box with no environment but `env`; its output is text."""
        binds = [str(word) for pair in self.binds for word in pair]
        command = ["unshare", "-m", "sh", "-c", _ENTER, "sh", self.lower, self.rw, self.dev, *binds, "--", *program]
        return subprocess.run(
            [str(word) for word in command],
            env={"PATH": os.environ["PATH"], **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def probe(
        self, what: str, *arguments: Any, env: dict[str, str] | None = None, script: str = "real_probe.py"
    ) -> Any:
        """Call a function of a probe script in the box and return its result."""
        program = (sys.executable, "-I", TREE / "tests/shim" / script, what, json.dumps(arguments))
        done = self.run(*program, env=env)
        assert done.returncode == 0, f"probe {what} ended with {done.returncode}: {done.stderr}"
        return json.loads(done.stdout)


def limits(memory_limit_bytes: int | None = 4 * GIB, uuid: str = UUID) -> bytes:
    """Return a limits file that grants one device."""
    device = Device(0, uuid, 0, "0000:01:00.0", "none", 16 * GIB, 300 << 20)
    return shm_abi.pack_limits([Share(0, device, memory_limit_bytes)], NONCE)
