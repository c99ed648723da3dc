"""gpushare nri: framing with hostile bytes, responses to the engine, and the hook's test of the plugin's lock."""

from __future__ import annotations

import contextlib
import os
import random
import re
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpushare.cli import main
from gpushare.core.errors import KernelError, RequestError
from gpushare.engines.base import Settings as HookSettings
from gpushare.integrations.nri import plugin, protocol
from gpushare.integrations.nri.wire import PLUGIN, REQUEST, RESPONSE, RUNTIME, Message, ProtocolError, Reader, encode
from gpushare.programs import hook
from gpushare.state import agentlock

from tests.support.nriengine import NriEngine, Refused

HOOK = "/usr/bin/env"  # a program that exists
SETTINGS = plugin.Settings("/run/nri.sock", "10", HookSettings("/usr/bin/gpushare-runtime", HOOK, cri=True))
CALLS = [
    Message(PLUGIN, 1, REQUEST, b"a" * 5000),
    Message(RUNTIME, 1, RESPONSE, b""),
    Message(PLUGIN, 3, REQUEST, b"b"),
]


def answer(method: str, request: Any, name: str, settings: plugin.Settings = SETTINGS, report: Any = len) -> Any:
    text = plugin.answer(settings, report, method, request.SerializeToString())
    return protocol.message(name).FromString(text)


def create(
    pod: dict[str, str],
    container: dict[str, str],
    *hooks: str,
    stage: str = "prestart",
    namespace: str = "",
    ignore_namespace: str = "",
) -> Any:
    request = protocol.message("CreateContainerRequest")()
    request.pod.namespace = namespace
    request.pod.annotations.update(pod)
    request.container.annotations.update(container)
    for path in hooks:
        getattr(request.container.hooks, stage).add(path=path)
    settings = SETTINGS._replace(ignore_namespace=ignore_namespace)
    return answer("CreateContainer", request, "CreateContainerResponse", settings).adjust


# Framing


@pytest.mark.parametrize("size", [1, 3, 7, 4096, 1 << 20])
def test_messages_are_read_in_pieces_of_any_size(size: int) -> None:
    data = b"".join(map(encode, CALLS))
    reader = Reader()
    found = [one for at in range(0, len(data), size) for one in reader.feed(data[at : at + size])]
    assert found == CALLS


def test_sent_frames_fit_the_engine_s_smallest_buffer() -> None:
    data, sizes = encode(CALLS[0]), []
    while data:
        size = int.from_bytes(data[4:8], "big")
        sizes.append(size)
        data = data[8 + size :]
    assert sizes == [4096, 5010 - 4096]


def test_frames_of_unknown_connections_are_skipped() -> None:
    assert Reader().feed(b"\0\0\0\x09\0\0\0\x02xx" + encode(CALLS[2])) == [CALLS[2]]


@pytest.mark.parametrize(
    "data",
    [
        b"\0\0\0\x01\xff\xff\xff\xff",  # a frame of 4 GiB
        b"\0\0\0\x01\0\0\0\x0a" + b"\x00\x40\x00\x01" + b"\0\0\0\x01\x01\0",  # a message above 4 MiB
        encode(Message(PLUGIN, 1, 3, b"")),  # a stream's data
        encode(Message(PLUGIN, 1, RESPONSE, b"")),  # of a call that the plugin did not make there
        encode(Message(RUNTIME, 1, REQUEST, b"")),
        b"\0\0\0\x01\0\0\0\x0a" + b"\0\0\0\0" + b"\0\0\0\x01\x01\x02",  # the start of a stream
    ],
)
def test_hostile_frames_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="the engine sent a"):
        Reader().feed(data)


def test_random_bytes_raise_nothing_else() -> None:
    """2000 mutated streams, each to the end: every one is parsed or refused, by framing and messages."""
    chance = random.Random(23)
    request = protocol.message("Request")(
        service=protocol.PLUGIN_SERVICE, method="CreateContainer", payload=b"\x0a\x00"
    )
    good = encode(Message(PLUGIN, 1, REQUEST, request.SerializeToString())) * 3
    refused = 0
    for _ in range(2000):
        data = bytearray(good)
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            for message in Reader().feed(bytes(data)):
                call = protocol.parse("Request", message.payload)
                plugin.answer(SETTINGS, lambda _: None, call.method, call.payload)
        except ProtocolError:
            refused += 1
    assert refused > 100


# Responses


def test_hooks_are_added_with_the_lock() -> None:
    hooks = create({}, {}).hooks
    (prestart,), (poststop,) = hooks.prestart, hooks.poststop
    assert list(prestart.args) == ["gpushare-hook", "--nri", "/run/gpushare/nri", "--cri", "prestart"]
    assert (prestart.path, poststop.args[-1], prestart.timeout.value) == (HOOK, "poststop", 30)
    assert hook.parse(prestart.args[1:]).nri == SETTINGS.lock


