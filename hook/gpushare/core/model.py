"""Data types that modules exchange: plain, immutable, cheap to import (start path)."""

from typing import Any, NamedTuple, Optional

from . import constants


class Device(NamedTuple):
    """A GPU of the host, in PCI order, or a MIG device of one. `memory_bytes` is what programs can allocate; NVML's
    total has `reserved_bytes` in addition. `context_bytes` is the memory of one process's context (gpu/contexts.py).
    A MIG device has its GPU's index, minor and bus id, and a uuid of its own ("MIG-...")."""

    index: int  # type: ignore[assignment]  # shadows tuple.index, which nothing here uses
    uuid: str  # "GPU-..." as the driver prints it
    minor: int
    bus_id: str  # "0000:01:00.0"
    model: str
    memory_bytes: int  # 0 when not known (NVML has not answered yet)
    context_bytes: int
    granularity_bytes: int = 2 << 20
    brand: str = ""  # as NVIDIA_REQUIRE_* writes it: tesla, geforce, ...; "" when not known
    arch: str = ""  # compute capability, "8.6"; "" when not known
    parent: str = ""  # of a MIG device: the uuid of its GPU
    mig_index: int = -1  # the second number in <gpu>:<mig>
    gpu_instance: int = -1
    compute_instance: int = -1
    reserved_bytes: int = 0
    profile: str = ""  # of a MIG device: "1g.10gb"

    @property
    def recorded(self) -> "Device":
        """The device as lease.json has it."""
        return self._replace(reserved_bytes=0, profile="")


class Context(NamedTuple):
    """The measured size of one process's CUDA context on one kind of device. `context_bytes` 0: not measured, and
    `why`. `mps`: the process is a client of an MPS daemon."""

    model: str
    driver: str
    profile: str  # of a MIG device
    mps: bool
    context_bytes: int
    why: str = ""


class Inventory(NamedTuple):
    """Driver and devices of this host. `root` is the driver root: /proc and /sys are below it, and the driver's files
    and dev are, too, unless `libraries` or `dev` is the root of these."""

    root: str
    driver_version: str
    devices: tuple[Device, ...]
    simulated: bool = False
    mig: tuple[Device, ...] = ()  # MIG devices, in the order of their GPUs
    cuda_version: str = ""  # the highest that the driver supports, "12.2"; "" when not known
    host_memory_bytes: int = 0  # MemTotal; 0 = not known
    contexts: tuple[Context, ...] = ()  # of the kinds of devices that were measured or tried
    stale_programs: tuple[str, ...] = ()  # paths: programs of another driver version than another file of their name
    libraries: str = ""  # "": root
    dev: str = ""  # "": root

    @property
    def files_root(self) -> str:
        """The root below which the driver's libraries and programs are."""
        return self.libraries or self.root

    @property
    def dev_root(self) -> str:
        """The root below which dev has the device nodes."""
        return self.dev or self.root


class Quota(NamedTuple):
    """A cap on what all containers of a user or namespace hold together. Each user, or each namespace that the pattern
    matches, has the quota for itself. "" and 0: no cap."""

    user: str  # uid, or * for every user; "" if the quota is for namespaces
    namespace: str  # pattern of fnmatch
    memory: str = ""
    compute_percent: int = 0
    containers: int = 0


class Policy(NamedTuple):
    """The resources that each container may request (NODE 4); the defaults are the workstation profile."""

    accept_env: str = "always"  # always | privileged | never
    accept_annotations: str = "always"
    require_limits: bool = False
    max_memory: str = ""  # "" = no maximum; else a quantity or percentage
    max_compute_percent: int = 100
    allowed_devices: tuple[str, ...] = ()  # uuids or indices; empty = all
    allowed_backends: tuple[str, ...] = ("shim",)  # `auto` takes the first suitable one
    unlimited: str = "exclusive"  # exclusive | shared | deny
    accept_volume_mounts: str = "always"
    accept_cdi: str = "always"
    annotations: str = "any"  # any | scoped: in a pod only <container>.gpushare.io/...
    nvidia_visible_devices: str = "alone"  # alone | with_limit
    privileged_containers: tuple[str, ...] = ("*",)  # <namespace>/<container> or an id; * = all, () = none
    over_maximum: str = "refuse"  # refuse | clamp
    accept_widening: str = "always"  # variables that let a container use more than its limit
    amounts: str = "device"  # device | container: what a memory amount of variables and annotations is for
    accept_switches: str = "never"  # other schedulers' variables that switch their limits off
    enabled_dialects: tuple[str, ...] = ("*",)  # names of dialects.registry.SCHEDULERS; * = all
    disabled_dialects: tuple[str, ...] = ()
    unlimited_process: str = "report"  # report | stop: for a process that uses a GPU without the shim
    lending: str = constants.NO_LENDING  # off | movable | evict | suspend: how borrowed memory is taken back
    suspend_idle_s: int = 0  # without a call, until a container may be suspended for another one; 0: never
    suspend_least_s: int = 60  # that a container runs before it is suspended again
    quotas: tuple[Quota, ...] = ()  # the first entry for a user and the first for a namespace apply

    @property
    def lent_as(self) -> str:
        """The `lending` of a share: the agent chooses between the two ways of taking back memory of the device."""
        return constants.EVICT if self.lending == constants.SUSPEND else self.lending


