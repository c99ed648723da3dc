"""Options that commands have in common: paths, --format, --no-color, --interval, and those for Xid errors."""

from __future__ import annotations

import os
from typing import Any, Callable, NamedTuple, Optional, TypeVar

import click
from click.core import ParameterSource

from ..core import constants
from ..core.errors import ConfigError, RequestError
from ..core.quoting import shown

Command = TypeVar("Command", bound=Callable[..., Any])


# Errors of a program, after which the GPU works on: "Xid Errors" in NVIDIA's GPU deployment documentation, the same
# that NVIDIA's own device plugin skips by default
IGNORED_XIDS = (13, 31, 43, 45, 68, 109)
NO_COLOR = "gpushare.no_color"  # in context.meta if --no-color was given, before or after the command's name


class Paths(NamedTuple):
    """The global options."""

    config: str
    state_dir: str


def require_config(paths: Paths) -> None:
    """Raise ConfigError if --config names a file that does not exist. The default file need not exist, nor must the
    user be able to search its folder: `doctor` reports that."""
    if paths.config == constants.CONFIG_PATH:
        return
    try:
        os.lstat(paths.config)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{paths.config}: no such file", "create it, or leave out --config") from None
    except (OSError, ValueError):
        pass  # the command reports it when it reads the file


def _no_color(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.meta[NO_COLOR] = True


def with_no_color(command: Command) -> Command:
    """Add --no-color. It is stored in context.meta, so the command needs no parameter for it."""
    return click.option(
        "--no-color", is_flag=True, expose_value=False, callback=_no_color, help="No colour, as with NO_COLOR=1."
    )(command)


def with_format(command: Command) -> Command:
    """Add -o, --format table|json, which the command gets as `output`, and --no-color."""
    choice = click.Choice(["table", "json"])
    option = click.option(
        *("-o", "--format", "output"),
        type=choice,
        default="table",
        show_default=True,
        help="Output format.",
    )
    return option(with_no_color(command))


def given(context: click.Context, option: click.Parameter, value: Optional[str]) -> Optional[str]:
    """Reject an empty value; for `callback` of an option. It usually comes from an unset variable in a script, and must
    not mean "all", "unchanged" or the current directory."""
    typed = context.get_parameter_source(option.name or "") is not ParameterSource.DEFAULT
    if value is not None and not value.strip() and typed:
        raise click.BadParameter("it is empty", param=option)
    return value


def _number(_: click.Context, option: click.Parameter, value: float) -> float:
    """Reject NaN, which click.FloatRange accepts because no comparison with NaN is true."""
    if value != value:
        raise click.BadParameter("'nan' is not a number", param=option)
    return value


def with_interval(default_s: float, meaning: str) -> Callable[[Command], Command]:
    """Add --interval SECONDS."""
    return click.option(
        "--interval",
        type=click.FloatRange(0.1, 3600),
        callback=_number,
        default=default_s,
        show_default=True,
        metavar="SECONDS",
        help=meaning,
    )


def with_xid_options(command: Command) -> Command:
    """Add --nvml and --ignore-xid, which the command gets as `nvml` and `ignored`."""
    library = click.option(
        "--nvml",
        callback=given,
        default="",
        metavar="FILE",
        help="libnvidia-ml.so.1 of the driver: a device with a Xid error becomes unhealthy.",
    )
    errors = click.option(
        "--ignore-xid",
        "ignored",
        callback=given,
        default=",".join(map(str, IGNORED_XIDS)),
        show_default=True,
        metavar="LIST",
        help="Xid errors after which a device stays healthy; none for all errors.",
    )
    return library(errors(command))


def xids(text: str) -> tuple[int, ...]:
    """Parse --ignore-xid. Raise RequestError."""
    numbers = [part.strip() for part in text.split(",")] if text != "none" else []
    if not all(number.isascii() and number.isdigit() and len(number) < 6 for number in numbers):
        raise RequestError(f"--ignore-xid={shown(text)}: not numbers", "write numbers such as 13,31, or none")
    return tuple(map(int, numbers))
