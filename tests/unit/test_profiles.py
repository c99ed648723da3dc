"""Profiles: complete configuration files with a stated purpose."""

from __future__ import annotations

import pytest
from gpushare.config import config, keys, profiles
from gpushare.core.errors import ConfigError
from gpushare.core.model import Config, Policy


def test_profile_has_every_key() -> None:
    for name in profiles.NAMES:
        read = config.parse_config(profiles.text(name), name)
        effective = keys.effective(read)
        expected = {key.path: key.default for key in keys.KEYS} | profiles.PROFILES[name]
        assert effective == expected
        assert all(key.split(".")[-1] + ":" in profiles.text(name) for key in expected)


@pytest.mark.parametrize("name", profiles.NAMES)
def test_profile_stays_valid_after_upgrade(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive is unpacked to a directory with its version in the name, which contains the default shim_dir."""
    before = profiles.text(name)
    shim = next(key for key in keys.KEYS if key.path == "shim_dir")
    moved = tuple(key._replace(default="/opt/next/shim") if key == shim else key for key in keys.KEYS)
    monkeypatch.setattr(config, "KEYS", moved)
    assert profiles.text(name) == before and shim.default not in before


def test_workstation_equals_defaults() -> None:
    assert config.parse_config(profiles.text("workstation"), "w") == Config()


def test_cluster_requires_limits() -> None:
    assert config.parse_config(profiles.text("cluster"), "c").policy == Policy(
        accept_widening="never",
        amounts="container",
        require_limits=True,
        max_memory="50%",
        unlimited="deny",
        annotations="scoped",
        enabled_dialects=(),
        nvidia_visible_devices="with_limit",
        privileged_containers=(),
    )


def test_unknown_profile_is_refused() -> None:
    with pytest.raises(ConfigError, match='no profile "cloud"; use workstation or cluster'):
        profiles.text("cloud")
