"""Completion of ids and names of containers in a shell."""

from __future__ import annotations

import click

from ..system import rootless
from . import facts


def complete_ids(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """The ids and names that start with `incomplete`, for `shell_complete` of an argument ID. Returns none on any
    error, such as a missing permission: an error message would disturb the user's command line."""
    try:
        state_dir = context.find_root().params.get("state") or rootless.state_dir()
        known = facts.known(state_dir)
        words = (*known.leased, *(name.shown for name in known.leased.values() if name.shown), *known.refused)
        return [word for word in words if word.startswith(incomplete)]
    except Exception:
        return []
