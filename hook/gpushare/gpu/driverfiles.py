"""Find the driver's user-space files for a set of capabilities, by version below the driver root.

    for_request(inventory, request, shares)        -> DriverFiles  all files and nodes for a container's request
    find(root, version, capabilities, simulated)   -> DriverFiles  only those of the capabilities
    nvml_library(root, version), cuda_library(...) -> str          host path, "" when missing
    root_of(root, version)                         -> str          the root of the driver's files: a container's?
    require_usable(inventory)                      raises DeviceError where no start can work
    host_program(inventory, name)                  -> str          path of a program to execute on the host, "" ...
    stale_programs(root, version)                  -> paths        programs of another version (for the inventory)

drivertable.py lists the names of each capability; driverchoice.py chooses among several files of a name. Raises
DeviceError. Effects: reads directories and headers of files of the driver root, which the host's administrator owns.
Runs on the start path.
"""

import os
import stat
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Optional

from ..core.errors import DeviceError
from ..core.model import Inventory, Request, Share
from ..system import ldcache
from . import driverchoice, drivernodes, mig, unsupported
from .driverchoice import LIBRARY, LIBRARY_32, PROGRAM, Kind, Search, Skipped
from .driverroot import HostNode, below, in_root, listing, node, short_read
from .drivertable import (
    ALWAYS,
    CAPABILITIES,
    CONTAINER_ROOT,
    DATA_DIRS,
    EXTRA_LINKS,
    FEATURES,
    FIRMWARE_DIRS,
    LAST_LIBRARY_DIR,
    LIBRARY_DIRS,
    LIBRARY_DIRS_32,
    OTHER_MACHINES,
    PLACES,
    PROGRAM_DIRS,
    SUBDIRECTORIES,
)
from .selectors import no_device

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
    skipped: tuple[Skipped, ...] = ()  # files of the same names that are not used


def _versions(names: frozenset[str]) -> set[str]:
    """Driver versions whose libcuda is in a directory: libcuda.so.535.261.03, not libcuda.so.1."""
    endings = (name[len("libcuda.so.") :] for name in names if name.startswith("libcuda.so."))
    return {ending for ending in endings if "." in ending}


def _listed(search: Search, directories: Iterable[str]) -> _Listed:
    paths = (below(search.root, directory, search.places) for directory in directories)
    return [(path, listing(path)) for path in paths]


def _library_directories(search: Search) -> tuple[str, ...]:
    """LIBRARY_DIRS without those of another machine, and without second names: on most hosts /lib is a link to
    /usr/lib, whose directory of libraries has thousands of names."""
    useless = [*OTHER_MACHINES.get(search.machine, ())]
    for name in ("lib", "lib64"):
        try:
            if os.readlink(os.path.join(search.root, name)).strip("/") == f"usr/{name}":
                useless.append(name)
        except OSError:
            pass
    return tuple(path for path in LIBRARY_DIRS if not f"{path}/".startswith(tuple(f"{one}/" for one in useless)))


def _filled(search: Search, text: str) -> str:
    return text.format(version=search.version, machine=search.machine)


def _groups(search: Search) -> Iterator[_Listed]:
    """The library directories, in groups: a group counts only if the ones before it have no libcuda. usr/lib has the
    32-bit libraries of many hosts. The last group is the root itself, as driver.libraries can name the directory of the
    libraries, and the directory where the loader of this root finds libcuda."""
    yield _listed(search, _library_directories(search))
    yield _listed(search, (LAST_LIBRARY_DIR,))
    yield _listed(search, (_filled(search, place.libraries) for place in PLACES))
    yield _listed(search, ("", *_cached_directories(search.root)))


def _cached_directories(root: str) -> list[str]:
    """The directories of libcuda.so.1 in the loader's cache of this root."""
    try:
        with open(os.path.join(below(root, "etc"), "ld.so.cache"), "rb") as file:
            found = ldcache.parse(file.read(ldcache.MAX_BYTES + 1)).libraries()
            paths = [os.fsdecode(path) for name, path, _ in found if name == b"libcuda.so.1"]
    except (OSError, ldcache.MalformedCache):
        return []
    return list(dict.fromkeys(os.path.dirname(path).lstrip("/") for path in paths))


def _directories(search: Search) -> _Listed:
    """Library directories for this version and the names in them; the directory of libcuda is first."""
    name = f"libcuda.so.{search.version}"
    listed: _Listed = []
    cuda = ""
    for group in _groups(search):
        listed += group
        cuda = driverchoice.first(search, _in(group, name), LIBRARY, "libcuda")
        if cuda:
            break
    else:
        _refuse(search, name, listed)
    home = next(item for item in listed if search.known.get(f"{item[0]}/{name}") == cuda)
    return _with_subdirectories([home, *(item for item in listed if item is not home)])


