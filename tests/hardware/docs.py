"""Print docs/hardware.md, generated from tests/hardware/measured.

`make docs` writes the file; a test compares it with this output.

    python3 -m tests.hardware.docs
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.hardware.checks import CHECKS

MEASURED = Path(__file__).with_name("measured")

HEAD = """\
# Real hardware

Generated from `tests/hardware/measured` by `make docs`; a test compares them.

Everything else in this project is tested on a simulated GPU. This page says what was found on real ones.

## Measure yours

    make gpu-check

on a machine with an NVIDIA GPU (compute capability 5.0 or later), best as root, with nothing else running on the GPU.
It takes at most 8 minutes, needs no network and no container engine, and changes no setting of the card. It prints a
table and writes `build/gpu-check.json`. The first GPU is used, or the one that `CUDA_VISIBLE_DEVICES` names.

* **What it needs.** `gcc`, `make`, `python3` 3.9 and the header `cuda.h` of CUDA 13 (of a CUDA toolkit, or of a
  Python package of NVIDIA's); with `nvml.h` also the shim before NVML. With a network it installs what is missing. Or
  build elsewhere, on a machine whose C library is not newer: `make build gpu-programs`, and carry `build/shim`
  and `build/gpu` over.
* **What it does.** Programs run natively and under the shim, in a mount namespace in which the shim lies over the
  driver's files; for an ordinary user that is a user namespace. Where neither is allowed (in most containers) it says
  so, and does the native part.
* **PyTorch** takes part if the `python3` in `PATH` has it.
* `make gpu-check GPU_ARGS="--only memory.plain,compute.30"` runs some of the checks; `--short` shortens all of them.

To send a measurement: add the JSON file to `tests/hardware/measured` as `<gpu>-<driver>.json`, run `make docs`, and
send both, as a patch or in a bug report. It
holds GPU, driver, kernel and library versions, paths of the driver's files, and the GPU's uuid (remove that if you
like).

## What is checked

| check | what | |
|---|---|---|
"""
NEEDS = {"": "", "hardware": "only on hardware", "torch": "only with PyTorch"}


def measurements() -> list[dict[str, Any]]:
    """Return all contributed measurements, sorted by file name."""
    return [json.loads(path.read_text()) for path in sorted(MEASURED.glob("*.json"))]


def text(measured: Sequence[dict[str, Any]]) -> str:
    """Return the page. Only runs on hardware count."""
    lines = [HEAD + "\n".join(f"| `{check.name}` | {check.what} | {NEEDS[check.needs]} |" for check in CHECKS)]
    real = [one for one in measured if not one["simulated"]]
    lines += ["", "## What was found", ""]
    if not real:
        lines.append("**There is no measurement on hardware yet.** Yours would be the first.")
    for one in real:
        gpu, host = one["gpu"], one["host"]
        lines += [f"### {gpu['model']}, driver {one['driver']}, {one['date'][:10]}", ""]
        capability, memory = gpu["compute_capability"], gpu["memory_bytes"] / (1 << 30)
        lines += [
            f"Compute capability {capability}, {gpu['multiprocessors']} multiprocessors, {memory:.1f} GiB, "
            f"CUDA {one['cuda']}, kernel {host['kernel']}, {host['libc']}."
            + (" A short run: its figures are rough." if one["short"] else ""),
            "",
            "| check | | found |",
            "|---|---|---|",
        ]
        lines += [
            f"| {check['what']} | {check['verdict']} | {check['note'].replace('|', '/')} |"
            for check in one["checks"].values()
        ]
        lines.append("")
        lines += _latencies(one["checks"].get("latency", {}).get("values", {}))
    return "\n".join(lines).rstrip() + "\n"


def _latencies(values: dict[str, dict[str, Any]]) -> list[str]:
    rows = [(name, value) for name, value in values.items() if "added_ns" in value]
    if not rows:
        return []
    head = ["| call | native, ns | under the shim, ns |", "|---|---:|---:|"]
    return [
        *head,
        *(f"| {name.replace('_', ' ')} | {one['native_ns']:,} | {one['shim_ns']:,} |" for name, one in rows),
        "",
    ]


if __name__ == "__main__":
    sys.stdout.write(text(measurements()))
