"""MIG devices that other software put into config.json: exactly they are granted, not their whole GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpushare.core.errors import DeviceError, RequestError
from gpushare.core.model import Config, Inventory, Node, Policy
from gpushare.request import request

from tests.support.driverhost import MIG_UUIDS, add_mig
from tests.unit import pure

VOID = "NVIDIA_VISIBLE_DEVICES=void"
FIRST, SECOND = (12, 13), (21, 22)  # capability nodes of driverhost.add_mig
CONFIG, MONITOR = 1, 2


@pytest.fixture
def divided(tmp_path: Path) -> Node:
    """A divided GPU and an undivided one."""
    add_mig(tmp_path)
    parts = tuple(
        pure.device(0, uuid=uuid, parent=pure.UUIDS[0], mig_index=i, gpu_instance=i + 1, compute_instance=0)
        for i, uuid in enumerate(MIG_UUIDS)
    )
    inventory = Inventory(str(tmp_path), pure.VERSION, (pure.device(0), pure.device(1)), mig=parts)
    return Node(Config(policy=Policy()), inventory)


def named(node: Node, *env: str, gpus: tuple[int, ...] = (0,), caps: tuple[int, ...], mounts: bool = False) -> Any:
    paths = [*(f"/dev/nvidia{minor}" for minor in gpus), *(f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in caps)]
    there: dict[str, Any] = {"linux": {"devices": [{"path": path, "type": "c"} for path in paths]}}
    if mounts:
        there = {"mounts": [{"destination": path, "source": path, "type": "bind"} for path in paths]}
    found = request.resolve(pure.bundle(*env, **there), node, with_injected=True)
    assert found is not None
    return found.selection.names


@pytest.mark.parametrize("mounts", [False, True])
@pytest.mark.parametrize("env", [(VOID,), (), (VOID, "GPUSHARE_MEMORY=1Gi")], ids=" ".join)
@pytest.mark.parametrize(
    ("gpus", "caps", "uuids"),
    [
        ((0,), SECOND, MIG_UUIDS[1:]),
        ((0,), (*FIRST, *SECOND), MIG_UUIDS),
        ((0, 1), FIRST, (MIG_UUIDS[0], pure.UUIDS[1])),
        ((0,), (*FIRST, 22), MIG_UUIDS[:1]),  # half of the second device's nodes
        ((0,), (*FIRST, MONITOR), MIG_UUIDS[:1]),
        ((0,), (), pure.UUIDS[:1]),  # docker run --device /dev/nvidia0
        ((0,), (CONFIG, MONITOR), pure.UUIDS[:1]),  # dividing a GPU needs the whole GPU
        ((1,), SECOND, pure.UUIDS[1:]),
    ],
)
def test_mig_devices_with_capability_nodes_are_granted(
    divided: Node,
    env: tuple[str, ...],
    gpus: tuple[int, ...],
    caps: tuple[int, ...],
    uuids: tuple[str, ...],
    mounts: bool,
) -> None:
    assert named(divided, *env, gpus=gpus, caps=caps, mounts=mounts) == tuple(uuids)


@pytest.mark.parametrize("caps", [(21,), (22,), (30, 31)])
def test_incomplete_capability_nodes_are_refused(divided: Node, caps: tuple[int, ...]) -> None:
    with pytest.raises(
        DeviceError, match="/dev/nvidia0, and nodes in /dev/nvidia-caps of no MIG device .*; run gpushare"
    ):
        named(divided, VOID, caps=caps)


@pytest.mark.parametrize(
    ("word", "caps", "uuids"),
    [
        (MIG_UUIDS[1], SECOND, MIG_UUIDS[1:]),  # a device plugin with PASS_DEVICE_SPECS
        ("0:1", (), MIG_UUIDS[1:]),
        ("0", SECOND, MIG_UUIDS[1:]),
        ("0", (), MIG_UUIDS),
        ("0:0", (*FIRST, *SECOND), MIG_UUIDS[:1]),
        ("all", SECOND, MIG_UUIDS[1:]),
    ],
)
def test_variable_never_widens_injected_mig_devices(
    divided: Node, word: str, caps: tuple[int, ...], uuids: tuple[str, ...]
) -> None:
    assert named(divided, f"NVIDIA_VISIBLE_DEVICES={word}", caps=caps) == tuple(uuids)


@pytest.mark.parametrize("word", ["0:0", "1", MIG_UUIDS[0]])
def test_variable_naming_other_mig_device_is_refused(divided: Node, word: str) -> None:
    with pytest.raises(RequestError, match="name different devices"):
        named(divided, f"NVIDIA_VISIBLE_DEVICES={word}", caps=SECOND)