class SharingRule(NamedTuple):
    """Split the devices that `model` and `devices` name (empty: all) into equal shares. A container that requests a
    device without a limit gets one. split_count 0: no such shares there."""

    split_count: int
    memory_scaling: float = 1.0  # memory of all shares together, as a multiple of the device's memory
    cores_scaling: float = 1.0  # compute of all shares together, as a multiple of the device's time
    model: str = ""
    devices: tuple[str, ...] = ()  # index, <gpu>:<mig> or uuid
    alone: bool = False  # the device plugin refuses a container that requests more than one share
    resource: str = ""  # its name for the shares, or the end of that name if it begins with a dot; "": the usual name


class Config(NamedTuple):
    """The effective configuration, as compiled into node.json."""

    driver_root: str = "/"
    state_dir: str = "/run/gpushare"  # from --state: node.json itself is in it, so no key of that file can set it
    shim_dir: str = constants.SHIM_DIR  # directory of libcuda.so and libnvidia-ml.so (the shim)
    memory_overcommit: float = 1.0
    placement: str = "binpack"  # binpack | spread
    policy: Policy = Policy()
    log: str = "syslog"  # destination of decisions: syslog, none, or the path of a file or socket
    runtime: str = ""  # absolute path of the low-level runtime; "" = found by oci_runtime.find
    compute_overcommit: float = 1.0
    slice_us: int = 0  # the devices' time slice, microseconds; 0 = the shim's default
    switch_us: int = 0
    sharing: tuple[SharingRule, ...] = ()  # the first rule that names a device applies
    host_memory: str = ""  # host memory for all oversubscribed shares together; "" = none
    oversubscribe_scaling: float = 2.0  # total memory of such a share, as a multiple of its part on the device
    turn_ms: int = 0  # migration slice: how long one such share has its host memory on the device; 0 = never
    turn_memory: str = "25%"  # part of each device that is kept free for migration slices
    usage_journal: str = "auto"  # auto, none, or the path of a file
    usage_journal_size: str = "64Mi"
    reconcile: str = "report"  # report | stop: for a container that uses more than its limit according to the driver
    compute_sharing: str = "slices"  # slices | turns
    round_ms: int = 20  # in which each container has a turn
    driver_libraries: str = ""  # root of the driver's files; "": gpushare finds it
    driver_dev: str = ""  # root that has dev; "": gpushare finds it
    kubelet_dir: str = constants.KUBELET_DIR
    claims_dir: str = constants.CLAIMS_DIR

    @property
    def dev_root(self) -> str:
        """The root below which dev has the device nodes, as far as the configuration sets it."""
        return self.driver_dev or self.driver_root


class Node(NamedTuple):
    """Configuration and devices of the host, as the start path reads them from node.json."""

    config: Config
    inventory: Inventory


