"""The group of commands, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, Optional

import click

from .. import log, names, rootless
from ..errors import GpushareError
from .options import Paths

# command -> module of this package, and its name there. Only the one that is asked for is loaded: `gpushare run` is
# how programs start.
COMMANDS = {
    "list": ("containers", "list_"),
    "inspect": ("containers", "inspect"),
    "devices": ("devices", "devices"),
    "explain": ("explain", "explain"),
    "prune": ("prune", "prune"),
    "run": ("run", "run"),
    "config": ("config", "config"),
    "runtime": ("runtime", "runtime"),
    "labels": ("labels", "labels"),
    "uninstall": ("uninstall", "uninstall"),
    "refresh": ("node", "refresh"),
    "version": ("node", "version"),
}


class _Commands(click.Group):
    """The table above."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> Optional[click.Command]:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(f".{module}", __package__), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[Optional[str], Optional[click.Command], list[str]]:
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]  # whose names are suggested
        return super().resolve_command(ctx, args)


def _print_version(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        from . import node

        click.echo(f"gpushare {node.installed()}")
        context.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", default=names.CONFIG_PATH, show_default=True, metavar="FILE", help="Configuration file.")
@click.option("--state", metavar="DIR", help=f"State directory.  [default: {names.STATE_DIR}]")
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version and exit.",
)
@click.pass_context
def group(context: click.Context, config: str, state: Optional[str]) -> None:
    """Exact shares of a GPU for containers: who has what, what a container would get, and why one was refused."""
    context.obj = Paths(os.path.abspath(config), os.path.abspath(state or rootless.state_dir()))


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs one command; returns its exit code. 2 = wrong usage, else as in errors.py."""
    try:
        result: Any = group.main(args=argv, prog_name="gpushare", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except PermissionError as error:
        return _fail(GpushareError(f"{error.filename!r}: {error.strerror}", "run as root"))
    except Exception as error:
        return _fail(error)


def _fail(error: Exception) -> int:
    line, code = log.line_of(error)
    log.to_stderr(line)
    return code
