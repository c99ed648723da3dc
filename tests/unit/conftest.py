"""Fixtures that several modules of unit tests share."""

from hypothesis import HealthCheck, settings

from tests.unit.clihost import cli, frozen, init, start, state

__all__ = ["cli", "frozen", "init", "start", "state"]

# Judged by what comes of an example, never by how long it took: there may be a second worker
settings.register_profile("gpushare", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gpushare")
