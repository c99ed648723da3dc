"""Find the shim of this installation (start path), for the snapshot and the ordinary program alike."""

from __future__ import annotations

import os

from . import constants


def shim_dir(program: str) -> str:
    """The directory of the shim, for `constants.SHIM_DIR`. `program` is the absolute path of the Python program."""
    folder = os.path.dirname(os.path.normpath(program))
    above = os.path.dirname(folder)
    if os.access(f"{folder}/_internal", os.F_OK):  # the bundle: packaging/gpushare.spec
        return f"{above}/shim"
    wheel = f"{above}/libexec/gpushare/shim"  # packaging/wheel.py
    return wheel if os.access(wheel, os.F_OK) else constants.SHIM_DIR