class Bundle(NamedTuple):
    """One container as its runtime described it. Only direct callers of oci.py use `spec`."""

    id: str
    pid: int  # 0 when there is none (explain, poststop)
    path: str  # the bundle directory
    rootfs: str  # absolute path in the container's mount namespace, before pivot_root
    env: tuple[tuple[str, str], ...]  # in order, duplicates kept
    annotations: dict[str, str]  # CRI_ANNOTATIONS only where the engine is configured as a CRI
    cgroups_path: str
    container_type: str  # "sandbox" | "container" | ""
    container_name: str
    privileged: bool
    spec: dict[str, Any]
    claims: tuple[str, str] = ("", "")  # an untrusted CRI annotation, (name, value), where no CRI is configured
    entry: str = ""  # its name in policy.privileged_containers: <namespace>/<container> in a pod, else its id
    claimed_entry: str = ""  # <namespace>/<container> according to untrusted annotations
    sys_admin: bool = False  # a program can have CAP_SYS_ADMIN, in any user namespace
    minors: tuple[int, ...] = ()  # of the GPUs whose nodes config.json has
    injected: str = ""  # what of config.json names a device, for messages: a node, else a rule
    volumes: tuple[str, ...] = ()  # devices that mounts below NVIDIA's directory request (dialects/cdi_devices.py)
    imex_volumes: tuple[str, ...] = ()  # IMEX channels, requested in the same way
    uid: int = 0  # of the first process, on the host
    shm: str = ""  # host path of its /dev/shm; "": a file system of its own


class Accepts(NamedTuple):
    """Whether requests from each source count: the keys of policy.accept, for one container."""

    env: bool
    annotations: bool
    cdi: bool
    volume_mounts: bool
    switches: bool
    widening: bool


class Condition(NamedTuple):
    """One condition of `any,model=A100,free>=20Gi`."""

    name: str  # model | memory | free | mig
    text: str  # as written, for messages
    value: Any  # as dialects/conditions.py parsed it


class Selection(NamedTuple):
    """The requested devices: kind is all | none | any | list. `none` means driver files, no GPU.
    (dialects/gpushare_env.py also uses `void`, and `any` with count 0 if no device is named; request.resolve replaces
    both.)"""

    kind: str
    count: int = 0  # type: ignore[assignment]  # for any; shadows tuple.count
    names: tuple[str, ...] = ()  # for list: as written (index, uuid)
    conditions: tuple[Condition, ...] = ()  # for any: conditions that the device must meet


class Amount(NamedTuple):
    """A memory amount as requested: either `limit_bytes` or `percent` is set. This is the memory request, which is
    granted; `ceiling` is the memory limit."""

    limit_bytes: Optional[int]
    percent: Optional[float]
    text: str  # as written, for messages
    foreign: bool = False  # another scheduler's, which may count memory that the driver reserves
    ceiling: Any = None  # Optional[Amount], the memory limit, if it is above the request; see request/lending.py


class Request(NamedTuple):
    """A container's request. `memory` and `compute` are per slot; key None = every device."""

    dialect: str  # "own", "nvidia", "injected", "own+nvidia", ...: the dialects that were used
    selection: Selection
    capabilities: tuple[str, ...] = ()  # sorted, expanded: "compute", "utility", ...
    memory: tuple[tuple[Optional[int], Amount], ...] = ()
    compute: tuple[tuple[Optional[int], int], ...] = ()  # percent 1..100
    compute_mode: str = "hard"
    priority: int = 0
    backend: str = "auto"  # or rows of backends.BACKENDS, separated by commas
    oversubscribe: bool = False
    # per slot: its memory covers device and host together, as this multiple of its part on the device
    scalings: tuple[tuple[Optional[int], float], ...] = ()
    sources: tuple[tuple[str, str], ...] = ()  # (variable or annotation, value) that were used
    ignored: tuple[str, ...] = ()  # one line each, for explain
    features: tuple[str, ...] = ()  # of drivertable.FEATURES: "gds", "mofed", ...
    imex_channels: tuple[str, ...] = ()  # numbers, or "all"
    mig_access: tuple[str, ...] = ()  # "config", "monitor": rights over MIG that only a privileged container gets
    requirements: tuple[tuple[str, str], ...] = ()  # (NVIDIA_REQUIRE_..., constraint)
    uid: int = 0  # of the first process, on the host
    shm: str = ""  # host path of its /dev/shm; "": a file system of its own


RESERVED = "that the driver reserves"  # the end of Share.clamped, where capacity and not policy is the reason


