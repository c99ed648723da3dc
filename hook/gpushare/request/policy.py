"""Apply the configuration's `policy` to one container (start path). Pure.

    accepts(bundle, policy)           -> Accepts    the keys of policy.accept, for this container
    refuse_unaccepted(own, scene)                GPUSHARE_* requests that the node does not accept
    applied(request, own, scene)      -> Request | None     as far as policy grants it; raises
    refuse_claims(bundle)                        annotations of a CRI where none is configured
    listed(bundle, policy)            -> bool    whether a container has an entry in policy.privileged_containers
    pod_wide(request, bundle)         -> str     the sandbox, if an annotation for the whole pod was used
    refuse_second(request, bundle, live)         a second container of a pod with that annotation

They raise PolicyError with the key of config.yaml.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Optional

from ..core import constants
from ..core.errors import PolicyError, RequestError
from ..core.model import Accepts, Bundle, Config, Lease, Node, Policy, Request, Selection
from ..core.quoting import setting, shown, shown_name
from ..gpu.selectors import find_devices, is_among, usable_devices
from . import lending, oci
from .dialects import gpushare_env, nvidia, registry


class Scene(NamedTuple):
    """A container on this node. `matches`: the values of other schedulers by dialect. `with_injected`: devices in
    config.json are a request. `on_host`: a program without a root file system of its own."""

    bundle: Bundle
    node: Node
    accepts: Accepts
    matches: tuple[registry.Match, ...] = ()
    with_injected: bool = False
    on_host: bool = False


def accepts(bundle: Bundle, policy: Policy) -> Accepts:
    enough = ("always", "privileged") if bundle.privileged else ("always",)
    return Accepts(
        env=policy.accept_env in enough,
        annotations=policy.accept_annotations in enough,
        cdi=policy.accept_cdi in enough,
        volume_mounts=policy.accept_volume_mounts in enough,
        switches=policy.accept_switches in enough,
        widening=policy.accept_widening in enough,
    )


def applied(request: Optional[Request], own: Optional[Request], scene: Scene) -> Optional[Request]:
    """Return the request as far as policy grants it. `own`: what GPUSHARE_* requests."""
    bundle, config = scene.bundle, scene.node.config
    if own is None or request is None:
        _refuse_injected(scene)
    if request is None:
        if scene.with_injected:
            _refuse_void(own, bundle)
        if not scene.on_host:
            _refuse_unlimited(bundle, config)
        return None
    if config.policy.amounts == "container":
        request = _on_one_device(request, scene)
    if scene.with_injected:
        request = _with_replaced(request, bundle)
    if not scene.on_host:
        _refuse_host_root(bundle)
    _refuse_unlisted(request, bundle, config.policy)
    require_allowed_backends(request, config.policy)
    if not (scene.on_host or scene.accepts.widening):  # a program on the host has no image either
        request = _without_widening(request, bundle)
    if any(amount.ceiling for _, amount in request.memory):
        request = request._replace(ignored=(*request.ignored, *lending.notes(request, config)))
    return request


def _refuse_host_root(bundle: Bundle) -> None:
    """Refuse a container without a root of its own: files are mounted into it."""
    if bundle.rootfs in ("", "/"):
        raise RequestError(f"config.json: root.path is {shown(bundle.rootfs)}", "give the container a root file system")


def refuse_unaccepted(own: Request, scene: Scene) -> None:
    """Refuse a request that is not accepted. Ignoring it could lift a limit."""
    policy = scene.node.config.policy
    for name, value in own.sources:
        is_variable = name in constants.ANNOTATIONS or name.startswith(constants.ENV_CDI_PREFIX)
        if not (scene.accepts.env if is_variable else scene.accepts.annotations):
            key = "env" if is_variable else "annotations"
            raise PolicyError(
                f"{setting(name, value)}: requests in {key} are not accepted on this node",
                f"set policy.accept.{key} in the node's config.yaml, or leave the name out",
            )
        if policy.annotations == "scoped" and name.startswith(constants.ANNOTATION_PREFIX):
            scoped = f"{scene.bundle.container_name or '<container>'}.{name}"
            raise PolicyError(
                f"{setting(name, value)}: only annotations for one container are accepted on this node",
                f"write {shown_name(scoped)}, or set policy.annotations: any",
            )


def _injected(bundle: Bundle, policy: Policy) -> str:
    """Return the device that config.json names; "" if none. A rule alone does not count if an entry of
    policy.privileged_containers allows it; otherwise deny_devices.py removes it."""
    is_rule = bundle.injected != "" and not bundle.minors
    return "" if is_rule and listed(bundle, policy) else bundle.injected


# field of Request that widens a limit -> our variable, its default
_MORE: dict[str, tuple[str, Any]] = {
    "compute_mode": (constants.ENV_COMPUTE_MODE, "hard"),
    "priority": (constants.ENV_PRIORITY, 0),
    "oversubscribe": (constants.ENV_OVERSUBSCRIBE, False),
    "scalings": (constants.ENV_OVERSUBSCRIBE, ()),
}


def _without_widening(request: Request, bundle: Bundle) -> Request:
    """Return `request` without what variables add to its limits. This is not an error: an image may have set them, and
    the user's limit holds in any case. Parameters of a claim count, as annotations do."""
    claims = [value.split(";") for name, value in bundle.env if name.startswith(constants.ENV_CLAIM_PREFIX)]
    claimed = {item.partition("=")[0] for items in claims for item in items}
    fields: dict[str, Any] = {}
    ignored = []
    for field, (variable, least) in _MORE.items():
        said = [(name, value) for name, value in request.sources if name == variable]
        key = constants.ANNOTATIONS[variable]
        annotated = any(name.endswith(key) for name, _ in request.sources)  # no scheduler has such annotations
        is_claimed = key[len(constants.ANNOTATION_PREFIX) :] in claimed
        if getattr(request, field) == least or is_claimed or (annotated and not said):
            continue
        fields[field] = least
        shown_as = setting(*said[0]) if said else f"{field} of {request.dialect}"
        ignored.append(f"{shown_as}: policy.accept.widening does not accept it")
    return request._replace(ignored=(*request.ignored, *ignored), **fields)


