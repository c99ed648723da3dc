"""Operations: the steps of a plan. Each class is one kind of operation, with the methods that it needs:

    describe()                   the line that `explain` prints
    edit_spec(editor)            add it to config.json, or to the record there of what our hook does (specedit.Editor)
    restore(*fields)             the operation that our hook carries out, from the fields of such a record
    put(root, tree)              carry it out in the container's mount namespace (apply.ContainerRoot); `tree` is a
                                 detached copy of its source, -1 if it has none on the host
    grant(access)                allow the use of a device, after everything else (apply.Access)

`NEEDS` tells whether config.json can hold an operation. The methods only call their argument, which has the effects, so
this module imports no upper layer. Records are a format on disk: containers of older versions have them.

To add an operation, add its class here, to `Op` and to NEEDS (and to RECORDED if config.json cannot hold it), and to
ContainerRoot or Editor what it calls there.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Union

from .model import LdEntry, Share
from .quantity import human

DEVICE_FLAGS = {
    False: ("nosuid", "noexec"),
    True: ("nosuid", "noexec", "nodev"),
}  # mount flags of a device node, by DeviceNode.simulated


def _share_text(share: Share) -> str:
    """Text of one share, for WriteLimits.describe()."""
    if share.memory_limit_bytes is None:
        memory = "all memory"
    else:
        memory = f"{human(share.memory_limit_bytes)} ({share.memory_limit_bytes} bytes)"
    if share.lending:
        memory += f", up to {human(share.virtual_bytes)} lent ({share.lending})"
    elif share.virtual_bytes:
        memory += f", {human(share.virtual_bytes)} with host memory"
    compute = "" if share.compute_percent is None else f", {share.compute_percent}% compute"
    options = [option for option, on in (("soft", share.soft), ("high priority", share.priority > 0)) if on]
    return f"slot {share.slot} {share.device.uuid} {memory}{compute}" + "".join(f", {option}" for option in options)


class WriteLimits(NamedTuple):
    """Write the limits file, on host-only storage; complete before any other op makes a device usable."""

    shares: tuple[Share, ...]
    path: str  # host path
    slice_us: int = 0  # see Config
    switch_us: int = 0
    mps: tuple[int, int, int] = (0, 0, 0)  # a mps.Grant
    turn_ms: int = 0
    turn_bytes: tuple[int, ...] = ()  # of each device; () = no migration slices
    round_ms: int = 0  # of the turns on all devices; 0: time slices

    def describe(self) -> str:
        times = (("slice", self.slice_us), ("switch", self.switch_us), ("round of turns", 1000 * self.round_ms))
        parts = [_share_text(share) for share in self.shares] + [f"{name} {us} us" for name, us in times if us]
        parts += [f"MPS on slot {self.mps[0] - 1}"] if self.mps[0] else []
        if self.turn_bytes:
            parts.append(f"migration slices of {self.turn_ms} ms on {', '.join(map(human, self.turn_bytes))}")
        return f"limits   {self.path}: " + "; ".join(parts)


class TenantTmpfs(NamedTuple):
    """Make the container's own writable tmpfs: exact size and inodes, with an empty usage file in it."""

    path: str  # host path of the mount
    size_bytes: int
    inodes: int

    def describe(self) -> str:
        return f"tmpfs    {self.path}: {self.size_bytes} bytes, {self.inodes} inodes"


class Mount(NamedTuple):
    """Bind-mount a host file, directory or socket."""

    source: str  # host path
    target: str  # container path
    kind: str  # "file" | "dir" | "socket"
    flags: tuple[str, ...]  # of: ro nosuid nodev noexec
    why: str

    def describe(self) -> str:
        return f"mount    {self.target} <- {self.source} ({self.kind} {' '.join(self.flags)}): {self.why}"

    def edit_spec(self, editor: Any) -> None:
        editor.add_mount(self)

    @staticmethod
    def restore(target: str, source: str, kind: str, flags: list[str]) -> "Mount":
        return Mount(source, target, kind, tuple(flags), "")

    def put(self, root: Any, tree: int) -> None:
        root.attach(tree, root.mount_point(self.target, self.kind), self.target)


