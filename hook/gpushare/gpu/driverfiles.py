"""Find the driver's user-space files for a set of capabilities, by version below the driver root.

    for_request(inventory, request, shares)        -> DriverFiles  all files and nodes for a container's request
    find(root, version, capabilities, simulated)   -> DriverFiles  only those of the capabilities
    nvml_library(root, version), cuda_library(...) -> str          host path, "" when missing

drivertable.py lists the names of each capability. Raises DeviceError.
Effects: reads directories and stats files of the driver root, which the host's administrator owns.
Runs on the start path, so it imports only the standard library.
"""

import os
import stat
from typing import NamedTuple, Optional

from ..core.errors import DeviceError
from ..core.model import Inventory, Request, Share
from . import drivernodes, mig
from .driverroot import HostNode, in_root, listing, short_read
from .drivertable import (
    ALWAYS,
    CAPABILITIES,
    DATA_DIRS,
    EXTRA_LINKS,
    FEATURES,
    FIRMWARE_DIRS,
    LIBRARY_DIRS,
    LIBRARY_DIRS_32,
    PROGRAM_DIRS,
    SUBDIRECTORIES,
)

_Listed = list[tuple[str, frozenset[str]]]  # (library directory, names in it)


class Library(NamedTuple):
    """One library. `links` are the links that must lead to it: (name, text)."""

    stem: str  # "libnvidia-nvvm"
    name: str  # "libnvidia-nvvm.so.535.261.03"
    source: str  # host path
    links: tuple[tuple[str, str], ...]  # (("libcuda.so.1", "libcuda.so.535..."), ("libcuda.so", "libcuda.so.1"))
    in_image: bool = False  # `source` is a path in the image: forward compatibility


class DataFile(NamedTuple):
    """Anything that is neither library nor program: vendor files, X modules, /run/udev."""

    target: str  # container path
    source: str  # host path
    kind: str = "file"  # "file" | "dir"


class DriverFiles(NamedTuple):
    """Everything of one driver version that a container may get. Paths are host paths."""

    version: str
    cuda: Library
    nvml: Library
    asked_cuda: bool  # compute was requested, so libcuda belongs in the library directory
    asked_nvml: bool  # the same for utility and libnvidia-ml
    libraries: tuple[Library, ...] = ()  # without cuda and nvml
    programs: tuple[tuple[str, str], ...] = ()  # (name, host path)
    firmware: tuple[str, ...] = ()  # host paths
    sockets: tuple[tuple[str, str], ...] = ()  # (container path, host path)
    nodes: tuple[HostNode, ...] = ()
    missing_nodes: tuple[str, ...] = ()
    libraries32: tuple[Library, ...] = ()  # all requested ones, including cuda and nvml
    data: tuple[DataFile, ...] = ()
    proc_capabilities: tuple[str, ...] = ()  # below /proc/driver/nvidia/capabilities


def _versions(names: frozenset[str]) -> set[str]:
    """Driver versions whose libcuda is in a directory: libcuda.so.535.261.03, not libcuda.so.1."""
    endings = (name[len("libcuda.so.") :] for name in names if name.startswith("libcuda.so."))
    return {ending for ending in endings if "." in ending}


def _listed(root: str, directories: tuple[str, ...]) -> _Listed:
    return [(path, listing(path)) for path in (os.path.join(root, directory) for directory in directories)]


def _directories(root: str, version: str) -> _Listed:
    """Library directories for this version and the names in them; the directory of libcuda is first."""
    listed = _listed(root, LIBRARY_DIRS)
    found = [item for item in listed if f"libcuda.so.{version}" in item[1]]
    if not found:
        others = sorted(set().union(*(_versions(names) for _, names in listed)))
        if others:
            raise DeviceError(
                f"the loaded driver is {version}, the libraries below {root} are {', '.join(others)}",
                "finish the driver upgrade (reboot, or reload the modules)",
            )
        raise DeviceError(f"no libcuda.so.{version} below {root}", "install the driver's libraries, or set driver.root")
    rest = [item for item in listed if item not in found and item[0] != os.path.join(root, "usr/lib")]
    return _with_subdirectories(found[:1] + rest)


def _with_subdirectories(dirs: _Listed) -> _Listed:
    present = [(f"{path}/{name}", names) for path, names in dirs for name in SUBDIRECTORIES if name in names]
    return dirs + [(path, listing(path)) for path, _ in present]


