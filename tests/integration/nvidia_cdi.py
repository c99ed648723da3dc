"""The CDI specification that NVIDIA's own tool writes, made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simulator.simhost import VERSION

LIBDIR = "usr/lib/x86_64-linux-gnu"


def cdi(root: Path) -> dict[str, Any]:
    """The output of `nvidia-ctk cdi generate` for two GPUs."""

    def tool(*args: str) -> dict[str, Any]:
        return {"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", *args]}

    def file(path: str) -> dict[str, Any]:
        return {"hostPath": f"{root}/{path}", "containerPath": f"/{path}", "options": ["ro", "nosuid", "nodev", "bind"]}

    names = ("libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler", "libnvidia-nvvm")
    libraries = [f"{LIBDIR}/{name}.so.{VERSION}" for name in names]
    return {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": [
            {"name": str(n), "containerEdits": {"deviceNodes": [{"path": f"/dev/nvidia{n}"}]}} for n in range(2)
        ],
        "containerEdits": {
            "env": ["NVIDIA_VISIBLE_DEVICES=void"],
            "deviceNodes": [{"path": f"/dev/{name}"} for name in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")],
            "hooks": [
                tool("create-symlinks", "--link", f"libcuda.so.1::/{LIBDIR}/libcuda.so"),
                tool("update-ldcache", "--folder", f"/{LIBDIR}"),
                tool("disable-device-node-modification"),
            ],
            "mounts": [file(path) for path in (*libraries, "usr/bin/nvidia-smi") if (root / path).is_file()],
        },
    }


def with_simulated_nodes(described: dict[str, Any], root: Path) -> dict[str, Any]:
    """The same for an engine that applies CDI itself: simulated nodes are files, so they are mounted."""

    def mounted(edits: dict[str, Any]) -> dict[str, Any]:
        nodes = [
            {"hostPath": f"{root}{node['path']}", "containerPath": node["path"], "options": ["rw", "bind"]}
            for node in edits.get("deviceNodes", [])
        ]
        rest = {key: value for key, value in edits.items() if key != "deviceNodes"}
        return {**rest, "mounts": [*edits.get("mounts", []), *nodes]}

    devices = [{**one, "containerEdits": mounted(one["containerEdits"])} for one in described["devices"]]
    return {**described, "devices": devices, "containerEdits": mounted(described["containerEdits"])}
