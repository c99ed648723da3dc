"""How a program of the bundle starts (start path): boot.c runs `main` in an interpreter with an empty environment.

argv: -c, descriptor of the environment that boot.c was given, path of the program, its words
"""

from __future__ import annotations

import gc
import os
import sys

from . import names, packed


def main() -> None:
    fd, program = int(sys.argv[1]), sys.argv[2]
    sys.argv[:3] = [program]
    os.set_inheritable(fd, False)
    folder, name = os.path.split(program)
    names.SHIM_DIR = os.path.dirname(folder) + "/shim"
    if name in packed.PROGRAMS:
        gc.disable()
        packed.load(f"{os.path.dirname(os.path.dirname(__file__))}/{name}.pack")
    if name == "gpushare-hook":  # takes nothing from the environment
        from . import hook

        os._exit(hook.main())
    from . import lowlevel

    lowlevel.ENVIRONMENT = f"/proc/self/fd/{fd}"
    if name == "gpushare-runtime":
        from . import runtime

        os._exit(runtime.main())
    os.environb.clear()
    os.environb.update(lowlevel.environment())
    from .cli import main as cli

    sys.exit(cli())