def _refuse(search: Search, name: str, listed: _Listed) -> None:
    """Raise DeviceError: there is no libcuda of the loaded version."""
    root, version = search.root, search.version
    bad = driverchoice.why_not(search, name)
    if bad:
        raise DeviceError(
            f"no usable libcuda.so.{version} below {root}{bad}", f"install the libraries of driver {version} again"
        )
    others = sorted(set().union(*(_versions(names) for _, names in listed)))
    if others:
        raise DeviceError(
            f"the loaded driver is {version}, the libraries below {root} are {', '.join(others)}",
            "finish the driver upgrade (reboot, or reload the modules)",
        )
    raise unsupported.of_kind(root) or DeviceError(
        f"no libcuda.so.{version} below {root}",
        "install the driver's libraries, or set driver.libraries to the directory that has them",
    )


def _in(dirs: _Listed, name: str) -> list[str]:
    return [f"{path}/{name}" for path, names in dirs if name in names]


def _with_subdirectories(dirs: _Listed) -> _Listed:
    present = [(f"{path}/{name}", names) for path, names in dirs for name in SUBDIRECTORIES if name in names]
    return dirs + [(path, listing(path)) for path, _ in present]


def _library(
    search: Search, stem: str, endings: tuple[str, ...], dirs: _Listed, kind: Kind = LIBRARY
) -> Optional[Library]:
    name = f"{stem}.so.{search.version}"
    source = driverchoice.first(search, _in(dirs, name), kind, stem)
    if not source:
        return None
    chain = (name, *(f"{stem}.{ending}" for ending in endings))
    links = tuple((chain[i + 1], chain[i]) for i in range(len(endings)))
    return Library(stem, name, source, links)


def _plugin(search: Search, name: str, dirs: _Listed, kind: Kind) -> Optional[Library]:
    """A library with its own version number, found by the link that names it."""
    source = driverchoice.first(search, _in(dirs, name), kind)
    if not source:
        return None
    real = os.path.basename(source)
    return Library(name.partition(".so")[0], real, source, () if real == name else ((name, real),))


def _libraries(search: Search, capabilities: tuple[str, ...], dirs: _Listed, kind: Kind = LIBRARY) -> list[Library]:
    """The libraries of the capabilities, each once, with its extra links."""
    stems = {stem: links for key in capabilities for stem, links in CAPABILITIES[key].libraries.items()}
    found = [_library(search, stem, links, dirs, kind) for stem, links in stems.items()]
    found += [_plugin(search, name, dirs, kind) for key in capabilities for name in CAPABILITIES[key].plugins]
    extra = {stem: links for key in capabilities for stem, links in EXTRA_LINKS.get(key, {}).items()}
    return [
        library._replace(
            links=library.links
            + tuple((name, text.format(name=library.name)) for name, text in extra.get(library.stem, ()))
        )
        for library in found
        if library is not None
    ]


def _required(search: Search, stem: str, dirs: _Listed) -> Library:
    endings = next(row.libraries[stem] for row in CAPABILITIES.values() if stem in row.libraries)
    library = _library(search, stem, endings, dirs)
    if library is not None:
        return library
    version = search.version
    bad = driverchoice.why_not(search, f"{stem}.so.{version}")
    if bad:
        raise DeviceError(
            f"no usable {stem}.so.{version} below {search.root}{bad}",
            f"install the libraries of driver {version} again",
        )
    raise DeviceError(f"no {stem}.so.{version} beside libcuda in {dirs[0][0]}", "install the whole driver")


def _libraries32(search: Search, capabilities: tuple[str, ...], dirs: _Listed) -> tuple[Library, ...]:
    """The 32-bit libraries. Some distributions use the same directory name for 64-bit ones."""
    taken = {path for path, _ in dirs}
    others = [item for item in _listed(search, LIBRARY_DIRS_32) if item[0] not in taken]
    return tuple(_libraries(search, capabilities, _with_subdirectories(others), LIBRARY_32))


