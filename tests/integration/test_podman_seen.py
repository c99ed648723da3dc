"""Devices visible to a podman container: devices from podman itself, privileges, user namespaces, volumes, CDI."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration import test_podman
from tests.integration.nvidia_cdi import cdi as nvidia_cdi
from tests.integration.nvidia_cdi import with_simulated_nodes
from tests.integration.podman_host import GIB, OURS, TWO_GIB, refusal
from tests.support.engines.base import SLEEP, Want
from tests.support.engines.image import PROBE
from tests.support.engines.podman import Podman
from tests.support.launcher import require_no_python
from tests.support.realnodes import ALLOWED, DENIED, access, opened, real_nodes
from tests.support.rootfs import run

no_hooks = test_podman.no_hooks


@pytest.fixture
def gpus_in_dev(tmp_path: Path) -> Iterator[Path]:
    """A /dev as on a host with two GPUs, which podman reads; no driver is behind the device numbers."""
    copy = tmp_path / "dev"
    copy.mkdir()
    run("mount", "-t", "tmpfs", "gpushare-test", copy)
    for name in ("null", "zero", "full", "random", "urandom", "tty", "fuse", "ptmx", "fd", "stdin", "stdout", "stderr"):
        run("cp", "-a", Path("/dev", name), copy)
    for name in ("pts", "shm"):
        (copy / name).mkdir()
        run("mount", "--bind", Path("/dev", name), copy / name)
    for name, minor in (
        ("nvidia0", 0),
        ("nvidia1", 1),
        ("nvidiactl", 255),
        ("nvidia-uvm", 250),
        ("nvidia-uvm-tools", 251),
    ):
        os.mknod(copy / name, 0o20666, os.makedev(195, minor))
    run("mount", "--rbind", copy, "/dev")
    yield Path("/dev")
    run("umount", "--lazy", "/dev")
    run("umount", "--lazy", copy)


# Visible devices


def test_privileged_container_sees_only_granted_gpus(podman: Podman, gpus_in_dev: Path) -> None:
    """podman adds every device of the host; a hook cannot remove them."""
    want = Want(("ls", "/dev"), TWO_GIB)
    if podman.way == "hook":
        said = refusal(podman, want, "--privileged")
        assert "/dev/nvidia" in said
        assert "gpushare-runtime" in said
        return
    seen = podman.run(want, 60, "--privileged").out.split()
    assert {"nvidia0", "nvidiactl"} <= set(seen)
    assert "nvidia1" not in seen
    assert podman.run(Want(env=TWO_GIB), 60, "--privileged").answer()["total_bytes"] == 2 * GIB


def test_device_flag_for_another_gpu_gives_no_access(podman: Podman, gpus_in_dev: Path) -> None:
    """podman adds a GPU beside the share."""
    want = Want(("ls", "/dev"), {**TWO_GIB, "GPUSHARE_DEVICES": "0"})
    if podman.way == "hook":
        assert "/dev/nvidia1" in refusal(podman, want, "--device", "/dev/nvidia1")
    else:
        seen = podman.run(want, 60, "--device", "/dev/nvidia1").out.split()
        assert "nvidia0" in seen
        assert "nvidia1" not in seen
    assert podman.run(Want(env=TWO_GIB), 60, "--device", "/dev/null:/dev/other").answer()["total_bytes"] == 2 * GIB


def test_host_s_dev_as_a_volume_opens_only_granted_gpus(podman: Podman, gpus_in_dev: Path) -> None:
    """gpushare's nodes cover the existing ones; the other GPU is visible but cannot be opened."""
    granted = [node for node in gpus_in_dev.glob("nvidia*") if node.name != "nvidia1"]
    for node in granted:  # like the simulated driver's
        node.unlink()
        node.touch()
    both = Want(("sh", "-c", f"{PROBE}; cat /dev/nvidia1"), TWO_GIB)
    result = podman.run(both, 60, "--volume", "/dev:/dev")
    assert result.answer()["total_bytes"] == 2 * GIB
    assert "Operation not permitted" in result.err
    assert [node.stat().st_size for node in granted] == [0] * len(granted)


