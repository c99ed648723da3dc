"""One candidate for each dialect: what its values request, as far as they count in this container.

    collect(own, scene, dropped) -> Candidates
    unused(own, scene)           -> lines    for explain: why the values of schedulers request nothing

A GPUSHARE_* variable wins over other variables for the same setting. merge.py merges the candidates. The table of other
schedulers' dialects is dialects/registry.py. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Optional

from ..core import constants
from ..core.errors import DeviceError, RequestError
from ..core.model import Bundle, Inventory, Request, Selection
from ..core.quantity import wrong
from ..core.quoting import setting, shown, shown_name
from ..gpu.selectors import narrowest
from .dialects import cdi_devices, gpushare_env, nvidia, parse_devices, registry
from .dialects.parsed_request import ParsedRequest
from .dialects.registry import BEYOND, COMPUTE, DEVICES, EVERYTHING, MEMORY, PRIORITY, Match, Value
from .policy import Scene

# name -> (bundle, inventory) -> Request | None. Dialects of other schedulers are in dialects/registry.py.
DIALECTS: dict[str, Callable[[Bundle, Inventory], Optional[Request]]] = {
    "own": gpushare_env.read,
    "injected": cdi_devices.read,
    "nvidia": nvidia.read,
}
_ASKING = (MEMORY, COMPUTE, DEVICES, PRIORITY, EVERYTHING)


class Candidates(NamedTuple):
    """`devices`: those of config.json, else of NVIDIA's variables; None if GPUSHARE_* names devices. `later`: rows that
    only set how much of a device that another row names; they are parsed for a container that gets one."""

    own: Optional[Request]
    own_limits: tuple[tuple[str, str], ...] = ()  # sources that set limits in GPUSHARE_*, also dropped ones
    devices: Optional[Request] = None
    asks: bool = True  # schedulers' values request devices
    schedulers: tuple[ParsedRequest, ...] = ()
    rows: tuple[Match, ...] = ()  # of `schedulers`
    later: tuple[Match, ...] = ()
    taken: frozenset[str] = frozenset()  # subjects that GPUSHARE_* sets
    refused: tuple[tuple[Value, str, str], ...] = ()  # (value, its dialect, key of the policy that refuses it)
    ignored: tuple[str, ...] = ()
    switches: bool = False  # whether values that switch limits off count

    @property
    def has_schedulers(self) -> bool:
        return bool(self.rows or self.later or self.refused or self.ignored)


def line(item: Value, why: str) -> str:
    return f"{setting(item.name, item.value)}: {why}"


def collect(own: Optional[Request], scene: Scene, dropped: Collection[str] = ()) -> Candidates:
    """Parse all values that count. `dropped`: variables of `own` whose limits do not count, but still request a device.
    Raise RequestError or DeviceError for an invalid value that GPUSHARE_* does not override."""
    limits = _limits(own) if own else ()
    own = _without(own, dropped) if own else None
    found = _schedulers(own, scene) if scene.matches else Candidates(own)
    found = found._replace(own_limits=limits)
    if own is not None and own.selection != gpushare_env.UNNAMED:
        return found  # other variables do not count, so they cannot be wrong
    limited = bool(found.own_limits) or any(parsed.limits for parsed in found.schedulers)
    asks = limited or scene.node.config.policy.nvidia_visible_devices != "with_limit"
    bundle = _accepted(found, scene, asks)
    return found._replace(devices=_devices(bundle, scene), asks=asks)


def _limits(own: Request) -> tuple[tuple[str, str], ...]:
    """Return the sources that set limits. A limit requests a device even if none is named."""
    keys = (constants.ENV_MEMORY, constants.ENV_COMPUTE)
    suffixes = (*(constants.ANNOTATIONS[key] for key in keys), *constants.MEMORY_ENDS)
    return tuple(pair for pair in own.sources if pair[0] in keys or pair[0].endswith(suffixes))


def _without(own: Request, dropped: Collection[str]) -> Request:
    left = tuple(pair for pair in own.sources if pair[0] not in dropped)
    fields: dict[str, Any] = {gpushare_env.ROWS[name][0]: () for name, _ in own.sources if name in dropped}
    return own._replace(sources=left, **fields)


def _accepted(found: Candidates, scene: Scene, asks: bool) -> Bundle:
    """Return the bundle without NVIDIA requests that policy does not accept, which is no error: every CUDA image has
    them. Koordinator's NVIDIA_VISIBLE_DEVICES has minors for indices; its annotation names the devices."""
    bundle, accepts = scene.bundle, scene.accepts
    if not (accepts.env and asks):
        bundle = bundle._replace(env=tuple(pair for pair in bundle.env if pair[0] != nvidia.ENV_DEVICES))
    for parsed in found.schedulers:
        if parsed.alias:
            aliases = [(nvidia.ENV_DEVICES, value) for value in _aliases(parsed, bundle)]
            bundle = bundle._replace(env=tuple(pair for pair in bundle.env if pair not in aliases))
    return bundle if accepts.volume_mounts else bundle._replace(volumes=())


