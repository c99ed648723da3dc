"""The ResourceSlice of a node. Has no side effects.

    devices(node)                             -> {name: Offer}
    slice_of(node_name, node_uid, offers, generation, version, taints) -> the object for this version of the API
    untainted(offers, taints)                 -> the offers for an API server without taints
    quantity(text)                            -> int      "4Gi" -> 4294967296

A device can be allocated several times (KEP-5075). Its memory and its compute are capacity that allocations consume.
One slice has all devices: a node has fewer than the 128 that the API server accepts.

Sources: resource.k8s.io/v1 of Kubernetes' API reference; v1beta2 has the same fields, v1beta1 has those of a device
below `basic`.
"""

from __future__ import annotations

import hashlib
import re
from fractions import Fraction
from typing import Any, NamedTuple, Optional

from ...allocation.admission import most_bytes
from ...core.errors import ConfigError, RequestError
from ...core.model import Device, Node
from ...core.quantity import UNITS, unrounded
from ...core.quoting import shown
from ...gpu.selectors import is_among, usable_devices
from ...state.ledger import capacity_bytes, capacity_percent, rule_of
from . import DRIVER

GROUP = "resource.k8s.io"
VERSIONS = ("v1", "v1beta2", "v1beta1")  # the newest first
MEMORY, COMPUTE = "memory", "compute"
MAX_DEVICES = 128
MAX_WITH_TAINTS = 64  # devices of a slice in which one has a taint
STANDARD = "resource.kubernetes.io/"  # attributes that several drivers have, so that one constraint applies to all
_MAX_TEXT = 64  # of an attribute
_SMALL: dict[str, Fraction] = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "E": Fraction(10**18),
    "Ei": Fraction(1 << 60),
}
_QUANTITY = re.compile(r"\+?([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE]([+-]?[0-9]{1,2})|([numkMGTPE]|[KMGTPE]i)?)")
_NAME = re.compile(r"[^a-z0-9-]+")
_MAX_DIGITS = 40
_MAX_SLICE_NAME = 253  # characters: a DNS subdomain


class Offer(NamedTuple):
    """One device. `memory` in bytes and `compute` in percent: what all allocations together can consume. A request is
    rounded up to a multiple of `step`. `share`: the size of an equal share, the only possible request; 0: any size.
    `most` and `most_percent`: what policy allows one container; 0 and 100: all."""

    device: Device
    memory: int
    compute: int
    step: int
    share: int = 0
    most: int = 0
    most_percent: int = 100
    driver: str = ""  # versions of the driver, and of CUDA
    cuda: str = ""
    pcie_root: str = ""
    numa: int = -1  # -1: unknown

    @property
    def largest(self) -> int:
        """The most memory that one claim can have, in whole blocks."""
        sizes = (self.memory, self.device.memory_bytes, self.most or self.memory)
        return min(sizes) // self.step * self.step


class Taint(NamedTuple):
    """Keeps claims off a device: `effect` NoSchedule, or NoExecute, which also ends the pods that have it."""

    key: str
    value: str
    effect: str


