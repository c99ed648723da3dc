"""The check of MPS: whether containers can use the daemons that were started, and what must be restarted.

FINDINGS is a table of possible findings. It is applied to each device with files of a daemon; the first finding that
applies is the device's result.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Callable, NamedTuple, Optional

from ..allocation import backends
from ..allocation.backends.mps import control as mps_control
from ..allocation.backends.mps import state as mps
from ..allocation.backends.mps import status as mps_status
from ..core import constants
from ..core.model import Device, Lease, Node
from ..gpu.selectors import device_name
from ..state import leases
from ..system import rootless
from .base import FAIL, OK, SKIP, WARN, Machine, Result, no_driver
from .state import some

_WORST = (FAIL, WARN, OK)


class Case(NamedTuple):
    """One device. `daemon`: the process that listens in its pipe directory; `found`: the content of the ready file."""

    host: Node
    device: Device
    folder: str
    daemon: Optional[mps_control.Daemon]
    found: mps.MpsState
    live: tuple[Lease, ...]

    @property
    def name(self) -> str:
        return f"GPU {device_name(self.device)}"

    @property
    def start(self) -> str:
        return f"gpushare mps start --device {device_name(self.device)}"

    @property
    def again(self) -> str:
        device = device_name(self.device)
        return f"gpushare mps stop --force --device {device}, start it again, then restart the containers that use it"

    def affected(self) -> str:
        """Names of the containers that were started with a daemon that has ended; "" if there are none."""
        uuid, state_dir = self.device.uuid, self.host.config.state_dir
        return some([constants.short(one.id) for one in mps_status.affected(self.found, uuid, self.live, state_dir)])


def _wrong_user(case: Case) -> Optional[Result]:
    if case.daemon is None or case.daemon.uid == 0:
        return None
    who = f"the daemon of {case.name} (pid {case.daemon.pid}) belongs to uid {case.daemon.uid}"
    return Result(FAIL, f"{who}, who can change its limits", f"end that daemon, then {case.start}")


def _dead(case: Case) -> Optional[Result]:
    if not case.found.was_running or case.daemon is not None:
        return None
    named = case.affected()
    also = (f"; programs get errors in {named}", f", then start {named} again") if named else ("", "")
    return Result(FAIL, f"the daemon of {case.name} (pid {case.found.pid}) has died{also[0]}", case.start + also[1])


def _not_offered(case: Case) -> Optional[Result]:
    if case.daemon is None or not case.found.problem:
        return None
    return Result(
        FAIL, f"a daemon listens for {case.name} (pid {case.daemon.pid}) whose limits are not set", case.start
    )


def _stale(case: Case) -> Optional[Result]:
    if case.daemon is not None or not case.found.problem:
        return None
    named = case.affected()
    if named:
        return Result(FAIL, f"the daemon of {case.name} is gone; programs get errors in {named}", case.start)
    remove = f"gpushare mps stop --device {device_name(case.device)}"
    return Result(WARN, f"stale {case.folder}/pipe: no process listens there", f"{case.start}, or {remove}")


def _not_listening(case: Case) -> Optional[Result]:
    if case.daemon is not None and case.daemon.pid == case.found.pid:
        return None
    if case.daemon is None:
        return Result(
            FAIL, f"the daemon of {case.name} (pid {case.found.pid}) no longer accepts connections", case.again
        )
    other = f"pid {case.daemon.pid} listens for {case.name}, and pid {case.found.pid} was given its limits"
    return Result(FAIL, other, case.again)


def _daemon_reports(case: Case) -> Optional[Result]:
    """Findings from the daemon's own status."""
    seen = mps_status.query(case.host, case.device, case.live)
    if seen.state != "running":
        return Result(FAIL, f"the daemon of {case.name}: {seen.note}", case.again)
    driver, loaded = case.found.driver_version, case.host.inventory.driver_version
    if driver != loaded:
        return Result(WARN, f"the daemon of {case.name} was started with driver {driver}, not {loaded}", case.again)
    named = case.affected()
    if named:
        return Result(
            WARN, f"the daemon of {case.name} is not the one that {named} began with", "start these containers again"
        )
    return Result(WARN, f"{case.name}: {seen.note}", "start these programs again") if seen.note else None


def _healthy(case: Case) -> Optional[Result]:
    count = len(backends.having(mps.NAME, case.live, case.device.uuid))
    containers = "1 container" if count == 1 else f"{count} containers"
    return Result(OK, f"runs on {case.name}, at most {case.found.thread_percent}%, for {containers}")


FINDINGS: tuple[Callable[[Case], Optional[Result]], ...] = (
    *(_wrong_user, _dead, _not_offered, _stale),  # the daemon cannot be used
    *(_not_listening, _daemon_reports, _healthy),  # containers can use the daemon
)


def daemons(machine: Machine) -> Result:
    """One result for all devices: the worst finding, with its hint."""
    if machine.node is None:
        return no_driver(machine)
    if os.geteuid() != 0 or rootless.is_rootless():
        return Result(SKIP, "needs root")
    host, left = machine.node, mps_status.known(machine.state_dir)
    here = {device.uuid: device for device in host.inventory.devices}
    found = [
        Result(WARN, f"{mps.directory(machine.state_dir, uuid)} is of a GPU that is gone", "gpushare mps stop")
        for uuid in left
        if uuid not in here
    ]
    live = leases.view(machine.state_dir).live if left else ()
    cases = [_case(host, here[uuid], machine.state_dir, live) for uuid in left if uuid in here]
    found += [_finding(case) for case in cases if not _is_stopped(case)]
    return _joined(found) if found else _unused(host)


def _case(host: Node, device: Device, state_dir: str, live: tuple[Lease, ...]) -> Case:
    folder = mps.directory(state_dir, device.uuid)
    daemon = mps_control.listening(f"{folder}/pipe")
    return Case(host, device, folder, daemon, mps.state(device.uuid, state_dir), live)


def _is_stopped(case: Case) -> bool:
    """Whether the daemon was stopped on purpose: neither its socket directory nor its ready file is left, and no
    container was using it."""
    left = os.path.lexists(f"{case.folder}/pipe") or os.path.lexists(f"{case.folder}/{mps.READY}")
    return case.daemon is None and not left and not case.affected()


def _finding(case: Case) -> Result:
    return next(result for result in (ask(case) for ask in FINDINGS) if result is not None)


def _joined(found: Sequence[Result]) -> Result:
    worst = min(found, key=lambda one: _WORST.index(one.result))
    same = [one.detail for one in found if one.result == worst.result]
    return Result(worst.result, some(same), worst.hint)


def _unused(host: Node) -> Result:
    if not backends.allows(host.config.policy, mps.NAME):
        return Result(OK, "not in use")
    if mps_control.program(host.inventory) is None:
        return Result(
            WARN,
            f"policy.allowed_backends has mps, and the driver in {host.inventory.files_root} has no {mps_control.NAME}",
            "install it: it is part of the driver",
        )
    return Result(WARN, "policy.allowed_backends has mps, and no GPU has a daemon", "gpushare mps start")
