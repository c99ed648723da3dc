#!/usr/bin/env python3
"""Print docs/backends.md, generated from the table of backends and the errors for unsupported combinations.

`make docs` writes the file; a test compares it with this output.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Optional

from gpushare.allocation.backends.base import Site

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hook"))
from gpushare.allocation import backends
from gpushare.allocation.backends.dmem import regions as dmem
from gpushare.allocation.backends.mps import state as mps
from gpushare.core import model
from gpushare.core.errors import GpushareError
from gpushare.state.ledger import Ledger
from gpushare.system import rootless

HEAD = """\
# Who holds a limit

Generated from `hook/gpushare/allocation/backends` by `make docs`; a test compares them.

A request names limits; a *backend* holds them. Memory and compute have holders of their own: `GPUSHARE_BACKEND=dmem` is
memory by the kernel and compute by the shim.

* Without `GPUSHARE_BACKEND` (or `--backend`, or `gpushare.io/backend`), and with `auto`, each limit is held by the
  first of `policy.allowed_backends` that can on that device. `[mps, shim]` makes MPS the usual one, and the shim what
  comes where it is not running.
* With names, `mps` or `dmem,mps`, each holds what it is for, and the shim what none of them is for. One that cannot is
  refused, with the reason; it is not replaced. `any` takes a device where it can.
* No limit is ever without a holder: the container does not start then.
* `gpushare explain` says who holds what, and why: `held memory by dmem (asked); compute by shim (dmem does not hold
  compute)`. The log of decisions has `backend=`.
* The shim stands in every container. Whoever enforces a limit, the shim shows it and counts, and keeps it too where it
  can.
* All of a MIG device, without a limit, needs no backend for its memory: that is the hardware's.
* Memory beyond the device (`GPUSHARE_OVERSUBSCRIBE`, `memory_scaling` above 1: [more](oversubscription.md))
  is `oversubscribe` below, a name that nobody asks for: who holds the memory of such a share lets it go on, and that is
  the shim alone.

"""

DMEM = """
## dmem

Linux 6.14, cgroup v2, driver 615 with CUDA 13.4. Found by the device's line in `dmem.capacity` of the root cgroup,
`nvidia/<pci address>/vidmem`. The limit is `dmem.max` of the container's cgroup, and the same figure `dmem.min`:
`gpushare-runtime` puts it into `linux.resources.unified`, and its hook (or `gpushare-hook`) sees to it that it is
there. Or the container does not start: when its cgroup has no `dmem.max`, or other processes are in it, or the file
does not say it afterwards. `gpushare limit set --memory` writes them anew; below what is in use newer kernels refuse
that, and then nothing has changed.

NVIDIA asks for limits to be set through NVML, which adds `dmem.min` to the cgroups above as well. This does not: that
would stay there when the container ends. So what the kernel *protects* for a container is what the cgroups above it are
given by hand, and what it *denies* is exact.

Where the kernel has no dmem controller, a driver of 615 and later counts for each cgroup by itself, and is told through
`nvmlDeviceSetMemoryLimits_v1` (soft and hard limit the same figure), when the container is made and when the limit
changes. The start then waits for NVML, which without persistence mode takes seconds.

