"""The files into which crun writes what hooks print (start path).

    without(spec)             -> Spec    a config.json that names none of them; `spec` itself when it has none
    silence_for(annotations)  -> None    prints nothing from here on where they name a file
    read_state(data)          -> State   the same, for the text of an OCI state

The annotations run.oci.hooks.stdout and run.oci.hooks.stderr hold any path of the host. crun opens it as the host's
root before it runs a hook (open_hooks_output in its container.c: O_CREAT | O_APPEND, mode 0700). podman copies the
annotations of an image into config.json, so an image can choose the file, and our messages repeat what the image asks
for. gpushare-runtime removes both. A hook alone comes too late for that, and prints nothing.

The one value that may stay is crun's own error output, /dev/stderr, which gpushare-runtime sets itself: crun opens it
in its own process and on the host, so it is where crun writes its errors anyway.
"""

from __future__ import annotations

import os
from typing import Any

from ..core import constants
from . import oci

OWN_STDERR = "/dev/stderr"
_MAY_NAME_A_FILE = (*(key.encode() for key in constants.HOOK_OUTPUT_ANNOTATIONS), b"\\")  # or spell it with an escape


def without(spec: dict[str, Any]) -> dict[str, Any]:
    """Never changes its argument."""
    annotations = oci.section(spec, "annotations")
    if annotations.keys().isdisjoint(constants.HOOK_OUTPUT_ANNOTATIONS):
        return spec
    kept = {key: value for key, value in annotations.items() if key not in constants.HOOK_OUTPUT_ANNOTATIONS}
    return {**spec, "annotations": kept}


def is_redirected(annotations: object) -> bool:
    """Whether they name a file other than crun's own error output."""
    if not isinstance(annotations, dict):
        return False
    stdout, stderr = constants.HOOK_OUTPUT_ANNOTATIONS
    return stdout in annotations or annotations.get(stderr, OWN_STDERR) != OWN_STDERR


def silence_for(annotations: object) -> None:
    """Also what this process starts prints nothing then."""
    if is_redirected(annotations):
        _silence()


def read_state(data: bytes) -> oci.State:
    """oci.read_state, silent from here on where the state names a file, or cannot be read and may. Raises as that."""
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
