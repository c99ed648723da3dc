"""Prevent that crun writes the output of hooks to a host file (start path).

    without(spec)             -> Spec    a config.json without the annotations; `spec` itself if it has none
    silence_for(annotations)  -> None    print nothing from here on if they name a file
    read_state(data)          -> State   the same, for the text of an OCI state

The annotations run.oci.hooks.stdout and run.oci.hooks.stderr name any path of the host. crun opens it as the host's
root before it runs a hook (open_hooks_output in its container.c: O_CREAT | O_APPEND, mode 0700). podman copies
annotations of an image into config.json. So an image can choose the file, and our messages quote values of the image.
gpushare-runtime removes both annotations. A hook runs too late for that, so it prints nothing.

Only crun's own error output, /dev/stderr, may stay, which gpushare-runtime sets itself: crun opens it in its own
process on the host, where it writes its errors anyway."""

from __future__ import annotations

import os
from typing import Any

from ..core import constants
from . import oci, speckeys

OWN_STDERR = "/dev/stderr"
_MAY_NAME_A_FILE = (*(key.encode() for key in constants.HOOK_OUTPUT_ANNOTATIONS), b"\\")  # or the name has an escape


def without(spec: dict[str, Any]) -> dict[str, Any]:
    """Return `spec` without the annotations. The argument never changes."""
    annotations = speckeys.section(spec, "annotations")
    if annotations.keys().isdisjoint(constants.HOOK_OUTPUT_ANNOTATIONS):
        return spec
    kept = {key: value for key, value in annotations.items() if key not in constants.HOOK_OUTPUT_ANNOTATIONS}
    return {**spec, "annotations": kept}


def is_redirected(annotations: object) -> bool:
    """Return whether the annotations name a file other than crun's own error output."""
    if not isinstance(annotations, dict):
        return False
    stdout, stderr = constants.HOOK_OUTPUT_ANNOTATIONS
    return stdout in annotations or annotations.get(stderr, OWN_STDERR) != OWN_STDERR


def silence_for(annotations: object) -> None:
    """Redirect this process and its children to /dev/null if the annotations name a file."""
    if is_redirected(annotations):
        _silence()


def read_state(data: bytes) -> oci.State:
    """Do oci.read_state, and be silent if the state names a file, or may name one and cannot be parsed."""
    try:
        state = oci.read_state(data)
    except BaseException:
        if len(data) > oci.MAX_STATE_BYTES or any(part in data for part in _MAY_NAME_A_FILE):
            _silence()
        raise
    silence_for(state.annotations)
    return state


def _silence() -> None:
    try:
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        os.dup2(null, 1)
        os.dup2(null, 2)
    except OSError:
        os._exit(1)
