"""Find this machine's driver files and GPU, and describe the machine."""

from __future__ import annotations

import glob
import os
import platform
import shutil
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Optional

from tests.hardware import processes
from tests.hardware.place import STEMS, TREE

FIND_S = 60.0  # the first cuInit takes seconds if no process keeps the driver loaded
DIRECTORIES = (
    *("/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/lib64", "/usr/lib"),
    *("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib/wsl/lib", "/run/opengl-driver/lib"),
    *("/usr/local/cuda*/compat", "/usr/lib64/nvidia", "/usr/lib/nvidia*"),
)
ELF64 = b"\x7fELF\x02"
MACHINES = {"x86_64": 62, "aarch64": 183}
GIB = 1 << 30


class Machine(NamedTuple):
    """One GPU, and how to reach it. `libcuda`, `libnvml`: files for a native program."""

    libcuda: str
    libnvml: str
    shim: Path
    real: dict[str, Path]  # stem -> the file that a native program loads
    covers: tuple[tuple[str, Path], ...]  # every file that a loader could choose instead
    simhost: Optional[Path]
    model: str
    uuid: str
    bus_id: str
    total_bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    driver_version: str
    cuda_version: int
    why_simulated: str = ""
    context_bytes: Optional[int] = None  # the next two are set once they are measured
    slices_ns: tuple[int, int] = (0, 0)  # a time slice, a switch to another context

    @property
    def arch(self) -> str:
        """The compute capability, as NVML writes it."""
        return "{}.{}".format(*self.capability)

    def facts(self) -> dict[str, Any]:
        """Return the facts for the JSON."""
        return {
            "model": self.model,
            "uuid": self.uuid,
            "memory_bytes": self.total_bytes,
            "compute_capability": self.arch,
            "multiprocessors": self.multiprocessors,
        }


def find(shim: Path, simulate: bool, work: Path) -> Machine:
    """Find this machine's GPU, or create a simulated one. Raises Failed when there is neither."""
    reason = "asked for"
    if not simulate:
        choose_device()
        try:
            return _real(shim)
        except (processes.Failed, processes.Absent) as error:
            reason = str(error)
    from simulator.simhost import CHECKPOINTS, LIBDIR, make_simhost

    if not (TREE / "build" / "sim").is_dir():
        raise processes.Failed(f"no GPU ({reason}), and no simulator: make build makes build/sim")
    root = make_simhost(work / "host", gpus=1, memory_bytes=16 * GIB, late_return_ms=0, driver=CHECKPOINTS)
    real = {stem: (root / LIBDIR / f"{stem}.so.1").resolve() for stem in STEMS}
    return _ask(shim, real, (), root, reason)


