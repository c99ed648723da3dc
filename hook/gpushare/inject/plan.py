"""Make the plan: every change to one container as plain data, in the order in which it is applied. Pure.

    make_plan(bundle, request, node, lease, image, driver_files) -> Plan

`lease` is None (or has no shares) for a request of `none`: driver files, no GPU. The plan creates limits and the
tenant's tmpfs before it mounts them, files before links and the loader's cache, and device nodes and then device rules
at the end, so that limits are in place before a device is usable.
Raises RequestError if no limit can be enforced in the image. Runs on the start path.
"""

from typing import NamedTuple, Optional

from ..allocation import backends, lending
from ..core import constants
from ..core.errors import RequestError
from ..core.model import Bundle, Config, Image, LdEntry, Lease, Node, Request, Share
from ..core.ops import (
    Cover,
    DeviceNode,
    DeviceRule,
    ImageFile,
    LdCache,
    Link,
    Mount,
    Op,
    Plan,
    ProcMask,
    TenantTmpfs,
    WriteLimits,
)
from ..core.quoting import shown
from ..gpu import forward
from ..gpu.driverfiles import DriverFiles, Library
from ..gpu.drivertable import ALWAYS
from ..request import oci
from ..state import activity_files, storage
from ..state.ledger import turn_bytes
from ..system import ldcache

_FILE = ("ro", "nosuid", "nodev")
_DATA = ("nosuid", "nodev", "noexec")  # the container writes to it, or it is a socket of a daemon


class _Shown(NamedTuple):
    """A library in the container: the driver's names, and a source that may be the shim."""

    library: Library
    source: str
    why: str

    def at(self, target: str, why: str = "") -> Op:
        """Return the operation that mounts it at `target`."""
        if self.library.in_image and self.source == self.library.source:
            return ImageFile(self.source, target, _FILE, why or self.why)
        return Mount(self.source, target, "file", _FILE, why or self.why)


def _limited(shares: tuple[Share, ...]) -> bool:
    return any(share.memory_limit_bytes is not None or share.compute_percent is not None for share in shares)


def _pages(state_dir: str, shares: tuple[Share, ...]) -> list[Op]:
    """Mount the activity files: this container's own, and those of all containers on a device."""
    ops: list[Op] = []
    for share in shares:
        uuid = share.device.uuid
        own, everything = activity_files.path(state_dir, uuid, share.page), activity_files.directory(state_dir, uuid)
        ops.append(Mount(own, f"{constants.PAGES_DIR}/{uuid}", "file", _DATA, "own activity file"))
        ops.append(Mount(everything, f"{constants.PEERS_DIR}/{uuid}", "dir", ("ro", *_DATA), "all activity files"))
    return ops


def _limits(config: Config, bundle: Bundle, shares: tuple[Share, ...], files: DriverFiles, shim_dir: str) -> list[Op]:
    """Write the limits file, mount the tenant's tmpfs and the private directory with the real libraries."""
    state = storage.container_dir(config.state_dir, bundle.id)
    mps = backends.in_limits(shares, config.state_dir, oci.first_uid(bundle.spec))
    limits = WriteLimits(shares, f"{state}/share/limits", config.slice_us, config.switch_us, mps)
    if config.compute_sharing == "turns":
        limits = limits._replace(round_ms=config.round_ms)
    if config.turn_ms and any(share.virtual_bytes and not share.lending for share in shares):
        turns = tuple(turn_bytes(share.device, config) for share in shares)
        limits = limits._replace(turn_ms=config.turn_ms, turn_bytes=turns)
    return [
        limits,
        TenantTmpfs(f"{state}/rw", storage.TENANT_BYTES, storage.TENANT_INODES),
        Mount(f"{state}/share", constants.PRIVATE_DIR, "dir", _FILE, "limits and private libraries, host-only"),
        Mount(f"{state}/rw", constants.RW_DIR, "dir", _DATA, "usage file"),
        *_pages(config.state_dir, shares),
        _Shown(files.cuda, files.cuda.source, "the real libcuda, under a private name").at(constants.REAL_CUDA),
        _Shown(files.nvml, files.nvml.source, "the real libnvidia-ml, under a private name").at(constants.REAL_NVML),
        *(() if files.asked_nvml else (_own_nvml(files, shim_dir),)),
    ]


def _own_nvml(files: DriverFiles, shim_dir: str) -> Op:
    """Mount the shim's libnvidia-ml where only the shim's libcuda finds it, which uses it to count memory."""
    return _Shown(files.nvml, f"{shim_dir}/{files.nvml.stem}.so", "the shim's libnvidia-ml").at(constants.OWN_NVML)


