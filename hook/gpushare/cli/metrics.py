"""The metrics of `gpushare export`: their table, and their samples for Prometheus.

Each scrape reads leases and usage files, as `gpushare top` does (sample.py). The driver's numbers are from its last
query (`Seen`). Metric names follow promtool's rules. docs/metrics.md is generated from the table; a test fails if
the page is out of date.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..core import constants
from ..core.errors import GpushareError
from ..gpu.nvml_usage import Gpu
from ..monitor.overuse import Comparison, Finding
from ..state import log
from ..state.accounts import Account
from . import facts
from .options import Paths
from .sample import Line, Sampler

SHARE_LABELS = ("container", "pod", "namespace", "uuid", "slot", "id", "name", "service")
ACCOUNT_LABELS = (*SHARE_LABELS, "user")
DEVICE_LABELS = ("uuid", "device", "model")


class Metric(NamedTuple):
    """One metric: a counter if its name ends with _total, else a gauge."""

    name: str
    labels: tuple[str, ...]
    help: str


METRICS = (
    Metric("gpushare_memory_used_bytes", SHARE_LABELS, "Memory that the container's processes report."),
    Metric("gpushare_memory_driver_bytes", SHARE_LABELS, "The part of it for contexts, code, streams and graphs."),
    Metric("gpushare_memory_limit_bytes", SHARE_LABELS, "Memory limit of the share; none without a limit."),
    Metric("gpushare_memory_request_bytes", SHARE_LABELS, "Memory request of a share that borrows up to its limit."),
    Metric("gpushare_memory_borrowed_bytes", SHARE_LABELS, "Memory above the request, which can be taken back."),
    Metric("gpushare_memory_host_bytes", SHARE_LABELS, "Part of a share in host memory: oversubscribed or suspended."),
    Metric("gpushare_memory_physical_bytes", SHARE_LABELS, "Memory of the container's processes, by driver count."),
    Metric("gpushare_memory_over_bytes", SHARE_LABELS,
           "Memory by the driver's count beyond the limit and the uncertainty of context sizes; 0: within the limit."),
    Metric("gpushare_compute_used_ratio", SHARE_LABELS, "Share of the device's time over the last second, 0 to 1."),
    Metric("gpushare_compute_limit_ratio", SHARE_LABELS, "Compute limit of the share, 0 to 1; none without a limit."),
    Metric("gpushare_compute_seconds_total", SHARE_LABELS, "Device time that the container used."),
    Metric("gpushare_throttled_seconds_total", SHARE_LABELS,
           "Time that threads waited because of the compute limit, summed over threads."),
    Metric("gpushare_oom_total", SHARE_LABELS, "Allocations refused by the memory limit."),
    Metric("gpushare_account_granted_seconds_total", ACCOUNT_LABELS,
           "Device time that the container was granted: its compute limit multiplied by time."),
    Metric("gpushare_account_used_seconds_total", ACCOUNT_LABELS, "Device time that the container used."),
    Metric("gpushare_account_granted_byte_seconds_total", ACCOUNT_LABELS,
           "Memory that the container was granted, multiplied by time."),
    Metric("gpushare_account_used_byte_seconds_total", ACCOUNT_LABELS,
           "Memory that the container used, multiplied by time."),
    Metric("gpushare_account_peak_bytes", ACCOUNT_LABELS, "Most memory that the container used at one time."),
    Metric("gpushare_account_refused_total", ACCOUNT_LABELS, "Allocations refused by the memory limit."),
    Metric("gpushare_account_throttled_seconds_total", ACCOUNT_LABELS,
           "Time that threads waited because of the compute limit, summed over threads."),
    Metric("gpushare_account_suspended_seconds_total", ACCOUNT_LABELS, "Time that the container was suspended."),
    Metric("gpushare_exceeded_total", ("container", "pod", "namespace", "id", "name", "service"),
           "How often the container exceeded its memory limit by the driver's count."),
    Metric("gpushare_unlimited_processes", ("container", "pod", "namespace", "id", "name", "service"),
           "Processes of the container that use a GPU without gpushare's library, so without a limit."),
    Metric("gpushare_device_memory_bytes", DEVICE_LABELS, "Memory of the device."),
    Metric("gpushare_device_memory_used_bytes", DEVICE_LABELS, "Memory in use on the device, as NVML reports."),
    Metric("gpushare_device_memory_granted_bytes", DEVICE_LABELS, "Sum of memory limits on the device."),
    Metric("gpushare_device_memory_unshared_bytes", DEVICE_LABELS,
           "Memory of processes outside of containers with a share, as NVML reports."),
    Metric("gpushare_device_compute_granted_ratio", DEVICE_LABELS, "Sum of hard compute limits on the device."),
    Metric("gpushare_device_utilization_ratio", DEVICE_LABELS, "Fraction of recent time with work, as NVML reports."),
    Metric("gpushare_device_temperature_celsius", DEVICE_LABELS, "Temperature of the GPU, as NVML reports."),
    Metric("gpushare_device_power_watts", DEVICE_LABELS, "Power that the GPU draws, as NVML reports."),
    Metric("gpushare_device_containers", DEVICE_LABELS, "Containers with a share of the device."),
    Metric("gpushare_refused_starts_total", (), "Containers that did not start because their request was refused."),
    Metric("gpushare_damaged_leases", (), "Leases that cannot be read; their devices are blocked."),
    Metric("gpushare_state_up", (), "1 if leases and devices could be read at this scrape."),
    Metric("gpushare_driver_up", (), "1 if NVML answered the last query."),
    Metric("gpushare_reconcile_timestamp_seconds", (), "When use was last compared with limits, unix time."),
    Metric("gpushare_build_info", ("version",), "Version of gpushare; always 1."),
)  # fmt: skip


class Seen(NamedTuple):
    """The driver's last answer, and its comparison with limits. `gpus` None: the driver did not answer."""

    gpus: Optional[dict[str, Gpu]] = None
    comparison: Comparison = Comparison((), {})
    time_s: float = 0.0  # unix; 0: never
    exceeded: dict[str, int] = {}
    unlimited: Optional[dict[str, int]] = None  # container id -> number of such processes


