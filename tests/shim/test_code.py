"""Code and global data of modules and libraries are charged, whatever the form of the image."""

from __future__ import annotations

import subprocess
import textwrap

import pytest

from tests.shim.box import CONTEXT_BYTES, GIB, Box
from tests.shim.inside import MIB, PRELUDE, peak, run

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

def zstd(plain):
    "Blocks of 128 KiB: one byte that is repeated, or as they are."
    out = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", len(plain))
    for at in range(0, max(len(plain), 1), 1 << 17):
        block = plain[at : at + (1 << 17)]
        last = at + (1 << 17) >= len(plain)
        repeated = len(block) > 1 and block == block[:1] * len(block)
        out += (last | repeated << 1 | len(block) << 3).to_bytes(3, "little") + (block[:1] if repeated else block)
    return out

def cubin(sections, kernels=()):
    "sections: (name, flags, size), which take no bytes in the file. kernels: names of entry functions."
    names, strings, table, symbols, content = b"\0", b"\0", bytes(64), bytes(24), b""
    for kernel in kernels:
        symbols += struct.pack("<IBBHQQ", len(strings), 0x12, 0x10, 1, 0, 0)
        strings += kernel.encode() + b"\0"
    bodies = [(".shstrtab", 3, None), (".symtab", 2, symbols), (".strtab", 3, strings)]
    for name in [row[0] for row in sections] + [row[0] for row in bodies]:
        names += name.encode() + b"\0"
    at, first = 1, 1 + len(sections)
    for name, flags, size in sections:
        table += struct.pack("<IIQQQQIIQQ", at, 8, flags, 0, 64, size, 0, 0, 8, 0)
        at += len(name) + 1
    for name, kind, body in bodies:
        body = names if body is None else body
        link = first + 2 if kind == 2 else 0
        table += struct.pack("<IIQQQQIIQQ", at, kind, 0, 0, 64 + len(content), len(body), link, 0, 1, 24)
        at += len(name) + 1
        content += body
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    head = struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, 64 + len(content), 0, 64, 0, 0, 64, first + 3, first)
    return ident + head + content + table

def elf(nobits):
    "A cubin with global data that takes no bytes in the file."
    return cubin([(".nv.global", 3, nobits), (".text.k", 6, 64)], ["k"]) + bytes(64)

def fat(*entries):
    "entries: (kind, arch, body), in one fat binary."
    parts = b""
    for kind, arch, body in entries:
        body += bytes(-len(body) % 8)
        head = struct.pack("<HHIQIIHHIIIQQQ", kind, 1, 72, len(body), 0, 0, 0, 0, arch, 0, 0, 0, 0, 0)
        parts += head + bytes(8) + body
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(parts)) + parts

def function(module, name):
    found = c_void_p()
    return cuda.cuModuleGetFunction(byref(found), module, name), found

def loaded(image):
    module = c_void_p()
    ok(cuda.cuModuleLoadData(byref(module), image))
    return module

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


@pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
def test_large_variable_is_charged(loading: str) -> None:
    program = """
        large = ptx(".global .b8 x[8589934592];")
        def refused(name, image):
            start()
            print(name, load(image), alloc(256 * MIB))
        for name, image in {
            "aligned": ptx(".global .align 4 .b8 x[8589934592];"),
            "tab": ptx(".global\\t.b8 x[8589934592];"),
            "product": ptx(".global .b64 x[1024 * 1024 * 1024];"),
            "second": ptx(".global .b8 y[64]; .global .b64 x[1024*1024*512];"),
            "cubin": elf(8 << 30),
            "fat-cubin": fatbin(2, elf(8 << 30)),
            "lz4-cubin": fatbin(2, lz4(elf(8 << 30)), LZ4, len(elf(0))),
            "zstd-cubin": fatbin(2, zstd(elf(8 << 30)), ZSTD, len(elf(0))),
            "zstd-ptx": fatbin(1, zstd(large), ZSTD, len(large)),
            "lz4-ptx": fatbin(1, lz4(large), LZ4, len(large)),
            "two": fat((2, 80, elf(8 << 30)), (1, 70, ptx(""))),
        }.items():
            apart(refused, name, image)
    """
    with Box([GIB]) as box:
        words = charged(box, program, loading)
        assert len(words) == 33 and words[1::3] == ["2"] * 11 and words[2::3] == ["0"] * 11, words
        assert peak(box) <= GIB


