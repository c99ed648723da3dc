"""Completion of container ids in a shell."""

from __future__ import annotations

import click

from ..system import rootless
from . import facts


def complete_ids(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """For `shell_complete` of an argument ID: containers and refusals. Whoever may not see them gets none; an error has
    no place while somebody types."""
    try:
        state_dir = context.find_root().params.get("state") or rootless.state_dir()
        return [name for name in facts.known(state_dir) if name.startswith(incomplete)]
    except Exception:
        return []
