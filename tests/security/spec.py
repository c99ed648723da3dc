"""Attacks by config.json: an invalid root, directory or identity, and unreasonable files."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from typing import Any

from . import rules
from .scene import Scene

Prepare = Callable[[Scene], None]


def put(path: str, value: Any) -> Prepare:
    """Set a field of config.json; `{host}` and `{root}` in a text are the sentinel directory and the root file
    system."""

    def prepare(scene: Scene) -> None:
        *above, last = path.split(".")
        here: Any = scene.spec
        for step in above:
            here = here[int(step)] if isinstance(here, list) else here.setdefault(step, {})
        text = value.format(host=scene.host, root=scene.root) if isinstance(value, str) else value
        here[last] = text

    return prepare


def drop(path: str) -> Prepare:
    def prepare(scene: Scene) -> None:
        del scene.spec[path]

    return prepare


def relative_root(scene: Scene) -> None:
    """A relative root.path is relative to the bundle, whatever the caller's directory."""
    scene.spec["root"]["path"] = os.path.relpath(scene.root, scene.one.bundle)


def dots_root(scene: Scene) -> None:
    scene.spec["root"]["path"] = "../" * 20 + str(scene.root).lstrip("/")


def root_of_the_host(scene: Scene) -> None:
    """Set root.path to "/". The mounts from this tree are removed: below /tmp the spec's own tmpfs would hide it, and
    runc would refuse before gpushare runs."""
    scene.spec["root"]["path"] = "/"
    scene.spec["mounts"] = [mount for mount in scene.spec["mounts"] if mount["type"] != "bind"]


def linked_root(target: str) -> Prepare:
    """Make root.path a link."""

    def prepare(scene: Scene) -> None:
        os.symlink(target.format(root=scene.root, host=scene.host), scene.one.bundle / "link")
        scene.spec["root"]["path"] = "link"

    return prepare


def huge(scene: Scene) -> None:
    scene.raw = lambda text: text[:-1] + ', "x": "' + "y" * (100 << 20) + '"}'


def nested(depth: int) -> Prepare:
    def prepare(scene: Scene) -> None:
        scene.raw = lambda text: text[:-1] + ', "x": ' + "[" * depth + "]" * depth + "}"

    return prepare


def duplicate_objects(scene: Scene) -> None:
    """Write two `process` objects: Go merges them, and Python takes the last."""
    other = {**scene.spec["process"], "env": ["GPUSHARE_MEMORY=16Gi"]}
    scene.raw = lambda text: f'{{"process": {json.dumps(other)}, {text[1:]}'


def _hidden_rule(key: str) -> Prepare:
    """Add a device rule without a request, in an object that Go merges into the other `linux`."""

    def prepare(scene: Scene) -> None:
        rules.allowing(rules.GPUS, asks=False)(scene)
        hidden = json.dumps(scene.spec["linux"])
        del scene.spec["linux"]["resources"]
        scene.raw = lambda text: f'{{"{key}": {hidden}, {text[1:]}'

    return prepare


rule_in_another_case, rule_in_a_second_object = _hidden_rule("Linux"), _hidden_rule("linux")


def other_case(scene: Scene) -> None:
    """Write field names in another case: Go's parser accepts any case, and the last one counts."""
    env = [line for line in scene.spec["process"]["env"] if not line.startswith("GPUSHARE_MEMORY=")]
    other = {**scene.spec["process"], "env": [*env, "GPUSHARE_MEMORY=16Gi"]}
    scene.raw = lambda text: text[:-1] + f', "Process": {json.dumps(other)}' + "}"


def directory_of_descriptors(number: int) -> Prepare:
    """Set the working directory to a host descriptor that leaked into the container's init."""
    return put("process.cwd", f"/proc/self/fd/{number}")


TINY = {"LOCKS": 0, "MEMLOCK": 0, "MSGQUEUE": 0, "NPROC": 1, "SIGPENDING": 0, "RTPRIO": 0, "CORE": 0}
_NO_LIMIT = 2**64 - 1


def tiny_limits(scene: Scene) -> None:
    """Resource limits of the process that most programs never see. The usage file is longer than the file size, which
    crun also sets for hooks."""
    limits = [{"type": f"RLIMIT_{name}", "soft": value, "hard": value} for name, value in TINY.items()]
    limits.append({"type": "RLIMIT_FSIZE", "soft": 1 << 16, "hard": _NO_LIMIT})
    scene.spec["process"]["rlimits"] = [*limits, {"type": "RLIMIT_STACK", "soft": _NO_LIMIT, "hard": _NO_LIMIT}]


def without_calls(*names: str) -> Prepare:
    """A seccomp profile in which these system calls fail."""

    def prepare(scene: Scene) -> None:
        rule = {"names": list(names), "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM}
        scene.spec["linux"]["seccomp"] = {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rule]}

    return prepare
