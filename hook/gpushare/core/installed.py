"""Find the shim of this installation (start path), for the snapshot and the ordinary program alike; tell gpushare's own
programs from others."""

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


def is_gpushare(path: str) -> bool:
    """Whether a program is gpushare-runtime, perhaps under another name: as low-level runtime it would execute itself
    for ever."""
    return os.path.basename(os.path.realpath(path)).startswith("gpushare")
