"""Run one command on a machine with a driver, for a test: the simulator's files replace a real driver's files.

    python3 -m tests.hardware.installed SIMHOST SCRATCH COMMAND...       SCRATCH: an empty directory

gpu-check takes it for hardware: it finds the files by their names and through the loader, and uses nothing else.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from tests.hardware.place import SIM_LIBDIR, STEMS, USR_LIB, own_namespace
from tests.shim.box import VERSION, make_devices, mount


def main(simhost: str, scratch: str, *command: str) -> NoReturn:
    libdir = f"{scratch}/lower/{SIM_LIBDIR}"
    os.makedirs(libdir)
    os.mkdir(f"{scratch}/dev")
    for stem in STEMS:
        name = f"{stem}.so.{VERSION}"
        with open(f"{simhost}/usr/lib/{SIM_LIBDIR}/{name}", "rb") as source, open(f"{libdir}/{name}", "xb") as target:
            target.write(source.read())
        os.symlink(name, f"{libdir}/{stem}.so.1")
    own_namespace()
    mount("overlay", USR_LIB, "overlay", 0, f"lowerdir={scratch}/lower:{USR_LIB}")
    make_devices(simhost, scratch)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
