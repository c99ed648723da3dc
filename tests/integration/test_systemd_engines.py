"""docker, podman and containerd with systemd's cgroups, under a real systemd and with real device nodes: a container
keeps its GPU, and gets no other, when systemd, the engine or the runtime writes device rules again.
docs/engines-reference.md has the table."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpushare.engines import hookfiles
from gpushare.engines.base import Settings

from simulator.simhost import make_simhost
from tests.integration.test_systemd_cgroups import low_levels, version_of
from tests.support import host
from tests.support.engines import podman as podmans
from tests.support.engines.containerd_daemon import MAIN
from tests.support.engines.cri import Cri, CriError
from tests.support.engines.dockerd import NO_NETWORK
from tests.support.engines.image import IMAGE, make_archive, make_root, make_tar
from tests.support.host import write_config
from tests.support.processes import reap_zombies
from tests.support.realnodes import ALLOWED, DENIED, NODES, make_nodes
from tests.support.rootfs import run, unmount_below
from tests.support.spec import Hook
from tests.support.systemd import Systemd

EDIT_SPEC = Path(__file__).parent / "programs" / "edit_spec.py"
CONFIG, STATE = "/etc/gpushare/config.yaml", "/run/gpushare"
GRANTED = dict.fromkeys(NODES, ALLOWED) | {"nvidia1": DENIED}
LOOK = 'for n in nvidia0 nvidia1 nvidiactl; do e=$( (: <>/nodes/$n) 2>&1 ); echo "$n|$e"; done'
Events = dict[str, tuple[tuple[str, ...], ...]]  # name -> commands
SYSTEMD: Events = {name: (("systemctl", name),) for name in ("daemon-reload", "daemon-reexec")}
UNIT = """[Unit]
DefaultDependencies=no
[Service]
Type=notify
Delegate=yes
KillMode=process
StandardOutput=append:{log}
StandardError=append:{log}
ExecStart={program}
"""


class Machine(Systemd):
    """A systemd on a host with two GPUs without a driver, and an image with their nodes in /nodes. The directory has a
    short path, for sockets."""

    def __init__(self, image_root: Path, low_level: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="gs-"))
        self.driver = make_simhost(self.directory / "host", gpus=2, memory_bytes=16 << 30)
        (self.driver / ".gpushare-sim").unlink()
        make_nodes(self.driver / "dev")
        self.low_level = shutil.which(low_level) or low_level
        (self.directory / "etc").mkdir()
        self.devices_alone = self.directory / "devices-alone"  # engines set a CPU weight or a limit of pids, too
        words = f"{sys.executable} {EDIT_SPEC} keep-resources devices {self.low_level}"
        self.devices_alone.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        self.devices_alone.chmod(0o755)
        keys = {"runtime": {"path": str(self.devices_alone)}, "log": {"decisions": "/run/decisions"}}
        write_config(self.directory / "etc/config.yaml", self.driver, **keys)
        self.image = Path(shutil.copytree(image_root, self.directory / "image", symlinks=True))
        make_nodes(self.image / "nodes")
        self._engines: dict[type[Engine], Engine] = {}
        super().__init__(self.directory / "systemd", self.directory / "etc")
        self.bus()

    def engine(self, kind: type[Engine]) -> Engine:
        if kind not in self._engines:
            self._engines[kind] = kind(self)
        return self._engines[kind]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        super().close()
        reap_zombies()
        unmount_below(self.directory)
        run("rm", "-rf", self.directory)

    def service(self, name: str, program: str) -> None:
        self.unit(name, UNIT.format(program=program, log=self.directory / name))
        self.run("systemctl", "daemon-reload")
        if self.call("systemctl", "start", name).returncode:
            raise AssertionError((self.directory / name).read_text()[-3000:])

    def cdi(self) -> dict[str, str]:
        """Write the CDI file; return the device that each way names."""
        self.run("mkdir", "-p", "/run/cdi")
        words = ("--program", str(host.BIN / "gpushare-hook"), "--output", "/run/cdi/gpushare.json", "--format", "json")
        self.run("gpushare", "cdi", "generate", *words)
        names = [one["name"] for one in json.loads(self.run("cat", "/run/cdi/gpushare.json"))["devices"]]
        return {"cdi any": "any", "cdi uuid": next(name for name in names if name != "any")}

    def opened(self, *exec_words: str) -> dict[str, str]:
        """The kernel's error by node, in the container in which `exec_words` starts a program."""
        lines = (line.split("|") for line in self.run(*exec_words, "sh", "-c", LOOK).splitlines())
        return {name: text.rpartition(": ")[2] for name, text in lines}


