"""The opaque parameters of a claim or a DeviceClass. Has no side effects.

SCHEMA                        JSON schema
fields(where, value, memory)  -> {"memory": "4Gi..8Gi", "priority": "high", ...} of the claim's variable

apiVersion: gpushare.io/v1
kind: ShareParameters
computeMode: soft
priority: high
memoryLimit: 8Gi
"""

from __future__ import annotations

from typing import Any

from ...core.errors import RequestError
from ...core.quoting import shown

SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Parameters of gpushare for the devices of a claim",
    "type": "object",
    "required": ["apiVersion", "kind"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "gpushare.io/v1"},
        "kind": {"const": "ShareParameters"},
        "computeMode": {"enum": ["hard", "soft"], "description": "As GPUSHARE_COMPUTE_MODE."},
        "priority": {"enum": ["normal", "high"], "description": "As GPUSHARE_PRIORITY."},
        "memoryLimit": {
            "type": "string",
            "pattern": "^[0-9]+(Ki|Mi|Gi|Ti|k|M|G|T)?$",
            "description": "The limit of memory that is lent above the claim's memory, as in GPUSHARE_MEMORY=4Gi..8Gi.",
        },
    },
}


def checked(where: str, value: Any) -> dict[str, str]:
    """The parameters without apiVersion and kind. Raises RequestError, which quotes the first wrong key or value."""
    import jsonschema

    for error in sorted(jsonschema.Draft202012Validator(SCHEMA).iter_errors(value), key=lambda one: list(one.path)):
        known = ", ".join(SCHEMA["properties"])
        if error.validator == "additionalProperties":
            unknown = next(name for name in error.instance if name not in SCHEMA["properties"])
            raise RequestError(f"{where}: unknown key {shown(unknown)} in the parameters", f"use {known}")
        if error.validator == "required":
            missing = next(name for name in error.validator_value if name not in error.instance)
            raise RequestError(f"{where}: the parameters have no {missing}", f"write {missing}: {_expected(missing)}")
        if not error.path:
            raise RequestError(f"{where}: the parameters are {shown(error.instance)}, not an object", f"use {known}")
        name = str(error.path[0])
        raise RequestError(f"{where}: {name} is {shown(error.instance)} in the parameters", f"write {_expected(name)}")
    return {name: text for name, text in value.items() if name not in SCHEMA["required"]}


def _expected(name: str) -> str:
    rule = SCHEMA["properties"][name]
    return str(rule.get("const", " or ".join(rule.get("enum", ())) or "a size such as 8Gi"))
