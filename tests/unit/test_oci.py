"""State and config.json are untrusted text: every fault is one RequestError, never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpushare.core import constants
from gpushare.core.errors import RequestError
from gpushare.request import oci, speckeys

from tests.unit.pure import bundle

STATE = {"ociVersion": "1.0.2", "id": "c1", "status": "created", "pid": 42, "bundle": "/b", "annotations": {"a": "b"}}


def state(**changes: Any) -> bytes:
    return json.dumps({**STATE, **changes}).encode()


def test_state_is_parsed() -> None:
    assert oci.read_state(state()) == oci.State("c1", 42, "created", "/b", {"a": "b"})
    assert oci.read_state(state(pid=None, annotations=None, status=3)).pid == 0


@pytest.mark.parametrize("text", ["a", "a.b_c+d-e", "0" * 64, "..."])
def test_valid_id_is_accepted(text: str) -> None:
    assert oci.read_state(state(id=text)).id == text


@pytest.mark.parametrize(
    "text", ["", None, 3, ".", "..", "../x", "a/b", "a\nb", "a\0b", "a b", "ü", "\ud800", "x" * 201]
)
def test_bad_id_is_refused(text: Any) -> None:
    with pytest.raises(RequestError, match="id") as caught:
        oci.read_state(state(id=text))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[]", "must be a JSON object, not list"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"id": ' + b"9" * 5000 + b"}", "not valid JSON|no container id"),
        (b" " * ((4 << 20) + 1), "larger than"),
        (state(bundle="relative"), "not an absolute path"),
        (state(bundle=""), "bundle is missing"),
        (state(bundle="/a\0b"), "NUL"),
        (state(bundle="/\ud800"), "not valid text"),
        (state(pid="7"), "not a process id"),
        (state(pid=True), "not a process id"),
        (state(pid=-1), "not a process id"),
        (state(annotations=[1]), "must be an object"),
        (state(annotations={"a": 1}), "must be text"),
    ],
)
def test_bad_state_is_refused(data: bytes, what: str) -> None:
    with pytest.raises(RequestError, match=what):
        oci.read_state(data)


def test_bundle_path_of_old_state_is_read() -> None:
    assert oci.read_state(json.dumps({"id": "x", "bundlePath": "/old"}).encode()).bundle == "/old"


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        ("rootfs", "/bundle/rootfs"),
        ("/var/lib/x", "/var/lib/x"),
        ("./a/../b", "/bundle/b"),
        ("//x", "/x"),
        ("..", "/"),
        ("", ""),
        (None, ""),
    ],
)
def test_root_path_is_resolved(root: Any, expected: str) -> None:
    assert bundle(root={"path": root}).rootfs == expected


def test_environment_keeps_order_and_duplicates() -> None:
    found = bundle("A=1", "B=x=y", "A=2", "NOVALUE", "C=")
    assert found.env == (("A", "1"), ("B", "x=y"), ("A", "2"), ("C", ""))


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        ({"root": []}, "root must be an object"),
        ({"root": {"path": 3}}, "root.path is missing or not text"),
        ({"root": {"path": "a\0b"}}, "NUL"),
        ({"process": 3}, "process must be an object"),
        ({"process": {"env": "A=1"}}, "process.env must be a list"),
        ({"process": {"env": [1]}}, "not text"),
        ({"process": {"env": ["A=b\0c"]}}, "NUL"),
        ({"annotations": []}, "annotations must be an object"),
        ({"annotations": {"a": None}}, "must be text"),
        ({"linux": {"cgroupsPath": 1}}, "cgroupsPath must be text"),
        ({"linux": "x"}, "linux must be an object"),
        ({"process": {"capabilities": []}}, "process.capabilities must be an object"),
    ],
)
def test_wrong_type_is_refused(spec: dict[str, Any], what: str) -> None:
    with pytest.raises(RequestError, match=what):
        oci.bundle_of(oci.State("c", 0, "", "/b", {}), spec)


def _places(known: dict[str, Any], place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, below in known.items():
        yield (*place, key)
        yield from _places(below, (*place, key))


def _at(place: tuple[str, ...], last: str, in_lists: bool) -> dict[str, Any]:
    value: Any = {last: {}}
    for key in reversed(place[:-1]):
        value = {key: [value] if in_lists else value}
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("place", list(_places(speckeys.KEYS)), ids=".".join)
def test_key_in_other_case_is_refused(place: tuple[str, ...]) -> None:
    """runc would read the key."""
    spelled = {place[-1].upper(), place[-1].swapcase(), place[-1].capitalize(), place[-1].replace("s", "\u017f")}
    for in_lists in (False, True):
        speckeys.refuse_other_case(_at(place, place[-1], in_lists), speckeys.KEYS)
        for key in spelled - {place[-1]}:
            with pytest.raises(RequestError, match="in the wrong case"):
                speckeys.refuse_other_case(_at(place, key, in_lists), speckeys.KEYS)


def test_annotation_names_may_have_any_case() -> None:
    assert bundle(annotations={"Env": "x", "PROCESS": "y", "Type": "z"}).annotations["PROCESS"] == "y"


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', '{"linux": {"x": [{"b": {}, "c": 1, "b": {}}]}}'])
def test_duplicate_key_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RequestError, match='"[ab]" is twice in one object'):
        oci.load_bundle(str(tmp_path))


@pytest.mark.parametrize("key", ["io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType"])
def test_sandbox_is_recognized(key: str) -> None:
    assert bundle(annotations={key: "sandbox"}).container_type == "sandbox"
    assert bundle().container_type == ""


@pytest.mark.parametrize("real, forged", [(0, 1), (1, 0)])
@pytest.mark.parametrize("keys", constants.CRI_ANNOTATION_PAIRS, ids=lambda keys: keys[0].rpartition("/")[2])
def test_contradicting_cri_annotations_are_refused(keys: tuple[str, str], real: int, forged: int) -> None:
    """Otherwise a pod's owner could hide which container a limit applies to, keep all devices that a plugin gave a
    container, or pass a container off as one of an entry or of another pod."""
    contradicting = {keys[real]: "container", keys[forged]: "sandbox"}
    with pytest.raises(RequestError, match=f'{keys[0]}="[a-z]*" and {keys[1]}="[a-z]*" contradict'):
        bundle(annotations=contradicting)
    assert bundle(annotations=contradicting, cri=False).annotations == {}
    assert bundle(annotations=dict.fromkeys(keys, "container")).annotations == dict.fromkeys(keys, "container")


def test_container_name_is_read() -> None:
    assert bundle(annotations={"io.kubernetes.cri.container-name": "train"}).container_name == "train"


@pytest.mark.parametrize("name", ["bounding", "inheritable", "permitted", "effective", "ambient"])
def test_capability_in_any_set_and_case_is_privileged(name: str) -> None:
    for word in ("CAP_SYS_ADMIN", "cap_sys_admin"):
        assert bundle(process={"capabilities": {name: ["CAP_CHOWN", word]}}).privileged
    assert not bundle(process={"capabilities": {name: ["CAP_CHOWN"]}}).privileged and not bundle().privileged


@pytest.mark.parametrize(
    "linux, privileged",
    [
        ({"namespaces": [{"type": "mount"}]}, True),
        (
            {"namespaces": [{"type": "user"}], "uidMappings": [{"containerID": 0, "hostID": 100000, "size": 65536}]},
            False,
        ),
        ({"namespaces": [{"type": "user"}], "uidMappings": [{"containerID": 0, "hostID": 0, "size": 65536}]}, True),
        ({"namespaces": [{"type": "user"}], "uidMappings": [{"containerID": 7, "hostID": 0, "size": 1}]}, True),
        ({"namespaces": [{"type": "user"}], "uidMappings": [{"containerID": 0, "hostID": None, "size": 1}]}, True),
        ({"namespaces": [{"type": "user"}]}, True),  # no mapping is given
        ({"namespaces": [{"type": "user", "path": "/proc/self/ns/user"}]}, True),
        ({"namespaces": [{"type": "user", "path": "/run/netns/user"}]}, True),
        ({"namespaces": [{"type": "user", "path": 7}]}, True),
    ],
)
def test_user_namespace_without_host_root_is_unprivileged(linux: dict[str, Any], privileged: bool) -> None:
    process = {"capabilities": {"bounding": ["CAP_SYS_ADMIN"]}}
    assert bundle(process=process, linux=linux).privileged is privileged


def test_joined_user_namespace_is_judged_by_its_map() -> None:
    process = {"capabilities": {"bounding": ["CAP_SYS_ADMIN"]}}
    with subprocess.Popen(["unshare", "--user", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as apart:
        assert apart.stdin is not None and apart.stdout is not None
        apart.stdin.write(b"x\n")
        apart.stdin.flush()
        assert apart.stdout.readline() == b"x\n"
        spec = {"namespaces": [{"type": "user", "path": f"/proc/{apart.pid}/ns/user"}]}
        assert bundle(process=process, linux=spec).privileged  # no map yet
        Path(f"/proc/{apart.pid}/uid_map").write_text("0 100000 1000\n")
        assert not bundle(process=process, linux=spec).privileged
        apart.stdin.close()


def write(directory: Path, data: bytes) -> str:
    (directory / "config.json").write_bytes(data)
    return str(directory)


def test_bundle_is_loaded(tmp_path: Path) -> None:
    directory = write(tmp_path, json.dumps({"root": {"path": "r"}, "linux": {"cgroupsPath": "/x"}}).encode())
    by_path = oci.load_bundle(directory)
    assert (by_path.path, by_path.rootfs, by_path.pid, by_path.cgroups_path) == (directory, f"{directory}/r", 0, "/x")
    by_state = oci.load_bundle(oci.State("id7", 9, "created", directory, {}))
    assert (by_state.id, by_state.pid, by_state.env) == ("id7", 9, ())


def test_relative_bundle_path_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b").mkdir()
    write(tmp_path / "b", b"{}")
    monkeypatch.chdir(tmp_path)
    assert oci.load_bundle("b").path == str(tmp_path / "b")
    assert oci.load_bundle("b").id == "b"


def test_missing_or_special_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot read config.json .*No such file"):
        oci.load_bundle(str(tmp_path))
    os.mkfifo(tmp_path / "config.json")  # must not block either
    with pytest.raises(RequestError, match="not a regular file"):
        oci.load_bundle(str(tmp_path))
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(RequestError, match="not a regular file"):
        oci.load_bundle(str(tmp_path))


def test_huge_config_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path, b"{}")
    with open(tmp_path / "config.json", "r+b") as file:
        file.truncate(oci.MAX_CONFIG_BYTES + 1)
    with pytest.raises(RequestError, match="larger than"):
        oci.load_bundle(directory)


class Recorded(dict[str, Any]):
    """A config.json that notes which keys are read."""

    def __init__(self, values: dict[str, Any], place: str, read: set[str]) -> None:
        super().__init__({key: recorded(value, f"{place}{key}.", read) for key, value in values.items()})
        self._place, self._read = place, read

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(f"{self._place}{key}")
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self._read.add(f"{self._place}{key}")
        return super().__getitem__(key)


def recorded(value: Any, place: str, read: set[str]) -> Any:
    if isinstance(value, list):
        return [recorded(one, place, read) for one in value]
    return Recorded(value, place, read) if isinstance(value, dict) and place != "annotations." else value


def paths(known: dict[str, Any], place: str = "") -> set[str]:
    below = (paths(value, f"{place}{key}.") for key, value in known.items())
    return {f"{place}{key}" for key in known}.union(*below)


def test_every_key_that_is_read_is_known_in_one_case(tmp_path: Path) -> None:
    """The runtime would apply a key in another case, which gpushare does not see: speckeys.KEYS."""
    read: set[str] = set()
    linux = {
        "namespaces": [{"type": "user"}, {"type": "mount"}],
        "uidMappings": [{"containerID": 0, "hostID": 9, "size": 1}],
    }
    process = {"env": ["A=b"], "user": {"uid": 0}, "capabilities": {"effective": ["CAP_SYS_ADMIN"]}}
    mounts = [{"destination": "/dev/shm", "source": "shm", "type": "tmpfs", "options": []}]
    spec = {"root": {"path": str(tmp_path)}, "process": process, "linux": linux, "mounts": mounts, "annotations": {}}
    oci.bundle_of(oci.State("c1", 0, "", str(tmp_path), {}), Recorded(spec, "", read))
    assert {"root.path", "process.env", "linux.namespaces.type", "linux.uidMappings.hostID"} <= read
    assert read <= paths(speckeys.KEYS)
