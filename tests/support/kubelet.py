"""A fake of kubelet's device plugin manager: the real protocol, over Unix sockets.

    with Kubelet(folder) as kubelet:                 empty the folder, then listen on kubelet.sock, like kubelet
        kubelet.wait(lambda: kubelet.healthy(name))  until the plugin has reported devices
        kubelet.allocate(name, 4096)                 -> environment of the container; raises Refused

It answers a registration once it has connected to the plugin, accepts messages of up to 4 MiB, requests the plugin's
preference if it has one, and chooses the rest at random. When a stream ends, it disconnects the last plugin of that
resource, whichever plugin the stream was of (runClient in kubelet's devicemanager/plugin/v1beta1, up to 1.36).
"""

from __future__ import annotations

import os
import random
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Optional

import grpc

from tests.support.engines.cri import methods

PROTO = Path(__file__).with_name("deviceplugin.proto")
VERSION = "v1beta1"
TIMEOUT_S = 30.0


class Refused(Exception):
    """The plugin's message, and gRPC's code."""


class Endpoint:
    """One registered plugin."""

    def __init__(self, kubelet: Kubelet, path: str, request: Any) -> None:
        self.path, self.name, self.options = path, request.resource_name, request.options
        self.devices: dict[str, str] = {}  # id -> health
        self.numa: dict[str, tuple[int, ...]] = {}  # id -> NUMA nodes
        self.lists, self.ended = 0, False
        self.dropped = False  # by this kubelet
        self._kubelet = kubelet
        self.channel = grpc.insecure_channel(f"unix:{path}", options=[("grpc.default_authority", "localhost")])
        grpc.channel_ready_future(self.channel).result(timeout=10)
        _, asked, answer = methods(PROTO, VERSION)["ListAndWatch"]
        open_stream = self.channel.unary_stream(
            f"/{VERSION}.DevicePlugin/ListAndWatch", asked.SerializeToString, answer.FromString
        )
        self.stream = open_stream(asked())
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        why = ""
        try:
            for response in self.stream:
                with self._kubelet.changed:
                    self.devices = {one.ID: one.health for one in response.devices}
                    self.numa = {one.ID: tuple(node.ID for node in one.topology.nodes) for one in response.devices}
                    self.lists += 1
                    self._kubelet.changed.notify_all()
        except grpc.RpcError as error:
            why = f"{error.code().name}: {error.details()}"
        with self._kubelet.changed:
            self.ended, self.why = True, why
            last = self._kubelet.endpoints.get(self.name, self)
            self._kubelet.changed.notify_all()
        if not self.dropped:
            last.drop()

    def call(self, method: str, **fields: Any) -> Any:
        path, asked, answer = methods(PROTO, VERSION)[method]
        function = self.channel.unary_unary(path, asked.SerializeToString, answer.FromString)
        try:
            return function(asked(**fields), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise Refused(error.details(), error.code().name) from None

    def drop(self) -> None:
        self.dropped = True
        self.stream.cancel()

    def close(self) -> None:
        self.drop()
        self._thread.join(TIMEOUT_S)
        self.channel.close()


class Kubelet:
    def __init__(self, folder: Path, refuse: str = "") -> None:
        self.folder, self.refuse, self.refused = folder, refuse, ""  # refused: the only resource; "": all
        self.changed = threading.Condition()
        self.endpoints: dict[str, Endpoint] = {}  # the last of each resource
        self._all: list[Endpoint] = []
        self.used: dict[str, set[str]] = {}
        self._server: Optional[Any] = None

    def __enter__(self) -> Kubelet:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        for path in self.folder.iterdir():
            if stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink()
        method, asked, answer = methods(PROTO, VERSION)["Register"]
        handler = grpc.unary_unary_rpc_method_handler(self._register, asked.FromString, answer.SerializeToString)
        server = grpc.server(ThreadPoolExecutor(4))
        service, _, name = method.strip("/").partition("/")
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
        server.add_insecure_port(f"unix:{self.folder / 'kubelet.sock'}")
        server.start()
        self._server = server

    def stop(self) -> None:
        """End like a stopped or crashed kubelet: all connections close."""
        if self._server is not None:
            self._server.stop(0).wait()
            self._server = None
        for one in self._all:
            one.close()
        self.endpoints, self._all = {}, []

    def _register(self, request: Any, context: Any) -> Any:
        is_refused = self.refuse and self.refused in ("", request.resource_name)
        if is_refused or request.version != VERSION:
            context.abort(grpc.StatusCode.UNKNOWN, self.refuse or f"unsupported version {request.version}")
        if os.sep in request.endpoint or "/" not in request.resource_name:
            context.abort(grpc.StatusCode.UNKNOWN, "bad request")
        endpoint = Endpoint(self, str(self.folder / request.endpoint), request)
        with self.changed:
            self.endpoints[request.resource_name] = endpoint
            self._all.append(endpoint)
            self.changed.notify_all()
        return methods(PROTO, VERSION)["Register"][2]()

    def wait(self, until: Callable[[], Any]) -> None:
        with self.changed:
            assert self.changed.wait_for(until, TIMEOUT_S), self.describe()

    def has_listed(self, *names: str) -> bool:
        """Whether these resources have been listed since they were registered."""
        return all(name in self.endpoints and self.endpoints[name].lists for name in names)

    def describe(self) -> str:
        return str({name: (one.lists, len(one.devices), one.ended) for name, one in self.endpoints.items()})

    def healthy(self, name: str) -> set[str]:
        """Ids of healthy devices; none before the plugin's first list and after the end of its stream."""
        endpoint = self.endpoints.get(name)
        if endpoint is None or endpoint.ended:
            return set()
        return {unit for unit, health in endpoint.devices.items() if health == "Healthy"}

    def allocate(self, name: str, count: int, must: tuple[str, ...] = ()) -> dict[str, str]:
        """Allocate for one container like kubelet; `must`: the devices of an init container of the pod."""
        endpoint = self.endpoints[name]
        used = self.used.setdefault(name, set()) - set(must)
        available = self.healthy(name) - used
        assert len(available) >= count, "the scheduler would not have chosen this node"
        chosen = list(must)
        if endpoint.options.get_preferred_allocation_available:
            request = {
                "available_deviceIDs": random.sample(sorted(available), len(available)),
                "must_include_deviceIDs": must,
                "allocation_size": count,
            }
            answer = endpoint.call("GetPreferredAllocation", container_requests=[request])
            (preferred,) = answer.container_responses
            chosen += [unit for unit in preferred.deviceIDs if unit in available and unit not in must]
        left = sorted(available - set(chosen))
        chosen += random.sample(left, max(0, count - len(chosen)))
        chosen = chosen[:count]
        (response,) = endpoint.call("Allocate", container_requests=[{"devices_ids": chosen}]).container_responses
        assert not (response.mounts or response.devices or response.annotations or response.cdi_devices)
        self.used[name] = used | set(chosen)
        return dict(response.envs)