class InPlace(NamedTuple):
    """A Mount that config.json holds; the runtime makes it before the hook runs."""

    source: str  # host path
    target: str  # container path
    kind: str  # as Mount's

    def describe(self) -> str:
        return f"mount    {self.target} <- {self.source} ({self.kind}): in config.json"

    @staticmethod
    def restore(target: str, source: str, kind: str) -> "InPlace":
        return InPlace(source, target, kind)


class ImageFile(NamedTuple):
    """Bind-mount a regular file of the image at a second path in it; a runtime would search for it on the host.
    `source` is its real path. If that is a link by then, the file was swapped and the start fails."""

    source: str  # container path, without links
    target: str  # container path
    flags: tuple[str, ...]
    why: str

    @property
    def kind(self) -> str:
        return "file"

    def describe(self) -> str:
        return f"image    {self.target} <- {self.source} of the image ({' '.join(self.flags)}): {self.why}"

    def edit_spec(self, editor: Any) -> None:
        editor.leave("ImageFile", self.source, self.target, list(self.flags))

    @staticmethod
    def restore(source: str, target: str, flags: list[str]) -> "ImageFile":
        return ImageFile(source, target, tuple(flags), "")

    def put(self, root: Any, tree: int) -> None:
        root.show_image_file(self.source, self.target, self.flags)


class Cover(NamedTuple):
    """Bind-mount a host file over a file of the image. Applied after the ImageFile that keeps the covered file."""

    source: str  # host path
    target: str  # container path
    flags: tuple[str, ...]
    why: str

    @property
    def kind(self) -> str:
        return "file"

    def describe(self) -> str:
        return f"cover    {self.target} <- {self.source} ({' '.join(self.flags)}): {self.why}"

    def edit_spec(self, editor: Any) -> None:
        editor.leave("Cover", self.source, self.target, list(self.flags))

    @staticmethod
    def restore(source: str, target: str, flags: list[str]) -> "Cover":
        return Cover(source, target, tuple(flags), "")

    def put(self, root: Any, tree: int) -> None:
        root.attach(tree, root.mount_point(self.target, self.kind), self.target)


class Link(NamedTuple):
    """Make a symbolic link in the container's root file system."""

    target: str  # container path of the link
    text: str  # the path that it contains
    why: str

    def describe(self) -> str:
        return f"link     {self.target} -> {self.text}: {self.why}"

    def edit_spec(self, editor: Any) -> None:
        editor.leave("Link", self.target, self.text)

    @staticmethod
    def restore(target: str, text: str) -> "Link":
        return Link(target, text, "")

    def put(self, root: Any, tree: int) -> None:
        root.link(self.target, self.text)


class DeviceNode(NamedTuple):
    """A device node, bind-mounted (hook) or listed in linux.devices (spec)."""

    source: str  # host path
    target: str
    major: int
    minor: int
    simulated: bool  # a regular file: no cgroup rule

    def describe(self) -> str:
        what = "simulated" if self.simulated else f"c {self.major}:{self.minor}"
        return f"device   {self.target} <- {self.source} ({what})"

    def edit_spec(self, editor: Any) -> None:
        editor.add_device(self)

    @staticmethod
    def restore(*fields: Any) -> "DeviceNode":
        return DeviceNode(*fields)

    def put(self, root: Any, tree: int) -> None:
        if self.simulated or not root.has_device(self.target, self.major, self.minor):
            root.attach(tree, root.mount_point(self.target, "file"), self.target)


class DeviceRule(NamedTuple):
    """Allow a device in the cgroup: rw, never m. Always after WriteLimits in a plan."""

    major: int
    minor: int

    def describe(self) -> str:
        return f"allow    c {self.major}:{self.minor} rw"

    def edit_spec(self, editor: Any) -> None:
        editor.add_rule(self.major, self.minor)

    def grant(self, access: Any) -> None:
        access.rules.append((self.major, self.minor))