def _refuse_injected(scene: Scene) -> None:
    """Refuse devices that only another tool added. They would give a whole GPU without a limit."""
    found = "" if scene.accepts.cdi else _injected(scene.bundle, scene.node.config.policy)
    if found:
        raise PolicyError(
            f"config.json has {found}: devices that other software puts there are not accepted on this node",
            f"request devices with {constants.ENV_DEVICES}, or set policy.accept.cdi in the node's config.yaml",
        )


def _refuse_unlimited(bundle: Bundle, config: Config) -> None:
    """Refuse the same in a container without a request, if limits are required."""
    policy = config.policy
    required = {
        "policy.require_limits": policy.require_limits,
        "policy.max_memory": policy.max_memory,
        "policy.unlimited": policy.unlimited == "deny",
        "sharing": config.sharing,
    }
    key = next((key for key, value in required.items() if value), "")
    found = _injected(bundle, policy) if key else ""
    if found:
        raise PolicyError(
            f"config.json has {found} without a memory limit, and {key} requires one",
            f"start the container through gpushare-runtime, with {constants.ENV_MEMORY}",
        )


def listed(bundle: Bundle, policy: Policy) -> bool:
    """Return whether policy.privileged_containers lists this container; "*" lists every privileged one."""
    if bundle.sys_admin and "*" in policy.privileged_containers:
        return True
    if _fits(bundle.claimed_entry, policy):
        refuse_claims(bundle)
    return _fits(bundle.entry, policy)


def _fits(entry: str, policy: Policy) -> bool:
    namespace, slash, name = entry.partition("/")
    patterns = {entry, f"{namespace}/*", f"*/{name}", "*/*"} if slash else {entry}
    return not patterns.isdisjoint(policy.privileged_containers)


def refuse_claims(bundle: Bundle) -> None:
    """Raise RequestError for a container of a pod under an engine that is not configured as a CRI. Its annotations do
    not count, and a request that depends on them must neither be granted twice nor ignored."""
    name, value = bundle.claims
    raise RequestError(
        f"annotation {setting(name, value)} would make this a container of a pod, but the engine's configuration "
        "does not declare the engine a CRI",
        "on containerd or CRI-O run `gpushare runtime configure containerd` (or crio) again and restart it; elsewhere "
        "leave the annotation out",
    )


