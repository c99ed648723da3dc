"""The programs of frameworks, with stand-ins for these: they run to their end and report what they should."""

from __future__ import annotations

import os
import sys
import types
from typing import Any, Callable

import pytest

from tests.hardware import checks_frameworks, fakes, processes
from tests.hardware.tenants import frameworks

MIB = 1 << 20
LIMIT = 600 * MIB
TORCH = ("eager", "compiled", "graphs", "expandable", "async", "triton")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> fakes.Device:
    device = fakes.Device(LIMIT)
    for name in (
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "XLA_PYTHON_CLIENT_PREALLOCATE",
        "NCCL_SOCKET_IFNAME",
    ):
        monkeypatch.setenv(name, "")
    for name in ("triton_kernel", "numba_kernel"):  # imported again by each test, and forgotten after it
        monkeypatch.setitem(sys.modules, f"tests.hardware.tenants.{name}", None)
        del sys.modules[f"tests.hardware.tenants.{name}"]
    torch = fakes.torch(device)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", torch.distributed)
    return device


def run(monkeypatch: pytest.MonkeyPatch, program: Callable[..., None], **arguments: Any) -> dict[str, Any]:
    """Return everything that a program reports."""
    said: dict[str, Any] = {}
    monkeypatch.setattr(frameworks, "say", said.update)
    monkeypatch.setattr(frameworks, "listen", dict)
    program(**arguments)
    return said


def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        def __init__(self, function: Callable[..., None]) -> None:
            self.function = function

        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            def launch(values: fakes.Array, length: int, block: int) -> None:
                assert grid[0] * block == length
                values.numbers = (values + 1).numbers

            return launch

    language = types.ModuleType("triton.language")
    vars(language).update(constexpr=int)
    module = types.ModuleType("triton")
    vars(module).update(jit=Kernel, language=language)
    monkeypatch.setitem(sys.modules, "triton", module)
    monkeypatch.setitem(sys.modules, "triton.language", language)


@pytest.mark.parametrize("name", TORCH)
def test_torch_program_stops_at_the_limit_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, device: fakes.Device, name: str
) -> None:
    triton(monkeypatch)
    said = run(monkeypatch, frameworks.framework, name=name, most_bytes=2 * LIMIT)
    assert said["got_bytes"] == 576 * MIB, "two of 256 MiB, two of 32"
    assert (said["total_bytes"], said["free_bytes"]) == (LIMIT, LIMIT)
    assert said["goes_on"] and "out of memory" in said["refused"]
    assert device.used_bytes == 0 and "empty_cache" in device.calls
    own = {"compiled": ["compile"], "graphs": ["replay"] * 7}
    assert [call for call in device.calls if call in ("compile", "replay")] == own.get(name, [])
    settings = {"expandable": "expandable_segments:True", "async": "backend:cudaMallocAsync"}
    assert os.environ["PYTORCH_ALLOC_CONF"] == os.environ["PYTORCH_CUDA_ALLOC_CONF"] == settings.get(name, "")


def cupy(device: fakes.Device) -> dict[str, Any]:
    module = types.ModuleType("cupy")
    pool = fakes.namespace(free_all_blocks=device.called("free_all_blocks"))
    runtime = fakes.namespace(memGetInfo=device.memory)
    names = {"__version__": "13", "uint8": 1, "cuda": fakes.namespace(runtime=runtime), "empty": device.take}
    vars(module).update(names, ones=fakes.torch(device).ones, get_default_memory_pool=lambda: pool)
    return {"cupy": module}


def numba(device: fakes.Device) -> dict[str, Any]:
    cuda, module, numpy = types.ModuleType("numba.cuda"), types.ModuleType("numba"), types.ModuleType("numpy")
    context = fakes.namespace(get_memory_info=lambda: (*device.memory(), 0))

    class Jitted:
        def __init__(self, function: Callable[..., None]) -> None:
            self.function = function

        def __getitem__(self, shape: tuple[int, int]) -> Callable[..., None]:
            def launch(values: fakes.Array) -> None:
                for at in range(shape[0] * shape[1]):
                    vars(cuda)["grid"] = lambda _, at=at: at
                    self.function(values)

            return launch

    vars(cuda).update(is_available=lambda: True, jit=Jitted, device_array=device.take)
    vars(cuda).update(to_device=lambda numbers: numbers, current_context=lambda: context)
    vars(module).update(__version__="0.62", cuda=cuda)
    vars(numpy).update(ones=fakes.torch(device).ones)
    return {"numba": module, "numba.cuda": cuda, "numpy": numpy}


