"""Fixtures that several modules of unit tests share."""

from hypothesis import HealthCheck, settings

from tests.unit.clihost import cli, frozen, init, start, state

__all__ = ["cli", "frozen", "init", "start", "state"]

# Hypothesis must not fail an example for its duration: another pytest worker may slow it down
settings.register_profile("gpushare", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gpushare")
