"""gpushare cdi generate: the devices are valid, and each requests exactly its GPU."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import jsonschema
import pytest
import yaml
from gpushare.cli import cdi as cli_cdi
from gpushare.cli import facts, main
from gpushare.core.errors import ConfigError, PolicyError, RequestError
from gpushare.core.model import Node, Policy, Request
from gpushare.engines.base import Settings
from gpushare.engines.host import Host
from gpushare.integrations import cdi, uninstall
from gpushare.request import request

from tests.support.host import TREE
from tests.unit import pure

SETTINGS = Settings("/usr/bin/gpushare-runtime", "/usr/bin/gpushare-hook", state_dir="/run/other")
SCHEMA = jsonschema.Draft202012Validator(json.loads((TREE / "tests/schemas/cdi.json").read_text()))
FIRST, SECOND = pure.UUIDS
PART = "MIG-cccccccc-0000-0000-0000-000000000003"


def edits(value: dict[str, Any], *names: str) -> tuple[list[str], list[dict[str, Any]]]:
    """(environment, hooks) after an engine adds these devices: a variable of the same name is replaced."""
    by_name = {one["name"]: one["containerEdits"] for one in value["devices"]}
    env = dict(line.split("=", 1) for name in names for line in by_name[name]["env"])
    return [f"{key}={text}" for key, text in env.items()], [hook for name in names for hook in by_name[name]["hooks"]]


def asked(node: Node, *names: str, env: tuple[str, ...] = (), annotations: Any = None) -> Optional[Request]:
    given, _ = edits(cdi.document(node, SETTINGS), *names)
    return request.resolve(pure.bundle(*env, *given, annotations=annotations), node)


@pytest.mark.parametrize(
    ("uuids", "policy", "names", "version"),
    [
        (pure.UUIDS, {}, ["any", *pure.UUIDS], "0.3.0"),
        (pure.UUIDS, {"allowed_devices": ("1",)}, ["any", SECOND], "0.3.0"),
        (("0-1", SECOND), {}, ["any", "0-1", SECOND], "0.5.0"),
        (("MIG-GPU-aa/1/0", SECOND), {}, ["any", SECOND], "0.3.0"),  # the name of a MIG device before driver 470
    ],
)
def test_document_lists_devices_by_name(uuids: tuple[str, ...], policy: Any, names: list[str], version: str) -> None:
    node = pure.node(**policy)
    found = tuple(pure.device(index, uuid=uuid) for index, uuid in enumerate(uuids))
    value = cdi.document(node._replace(inventory=node.inventory._replace(devices=found)), SETTINGS)
    SCHEMA.validate(value)
    assert (value["kind"], value["cdiVersion"]) == ("gpushare.io/share", version)
    assert [one["name"] for one in value["devices"]] == names
    for name in names:
        _, hooks = edits(value, name)
        assert [(hook["hookName"], hook["path"]) for hook in hooks] == [
            ("prestart", SETTINGS.hook),
            ("poststop", SETTINGS.hook),
        ]
        assert all(hook["args"] == ["gpushare-hook", "--state", "/run/other", hook["hookName"]] for hook in hooks)


def test_document_with_names_of_nvidia(with_nodes: Node) -> None:
    """Each name requests the same devices as in a file of nvidia-ctk."""
    value = cdi.document(with_nodes, SETTINGS, nvidia=True)
    SCHEMA.validate(value)
    assert (value["kind"], value["cdiVersion"]) == ("nvidia.com/gpu", "0.5.0")  # names that begin with a digit
    assert [one["name"] for one in value["devices"]] == ["all", "0", "1:0", FIRST, PART]

    def requested(*names: str) -> tuple[str, ...]:
        given, _ = edits(value, *names)
        found = request.resolve(pure.bundle("GPUSHARE_MEMORY=4Gi", *given), with_nodes)
        assert found is not None and found.memory[0][1].limit_bytes == 4 << 30
        return found.selection.names

    assert requested("all") == requested("0", "1:0") == requested("all", PART) == (FIRST, PART)
    assert requested("0") == requested(FIRST) == (FIRST,)
    assert requested("1:0") == requested(PART) == (PART,)
    paths = {one["name"]: [node["path"] for node in one["containerEdits"]["deviceNodes"]] for one in value["devices"]}
    assert paths["0"] == paths[FIRST] and paths["1:0"] == paths[PART]
    assert sorted(paths["all"]) == sorted({*paths["0"], *paths["1:0"]})
    allowed = with_nodes._replace(config=with_nodes.config._replace(policy=Policy(allowed_devices=("0",))))
    assert [one["name"] for one in cdi.document(allowed, SETTINGS, nvidia=True)["devices"]] == ["all", "0", FIRST]
    none = cdi.document(pure.node(devices=0), SETTINGS, nvidia=True)
    assert edits(none, "all")[0] == ["GPUSHARE_CDI_any=any"]  # refused at the start, with the reason


@pytest.mark.parametrize(
    ("name", "text", "refused"),
    [
        ("etc/cdi/nvidia.yaml", "---\ncdiVersion: 0.5.0\nkind: nvidia.com/gpu\n", True),
        ("var/run/cdi/nvidia.yaml", 'cdiVersion: "0.5.0"\nkind: "nvidia.com/gpu"\n', True),
        ("etc/cdi/nvidia.json", '{"cdiVersion": "0.5.0",\n "kind": "nvidia.com/gpu", "devices": []}', True),
        ("etc/cdi/nvidia.json", '{"kind": "nvidia.com/gpu"}', True),
        ("etc/cdi/vendor.yaml", "kind: nvidia.com/gpu-foo\n", False),
        ("etc/cdi/gpushare-nvidia.yaml", "kind: nvidia.com/gpu\n", False),  # the file that is written
        ("etc/cdi/gpushare.yaml", "kind: gpushare.io/share\n", False),
        ("etc/cdi/vendor.yaml", "# not nvidia.com/gpu\nkind: vendor.com/nic\n", False),
        ("etc/cdi/nvidia.json", '{\n  "cdiVersion": "0.5.0",\n\t"kind": "nvidia.com/gpu"}', True),
        pytest.param("etc/cdi/vendor.yaml", "\n" * (1 << 20), False, id="blank lines"),
    ],
)
def test_names_of_nvidia_are_left_to_their_owner(tmp_path: Path, name: str, text: str, refused: bool) -> None:
    """Two files with the same device make it unusable."""
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text)
    host = Host(str(tmp_path))
    ours = str(tmp_path / "etc/cdi/gpushare-nvidia.yaml")
    if refused:
        with pytest.raises(ConfigError, match=f'^"/{name}" has devices of nvidia.com/gpu already; '):
            cdi.refuse_other_nvidia(host, ours)
    else:
        cdi.refuse_other_nvidia(host, ours)


@pytest.mark.parametrize("special", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)], ids=range(3))
def test_special_file_beside_it_is_not_read(tmp_path: Path, special: Callable[[Path], object]) -> None:
    (tmp_path / "etc/cdi").mkdir(parents=True)
    special(tmp_path / "etc/cdi/vendor.yaml")
    cdi.refuse_other_nvidia(Host(str(tmp_path)), None)


def test_document_without_gpu_is_valid() -> None:
    """The file of a node without a GPU is valid; `any` is refused at the start with the reason."""
    value = cdi.document(pure.node(devices=0), SETTINGS)
    SCHEMA.validate(value)
    assert [one["name"] for one in value["devices"]] == ["any"]


@pytest.fixture
def with_nodes(tmp_path: Path) -> Node:
    """A driver root with device nodes of two GPUs, the second of which has a MIG device."""
    numbers = {"nvidia0": (195, 0), "nvidia1": (195, 1), "nvidiactl": (195, 255), "nvidia-uvm": (510, 0)}
    (tmp_path / "dev/nvidia-caps").mkdir(parents=True)
    minors = {f"gpu1/mig/gi3{path}": minor for path, minor in (("/access", 21), ("/ci0/access", 22))}
    for path, minor in minors.items():
        numbers[f"nvidia-caps/nvidia-cap{minor}"] = (240, minor)
        file = tmp_path / "proc/driver/nvidia/capabilities" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"DeviceFileMinor: {minor}\n")
    for name, (major, minor) in numbers.items():
        os.mknod(tmp_path / "dev" / name, 0o666 | stat.S_IFCHR, os.makedev(major, minor))
    node = pure.node()
    part = pure.device(1, uuid=PART, parent=SECOND, mig_index=0, gpu_instance=3, compute_instance=0)
    return node._replace(inventory=node.inventory._replace(root=str(tmp_path), mig=(part,)))


def test_named_devices_have_nodes_and_any_has_none(with_nodes: Node) -> None:
    """A name without its nodes would lose them at systemctl daemon-reload; `any` is not known before the start."""
    value = cdi.document(with_nodes, SETTINGS)
    SCHEMA.validate(value)
    assert value["cdiVersion"] == "0.5.0"  # of hostPath
    root = with_nodes.inventory.root
    described = {one["name"]: one["containerEdits"].get("deviceNodes", []) for one in value["devices"]}
    control = ["/dev/nvidiactl", "/dev/nvidia-uvm"]
    caps = ["/dev/nvidia-caps/nvidia-cap21", "/dev/nvidia-caps/nvidia-cap22"]
    paths = {"any": [], FIRST: ["/dev/nvidia0", *control], PART: ["/dev/nvidia1", *caps, *control]}
    assert described == {
        name: [{"path": path, "hostPath": f"{root}{path}", "permissions": "rw"} for path in found]
        for name, found in paths.items()
    }
    simulated = with_nodes._replace(inventory=with_nodes.inventory._replace(simulated=True))
    assert "deviceNodes" not in json.dumps(cdi.document(simulated, SETTINGS))
    (Path(root) / "dev/nvidia0").unlink()
    first = cdi.document(with_nodes, SETTINGS)["devices"][1]
    assert (first["name"], "deviceNodes" in first["containerEdits"]) == (FIRST, False)


def injected(*numbers: tuple[str, int, int]) -> dict[str, Any]:
    """`linux` of a config.json after an engine added these nodes."""
    devices = [{"path": path, "type": "c", "major": major, "minor": minor} for path, major, minor in numbers]
    rules = [
        {"allow": True, "type": "c", "major": major, "minor": minor, "access": "rw"} for _, major, minor in numbers
    ]
    return {"devices": devices, "resources": {"devices": [{"allow": False, "access": "rwm"}, *rules]}}


ONE, TWO = ("/dev/nvidia0", 195, 0), ("/dev/nvidia1", 195, 1)
CONTROL = (("/dev/nvidiactl", 195, 255), ("/dev/nvidia-uvm", 510, 0))


def test_hook_accepts_the_nodes_of_its_cdi_device(with_nodes: Node) -> None:
    def check(linux: dict[str, Any], env: str) -> None:
        container = pure.bundle(env, linux=linux)
        found = request.resolve(container, with_nodes)
        assert found is not None
        request.refuse_conflicts(container, found, with_nodes.inventory)

    own = f"{cdi.variable(FIRST)}={FIRST}"
    check(injected(ONE, *CONTROL), own)
    check(injected(TWO, *CONTROL, ("/dev/nvidia-caps/nvidia-cap21", 240, 21)), f"{cdi.variable(PART)}={PART}")
    for env, nodes in (
        (own, (ONE, TWO)),
        (own, (("/dev/gpu", 195, 0),)),
        (own, (("/dev/nvidia0", 195, 1),)),
        (f"{cdi.variable('any')}=any", (ONE, *CONTROL)),
        (f"GPUSHARE_DEVICES={FIRST}", (ONE, *CONTROL)),
    ):
        with pytest.raises(RequestError, match="already has an NVIDIA device"):
            check(injected(*nodes), env)
    foreign_rule = injected(ONE, *CONTROL)
    foreign_rule["resources"]["devices"] += injected(TWO)["resources"]["devices"]
    with pytest.raises(RequestError, match="allows devices that were not granted"):
        check(foreign_rule, own)


@pytest.mark.parametrize(
    ("names", "selection"),
    [
        (("any",), ("any", 1, ())),
        ((SECOND,), ("list", 0, (SECOND,))),
        ((SECOND, FIRST), ("list", 0, (SECOND, FIRST))),  # in the order of the request
    ],
)
def test_cdi_devices_become_selection(names: tuple[str, ...], selection: Any) -> None:
    found = asked(pure.node(), *names, env=("GPUSHARE_MEMORY=4Gi", "NVIDIA_VISIBLE_DEVICES=all"))
    assert found is not None
    assert (found.selection.kind, found.selection.count, found.selection.names) == selection
    assert [amount.limit_bytes for _, amount in found.memory] == [4 << 30]
    assert found.sources[0][0] == cdi.variable(names[0])


def test_same_request_beside_cdi_device_is_accepted() -> None:
    for env, extra in ((("GPUSHARE_DEVICES=any",), None), ((), {"gpushare.io/devices": "any"})):
        assert asked(pure.node(), "any", env=env, annotations=extra) == asked(pure.node(), "any")


@pytest.mark.parametrize(
    ("names", "env", "annotations", "match"),
    [
        (("any", FIRST), (), None, "any"),
        ((FIRST, "any"), (), None, "any cannot be combined"),
        ((FIRST,), ("GPUSHARE_DEVICES=1",), None, "which CDI has set"),
        ((FIRST,), ("GPUSHARE_DEVICES=none",), None, "which CDI has set"),
        ((FIRST,), (), {"gpushare.io/devices": SECOND}, "GPUSHARE_CDI_GPU_aaaaaaaa.* contradict"),
    ],
)
def test_contradicting_request_is_refused(
    names: tuple[str, ...], env: tuple[str, ...], annotations: Any, match: str
) -> None:
    with pytest.raises(RequestError, match=match):
        asked(pure.node(), *names, env=env, annotations=annotations)


@pytest.mark.parametrize("value", ["1", "all", f"{SECOND},1", "any:2", "", "none"])
def test_cdi_variable_of_image_adds_no_device(value: str) -> None:
    """An image can set such a variable beside the user's CDI device, but does not know a UUID of this host."""
    with pytest.raises(RequestError, match="GPUSHARE_CDI_X=.*not set by a CDI device"):
        asked(pure.node(), FIRST, env=(f"GPUSHARE_CDI_X={value}",))


