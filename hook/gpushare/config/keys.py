"""The keys of the configuration file. Schema, sample, defaults, checks and docs/config.md derive from this table.

KEYS               -> tuple[Key, ...]   in the order of the file
effective(config)  -> dict              dotted key -> value, as the file would set it
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from ..core import constants, installed
from ..core.errors import RequestError
from ..core.model import Config
from ..core.quantity import amount, human, size_bytes, whole_percent
from ..core.quoting import shown
from ..request.dialects import registry
from . import quotas, sharing

VERSION = 1
NVIDIA_VERSION = "v1"  # of the configuration of NVIDIA's device plugin, which may be pasted as a whole
LEAST_JOURNAL = 1 << 20
NVIDIA_ONLY = ("flags", "resources", "imex")  # keys that only NVIDIA's plugin uses
_ACCEPT = {"enum": ["always", "privileged", "never"]}
_SCHEDULERS = [row.name for row in registry.SCHEDULERS]
_TEXT = {"type": "string"}
_PATH = {"type": "string", "pattern": "^/[^\\u0000]*$"}
_PATH_OR_EMPTY = "^(/[^\\u0000]*)?$"
_JOURNAL = "^(auto|none|/[^\\u0000]*)$"
_LOG = "^(syslog|none|/[^\\u0000]*)$"
_NO_TIME = "none"
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_TIME = "^(none|[0-9]{1,6}[smhd])$"
_DURATION = {"type": "string", "pattern": _TIME}
_DEVICE = "^([0-9]+(:[0-9]+)?|(GPU|MIG|gpu|mig)-[^ ]+)$"
# Pattern -> expected value, for messages and docs/config.md
PATTERNS = {
    _PATH["pattern"]: "an absolute path",
    _PATH_OR_EMPTY: "an absolute path, or nothing",
    _JOURNAL: "auto, none, or an absolute path",
    _TIME: "none, or a number with s, m, h or d, such as 15m",
    _LOG: "syslog, none, or an absolute path",
    _DEVICE: "an index such as 0 or a whole uuid",
    **quotas.PATTERNS,
}
TYPES = {
    "array": "a list such as [a, b]",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "object": "indented keys, one per line",
    "string": "text, in quotes",
}


class Kind(NamedTuple):
    """How to convert a value of the file to a field of `Config` (`read`, raises RequestError) and back (`plain`)."""

    read: Callable[[str, Any], Any] = lambda _, value: value
    plain: Callable[[Any], Any] = lambda value: value


def _number(_: str, value: Any) -> float:
    if value != value:  # NaN, which is neither below nor above any bound
        raise RequestError('"NaN" is wrong', "expected a number")
    return float(value)


def _amount(path: str, value: str) -> str:
    amount(path, value.strip())
    return value.strip()


def _journal_size(path: str, value: str) -> str:
    if size_bytes(path, value) < LEAST_JOURNAL:
        raise RequestError(f"{shown(value)} is too small for a journal", f"give at least {human(LEAST_JOURNAL)}")
    return value.strip()


def _duration(_: str, value: str) -> int:
    """Return the seconds of `15m`; 0 for `none`."""
    return 0 if value == _NO_TIME else int(value[:-1]) * _UNITS_S[value[-1]]


def _low_level(_: str, value: str) -> str:
    if value and installed.is_gpushare(value):
        raise RequestError(f"{shown(value)} is gpushare itself", "set it to runc or crun, or leave it empty")
    return value


SAME = Kind()
LOW_LEVEL = Kind(_low_level)
JOURNAL_SIZE = Kind(_journal_size)
DIRECTORY = Kind(lambda _, value: os.path.normpath(value))
DIRECTORY_OR_NONE = Kind(lambda _, value: os.path.normpath(value) if value else "")
LENDING = Kind(lambda _, value: constants.LENDING_WORDS.get(value, value))
DURATION = Kind(_duration, lambda seconds: f"{seconds}s" if seconds else _NO_TIME)
NUMBER = Kind(_number)
WHOLE = Kind(lambda _, value: int(value))
LIST = Kind(lambda _, value: tuple(value), list)
AMOUNT = Kind(_amount)
AMOUNT_OR_NONE = Kind(lambda path, value: _amount(path, value) if value.strip() else "")
PERCENT = Kind(whole_percent, "{}%".format)


class Key(NamedTuple):
    """One key: its path in the file, the field of `Config` (or of its `policy`) that it sets, the conversion, the JSON
    Schema and the description. `field` is "" if `sharing.rules` reads the key. `default` is the field's default."""

    path: str  # dotted
    field: str
    kind: Kind
    schema: dict[str, Any]
    description: str
    default: Any = None


