"""gpushare labels."""

from __future__ import annotations

import os
import sys

import click

from .. import labels as features
from ..engines.base import Change
from ..engines.host import Host
from . import facts
from .options import Paths
from .output import write_line


@click.command()
@click.option("--output", "path", default=features.FILE, show_default=True, metavar="FILE", help="Where it is written.")
@click.option("--dry-run", is_flag=True, help="Print the file, write nothing.")
@click.pass_obj
def labels(paths: Paths, path: str, dry_run: bool) -> None:
    """Tell Kubernetes how much memory this node has to share.

    Writes the feature file of node-feature-discovery. Run it again when devices or policy have changed.
    """
    text = features.feature_file(facts.host(paths))
    if dry_run:
        sys.stdout.write(text)
        return
    path, host = os.path.abspath(path), Host()
    before = host.read(path)
    if before == text:
        write_line("nothing to do")
        return
    change = Change(path, before, text)
    host.write([change])
    write_line(change.describe())