def test_only_requests_among_the_pod_s_annotations_are_passed() -> None:
    pod = {
        "gpushare.io/memory": "4Gi",
        "main.gpushare.io/memory": "1Gi",
        "gpu-fraction": "0.5",
        "nvidia.com/container.a.gpu-memory.limit": "2Gi",
        "x/y/main.gpushare.io/memory": "no",
        "io.kubernetes.cri.container-name": "forged",
        "example.org/x": "no",
        "gpushare.io/compute": "the pod's",
    }
    passed = create(pod, {"gpushare.io/compute": "30%"}).annotations
    assert set(passed) == set(list(pod)[:4])


def test_missing_program_is_added_to_no_container(tmp_path: Path) -> None:
    """Otherwise no container of the node would start, also not the installer that brings the program back."""
    settings, lines = SETTINGS._replace(hook=SETTINGS.hook._replace(hook=str(tmp_path / "hook"))), list[str]()
    request = protocol.message("CreateContainerRequest")()
    request.pod.annotations["gpushare.io/memory"] = "4Gi"

    def created() -> Any:
        return answer("CreateContainer", request, "CreateContainerResponse", settings, lines.append)

    assert not created().ByteSize()
    assert lines == [f'"{tmp_path}/hook" does not exist, so a container starts without gpushare\'s hook']
    (tmp_path / "hook").touch(0o755)
    assert created().adjust.hooks.prestart and len(lines) == 1


@pytest.mark.parametrize(
    ("value", "namespace", "named", "ignored"),
    [
        ("true", "gpushare", "gpushare", True),
        ("false", "gpushare", "gpushare", False),
        ("true", "tenant", "gpushare", False),
        ("true", "gpushare", "", False),
        ("true", "", "", False),
    ],
)
def test_pod_can_ask_for_no_hook(value: str, namespace: str, named: str, ignored: bool) -> None:
    """The installer's pod does. A user's pod must not escape the hook."""
    made = create({plugin.IGNORED: value}, {}, namespace=namespace, ignore_namespace=named)
    assert bool(made.hooks.prestart) is not ignored


@pytest.mark.parametrize(
    ("content", "held", "registered"),
    [("registered cri-o\n", True, True), ("", True, False), ("registered", False, False)],
)
def test_check_finds_a_plugin_that_an_engine_has_accepted(
    tmp_path: Path, content: str, held: bool, registered: bool
) -> None:
    lock = agentlock.take(str(tmp_path), plugin.LOCK)
    (tmp_path / plugin.LOCK).write_text(content)
    if not held:
        os.close(lock)
    done = main(["--state", str(tmp_path), "nri", "--check"])
    assert plugin.is_registered(str(tmp_path)) is registered and done == (0 if registered else 1)
    if held:
        os.close(lock)


@pytest.mark.parametrize("place", ["state", "programs"])
def test_plugin_ends_when_a_directory_of_its_pod_was_deleted(tmp_path: Path, place: str) -> None:
    """A removal and the next installation replace them on the node; the pod keeps the deleted ones."""
    folders = {name: tmp_path / name for name in ("state", "programs")}
    for path in folders.values():
        path.mkdir()
    with contextlib.ExitStack() as stack:
        opened = {name: os.open(path, os.O_RDONLY) for name, path in folders.items()}
        for file in opened.values():
            stack.callback(os.close, file)
        state, programs = (f"/proc/self/fd/{opened[name]}" for name in ("state", "programs"))
        settings = SETTINGS._replace(socket=str(tmp_path / "none"))
        settings = settings._replace(hook=settings.hook._replace(state_dir=state, hook=f"{programs}/current/bin/hook"))
        plugin.check_places(settings.hook)
        lock = plugin.Lock(state)
        stack.callback(os.close, lock._fd)
        (folders["state"] / "nri").unlink()
        folders[place].rmdir()
        assert main(["--state", state, "nri", "--check"]) == 1
        ours, engine = map(stack.enter_context, socket.socketpair())
        engine.sendall(b"\0")  # wakes the plugin
        end, _ = map(stack.enter_context, socket.socketpair())
        deleted = state if place == "state" else programs
        with pytest.raises(KernelError, match=f'"{deleted}" was deleted'):
            plugin.Connection(ours, settings, len, lock).serve(end.fileno())


@pytest.mark.parametrize("stage", ["prestart", "create_runtime"])
def test_configured_engine_gets_no_second_hook(stage: str) -> None:
    """CRI-O moves hooks of the stage prestart in its hooks_dir to createRuntime."""
    assert not create({"gpushare.io/memory": "4Gi"}, {}, HOOK, stage=stage).ByteSize()
    assert create({}, {}, "/opt/other", stage=stage).hooks.prestart


def test_plugin_subscribes_to_creates_only() -> None:
    assert answer("Configure", protocol.message("ConfigureRequest")(), "ConfigureResponse").events == 8