def test_cdi_request_obeys_policy() -> None:
    """The variable is a request like any other, because an image can set it."""
    for words, key in (({"accept_env": "never"}, "env"), ({"accept_env": "privileged"}, "env")):
        with pytest.raises(PolicyError, match=rf"GPUSHARE_CDI_GPU_aaaaaaaa.*policy\.accept\.{key} "):
            asked(pure.node(**words), FIRST)
    assert asked(pure.node(accept_annotations="never", annotations="scoped"), FIRST) is not None


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "host", lambda paths: pure.node())
    monkeypatch.setattr(cli_cdi, "check_program", lambda path: "/usr/bin/gpushare-hook")
    monkeypatch.setattr(cli_cdi, "foreign_owners", lambda paths: [])


@pytest.mark.parametrize(
    ("ending", "words", "is_json"),
    [
        ("yaml", (), False),
        ("json", (), True),
        ("yaml", ("--format", "json"), True),
        ("json", ("--format", "json"), True),
    ],
)
def test_generate_writes_file_in_requested_format(
    host: None, ending: str, words: tuple[str, ...], is_json: bool, tmp_path: Path, capfd: Any
) -> None:
    path = tmp_path / "cdi" / f"gpushare.{ending}"
    line = ["cdi", "generate", "--output", str(path), *words]
    assert main(line) == 0 and main(line) == 0
    assert capfd.readouterr() == (f"create {path}\nnothing to do\n", "")
    text = path.read_text()
    assert text.startswith("{") == is_json and "&id" not in text
    value = yaml.safe_load(text)
    SCHEMA.validate(value)
    assert value == json.loads(json.dumps(cdi.document(pure.node(), SETTINGS._replace(state_dir="/run/gpushare"))))
    assert path.stat().st_mode & 0o777 == 0o644


