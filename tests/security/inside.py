"""Attacks by a program in the running container, as its root: on its limits, its activity files, other devices, the
host."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.support.host import PYTHON
from tests.support.runc import Container

from . import proof
from .scene import Scene

Prepare = Callable[[Scene], None]
OURS = "/usr/lib/gpushare"


def fails(*scripts: str) -> Prepare:
    """Run scripts that must fail; the proof detects their effects."""

    def attack(one: Container) -> None:
        for script in scripts:
            done = one.exec("bash", "-c", script)
            assert done.returncode != 0, f"{script}: {done.stdout}{done.stderr}"

    return lambda scene: scene.inside.append(attack)


def does(*scripts: str) -> Prepare:
    """Run scripts that may succeed without effect. The usage file is restored, so that the proof can read the share."""

    def attack(one: Container) -> None:
        keep = f"cp {OURS}/rw/usage /dev/shm/kept && {{ "
        for script in scripts:
            done = one.exec("bash", "-c", f"{keep} {script}; cat /dev/shm/kept 1<>{OURS}/rw/usage >&1; }}")
            assert done.returncode in (0, 1), f"{script}: {done.stdout}{done.stderr}"

    return lambda scene: scene.inside.append(attack)


LIMITS = (
    f"echo x >{OURS}/limits",
    f"chmod 666 {OURS}/limits",
    f"chown 1000 {OURS}/limits",
    f"truncate -s 0 {OURS}/limits",
    f"rm -f {OURS}/limits",
    f"mv {OURS}/limits {OURS}/rw/limits",
    f"ln {OURS}/limits {OURS}/rw/limits",
    f"ln -sf /etc/passwd {OURS}/limits",
    f"cp /etc/passwd {OURS}/rw/more",
    f"touch {OURS}/more",
    f"exec 3<{OURS}/limits; echo x >/proc/self/fd/3",
    f"mount --bind /etc/passwd {OURS}/limits",
    f"mount -o remount,rw,bind {OURS}",
    f"umount -l {OURS}",
    f"umount {OURS}/limits",
    "echo 1 >/proc/driver/nvidia/params",
)

# Another GPU, a missing GPU, a disk of that number, the memory of the host, the capabilities of MIG
DEVICES = ("c 195 1", "c 195 7", "b 195 0", "b 7 0", "c 1 1", "c 1 2", "c 237 1")


def makes(*nodes: str) -> Prepare:
    """Assert that the cgroup denies opening each node, whether or not it can be made."""

    def attack(one: Container) -> None:
        for node in nodes:
            for mode in ("<", ">", "<>"):
                script = f"mknod {proof.MADE} {node} && (: {mode}{proof.MADE}); rm -f {proof.MADE}"
                done = one.exec("bash", "-c", script)
                assert "Operation not permitted" in done.stderr, f"{script}: {done.stdout}{done.stderr}"

    return lambda scene: scene.inside.append(attack)


def descriptors(scene: Scene) -> None:
    """The container's first program has only the three standard streams open, as from any runtime."""

    def attack(one: Container) -> None:
        script = "until [ $(cat /proc/1/comm) = sleep ]; do :; done; ls /proc/1/fd"
        assert one.exec("bash", "-c", script).stdout.split() == ["0", "1", "2"]

    scene.inside.append(attack)


def process_environment(scene: Scene) -> None:
    """The container can read neither host paths nor a token of the edit."""

    def attack(one: Container) -> None:
        seen = one.exec("cat", "/proc/1/environ", "/proc/self/environ").stdout
        assert str(scene.node.state) not in seen and "GPUSHARE_NONCE" not in seen
        assert (
            one.exec("test", "-e", str(scene.node.state)).returncode
            or not one.exec("ls", f"{scene.node.state}/containers").stdout
        ), "the state directory is visible"

    scene.inside.append(attack)


def other_tenant(scene: Scene) -> None:
    """A second container on the same device: its MPS pipes, counters, limits and names are invisible in the first."""

    def attack(one: Container) -> None:
        with scene.container(["sleep", "inf"], name="other") as other:
            other.start()
            assert one.exec("bash", "-c", f"ls -A {OURS}/mps | grep -q .").returncode != 0
            for script in (
                f"mkfifo {OURS}/mps/control",
                f"mkdir {OURS}/mps/GPU-0",
                f"grep -rqa {other.id} {OURS} /proc/self/mountinfo",
                f"for p in {OURS}/peers/*/*; do echo x >$p && exit 0; done; exit 1",
            ):
                done = one.exec("bash", "-c", script)
                assert done.returncode != 0, f"{script}: {done.stdout}"
            proof.require_share(scene.node, other)
            other.kill()
            other.wait()
            other.delete()

    scene.inside.append(attack)


def hidden_in_a_user_namespace(scene: Scene) -> None:
    """A user namespace may mount over gpushare's files: its processes then have no GPU."""
    scene.spec["process"]["noNewPrivileges"] = False

    def attack(one: Container) -> None:
        for script in (
            f"mount -t tmpfs none {OURS} && mkdir {OURS}/rw",
            f"mount --bind /etc/passwd {OURS}/limits",
            f"umount {OURS}/rw",
        ):
            program = f"{script}; exec {PYTHON} /opt/grab.py"
            done = one.exec("unshare", "--user", "--map-root-user", "--mount", "bash", "-c", program)
            if done.returncode == 0 and "refused" not in done.stdout:
                assert f'"total_bytes": {proof.LIMIT}' in done.stdout, f"{script}: {done.stdout}"

    scene.inside.append(attack)


def pid_of_another(scene: Scene) -> None:
    """The process of a second container's state has ended, and its pid is now another container's or the host's: the
    hook refuses, and that process does not change."""

    def attack(one: Container) -> None:
        with scene.container(["true"], env={"GPUSHARE_MEMORY": "1Gi"}, name="stale", hook=scene.node.hook()) as stale:
            mounts = Path(f"/proc/{one.pid}/mountinfo").read_text()
            with subprocess.Popen(["true"]) as gone:
                pass
            for pid in (one.pid, os.getpid(), gone.pid, -1, 1 << 40):
                state = {"ociVersion": "1.0.2", "id": stale.id, "status": "creating", "pid": pid}
                for stage in ("prestart", "createRuntime", "adopt"):
                    done = _hook(scene, stage, {**state, "bundle": str(stale.bundle)})
                    assert done.returncode != 0, (stage, pid)
                    assert done.stderr.startswith("gpushare: ") and done.stderr.count("\n") == 1, done.stderr
                    assert scene.node.leases() == [one.id], (stage, pid)
            assert Path(f"/proc/{one.pid}/mountinfo").read_text() == mounts

    scene.inside.append(attack)


def _hook(scene: Scene, stage: str, state: dict[str, object]) -> subprocess.CompletedProcess[str]:
    hook = scene.node.hook()
    command = [hook.program, "--config", hook.config, "--state", hook.state, stage]
    return subprocess.run([str(word) for word in command], input=json.dumps(state), capture_output=True, text=True)
