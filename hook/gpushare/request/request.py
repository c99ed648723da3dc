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

from typing import Any, Optional

from ..core import constants
from ..core.errors import RequestError
from ..core.model import Bundle, Inventory, Node, Request
from ..core.quoting import setting, shown_name
from ..gpu.drivernodes import of_cdi_device
from ..gpu.selectors import find_devices
from . import candidates, deny_devices, merge, policy, speckeys
from .dialects import cdi_devices, gpushare_env, nvidia, nvidia_driver_env, registry
from .policy import Scene

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


def _annotated(bundle: Bundle) -> bool:
    """Return whether an annotation requests something. Those of a pod do so for each of its containers."""
    asking = (
        key for key in bundle.annotations if constants.ANNOTATION_PREFIX in key and key != constants.APPLIED_ANNOTATION
    )
    return next(asking, "") != "" or registry.any_annotation(bundle.annotations)


def _scene(bundle: Bundle, node: Node, with_injected: bool = False, on_host: bool = False) -> Scene:
    matches = registry.matches(bundle.env, bundle.annotations, bundle.container_name)
    return Scene(bundle, node, policy.accepts(bundle, node.config.policy), matches, with_injected, on_host)


def resolve(bundle: Bundle, node: Node, with_injected: bool = False, on_host: bool = False) -> Optional[Request]:
    """Return the container's Request. The sandbox container of a pod has none, whatever it inherited."""
    if bundle.container_type == "sandbox":
        if bundle.injected:
            raise RequestError(
                f"config.json of a pod's sandbox has {bundle.injected}",
                "ask for devices in a container of the pod, not in the pod",
            )
        return None
    scene = _scene(bundle, node, with_injected, on_host)
    if bundle.claims[0] and _annotated(bundle):
        policy.refuse_claims(bundle)
    own = candidates.DIALECTS["own"](bundle, node.inventory)
    if own is not None:
        policy.refuse_unaccepted(own, scene)
    larger: dict[str, str] = {}
    if own is not None and scene.matches and not scene.accepts.widening:
        # an image can set variables, so one replaces a scheduler's limit by a larger one only if policy accepts that
        theirs = candidates.collect(own, scene, merge.OWN_LIMITS)._replace(refused=())
        larger = merge.larger(own, merge.merged(theirs, node), node)
    found = candidates.collect(own, scene, larger)
    request = merge.merged(found, node)
    if request is not None:
        why = "policy.accept.widening does not accept more than another scheduler's limit"
        notes = (f"{setting(*pair)}: {why}" for pair in larger.items())
        request = request._replace(uid=bundle.uid, shm=bundle.shm, ignored=(*request.ignored, *notes))
        gpushare_env.refuse_unknown(bundle)
    request = policy.applied(request, own, scene)
    if request is None:
        return None
    return nvidia_driver_env.with_settings(request, bundle, node.inventory, scene.accepts)


def unused(bundle: Bundle, node: Node) -> tuple[str, ...]:
    """Return a line for each value of another scheduler that has no effect, if `resolve` is None (explain)."""
    if bundle.container_type == "sandbox":
        return ()
    scene = _scene(bundle, node)
    return candidates.unused(candidates.DIALECTS["own"](bundle, node.inventory), scene) if scene.matches else ()


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
