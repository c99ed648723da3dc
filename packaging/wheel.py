"""Add the shim and the programs for one CPU architecture to a wheel. hatchling runs this for `make packages`.

Files below the prefix, which is a virtual environment's directory or /usr/local:

bin/gpushare-hook, gpushare-runtime   the launchers
bin/gpushare-runtime-cri              a copy of gpushare-runtime, because a wheel cannot contain links
libexec/gpushare/snapshot             the program that the launchers start (docs/internals/snapshot.md)
bin/gpushare-hook.py, gpushare-runtime.py   the programs that they start without a snapshot; pip sets their Python
libexec/gpushare/shim/                the library for containers
libexec/gpushare/licenses/            licences of code in the static programs
"""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MACHINE = "GPUSHARE_WHEEL_MACHINE"
HOME = "libexec/gpushare"  # the same path as in installed.py and the launchers
PROGRAMS = ("gpushare-hook", "gpushare-runtime")


class Compiled(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files. Raises RuntimeError without a compiled shim: such a wheel could not enforce limits."""
        if version == "editable":  # a source tree uses the programs and shim in build/
            return
        machine = os.environ.get(MACHINE)
        if not machine:
            raise RuntimeError("a wheel needs the compiled shim: `make packages` writes wheels to build/packages")
        shim, launchers = f"build/shim-release/{machine}", f"build/wheel/{machine}"
        snapshot, licences = "build/libexec/snapshot", f"{launchers}/licenses"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux2014_{machine}"
        for name in ("libcuda.so", "libnvidia-ml.so"):
            build_data["shared_data"][f"{shim}/{name}"] = f"{HOME}/shim/{name}"
        linked = []
        if machine == os.uname().machine and os.path.exists(snapshot):
            build_data["shared_data"][snapshot] = f"{HOME}/snapshot"
            linked = ["build/snapshot/log"]
        shutil.rmtree(licences, ignore_errors=True)
        subprocess.run(["packaging/licences", licences, *linked], check=True)
        build_data["shared_data"][licences] = f"{HOME}/licenses"
        for name in PROGRAMS:
            build_data["shared_scripts"][f"{launchers}/{name}"] = name
            build_data["shared_scripts"][f"packaging/wheel/{name}.py"] = f"{name}.py"
        build_data["shared_scripts"][f"{launchers}/gpushare-runtime-cri"] = "gpushare-runtime-cri"
