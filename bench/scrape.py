"""Measure how long Prometheus waits for `gpushare export` on a host with a hundred shares, over loopback."""

from __future__ import annotations

import http.client
import os
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from gpushare.config import node
from gpushare.core.model import Lease, Share
from gpushare.core.ops import TenantTmpfs, WriteLimits
from gpushare.state import leasefile, leases, storage
from gpushare.system import procs

from simulator.simhost import make_simhost
from tests.support import host

SHARES = 100
SCRAPES = 30
GIB, MIB = 1 << 30, 1 << 20


class Took(NamedTuple):
    """Durations in milliseconds."""

    scrapes: list[float]  # duration of each scrape; the first, which fills caches, is excluded
    processor: float  # mean processor time of the exporter per scrape, which other load on the machine does not change


def scrapes_ms(directory: Path) -> Took:
    """Scrape a hundred shares several times, one scrape after another."""
    simulated = make_simhost(directory / "host", gpus=4, memory_bytes=80 * GIB)
    here = host.Node(directory / "node", simulated)
    exporter = None
    try:
        fill(here)
        words = [host.BIN / "gpushare", "--config", here.config, "--state", here.state, "export", "--port", "0"]
        exporter = subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, text=True)
        assert exporter.stdout is not None
        port = int(exporter.stdout.readline().rpartition(":")[2].partition("/")[0])
        _one(port)
        before = _processor_ms(exporter.pid)
        scrapes = [_one(port) for _ in range(SCRAPES)]
        return Took(scrapes, (_processor_ms(exporter.pid) - before) / SCRAPES)
    finally:
        if exporter is not None:
            exporter.terminate()
            exporter.communicate()
        here.close()


def _processor_ms(pid: int) -> float:
    """Return utime and stime of proc_pid_stat(5), which include threads that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return 1000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def fill(here: host.Node) -> None:
    """Create shares as container starts do, all held by this process."""
    state = str(here.state)
    storage.prepare(state)
    devices = node.compile_node(str(here.config), state).inventory.devices
    me = procs.myself()
    for number in range(SHARES):
        share = Share(0, devices[number % len(devices)], 512 * MIB, 4)
        name = f"{number:064x}"
        lease = Lease(name, "reserved", procs.boot_id(), "/none", (share,), me.pid, me.start, created=time.time())
        folder = Path(storage.container_dir(state, name))
        folder.mkdir()
        (folder / "lease.json").write_bytes(leasefile.to_json(lease))
        storage.execute(WriteLimits(lease.shares, f"{storage.make_share_dir(state, name, lease.shares)}/limits"))
        storage.execute(TenantTmpfs(str(folder / "rw"), storage.TENANT_BYTES, storage.TENANT_INODES))
        saved = leases.find(state, name)  # without the device's fields that a lease does not keep
        assert saved is not None
        leases.hold(state, saved, me, procs.cgroup_of(me.pid))


def _one(port: int) -> float:
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    took = time.perf_counter() - began
    connection.close()
    if text.count("\ngpushare_memory_limit_bytes{") != SHARES:
        raise RuntimeError("the answer does not have all shares")
    return took * 1000