def choose_device() -> None:
    """Choose one GPU for all programs: the first in CUDA_VISIBLE_DEVICES, otherwise the first by PCI address."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"


def _real(shim: Path) -> Machine:
    if not os.path.exists("/dev/nvidia-uvm") and shutil.which("nvidia-modprobe"):
        # Creates the nodes that root's first CUDA program would create, and loads a missing module.
        _output("nvidia-modprobe", "-c", "0", "-u")
    # A shim compiled without nvml.h replaces only libcuda; without any shim, the native checks run.
    stems = [stem for stem in STEMS if (shim / f"{stem}.so").exists()] or STEMS
    covers = tuple((stem, path) for stem, path in _files() if stem in stems)
    if not any(stem == "libcuda" for stem, _ in covers):
        raise processes.Absent("no libcuda.so.1 is installed")
    found = processes.ask("loaded", time.monotonic() + FIND_S, directories=_directories_of(covers))
    if found["directory"]:
        os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, (os.environ.get("LD_LIBRARY_PATH"), found["directory"])))
    real = {stem: Path(path) for stem, path in found["files"].items() if stem in stems}
    every = dict.fromkeys([*covers, *((stem, path) for stem, path in real.items())])
    return _ask(shim, real, tuple(every), None, "")


def _directories_of(covers: tuple[tuple[str, Path], ...]) -> list[str]:
    return list(dict.fromkeys(str(path.parent) for stem, path in covers if stem == "libcuda"))


def _ask(
    shim: Path,
    real: dict[str, Path],
    covers: tuple[tuple[str, Path], ...],
    simhost: Optional[Path],
    reason: str,
) -> Machine:
    libcuda = str(real["libcuda"]) if simhost else "libcuda.so.1"
    libnvml = str(real.get("libnvidia-ml", "")) if simhost else "libnvidia-ml.so.1"
    deadline = time.monotonic() + FIND_S
    facts = processes.ask("device", deadline, library=libcuda)
    return Machine(
        libcuda=libcuda,
        libnvml=libnvml,
        shim=shim,
        real=real,
        covers=covers,
        simhost=simhost,
        driver_version=_driver_version(real["libcuda"], bool(simhost)),
        why_simulated=reason,
        **{**facts, "capability": tuple(facts["capability"])},
    )


def _driver_version(libcuda: Path, simulated: bool) -> str:
    """Return the version of the loaded module, otherwise the one in the file's name."""
    for path in () if simulated else ("/sys/module/nvidia/version", "/proc/driver/nvidia/version"):
        try:
            words = Path(path).read_text().split()
        except OSError:
            continue
        for word in words:
            if word[0].isdigit() and "." in word:
                return word
    return libcuda.name.partition(".so.")[2]


def _files() -> Iterator[tuple[str, Path]]:
    """Find every libcuda and libnvidia-ml of this architecture, with links resolved."""
    directories = [word for word in os.environ.get("LD_LIBRARY_PATH", "").split(":") if word]
    directories += sorted({os.path.dirname(path) for path in _cache()})
    directories += [path for pattern in DIRECTORIES for path in sorted(glob.glob(pattern))]
    seen = set()
    for directory in dict.fromkeys(directories):
        for stem in STEMS:
            for path in sorted(Path(directory).glob(f"{stem}.so*")):
                file = path.resolve()
                if file not in seen and _is_ours(file):
                    seen.add(file)
                    yield stem, file


def _cache() -> list[str]:
    """Return the paths of the driver's libraries in ld.so.cache."""
    text = _output("ldconfig", "-p") or _output("/sbin/ldconfig", "-p")
    paths = (line.rpartition("=> ")[2] for line in text.splitlines())
    return [path for path in paths if os.path.basename(path).startswith(tuple(f"{stem}.so" for stem in STEMS))]


def _output(*command: str) -> str:
    """Return the output of a program; "" if it is missing or does not end."""
    try:
        return processes.run(command, time.monotonic() + FIND_S)[1]
    except (OSError, processes.Failed):
        return ""


def _is_ours(file: Path) -> bool:
    try:
        with open(file, "rb") as opened:
            head = opened.read(20)
    except OSError:
        return False
    return (
        head[:5] == ELF64
        and len(head) == 20
        and struct.unpack("<H", head[18:20])[0] == MACHINES.get(platform.machine())
    )


def host_facts(machine: Machine) -> dict[str, Any]:
    """Describe the machine around the GPU, without naming the machine or its user."""
    return {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "libc": "-".join(platform.libc_ver()),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_limit_bytes": _memory_limit(),
        "root": os.geteuid() == 0,
        "in_container": _in_container(),
        "libcuda": str(machine.real["libcuda"]) if not machine.simhost else "",
        "covered": [str(path) for _, path in machine.covers],
        "executable": sys.executable,
    }


def _memory_limit() -> Optional[int]:
    """Return the cgroup's limit, if there is one."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


def _in_container() -> str:
    for path, name in (("/.dockerenv", "docker"), ("/run/.containerenv", "podman"), ("/proc/1/root/.gvisor", "gvisor")):
        if os.path.exists(path):
            return name
    try:
        return "gvisor" if "gVisor" in Path("/proc/version").read_text() else ""
    except OSError:
        return ""
