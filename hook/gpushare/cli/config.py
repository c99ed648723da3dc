"""gpushare config check, gpushare config show."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Optional

import click

from ..config.config import WrongConfig, load_config, without_effect
from ..config.keys import effective
from ..core.model import Config
from ..state import log
from .options import Paths, with_format
from .output import Column, write_json, write_line, write_table


@click.group()
def config() -> None:
    """Check or show the configuration file."""


@config.command()
@click.argument("file", required=False)
@with_format
@click.pass_obj
def check(paths: Paths, file: Optional[str], output: str) -> int:
    """Check the configuration file.

    Reads FILE, or the file of --config, and lists every error with its line.
    """
    path = _path(paths, file)
    found = path if os.path.exists(path) else None
    try:
        loaded = load_config(path)
    except WrongConfig as error:
        for problem in error.problems:
            log.to_stderr(log.line_of(problem.error(path))[0])
        if output == "json":
            errors = [problem._asdict() for problem in error.problems]
            write_json({"file": found, "valid": False, "errors": errors})
        return error.exit_code
    for note in without_effect(Path(path).read_text(encoding="utf-8")) if found else ():
        log.to_stderr(f"gpushare: {path}: {note}")
    if output == "json":
        write_json({"file": found, "valid": True, "config": _nested(effective(loaded))})
    else:
        write_line(f"{path}: {'valid' if found else 'no such file, so the defaults apply'}")
    return 0


@config.command()
@click.argument("file", required=False)
@with_format
@click.pass_obj
def show(paths: Paths, file: Optional[str], output: str) -> None:
    """Print the effective configuration.

    Prints every key with its value, and the default of each value that was changed. Reads FILE, or the file of
    --config.
    """
    path = _path(paths, file)
    values = effective(load_config(path))
    defaults = effective(Config())
    changed = [key for key in values if values[key] != defaults[key]]
    if output == "json":
        found = path if os.path.exists(path) else None
        write_json({"file": found, "state": paths.state_dir, "config": _nested(values), "changed": changed})
        return
    columns = (Column("key"), Column("value"), Column("default", leaves=1))
    rows = [(key, json.dumps(values[key]), json.dumps(defaults[key]) if key in changed else "") for key in values]
    write_table(columns, [*rows, ("--state", json.dumps(paths.state_dir), "")])


def _path(paths: Paths, file: Optional[str]) -> str:
    return os.path.abspath(file) if file else paths.config


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """Convert dotted keys to nested objects, as in the configuration file."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *parents, leaf = name.split(".")
        here = tree
        for parent in parents:
            here = here.setdefault(parent, {})
        here[leaf] = value
    return tree
