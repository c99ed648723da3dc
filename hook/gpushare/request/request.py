"""Resolve a container's description into one Request: all dialects, combined and checked against policy.

    mentions(bundle)                         -> bool             cheap: whether the container can request anything
    resolve(bundle, node, with_injected, on_host) -> Request | None   None: no request
    unused(bundle, node)                 -> tuple[str, ...]  for explain: ignored values of other schedulers
    refuse_conflicts(bundle, request, inventory) -> None     for the hook alone: raises if NVIDIA's tools ran before

`with_injected`: devices that other software added to config.json count as a request. Only gpushare-runtime sets it,
because only it can remove them again.
`on_host`: a program on the host (`gpushare run`), without a root file system of its own.
Pure. They raise RequestError (makes no sense), DeviceError (no such device) and PolicyError (not allowed).
Runs on the start path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

from ..core import constants
from ..core.errors import DeviceError, PolicyError, RequestError
from ..core.model import Bundle, Inventory, Node, Policy, Request, Selection
from ..core.quantity import wrong
from ..core.quoting import setting, shown, shown_name
from ..gpu.drivernodes import of_cdi_device
from ..gpu.selectors import find_devices, is_among, usable_devices
from . import constraints, deny_devices, lending, merge, oci, policy, scheduler_requests, speckeys
from .dialects import cdi_devices, gpushare_env, nvidia, nvidia_driver_env, registry

# name -> (bundle, inventory) -> Request | None, the most specific dialect first.
# Dialects of other schedulers are in dialects/registry.py; merge.py adds them.
DIALECTS: dict[str, Callable[[Bundle, Inventory], Optional[Request]]] = {
    "own": gpushare_env.read,
    "injected": cdi_devices.read,
    "nvidia": nvidia.read,
}
# Prefixes of variables that can be a request: GPUSHARE_*, common misspellings, NVIDIA's, and other schedulers'
TRIGGERS = (*gpushare_env.PREFIXES, nvidia.ENV_DEVICES, *registry.BEGINNINGS)
# Text that the launcher searches in a config.json, in any case of letters. Without one of these, or a device of the
# driver's major (scan.c), `mentions` finds nothing. ASCII letters, digits and . _ - / only, which it knows in every
# JSON spelling.
DEVICE_TRIGGER = "/nvidia"  # below /dev, however that is spelled; counts in a sandbox too
RAW_TRIGGERS = (
    *TRIGGERS,
    constants.ANNOTATION_PREFIX.rstrip("/"),
    nvidia.VOLUME_ROOT.rpartition("/")[2],
    DEVICE_TRIGGER,
    "cdi.k8s.io",
    *registry.KEY_BEGINNINGS,
    *constants.HOOK_OUTPUT_ANNOTATIONS,  # no request; gpushare-runtime removes it (hookoutput.py)
)
_LONGEST = max(map(len, TRIGGERS))


def _ascii_upper(text: str) -> str:
    """Uppercase ASCII only. str.upper turns a long s (U+017F) into S, and the launcher compares bytes."""
    return text.upper() if text.isascii() else "".join(c.upper() if c.isascii() else c for c in text)


def mentions(bundle: Bundle) -> bool:
    """Return False if no dialect can find a request, so that the container needs neither inventory nor lease. Our
    variables count in any case of letters: a misspelled limit must be refused, not ignored."""
    if bundle.container_type == "sandbox":
        return bool(bundle.injected)
    return (
        any(_ascii_upper(name[:_LONGEST]).startswith(TRIGGERS) for name, _ in bundle.env)
        or any(constants.ANNOTATION_PREFIX in key for key in bundle.annotations)
        or registry.any_annotation(bundle.annotations)
        or bool(bundle.volumes)
        or bool(bundle.injected)
    )


def _foreign(bundle: Bundle, node: Node, with_injected: bool, limited: bool) -> Optional[Request]:
    """Return the devices in config.json, else those of NVIDIA's variables. Devices that an engine added win over the
    variables, which every CUDA image has. Variables that name other devices are a contradiction."""
    accepted = policy.accepted_nvidia(bundle, node.config.policy, limited)
    found = None
    if with_injected and policy.accepted(node.config.policy.accept_cdi, bundle):
        found = DIALECTS["injected"](bundle, node.inventory)
    if found is None:
        return DIALECTS["nvidia"](accepted, node.inventory)
    name, value = nvidia.device_source(accepted)
    try:
        named = nvidia.selection(accepted, node.inventory)
    except (RequestError, DeviceError):  # device plugins write paths and CDI names there too
        named = Selection("all")
    if named is not None and named.kind == "list":
        both = cdi_devices.narrowest(found.selection, named, node.inventory)
        if both is None or not cdi_devices.same_gpus(named, found.selection, node.inventory):
            raise RequestError(
                f"{setting(name, value)} and {found.sources[0][1]} in config.json name different devices",
                "leave one of them out",
            )
        found = found._replace(selection=both)
    if named is None:
        return found
    return found._replace(ignored=(*found.ignored, f"{setting(name, value)}: config.json has {found.sources[0][1]}"))


def _without(mine: Optional[Request], bundle: Bundle, node: Node, with_injected: bool) -> Optional[Request]:
    """Resolve GPUSHARE_* and NVIDIA's variables."""
    if mine is not None and mine.selection != gpushare_env.UNNAMED:
        return _combine(mine, None)  # other variables do not count, so they cannot be wrong
    foreign = _foreign(bundle, node, with_injected, limited=mine is not None and bool(_limits(mine)))
    return foreign if mine is None else _combine(mine, foreign)


