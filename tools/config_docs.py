"""The text of docs/config.md, generated from the table of configuration keys: a row of generated.py."""

from __future__ import annotations

import json
from typing import Any

from gpushare.config import keys
from gpushare.core import errors

HEAD = """\
# Configuration

Generated from the table of keys in `hook/gpushare/config/keys.py` by `make docs`; a test fails if the page is out of
date.

A host has one configuration file, `/etc/gpushare/config.yaml`, in YAML. Only the key `version` is required; an unknown
key is an error. A changed file applies to containers that start after the change; running containers keep their limits.

* `gpushare config check` checks the file, and reports each error with its line.
* `gpushare runtime configure ENGINE --profile workstation` (or `cluster`) writes a first file.
* `config/config.yaml` is a sample with every key.
* The directory of leases and limits is not a key. Set it with `--state DIR`, an option of the hook and of `gpushare`.
  The default is `/run/gpushare`, which gpushare mounts as a tmpfs of its own.

| key | values | default | meaning |
|---|---|---|---|
"""

TAIL = """
## Exit codes

`gpushare-hook` and `gpushare` exit with these codes. The message is one line on standard error.

| code | error | when |
|---:|---|---|
"""

WHEN = {
    "GpushareError": "another error that needs action",
    "RequestError": "the request is invalid",
    "DeviceError": "the driver or a device is missing",
    "KernelError": "the kernel refused an operation; its name and path are in the message",
    "CapacityError": "the container requests more than is free now",
    "PolicyError": "the container requests something that policy does not allow",
    "ConfigError": "the configuration file is wrong",
}


def values(schema: dict[str, Any]) -> str:
    """Describe briefly which values the schema accepts."""
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"] if value and value is not True)
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema == {"type": "object"}:
        return "any keys"
    if schema["type"] == "object":
        return "entries with " + ", ".join(f"`{name}`" for name in schema["properties"])
    if schema["type"] == "array":
        return (
            f"list, each {values(schema['items'])}"
            if "pattern" in schema["items"]
            else f"list of {values(schema['items'])}"
        )
    if "minimum" in schema:
        return f"{schema['minimum']} to {schema['maximum']}"
    if "pattern" in schema:
        return keys.PATTERNS[schema["pattern"]]
    return {"boolean": "`true`, `false`", "string": "text", "number": "number"}[schema["type"]]


def text() -> str:
    rows = [
        f"| `{key.path}` | {values(key.schema)} | `{json.dumps(key.default)}` | {key.description} |\n"
        for key in keys.KEYS
    ]
    codes = sorted((getattr(errors, name).exit_code, name, when) for name, when in WHEN.items())
    return HEAD + "".join(rows) + TAIL + "".join(f"| {code} | {name} | {when} |\n" for code, name, when in codes)
