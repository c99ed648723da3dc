"""A simulated host whose driver enforces memory limits of cgroups, like 615: the simulator's NVML plus the functions of
tests/unit/nvml615.c. The rest of the driver only gets another version number."""

from __future__ import annotations

import subprocess
from pathlib import Path

from simulator.simhost import BUILT, LIBDIR
from simulator.simhost import VERSION as OLD

from .host import TREE

VERSION = "615.71.05"
ADDED = ("nvmlDeviceSetMemoryLimits_v1", "nvmlDeviceGetMemoryLimits_v1")


def renew(root: Path) -> None:
    """Replace the host's driver by that one."""
    libdir = root / LIBDIR
    for path in sorted(libdir.iterdir()):
        name = path.name.replace(OLD, VERSION)
        if path.is_symlink():
            target = str(path.readlink()).replace(OLD, VERSION)
            path.unlink()
            path.with_name(name).symlink_to(target)
        else:
            path.rename(path.with_name(name))
    for path in (root / "proc/driver/nvidia").rglob("*"):
        if path.is_file():
            path.write_text(path.read_text().replace(OLD, VERSION))
    (root / "sys/module/nvidia/version").write_text(VERSION + "\n")
    _link(libdir / f"libnvidia-ml.so.{VERSION}")


def _link(library: Path) -> None:
    exported = library.with_name("exported.map")
    text = (BUILT / "libnvidia-ml.map").read_text()
    exported.write_text(text.replace("global:", "global: " + " ".join(f"{name};" for name in ADDED)))
    objects = [
        *(BUILT / "obj/nvml").glob("*.o"),
        *(BUILT / "obj" / f"{name}.o" for name in SHARED),
        BUILT / "nvml_stubs.o",
    ]
    flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-DSIMULATOR", "-Wl,-soname,libnvidia-ml.so.1"]
    flags += ["-Wl,-z,nodelete", f"-Wl,--version-script={exported}", "-o", str(library)]
    source = TREE / "tests" / "unit" / "nvml615.c"
    library.unlink()
    subprocess.run(["gcc", *flags, source, *objects, "-lpthread", "-ldl"], check=True)
    exported.unlink()


SHARED = ("device", "memory", "shared", "scheduler")  # SIM_SHARED of sim.mk


def calls(root: Path) -> list[list[str]]:
    """The arguments of each NVML call: [uuid, cgroup, soft, hard]."""
    path = root / LIBDIR / "limits"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []
