"""From a container's description to what it asks for: the dialect table, combined, and checked against policy.

    mentions(bundle)                         -> bool             cheap: could this container ask for anything at all?
    resolve(bundle, node, with_injected, on_host) -> Request | None   None: nothing asked, leave the container alone
    unused(bundle, node)                 -> tuple[str, ...]  explain: words of other schedulers where that is None
    refuse_conflicts(bundle, request)    -> None             hook-only mode: raises when NVIDIA's tools were here first

`with_injected`: devices that other software put into config.json count as a request. Only gpushare-runtime can say so,
since only it can take them out again.
`on_host`: a program of this host (`gpushare run`), which has no root file system of its own.
Pure. They raise RequestError (makes no sense), DeviceError (no such device) and PolicyError (not allowed).
Start path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

from ..core import constants
from ..core.errors import DeviceError, PolicyError, RequestError
from ..core.model import Bundle, Inventory, Node, Policy, Request, Selection
from ..core.quantity import wrong
from ..core.quoting import setting, shown, shown_name
from . import oci, policy
from .dialects import Env, cdi_devices, gpushare_env, nvidia, nvidia_driver_env, triggers

# name -> (env, annotations, spec, inventory) -> Request | None, the most specific language first.
# Other schedulers' words are in dialects/registry.py, and merge.py says what they add.
DIALECTS: dict[str, Callable[[Env, dict[str, str], dict[str, Any], Inventory], Optional[Request]]] = {
    "own": gpushare_env.read,
    "injected": cdi_devices.read,
    "nvidia": nvidia.read,
}
# Beginnings of variables without which nothing is asked: ours, also as people misspell them, NVIDIA's, and others'
TRIGGERS = (*gpushare_env.PREFIXES, nvidia.ENV_DEVICES, *triggers.BEGINNINGS)
# What the launcher looks for in the text of a config.json, in any case of letters: without one of these, or a device
# of the driver's major (scan.c), there is nothing that `mentions` could find. ASCII letters, digits and . _ - / only,
# which it knows in every JSON spelling.
DEVICE_TRIGGER = "/nvidia"  # of /dev, however that is spelled: the one that counts in a sandbox, too
RAW_TRIGGERS = (
    *TRIGGERS,
    constants.ANNOTATION_PREFIX.rstrip("/"),
    nvidia.VOLUME_ROOT.rpartition("/")[2],
    DEVICE_TRIGGER,
    "cdi.k8s.io",
    *triggers.KEY_BEGINNINGS,
    *constants.HOOK_OUTPUT_ANNOTATIONS,  # asks for nothing; gpushare-runtime removes it (hookoutput.py)
)
_LONGEST = max(map(len, TRIGGERS))


def _ascii_upper(text: str) -> str:
    """Not str.upper: to that a long s (U+017F) is an S, and the launcher reads bytes."""
    return text.upper() if text.isascii() else "".join(c.upper() if c.isascii() else c for c in text)


def mentions(bundle: Bundle) -> bool:
    """False when no dialect can find anything, so that such a container costs neither inventory nor lease.
    Variables of ours count in any case of letters: a misspelt limit must be refused, not overlooked."""
    if bundle.container_type == "sandbox":
        return bool(cdi_devices.named(bundle.spec))
    return (
        any(_ascii_upper(name[:_LONGEST]).startswith(TRIGGERS) for name, _ in bundle.env)
        or any(constants.ANNOTATION_PREFIX in key for key in bundle.annotations)
        or not triggers.KEYS.isdisjoint(bundle.annotations)
        or bool(nvidia.volume_requests(bundle.spec))
        or bool(cdi_devices.named(bundle.spec))
    )


def _foreign(bundle: Bundle, node: Node, with_injected: bool, limited: bool) -> Optional[Request]:
    """What is in config.json already, else NVIDIA's words. The devices that an engine really put there count before the
    words, which every CUDA image has; words that name other devices are a contradiction."""
    env, spec = policy.heard(bundle, node.config.policy, limited)
    found = None
    if with_injected and policy.accepted(node.config.policy.accept_cdi, bundle):
        found = DIALECTS["injected"](bundle.env, bundle.annotations, bundle.spec, node.inventory)
    if found is None:
        return DIALECTS["nvidia"](env, bundle.annotations, spec, node.inventory)
    name, value = nvidia.asked(env, spec)
    try:
        said = nvidia.selection(env, spec, node.inventory)
    except (RequestError, DeviceError):  # device plugins write paths and CDI names there, too
        said = Selection("all")
    if said is not None and said.kind == "list":
        both = cdi_devices.narrowest(found.selection, said, node.inventory)
        if both is None or not cdi_devices.same_gpus(said, found.selection, node.inventory):
            raise RequestError(
                f"{setting(name, value)} and {found.sources[0][1]} in config.json name different devices",
                "leave one of them out",
            )
        found = found._replace(selection=both)
    if said is None:
        return found
    return found._replace(ignored=(*found.ignored, f"{setting(name, value)}: config.json has {found.sources[0][1]}"))


def _without(mine: Optional[Request], bundle: Bundle, node: Node, with_injected: bool) -> Optional[Request]:
    """Our own words, and NVIDIA's."""
    if mine is not None and mine.selection != gpushare_env.UNNAMED:
        return _combine(mine, None)  # foreign words do not matter, so they cannot be wrong either
    foreign = _foreign(bundle, node, with_injected, limited=mine is not None and bool(_limits(mine)))
    return foreign if mine is None else _combine(mine, foreign)


def _spoken(bundle: Bundle) -> tuple[Any, ...]:
    """Other schedulers' words, as dialects.table reads them."""
    said = any(name.startswith(triggers.WORDS) for name, _ in bundle.env)
    if not said and triggers.KEYS.isdisjoint(bundle.annotations):
        return ()
    from .dialects import registry

    return registry.matches(bundle.env, bundle.annotations)


def _with_schedulers(
    matches: tuple[Any, ...], mine: Optional[Request], bundle: Bundle, node: Node, with_injected: bool
) -> Optional[Request]:
    """The same, with other schedulers' words. A variable of ours, which an image can set, replaces their limit by a
    larger one only where policy takes what widens a request."""
    request = _combined(matches, mine, bundle, node, with_injected)
    if mine is None or policy.accepted(node.config.policy.accept_widening, bundle):
        return request
    from . import merge

    limits = [name for name, _ in mine.sources if name in (constants.ENV_MEMORY, constants.ENV_COMPUTE)]
    theirs = _combined(matches, merge.without(mine, limits), bundle, node, with_injected, judged=True)
    larger = [name for name in limits if theirs is not None and merge.is_larger(name, mine, theirs, node)]
    request = _combined(matches, merge.without(mine, larger), bundle, node, with_injected) if larger else request
    lines = [
        f"{setting(name, value)}: policy.accept.widening does not take more than another scheduler's limit"
        for name, value in mine.sources
        if name in larger
    ]
    return request if request is None else request._replace(ignored=(*request.ignored, *lines))


def _combined(
    matches: tuple[Any, ...],
    mine: Optional[Request],
    bundle: Bundle,
    node: Node,
    with_injected: bool,
    judged: bool = False,
) -> Optional[Request]:
    """`judged`: only for what other schedulers' words grant, so those that policy does not take are no error."""
    from . import merge, scheduler_requests

    heard = scheduler_requests.collect(matches, mine, bundle, node)
    heard = heard._replace(unheard=()) if judged else heard
    if mine is not None and mine.selection != gpushare_env.UNNAMED:
        request = _combine(mine, None)
    else:
        limited = heard.limited or (mine is not None and bool(_limits(mine)))
        base = _foreign(scheduler_requests.without_alias(bundle, heard), node, with_injected, limited)
        if limited or node.config.policy.nvidia_visible_devices != "with_limit":
            base = merge.with_devices(base, heard, node)
        request = base if mine is None else _combine(mine, base)
    return request if request is None else merge.with_limits(request, heard, node)


def _limits(request: Request) -> list[tuple[str, str]]:
    """The sources that set limits: a limit asks for a device even where none is named."""
    keys = (constants.ENV_MEMORY, constants.ENV_COMPUTE)
    suffixes = tuple(constants.ANNOTATIONS[key] for key in keys)
    return [pair for pair in request.sources if pair[0] in keys or pair[0].endswith(suffixes)]


def _combine(mine: Request, foreign: Optional[Request]) -> Optional[Request]:
    """Our own words win; NVIDIA's say the devices where ours name none."""
    limits = _limits(mine)
    if mine.selection.kind in ("void", "none"):
        if limits:
            (name, value), word = limits[0], mine.selection.kind
            raise RequestError(
                f"{setting(name, value)}: a limit, but {constants.ENV_DEVICES} is {word}",
                "name a device, or leave one out",
            )
        return mine if mine.selection.kind == "none" else None
    if mine.selection != gpushare_env.UNNAMED:
        return mine
    if foreign is not None and foreign.selection.kind != "none":
        return mine._replace(
            dialect=f"own+{foreign.dialect}",
            selection=foreign.selection,
            sources=foreign.sources + mine.sources,
            ignored=foreign.ignored + mine.ignored,
        )
    if not limits:  # only how to share, not what: nothing is asked
        return foreign
    ignored = mine.ignored
    if foreign is not None:
        ignored += (f"{nvidia.ENV_DEVICES}=none: {shown_name(limits[0][0])} asks for a device",)
    return mine._replace(selection=Selection("any", count=1), ignored=ignored)


def _refuse_unknown(env: Env, annotations: dict[str, str]) -> None:
    """GPUSHARE_MEM=4Gi beside a device means a limit to whoever wrote it. Without a request it is nobody's business."""
    for name, value in gpushare_env.unknown(env):
        raise wrong(name, value, "unknown name", f"use {', '.join(gpushare_env.ROWS)}")
    for name, value in gpushare_env.unattributed(annotations):
        raise wrong(name, value, "the engine does not say which container this is", "leave out the prefix")


def _check_rootfs(bundle: Bundle) -> None:
    """A container that gets files must have a root of its own."""
    if bundle.rootfs in ("", "/"):
        raise RequestError(f"config.json: root.path is {shown(bundle.rootfs)}", "give the container a root file system")


def _check_words(request: Request, rules: Policy) -> None:
    """What no device is needed to judge."""
    policy.require_allowed_backends(request, rules)


def _with_driver_words(request: Request, bundle: Bundle, node: Node) -> Request:
    """The request with what NVIDIA's variables say about the driver, as far as policy listens."""
    rules = node.config.policy
    env = bundle.env if policy.accepted(rules.accept_env, bundle) else nvidia.constraints_only(bundle.env)
    spec = bundle.spec if policy.accepted(rules.accept_volume_mounts, bundle) else {}
    more: tuple[str, ...] = ()
    if not policy.accepted(rules.accept_widening, bundle):
        said = dict(
            pair for pair in env if pair[0] in nvidia_driver_env.WIDENING and pair[1].strip() not in ("", "disabled")
        )
        more = tuple(f"{setting(*pair)}: policy.accept.widening does not take it" for pair in said.items())
        env = tuple(pair for pair in env if pair[0] not in nvidia_driver_env.WIDENING)
    words = nvidia_driver_env.read(env, spec, node.inventory)
    if words.mig_access and not bundle.privileged:
        name, value = next((name, value) for name, value in words.sources if name in nvidia_driver_env.MIG_RIGHTS)
        raise PolicyError(
            f"{setting(name, value)}: only a privileged container gets rights over MIG",
            "leave it out, or run privileged",
        )
    request = request._replace(
        uid=oci.uid_on_host(bundle.spec),
        shm=oci.shm_source(bundle.spec),
        features=words.features,
        imex_channels=words.imex_channels,
        mig_access=words.mig_access,
        requirements=words.requirements,
        sources=request.sources + words.sources,
        ignored=request.ignored + words.ignored + more,
    )
    if request.requirements and request.selection.kind == "none":  # for the others placement asks, device by device
        from . import constraints

        constraints.require(request.requirements, node.inventory, None)
    return request