def _program_directories(search: Search, libdir: str = "") -> list[str]:
    """Real paths of the program directories. Those of the installation of the library directory `libdir` are first:
    usr/local/nvidia/bin for usr/local/nvidia/lib64. Most programs are missing, so the directories are resolved once."""
    under = libdir[len(search.root) :].strip("/")
    home = "usr/lib/nvidia" if under.endswith("/nvidia/current") else f"/{under}".partition("/lib")[0][1:] or "usr"
    own = [
        place.programs
        for place in PLACES
        if libdir == below(search.root, _filled(search, place.libraries), search.places)
    ]
    ordered = sorted(PROGRAM_DIRS, key=lambda directory: directory.rpartition("/")[0] != home)
    names = [*(_filled(search, one) for one in own), *ordered, *(() if search.root == "/" else ("bin",))]
    paths = [in_root(search.root, directory, search.places) for directory in names]
    return [path for path in dict.fromkeys(paths) if path]


def _programs(search: Search, capabilities: tuple[str, ...], libdir: str) -> tuple[tuple[str, str], ...]:
    """The path of each program in the first directory that has it for this driver."""
    directories = _program_directories(search, libdir)
    found = []
    for name in (name for key in capabilities for name in CAPABILITIES[key].programs):
        source = driverchoice.first(search, [f"{path}/{name}" for path in directories], PROGRAM)
        if source:
            found.append((name, source))
    return tuple(found)


def _firmware(search: Search) -> tuple[str, ...]:
    """GSP firmware, whose version tools read, from the first directory that has it; the kernel's own one is first."""
    configured = short_read(os.path.join(search.root, "sys/module/firmware_class/parameters/path")) or ""
    directories = (f"{configured.strip().strip('/')}/nvidia", *FIRMWARE_DIRS)
    for directory in directories[0 if configured.strip() else 1 :]:
        path = below(search.root, f"{directory}/{search.version}", search.places)
        names = sorted(n for n in listing(path) if n.startswith("gsp") and n.endswith(".bin"))
        files = [driverchoice.plain_file(search, f"{path}/{name}") for name in names]
        if any(files):
            return tuple(file for file in files if file)
    return ()


