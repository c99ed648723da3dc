"""gpushare doctor: programs, the low-level runtime, engines and their cgroup drivers, NVIDIA's hooks."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpushare.config import oci_runtime
from gpushare.doctor import FAIL, OK, WARN, Machine, Result, engines
from gpushare.engines import configure
from gpushare.engines.configure import ENGINES
from gpushare.system import systemdscope

from tests.unit.doctorhost import ask, machine, put, root

__all__ = ["machine", "root"]  # fixtures


def test_missing_or_unsafe_programs_are_reported(machine: Machine, root: Path) -> None:
    settings = machine.settings._replace(
        program=str(root / "opt/gpushare-runtime"), hook=str(root / "opt/gpushare-hook")
    )
    there = machine._replace(settings=settings)
    assert ask("programs", there).result == OK
    (root / "opt/gpushare-hook").chmod(0o777)
    assert ask("programs", there).result == FAIL and "chmod go-w" in ask("programs", there).hint
    (root / "opt/gpushare-hook").chmod(0o755)
    for name in ("gpushare-runtime-cri", "gpushare-hook"):
        (root / "opt" / name).unlink()
        assert f'{name}" is not a program' in ask("programs", there).detail
        put(root, f"opt/{name}", "#!/bin/sh\n").chmod(0o755)


def test_snapshot_that_does_not_start_is_reported(machine: Machine, root: Path) -> None:
    settings = machine.settings._replace(
        program=str(root / "opt/gpushare-runtime"), hook=str(root / "opt/gpushare-hook")
    )
    there = machine._replace(settings=settings)
    snapshot = put(root, "libexec/snapshot", "#!/bin/sh\nexit 0\n")
    snapshot.chmod(0o755)
    assert ask("programs", there).result == OK
    for broken in ("#!/bin/sh\nexit 1\n", "\x7fELF", "#!/bin/sh\nkill -SEGV $$\n"):
        snapshot.write_text(broken)
        found = ask("programs", there)
        assert found.result == FAIL and str(root / "libexec/snapshot") in found.detail and "remove it" in found.hint


def test_missing_or_broken_runtime_is_reported(machine: Machine, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.config
    good = put(root, "opt/runc", "#!/bin/sh\necho runc version 1.9\necho more\n")
    good.chmod(0o755)
    chosen = machine._replace(config=machine.config._replace(runtime=str(good)))
    assert ask("runtime", chosen) == Result(OK, f"{good}, runc version 1.9")
    good.write_text("#!/bin/sh\nexit 3\n")
    assert ask("runtime", chosen).result == FAIL
    good.chmod(0o644)
    assert "is not a program" in ask("runtime", chosen).detail
    monkeypatch.setattr(oci_runtime, "_DIRECTORIES", (str(root),))
    assert "no runc or crun" in ask("runtime", machine).detail


def test_unconfigured_engines_are_reported(machine: Machine, root: Path) -> None:
    result = ask("engines", machine)
    assert result == Result(WARN, "docker: not configured", "gpushare runtime configure docker")
    configure.configure(ENGINES["docker"], machine.settings, machine.files)
    assert ask("engines", machine) == Result(OK, "docker (runtime)")
    put(root, "etc/docker/daemon.json", "{")
    assert ask("engines", machine).result == FAIL
    (root / "etc/docker/daemon.json").unlink()
    (root / "usr/bin/dockerd").unlink()
    assert ask("engines", machine).result == OK


@pytest.mark.parametrize(
    ("engine", "file", "text", "driver"),
    [
        ("docker", "etc/docker/daemon.json", '{"exec-opts": ["native.cgroupdriver=systemd"]}', "systemd"),
        ("docker", "etc/docker/daemon.json", '{"exec-opts": ["native.cgroupdriver=cgroupfs"]}', "cgroupfs"),
        ("containerd", "etc/containerd/config.toml", "    SystemdCgroup = true\n", "systemd"),
        ("containerd", "etc/containerd/config.toml", "    # SystemdCgroup = true\n", "cgroupfs"),
        ("crio", "etc/crio/crio.conf", "", "systemd"),
        ("crio", "etc/crio/crio.conf.d/1.conf", 'cgroup_manager = "cgroupfs"\n', "cgroupfs"),
        ("crio", "etc/crio/crio.conf.d/00-default", 'cgroup_manager = "cgroupfs"\n', "cgroupfs"),
        ("podman", "etc/containers/containers.conf", 'cgroup_manager = "systemd"\n', "systemd"),
    ],
)
def test_cgroup_driver_is_read_from_engine_config(
    machine: Machine, root: Path, engine: str, file: str, text: str, driver: str
) -> None:
    put(root, file, text)
    assert engines.cgroup_driver(machine, engine) == driver


def without_systemd(monkeypatch: pytest.MonkeyPatch, root: Path) -> Path:
    """Let systemd's socket be a missing file below `root`, and the runtime one that gives systemd all rules."""
    monkeypatch.setattr(systemdscope, "SOCKET", str(root / "private"))
    monkeypatch.setattr(engines, "_forgets_devices", lambda machine: "")
    return root / "private"


