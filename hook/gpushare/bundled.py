"""Start a program of the bundle (start path): boot.c runs `main` in an interpreter with an empty environment.

argv: -c, descriptor of boot.c's original environment, path of the program, its arguments
"""

from __future__ import annotations

import gc
import signal
import sys


def main() -> None:
    fd, program = int(sys.argv[1]), sys.argv[2]
    sys.argv[:3] = [program]
    name = program.rpartition("/")[2]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the program handles it: no traceback
    if name != "gpushare":
        gc.disable()
    import os

    from .core import constants, installed

    os.set_inheritable(fd, False)
    constants.SHIM_DIR = installed.shim_dir(program)
    if name == "gpushare-hook":  # uses no environment variables
        from .programs import hook

        os._exit(hook.main())
    from .config import oci_runtime

    oci_runtime.ENVIRONMENT = f"/proc/self/fd/{fd}"
    if name == "gpushare-runtime":
        from .programs import runtime

        os._exit(runtime.main())
    os.environb.clear()
    os.environb.update(oci_runtime.environment())
    from .cli import main as cli

    sys.exit(cli())
