"""gpushare status."""

from __future__ import annotations

import click

from . import facts, top, topscreen
from .options import Paths, with_format
from .output import write_json, write_line
from .sample import Sampler
from .topscreen import CONTAINERS, DEVICES


@click.command()
@with_format
@click.pass_obj
def status(paths: Paths, output: str) -> None:
    """Show the GPUs of this host and the containers that share them.

    `gpushare devices` and `gpushare list` show more of each, `gpushare doctor` checks the host for problems.
    """
    taken = Sampler(paths).take()
    if output == "json":
        write_json(taken.plain())
        return
    if taken.note:
        write_line(taken.note)
    containers = topscreen.without_empty(CONTAINERS, taken.lines)
    for cells, values in ((DEVICES, taken.devices), (containers, taken.lines)):
        if values:
            top.write_cells(cells, values)
            write_line()
    if not taken.lines:
        write_line(facts.none())
    facts.warn_of_hidden_shares(facts.LESS_FREE)