class KernelLimit(NamedTuple):
    """Limit the device memory of the container's whole cgroup, see dmem.py. Applied before any DeviceRule."""

    uuid: str
    region: str  # name of the device's memory in dmem.capacity
    limit_bytes: int
    record: str  # host path of the file that records the change
    tree: str = ""  # cgroup directory of a simulated driver root; "": the kernel's own
    library: str = ""  # NVML, where the driver enforces the limit instead of the kernel; then there is no region
    request_bytes: int = 0  # the soft limit, if the container may borrow memory above it; 0: the limit

    @property
    def soft_bytes(self) -> int:
        return self.request_bytes or self.limit_bytes

    def describe(self) -> str:
        soft = f", soft {self.request_bytes}" if self.request_bytes else ""
        if self.library:
            where = f"{self.uuid} for the container's cgroup, through NVML"
            return f"driver   memory limit of {where}: {self.limit_bytes}{soft}"
        if self.request_bytes:
            return f"kernel   dmem.max {self.region} {self.limit_bytes} and dmem.min {self.request_bytes}"
        return f"kernel   dmem.max and dmem.min {self.region} {self.limit_bytes}"

    def edit_spec(self, editor: Any) -> None:
        editor.leave("KernelLimit", *self)
        if not self.tree and not self.library:
            editor.add_kernel_limit(self.region, self.limit_bytes, self.soft_bytes)

    @staticmethod
    def restore(*fields: Any) -> "KernelLimit":
        return KernelLimit(*fields)

    def grant(self, access: Any) -> None:
        access.limits.append(self)


class LdCache(NamedTuple):
    """Add or replace entries of /etc/ld.so.cache, in place and atomically."""

    entries: tuple[LdEntry, ...]

    def describe(self) -> str:
        return "ldcache  " + ", ".join(f"{entry.soname} => {entry.path}" for entry in self.entries)

    def edit_spec(self, editor: Any) -> None:
        editor.leave("LdCache", [list(entry) for entry in self.entries])

    @staticmethod
    def restore(entries: list[list[Any]]) -> "LdCache":
        return LdCache(tuple(LdEntry(*entry) for entry in entries))

    def put(self, root: Any, tree: int) -> None:
        root.extend_ld_cache(self.entries)


class ProcMask(NamedTuple):
    """Cover /proc/driver/nvidia by a copy with only the granted GPUs and ModifyDeviceFiles: 0."""

    bus_ids: tuple[str, ...]
    capabilities: tuple[str, ...] = ()  # files kept below capabilities/: "gpu0/mig/gi1/access"

    def describe(self) -> str:
        kept = f", capabilities {' '.join(self.capabilities)}" if self.capabilities else ""
        return f"mask     /proc/driver/nvidia: {' '.join(self.bus_ids) or 'no GPU'}{kept}, ModifyDeviceFiles 0"

    def edit_spec(self, editor: Any) -> None:
        editor.leave("ProcMask", list(self.bus_ids), list(self.capabilities))

    @staticmethod
    def restore(bus_ids: list[str], capabilities: list[str]) -> "ProcMask":
        return ProcMask(tuple(bus_ids), tuple(capabilities))

    def put(self, root: Any, tree: int) -> None:
        root.mask_proc(self.bus_ids, self.capabilities)


Op = Union[
    WriteLimits,
    TenantTmpfs,
    Mount,
    InPlace,
    ImageFile,
    Cover,
    Link,
    DeviceNode,
    DeviceRule,
    KernelLimit,
    LdCache,
    ProcMask,
]

# The way to execute an op: only in config.json, only by a hook in the container's namespace, or either
NEEDS = {
    "spec": (InPlace,),
    "namespace": (WriteLimits, TenantTmpfs, ImageFile, Cover, LdCache, ProcMask),
    "either": (Mount, Link, DeviceNode, DeviceRule, KernelLimit),
}

# Kind of a record in config.json -> the operation of it that is left for our hook
RECORDED: dict[str, Callable[..., Op]] = {
    "Mount": InPlace.restore,  # config.json mounts it
    "Bind": Mount.restore,
    "Device": DeviceNode.restore,
    "Link": Link.restore,
    "LdCache": LdCache.restore,
    "ProcMask": ProcMask.restore,
    "KernelLimit": KernelLimit.restore,
    "ImageFile": ImageFile.restore,
    "Cover": Cover.restore,
}


def call(ops: tuple[Op, ...], method: str, argument: Any) -> None:
    """Call `method` of each operation that has it, in order."""
    for op in ops:
        step = getattr(op, method, None)
        if step is not None:
            step(argument)


def needs(op: Op) -> str:
    """A key of NEEDS."""
    return next(name for name, kinds in NEEDS.items() if isinstance(op, kinds))


class Plan(NamedTuple):
    """All ops for one container, in the order in which they are applied."""

    container_id: str
    ops: tuple[Op, ...]
    notes: tuple[str, ...] = ()  # skipped parts and reasons, for explain
