"""The leases of the first packages of 0.1.0. This file goes with 0.3.0."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from gpushare.core.model import Device, Lease, Share
from gpushare.state import leaseend, leases, migration, storage
from gpushare.system import procs

DEVICE = {
    "index": 0,
    "uuid": "GPU-00112233-4455-6677-8899-aabbccddeeff",
    "minor": 0,
    "bus_id": "0000:00:00.0",
    "model": "Test GPU",
    "memory_bytes": 16 << 30,
    "context_bytes": 300 << 20,
    "granularity_bytes": 2 << 20,
    "brand": "",
    "arch": "",
    "parent": "",
    "mig_index": -1,
    "gpu_instance": -1,
    "compute_instance": -1,
}
SHARE = {
    "slot": 0,
    "device": DEVICE,
    "memory_limit_bytes": 1 << 30,
    "compute_percent": 30,
    "soft": False,
    "priority": 0,
    "oversubscribe": False,
    "clamped": "",
    "page": 0,
    "paused": False,
    "draining_bytes": 0,
    "memory_backend": "shim",
    "compute_backend": "shim",
    "virtual_bytes": 0,
}


def test_lease_of_0_1_0_is_read_and_released(state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every field that its packages wrote, and the file `held`. Its processes are known by the path of their cgroup,
    unless that can be shared."""
    storage.prepare(str(state_dir))
    monkeypatch.setattr(migration.cgroup, "directories", lambda *_: (str(tmp_path), ""))
    state, init = str(state_dir), subprocess.Popen(["sleep", "inf"])
    lease = {
        "id": "c1",
        "state": "reserved",
        "boot_id": procs.boot_id(),
        "bundle": "/bundle",
        "shares": [SHARE],
        "creator_pid": 12,
        "creator_start": 34,
        "init_pid": 0,
        "init_start": 0,
        "cgroup": "",
        "created": 1.5,
        "dialect": "gpushare",
        "driver_version": "535.261.03",
        "sandbox": "",
    }
    who, folder = procs.find(init.pid), Path(storage.container_dir(state, "c1"))
    assert who is not None
    folder.mkdir(parents=True)
    (folder / "lease.json").write_text(json.dumps(lease))
    assert [(one.state, one.creator_pid) for one, _ in leases.view(state).dead] == [("reserved", 12)]
    text = f"{migration.HELD_VERSION}\n12 34\n{who.pid} {who.start}\n/a b\n"
    (folder / migration.HELD).write_text(text)
    (found,) = leases.view(state).live
    shares = (Share(0, Device(**DEVICE), 1 << 30, 30),)  # type: ignore[arg-type]
    wanted = Lease("c1", "held", procs.boot_id(), "/bundle", shares, 12, 34, who.pid, who.start, "/a b")
    assert found == wanted._replace(
        cgroup_dir=str(tmp_path), created=1.5, dialect="gpushare", driver_version="535.261.03", cri=True
    )
    for damaged in ("", text[:-1], text + "\n", text.replace("12 ", "1 "), text.replace(" ", "")):
        (folder / migration.HELD).write_text(damaged)
        assert [damage.id for damage in leases.view(state).damaged] == ["c1"], damaged
    (folder / migration.HELD).write_text(text)
    init.kill()
    init.wait()
    (tmp_path / "cgroup.events").write_text("populated 1\n")
    assert "is alive" in leaseend.release(state, "c1")
    (tmp_path / "cgroup.events").write_text("populated 0\n")
    assert leaseend.release(state, "c1") == "" and leases.view(state) == leases.View((), (), (), ())
    for path in ("/", ""):
        found_json = migration.lease_json(json.dumps({**lease, "state": "held", "cgroup": path}).encode(), bytes)
        assert json.loads(found_json)["cgroup_dir"] == ""
