"""gpushare agent."""

from __future__ import annotations

import select

import click

from ..config import node
from ..core.errors import GpushareError
from ..gpu import driverfiles, inventory
from ..monitor import eviction
from ..state import agentlock, log, storage
from ..system import sigterm
from .options import Paths, with_interval, with_no_color
from .output import write_now


@click.command()
@with_interval(0.1, "Time between two searches for containers that wait.")
@with_no_color
@click.pass_obj
def agent(paths: Paths, interval: float) -> int:
    """Take borrowed memory back from containers.

    With policy.lending evict, containers borrow memory above their request while this command runs. When another
    container needs memory of its own request and the device is full, the agent kills the container that is furthest
    above its request, and writes a line to standard error and to log.decisions. It runs until SIGTERM; then
    lending stops.
    """
    storage.prepare(paths.state_dir)
    config = node.load_config_only(*paths)
    lock = agentlock.take(paths.state_dir)  # until this process ends
    library = ""
    try:
        library = driverfiles.nvml_library(config.driver_root, inventory.driver_version(config.driver_root))
    except (GpushareError, OSError):
        pass  # no driver is loaded: containers' own numbers are all there is
    taking = eviction.Agent(paths.state_dir, config.log, library, log.to_stderr)
    with sigterm.readable() as end:
        write_now(f"lending memory of containers in {paths.state_dir}")
        said = ""
        while not select.select([end], [], [], interval)[0]:
            line = ""
            try:
                lock = agentlock.kept(lock, paths.state_dir)
                taking.tick()
            except GpushareError as error:
                line = log.line_of(error)[0]
            if line and line != said:
                log.to_stderr(line)
            said = line
        taking.close()
    return 0