def test_hooks_that_cannot_reach_systemd_warn(machine: Machine, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    socket = without_systemd(monkeypatch, root)
    put(root, "usr/bin/crio").chmod(0o755)
    assert ask("cgroup drivers", machine).result == OK
    configure.configure(ENGINES["crio"], machine.settings._replace(hook_only=True), machine.files)
    result = ask("cgroup drivers", machine)
    assert result.result == WARN and "containers of crio lose their GPU at `systemctl daemon-reload`" in result.detail
    assert "use cgroupfs in crio" in result.hint
    socket.touch()
    assert ask("cgroup drivers", machine).result == OK
    socket.unlink()
    put(root, "etc/crio/crio.conf.d/00.conf", 'cgroup_manager = "cgroupfs"\n')
    assert ask("cgroup drivers", machine).result == OK


def test_cdi_file_without_systemd_warns(machine: Machine, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_systemd(monkeypatch, root)
    put(root, "usr/bin/podman").chmod(0o755)
    put(root, "etc/containers/containers.conf", 'cgroup_manager = "systemd"\n')
    assert ask("cgroup drivers", machine).result == OK
    put(root, "etc/cdi/gpushare.yaml", "devices: [{containerEdits: {hooks: []}}]\n")
    result = ask("cgroup drivers", machine)
    assert result.result == WARN and "containers of /etc/cdi/gpushare.yaml lose their GPU" in result.detail


@pytest.mark.parametrize(
    ("version", "result"), [("1.1.2", OK), ("1.1.3", WARN), ("1.1.5+ds1", WARN), ("1.1.7", OK), ("1.1.15", OK)]
)
def test_runc_that_forgets_devices_warns(
    machine: Machine, root: Path, monkeypatch: pytest.MonkeyPatch, version: str, result: str
) -> None:
    socket = root / "private"
    monkeypatch.setattr(systemdscope, "SOCKET", str(socket))
    low_level = put(root, "runc", f"#!/bin/sh\necho runc version {version}\n")
    low_level.chmod(0o755)
    assert machine.config
    machine = machine._replace(config=machine.config._replace(runtime=str(low_level)))
    put(root, "etc/docker/daemon.json", '{"exec-opts": ["native.cgroupdriver=systemd"]}')
    found = ask("cgroup drivers", machine)
    assert found.result == result and (f"containers of runc version {version} lose" in found.detail) == (result == WARN)
    socket.touch()
    assert ask("cgroup drivers", machine).result == OK


def test_nvidia_hooks_are_reported(machine: Machine, root: Path) -> None:
    assert ask("NVIDIA hooks", machine) == Result(OK, "none")
    put(root, "etc/docker/daemon.json", '{"default-runtime": "nvidia"}')
    result = ask("NVIDIA hooks", machine)
    assert result.result == WARN and "/etc/docker/daemon.json (default runtime)" in result.detail
    hook = put(root, "opt/hook.json", '{"hook": {"path": "/usr/bin/nvidia-container-runtime-hook"}}')
    folder = root / "usr/share/containers/oci/hooks.d"
    folder.mkdir(parents=True)
    (folder / "oci-nvidia-hook.json").symlink_to(hook)
    assert "oci-nvidia-hook.json (hook)" in ask("NVIDIA hooks", machine).detail
    put(root, "usr/bin/podman").chmod(0o755)
    configure.configure(ENGINES["podman"], machine.settings._replace(hook_only=True), machine.files)
    result = ask("NVIDIA hooks", machine)
    assert result.result == FAIL and "refused" in result.detail