def jax(device: fakes.Device) -> dict[str, Any]:
    def zeros(size: int, dtype: int) -> fakes.Array:
        try:
            return device.take(size)
        except fakes.OutOfMemoryError:
            raise RuntimeError("RESOURCE_EXHAUSTED: failed to allocate") from None

    module = types.ModuleType("jax")
    stats = {"bytes_limit": LIMIT, "bytes_in_use": 0}
    numbers = fakes.namespace(uint8=1, zeros=zeros, ones=fakes.torch(device).ones)
    vars(module).update(__version__="0.8", numpy=numbers, jit=lambda function: function)
    vars(module).update(default_backend=lambda: "gpu", devices=lambda: [fakes.namespace(memory_stats=lambda: stats)])
    return {"jax": module}


@pytest.mark.parametrize("make", [cupy, numba, jax])
def test_other_frameworks_stop_at_the_limit_and_go_on(
    monkeypatch: pytest.MonkeyPatch, device: fakes.Device, make: Callable[[fakes.Device], dict[str, Any]]
) -> None:
    for name, module in make(device).items():
        monkeypatch.setitem(sys.modules, name, module)
    said = run(monkeypatch, frameworks.framework, name=make.__name__, most_bytes=2 * LIMIT)
    got = 576 * MIB if make is not jax else 9 * 64 * MIB
    assert (said["got_bytes"], said["total_bytes"], said["goes_on"]) == (got, LIMIT, True)


def test_graphs_are_tried_after_refusals_outside_and_during_a_capture(
    monkeypatch: pytest.MonkeyPatch, device: fakes.Device
) -> None:
    said = run(monkeypatch, frameworks.framework, name="graphs", most_bytes=2 * LIMIT)
    assert said["trials"] == dict.fromkeys(
        (
            "a captured graph replays while memory is full",
            "it works once memory is free",
            "a captured graph replays",
            "a new capture works",
            "an allocation during a capture is refused",
            "no capture is left then",
            "an earlier graph replays then",
            "the next capture works then",
        ),
        "",
    )


def test_capture_that_ends_with_another_error_was_refused(
    monkeypatch: pytest.MonkeyPatch, device: fakes.Device
) -> None:
    """The error that leaving the capture raises hides the refusal, but follows it."""
    capture = sys.modules["torch"].cuda.graph

    class Ended:
        def __init__(self, graph: Any, **_: Any) -> None:
            self.open = capture(graph)

        def __enter__(self) -> None:
            self.open.__enter__()

        def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
            try:
                self.open.__exit__(kind, error, trace)
            finally:
                if error:
                    raise RuntimeError("operation failed due to a previous error during capture")

    sys.modules["torch"].cuda.graph = Ended
    said = run(monkeypatch, frameworks.framework, name="graphs", most_bytes=2 * LIMIT)
    assert not any(said["trials"].values()), said["trials"]


def test_failed_trial_names_what_failed(monkeypatch: pytest.MonkeyPatch, device: fakes.Device) -> None:
    def synchronize() -> None:
        raise RuntimeError("operation failed due to a previous error during capture")

    sys.modules["torch"].cuda.synchronize = synchronize
    said = run(monkeypatch, frameworks.framework, name="graphs", most_bytes=2 * LIMIT)
    failed = {what: why for what, why in said["trials"].items() if why}
    assert failed == {
        "no capture is left then": "RuntimeError: operation failed due to a previous error during capture"
    }
    assert not said["goes_on"]


