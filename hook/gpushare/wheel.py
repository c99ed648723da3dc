"""The programs as a wheel installs them (see packaging/wheel.py).

The launchers in front of `hook` and `runtime` see to it that a hook's environment, which can be an image's, is not read
by the interpreter.
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
