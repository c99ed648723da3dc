"""gpushare-runtime with a real runc: its changes to a bundle, and what stays unchanged."""

from __future__ import annotations

import json
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpushare.state import leases
from gpushare.system import procs

from tests.integration.edited import APPLIED, config_of, injected
from tests.support import host
from tests.support.host import PYTHON, Node, python_mounts
from tests.support.runc import Container, RuntimeFailed

MakeContainer = Callable[..., Container]
ALL = {"GPUSHARE_MEMORY": "16Gi"}  # the whole device: starts only when nothing else is granted
ONE_GIB = {"GPUSHARE_MEMORY": "1Gi"}


# One container, from start to end


def test_lease_exists_as_long_as_the_container(container: MakeContainer, node: Node) -> None:
    one = container(["sleep", "inf"], env=ALL, runtime=node.runtime())
    one.create()
    lease, init = leases.find(str(node.state), one.id), procs.find(one.pid)
    assert lease is not None and init is not None
    assert (lease.state, lease.init_pid, lease.init_start, lease.bundle) == ("held", *init[:2], str(one.bundle))
    assert lease.cgroup == f"/{one.id}" == procs.cgroup_of(one.pid)
    refused = container(["true"], env=ONE_GIB, runtime=node.runtime())
    with pytest.raises(RuntimeFailed, match=one.id):
        refused.create()
    one.start()
    one.kill()
    one.wait()
    one.delete()
    assert node.leases() == []
    assert not [
        line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f"{node.state}/containers/" in line
    ]
    assert refused.run() == 0


def test_run_with_keep_releases_the_share(
    container: MakeContainer, make_node: Callable[..., Node], simhost: Path
) -> None:
    """runc and crun call no poststop hook then: the share is released at the next start or with the delete."""
    node = make_node(simhost, **host.newest_crun())
    one = container(["sh", "-c", "exit 7"], env=ALL)
    words = [*node.runtime(), "--root", str(one.bundle / "runtime")]
    command = [*words, "run", "--keep", "--bundle", str(one.bundle), one.id]
    assert subprocess.run(command, stdin=subprocess.DEVNULL).returncode == 7
    assert node.leases() == [one.id]
    other = container(["true"], env=ALL, runtime=node.runtime())
    assert other.run() == 0, other.stderr
    other.delete()
    assert subprocess.run([*words, "delete", one.id]).returncode == 0
    assert node.leases() == []


def test_driver_files_can_be_requested_without_a_gpu(container: MakeContainer, node: Node) -> None:
    one = container(
        ["sh", "-c", "nvidia-smi --version; ls /dev/nvidia* /usr/lib/gpushare; ldconfig -p | grep libcuda.so.1"],
        env={"NVIDIA_VISIBLE_DEVICES": "none"},
        runtime=node.runtime(),
    )
    assert one.run() == 0, one.stderr
    assert "/dev/nvidia" not in one.stdout and "libcuda.so.1" in one.stdout
    assert node.leases() == []


def test_runtime_and_hook_give_the_same_container(container: MakeContainer, node: Node) -> None:
    """Files, modes, links, mounts and the loader's cache are the same: programs cannot see a difference."""
    look = (
        "find /dev/nvidia* /usr/lib/gpushare /usr/lib/*/libcuda* /usr/lib/*/libnvidia* -printf '%p %y %m %l\\n' | sort;"
        "ldconfig -p | grep -E 'cuda|nvidia' | sort;"
        "grep -E 'nvidia|cuda|gpushare' /proc/self/mounts | sed 's/size=[^,]*,//' | sort"
    )
    seen = []
    for way in ("hook", "runtime"):
        one = container(["sh", "-c", look], env=ONE_GIB, **node.way(way))
        assert one.run() == 0, one.stderr
        seen.append(one.stdout.replace(one.id, "ID").splitlines())
        one.delete()
    assert seen[0] == seen[1]
    assert len(seen[0]) > 40


# config.json


