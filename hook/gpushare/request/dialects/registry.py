"""The table of dialects: the variables and annotations of each system, with their units and traps.

    ROWS                            every dialect; docs/dialects.md and the launcher's triggers are written from it
    SCHEDULERS                      those of other schedulers, parsed if one of their variables occurs; see merge.py
    BEGINNINGS, KEYS                prefixes of variables, and annotations, that can be a request; and
    KEY_BEGINNINGS                  prefixes of such annotations
    VARIABLES                       prefixes of all their variables
    matches(env, annotations, container) -> tuple[Match, ...]     the rows that occur, with their values
    any_annotation(names)           whether one of them is an annotation of a row
    reader(row)                     -> the parser: `read` of the module with the row's name
    parsed(match, inventory)        -> ParsedRequest
    are_together(one, other)        -> bool     whether one system sets the variables of both rows
    OWN                             subject -> our variable for it

A new system is a row here, a module beside this one, and `make docs`. A start loads a parser only if one of its
variables occurs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Optional

from ...core import constants
from ...core.model import Inventory
from . import Env, one_value

# Prefix of annotations that name their container: nvidia.com/container.<container>.<name>
SCOPE = "nvidia.com/container."
# Subjects of a key
MEMORY, COMPUTE, MODE, DEVICES, PRIORITY, BEYOND, SWITCH, EVERYTHING, OTHER = (
    "memory", "compute", "mode", "devices", "priority", "beyond", "switch", "everything", "other",
)  # fmt: skip
_ASKS = (MEMORY, COMPUTE, DEVICES, EVERYTHING)
OWN = {
    MODE: constants.ENV_COMPUTE_MODE,
    MEMORY: constants.ENV_MEMORY,
    COMPUTE: constants.ENV_COMPUTE,
    PRIORITY: constants.ENV_PRIORITY,
    DEVICES: constants.ENV_DEVICES,
    BEYOND: constants.ENV_OVERSUBSCRIBE,
}


class Key(NamedTuple):
    """One variable or annotation. `number`: what the n of NAME_n counts, slot or index; "": there is none."""

    name: str
    about: str
    number: str = ""


class Row(NamedTuple):
    """One dialect. `memory`, `compute`: the format of amounts. `gate`: a variable without which the others belong to
    another program. `asks` False: it only sets how much of a device that another dialect names. `container`: an
    annotation that names the container of a pod to which the others apply. `scoped`: annotations below SCOPE.
    `empty`: an empty value counts, and its parser refuses it. `beside`: rows whose variables one system sets together
    with these; "*": any row."""

    name: str
    system: str
    variables: tuple[Key, ...]
    annotations: tuple[Key, ...] = ()
    memory: str = ""
    compute: str = ""
    trap: str = ""
    gate: str = ""
    asks: bool = True
    container: str = ""
    scoped: tuple[Key, ...] = ()
    empty: bool = False
    beside: tuple[str, ...] = ()

    @property
    def is_numbered(self) -> bool:
        """Whether the n of its NAME_n is a device of the host."""
        return any(key.number == "index" for key in self.variables)


class Value(NamedTuple):
    """A variable or annotation with its value. `number` is the n of NAME_n."""

    key: Key
    name: str
    value: str
    number: Optional[int] = None

    @property
    def is_scoped(self) -> bool:
        """Whether it is an annotation of one container of a pod."""
        return self.name.startswith(SCOPE)

    @property
    def is_annotation(self) -> bool:
        return is_annotation(self.name)


class Match(NamedTuple):
    """A row with its values that occur and are not empty."""

    row: Row
    values: tuple[Value, ...]


SCHEDULERS = (
    Row(
        "hami",
        "HAMi, Volcano vGPU; also what KAI and Koordinator write for HAMi-core",
        (
            Key("CUDA_DEVICE_MEMORY_LIMIT", MEMORY, "slot"),
            Key("CUDA_DEVICE_SM_LIMIT", COMPUTE, "slot"),
            Key("CUDA_TASK_PRIORITY", PRIORITY),
            Key("CUDA_OVERSUBSCRIBE", BEYOND),
            Key("GPU_CORE_UTILIZATION_POLICY", SWITCH),
            Key("CUDA_DISABLE_CONTROL", SWITCH),
        ),
        beside=("runai", "koordinator"),
        memory="`3000m`: k, m, g are 1024-based; without a letter bytes",
        compute="percent; 0 and 100 are no limit",
        trap="The number counts devices inside the container, not on the host. Priority 0 is the high one. "
        "With `CUDA_OVERSUBSCRIBE=true` a limit is for device and host memory together: its part on the device, "
        "multiplied by `oversubscription.scaling`, which should have the value of HAMi's deviceMemoryScaling.",
    ),
    Row(
        "vgpu-manager",
        "vgpu-manager",
        (
            Key("CUDA_MEM_LIMIT", MEMORY, "index"),
            Key("CUDA_CORE_LIMIT", COMPUTE, "index"),
            Key("CUDA_CORE_SOFT_LIMIT", COMPUTE, "index"),
            Key("CUDA_MEM_RATIO", BEYOND, "index"),
            Key("CUDA_MEM_OVERSOLD", BEYOND, "index"),
            Key("GPU_DEVICES_UUID", DEVICES),
            Key("MANAGER_VISIBLE_DEVICES", DEVICES),
            Key("MANAGER_VISIBLE_DEVICE", DEVICES, "index"),
            Key("DISABLE_VGPU_CONTROL", SWITCH),
        ),
        memory="`1.5g`: k, m, g, t are 1024-based, with decimals; without a letter bytes",
        compute="percent; 0 and 100 are no limit; with a soft limit above it the limit is soft",
        trap="The number is that of `MANAGER_VISIBLE_DEVICE_<number>`, else the place in `MANAGER_VISIBLE_DEVICES` "
        "(which has a uuid of zeros for devices of other containers) or, in older versions, in `GPU_DEVICES_UUID`. "
        "Without these variables it is the index on the host, so `CUDA_MEM_LIMIT_3` also names device 3. Empty values "
        "are no limit. If memory is oversold (a ratio above 1) a limit is for device and host memory together: its "
        "part on the device, multiplied by the ratio, which is at most `oversubscription.scaling`.",
    ),
    Row(
        "volcano",
        "Volcano GPU share",
        (Key("VOLCANO_GPU_ALLOCATED", MEMORY), Key("VOLCANO_GPU_MEMORY_TOTAL", MEMORY)),
        memory="integers in one unit, usually MiB: the share is allocated / total",
        trap="Without `VOLCANO_GPU_MEMORY_TOTAL` the number allocated is one of whole devices, which are no limit.",
    ),
    Row(
        "aliyun",
        "Aliyun gpushare, cGPU",
        (
            Key("ALIYUN_COM_GPU_MEM_CONTAINER", MEMORY),
            Key("ALIYUN_COM_GPU_MEM_DEV", MEMORY),
            Key("ALIYUN_COM_GPU_MEM_POD", OTHER),
            Key("ALIYUN_COM_GPU_MEM_IDX", DEVICES),
            Key("ALIYUN_COM_GPU_VISIBLE_DEVICES", DEVICES),
            Key("CGPU_DISABLE", SWITCH),
        ),
        memory="integers in GiB or MiB (no variable tells which): the share is container / dev of the device",
        trap="`ALIYUN_COM_GPU_MEM_IDX=-1` and `NVIDIA_VISIBLE_DEVICES=no-gpu-has-...` mean that there was no room, and "
        "are refused. `_POD` is the amount of the whole pod and is ignored.",
    ),
    Row(
        "pai",
        "Aliyun PAI",
        (
            Key("AMP_VGPU_ENABLE", SWITCH),
            Key("GPU_MEM_PER_DEVICE", MEMORY),
            Key("GPU_UTIL_PER_DEVICE", COMPUTE),
        ),
        memory="bytes, for each device",
        compute="percent, for each device; 0 and 100 are no limit",
        gate="AMP_VGPU_ENABLE",
        beside=("aliyun",),
        trap="Without `AMP_VGPU_ENABLE` the other two variables belong to another program and are ignored.",
    ),
    Row(
        "runai",
        "Run:ai, KAI scheduler",
        (Key("GPU_PORTION", MEMORY), Key("RUNAI_NUM_OF_GPUS", MEMORY), Key("RUNAI_GPU_MEMORY_LIMIT", MEMORY)),
        (
            Key("gpu-fraction", MEMORY),
            Key("gpu-memory", MEMORY),
            Key("gpu-sm-percentage", COMPUTE),
            Key("gpu-sm-cores", COMPUTE),
            Key("gpu-fraction-num-devices", OTHER),
            Key("gpu-fraction-container-name", OTHER),
        ),
        memory="fraction of the device, `0.5`; the annotation `gpu-memory` is in MiB; `RUNAI_GPU_MEMORY_LIMIT` is a "
        "fraction, or a Kubernetes quantity",
        compute="percent; a number of multiprocessors (`gpu-sm-cores`) is refused",
        container="gpu-fraction-container-name",
        trap="The requested amount counts, not the ceiling for idle times (`RUNAI_GPU_MEMORY_LIMIT`). 1 and "
        "above are whole devices, which are no limit. Portions are rounded to two decimals, so one that differs from "
        "an exact amount by less than 1 % of the device does not contradict it; the smaller one counts.",
    ),
    Row(
        "koordinator",
        "Koordinator",
        (),
        (Key("scheduling.koordinator.sh/device-allocated", EVERYTHING),),
        memory="JSON: `koordinator.sh/gpu-memory`, a Kubernetes quantity, else `gpu-memory-ratio`, percent",
        compute="`koordinator.sh/gpu-core`, percent; 100 is no limit",
        trap="Devices are named by minor, not by index, also in the `NVIDIA_VISIBLE_DEVICES` that Koordinator sets.",
    ),
    Row(
        "tencent",
        "Tencent gpu-manager",
        (),
        (
            Key("tencent.com/vcuda-core", EVERYTHING),
            Key("tencent.com/vcuda-core-limit", COMPUTE),
            Key("tencent.com/vcuda-memory", MEMORY),
            Key("tencent.com/vcuda-device", DEVICES),
        ),
        memory="blocks of 256 MiB",
        compute="hundredths of a device; 100 and its multiples are whole devices, without limits",
        trap="`vcuda-device` names device nodes, `/dev/nvidia1`, so minors. Time above `vcuda-core` up to "
        "`vcuda-core-limit` is not granted.",
    ),
    Row(
        "nvidia-memory",
        "NVIDIA container toolkit's memory limits, KAI and Run:ai with GPU fractioning (fractiond, sharingd)",
        (
            Key("NVIDIA_GPU_MEMORY_REQUEST", MEMORY),
            Key("NVIDIA_GPU_MEMORY_LIMIT", MEMORY),
            Key("NVIDIA_GPU_MEMORY_REQUESTS", MEMORY),
            Key("NVIDIA_GPU_MEMORY_LIMITS", MEMORY),
        ),
        scoped=(
            Key("gpu-memory.request", MEMORY),
            Key("gpu-memory.limit", MEMORY),
            Key("gpus.devices", DEVICES),
            Key("gpu-compute.portion", COMPUTE),
            Key("gpu-compute.mode", OTHER),
        ),
        empty=True,
        beside=("*",),
        memory="variables: whole MiB, for each device; annotations: a Kubernetes quantity, such as 4Gi",
        compute="a portion of the device above 0 and up to 1, which is no limit; rounded to whole percent",
        trap="A request alone is also the limit, and a limit alone is also the request. Memory above the "
        "request is lent (docs/lending.md). The variables count before the annotations, which may differ from "
        "them by less than a MiB, or by counting MB where the variable has MiB. `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT` "
        "beside them must be the request or the limit. Requests of other containers of the pod do not count. "
        "NVIDIA's hook `apply-cuda-memory-limits` stays in `config.json` if it sets this limit in the driver for "
        "granted devices; gpushare-runtime removes it where it would fail: before driver 615, without cgroup v2, and "
        "for MIG devices. `gpushare limit set` does not change what this hook has set in the driver.",
    ),
    Row(
        "mps",
        "NVIDIA MPS, a client's variables",
        (
            Key("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", MEMORY),
            Key("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", COMPUTE),
            Key("CUDA_MPS_CLIENT_PRIORITY", PRIORITY),
            Key("CUDA_MPS_PIPE_DIRECTORY", OTHER),
            Key("CUDA_MPS_LOG_DIRECTORY", OTHER),
        ),
        memory="`0=1G,1=512MB`: by slot, 1024-based",
        compute="percent; 100 is no limit",
        asks=False,
        beside=("*",),
        trap="MPS applies them to each process; gpushare applies them to all processes of the container together. They "
        "request no device. The shim enforces the limits, without an MPS daemon.",
    ),
)
ROWS = (
    Row(
        "own",
        "gpushare",
        (Key("GPUSHARE_...", EVERYTHING),),
        (Key("gpushare.io/...", EVERYTHING), Key("<container>.gpushare.io/...", EVERYTHING)),
        memory="`4Gi`, `25%`, `0=4Gi,1=8Gi`; request and limit `4Gi..12Gi`, `0=4Gi..8Gi,1=2Gi`",
        compute="`30%`, `0=30%,1=50%`",
        trap="A GPUSHARE_* name overrides the other dialects, each for its own setting. The annotations "
        "`gpushare.io/memory-request` and `gpushare.io/memory-limit` are the two ends of `GPUSHARE_MEMORY`; one alone "
        "is both. Memory above the request is lent (docs/lending.md).",
    ),
    Row(
        "injected",
        "CDI, DRA, NVIDIA's container runtime, device plugins",
        (),
        trap="Devices that are already in `config.json` are a request for gpushare-runtime only, since only it can "
        "remove them again. For a GPU in MIG mode they are the MIG devices whose capability nodes are there too.",
    ),
    Row(
        "nvidia",
        "NVIDIA container toolkit",
        (Key("NVIDIA_VISIBLE_DEVICES", DEVICES), Key("NVIDIA_DRIVER_CAPABILITIES", OTHER)),
        trap="Most CUDA images set it. Mounts of `/dev/null` at `/var/run/nvidia-container-devices/<id>` "
        "win over the variable; both may name GPUs as CDI does, `nvidia.com/gpu=0`. It names devices; other "
        "dialects set the limits. See [driver.md](driver.md) for the rest.",
    ),
    *SCHEDULERS,
)

_KEYS = {key.name: (row, key) for row in SCHEDULERS for key in (*row.variables, *row.annotations)}
_SCOPED = {key.name: (row, key) for row in SCHEDULERS for key in row.scoped}
KEYS = frozenset(key.name for row in SCHEDULERS for key in row.annotations)


def _beginnings(row: Row) -> tuple[str, ...]:
    if not row.asks:
        return ()
    return (row.gate,) if row.gate else tuple(key.name for key in row.variables if key.about in _ASKS)


def _shortest(names: tuple[str, ...]) -> tuple[str, ...]:
    """Drop prefixes that begin with another one: a text without the shorter has neither."""
    return tuple(name for name in names if not any(name != other and name.startswith(other) for other in names))


VARIABLES = _shortest(tuple(key.name for row in SCHEDULERS for key in row.variables))
BEGINNINGS = _shortest(tuple(name for row in SCHEDULERS for name in _beginnings(row)))
KEY_BEGINNINGS = _shortest(tuple(sorted({*KEYS, SCOPE})))


def is_annotation(name: str) -> bool:
    return name in KEYS or name.startswith(SCOPE)


def any_annotation(names: Iterable[str]) -> bool:
    return any(map(is_annotation, names))


def _scoped(annotations: dict[str, str], container: str) -> list[tuple[Row, Value]]:
    """Return the annotations for this container; for any container if the engine does not name it."""
    found = []
    for name, value in annotations.items():
        whose, _, rest = name[len(SCOPE) :].partition(".") if name.startswith(SCOPE) else ("", "", "")
        if rest in _SCOPED and container in ("", whose):
            row, key = _SCOPED[rest]
            found.append((row, Value(key, name, value)))
    return found


def _value_of(name: str, value: str) -> Optional[tuple[Row, Value]]:
    """Return a variable as a Value: NAME, or NAME_n if its key is numbered."""
    if name in _KEYS:
        row, key = _KEYS[name]
        return row, Value(key, name, value)
    stem, _, digits = name.rpartition("_")
    if stem not in _KEYS or not (digits.isascii() and digits.isdigit()) or len(digits) > 3:
        return None
    row, key = _KEYS[stem]
    return (row, Value(key, name, value, int(digits))) if key.number else None


def matches(env: Env, annotations: dict[str, str], container: str) -> tuple[Match, ...]:
    """Return the rows that occur in this container of a pod. Empty values do not count, except in keys numbered by
    index, where for vgpu-manager they mean that a device has no limit, and in rows with `empty`."""
    pairs = [(name, value) for name, value in env if name.startswith(VARIABLES) and name not in KEYS]
    pairs += [(key, value) for key, value in annotations.items() if key in KEYS]
    values = [pair for pair in (_value_of(*pair) for pair in pairs) if pair is not None]
    found: dict[str, list[Value]] = {}
    for row, value in (*values, *_scoped(annotations, container)):
        if value.value.strip() or value.key.number == "index" or row.empty:
            found.setdefault(row.name, []).append(value)
    rows = [Match(row, tuple(found[row.name])) for row in SCHEDULERS if row.name in found]
    return tuple(one for one in rows if not one.row.gate or any(values.name == one.row.gate for values in one.values))


def reader(row: Row) -> Callable[..., Any]:
    """Return `read` of dialects/<name>.py: (values, inventory) -> ParsedRequest."""
    module = __import__(f"{__package__}.{row.name.replace('-', '_')}", fromlist=["read"])
    found: Callable[..., Any] = module.read
    return found


def parsed(match: Match, inventory: Inventory) -> Any:
    """Return the ParsedRequest of a row's values, each name once. Equal duplicates are accepted."""
    found: dict[str, list[Value]] = {}
    for one in match.values:
        found.setdefault(one.name, []).append(one)
    for name, several in found.items():
        one_value(name, [one.value for one in several])
    return reader(match.row)(tuple(several[0] for several in found.values()), inventory)


def are_together(one: Row, other: Row) -> bool:
    return not {"*", other.name}.isdisjoint(one.beside) or not {"*", one.name}.isdisjoint(other.beside)
