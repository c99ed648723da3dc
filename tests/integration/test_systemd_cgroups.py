"""Containers in cgroups of a real systemd, with runc or crun and real device nodes: they open their GPU and no other,
and keep both when systemd or the runtime writes device rules again. docs/engines-reference.md has the table."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simulator.simhost import make_simhost
from tests.integration import ns_util
from tests.support.host import BIN, BUILD, write_config
from tests.support.processes import reap_zombies
from tests.support.realnodes import ALLOWED, DENIED, NODES, make_nodes
from tests.support.spec import Hook, spec
from tests.support.systemd import Systemd
from tools import newest

CONFIG, STATE = "/etc/gpushare/config.yaml", "/run/gpushare"


# Systemd, or the runtime as `docker update` and `docker pause` call it, may write device rules again at these events
EVENTS = {
    "daemon-reload": ("systemctl daemon-reload",),
    "daemon-reexec": ("systemctl daemon-reexec",),
    "set-property": ("systemctl set-property --runtime gs-c1.scope CPUWeight=50",),
    "update": ("update --resources /run/nothing c1",),
    "pause": ("pause c1", "resume c1"),
    "daemon-reload again": ("systemctl daemon-reload",),
}


def version_of(program: str) -> tuple[int, int]:
    text = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"version (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def low_levels() -> list[str]:
    """The installed runtimes. crun before 1.21 refuses pure cgroup v2 without CAP_SYS_RESOURCE."""
    return ["runc", *(["crun"] if version_of("crun") >= (1, 21) else [])]


class Machine(Systemd):
    """A systemd on a host with two GPUs without a driver, and a bundle whose root has their nodes."""

    def __init__(self, directory: Path, low_level: str) -> None:
        self.root = make_simhost(directory / "host", gpus=2, memory_bytes=16 << 30)
        (self.root / ".gpushare-sim").unlink()
        make_nodes(self.root / "dev")
        etc = directory / "etc"
        etc.mkdir()
        path = subprocess.run(["which", low_level], capture_output=True, text=True, check=True).stdout.strip()
        write_config(etc / "config.yaml", self.root, runtime={"path": path}, log={"decisions": "/run/decisions"})
        self.low_level, self.bundle = path, directory / "bundle"
        self.rootfs = ns_util.make_image(self.bundle / "rootfs")
        make_nodes(self.rootfs / "nodes")
        super().__init__(directory / "systemd", etc)
        self.bus()
        self.run("sh", "-c", "echo '{}' >/run/nothing")
        self.run("gpushare", "refresh")  # knows whether this runtime gives systemd its rules

    def start(self, way: str) -> None:
        """Start a container with GPU 0."""
        hook = Hook(BIN / "gpushare-hook", Path(CONFIG), Path(STATE))
        value = spec(
            rootfs=self.rootfs,
            args=["sleep", "inf"],
            env={} if way.startswith("cdi") else {"GPUSHARE_DEVICES": "0"},
            annotations={},
            hook=None if way == "runtime" else hook,
            mounts=[],
            user=(0, 0),
            cgroups_path="system.slice:gs:c1",
        )
        if way.startswith("cdi"):
            self._inject(value, way)
        (self.bundle / "config.json").write_text(json.dumps(value))
        ours = [str(BIN / "gpushare-runtime"), "--gpushare-config", CONFIG, "--gpushare-state", STATE]
        self.words = [*(ours if way == "runtime" else [self.low_level]), "--systemd-cgroup", "--root", "/run/low"]
        words = [*self.words, "run", "--detach", "--bundle", str(self.bundle), "c1"]
        self.run("sh", "-c", '"$@" >/run/printed 2>&1 </dev/null || { cat /run/printed; exit 1; }', "sh", *words)

    def _inject(self, value: dict[str, Any], way: str) -> None:
        """Apply the CDI device `any`, or that of GPU 0, as an engine does."""
        words = ("cdi", "generate", "--format", "json", "--program", str(BIN / "gpushare-hook"))
        edits = json.loads(self.run("gpushare", *words))["devices"][way == "cdi uuid"]["containerEdits"]
        value["process"]["env"] += edits["env"]
        value["linux"]["devices"] = []
        for node in edits.get("deviceNodes", ()):
            number = os.stat(node["hostPath"]).st_rdev
            device = {"type": "c", "major": os.major(number), "minor": os.minor(number)}
            value["linux"]["devices"].append({**device, "path": node["path"], "fileMode": 0o666})
            value["linux"]["resources"]["devices"].append({**device, "allow": True, "access": node["permissions"]})

    @contextlib.contextmanager
    def hidden_socket(self) -> Iterator[None]:
        """Without the socket at which the hook calls systemd. runc and crun use D-Bus."""
        self.run("mv", "/run/systemd/private", "/run/systemd/hidden")
        try:
            yield
        finally:
            self.run("mv", "/run/systemd/hidden", "/run/systemd/private")

    @contextlib.contextmanager
    def counted_calls(self) -> Iterator[list[None]]:
        """Connections to that socket. Each ends at once, so the hook gets no answer."""
        calls: list[None] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    listener.accept()[0].close()
                    calls.append(None)

        with self.hidden_socket(), socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/{self.pid}/root/run/systemd/private")
            listener.listen()
            thread = threading.Thread(target=serve)
            thread.start()
            try:
                yield calls
            finally:
                listener.shutdown(socket.SHUT_RDWR)
                thread.join()

    def opened(self) -> dict[str, str]:
        """The kernel's error by node, of the nodes that the image has."""
        script = 'for n in nvidia0 nvidia1 nvidiactl; do e=$( (: <>/nodes/$n) 2>&1 ); echo "$n|$e"; done'
        lines = (line.split("|") for line in self.run(*self.words, "exec", "c1", "sh", "-c", script).splitlines())
        return {name: text.rpartition(": ")[2] for name, text in lines}


