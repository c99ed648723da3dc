"""What other schedulers' words ask for, as far as policy and our own names let them. See dialects/registry.py.

    listen(spoken, mine, bundle, node) -> Heard      reads them
    unused(spoken, mine, bundle, node) -> lines      the same for a container that asks for nothing
    without_alias(bundle, heard)       -> Bundle     less a NVIDIA_VISIBLE_DEVICES of other meaning

Own names win, each over what others say about the same. merge.py makes a request of it. Loaded only when a word of
another scheduler occurs. Pure.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

from ..core import constants
from ..core.model import Bundle, Node, Policy, Request
from ..core.quoting import setting, shown, shown_name
from . import policy
from .dialects import Env, cdi_devices, gpushare_env, nvidia, registry
from .dialects.parsed_request import Limit, ParsedRequest, once
from .dialects.registry import BEYOND, COMPUTE, DEVICES, EVERYTHING, MEMORY, PRIORITY, Match, Value

MODE = "mode"
_FIELDS = {  # what a word can be about -> the name of ours that says it
    MODE: constants.ENV_COMPUTE_MODE,
    MEMORY: constants.ENV_MEMORY,
    COMPUTE: constants.ENV_COMPUTE,
    PRIORITY: constants.ENV_PRIORITY,
    DEVICES: constants.ENV_DEVICES,
    BEYOND: constants.ENV_OVERSUBSCRIBE,
}


class SchedulerRequests(NamedTuple):
    """Other schedulers' words, read. `later`: rows that only say how much of a device that others name."""

    parsed_requests: tuple[ParsedRequest, ...]
    later: tuple[Match, ...] = ()
    taken: frozenset[str] = frozenset()  # what our own words say
    unheard: tuple[tuple[Value, str, str], ...] = ()  # (word, its dialect, key of the policy that does not listen)
    ignored: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    switches: bool = False  # whether words that switch limits off count

    @property
    def limited(self) -> bool:
        """Whether they set a limit: then NVIDIA_VISIBLE_DEVICES counts where policy wants one beside it."""
        return any(map(limits_of, self.parsed_requests))


def limits_of(parsed: ParsedRequest) -> list[Limit]:
    """Its limits, but for those that say that there is none."""
    return [limit for limit in (*parsed.memory, *parsed.compute) if not limit.is_none]


def line(said: Value, why: str) -> str:
    return f"{setting(said.name, said.value)}: {why}"


def _own_names(mine: Optional[Request], env: Env) -> dict[str, str]:
    """What our own words say -> the name that says it."""
    found = {}
    if any(name == constants.ENV_ALLOCATED_GPU for name, _ in env):  # an equal share, which nobody makes larger
        found[MEMORY] = constants.ENV_ALLOCATED_GPU
    for field, variable in _FIELDS.items():
        suffix = constants.ANNOTATIONS[variable]
        name = next((name for name, _ in mine.sources if name == variable or name.endswith(suffix)), "") if mine else ""
        if name and not (field == DEVICES and mine is not None and mine.selection == gpushare_env.UNNAMED):
            found[field] = name
    if MEMORY in found:  # whose limit is not read
        found.setdefault(BEYOND, found[MEMORY])
    return found


def _unspoken(dialect: str, rules: Policy) -> str:
    """Why a dialect means nothing on this node, "" when it does mean something."""
    if dialect in rules.disabled_dialects:
        return f"policy.dialects.disabled has {dialect}"
    missing = {"*", dialect}.isdisjoint(rules.enabled_dialects)
    return f"policy.dialects.enabled does not have {dialect}" if missing else ""


def _unaccepted(said: Value, bundle: Bundle, node: Node) -> str:
    """The key of the configuration by which a word does not count; "" when it does."""
    rules = node.config.policy
    if said.name not in registry.KEYS:
        return "" if policy.accepted(rules.accept_env, bundle) else "policy.accept.env"
    if not policy.accepted(rules.accept_annotations, bundle):
        return "policy.accept.annotations"
    return "policy.annotations" if rules.annotations == "scoped" else ""


