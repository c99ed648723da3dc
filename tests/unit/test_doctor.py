"""gpushare doctor: each check where it is well and where it is not, over a host that is made of files."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpushare import bpf, doctor, leases, linux, log, lowlevel, mountns, rootless, storage
from gpushare.doctor import CHECKS, FAIL, OK, SKIP, WARN, Machine, Result, engines, shim
from gpushare.engines import configure
from gpushare.engines.base import Settings
from gpushare.engines.configure import ENGINES
from gpushare.engines.host import Host
from gpushare.errors import CapacityError, DeviceError
from gpushare.model import Config, Inventory

from tests.unit import pure
from tests.unit.clihost import GIB


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files of a host with one engine, docker, and with our programs."""
    path = tmp_path / "root"
    for name in ("usr/bin/dockerd", "usr/bin/docker", "opt/gpushare-runtime", "opt/gpushare-hook"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("#!/bin/sh\n")
        (path / name).chmod(0o755)
    return path


@pytest.fixture
def machine(root: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A host without a fault, its driver a value."""
    storage.prepare(str(state_dir))
    settings = Settings("/opt/gpushare-runtime", "/opt/gpushare-hook", state_dir=str(state_dir))
    config = Config(driver_root=str(root), state_dir=str(state_dir), shim_dir=str(root / "shim"))
    inventory = Inventory(str(root), pure.VERSION, (pure.device(0),), simulated=True, cuda_version="12.2")
    return Machine("/none.yaml", str(state_dir), settings, Host(str(root)), config, inventory)


def put(root: Path, name: str, text: str = "") -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def ask(name: str, machine: Machine) -> Result:
    (check,) = (check for check in CHECKS if check.name == name)
    return doctor.answer(check, machine)


def test_every_name_is_there_once_and_says_what_is_well() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names) and all(check.meaning for check in CHECKS)


# Driver


def test_driver_that_is_not_there_is_a_failure_and_the_rest_is_skipped(machine: Machine) -> None:
    broken = machine._replace(inventory=None, driver_error=DeviceError("no driver", "load it"))
    assert ask("driver", broken) == Result(FAIL, "no driver", "load it")
    for name in ("driver files", "devices", "device nodes", "library loads", "containers"):
        assert ask(name, broken).result == SKIP, name


def test_driver_and_devices_are_named(machine: Machine) -> None:
    assert ask("driver", machine).detail.startswith(f"{pure.VERSION}, CUDA 12.2 in ")
    assert ask("devices", machine) == Result(OK, "0 Test GPU 16 GiB")


def test_devices_that_nvml_does_not_know(machine: Machine) -> None:
    assert machine.inventory
    unknown = machine.inventory._replace(devices=(pure.device(0, memory_bytes=0), pure.device(1)))
    result = ask("devices", machine._replace(inventory=unknown))
    assert result.result == WARN and "of device 0:" in result.detail
    assert ask("devices", machine._replace(inventory=unknown._replace(devices=()))).result == FAIL


def test_driver_files(machine: Machine, root: Path) -> None:
    assert ask("driver files", machine).result == FAIL  # there are none
    libdir = "usr/lib/x86_64-linux-gnu"
    for stem in ("libcuda", "libnvidia-ml"):
        put(root, f"{libdir}/{stem}.so.{pure.VERSION}")
    result = ask("driver files", machine)
    assert result.result == WARN and "no nvidia-smi" in result.detail
    put(root, "usr/bin/nvidia-smi").chmod(0o755)
    result = ask("driver files", machine)
    assert result.result == WARN and "libnvidia-ptxjitcompiler" in result.detail
    put(root, f"{libdir}/libnvidia-ptxjitcompiler.so.{pure.VERSION}")
    assert ask("driver files", machine).result == OK
    newer = machine.inventory._replace(driver_version="550.1") if machine.inventory else None
    result = ask("driver files", machine._replace(inventory=newer))
    assert result.result == FAIL and pure.VERSION in result.detail and "550.1" in result.detail


def test_device_nodes(machine: Machine, root: Path) -> None:
    names = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia0")
    for name in names:
        put(root, f"dev/{name}")
    assert ask("device nodes", machine).result == OK
    for name in names:
        (root / "dev" / name).unlink()
        result = ask("device nodes", machine)
        assert result.result == FAIL and f"missing: /dev/{name}" in result.detail and "nvidia-modprobe" in result.hint
        put(root, f"dev/{name}")


def test_rights(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask("rights", machine) == Result(OK, "root")
    monkeypatch.setattr(rootless, "is_rootless", lambda: True)
    assert ask("rights", machine).result == WARN
    assert ask("library loads", machine).result == SKIP


# Kernel


def failing(number: int) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise linux.SyscallError("call", "/", number)

    return call


def test_kernel_of_this_machine_has_everything(machine: Machine) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert ask("kernel", machine).result == OK
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "call", ["open_tree", "detached_tmpfs", "pidfd_open", "openat2", "mount_setattr", "move_mount"]
)
def test_kernel_without_a_call(machine: Machine, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr(linux, call, failing(errno.ENOSYS))
    result = ask("kernel", machine)
    assert result.result == FAIL and "lacks" in result.detail and "5.12" in result.hint
    monkeypatch.setattr(linux, call, failing(errno.EPERM))
    result = ask("kernel", machine)
    assert result.result == FAIL and "not permitted" in result.detail
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert ask("kernel", machine).result == SKIP


def hierarchy(kind: str, options: str = "") -> mountns.MountEntry:
    (one, *_) = mountns.read_mounts()
    return one._replace(fstype=kind, super_options=options)


@pytest.mark.parametrize(
    ("mounts", "load", "result", "words"),
    [
        ((), None, FAIL, "no cgroup"),
        ((("cgroup", "rw,cpu"),), None, FAIL, "no cgroup"),
        ((("cgroup", "rw,devices"),), None, OK, "v1,"),
        ((("cgroup", "rw,devices"), ("cgroup2", "rw")), None, OK, "hybrid"),
        ((("cgroup2", "rw"),), None, OK, "device programs load"),
        ((("cgroup2", "rw"),), failing(errno.EPERM), WARN, "cannot be loaded"),
    ],
)
def test_cgroups(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, mounts: Any, load: Any, result: str, words: str
) -> None:
    found = [hierarchy(*one) for one in mounts]
    monkeypatch.setattr(mountns, "read_mounts", lambda: found)
    monkeypatch.setattr(bpf, "load", load or (lambda *_: os.open("/", os.O_RDONLY)))
    said = ask("cgroups", machine)
    assert said.result == result and words in said.detail


# Programs and engines


def test_programs(machine: Machine, root: Path) -> None:
    settings = machine.settings._replace(
        program=str(root / "opt/gpushare-runtime"), hook=str(root / "opt/gpushare-hook")
    )
    there = machine._replace(settings=settings)
    assert ask("programs", there).result == OK
    (root / "opt/gpushare-hook").chmod(0o777)
    assert ask("programs", there).result == FAIL and "chmod go-w" in ask("programs", there).hint
    (root / "opt/gpushare-hook").unlink()
    assert "is not a program" in ask("programs", there).detail


def test_runtime(machine: Machine, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.config
    good = put(root, "opt/runc", "#!/bin/sh\necho runc version 1.9\necho more\n")
    good.chmod(0o755)
    chosen = machine._replace(config=machine.config._replace(runtime=str(good)))
    assert ask("runtime", chosen) == Result(OK, f"{good}, runc version 1.9")
    good.write_text("#!/bin/sh\nexit 3\n")
    assert ask("runtime", chosen).result == FAIL
    good.chmod(0o644)
    assert "is not a program" in ask("runtime", chosen).detail
    monkeypatch.setattr(lowlevel, "_DIRECTORIES", (str(root),))
    assert "no runc or crun" in ask("runtime", machine).detail


def test_engines(machine: Machine, root: Path) -> None:
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
        ("podman", "etc/containers/containers.conf", 'cgroup_manager = "systemd"\n', "systemd"),
    ],
)
def test_cgroup_driver_of_an_engine(
    machine: Machine, root: Path, engine: str, file: str, text: str, driver: str
) -> None:
    put(root, file, text)
    assert engines.cgroup_driver(machine, engine) == driver


def test_hook_alone_with_systemd_cgroups_is_warned_of(machine: Machine, root: Path) -> None:
    put(root, "usr/bin/crio")
    (root / "usr/bin/crio").chmod(0o755)
    assert ask("cgroup drivers", machine).result == OK
    configure.configure(ENGINES["crio"], machine.settings._replace(hook_only=True), machine.files)
    result = ask("cgroup drivers", machine)
    assert result.result == WARN and "daemon-reload" in result.detail and "crio" in result.hint
    put(root, "etc/crio/crio.conf.d/00.conf", 'cgroup_manager = "cgroupfs"\n')
    assert ask("cgroup drivers", machine).result == OK


def test_nvidia_hooks(machine: Machine, root: Path) -> None:
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


# The library


def test_library_files(machine: Machine, root: Path) -> None:
    result = ask("library", machine)
    assert result.result == FAIL and "libcuda.so: No such file" in result.detail
    import sys

    for name in shim.LIBRARIES:
        put(root, f"shim/{name}").write_bytes(Path(sys.executable).resolve().read_bytes()[:4096])
    assert ask("library", machine).result == FAIL  # cut short
    (root / "shim").rename(root / "other")
    from tests.lib.host import SHIM

    assert machine.config
    assert ask("library", machine._replace(config=machine.config._replace(shim_dir=str(SHIM)))).result == OK


@pytest.mark.parametrize(
    ("answer", "result", "words"),
    [
        ({"CUDA": GIB, "NVML": GIB}, OK, "1 GiB"),
        ({"CUDA": GIB, "NVML": 16 * GIB}, FAIL, "NVML shows 16 GiB where the limit is 1 GiB"),
        ({"CUDA": 0, "NVML": 0}, FAIL, "CUDA shows 0 B and NVML shows 0 B"),
        ({}, FAIL, "CUDA shows 0 B"),
        ({"error": "cuInit returned 100", "hint": "x"}, FAIL, "cuInit returned 100"),
    ],
)
def test_what_the_process_with_the_library_says(answer: Any, result: str, words: str) -> None:
    said = shim.judged(answer)
    assert said.result == result and words in said.detail


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[..., Any]], None]]:
    """silent(function): what the child does in the place of looking at the driver."""
    monkeypatch.setattr(shim, "_DEADLINE_S", 0.3)
    yield lambda function: monkeypatch.setattr(shim, "_share", function)
    assert not [name for name in os.listdir("/tmp") if name.startswith("gpushare-doctor-")]


def test_driver_that_hangs_or_crashes_in_the_child_is_an_answer(machine: Machine, silent: Any) -> None:
    silent(lambda *_: time.sleep(100))
    assert "did not answer within" in ask("library loads", machine).detail
    silent(lambda *_: os.kill(os.getpid(), 9))
    assert "ended by signal 9" in ask("library loads", machine).detail
    silent(lambda *_: os._exit(4))
    assert "ended by exit code 4" in ask("library loads", machine).detail

    def refused(*_: Any) -> Any:
        raise CapacityError("no room", "wait")

    silent(refused)
    assert ask("library loads", machine) == Result(FAIL, "no room", "wait")
    silent(lambda *_: {}["x"])
    assert "KeyError" in ask("library loads", machine).detail


# State


def test_state_directory(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask("state", machine).result == OK
    assert "yet" in ask("state", machine._replace(state_dir=str(tmp_path / "none"))).detail
    (tmp_path / "plain").mkdir()
    assert ask("state", machine._replace(state_dir=str(tmp_path / "plain"))).result == OK
    (tmp_path / "plain" / "file").write_text("")
    assert ask("state", machine._replace(state_dir=str(tmp_path / "plain"))).result == WARN
    status = os.statvfs(machine.state_dir)
    full = os.statvfs_result((*status[:4], status.f_blocks // 10, *status[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    result = ask("state", machine)
    assert result.result == WARN and "9" in result.detail.rpartition(" is ")[2]


def test_leases(machine: Machine, start: Callable[..., Path], state: Path) -> None:
    assert ask("leases", machine).detail == "0 containers hold a share"
    start("live", pure.share(0, 0, GIB))
    assert ask("leases", machine) == Result(OK, "1 container holds a share")
    start("gone", pure.share(0, 0, GIB))
    path = state / "containers" / "gone" / "lease.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot_id": "x"}))
    (state / "containers" / "half").mkdir()
    result = ask("leases", machine)
    assert result == Result(WARN, "1 container holds a share; left behind: gone, half", "gpushare prune")
    (state / "changing").write_text("live")
    assert "gone, half, a change of limits of live" in ask("leases", machine).detail
    (state / "changing").unlink()
    path.write_text("{")
    result = ask("leases", machine)
    assert result.result == FAIL and "gone: lease.json is damaged" in result.detail and "--assume-free" in result.hint
    leases.sweep(str(state), assume_free=True)
    assert "2 released shares are not removed" in ask("leases", machine).detail
    storage.empty_trash(str(state))
    assert ask("leases", machine).result == OK


def test_containers_of_another_driver(machine: Machine, start: Callable[..., Path]) -> None:
    assert ask("containers", machine) == Result(OK, "no container runs")
    start("c1", pure.share(0, 0, GIB))
    assert ask("containers", machine).result == OK
    assert machine.inventory
    newer = machine.inventory._replace(driver_version="550.1")
    result = ask("containers", machine._replace(inventory=newer))
    assert result.result == WARN and f"c1 was started with driver {pure.VERSION}" in result.detail
    other = machine.inventory._replace(devices=(pure.device(1),))
    assert f"c1 has {pure.UUIDS[0]}, which is gone" in ask("containers", machine._replace(inventory=other)).detail


def test_refusals(machine: Machine) -> None:
    folder = Path(machine.state_dir) / "errors"
    assert ask("refusals", machine).result == OK
    log.record(machine.state_dir, "old", "gpushare: no room", CapacityError("no room"))
    os.utime(folder / "old", (0, 0))
    assert ask("refusals", machine).result == OK
    log.record(machine.state_dir, "c1", "gpushare: no room; wait", CapacityError("no room"))
    result = ask("refusals", machine)
    assert result == Result(WARN, "1 container was refused in the last day; c1: no room; wait", "gpushare inspect c1")
    log.record(machine.state_dir, "c2", "gpushare: internal error", ZeroDivisionError("x"))
    result = ask("refusals", machine)
    assert result.detail.startswith("2 containers were refused") and "report" in result.hint


# The command


def test_check_with_a_bug_does_not_hide_the_others(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Machine) -> Result:
        raise ZeroDivisionError("x")

    for error, words in ((broken, "ZeroDivisionError"), (lambda _: os.stat("/none/x"), "/none/x: No such")):
        result = doctor.answer(doctor.Check("x", "", error), machine)
        assert result.result == FAIL and words in result.detail


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """answers(result, ...): what the checks find, in the order of the table."""

    def set_(*results: Result) -> None:
        checks = tuple(
            doctor.Check(f"check {number}", "", lambda _, one=result: one)
            for number, result in enumerate(results)  # type: ignore[misc]
        )
        monkeypatch.setattr(doctor, "CHECKS", checks)

    return set_


def test_exit_code_table_and_json(cli: Callable[..., Any], answers: Callable[..., None]) -> None:
    answers(Result(OK, "well"), Result(WARN, "odd", "look"))
    code, text, error = cli("doctor")
    assert (code, error) == (0, "")
    assert text.splitlines() == [
        "CHECK    RESULT  DETAIL  WHAT TO DO",
        "check 0  ok      well",
        "check 1  warn    odd     look",
        "",
        "no failures, 1 warning, 2 checks",
    ]
    answers(Result(FAIL, "broken", "mend"), Result(SKIP, "not here"), Result(FAIL, "too", ""))
    code, text, error = cli("doctor", "--format", "json")
    assert (code, error) == (1, "")
    value = json.loads(text)
    assert (value["failures"], value["warnings"]) == (2, 0)
    assert value["checks"][0] == {"name": "check 0", "result": "fail", "detail": "broken", "hint": "mend"}


def test_broken_configuration_is_a_row_not_the_end(cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("version: 1\nmemory_overcomit: 2\n")
    code, text, error = cli("--config", str(tmp_path / "bad.yaml"), "doctor", "--format", "json")
    assert (code, error) == (1, "")
    found = {one["name"]: one for one in json.loads(text)["checks"]}
    assert found["configuration"]["result"] == "fail" and "memory_overcomit" in found["configuration"]["detail"]
    assert found["driver"]["result"] == found["library"]["result"] == "skip"
    assert found["kernel"]["result"] == "ok"
