"""Frameworks as users run them: each allocates device memory until it is refused, and goes on."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.hardware.tenant import absent, listen, say

MIB = 1 << 20
STEPS = (256 * MIB, 32 * MIB)
SIDE = 512
NCCL_S = 25


class Program(NamedTuple):
    """`work` returns whether a result on the device is right; `take(bytes)` allocates; `forget` frees cached memory."""

    version: str
    work: Callable[[], bool]
    take: Callable[[int], Any]
    forget: Callable[[], Any]
    memory: Callable[[], tuple[int, int]]  # (free, total)


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


def _graphs(torch: Any) -> Callable[[], bool]:
    ones = torch.ones(SIDE, SIDE, device="cuda")
    out = torch.zeros(SIDE, SIDE, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.mm(ones, ones, out=out)
    torch.cuda.current_stream().wait_stream(stream)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        torch.mm(ones, ones, out=out)

    def replay() -> bool:
        recorded.replay()
        return bool(out.sum().item() == SIDE**3)

    return replay


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
    )


PROGRAMS: dict[str, Callable[[], Program]] = {
    "eager": lambda: _torch("", _eager),
    "compiled": lambda: _torch("", _compiled),
    "graphs": lambda: _torch("", _graphs),
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


def is_out_of_memory(error: Exception) -> bool:
    text = f"{type(error).__name__} {error}".lower().replace("_", "").replace(" ", "")
    return "outofmemory" in text or "resourceexhausted" in text


def framework(name: str, most_bytes: int) -> None:
    """Work and report the memory; on a line allocate until refused; on another free it all and work again."""
    program = PROGRAMS[name]()
    assert program.work(), "a result on the device is wrong"
    free, total = program.memory()
    say(version=program.version, total_bytes=total, free_bytes=free)
    listen()
    held: list[Any] = []
    got, error_text = 0, ""
    for step in STEPS:
        while got + step <= most_bytes:
            try:
                held.append(program.take(step))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise RuntimeError(f"{type(error).__name__}: {error}") from error
                error_text = f"{type(error).__name__}: {error}"[:200]
                break
            got += step
    say(got_bytes=got, refused=error_text)
    listen()
    held.clear()
    program.forget()
    say(goes_on=program.work())


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
