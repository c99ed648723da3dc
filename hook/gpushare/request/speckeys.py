"""The keys of config.json that gpushare depends on, in one case of letters. Pure, start path.

refuse_other_case(spec, KEYS) -> None     RequestError for a key that the runtime would accept and Python would not
section(spec, *keys)          -> dict     the object at these keys, items: the list; both check the type
"""

from __future__ import annotations

from typing import Any

from ..core.errors import RequestError
from ..core.quoting import shown


def _shape(**below: str) -> dict[str, Any]:
    return {key: {word: {} for word in words.split()} for key, words in below.items()}


# All keys of config.json that gpushare reads. Objects in lists have the keys of the list.
KEYS: dict[str, Any] = {
    **_shape(annotations="", mounts="destination options source type", root="path"),
    "hooks": _shape(**dict.fromkeys(("prestart", "createRuntime", "createContainer", "startContainer"), "args path")),
    "linux": {
        **_shape(cgroupsPath="", devices="major minor path type", namespaces="path type"),
        **_shape(gidMappings="containerID hostID size", uidMappings="containerID hostID size"),
        "resources": _shape(devices="access allow major minor type"),
    },
    "process": _shape(env="", user="uid", capabilities="bounding inheritable permitted effective ambient"),
}


def refuse_other_case(found: Any, known: dict[str, Any], place: str = "") -> None:
    """Refuse keys in another case. The runtime's parser in Go accepts any case of letters (and U+017F for s), so it
    would apply a device rule that gpushare has not seen. No engine writes such keys."""
    for one in found if isinstance(found, list) else (found,) if known else ():
        for key, value in one.items() if isinstance(one, dict) else ():
            if key in known:
                refuse_other_case(value, known[key], f"{place}{key}.")
            elif key.casefold() in map(str.casefold, known):
                raise RequestError(
                    f"config.json: {place}{shown(key)} is a known key in the wrong case",
                    "write it as the specification does",
                )


def section(spec: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Return the object at `keys`; empty if absent or null. Raise for any other type."""
    here = spec
    for depth, key in enumerate(keys):
        value = here.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise RequestError(f"config.json: {'.'.join(keys[: depth + 1])} must be an object")
        here = value
    return here


def items(spec: dict[str, Any], *keys: str) -> list[Any]:
    """Return the list at `keys`; empty if absent or null. Raise for any other type."""
    value = section(spec, *keys[:-1]).get(keys[-1])
    if value is None:
        return []
    if not isinstance(value, list):
        raise RequestError(f"config.json: {'.'.join(keys)} must be a list")
    return value
