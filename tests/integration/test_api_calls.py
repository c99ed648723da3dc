"""The calls of gpushare's programs to the API server are the rights of their accounts.

Each program runs as in its pod, beside a stand-in for the API server that counts connections. It has a token here, also
if its manifest forbids one. The installer's tests are in test_installer.py.
"""

from __future__ import annotations

import http.client
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpushare.integrations.nri import protocol

from tests.integration.test_dra import folder
from tests.integration.test_k8s_plugin import MEMORY, Program, program
from tests.support import dra, kubelet
from tests.support.apiserver import compared
from tests.support.host import BIN, TREE, Node
from tests.support.nriengine import NriEngine
from tests.support.rbac import Access, access, built, environment, pod_command

KUBERNETES = TREE / "packaging" / "kubernetes"
HOOK = str(BIN / "gpushare-hook")
NO_CALLS = ("nri", "plugin", "exporter")

__all__ = ["folder"]  # a fixture


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dra.ApiServer]:
    with dra.ApiServer(tmp_path / "account") as made:
        for name, value in environment(made).items():
            monkeypatch.setenv(name, value)
        yield made


@pytest.fixture
def start(
    make_host: Callable[..., Path], make_node: Callable[..., Node], api: dra.ApiServer
) -> Iterator[Callable[..., Program]]:
    """start(words of gpushare) -> the running program of a pod on a node with one device."""
    node = make_node(make_host(gpus=1, memory_bytes=64 << 20))
    assert node.cli("refresh").returncode == 0
    made: list[Program] = []

    def begin(*words: object) -> Program:
        command = [program(), "--config", node.config, "--state", node.state, *words]
        made.append(Program(pod_command(api, command)))
        return made[-1]

    yield begin
    for one in made:
        if one.process.returncode is None:
            one.end(signal.SIGKILL)


def nri(start: Callable[..., Program], folder: Path) -> None:
    with NriEngine(folder / "nri.sock") as engine:
        one = start("nri", "--socket", folder / "nri.sock", "--hook", HOOK)
        assert engine.accept().plugin_name == "gpushare"
        request = protocol.message("CreateContainerRequest")()
        request.pod.annotations["gpushare.io/memory"] = "4Gi"
        assert engine.call("CreateContainer", request, "CreateContainerResponse").adjust.hooks.prestart
        one.expect("containers exist")
        assert one.end() == (0, "")


def plugin(start: Callable[..., Program], folder: Path) -> None:
    with kubelet.Kubelet(folder) as manager:
        one = start("k8s-plugin", "--kubelet", folder, "--interval", "0.1")
        manager.wait(lambda: manager.has_listed(MEMORY))
        assert manager.allocate(MEMORY, 4)
        assert one.end()[0] == 0


def exporter(start: Callable[..., Program], folder: Path) -> None:
    one = start("export", "--port", "0")
    connection = http.client.HTTPConnection("127.0.0.1", int(one.expect(r":(\d+)/")[1]), timeout=30)
    connection.request("GET", "/metrics")
    assert connection.getresponse().status == 200
    connection.close()
    assert one.end()[0] == 0


@pytest.mark.parametrize("name", NO_CALLS)
def test_program_without_token_calls_no_api_server(
    name: str, start: Callable[..., Program], folder: Path, api: dra.ApiServer
) -> None:
    use: Any = {"nri": nri, "plugin": plugin, "exporter": exporter}[name]
    use(start, folder)
    assert (api.calls, api.connections) == ([], 0)
    found = access(built(KUBERNETES / name))[f"gpushare-{name}"]
    assert found == Access(False, frozenset())


def test_dra_driver_calls_what_its_account_may(start: Callable[..., Program], folder: Path, api: dra.ApiServer) -> None:
    """It creates its slice, updates it, reads claims, and finds server and token where kubelet puts them."""
    (folder / "cdi").mkdir()
    words = ("--kubelet", folder, "--cdi", folder / "cdi", "--program", HOOK, "--interval", "0.1")
    with dra.Kubelet(folder) as manager:
        one = start("dra", *words)
        one.expect("serving 1 devices")
        manager.register()
        claim = api.allocate("a", {"gpu": {"memory": "4Mi"}})
        assert manager.prepare(claim)
        manager.unprepare(claim)
        assert one.end()[0] == 0
        (stored,) = api.slices.values()
        stored["spec"]["devices"][0]["attributes"]["index"] = {"int": 7}  # as another version of the driver wrote it
        api.release("a")
        again = start("dra", *words)
        again.expect("published 1 devices")
        assert again.end()[0] == 0
    rights = access(built(KUBERNETES / "dra"))["gpushare-dra"].rights
    assert compared(api.calls, rights) == (set(), set())
    assert api.connections >= len(api.calls) > 0


def test_call_of_any_program_would_be_found(api: dra.ApiServer) -> None:
    """The stand-in is where a program finds the API server, with the token that it finds."""
    script = "from gpushare.integrations.dra.apiserver import Server, default_url; "
    code = script + "print(Server(default_url()).slice('x'))"
    command = pod_command(api, [TREE / "build/venv/bin/python", "-c", code])
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout == "None\n"
    assert [call.verb for call in api.calls] == ["get"] and api.connections == 2
