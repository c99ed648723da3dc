"""gpushare config check."""

from __future__ import annotations

import os
from typing import Any, Optional

import click

from ..config import load_config
from ..errors import ConfigError
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
    """Read FILE (or the file of --config) and print the effective values, or say what is wrong and where."""
    path = os.path.abspath(file) if file else paths.config
    exists = os.path.exists(path)
    if file and not exists:
        raise ConfigError(f"{path}: no such file")
    loaded = load_config(path)._replace(state_dir=paths.state_dir)
    values: dict[str, Any] = {**loaded._asdict(), "policy": loaded.policy._asdict()}
    if output == "json":
        write_json({"file": path if exists else None, "valid": True, "config": values})
        return
    write_line(f"{path}: {'valid' if exists else 'no such file, so these defaults hold'}")
    policy = values.pop("policy")
    flat = {**values, **{f"policy.{name}": value for name, value in policy.items()}}
    for name, value in flat.items():
        text = ", ".join(value) if isinstance(value, tuple) else str(value)
        write_line(f"  {name:<28} {text or '-'}")
