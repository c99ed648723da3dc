"""gpushare config check, gpushare config show."""

from __future__ import annotations

import json
import os
from typing import Any, Optional

import click

from ..config.config import effective, load_config
from ..core.model import Config
from .options import Paths, with_format
from .output import Column, write_json, write_line, write_table


@click.group()
def config() -> None:
    """The configuration file."""


@config.command()
@click.argument("file", required=False)
@with_format
@click.pass_obj
def check(paths: Paths, file: Optional[str], output: str) -> None:
    """Check the configuration file.

    Reads FILE, or that of --config, and says what is wrong and in which line.
    """
    path, values = _read(paths, file)
    exists = os.path.exists(path)
    if output == "json":
        write_json({"file": path if exists else None, "valid": True, "config": _nested(values)})
        return
    write_line(f"{path}: {'valid' if exists else 'no such file, so the defaults hold'}")


@config.command()
@click.argument("file", required=False)
@with_format
@click.pass_obj
def show(paths: Paths, file: Optional[str], output: str) -> None:
    """Print what is in force.

    Every key of FILE, or of that of --config, with its value, and its default where that is another.
    """
    path, values = _read(paths, file)
    defaults = effective(Config())
    changed = [key for key in values if values[key] != defaults[key]]
    if output == "json":
        found = path if os.path.exists(path) else None
        write_json({"file": found, "state": paths.state_dir, "config": _nested(values), "changed": changed})
        return
    columns = (Column("key"), Column("value"), Column("default", leaves=1))
    rows = [(key, json.dumps(values[key]), json.dumps(defaults[key]) if key in changed else "") for key in values]
    write_table(columns, [*rows, ("--state", json.dumps(paths.state_dir), "")])


def _read(paths: Paths, file: Optional[str]) -> tuple[str, dict[str, Any]]:
    path = os.path.abspath(file) if file else paths.config
    return path, effective(load_config(path))


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
