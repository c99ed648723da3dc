"""Parse NVIDIA's variables about the driver, which apply to requests of any dialect.

    read(env, volumes, inventory) -> DriverSettings

NVIDIA_GDS, _MOFED, _GDRCOPY, _NVSWITCH =enabled; NVIDIA_IMEX_CHANNELS, or mounts of /dev/null at
/var/run/nvidia-container-devices/imex/<channel>; NVIDIA_MIG_CONFIG_DEVICES and _MONITOR_DEVICES; NVIDIA_REQUIRE_*.
Source: NVIDIA container toolkit documentation and MIG user guide. Runs on the start path.
"""

from typing import NamedTuple

from ...core.model import Inventory
from ...core.quantity import wrong
from ...core.quoting import shown
from ...gpu.drivertable import FEATURES
from ...gpu.selectors import find_devices
from .. import constraints
from . import Env, one_value

ENV_IMEX = "NVIDIA_IMEX_CHANNELS"
MIG_RIGHTS = {"NVIDIA_MIG_CONFIG_DEVICES": "config", "NVIDIA_MIG_MONITOR_DEVICES": "monitor"}
_REQUIRE = "NVIDIA_REQUIRE_"
_DISABLE_REQUIRE = "NVIDIA_DISABLE_REQUIRE"
_TRUE = ("1", "t", "true", "yes")
_NOTHING = ("", "void", "none")
_NAMES = frozenset((ENV_IMEX, _DISABLE_REQUIRE, *MIG_RIGHTS, *(feature.variable for feature in FEATURES.values())))
WIDENING = frozenset((ENV_IMEX, *(feature.variable for feature in FEATURES.values())))  # more than a device
_MAX_CHANNELS = 2048  # maximum of the driver


class DriverSettings(NamedTuple):
    """Fields of Request, and values that have no effect."""

    features: tuple[str, ...]
    imex_channels: tuple[str, ...]
    mig_access: tuple[str, ...]
    requirements: tuple[tuple[str, str], ...]
    sources: tuple[tuple[str, str], ...]
    ignored: tuple[str, ...]


def _features(values: dict[str, str]) -> tuple[tuple[str, ...], list[str]]:
    given = {name: values.get(feature.variable, "").strip() for name, feature in FEATURES.items()}
    ignored = [
        f"{FEATURES[name].variable}={shown(value)}: only the value enabled switches it on"
        for name, value in given.items()
        if value not in ("", "enabled", "disabled")
    ]
    return tuple(name for name, value in given.items() if value == "enabled"), ignored


def _imex(value: str, volumes: tuple[str, ...]) -> tuple[str, ...]:
    """Parse channel numbers, or ("all",)."""
    channels = [channel.strip() for channel in value.split(",") if channel.strip()] + list(volumes)
    if "all" in channels:
        return ("all",)
    for channel in channels:
        if not (channel.isascii() and channel.isdigit()) or len(channel) > 4 or int(channel) >= _MAX_CHANNELS:
            raise wrong(ENV_IMEX, ",".join(channels), f"{shown(channel)} is not an IMEX channel", "write all, or 0,1")
    return tuple(str(number) for number in sorted({int(channel) for channel in channels}))


def _mig_access(values: dict[str, str], inventory: Inventory) -> tuple[str, ...]:
    """Parse rights over MIG. The driver grants each for the whole host; the named devices must exist."""
    found = []
    for name, right in MIG_RIGHTS.items():
        value = values.get(name, "").strip()
        if value in _NOTHING:
            continue
        for token in (token.strip() for token in value.split(",")):
            if token != "all":
                find_devices(name, value, token, inventory)
        found.append(right)
    return tuple(found)


def _requirements(values: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """Return all constraints, parsed, in the order of their names."""
    if values.get(_DISABLE_REQUIRE, "").strip().lower() in _TRUE:
        return ()
    found = sorted((name, value) for name, value in values.items() if name.startswith(_REQUIRE) and value.strip())
    if found:
        for name, value in found:
            constraints.parse(name, value)
    return tuple(found)


def read(env: Env, volumes: tuple[str, ...], inventory: Inventory) -> DriverSettings:
    """Parse all of them. `volumes`: IMEX channels that mounts request. Raise RequestError or DeviceError."""
    values: dict[str, str] = {}
    for name in dict.fromkeys(name for name, _ in env if name in _NAMES or name.startswith(_REQUIRE)):
        values[name] = one_value(name, [value for key, value in env if key == name]) or ""
    features, ignored = _features(values)
    imex = _imex(values.get(ENV_IMEX, ""), volumes)
    access = _mig_access(values, inventory)
    used = [FEATURES[name].variable for name in features]
    used += [name for name, right in MIG_RIGHTS.items() if right in access]
    used += [ENV_IMEX] if imex and values.get(ENV_IMEX) else []
    sources = tuple((name, values[name]) for name in used)
    return DriverSettings(features, imex, access, _requirements(values), sources, tuple(ignored))
