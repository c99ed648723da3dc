"""Attacks by the device rules of config.json, as `--device-cgroup-rule` of an engine writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.runc import Container

from .scene import Scene

Prepare = Callable[[Scene], None]
_RULE = {"allow": True, "type": "c", "access": "rwm"}
EVERY_DEVICE = {**_RULE, "type": "a"}
EVERY_MAJOR = _RULE
IN_ANOTHER_CASE = {"Allow": True, "type": "c", "access": "rwm"}
GPUS = {**_RULE, "major": 195}
GPU = {**_RULE, "major": 195, "minor": 0, "access": "r"}
_OPEN = "mknod {path} c 195 {minor} && exec 3{mode}{path}"


def opens_no_gpu(one: Container) -> None:
    """A node made inside cannot be opened, in any mode; a rule for all devices also loses the right to mknod."""
    for minor in (0, 1, 255):
        for number, mode in enumerate(("<", ">", "<>")):
            path = f"/dev/made-{minor}-{number}"
            done = one.exec("bash", "-c", _OPEN.format(path=path, minor=minor, mode=mode))
            assert "Operation not permitted" in done.stderr, done.stderr


def allowing(rule: dict[str, Any], asks: bool = True) -> Prepare:
    """Add `rule` to a container that requests a share, or nothing."""

    def prepare(scene: Scene) -> None:
        scene.spec["linux"]["resources"]["devices"].append(rule)
        if not asks:
            env = scene.spec["process"]["env"]
            scene.spec["process"]["env"] = [line for line in env if not line.startswith("GPUSHARE_")]

    return prepare