@pytest.mark.parametrize("more", [True, False])
def test_split_synchronisation_is_continued(more: bool) -> None:
    request = protocol.message("SynchronizeRequest")(more=more)
    assert answer("Synchronize", request, "SynchronizeResponse").more is more


def test_index_has_two_digits() -> None:
    for wrong in ("", "1", "100", "ab", "\u0661\u0661"):
        with pytest.raises(RequestError, match="not two digits"):
            plugin.check_index(wrong)
    plugin.check_index("05")


# A running plugin


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[NriEngine, list[str]]]:
    """An engine with a connected plugin, and the plugin's lines. The plugin connects again when its connection ends."""
    lines = list[str]()
    with NriEngine(tmp_path / "s", "cri-o", "1.36.3") as made:
        settings = SETTINGS._replace(hook=SETTINGS.hook._replace(state_dir=str(tmp_path)))
        lock, (end, stop) = plugin.Lock(str(tmp_path)), os.pipe()

        def run() -> None:
            while not select.select([end], [], [], 0)[0]:
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.connect(str(tmp_path / "s"))
                    lines.append(plugin.Connection(connection, settings, lines.append, lock).serve(end))

        thread = threading.Thread(target=run)
        thread.start()
        made.accept()
        yield made, lines
        os.write(stop, b"x")
        thread.join(60)
        os.close(end)
        os.close(stop)
    assert not thread.is_alive() and (tmp_path / "nri").read_bytes().startswith(b"registered ")


def test_malformed_messages_are_refused_and_the_next_is_answered(engine: tuple[NriEngine, list[str]]) -> None:
    """Each in one answer, on the same connection: an engine creates no container while a plugin connects again."""
    made, _ = engine
    request = protocol.message("CreateContainerRequest")()
    request.pod.annotations["gpushare.io/memory"] = "4Gi"
    good = request.SerializeToString()
    deep = b""
    for _ in range(200):  # a field that the plugin does not know, nested
        deep = b"\x7b" + deep + b"\x7c"
    for payload in (b"\xff", good[:-1], b"\x0a\x05\x32\x03\x0a\x01\xff", b"\x0a\xff\xff\xff\xff\x0f", deep):
        for method in ("CreateContainer", "Synchronize", "Configure"):
            with contextlib.suppress(Refused):
                made.call(method, payload, "Empty")
    with pytest.raises(Refused, match="the engine sent 1 bytes that are no CreateContainerRequest"):
        made.call("CreateContainer", b"\xff", "Empty")
    with pytest.raises(Refused, match="gpushare has no such service"):
        made.call("CreateContainer", good, "Empty", service="other")
    assert made.call("NoSuchMethod", good, "Empty").ByteSize() == 0
    assert made.call("CreateContainer", good, "CreateContainerResponse").adjust.hooks.prestart


@pytest.mark.parametrize("data", [b"\0\0\0\x01\xff\xff\xff\xff", encode(Message(PLUGIN, 1, REQUEST, b"\xff"))])
def test_plugin_connects_again_after_bytes_that_are_no_call(engine: tuple[NriEngine, list[str]], data: bytes) -> None:
    made, lines = engine
    made.send(data)
    made.closed()
    assert made.accept().plugin_idx == "10"
    assert any(re.search("the engine sent .*; connecting again", line) for line in lines)


def test_huge_container_is_answered(engine: tuple[NriEngine, list[str]]) -> None:
    """The most that a pod can have in annotations, and names that would slow down a pattern with two stars."""
    made, _ = engine
    request = protocol.message("CreateContainerRequest")()
    for number in range(64):
        request.pod.annotations[f"{'a' * number}.gpushare.io/memory"] = "x" * 4096
    request.pod.annotations["a." * 50000 + "b"] = ""
    passed = made.call("CreateContainer", request, "CreateContainerResponse").adjust.annotations
    assert len(passed) == 64


# The hook's test of the lock


def test_hook_finds_whether_a_plugin_holds_the_lock(tmp_path: Path) -> None:
    lock = str(tmp_path / "nri")
    assert hook._is_gone(lock)
    code = "import sys; from gpushare.state import agentlock; agentlock.take(sys.argv[1], 'nri'); print(); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout and holder.stdout.readline()
        assert not hook._is_gone(lock)
        holder.kill()
    assert hook._is_gone(lock)


def test_plugin_holds_the_lock_of_a_state_directory_that_was_made_again(tmp_path: Path) -> None:
    lock, path = plugin.Lock(str(tmp_path)), tmp_path / "nri"
    assert path.read_bytes() == b""
    lock.mark("a longer name\n")
    lock.mark("cri-o")
    assert path.read_bytes() == b"registered cri-o\n"
    path.rename(tmp_path / "lost")
    path.touch(0o600)
    assert hook._is_gone(str(path))
    lock.keep()
    assert not hook._is_gone(str(path)) and path.read_bytes() == b"registered cri-o\n"
    lock.keep()
    assert not hook._is_gone(str(path))
