"""The container of a DaemonSet for runc, made from the manifest and the image's build context as an engine would.

    image = unpack(context, directory)              build the Dockerfile: a root, and the command that it starts
    arguments(manifest, image, {path: directory})   -> of runc.Container; the directories replace the node's

An image has only the files that it copies: no shell, no /tmp, no /etc. An unknown instruction or field is an error, so
no part of a manifest or Dockerfile is ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from .rootfs import run

PROPAGATION = {"None": "rprivate", "HostToContainer": "rslave", "Bidirectional": "rshared"}
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
# Numbers from capability.h
CAPABILITIES = (
    "CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE "
    "NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN "
    "SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE "
    "MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE"
).split()
# From the config.json of an ordinary test container: an empty image has no /tmp and no /run
PSEUDO = ("/proc", "/dev", "/dev/pts", "/dev/shm", "/sys")


class Image(NamedTuple):
    rootfs: Path
    entrypoint: list[str]
    cmd: list[str]
    env: dict[str, str]


def unpack(context: Path, directory: Path) -> Image:
    """Do what docker build does, for the few instructions in use."""
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


def arguments(manifest: Path, image: Image, node: dict[str, Path], args: Sequence[str] = ()) -> dict[str, Any]:
    """`node`: path of each hostPath -> the directory in its place. `args` replaces the manifest's."""
    (pod,) = (one["spec"]["template"]["spec"] for one in yaml.safe_load_all(manifest.read_text()))
    (container,) = pod["containers"]
    security: dict[str, Any] = {
        "privileged": False,
        "runAsUser": 0,
        "allowPrivilegeEscalation": True,
        "readOnlyRootFilesystem": False,
        "seLinuxOptions": {},  # no effect on a host without SELinux
    }
    security |= {"capabilities": {}} | container.get("securityContext", {})
    assert len(security) == 6 and security["runAsUser"] == 0, f"not known here: {security}"
    assert security["privileged"] or security["capabilities"] == {"drop": ["ALL"]}
    kept = _all_capabilities() if security["privileged"] else []
    mounted = {one["name"] for one in container["volumeMounts"]}
    sources = {one["name"]: node[one["hostPath"]["path"]] for one in pod["volumes"] if one["name"] in mounted}

    def edit(spec: dict[str, Any]) -> None:
        linux, process = spec["linux"], spec["process"]
        spec["root"]["readonly"] = security["readOnlyRootFilesystem"]
        spec["mounts"] = [one for one in spec["mounts"] if one["destination"] in PSEUDO]
        for one in container["volumeMounts"]:
            options = [PROPAGATION[one.get("mountPropagation", "None")], "ro" if one.get("readOnly") else "rw"]
            bind = {"type": "bind", "source": str(sources[one["name"]]), "destination": one["mountPath"]}
            spec["mounts"].append({**bind, "options": ["rbind", *options]})
            if "rshared" in options:
                linux["rootfsPropagation"] = "rshared"
        linux["resources"]["memory"] = {"limit": _bytes(container["resources"]["limits"]["memory"])}
        process["noNewPrivileges"] = not security["allowPrivilegeEscalation"]
        process["capabilities"] = {kind: kept for kind in process["capabilities"]}
        if security["privileged"]:
            linux["resources"]["devices"] = [{"allow": True, "access": "rwm"}]
            linux["maskedPaths"] = linux["readonlyPaths"] = []
        if pod.get("hostPID"):
            linux["namespaces"] = [one for one in linux["namespaces"] if one["type"] != "pid"]

    return {
        "args": [*container.get("command", image.entrypoint), *(args or container.get("args", image.cmd))],
        "env": {**image.env, **{one["name"]: _value(one) for one in container.get("env", [])}},
        "rootfs": image.rootfs,
        "edit": edit,
    }


def _value(variable: dict[str, Any]) -> str:
    """A variable's value; of a field of the pod, the field's name."""
    value: str = variable["value"] if "value" in variable else variable["valueFrom"]["fieldRef"]["fieldPath"]
    return value


def _all_capabilities() -> list[str]:
    """All capabilities of this process, which a privileged container of an engine gets."""
    (bounding,) = re.findall(r"CapBnd:\t(\w+)", Path("/proc/self/status").read_text())
    return [f"CAP_{name}" for number, name in enumerate(CAPABILITIES) if int(bounding, 16) >> number & 1]


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]i)", text)
    assert match, text
    return int(match[1]) * UNITS[match[2]]
