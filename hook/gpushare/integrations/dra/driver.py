"""The DRA driver's main loop: serve kubelet, and publish the node's devices in a ResourceSlice.

    run(first, state_dir, settings, hook, report)   until SIGTERM

The slice stays when the driver ends: kubelet deletes it if no driver comes back. The driver reads it again from time to
time, because kubelet or an administrator can delete it; no watch is needed for one object.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

from ...config import node
from ...core.errors import GpushareError
from ...core.model import Node
from ...engines.base import Settings as Hooks
from ...system import sigterm
from . import slices
from .apiserver import Server
from .service import Service

_PUBLISH_S = 60.0  # between two reads of an unchanged slice
_RETRY_S = 5.0

Report = Callable[[str], None]


class Settings(NamedTuple):
    """Options of the command."""

    kubelet: str  # kubelet's directory, with plugins and plugins_registry
    cdi: str  # directory of CDI specifications
    interval_s: float


def run(first: Node, state_dir: str, settings: Settings, server: Server, hooks: Hooks, report: Report) -> None:
    """Run until SIGTERM. Raises GpushareError if the devices cannot be published at the start; later failures are
    printed, and tried again."""
    name, uid = server.node()
    with sigterm.readable() as end, Service(server, hooks, settings.cdi, report) as service:
        publisher = Publisher(server, name, uid, report)
        here: Node = first
        offers = slices.devices(here)
        service.show(here, name, offers)
        publisher.publish(offers)
        service.serve(f"{settings.kubelet}/plugins_registry", f"{settings.kubelet}/plugins")
        report(f"serving {len(offers)} devices of node {name}")
        while not select.select([end], [], [], settings.interval_s)[0]:
            here = node.last(state_dir) or here
            try:
                offers = slices.devices(here)
                service.show(here, name, offers)
                if not service.is_reachable:
                    service.serve(f"{settings.kubelet}/plugins_registry", f"{settings.kubelet}/plugins")
                    report("the sockets were removed: serving on new ones")
                publisher.follow(offers)
            except (GpushareError, OSError) as error:
                publisher.failed(str(error))


class Publisher:
    """Keeps the slice equal to the offers."""

    def __init__(self, server: Server, name: str, uid: str, report: Report) -> None:
        self._server, self._name, self._uid, self._report = server, name, uid, report
        self._published: Optional[dict[str, slices.Offer]] = None
        self._stored: Any = None  # the spec as the API server wrote it, which can lack fields
        self._next = 0.0
        self._last_line = ""

    def follow(self, offers: dict[str, slices.Offer]) -> None:
        if offers != self._published or time.monotonic() >= self._next:
            self.publish(offers)

    def failed(self, line: str) -> None:
        self._next = time.monotonic() + _RETRY_S
        self._say(line)

    def publish(self, offers: dict[str, slices.Offer]) -> None:
        """Create the slice, or update it under the next generation of the pool if it differs."""
        version = self._server.version()
        old = self._server.slice(slices.slice_name(self._name))
        generation = old["spec"]["pool"]["generation"] if old else 1
        wanted = slices.slice_of(self._name, self._uid, offers, generation, version)
        unchanged = offers == self._published and old is not None and old["spec"] == self._stored
        if old is None or not (unchanged or old["spec"] == wanted["spec"]):
            if old is not None:
                wanted["spec"]["pool"]["generation"] = generation + 1
            stored = self._server.write(wanted, old)
            self._report(f"published {len(offers)} devices ({slices.GROUP}/{version})")
            self._stored = stored["spec"]
            dropped = slices.consumable(stored)
            if dropped:
                self._say(f"{dropped}; enable the feature gate DRAConsumableCapacity")
        self._published, self._next = offers, time.monotonic() + _PUBLISH_S

    def _say(self, line: str) -> None:
        """Print a line, unless it equals the previous one."""
        if line != self._last_line:
            self._last_line = line
            self._report(line)
