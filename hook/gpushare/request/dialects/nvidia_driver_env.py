"""Parse NVIDIA's variables about the driver, which apply to requests of any dialect.

    with_settings(request, bundle, inventory, accepts) -> Request

NVIDIA_DRIVER_CAPABILITIES; NVIDIA_GDS, _MOFED, _GDRCOPY, _NVSWITCH =enabled; NVIDIA_IMEX_CHANNELS, or mounts of
/dev/null at /var/run/nvidia-container-devices/imex/<channel>; NVIDIA_MIG_CONFIG_DEVICES and _MONITOR_DEVICES;
NVIDIA_REQUIRE_*.
Source: NVIDIA container toolkit documentation and MIG user guide. Runs on the start path.
"""

from ...core.errors import PolicyError
from ...core.model import Accepts, Bundle, Inventory, Request
from ...core.quantity import wrong
from ...core.quoting import setting, shown
from ...gpu.drivertable import FEATURES
from ...gpu.selectors import find_devices
from .. import constraints
from . import expand_capabilities, one_value
from .nvidia import ENV_CAPABILITIES

ENV_IMEX = "NVIDIA_IMEX_CHANNELS"
MIG_RIGHTS = {"NVIDIA_MIG_CONFIG_DEVICES": "config", "NVIDIA_MIG_MONITOR_DEVICES": "monitor"}
_REQUIRE = "NVIDIA_REQUIRE_"
_DISABLE_REQUIRE = "NVIDIA_DISABLE_REQUIRE"
_TRUE = ("1", "t", "true", "yes")
_NOTHING = ("", "void", "none")
_ALWAYS = (_REQUIRE, _DISABLE_REQUIRE, ENV_CAPABILITIES)
_WIDENING = frozenset((ENV_IMEX, *(feature.variable for feature in FEATURES.values())))  # more than a device
_NAMES = frozenset((ENV_CAPABILITIES, _DISABLE_REQUIRE, *MIG_RIGHTS, *_WIDENING))
_MAX_CHANNELS = 2048  # maximum of the driver


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


def _mig_access(values: dict[str, str], bundle: Bundle, inventory: Inventory) -> dict[str, str]:
    """Return right over MIG -> the variable that requests it. The driver grants each for the whole host; the named
    devices must exist."""
    found = {}
    for name, right in MIG_RIGHTS.items():
        value = values.get(name, "").strip()
        if value in _NOTHING:
            continue
        for token in (token.strip() for token in value.split(",")):
            if token != "all":
                find_devices(name, value, token, inventory)
        found[right] = name
    for name in found.values() if not bundle.privileged else ():
        raise PolicyError(
            f"{setting(name, values[name])}: only a privileged container gets rights over MIG",
            "leave it out, or run privileged",
        )
    return found


def _requirements(values: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """Return all constraints, parsed, in the order of their names."""
    if values.get(_DISABLE_REQUIRE, "").strip().lower() in _TRUE:
        return ()
    found = sorted((name, value) for name, value in values.items() if name.startswith(_REQUIRE) and value.strip())
    if found:
        for name, value in found:
            constraints.parse(name, value)
    return tuple(found)


def _accepted(bundle: Bundle, accepts: Accepts) -> tuple[dict[str, str], dict[str, str]]:
    """Return the values by variable that count, and the values that policy.accept.widening refuses."""
    env = [pair for pair in bundle.env if pair[0] in _NAMES or pair[0].startswith(_REQUIRE)]
    if not accepts.env:
        env = [pair for pair in env if pair[0].startswith(_ALWAYS)]
    refused: dict[str, str] = {}
    if not accepts.widening:
        refused = {name: value for name, value in env if name in _WIDENING and value.strip() not in ("", "disabled")}
        env = [pair for pair in env if pair[0] not in _WIDENING]
    values: dict[str, str] = {}
    for name in dict.fromkeys(name for name, _ in env):
        values[name] = one_value(name, [value for key, value in env if key == name]) or ""
    return values, refused


def with_settings(request: Request, bundle: Bundle, inventory: Inventory, accepts: Accepts) -> Request:
    """Return the request with what these variables request, as far as policy accepts them. Capabilities and
    constraints, which images set, always count."""
    values, refused = _accepted(bundle, accepts)
    capabilities = expand_capabilities(ENV_CAPABILITIES, values.get(ENV_CAPABILITIES))
    features, ignored = _features(values)
    imex = _imex(values.get(ENV_IMEX, ""), bundle.imex_volumes if accepts.volume_mounts else ())
    access = _mig_access(values, bundle, inventory)
    requirements = _requirements(values)
    if requirements and request.selection.kind == "none":  # else placement checks them for each device
        constraints.require(requirements, inventory, None)
    used = [*(FEATURES[name].variable for name in features), *access.values()]
    used += [ENV_IMEX] if imex and values.get(ENV_IMEX) else []
    lines = [f"{setting(*pair)}: policy.accept.widening does not accept it" for pair in refused.items()]
    return request._replace(
        capabilities=capabilities,
        features=features,
        imex_channels=imex,
        mig_access=tuple(access),
        requirements=requirements,
        sources=(*request.sources, *((name, values[name]) for name in used)),
        ignored=(*request.ignored, *ignored, *lines),
    )
