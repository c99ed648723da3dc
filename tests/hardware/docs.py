"""The text of docs/hardware.md, generated from tests/hardware/measured: a row of tools/generated.py."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.hardware.assumptions import ASSUMPTIONS, findings
from tests.hardware.checks import CHECKS, Check
from tests.hardware.session import size

MEASURED = Path(__file__).with_name("measured")
MOST_CELL = 240
ORDER = ("missed", "failed", "held", "measured", "absent", "not run")  # what a reader must know first
OLD_FORMAT = "\nThe file has format 2: in its checks of compute, the throughput decided, not the device time."

HEAD = """\
# Real hardware

`make docs` generates this page from `tests/hardware`; a test fails if the page is out of date.

The tests of gpushare use a simulated GPU. `make gpu-check` tests gpushare on a real GPU: it checks
the limits, and what gpushare assumes about GPUs and drivers.

## Does gpushare work here?

```sh
make build
make gpu-check
```

Run it as root on a machine with an NVIDIA GPU (compute capability 5.0 or later) while nothing else
uses the GPU. `make build` needs Debian or Ubuntu and a network. `make gpu-check` takes at most two
and a half minutes. It needs no network and no container engine, installs nothing, and changes no
setting of the card. It uses the first GPU, or the one in `CUDA_VISIBLE_DEVICES`. The check
`containers` also needs `runc`. Without `make build` it tests only the driver, unless it finds a
[carried shim](#carry-everything-to-a-machine-without-a-network) or can compile one. If no GPU works,
it uses the simulator and reports that in its first line.

It prints a result for each check:

| result | meaning |
|---|---|
| held | the limit, or another promise, holds on this machine |
| missed | it does not hold |
| measured | a figure without a promise; it confirms or refutes an assumption |
| failed | a program of the check failed; the JSON file has its messages |
| absent | this machine lacks what the check needs |
| not run | no time was left, or a framework does not work here without gpushare either |

The exit code is 1 if something was missed or failed, 2 if nothing could be checked, and otherwise
0. Checks that are absent or not run do not change it: see how many are `held`.

## Measure everything

```sh
make gpu-check GPU_ARGS=--all
```

This runs every check except for the named ones (see the table), and stops after 6 minutes; checks
that had no time left are reported as not run. After each check, the results so far are saved to
`build/gpu-check.json`. If a check fails, hangs or crashes, the other checks still run. If the run
was interrupted, or checks were not run, continue it:

```sh
make gpu-check GPU_ARGS="--all --resume build/gpu-check.json"
```

Turns ([compute](compute.md#turns)) are measured against time slices only on request, in five minutes:

```sh
make gpu-check GPU_ARGS="--only 'turns.*'"
```

`--resume` keeps every result and runs the other checks. It refuses a file of another GPU,
another driver or an older format.

| option | effect |
|---|---|
| `GPU_ARGS="--list"` | list the checks and their time limits |
| `GPU_ARGS="--only modules,slices"` | run these checks and `context`, which others need; with `--resume`: again |
| `GPU_ARGS="--simulated"` | use the simulator, also where there is a GPU |
| `GPU_ARGS="--short"` | shorten all checks; the figures are less exact |
| `GPU_ARGS="--out FILE"` | write the JSON file elsewhere |
| `GPU_ARGS="--budget 200"` | stop after this many seconds; later checks are reported as not run |

* **Compute.** The device itself counts how long programs had it, and the result is judged by that
  device time. The throughput is reported beside it: a card at its power limit clocks higher when it
  works less, so 30 % of the device time can be 34 % of the native throughput. Programs that run side
  by side begin behind a barrier. If they did not overlap, the check fails.
* **Compiling.** The *shim* is gpushare's library in front of the driver. After `make build`,
  `make gpu-check` keeps it up to date. In a tree without `make build`, it uses a carried
  `build/shim` (next section). Otherwise it compiles the shim, which needs a copy of `build/zstd`,
  `gcc`, `make`, `python3` 3.9 or later, and the headers of CUDA 13, from a CUDA toolkit or from the
  packages that PyTorch needs. Without a shim, only the checks of the driver itself run.
* **Frameworks.** The checks use the first `python3` that has PyTorch; `GPU_PYTHON=/path/to/python3`
  selects another one, such as that of a virtual environment, which is not in the PATH of root:
  `sudo make gpu-check GPU_PYTHON=/path/to/venv/bin/python`. CuPy, Numba, JAX and Triton are checked
  if that Python has them.
* **Private mounts.** Programs run natively and under the shim. For the run under the shim, it is
  mounted over the driver's files in a private mount namespace, and for a user other than root also
  in a user namespace. Most containers forbid both kinds of namespaces: there only the native part
  runs.

## Carry everything to a machine without a network

Build everything on a machine with a network, and pack the tree. The C library of that machine must
not be newer than the one of the machine with the GPU.

```sh
make build gpu-programs dist
build/venv/bin/pip download --no-deps --dest build/cudart nvidia-cuda-runtime-cu11
unzip -o -j -d build/gpu build/cudart/*.whl '*/libcudart.so.11.0'
cp "$(command -v runc)" /usr/lib/x86_64-linux-gnu/libseccomp.so.2 build/gpu/
git archive --format=tar --output=build/tree.tar HEAD
tar -rf build/tree.tar build/shim/libcuda.so build/shim/libnvidia-ml.so build/gpu \\
    build/dist/gpushare-*-linux-*.tar.gz
```

| part | without it |
|---|---|
| `build/shim`, `build/gpu` | the shim is compiled on the machine with the GPU, or only the driver is checked |
| the archive of `make dist` | the checks `run`, `mps` and `containers` need Python packages, or are absent |
| `runc`, `libseccomp.so.2` | the check `containers` needs a `runc` on the machine with the GPU |
| `libcudart.so.11.0` | the check `private-loader` leaves out CUDA 11 |

The machine with the GPU needs `bash`, `python3` 3.9 or later and the driver. To carry PyTorch as
well, run `pip download --dest build/wheels torch` with the Python version of that machine, then
`tar -rf build/tree.tar build/wheels`. There, in the folder `gpushare`, run
`python3 -m venv venv && venv/bin/pip install --no-index --find-links build/wheels torch`, and name
this Python: `sudo GPU_PYTHON=$PWD/venv/bin/python tests/hardware/start --all`.

Copy `build/tree.tar` to the machine with the GPU. Run there, in the folder with the copy:

```sh
mkdir gpushare && tar -xf tree.tar -C gpushare
sudo gpushare/tests/hardware/start --all
```

All figures are then in `gpushare/build/gpu-check.json`.

## Add a measurement

Copy the JSON file to `tests/hardware/measured/<gpu>-<driver>.json` (create the folder if it is
missing), run `make docs`, and send the JSON file and this page as a patch or in a bug report.
Remarks for readers go into a file of that name plus `.md`. The JSON file holds versions of GPU,
driver, kernel and libraries, paths of the driver's files, and the GPU's uuid (remove that if you like).

## What is checked

The checks run in this order. A check that reaches its time limit is stopped. Without `--all`, only
those marked "quick" run.

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
    """Return all contributed measurements, sorted by file name, each with the remarks beside it."""
    paths = sorted(MEASURED.glob("*.json"))
    remarks = [path.with_suffix(path.suffix + ".md") for path in paths]
    return [
        {**json.loads(path.read_text()), "remarks": beside.read_text().strip() if beside.exists() else ""}
        for path, beside in zip(paths, remarks)
    ]


def text(measured: Sequence[dict[str, Any]]) -> str:
    """Return the page. Only runs on hardware count."""
    rows = (f"| `{row.name}` | {row.what} | {row.limit_s:.0f} s | {_notes(row)} |" for row in CHECKS)
    lines = [HEAD + "\n".join(rows), "", *_assumptions()]
    real = [one for one in measured if not one["simulated"]]
    lines += ["", "## What was found", ""]
    if not real:
        lines.append("**There is no measurement on hardware yet.** Yours would be the first.")
    for one in real:
        lines += _measurement(one)
    return "\n".join(lines).rstrip() + "\n"


def _notes(check: Check) -> str:
    words = ("quick" if check.quick else "", "only by name" if check.named else "", NEEDS[check.needs])
    return ", ".join(filter(None, words))


def _cell(words: str) -> str:
    """Return a text that fits into a table: one line, short, without a bar."""
    line = " ".join(words.replace("|", "/").split())
    return line if len(line) <= MOST_CELL else line[: MOST_CELL - 3] + "..."


def _measurement(one: dict[str, Any]) -> list[str]:
    """Return the section of one measurement, of this format or of format 2."""
    gpu, host = one["gpu"], one["host"]
    capability, memory = gpu["compute_capability"], gpu["memory_bytes"] / (1 << 30)
    about = f"Compute capability {capability}, {gpu['multiprocessors']} multiprocessors, {memory:.1f} GiB,\n"
    about += f"CUDA {one['cuda']}, kernel {host['kernel']}, {host['libc']}."
    about += " A short run: its figures are rough." if one["short"] else ""
    about += OLD_FORMAT if one["format"] < 3 else ""
    lines = [f"### {gpu['model']}, driver {one['driver']}, {one['date'][:10]}", "", about, ""]
    if one.get("remarks"):
        lines += [one["remarks"], ""]
    lines += ["| check | | found |", "|---|---|---|"]
    lines += [
        f"| {_cell(check['what'])} | {check['verdict']} | {_cell(check['note'])} |"
        for check in sorted(one["checks"].values(), key=lambda check: ORDER.index(check["verdict"]))
    ]
    lines += ["", "| assumption | | figure |", "|---|---|---|"]
    lines += [
        f"| {found.assumption.sentence} | {found.verdict} | {_cell(found.figure)} |"
        for found in findings(one["checks"])  # of today's assumptions, whatever those of the file were
    ]
    lines.append("")
    lines += _latencies(one["checks"].get("latency", {}).get("values", {}))
    return [*lines, *_costs(one.get("costs", []))]


def _costs(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of what single objects take of the device."""
    if not rows:
        return []
    head = ["| object | device | NVML, for the process | left after its end |", "|---|---:|---:|---:|"]
    lines = []
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['item']} | {_cell(row['failed'])} | | |")
            continue
        own = "unknown" if row["process_bytes"] is None else size(row["process_bytes"])
        left = f" {size(row['left_bytes'])}" if "left_bytes" in row else ""
        lines.append(f"| {row['item']} | {size(row['device_bytes'])} | {own} |{left} |")
    return [*head, *lines, ""]


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
