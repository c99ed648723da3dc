"""gpushare completion."""

from __future__ import annotations

from typing import Any

import click

from .main import COMPLETE, PROGRAM, group
from .output import write

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Generate a shell completion script.

    For bash write `source <(gpushare completion bash)` into ~/.bashrc, for zsh the same with zsh into ~/.zshrc after
    compinit. For fish: gpushare completion fish >~/.config/fish/completions/gpushare.fish
    """
    from click.shell_completion import get_completion_class

    found: Any = get_completion_class(shell)
    maker = found(group, {}, PROGRAM, COMPLETE)
    write(found.source_template % maker.source_vars())
