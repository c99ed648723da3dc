"""gpushare doctor: programs, the low-level runtime, engines and their cgroup drivers, NVIDIA's hooks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gpushare.config import oci_runtime
from gpushare.core.errors import ConfigError
from gpushare.doctor import FAIL, OK, WARN, Machine, Result, engines
from gpushare.engines import configure
from gpushare.engines.configure import ENGINES
from gpushare.system import systemdscope

from tests.unit.doctorhost import ask, machine, put, root

__all__ = ["machine", "root"]  # fixtures
CRI3 = "io.containerd.cri.v1.runtime"
RUNC = f"[plugins.'{CRI3}'.containerd.runtimes.runc.options]\n"


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
    broken = ask("engines", machine)
    assert broken.result == FAIL and broken.detail.startswith("docker: /etc/docker/daemon.json")
    assert broken.hint == "correct the file of docker first: `gpushare runtime configure` refuses it, too"
    with pytest.raises(ConfigError):
        configure.configure(ENGINES["docker"], machine.settings, machine.files)
    (root / "etc/docker/daemon.json").unlink()
    (root / "usr/bin/dockerd").unlink()
    assert ask("engines", machine).result == OK


@pytest.mark.parametrize(
    ("engine", "file", "text", "driver"),
    [
        ("docker", "etc/docker/daemon.json", '{"exec-opts": ["native.cgroupdriver=systemd"]}', "systemd"),
        ("docker", "etc/docker/daemon.json", '{"exec-opts": ["native.cgroupdriver=cgroupfs"]}', "cgroupfs"),
        ("containerd", "etc/containerd/config.toml", f"version = 3\n{RUNC}    SystemdCgroup = true\n", "systemd"),
        ("containerd", "etc/containerd/config.toml", f"version = 3\n{RUNC}    # SystemdCgroup = true\n", "cgroupfs"),
        ("docker", "etc/default/docker", "DOCKER_OPTS='--exec-opt native.cgroupdriver=systemd'\n", "systemd"),
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


OUTSIDE = "kubepods-burstable-podabc.slice:cri-containerd:demo1"


def test_containers_outside_their_pod_s_cgroup_are_reported(machine: Machine, root: Path) -> None:
    """shared/cases/engines/01, on hosts where an earlier version configured containerd."""
    assert ask("handlers", machine).result == OK
    runc, ours = (f"[plugins.'{CRI3}'.containerd.runtimes.{name}.options]\n" for name in ("runc", "gpushare"))
    put(root, "etc/containerd/config.toml", f'version = 3\nimports = ["a.toml"]\n{runc}SystemdCgroup = true\n')
    assert ask("handlers", machine).result == OK
    put(root, "etc/containerd/a.toml", f"version = 3\n{ours}BinaryName = '/x'\n")
    found = ask("handlers", machine)
    assert found.result == FAIL and "SystemdCgroup is false for the handler gpushare and true for" in found.detail
    assert found.hint == "run `gpushare runtime configure containerd` again and restart containerd"
    put(root, "etc/containerd/a.toml", f"version = 3\n{ours}SystemdCgroup = true\n")
    assert ask("handlers", machine).result == OK
    for folder in (
        f"system.slice/{OUTSIDE}",
        f"memory/{OUTSIDE.replace('demo1', 'demo2')}",
        "a/cri-containerd-3.scope",
    ):
        (root / "sys/fs/cgroup" / folder).mkdir(parents=True)
    found = ask("handlers", machine)
    assert found.result == FAIL and "2 containers are outside the pod's cgroup" in found.detail
    assert found.detail.endswith(": demo1, demo2") and found.hint.endswith("then delete these pods")


def test_cgroups_of_users_are_no_containers_outside_their_pod_s_cgroup(machine: Machine, root: Path) -> None:
    """Any user can make such a name in a cgroup that systemd delegated."""
    delegated = root / "sys/fs/cgroup/user.slice/user-1000.slice/user@1000.service"
    (delegated / OUTSIDE).mkdir(parents=True)
    os.chown(delegated, 1000, 1000)
    assert ask("handlers", machine).result == OK


def test_handler_is_compared_with_the_one_that_it_copies(machine: Machine, root: Path) -> None:
    """Not with a default handler that does not run runc."""
    table = f"[plugins.'{CRI3}'.containerd"
    runtimes = (
        f"{table}]\ndefault_runtime_name = 'kata'\n{table}.runtimes.kata]\nruntime_type = 'io.containerd.kata.v2'\n"
        f"{table}.runtimes.runc.options]\nSystemdCgroup = true\n{table}.runtimes.gpushare.options]\nSystemdCgroup = "
    )
    for systemd, result in (("true", OK), ("false", FAIL)):
        put(root, "etc/containerd/config.toml", f"version = 3\n{runtimes}{systemd}\n")
        assert ask("handlers", machine).result == result


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("version = 2\n", OK),  # unknown
        (f"version = 3\n[plugins.'{CRI3}']\nenable_cdi = true\n", OK),
        (f"version = 3\n[plugins.'{CRI3}']\nenable_cdi = false\n", FAIL),
        ("version = 2\n[plugins.'io.containerd.grpc.v1.cri']\nenable_cdi = false\n", FAIL),
    ],
)
def test_cdi_that_containerd_ignores_is_reported(machine: Machine, root: Path, text: str, result: str) -> None:
    put(root, "etc/containerd/config.toml", text)
    assert ask("CDI", machine).result == OK
    put(root, "etc/cdi/gpushare.yaml", "devices: []\n")  # perhaps for docker only
    assert ask("CDI", machine).result == OK
    claim = put(root, "var/run/cdi/gpushare.io-claim_1.json")
    found = ask("CDI", machine)
    assert found.result == result and ("/var/run/cdi/gpushare.io-claim_1.json" in found.detail) == (result == FAIL)
    claim.unlink()
    if "enable_cdi" in text:
        configure.configure(
            ENGINES["containerd"], machine.settings._replace(engine_version="2.2", hook_only=True), machine.files
        )
        assert ask("CDI", machine).result == result


def test_containerd_s_own_answer_about_cdi_is_used(
    machine: Machine, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """containerd 1.7 prints the key, 1.6 does not know it."""
    put(root, "run/cdi/gpushare.io-claim_1.json")
    (root / "var").mkdir(exist_ok=True)
    (root / "var/run").symlink_to("../run")
    key = "\n[plugins.'io.containerd.grpc.v1.cri']\nstream_server_port = '0'\n"
    for answer, result in ((key, FAIL), (f"{key}enable_cdi = false\n", FAIL), (f"{key}enable_cdi = true\n", OK)):
        monkeypatch.setattr(type(machine.files), "ask", lambda *words, text=answer: f"version = 2{text}")
        assert ask("CDI", machine).result == result


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