def test_devices_for_builds_have_buildkit_s_annotation(host: None, capfd: Any) -> None:
    assert main(["cdi", "generate", "--format", "json", "--for-builds"]) == 0
    value = json.loads(capfd.readouterr().out)
    SCHEMA.validate(value)
    assert value["cdiVersion"] == "0.6.0"  # of annotations
    expected = {"org.mobyproject.buildkit.device.autoallow": "true"}
    assert [one["annotations"] for one in value["devices"]] == [expected] * len(value["devices"])
    assert "autoallow" not in json.dumps(cdi.document(pure.node(), SETTINGS))


def test_missing_program_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """Engines would run the program as root, so it must exist before the file is written."""
    monkeypatch.setattr(facts, "host", lambda paths: pure.node())
    hook = tmp_path / "gpushare-hook"
    line = ["cdi", "generate", "--program", str(hook)]
    assert main(line) == 78 and f'"{hook}" is not a program' in capfd.readouterr().err
    monkeypatch.setattr(cli_cdi, "check_program", lambda path: path)
    monkeypatch.setattr(cli_cdi, "foreign_owners", lambda paths: [f"{paths[0]} is not root's"])
    assert main(line) == 0
    text, error = capfd.readouterr()
    assert f"path: {hook}\n" in text and error == f"gpushare: {hook} is not root's\n"


def test_device_without_name_is_reported(host: None, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    node = pure.node(devices=1)
    odd = node._replace(inventory=node.inventory._replace(devices=(pure.device(0, uuid="MIG-GPU-aa/1/0"),)))
    monkeypatch.setattr(facts, "host", lambda paths: odd)
    assert main(["cdi", "generate"]) == 0
    assert '"MIG-GPU-aa/1/0" is left out' in capfd.readouterr().err


def test_uninstall_removes_file(tmp_path: Path) -> None:
    (tmp_path / "etc/cdi").mkdir(parents=True)
    (tmp_path / "etc/cdi/gpushare.yaml").touch()
    (tmp_path / "etc/cdi/nvidia.yaml").touch()
    settings = SETTINGS._replace(state_dir=str(tmp_path / "run"))
    assert uninstall.plan(settings, Host(str(tmp_path)), purge=False, force=True).files == ("/etc/cdi/gpushare.yaml",)
