"""Mutate JSON structurally: half of the time replace, remove, duplicate or move a value, so that inputs pass the
parser. The other half is libFuzzer's own mutation of bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, Union

Place = tuple[Any, Union[str, int]]  # (container, its key or index)

KEYS = (
    "annotations", "process", "env", "capabilities", "bounding", "root", "path", "mounts", "destination", "source",
    "type", "options", "hooks", "prestart", "createRuntime", "poststop", "args", "linux", "devices", "resources",
    "major", "minor", "allow", "access", "fileMode", "cgroupsPath", "id", "pid", "bundle", "bundlePath", "status",
    "gpushare.io/memory", "gpushare.io/devices", "gpushare.io/applied", "main.gpushare.io/compute",
    "io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType", "io.kubernetes.cri.container-name",
    "cdi.k8s.io/x", "gpushare.io/memory-request", "gpushare.io/memory-limit",
    "nvidia.com/container.main.gpu-memory.limit",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 195, 255, 1 << 31, 1 << 63, 10**30, 1.5, float("nan"), "", "/", "..", "a\0b",
    "\ud800", [], {}, [[]], [{}], "c", "b", "a", "rwm", "sandbox", "container", "CAP_SYS_ADMIN", "/dev/nvidia0",
    "/dev/nvidiactl", "/usr/lib/libcuda.so.535", "/usr/lib", "/lib/../etc", "/var/run/nvidia-container-devices/0",
    "bind", "rshared", "/usr/bin/nvidia-ctk", "/opt/bin/gpushare-hook", "GPUSHARE_MEMORY=1Gi", "GPUSHARE_COMPUTE=30%",
    "NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES=/var/run/nvidia-container-devices", "GPUSHARE_APPLIED=x",
    "NVIDIA_GPU_MEMORY_REQUEST=1024", "NVIDIA_GPU_MEMORY_LIMIT=2048", "GPUSHARE_MEMORY=1Gi..2Gi",
    "GPUSHARE_DEVICES=0", "NVIDIA_REQUIRE_CUDA=cuda>=12.0", "\u017f", "Gpu\u017fhare_Memory=1",
)  # fmt: skip


def _places(value: Any, found: list[Place]) -> list[Place]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        found.append((value, key))
        _places(item, found)
    return found


def _some(chance: random.Random, places: list[Place], words: Sequence[str]) -> Any:
    """A random value, or a copy of an existing one."""
    if words and chance.random() < 0.2:
        return chance.choice(words) + chance.choice(("", "=", "_0=")) + chance.choice(("1", "1024", "30%", "0", "all"))
    if places and chance.random() < 0.4:
        holder, key = chance.choice(places)
        return json.loads(json.dumps(holder[key]))
    return json.loads(json.dumps(chance.choice(VALUES)))


def _key(chance: random.Random, words: Sequence[str]) -> str:
    return chance.choice(words if words and chance.random() < 0.3 else KEYS)


def _change(chance: random.Random, whole: Any, words: Sequence[str]) -> Any:
    places = _places(whole, [])
    if not places or chance.random() < 0.1:
        if isinstance(whole, dict):
            whole[_key(chance, words)] = _some(chance, places, words)
        return whole
    holder, key = chance.choice(places)
    what = chance.randrange(5)
    inner = holder[key]
    if what == 0:
        del holder[key]
    elif what == 1 and isinstance(inner, dict):
        inner[_key(chance, words)] = _some(chance, places, words)
    elif what == 2 and isinstance(inner, list):
        inner.insert(chance.randrange(len(inner) + 1), _some(chance, places, words))
    elif what == 3 and isinstance(holder, dict):
        holder[_key(chance, words)] = holder.pop(key)
    else:
        holder[key] = _some(chance, places, words)
    return whole


def mutator(plain: Callable[[bytes, int], bytes], words: Sequence[str]) -> Callable[[bytes, int, int], bytes]:
    """A mutator for atheris; `plain` is its Mutate. `words` are also inserted as list members and keys."""

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if chance.random() < 0.5:
            return plain(data, most)
        try:
            value = json.loads(data)
            for _ in range(chance.randrange(1, 4)):
                value = _change(chance, value, words)
            ascii_only = chance.random() < 0.8
            changed = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
        except (ValueError, RecursionError):
            return plain(data, most)
        return changed if len(changed) <= most else plain(data, most)

    return mutate
