"""Stand-ins for frameworks that need a GPU: they record calls, and refuse memory beyond a limit, as in a share."""

from __future__ import annotations

import contextlib
import functools
import math
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from tests.conformance import driver


class OutOfMemoryError(RuntimeError):
    pass


class Device:
    """A device with `limit_bytes`; `calls` are the names of what was called."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.used_bytes = limit_bytes, 0
        self.calls: list[str] = []

    def called(self, name: str, result: Any = None) -> Callable[..., Any]:
        """Return a function that records its call."""

        def call(*_: Any, **__: Any) -> Any:
            self.calls.append(name)
            return result

        return call

    def take(self, size: int, **_: Any) -> Array:
        if self.used_bytes + size > self.limit_bytes:
            raise OutOfMemoryError("CUDA out of memory")
        return Array(self, [], size)

    def memory(self) -> tuple[int, int]:
        return self.limit_bytes - self.used_bytes, self.limit_bytes


class Allocating(Device):
    """A device whose memory comes from the driver that this process finds, so the shim limits it.

    As with PyTorch, an import alone creates no context.
    """

    def __init__(self) -> None:
        super().__init__(0)

    @functools.cached_property
    def driver(self) -> driver.Driver:
        found = driver.Driver("libcuda.so.1")
        found.context()
        return found

    def take(self, size: int, **_: Any) -> Array:
        try:
            address = self.driver.alloc(size)
        except driver.DriverError:
            raise OutOfMemoryError("CUDA out of memory") from None
        taken = Array(self, [], size)
        weakref.finalize(taken, self.driver.free, address)
        return taken

    def memory(self) -> tuple[int, int]:
        return self.driver.free_bytes(), self.driver.total_bytes()


class Array:
    """Numbers on a device. A matrix product of ones is all that is ever multiplied."""

    def __init__(self, device: Device, numbers: list[float], size: int = 0) -> None:
        self.device, self.numbers, self.bytes, self.size = device, numbers, size, len(numbers)
        device.used_bytes += size

    def __del__(self) -> None:
        self.device.used_bytes -= self.bytes

    def __mul__(self, by: float) -> Array:
        return Array(self.device, [number * by for number in self.numbers])

    def __add__(self, more: float) -> Array:
        return Array(self.device, [number + more for number in self.numbers])

    def __matmul__(self, other: Array) -> Array:
        return self * math.sqrt(len(self.numbers))

    def sum(self, dim: int = 0) -> Array:
        return Array(self.device, [sum(self.numbers)])

    def item(self) -> float:
        return self.numbers[0]

    def numel(self) -> int:
        return len(self.numbers)

    block_until_ready = copy_to_host = lambda self: self

    def zero_(self) -> None:
        self.numbers = [0.0] * len(self.numbers)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, tuple):  # of a matrix whose elements are equal
            return Array(self.device, [self.numbers[at[0]]])
        return self.numbers[at]

    def __setitem__(self, at: int, number: float) -> None:
        self.numbers[at] = number

    def __int__(self) -> int:
        return int(self.numbers[0])

    def __eq__(self, other: object) -> bool:
        return self.numbers[0] == other


class Event:
    """An event on an idle device: it is done as soon as it is recorded."""

    def __init__(self, device: Device) -> None:
        self.device, self.at = device, 0.0

    def record(self, *_: Any) -> None:
        self.at = time.monotonic()
        self.device.calls.append("record")

    def synchronize(self) -> None:
        self.device.calls.append("synchronize")

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.at - self.at)


class Graph:
    """A CUDA graph of products. Like the real one it does not keep the tensors that it uses."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.products: list[tuple[weakref.ref[Array], ...]] = []

    def replay(self) -> None:
        self.device.calls.append("replay")
        for left, right, out in self.products:
            tensors = left(), right(), out()
            if None not in tensors:
                tensors[2].numbers = (tensors[0] @ tensors[1]).numbers  # type: ignore


def namespace(**names: Any) -> Any:
    return types.SimpleNamespace(**names)


def torch(device: Device) -> types.ModuleType:
    """Return a module with what the programs use of PyTorch."""

    @contextlib.contextmanager
    def anywhere(*_: Any, **__: Any) -> Iterator[None]:
        yield

    def filled(number: float) -> Callable[..., Array]:
        def fill(*shape: int, **_: Any) -> Array:
            count = 1
            for length in shape:
                count *= length
            return Array(device, [number] * count)

        return fill

    captures: list[Graph] = []  # the open one

    @contextlib.contextmanager
    def capture(graph: Graph, **_: Any) -> Iterator[None]:
        captures.append(graph)
        try:
            yield
        finally:
            captures.clear()

    def product(left: Array, right: Array, out: Array) -> None:
        if captures:
            captures[0].products.append((weakref.ref(left), weakref.ref(right), weakref.ref(out)))
        else:
            out.numbers = (left @ right).numbers

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        device.calls.append("compile")
        return function

    stream = namespace(wait_stream=device.called("wait_stream"))
    module = types.ModuleType("torch")
    cuda = namespace(
        is_available=lambda: True,
        empty_cache=device.called("empty_cache"),
        mem_get_info=device.memory,
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=anywhere,
        graph=capture,
        is_current_stream_capturing=lambda: bool(captures),
        synchronize=device.called("synchronize"),
        Event=lambda enable_timing=False: Event(device),
        CUDAGraph=lambda: Graph(device),
    )
    distributed = types.ModuleType("torch.distributed")
    vars(distributed).update(
        is_nccl_available=lambda: True,
        init_process_group=device.called("init_process_group"),
        all_reduce=lambda array: device.called("all_reduce")(),
    )
    names = {
        "__version__": "2.9",
        "uint8": 1,
        "float16": 2,
        "cuda": cuda,
        "distributed": distributed,
        "compile": compiled,
    }
    vars(module).update(
        randn=lambda *_, **__: Array(device, [1]), empty_like=lambda like: Array(device, list(like.numbers))
    )
    vars(module).update(names, mm=product, empty=device.take, ones=filled(1), zeros=filled(0))
    return module
