"""`gpushare nri` under containerd 2.1, whose configuration does not mention gpushare or NRI, and under containerd 1.7,
whose configuration enables NRI. Their programs come from Debian (tools/newest.py)."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from simulator.simhost import make_simhost
from tests.integration.engines import programs
from tests.integration.test_k8s_plugin import Program, program
from tests.support.engines.base import SLEEP, Want
from tests.support.engines.containerd_daemon import Daemon
from tests.support.engines.image import PROBE
from tests.support.engines.places import DefaultPlaces
from tests.support.engines.pods import Pod, PodContainer
from tests.support.host import BIN, Node
from tests.support.realnodes import ALLOWED, DENIED, access, opened, real_nodes
from tests.support.rootfs import run

GIB = 1 << 30
TWO_GIB = {"GPUSHARE_MEMORY": "2Gi"}
DEVICES = ("sh", "-c", "ls -d /dev/nvidia[0-9]* /usr/lib/gpushare 2>/dev/null")
OUT_OF_MEMORY = 2  # of CUresult
TIMEOUT_S = 2  # of NRI for a response
LATE_S = 3
# Engine -> its program's version, and the lines that its configuration needs for NRI
ENGINES = {
    "newest containerd": ("2.", ""),
    "trixie containerd": ("1.7", '[plugins."io.containerd.nri.v1.nri"]\n  disable = false\n'),
}
NEWEST = next(iter(ENGINES))
EVERY = os.environ.get("GPUSHARE_NRI_ENGINES") == "all"  # every test under every engine


class Engine:
    """containerd, and the plugin, which a test starts and ends."""

    def __init__(self, directory: Path, image_root: Path, name: str) -> None:
        self.directory, self.name = directory, name
        version, enable = ENGINES[name]
        self._places = DefaultPlaces(directory / "places")  # also the default path of NRI's socket
        host = make_simhost(directory / "host", gpus=1, memory_bytes=16 * GIB, late_return_ms=0)
        self.node = Node(directory / "node", host)
        assert self.node.cli("refresh").returncode == 0
        self.daemon = Daemon(directory / "d")
        self.config = directory / "config.toml"
        self.config.write_text(self.daemon.text() + enable)
        self.daemon.start(self.config)
        self.daemon.load(image_root)
        self.version = re.escape(version)
        self.plugin: Program

    def start_plugin(self, hook: Path = BIN / "gpushare-hook") -> None:
        words = ("--config", self.node.config, "--state", self.node.state, "nri")
        self.plugin = Program([str(program()), *map(str, words), "--hook", str(hook)])
        try:
            self.plugin.expect(f"registered with containerd v?{self.version}")
            self.plugin.expect("containers exist")  # the engine calls it from then on
        except BaseException:
            self.plugin.end(signal.SIGKILL)
            raise

    def restart(self) -> None:
        self.daemon.kill()
        self.daemon.start(self.config)

    def pod(self, **annotations: str) -> Pod:
        return Pod(self.daemon, self.directory / "pods", annotations, "")

    def close(self) -> None:
        self.daemon.close()
        self.node.close()
        self._places.close()
        run("rm", "-rf", self.directory)


@contextmanager
def running(image_root: Path, name: str = NEWEST) -> Iterator[Engine]:
    with programs(name):
        made = Engine(Path(tempfile.mkdtemp(prefix="gs-")), image_root, name)
        try:
            yield made
        finally:
            made.close()


@contextmanager
def with_plugin(engine: Engine) -> Iterator[Engine]:
    engine.start_plugin()
    try:
        yield engine
    finally:
        if engine.plugin.process.returncode is None:
            engine.plugin.process.send_signal(signal.SIGCONT)
            ended = engine.plugin.end()
            assert ended == (0, "")
    assert engine.node.leases() == [], "a lease was left behind"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The mark older_engine: under every engine; the other tests only under the newest one."""
    if "engine_name" in metafunc.fixturenames:
        older = EVERY or metafunc.definition.get_closest_marker("older_engine")
        metafunc.parametrize("engine_name", [*ENGINES] if older else [NEWEST], scope="module")


@pytest.fixture(scope="module")
def _engine(engine_name: str, image_root: Path) -> Iterator[Engine]:
    with running(image_root, engine_name) as made:
        yield made


@pytest.fixture
def engine(_engine: Engine) -> Iterator[Engine]:
    """The engine with a running plugin."""
    with with_plugin(_engine):
        yield _engine


def limit(one: PodContainer) -> int:
    """The memory that the driver shows, after a program could not allocate more; the device's node opens."""
    answer: dict[str, Any] = one.exec(PROBE).answer()
    total = int(answer["total_bytes"])
    assert answer["refused"] == OUT_OF_MEMORY and 0 < answer["got_bytes"] <= total == answer["nvml_total_bytes"]
    assert opened(one, "/dev/nvidia0") == ""
    return total


def has_no_gpu(one: PodContainer) -> bool:
    """No node and no library; a node of the driver's number, which the host makes, cannot be opened either."""
    has_driver = "failed" not in json.loads(one.exec(PROBE).out)
    return not has_driver and one.exec(*DEVICES).out == "" and {access(one, 0), access(one, 255)} == {DENIED}


def hooks(one: PodContainer) -> list[str]:
    """Stages in config.json."""
    return sorted(one.info()["runtimeSpec"].get("hooks") or {})


