"""Configurations to begin with: text(profile) -> the text of a config.yaml."""

from __future__ import annotations

from .errors import ConfigError

NAMES = ("workstation", "cluster")
_TEXTS = {
    "workstation": "# gpushare: one person's machine\nversion: 1\n",
    "cluster": "# gpushare: a node of a cluster\nversion: 1\npolicy:\n  require_limits: true\n  unlimited: deny\n",
}


def text(profile: str) -> str:
    """Raises ConfigError."""
    if profile not in _TEXTS:
        raise ConfigError(f"no profile {profile!r}", f"one of {', '.join(NAMES)}")
    return _TEXTS[profile]
