"""The text of docs/backends.md, generated from the table of backends and the errors for unsupported combinations: a row
of generated.py."""

from __future__ import annotations

from typing import Any, Optional

from gpushare.allocation import backends
from gpushare.allocation.backends.base import Site
from gpushare.allocation.backends.dmem import regions as dmem
from gpushare.allocation.backends.mps import state as mps
from gpushare.core import model
from gpushare.core.errors import GpushareError
from gpushare.state.ledger import Ledger
from gpushare.system import rootless

HEAD = """\
# Backends: what enforces a limit

Generated from `hook/gpushare/allocation/backends` by `make docs`; a test fails if the page is out of date.

A request sets limits; a *backend* enforces them. Memory and compute can have different backends:
with `GPUSHARE_BACKEND=dmem` the kernel enforces the memory limit and the shim the compute limit.

* Without `GPUSHARE_BACKEND` (or `--backend`, or `gpushare.io/backend`), and with `auto`, gpushare takes the first of
  `policy.allowed_backends` that can enforce the limit on that device. With `[mps, shim]` it takes MPS, and the shim
  where MPS is not running.
* With names, `mps` or `dmem,mps`, each named backend enforces the limits that it can, and the shim the rest. A named
  backend that cannot enforce its limits on this device is refused with the reason, and not replaced. `any` takes a
  device on which it can.
* A container with a limit that no backend can enforce does not start.
* `gpushare explain` shows the backends and the reasons: `held memory by dmem (requested); compute by shim (dmem does
  not enforce compute)`. The decision log has `backend=`.
* The shim is in every container. It reports the limits and counts the use, whichever backend enforces the limits, and
  enforces them too where it can.
* A whole MIG device, without a limit, needs no backend for its memory: the hardware enforces its size.
* `oversubscribe` below is memory beyond the device (`GPUSHARE_OVERSUBSCRIBE`, `memory_scaling` above 1:
  [oversubscription](oversubscription.md)). A request cannot name it. Only the shim can enforce it.

"""

DMEM = """
## dmem

Experimental: no kernel and no driver with these limits has run it
([decision](internals/decisions/2026-11-28-dmem.md)).

Needs Linux 6.14, cgroup v2, and driver 615 with CUDA 13.4. gpushare finds the device by its line in `dmem.capacity` of
the root cgroup, `nvidia/<pci address>/vidmem`. The limit is `dmem.max` of the container's cgroup, and `dmem.min` has
the same value. `gpushare-runtime` writes both to `linux.resources.unified`, and its hook (or `gpushare-hook`) checks
them. The container does not start if its cgroup has no `dmem.max`, if other processes are in the cgroup, or if the
file has another value after the write. `gpushare limit set --memory` writes both files again. Newer kernels refuse a
value below the use, and then nothing changes.

NVIDIA recommends to set limits through NVML, which adds `dmem.min` to the parent cgroups as well. gpushare does not do
that: the values would stay there after the container ends. So the kernel *denies* memory beyond the limit exactly, but
*protects* a container's memory only as far as the administrator sets `dmem.min` in the parent cgroups.

Where the kernel has no dmem controller, drivers from 615 on count the memory of each cgroup themselves. gpushare then
calls `nvmlDeviceSetMemoryLimits_v1` (soft and hard limit with the same value) when the container is created and when
the limit changes. The start waits for NVML, which takes seconds without persistence mode.

A container that [borrows memory](lending.md#with-the-limits-of-driver-615) has its request as `dmem.min` (soft limit)
and its limit as `dmem.max` (hard limit).

If cgroup v1 is mounted beside v2, runc and crun refuse a config.json with these limits. There the backend `dmem` is not
available, and `gpushare explain` gives the reason.

### What of dmem was tested

These tests run with the runc and crun of Debian 12 (1.1.5 and 1.8.1) and of Debian sid (1.3.6 and 1.28):

* On a kernel without the controller, and on cgroup v1, each runtime refuses the container with one line that names
  `dmem` or `unified`. The container does not start without its limit.
* crun writes both values into the container's cgroup before the hook runs, also request and limit of a container that
  borrows. The files are plain ones in place of the kernel's.
* Each runtime writes values of `unified` unchanged, and does not write them again for `update`, `pause` and `resume`.
  So `docker update` keeps what `gpushare limit set` wrote. The test uses another file of the cgroup.

The tests use a stand-in for NVML's `nvmlDeviceSetMemoryLimits_v1`.

These parts have **never run**, because no kernel with the controller and no GPU with driver 615 was available:

* a write into the kernel's own `dmem.max` and `dmem.min`, and the lines of the driver in `dmem.capacity`
* the enabling of the controller in `cgroup.subtree_control` by runc and crun, and systemd as the cgroup manager
* an allocation that the driver refuses because of `dmem.max`, and borrowing between `dmem.min` and `dmem.max`
* the driver's own limits through NVML

The check `dmem` of `make gpu-check` tells whether a machine has the controller with the GPU in it.
"""

GPU = model.Device(0, "GPU-0", 0, "0000:01:00.0", "GPU", 16 << 30, 0)
PART = model.Device(0, "MIG-0", 0, "0000:01:00.0", "GPU", 4 << 30, 0, parent="GPU-0", mig_index=0)
UNDIVIDED, DIVIDED = (), (PART,)
# title, request, device, the node's MIG devices, compute backends of other containers on the same device
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
        ("enforces", [" and ".join(row.enforces) for row in rows]),
        ("enforced by", [row.enforced_by for row in rows]),
        ("can be bypassed by", [row.bypassed_by for row in rows]),
        ("changes while the container runs", [row.changes_live for row in rows]),
        ("tried", [row.tested for row in rows]),
    )
    lines = ["| | " + " | ".join(f"`{row.name}`" for row in rows) + " |", "|---" * (len(rows) + 1) + "|"]
    lines += [f"| {label} | " + " | ".join(cells) + " |" for label, cells in facts]
    bad = ["", "## Refused combinations", "", "On a host with every backend:", "", "| request | reason |", "|---|---|"]
    bad += [f"| {what} | {refusal(asked, device, mig, beside)} |" for what, asked, device, mig, beside in CASES]
    bad += [
        "",
        "Also refused: a backend that is not in `policy.allowed_backends`; MPS that is not running or serves another",
        "user ([mps.md](mps.md)); `dmem` without support in kernel and driver, or without a region of the device; MPS",
        "and `dmem` for rootless users; and `dmem` for `gpushare run`, whose programs have no cgroup of their own.",
    ]
    return HEAD + "\n".join([*lines, *bad]) + "\n" + DMEM
