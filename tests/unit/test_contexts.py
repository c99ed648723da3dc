"""Memory of a CUDA context: measured once for each kind of device, kept in node.json, estimated until then."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
from gpushare.allocation import contextmeasuring
from gpushare.config import node
from gpushare.core import constants
from gpushare.core.model import Context, Node
from gpushare.gpu import contextprobe, contexts, driverfiles

from simulator import models, simhost
from tests.support.driverhost import divide
from tests.support.remote import Remote

# The programs fork with one thread; a test runner may have more, which Python 3.12 warns about.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
MIB = 1 << 20
V = simhost.VERSION


def again(one: Node, known: tuple[Context, ...]) -> tuple[Context, ...]:
    return contextmeasuring.measured(one, known, again=True)


class Host:
    """Compiles node.json of a simulated host."""

    def __init__(self, directory: Path, root: Path) -> None:
        self.root, self.config, self.state = root, directory / "config.yaml", directory / "state"
        self.config.write_text(f"version: 1\ndriver: {{root: {root}}}\n")
        self.state.mkdir()

    def refresh(self, measure: Optional[node.Measure] = contextmeasuring.measured) -> Node:
        return node.compile_node(str(self.config), str(self.state), measure=measure)

    def fresh(self) -> Node:
        found = node.read_node(str(self.config), str(self.state))
        assert found is not None
        return found

    def probe(self, uuid: str, deadline_s: float = 20) -> tuple[int, str]:
        nvml, cuda = driverfiles.nvml_library(str(self.root), V), driverfiles.cuda_library(str(self.root), V)
        return contextprobe.probe(nvml, cuda, uuid, deadline_s)


@pytest.fixture
def on(tmp_path: Path, make_host: Callable[..., Path]) -> Callable[..., Host]:
    """on(**arguments of make_host) -> Host."""
    return lambda **arguments: Host(tmp_path, make_host(**arguments))


def test_context_is_measured_once_and_kept(on: Callable[..., Host], monkeypatch: pytest.MonkeyPatch) -> None:
    host = on(gpus=2, context_bytes=171 * MIB)
    assert host.refresh(None).inventory.devices[0].context_bytes == 300 * MIB  # the estimate
    probes: list[str] = []
    probe = contextprobe.probe
    monkeypatch.setattr(contextprobe, "probe", lambda *a, **k: (probes.append(a[2]), probe(*a, **k))[1])
    measured = host.refresh().inventory
    assert [device.context_bytes for device in measured.devices] == [172 * MIB] * 2  # whole blocks
    assert measured.contexts == (Context(simhost.DEFAULT_MODEL, V, "", False, 172 * MIB),)
    assert probes == [simhost.default_uuid(0)]  # GPUs of one model are measured once
    assert host.fresh().inventory == measured
    assert host.refresh().inventory == measured and len(probes) == 1
    assert host.refresh(None).inventory == measured  # also a start that compiles keeps it
    assert host.refresh(again).inventory == measured and len(probes) == 2
    monkeypatch.setattr(contextprobe, "probe", lambda *_: (0, "it is full"))
    assert host.refresh(again).inventory == measured  # a failed measurement does not replace an earlier one


def test_measurement_of_another_driver_is_not_used(on: Callable[..., Host]) -> None:
    inventory = on().refresh(None).inventory
    old = Context(simhost.DEFAULT_MODEL, "470.1", "", False, 7)
    assert contexts.with_measured(inventory, (old,)) == inventory


@pytest.mark.parametrize("name", [name for name in models.MODELS if " MIG " not in name])
def test_measured_context_is_that_of_the_model(on: Callable[..., Host], name: str) -> None:
    (device,) = on(model=name).refresh().inventory.devices
    like = models.MODELS[name]
    assert (device.memory_bytes, device.reserved_bytes) == (like.memory_bytes, like.reserved_bytes)
    unlisted = constants.INIT_BYTES + constants.CONTEXT_UNLISTED_BYTES
    assert device.context_bytes == contexts.rounded(like.listed_bytes + (0 if name == models.DEFAULT else unlisted))


def test_mig_device_has_a_context_of_its_own(on: Callable[..., Host]) -> None:
    host = on(model="NVIDIA H100 80GB HBM3")
    divide(host.root, profile=models.H100_MIG)
    like = models.MODELS[models.H100_MIG]
    estimated = host.refresh(None).inventory
    assert {one.profile for one in estimated.mig} == {"1g.10gb"}
    assert like.context_bytes < estimated.mig[0].context_bytes < like.context_bytes + 128 * MIB
    measured = host.refresh().inventory
    size = contexts.rounded(like.context_bytes + constants.INIT_BYTES + constants.CONTEXT_UNLISTED_BYTES)
    assert [one.context_bytes for one in measured.mig] == [size] * 2
    assert [one[2:5] for one in measured.contexts] == [("1g.10gb", False, size)]  # not of the whole GPU
    assert {(one.memory_bytes, one.reserved_bytes) for one in measured.mig} == {
        (like.memory_bytes, like.reserved_bytes)
    }


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"compute_mode": 3}, "its compute mode is exclusive"),
        ({"compute_mode": 2}, "its compute mode is prohibited"),
        ({"memory_bytes": 1000 * MIB}, "only 1000 MiB of it are free"),
    ],
)
def test_full_or_exclusive_device_is_left_alone(on: Callable[..., Host], arguments: dict[str, Any], why: str) -> None:
    host = on(**arguments)
    found = host.refresh().inventory
    assert found.contexts == (Context(simhost.DEFAULT_MODEL, V, "", False, 0, why),)
    assert found.devices[0].context_bytes == 300 * MIB
    assert host.fresh().inventory == found


def test_probe_has_a_deadline(on: Callable[..., Host], tmp_path: Path) -> None:
    host = on()
    before = time.monotonic()
    assert contextprobe.probe("x", str(tmp_path), "u", 0.0) == (0, "the driver did not answer within 0 s")
    assert time.monotonic() - before < 5
    with pytest.raises(ChildProcessError):  # the child was reaped
        os.waitpid(-1, os.WNOHANG)
    assert contextprobe.probe("", "", "u")[1] == "the driver's libraries were not found"
    assert "NVMLError_NotFound" in host.probe("GPU-00000000-0000-0000-0000-000000000000")[1]


def test_memory_of_other_processes_does_not_count(on: Callable[..., Host]) -> None:
    host = on()
    with Remote(host.root) as other:
        other.do("cuda.context(); cuda.alloc(1 << 30)")
        assert host.probe(simhost.default_uuid(0)) == (300 * MIB, "")


@pytest.mark.parametrize(
    ("listed", "why"),
    [
        (lambda: {os.getpid(): 1 << 30}, "NVML reports another process under this process's id"),
        (dict, "NVML reports no memory of the measuring process"),
        (lambda: {1: 1 << 30}, "NVML reports no memory of the measuring process"),
    ],
)
def test_process_of_another_pid_namespace_does_not_count(
    on: Callable[..., Host], monkeypatch: pytest.MonkeyPatch, listed: Callable[[], dict[int, int]], why: str
) -> None:
    """In a pid namespace, NVML may list host pids."""
    host = on()
    monkeypatch.setattr(contextprobe, "processes", lambda *_: listed())
    size, reason = host.probe(simhost.default_uuid(0))
    assert size == 0 and reason.startswith(why)


def test_client_of_mps_is_charged_its_own_measurement(on: Callable[..., Host]) -> None:
    inventory = on().refresh(None).inventory
    (device,) = inventory.devices
    assert contexts.under_mps(device, inventory) == device
    shared = Context(device.model, V, "", True, 30 * MIB)
    assert contexts.under_mps(device, inventory._replace(contexts=(shared,))).context_bytes == 30 * MIB
    assert contexts.with_measured(inventory, (shared,)).devices == inventory.devices