def _names_device(bundle: Bundle, matches: tuple[Match, ...], mine: dict[str, str], node: Node) -> bool:
    """Whether this container of a pod is one that uses a GPU: annotations reach its sidecars as well."""
    rules = node.config.policy
    heard = [one.said for one in matches if not _unspoken(one.row.name, rules)]
    variables = any(said.name.startswith(registry.BEGINNINGS) for some in heard for said in some)
    return bool(
        DEVICES in mine
        or (variables and policy.accepted(rules.accept_env, bundle))
        or nvidia.names_device(bundle.env, bundle.spec)
        or cdi_devices.named(bundle.spec)
    )


def collect(matches: tuple[Match, ...], mine: Optional[Request], bundle: Bundle, node: Node) -> SchedulerRequests:
    """Raises RequestError and DeviceError for words that make no sense, and that our own do not overrule."""
    ours = _own_names(mine, bundle.env)
    beside = not bundle.container_name or _names_device(bundle, matches, ours, node)
    heard, unheard, ignored = [], [], []
    for row, words in matches:
        left, off = [], _unspoken(row.name, node.config.policy)
        whose = bundle.annotations.get(row.container, "") if row.container and bundle.container_name else ""
        for said in words:
            key = _unaccepted(said, bundle, node)
            if off:
                ignored.append(line(said, off))
            elif said.word.about in ours:
                ignored.append(line(said, f"{ours[said.word.about]} says it"))
                if said.word.about == DEVICES and row.is_numbered:  # what the numbers of its limits stand for
                    left.append(said)
            elif said.word.about == EVERYTHING and {MEMORY, COMPUTE, DEVICES} <= ours.keys():
                ignored.append(line(said, f"{ours[DEVICES]} and our other names say it"))
            elif said.name in registry.KEYS and whose not in ("", bundle.container_name) and said.name != row.container:
                ignored.append(line(said, f"{row.container} is {shown(whose)}"))
            elif said.name in registry.KEYS and not (beside or whose):
                ignored.append(line(said, f"container {shown(bundle.container_name)} names no device"))
            elif key:
                unheard.append((said, row.name, key))
            else:
                left.append(said)
        if any(said.word.about in (MEMORY, COMPUTE, DEVICES, PRIORITY, EVERYTHING) for said in left):
            heard.append(Match(row, tuple(left)))
    parsed_requests = tuple(registry.reader(row)(once(words), node.inventory) for row, words in heard if row.asks)
    aliased = [
        (one.named, value)
        for one in parsed_requests
        for value in _aliases(one, bundle)
        if one.named and DEVICES not in ours
    ]
    ignored += [f"{nvidia.ENV_DEVICES}={shown(value)}: {shown_name(said.name)} says which" for said, value in aliased]
    return SchedulerRequests(
        parsed_requests,
        tuple(one for one in heard if not one.row.asks),
        frozenset(ours),
        tuple(unheard),
        tuple(ignored),
        nvidia.capabilities(bundle.env),
        policy.accepted(node.config.policy.accept_switches, bundle),
    )


def unused(matches: tuple[Match, ...], mine: Optional[Request], bundle: Bundle, node: Node) -> tuple[str, ...]:
    """Why none of these words asks for anything, in a container that asks for nothing (explain)."""
    heard = collect(matches, mine, bundle, node)
    lines = [*heard.ignored, *(line(said, f"{key} does not listen") for said, _, key in heard.unheard)]
    told = {text.partition("=")[0] for text in lines}
    for row, words in matches:
        why = "no device is asked for" if row.asks else f"words of {row.name} ask for no device"
        lines += [line(said, why) for said in words if said.name not in told]
    return tuple(lines)


def without_alias(bundle: Bundle, heard: SchedulerRequests) -> Bundle:
    """Koordinator writes minors where everybody else reads indices; its annotation says which devices are meant."""
    alias = {value for parsed in heard.parsed_requests for value in _aliases(parsed, bundle)}
    env = tuple(pair for pair in bundle.env if pair[0] != nvidia.ENV_DEVICES or pair[1] not in alias)
    return bundle._replace(env=env)


def _aliases(parsed: ParsedRequest, bundle: Bundle) -> list[str]:
    """The values of NVIDIA_VISIBLE_DEVICES that are this demand's devices in other words."""
    values = dict.fromkeys(value for name, value in bundle.env if name == nvidia.ENV_DEVICES)
    return [value for value in values if parsed.alias and value.strip() == parsed.alias]
