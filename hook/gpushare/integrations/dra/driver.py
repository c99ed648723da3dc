"""The DRA driver's main loop: serve kubelet, and publish the node's devices in a ResourceSlice.

    run(first, state_dir, settings, hook, report)   until SIGTERM

The slice stays when the driver ends: kubelet deletes it if no driver comes back. The driver reads it again from time to
time, because kubelet or an administrator can delete it; no watch is needed for one object.

Only a driver can release a claim that is prepared: until then its pod stays in Terminating. So the driver serves
kubelet as soon as it starts, also on a node whose devices are not known, and while the API server does not answer.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple, Optional

from ...config import node
from ...core.errors import GpushareError
from ...core.model import Device, Node
from ...engines.base import Settings as Hooks
from ...system import sigterm
from .. import devicestate, grpcsocket
from ..xid import XidWatch
from . import protocol, slices
from .apiserver import Server
from .service import REGISTRATION_SOCKET, Service

XID, GONE = "gpushare.io/xid", "gpushare.io/gone"  # taints
_PUBLISH_S = 60.0  # between two reads of an unchanged slice
_RETRY_S = 5.0

Report = Callable[[str], None]


class Settings(NamedTuple):
    """Options of the command."""

    kubelet: str  # kubelet's directory, with plugins and plugins_registry
    cdi: str  # directory of CDI specifications
    interval_s: float
    nvml: str = ""  # NVML's library, for Xid errors; "": they are not watched
    ignored_xids: tuple[int, ...] = ()
    effect: str = "NoSchedule"  # of a broken device's taint


def run(
    first: Optional[Node], state_dir: str, settings: Settings, server: Server, hooks: Hooks, report: Report
) -> None:
    """Run until SIGTERM. `first`: None if the node's devices are not known yet. Raises GpushareError if the token names
    no node or kubelet's directory is not there; other failures are printed, and tried again."""
    name, uid = server.node()
    with sigterm.readable() as end, Service(server, hooks, settings.cdi, report) as service, ExitStack() as stack:
        publisher = Publisher(server, name, uid, report)
        state = _State(settings, report, stack)
        here, serves = first, False
        service.serve(f"{settings.kubelet}/plugins_registry", f"{settings.kubelet}/plugins")
        while True:
            here = node.last(state_dir) or here
            try:
                if not service.is_reachable:
                    service.serve(f"{settings.kubelet}/plugins_registry", f"{settings.kubelet}/plugins")
                    report("the sockets were removed: serving on new ones")
                if here is not None:
                    offers, taints = state.of(here)
                    service.show(here, name, offers)
                    publisher.follow(offers, taints)
                    if not serves:
                        report(f"serving {len(offers)} devices of node {name}")
                    serves = True
            except (GpushareError, OSError) as error:
                publisher.failed(str(error))
            ready = select.select([end, state.woken], [], [], settings.interval_s)[0]
            if end in ready:
                return
            if ready:
                os.read(state.woken, 4096)


class _State:
    """The offers with what the kernel shows of the devices, and the taints of broken ones."""

    def __init__(self, settings: Settings, report: Report, stack: ExitStack) -> None:
        self._effect, self._report = settings.effect, report
        self._last = dict[str, slices.Taint]()
        self.woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._xids: Optional[XidWatch] = None
        if settings.nvml:
            self._xids = XidWatch(settings.nvml, settings.ignored_xids, report, wake)
            stack.callback(self._xids.close)

    def of(self, here: Node) -> tuple[dict[str, slices.Offer], dict[str, slices.Taint]]:
        offers = slices.devices(here)
        root = devicestate.visible(here.config.driver_root)
        devices = [one.device for one in offers.values()]
        roots, nodes = devicestate.pcie_roots(root, devices), devicestate.numa_nodes(root, devices)
        offers = {
            name: one._replace(pcie_root=roots.get(one.device.bus_id, ""), numa=nodes[one.device.bus_id])
            for name, one in offers.items()
        }
        taints = self._taints(root, devices)
        for uuid in {*taints, *self._last}:
            if taints.get(uuid) != self._last.get(uuid):
                taint = taints.get(uuid)
                self._report(f"device {uuid}: " + (f"taint {taint.key}={taint.value}" if taint else "is back"))
        self._last = taints
        return offers, taints

    def _taints(self, root: str, devices: list[Device]) -> dict[str, slices.Taint]:
        xids = self._xids.errors() if self._xids else {}
        found = {}
        for one in devices:
            xid = xids.get(one.parent or one.uuid)
            if xid is not None:
                found[one.uuid] = slices.Taint(XID, str(xid), self._effect)
        found.update({uuid: slices.Taint(GONE, "", self._effect) for uuid in devicestate.gone(root, devices)})
        return found


def require_answer(kubelet: str) -> None:
    """Raise GpushareError unless a driver answers kubelet."""
    path = f"{kubelet}/plugins_registry/{REGISTRATION_SOCKET}"
    grpcsocket.require_answer(path, f"/{protocol.REGISTRATION}/GetInfo")


class Publisher:
    """Keeps the slice equal to the offers."""

    def __init__(self, server: Server, name: str, uid: str, report: Report) -> None:
        self._server, self._name, self._uid, self._report = server, name, uid, report
        self._published: Optional[tuple[Any, Any]] = None  # offers and taints
        self._stores_taints = True
        self._stored: Any = None  # the spec as the API server wrote it, which can lack fields
        self._next = 0.0
        self._last_line = ""

    def follow(self, offers: dict[str, slices.Offer], taints: Optional[dict[str, slices.Taint]] = None) -> None:
        if (offers, taints or {}) != self._published or time.monotonic() >= self._next:
            self.publish(offers, taints)

    def failed(self, line: str) -> None:
        self._next = time.monotonic() + _RETRY_S
        self._say(line)

    def publish(self, offers: dict[str, slices.Offer], taints: Optional[dict[str, slices.Taint]] = None) -> None:
        """Create the slice, or update it under the next generation of the pool if it differs. Where the API server
        stores no taints, the slice is without the broken devices."""
        given = (offers, taints or {})
        if taints and (not self._stores_taints or len(offers) > slices.MAX_WITH_TAINTS):
            offers, taints = slices.untainted(offers, taints), None
        version = self._server.version()
        old = self._server.slice(slices.slice_name(self._name))
        generation = old["spec"]["pool"]["generation"] if old else 1
        wanted = slices.slice_of(self._name, self._uid, offers, generation, version, taints)
        if old is not None:
            slices.keep_times(wanted, old)
        unchanged = given == self._published and old is not None and old["spec"] == self._stored
        if old is None or not (unchanged or old["spec"] == wanted["spec"]):
            if old is not None:
                wanted["spec"]["pool"]["generation"] = generation + 1
            stored = self._server.write(wanted, old)
            self._report(f"published {len(offers)} devices ({slices.GROUP}/{version})")
            self._stored = stored["spec"]
            if taints and not slices.has_taints(stored):
                self._stores_taints = False
                self._report("the API server dropped taints: broken devices are left out; enable DRADeviceTaints")
                self.publish(*given)
                return
            dropped = slices.consumable(stored)
            if dropped:
                self._say(f"{dropped}; enable the feature gate DRAConsumableCapacity")
        self._published, self._next = given, time.monotonic() + _PUBLISH_S

    def _say(self, line: str) -> None:
        """Print a line, unless it equals the previous one."""
        if line != self._last_line:
            self._last_line = line
            self._report(line)