def _libraries(files: DriverFiles, shim_dir: str, shimmed: bool) -> list[_Shown]:
    """Return the libraries of the library directory: the shim (without a GPU, the driver's own), then the rest."""
    visible = []
    for library, asked in ((files.cuda, files.asked_cuda), (files.nvml, files.asked_nvml)):
        if asked and shimmed:
            visible.append(_Shown(library, f"{shim_dir}/{library.stem}.so", "the shim"))
        elif asked:
            visible.append(_Shown(library, library.source, "driver library"))
    return visible + [_driver_library(library) for library in files.libraries]


def _driver_library(library: Library) -> _Shown:
    return _Shown(library, library.source, "the image's newer driver" if library.in_image else "driver library")


def _libraries32(files: DriverFiles, shares: tuple[Share, ...], image: Image, notes: list[str]) -> list[_Shown]:
    """Return the 32-bit libraries. There is no 32-bit shim, so a share with a limit gets no 32-bit libcuda."""
    if not files.libraries32:
        return []
    if not image.libdir32:
        notes.append("no 32-bit glibc in the image: the 32-bit libraries are left out")
        return []
    libraries = list(files.libraries32)
    if _limited(shares):
        libraries = [library for library in libraries if library.stem not in ALWAYS]
        notes.append("no 32-bit libcuda and libnvidia-ml: the shim has no 32-bit version")
    return [_Shown(library, library.source, "32-bit driver library") for library in libraries]


def _place(visible: list[_Shown], image: Image, libdir: str) -> tuple[list[Op], list[Op]]:
    """Return mounts and links in a library directory. If the image has a file at the path of a link, mount the library
    over the file instead; a loader reads it the same way."""
    links_there = {path for path, _ in image.existing_links}
    files_there = {path for path, _ in image.other_drivers} - links_there
    mounts: list[Op] = []
    links: list[Op] = []
    for one in visible:
        library = one.library
        mounts.append(one.at(f"{libdir}/{library.name}"))
        for name, text in library.links:
            path = f"{libdir}/{name}"
            if path in files_there:
                mounts.append(one.at(path, f"{one.why}, over the image's own file"))
            else:
                links.append(Link(path, text, f"name of {library.stem}"))
    return mounts, links


def _covers(files: DriverFiles, image: Image, shim_dir: str, taken: set[str]) -> list[Op]:
    """Mount the shim over every other copy of the driver that a loader could prefer, except at paths in `taken`."""
    sources = {library.stem: f"{shim_dir}/{library.stem}.so" for library in (files.cuda, files.nvml)}
    sources.update((library.stem, library.source) for library in files.libraries)  # one version for these too
    shown_elsewhere = {library.source for library in (files.cuda, *files.libraries) if library.in_image}
    covers: list[Op] = []
    for path, soname in image.other_drivers:
        source = sources.get(soname.partition(".so")[0])
        if source is not None and path not in taken:
            why = f"covers another {soname}"
            if path in shown_elsewhere:
                covers.append(Cover(source, path, _FILE, why))
            else:
                covers.append(Mount(source, path, "file", _FILE, why))
            taken.add(path)
    return covers


def _extras(files: DriverFiles) -> list[Op]:
    """Mount programs, firmware, vendor files and sockets."""
    ops: list[Op] = [Mount(path, f"/usr/bin/{name}", "file", _FILE, "driver program") for name, path in files.programs]
    for path in files.firmware:
        name = path.rpartition("/")[2]
        ops.append(Mount(path, f"/lib/firmware/nvidia/{files.version}/{name}", "file", _FILE, "firmware"))
    ops += [Mount(one.source, one.target, one.kind, _FILE, "driver file") for one in files.data]
    ops += [Mount(source, target, "socket", _DATA, "driver socket") for target, source in files.sockets]
    return ops


def _cache(visible: list[_Shown], visible32: list[_Shown], image: Image, notes: list[str]) -> list[Op]:
    """Add the libraries to the loader's cache, which `ldconfig -p` prints too."""
    if image.ldcache_note or not image.has_ldcache:
        notes.append(f"ld.so.cache is left alone: {image.ldcache_note or 'the image has none'}")
        return []
    flags = ldcache.FLAGS.get(image.machine)
    if flags is None:
        notes.append(f"ld.so.cache is left alone: unknown machine {shown(image.machine)}")
        return []
    entries = _entries(visible, image.libdir, flags) + _entries(visible32, image.libdir32, ldcache.FLAGS["i386"])
    return [LdCache(tuple(entries))] if entries else []