def _sockets(search: Search, capabilities: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    found = []
    for name in (name for key in capabilities for name in CAPABILITIES[key].sockets):
        folder, _, base = name.rpartition("/")
        path = f"{below(search.root, folder, search.places).rstrip('/')}/{base}"
        try:
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                found.append(("/" + name, path))
        except OSError:
            pass
    return tuple(found)


def _data(search: Search, capabilities: tuple[str, ...]) -> tuple[DataFile, ...]:
    """Vendor files in all directories where the host has them; a file in two directories is needed in both."""
    found: dict[str, DataFile] = {}
    places = [(source, target or source) for source, target in DATA_DIRS]
    for name in (name.format(version=search.version) for key in capabilities for name in CAPABILITIES[key].data):
        for source, target in places:
            path = _data_file(search, f"{source}/{name}")
            if path:
                found.setdefault(f"/{target}/{name}", DataFile(f"/{target}/{name}", path))
    return tuple(found.values())


def _data_file(search: Search, path: str) -> str:
    real = in_root(search.root, path, search.places)
    if real and ".so" in path:
        return driverchoice.first(search, (real,), LIBRARY)
    return driverchoice.plain_file(search, real) if real else ""


def _feature_data(root: str, features: tuple[str, ...]) -> tuple[DataFile, ...]:
    exists = {"file": os.path.isfile, "dir": os.path.isdir}
    wanted = [item for feature in features for item in FEATURES[feature].data]
    found = [(f"/{path}", in_root(root, path), kind) for path, kind in wanted]
    return tuple(DataFile(target, path, kind) for target, path, kind in found if path and exists[kind](path))


def find(
    root: str,
    version: str,
    capabilities: tuple[str, ...],
    simulated: bool = False,
    stale: tuple[str, ...] = (),
    thorough: bool = False,
    dev: str = "",
) -> DriverFiles:
    """The files for `capabilities`. Libraries that a driver version does not have are left out; libcuda and
    libnvidia-ml are required. `stale`: programs of another version. `thorough`: also examine the files after the used
    one, to report all skipped files. `dev`: the root that has dev, if it is another one."""
    search = driverchoice.new(root, version, stale, thorough)
    dirs = _directories(search)
    libraries = _libraries(search, capabilities, dirs)
    requested = {stem for key in capabilities for stem in CAPABILITIES[key].libraries}
    nodes, missing = drivernodes.of_capabilities(dev or root, capabilities, simulated)
    cuda = _required(search, "libcuda", dirs)
    found = DriverFiles(
        version=version,
        cuda=cuda,
        nvml=_required(search, "libnvidia-ml", dirs),
        asked_cuda="libcuda" in requested,
        asked_nvml="libnvidia-ml" in requested,
        libraries=tuple(library for library in libraries if library.stem not in ALWAYS),
        programs=_programs(search, capabilities, os.path.dirname(cuda.source)),
        firmware=_firmware(search),
        sockets=_sockets(search, capabilities),
        nodes=nodes,
        missing_nodes=missing,
        libraries32=_libraries32(search, capabilities, dirs) if "compat32" in capabilities else (),
        data=_data(search, capabilities),
    )
    return found._replace(skipped=tuple(search.skipped))


def for_capabilities(inventory: Inventory, capabilities: tuple[str, ...], thorough: bool = False) -> DriverFiles:
    """`find` for the driver of this host."""
    version, stale = inventory.driver_version, inventory.stale_programs
    roots = inventory.files_root, inventory.dev_root
    return find(roots[0], version, capabilities, inventory.simulated, stale, thorough, roots[1])


def for_request(inventory: Inventory, request: Request, shares: tuple[Share, ...]) -> DriverFiles:
    """Everything for `request` besides the GPUs of `shares`: files, control and feature nodes, IMEX, MIG."""
    root, dev, simulated = inventory.root, inventory.dev_root, inventory.simulated
    files = for_capabilities(inventory, request.capabilities)
    nodes, missing = drivernodes.of_features(dev, request.features, simulated)
    paths = mig.capability_paths(shares, request.mig_access)
    more = (
        *nodes,
        *drivernodes.of_display(root, shares, request.capabilities, dev),
        *drivernodes.of_imex(dev, request.imex_channels, simulated),
        *mig.nodes(root, paths, simulated, dev),
    )
    return files._replace(
        nodes=tuple(dict.fromkeys((*files.nodes, *more))),
        missing_nodes=files.missing_nodes + missing,
        data=files.data + _feature_data(root, request.features),
        proc_capabilities=paths,
    )


def _in_library_dirs(root: str, version: str, stem: str) -> str:
    search = driverchoice.new(root, version)
    for group in _groups(search):
        found = driverchoice.first(search, _in(group, f"{stem}.so.{version}"), LIBRARY, stem)
        if found:
            return found
    return ""


def nvml_library(root: str, version: str) -> str:
    """Host path of this version's libnvidia-ml, "" when there is none."""
    return _in_library_dirs(root, version, "libnvidia-ml")


def cuda_library(root: str, version: str) -> str:
    """Host path of this version's libcuda, "" when there is none."""
    return _in_library_dirs(root, version, "libcuda")


def require_usable(inventory: Inventory) -> None:
    """Raise the reason if no start can work: no device, no libraries of the loaded driver, or no node of a device."""
    if not inventory.devices:
        raise no_device(inventory)
    for_capabilities(inventory, ())
    names = [f"nvidia{device.minor}" for device in inventory.devices]
    if not any(node(inventory.dev_root, name, inventory.simulated) for name in names):
        raise DeviceError(
            f"no device node {os.path.join(inventory.dev_root, 'dev', names[0])}",
            "run `nvidia-modprobe -u -c 0`, or set driver.dev to the directory whose dev has the nodes",
        )


def root_of(root: str, version: str) -> str:
    """`root`, or the root file system of the driver's container if only that has libcuda."""
    container = os.path.join(root, CONTAINER_ROOT)
    return container if not cuda_library(root, version) and cuda_library(container, version) else root


def host_program(inventory: Inventory, name: str) -> str:
    """Host path of a driver program that gpushare executes on the host, "" when there is none. If no directory has the
    driver's own program, an executable script is used: on the host it finds its program."""
    root, version = inventory.files_root, inventory.driver_version
    search = driverchoice.new(root, version, inventory.stale_programs)
    paths = [f"{one}/{name}" for one in _program_directories(search, os.path.dirname(cuda_library(root, version)))]
    own = driverchoice.first(search, paths, PROGRAM)
    candidates = [own] if own else [driverchoice.plain_file(search, path) for path in paths]
    return next((path for path in candidates if path and os.access(path, os.X_OK)), "")


def stale_programs(root: str, version: str) -> tuple[str, ...]:
    """Programs that lack the string of the driver's version, where another file of the same name has it. Not every
    program has this string: nvidia-smi and nvidia-cuda-mps-control have, nvidia-cuda-mps-server has not. Not on the
    start path, because it reads whole files."""
    search = driverchoice.new(root, version)
    directories = _program_directories(search)
    stale: list[str] = []
    for name in (name for row in CAPABILITIES.values() for name in row.programs):
        paths = [driverchoice.first(search, (f"{one}/{name}",), PROGRAM) for one in directories]
        several = [path for path in dict.fromkeys(paths) if path]
        if len(several) > 1:
            named = [path for path in several if driverchoice.has_version(path, version)]
            stale += [path for path in several if named and path not in named]
    return tuple(stale)
