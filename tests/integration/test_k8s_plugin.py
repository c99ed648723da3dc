"""`gpushare k8s-plugin` with a kubelet that uses the real protocol, on a simulated host with two devices."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Optional

import grpc
import pytest
import yaml
from gpushare.core import constants

from simulator.simhost import raise_xid
from tests.support import host
from tests.support.host import Node
from tests.support.kubelet import Kubelet, Refused

MEMORY, COMPUTE, GPU = "gpushare.io/memory-mib", "gpushare.io/compute", "gpushare.io/gpu"
GIB, MIB = 1 << 30, 1 << 20
EACH = 64  # MiB of a simulated device: few enough ids for a test to read
DEADLINE_S = 60


def program() -> Path:
    """The bundle's program, if the bundle was made with gRPC (WITH=kubernetes); else the source tree's."""
    has_grpc = any(host.BIN.parent.glob("libexec/_internal/lib/*/grpc"))
    return (host.BIN if has_grpc else host.BUILD / "bin") / "gpushare"


class Program:
    """A program that runs until it is ended; `lines` are its output so far."""

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._said = threading.Condition()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            with self._said:
                self.lines.append(line.rstrip("\n"))
                self._said.notify_all()

    def expect(self, pattern: str) -> re.Match[str]:
        """Wait for a line that matches; skip earlier lines."""

        def found() -> Optional[re.Match[str]]:
            matches = [re.search(pattern, line) for line in self.lines]
            at = next((at for at, match in enumerate(matches) if match), None)
            del self.lines[: 0 if at is None else at + 1]
            return None if at is None else matches[at]

        with self._said:
            match = self._said.wait_for(found, DEADLINE_S)
        assert match, self.lines
        return match

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """(exit code, standard error)"""
        if self.process.returncode is None:
            self.process.send_signal(number)
        code = self.process.wait(DEADLINE_S)
        self._thread.join(DEADLINE_S)
        with self.process.stderr as errors, self.process.stdout:  # type: ignore[union-attr]
            return code, errors.read()


class Plugin(Program):
    """The running device plugin."""

    def __init__(self, node: Node, folder: Path, *args: str) -> None:
        command = [program(), "--config", node.config, "--state", node.state, "k8s-plugin"]
        super().__init__([*map(str, command), "--kubelet", str(folder), "--interval", "0.1", *args])


@pytest.fixture
def folder() -> Iterator[Path]:
    """kubelet's directory; the path of a socket must be short."""
    with tempfile.TemporaryDirectory(prefix="gpushare-", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def two(make_host: Callable[..., Path], make_node: Callable[..., Node]) -> Callable[..., Node]:
    """two(memory of each device, **configuration) -> a node with node.json, as after the installer."""

    def make(memory_bytes: int = EACH * MIB, **config: Any) -> Node:
        node = make_node(make_host(gpus=2, memory_bytes=memory_bytes), **config)
        assert node.cli("refresh").returncode == 0
        return node

    return make


@pytest.fixture
def plugin(folder: Path) -> Iterator[Callable[..., Plugin]]:
    made: list[Plugin] = []

    def start(node: Node, *args: str) -> Plugin:
        made.append(Plugin(node, folder, *args))
        return made[-1]

    yield start
    for one in made:
        if one.process.returncode is None:
            one.end(signal.SIGKILL)


def uuids(node: Node) -> list[str]:
    return re.findall(r"GPU-[0-9a-f-]+", node.cli("devices", "--format", "json").stdout)


def sockets(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "kubelet.sock")


def units(kubelet: Kubelet, name: str, *uuids: str) -> tuple[int, ...]:
    """Count each device's healthy ids; an id begins with the device's uuid, or with a prefix of it."""
    ids = kubelet.healthy(name)
    return tuple(sum(unit.startswith((uuid, uuid[4:12] + "-")) for unit in ids) for uuid in uuids)


def test_plugin_registers_allocates_and_follows_kubelet(
    two: Callable[..., Node], folder: Path, plugin: Callable[..., Plugin]
) -> None:
    """Registration, allocation, a kubelet restart, device changes, and a clean exit."""
    node = two()
    first, second = uuids(node)
    with Kubelet(folder) as kubelet:
        one = plugin(node)
        kubelet.wait(lambda: kubelet.has_listed(MEMORY, COMPUTE, GPU))
        one.expect(f"registered {GPU}: 0")
        assert units(kubelet, MEMORY, first, second) == (EACH, EACH)
        assert [oct(path.stat().st_mode) for path in folder.glob("gpushare-*.sock")] == ["0o140600"] * 3
        for endpoint in kubelet.endpoints.values():
            assert endpoint.options == endpoint.call("GetDevicePluginOptions")
            assert not endpoint.options.pre_start_required
            endpoint.call("PreStartContainer", devices_ids=["x"])

        # first all free ids of the fuller device, then of the other
        name = constants.ENV_ALLOCATED_MEMORY
        assert kubelet.allocate(MEMORY, 40) == {name: f"{first}=40Mi"}
        one.expect(re.escape(f"{MEMORY}: {name}={first}=40Mi"))
        assert kubelet.allocate(MEMORY, 25) == {name: f"{second}=25Mi"}
        assert kubelet.allocate(MEMORY, 24) == {name: f"{first}=24Mi"}
        with pytest.raises(Refused) as caught:
            kubelet.endpoints[MEMORY].call("Allocate", container_requests=[{"devices_ids": ["nobodys-1"]}])
        assert caught.value.args == ('gpushare: no device "nobodys-1" is offered on this node', "INVALID_ARGUMENT")

        # kubelet restarts: it keeps its allocations and empties its directory
        before = sockets(folder)
        kubelet.stop()
        (folder / "kubelet.sock").unlink(missing_ok=True)
        one.expect("kubelet is gone; waiting for it")
        kubelet.start()
        kubelet.wait(lambda: kubelet.has_listed(MEMORY, COMPUTE, GPU))
        assert len(sockets(folder)) == 3 and not set(sockets(folder)) & set(before)
        assert kubelet.allocate(MEMORY, 39) == {name: f"{second}=39Mi"}
        # a quick restart, and a process that removes sockets
        kubelet.stop()
        kubelet.start()
        kubelet.wait(lambda: kubelet.has_listed(MEMORY, COMPUTE, GPU))
        one.expect(f"registered {GPU}")
        removed = dict(kubelet.endpoints)
        (folder / Path(removed[MEMORY].path).name).unlink()
        kubelet.wait(lambda: kubelet.endpoints[MEMORY] is not removed[MEMORY])
        kubelet.wait(lambda: kubelet.has_listed(MEMORY, COMPUTE, GPU))
        kubelet.stop()
        shutil.rmtree(folder)  # a node that is set up again
        folder.mkdir()
        kubelet.start()
        kubelet.wait(lambda: kubelet.has_listed(MEMORY, COMPUTE, GPU))

        # health
        kubelet.used.clear()
        gpus = node.driver_root / "proc/driver/nvidia/gpus"
        bus = sorted(path.name for path in gpus.iterdir())[1]
        shutil.move(gpus / bus, node.driver_root / "gone")
        kubelet.wait(lambda: units(kubelet, MEMORY, first, second) == (EACH, 0))
        one.expect(f"device 1 .*: no GPU at {bus} any more")
        assert kubelet.allocate(MEMORY, 64) == {name: f"{first}=64Mi"}
        unhealthy = [unit for unit, health in kubelet.endpoints[MEMORY].devices.items() if health == "Unhealthy"]
        with pytest.raises(Refused, match=r"device 1 \(GPU-.*\) is gone"):
            kubelet.endpoints[MEMORY].call("Allocate", container_requests=[{"devices_ids": unhealthy[:1]}])
        version = node.driver_root / "sys/module/nvidia/version"
        texts = {path: path.read_bytes() for path in (version, node.driver_root / "proc/driver/nvidia/version")}
        for path in texts:
            path.unlink(missing_ok=True)
        kubelet.wait(lambda: not kubelet.healthy(MEMORY) and len(kubelet.endpoints[MEMORY].devices) == 2 * EACH)
        one.expect("device 0 .*: no driver is loaded")
        for path, text in texts.items():
            path.write_bytes(text)
        shutil.move(node.driver_root / "gone", gpus / bus)
        kubelet.wait(lambda: len(kubelet.healthy(MEMORY)) == 2 * EACH)
        one.expect("device 1 .*: is back")

        # exit
        ended = kubelet.endpoints
        assert one.end() == (0, "")
        kubelet.wait(lambda: all(endpoint.ended for endpoint in ended.values()))
        assert sockets(folder) == []


def test_equal_shares_and_whole_devices_are_advertised(
    two: Callable[..., Node], folder: Path, plugin: Callable[..., Plugin]
) -> None:
    node = two(sharing={"split_count": 4})
    first, second = uuids(node)
    with Kubelet(folder) as kubelet:
        plugin(node, "--whole", "1", "--interval", "3600")
        kubelet.wait(lambda: kubelet.has_listed(MEMORY, COMPUTE, GPU))
        assert kubelet.healthy(MEMORY) == set() and units(kubelet, GPU, first, second) == (4, 1)
        name = constants.ENV_ALLOCATED_GPU
        assert kubelet.allocate(GPU, 2) == {name: f"{first},{second}=64Mi"}
        assert kubelet.allocate(GPU, 1) == {name: first}
        with pytest.raises(Refused, match="2 GPUs are requested, and kubelet chose from 1"):
            kubelet.allocate(GPU, 2)
        kubelet.stop()  # the poll interval is an hour; the directory watch reacts
        kubelet.start()
        kubelet.wait(lambda: kubelet.has_listed(MEMORY, COMPUTE, GPU))
        assert len(kubelet.healthy(GPU)) == 5


def test_renamed_shares_are_offered_at_once(
    two: Callable[..., Node], folder: Path, plugin: Callable[..., Plugin]
) -> None:
    """A change of the node's profile. kubelet offers none under the former name."""
    node, name = two(sharing={"split_count": 4}), "gpushare.io/gpu.shared"
    with Kubelet(folder) as kubelet:

        def moved(there: str, gone: str) -> bool:
            return (len(kubelet.healthy(there)), len(kubelet.healthy(gone))) == (8, 0)

        plugin(node, "--interval", "0.1")
        kubelet.wait(lambda: len(kubelet.healthy(GPU)) == 8)
        text = node.config.read_text()
        for renamed, there, gone in ((True, name, GPU), (False, GPU, name)):
            time_slicing = {"renameByDefault": renamed, "failRequestsGreaterThanOne": True}
            value = yaml.safe_load(text) | {"sharing": {"split_count": 4, "timeSlicing": time_slicing}}
            node.config.write_text(yaml.safe_dump(value))
            assert node.cli("refresh").returncode == 0
            kubelet.wait(partial(moved, there, gone))
            assert list(kubelet.allocate(there, 1)) == [constants.ENV_ALLOCATED_GPU]
            with pytest.raises(Refused, match="failRequestsGreaterThanOne allows 1"):
                kubelet.allocate(there, 2)


def test_xid_error_makes_a_device_unhealthy(
    two: Callable[..., Node], folder: Path, plugin: Callable[..., Plugin]
) -> None:
    """NVML reports the error. Errors of programs are ignored; --ignore-xid replaces their list."""
    node = two()
    first, second = uuids(node)
    library = next(node.driver_root.rglob("libnvidia-ml.so.1"))
    with Kubelet(folder) as kubelet:
        one = plugin(node, "--nvml", str(library), "--interval", "3600")
        one.expect("Xid errors are watched")
        kubelet.wait(lambda: kubelet.has_listed(MEMORY, COMPUTE, GPU))
        raise_xid(node.driver_root / "dev/nvidia0", 31)
        one.expect(f"GPU {first}: Xid 31, which is ignored")
        raise_xid(node.driver_root / "dev/nvidia1", 79)
        one.expect("device 1 .*: Xid 79")
        kubelet.wait(lambda: units(kubelet, MEMORY, first, second) == (EACH, 0))
        kubelet.wait(lambda: units(kubelet, COMPUTE, first, second) == (100, 0))
        assert one.end() == (0, "")
    with Kubelet(folder) as kubelet:
        one = plugin(node, "--nvml", str(library), "--ignore-xid", "79")
        one.expect("Xid errors are watched")
        kubelet.wait(lambda: kubelet.has_listed(MEMORY, COMPUTE, GPU))
        raise_xid(node.driver_root / "dev/nvidia0", 79)
        one.expect(f"GPU {first}: Xid 79, which is ignored")
        raise_xid(node.driver_root / "dev/nvidia0", 31)
        kubelet.wait(lambda: units(kubelet, MEMORY, first, second) == (0, EACH))
    with Kubelet(folder):
        plugin(node, "--nvml", "/none").expect("Xid errors are not watched: /none")


def test_malformed_requests_do_not_end_the_plugin(
    two: Callable[..., Node], folder: Path, plugin: Callable[..., Plugin]
) -> None:
    """Bytes that are not HTTP, missing methods, malformed messages, a second stream: the plugin survives each and logs
    at most one line."""
    node = two()
    with Kubelet(folder) as kubelet:
        one = plugin(node)
        kubelet.wait(lambda: kubelet.has_listed(MEMORY, COMPUTE, GPU))
        endpoint = kubelet.endpoints[MEMORY]
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(endpoint.path)
            client.sendall(b"\x00\xff" * 4096)
        for method, request in (
            ("Allocate", b"\xff\xff\xff"),
            ("Allocate", b"\x0a\x03\x0a\x01\xff"),  # an id that is not UTF-8
            ("GetPreferredAllocation", b"\x0a\x0b\x18" + b"\xff" * 9 + b"\x01"),  # -1 of them, from no ids
            ("Nothing", b""),
        ):
            call = endpoint.channel.unary_unary(f"/v1beta1.DevicePlugin/{method}")
            try:
                answer = call(request, timeout=DEADLINE_S)
            except grpc.RpcError as error:
                assert error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNIMPLEMENTED)
            else:
                assert (method, answer) == ("GetPreferredAllocation", b"\x0a\x00")
        more = endpoint.channel.unary_stream("/v1beta1.DevicePlugin/ListAndWatch")(b"", timeout=DEADLINE_S)
        assert len(next(more)) > 2 * EACH
        kubelet.wait(lambda: endpoint.ended)  # kubelet has one stream, now this one
        assert endpoint.why == ""
        more.cancel()
        kubelet.wait(lambda: len(kubelet.healthy(MEMORY)) == 2 * EACH)  # registered again
        assert kubelet.allocate(MEMORY, 64)
        assert one.end() == (0, "")
        assert all(len(line) < 500 and "Traceback" not in line for line in one.lines)


