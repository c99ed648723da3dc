"""Fixtures that several modules of unit tests share."""

from tests.unit.clihost import cli, frozen, init, start, state

__all__ = ["cli", "frozen", "init", "start", "state"]