class Docker:
    """docker has no hooks, and CDI from version 25 on."""

    WAYS = ("runtime", *(("cdi any", "cdi uuid") if version_of("dockerd") >= (25, 0) else ()))

    def __init__(self, machine: Machine) -> None:
        self.machine, below = machine, machine.directory / "docker"
        below.mkdir()
        paths = {"gpushare": host.BIN / "gpushare-runtime", "low": machine.devices_alone}
        keys = {"runtimes": {name: {"path": str(path)} for name, path in paths.items()}, "features": {"cdi": True}}
        (below / "daemon.json").write_text(json.dumps({**keys, "deprecated-key-path": str(below / "key")}))
        self._devices = machine.cdi()
        options = {"config-file": "daemon.json", "data-root": "data", "exec-root": "exec", "pidfile": "pid"}
        words = [shutil.which("dockerd") or "dockerd", *(f"--{name}={below / file}" for name, file in options.items())]
        words += [f"--host=unix://{below}/socket", "--storage-driver=overlay2", "--live-restore", *NO_NETWORK]
        machine.service("docker.service", " ".join([*words, "--exec-opt=native.cgroupdriver=systemd"]))
        self._docker = ("/usr/bin/docker", f"--config={below}", "-H", f"unix://{below}/socket")
        machine.run(*self._docker, "import", str(make_tar(machine.image, below / "image.tar")), "t")
        self.exec = (*self._docker, "exec", "c1")
        self.events = {
            **SYSTEMD,
            "docker pause": ((*self._docker, "pause", "c1"), (*self._docker, "unpause", "c1")),
            "restart of docker": (("systemctl", "restart", "docker.service"),),
            "docker restart": ((*self._docker, "restart", "--time", "0", "c1"),),
        }
        if not machine.low_level.endswith("/crun"):  # docker 20.10 sends a memory limit of 0, which crun 1.28 refuses
            self.events["docker update"] = ((*self._docker, "update", "--restart", "no", "c1"),)

    def start(self, way: str) -> None:
        words = ("run", "--detach", "--name", "c1", "--network", "none", "--runtime")
        asks = ("gpushare", "--env", "GPUSHARE_DEVICES=0")
        if way.startswith("cdi"):
            asks = ("low", "--device", f"gpushare.io/share={self._devices[way]}")
        self.machine.run(*self._docker, *words, *asks, "t", "sleep", "inf")

    def remove(self) -> None:
        self.machine.run(*self._docker, "rm", "--force", "c1")

    def close(self) -> None:
        self.machine.run("systemctl", "stop", "docker.service")


class Podman:
    """Podman has no daemon: what an engine's restart could lose is what its next command could."""

    WAYS = ("hook", "runtime", "cdi any", "cdi uuid")

    def __init__(self, machine: Machine) -> None:
        self.machine, below = machine, machine.directory / "podman"
        for name in ("hooks", "root", "run", "tmp"):
            (below / name).mkdir(parents=True)
        programs = (str(host.BIN / "gpushare-runtime"), str(host.BIN / "gpushare-hook"))
        for stage in ("createRuntime", "poststop"):
            text = hookfiles.text(Settings(*programs, CONFIG, STATE), stage)
            (below / "hooks" / f"gpushare-{stage}.json").write_text(text)
        settings = (
            podmans.SETTINGS.replace("cgroupfs", "systemd") + f'[engine.runtimes]\ngpushare = ["{programs[0]}"]\n'
        )
        (below / "containers.conf").write_text(settings)
        self._podman = ("env", f"CONTAINERS_CONF={below}/containers.conf", "podman", "--root", f"{below}/root")
        self._podman += ("--runroot", f"{below}/run", "--tmpdir", f"{below}/tmp", "--storage-driver", "overlay")
        machine.run(*self._podman, "import", str(make_tar(machine.image, below / "image.tar")), "localhost/t")
        self._devices = machine.cdi()

    def start(self, way: str) -> None:
        hooks = ("--hooks-dir", f"{self.machine.directory}/podman/hooks") if way == "hook" else ()
        low_level = "gpushare" if way == "runtime" else str(self.machine.devices_alone)
        podman = (*self._podman, "--runtime", low_level, *hooks)
        # podman 5 sends its own device rules, too. crun 1.28 refuses: the container must stay as it is. crun 1.21
        # applies them, so the GPU is lost (docs/engines-reference.md)
        sends = version_of("podman") >= (5, 0) and self.machine.low_level.endswith("/crun")
        update = (*podman, "update", "--cpu-shares", "100", "c1")
        if sends:
            update = ("sh", "-c", '! "$@"', "sh", *update)
        self.exec = (*podman, "exec", "c1")
        self.events = {
            **SYSTEMD,
            "podman update": () if sends and version_of("crun") < (1, 22) else (update,),
            "podman pause": ((*podman, "pause", "c1"), (*podman, "unpause", "c1")),
            "podman restart": ((*podman, "restart", "--time", "0", "c1"),),
        }
        device = ("--device", f"gpushare.io/share={self._devices.get(way)}")
        asks = device if way in self._devices else ("--env", "GPUSHARE_DEVICES=0")
        words = ("--detach", "--name", "c1", "--network", "none")
        self.machine.run(*podman, "run", *words, *asks, "localhost/t", "sleep", "inf")

    def remove(self) -> None:
        self.machine.run(*self._podman, "rm", "--force", "--time", "0", "c1")

    def close(self) -> None:
        pass


