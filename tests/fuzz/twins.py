"""Input that both the launcher's C and Python parse: C may pass it to Python, but never parses it differently."""

from __future__ import annotations

import ctypes
import json
from typing import Any, Optional

from gpushare.core import constants
from gpushare.core.errors import GpushareError
from gpushare.programs import commandline
from gpushare.request import hookoutput, oci, request
from gpushare.request.dialects import cdi_devices

from tests.support.host import BUILD

PATH_MAX = 4096


class _Call(ctypes.Structure):
    """struct call of launcher.h."""

    _fields_ = [
        ("config", ctypes.c_char_p),
        ("state_dir", ctypes.c_char_p),
        ("rest", ctypes.POINTER(ctypes.c_char_p)),
        ("command", ctypes.c_char_p),
        ("id", ctypes.c_char_p),
        ("bundle", ctypes.c_char_p),
        ("config_name", ctypes.c_char_p),
        ("unknown", ctypes.c_bool),
        ("cri", ctypes.c_bool),
    ]


class _State(ctypes.Structure):
    """struct state of launcher.h."""

    _fields_ = [
        ("bundle", ctypes.c_char * PATH_MAX),
        ("redirects", ctypes.c_bool),
    ]


_launcher = ctypes.CDLL(str(BUILD / "fuzz" / "liblauncher.so"))
_launcher.scan_text_may_ask.restype = ctypes.c_bool
_launcher.scan_text_may_ask.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_bool]
_launcher.state_read.restype = ctypes.c_bool


def _text(value: Optional[bytes], default: str) -> str:
    return value.decode("utf-8", "surrogateescape") if value else default


def command_line(data: bytes) -> None:
    """Arguments, each ended by a NUL."""
    raw = data.split(b"\0")[:-1][:64]
    call = _Call()
    line = (ctypes.c_char_p * (len(raw) + 1))(*raw, None)
    _launcher.read_line(line, ctypes.byref(call))
    words = [word.decode("utf-8", "surrogateescape") for word in raw]
    seen = commandline.parse(words)
    rest: list[str] = []
    while call.rest[len(rest)] is not None:
        rest.append(call.rest[len(rest)].decode("utf-8", "surrogateescape"))
    assert tuple(rest) == seen.rest
    assert _text(call.config, "") == (seen.config or constants.CONFIG_PATH)
    assert _text(call.state_dir, "") == (seen.state_dir or constants.STATE_DIR)
    assert call.cri == seen.cri
    assert call.unknown or not seen.unknown, seen.unknown
    if call.unknown:
        return
    assert _text(call.command, "") == seen.command
    if seen.command in commandline.HANDLED:
        assert _text(call.id, "") == seen.container_id
    if seen.command in commandline.STARTING:
        assert _text(call.bundle, ".") == seen.bundle
        assert _text(call.config_name, "config.json") == seen.config_name


def _allows_in_another_case(value: Any) -> bool:
    if isinstance(value, dict):
        return any(
            (key != "allow" and key.lower() == "allow") or _allows_in_another_case(below)
            for key, below in value.items()
        )
    return isinstance(value, list) and any(map(_allows_in_another_case, value))


def words_in_config(data: bytes) -> None:
    """A config.json with a request, or with access to a GPU, must contain a trigger or such a rule in its text."""
    for cri in (False, True):
        try:
            spec = json.loads(data.decode())
            if _allows_in_another_case(spec):  # the runtime obeys it, and Python refuses it
                text = ctypes.create_string_buffer(data, len(data))
                assert _launcher.scan_text_may_ask(text, ctypes.c_size_t(len(data)), cri)
            bundle = oci.bundle_of(oci.State("c", 1, "", "/b", {}), spec, cri)
            asks = request.mentions(bundle) or cdi_devices.rules_reach(spec) or hookoutput.without(spec) is not spec
            device = bundle.injected
        except (ValueError, RecursionError, AttributeError, GpushareError):
            return  # the low-level runtime refuses it too
        assert cri or constants.CRI_ANNOTATIONS.isdisjoint(bundle.annotations)
        assert not device or asks, "a device counts for every container"
        text = ctypes.create_string_buffer(data, len(data))  # the launcher modifies it
        assert not asks or _launcher.scan_text_may_ask(text, ctypes.c_size_t(len(data)), cri)


def oci_state(data: bytes) -> None:
    """The state, where both can parse it."""
    found = _State()
    if not _launcher.state_read(data, ctypes.c_size_t(len(data)), ctypes.byref(found)):
        return
    try:
        seen = oci.read_state(data)
    except GpushareError:
        return
    assert found.bundle.decode("utf-8", "surrogateescape") == seen.bundle
    assert found.redirects or not hookoutput.is_redirected(seen.annotations)