def _real(root: str, path: str) -> str:
    """The real path of a file: a bind mount would follow a link out of the root."""
    return (in_root(root, os.path.relpath(path, root)) or path) if os.path.islink(path) else path


def _library(root: str, stem: str, endings: tuple[str, ...], version: str, dirs: _Listed) -> Optional[Library]:
    name = f"{stem}.so.{version}"
    directory = next((path for path, names in dirs if name in names), None)
    if directory is None:
        return None
    chain = (name, *(f"{stem}.{ending}" for ending in endings))
    links = tuple((chain[i + 1], chain[i]) for i in range(len(endings)))
    return Library(stem, name, _real(root, os.path.join(directory, name)), links)


def _plugin(root: str, name: str, dirs: _Listed) -> Optional[Library]:
    """A library with its own version number, found by the link that names it."""
    directory = next((path for path, names in dirs if name in names), None)
    source = in_root(root, os.path.relpath(os.path.join(directory, name), root)) if directory else None
    if source is None:
        return None
    real = os.path.basename(source)
    return Library(name.partition(".so")[0], real, source, () if real == name else ((name, real),))


def _libraries(root: str, version: str, capabilities: tuple[str, ...], dirs: _Listed) -> list[Library]:
    """The libraries of the capabilities, each once, with its extra links."""
    stems = {stem: links for key in capabilities for stem, links in CAPABILITIES[key].libraries.items()}
    found = [_library(root, stem, links, version, dirs) for stem, links in stems.items()]
    found += [_plugin(root, name, dirs) for key in capabilities for name in CAPABILITIES[key].plugins]
    extra = {stem: links for key in capabilities for stem, links in EXTRA_LINKS.get(key, {}).items()}
    return [
        library._replace(
            links=library.links
            + tuple((name, text.format(name=library.name)) for name, text in extra.get(library.stem, ()))
        )
        for library in found
        if library is not None
    ]


def _required(root: str, stem: str, version: str, dirs: _Listed) -> Library:
    endings = next(row.libraries[stem] for row in CAPABILITIES.values() if stem in row.libraries)
    library = _library(root, stem, endings, version, dirs)
    if library is None:
        raise DeviceError(f"no {stem}.so.{version} beside libcuda in {dirs[0][0]}", "install the whole driver")
    return library


def _libraries32(root: str, version: str, capabilities: tuple[str, ...], dirs: _Listed) -> tuple[Library, ...]:
    """The 32-bit libraries. Some distributions use the same directory name for 64-bit ones, so check the machine."""
    taken = {path for path, _ in dirs}
    others = [item for item in _listed(root, LIBRARY_DIRS_32) if item[0] not in taken]
    found = _libraries(root, version, capabilities, _with_subdirectories(others))
    return tuple(library for library in found if _machine(library.source) == "i386")


def _machine(path: str) -> str:
    from ..system import elf

    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        library = elf.read_library(fd)
        return library.machine if library else ""
    finally:
        os.close(fd)