def quantity(text: str) -> int:
    """A Kubernetes quantity, rounded up. Raises RequestError."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise RequestError(f"{shown(text)} is not a quantity of Kubernetes", "write 4Gi or 30")
    number, exponent, unit = match.groups()
    if len(number) > _MAX_DIGITS:
        raise RequestError(f"{shown(text)} has more than {_MAX_DIGITS} digits", "write 4Gi or 30")
    scale = _SMALL.get(unit or "") or Fraction(UNITS[unit or ""])
    value = Fraction(number) * Fraction(10) ** int(exponent or 0) * scale
    return int(-(-value.numerator // value.denominator))


def text_of(size: int) -> str:
    """A size as the API server writes it: the largest binary unit that divides it."""
    return unrounded(size) if size else "0"


def device_name(device: Device) -> str:
    """The uuid as a DNS label, so that the name stays with the device."""
    return _NAME.sub("-", device.uuid.lower()).strip("-")[:63].rstrip("-")


def devices(node: Node) -> dict[str, Offer]:
    """The devices that policy allows, in PCI order. Raises ConfigError for more than one slice can have. A device of
    unknown size is left out, because its free memory is not known."""
    policy, host = node.config.policy, node.inventory
    allowed = policy.allowed_devices
    found = {}
    for device in usable_devices(node.inventory):
        memory, rule = capacity_bytes(device, node.config), rule_of(device, node.config)
        if not memory or (allowed and not is_among(device, allowed)):
            continue
        share = 0
        if rule is not None:
            share = memory // rule.split_count // device.granularity_bytes * device.granularity_bytes
        found[device_name(device)] = Offer(
            device,
            memory,
            capacity_percent(device, node.config),
            device.granularity_bytes,
            share,
            most_bytes(device, policy) if policy.max_memory else 0,
            policy.max_compute_percent,
            host.driver_version,
            host.cuda_version,
        )
    if len(found) > MAX_DEVICES:
        raise ConfigError(
            f"{len(found)} devices, and a ResourceSlice has at most {MAX_DEVICES}", "set policy.allowed_devices"
        )
    return found


def _version(text: str) -> str:
    """A version as the API server accepts it: three numbers without leading zeros, "535.261.3"; "" for other texts."""
    parts = text.split(".")
    if not all(part.isascii() and part.isdigit() for part in parts) or len(parts) > 3:
        return ""
    return ".".join(str(int(part)) for part in [*parts, "0", "0"][:3])


def untainted(offers: dict[str, Offer], taints: dict[str, Taint]) -> dict[str, Offer]:
    """The offers without tainted devices."""
    return {name: one for name, one in offers.items() if one.device.uuid not in taints}


def _capacity(value: int, default: int, least: int, step: int, most: int) -> dict[str, Any]:
    texts = {"min": text_of(least), "max": text_of(most), "step": text_of(step)}
    return {"value": text_of(value), "requestPolicy": {"default": text_of(default), "validRange": texts}}


def _device(name: str, offer: Offer, version: str, taint: Optional[Taint]) -> dict[str, Any]:
    device = offer.device
    texts = {
        "uuid": device.uuid,
        "model": device.model,
        "brand": device.brand,
        "profile": device.profile,
        "parentUUID": device.parent,
        STANDARD + "pciBusID": device.bus_id,
        STANDARD + "pcieRoot": offer.pcie_root,
    }
    attributes: dict[str, Any] = {key: {"string": text[:_MAX_TEXT]} for key, text in texts.items() if text}
    versions = {"driverVersion": offer.driver, "cudaDriverVersion": offer.cuda, "cudaComputeCapability": device.arch}
    attributes.update({key: {"version": _version(text)} for key, text in versions.items() if _version(text)})
    if offer.numa >= 0:
        attributes[STANDARD + "numaNode"] = {"int": offer.numa}
    attributes["index"] = {"int": device.index}
    attributes["mig"] = {"bool": bool(device.parent)}
    memory = _capacity(offer.memory, offer.largest, offer.step, offer.step, offer.largest)
    if offer.share:
        memory["requestPolicy"] = {"default": text_of(offer.share), "validValues": [text_of(offer.share)]}
    percent = min(100, offer.compute, offer.most_percent)
    # Where policy limits compute, it refuses a container without a compute limit
    least, default = (0, 0) if offer.most_percent >= 100 else (1, percent)
    fields = {
        "attributes": attributes,
        "capacity": {MEMORY: memory, COMPUTE: _capacity(offer.compute, default, least, 1, percent)},
        "allowMultipleAllocations": True,
        **({"taints": [taint._asdict()]} if taint else {}),
    }
    return {"name": name, **({"basic": fields} if version == "v1beta1" else fields)}


def slice_name(node_name: str) -> str:
    """The name of the node's slice; a long one of a node ends in a checksum."""
    name = f"{node_name}-{DRIVER}"
    if len(name) <= _MAX_SLICE_NAME:
        return name
    digest = hashlib.sha256(node_name.encode()).hexdigest()[:8]
    return f"{node_name[: _MAX_SLICE_NAME - len(DRIVER) - len(digest) - 2].rstrip('.-')}-{digest}-{DRIVER}"


def slice_of(
    node_name: str,
    node_uid: str,
    offers: dict[str, Offer],
    generation: int,
    version: str,
    taints: Optional[dict[str, Taint]] = None,
) -> dict[str, Any]:
    """The object. The node owns it, so it goes when the node does. `taints`: by uuid."""
    tainted = taints or {}
    owner = {"apiVersion": "v1", "kind": "Node", "name": node_name, "uid": node_uid, "controller": True}
    return {
        "apiVersion": f"{GROUP}/{version}",
        "kind": "ResourceSlice",
        "metadata": {"name": slice_name(node_name), "ownerReferences": [owner]},
        "spec": {
            "driver": DRIVER,
            "nodeName": node_name,
            "pool": {"name": node_name, "generation": generation, "resourceSliceCount": 1},
            "devices": [
                _device(name, offer, version, tainted.get(offer.device.uuid)) for name, offer in offers.items()
            ],
        },
    }


def consumable(found: dict[str, Any]) -> Optional[str]:
    """Why the API server stored a slice of devices that can be allocated once only; None if it stored all fields."""
    for device in found["spec"].get("devices", []):
        if not device.get("basic", device).get("allowMultipleAllocations"):
            return "the API server dropped allowMultipleAllocations: a claim gets a whole device"
    return None


def _taints(found: dict[str, Any]) -> dict[str, Any]:
    """{name of the device: its taints} in a slice."""
    return {one["name"]: one.get("basic", one).get("taints") or [] for one in found["spec"].get("devices", [])}


def has_taints(found: dict[str, Any]) -> bool:
    return any(_taints(found).values())


def keep_times(wanted: dict[str, Any], old: dict[str, Any]) -> None:
    """Give taints of `wanted` the time at which the API server first stored them."""
    before = {
        (name, *(one[key] for key in Taint._fields)): one["timeAdded"]
        for name, some in _taints(old).items()
        for one in some
        if "timeAdded" in one
    }
    for name, some in _taints(wanted).items():
        for one in some:
            time = before.get((name, *(one[key] for key in Taint._fields)))
            one.update({"timeAdded": time} if time else {})
