"""A stand-in for the part of kubelet that device plugins talk to: the real protocol, over unix sockets.

    with Kubelet(folder) as kubelet:                 empties the folder, then listens on kubelet.sock, as kubelet does
        kubelet.wait(lambda: kubelet.healthy(name))  until a plugin has said so
        kubelet.allocate(name, 4096)                 -> environment that the container gets; raises Refused

It answers a registration when it has reached the plugin, takes messages of up to 4 MiB, asks for a preference where the
plugin has one, and chooses at random what that leaves open.
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
    """What the plugin said, and gRPC's code."""


class Endpoint:
    """One registered plugin."""

    def __init__(self, kubelet: Kubelet, path: str, request: Any) -> None:
        self.path, self.options = path, request.options
        self.devices: dict[str, str] = {}  # id -> health
        self.lists, self.ended = 0, False
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
                    self.lists += 1
                    self._kubelet.changed.notify_all()
        except grpc.RpcError as error:
            why = f"{error.code().name}: {error.details()}"
        with self._kubelet.changed:
            self.ended, self.why = True, why
            self._kubelet.changed.notify_all()

    def call(self, method: str, **fields: Any) -> Any:
        path, asked, answer = methods(PROTO, VERSION)[method]
        function = self.channel.unary_unary(path, asked.SerializeToString, answer.FromString)
        try:
            return function(asked(**fields), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise Refused(error.details(), error.code().name) from None

    def close(self) -> None:
        self.stream.cancel()
        self._thread.join(TIMEOUT_S)
        self.channel.close()


class Kubelet:
    def __init__(self, folder: Path, refuse: str = "") -> None:
        self.folder, self.refuse = folder, refuse
        self.changed = threading.Condition()
        self.endpoints: dict[str, Endpoint] = {}
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
        """As it ends, or dies: all connections go."""
        if self._server is not None:
            self._server.stop(0).wait()
            self._server = None
        for one in self.endpoints.values():
            one.close()
        self.endpoints = {}

    def _register(self, request: Any, context: Any) -> Any:
        if self.refuse or request.version != VERSION:
            context.abort(grpc.StatusCode.UNKNOWN, self.refuse or f"unsupported version {request.version}")
        if os.sep in request.endpoint or not request.resource_name.startswith("gpushare.io/"):
            context.abort(grpc.StatusCode.UNKNOWN, "bad request")
        endpoint = Endpoint(self, str(self.folder / request.endpoint), request)
        with self.changed:
            before = self.endpoints.pop(request.resource_name, None)
            self.endpoints[request.resource_name] = endpoint
            self.changed.notify_all()
        if before is not None:
            before.close()
        return methods(PROTO, VERSION)["Register"][2]()

    def wait(self, until: Callable[[], Any]) -> None:
        with self.changed:
            assert self.changed.wait_for(until, TIMEOUT_S), self.describe()

    def told(self, *names: str) -> bool:
        """Whether these resources have been listed since they were registered."""
        return all(name in self.endpoints and self.endpoints[name].lists for name in names)

    def describe(self) -> str:
        return str({name: (one.lists, len(one.devices), one.ended) for name, one in self.endpoints.items()})

    def healthy(self, name: str) -> set[str]:
        """Ids; none before the plugin's first list."""
        endpoint = self.endpoints.get(name)
        return {unit for unit, health in endpoint.devices.items() if health == "Healthy"} if endpoint else set()

    def allocate(self, name: str, count: int, must: tuple[str, ...] = ()) -> dict[str, str]:
        """As kubelet does it for one container; `must`: what an init container of the pod had."""
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
