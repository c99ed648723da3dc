#!/usr/bin/env python3
"""Print docs/metrics.md, generated from the table of metrics.

`make docs` writes the file; a test compares it with this output.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hook"))
from gpushare.cli import metrics
from gpushare.cli.export import PORT

HEAD = f"""\
# Metrics

Generated from the table in `hook/gpushare/cli/metrics.py` by `make docs`; a test compares them.

    gpushare export                       # http://127.0.0.1:{PORT}/metrics, until SIGTERM
    gpushare export --once                # print them
    gpushare export --socket /run/m.sock  # a unix socket of mode 0600 instead
    systemctl enable --now gpushare-exporter.service    # from a package

    scrape_configs:
      - job_name: gpushare
        static_configs: [{{targets: ["127.0.0.1:{PORT}"]}}]

It serves on loopback, without password or encryption; `--listen 0.0.0.0` is for everybody who reaches the host. It
needs root (leases are root's) and the host's pid namespace; for another user it shows what he has himself. Alert
rules for Prometheus are in `packaging/metrics/alerts.yaml`, a dashboard for Grafana in
`packaging/metrics/dashboard.json` (from a package: below `/usr/share/doc/gpushare`).

* `container`, `pod` and `namespace` are those of Kubernetes, from the container's `config.json`; outside of a pod
  `container` is its id and the others are empty. `id` is always the engine's id, `slot` the device's number in the
  container.
* A container is shown while it runs; its counters begin at 0 when it starts. What its processes say of themselves is
  not believed beyond what the device has.
* What NVML says is of the last look (`--interval`, 10 seconds). A series is missing where nobody knows its value: NVML
  does not answer, the device does not measure it, there is no limit.

"""
TAIL = """
## When a program goes round the shim

A program can load the driver's library by its path and allocate without asking the shim
([security.md](security.md)). At every interval `gpushare export` asks NVML for the memory of each process, finds the
container of each by its cgroup, else by its pid namespace, and compares the sum with the container's limit:

* `gpushare_memory_physical_bytes` is that sum, `gpushare_memory_over_bytes` what of it is beyond the limit. The size of
  CUDA contexts is known only about, so 64 MiB, or a quarter of a context where that is more, are allowed for each
  process; on a device of which the container has no share nothing is. The limit of a share that goes on in host
  memory is here what it has on both together.
* Over at two looks in a row: one line in `log.decisions` (`decision=exceeded`, [log.md](log.md)), one more in
  `gpushare_exceeded_total`. There is another when it has been below in between.
* With `reconcile.action: stop` in the configuration its first process and those that hold the memory are killed.
* Less than the allowance, less than two intervals, and device time are not seen: this is a watch, not a limit.
  A process that NVML shows without a size counts as 0; programs of `gpushare run` without rights share a cgroup, so
  only their first process is theirs.
"""


def text() -> str:
    """Return the page."""
    lines = ["| metric | labels | meaning |", "|---|---|---|"]
    names = {metrics.SHARE_LABELS: "of a share", metrics.DEVICE_LABELS: "of a device"}
    for one in metrics.METRICS:
        labels = names.get(one.labels) or ", ".join(f"`{label}`" for label in one.labels)
        lines.append(f"| `{one.name}` | {labels} | {one.help} |")
    of = [
        f"Of a share: {', '.join(f'`{label}`' for label in metrics.SHARE_LABELS)}. "
        f"Of a device: {', '.join(f'`{label}`' for label in metrics.DEVICE_LABELS)}.",
        "",
    ]
    return HEAD + "\n".join([*of, *lines]) + "\n" + TAIL


if __name__ == "__main__":
    print(text(), end="")