def test_host_s_dev_without_gpus_is_unchanged(podman: Podman, gpus_in_dev: Path) -> None:
    for node in gpus_in_dev.glob("nvidia*"):
        node.unlink()
    assert "/dev/nvidia0" in refusal(podman, Want(SLEEP, TWO_GIB), "--volume", "/dev:/dev")
    assert list(gpus_in_dev.glob("nvidia*")) == []


def test_limit_holds_in_user_namespaces(podman: Podman, tmp_path: Path) -> None:
    ranges, users = tmp_path / "subid", tmp_path / "passwd"
    ranges.write_text("containers:300000:100000\n")
    # libsubid, which podman 5 uses, only knows ranges of users that exist
    users.write_text(Path("/etc/passwd").read_text() + "containers:x:4243:4243::/nonexistent:/bin/false\n")
    files = {"/etc/subuid": ranges, "/etc/subgid": ranges, "/etc/passwd": users}
    for name, source in files.items():
        run("mount", "--bind", source, name)
    try:
        for words in (("--userns=auto",), ("--uidmap=0:300000:5000", "--gidmap=0:300000:5000")):
            with podman.start(Want(SLEEP, TWO_GIB), *words) as one:
                (mapped,) = Path(f"/proc/{one.pid}/uid_map").read_text().splitlines()
                assert mapped.split()[:2] == ["0", "300000"]
                answer = one.exec(PROBE).answer()
                assert (answer["total_bytes"], answer["refused"]) == (2 * GIB, 2)
                assert one.exec("sh", "-c", f"echo > {OURS}").code != 0
    finally:
        for name in files:
            run("umount", name)


def test_containers_with_one_volume_have_separate_limits(podman: Podman) -> None:
    """Neither sees the other's limit."""
    three = Want(SLEEP, {"GPUSHARE_MEMORY": "3Gi"})
    with (
        podman.start(Want(SLEEP, TWO_GIB), "--volume", "shared:/opt") as one,
        podman.start(three, "--volumes-from", one.name) as two,
    ):
        totals = [container.exec(PROBE).answer()["total_bytes"] for container in (one, two)]
    assert totals == [2 * GIB, 3 * GIB]
    podman.command("volume", "rm", "--force", "shared")


# CDI


@pytest.fixture
def etc_cdi() -> Iterator[Path]:
    """podman's CDI directory, empty."""
    place = Path("/etc/cdi")
    made = place.exists()
    place.mkdir(exist_ok=True)
    run("mount", "-t", "tmpfs", "gpushare-test", place)
    try:
        yield place
    finally:
        run("umount", place)
        if not made:
            place.rmdir()


@pytest.fixture
def cdi(podman: Podman, no_hooks: None, etc_cdi: Path) -> Path:
    """The output of `gpushare cdi generate` in podman's directory; podman is not configured to run our hooks."""
    done = podman.node.cli("cdi", "generate", "--output", "/etc/cdi/gpushare.yaml")
    assert (done.returncode, done.stdout) == (0, "create /etc/cdi/gpushare.yaml\n"), done.stderr
    return etc_cdi / "gpushare.yaml"


def test_cdi_device_gets_a_share(podman: Podman, cdi: Path) -> None:
    """With the CDI file alone podman gives a share, which ends with the container; with our runtime it does as well."""
    (gpu,) = json.loads(podman.node.cli("devices", "--format", "json").stdout)
    for name in ("any", gpu["uuid"]):
        with podman.start(Want(SLEEP, TWO_GIB), "--device", f"gpushare.io/share={name}") as one:
            assert podman.node.leases() == [one.id]
            answer = one.exec(PROBE).answer()
            assert (answer["total_bytes"], answer["refused"]) == (2 * GIB, 2)
        assert podman.node.leases() == []
    if podman.way == "hook":
        assert podman.run(Want(("ls", OURS), TWO_GIB)).code != 0, "without the device no hook runs"
    assert "which CDI has set" in refusal(
        podman, Want(SLEEP, {"GPUSHARE_DEVICES": "0"}), "--device", "gpushare.io/share=any"
    )
    done = podman.run(Want(), 60, "--device", "gpushare.io/share=GPU-00000000-dead-0000-0000-000000000000")
    assert done.code != 0 and "unresolvable CDI devices" in done.err