_KEYS = (
    Key("version", "", SAME, {"enum": [VERSION, NVIDIA_VERSION]},
        "Version of this file's format; v1, as in the configuration of NVIDIA's device plugin, means 1."),
    Key("driver.root", "driver_root", DIRECTORY, _PATH,
        "Root directory of the NVIDIA driver, which contains its libraries, dev and proc. / if the driver is installed "
        "on the host; for example /run/nvidia/driver if it runs in a container."),
    Key("driver.libraries", "driver_libraries", DIRECTORY_OR_NONE, {"type": "string", "pattern": _PATH_OR_EMPTY},
        "Directory with the driver's libraries and programs, if they are not below driver.root in a usual place: one "
        "that has lib64 and bin, such as /opt/nvidia. Empty: gpushare finds them (docs/driver.md)."),
    Key("driver.dev", "driver_dev", DIRECTORY_OR_NONE, {"type": "string", "pattern": _PATH_OR_EMPTY},
        "Directory that has dev with the driver's device nodes, if that is not driver.root. Empty: driver.root, or the "
        "driver's container if only that has them."),
    Key("kubernetes.kubelet_dir", "kubelet_dir", DIRECTORY, _PATH,
        "Directory that has kubelet's device-plugins. Its checkpoint proves the variables of the device plugin. "
        "kubelet uses the default whatever its --root-dir is, so only a distribution that changed kubelet needs "
        "another one."),
    Key("kubernetes.claims_dir", "claims_dir", DIRECTORY, _PATH,
        "Directory in which `gpushare dra` prepares claims (--cdi). The files there prove the variables of the DRA "
        "driver."),
    Key("shim_dir", "shim_dir", DIRECTORY, _PATH, "Directory with gpushare's libcuda.so and libnvidia-ml.so."),
    Key("runtime.path", "runtime", LOW_LEVEL, {"type": "string", "pattern": _PATH_OR_EMPTY},
        "The low-level runtime that gpushare-runtime executes; empty: the runc or crun of the engine's default handler "
        "if that names its path, else runc if this host has it, else crun."),
    Key("placement.strategy", "placement", SAME, {"enum": ["binpack", "spread"]},
        "How to choose a device for `any` among devices with enough free memory and compute. binpack: the device that "
        "will then be fullest, so that other devices stay free; spread: the device that will then be emptiest. Memory "
        "and compute count alike."),
    Key("sharing.split_count", "", SAME, sharing.SPLIT,
        "Number of equal shares of a device, for containers that request a device without a memory limit. The device "
        "serves at most this many containers. 0: no equal shares; policy.unlimited applies to such containers."),
    Key("sharing.memory_scaling", "", SAME, sharing.SCALING,
        "Memory of all equal shares together, as a multiple of the device's memory. Each share gets this amount "
        "divided by split_count. The part above 1.0 is in host memory (oversubscription)."),
    Key("sharing.cores_scaling", "", SAME, sharing.SCALING,
        "Compute of all equal shares together, as a multiple of the device's whole time. A value above 1.0 counts as "
        "compute_overcommit."),
    Key("sharing.overrides", "", SAME, sharing.overrides(_DEVICE),
        "Equal shares of particular devices. Each entry has model (A100, L40*) or devices (index or uuid), "
        "split_count, and optionally memory_scaling and cores_scaling (default 1.0). The first entry that matches a "
        "device applies."),
    Key("sharing.timeSlicing.renameByDefault", "", SAME, {"type": "boolean"},
        "As in the configuration of NVIDIA's device plugin. true: `gpushare k8s-plugin` offers equal shares as "
        "gpushare.io/gpu.shared in place of gpushare.io/gpu, and the label gpu.product does not end with -SHARED. "
        "`rename` of a resource sets another name."),
    Key("sharing.timeSlicing.failRequestsGreaterThanOne", "", SAME, {"type": "boolean"},
        "As in the configuration of NVIDIA's device plugin. true: `gpushare k8s-plugin` refuses a container that "
        "requests more than one equal share. false: it gets one of each of several devices."),
    Key(sharing.TIME_SLICING, "", SAME, sharing.resources(_DEVICE),
        "As in the configuration of NVIDIA's device plugin: replicas of nvidia.com/gpu is another name for "
        "split_count. It applies to MIG devices too. With a list of devices (index or uuid), an entry applies to these "
        "devices, like an entry of overrides."),
    Key("memory_overcommit", "memory_overcommit", NUMBER, {"type": "number", "minimum": 0.1, "maximum": 16},
        "Memory that may be granted on a device, as a multiple of the device's memory. With 1.0 every container can "
        "use its whole limit at any time. One container never gets more than the device has."),
    Key("oversubscription.host_memory", "host_memory", AMOUNT_OR_NONE, _TEXT,
        "Experimental. Host memory for oversubscribed shares (GPUSHARE_OVERSUBSCRIBE, memory_scaling above 1.0), such "
        "as 64Gi, or 50% of the host's memory; empty: none, and such shares are refused. The whole share counts, also "
        "its part on the device."),
    Key("oversubscription.scaling", "oversubscribe_scaling", NUMBER, sharing.SCALING,
        "Memory on device and host together for a container that sets GPUSHARE_OVERSUBSCRIBE, as a multiple of its "
        "memory limit."),
    Key("oversubscription.turn_ms", "turn_ms", WHOLE, {"type": "integer", "minimum": 0, "maximum": 2000},
        "Migration slice in milliseconds: how long one oversubscribed container at a time has its host memory moved to "
        "the device; 0: the memory stays on the host."),
    Key("oversubscription.turn_memory", "turn_memory", AMOUNT, _TEXT,
        "Memory of each device that is reserved for migration slices if turn_ms is not 0, such as 4Gi or 25%."),
    Key("compute_overcommit", "compute_overcommit", NUMBER, {"type": "number", "minimum": 0.1, "maximum": 16},
        "Compute that may be granted on a device, as a multiple of the device's whole time. With 1.0 every container "
        "can use its whole limit at any time. Only hard limits count; containers without a limit, or with a soft "
        "limit, reserve no compute."),
    Key("compute.sharing", "compute_sharing", SAME, {"enum": ["slices", "turns"]},
        "How containers with compute limits share a device that they keep busy together. slices: the device switches "
        "between them after each time slice, which takes about a tenth of its time. turns: they use it one after the "
        "other, each for its part of a round; measured in simulations only so far."),
    Key("compute.round_ms", "round_ms", WHOLE, {"type": "integer", "minimum": 5, "maximum": 1000},
        "With sharing: turns, the time in which each container has about one turn, in milliseconds. A round is "
        "at least 160 context switches long, and a turn 2 ms and 16 switches."),
    Key("compute.slice_us", "slice_us", WHOLE, {"type": "integer", "minimum": 0, "maximum": 1000000},
        "The device's time slice in microseconds: how long one container runs while other containers wait; 0: the "
        "default, 2000."),
    Key("compute.switch_us", "switch_us", WHOLE, {"type": "integer", "minimum": 0, "maximum": 1000000},
        "Mean time in microseconds that the device needs to switch between containers; 0: the default, 125. The right "
        "value makes compute limits more exact."),
    Key("policy.accept.env", "policy.accept_env", SAME, _ACCEPT,
        "Containers whose environment variables are accepted as requests. Images can set variables too."),
    Key("policy.accept.annotations", "policy.accept_annotations", SAME, _ACCEPT,
        "Containers whose annotations are accepted as requests."),
    Key("policy.accept.volume_mounts", "policy.accept_volume_mounts", SAME, _ACCEPT,
        "Containers whose mounts at /var/run/nvidia-container-devices are accepted as requests."),
    Key("policy.accept.cdi", "policy.accept_cdi", SAME, _ACCEPT,
        "Containers whose devices in config.json, put there by CDI, DRA or NVIDIA's tools, are accepted as requests. "
        "In other containers such devices are refused, or removed if a gpushare request determines the devices."),
    Key("policy.accept.switches", "policy.accept_switches", SAME, _ACCEPT,
        "Containers in which other schedulers' variables may switch their own limits off: CUDA_DISABLE_CONTROL, "
        "CGPU_DISABLE and similar ones. never: requested limits stay in force."),
    Key("policy.accept.widening", "policy.accept_widening", SAME, _ACCEPT,
        "Containers in which variables may extend a request beyond its limit. An image can set such variables next to "
        "the limit that a user sets: GPUSHARE_COMPUTE_MODE=soft, GPUSHARE_PRIORITY=high, GPUSHARE_OVERSUBSCRIBE, other "
        "schedulers' variables of the same meaning, NVIDIA_NVSWITCH, NVIDIA_MOFED, NVIDIA_GDRCOPY, NVIDIA_GDS and "
        "NVIDIA_IMEX_CHANNELS. In other containers they are ignored and the limit stays, also another scheduler's "
        "limit next to a larger GPUSHARE_MEMORY or GPUSHARE_COMPUTE. Annotations and parameters of a claim always "
        "count."),
    Key("policy.dialects.enabled", "policy.enabled_dialects", LIST,
        {"type": "array", "items": {"enum": ["*", *_SCHEDULERS]}},
        "Other schedulers whose variables and annotations count (docs/dialects.md); * means all. Requests in the "
        "format of any other scheduler are ignored."),
    Key("policy.dialects.disabled", "policy.disabled_dialects", LIST,
        {"type": "array", "items": {"enum": _SCHEDULERS}},
        "Other schedulers whose variables and annotations are ignored, even if policy.dialects.enabled lists them."),
    Key("policy.annotations", "policy.annotations", SAME, {"enum": ["any", "scoped"]},
        "Annotations that count. any: all; scoped: only annotations that name one container of a pod, such as "
        "<container>.gpushare.io/memory."),
    Key("policy.nvidia_visible_devices", "policy.nvidia_visible_devices", SAME, {"enum": ["alone", "with_limit"]},
        "Effect of the variable NVIDIA_VISIBLE_DEVICES, which most CUDA images set themselves. alone: it grants "
        "the devices that it names. with_limit: it only selects the devices of a container that also requests a limit, "
        "through gpushare or another scheduler; without a limit it grants nothing."),
    Key("policy.amounts", "policy.amounts", SAME, {"enum": ["device", "container"]},
        "Meaning of an amount of memory in variables and annotations. device: the container gets it on each of its "
        "devices; container: a scheduler counted it once, so the container gets one device. A request for several is "
        "refused, and NVIDIA_VISIBLE_DEVICES=all of an image means any device. Devices that kubelet or a claim "
        "allocated have amounts of their own."),
    Key("policy.privileged_containers", "policy.privileged_containers", LIST,
        {"type": "array", "items": {"type": "string", "minLength": 1}},
        "Privileged containers that may use a GPU: <namespace>/<container> in a pod, where either may be *, else the "
        "container's id; * means all. For any other privileged container gpushare-runtime removes the NVIDIA devices "
        "that the engine adds, and refuses requests. Privileged means CAP_SYS_ADMIN in the host's user namespace: such "
        "a container is root on the host and can undo its limit. The cluster profile lists none."),
    Key("policy.require_limits", "policy.require_limits", SAME, {"type": "boolean"},
        "Refuse containers that request a device without a memory limit."),
    Key("policy.max_memory", "policy.max_memory", AMOUNT_OR_NONE, _TEXT,
        "Maximum memory per container and device, such as 8Gi or 50%; empty: no maximum. With a maximum, a container "
        "must request a limit, unless over_maximum is clamp."),
    Key("policy.max_compute", "policy.max_compute_percent", PERCENT, _TEXT,
        "Maximum compute per container and device, from 1% to 100%."),
    Key("policy.over_maximum", "policy.over_maximum", SAME, {"enum": ["refuse", "clamp"]},
        "Action for a container that requests more than a maximum, or no limit although there is a maximum. refuse: it "
        "does not start; clamp: it gets the maximum."),
    Key(quotas.KEY, "", SAME, quotas.SCHEMA,
        "Caps on what all containers of a user or Kubernetes namespace hold together on this host. Each entry has user "
        "(name, uid, or * for every user) or namespace (a name, or a pattern such as team-*), and memory, compute or "
        "containers. Each user or namespace that an entry matches has the quota for itself; the first entry that "
        "matches applies. Empty: none."),
    Key("policy.allowed_devices", "policy.allowed_devices", LIST,
        {"type": "array", "items": {"type": "string", "pattern": _DEVICE}},
        "Devices that containers may get, by index (\"0\", \"0:1\" for a MIG device) or whole uuid; empty: all."),
    Key("policy.allowed_backends", "policy.allowed_backends", LIST,
        {"type": "array", "minItems": 1, "items": {"enum": list(constants.BACKENDS)}},
        "Backends that may enforce limits (docs/backends.md). If a container names no backend, each of its limits gets "
        "the first suitable one of this list."),
    Key("policy.unlimited", "policy.unlimited", SAME, {"enum": ["exclusive", "shared", "deny"]},
        "Effect of a request without a memory limit. exclusive: the container gets the device for itself; shared: it "
        "shares the device with other containers; deny: it is refused."),
    Key("policy.unlimited_process", "policy.unlimited_process", SAME, {"enum": ["report", "stop"]},
        "Action of `gpushare export` for a process of a container that uses a GPU without gpushare's library, and so "
        "without a limit, such as one that loads another libcuda.so.1. report: write a line to log.decisions; stop: "
        "also kill that process (docs/driver.md)."),
    Key("policy.lending", "policy.lending", LENDING,
        {"enum": [constants.NO_LENDING, "on", constants.MOVABLE, constants.EVICT, constants.SUSPEND, False, True]},
        "Experimental. How memory above a container's request is lent, up to its limit (4Gi..12Gi; docs/lending.md). "
        "off: never, the request is the limit; movable: as memory that the driver can move to the host, within "
        "oversubscription.host_memory; evict: as memory of the device, while `gpushare agent` runs. The agent ends "
        "the container that borrowed most when another container needs its own request; suspend, or on: the same, "
        "but the agent suspends that container (docs/suspend.md) and ends it only if the driver cannot suspend it."),
    Key("policy.suspend.idle", "policy.suspend_idle_s", DURATION, _DURATION,
        "Experimental. Time without a call of CUDA after which `gpushare agent` may suspend a container whose memory "
        "another one needs, such as 15m. A container for which there is no room then starts suspended, and gets its "
        "memory at its first call. none: never."),
    Key("policy.suspend.least", "policy.suspend_least_s", DURATION, _DURATION,
        "Time that a container runs before the agent suspends it again."),
    Key("reconcile.action", "reconcile", SAME, {"enum": ["report", "stop"]},
        "Action of `gpushare export` for a container that uses more memory than its limit according to the driver. "
        "report: write a line to log.decisions; stop: also kill the container."),
    Key("usage.journal", "usage_journal", SAME, {"type": "string", "pattern": _JOURNAL},
        "File that keeps what each container was granted and used, for `gpushare usage`. auto: "
        "/var/lib/gpushare/usage.log, or ~/.local/state/gpushare/usage.log without root; with another state directory "
        "there is none. none: no such file; or an absolute path."),
    Key("usage.journal_size", "usage_journal_size", JOURNAL_SIZE, _TEXT,
        "Maximum size of that file and the one before it together, such as 64Mi. Older lines are dropped."),
    Key("log.decisions", "log", SAME, {"type": "string", "pattern": _LOG},
        "Destination of the log line for each share that is granted, refused or released: syslog (the journal if the "
        "host runs systemd); none; or the absolute path of a file, or of a socket that accepts /dev/log messages."),
    *(Key(name, "", SAME, {"type": "object"},
          "Accepted because the configuration of NVIDIA's device plugin has it; no effect.") for name in NVIDIA_ONLY),
)  # fmt: skip


def effective(config: Config) -> dict[str, Any]:
    """Return every key with its value, as the file would set it."""
    values = {"version": VERSION, **sharing.plain(config.sharing), quotas.KEY: quotas.plain(config.policy.quotas)}
    values.update((name, {}) for name in NVIDIA_ONLY)
    for key in _KEYS:
        if key.field:
            part, _, name = key.field.rpartition(".")
            values[key.path] = key.kind.plain(getattr(config.policy if part else config, name))
    return {key.path: values[key.path] for key in _KEYS}


KEYS = tuple(key._replace(default=value) for key, value in zip(_KEYS, effective(Config()).values()))
