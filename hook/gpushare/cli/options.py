"""What every command has in common: where things are, and --format."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


class Paths(NamedTuple):
    """The global options."""

    config: str
    state_dir: str


def with_format(command: Command) -> Command:
    """Adds --format table|json as the argument `output`."""
    choice = click.Choice(["table", "json"])
    option = click.option(
        "--format", "output", type=choice, default="table", show_default=True, help="For people, or for programs."
    )
    return option(command)
