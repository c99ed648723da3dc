"""Real CRI-O: its own answers about gpushare's handler, and a restart beside live containers.

Collected only where crio is in PATH (make engines). test_engines.py starts containers by it, too.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import tomlkit
from gpushare.engines import crio as configured_crio

from tests.integration import engines
from tests.support.engines import crio
from tests.support.engines.base import SLEEP, Want
from tests.support.engines.cri import CriError
from tests.support.engines.crio import Crio
from tests.support.engines.image import PROBE
from tests.support.engines.places import DefaultPlaces
from tests.support.engines.pods import wait_gone
from tests.support.host import BUILD
from tests.support.rootfs import run
from tools import effective_docs

GIB = 1 << 30
OURS = {"runtime_path": str(BUILD / "bin/gpushare-runtime-cri")}
# All keys that a handler of an OCI runtime can have
FULL = """[crio.runtime]
default_runtime = "crun"
[crio.runtime.runtimes.crun]
runtime_path = "{directory}/libexec/crun"
runtime_root = "/run/mine"
monitor_path = "{directory}/libexec/conmon"
monitor_cgroup = "pod"
monitor_exec_cgroup = "container"
monitor_env = ["A=b"]
allowed_annotations = ["io.containers.trace-syscall", "userns-mode.crio.io"]
container_min_memory = "1MiB"
no_sync_log = true
privileged_without_host_devices = true
exec_cpu_affinity = "first"
container_create_timeout = 300
seccomp_profile = "{directory}/seccomp.json"
[crio.runtime.runtimes.crun.default_annotations]
"run.oci.keep_original_groups" = "1"
"""


@pytest.fixture
def daemon() -> Iterator[crio.Daemon]:
    """A CRI-O that is not started yet."""
    directory = Path(tempfile.mkdtemp(prefix="gs-"))
    places = DefaultPlaces(directory / "places")
    made = crio.Daemon(directory / "d")
    try:
        yield made
    finally:
        made.close()
        places.close()
        run("rm", "-rf", directory)


@pytest.fixture(scope="module", params=["hook", "runtime"])
def crio_engine(request: pytest.FixtureRequest, image_root: Path) -> Iterator[Crio]:
    directory = Path(tempfile.mkdtemp(prefix="gs-"))
    with engines.engine(f"crio, {request.param}", directory, image_root) as made:
        made.node.cli("refresh")
        yield cast(Crio, made)


def handlers(daemon: crio.Daemon) -> dict[str, dict[str, Any]]:
    """The handlers that the daemon has after a start, with dotted keys, without zero values. "every": all keys of a
    handler."""
    daemon.start()
    found = tomlkit.parse(daemon.status()).unwrap()["crio"]["runtime"]
    daemon.kill()
    flat = {name: effective_docs.flat(table) for name, table in found["runtimes"].items()}
    tables = {name: {key: value for key, value in one.items() if value} for name, one in flat.items()}
    default = found["default_runtime"]
    return {**tables, "default": tables[default], "every": flat[default]}


def configure(*options: str) -> subprocess.CompletedProcess[str]:
    words = [BUILD / "bin/gpushare", "runtime", "configure", "crio", *options]
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


def put(daemon: crio.Daemon, text: str) -> None:
    """Write the drop-in of the default handler, and the files that it names."""
    directory = daemon.directory
    (directory / "libexec").mkdir()
    for name in ("crun", "conmon"):
        shutil.copy(shutil.which(name) or name, directory / "libexec")
    (directory / "seccomp.json").write_text('{"defaultAction": "SCMP_ACT_ALLOW"}')
    (crio.DROP_INS / "10-crio.conf").write_text(text.format(directory=directory))


@pytest.mark.parametrize("text", [FULL, '[crio.runtime]\nlog_level = "debug"\n'], ids=["own handler", "built-in one"])
def test_handler_equals_the_default_one_in_every_other_key(daemon: crio.Daemon, text: str) -> None:
    put(daemon, text)
    before = handlers(daemon)
    done = configure()
    assert done.returncode == 0 and "did not run" not in done.stderr, done.stderr
    after = handlers(daemon)
    assert {name: after[name] for name in before} == before
    ours, default = after["gpushare"], after["default"]
    assert ours == {**default, **OURS}
    if text == FULL:
        # CRI-O has no other key; these are of virtual machines, or empty for an OCI runtime
        assert set(after["every"]) - set(default) == {"runtime_config_path", "runtime_type"}
        words = run("crio", "--version")
        number = re.search(r"\d+\.\d+\.\d+", words)
        assert number
        place = str(daemon.directory)
        shown = [
            {key: value.replace(place, "/usr") if isinstance(value, str) else value for key, value in one.items()}
            for one in (before["default"], default, ours)
        ]
        effective_docs.check(f"CRI-O {number[0]}", *shown)
    assert configure().stdout == "nothing to do\n"
    assert configure("--undo").returncode == 0
    assert handlers(daemon) == before and not Path(configured_crio.FILE).exists()


def test_handler_of_a_later_file_replaces_the_whole_table(daemon: crio.Daemon) -> None:
    """Also if that file is a link, or hidden, or has another ending: CRI-O reads it."""
    put(daemon, FULL)
    (daemon.directory / "other").write_text('[crio.runtime.runtimes.crun]\nmonitor_env = ["C=d"]\n')
    (crio.DROP_INS / ".20").symlink_to(daemon.directory / "other")
    (crio.DROP_INS / "10-crio.conf").rename(crio.DROP_INS / ".10")
    assert configure().returncode == 0
    found = handlers(daemon)
    assert found["gpushare"] == {**found["crun"], **OURS} and found["crun"]["monitor_env"] == ["C=d"]
    assert "container_create_timeout" not in found["crun"] or found["crun"]["container_create_timeout"] != 300


def test_files_that_crio_refused_before_are_changed_with_a_note(daemon: crio.Daemon) -> None:
    (crio.DROP_INS / "50.conf").write_text('[crio.runtime]\npids_limit = "many"\n')
    done = configure()
    assert done.returncode == 0 and Path(configured_crio.FILE).exists()
    assert "CRI-O refuses the change: get and merge config from context" in done.stderr
    assert "it refused the files before the change, too" in done.stderr


@pytest.mark.parametrize("way", ["hook", "runtime"])
def test_containers_outlive_a_killed_crio(image_root: Path, way: str) -> None:
    directory = Path(tempfile.mkdtemp(prefix="gs-"))
    with engines.engine(f"crio, {way}", directory, image_root) as one:
        engine = cast(Crio, one)
        engine.node.cli("refresh")
        with engine.pod({"lives.gpushare.io/memory": "10Gi", "dies.gpushare.io/memory": "6Gi"}) as pod:
            lives, dies = pod.run(Want(SLEEP), "lives"), pod.run(Want(SLEEP), "dies")
            pid = dies.pid
            engine.daemon.kill()
            end(pid)
            assert engine.node.leases() == sorted([lives.id, dies.id])
            engine.daemon.start()
            assert lives.exec(PROBE).answer()["total_bytes"] == 10 * GIB
            dies.wait()
            again = pod.run(Want(SLEEP), "dies", attempt=1)  # kubelet keeps the ended one
            assert again.exec(PROBE).answer()["total_bytes"] == 6 * GIB
            for running in (lives, again):
                running.stop()  # StopPodSandbox would wait for a program that ignores SIGTERM, up to its deadline
        assert engine.node.leases() == []


def end(pid: int) -> None:
    """Kill a program while CRI-O does not run, and wait for its end."""
    ended = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    wait_gone(ended)


def test_refusal_reads_as_in_the_events_of_the_pod(crio_engine: Crio) -> None:
    with crio_engine.pod({"main.gpushare.io/memory": "lots"}) as pod, pytest.raises(CriError) as caught:
        pod.run(Want(SLEEP))
    assert caught.value.detail.startswith("container create failed: ") and "\n" not in caught.value.detail.strip()
    text = caught.value.detail.replace('\\"', '"')  # runc quotes what a hook wrote
    assert 'main.gpushare.io/memory="lots": not an amount of memory' in text


def test_handler_of_the_pod_decides(crio_engine: Crio) -> None:
    """A pod without a RuntimeClass gets a share through hooks only."""
    with crio_engine.pod(handler="") as pod, pod.run(Want(SLEEP, {"GPUSHARE_MEMORY": "2Gi"})) as one:
        assert (one.exec("ls", "/usr/lib/gpushare").code == 0) == (crio_engine.way == "hook")
