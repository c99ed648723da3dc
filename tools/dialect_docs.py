#!/usr/bin/env python3
"""Print docs/dialects.md from the table of dialects, or triggers.py with --triggers.

--triggers prints hook/gpushare/request/dialects/triggers.py. `make docs` writes both files; a test compares them.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hook"))
from gpushare.request.dialects import registry

HEAD = """\
# Dialects

Generated from `hook/gpushare/request/dialects/registry.py` by `make docs`; a test compares them.

A container that another scheduler has described needs no second description: gpushare reads what that scheduler
writes into the container's environment and annotations, and keeps the limits itself. Nothing of the other system has
to run.

* Our own names win, each over what others say about the same: with `GPUSHARE_MEMORY=4Gi` a foreign memory limit is
  not even read, a foreign compute limit still counts. Where `policy.accept.widening` takes no variables, as in the
  cluster profile, a variable that is larger than the foreign limit is ignored: an image can set it.
* Two dialects that say the same are fine. Two that disagree are an error that names both words with their values.
* `NVIDIA_VISIBLE_DEVICES=all`, which images set, gives way to a dialect that names devices. A list of others
  contradicts it.
* Limits for which nobody names a device ask for one, as ours do; those of an MPS client never ask. An annotation
  reaches every container of a pod, so in a pod it counts for containers that name a device, and for one of them only.
* A limit that is malformed, has no unit, or is for a device that the container does not get keeps the container from
  starting, with the word and its value in the message.
* Some schedulers divide NVML's whole total, which includes memory that the driver reserves
  ([placement.md](placement.md#capacity)). An amount that exceeds what is free by no more than that is reduced to what
  is free, so the last container of such a scheduler fits. `explain`, `list` and the log show the request. An amount
  that exceeds it by more is refused, and so is one that would leave less than a CUDA context needs.
* Limits that are meant to go on in host memory do so where the node has a budget for it
  (`oversubscription.host_memory`, [oversubscription.md](oversubscription.md)); elsewhere the container does not start,
  and the message says which key is missing.
* Words that switch limits off (`CUDA_DISABLE_CONTROL`, `CGPU_DISABLE` and the others below) do not: whoever sets a
  variable of his container could lift his own limit. `policy.accept.switches` can allow it. They keep the other
  system's own library out of the container, as its device plugin does with `CUDA_DISABLE_CONTROL=true`, and so are a
  way to have gpushare alone keep the limits.
* `policy.accept.env` and `policy.accept.annotations` say where requests are listened to, and with
  `policy.annotations: scoped`, as in the cluster profile, none of the annotations below counts. A limit that is not
  listened to, in a container that gets a device, is refused, not forgotten. `policy.dialects` says whose words mean
  something: all, but in the cluster profile none until you name your scheduler in `policy.dialects.enabled`, since
  our own admission policy counts only what our own names ask for.
* Of pods' annotations containerd passes on those that its configuration names; `gpushare runtime configure` adds these.
* `gpushare explain BUNDLE` says which dialects were used, by which words, and what was ignored and why, also where
  nothing is asked. `--format json` has the same as `request.dialect`, `request.sources`, `request.ignored`, and
  `unused`.
* `gpushare run` listens to our own names only.

Slot: which device inside the container, from 0. Index: which device of the host, in PCI order. Minor: the number in
`/dev/nvidia<minor>`. The three differ on many hosts.

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
    words = [("variable", word) for word in row.variables] + [("annotation", word) for word in row.annotations]
    if words:
        lines += ["| name | where | about |", "|---|---|---|"]
        lines += [f"| `{word.name}`{NUMBERS[word.number]} | {where} | {ABOUT[word.about]} |" for where, word in words]
        lines.append("")
    lines += [f"* {label}: {text}." for label, text in (("Memory", row.memory), ("Compute", row.compute)) if text]
    lines += [f"* Only where `{row.gate}` is set."] if row.gate else []
    lines += [f"* {row.trap}"] if row.trap else []
    return "\n".join(lines) + "\n"


def text() -> str:
    return HEAD + "\n".join(section(row) for row in registry.ROWS)


TRIGGERS = '''"""The triggers of dialects/registry.py, which a start loads only if one of these occurs. Written
from it by `make docs`; a test compares. Start path."""

# Beginnings of variables that ask for something
BEGINNINGS = (
{beginnings})
# Beginnings of all variables
WORDS = (
{words})
# Annotations, and what they begin with
KEYS = frozenset((
{keys}))  # fmt: skip
KEY_BEGINNINGS = (
{key_beginnings})
'''


def triggers() -> str:
    lists = {
        "beginnings": registry.BEGINNINGS,
        "words": registry.WORDS,
        "keys": sorted(registry.KEYS),
        "key_beginnings": registry.KEY_BEGINNINGS,
    }
    rows = {key: "".join(f'    "{name}",\n' for name in names) for key, names in lists.items()}
    return TRIGGERS.format(**rows)


if __name__ == "__main__":
    sys.stdout.write(triggers() if sys.argv[1:] == ["--triggers"] else text())
