"""A claim's allocated devices, and its CDI specification. Has no side effects.

    shares_of(claim, version, pool, offers)      -> [ClaimShare]     raises RequestError, DeviceError
    document(uid, shares, node, settings, secret) -> the CDI specification
    consumed(document)                           -> [(uuid, bytes, percent)]   of a specification on disk
    refuse_overcommit(shares, offers, others)    raise CapacityError for more than a device has

Each allocated device is a CDI device, because a container can name one request of a claim. It sets a variable
(request/dialects/claims.py); the specification adds gpushare's hooks once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from ...core import constants
from ...core.errors import CapacityError, DeviceError, RequestError
from ...core.model import Device, Node
from ...core.quantity import human
from ...core.quoting import shown
from ...engines import hookfiles
from ...engines.base import Settings
from ...gpu.drivernodes import of_cdi_device
from ..cdi import described
from . import DRIVER, parameters
from .slices import COMPUTE, MEMORY, Offer, quantity

KIND = "gpushare.io/claim"
_VERSION = "0.5.0"  # names that begin with a digit, and hostPath
_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}")


class ClaimShare(NamedTuple):
    """One allocated device of a claim."""

    number: int
    request: str  # name of the request, without the subrequest
    name: str  # of the device, in the slice
    share_id: str
    device: Device
    memory: int
    compute: int  # 0: no limit
    memory_limit: int
    once: tuple[tuple[str, str], ...]  # (key of the variable, value)

    @property
    def text(self) -> str:
        """The value of the variable."""
        size = f"{self.memory}..{self.memory_limit}" if self.memory_limit > self.memory else str(self.memory)
        compute = [f"compute={self.compute}"] if self.compute else []
        return ";".join([self.device.uuid, f"memory={size}", *compute, *(f"{key}={text}" for key, text in self.once)])


def checked_uid(uid: str) -> str:
    """The uid, which becomes part of a path. Raises RequestError."""
    if not _UID.fullmatch(uid):
        raise RequestError(f"{shown(uid)} is not the uid of a claim", "this call is kubelet's")
    return uid


def _parameters(where: str, allocation: dict[str, Any], request: str) -> dict[str, str]:
    """The parameters for a request: those of the DeviceClass first, and the claim's override them."""
    found: dict[str, str] = {}
    entries = allocation.get("config") or []
    for source in ("FromClass", "FromClaim"):
        for entry in entries:
            opaque = entry.get("opaque") or {}
            names = entry.get("requests") or []
            if entry.get("source") != source or opaque.get("driver") != DRIVER:
                continue
            if not names or request in names or request.partition("/")[0] in names:
                found.update(parameters.checked(where, opaque.get("parameters")))
    return found


def shares_of(claim: dict[str, Any], pool: str, offers: dict[str, Offer]) -> list[ClaimShare]:
    """The devices of this node that the scheduler allocated to the claim. A result without consumed capacity is of an
    API server without consumable capacity: all of the device that policy allows."""
    where = f"claim {claim['metadata'].get('namespace', '')}/{claim['metadata'].get('name', '')}"
    allocation = ((claim.get("status") or {}).get("allocation") or {}).get("devices")
    if not allocation:
        raise RequestError(f"{where} is not allocated", "kubelet tries again")
    found: list[ClaimShare] = []
    for result in allocation.get("results") or []:
        if result["driver"] != DRIVER:
            continue
        if result.get("adminAccess"):
            raise RequestError(f"{where} requests adminAccess, which gpushare does not grant", "leave out adminAccess")
        if result["pool"] != pool:
            raise RequestError(
                f"{where} has a device of pool {shown(result['pool'])}, and this is {shown(pool)}", "delete the pod"
            )
        offer = offers.get(result["device"])
        if offer is None:
            raise DeviceError(f"{where}: device {shown(result['device'])} is not on this node", "delete the pod")
        consumed = {
            key.rpartition("/")[2]: quantity(str(text)) for key, text in (result.get("consumedCapacity") or {}).items()
        }
        memory = consumed.get(MEMORY, offer.largest)
        compute = consumed.get(COMPUTE, 0) if consumed else min(100, offer.compute, offer.most_percent)
        if not 0 < memory <= offer.memory or not 0 <= compute <= 100:
            raise RequestError(
                f"{where}: {human(memory)} and {compute} % of device {shown(result['device'])} cannot be given",
                "delete the pod",
            )
        given = _parameters(where, allocation, result["request"])
        limit = quantity(given["memoryLimit"]) if "memoryLimit" in given else memory
        if limit < memory:
            raise RequestError(
                f"{where}: memoryLimit is {shown(given['memoryLimit'])}, below the {human(memory)} of the claim",
                "raise it",
            )
        keys = {"computeMode": "compute-mode", "priority": "priority"}
        once = tuple((word, given[key]) for key, word in keys.items() if key in given)
        request = result["request"].partition("/")[0]
        found.append(
            ClaimShare(
                len(found),
                request,
                result["device"],
                result.get("shareID") or "",
                offer.device,
                memory,
                compute,
                limit,
                once,
            )
        )
    if not found:
        raise RequestError(f"{where} has no device of {DRIVER}", "this call is kubelet's")
    return found


