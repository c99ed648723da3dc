"""Collect requests from other schedulers' variables that policy accepts and GPUSHARE_* does not override.

    collect(matches, mine, bundle, node) -> SchedulerRequests
    unused(matches, mine, bundle, node)  -> lines    why they request nothing, for explain
    without_alias(bundle, collected)     -> Bundle   without a NVIDIA_VISIBLE_DEVICES that has another meaning

A GPUSHARE_* variable wins over other variables for the same setting. merge.py merges the result. The table of dialects
is dialects/registry.py. Loaded only if a variable of another scheduler occurs. Pure.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

from ..core import constants
from ..core.model import Bundle, Node, Policy, Request
from ..core.quantity import wrong
from ..core.quoting import setting, shown, shown_name
from . import policy
from .dialects import Env, gpushare_env, nvidia, registry
from .dialects.parsed_request import Limit, ParsedRequest, once
from .dialects.registry import BEYOND, COMPUTE, DEVICES, EVERYTHING, MEMORY, PRIORITY, Match, Value

MODE = "mode"
_FIELDS = {  # subject of a value -> our variable for it
    MODE: constants.ENV_COMPUTE_MODE,
    MEMORY: constants.ENV_MEMORY,
    COMPUTE: constants.ENV_COMPUTE,
    PRIORITY: constants.ENV_PRIORITY,
    DEVICES: constants.ENV_DEVICES,
    BEYOND: constants.ENV_OVERSUBSCRIBE,
}


class SchedulerRequests(NamedTuple):
    """Parsed values of other schedulers. `later`: rows that only set how much of a device that another row names."""

    parsed_requests: tuple[ParsedRequest, ...]
    later: tuple[Match, ...] = ()
    taken: frozenset[str] = frozenset()  # subjects that GPUSHARE_* sets
    refused: tuple[tuple[Value, str, str], ...] = ()  # (value, its dialect, key of the policy that refuses it)
    ignored: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    switches: bool = False  # whether values that switch limits off count

    @property
    def limited(self) -> bool:
        """Whether a scheduler sets a limit, which policy can require beside NVIDIA_VISIBLE_DEVICES."""
        return any(map(limits_of, self.parsed_requests))


def limits_of(parsed: ParsedRequest) -> list[Limit]:
    """Return its limits, without values for "no limit"."""
    return [limit for limit in (*parsed.memory, *parsed.compute) if not limit.is_none]


def line(item: Value, why: str) -> str:
    return f"{setting(item.name, item.value)}: {why}"


def _own_names(mine: Optional[Request], env: Env) -> dict[str, str]:
    """Return subject -> name, of the GPUSHARE_* variables that are set."""
    found = {}
    if any(name == constants.ENV_ALLOCATED_GPU for name, _ in env):  # an equal share, which no variable enlarges
        found[MEMORY] = constants.ENV_ALLOCATED_GPU
    claim = next((name for name, _ in env if name.startswith(constants.ENV_CLAIM_PREFIX)), "")
    if claim:  # sets compute also where the claim has none
        found[COMPUTE] = claim
    for field, variable in _FIELDS.items():
        suffixes = (constants.ANNOTATIONS[variable], *(constants.MEMORY_ENDS if field == MEMORY else ()))
        sources = (name for name, _ in mine.sources) if mine else ()
        name = next((name for name in sources if name == variable or name.endswith(suffixes)), "")
        if name and not (field == DEVICES and mine is not None and mine.selection == gpushare_env.UNNAMED):
            found[field] = name
    if MEMORY in found:  # its limit is not parsed
        found.setdefault(BEYOND, found[MEMORY])
    return found


def _disabled(dialect: str, rules: Policy) -> str:
    """Return why a dialect does not count on this node; "" if it does."""
    if dialect in rules.disabled_dialects:
        return f"policy.dialects.disabled has {dialect}"
    missing = {"*", dialect}.isdisjoint(rules.enabled_dialects)
    return f"policy.dialects.enabled does not have {dialect}" if missing else ""


def _unaccepted(item: Value, bundle: Bundle, node: Node) -> str:
    """Return the configuration key that refuses a value; "" if it is accepted."""
    rules = node.config.policy
    if not registry.is_annotation(item.name):
        return "" if policy.accepted(rules.accept_env, bundle) else "policy.accept.env"
    if not policy.accepted(rules.accept_annotations, bundle):
        return "policy.accept.annotations"
    return "policy.annotations" if rules.annotations == "scoped" and not registry.is_scoped(item.name) else ""


def _names_device(bundle: Bundle, matches: tuple[Match, ...], mine: dict[str, str], node: Node) -> bool:
    """Return whether this container of a pod uses a GPU: its annotations reach sidecars too."""
    rules = node.config.policy
    collected = [one.values for one in matches if not _disabled(one.row.name, rules)]
    variables = any(item.name.startswith(registry.BEGINNINGS) for some in collected for item in some)
    return bool(
        DEVICES in mine
        or (variables and policy.accepted(rules.accept_env, bundle))
        or nvidia.names_device(bundle)
        or bundle.injected
    )


class _Scene(NamedTuple):
    """The facts that decide whether a value counts."""

    bundle: Bundle
    node: Node
    ours: dict[str, str]  # subject -> name of the GPUSHARE_* that is set
    names_device: bool  # this container of a pod uses a GPU


def _why_ignored(item: Value, row: registry.Row, scene: _Scene) -> str:
    """Return why a value counts for nothing; "" if it counts."""
    ours, container = scene.ours, scene.bundle.container_name
    whose = scene.bundle.annotations.get(row.container, "") if row.container and container else ""
    if item.key.about in ours:
        return f"{ours[item.key.about]} overrides it"
    if item.key.about == EVERYTHING and {MEMORY, COMPUTE, DEVICES} <= ours.keys():
        return f"{ours[DEVICES]} and other GPUSHARE_* names override it"
    if item.name not in registry.KEYS:
        return ""
    if whose not in ("", container) and item.name != row.container:
        return f"{row.container} is {shown(whose)}"
    return "" if scene.names_device or whose else f"container {shown(container)} names no device"


def _sorted_out(match: Match, scene: _Scene) -> tuple[list[Value], list[tuple[Value, str, str]], list[str]]:
    """(values that count, values that the configuration refuses, lines about ignored ones) of one dialect."""
    row, left, refused, ignored = match.row, [], [], []
    off = _disabled(row.name, scene.node.config.policy)
    for item in match.values:
        why = off or _why_ignored(item, row, scene)
        key = "" if why else _unaccepted(item, scene.bundle, scene.node)
        if why:
            ignored.append(line(item, why))
        elif key:
            refused.append((item, row.name, key))
        elif registry.is_scoped(item.name) and not scene.bundle.container_name:
            advice = f"set {constants.ENV_MEMORY}, or leave the annotation out"
            raise wrong(item.name, item.value, "the engine does not name this container", advice)
        # a device that is overridden still tells what the numbers of its limits mean
        if not (why or key) or (not off and row.is_numbered and item.key.about == DEVICES and DEVICES in scene.ours):
            left.append(item)
    return left, refused, ignored


def collect(matches: tuple[Match, ...], mine: Optional[Request], bundle: Bundle, node: Node) -> SchedulerRequests:
    """Parse the values. Raise RequestError or DeviceError for an invalid one that GPUSHARE_* does not override."""
    ours = _own_names(mine, bundle.env)
    beside = not bundle.container_name or _names_device(bundle, matches, ours, node)
    scene = _Scene(bundle, node, ours, beside)
    collected, refused, ignored = [], [], []
    for match in matches:
        left, not_accepted, lines = _sorted_out(match, scene)
        refused += not_accepted
        ignored += lines
        if any(item.key.about in (MEMORY, COMPUTE, DEVICES, PRIORITY, EVERYTHING) for item in left):
            collected.append(Match(match.row, tuple(left)))
    parsed_requests = tuple(registry.reader(row)(once(values), node.inventory) for row, values in collected if row.asks)
    for one in parsed_requests:
        if one.named and DEVICES not in ours:
            ignored += [
                f"{nvidia.ENV_DEVICES}={shown(value)}: {shown_name(one.named.name)} names the devices"
                for value in _aliases(one, bundle)
            ]
    return SchedulerRequests(
        parsed_requests,
        tuple(one for one in collected if not one.row.asks),
        frozenset(ours),
        tuple(refused),
        tuple(ignored),
        nvidia.capabilities(bundle.env),
        policy.accepted(node.config.policy.accept_switches, bundle),
    )


def unused(matches: tuple[Match, ...], mine: Optional[Request], bundle: Bundle, node: Node) -> tuple[str, ...]:
    """Return why each of these values requests nothing, in a container without a request (explain)."""
    collected = collect(matches, mine, bundle, node)
    lines = [*collected.ignored, *(line(item, f"{key} does not accept it") for item, _, key in collected.refused)]
    told = {text.partition("=")[0] for text in lines}
    for row, values in matches:
        why = "no device is requested" if row.asks else f"{row.name} variables request no device"
        lines += [line(item, why) for item in values if item.name not in told]
    return tuple(lines)


def without_alias(bundle: Bundle, collected: SchedulerRequests) -> Bundle:
    """Drop Koordinator's NVIDIA_VISIBLE_DEVICES, which has minors for indices; its annotation names the devices."""
    alias = {value for parsed in collected.parsed_requests for value in _aliases(parsed, bundle)}
    env = tuple(pair for pair in bundle.env if pair[0] != nvidia.ENV_DEVICES or pair[1] not in alias)
    return bundle._replace(env=env)


def _aliases(parsed: ParsedRequest, bundle: Bundle) -> list[str]:
    """Return values of NVIDIA_VISIBLE_DEVICES that mean the devices of this request."""
    values = dict.fromkeys(value for name, value in bundle.env if name == nvidia.ENV_DEVICES)
    return [value for value in values if parsed.alias and value.strip() == parsed.alias]
