"""Names of containers: from each engine's files, wherever a command takes an ID, and what happens without them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpushare.allocation import placement
from gpushare.cli import facts
from gpushare.cli.ids import complete_ids
from gpushare.cli.main import group
from gpushare.core import constants
from gpushare.core.errors import CapacityError
from gpushare.request import request
from gpushare.state import leases, log, names
from gpushare.state.names import Name, Names

from tests.unit import pure
from tests.unit.clihost import GIB, LONG, cli, init, start, state

__all__ = ["cli", "init", "start", "state"]  # fixtures
OTHER = "0123456789" + "f" * 54  # begins as LONG
POD = dict(zip((pair[0] for pair in constants.CRI_ANNOTATION_PAIRS), ("container", "main", "ml", "train-0", "box")))


def leased(state: Path, name: str, bundle: Path, **fields: Any) -> None:
    """Let the container's lease have this bundle."""
    path = state / "containers" / name / "lease.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "bundle": str(bundle), "cri": False, **fields}))


def docker(state: Path, folder: Path, container_id: str, name: str, mounts_of: str = "", **labels: str) -> Path:
    """Write a container as docker does, and return the file that has its name."""
    file = folder / "data" / "containers" / container_id / "config.v2.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"ID": container_id, "Name": f"/{name}", "Config": {"Labels": labels or None}}))
    bundle = folder / "io.containerd.runtime.v2.task/moby" / container_id
    bundle.mkdir(parents=True)
    source = file.parent.parent / (mounts_of or container_id) / "hosts"
    mounts = [{"destination": "/proc", "source": "proc"}, {"destination": "/etc/hosts", "source": str(source)}]
    (bundle / "config.json").write_text(json.dumps({"mounts": mounts}))
    leased(state, container_id, bundle)
    return file


def podman(state: Path, folder: Path, container_id: str, *containers: dict[str, Any], removed: bool = False) -> Path:
    """Write a list of containers as podman does, one container of which has a lease, and return it."""
    bundle = folder / "overlay-containers" / container_id / "userdata"
    bundle.mkdir(parents=True)
    file = bundle.parents[1] / ("volatile-containers.json" if removed else "containers.json")
    file.write_text(json.dumps(containers))
    leased(state, container_id, bundle)
    return file


def pod(state: Path, folder: Path, container_id: str, **more: Any) -> None:
    bundle = folder / "io.containerd.runtime.v2.task/k8s.io" / container_id
    bundle.mkdir(parents=True)
    (bundle / "config.json").write_text(json.dumps({"annotations": POD}))
    leased(state, container_id, bundle, **{"cri": True, **more})


def listed(cli: Callable[..., Any]) -> dict[str, Any]:
    return {one["id"]: one["name"] for one in json.loads(cli("list", "-o", "json")[1])}


@pytest.fixture(autouse=True)
def no_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this host's docker and podman."""
    usual = tmp_path / "usual"
    monkeypatch.setattr(names, "_DOCKER_ROOT", str(usual / "docker"))
    monkeypatch.setattr(names, "_DAEMON_JSON", str(usual / "daemon.json"))
    monkeypatch.setattr(names, "_PODMAN_STORAGE", str(usual / "storage"))
    return usual


def test_names_of_each_engine_are_listed(cli: Callable[..., Any], start: Any, state: Path, tmp_path: Path) -> None:
    for one in ("d", "shared", "p", "rm", "k", "run-1", "bare"):
        start(one, pure.share(0, 0, GIB))
    docker(state, tmp_path / "docker", "d", "web-1")
    docker(state, tmp_path / "docker", "shared", "sidecar", mounts_of="d")  # --network container:d
    podman(state, tmp_path / "podman", "p", {"id": "x", "names": ["no"]}, {"id": "p", "names": ["train"]})
    podman(state, tmp_path / "podman", "rm", {"id": "rm", "names": ["once"]}, removed=True)
    pod(state, tmp_path / "cri", "k")
    leased(state, "run-1", tmp_path, dialect=constants.RUN_DIALECT)
    expected = {"d": "web-1", "shared": "sidecar", "p": "train", "rm": "once", "k": "ml/train-0/main"}
    assert listed(cli) == {**expected, "run-1": None, "bare": None}
    rows = [line.split() for line in cli("list")[1].splitlines()]
    assert rows[0][:2] == ["CONTAINER", "NAME"]
    assert {row[0]: row[1] for row in rows[1:]} == {**expected, "run-1": "-", "bare": "-"}
    top = json.loads(cli("top", "--once", "-o", "json")[1])["containers"]
    assert {one["id"]: one["name"] for one in top} == listed(cli)


