"""gpushare labels."""

from __future__ import annotations

import os

import click

from ..core import constants
from ..engines.base import Change
from ..engines.host import Host
from ..integrations import labels as features
from . import facts
from .options import Paths, given, with_format
from .output import write, write_json, write_line


@click.command()
@click.option(
    "--output",
    "path",
    callback=given,
    default=features.FILE,
    show_default=True,
    metavar="FILE",
    help="File to write.",
)
@click.option("--dry-run", is_flag=True, help="Print the file, write nothing.")
@with_format
@click.pass_obj
def labels(paths: Paths, path: str, dry_run: bool, output: str) -> None:
    """Write node labels and the memory to share for Kubernetes.

    Writes a feature file of node-feature-discovery. Run the command again when devices or policy have changed.
    """
    text = features.feature_file(facts.host(paths))
    path, host = os.path.abspath(path), Host()
    change = Change(path, host.read(path), text)
    change.refuse_foreign(constants.ANNOTATION_PREFIX)
    if change.before != text and not dry_run:
        host.write([change])
    if output == "json":
        lines = (line.partition("=") for line in text.splitlines() if not line.startswith("#"))
        action = None if change.before == text else change.action
        write_json({"dry_run": dry_run, "file": path, "action": action, "features": {k: v for k, _, v in lines}})
    elif dry_run:
        write(text)
    else:
        write_line("nothing to do" if change.before == text else change.describe())
