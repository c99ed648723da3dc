"""gpushare agent."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Optional

import click

from ..config import node
from ..core import constants
from ..core.errors import GpushareError
from ..core.model import Config, Lease
from ..gpu import driverfiles, inventory
from ..monitor import eviction
from ..state import agentlock, leases, log, storage
from ..system import sigterm
from .options import Paths, with_interval, with_no_color
from .output import write_now

if TYPE_CHECKING:
    from ..monitor import suspending

_AGAIN_S = 30.0  # until configuration, driver and devices are read again: they can change, and lack at first


@click.command()
@with_interval(0.1, "Time between two searches for containers that wait.")
@with_no_color
@click.pass_obj
def agent(paths: Paths, interval: float) -> int:
    """Take back lent memory, suspend containers (experimental).

    With policy.lending evict, containers borrow memory above their request while this command runs. When another
    container needs memory of its own request and the device is full, the agent kills the container that is furthest
    above its request, and writes a line to standard error and to log.decisions. With policy.lending suspend, it
    suspends that container where the driver can. With policy.suspend.idle, it suspends containers that make no call of
    CUDA for others that need their memory, and resumes them when they call. It runs until SIGTERM; then lending stops.
    """
    storage.prepare(paths.state_dir)
    config = node.load_config_only(*paths)
    lock = agentlock.take(paths.state_dir)  # until this process ends
    suspender: Optional[suspending.Suspender] = None
    again_s, why = 0.0, ""

    def take_back(lease: Lease) -> bool:
        return config.policy.lending == constants.SUSPEND and suspender is not None and suspender.take_back(lease)

    def meanwhile() -> None:
        """Do not let containers wait for memory that others borrowed until the driver has moved another one's."""
        with suppress(GpushareError):
            taking.tick()

    taking = eviction.Agent(paths.state_dir, config.log, "", log.to_stderr, take_back)
    with sigterm.readable() as end:
        write_now(f"lending memory of containers in {paths.state_dir}")
        said = ""
        while not select.select([end], [], [], interval)[0]:
            line = ""
            try:
                lock = agentlock.kept(lock, paths.state_dir)
                seen = leases.view(paths.state_dir)
                if time.monotonic() >= again_s:
                    again_s = time.monotonic() + _AGAIN_S
                    config = node.load_config_only(*paths)
                    taking.library = _nvml(config)
                    if _suspends(config) or any(share.phase for lease in seen.live for share in lease.shares):
                        suspender, why = _suspender(paths, config, suspender, meanwhile, why)
                taking.tick(seen)
                if suspender is not None:
                    suspender.tick(seen)
            except GpushareError as error:
                line = log.line_of(error)[0]
            if line and line != said:
                log.to_stderr(line)
            said = line
        taking.close()
    return 0


def _suspends(config: Config) -> bool:
    return bool(config.policy.suspend_idle_s) or config.policy.lending == constants.SUSPEND


def _nvml(config: Config) -> str:
    """Return the path of NVML; "" if no driver is loaded: then containers' own numbers are all there is."""
    try:
        version = inventory.driver_version(config.driver_root)
        files = config.driver_libraries or driverfiles.root_of(config.driver_root, version)
        return driverfiles.nvml_library(files, version)
    except (GpushareError, OSError):
        return ""


def _suspender(
    paths: Paths, config: Config, now: Optional[suspending.Suspender], meanwhile: Callable[[], None], said: str
) -> tuple[Optional[suspending.Suspender], str]:
    """Return what suspends and resumes containers, `now` if there is one, with this host's driver and devices. None and
    why if the driver cannot, or is not loaded. `said`: the reason that was written before."""
    from ..allocation import suspension
    from ..monitor import suspending

    try:
        host = node.load_node(*paths)
        if now is not None and now.node == host:
            return now, ""
        site = suspension.Site(paths.state_dir, host, meanwhile=meanwhile)
    except GpushareError as error:
        why = f"gpushare: no container is suspended: {error}"
        if why != said:
            log.to_stderr(why)
        return None, why
    now = now or suspending.Suspender(site, paths.state_dir, host, config.log, log.to_stderr)
    now.site, now.node = site, host
    return now, ""