def charged(box: Box, program: str, loading: str) -> list[str]:
    """Run the program while the driver loads modules lazily or at once."""
    return run(box, f'os.environ["CUDA_MODULE_LOADING"] = "{loading}"\n' + textwrap.dedent(program), helpers=IMAGES)


@pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
def test_small_modules_share_blocks(loading: str) -> None:
    program = """
        start()
        before = info()[0]
        image = cubin([(".text.k", 6, 8192), (".nv.constant0.k", 2, 512)], ["k"])
        for count in (1, 10, 500):
            modules = [loaded(image) for _ in range(count)]
            for module in modules:
                ok(function(module, b"k")[0])
            print((before - info()[0]) // MIB)
            for module in modules:
                ok(cuda.cuModuleUnload(module))
            print(before - info()[0])
    """
    with Box([2 * GIB]) as box:
        assert charged(box, program, loading) == ["2", "0", "2", "0", "6", "0"]
        assert peak(box) == CONTEXT_BYTES + 6 * MIB  # as the simulated driver


def test_only_used_kernels_are_charged() -> None:
    program = """
        start()
        sections = [(".text.a", 6, 30 * MIB), (".text.b", 6, 50 * MIB), (".text.helper", 6, 10 * MIB),
                    (".nv.constant0.a", 2, 4 * MIB), (".nv.constant3", 2, 2 * MIB), (".nv.global", 3, 4 * MIB),
                    (".nv.shared.a", 3, 64 << 10), (".debug_line", 0, 100 * MIB)]
        before, used = info()[0], lambda: (before - info()[0]) // MIB
        module = loaded(cubin(sections, ["a", "b"]))
        print(used())
        print(function(module, b"absent")[0], used())
        ok(function(module, b"a")[0])
        print(used())
        ok(function(module, b"a")[0])
        ok(function(module, b"b")[0])
        print(used())
        ok(cuda.cuModuleUnload(module))
        print(used())
    """
    with Box([2 * GIB]) as box:
        assert run(box, program, helpers=IMAGES) == ["0", "500", "0", "50", "100", "0"]
        assert peak(box) == CONTEXT_BYTES + 100 * MIB


def test_only_the_image_for_this_device_is_charged() -> None:
    program = """
        start()
        code = lambda mib: cubin([(".text.k", 6, mib * MIB)], ["k"])
        before, used = info()[0], lambda: (before - info()[0]) // MIB
        fits = fat((2, 70, code(900)), (2, 80, code(20)), (2, 86, code(10)), (2, 90, code(900)),
                   (1, 90, ptx(".global .b8 x[943718400];")), (1, 80, ptx(".global .b8 x[943718400];")))
        ok(function(loaded(fits), b"k")[0])
        print(used())
        ok(function(loaded(fat((2, 70, code(900)), (1, 80, ptx(".global .b8 x[6000000];")))), b"k")[0])
        print(used())
    """
    with Box([2 * GIB]) as box:
        assert run(box, program, helpers=IMAGES) == ["10", "16"]