def _entries(visible: list[_Shown], libdir: str, flags: int) -> list[LdEntry]:
    """Return each name by which a loader looks up a library. Links below the directory are for other programs."""
    names_of = ([name for name, _ in library.links if "/" not in name] or [library.name] for library, _, _ in visible)
    return [LdEntry(name, f"{libdir}/{name}", flags) for some in names_of for name in some]


def _devices(node: Node, shares: tuple[Share, ...], files: DriverFiles) -> list[Op]:
    """Return the nodes of the granted devices and the driver's control nodes, then the rules for all of them."""
    root, simulated = node.inventory.dev_root.rstrip("/"), node.inventory.simulated
    minors = dict.fromkeys(share.device.minor for share in shares)  # MIG devices of one GPU share its node
    nodes = [
        DeviceNode(f"{root}/dev/nvidia{minor}", f"/dev/nvidia{minor}", constants.NVIDIA_MAJOR, minor, simulated)
        for minor in minors
    ]
    nodes += [DeviceNode(n.source, f"/dev/{n.name}", n.major, n.minor, simulated) for n in files.nodes]
    rules = [DeviceRule(n.major, n.minor) for n in nodes if not n.simulated]
    return [*nodes, *rules]


def _no_glibc(shares: tuple[Share, ...]) -> str:
    """Return the note for an image without glibc. Raise if a limit was requested: nothing could enforce it."""
    if _limited(shares):
        raise RequestError(
            "this image has no glibc (libc.so.6), which NVIDIA's driver needs, so gpushare cannot enforce the limit",
            "use an image with glibc, or request the device without limits",
        )
    return "no glibc in the image: device nodes only, no driver files"


def request_notes(request: Request, shares: tuple[Share, ...]) -> tuple[str, ...]:
    """Return the first notes of a plan: variables and annotations that are ignored, with their values quoted."""
    return (*request.ignored, *(one.clamp_note for one in shares if one.clamped))


def lending_notes(request: Request, shares: tuple[Share, ...], config: Config) -> tuple[str, ...]:
    """Return the notes of memory limits that the devices cannot grant."""
    if not any(memory.ceiling for _, memory in request.memory):
        return ()
    return lending.notes(request, shares, config)


def make_plan(
    bundle: Bundle, request: Request, node: Node, lease: Optional[Lease], image: Image, driver_files: DriverFiles
) -> Plan:
    """Return all operations for this container."""
    shares = lease.shares if lease is not None else ()
    notes = [*request_notes(request, shares), *lending_notes(request, shares, node.config)]
    ops: list[Op] = []
    if not image.libdir:
        notes.append(_no_glibc(shares))
    else:
        ops += _files(bundle, node, shares, image, driver_files, notes)
    bus_ids = tuple(dict.fromkeys(share.device.bus_id for share in shares))
    ops.append(ProcMask(bus_ids, driver_files.proc_capabilities))
    if _limited(shares) and {"graphics", "video"} & set(request.capabilities):
        notes.append("memory that OpenGL, Vulkan and video codecs take is not counted: the limit holds for CUDA")
    if shares:
        ops += backends.ops(shares, node, storage.container_dir(node.config.state_dir, bundle.id))
        ops += _devices(node, shares, driver_files)
        notes += [f"/dev/{name} is not on this host" for name in driver_files.missing_nodes]
    return Plan(bundle.id, tuple(ops), tuple(notes))


def _files(
    bundle: Bundle, node: Node, shares: tuple[Share, ...], image: Image, files: DriverFiles, notes: list[str]
) -> list[Op]:
    """Return the operations that add files to an image with glibc."""
    shim_dir = node.config.shim_dir.rstrip("/")
    if shares:
        files = forward.newest(files, image, shares, notes)
    visible = _libraries(files, shim_dir, shimmed=bool(shares))
    visible32 = _libraries32(files, shares, image, notes)
    mounts, links = _place(visible, image, image.libdir)
    mounts32, links32 = _place(visible32, image, image.libdir32)
    ops: list[Op] = []
    if shares:
        ops += _limits(node.config, bundle, shares, files, shim_dir)
    ops += mounts
    if shares:
        taken = {op.target for op in (*ops, *mounts, *links) if isinstance(op, (Mount, ImageFile, Link))}
        ops += _covers(files, image, shim_dir, taken)
    return ops + mounts32 + _extras(files) + links + links32 + _cache(visible, visible32, image, notes)
