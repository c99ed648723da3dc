#!/usr/bin/env python3
"""Print docs/dialects.md from the table of dialects, or triggers.py with --triggers.

--triggers prints hook/gpushare/request/dialects/triggers.py. `make docs` writes both files; a test fails if one
is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hook"))
from gpushare.request.dialects import registry

HEAD = """\
# Dialects

Generated from `hook/gpushare/request/dialects/registry.py` by `make docs`; a test fails if the page is out of date.

A container that another scheduler describes needs no second description. gpushare reads the variables and annotations
that the scheduler writes, and enforces the limits itself. The scheduler's own node software does not have to run.

* GPUSHARE_* names override other dialects, each for its own setting. With `GPUSHARE_MEMORY=4Gi` a foreign memory limit
  is not parsed; a foreign compute limit still counts. An image can set variables, so where `policy.accept.widening`
  accepts none, as in the cluster profile, a variable that is larger than the foreign limit is ignored.
* Two dialects may request the same. If they disagree, the container does not start, and the error names both variables
  with their values.
* `NVIDIA_VISIBLE_DEVICES=all`, which images set, yields to a dialect that names devices. A list of other devices
  contradicts it.
* Limits without devices request a device, as in gpushare's own dialect; limits of an MPS client do not. An annotation
  reaches every container of a pod. One with `<container>` in its name counts for that container, any other for one
  container that names a device.
* A container does not start if a limit is malformed, has no unit, or is for a device that the container does not get.
  The message has the variable and its value.
* Some schedulers divide NVML's whole total, which includes memory that the driver reserves
  ([placement.md](placement.md#capacity)). An amount that exceeds what is free by no more than that is reduced to what
  is free, so the last container of such a scheduler fits. `explain`, `list` and the log show the request. An amount
  that exceeds it by more is refused, and so is one that would leave less than a CUDA context needs.
* Limits that include host memory need a budget on the node (`oversubscription.host_memory`,
  [oversubscription.md](oversubscription.md)). Without one the container does not start, and the message names the
  missing key.
* Variables that switch limits off (`CUDA_DISABLE_CONTROL`, `CGPU_DISABLE` and the others below) have no effect by
  default, since a user could lift the limit of a container by setting one. `policy.accept.switches` allows them. They
  also keep the other system's library out of the container, as its device plugin does with `CUDA_DISABLE_CONTROL=true`,
  so that gpushare alone enforces the limits.
* `policy.accept.env` and `policy.accept.annotations` decide whether variables and annotations are accepted. With
  `policy.annotations: scoped`, as in the cluster profile, only those with `<container>` in their name are. If a
  container gets a device and a limit for it is not accepted, the container does not start. `policy.dialects` selects
  the dialects: all by default, none in the cluster profile until you add your scheduler to `policy.dialects.enabled`,
  since gpushare's admission policy counts GPUSHARE_* names only.
* containerd passes on those annotations of a pod that its configuration lists; `gpushare runtime configure` adds these.
* `gpushare explain BUNDLE` shows the dialects and values that were used, and which values were ignored and why, also
  if the container requests nothing. `--format json` has the same as `request.dialect`, `request.sources`,
  `request.ignored`, and `unused`.
* `gpushare run` accepts GPUSHARE_* variables only.

Slot: number of the device inside the container, from 0. Index: number of the device on the host, in PCI order. Minor:
the number in `/dev/nvidia<minor>`. The three differ on many hosts.

"""

NUMBERS = {"slot": ", also with `_<slot>`", "index": ", also with `_<index>`", "": ""}
ABOUT = {
    registry.MEMORY: "memory",
    registry.COMPUTE: "compute",
    registry.DEVICES: "devices",
    registry.PRIORITY: "priority",
    registry.BEYOND: "host memory",
    registry.SWITCH: "switches limits on or off",
    registry.EVERYTHING: "everything",
    registry.OTHER: "other",
}


def section(row: registry.Row) -> str:
    lines = [f"## {row.name}\n", f"{row.system}.\n"]
    keys = [("variable", key) for key in row.variables] + [("annotation", key) for key in row.annotations]
    keys += [("annotation", key._replace(name=f"{registry.SCOPE}<container>.{key.name}")) for key in row.scoped]
    if keys:
        lines += ["| name | where | about |", "|---|---|---|"]
        lines += [f"| `{key.name}`{NUMBERS[key.number]} | {where} | {ABOUT[key.about]} |" for where, key in keys]
        lines.append("")
    lines += [f"* {label}: {text}." for label, text in (("Memory", row.memory), ("Compute", row.compute)) if text]
    lines += [f"* Only where `{row.gate}` is set."] if row.gate else []
    lines += [f"* {row.trap}"] if row.trap else []
    return "\n".join(lines) + "\n"


def text() -> str:
    return HEAD + "\n".join(section(row) for row in registry.ROWS)


TRIGGERS = '''"""The triggers of dialects/registry.py, which a start loads only if one of these occurs. `make docs`
generates this file; a test fails if it is out of date. Runs on the start path."""

from __future__ import annotations

from collections.abc import Iterable

# Prefixes of variables that request something
BEGINNINGS = (
{beginnings})
# Prefixes of all variables
VARIABLES = (
{variables})
# Annotations, and their prefixes
KEYS = frozenset((
{keys}))  # fmt: skip
KEY_BEGINNINGS = (
{key_beginnings})
# Prefix of annotations that name their container
SCOPE = "{scope}"


def any_annotation(names: Iterable[str]) -> bool:
    """Return whether one of these is an annotation of another scheduler."""
    return any(name in KEYS or name.startswith(SCOPE) for name in names)
'''


def triggers() -> str:
    lists = {
        "beginnings": registry.BEGINNINGS,
        "variables": registry.VARIABLES,
        "keys": sorted(registry.KEYS),
        "key_beginnings": registry.KEY_BEGINNINGS,
    }
    rows = {key: "".join(f'    "{name}",\n' for name in names) for key, names in lists.items()}
    return TRIGGERS.format(**rows, scope=registry.SCOPE)


if __name__ == "__main__":
    sys.stdout.write(triggers() if sys.argv[1:] == ["--triggers"] else text())
