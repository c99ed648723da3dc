"""Profiles are configuration files like any other, and say what they are for."""

from __future__ import annotations

import pytest
from gpushare.config import config, keys, profiles
from gpushare.core.errors import ConfigError
from gpushare.core.model import Config, Policy


def test_each_profile_is_a_file_with_every_key() -> None:
    for name in profiles.NAMES:
        read = config.parse_config(profiles.text(name), name)
        effective = keys.effective(read)
        expected = {key.path: key.default for key in keys.KEYS} | profiles.PROFILES[name]
        assert effective == expected
        assert all(key.split(".")[-1] + ":" in profiles.text(name) for key in expected)


@pytest.mark.parametrize("name", profiles.NAMES)
def test_a_profile_is_good_for_the_next_version_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive is unpacked to a directory with its version in the name; the default of shim_dir is there."""
    before = profiles.text(name)
    shim = next(key for key in keys.KEYS if key.path == "shim_dir")
    moved = tuple(key._replace(default="/opt/next/shim") if key == shim else key for key in keys.KEYS)
    monkeypatch.setattr(config, "KEYS", moved)
    assert profiles.text(name) == before and shim.default not in before


def test_a_workstation_is_the_defaults() -> None:
    assert config.parse_config(profiles.text("workstation"), "w") == Config()


def test_a_cluster_gives_nothing_by_accident() -> None:
    assert config.parse_config(profiles.text("cluster"), "c").policy == Policy(
        accept_widening="never",
        require_limits=True,
        max_memory="50%",
        unlimited="deny",
        annotations="scoped",
        enabled_dialects=(),
        nvidia_visible_devices="with_limit",
        privileged_containers=(),
    )


def test_there_is_no_other_profile() -> None:
    with pytest.raises(ConfigError, match='no profile "cloud"; use workstation or cluster'):
        profiles.text("cloud")
