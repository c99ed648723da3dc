"""The text of docs/dialects.md, generated from the table of dialects: a row of generated.py."""

from __future__ import annotations

from gpushare.request.dialects import registry

HEAD = """\
# Dialects

Generated from `hook/gpushare/request/dialects/registry.py` by `make docs`; a test fails if the page is out of date.

A container that another scheduler describes needs no second description. gpushare reads the variables and annotations
that the scheduler writes, and enforces the limits itself. The scheduler's own node software does not have to run.

* GPUSHARE_* names override other dialects, each for its own setting. With `GPUSHARE_MEMORY=4Gi`, gpushare ignores the
  memory limit of another scheduler, but not its compute limit. An image can set variables. So where
  `policy.accept.widening` does not accept them, as in the cluster profile, gpushare ignores a GPUSHARE_* limit that is
  larger than the other scheduler's. If it is larger on one device and smaller on another, the container does not start.
* A container with variables of two schedulers does not start, because nothing tells which of them chose its share.
  Exceptions are dialects that one system sets together ("Beside" below). They may request the same; if they disagree,
  the container does not start either. The error names both variables with their values. Leave one scheduler's
  variables out, or list its dialect in `policy.dialects.disabled`.
* A dialect that names devices overrides `NVIDIA_VISIBLE_DEVICES=all`, which images set. It contradicts a list of other
  devices in that variable.
* Limits without devices request a device, as in gpushare's own dialect; limits of an MPS client do not. An annotation
  reaches every container of a pod. If its name contains `<container>`, it counts for that container. Any other
  annotation counts for one container that names a device.
* A container does not start if a limit is malformed, has no unit, or is for a device that the container does not get.
  The message has the variable and its value.
* Some schedulers divide NVML's whole total, which includes memory that the driver reserves
  ([placement.md](placement.md#capacity)). If an amount exceeds the free memory by at most this reserved memory,
  gpushare reduces it to the free memory, so the last container of such a scheduler fits. `explain`, `list` and the log
  show the request. gpushare refuses an amount that exceeds the free memory by more, and a reduced amount that is too
  small for a CUDA context.
* Limits that include host memory need a budget on the node (`oversubscription.host_memory`,
  [oversubscription.md](oversubscription.md)). Without one the container does not start, and the message names the
  missing key.
* Variables that switch limits off (`CUDA_DISABLE_CONTROL`, `CGPU_DISABLE` and the others below) have no effect by
  default, because a user could set one to lift the limit of a container. `policy.accept.switches` allows them. You can
  also set such a variable to keep the other system's library out of the container: its device plugin does that for
  `CUDA_DISABLE_CONTROL=true`. Then gpushare alone enforces the limits.
* `policy.accept.env` and `policy.accept.annotations` decide whether variables and annotations count. With
  `policy.annotations: scoped`, as in the cluster profile, only annotations with `<container>` in their name count. If a
  container gets a device and policy does not accept the limit for it, the container does not start.
* `policy.dialects` selects the dialects. By default all count. In the cluster profile none counts until you add your
  scheduler to `policy.dialects.enabled`, because gpushare's admission policy counts GPUSHARE_* names only.
* containerd passes on only the annotations of a pod that its configuration lists. `gpushare runtime configure` adds the
  annotations of the dialects to that list.
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


def _rows(names: tuple[str, ...]) -> str:
    return "any dialect" if "*" in names else ", ".join(f"`{name}`" for name in names)


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
    lines += [f"* Beside: {_rows(row.beside)}."] if row.beside else []
    lines += [f"* {row.trap}"] if row.trap else []
    return "\n".join(lines) + "\n"


def text() -> str:
    return HEAD + "\n".join(section(row) for row in registry.ROWS)
