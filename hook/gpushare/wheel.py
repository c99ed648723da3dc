"""The programs as a wheel installs them: the shim is beside the modules (see packaging/wheel.py).

The launchers in front of `hook` and `runtime` see to it that a hook's environment, which can be an image's, is not read
by the interpreter.
"""

from __future__ import annotations

import os

from . import names

_SHIM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "shim")


def _prepare() -> None:
    if os.path.isdir(_SHIM):  # not in a source tree
        names.SHIM_DIR = _SHIM


def cli() -> int:
    _prepare()
    from .cli import main

    return main()


def hook() -> int:
    _prepare()
    from .hook import main

    return main()


def runtime() -> int:
    _prepare()
    from .runtime import main

    return main()