@pytest.mark.parametrize(
    "text", ["web", "shop/web", "shop-web-1", "train-0", "ml/train-0", "ml/train-0/main", "train-0/main"]
)
def test_every_command_takes_names(
    cli: Callable[..., Any], start: Any, state: Path, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in ("d", "k", "web2"):
        start(one, pure.share(0, 0, GIB))
    docker(
        state,
        tmp_path,
        "d",
        "shop-web-1",
        **{"com.docker.compose.project": "shop", "com.docker.compose.service": "web"},
    )
    pod(state, tmp_path, "k")
    want = "k" if "train" in text else "d"
    for command in (["inspect", text], ["limit", "show", text], ["list", "--filter", f"name={text}"]):
        code, out, error = cli(*command, "-o", "json")
        value = json.loads(out)
        assert (code, error) == (0, "")
        assert (value[0] if isinstance(value, list) else value)["id"] == want, command
    assert json.loads(cli("pause", text, "-o", "json")[1])["id"] == want


def test_whole_name_comes_before_parts_and_prefixes(
    cli: Callable[..., Any], start: Any, state: Path, tmp_path: Path
) -> None:
    labels = {"com.docker.compose.project": "shop", "com.docker.compose.service": "web"}
    for one in ("a", "b", "web0"):
        start(one, pure.share(0, 0, GIB))
    docker(state, tmp_path, "a", "web")
    docker(state, tmp_path, "b", "shop-web-1", **labels)
    assert json.loads(cli("inspect", "web", "-o", "json")[1])["id"] == "a"
    assert json.loads(cli("inspect", "shop/web", "-o", "json")[1])["id"] == "b"
    assert json.loads(cli("inspect", "web0", "-o", "json")[1])["id"] == "web0"


def test_name_that_is_another_container_s_id_does_not_stand_for_it(
    cli: Callable[..., Any], start: Any, state: Path, tmp_path: Path
) -> None:
    """A pod's owner chooses the names of its containers, and would get what the administrator gives to the other."""
    for one in (LONG, "b"):
        start(one, pure.share(0, 0, GIB))
    docker(state, tmp_path, "b", LONG[:12])
    assert json.loads(cli("inspect", LONG[:12], "-o", "json")[1])["id"] == LONG
    assert json.loads(cli("limit", "set", LONG[:12], "--memory", "2Gi", "-o", "json")[1])["id"] == LONG


def test_ambiguous_name_lists_candidates(cli: Callable[..., Any], start: Any, state: Path, tmp_path: Path) -> None:
    labels = {"com.docker.compose.project": "shop", "com.docker.compose.service": "web"}
    for one in (LONG, OTHER):
        start(one, pure.share(0, 0, GIB))
        docker(state, tmp_path, one, f"shop-web-{one[10]}", **labels)
    code, text, error = cli("inspect", "web")
    assert (code, text) == (64, "")
    assert error == (
        'gpushare: name "web" is ambiguous (2 matches): 0123456789ab (shop-web-a), 0123456789ff (shop-web-f); '
        "give an ID, or more of the name\n"
    )
    assert 'ID prefix "0123" is ambiguous (2 matches)' in cli("limit", "show", "0123")[2]


def test_refused_starts_never_make_live_ids_ambiguous(
    cli: Callable[..., Any], start: Any, state: Path, tmp_path: Path, no_engines: Path
) -> None:
    """Also not those of a container that its user starts again and again under the same name."""
    start(LONG, pure.share(0, 0, GIB))
    docker(state, tmp_path, LONG, "web")
    refused = [f"{LONG[:2]}{number:062x}" for number in range(50)]
    for one in refused:
        log.record(str(state), one, "gpushare: device 0: no room", CapacityError("device 0: no room"))
    file = no_engines / "docker" / "containers" / refused[7] / "config.v2.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"Name": "/late"}))
    for text in (LONG[:12], LONG[:2], LONG[:1], "web"):
        assert json.loads(cli("inspect", text, "-o", "json")[1])["id"] == LONG, text
    late = json.loads(cli("inspect", "late", "-o", "json")[1])
    assert (late["id"], late["name"], late["last_refusal"]) == (refused[7], "late", "device 0: no room")
    code, _, error = cli("inspect", refused[7][:10])
    assert code == 64 and "is ambiguous (50 matches)" in error and error.rstrip().count(",") == 7


def test_ids_are_short_in_tables_and_full_on_request(
    cli: Callable[..., Any], start: Any, state: Path, tmp_path: Path
) -> None:
    start(LONG, pure.share(0, 0, GIB), pure.share(1, 1, GIB))
    assert cli("list")[1].splitlines()[1].split()[0] == LONG[:12]
    assert cli("list", "--no-trunc")[1].splitlines()[1].split()[0] == LONG
    assert cli("ls", "-q")[1] == f"{LONG[:12]}\n"
    assert cli("ps", "-q", "--no-trunc")[1] == f"{LONG}\n"


def test_rename_shows_at_once(state: Path, start: Any, tmp_path: Path) -> None:
    """The program that reads names may run for months."""
    start("d", pure.share(0, 0, GIB))
    file = docker(state, tmp_path, "d", "before")
    known = Names()

    def shown() -> str:
        (one,) = facts.containers_of(str(state), leases.view(str(state)), names=known)
        return one.name.shown

    assert shown() == "before"
    new = file.with_name("new")
    new.write_text(file.read_text().replace("before", "after"))
    new.rename(file)
    assert shown() == "after"
    file.unlink()
    assert shown() == ""


FILES: dict[str, Callable[[Path], Any]] = {
    "missing": lambda path: None,
    "empty": lambda path: path.write_text(""),
    "binary": lambda path: path.write_bytes(bytes(range(256))),
    "deep": lambda path: path.write_text("[" * 100_000),
    "number": lambda path: path.write_text("7"),
    "list of numbers": lambda path: path.write_text("[1, 2]"),
    "wrong types": lambda path: path.write_text('{"Name": 7, "Config": [], "mounts": 3, "annotations": 1}'),
    "long name": lambda path: path.write_text(json.dumps({"Name": "/" + "x" * 5000})),
    "fifo": lambda path: os.mkfifo(path),
    "directory": lambda path: path.mkdir(),
    "huge": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40),
}