def _names(one: facts.Container) -> tuple[str, ...]:
    """The labels container, pod and namespace. The name of a container without a pod is its id."""
    namespace, pod, container = one.name.pod or ("", "", "")
    return _utf8(container or one.id), _utf8(pod), _utf8(namespace)


def _ids(one: facts.Container) -> tuple[str, ...]:
    """The labels id, name and service. Without a name, `name` is the id as tables show it, so that it suits legends."""
    return _utf8(one.id), _utf8(one.name.shown or constants.short(one.id)), _utf8(one.name.service)


def _user(one: facts.Container) -> str:
    """The label user: the uid of the first process, or empty if the lease is older than gpushare's record of it."""
    return "" if one.lease is None or one.lease.uid < 0 else str(one.lease.uid)


class Metrics(Collector):
    """The collector that prometheus_client calls at each scrape. export.py replaces `seen` as a whole after each query
    of the driver. A lock serialises concurrent scrapes."""

    def __init__(self, paths: Paths, version: str) -> None:
        self.seen = Seen()
        self._sampler = Sampler(paths)
        self._version = version
        self._state_dir = paths.state_dir
        self._refused, self._refusals = set(log.refusals(self._state_dir)), 0  # an earlier exporter counted these
        self._scrape_lock = threading.Lock()

    def describe(self) -> Iterator[Any]:
        """The metrics without samples, which a registry requests; reads nothing."""
        yield from _families().values()

    def collect(self) -> Iterator[Any]:
        with self._scrape_lock:
            families = _families()
            self._fill(families)
        yield from families.values()

    def _count_refusals(self) -> int:
        """The refusals so far. gpushare keeps the last ones only; kubelet starts a refused container again under
        another id, and docker under the same one."""
        found = set(log.refusals(self._state_dir))
        self._refusals += len(found - self._refused)
        self._refused = found
        return self._refusals

    def _fill(self, families: dict[str, Any]) -> None:
        seen = self.seen

        def put(name: str, labels: tuple[str, ...], value: Optional[float]) -> None:
            if value is not None:
                families[name].add_metric(labels, value)

        put("gpushare_build_info", (self._version,), 1)
        put("gpushare_driver_up", (), int(seen.gpus is not None))
        put("gpushare_reconcile_timestamp_seconds", (), seen.time_s or None)
        try:
            sample = self._sampler.take()
        except (GpushareError, OSError):
            put("gpushare_state_up", (), 0)
            return
        put("gpushare_state_up", (), int(not sample.note))
        put("gpushare_refused_starts_total", (), self._count_refusals())
        put("gpushare_damaged_leases", (), sum(line.container.state == "damaged" for line in sample.lines))
        lines = [line for line in sample.lines if line.use is not None and line.container.state not in facts.GONE]
        findings = {(one.id, one.uuid): one for one in seen.comparison.findings}
        containers = {line.container.id: line.container for line in lines}
        for line in lines:
            assert line.use is not None
            uuid = line.use.share.device.uuid
            labels = (*_names(line.container), uuid, str(line.use.share.slot), *_ids(line.container))
            for name, value in _of_share(line, findings.pop((line.container.id, uuid), None)):
                put(name, labels, value)
            for name, value in _of_account(line.use.account):
                put(name, (*labels, _user(line.container)), value)
        for (container_id, uuid), one in findings.items():  # usage of a device without a share of it
            container = containers.get(container_id)
            if container is not None and one.slot is None:
                labels = (*_names(container), uuid, "", *_ids(container))
                put("gpushare_memory_physical_bytes", labels, one.physical_bytes)
                put("gpushare_memory_over_bytes", labels, one.over_bytes)
        for container_id, container in containers.items():
            count = seen.exceeded.get(container_id, 0)
            put("gpushare_exceeded_total", (*_names(container), *_ids(container)), count)
            if seen.unlimited is not None:
                number = seen.unlimited.get(container_id, 0)
                put("gpushare_unlimited_processes", (*_names(container), *_ids(container)), number)
        for device in sample.devices:
            device_labels = (device["uuid"], device["name"], _utf8(device["model"]))
            for name, value in _of_device(device, seen):
                put(name, device_labels, value)