def test_full_container_keeps_its_compressed_library() -> None:
    """Neither a neighbour's allocations nor the limit changes what a library is charged, and handles stay valid. A
    kernel whose code exceeds the limit runs; then nothing is free."""
    program = """
        start()
        sections = [(".text.k", 6, 20 * MIB), (".text.other", 6, 60 * MIB), (".nv.global", 3, 10 * MIB)]
        image = cubin(sections, ["k", "other"])
        image = fatbin(2, zstd(image), ZSTD, len(image))
        library, kernel, again = c_void_p(), c_void_p(), c_void_p()
        ok(cuda.cuLibraryLoadData(byref(library), image, None, None, 0, None, None, 0))
        ok(cuda.cuLibraryGetKernel(byref(kernel), library, b"k"))
        before = info()[0]
        if sys.argv[1] == "full":
            ok(alloc(info()[0] - 60 * MIB))
            before = info()[0]
        launch = lambda which: cuda.cuLaunchKernel(which, 1, 1, 1, 1, 1, 1, 0, None, None, None)
        print(launch(kernel), (before - info()[0]) // MIB)
        ok(cuda.cuLibraryGetKernel(byref(again), library, b"other"))
        print(launch(again), launch(kernel), cuda.cuLibraryGetKernel(byref(again), library, b"k"))
        print(info()[0] // MIB, alloc(2 * MIB))
    """
    with Box([1 * GIB]) as box:
        assert run(box, program, "full", helpers=IMAGES) == ["0", "30", "0", "0", "0", "0", "2"]
        assert run(box, program, "", helpers=IMAGES) == ["0", "30", "0", "0", "0", "634", "0"]
        assert peak(box) == 1 * GIB + 30 * MIB


def test_a_busy_neighbour_is_not_charged() -> None:
    """Both containers are on one device, and one allocates all the time while the other loads compressed modules."""
    neighbour = """
        start()
        print("ready", flush=True)
        while True:
            held = []
            for _ in range(64):
                alloc(32 * MIB, held)
            for address in held:
                cuda.cuMemFree_v2(address)
    """
    program = """
        start()
        image = cubin([(".text.k", 6, 4096)], ["k"])
        image = fatbin(2, zstd(image), ZSTD, len(image))
        before = info()[0]
        for _ in range(500):
            ok(function(loaded(image), b"k")[0])
        print((before - info()[0]) // MIB)
    """
    command = ["python3", "-c", PRELUDE + textwrap.dedent(neighbour)]
    with (
        Box([1 * GIB]) as box,
        Box([4 * GIB], simhost=box.simhost) as other,
        other.popen(command, stdout=subprocess.PIPE) as busy,
    ):
        assert busy.stdout
        assert busy.stdout.readline()
        try:
            assert run(box, program, helpers=IMAGES) == ["2"]
        finally:
            busy.kill()


def test_entry_that_cannot_be_decompressed_is_charged_as_the_driver_counts() -> None:
    """The size in its header has no effect."""
    program = """
        start()
        module = c_void_p()
        broken = fatbin(2, b"no frame of zstd" * 4, ZSTD, 900 * MIB)
        print(cuda.cuModuleLoadData(byref(module), broken), function(module, b"k")[0], alloc(4 * MIB))
        ok(cuda.cuModuleUnload(module))
        print(alloc(4 * MIB))
    """
    with Box([1 * GIB]) as box:
        assert run(box, program, helpers=IMAGES) == ["0", "0", "0", "0"]


def test_library_is_charged_at_its_first_use() -> None:
    """Also if the program keeps the image (CU_LIBRARY_BINARY_IS_PRESERVED), which the shim reads only then."""
    program = """
        start()
        for preserved in (0, 1):
            image = ctypes.create_string_buffer(cubin([(".text.k", 6, 40 * MIB)], ["k"]))
            library, kernel = c_void_p(), c_void_p()
            option, value = (c_int * 1)(1), (c_void_p * 1)(preserved)
            ok(cuda.cuLibraryLoadData(byref(library), image, None, None, 0, option, value, 1))
            before = info()[0]
            ok(cuda.cuLibraryGetKernel(byref(kernel), library, b"k"))
            print(before - info()[0])
            ok(cuda.cuKernelGetFunction(byref(c_void_p()), kernel))
            print((before - info()[0]) // MIB)
            ok(cuda.cuLibraryUnload(library))
            print(before - info()[0])
    """
    with Box([1 * GIB]) as box:
        assert run(box, program, helpers=IMAGES) == ["0", "40", "0"] * 2