@pytest.mark.parametrize("content", FILES)
@pytest.mark.parametrize("engine", ["docker", "podman", "bundle", "pod"])
def test_unreadable_file_means_no_name(
    cli: Callable[..., Any], start: Any, state: Path, tmp_path: Path, engine: str, content: str
) -> None:
    """A FIFO stands for an engine that hangs: no command waits for it."""
    start("one", pure.share(0, 0, GIB))
    if engine == "podman":
        path = podman(state, tmp_path, "one", {"id": "one", "names": ["x"]})
    elif engine == "docker":
        path = docker(state, tmp_path, "one", "x")
    else:
        pod(state, tmp_path, "one", cri=engine == "pod")
        path = tmp_path / "io.containerd.runtime.v2.task/k8s.io/one/config.json"
    path.unlink()
    FILES[content](path)
    began = time.monotonic()
    assert listed(cli) == {"one": None}
    assert cli("inspect", "one")[0] == 0
    assert time.monotonic() - began < 10


def test_name_with_control_characters_is_escaped(
    cli: Callable[..., Any], start: Any, state: Path, tmp_path: Path
) -> None:
    start("one", pure.share(0, 0, GIB))
    docker(state, tmp_path, "one", "a\x1b[31m\nb\ud800")
    code, text, error = cli("list")
    assert (code, error) == (0, "") and "\x1b" not in text and len(text.splitlines()) == 2


def test_pod_of_an_engine_that_is_no_cri_is_ignored(
    cli: Callable[..., Any], start: Any, state: Path, tmp_path: Path
) -> None:
    """Podman copies annotations from images, so any image could claim the name of a pod."""
    start("one", pure.share(0, 0, GIB))
    pod(state, tmp_path, "one", cri=False)
    assert listed(cli) == {"one": None}


def test_names_complete_like_ids(start: Any, state: Path, tmp_path: Path) -> None:
    start(LONG, pure.share(0, 0, GIB))
    docker(state, tmp_path, LONG, "web-1")
    with group.make_context("gpushare", ["--state", str(state), "list"]) as context:
        assert complete_ids(context, group.params[0], "we") == ["web-1"]
        assert complete_ids(context, group.params[0], "01") == [LONG]


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("a/b/c", True),
        ("a/b", True),
        ("b/c", True),
        ("b", True),
        ("c", True),
        ("a/c", False),
        ("", False),
        ("/", False),
    ],
)
def test_parts_of_pod_names(text: str, matches: bool) -> None:
    assert Name("a/b/c", pod=("a", "b", "c")).matches(text) is matches
    assert not Name(pod=("", "", "")).matches(text)


@pytest.mark.parametrize("word", ["status", "status=", "colour=red", "=x"])
def test_wrong_filter_is_one_line(cli: Callable[..., Any], word: str) -> None:
    code, text, error = cli("list", "--filter", word)
    assert (code, text) == (2, "") and error.count("\n") == 1 and "id, name, status, device" in error


