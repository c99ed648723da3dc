"""NRI's validator in containerd and CRI-O: it can refuse containers while gpushare's NRI plugin does not run. Pure.

Sources: containerd 2.2.0, internal/nri/config.go; CRI-O 1.34.0, internal/config/nri/nri.go; containerd/nri 0.10.0,
plugins/default-validator. Both engines have the same validator under other names of its settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..core.errors import ConfigError
from . import tomltext
from .tomltext import Keys

PLUGIN = "gpushare"
OPTIONAL = "gpushare-nri-optional"  # annotation of pods that start without the plugin


class Names(NamedTuple):
    """The names of one engine."""

    engine: str
    since: tuple[int, int]  # earlier versions ignore the table
    nri: Keys
    off: tuple[str, bool]  # the setting of NRI, and its value that disables NRI
    closed: str  # true: plugins cannot connect
    prefix: str  # of the following
    enable: str

    @property
    def keys(self) -> Keys:
        return (*self.nri, "default_validator")

    @property
    def required(self) -> str:
        return f"{self.prefix}required_plugins"

    @property
    def tolerates(self) -> str:
        return f"{self.prefix}tolerate_missing_plugins_annotation"

    @property
    def rejects(self) -> str:
        return f"{self.prefix}reject_oci_hook_adjustment"


CONTAINERD = Names(
    "containerd",
    (2, 2),
    ("plugins", "io.containerd.nri.v1.nri"),
    ("disable", True),
    "disable_connections",
    "",
    "enable",
)
CRIO = Names(
    "CRI-O",
    (1, 34),
    ("crio", "nri"),
    ("enable_nri", False),
    "nri_disable_connections",
    "nri_validator_",
    "nri_enable_default_validator",
)


def why_not(names: Names, version: tuple[int, int]) -> str:
    """Why an engine of this version cannot require the plugin, (0, 0) if it is unknown; empty: it can."""
    if version >= names.since:
        return ""
    unknown = "" if any(version) else f"the version of {names.engine} is unknown (--engine-version); "
    first = ".".join(map(str, names.since))
    return f"{unknown}{names.engine} before {first} cannot require NRI plugins, so its configuration stays unchanged"


def overridden(table: Mapping[str, Any], path: str, names: Names) -> list[str]:
    """One note for each setting with which a file that the engine reads after gpushare's drop-in undoes the
    requirement. Raises ConfigError if the file removes the exception for gpushare's own pods."""
    if table.get(names.tolerates, OPTIONAL) != OPTIONAL:
        raise ConfigError(
            f"{path}: {names.tolerates} overrides gpushare's, so {names.engine} would refuse gpushare's own pods",
            f"set it to {OPTIONAL}, or remove it",
        )
    required = table.get(names.required)
    notes = []
    if isinstance(required, list) and PLUGIN not in required:
        notes.append(f"{path}: {names.required} overrides gpushare's, so add {PLUGIN} there")
    if table.get(names.enable) is False:
        notes.append(f"{path}: {names.enable} = false overrides gpushare's, so set it to true there")
    return notes


def table(config: Mapping[str, Any], path: str, names: Names) -> dict[str, Any]:
    """The table for gpushare's drop-in, with what the other files require. Raises ConfigError."""
    nri, other = tomltext.table_at(config, names.nri, path), tomltext.table_at(config, names.keys, path)
    for name, value in (names.off, (names.closed, True)):
        if nri.get(name) is value:
            raise ConfigError(
                f"{path}: {name} = {str(value).lower()} keeps the plugin out, so {names.engine} would refuse every "
                "container",
                f"set it to {str(not value).lower()}, or remove it",
            )
    if other.get(names.rejects):
        raise ConfigError(
            f"{path}: {names.rejects} = true makes {names.engine} refuse gpushare's hooks",
            "set it to false, or remove it",
        )
    if other.get(names.tolerates) not in (None, "", OPTIONAL):
        raise ConfigError(
            f"{path}: {names.tolerates} names an annotation that gpushare's own pods do not have",
            f"set it to {OPTIONAL}, or remove it",
        )
    required = other.get(names.required, [])
    if not isinstance(required, list):
        raise ConfigError(f"{path}: {names.required} must be a list of plugins", "fix the file")
    return {
        names.enable: True,
        names.required: [*(one for one in required if one != PLUGIN), PLUGIN],
        names.tolerates: OPTIONAL,
    }