def _on_one_device(request: Request, scene: Scene) -> Request:
    """Return the request with one device if a scheduler counted its memory once (policy.amounts). Every CUDA image sets
    NVIDIA_VISIBLE_DEVICES=all, which then means any device. Raise RequestError for several devices."""
    keys = (constants.ANNOTATIONS[constants.ENV_MEMORY], *constants.MEMORY_ENDS)
    amount = next((pair for pair in request.sources if pair[0] == constants.ENV_MEMORY or pair[0].endswith(keys)), None)
    if amount is None or any(name.startswith(constants.OF_PLUGINS) for name, _ in scene.bundle.env):
        return request
    selection, count = request.selection, request.selection.count
    if selection.kind == "list":
        count = len({one for name in selection.names for one in find_devices("", "", name, scene.node.inventory)})
    elif selection.kind == "all":
        allowed = scene.node.config.policy.allowed_devices
        count = sum(not allowed or is_among(one, allowed) for one in usable_devices(scene.node.inventory))
    if count < 2:
        return request
    if selection.kind == "all" and request.dialect == "own+nvidia":
        line = f"{nvidia.ENV_DEVICES}: policy.amounts is container, so the container gets one device"
        return request._replace(selection=Selection("any", count=1), ignored=(*request.ignored, line))
    raise RequestError(
        f"{setting(*amount)} is one amount, which the scheduler counts once, and {count} devices are requested",
        f"set {constants.ENV_DEVICES}=any, or name one device (policy.amounts)",
    )


def _refuse_void(own: Optional[Request], bundle: Bundle) -> None:
    """Refuse `void` beside a device in config.json: that would be a GPU without a limit."""
    if bundle.minors and own is not None and own.selection == gpushare_env.VOID:
        raise RequestError(
            f"{setting(*own.sources[0])}, but config.json has {bundle.injected}", "leave one of them out"
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


def _refuse_unlisted(request: Request, bundle: Bundle, policy: Policy) -> None:
    if bundle.privileged and not listed(bundle, policy):
        name, value = request.sources[0]
        raise PolicyError(
            f"{setting(name, value)}: this container is privileged (CAP_SYS_ADMIN in the host's user namespace), and "
            "not among policy.privileged_containers",
            f"add {shown(bundle.entry)} there in the node's config.yaml, which lets it undo limits, or run it "
            "without the capability or in a user namespace of its own",
        )


def _unscoped(request: Request) -> str:
    """Return the first used annotation that names no container; those of other schedulers never do."""
    return next(
        (name for name, _ in request.sources if name.startswith(constants.ANNOTATION_PREFIX) or name in registry.KEYS),
        "",
    )


def pod_wide(request: Request, bundle: Bundle) -> str:
    """Return the id of the pod's sandbox if the request is an annotation of the whole pod. Of a container
    with Kubernetes claims, return the names of their variables, joined by commas: containers can share a claim."""
    claims = [name for name, _ in bundle.env if name.startswith(constants.ENV_CLAIM_PREFIX)]
    if claims:
        return ",".join(claims)
    return oci.sandbox_id(bundle.annotations) if bundle.container_name and _unscoped(request) else ""


def refuse_second(request: Request, bundle: Bundle, live: Iterable[Lease]) -> None:
    """Refuse a second container with the annotation of a pod, or with the same device of a claim: 4 GiB for all must
    not become 4 GiB for each. config.json does not list the pod's other containers, so the first one that
    starts gets the share."""
    mine = {*pod_wide(request, bundle).split(",")} - {""}
    if not mine:
        return
    other = next((one for one in live if one.id != bundle.id and not mine.isdisjoint(one.sandbox.split(","))), None)
    if other is not None and next(iter(mine)).startswith(constants.ENV_CLAIM_PREFIX):
        raise RequestError(
            f"container {other.id} already has the share of this claim, which is for one container",
            "give each container a request of its own in the claim (resources.claims[].request), or a claim of its own",
        )
    if other is not None:
        name = _unscoped(request)
        own = constants.ANNOTATION_PREFIX + "memory" if name in registry.KEYS else name
        raise RequestError(
            f"{shown_name(name)} is for the whole pod, and container {other.id} already has the share that it requests",
            f"write {shown_name(f'{bundle.container_name}.{own}')}",
        )


def named_backends(request: Request) -> tuple[str, ...]:
    """Return the backends that the container names; () for auto."""
    return tuple(word for word in request.backend.split(",") if word != constants.AUTO)


def require_allowed_backends(request: Request, policy: Policy) -> None:
    """Raise PolicyError for a named backend that policy does not allow."""
    allowed = ", ".join(policy.allowed_backends)
    for name in named_backends(request):
        if name not in policy.allowed_backends:
            raise PolicyError(
                f"backend {shown(name)} is not allowed on this node (policy.allowed_backends: {allowed})",
                f"use {allowed}",
            )
