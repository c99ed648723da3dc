"""The driver's user-space files for a set of capabilities, found by version below the driver root.

    find(root, version, capabilities, simulated) -> DriverFiles     raises DeviceError
    nvml_library(root, version)                  -> str             host path of libnvidia-ml, "" when missing

A table says which libraries and programs belong to a capability, and by which soname links a loader finds each.
Effects: reads directories and stats files of the driver root, which the host's administrator owns.
Start path: standard library only.
"""

from __future__ import annotations

import os
import stat
from typing import NamedTuple, Optional

from .errors import DeviceError

_Listed = list[tuple[str, frozenset[str]]]  # (library directory, what it holds)

# library -> link names beside lib<name>.so.<version>; a library without one is looked up by its full name
UTILITY = {"libnvidia-ml": ("so.1", "so"), "libnvidia-cfg": ("so.1",), "libnvidia-nscq": ("so.2",)}
COMPUTE = {
    "libcuda": ("so.1", "so"),
    "libcudadebugger": ("so.1",),
    "libnvidia-opencl": ("so.1",),
    "libnvidia-gpucomp": (),
    "libnvidia-ptxjitcompiler": ("so.1",),
    "libnvidia-fatbinaryloader": (),
    "libnvidia-allocator": ("so.1",),
    "libnvidia-compiler": (),
    "libnvidia-pkcs11": (),
    "libnvidia-pkcs11-openssl3": (),
    "libnvidia-nvvm": ("so.4",),
    "libnvidia-tileiras": (),
}
VIDEO = {
    "libvdpau_nvidia": ("so.1",),
    "libnvidia-encode": ("so.1",),
    "libnvidia-opticalflow": ("so.1", "so"),
    "libnvcuvid": ("so.1",),
}
LIBRARIES: dict[str, dict[str, tuple[str, ...]]] = {"utility": UTILITY, "compute": COMPUTE, "video": VIDEO}
PROGRAMS: dict[str, tuple[str, ...]] = {
    "utility": ("nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nv-fabricmanager"),
    "compute": ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server"),
}
SOCKETS = {"utility": ("run/nvidia-persistenced/socket", "run/nvidia-fabricmanager/socket")}
CONTROL_NODES = {"": ("nvidiactl",), "compute": ("nvidia-uvm", "nvidia-uvm-tools")}
ALWAYS = ("libcuda", "libnvidia-ml")  # the shim needs both, whatever was asked for

# Where distributions put 64-bit libraries: multiarch (Debian and its alternatives), lib64, Arch, NixOS, COS
LIBRARY_DIRS = (
    "usr/lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu", "usr/lib/aarch64-linux-gnu/nvidia/current",
    "usr/lib64", "usr/lib64/nvidia", "lib/x86_64-linux-gnu", "lib64",
    "run/opengl-driver/lib", "usr/local/nvidia/lib64", "usr/lib",
)  # fmt: skip
PROGRAM_DIRS = ("usr/lib/nvidia/current", "usr/bin", "usr/sbin", "usr/local/nvidia/bin", "run/opengl-driver/bin")
FIRMWARE_DIRS = ("lib/firmware/nvidia", "usr/lib/firmware/nvidia")


class Library(NamedTuple):
    """One library. `links` are the names that must lead to it, each with what the link holds."""

    stem: str  # "libnvidia-nvvm"
    name: str  # "libnvidia-nvvm.so.535.261.03"
    source: str  # host path
    links: tuple[tuple[str, str], ...]  # (("libcuda.so.1", "libcuda.so.535..."), ("libcuda.so", "libcuda.so.1"))


class HostNode(NamedTuple):
    """A control device of the host."""

    name: str  # "nvidiactl"
    source: str
    major: int
    minor: int


class DriverFiles(NamedTuple):
    """Everything of one driver version that a container may get. Paths are host paths."""

    version: str
    cuda: Library
    nvml: Library
    asked_cuda: bool  # compute was asked for, so libcuda belongs in the library directory
    asked_nvml: bool
    libraries: tuple[Library, ...] = ()  # without cuda and nvml
    programs: tuple[tuple[str, str], ...] = ()  # (name, host path)
    firmware: tuple[str, ...] = ()  # host paths
    sockets: tuple[tuple[str, str], ...] = ()  # (container path, host path)
    nodes: tuple[HostNode, ...] = ()
    missing_nodes: tuple[str, ...] = ()


def _listing(path: str) -> frozenset[str]:
    try:
        return frozenset(os.listdir(path))
    except OSError:
        return frozenset()


def _in_root(root: str, path: str) -> Optional[str]:
    """`path` (relative to `root`) with its links followed as if `root` were "/"; None when it does not exist.
    Debian's /usr/bin/nvidia-smi is a chain of absolute links, which lead elsewhere when root is not "/"."""
    parts, here, hops = path.strip("/").split("/"), "", 0
    while parts:
        part = parts.pop(0)
        if part in ("", "."):
            continue
        if part == "..":
            here = here.rpartition("/")[0]
            continue
        full = os.path.join(root, here.lstrip("/"), part)
        try:
            mode = os.lstat(full).st_mode
        except OSError:
            return None
        if not stat.S_ISLNK(mode):
            here = f"{here}/{part}"
            continue
        hops += 1
        if hops > 40:
            return None
        text = os.readlink(full)
        here = "" if text.startswith("/") else here
        parts = text.split("/") + parts
    return os.path.join(root, here.lstrip("/"))


