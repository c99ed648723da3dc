"""gpushare config check."""

from __future__ import annotations

import json
import os
from typing import Any, Optional

import click

from ..config import effective, load_config
from .options import Paths, with_format
from .output import write_json, write_line


@click.group()
def config() -> None:
    """The configuration file."""


@config.command()
@click.argument("file", required=False)
@with_format
@click.pass_obj
def check(paths: Paths, file: Optional[str], output: str) -> None:
    """Check the file and print what is in force.

    Reads FILE, or that of --config, and prints every key with its value, or says what is wrong and in which line.
    """
    path = os.path.abspath(file) if file else paths.config
    values = effective(load_config(path))
    exists = os.path.exists(path)
    if output == "json":
        write_json(
            {"file": path if exists else None, "valid": True, "config": _nested(values), "state": paths.state_dir}
        )
        return
    write_line(f"{path}: {'valid' if exists else 'no such file, so these defaults hold'}")
    width = max(map(len, values))
    for name, value in values.items():
        write_line(f"  {name:<{width}}  {json.dumps(value)}")
    write_line(f"state directory: {paths.state_dir}")


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as the file nests them."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *parents, leaf = name.split(".")
        here = tree
        for parent in parents:
            here = here.setdefault(parent, {})
        here[leaf] = value
    return tree
