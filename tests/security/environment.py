"""Attacks by the image's environment: variables of loaders, interpreters and packers, and variables that raise a
limit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support import rootfs
from tests.support.host import TREE

from .scene import Scene

Prepare = Callable[[Scene], None]
SOURCE = TREE / "tests" / "integration" / "programs" / "evil.c"
LIBRARIES = ("libm.so.6", "libz.so.1", "libexpat.so.1", "libffi.so.8", "libpthread.so.0", "libdl.so.2", "libutil.so.1")
MODULES = ("json", "os", "encodings", "sitecustomize", "usercustomize", "gpushare", "ctypes", "site", "struct")
PROGRAMS = ("runc", "crun", "ldconfig", "mount", "python3", "sh", "gpushare-hook")


def _traps(scene: Scene) -> Path:
    """Make a directory at one path on the host and (read-only) in the container. It has a library, modules and programs
    that each write a line into the host's sentinel directory when the host uses them."""
    trap = scene.directory / "trap"
    for name in ("lib", "modules", "bin", "tmp"):
        (trap / name).mkdir(parents=True)
    log = scene.host / "caught"
    rootfs.run("gcc", "-shared", "-fPIC", "-w", f'-DEVIL_LOG="{log}"', "-o", trap / "evil.so", SOURCE)
    for name in LIBRARIES:
        (trap / "lib" / name).symlink_to("../evil.so")
    (trap / "lib" / "gconv-modules").write_text(
        "module INTERNAL ANSI_X3.4-1968// ../evil 1\nmodule UTF-8// X// evil 1\n"
    )
    (trap / "lib" / "evil.so").symlink_to("../evil.so")
    for name in MODULES:
        (trap / "modules" / f"{name}.py").write_text(f"open({str(log)!r}, 'a').write('module {name}\\n')\n")
    for name in PROGRAMS:
        (trap / "bin" / name).write_text(f"#!/bin/bash\necho {name} >>{log}\n")
        (trap / "bin" / name).chmod(0o755)
    return trap


def obeyed(*lines: str) -> Prepare:
    """Set the image's variables; `{trap}` in them is the directory of traps. The hook gets them too, as from an engine
    that passes a container's environment to its hooks."""

    def prepare(scene: Scene) -> None:
        trap = _traps(scene)
        scene.mount(trap, str(trap), "rbind", "ro")
        made = [line.format(trap=trap) for line in lines]
        # The traps are for host processes. In the container the engine starts a foreign program.
        scene.set_env(*made)
        for entries in scene.spec["hooks"].values():
            for entry in entries:
                entry["env"] = [*entry.get("env", []), *made]

    return prepare


def variables(*lines: str) -> Prepare:
    return lambda scene: scene.set_env(*lines)


def variables_instead(*lines: str) -> Prepare:
    """Set variables instead of the request of the engine's user."""

    def prepare(scene: Scene) -> None:
        env = scene.spec["process"]["env"]
        scene.spec["process"]["env"] = [line for line in env if not line.startswith("GPUSHARE_MEMORY=")]
        scene.set_env(*lines)

    return prepare


def annotation(key: str, value: str) -> Prepare:
    def prepare(scene: Scene) -> None:
        scene.spec["annotations"][key] = value

    return prepare


def several_annotations(said: dict[str, str]) -> Prepare:
    return lambda scene: scene.spec["annotations"].update(said)