def test_names_of_nvidia_get_a_share(podman: Podman, cdi: Path) -> None:
    """On a host without NVIDIA's toolkit. Where its file is, gpushare leaves the names to it."""
    ours, theirs = cdi.with_name("gpushare-nvidia.yaml"), cdi.with_name("nvidia.yaml")
    words = ("cdi", "generate", "--nvidia-names", "--output", str(ours))
    theirs.write_text("cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: []\n")
    done = podman.node.cli(*words)
    assert (done.returncode, done.stdout) == (78, "") and not ours.exists()
    assert f'"{theirs}" has devices of nvidia.com/gpu already' in done.stderr
    theirs.unlink()
    for action in (f"create {ours}", "nothing to do"):
        done = podman.node.cli(*words)
        assert (done.returncode, done.stdout) == (0, f"{action}\n"), done.stderr
    (gpu,) = json.loads(podman.node.cli("devices", "--format", "json").stdout)
    for name in ("all", "0", gpu["uuid"]):
        with podman.start(Want(SLEEP, TWO_GIB), "--device", f"nvidia.com/gpu={name}") as one:
            assert podman.node.leases() == [one.id]
            answer = one.exec(PROBE).answer()
            assert (answer["total_bytes"], answer["refused"]) == (2 * GIB, 2)
        assert podman.node.leases() == []


def test_cdi_device_puts_its_rules_into_the_spec(podman: Podman, cdi: Path, tmp_path: Path) -> None:
    """Without them systemd does not know the devices, and `systemctl daemon-reload` takes them away."""
    with real_nodes(podman.node, tmp_path / "real"):
        assert podman.node.cli("cdi", "generate", "--output", "/etc/cdi/gpushare.yaml").returncode == 0
        (gpu, _) = json.loads(podman.node.cli("devices", "--format", "json").stdout)
        with podman.start(Want(SLEEP), "--device", f"gpushare.io/share={gpu['uuid']}") as one:
            assert (opened(one, "/dev/nvidia0"), opened(one, "/dev/nvidiactl")) == (ALLOWED, ALLOWED)
            assert (access(one, 0), access(one, 1), access(one, 255)) == (ALLOWED, DENIED, ALLOWED)
            assert podman.node.leases() == [one.id]
            spec = json.loads(Path(podman.inspect(one.name)["OCIConfigPath"]).read_text())
            rules = [rule for rule in spec["linux"]["resources"]["devices"] if rule.get("major") == 195]
            assert sorted(rule["minor"] for rule in rules if rule["allow"]) == [0, 255]


def test_nvidia_s_cdi_device_is_limited_or_refused(podman: Podman, etc_cdi: Path) -> None:
    """podman itself injects it with libcuda and hooks: the runtime enforces the limit, the hook alone refuses it."""
    root = podman.node.driver_root
    described = with_simulated_nodes(nvidia_cdi(root), root)
    described["devices"] = described["devices"][:1]  # this host has one GPU
    (etc_cdi / "nvidia.json").write_text(json.dumps(described))
    words = ("--device", "nvidia.com/gpu=0")
    if podman.way == "hook":
        said = refusal(podman, Want(SLEEP, TWO_GIB), *words)
        assert 'already has an NVIDIA createContainer hook "/usr/bin/nvidia-cdi-hook"' in said
        return
    with podman.start(Want(SLEEP, TWO_GIB), *words) as one:
        answer = one.exec(PROBE).answer()
        assert (answer["devices"], answer["total_bytes"], answer["refused"]) == (1, 2 * GIB, 2)
        assert podman.node.leases() == [one.id]
    with podman.start(Want(SLEEP), *words):  # no memory limit, so the whole device
        assert "held by" in refusal(podman, Want(SLEEP, TWO_GIB))


def test_podman_s_default_device_rules_start_no_python(podman: Podman, tmp_path: Path) -> None:
    with podman.start(Want(SLEEP)) as one:
        path = Path(podman.inspect(one.name)["OCIConfigPath"])
        require_no_python(tmp_path / "installed", json.loads(path.read_text()))
