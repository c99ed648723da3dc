"""Entry points of the programs in a wheel (see packaging/wheel.py).

The launchers that start `hook` and `runtime` keep a hook's environment from the interpreter, because an image can set
it.
"""

from __future__ import annotations

import os
import sys

from .core import constants, installed


def _prepare() -> None:
    constants.SHIM_DIR = installed.shim_dir(os.path.realpath(sys.argv[0]))


def cli() -> int:
    _prepare()
    from .cli import main

    return main()


def hook() -> int:
    _prepare()
    from .programs.hook import main

    return main()


def runtime() -> int:
    _prepare()
    from .programs.runtime import main

    return main()