class Containerd:
    """containerd as kubelet uses it, with two handlers."""

    WAYS = ("hook", "runtime")

    def __init__(self, machine: Machine) -> None:
        self.machine, below = machine, machine.directory / "containerd"
        (below / "log").mkdir(parents=True, exist_ok=True)
        spec = json.loads(machine.run("ctr", "oci", "spec"))
        spec["hooks"] = Hook(host.BIN / "gpushare-hook", Path(CONFIG), Path(STATE), cri=True).entries()
        (below / "spec.json").write_text(json.dumps(spec))
        text = MAIN.format(directory=below, disabled="[]", imports="[]", image=IMAGE)
        for way, key, value in (
            ("runc", "BinaryName", machine.devices_alone),  # containerd's default must be there
            ("hook", "BinaryName", machine.devices_alone),
            ("runtime", "BinaryName", host.BIN / "gpushare-runtime-cri"),
        ):
            table = f'[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{way}'
            base = f'base_runtime_spec = "{below}/spec.json"\n' if way == "hook" else ""
            text += f'{table}]\nruntime_type = "io.containerd.runc.v2"\n{base}'
            text += f'{table}.options]\n{key} = "{value}"\nSystemdCgroup = true\n'
        (below / "config.toml").write_text(text)
        machine.run("ip", "link", "set", "lo", "up")  # the CRI plugin listens there
        program = shutil.which("containerd") or "containerd"
        machine.service("containerd.service", f"{program} --config {below}/config.toml")
        self._ctr = ("ctr", "--address", f"{below}/sock", "--namespace", "k8s.io")
        machine.run(*self._ctr, "images", "import", str(make_archive(machine.image, below)))
        self._cri = Cri(below / "sock")
        try:
            self._cri.call("ListPodSandbox")
        except CriError:
            raise AssertionError((machine.directory / "containerd.service").read_text()[-6000:]) from None
        self.events = {**SYSTEMD, "restart of containerd": (("systemctl", "restart", "containerd.service"),)}

    def start(self, way: str) -> None:
        host_network = {"namespace_options": {"network": "NODE"}}
        sandbox: dict[str, Any] = {
            "metadata": {"name": "p", "uid": "u", "namespace": "default"},
            "log_directory": f"{self.machine.directory}/containerd/log",
            "linux": {"cgroup_parent": "gs.slice", "security_context": host_network},
        }
        self._pod = self._cri.call("RunPodSandbox", config=sandbox, runtime_handler=way).pod_sandbox_id
        config = {
            "metadata": {"name": "c1"},
            "image": {"image": IMAGE},
            "command": ["sleep", "inf"],
            "envs": [{"key": "GPUSHARE_DEVICES", "value": "0"}],
            "linux": {"security_context": host_network},
            "log_path": "c1",
        }
        one = self._cri.call("CreateContainer", pod_sandbox_id=self._pod, config=config, sandbox_config=sandbox)
        self._cri.call("StartContainer", container_id=one.container_id)
        self.exec = (*self._ctr, "tasks", "exec", "--exec-id", "look", one.container_id)

    def remove(self) -> None:
        self._cri.call("StopPodSandbox", pod_sandbox_id=self._pod)
        self._cri.call("RemovePodSandbox", pod_sandbox_id=self._pod)

    def close(self) -> None:
        self._cri.close()
        self.machine.run("systemctl", "stop", "containerd.service")


Engine = Docker | Podman | Containerd


@pytest.fixture(scope="module")
def image_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("image") / "root")


@pytest.fixture(scope="module", params=low_levels())
def machine(request: pytest.FixtureRequest, image_root: Path) -> Iterator[Machine]:
    with contextlib.closing(Machine(image_root, request.param)) as made:
        yield made


@pytest.mark.parametrize(
    ("kind", "way"),
    [(kind, way) for kind in (Docker, Podman, Containerd) for way in kind.WAYS],
    ids=lambda one: one if isinstance(one, str) else one.__name__.lower(),
)
def test_device_rules_persist(machine: Machine, kind: type[Engine], way: str) -> None:
    engine = machine.engine(kind)
    with_crun = machine.low_level.endswith("/crun")
    if kind is Docker and with_crun and version_of("crun") < (1, 22) and version_of("dockerd") < (26, 0):
        # this docker denies one device (fuse), and this crun can give systemd no such rule
        with pytest.raises(AssertionError, match="systemd does not support deny rules for devices"):
            engine.start(way)
        engine.remove()
        return
    engine.start(way)
    try:
        assert machine.opened(*engine.exec) == GRANTED
        seen = {}
        for name, commands in engine.events.items():
            for words in commands:
                machine.run(*words)
            seen[name] = machine.opened(*engine.exec)
        assert seen == dict.fromkeys(engine.events, GRANTED)
    finally:
        engine.remove()
