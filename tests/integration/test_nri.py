"""`gpushare nri` under containerd 2.1 (tools/newest.py), whose configuration does not mention gpushare or NRI."""

from __future__ import annotations

import json
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
from tests.support.rootfs import run

GIB = 1 << 30
TWO_GIB = {"GPUSHARE_MEMORY": "2Gi"}
DEVICES = ("sh", "-c", "ls -d /dev/nvidia[0-9]* /usr/lib/gpushare 2>/dev/null")
TIMEOUT_S = 2  # of NRI for a response


class Engine:
    """containerd, and the plugin, which a test starts and ends."""

    def __init__(self, directory: Path, image_root: Path) -> None:
        self.directory = directory
        self._places = DefaultPlaces(directory / "places")  # also the default path of NRI's socket
        host = make_simhost(directory / "host", gpus=1, memory_bytes=16 * GIB, late_return_ms=0)
        self.node = Node(directory / "node", host)
        assert self.node.cli("refresh").returncode == 0
        self.daemon = Daemon(directory / "d")
        self._config = directory / "config.toml"
        self._config.write_text(self.daemon.text())
        self.daemon.start(self._config)
        self.daemon.load(image_root)
        self.plugin: Program

    def start_plugin(self) -> None:
        words = ("--config", self.node.config, "--state", self.node.state, "nri")
        self.plugin = Program([str(program()), *map(str, words), "--hook", str(BIN / "gpushare-hook")])
        try:
            self.plugin.expect("registered with containerd")
            self.plugin.expect("containers exist")  # the engine calls it from then on
        except BaseException:
            self.plugin.end(signal.SIGKILL)
            raise

    def restart(self) -> None:
        self.daemon.kill()
        self.daemon.start(self._config)

    def pod(self, **annotations: str) -> Pod:
        return Pod(self.daemon, self.directory / "pods", annotations, "")

    def close(self) -> None:
        self.daemon.close()
        self.node.close()
        self._places.close()
        run("rm", "-rf", self.directory)


@contextmanager
def running(image_root: Path) -> Iterator[Engine]:
    with programs("newest containerd"):
        made = Engine(Path(tempfile.mkdtemp(prefix="gs-")), image_root)
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


@pytest.fixture(scope="module")
def _engine(image_root: Path) -> Iterator[Engine]:
    with running(image_root) as made:
        yield made


@pytest.fixture
def engine(_engine: Engine) -> Iterator[Engine]:
    """The engine with a running plugin."""
    with with_plugin(_engine):
        yield _engine


def total_bytes(one: PodContainer) -> int:
    answer: dict[str, Any] = one.exec(PROBE).answer()
    return int(answer["total_bytes"])


def has_no_gpu(one: PodContainer) -> bool:
    return one.exec(*DEVICES).out == ""


def hooks(one: PodContainer) -> list[str]:
    """Stages in config.json."""
    return sorted(one.info()["runtimeSpec"].get("hooks") or {})


def test_pod_gets_its_share(engine: Engine) -> None:
    """By variable and by annotation; a neighbour without a request has no GPU."""
    with engine.pod(**{"a.gpushare.io/memory": "1Gi", "example.org/other": "x"}) as pod:
        a, b, plain = pod.run(Want(SLEEP), "a"), pod.run(Want(SLEEP, TWO_GIB), "b"), pod.run(Want(SLEEP), "plain")
        assert (total_bytes(a), total_bytes(b)) == (GIB, 2 * GIB)
        assert has_no_gpu(plain)
        assert engine.node.leases() == sorted([a.id, b.id])
        assert hooks(a) == ["poststop", "prestart"]
        assert "example.org/other" not in a.info()["runtimeSpec"]["annotations"]
        found = json.loads(engine.node.cli("inspect", b.id, "-o", "json").stdout)
        assert found["name"] == f"default/{pod.config['metadata']['name']}/b"


def test_refused_request_fails_with_its_reason(engine: Engine) -> None:
    with engine.pod() as pod, pytest.raises(Exception, match="99Gi requested, 16 GiB free"):
        pod.run(Want(SLEEP, {"GPUSHARE_MEMORY": "99Gi"}))


def test_no_plugin_no_gpu(engine: Engine) -> None:
    engine.plugin.end()
    with engine.pod() as pod:
        one = pod.run(Want(SLEEP, TWO_GIB))
        assert has_no_gpu(one) and hooks(one) == []


def test_slow_plugin_no_gpu(engine: Engine) -> None:
    """The plugin answers later than NRI's timeout: no GPU. After that it connects again."""
    with engine.pod() as pod:
        engine.plugin.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        one = pod.container(Want(SLEEP, TWO_GIB))
        assert TIMEOUT_S <= time.monotonic() - began < 2 * TIMEOUT_S
        one.start()
        assert has_no_gpu(one) and hooks(one) == []
        engine.plugin.process.send_signal(signal.SIGCONT)
        engine.plugin.expect("connecting again")
        engine.plugin.expect("1 containers exist|2 containers exist")
        assert total_bytes(pod.run(Want(SLEEP, TWO_GIB), "next")) == 2 * GIB


def test_plugin_killed_between_create_and_start_no_gpu(engine: Engine) -> None:
    """The hook is in config.json by then, and finds that no plugin holds the lock."""
    with engine.pod() as pod:
        one, plain = pod.container(Want(SLEEP, TWO_GIB)), pod.container(Want(SLEEP), "plain")
        engine.plugin.end(signal.SIGKILL)
        one.start()
        plain.start()
        assert hooks(one) == ["poststop", "prestart"]
        assert has_no_gpu(one) and has_no_gpu(plain)
        assert engine.node.leases() == []


def test_second_plugin_is_refused(engine: Engine) -> None:
    done = engine.node.cli("nri", "--hook", str(BIN / "gpushare-hook"))
    assert done.returncode == 75 and "another gpushare nri runs" in done.stderr


def test_restarts_keep_shares(image_root: Path) -> None:
    """Of the plugin, killed, and of the engine, killed while the plugin runs. The test has its own engine: other tests
    must end with the engine that they began with."""
    with running(image_root) as engine, with_plugin(engine), engine.pod() as pod:
        one = pod.run(Want(SLEEP, TWO_GIB))
        engine.plugin.end(signal.SIGKILL)
        engine.start_plugin()
        assert total_bytes(one) == 2 * GIB
        created = pod.container(Want(SLEEP, TWO_GIB), "created")
        engine.restart()
        engine.plugin.expect("registered with containerd")
        engine.plugin.expect("containers exist, [1-9][0-9]* of them with gpushare's hook")
        created.start()
        after = pod.run(Want(SLEEP, TWO_GIB), "after")
        assert [total_bytes(each) for each in (one, created, after)] == [2 * GIB] * 3
        assert engine.node.leases() == sorted([one.id, created.id, after.id])
