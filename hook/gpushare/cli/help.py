"""gpushare help."""

from __future__ import annotations

import click

from ..core.quoting import shown
from .main import group


@click.command("help")
@click.argument("command", nargs=-1)
@click.pass_context
def help_(context: click.Context, command: tuple[str, ...]) -> None:
    """Show the help of a command.

    Without a command it lists all commands. `gpushare help limit set` is the same as `gpushare limit set --help`.
    """
    here: click.Command = group
    path = context.parent
    assert path is not None
    for word in command:
        found = here.get_command(path, word) if isinstance(here, click.Group) else None
        if found is None:
            raise click.UsageError(f"no such command {shown(word)}", path)
        here, path = found, click.Context(found, path, info_name=word)
    click.echo(here.get_help(path))
