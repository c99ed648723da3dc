"""Code and global data of modules and libraries are charged, whatever the form of the image."""

from __future__ import annotations

import pytest

from tests.shim.box import CONTEXT_BYTES, GIB, Box
from tests.shim.inside import MIB, peak, run

IMAGES = r"""
import struct
LZ4, ZSTD = 0x2000, 0x8000

def fatbin(kind, body, flags=0, plain=0):
    sizes = 72, len(body), len(body)
    head = struct.pack("<HHIQIIHHIIIQQQ", kind, 1, *sizes, 0, 0, 8, 86, 0, 0, flags, 0, plain)
    assert len(head) == 64
    head += bytes(8)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(head) + len(body)) + head + body

def lz4(plain):
    "One run of literals, but the last is a match where it can be."
    zeros = len(plain) - len(plain.rstrip(b"\0"))
    text = plain[: len(plain) - zeros + 1] if zeros > 20 else plain
    lengths = lambda n: bytes([255]) * (n // 255) + bytes([n % 255])
    match = zeros - 1 - 4 if zeros > 20 else 0
    token = 0xF0 | (15 if match else 0)
    out = bytes([token]) + lengths(len(text) - 15) + text
    return out + struct.pack("<H", 1) + lengths(match - 15) if match else out

def elf(nobits):
    "A cubin of one section of global data that takes no bytes in the file."
    shoff = 64
    null = bytes(64)
    section = struct.pack("<IIQQQQIIQQ", 0, 8, 3, 0, 0, nobits, 0, 0, 8, 0)
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    head = ident + struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, shoff, 0, 64, 0, 0, 64, 2, 0)
    return head + null + section + bytes(64)

def ptx(declaration):
    head = ".version 7.0\n.target sm_70\n.address_size 64\n"
    return f"{head}{declaration}\n.visible .entry k() {{ ret; }}\n".encode() + b"\0"

def load(image):
    module, function = c_void_p(), c_void_p()
    result = cuda.cuModuleLoadData(byref(module), image)
    if result == 0:
        result = cuda.cuModuleGetFunction(byref(function), module, b"k")
        if result:
            ok(cuda.cuModuleUnload(module))
    return result
"""


@pytest.mark.parametrize(
    "image",
    [
        "ptx('.global .align 4 .b8 x[8589934592];')",
        "ptx('.global\\t.b8 x[8589934592];')",
        "ptx('.global .b64 x[1024 * 1024 * 1024];')",
        "ptx('.global .b8 y[64]; .global .b64 x[1024*1024*512];')",
        "elf(8 << 30)",
        "fatbin(2, elf(8 << 30))",
        "fatbin(2, lz4(elf(8 << 30)), LZ4, len(elf(0)))",
        "fatbin(1, lz4(ptx('.global .b8 x[8589934592];')), LZ4, len(ptx('.global .b8 x[8589934592];')))",
    ],
)
@pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
def test_large_variable_is_charged(image: str, loading: str) -> None:
    limit = 1 * GIB
    program = f"""
        os.environ["CUDA_MODULE_LOADING"] = "{loading}"
        start()
        print(load({image}), alloc(256 * MIB))
    """
    with Box([limit]) as box:
        assert run(box, program, helpers=IMAGES) == ["2", "0"]
        assert peak(box) <= limit


@pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
def test_unreadable_image_is_measured_and_unloaded_over_the_limit(loading: str) -> None:
    program = f"""
        os.environ["CUDA_MODULE_LOADING"] = "{loading}"
        start()
        small, large = (fatbin(2, b"SIMMOD globals=%d code=4096\\n" % n, ZSTD, 4096) for n in (100 * MIB, 900 * MIB))
        before = info()[0]
        print(load(large), info()[0] == before, load(small), before - info()[0] >= 100 * MIB)
        library, module = c_void_p(), c_void_p()
        print(cuda.cuLibraryLoadData(byref(library), large, None, None, 0, None, None, 0) or
              cuda.cuLibraryGetKernel(byref(module), library, b"k") or
              cuda.cuKernelGetFunction(byref(module), module))
        print(alloc(590 * MIB), alloc(40 * MIB))
    """
    with Box([1 * GIB]) as box:
        words = run(box, program, helpers=IMAGES)
        assert words[:4] == ["2", "True", "0", "True"]
        assert words[4:] == ["2", "0", "2"]


@pytest.mark.parametrize("use", ["launch", "attribute", "graph"])
def test_kernel_used_in_another_context_is_charged(use: str) -> None:
    limit = 2 * CONTEXT_BYTES + 150 * MIB
    program = """
        start()
        library, kernel, other = c_void_p(), c_void_p(), c_void_p()
        image = b"SIMMOD globals=%d code=4096\\n" % (100 * MIB)
        ok(cuda.cuLibraryLoadData(byref(library), image, None, None, 0, None, None, 0))
        ok(cuda.cuLibraryGetKernel(byref(kernel), library, b"k"))
        launch = lambda: cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None)
        print(launch())
        ok(cuda.cuCtxCreate_v2(byref(other), 0, 0))
        value, graph, node = c_int(), c_void_p(), c_void_p()
        if sys.argv[1] == "launch":
            print(launch())
        elif sys.argv[1] == "attribute":
            print(cuda.cuKernelGetAttribute(byref(value), 0, kernel, 0))
        else:
            ok(cuda.cuGraphCreate(byref(graph), 0))
            params = (c_uint64 * 10)(kernel.value, 1 | 1 << 32, 1 | 1 << 32, 1 | 1 << 32, 0)
            print(cuda.cuGraphAddKernelNode(byref(node), graph, None, c_size_t(0), params))
    """
    with Box([limit]) as box:
        assert run(box, program, use) == ["0", "2"]
        assert peak(box) <= limit


@pytest.mark.parametrize(("limit_kind", "value"), [(3, 8), (4, 1 << 20)])
def test_memory_for_nested_launches_is_charged(limit_kind: int, value: int) -> None:
    limit = CONTEXT_BYTES + 500 * MIB
    program = f"start(); print(cuda.cuCtxSetLimit({limit_kind}, c_size_t({value})), alloc(100 * MIB))"
    with Box([limit]) as box:
        assert run(box, program) == ["2", "0"]
        assert peak(box) <= limit


@pytest.mark.parametrize("limit_kind", [0, 1, 2])
def test_context_limit_below_its_default_frees_nothing(limit_kind: int) -> None:
    """The default of a context's limit stays allocated, so lowering the limit frees no memory."""
    program = f"""
        start()
        before, value = info(), c_size_t()
        ok(cuda.cuCtxGetLimit(byref(value), {limit_kind}))
        ok(cuda.cuCtxSetLimit({limit_kind}, c_size_t(0)))
        lowered = info()
        ok(cuda.cuCtxSetLimit({limit_kind}, c_size_t(4 * value.value)))
        raised = info()
        ok(cuda.cuCtxSetLimit({limit_kind}, value))
        print(lowered == before, raised[0] < before[0], info() == before)
        ok(cuda.cuCtxSetLimit({limit_kind}, c_size_t(0)))
        fill()
    """
    with Box([3 * GIB]) as box:
        assert run(box, program) == ["True", "True", "True"]
        assert peak(box) == 3 * GIB
