"""Frameworks as users run them: each allocates device memory until it is refused, and goes on."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

from tests.hardware.tenant import absent, listen, say

MIB = 1 << 20
STEPS = (256 * MIB, 32 * MIB)
SIDE = 512
NCCL_S = 25


Trials = dict[str, Callable[[], bool]]  # what a trial does -> whether its result is right


class Program(NamedTuple):
    """`work` returns whether a result on the device is right; `take(bytes)` allocates; `forget` frees cached memory.

    `steps`: sizes of allocations, each until the first refusal. `at_limit`, `after`: more trials while the memory is
    full, and once it is free again.
    """

    version: str
    work: Callable[[], bool]
    take: Callable[[int], Any]
    forget: Callable[[], Any]
    memory: Callable[[], tuple[int, int]]  # (free, total)
    steps: Sequence[int] = STEPS
    at_limit: Trials = {}
    after: Trials = {}


def imported(name: str) -> Any:
    """Import a module, or end with the reason why it is absent."""
    try:
        return __import__(name, fromlist=["_"])
    except Exception as error:  # an installed package may fail in any way without what it needs
        absent(f"{name} cannot be imported by this python3 ({type(error).__name__}: {error})"[:200])


def torch_module() -> Any:
    torch = imported("torch")
    if not torch.cuda.is_available():
        absent("PyTorch sees no GPU")
    return torch


def _torch(settings: str, make: Callable[[Any], Callable[[], bool]]) -> Program:
    """Return PyTorch with these settings of its allocator; `make(torch)` returns what it works on."""
    if settings:
        os.environ["PYTORCH_ALLOC_CONF"] = os.environ["PYTORCH_CUDA_ALLOC_CONF"] = settings
    torch = torch_module()
    return Program(
        str(torch.__version__),
        make(torch),
        lambda size: torch.empty(size, dtype=torch.uint8, device="cuda"),
        torch.cuda.empty_cache,
        torch.cuda.mem_get_info,
    )


def _eager(torch: Any) -> Callable[[], bool]:
    ones = torch.ones(SIDE, SIDE, device="cuda")
    return lambda: bool((ones @ ones).sum().item() == SIDE**3)


def _compiled(torch: Any) -> Callable[[], bool]:
    ones = torch.ones(SIDE, SIDE, device="cuda")
    double = torch.compile(lambda x: (x * 2 + 1).sum(dim=1))
    return lambda: bool(double(ones).sum().item() == 3 * SIDE**2)


class Graphs:
    """Products of matrices in CUDA graphs. A graph reads and writes the tensors of its capture, so it keeps them."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.ones, self.out = (make(SIDE, SIDE, device="cuda") for make in (torch.ones, torch.zeros))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.mm(self.ones, self.ones, out=self.out)
        torch.cuda.current_stream().wait_stream(stream)
        self.first = self.captured()

    def captured(self) -> Any:
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            self.torch.mm(self.ones, self.ones, out=self.out)
        return graph

    def replays(self, graph: Any) -> bool:
        """Replay and read two elements, which allocates nothing: the memory may be full."""
        self.out.zero_()
        graph.replay()
        return bool(self.out[0, 0].item() == self.out[-1, -1].item() == SIDE)

    def replay(self) -> bool:
        return self.replays(self.first)

    def capture(self) -> bool:
        return self.replays(self.captured())

    def refused_in_capture(self) -> bool:
        """Return whether an allocation beyond the limit during a capture is refused as memory that is lacking."""
        graph = self.torch.cuda.CUDAGraph()
        try:
            with self.torch.cuda.graph(graph):
                self.torch.mm(self.ones, self.ones, out=self.out)
                self.torch.empty(self.torch.cuda.mem_get_info()[1] + MIB, dtype=self.torch.uint8, device="cuda")
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return True
        return False

    def not_capturing(self) -> bool:
        """Return whether no capture is left, so that the whole device can be waited for."""
        self.torch.cuda.synchronize()
        return not self.torch.cuda.is_current_stream_capturing()


def _graphs() -> Program:
    program = _torch("", _eager)
    graphs = Graphs(torch_module())
    during: Trials = {
        "an allocation during a capture is refused": graphs.refused_in_capture,
        "no capture is left then": graphs.not_capturing,
        "an earlier graph replays then": graphs.replay,
        "the next capture works then": graphs.capture,
    }
    return program._replace(
        work=graphs.replay,
        at_limit={"a captured graph replays while memory is full": graphs.replay},
        after={"a captured graph replays": graphs.replay, "a new capture works": graphs.capture, **during},
    )


def _triton_kernel(torch: Any) -> Callable[[], bool]:
    kernel = imported("tests.hardware.tenants.triton_kernel")
    return lambda: bool(kernel.add_one(torch.zeros(4096, device="cuda")).sum().item() == 4096)