def _programs(root: str, capabilities: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Each program's path in the first directory that has it. Most programs are missing, so the directories are
    resolved once."""
    directories = [(directory, in_root(root, directory)) for directory in PROGRAM_DIRS]
    present = [(directory, path) for directory, path in directories if path]
    found = []
    for name in (name for key in capabilities for name in CAPABILITIES[key].programs):
        sources = (_program(root, directory, path, name) for directory, path in present)
        source = next((source for source in sources if source), None)
        if source:
            found.append((name, source))
    return tuple(found)


def _program(root: str, directory: str, path: str, name: str) -> Optional[str]:
    """The regular file `name` of the program directory `directory`, whose real path is `path`."""
    try:
        mode = os.lstat(f"{path}/{name}").st_mode
    except OSError:
        return None
    if stat.S_ISREG(mode):
        return f"{path}/{name}"
    source = in_root(root, f"{directory}/{name}") if stat.S_ISLNK(mode) else None
    return source if source and os.path.isfile(source) else None


def _firmware(root: str, version: str) -> tuple[str, ...]:
    """GSP firmware, whose version tools read, from the first directory that has it; the kernel's own one is first."""
    configured = short_read(os.path.join(root, "sys/module/firmware_class/parameters/path")) or ""
    directories = (f"{configured.strip().strip('/')}/nvidia", *FIRMWARE_DIRS)
    for directory in directories[0 if configured.strip() else 1 :]:
        path = os.path.join(root, directory, version)
        files = sorted(n for n in listing(path) if n.startswith("gsp") and n.endswith(".bin"))
        if files:
            return tuple(_real(root, os.path.join(path, name)) for name in files)
    return ()


def _sockets(root: str, capabilities: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    found = []
    for name in (name for key in capabilities for name in CAPABILITIES[key].sockets):
        path = os.path.join(root, name)
        try:
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                found.append(("/" + name, path))
        except OSError:
            pass
    return tuple(found)


def _data(root: str, version: str, capabilities: tuple[str, ...]) -> tuple[DataFile, ...]:
    """Vendor files in all directories where the host has them; a file in two directories is needed in both."""
    found: dict[str, DataFile] = {}
    places = [(source, target or source) for source, target in DATA_DIRS if os.path.isdir(os.path.join(root, source))]
    for name in (name.format(version=version) for key in capabilities for name in CAPABILITIES[key].data):
        for source, target in places:
            path = in_root(root, f"{source}/{name}")
            if path and os.path.isfile(path):
                found.setdefault(f"/{target}/{name}", DataFile(f"/{target}/{name}", path))
    return tuple(found.values())


def _feature_data(root: str, features: tuple[str, ...]) -> tuple[DataFile, ...]:
    exists = {"file": os.path.isfile, "dir": os.path.isdir}
    wanted = [item for feature in features for item in FEATURES[feature].data]
    found = [(f"/{path}", in_root(root, path), kind) for path, kind in wanted]
    return tuple(DataFile(target, path, kind) for target, path, kind in found if path and exists[kind](path))


def find(root: str, version: str, capabilities: tuple[str, ...], simulated: bool = False) -> DriverFiles:
    """The files for `capabilities`. Libraries that a driver version does not have are left out; libcuda and
    libnvidia-ml are required."""
    dirs = _directories(root, version)
    libraries = _libraries(root, version, capabilities, dirs)
    requested = {stem for key in capabilities for stem in CAPABILITIES[key].libraries}
    nodes, missing = drivernodes.of_capabilities(root, capabilities, simulated)
    return DriverFiles(
        version=version,
        cuda=_required(root, "libcuda", version, dirs),
        nvml=_required(root, "libnvidia-ml", version, dirs),
        asked_cuda="libcuda" in requested,
        asked_nvml="libnvidia-ml" in requested,
        libraries=tuple(library for library in libraries if library.stem not in ALWAYS),
        programs=_programs(root, capabilities),
        firmware=_firmware(root, version),
        sockets=_sockets(root, capabilities),
        nodes=nodes,
        missing_nodes=missing,
        libraries32=_libraries32(root, version, capabilities, dirs) if "compat32" in capabilities else (),
        data=_data(root, version, capabilities),
    )


def for_request(inventory: Inventory, request: Request, shares: tuple[Share, ...]) -> DriverFiles:
    """Everything for `request` besides the GPUs of `shares`: files, control and feature nodes, IMEX, MIG."""
    root, simulated = inventory.root, inventory.simulated
    files = find(root, inventory.driver_version, request.capabilities, simulated)
    nodes, missing = drivernodes.of_features(root, request.features, simulated)
    paths = mig.capability_paths(shares, request.mig_access)
    more = (
        *nodes,
        *drivernodes.of_display(root, shares, request.capabilities),
        *drivernodes.of_imex(root, request.imex_channels, simulated),
        *mig.nodes(root, paths, simulated),
    )
    return files._replace(
        nodes=tuple(dict.fromkeys((*files.nodes, *more))),
        missing_nodes=files.missing_nodes + missing,
        data=files.data + _feature_data(root, request.features),
        proc_capabilities=paths,
    )


def _in_library_dirs(root: str, name: str) -> str:
    paths = (os.path.join(root, directory, name) for directory in LIBRARY_DIRS)
    return next((path for path in paths if os.path.isfile(path)), "")


def nvml_library(root: str, version: str) -> str:
    """Host path of this version's libnvidia-ml, "" when there is none."""
    return _in_library_dirs(root, f"libnvidia-ml.so.{version}")


def cuda_library(root: str, version: str) -> str:
    """Host path of this version's libcuda, "" when there is none."""
    return _in_library_dirs(root, f"libcuda.so.{version}")