def _versions(listing: frozenset[str]) -> set[str]:
    """Driver versions whose libcuda is in a directory: libcuda.so.535.261.03, not libcuda.so.1."""
    endings = (name[len("libcuda.so.") :] for name in listing if name.startswith("libcuda.so."))
    return {ending for ending in endings if "." in ending}


def _directories(root: str, version: str) -> _Listed:
    """Library directories with this version's files, libcuda's own first, with what they hold."""
    listed = [(path, _listing(path)) for path in (os.path.join(root, d) for d in LIBRARY_DIRS)]
    found = [item for item in listed if f"libcuda.so.{version}" in item[1]]
    if not found:
        others = sorted(set().union(*(_versions(listing) for _, listing in listed)))
        if others:
            raise DeviceError(
                f"the loaded driver is {version}, the libraries below {root} are {', '.join(others)}",
                "finish the driver upgrade (reboot, or reload the modules)",
            )
        raise DeviceError(f"no libcuda.so.{version} below {root}", "install the driver's libraries, or set driver.root")
    rest = [item for item in listed if item not in found and item[0] != os.path.join(root, "usr/lib")]
    return found[:1] + rest


def _library(root: str, stem: str, endings: tuple[str, ...], version: str, dirs: _Listed) -> Optional[Library]:
    name = f"{stem}.so.{version}"
    directory = next((path for path, listing in dirs if name in listing), None)
    if directory is None:
        return None
    source = os.path.join(directory, name)
    if os.path.islink(source):  # a store of packages; a bind mount would follow it out of the root
        source = _in_root(root, os.path.relpath(source, root)) or source
    chain = (name, *(f"{stem}.{ending}" for ending in endings))
    return Library(stem, name, source, tuple((chain[i + 1], chain[i]) for i in range(len(endings))))


def _required(root: str, stem: str, version: str, dirs: _Listed) -> Library:
    endings = next(table[stem] for table in LIBRARIES.values() if stem in table)
    library = _library(root, stem, endings, version, dirs)
    if library is None:
        raise DeviceError(f"no {stem}.so.{version} beside libcuda in {dirs[0][0]}", "install the whole driver")
    return library


def _programs(root: str, capabilities: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    found = []
    for name in (name for capability in capabilities for name in PROGRAMS.get(capability, ())):
        paths = (_in_root(root, f"{directory}/{name}") for directory in PROGRAM_DIRS)
        source = next((path for path in paths if path and os.path.isfile(path)), None)
        if source:
            found.append((name, source))
    return tuple(found)


def _firmware(root: str, version: str) -> tuple[str, ...]:
    """GSP firmware: tools read its version. One copy, the first directory that has it."""
    for directory in FIRMWARE_DIRS:
        path = os.path.join(root, directory, version)
        files = sorted(n for n in _listing(path) if n.startswith("gsp") and n.endswith(".bin"))
        if files:
            return tuple(os.path.join(path, name) for name in files)
    return ()


def _sockets(root: str, capabilities: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    found = []
    for name in (name for capability in capabilities for name in SOCKETS.get(capability, ())):
        path = os.path.join(root, name)
        try:
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                found.append(("/" + name, path))
        except OSError:
            pass
    return tuple(found)


def _nodes(root: str, capabilities: tuple[str, ...], simulated: bool) -> tuple[list[HostNode], list[str]]:
    """Control nodes that are there, and the names of those that are not. A node is a character device, or a
    regular file where the root is simulated."""
    found, missing = [], []
    for name in (name for capability in ("", *capabilities) for name in CONTROL_NODES.get(capability, ())):
        path = os.path.join(root, "dev", name)
        try:
            status = os.lstat(path)
        except OSError:
            missing.append(name)
            continue
        if stat.S_ISCHR(status.st_mode):
            found.append(HostNode(name, path, os.major(status.st_rdev), os.minor(status.st_rdev)))
        elif simulated and stat.S_ISREG(status.st_mode):
            found.append(HostNode(name, path, 0, 0))
        else:
            missing.append(name)
    return found, missing


def find(root: str, version: str, capabilities: tuple[str, ...], simulated: bool = False) -> DriverFiles:
    """The files for `capabilities`. Libraries that a driver version does not have are left out; libcuda and
    libnvidia-ml must be there."""
    dirs = _directories(root, version)
    asked = {stem: links for capability in capabilities for stem, links in LIBRARIES.get(capability, {}).items()}
    others = (_library(root, stem, links, version, dirs) for stem, links in asked.items() if stem not in ALWAYS)
    nodes, missing = _nodes(root, capabilities, simulated)
    return DriverFiles(
        version=version,
        cuda=_required(root, "libcuda", version, dirs),
        nvml=_required(root, "libnvidia-ml", version, dirs),
        asked_cuda="libcuda" in asked,
        asked_nvml="libnvidia-ml" in asked,
        libraries=tuple(library for library in others if library is not None),
        programs=_programs(root, capabilities),
        firmware=_firmware(root, version),
        sockets=_sockets(root, capabilities),
        nodes=tuple(nodes),
        missing_nodes=tuple(missing),
    )


def nvml_library(root: str, version: str) -> str:
    """Host path of this version's libnvidia-ml, "" when there is none."""
    name = f"libnvidia-ml.so.{version}"
    paths = (os.path.join(root, directory, name) for directory in LIBRARY_DIRS)
    return next((path for path in paths if os.path.isfile(path)), "")