def _cupy() -> Program:
    cupy = imported("cupy")
    runtime = cupy.cuda.runtime
    ones = cupy.ones(4096)
    return Program(
        cupy.__version__,
        lambda: bool(int((ones * 2).sum()) == 8192),
        lambda size: cupy.empty(size, dtype=cupy.uint8),
        cupy.get_default_memory_pool().free_all_blocks,
        runtime.memGetInfo,
    )


def _numba() -> Program:
    cuda = imported("numba.cuda")
    if not cuda.is_available():
        absent("Numba sees no GPU")

    numpy, kernel = imported("numpy"), imported("tests.hardware.tenants.numba_kernel")

    def work() -> bool:
        values = cuda.to_device(numpy.ones(256))
        kernel.double[1, 256](values)
        return bool(values.copy_to_host().sum() == 512)

    return Program(
        imported("numba").__version__,
        work,
        lambda size: cuda.device_array(size, dtype="uint8"),
        lambda: None,  # it frees when it needs memory
        lambda: tuple(cuda.current_context().get_memory_info()[:2]),
    )


def _jax() -> Program:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    jax = imported("jax")
    if jax.default_backend() != "gpu":
        absent("JAX sees no GPU")
    numbers = jax.numpy

    def memory() -> tuple[int, int]:
        stats = jax.devices()[0].memory_stats()
        return stats["bytes_limit"] - stats["bytes_in_use"], stats["bytes_limit"]

    return Program(
        jax.__version__,
        lambda: bool(jax.jit(lambda x: (x * 2).sum())(numbers.ones(4096)) == 8192),
        lambda size: numbers.zeros(size, dtype=numbers.uint8).block_until_ready(),
        lambda: None,
        memory,
        steps=(64 * MIB,),  # its allocator waits for 10 s before each refusal
    )


PROGRAMS: dict[str, Callable[[], Program]] = {
    "eager": lambda: _torch("", _eager),
    "compiled": lambda: _torch("", _compiled),
    "graphs": _graphs,
    "expandable": lambda: _torch("expandable_segments:True", _eager),
    "async": lambda: _torch("backend:cudaMallocAsync", _eager),
    "triton": lambda: _torch("", _triton_kernel),
    "cupy": _cupy,
    "numba": _numba,
    "jax": _jax,
}


def imports() -> None:
    """Import PyTorch, so that later programs find its files in memory.

    It sees no device, because a context of it would disturb what other programs measure.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name in ("torch", "triton"):
        imported(name)
    say(imported=True)


def is_out_of_memory(error: Optional[BaseException]) -> bool:
    """Return whether an error, or the one that it followed, is a refusal of memory."""
    while error is not None:
        text = f"{type(error).__name__} {error}".lower().replace("_", "").replace(" ", "")
        if "outofmemory" in text or "resourceexhausted" in text:
            return True
        error = error.__cause__ or error.__context__  # leaving a capture can fail after the refusal
    return False


def attempt(work: Callable[[], bool]) -> str:
    """Return "" if the work's result is right; otherwise what is wrong."""
    try:
        return "" if work() else "a result on the device is wrong"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


def framework(name: str, most_bytes: int) -> None:
    """Work and report the memory; on a line allocate until refused; on another free it all and work again.

    `broken`: why it cannot work even before. `trials`: what went wrong in each trial, "" for nothing.
    """
    try:
        program = PROGRAMS[name]()
        broken = attempt(program.work)
    except Exception as error:  # an installed package may not fit the others
        broken = f"{type(error).__name__}: {error}"[:300]
    if broken:
        say(broken=broken)
        return
    free, total = program.memory()
    say(version=program.version, total_bytes=total, free_bytes=free)
    listen()
    held: list[Any] = []
    got, refused = 0, ""
    for step in program.steps:
        while got + step <= most_bytes:
            try:
                held.append(program.take(step))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise RuntimeError(f"{type(error).__name__}: {error}") from error
                refused = f"{type(error).__name__}: {error}"[:200]
                break
            got += step
    say(got_bytes=got, refused=refused)
    listen()
    trials = {what: attempt(work) for what, work in program.at_limit.items()}
    held.clear()
    program.forget()
    trials["it works once memory is free"] = attempt(program.work)
    trials.update((what, attempt(work)) for what, work in program.after.items())
    say(goes_on=not any(trials.values()), trials=trials)


def nccl(file: str, rank: int, ranks: int) -> None:
    """Sum a tensor over `ranks` processes with NCCL; report the result, or the error."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch = torch_module()
    distributed = imported("torch.distributed")
    if not distributed.is_nccl_available():
        absent("this PyTorch has no NCCL")
    try:
        distributed.init_process_group(
            "nccl", f"file://{file}", rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=NCCL_S)
        )
        tensor = torch.ones(1 << 20, device="cuda")
        distributed.all_reduce(tensor)
        say(sum=tensor.sum().item(), right=ranks << 20, error="")
    except Exception as error:
        say(sum=None, right=ranks << 20, error=f"{type(error).__name__}: {error}"[:600])
    sys.stdout.flush()
    os._exit(0)  # NCCL's own threads may wait for a rank that has failed