def test_filters_combine(cli: Callable[..., Any], start: Any, state: Path, tmp_path: Path) -> None:
    for number, one in enumerate(("a1", "a2", "b1")):
        start(one, pure.share(0, number % 2, GIB))
        docker(state, tmp_path, one, f"name-{one}")

    def ids(*filters: str) -> list[str]:
        return str(cli("list", "-q", *(word for one in filters for word in ("-f", one)))[1]).split()

    assert ids("id=a") == ["a1", "a2"]
    assert ids("name=name-a1", "name=b1") == ["a1", "b1"]
    assert ids("id=a", "device=1") == ["a2"]
    assert ids("status=running") == ["a1", "a2", "b1"] and ids("status=dead") == []


@pytest.mark.parametrize(
    ("text", "meant"),
    [("serv", "serve"), ("sreve", "serve"), (LONG[:11] + "x", LONG[:12]), ("serve-2x", "serve"), ("zebra", "")],
)
def test_unknown_container_gets_the_most_similar_one(
    cli: Callable[..., Any], start: Any, state: Path, tmp_path: Path, text: str, meant: str
) -> None:
    start(LONG, pure.share(0, 0, GIB))
    docker(state, tmp_path, LONG, "serve")
    for command in ("inspect", "pause"):
        code, _, error = cli(command, text)
        assert code == 64 and f'no container "{text}"' in error
        assert ("did you mean" in error) == bool(meant) and (not meant or f'did you mean "{meant}"; `gpu' in error)


def test_refusal_names_holders_as_list_does(no_engines: Path) -> None:
    """Those of a CRI by their id alone: users of another namespace see a refusal."""
    file = no_engines / "docker/containers" / LONG / "config.v2.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"Name": "/serve"}))
    held = [pure.lease(pure.share(0, 0, 4 * GIB), container_id=one) for one in (LONG, OTHER, "sleep-1")]
    with pytest.raises(CapacityError) as refused:
        placement.grant(
            request.resolve(pure.bundle("GPUSHARE_MEMORY=8Gi"), pure.node(devices=1)),
            pure.node(devices=1),
            pure.ledger(*held),
        )
    holders = f"held by {LONG[:12]} (serve, 4 GiB), {OTHER[:12]} (4 GiB), sleep-1 (4 GiB); "
    assert f"device 0: 8 GiB requested, 4 GiB free of 16 GiB, {holders}" in str(refused.value)


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_refusal_hides_names_of_pods_in_files_of_engines(engine: str, no_engines: Path) -> None:
    """cri-dockerd and CRI-O write pods' containers there, too."""
    name = "k8s_box_train-0_ml_0123_0"
    file, value = {
        "docker": (no_engines / "docker/containers" / LONG / "config.v2.json", {"Name": f"/{name}"}),
        "podman": (no_engines / "storage/overlay-containers/containers.json", [{"id": LONG, "names": [name]}]),
    }[engine]
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(value))
    node, held = pure.node(devices=1), pure.lease(pure.share(0, 0, 16 * GIB), container_id=LONG)
    with pytest.raises(CapacityError) as refused:
        placement.grant(request.resolve(pure.bundle("GPUSHARE_MEMORY=8Gi"), node), node, pure.ledger(held))
    assert f"held by {LONG[:12]} (16 GiB)" in str(refused.value) and "train-0" not in str(refused.value)


def test_names_are_looked_up_only_when_a_refusal_is_read(no_engines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease lock is held before that, and a start that finds another device needs none. One lookup for all."""
    file = no_engines / "docker/containers" / LONG / "config.v2.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"Name": "/serve"}))
    made: list[Names] = []
    monkeypatch.setattr(names, "Names", lambda: made.append(Names()) or made[-1])
    node = pure.node(devices=2)
    held = [pure.lease(pure.share(0, at, None), container_id=one) for at, one in ((0, LONG), (1, OTHER))]
    asked = request.resolve(pure.bundle("GPUSHARE_DEVICES=any", "GPUSHARE_MEMORY=8Gi"), node)
    assert placement.grant(asked, node, pure.ledger(held[0])) and not made
    with pytest.raises(CapacityError) as refused:
        placement.grant(asked, node, pure.ledger(*held))
    assert not made
    assert f"GPU 0: held whole by {LONG[:12]} (serve); GPU 1: held whole by {OTHER[:12]};" in str(refused.value)
    assert refused.value.message and len(made) == 1