@pytest.fixture(scope="module", params=low_levels())
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    made = Machine(tmp_path_factory.mktemp("machine"), request.param)
    yield made
    made.close()
    reap_zombies()


@pytest.mark.parametrize("way", ["hook", "cdi any", "cdi uuid", "runtime"])
def test_device_rules_persist(machine: Machine, way: str) -> None:
    machine.start(way)
    granted = dict.fromkeys(NODES, ALLOWED) | {"nvidia1": DENIED}
    try:
        assert machine.opened() == granted
        seen = {}
        for name, lines in EVENTS.items():
            for line in lines:
                machine.run(*(() if line.startswith("systemctl ") else machine.words), *line.split())
            seen[name] = machine.opened()
        assert seen == dict.fromkeys(EVENTS, granted)
    finally:
        machine.run(*machine.words, "delete", "--force", "c1")


def test_hook_that_cannot_reach_systemd_warns(machine: Machine) -> None:
    with machine.hidden_socket():
        machine.start("hook")
        assert machine.opened() == dict.fromkeys(NODES, ALLOWED) | {"nvidia1": DENIED}
        granted = machine.run("cat", "/run/decisions").splitlines()[-1]
        assert "the GPU is lost at systemctl daemon-reload: /run/systemd/private: No such file or directory" in granted
    machine.run(*machine.words, "delete", "--force", "c1")


@pytest.mark.parametrize("low_level", ["runc", "crun"])
def test_runtime_that_gives_systemd_the_rules_costs_no_call(tmp_path: Path, low_level: str) -> None:
    """`gpushare refresh` has asked the runtime for its version. After an edit of config.yaml nothing is known of it."""
    machine = Machine(tmp_path, str(newest.unpack(BUILD / "newest") / low_level))
    try:
        calls = []
        for before in ("true", "touch"):
            machine.run(before, CONFIG)
            with machine.counted_calls() as count:
                machine.start("runtime")
            machine.run(*machine.words, "delete", "--force", "c1")
            calls.append(len(count))
        assert calls == [0, 1]
    finally:
        machine.close()
        reap_zombies()