def _devices(bundle: Bundle, scene: Scene) -> Optional[Request]:
    """Return the devices in config.json, else those of NVIDIA's variables. Devices that an engine added win over the
    variables, which every CUDA image has. Variables that name other devices are a contradiction."""
    inventory = scene.node.inventory
    found = DIALECTS["injected"](bundle, inventory) if scene.with_injected and scene.accepts.cdi else None
    if found is None:
        return DIALECTS["nvidia"](bundle, inventory)
    name, value = nvidia.device_source(bundle)
    try:
        named = parse_devices(name, nvidia.unqualified(value), inventory, any_allowed=False)
    except (RequestError, DeviceError):  # device plugins write paths and CDI names there too
        named = Selection("all")
    if named is None:
        return found
    if named.kind == "list":
        both = narrowest(found.selection, named, inventory)
        if both is None:
            raise RequestError(
                f"{setting(name, value)} and {found.sources[0][1]} in config.json name different devices",
                "leave one of them out",
            )
        found = found._replace(selection=both)
    return found._replace(ignored=(*found.ignored, f"{setting(name, value)}: config.json has {found.sources[0][1]}"))


# Other schedulers


def _own_names(own: Optional[Request], bundle: Bundle) -> dict[str, str]:
    """Return subject -> name, of the GPUSHARE_* variables that are set."""
    found = {}
    if any(name == constants.ENV_ALLOCATED_GPU for name, _ in bundle.env):  # an equal share, which no variable enlarges
        found[MEMORY] = constants.ENV_ALLOCATED_GPU
    claim = next((name for name, _ in bundle.env if name.startswith(constants.ENV_CLAIM_PREFIX)), "")
    if claim:  # sets compute also where the claim has none
        found[COMPUTE] = claim
    for field, variable in registry.OWN.items() if own else ():
        suffixes = (constants.ANNOTATIONS[variable], *(constants.MEMORY_ENDS if field == MEMORY else ()))
        sources = own.sources if own and (field != DEVICES or own.selection != gpushare_env.UNNAMED) else ()
        found.update((field, name) for name, _ in reversed(sources) if name == variable or name.endswith(suffixes))
    if MEMORY in found:  # its limit is not parsed
        found.setdefault(BEYOND, found[MEMORY])
    return found


def _disabled(dialect: str, scene: Scene) -> str:
    """Return why a dialect does not count on this node; "" if it does."""
    rules = scene.node.config.policy
    if dialect in rules.disabled_dialects:
        return f"policy.dialects.disabled has {dialect}"
    missing = {"*", dialect}.isdisjoint(rules.enabled_dialects)
    return f"policy.dialects.enabled does not have {dialect}" if missing else ""


def _unaccepted(item: Value, scene: Scene) -> str:
    """Return the configuration key that refuses a value; "" if it is accepted."""
    if not item.is_annotation:
        return "" if scene.accepts.env else "policy.accept.env"
    if not scene.accepts.annotations:
        return "policy.accept.annotations"
    return "policy.annotations" if scene.node.config.policy.annotations == "scoped" and not item.is_scoped else ""


def _names_device(scene: Scene, ours: dict[str, str]) -> bool:
    """Return whether this container of a pod uses a GPU: its annotations reach sidecars too."""
    collected = [one.values for one in scene.matches if not _disabled(one.row.name, scene)]
    variables = any(item.name.startswith(registry.BEGINNINGS) for some in collected for item in some)
    return bool(
        not scene.bundle.container_name
        or DEVICES in ours
        or (variables and scene.accepts.env)
        or scene.bundle.injected
        or nvidia.names_device(scene.bundle)
    )


