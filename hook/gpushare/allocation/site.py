"""What a backend is asked about."""

from __future__ import annotations

from typing import NamedTuple

from ..core.model import Device, Node, Request
from ..state.ledger import Ledger


class Site(NamedTuple):
    """One device that one container may get."""

    device: Device
    request: Request
    node: Node
    ledger: Ledger
