"""The text of docs/metrics.md, generated from the table of metrics: a row of generated.py."""

from __future__ import annotations

from gpushare.cli import metrics
from gpushare.cli.export import PORT

HEAD = f"""\
# Metrics

Generated from the table in `hook/gpushare/cli/metrics.py` by `make docs`; a test fails if the page is out of date.

```sh
gpushare export                       # http://127.0.0.1:{PORT}/metrics, until SIGTERM
gpushare export --once                # print them
gpushare export --socket /run/m.sock  # a unix socket of mode 0600 instead
systemctl enable --now gpushare-exporter.service    # from a package
```

```yaml
scrape_configs:
  - job_name: gpushare
    static_configs: [{{targets: ["127.0.0.1:{PORT}"]}}]
```

The exporter uses loopback, without password or encryption. With `--listen 0.0.0.0` every machine that reaches the host
can read the metrics. It needs the host's pid namespace, and root, to which the leases belong. If another user runs it,
it shows that user's programs. `packaging/metrics` has alert rules for Prometheus (`alerts.yaml`) and a dashboard for
Grafana (`dashboard.json`); a package installs them below `/usr/share/doc/gpushare`.

* `container`, `pod` and `namespace` are the names in Kubernetes, from the container's `config.json`. Outside of a pod
  `container` is the id, and the other two are empty. `id` is always the engine's id, and `slot` the device's number in
  the container.
* `name` is the name that people use: that of docker or podman, NAMESPACE/POD/CONTAINER, or else the short id. `service`
  is PROJECT/SERVICE of Compose, or empty. The exporter reads names from files of the engine, so it must see the host's
  files.
* `user` is the uid of the container's first process, as the host numbers it.
* A container has metrics while it runs; its counters start at 0. gpushare caps the values that its
  processes report at the size of the device.
* Values from NVML come from the last query (`--interval`, 10 seconds). A series is missing if there is no value:
  NVML does not answer, the device does not measure it, or there is no limit.

"""
TAIL = """
## When a program bypasses the shim

A program can load the driver's library by its path and allocate memory without the shim
([security.md](security.md)). At every interval `gpushare export` reads the memory of each process from NVML, finds the
container of each process by its cgroup or its pid namespace, and compares the sum with the container's limit:

* `gpushare_memory_physical_bytes` is that sum, and `gpushare_memory_over_bytes` its part beyond the limit. The
  driver takes memory that no call can refuse, and some drivers give the shim no count. So each process may exceed the
  limit by 64 MiB, or by a quarter of a context if that is more. On a
  device of which the container has no share, nothing is allowed. For an oversubscribed share the limit here is that of
  device and host together.
* If the container is over the limit at two queries in a row, gpushare writes one line to `log.decisions`
  (`decision=exceeded`, [log.md](log.md)) and adds one to `gpushare_exceeded_total`. It does so again only after the
  container was below the limit.
* With `reconcile.action: stop` in the configuration, gpushare kills the container's first process and the processes
  that hold the memory.
* This is a check, not a limit: it does not see amounts below the allowance, uses shorter than two intervals, or device
  time. A process that NVML shows without a size counts as 0. Programs of `gpushare run` without root share a cgroup,
  so only the first process of each is attributed to it.
"""


def text() -> str:
    """Return the page."""
    lines = ["| metric | labels | meaning |", "|---|---|---|"]
    names = {
        metrics.SHARE_LABELS: "of a share",
        metrics.ACCOUNT_LABELS: "of a share, `user`",
        metrics.DEVICE_LABELS: "of a device",
    }
    for one in metrics.METRICS:
        labels = names.get(one.labels) or ", ".join(f"`{label}`" for label in one.labels)
        lines.append(f"| `{one.name}` | {labels} | {one.help} |")
    of = [
        f"Of a share: {', '.join(f'`{label}`' for label in metrics.SHARE_LABELS)}. "
        f"Of a device: {', '.join(f'`{label}`' for label in metrics.DEVICE_LABELS)}.",
        "",
    ]
    return HEAD + "\n".join([*of, *lines]) + "\n" + TAIL
