"""containerd's validator for NRI: it can refuse containers while gpushare's NRI plugin does not run. Pure.

Sources: containerd 2.2.0, internal/nri/config.go; containerd/nri 0.10.0, plugins/default-validator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.errors import ConfigError
from . import tomltext
from .tomltext import Keys

SINCE = (2, 2)  # earlier versions ignore the table
KEYS: Keys = ("plugins", "io.containerd.nri.v1.nri", "default_validator")
PLUGIN = "gpushare"
OPTIONAL = "gpushare-nri-optional"  # annotation of pods that start without the plugin
_REJECTS = "reject_oci_hook_adjustment"
_REQUIRED = "required_plugins"
_TOLERATES = "tolerate_missing_plugins_annotation"


def table(config: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The table for gpushare's drop-in, with what the other files require. Raises ConfigError."""
    other = tomltext.table_at(config, KEYS, path)
    if other.get(_REJECTS):
        raise ConfigError(
            f"{path}: {_REJECTS} = true makes containerd refuse gpushare's hooks", "set it to false, or remove it"
        )
    if other.get(_TOLERATES) not in (None, "", OPTIONAL):
        raise ConfigError(
            f"{path}: {_TOLERATES} names an annotation that gpushare's own pods do not have",
            f"set it to {OPTIONAL}, or remove it",
        )
    required = other.get(_REQUIRED, [])
    if not isinstance(required, list):
        raise ConfigError(f"{path}: {_REQUIRED} must be a list of plugins", "fix the file")
    return {
        "enable": True,
        _REQUIRED: [*(one for one in required if one != PLUGIN), PLUGIN],
        _TOLERATES: OPTIONAL,
    }