@pytest.mark.older_engine
def test_pod_gets_its_share(engine: Engine) -> None:
    """By variable and by annotation; a neighbour without a request has no GPU."""
    with engine.pod(**{"a.gpushare.io/memory": "1Gi", "example.org/other": "x"}) as pod:
        a, b, plain = pod.run(Want(SLEEP), "a"), pod.run(Want(SLEEP, TWO_GIB), "b"), pod.run(Want(SLEEP), "plain")
        assert ("io.containerd.nri" in engine.config.read_text()) == (engine.name != NEWEST)
        assert (limit(a), limit(b)) == (GIB, 2 * GIB)
        assert (engine.node.state / "nri").read_text() == "registered containerd\n"  # the installer waits for this
        assert has_no_gpu(plain)
        assert engine.node.leases() == sorted([a.id, b.id])
        assert hooks(a) == ["poststop", "prestart"]
        assert "example.org/other" not in a.info()["runtimeSpec"]["annotations"]
        found = json.loads(engine.node.cli("inspect", b.id, "-o", "json").stdout)
        assert found["name"] == f"default/{pod.config['metadata']['name']}/b"


def test_only_the_granted_device_can_be_opened(engine: Engine, tmp_path: Path) -> None:
    """By real device nodes, which the device cgroup decides about."""
    with real_nodes(engine.node, tmp_path / "real"), engine.pod() as pod:
        one, plain = pod.run(Want(SLEEP, {"GPUSHARE_DEVICES": "0"})), pod.run(Want(SLEEP), "plain")
        assert (access(one, 0), access(one, 1), access(one, 255)) == (ALLOWED, DENIED, ALLOWED)
        assert (access(plain, 0), access(plain, 255)) == (DENIED, DENIED)


def test_refused_request_fails_with_its_reason(engine: Engine) -> None:
    with engine.pod() as pod, pytest.raises(Exception, match="99 GiB requested, 16 GiB free"):
        pod.run(Want(SLEEP, {"GPUSHARE_MEMORY": "99Gi"}))


@pytest.mark.older_engine
def test_no_plugin_no_gpu(engine: Engine) -> None:
    engine.plugin.end()
    with engine.pod() as pod:
        one = pod.run(Want(SLEEP, TWO_GIB))
        assert has_no_gpu(one) and hooks(one) == []


@pytest.mark.older_engine
def test_missing_program_stops_no_container(engine: Engine) -> None:
    """As on a node from which gpushare was removed while its plugin ran, and to which it comes back."""
    engine.plugin.end()
    program = engine.directory / "hook"
    engine.start_plugin(program)
    with engine.pod() as pod:
        one = pod.run(Want(SLEEP, TWO_GIB))
        assert has_no_gpu(one) and hooks(one) == []
        engine.plugin.expect("does not exist, so a container starts without gpushare's hook")
        program.symlink_to(BIN / "gpushare-hook")
        assert limit(pod.run(Want(SLEEP, TWO_GIB), "next")) == 2 * GIB
    program.unlink()


def test_slow_plugin_no_gpu(engine: Engine) -> None:
    """The plugin answers after 3 s, and NRI's timeout is 2 s: no GPU. After that the plugin connects again."""
    with engine.pod() as pod:
        engine.plugin.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        one = pod.container(Want(SLEEP, TWO_GIB))
        assert TIMEOUT_S <= time.monotonic() - began < 30  # CRI's own timeout is 60 s
        one.start()
        assert has_no_gpu(one) and hooks(one) == []
        select.select([], [], [], max(0, LATE_S - (time.monotonic() - began)))
        engine.plugin.process.send_signal(signal.SIGCONT)
        engine.plugin.expect("connecting again")
        engine.plugin.expect("1 containers exist|2 containers exist")
        assert limit(pod.run(Want(SLEEP, TWO_GIB), "next")) == 2 * GIB
        assert has_no_gpu(one)


@pytest.mark.older_engine
def test_plugin_killed_between_create_and_start_no_gpu(engine: Engine) -> None:
    """The hook is in config.json by then, and finds that no plugin holds the lock. A container that starts when the
    plugin runs again has its share."""
    with engine.pod() as pod:
        one, plain = pod.container(Want(SLEEP, TWO_GIB)), pod.container(Want(SLEEP), "plain")
        late = pod.container(Want(SLEEP, TWO_GIB), "late")
        engine.plugin.end(signal.SIGKILL)
        one.start()
        plain.start()
        assert hooks(one) == ["poststop", "prestart"]
        assert has_no_gpu(one) and has_no_gpu(plain)
        assert engine.node.leases() == []
        engine.start_plugin()
        late.start()
        assert has_no_gpu(one) and limit(late) == 2 * GIB


def test_second_plugin_is_refused(engine: Engine) -> None:
    done = engine.node.cli("nri", "--hook", str(BIN / "gpushare-hook"))
    assert done.returncode == 75 and "another gpushare nri runs" in done.stderr


def test_restarts_keep_shares(engine_name: str, image_root: Path) -> None:
    """Of the plugin, killed, and of the engine, killed while the plugin runs. The test has its own engine: other tests
    must end with the engine that they began with."""
    with running(image_root, engine_name) as engine, with_plugin(engine), engine.pod() as pod:
        one = pod.run(Want(SLEEP, TWO_GIB))
        engine.plugin.end(signal.SIGKILL)
        engine.start_plugin()
        assert limit(one) == 2 * GIB
        created = pod.container(Want(SLEEP, TWO_GIB), "created")
        engine.restart()
        engine.plugin.expect("registered with containerd")
        engine.plugin.expect("containers exist, [1-9][0-9]* of them with gpushare's hook")
        created.start()
        after = pod.run(Want(SLEEP, TWO_GIB), "after")
        assert [limit(each) for each in (one, created, after)] == [2 * GIB] * 3
        assert engine.node.leases() == sorted([one.id, created.id, after.id])
