"""The keys of the configuration file, declared once: schema, sample, defaults, checks and docs/config.md follow.

KEYS               -> tuple[Key, ...]   in the order of the file
effective(config)  -> dict              dotted key -> value, as the file would set it
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from ..core import constants
from ..core.errors import RequestError
from ..core.model import Config
from ..core.quantity import amount, whole_percent
from ..request.dialects import registry
from . import sharing

VERSION = 1
_ACCEPT = {"enum": ["always", "privileged", "never"]}
_SCHEDULERS = [row.name for row in registry.SCHEDULERS]
_TEXT = {"type": "string"}
_PATH = {"type": "string", "pattern": "^/[^\\u0000]*$"}
_PATH_OR_EMPTY = "^(/[^\\u0000]*)?$"
_LOG = "^(syslog|none|/[^\\u0000]*)$"
_DEVICE = "^([0-9]+(:[0-9]+)?|(GPU|MIG|gpu|mig)-[^ ]+)$"
# What a text must be, in the words of messages and of docs/config.md
PATTERNS = {
    _PATH["pattern"]: "an absolute path",
    _PATH_OR_EMPTY: "an absolute path, or nothing",
    _LOG: "syslog, none, or an absolute path",
    _DEVICE: "an index such as 0 or a whole uuid",
}
TYPES = {
    "array": "a list such as [a, b]",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "object": "keys below it, one a line",
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


SAME = Kind()
DIRECTORY = Kind(lambda _, value: os.path.normpath(value))
NUMBER = Kind(_number)
WHOLE = Kind(lambda _, value: int(value))
LIST = Kind(lambda _, value: tuple(value), list)
AMOUNT = Kind(_amount)
AMOUNT_OR_NONE = Kind(lambda path, value: _amount(path, value) if value.strip() else "")
PERCENT = Kind(whole_percent, "{}%".format)


class Key(NamedTuple):
    """One key: its place in the file, the field of `Config` (or of its `policy`) that it sets, the conversion, the JSON
    Schema and the meaning. `field` is "" if `sharing.rules` reads the key. `default` is that of the field."""

    path: str  # dotted
    field: str
    kind: Kind
    schema: dict[str, Any]
    description: str
    default: Any = None


_KEYS = (
    Key("version", "", SAME, {"const": VERSION}, "Version of this file's format."),
    Key("driver.root", "driver_root", DIRECTORY, _PATH,
        "Root below which the NVIDIA driver is: its libraries, dev and proc. / when it is installed on the host, "
        "for example /run/nvidia/driver when it runs in a container."),
    Key("shim_dir", "shim_dir", DIRECTORY, _PATH, "Directory with our libcuda.so and libnvidia-ml.so."),
    Key("runtime.path", "runtime", SAME, {"type": "string", "pattern": _PATH_OR_EMPTY},
        "The low-level runtime that gpushare-runtime executes; empty: runc if this host has it, else crun."),
    Key("placement.strategy", "placement", SAME, {"enum": ["binpack", "spread"]},
        "Which of the devices that have room a container gets that asks for any: binpack takes the one that is then "
        "the fullest, so that others stay free; spread the one that is then the emptiest. Memory and compute count "
        "alike."),
    Key("sharing.split_count", "", SAME, sharing.SPLIT,
        "Into how many equal shares a device is divided for containers that ask for a device and for no limit of "
        "memory, and how many containers it serves at most; 0: there are no equal shares, and such a container is what "
        "policy.unlimited says."),
    Key("sharing.memory_scaling", "", SAME, sharing.SCALING,
        "How much memory the equal shares have together, as a multiple of the device's: each gets this much divided by "
        "split_count. What is more than 1.0 lies in host memory (oversubscription)."),
    Key("sharing.cores_scaling", "", SAME, sharing.SCALING,
        "How much compute the equal shares have together, as a multiple of all of the device's time. More than 1.0 "
        "counts as compute_overcommit."),
    Key("sharing.overrides", "", SAME, sharing.overrides(_DEVICE),
        "The same for some devices: entries with model (A100, L40*) or devices (index or uuid), split_count, and where "
        "they are not 1.0 memory_scaling and cores_scaling. The first that names a device counts."),
    *(Key(f"sharing.timeSlicing.{name}", "", SAME, {"type": "boolean"},
          "As in the configuration of NVIDIA's device plugin; of no effect here.")
      for name in ("renameByDefault", "failRequestsGreaterThanOne")),
    Key(sharing.TIME_SLICING, "", SAME, sharing.RESOURCES,
        "As in the configuration of NVIDIA's device plugin: replicas of nvidia.com/gpu is another name for "
        "split_count, and counts for MIG devices too."),
    Key("memory_overcommit", "memory_overcommit", NUMBER, {"type": "number", "minimum": 0.1, "maximum": 16},
        "How much memory may be granted on a device, as a multiple of what it has. 1.0 means that every container "
        "can use its whole limit at any time. One container never gets more than the device has."),
    Key("oversubscription.host_memory", "host_memory", AMOUNT_OR_NONE, _TEXT,
        "How much of the host's memory shares may have that go on there (GPUSHARE_OVERSUBSCRIBE, memory_scaling above "
        "1.0): such as 64Gi, or 50% of what the host has; empty: none, and they are refused. All of such a share "
        "counts, its part on the device too."),
    Key("oversubscription.scaling", "oversubscribe_scaling", NUMBER, sharing.SCALING,
        "How much a container that sets GPUSHARE_OVERSUBSCRIBE may hold on device and host together, as a multiple of "
        "its memory limit."),
    Key("oversubscription.turn_ms", "turn_ms", WHOLE, {"type": "integer", "minimum": 0, "maximum": 2000},
        "How long one oversubscribed container at a time has what it has in host memory on the device, in "
        "milliseconds; 0: it stays on the host."),
    Key("oversubscription.turn_memory", "turn_memory", AMOUNT, _TEXT,
        "How much of each device is kept free of shares for that, where turn_ms is not 0: such as 4Gi or 25%."),
    Key("compute_overcommit", "compute_overcommit", NUMBER, {"type": "number", "minimum": 0.1, "maximum": 16},
        "How much compute may be granted on a device, as a multiple of all of its time. 1.0 means that every container "
        "can use its whole limit at any time. Only hard limits count: what a container without a limit, or with a soft "
        "one, takes is nobody's."),
    Key("compute.slice_us", "slice_us", WHOLE, {"type": "integer", "minimum": 0, "maximum": 1000000},
        "How long the device lets one container run while others wait, in microseconds; 0: as usual, 2000."),
    Key("compute.switch_us", "switch_us", WHOLE, {"type": "integer", "minimum": 0, "maximum": 1000000},
        "What it takes the device, in the mean, to go from one container to another, in microseconds; 0: as usual, "
        "125. Compute limits come nearer where it is right."),
    Key("policy.accept.env", "policy.accept_env", SAME, _ACCEPT,
        "From which containers requests in environment variables are taken. Images can set them too."),
    Key("policy.accept.annotations", "policy.accept_annotations", SAME, _ACCEPT,
        "From which containers requests in annotations are taken."),
    Key("policy.accept.volume_mounts", "policy.accept_volume_mounts", SAME, _ACCEPT,
        "From which containers requests in the form of mounts at /var/run/nvidia-container-devices are taken."),
    Key("policy.accept.cdi", "policy.accept_cdi", SAME, _ACCEPT,
        "From which containers devices that CDI, DRA or NVIDIA's tools have put into config.json are taken for a "
        "request. From others they are refused, or taken out where a request of ours says what the container gets."),
    Key("policy.accept.switches", "policy.accept_switches", SAME, _ACCEPT,
        "From which containers words of other schedulers that switch their own limits off are taken: "
        "CUDA_DISABLE_CONTROL, CGPU_DISABLE and the like. never: limits that are asked for stay."),
    Key("policy.accept.widening", "policy.accept_widening", SAME, _ACCEPT,
        "From which containers variables are taken that make more of a request than its limit, which an image can set "
        "beside the limit of a user: GPUSHARE_COMPUTE_MODE=soft, GPUSHARE_PRIORITY=high, GPUSHARE_OVERSUBSCRIBE, other "
        "schedulers' words of the same meaning, NVIDIA_NVSWITCH, NVIDIA_MOFED, NVIDIA_GDRCOPY, NVIDIA_GDS and "
        "NVIDIA_IMEX_CHANNELS. Elsewhere they are ignored and the limit stays, also one of another scheduler beside a "
        "larger GPUSHARE_MEMORY or GPUSHARE_COMPUTE. Annotations count in any case."),
    Key("policy.dialects.enabled", "policy.enabled_dialects", LIST,
        {"type": "array", "items": {"enum": ["*", *_SCHEDULERS]}},
        "Other schedulers whose words count (docs/dialects.md); * means all. Those of the others mean nothing here."),
    Key("policy.dialects.disabled", "policy.disabled_dialects", LIST,
        {"type": "array", "items": {"enum": _SCHEDULERS}},
        "Other schedulers whose words mean nothing, whatever policy.dialects.enabled says."),
    Key("policy.annotations", "policy.annotations", SAME, {"enum": ["any", "scoped"]},
        "Which annotations count: any, or scoped, that is only those that name one container of a pod: "
        "<container>.gpushare.io/memory."),
    Key("policy.nvidia_visible_devices", "policy.nvidia_visible_devices", SAME, {"enum": ["alone", "with_limit"]},
        "What the variable NVIDIA_VISIBLE_DEVICES does, which most CUDA images set themselves. alone: it grants "
        "the devices that it names. with_limit: it names the devices of a container that asks for a limit, in our "
        "words or another scheduler's, and alone grants nothing."),
    Key("policy.privileged_containers", "policy.privileged_containers", LIST,
        {"type": "array", "items": {"type": "string", "minLength": 1}},
        "Privileged containers that may use a GPU: <namespace>/<container> in a pod, where either may be *, else the "
        "container's id; * means all. From any other, gpushare-runtime takes the NVIDIA devices that the engine "
        "adds, and a request is refused. Privileged means CAP_SYS_ADMIN in the host's user namespace: such a container "
        "is root on the host and can undo its limit. The cluster profile lists none."),
    Key("policy.require_limits", "policy.require_limits", SAME, {"type": "boolean"},
        "Refuse containers that ask for a device without a memory limit."),
    Key("policy.max_memory", "policy.max_memory", AMOUNT_OR_NONE, _TEXT,
        "Most memory per container and device, such as 8Gi or 50%; empty: no maximum. With a maximum a container "
        "must ask for a limit, unless over_maximum is clamp."),
    Key("policy.max_compute", "policy.max_compute_percent", PERCENT, _TEXT,
        "Most compute per container and device, from 1% to 100%."),
    Key("policy.over_maximum", "policy.over_maximum", SAME, {"enum": ["refuse", "clamp"]},
        "What becomes of a container that asks for more than a maximum, or for no limit where there is one: it does "
        "not start, or gets the maximum."),
    Key("policy.allowed_devices", "policy.allowed_devices", LIST,
        {"type": "array", "items": {"type": "string", "pattern": _DEVICE}},
        "Devices that containers may get, by index (\"0\", \"0:1\" for a MIG device) or whole uuid; empty: all."),
    Key("policy.allowed_backends", "policy.allowed_backends", LIST,
        {"type": "array", "minItems": 1, "items": {"enum": list(constants.BACKENDS)}},
        "Who may hold limits (docs/backends.md). A container that names none gets the first of these that can, for "
        "each limit by itself."),
    Key("policy.unlimited", "policy.unlimited", SAME, {"enum": ["exclusive", "shared", "deny"]},
        "What a container without a memory limit gets: the device for itself, the device beside others, or nothing."),
    Key("reconcile.action", "reconcile", SAME, {"enum": ["report", "stop"]},
        "What `gpushare export` does with a container that, as the driver counts, uses more memory than its limit: it "
        "writes a line to log.decisions, or does that and kills the container."),
    Key("log.decisions", "log", SAME, {"type": "string", "pattern": _LOG},
        "Where one line goes for each share that is granted, refused or released: syslog, which is the journal where "
        "systemd runs; none; or the absolute path of a file, or of a socket that takes what /dev/log does."),
)  # fmt: skip


def effective(config: Config) -> dict[str, Any]:
    """Return every key with its value, as the file would set it."""
    values = {"version": VERSION, **sharing.plain(config.sharing)}
    for key in _KEYS:
        if key.field:
            part, _, name = key.field.rpartition(".")
            values[key.path] = key.kind.plain(getattr(config.policy if part else config, name))
    return {key.path: values[key.path] for key in _KEYS}


KEYS = tuple(key._replace(default=value) for key, value in zip(_KEYS, effective(Config()).values()))
