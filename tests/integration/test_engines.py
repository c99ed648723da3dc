"""The same request gives the same container with every engine, through hook or runtime."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration import engines
from tests.support.engines.base import SLEEP, Engine, Refused, Want
from tests.support.engines.image import PROBE
from tests.support.judge import peak_bytes
from tests.support.realnodes import ALLOWED, DENIED, access, opened, real_nodes
from tests.support.spec import Mount

GIB = 1 << 30
TWO_GIB = {"GPUSHARE_MEMORY": "2Gi"}
WHOLE = {"GPUSHARE_MEMORY": "16Gi"}
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


@pytest.fixture(scope="module", params=engines.ENGINES)
def _made(request: pytest.FixtureRequest, image_root: Path) -> Iterator[Engine]:
    unified = Path("/sys/fs/cgroup/unified")
    hybrid = "crun" in request.param and os.path.ismount(unified)
    if hybrid:  # crun refuses a host with cgroup v1 and v2 at once
        engines.run("umount", unified)
    directory = Path(tempfile.mkdtemp(prefix="gs-"))
    with engines.engine(request.param, directory, image_root) as made:
        made.node.cli("refresh")  # mounts the state directory, which stays
        yield made
    if hybrid:
        engines.run("mount", "-t", "cgroup2", "none", unified)


@pytest.fixture
def engine(_made: Engine) -> Iterator[Engine]:
    yield _made
    assert _made.node.leases() == [], "a lease was left behind"


def test_limit_is_visible_reached_and_enforced(engine: Engine) -> None:
    answer = engine.run(Want(env=TWO_GIB)).answer()
    assert (answer["devices"], answer["total_bytes"], answer["nvml_total_bytes"]) == (1, 2 * GIB, 2 * GIB)
    assert answer["refused"] == OUT_OF_MEMORY
    assert GIB < answer["got_bytes"] < peak_bytes(engine.node.driver_root, answer["pidns"]) <= 2 * GIB


def test_exec_has_the_same_limit(engine: Engine) -> None:
    with engine.start(Want(SLEEP, TWO_GIB)) as one:
        assert engine.node.leases() == [one.id]
        for args in ((PROBE,), ("env", "-i", PROBE), ("sh", "-c", f"GPUSHARE_MEMORY=9Gi {PROBE}")):
            assert one.exec(*args).answer()["total_bytes"] == 2 * GIB
        assert one.exec(PROBE, user="1000:1000").answer()["total_bytes"] == 2 * GIB


def test_two_shares_stay_within_the_device(engine: Engine) -> None:
    with engine.start(Want(SLEEP, {"GPUSHARE_MEMORY": "10Gi"})):
        with pytest.raises(Refused) as refused:
            engine.start(Want(SLEEP, {"GPUSHARE_MEMORY": "7Gi"}))
        if engine.shows_reason:
            assert "7 GiB" in refused.value.result.err
        with engine.start(Want(SLEEP, {"GPUSHARE_MEMORY": "6Gi"})):
            pass
    assert engine.run(Want(env=WHOLE)).answer()["total_bytes"] == 16 * GIB


def test_container_without_request_gets_no_gpu(engine: Engine) -> None:
    result = engine.run(Want(("ls", "-d", "/dev/nvidia0", "/dev/nvidiactl", "/usr/lib/gpushare")))
    assert result.code != 0
    assert result.out == ""


def test_only_granted_devices_can_be_opened(engine: Engine, tmp_path: Path) -> None:
    """By name, and by a node of the same number: the device cgroup decides."""
    with real_nodes(engine.node, tmp_path / "real"):
        with engine.start(Want(SLEEP, {"GPUSHARE_DEVICES": "0"})) as one:
            assert (opened(one, "/dev/nvidia0"), opened(one, "/dev/nvidiactl")) == (ALLOWED, ALLOWED)
            assert (access(one, 0), access(one, 1), access(one, 255)) == (ALLOWED, DENIED, ALLOWED)
        with engine.start(Want(SLEEP)) as none:
            assert (access(none, 0), access(none, 255)) == (DENIED, DENIED)


def test_refusal_is_shown(engine: Engine) -> None:
    with pytest.raises(Refused) as refused:
        engine.start(Want(SLEEP, {"GPUSHARE_MEMORY": "lots"}))
    assert refused.value.result.code != 0
    if engine.shows_reason:
        assert "GPUSHARE_MEMORY" in refused.value.result.err
        assert "lots" in refused.value.result.err
    assert any("lots" in kept.read_text() for kept in (engine.node.state / "errors").iterdir())


@pytest.mark.parametrize("want", [{"read_only": True}, {"user": "1000:1000"}, {"tmpfs": ("/run",)}], ids=str)
def test_limit_holds_with_each_option(engine: Engine, want: dict[str, object]) -> None:
    answer = engine.run(Want(env=TWO_GIB)._replace(**want)).answer()
    assert (answer["total_bytes"], answer["refused"]) == (2 * GIB, OUT_OF_MEMORY)


def test_volume_over_our_directory_is_covered(engine: Engine, tmp_path: Path) -> None:
    """A user's volume there could contain any limits: gpushare mounts its own over it and creates nothing in it."""
    (tmp_path / "limits").write_text("all of it")
    want = Want(env=TWO_GIB, mounts=(Mount(tmp_path, "/usr/lib/gpushare", ("rw",)),))
    assert engine.run(want).answer()["total_bytes"] == 2 * GIB
    assert [path.name for path in tmp_path.iterdir()] == ["limits"]


def test_restarted_container_gets_its_share_again(engine: Engine) -> None:
    if not engine.restarts:
        return
    with engine.start(Want(SLEEP, TWO_GIB)) as one:
        one.stop()
        one.restart()
        assert one.exec(PROBE).answer()["total_bytes"] == 2 * GIB
        assert engine.node.leases() == [one.id]


def test_annotation_requests_a_share(engine: Engine) -> None:
    if not engine.annotates:
        return
    answer = engine.run(Want(annotations={"gpushare.io/memory": "1Gi"})).answer()
    assert answer["total_bytes"] == GIB


def test_ended_program_releases_its_share(engine: Engine) -> None:
    for _ in range(3):
        assert engine.run(Want(env=WHOLE)).answer()["total_bytes"] == 16 * GIB
