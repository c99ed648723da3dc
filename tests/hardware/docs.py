"""Print docs/hardware.md, generated from tests/hardware/measured.

`make docs` writes the file; a test fails if the file is out of date.

    python3 -m tests.hardware.docs
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.hardware.assumptions import ASSUMPTIONS
from tests.hardware.checks import CHECKS

MEASURED = Path(__file__).with_name("measured")

HEAD = """\
# Real hardware

`make docs` generates this page from `tests/hardware`; a test fails if the page is out of date.

gpushare is tested on a simulated GPU. `make gpu-check` tests it on a real GPU: it checks the
limits, and what gpushare assumes about GPUs and drivers.

## Measure a GPU

```sh
make gpu-check
```

Run it as root on a machine with an NVIDIA GPU (compute capability 5.0 or later) while nothing else
uses the GPU. It takes less than 6 minutes, needs no network and no container engine, installs
nothing, and changes no setting of the card. It uses the first GPU, or the one in
`CUDA_VISIBLE_DEVICES`. After each check it writes the results so far to `build/gpu-check.json`, and
prints which assumption each figure confirms or refutes. If a check fails, hangs or crashes, the
other checks still run.

| option | effect |
|---|---|
| `GPU_ARGS="--list"` | list the checks and their time limits |
| `GPU_ARGS="--only modules,slices"` | run these checks |
| `GPU_ARGS="--short"` | shorten all checks; the figures are less exact |
| `GPU_ARGS="--out FILE"` | write the JSON file elsewhere |
| `GPU_ARGS="--budget 200"` | stop after this many seconds; later checks are reported as not run |

* **Compiling.** The *shim* is gpushare's library in front of the driver. In a tree in which
  `make build` has run, `make gpu-check` brings the shim up to date. Elsewhere it compiles the shim,
  if the folder `build/zstd` was copied there from such a tree. That needs `gcc`, `make`, `python3`
  3.9 or later and the headers of CUDA 13, from a CUDA toolkit or from the packages that PyTorch
  needs. Without a shim, only the checks of the driver itself run.
* **Frameworks.** The checks use the first `python3` that has PyTorch; `GPU_PYTHON=/path/to/python3`
  selects another one. CuPy, Numba, JAX and Triton are checked if that Python has them.
* **Private mounts.** Programs run natively and under the shim. For the run under the shim, it is
  mounted over the driver's files in a private mount namespace, and for a user other than root also
  in a user namespace. Most containers forbid both kinds of namespaces: there only the native part
  runs.

## Measure a GPU without a network

Build everything on a machine with a network, and pack the tree. The C library of that machine must
not be newer than the one of the machine with the GPU. The lines with `pip` and `unzip` are
optional: with them, the check `private-loader` covers CUDA 11. For the checks `run` and `mps`, also
run `make dist` and add `build/dist/gpushare` to the archive.

```sh
make build gpu-programs
build/venv/bin/pip download --no-deps --dest build/cudart nvidia-cuda-runtime-cu11
unzip -o -j -d build/gpu build/cudart/*.whl '*/libcudart.so.11.0'
git archive --format=tar --output=build/tree.tar HEAD
tar -rf build/tree.tar build/shim/libcuda.so build/shim/libnvidia-ml.so build/gpu
```

Copy `build/tree.tar` to the machine with the GPU, which needs `bash`, `python3` 3.9 or later and
the driver. Run there, in the folder with the copy:

```sh
mkdir gpushare && tar -xf tree.tar -C gpushare
sudo gpushare/tests/hardware/start
```

All figures are then in `gpushare/build/gpu-check.json`.

## Add a measurement

Copy the JSON file to `tests/hardware/measured/<gpu>-<driver>.json` (create the folder if it is
missing), run `make docs`, and send the JSON file and this page as a patch or in a bug report. The
JSON file holds versions of GPU, driver, kernel and libraries, paths of the driver's files, and the
GPU's uuid (remove that if you like).

## What is checked

The checks run in this order. A check that reaches its time limit is stopped.

| check | what | limit | |
|---|---|---:|---|
"""
NEEDS = {
    "": "",
    "hardware": "only on hardware",
    "torch": "only with PyTorch",
    "framework": "only with this package",
}


def measurements() -> list[dict[str, Any]]:
    """Return all contributed measurements, sorted by file name."""
    return [json.loads(path.read_text()) for path in sorted(MEASURED.glob("*.json"))]


def text(measured: Sequence[dict[str, Any]]) -> str:
    """Return the page. Only runs on hardware count."""
    rows = (f"| `{row.name}` | {row.what} | {row.limit_s:.0f} s | {NEEDS[row.needs]} |" for row in CHECKS)
    lines = [HEAD + "\n".join(rows), "", *_assumptions()]
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
        lines += ["", "| assumption | | figure |", "|---|---|---|"]
        lines += [
            f"| {found['sentence']} | {found['verdict']} | {found['figure'].replace('|', '/')} |"
            for found in one["assumptions"].values()
        ]
        lines.append("")
        lines += _latencies(one["checks"].get("latency", {}).get("values", {}))
    return "\n".join(lines).rstrip() + "\n"


def _assumptions() -> list[str]:
    head = [
        "## What gpushare assumes",
        "",
        "A measurement confirms or refutes each sentence. The last column names the file or folder of the",
        "source that relies on it.",
        "",
    ]
    rows = [f"| {row.sentence} | `{row.check}` | `{row.relies_on}` |" for row in ASSUMPTIONS]
    return [*head, "| assumption | check | relies on it |", "|---|---|---|", *rows]


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