def _matches(bundle: Bundle) -> tuple[Any, ...]:
    """Return the values of other schedulers by dialect."""
    return registry.matches(bundle.env, bundle.annotations, bundle.container_name)


def _with_schedulers(
    matches: tuple[Any, ...], mine: Optional[Request], bundle: Bundle, node: Node, with_injected: bool
) -> Optional[Request]:
    """Resolve the same with other schedulers. An image can set GPUSHARE_* variables, so one of them replaces a
    scheduler's limit by a larger one only if policy accepts that (policy.accept.widening)."""
    request = _combined(matches, mine, bundle, node, with_injected)
    if mine is None or policy.accepted(node.config.policy.accept_widening, bundle):
        return request
    limits = [name for name, _ in mine.sources if name in (constants.ENV_MEMORY, constants.ENV_COMPUTE)]
    theirs = _combined(matches, merge.without(mine, limits), bundle, node, with_injected, judged=True)
    larger = [name for name in limits if theirs is not None and merge.is_larger(name, mine, theirs, node)]
    request = _combined(matches, merge.without(mine, larger), bundle, node, with_injected) if larger else request
    lines = [
        f"{setting(name, value)}: policy.accept.widening does not accept more than another scheduler's limit"
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
    """`judged`: only to see what the schedulers grant, so a value that policy refuses is no error."""
    collected = scheduler_requests.collect(matches, mine, bundle, node)
    collected = collected._replace(refused=()) if judged else collected
    if mine is not None and mine.selection != gpushare_env.UNNAMED:
        request = _combine(mine, None)
    else:
        limited = collected.limited or (mine is not None and bool(_limits(mine)))
        base = _foreign(scheduler_requests.without_alias(bundle, collected), node, with_injected, limited)
        if limited or node.config.policy.nvidia_visible_devices != "with_limit":
            base = merge.with_devices(base, collected, node)
        request = base if mine is None else _combine(mine, base)
    return request if request is None else merge.with_limits(request, collected, node)


def _limits(request: Request) -> list[tuple[str, str]]:
    """Return the sources that set limits. A limit requests a device even if none is named."""
    keys = (constants.ENV_MEMORY, constants.ENV_COMPUTE)
    suffixes = (*(constants.ANNOTATIONS[key] for key in keys), *constants.MEMORY_ENDS)
    return [pair for pair in request.sources if pair[0] in keys or pair[0].endswith(suffixes)]


def _combine(mine: Request, foreign: Optional[Request]) -> Optional[Request]:
    """Combine requests: GPUSHARE_* wins; NVIDIA's variables name the devices if GPUSHARE_* names none."""
    limits = _limits(mine)
    if mine.selection.kind in ("void", "none"):
        if limits:
            (name, value), word = limits[0], mine.selection.kind
            raise RequestError(
                f"{setting(name, value)}: sets a limit, but {constants.ENV_DEVICES} is {word}",
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
    if not limits:  # only how to share: no request
        return foreign
    ignored = mine.ignored
    if foreign is not None:
        ignored += (f"{nvidia.ENV_DEVICES}=none: {shown_name(limits[0][0])} requests a device",)
    return mine._replace(selection=Selection("any", count=1), ignored=ignored)


def _refuse_unknown(bundle: Bundle) -> None:
    """Refuse unknown GPUSHARE_* variables beside a request: GPUSHARE_MEM=4Gi was meant as a limit."""
    for name, value in gpushare_env.unknown(bundle.env):
        raise wrong(name, value, "unknown name", f"use {', '.join(gpushare_env.ROWS)}")
    for name, value in gpushare_env.unattributed(bundle):
        raise wrong(name, value, "the engine does not name this container", "leave out the prefix")


def _check_rootfs(bundle: Bundle) -> None:
    """Refuse a container without a root of its own: files are mounted into it."""
    if bundle.rootfs in ("", "/"):
        raise RequestError(f"config.json: root.path is {shown(bundle.rootfs)}", "give the container a root file system")


def _check(request: Request, rules: Policy) -> None:
    """Check everything that does not depend on a device."""
    policy.require_allowed_backends(request, rules)


def _with_driver_env(request: Request, bundle: Bundle, node: Node) -> Request:
    """Return the request with NVIDIA's variables about the driver, as far as policy accepts them."""
    rules = node.config.policy
    env = bundle.env if policy.accepted(rules.accept_env, bundle) else nvidia.constraints_only(bundle.env)
    volumes = bundle.imex_volumes if policy.accepted(rules.accept_volume_mounts, bundle) else ()
    more: tuple[str, ...] = ()
    if not policy.accepted(rules.accept_widening, bundle):
        refused = dict(
            pair for pair in env if pair[0] in nvidia_driver_env.WIDENING and pair[1].strip() not in ("", "disabled")
        )
        more = tuple(f"{setting(*pair)}: policy.accept.widening does not accept it" for pair in refused.items())
        env = tuple(pair for pair in env if pair[0] not in nvidia_driver_env.WIDENING)
    driver = nvidia_driver_env.read(env, volumes, node.inventory)
    if driver.mig_access and not bundle.privileged:
        name, value = next((name, value) for name, value in driver.sources if name in nvidia_driver_env.MIG_RIGHTS)
        raise PolicyError(
            f"{setting(name, value)}: only a privileged container gets rights over MIG",
            "leave it out, or run privileged",
        )
    request = request._replace(
        uid=oci.uid_on_host(bundle.spec),
        shm=oci.shm_source(bundle.spec),
        features=driver.features,
        imex_channels=driver.imex_channels,
        mig_access=driver.mig_access,
        requirements=driver.requirements,
        sources=request.sources + driver.sources,
        ignored=request.ignored + driver.ignored + more,
    )
    if request.requirements and request.selection.kind == "none":  # else placement checks them for each device
        constraints.require(request.requirements, node.inventory, None)
    return request


def resolve(bundle: Bundle, node: Node, with_injected: bool = False, on_host: bool = False) -> Optional[Request]:
    """Return the container's Request. The sandbox container of a pod has none, whatever it inherited."""
    if bundle.container_type == "sandbox":
        _refuse_in_sandbox(bundle)
        return None
    rules = node.config.policy
    if bundle.claims[0] and _annotated(bundle):
        policy.refuse_claims(bundle)
    mine = DIALECTS["own"](bundle, node.inventory)
    if mine is not None:
        policy.refuse_unaccepted(mine, bundle, rules)
    matches = _matches(bundle)
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
    if rules.amounts == "container":
        request = _on_one_device(request, bundle, node)
    request = _with_replaced(request, bundle) if with_injected else request
    _refuse_unknown(bundle)
    if not on_host:
        _check_rootfs(bundle)
    policy.refuse_unlisted(request, bundle, rules)
    _check(request, rules)
    if not on_host:  # no image either
        request = policy.without_widening(request, bundle, rules)
    if any(amount.ceiling for _, amount in request.memory):
        request = request._replace(ignored=(*request.ignored, *lending.notes(request, node.config)))
    return _with_driver_env(request, bundle, node)


def _on_one_device(request: Request, bundle: Bundle, node: Node) -> Request:
    """Return the request with one device if a scheduler counted its memory once (policy.amounts). Every CUDA image sets
    NVIDIA_VISIBLE_DEVICES=all, which then means any device. Raise RequestError for several devices."""
    keys = (constants.ANNOTATIONS[constants.ENV_MEMORY], *constants.MEMORY_ENDS)
    amount = next((pair for pair in request.sources if pair[0] == constants.ENV_MEMORY or pair[0].endswith(keys)), None)
    if amount is None or any(name.startswith(constants.OF_PLUGINS) for name, _ in bundle.env):
        return request
    selection, count = request.selection, request.selection.count
    if selection.kind == "list":
        count = len({one for name in selection.names for one in find_devices("", "", name, node.inventory)})
    elif selection.kind == "all":
        allowed = node.config.policy.allowed_devices
        count = sum(not allowed or is_among(one, allowed) for one in usable_devices(node.inventory))
    if count < 2:
        return request
    if selection.kind == "all" and request.dialect == "own+nvidia":
        line = f"{nvidia.ENV_DEVICES}: policy.amounts is container, so the container gets one device"
        return request._replace(selection=Selection("any", count=1), ignored=(*request.ignored, line))
    raise RequestError(
        f"{setting(*amount)} is one amount, which the scheduler counts once, and {count} devices are requested",
        f"set {constants.ENV_DEVICES}=any, or name one device (policy.amounts)",
    )


def _refuse_in_sandbox(bundle: Bundle) -> None:
    if bundle.injected:
        raise RequestError(
            f"config.json of a pod's sandbox has {bundle.injected}",
            "ask for devices in a container of the pod, not in the pod",
        )


def _annotated(bundle: Bundle) -> bool:
    """Return whether an annotation requests something. Those of a pod do so for each of its containers."""
    asking = (
        key for key in bundle.annotations if constants.ANNOTATION_PREFIX in key and key != constants.APPLIED_ANNOTATION
    )
    return next(asking, "") != "" or registry.any_annotation(bundle.annotations)


def unused(bundle: Bundle, node: Node) -> tuple[str, ...]:
    """Return a line for each value of another scheduler that has no effect, if `resolve` is None (explain)."""
    matches = _matches(bundle) if bundle.container_type != "sandbox" else ()
    if not matches:
        return ()
    mine = DIALECTS["own"](bundle, node.inventory)
    return scheduler_requests.unused(matches, mine, bundle, node)


def _refuse_void(mine: Optional[Request], bundle: Bundle) -> None:
    """Refuse `void` beside a device in config.json: that would be a GPU without a limit."""
    minors = bundle.minors if mine is not None and mine.selection == gpushare_env.VOID else ()
    if mine is not None and minors:
        name, value = mine.sources[0]
        raise RequestError(
            f"{setting(name, value)}, but config.json has {nvidia.DEVICE_PREFIX}{minors[0]}", "leave one of them out"
        )


def _with_replaced(request: Request, bundle: Bundle) -> Request:
    """Note the devices of config.json that are replaced by the request."""
    minors = bundle.minors if "injected" not in request.dialect else ()
    if not minors:
        return request
    paths = ",".join(f"{nvidia.DEVICE_PREFIX}{minor}" for minor in minors)
    return request._replace(
        ignored=(*request.ignored, f"{paths} in config.json: {shown_name(request.sources[0][0])} names the devices")
    )


def _without_cdi_nodes(bundle: Bundle, request: Request, inventory: Inventory) -> dict[str, Any]:
    """Return the spec less the nodes and rules of gpushare's own CDI devices, which this request names."""
    spec = bundle.spec
    from_cdi = any(name.startswith(constants.ENV_CDI_PREFIX) for name, _ in request.sources)
    from_claim = any(name.startswith(constants.ENV_CLAIM_PREFIX) for name, _ in bundle.env)
    if not (from_cdi or from_claim) or request.selection.kind != "list":
        return spec
    devices = [device for name in request.selection.names for device in find_devices("", "", name, inventory)]
    nodes = [node for device in devices for node in of_cdi_device(inventory, device)]
    own = [(f"/dev/{node.name}", node.major, node.minor) for node in nodes]
    numbers = [("c", node.major, node.minor) for node in nodes]

    def is_own(device: Any) -> bool:
        return isinstance(device, dict) and (device.get("path"), device.get("major"), device.get("minor")) in own

    def allows_own(rule: Any) -> bool:
        return isinstance(rule, dict) and (rule.get("type"), rule.get("major"), rule.get("minor")) in numbers

    resources = speckeys.section(spec, "linux", "resources")
    rules = [rule for rule in speckeys.items(spec, "linux", "resources", "devices") if not allows_own(rule)]
    kept = [device for device in speckeys.items(spec, "linux", "devices") if not is_own(device)]
    linux = {**speckeys.section(spec, "linux"), "devices": kept, "resources": {**resources, "devices": rules}}
    return {**spec, "linux": linux}


def refuse_conflicts(bundle: Bundle, request: Request, inventory: Inventory) -> None:
    """Refuse what other software added to config.json, and name it: a hook cannot remove it, and an NVIDIA hook would
    mount its own libcuda over the shim, or beside it."""
    spec = _without_cdi_nodes(bundle, request, inventory)
    found, name = nvidia.conflicts(spec), shown_name(request.sources[0][0])
    if found:
        raise RequestError(
            f"config.json already has an NVIDIA {found[0]}" + (f" and {len(found) - 1} more" if found[1:] else ""),
            f"start the container through gpushare-runtime, which replaces it, or leave out {name}",
        )
    if not cdi_devices.rules_reach(spec):
        return
    if deny_devices.rules_open(spec, {constants.NVIDIA_MAJOR}):
        raise RequestError(
            "config.json allows devices that were not granted (linux.resources.devices), as --privileged does",
            "start the container through gpushare-runtime, which denies them, or leave out --device-cgroup-rule and "
            "--privileged",
        )
