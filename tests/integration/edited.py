"""A bundle after gpushare-runtime edited it, and edits that other software may have made before."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.support.host import Node
from tests.support.runc import Container

APPLIED = "gpushare.io/applied"


def config_of(one: Container) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((one.bundle / "config.json").read_text())
    return content


def injected(node: Node) -> Callable[[dict[str, Any]], None]:
    """Edits of a device plugin with CDI: a node, the driver's libraries, and NVIDIA's own hooks."""
    root = node.driver_root

    def edit(spec: dict[str, Any]) -> None:
        options = ["bind", "ro", "nosuid", "nodev"]
        for name in ("libcuda.so.535.261.03", "libnvidia-ml.so.535.261.03"):
            target = f"/usr/lib/x86_64-linux-gnu/{name}"
            spec["mounts"].append(
                {"type": "bind", "source": f"{root}{target}", "destination": target, "options": options}
            )
        spec["mounts"].append(
            {"type": "bind", "source": f"{root}/dev/nvidia0", "destination": "/dev/nvidia0", "options": ["bind"]}
        )
        tool = {"path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", "update-ldcache"]}
        spec["hooks"] = {"createContainer": [tool], "prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook"}]}

    return edit