@pytest.mark.parametrize("early", [True, False])
def test_error_of_a_framework_that_cannot_work_is_reported(
    monkeypatch: pytest.MonkeyPatch, device: fakes.Device, early: bool
) -> None:
    for name, module in cupy(device).items():
        monkeypatch.setitem(sys.modules, name, module)

    def broken(*_: Any) -> None:
        raise AttributeError("module 'numpy' has no attribute 'row_stack'")

    if early:
        vars(sys.modules["cupy"])["ones"] = broken
    else:
        monkeypatch.setattr(fakes.Array, "__mul__", broken)
    said = run(monkeypatch, frameworks.framework, name="cupy", most_bytes=LIMIT)
    assert said == {"broken": "AttributeError: module 'numpy' has no attribute 'row_stack'"}


@pytest.mark.parametrize("native_too", [True, False])
def test_broken_framework_is_not_a_fault_of_the_share(monkeypatch: pytest.MonkeyPatch, native_too: bool) -> None:
    said = {"broken": "AttributeError: row_stack"} if native_too else {"version": "1"}
    monkeypatch.setattr(processes, "ask", lambda *_, **__: said)
    session: Any = fakes.namespace(deadline=0)
    if not native_too:
        with pytest.raises(processes.Failed, match="Numba works natively, but not in a share: why"):
            checks_frameworks.broken(session, "numba", LIMIT, "why")
        return
    result = checks_frameworks.broken(session, "numba", LIMIT, "why")
    assert (result.verdict, result.note) == ("not run", "Numba does not work here: AttributeError: row_stack")


def test_import_in_advance_sees_no_device(monkeypatch: pytest.MonkeyPatch, device: fakes.Device) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    triton(monkeypatch)
    assert run(monkeypatch, frameworks.imports) == {"imported": True}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and device.calls == []


def test_another_error_is_no_refusal(monkeypatch: pytest.MonkeyPatch, device: fakes.Device) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    vars(sys.modules["torch"])["empty"] = broken
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run(monkeypatch, frameworks.framework, name="eager", most_bytes=LIMIT)


def test_missing_framework_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(frameworks, "absent", lambda why: (_ for _ in ()).throw(SystemExit(why)))
    with pytest.raises(SystemExit, match="cupy cannot be imported by this python3"):
        frameworks.framework("cupy", LIMIT)


@pytest.mark.parametrize("error", ["", "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"])
def test_nccl_reports_the_sum_or_the_error(monkeypatch: pytest.MonkeyPatch, device: fakes.Device, error: str) -> None:
    def reduce(array: fakes.Array) -> None:
        if error:
            raise RuntimeError(error)
        array.numbers = (array * 2).numbers

    vars(sys.modules["torch.distributed"])["all_reduce"] = reduce
    monkeypatch.setattr(os, "_exit", lambda _: None)
    said = run(monkeypatch, frameworks.nccl, file="/tmp/x", rank=0, ranks=2)
    assert (said["sum"], said["right"]) == (None if error else 2 << 20, 2 << 20)
    assert error in said["error"]


GIB = 1 << 30
SEEN = {
    "total_bytes": 4 * GIB,
    "free_bytes": 3 * GIB,
    "got_bytes": 3 * GIB,
    "refused": "out of memory",
    "used_bytes": GIB,
    "charged_bytes": GIB,
    "trials": {"it works once memory is free": ""},
}


@pytest.mark.parametrize(
    ("change", "device_bytes", "words"),
    [
        ({}, 4 * GIB, ""),
        ({"refused": "", "got_bytes": 5 * GIB}, 4 * GIB, "got 5 GiB of a limit of 4 GiB"),
        ({"got_bytes": 2 * GIB}, 3 * GIB, "got only 2 GiB of 3 GiB free"),
        ({"total_bytes": 80 * GIB}, 4 * GIB, "it sees 80 GiB"),
        ({}, 4 * GIB + MIB, "the device counts 4.001 GiB"),
        ({"trials": {"it works": "no"}}, 4 * GIB, "it did not go on as before (it works: no)"),
    ],
)
def test_verdict_on_a_framework(change: dict[str, Any], device_bytes: int, words: str) -> None:
    result = checks_frameworks.judge({**SEEN, **change}, 4 * GIB, device_bytes)
    assert result.verdict == ("missed" if words else "held") and words in result.note
