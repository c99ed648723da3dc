"""gpushare k8s-plugin: its errors at the start, and how many devices fit in one message to kubelet."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from gpushare.cli import facts, k8s_plugin, main
from gpushare.core.errors import ConfigError
from gpushare.gpu import inventory
from gpushare.integrations import devicestate
from gpushare.integrations.kubelet import offers, plugin, protocol, service
from gpushare.integrations.kubelet.offers import MEMORY

from tests.support.engines.cri import methods
from tests.support.host import TREE
from tests.support.kubelet import PROTO, VERSION
from tests.unit import pure


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """kubelet's folder; the path of a socket must be short."""
    node = pure.node()
    monkeypatch.setattr(facts, "host", lambda paths: node)
    path = tempfile.mkdtemp(prefix="gpushare-", dir="/tmp")
    yield Path(path)
    shutil.rmtree(path, ignore_errors=True)


def stale_socket(folder: Path) -> None:
    """A socket that a dead kubelet left."""
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "kubelet.sock"))


def test_host_without_device_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(facts, "host", lambda paths: pure.node(devices=0))
    assert main(["--state", str(tmp_path), "k8s-plugin", "--kubelet", str(folder)]) == 1
    assert capfd.readouterr().err == "gpushare: this host has no device; load the driver\n"


@pytest.mark.parametrize(
    ("make", "words", "code", "line"),
    [
        (shutil.rmtree, (), 1, r"\"/tmp/gpushare-\w+\": No such file or directory; start kubelet"),
        (None, (), 1, r"\"/tmp/gpushare-\w+/kubelet.sock\": kubelet has no socket there; start kubelet"),
        (lambda folder: (folder / "kubelet.sock").touch(), (), 1, 'kubelet.sock": kubelet has no socket there'),
        (stale_socket, (), 1, 'kubelet.sock": kubelet does not answer; '),
        (None, ("--memory-unit", "x"), 64, '--memory-unit="x": not an amount of memory'),
        (None, ("--resource", "x=a.b/c"), 64, '--resource "x=a.b/c": not KIND=DOMAIN/NAME; write memory, compute, gpu'),
        (None, ("--resource", "memory=gpumem"), 64, '--resource "memory=gpumem": not KIND=DOMAIN/NAME'),
        (None, ("--resource", "gpu=a/b", "--resource", "memory=a/b"), 64, '--resource "memory=a/b": given twice'),
        (None, ("--ignore-xid", "31;43"), 64, '--ignore-xid="31;43": not numbers; write numbers such as 13,31'),
    ],
)
def test_start_failure_is_one_line(
    folder: Path,
    make: Any,
    words: Any,
    code: int,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Any,
) -> None:
    if make is not None:
        make(folder)
    monkeypatch.setattr(plugin, "_LISTENS_S", 0.2)
    assert main(["--state", str(tmp_path), "k8s-plugin", "--kubelet", str(folder), *words]) == code
    said, error = capfd.readouterr()
    assert re.search(line, error) and error.count("\n") == 1 and "registered" not in said, error
    assert not folder.exists() or [path.name for path in folder.iterdir() if path.name != "kubelet.sock"] == []


def test_missing_grpc_is_one_line() -> None:
    """grpc is an optional extra: without it, the command names the package to install and everything else works."""
    text = "import sys; sys.modules['grpc'] = sys.modules['google.protobuf'] = None; from gpushare.cli import main; "
    command = [sys.executable, "-c", text + "sys.exit(main(sys.argv[1:]))"]
    done = subprocess.run([*command, "k8s-plugin"], cwd=TREE / "hook", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(
        r"gpushare: .*needs grpcio and protobuf.*; pip install 'gpushare\[kubernetes\]', or .*\n", done.stderr
    )
    done = subprocess.run([*command, "k8s-plugin", "--help"], cwd=TREE / "hook", capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("gib", "devices", "unit_mib", "fits"),
    [
        (140, 1, 1, True),  # an H200 in units of 1 MiB
        (80, 2, 1, False),
        (80, 2, 2, True),
    ],
)
def test_offer_must_fit_in_message(gib: int, devices: int, unit_mib: int, fits: bool) -> None:
    node = pure.node(devices=devices, memory_bytes=gib << 30)
    found = offers.offered(node, unit_mib)[MEMORY]
    resource = service.Service(MEMORY, offers.resources(unit_mib, {})[MEMORY], print)
    if fits:
        resource.show(found, frozenset(pure.UUIDS), "binpack")
        assert resource.size == devices * (gib << 10) // unit_mib
    else:
        with pytest.raises(ConfigError, match=r"163840 units of gpushare.io/memory-mib has \d{7} bytes.*--memory-unit"):
            resource.show(found, frozenset(pure.UUIDS), "binpack")


def test_malformed_messages_are_refused_and_the_next_is_answered() -> None:
    node, chance = pure.node(devices=1, memory_bytes=1 << 30), random.Random(7)
    asked = protocol.message("AllocateRequest")(container_requests=[{"devices_ids": ["aaaaaaaa-0", "aaaaaaaa-1"]}])
    good = asked.SerializeToString()
    garbage = [
        b"\xff",
        good[:-1],
        b"\x0a\xff\xff\xff\xff\x0f",
        b"\x0a\x03\x0a\x01\xff",
        *(chance.randbytes(9) for _ in range(20)),
    ]
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        service.Service(MEMORY, "a.io/memory", lambda _: None) as one,
    ):
        one.show(offers.offered(node, 1)[MEMORY], frozenset(pure.UUIDS), "binpack")
        one.serve(f"{folder}/s")
        with grpc.insecure_channel(f"unix:{folder}/s") as channel:
            for method in ("Allocate", "GetPreferredAllocation", "PreStartContainer"):
                call = channel.unary_unary(f"/{protocol.SERVICE}/{method}")
                for text in garbage:
                    with contextlib.suppress(grpc.RpcError):
                        call(text, timeout=30)
                with contextlib.suppress(grpc.RpcError):
                    call(good, timeout=30)
            for text in garbage[:4]:
                with pytest.raises(grpc.RpcError):
                    channel.unary_unary(f"/{protocol.SERVICE}/Allocate")(text, timeout=30)
            stream = channel.unary_stream(f"/{protocol.SERVICE}/ListAndWatch")
            with pytest.raises(grpc.RpcError):
                next(stream(b"\xff", timeout=30))
            listed = protocol.reader("ListAndWatchResponse")(next(stream(b"", timeout=30)))
            ids = [unit.ID for unit in listed.devices][:2]
            asked = protocol.message("AllocateRequest")(container_requests=[{"devices_ids": ids}])
            answer = channel.unary_unary(f"/{protocol.SERVICE}/Allocate")(asked.SerializeToString(), timeout=30)
            (found,) = protocol.reader("AllocateResponse")(answer).container_responses
            assert dict(found.envs) == {offers.VARIABLES[MEMORY]: f"{pure.UUIDS[0]}=2Mi"}


