"""Shares with a part in host memory (docs/oversubscription.md). Pure; loaded only for such a share.

    whole_bytes(size, scaling, device)      -> int     bytes that a share may hold on device and host together
    divided(memory, scaling, device)        -> (Amount on the device, bytes in all) of an amount for both
    require_budget(shares, node, ledger, sources)      raises CapacityError, PolicyError, RequestError
    budget_bytes(config, inventory)         -> int     host memory that may be promised

The budget counts the whole of each such share, including its device part: when other containers fill the device, all
of the share is in host memory, and there must be room for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core import constants
from ..core.constants import ENV_MEMORY, ENV_OVERSUBSCRIBE
from ..core.errors import CapacityError, PolicyError, RequestError
from ..core.model import Amount, Config, Device, Inventory, Node, Share
from ..core.quantity import amount, bytes_of, described, human
from ..core.quoting import shown_name
from ..gpu.selectors import device_name
from ..state.ledger import Ledger
from ..state.shm_abi import MAX_DEVICES

KEY = "oversubscription.host_memory"
_OURS = (ENV_OVERSUBSCRIBE, constants.ANNOTATIONS[ENV_OVERSUBSCRIBE])
_MOST_DEVICES = MAX_DEVICES // 2  # host parts are counted as devices too


def whole_bytes(size: int | None, scaling: float, device: Device) -> int:
    """Return `size` times `scaling` in whole blocks; 0 if that is not more than `size`. RequestError without a
    limit."""
    if size is None:
        raise RequestError(
            f"{ENV_OVERSUBSCRIBE}: no memory limit is requested for device {device_name(device)}, so there is no "
            "limit to exceed",
            f"set {ENV_MEMORY}",
        )
    whole = round(size * scaling)
    whole -= whole % device.granularity_bytes
    return whole if whole > size else 0


def divided(memory: Amount, scaling: float, device: Device) -> tuple[Amount, int]:
    """Divide `memory`, which covers device and host and is `scaling` times its device part. Return the device part
    and the whole, in whole blocks rounded down: limits that add up to `scaling` times the device then fit into it."""
    block = max(1, device.granularity_bytes)
    whole = bytes_of(memory, device.memory_bytes, device.granularity_bytes)
    whole -= whole % block
    part = int(whole / scaling)
    part -= part % block
    return Amount(part, None, f"{described(memory)} ({human(part)} of it on the device)", memory.foreign), whole


def budget_bytes(config: Config, inventory: Inventory) -> int:
    """Return the budget; 0: none, or the size of host memory is not known."""
    if not config.host_memory:
        return 0
    return bytes_of(amount(KEY, config.host_memory), inventory.host_memory_bytes, 1)


def _without(sources: Sequence[tuple[str, str]]) -> str:
    """Return a hint for a host without a budget, by the variable of the request."""
    from ..request.dialects import registry  # only for a refusal

    others = tuple(word.name for row in registry.SCHEDULERS for word in row.variables if word.about == registry.BEYOND)
    said = next((name for name, _ in sources if name.startswith(others) or name.endswith(_OURS)), "")
    return f"leave {shown_name(said)} out" if said else "sharing.memory_scaling to 1.0"


def require_budget(
    shares: Sequence[Share], node: Node, ledger: Ledger, sources: Sequence[tuple[str, str]] = ()
) -> None:
    """Refuse the shares of a container if they exceed the free budget. `sources`: the variables that request them."""
    asked = sum(share.virtual_bytes for share in shares)
    if not asked:
        return
    budget = budget_bytes(node.config, node.inventory)
    if not budget:
        raise PolicyError(
            f"{human(asked)} on device and host together was requested, and {KEY} gives none",
            f"set {KEY} in the node's config.yaml, or {_without(sources)}",
        )
    if len(shares) > _MOST_DEVICES:
        raise RequestError(
            f"{len(shares)} devices with memory beyond them were requested, at most {_MOST_DEVICES} are possible",
            "request fewer devices",
        )
    if ledger.blocked:  # by unreadable leases: what was promised to them is unknown
        raise CapacityError(
            "host memory of oversubscribed shares is in use by containers that gpushare does not know",
            "stop them and run `gpushare prune --assume-free`",
        )
    if ledger.host_bytes + asked > budget:
        free = max(0, budget - ledger.host_bytes)
        raise CapacityError(
            f"host memory of oversubscribed shares: {human(asked)} requested, {human(free)} free of {human(budget)} "
            f"({KEY})",
            "ask for less, or stop an oversubscribed container" if ledger.host_bytes else "ask for less",
        )