class Share(NamedTuple):
    """One granted device of one container. None = no limit on that resource."""

    slot: int  # ordinal inside the container
    device: Device
    memory_limit_bytes: Optional[int]
    compute_percent: Optional[int] = None
    soft: bool = False
    priority: int = 0
    oversubscribe: bool = False
    clamped: str = ""  # the requested amount, where less was granted
    page: int = 0  # number of its activity file in devices/<uuid>, see activity_files.py
    paused: bool = False  # launches are held back
    draining_bytes: int = 0  # use that is tolerated after its limit was lowered; 0 = nothing above the limit
    memory_backend: str = "shim"  # enforces the limit: a row of backends.BACKENDS
    compute_backend: str = "shim"
    virtual_bytes: int = 0  # oversubscribed: its limit on device and host together; with `lending` the memory limit
    granted_ns: int = 0  # device time granted from the start until Lease.counted_ns
    granted_byte_ns: int = 0  # memory granted until then, multiplied by time
    lending: str = ""  # movable | evict: memory above memory_limit_bytes, then the request, is lent up to virtual_bytes
    phase: str = ""  # of a suspended container: suspending | suspended | resuming; "": it runs
    suspended_bytes: int = 0  # in host memory, while it is suspended
    suspended_ns: int = 0  # time that it was suspended until Lease.counted_ns

    @property
    def counts(self) -> bool:
        """Whether what it was granted is taken from the device."""
        return self.phase != constants.SUSPENDED

    @property
    def ceiling_bytes(self) -> Optional[int]:
        """The memory limit, with what may be borrowed."""
        return self.virtual_bytes if self.lending else self.memory_limit_bytes

    @property
    def has_host_part(self) -> bool:
        """Whether some of its memory is on the host, or may be moved there."""
        return self.virtual_bytes > 0 and self.lending != constants.EVICT

    @property
    def host_promise_bytes(self) -> int:
        """The bytes that count against oversubscription.host_memory."""
        return (self.virtual_bytes if self.has_host_part else 0) + self.suspended_bytes

    @property
    def clamp_note(self) -> str:
        """Why it has less than was requested; "" if it has not."""
        if not self.clamped:
            return ""
        why = "less is granted" if self.clamped.endswith(RESERVED) else "policy allows less"
        return f"slot {self.slot}: {self.clamped} was requested, {why}"


class Lease(NamedTuple):
    """The record of a container's shares (lease.json). Start times are /proc/<pid>/stat field 22."""

    id: str
    state: str  # "reserved" | "held"
    boot_id: str
    bundle: str
    shares: tuple[Share, ...]
    creator_pid: int
    creator_start: int
    init_pid: int = 0
    init_start: int = 0
    cgroup: str = ""
    first: bool = False  # init is the first process of a pid namespace: no process of the container outlives it
    cgroup_dir: str = ""  # of the container's own cgroup; leftover.py identifies it by its inode number
    cgroup_id: int = 0  # that inode number; 0: no own cgroup
    created: float = 0.0  # unix seconds
    dialect: str = ""
    driver_version: str = ""
    sandbox: str = ""  # what only one container may use: the pod's annotation (its sandbox's id), or claims' variables
    cri: bool = False  # a CRI wrote annotations that name the container's pod
    began_ns: int = 0  # CLOCK_BOOTTIME; 0: not recorded
    counted_ns: int = 0  # the shares' granted_ns and granted_byte_ns are complete up to here; 0: since began_ns
    uid: int = -1  # of the first process, on the host; -1: not recorded
    namespace: str = ""  # as a CRI names them; "" elsewhere
    pod: str = ""
    container: str = ""
    image: str = ""


class LdEntry(NamedTuple):
    """One library in ld.so.cache: `flags` as ldconfig writes them (0x0303 = x86-64 libc6)."""

    soname: str
    path: str
    flags: int


class Image(NamedTuple):
    """State of a container's root before any change, as rootfs.probe found it. All paths are as seen inside the
    container."""

    libdir: str  # the directory of the image's libc.so.6; "" when it has no glibc
    machine: str  # "x86_64", "aarch64", "" when unknown
    has_ldcache: bool
    ldcache_note: str  # why the cache is left alone; "" when it is rewritten
    # (path, soname) of every libcuda/libnvidia-ml of the image that a loader could prefer:
    # cache entries, glibc-hwcaps, /usr/local/cuda*/compat, the spec's LD_LIBRARY_PATH
    other_drivers: tuple[tuple[str, str], ...] = ()
    existing_links: tuple[tuple[str, str], ...] = ()  # (path in libdir, link text)
    libdir32: str = ""  # the directory of its additional 32-bit glibc; "" when it has none
    # the newer driver in the image's /usr/local/cuda*/compat: its version and (stem, path) of each library
    compat_version: str = ""
    compat_files: tuple[tuple[str, str], ...] = ()