All of this was tried on cgroup trees of plain files, where real crun wrote what `gpushare-runtime` had put into
config.json, and with a stand-in for that NVML; on a kernel without the controller real runc and crun start nothing. It
was **not run on hardware**; the check `dmem` of `make gpu-check` says whether a machine has
the controller, and the GPU in it.
"""

GPU = model.Device(0, "GPU-0", 0, "0000:01:00.0", "GPU", 16 << 30, 0)
PART = model.Device(0, "MIG-0", 0, "0000:01:00.0", "GPU", 4 << 30, 0, parent="GPU-0", mig_index=0)
UNDIVIDED, DIVIDED = (), (PART,)
# title, request, device, the node's MIG devices, backends that hold the compute of containers on the same device
CASES: tuple[tuple[str, dict[str, Any], model.Device, tuple[model.Device, ...], tuple[str, ...]], ...] = (
    ("`mps` with a soft compute limit", {"backend": "mps", "compute_mode": "soft"}, GPU, UNDIVIDED, ()),
    ("`mps` with a high priority", {"backend": "mps", "priority": 1}, GPU, UNDIVIDED, ()),
    ("`mps` with oversubscribed memory", {"backend": "mps", "oversubscribe": True}, GPU, UNDIVIDED, ()),
    ("`mps` with several GPUs", {"backend": "mps", "selection": model.Selection("any", 2)}, GPU, UNDIVIDED, ()),
    ("`mps` on a MIG device", {"backend": "mps"}, PART, DIVIDED, ()),
    ("`mps` on a GPU that is divided into MIG devices", {"backend": "mps"}, GPU, DIVIDED, ()),
    ("`mps` beside containers without it", {"backend": "mps"}, GPU, UNDIVIDED, ("shim",)),
    ("`shim` beside containers of MPS", {"backend": "shim"}, GPU, UNDIVIDED, ("mps",)),
    ("`dmem` on a MIG device", {"backend": "dmem"}, PART, DIVIDED, ()),
    ("`dmem` with oversubscribed memory", {"backend": "dmem", "oversubscribe": True}, GPU, UNDIVIDED, ()),
    ("`dmem` without a memory limit", {"backend": "dmem", "memory": ()}, GPU, UNDIVIDED, ()),
)


def _nothing_against(device: model.Device, inventory: model.Inventory) -> Optional[str]:
    return None


def _runs(uuid: str, state_dir: str) -> mps.MpsState:
    return mps.MpsState(driver_version="615", thread_percent=100, clients=60)


def refusal(asked: dict[str, Any], device: model.Device, mig: tuple[model.Device, ...], beside: tuple[str, ...]) -> str:
    """Return the error for a case, on a host that supports every backend."""
    was = mps.state, dmem.unsupported, rootless.is_rootless
    try:
        mps.state = _runs
        dmem.unsupported = _nothing_against
        rootless.is_rootless = lambda: False
        rules = model.Policy(allowed_backends=tuple(backends.BACKENDS))
        node = model.Node(model.Config(policy=rules), model.Inventory("/", "615", (GPU,), mig=mig))
        memory = ((None, model.Amount(1 << 30, None, "1Gi")),)
        request = model.Request(
            "own", **{"selection": model.Selection("any", 1), "capabilities": (), "memory": memory, **asked}
        )
        site = Site(device, request, node, Ledger({}, holding={device.uuid: frozenset(beside)}))
        backends.choose(bool(request.memory), True, site)
    except GpushareError as error:
        return error.brief
    finally:
        mps.state, dmem.unsupported, rootless.is_rootless = was
    raise AssertionError(f"{asked} is not refused")


def text() -> str:
    """Return the page."""
    rows = (*backends.BACKENDS.values(), backends.BEYOND)
    facts = (
        ("holds", [" and ".join(row.enforces) for row in rows]),
        ("enforced by", [row.enforced_by for row in rows]),
        ("can be bypassed by", [row.bypassed_by for row in rows]),
        ("changes while the container runs", [row.changes_live for row in rows]),
        ("tried", [row.tested for row in rows]),
    )
    lines = ["| | " + " | ".join(f"`{row.name}`" for row in rows) + " |", "|---" * (len(rows) + 1) + "|"]
    lines += [f"| {label} | " + " | ".join(cells) + " |" for label, cells in facts]
    bad = ["", "## What is refused", "", "On a host that has all of them:", "", "| asked | the reason |", "|---|---|"]
    bad += [f"| {what} | {refusal(asked, device, mig, beside)} |" for what, asked, device, mig, beside in CASES]
    bad += [
        "",
        "Besides: what is not in `policy.allowed_backends`; MPS that is not running, or serves others",
        "([mps.md](mps.md)); `dmem` where neither kernel nor driver has it, or no region; both for a user",
        "without rights over the host; and `dmem` for `gpushare run`, whose programs have no cgroup of their own.",
    ]
    return HEAD + "\n".join([*lines, *bad]) + "\n" + DMEM


if __name__ == "__main__":
    print(text(), end="")
