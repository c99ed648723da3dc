"""The container of a DaemonSet as an engine makes it, for runc: of the manifest, and of the image's build context.

    image = unpack(context, directory)              what the Dockerfile makes of the archive: a root, and what it starts
    arguments(manifest, image, {path: directory})   -> of lib.runc.Container; the directories stand in for the node's

An image here has nothing but what it copies: no shell, no /tmp, no /etc. What is not known here is an error, so nothing
of a manifest or a Dockerfile is passed over.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from .rootfs import run

PROPAGATION = {"None": "rprivate", "HostToContainer": "rslave", "Bidirectional": "rshared"}
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
# Of the config.json of an ordinary test container: an image of nothing has no /tmp and no /run
PSEUDO = ("/proc", "/dev", "/dev/pts", "/dev/shm", "/sys")


class Image(NamedTuple):
    rootfs: Path
    entrypoint: list[str]
    cmd: list[str]
    env: dict[str, str]


def unpack(context: Path, directory: Path) -> Image:
    """As docker build does it, for the few instructions that we use."""
    source, root = directory / "context", directory / "rootfs"
    root.mkdir(parents=True)
    source.mkdir()
    run("tar", "-C", source, "-xzf", context)
    words: dict[str, list[str]] = {"ENTRYPOINT": [], "CMD": []}
    env = {}
    for line in (source / "Dockerfile").read_text().splitlines():
        instruction, _, rest = line.partition(" ")
        if instruction in words:
            words[instruction] = json.loads(rest)
        elif instruction == "COPY":
            name, target = rest.split()
            (source / name).rename(root / target.lstrip("/"))
        elif instruction == "ENV":
            name, _, value = rest.partition("=")
            env[name] = value
        else:
            assert line == "FROM scratch" or instruction in ("#", "LABEL"), f"not known here: {line}"
    return Image(root, words["ENTRYPOINT"], words["CMD"], env)


def arguments(manifest: Path, image: Image, node: dict[str, Path]) -> dict[str, Any]:
    """`node`: path of each hostPath -> the directory that stands in for it."""
    (pod,) = (one["spec"]["template"]["spec"] for one in yaml.safe_load_all(manifest.read_text()))
    (container,) = pod["containers"]
    security = dict(container.get("securityContext", {}))
    sources = {one["name"]: node[one["hostPath"]["path"]] for one in pod["volumes"]}
    limit = _bytes(container["resources"]["limits"]["memory"])
    assert security.pop("runAsUser", 0) == 0 and security.pop("capabilities") == {"drop": ["ALL"]}
    read_only, escalates = security.pop("readOnlyRootFilesystem", False), security.pop("allowPrivilegeEscalation", True)
    assert not security and not pod.get("hostPID"), f"not known here: {security}"

    def edit(spec: dict[str, Any]) -> None:
        spec["root"]["readonly"] = read_only
        spec["mounts"] = [one for one in spec["mounts"] if one["destination"] in PSEUDO]
        for one in container["volumeMounts"]:
            options = [
                "rbind",
                PROPAGATION[one.get("mountPropagation", "None")],
                "ro" if one.get("readOnly") else "rw",
            ]
            source = str(sources[one["name"]])
            spec["mounts"].append(
                {"type": "bind", "source": source, "destination": one["mountPath"], "options": options}
            )
        spec["linux"]["resources"]["memory"] = {"limit": limit}
        spec["process"]["noNewPrivileges"] = not escalates
        spec["process"]["capabilities"] = {kind: [] for kind in spec["process"]["capabilities"]}

    return {
        "args": [*container.get("command", image.entrypoint), *container.get("args", image.cmd)],
        "env": image.env,
        "rootfs": image.rootfs,
        "edit": edit,
    }


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]i)", text)
    assert match, text
    return int(match[1]) * UNITS[match[2]]
