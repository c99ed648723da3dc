"""Attacks by config.json: a root, a directory or an identity that is none, a file that is no reasonable one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from . import rules
from .scene import Scene

Prepare = Callable[[Scene], None]


def put(path: str, value: Any) -> Prepare:
    """A field of config.json; `{host}` and `{root}` in a text are the sentinel directory and the root file system."""

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
    """root.path is "/". Without the mounts from this tree: where it is below /tmp, the spec's own tmpfs would hide it,
    and runc would refuse before we see anything."""
    scene.spec["root"]["path"] = "/"
    scene.spec["mounts"] = [mount for mount in scene.spec["mounts"] if mount["type"] != "bind"]


def linked_root(target: str) -> Prepare:
    """root.path is a link."""

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
    """Two `process` objects: Go merges them, and Python takes the last."""
    other = {**scene.spec["process"], "env": ["GPUSHARE_MEMORY=16Gi"]}
    scene.raw = lambda text: f'{{"process": {json.dumps(other)}, {text[1:]}'


def _hidden_rule(key: str) -> Prepare:
    """A device rule of a container that asks for nothing, in an object that Go merges into the other `linux`."""

    def prepare(scene: Scene) -> None:
        rules.allowing(rules.GPUS, asks=False)(scene)
        hidden = json.dumps(scene.spec["linux"])
        del scene.spec["linux"]["resources"]
        scene.raw = lambda text: f'{{"{key}": {hidden}, {text[1:]}'

    return prepare


rule_in_another_case, rule_in_a_second_object = _hidden_rule("Linux"), _hidden_rule("linux")


def other_case(scene: Scene) -> None:
    """Go's parser takes field names in any case, and the last one counts."""
    env = [line for line in scene.spec["process"]["env"] if not line.startswith("GPUSHARE_MEMORY=")]
    other = {**scene.spec["process"], "env": [*env, "GPUSHARE_MEMORY=16Gi"]}
    scene.raw = lambda text: text[:-1] + f', "Process": {json.dumps(other)}' + "}"


def directory_of_descriptors(number: int) -> Prepare:
    """A descriptor of the host's that leaked into the container's init would be its working directory."""
    return put("process.cwd", f"/proc/self/fd/{number}")