def test_container_without_request_is_unchanged(container: MakeContainer, node: Node) -> None:
    one = container(["true"], runtime=node.runtime())
    before = (one.bundle / "config.json").stat()
    assert one.run() == 0
    after = (one.bundle / "config.json").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_edit_is_idempotent_and_reversible(container: MakeContainer, node: Node) -> None:
    def unusual(spec: dict[str, Any]) -> None:
        spec["vendorField"] = {"kept": [1, None, "\u00e9\U0001f600"]}
        spec["linux"]["devices"] = None
        spec["hooks"] = {"createRuntime": [{"path": "/bin/true"}], "startContainer": []}
        del spec["annotations"]

    one = container(["true"], env=ONE_GIB, runtime=node.runtime(), edit=unusual)
    path = one.bundle / "config.json"
    path.chmod(0o640)
    assert one.run() == 0, one.stderr
    first = config_of(one)
    one.delete()
    one.pid, one.exit_code = 0, None
    assert one.run() == 0
    second = config_of(one)
    nonce = json.loads(first["annotations"][APPLIED])["nonce"]
    again = json.loads(second["annotations"][APPLIED])["nonce"]
    assert json.loads(json.dumps(second).replace(again, nonce)) == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [p.name for p in one.bundle.iterdir() if "gpushare" in p.name] == []
    restored = node.cli("explain", str(one.bundle), "--restore")
    assert (restored.returncode, config_of(one)) == (0, one.spec)
    assert "no changes of gpushare" in node.cli("explain", str(one.bundle), "--restore").stdout


def test_edit_is_removed_with_the_request(container: MakeContainer, node: Node) -> None:
    one = container(["sh", "-c", "! test -e /usr/lib/gpushare"], env=ONE_GIB, runtime=node.runtime())
    one.create()
    one.delete()
    spec = config_of(one)
    spec["process"]["env"] = [line for line in spec["process"]["env"] if "GPUSHARE" not in line]
    (one.bundle / "config.json").write_text(json.dumps(spec))
    one.pid = 0
    one.create()
    assert APPLIED not in config_of(one)["annotations"] and config_of(one)["mounts"] == one.spec["mounts"]


def test_forged_record_is_ignored(container: MakeContainer, node: Node) -> None:
    """An image's or a pod's annotation must not add mounts, nor remove the engine's own."""
    record = {
        "version": 1, "nonce": "0" * 32, "mounts": [["/proc", "proc"]], "devices": [], "rules": [], "annotations": [],
        "made": {}, "leased": True, "removed": [["mounts", 0, {"destination": "/host", "source": "/"}]], "ops": [],
    }  # fmt: skip
    for env in ({}, ONE_GIB):
        one = container(["sh", "-c", "test -e /proc/self && ! test -e /host"], env=env, runtime=node.runtime())
        one.spec["annotations"][APPLIED] = json.dumps(record)
        (one.bundle / "config.json").write_text(json.dumps(one.spec))
        assert one.run() == 0, one.stderr
        assert config_of(one)["annotations"].get(APPLIED) != json.dumps(record)
        one.delete()


# The container's own mounts


# Requests that other software has partly served

TOTAL = "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(0)).total)"


def test_injected_devices_are_a_request(container: MakeContainer, node: Node) -> None:
    env = {"NVIDIA_VISIBLE_DEVICES": "void", "GPUSHARE_MEMORY": "2Gi"}
    program = [PYTHON, "-c", TOTAL]
    one = container(program, env=env, mounts=python_mounts(), runtime=node.runtime(), edit=injected(node))
    assert one.run() == 0, one.stderr
    assert one.stdout.strip() == str(2 << 30)
    spec = config_of(one)
    assert not any("nvidia" in hook["path"] for hooks in spec["hooks"].values() for hook in hooks)
    (taken,) = [line["taken_out"] for line in node.decisions() if line["decision"] == "granted"]
    for what in ("/usr/bin/nvidia-cdi-hook", "/usr/bin/nvidia-container-runtime-hook", "/dev/nvidia0", "libcuda.so"):
        assert what in taken
    one.delete()
    assert node.cli("explain", str(one.bundle), "--restore").returncode == 0
    assert config_of(one) == one.spec


def test_our_hook_in_the_spec_runs_once(container: MakeContainer, node: Node) -> None:
    """containerd's base_runtime_spec with our hook, under gpushare-runtime."""
    one = container(["true"], env=ALL, hook=node.hook(), runtime=node.runtime())
    assert one.run() == 0, one.stderr
    assert node.leases() == [one.id]
    one.delete()
    assert node.leases() == []
