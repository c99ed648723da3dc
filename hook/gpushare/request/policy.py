"""Apply the configuration's `policy` to one container (start path). Pure.

    accepted(who, bundle)             -> bool    who: always | privileged | never
    refuse_unaccepted(mine, bundle, policy)      GPUSHARE_* requests that the node does not accept
    without_widening(request, bundle, policy) -> Request     drop what variables may not add to a limit
    refuse_injected(bundle, policy)              devices that other software added to config.json
    refuse_unlimited(bundle, config)             the same if limits are required
    refuse_unlisted(request, bundle, policy)     a privileged container without an entry
    refuse_claims(bundle)                        annotations of a CRI where none is configured
    listed(bundle, policy)            -> bool    whether a container has an entry in policy.privileged_containers
    pod_wide(request, bundle)         -> str     the sandbox, if an annotation for the whole pod was used
    refuse_second(request, bundle, live)         a second container of a pod with that annotation
    accepted_nvidia(bundle, policy, limited) -> Bundle       without NVIDIA requests that policy refuses

They raise PolicyError with the key of config.yaml.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..core import constants
from ..core.errors import PolicyError, RequestError
from ..core.model import Bundle, Config, Lease, Policy, Request
from ..core.quoting import setting, shown, shown_name
from . import oci
from .dialects import nvidia, registry


def accepted(who: str, bundle: Bundle) -> bool:
    return who == "always" or (who == "privileged" and bundle.privileged)


def refuse_unaccepted(mine: Request, bundle: Bundle, policy: Policy) -> None:
    """Refuse a request that is not accepted. Ignoring it could lift a limit."""
    for name, value in mine.sources:
        is_variable = name in constants.ANNOTATIONS or name.startswith(constants.ENV_CDI_PREFIX)
        if not accepted(policy.accept_env if is_variable else policy.accept_annotations, bundle):
            key = "env" if is_variable else "annotations"
            raise PolicyError(
                f"{setting(name, value)}: requests in {key} are not accepted on this node",
                f"set policy.accept.{key} in the node's config.yaml, or leave the name out",
            )
        if policy.annotations == "scoped" and name.startswith(constants.ANNOTATION_PREFIX):
            scoped = f"{bundle.container_name or '<container>'}.{name}"
            raise PolicyError(
                f"{setting(name, value)}: only annotations for one container are accepted on this node",
                f"write {shown_name(scoped)}, or set policy.annotations: any",
            )


def _injected(bundle: Bundle, policy: Policy) -> str:
    """Return the device that config.json names; "" if none. A rule alone does not count if an entry of
    policy.privileged_containers allows it; otherwise deny_devices.py removes it."""
    return "" if not bundle.minors and listed(bundle, policy) else bundle.injected


# field of Request that widens a limit -> our variable, its default
_MORE: dict[str, tuple[str, Any]] = {
    "compute_mode": (constants.ENV_COMPUTE_MODE, "hard"),
    "priority": (constants.ENV_PRIORITY, 0),
    "oversubscribe": (constants.ENV_OVERSUBSCRIBE, False),
    "scalings": (constants.ENV_OVERSUBSCRIBE, ()),
}


def without_widening(request: Request, bundle: Bundle, policy: Policy) -> Request:
    """Return `request` without what variables add to its limits, if policy does not accept that. This is not an error:
    an image may have set them, and the user's limit holds in any case."""
    if accepted(policy.accept_widening, bundle):
        return request
    fields: dict[str, Any] = {}
    ignored = []
    for field, (variable, least) in _MORE.items():
        said = [(name, value) for name, value in request.sources if name == variable]
        key = constants.ANNOTATIONS[variable]
        annotated = any(name.endswith(key) or registry.is_annotation(name) for name, _ in request.sources)
        if getattr(request, field) == least or (annotated and not said):
            continue
        fields[field] = least
        shown_as = setting(*said[0]) if said else f"{field} of {request.dialect}"
        ignored.append(f"{shown_as}: policy.accept.widening does not accept it")
    return request._replace(ignored=(*request.ignored, *ignored), **fields)


def refuse_injected(bundle: Bundle, policy: Policy) -> None:
    """Refuse devices that only another tool added. They would give a whole GPU without a limit."""
    found = _injected(bundle, policy)
    if found and not accepted(policy.accept_cdi, bundle):
        raise PolicyError(
            f"config.json has {found}: devices that other software puts there are not accepted on this node",
            f"request devices with {constants.ENV_DEVICES}, or set policy.accept.cdi in the node's config.yaml",
        )


def refuse_unlimited(bundle: Bundle, config: Config) -> None:
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


def _entry_of(bundle: Bundle) -> str:
    """Return the container's name in the configuration: <namespace>/<container> in a pod, else its id."""
    return oci.pod_entry(bundle.annotations) or bundle.id


def listed(bundle: Bundle, policy: Policy) -> bool:
    """Return whether policy.privileged_containers lists this container; "*" lists every privileged one."""
    if bundle.sys_admin and "*" in policy.privileged_containers:
        return True
    if _fits(bundle.claimed_entry, policy):
        refuse_claims(bundle)
    return _fits(_entry_of(bundle), policy)


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


def refuse_unlisted(request: Request, bundle: Bundle, policy: Policy) -> None:
    if bundle.privileged and not listed(bundle, policy):
        name, value = request.sources[0]
        raise PolicyError(
            f"{setting(name, value)}: this container is privileged (CAP_SYS_ADMIN in the host's user namespace), and "
            "not among policy.privileged_containers",
            f"add {shown(_entry_of(bundle))} there in the node's config.yaml, which lets it undo limits, or run it "
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


def accepted_nvidia(bundle: Bundle, policy: Policy, limited: bool) -> Bundle:
    """Return the bundle without NVIDIA requests that policy does not accept. That is no error: every CUDA image has
    them. `limited`: the container has a limit by GPUSHARE_*."""
    if not accepted(policy.accept_env, bundle) or (policy.nvidia_visible_devices == "with_limit" and not limited):
        bundle = bundle._replace(env=tuple(pair for pair in bundle.env if pair[0] != nvidia.ENV_DEVICES))
    return bundle if accepted(policy.accept_volume_mounts, bundle) else bundle._replace(volumes=())


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
