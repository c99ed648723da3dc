"""What every command has in common: where things are, and --format."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional, TypeVar

import click
from click.core import ParameterSource

Command = TypeVar("Command", bound=Callable[..., Any])


NO_COLOR = "gpushare.no_color"  # in the meta of a context: --no-color was given, wherever


class Paths(NamedTuple):
    """The global options."""

    config: str
    state_dir: str


def _no_color(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.meta[NO_COLOR] = True


def with_no_color(command: Command) -> Command:
    """Adds --no-color, which needs no argument."""
    return click.option(
        "--no-color", is_flag=True, expose_value=False, callback=_no_color, help="No colour, as with NO_COLOR=1."
    )(command)


def with_format(command: Command) -> Command:
    """Adds --format table|json as the argument `output`, and --no-color."""
    choice = click.Choice(["table", "json"])
    option = click.option(
        "--format", "output", type=choice, default="table", show_default=True, help="For people, or for programs."
    )
    return option(with_no_color(command))


def given(context: click.Context, option: click.Parameter, value: Optional[str]) -> Optional[str]:
    """For `callback`: an empty value is an empty variable in somebody's script, which must not mean "all", "as it is",
    or the directory that he is in."""
    typed = context.get_parameter_source(option.name or "") is not ParameterSource.DEFAULT
    if value is not None and not value.strip() and typed:
        raise click.BadParameter("it is empty", param=option)
    return value


def _number(_: click.Context, option: click.Parameter, value: float) -> float:
    """NaN is neither below nor above any bound, and nobody waits for it."""
    if value != value:
        raise click.BadParameter("'nan' is not a number", param=option)
    return value


def with_interval(default_s: float, meaning: str) -> Callable[[Command], Command]:
    """Adds --interval SECONDS."""
    return click.option(
        "--interval",
        type=click.FloatRange(0.1, 3600),
        callback=_number,
        default=default_s,
        show_default=True,
        metavar="SECONDS",
        help=meaning,
    )