def test_local_memory_is_charged_at_the_first_launch() -> None:
    """The room is for all threads that the device holds at once, and stays as large as the largest kernel needed."""
    program = """
        start()
        processors, each = c_int(), c_int()
        ok(cuda.cuDeviceGetAttribute(byref(processors), 16, 0))
        ok(cuda.cuDeviceGetAttribute(byref(each), 39, 0))
        threads = processors.value * each.value
        module = loaded(b"SIMMOD globals=0 code=4096\\n")
        small, large, huge = (function(module, b"k_local_%d" % n)[1] for n in (2048, 4096, 65536))
        launch = lambda which: cuda.cuLaunchKernel(which, 1, 1, 1, 1, 1, 1, 0, None, None, None)
        before, used = info()[0], lambda: before - info()[0]
        blocks = lambda n: -(-n * threads // (2 * MIB)) * 2 * MIB
        results = [launch(small), used() == blocks(1024), launch(large), used() == blocks(3072), launch(small)]
        print(*results, used() == blocks(3072), launch(huge), launch(large), used() == blocks(3072))
        ok(cuda.cuModuleUnload(module))
        print(used() == blocks(3072) - 2 * MIB)
    """
    with Box([2 * GIB]) as box:
        assert run(box, program, helpers=IMAGES) == ["0", "True", "0", "True", "0", "True", "2", "0", "True", "True"]
        assert peak(box) <= 2 * GIB


def test_kernel_used_in_another_context_is_charged() -> None:
    limit = 2 * CONTEXT_BYTES + 150 * MIB
    program = """
        start()
        library, kernel, other = c_void_p(), c_void_p(), c_void_p()
        image = b"SIMMOD globals=%d code=4096\\n" % (100 * MIB)
        ok(cuda.cuLibraryLoadData(byref(library), image, None, None, 0, None, None, 0))
        ok(cuda.cuLibraryGetKernel(byref(kernel), library, b"k"))
        launch = lambda: cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None)
        print("first", launch())
        ok(cuda.cuCtxCreate_v2(byref(other), 0, 0))
        value, graph, node = c_int(), c_void_p(), c_void_p()
        print("launch", launch())
        print("attribute", cuda.cuKernelGetAttribute(byref(value), 0, kernel, 0))
        ok(cuda.cuGraphCreate(byref(graph), 0))
        params = (c_uint64 * 10)(kernel.value, 1 | 1 << 32, 1 | 1 << 32, 1 | 1 << 32, 0)
        print("graph", cuda.cuGraphAddKernelNode(byref(node), graph, None, c_size_t(0), params))
    """
    with Box([limit]) as box:
        assert run(box, program) == ["first", "0", "launch", "2", "attribute", "2", "graph", "2"]
        assert peak(box) <= limit


def test_memory_for_nested_launches_is_charged() -> None:
    limit = CONTEXT_BYTES + 500 * MIB
    program = """
        start()
        print(*[cuda.cuCtxSetLimit(kind, c_size_t(value)) for kind, value in ((3, 8), (4, 1 << 20))], alloc(100 * MIB))
    """
    with Box([limit]) as box:
        assert run(box, program) == ["2", "2", "0"]
        assert peak(box) <= limit


def test_context_limit_below_its_default_frees_nothing() -> None:
    """The default of a context's limit stays allocated, so lowering the limit frees no memory."""
    program = """
        start()
        for kind in range(3):
            before, value = info(), c_size_t()
            ok(cuda.cuCtxGetLimit(byref(value), kind))
            ok(cuda.cuCtxSetLimit(kind, c_size_t(0)))
            lowered = info()
            ok(cuda.cuCtxSetLimit(kind, c_size_t(4 * value.value)))
            raised = info()
            ok(cuda.cuCtxSetLimit(kind, value))
            print(lowered == before, raised[0] < before[0], info() == before)
            ok(cuda.cuCtxSetLimit(kind, c_size_t(0)))
        fill()
    """
    with Box([3 * GIB]) as box:
        assert run(box, program) == ["True"] * 9
        assert peak(box) == 3 * GIB