def test_probe_wants_an_answer_on_every_socket(folder: Path, tmp_path: Path, capfd: Any) -> None:
    def probed() -> str:
        words = ["--state", str(tmp_path), "k8s-plugin", "--check", "--kubelet", str(folder)]
        code, said = main(words), capfd.readouterr().err
        assert code == (1 if said else 0)
        return str(said)

    assert "has no socket of the plugin" in probed()
    with service.Service(MEMORY, "a.io/memory", lambda _: None) as one:
        one.serve(str(folder / "gpushare-memory-mib-00000000.sock"))
        assert probed() == ""
        with socket.socket(socket.AF_UNIX) as hung:  # accepts, and does not answer
            hung.bind(str(folder / "gpushare-compute-00000000.sock"))
            assert 'gpushare-compute-00000000.sock" does not answer' in probed()


def test_options_name_every_kind() -> None:
    assert (*k8s_plugin.KINDS, offers.SHARED) == tuple(offers.VARIABLES)  # whose name the configuration sets


def test_proto_matches_kubelet() -> None:
    """Compare field by field with protoc's output for Kubernetes' file, which has more messages."""
    _, asked, _ = methods(PROTO, VERSION)["Allocate"]
    theirs = asked.DESCRIPTOR.file.message_types_by_name
    for name in protocol._MESSAGES:
        ours = protocol.message(name).DESCRIPTOR
        for field in ours.fields:
            other = theirs[name].fields_by_name[field.name]
            assert (field.number, field.type, field.is_repeated) == (other.number, other.type, other.is_repeated), name
    assert methods(PROTO, VERSION)["Register"][0] == protocol.REGISTER


def test_removed_devices_and_driver_are_found(tmp_path: Path) -> None:
    whole, divided = pure.device(0), pure.device(1)
    part = divided._replace(uuid="MIG-cccccccc", parent=divided.uuid, gpu_instance=3, compute_instance=0)
    version = tmp_path / "sys/module/nvidia/version"
    gpus = [tmp_path / "proc/driver/nvidia/gpus" / one.bus_id for one in (whole, divided)]
    instance = tmp_path / "proc/driver/nvidia/capabilities/gpu1/mig/gi3/ci0/access"
    for path in (*(gpu / "information" for gpu in gpus), version, instance):
        path.parent.mkdir(parents=True)
        path.write_text("535.1\n")

    def gone() -> dict[str, str]:
        return devicestate.gone(str(tmp_path), [whole, part])

    assert gone() == {}
    shutil.rmtree(instance.parent)
    assert gone() == {part.uuid: "the MIG device is gone"}
    shutil.rmtree(gpus[0])
    assert gone() == {part.uuid: "the MIG device is gone", whole.uuid: f"no GPU at {whole.bus_id} any more"}
    version.unlink()
    assert set(gone().values()) == {"no driver is loaded"}


def test_numa_node_is_read_from_sysfs(tmp_path: Path) -> None:
    """A missing file, and one that is no number, count as an unknown node."""
    devices = [pure.device(0, bus_id=f"0000:0{bus}:00.0") for bus in range(1, 5)]
    for device, text in zip(devices, ("1\n", "-1\n", "\n")):
        file = tmp_path / "sys/bus/pci/devices" / device.bus_id / "numa_node"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    assert list(devicestate.numa_nodes(str(tmp_path), devices).items()) == [
        (device.bus_id, node) for device, node in zip(devices, (1, -1, -1, -1))
    ]


def test_missing_driver_root_in_pod_uses_own_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc and /sys there belong to the same kernel: no device counts as gone because an operator's directory is
    missing."""
    asked: set[str] = set()

    def ask(root: str) -> tuple[str, ...]:
        asked.add(root)
        return ()

    for name in ("driver_version", "bus_ids", "mig_instances"):
        monkeypatch.setattr(inventory, name, ask)
    devicestate.gone(str(tmp_path / "run/nvidia/driver"), ())
    assert asked == {"/"}
    asked.clear()
    devicestate.gone(str(tmp_path), ())
    assert asked == {str(tmp_path)}
