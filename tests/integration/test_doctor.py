"""gpushare doctor with the simulated driver: its library check runs a real process with a real share."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import host, rootfs
from tests.support.host import Node
from tests.support.tenant import Tenant

MakeNode = Callable[..., Node]
# Rows that depend on the machine of the tests
OF_THE_MACHINE = {"engines", "cgroup drivers", "handlers", "CDI", "NVIDIA hooks", "programs"}


def found(node: Node) -> dict[str, Any]:
    done = node.cli("doctor", "--format", "json")
    assert done.stderr == "" and done.returncode in (0, 1), done
    value = json.loads(done.stdout)
    failures = [one for one in value["checks"] if one["result"] == "fail"]
    assert len(failures) == value["failures"] and done.returncode == bool(failures)
    return {one["name"]: one for one in value["checks"]}


def test_healthy_host_passes_all_checks(tenant: Callable[..., Tenant], node: Node, simhost: Path) -> None:
    """Also while a container uses the whole GPU: the trial share belongs to no container."""
    one = tenant("a", {"GPUSHARE_MEMORY": "16Gi"})
    one.container.start()
    one.expect("seen")
    before = rootfs.mount_points(), sorted(os.listdir(node.state))
    rows = found(node)
    assert {name: row for name, row in rows.items() if row["result"] != "ok" and name not in OF_THE_MACHINE} == {}
    assert rows["library loads"]["detail"] == "CUDA and NVML show a limit of 1 GiB"
    assert rows["leases"]["detail"] == "1 container holds a share"
    assert (rootfs.mount_points(), sorted(os.listdir(node.state))) == before
    assert list(Path(tempfile.gettempdir()).glob("gpushare-doctor-*")) == []
    text = node.cli("doctor").stdout
    assert "\x1b" not in text and text.splitlines()[0].split() == ["CHECK", "RESULT", "DETAIL", "WHAT", "TO", "DO"]


def test_doctor_leaves_no_state_directory_and_no_decision(make_node: MakeNode, simhost: Path) -> None:
    """Also where policy would refuse the trial share: the check does not test policy."""
    node = make_node(simhost, policy={"max_memory": "1Mi"})
    node.state.rmdir()
    rows = found(node)
    assert rows["state"]["result"] == rows["library loads"]["result"] == "ok"
    assert not node.state.exists() and node.decisions() == []


def test_wrong_shim_library_is_reported(make_node: MakeNode, simhost: Path, tmp_path: Path) -> None:
    """A complete library that is not the shim: the driver itself, which enforces no limit."""
    for name in ("libcuda.so", "libnvidia-ml.so"):
        source = simhost / "usr/lib/x86_64-linux-gnu" / name
        (tmp_path / "shim").mkdir(exist_ok=True)
        shutil.copy(source, tmp_path / "shim" / name)
    rows = found(make_node(simhost, shim_dir=str(tmp_path / "shim")))
    assert rows["library"]["result"] == "ok"
    assert (
        rows["library loads"]["result"] == "fail"
        and "16 GiB and NVML shows 16.38 GiB where the limit is 1 GiB" in rows["library loads"]["detail"]
    )


def test_half_upgraded_driver_is_reported(node: Node, simhost: Path) -> None:
    (simhost / "sys/module/nvidia/version").write_text("550.90.07\n")
    (simhost / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07\n")
    rows = found(node)
    assert rows["driver"]["result"] == "ok" and "550.90.07" in rows["driver"]["detail"]
    assert rows["driver files"]["result"] == "fail" and "535.261.03" in rows["driver files"]["detail"]
    assert "upgrade" in rows["driver files"]["hint"] and rows["library loads"]["result"] == "fail"


def test_unprivileged_user_gets_a_report(node: Node) -> None:
    """Rows that need root are skipped, without an internal error."""
    command = [host.BIN / "gpushare", "--config", node.config, "--state", node.state, "doctor", "--format", "json"]
    done = subprocess.run(
        ["setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups", *map(str, command)],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"]},
        timeout=60,
    )
    rows = {one["name"]: one for one in json.loads(done.stdout)["checks"]}
    assert done.stderr == "" and rows["rights"]["result"] == "warn"
    assert rows["library loads"]["result"] == "skip" and rows["kernel"]["result"] == "skip"
    assert not [row for row in rows.values() if "internal error" in row["detail"]]
