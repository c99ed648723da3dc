"""What a wheel has besides the modules: shim and launchers of one machine (run by hatchling, for `make packages`).

gpushare/shim/                      the library that stands in containers
bin/gpushare-hook, gpushare-runtime      the launchers, which start what is beside them:
bin/gpushare-runtime-cri            the second under another name: a wheel has no links
bin/gpushare-hook.py, gpushare-runtime.py   with the first line that whoever installs a wheel writes anew
"""

from __future__ import annotations

import os
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MACHINE = "GPUSHARE_WHEEL_MACHINE"
PROGRAMS = ("gpushare-hook", "gpushare-runtime")


class Compiled(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Raises RuntimeError for a wheel that would hold no limit."""
        if version == "editable":  # programs and shim of a source tree are those in build/
            return
        machine = os.environ.get(MACHINE)
        if not machine:
            raise RuntimeError("a wheel needs the compiled shim: `make packages` writes wheels to build/packages")
        shim, launchers = f"build/shim-release/{machine}", f"build/wheel/{machine}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux2014_{machine}"
        for name in ("libcuda.so", "libnvidia-ml.so"):
            build_data["force_include"][f"{shim}/{name}"] = f"gpushare/shim/{name}"
        for name in PROGRAMS:
            build_data["shared_scripts"][f"{launchers}/{name}"] = name
            build_data["shared_scripts"][f"packaging/wheel/{name}.py"] = f"{name}.py"
        build_data["shared_scripts"][f"{launchers}/gpushare-runtime-cri"] = "gpushare-runtime-cri"