def _of_share(line: Line, finding: Optional[Finding]) -> Iterator[tuple[str, Optional[float]]]:
    use = line.use
    assert use is not None
    share, compute = use.share, use.compute
    yield "gpushare_memory_used_bytes", use.used_bytes
    yield "gpushare_memory_driver_bytes", use.driver_bytes
    yield "gpushare_memory_limit_bytes", share.ceiling_bytes
    yield "gpushare_memory_request_bytes", share.memory_limit_bytes if share.lending else None
    yield "gpushare_memory_borrowed_bytes", use.borrowed_bytes if share.lending else None
    yield "gpushare_memory_host_bytes", use.host_bytes if share.virtual_bytes and not share.lending else None
    yield "gpushare_compute_limit_ratio", None if share.compute_percent is None else share.compute_percent / 100
    yield "gpushare_oom_total", use.refused
    if compute is not None:
        yield "gpushare_compute_used_ratio", compute.recent_percent / 100
        yield "gpushare_compute_seconds_total", compute.busy_ns / 1e9
        yield "gpushare_throttled_seconds_total", compute.waited_ns / 1e9
    if finding is not None:
        yield "gpushare_memory_physical_bytes", finding.physical_bytes
        yield "gpushare_memory_over_bytes", finding.over_bytes


def _of_account(account: Optional[Account]) -> Iterator[tuple[str, Optional[float]]]:
    if account is not None:
        yield "gpushare_account_granted_seconds_total", account.granted_ns / 1e9
        yield "gpushare_account_used_seconds_total", _over(account.used_ns)
        yield "gpushare_account_granted_byte_seconds_total", account.granted_byte_ns / 1e9
        yield "gpushare_account_used_byte_seconds_total", _over(account.used_byte_ns)
        yield "gpushare_account_peak_bytes", account.peak_bytes
        yield "gpushare_account_refused_total", account.refused
        yield "gpushare_account_throttled_seconds_total", _over(account.throttled_ns)
        yield "gpushare_account_suspended_seconds_total", account.suspended_ns / 1e9


def _over(ns: Optional[int]) -> Optional[float]:
    return None if ns is None else ns / 1e9


def _of_device(device: dict[str, Any], seen: Seen) -> Iterator[tuple[str, Optional[float]]]:
    yield "gpushare_device_memory_bytes", device["memory_bytes"] or None
    yield "gpushare_device_memory_granted_bytes", device["granted_bytes"]
    yield "gpushare_device_compute_granted_ratio", device["compute_granted_percent"] / 100
    yield "gpushare_device_containers", device["containers"]
    gpu = (seen.gpus or {}).get(device["uuid"])
    if gpu is not None:
        yield "gpushare_device_memory_used_bytes", gpu.used_bytes
        yield "gpushare_device_memory_unshared_bytes", seen.comparison.unshared_bytes.get(device["uuid"])
        yield "gpushare_device_utilization_ratio", None if gpu.busy_percent is None else gpu.busy_percent / 100
        yield "gpushare_device_temperature_celsius", gpu.celsius
        yield "gpushare_device_power_watts", None if gpu.milliwatts is None else gpu.milliwatts / 1000


def _families() -> dict[str, Any]:
    made: dict[str, Any] = {}
    for one in METRICS:
        kind = CounterMetricFamily if one.name.endswith("_total") else GaugeMetricFamily
        made[one.name] = kind(one.name, one.help, labels=one.labels)
    return made


def _utf8(text: str) -> str:
    """Escape what UTF-8 cannot encode. Ids and annotations are user input and may hold lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()
