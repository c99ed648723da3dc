#!/usr/bin/env python3
"""Print docs/config.md, generated from the table of configuration keys.

`make docs` writes the file; a test fails if the file is out of date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hook"))
from gpushare.config import keys
from gpushare.core import errors

HEAD = """\
# Configuration

Generated from the table of keys in `hook/gpushare/config/keys.py` by `make docs`; a test fails if the page is out of
date.

One file for a host, `/etc/gpushare/config.yaml`, in YAML. Only `version` must be there; an unknown key is an error.
`gpushare config check` reads the file and reports errors with their line. A container that starts after a change
uses the changed file; running containers keep their limits. `config/config.yaml` is a sample with every key.
`gpushare runtime configure --profile workstation` (or `cluster`) writes one to begin with.
Where leases and limits are kept is no key but an option, `--state DIR` of the hook and of `gpushare`; without it they
are in `/run/gpushare`, a tmpfs of its own.

| key | values | default | meaning |
|---|---|---|---|
"""

TAIL = """
## Exit codes

Of `gpushare-hook` and `gpushare`. The message is one line on standard error.

| code | error | when |
|---:|---|---|
"""

WHEN = {
    "GpushareError": "anything else that a person must act on",
    "RequestError": "the container asks for something that makes no sense",
    "DeviceError": "the driver or a device is not there",
    "KernelError": "the kernel refused an operation; its name and path are in the message",
    "CapacityError": "the container asks for more than is free now",
    "PolicyError": "the container asks for something that policy does not allow",
    "ConfigError": "the configuration file is wrong",
}


def values(schema: dict[str, Any]) -> str:
    """Describe briefly which values the schema accepts."""
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
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


if __name__ == "__main__":
    sys.stdout.write(text())
