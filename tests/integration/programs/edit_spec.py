"""An OCI runtime for tests that edits config.json and executes the next runtime.

    edit_spec.py EDIT ARGUMENT NEXT [its own options...] <the engine's command line>

drop-capability CAP_X     for --privileged on a machine that lacks the capability
keep-resources NAME       remove all other resources, on a machine whose cgroup v2 lacks their controllers
inject DRIVER_ROOT        the edits of NVIDIA's runtime: device 0, the driver's libraries, its hooks
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

LIBDIR = "/usr/lib/x86_64-linux-gnu"
VERSION = "535.261.03"


def drop_capability(spec: dict[str, Any], name: str) -> None:
    for kept in spec.get("process", spec).get("capabilities", {}).values():
        if name in kept:
            kept.remove(name)


def keep_resources(spec: dict[str, Any], name: str) -> None:
    resources = spec["linux"]["resources"] if "linux" in spec else spec
    for other in [key for key in resources if key != name] if "args" not in spec else ():
        del resources[other]


def inject(spec: dict[str, Any], root: str) -> None:
    if "mounts" not in spec:
        return  # a process that joins the container
    paths = [f"{LIBDIR}/libcuda.so.{VERSION}", f"{LIBDIR}/libnvidia-ml.so.{VERSION}", "/dev/nvidia0"]
    for path in paths:
        spec["mounts"].append({"type": "bind", "source": root + path, "destination": path, "options": ["bind"]})
    # Both would fail: they are missing on this machine.
    hooks = spec.setdefault("hooks", {})
    hooks.setdefault("prestart", []).append({"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["x"]})
    hooks.setdefault("createContainer", []).append({"path": "/usr/bin/nvidia-cdi-hook", "args": ["update-ldcache"]})


EDITS = {"drop-capability": drop_capability, "keep-resources": keep_resources, "inject": inject}


def file_of(words: tuple[str, ...]) -> str:
    """Return config.json of a create, the file of an exec or of podman's update; "" for all other commands."""
    if "create" in words:
        return os.path.join(words[words.index("--bundle") + 1], "config.json")
    if "update" in words:
        path = next((word.partition("=")[2] for word in words if word.startswith("--resources=")), "-")
        return "" if path == "-" else path
    return words[words.index("--process") + 1] if "exec" in words else ""


def main(edit: str, argument: str, following: str, *args: str) -> None:
    path = file_of(args)
    if path:
        with open(path) as file:
            spec = json.load(file)
        EDITS[edit](spec, argument)
        with open(path, "w") as file:
            json.dump(spec, file)
    os.execv(following, [following, *args])


if __name__ == "__main__":
    main(*sys.argv[1:])