def test_plugin_replaces_a_killed_or_older_plugin(
    two: Callable[..., Node], folder: Path, plugin: Callable[..., Plugin]
) -> None:
    node = two()
    with Kubelet(folder) as kubelet:
        killed = plugin(node)
        kubelet.wait(lambda: len(kubelet.endpoints) == 3)
        killed.end(signal.SIGKILL)
        left = sockets(folder)
        old = plugin(node)
        old.expect(f"registered {GPU}")
        assert len(left) == 3 and not set(left) & set(sockets(folder))
        new = plugin(node)  # as in an update that starts the new plugin first
        new.expect(f"registered {GPU}")
        ours = dict(kubelet.endpoints)
        assert old.end() == (0, "")
        kubelet.wait(lambda: all(kubelet.endpoints[name] is not one for name, one in ours.items()))
        kubelet.wait(lambda: kubelet.has_listed(MEMORY, COMPUTE, GPU))
        assert kubelet.allocate(MEMORY, 1) and len(sockets(folder)) == 3


def test_refusal_by_kubelet_ends_the_start_and_is_retried_later(
    two: Callable[..., Node], folder: Path, plugin: Callable[..., Plugin]
) -> None:
    """A refusal at the start ends the plugin. A later one is logged once and retried, but not with the resource that
    kubelet has: kubelet 1.36 reads a long list for so long that the next registration ends by its time limit, and a
    second list of the same resource would repeat that for ever."""
    node = two()
    with Kubelet(folder, refuse="no such resource here") as kubelet:
        code, error = plugin(node).end(0)
        assert (code, error.count("\n")) == (1, 1)
        assert f'kubelet.sock": kubelet refuses {MEMORY}: no such resource here' in error
        assert sockets(folder) == []
        kubelet.refuse = ""
        one = plugin(node)
        one.expect(f"registered {GPU}")
        kubelet.refuse, kubelet.refused = "not now", COMPUTE
        kubelet.stop()
        kubelet.start()
        one.expect("kubelet refuses gpushare.io/compute: not now")
        memory = kubelet.endpoints[MEMORY]
        kubelet.refuse = ""
        one.expect(f"registered {GPU}")
        assert kubelet.endpoints[MEMORY] is memory and not memory.ended
        assert kubelet.allocate(MEMORY, 3)
        assert not [line for line in one.lines if "refuses" in line]