def resolve(bundle: Bundle, node: Node, with_injected: bool = False, on_host: bool = False) -> Optional[Request]:
    """What the container asks for. The sandbox container of a pod asks for nothing, whatever it inherited."""
    if bundle.container_type == "sandbox":
        _refuse_in_sandbox(bundle)
        return None
    rules = node.config.policy
    if bundle.claims[0] and _annotated(bundle):
        policy.refuse_claims(bundle)
    mine = DIALECTS["own"](bundle.env, bundle.annotations, bundle.spec, node.inventory)
    if mine is not None:
        policy.refuse_unaccepted(mine, bundle, rules)
    matches = _spoken(bundle)
    request = (
        _with_schedulers(matches, mine, bundle, node, with_injected)
        if matches
        else _without(mine, bundle, node, with_injected)
    )
    if mine is None or request is None:
        policy.refuse_injected(bundle, rules)
    if request is None:
        if with_injected:
            _refuse_void(mine, bundle)
        if not on_host:
            policy.refuse_unlimited(bundle, node.config)
        return None
    request = _with_replaced(request, bundle) if with_injected else request
    _refuse_unknown(bundle.env, bundle.annotations)
    if not on_host:
        _check_rootfs(bundle)
    policy.refuse_unlisted(request, bundle, rules)
    _check_words(request, rules)
    if not on_host:  # nor is there an image
        request = policy.without_widening(request, bundle, rules)
    return _with_driver_words(request, bundle, node)


def _refuse_in_sandbox(bundle: Bundle) -> None:
    found = cdi_devices.named(bundle.spec)
    if found:
        raise RequestError(
            f"config.json of a pod's sandbox has {found}", "ask for devices in a container of the pod, not in the pod"
        )


def _annotated(bundle: Bundle) -> bool:
    """Whether an annotation asks for something, as those of a pod do for each of its containers."""
    asking = (
        key for key in bundle.annotations if constants.ANNOTATION_PREFIX in key and key != constants.APPLIED_ANNOTATION
    )
    return next(asking, "") != "" or not triggers.KEYS.isdisjoint(bundle.annotations)


def unused(bundle: Bundle, node: Node) -> tuple[str, ...]:
    """Where `resolve` is None: what other schedulers' words say in vain, one line each, for explain."""
    matches = _spoken(bundle) if bundle.container_type != "sandbox" else ()
    if not matches:
        return ()
    from . import scheduler_requests

    mine = DIALECTS["own"](bundle.env, bundle.annotations, bundle.spec, node.inventory)
    return scheduler_requests.unused(matches, mine, bundle, node)


def _refuse_void(mine: Optional[Request], bundle: Bundle) -> None:
    """`void` wants to be left alone, but with a device that is there already that would be a GPU without a limit."""
    minors = cdi_devices.minors(bundle.spec) if mine is not None and mine.selection == gpushare_env.VOID else ()
    if mine is not None and minors:
        name, value = mine.sources[0]
        raise RequestError(
            f"{setting(name, value)}, but config.json has {nvidia.DEVICE_PREFIX}{minors[0]}", "leave one of them out"
        )


def _with_replaced(request: Request, bundle: Bundle) -> Request:
    """Devices of config.json that were not what the request went by are taken out, which is worth a line."""
    minors = cdi_devices.minors(bundle.spec) if "injected" not in request.dialect else ()
    if not minors:
        return request
    paths = ",".join(f"{nvidia.DEVICE_PREFIX}{minor}" for minor in minors)
    return request._replace(
        ignored=(*request.ignored, f"{paths} in config.json: {shown_name(request.sources[0][0])} says which")
    )


def refuse_conflicts(bundle: Bundle, request: Request) -> None:
    """A hook cannot take out what other software put into config.json, so it refuses and says what that was:
    an NVIDIA hook would mount its own libcuda over ours, or beside it."""
    found, name = nvidia.conflicts(bundle.spec), shown_name(request.sources[0][0])
    if found:
        raise RequestError(
            f"config.json already has an NVIDIA {found[0]}" + (f" and {len(found) - 1} more" if found[1:] else ""),
            f"start the container through gpushare-runtime, which replaces it, or leave out {name}",
        )
    if not cdi_devices.rules_reach(bundle.spec):
        return
    from . import deny_devices

    if deny_devices.rules_open(bundle.spec, {constants.NVIDIA_MAJOR}):
        raise RequestError(
            "config.json allows devices that were not granted (linux.resources.devices), as --privileged does",
            "start the container through gpushare-runtime, which denies them, or leave out --device-cgroup-rule and "
            "--privileged",
        )