def _why_ignored(item: Value, row: registry.Row, bundle: Bundle, ours: dict[str, str], names_device: bool) -> str:
    """Return why a value counts for nothing; "" if it counts."""
    container = bundle.container_name
    whose = bundle.annotations.get(row.container, "") if row.container and container else ""
    if item.key.about in ours:
        return f"{ours[item.key.about]} overrides it"
    if item.key.about == EVERYTHING and {MEMORY, COMPUTE, DEVICES} <= ours.keys():
        return f"{ours[DEVICES]} and other GPUSHARE_* names override it"
    if item.name not in registry.KEYS:
        return ""
    if whose not in ("", container) and item.name != row.container:
        return f"{row.container} is {shown(whose)}"
    return "" if names_device or whose else f"container {shown(container)} names no device"


def _check_container(item: Value, bundle: Bundle) -> None:
    """Raise RequestError for an annotation of one container of a pod, if the engine does not name the container."""
    if item.is_scoped and not bundle.container_name:
        advice = f"set {constants.ENV_MEMORY}, or leave the annotation out"
        raise wrong(item.name, item.value, "the engine does not name this container", advice)


def _schedulers(own: Optional[Request], scene: Scene) -> Candidates:
    """Sort the values into three groups: values that count, refused values, and ignored values."""
    bundle, ours = scene.bundle, _own_names(own, scene.bundle)
    names_device = _names_device(scene, ours)
    collected, refused, ignored = [], [], []
    for row, values in scene.matches:
        left, off = [], _disabled(row.name, scene)
        for item in values:
            why = off or _why_ignored(item, row, bundle, ours, names_device)
            key = "" if why else _unaccepted(item, scene)
            if why:
                ignored.append(line(item, why))
            elif key:
                refused.append((item, row.name, key))
            else:
                _check_container(item, bundle)
            # a device that is overridden still tells what the numbers of its limits mean
            if not (why or key) or (not off and row.is_numbered and item.key.about == DEVICES and DEVICES in ours):
                left.append(item)
        if any(item.key.about in _ASKING and item.key.about not in ours for item in left):
            collected.append(Match(row, tuple(left)))
    rows = tuple(one for one in collected if one.row.asks)
    schedulers = tuple(registry.parsed(one, scene.node.inventory) for one in rows)
    if DEVICES not in ours:
        ignored += [text for one in schedulers for text in _overridden(one, bundle)]
    return Candidates(
        own,
        schedulers=schedulers,
        rows=rows,
        later=tuple(one for one in collected if not one.row.asks),
        taken=frozenset(ours),
        refused=tuple(refused),
        ignored=tuple(ignored),
        switches=scene.accepts.switches,
    )


def _overridden(parsed: ParsedRequest, bundle: Bundle) -> list[str]:
    """Return a line for each value of NVIDIA_VISIBLE_DEVICES that means the devices of this request."""
    if not parsed.named:
        return []
    name = shown_name(parsed.named.name)
    return [f"{nvidia.ENV_DEVICES}={shown(value)}: {name} names the devices" for value in _aliases(parsed, bundle)]


def _aliases(parsed: ParsedRequest, bundle: Bundle) -> list[str]:
    """Return values of NVIDIA_VISIBLE_DEVICES that mean the devices of this request."""
    values = dict.fromkeys(value for name, value in bundle.env if name == nvidia.ENV_DEVICES)
    return [value for value in values if parsed.alias and value.strip() == parsed.alias]


def unused(own: Optional[Request], scene: Scene) -> tuple[str, ...]:
    """Return why each of the schedulers' values requests nothing, in a container without a request."""
    found = _schedulers(own, scene)
    lines = [*found.ignored, *(line(item, f"{key} does not accept it") for item, _, key in found.refused)]
    told = {text.partition("=")[0] for text in lines}
    for row, values in scene.matches:
        why = "no device is requested" if row.asks else f"{row.name} variables request no device"
        lines += [line(item, why) for item in values if item.name not in told]
    return tuple(lines)