def cdi_name(uid: str, number: int) -> str:
    return f"{uid}-{number}"


def variable(uid: str, number: int, secret: str) -> str:
    """`secret`: of this claim; no other pod can name the variable, although it may know the uid."""
    return constants.ENV_CLAIM_PREFIX + re.sub(r"\W", "_", f"{cdi_name(uid, number)}_{secret}")


def document(uid: str, shares: Iterable[ClaimShare], node: Node, settings: Settings, secret: str) -> dict[str, Any]:
    """The CDI specification. An engine applies the hooks once, however many of the devices a container has."""
    devices = []
    for share in shares:
        edits: dict[str, Any] = {"env": [f"{variable(uid, share.number, secret)}={share.text}"]}
        nodes = [described(one) for one in of_cdi_device(node.inventory, share.device)]
        devices.append(
            {
                "name": cdi_name(uid, share.number),
                "containerEdits": {**edits, **({"deviceNodes": nodes} if nodes else {})},
            }
        )
    hooks = [{"hookName": stage, **hookfiles.entry_of(settings, stage)} for stage in hookfiles.STAGES]
    return {"cdiVersion": _VERSION, "kind": KIND, "devices": devices, "containerEdits": {"hooks": hooks}}


def texts(specification: dict[str, Any]) -> list[list[str]]:
    """The values of each device's variables in a specification of `document`."""
    return [[text.partition("=")[2] for text in device["containerEdits"]["env"]] for device in specification["devices"]]


def consumed(specification: dict[str, Any]) -> list[tuple[str, int, int]]:
    """(uuid, bytes, percent) of each device in a specification of `document`."""
    found: list[tuple[str, int, int]] = []
    for device in specification["devices"]:
        uuid, *items = device["containerEdits"]["env"][0].partition("=")[2].split(";")
        fields = dict(item.partition("=")[::2] for item in items)
        found.append((uuid, int(fields["memory"].partition("..")[0]), int(fields.get("compute", 0))))
    return found


def refuse_overcommit(
    shares: Iterable[ClaimShare], offers: dict[str, Offer], others: Iterable[tuple[str, int, int]]
) -> None:
    """Raise CapacityError if this claim and the other prepared ones exceed a device. The scheduler prevents that; a
    driver is the last that can notice."""
    shares, taken = list(shares), list(others)
    for offer in offers.values():
        mine = [(share.memory, share.compute) for share in shares if share.device.uuid == offer.device.uuid]
        all_of = mine + [(memory, compute) for uuid, memory, compute in taken if uuid == offer.device.uuid]
        memory, compute = sum(one for one, _ in all_of), sum(one for _, one in all_of)
        if mine and (memory > offer.memory or compute > offer.compute):
            raise CapacityError(
                f"the claims of {offer.device.uuid} add up to {human(memory)} and {compute} %, and it has "
                f"{human(offer.memory)} and {offer.compute} %",
                "delete the pod; the scheduler chooses again",
            )
