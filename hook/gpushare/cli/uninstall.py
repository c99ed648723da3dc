"""gpushare uninstall."""

from __future__ import annotations

import os
import sys

import click

from ..core.errors import GpushareError
from ..engines.host import Host
from ..integrations import uninstall as removal
from ..state import log
from .options import Paths, given, with_format
from .output import write_json, write_line
from .runtime import settings_of


@click.command()
@click.option("--dry-run", is_flag=True, help="Show what would be done, do nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--force", is_flag=True, help="Do it even if containers hold a share or MPS runs; they keep running.")
@click.option("--purge", is_flag=True, help="Also remove /etc/gpushare and the usage journal.")
@click.option("--root", callback=given, default="/", metavar="DIR", help="Change files below DIR.")
@with_format
@click.pass_obj
def uninstall(paths: Paths, /, dry_run: bool, yes: bool, force: bool, purge: bool, root: str, output: str) -> None:
    """Remove gpushare from all engines, and its state.

    Without --purge the configuration and the usage journal stay. The programs always stay: remove them with the package
    manager that installed them, or with rm if you unpacked an archive.
    """
    host, settings = Host(root), settings_of(paths, "")
    plan = removal.plan(settings, host, purge, force)
    lines = plan.lines()
    if output == "json":
        write_json({"dry_run": dry_run, "steps": lines, "next": plan.next()})
    for line in lines if output != "json" else ():
        write_line(line)
    sys.stdout.flush()  # before lines on standard error, even if both streams go to one pipe or file
    if not lines:
        if output != "json":
            write_line("nothing to do")
            name_next(plan)
        return
    if dry_run:
        return
    if not yes:
        if not sys.stdin.isatty():
            raise GpushareError(
                "nothing was done: standard input is not a terminal, so you cannot confirm", "give --yes"
            )
        click.confirm("Do this?", abort=True, err=True)
    removal.carry_out(plan, settings, host, force)
    name_next(plan)
    where = os.path.dirname(settings.program)
    log.to_stderr(f"gpushare: the programs stay in {where}; remove them in the way in which they were installed")


def name_next(plan: removal.Plan) -> None:
    for command in plan.next():
        log.to_stderr(f"gpushare: now run: {command}")
