"""Memory that another process of the container has open stays charged when its owner frees it or dies."""

from __future__ import annotations

import pytest

from simulator.simhost import Costs
from tests.shim.box import CONTEXT_BYTES, GIB, Box
from tests.shim.inside import MIB, PRELUDE, peak, run

SHARING = """
import array, signal, socket
SIZE = 400 * MIB

def create(exportable=True):
    handle, props = c_uint64(), (c_uint32 * 8)(1, exportable, 1, 0)
    return cuda.cuMemCreate(byref(handle), c_size_t(SIZE), props, c_uint64(0)) or handle

def exporter(kind, channel):
    start()
    if kind == "ipc":
        name, address = ctypes.create_string_buffer(64), []
        ok(alloc(SIZE, address))
        ok(cuda.cuIpcGetMemHandle(name, address[0]))
        channel.send(name.raw)
    else:
        handle, fd = create(), c_int()
        ok(cuda.cuMemExportToShareableHandle(byref(fd), handle, 1, c_uint64(0)))
        channel.sendmsg([b"fd"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd.value]))])
        os.close(fd.value)
    channel.recv(4)
    ok(cuda.cuMemFree_v2(address[0]) if kind == "ipc" else cuda.cuMemRelease(handle))
    channel.send(b"free")
    channel.recv(4)

class Handle(ctypes.Structure):
    _fields_ = [("raw", ctypes.c_char * 64)]

def importer(kind, channel):
    "Opens what the exporter sends; gives the function that closes it."
    data, found, _, _ = channel.recvmsg(64, 64)
    if kind == "ipc":
        address, name = c_uint64(), Handle()
        ctypes.memmove(byref(name), data, 64)
        ok(cuda.cuIpcOpenMemHandle_v2(byref(address), name, 1))
        return lambda: ok(cuda.cuIpcCloseMemHandle(address))
    fd, handle = array.array("i", found[0][2])[0], c_uint64()
    ok(cuda.cuMemImportFromShareableHandle(byref(handle), c_void_p(fd), 1))
    os.close(fd)
    return lambda: ok(cuda.cuMemRelease(handle))

def compare():
    "Make the shim compare its charge with the driver's count, twice."
    for _ in range(2):
        stream = c_void_p()
        ok(cuda.cuStreamCreate(byref(stream), 1))
        ok(cuda.cuStreamDestroy_v2(stream))
        info()

def share(kind, end):
    ours, theirs = socket.socketpair()
    child = os.fork()  # before either has started the driver
    if child == 0:
        exporter(kind, theirs)
        os._exit(0)
    start()
    close = importer(kind, ours)
    compare()
    print(kind, end, info()[0] // MIB, alloc(200 * MIB))  # charged once
    if end == "frees":
        ours.send(b"free")
        ours.recv(4)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    compare()
    back = 300 * MIB if end == "dies" else 0
    print(info()[0] // MIB - back // MIB, alloc(200 * MIB + back))
    close()
    compare()
    print(alloc(450 * MIB))
    if end == "frees":
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
"""


@pytest.mark.parametrize("listed", ["owner", "both"])
def test_open_shared_memory_stays_charged(listed: str) -> None:
    """Once, whether NVML lists it for its owner alone or for both processes, also after a comparison."""
    cases = [(kind, end) for kind in ("ipc", "fd") for end in ("frees", "dies")]
    limit = 2 * CONTEXT_BYTES + 500 * MIB
    with Box([limit], costs=Costs(imports_listed=listed == "both")) as box:
        want = [[*case, "100", "2", "100", "2", "0"] for case in cases]
        found = run(box, f"for case in {cases}:\n    apart(share, *case)", helpers=SHARING)
        assert found == [word for row in want for word in row]
        assert peak(box) <= limit


def test_closed_shared_memory_is_released() -> None:
    program = """
        start()
        for _ in range(400):
            name, address = ctypes.create_string_buffer(64), []
            ok(alloc(300 * MIB, address))
            ok(cuda.cuIpcGetMemHandle(name, address[0]))
            ok(cuda.cuMemFree_v2(address[0]))
        print(alloc(300 * MIB))
    """
    with Box([1 * GIB]) as box:
        assert run(box, program) == ["0"]


def test_unopened_exports_are_released() -> None:
    """Descriptors of all exports look alike, and there are more exports than rows."""
    program = """
        start()
        def create(size):
            handle, props = c_uint64(), (c_uint32 * 8)(1, 1, 1, 0)
            ok(cuda.cuMemCreate(byref(handle), c_size_t(size), props, c_uint64(0)))
            return handle
        before, inodes = info()[0], set()
        for _ in range(4):
            handles = [create(2 * MIB) for _ in range(300)]
            for handle in handles:
                fd = c_int()
                ok(cuda.cuMemExportToShareableHandle(byref(fd), handle, 1, c_uint64(0)))
                inodes.add(os.fstat(fd.value).st_ino)
                os.close(fd.value)
            print((before - info()[0]) // MIB)
            for handle in handles:
                ok(cuda.cuMemRelease(handle))
            print((before - info()[0]) // MIB)
        print(len(inodes))
    """
    with Box([1 * GIB]) as box:
        assert run(box, program) == ["600", "0"] * 4 + ["1"]


@pytest.mark.parametrize("marked", [True, False])
def test_exports_are_told_apart(marked: bool) -> None:
    """All descriptors are of one file. Freed memory that no process has open is released, and open memory stays
    charged. Without locks of open files (as in some sandboxes) all of it counts as open."""
    program = """
        if sys.argv[1] == "False":
            libc = ctypes.CDLL(None)
            class Filter(ctypes.Structure):  # fcntl(F_OFD_SETLK) gives ENOLCK
                _fields_ = [("n", ctypes.c_ushort), ("at", c_void_p)]
            rows = [(0x20, 0, 0, 0), (0x15, 0, 3, 72), (0x20, 0, 0, 24), (0x15, 0, 1, 37),
                    (0x06, 0, 0, 0x50000 | 37), (0x06, 0, 0, 0x7FFF0000)]
            import struct
            code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *row) for row in rows))
            assert libc.prctl(38, 1, 0, 0, 0) == 0
            assert libc.prctl(22, 2, byref(Filter(len(rows), ctypes.cast(code, c_void_p)))) == 0
        ours, theirs = socket.socketpair()
        child = os.fork()
        if child == 0:
            start()
            _, found, _, _ = theirs.recvmsg(64, 64)
            (control,) = found
            handle = c_uint64()
            fd = array.array("i", control[2])[0]
            ok(cuda.cuMemImportFromShareableHandle(byref(handle), c_void_p(fd), 1))
            os.close(fd)
            theirs.send(b"open")
            theirs.recv(4)
            ok(cuda.cuMemRelease(handle))
            theirs.send(b"gone")
            theirs.recv(4)
            os._exit(0)
        start()
        def create(size):
            handle, props, fd = c_uint64(), (c_uint32 * 8)(1, 1, 1, 0), c_int()
            ok(cuda.cuMemCreate(byref(handle), c_size_t(size), props, c_uint64(0)))
            ok(cuda.cuMemExportToShareableHandle(byref(fd), handle, 1, c_uint64(0)))
            return handle, fd
        (opened, fd), (unopened, _) = create(100 * MIB), create(300 * MIB)
        again = c_int()  # a second descriptor of the same memory
        ok(cuda.cuMemExportToShareableHandle(byref(again), opened, 1, c_uint64(0)))
        ours.sendmsg([b"fd"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [again.value]))])
        ours.recv(4)
        before = info()[0]
        ok(cuda.cuMemRelease(unopened))
        print((info()[0] - before) // MIB)
        ok(cuda.cuMemRelease(opened))
        print((info()[0] - before) // MIB)
        ours.send(b"shut")
        ours.recv(4)
        print((info()[0] - before) // MIB)
        ours.send(b"exit")
        os.waitpid(child, 0)
    """
    with Box([2 * GIB]) as box:
        found = run(box, program, str(marked), helpers=SHARING)
        assert found == (["300", "300", "400"] if marked else ["0", "0", "400"])


def test_more_exports_than_rows_stay_charged_while_open() -> None:
    """IPC handles differ: beyond the table's rows, they are counted together."""
    program = """
        start()
        ours, theirs = socket.socketpair()
        names, addresses = [], []
        for _ in range(200):
            name = Handle()
            ok(alloc(2 * MIB, addresses))
            ok(cuda.cuIpcGetMemHandle(byref(name), addresses[-1]))
            names.append(bytes(name))
        before = info()[0]
        end = theirs.fileno()
        importer = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(end)], pass_fds=[end])
        for name in names:
            ours.sendall(name)
        ours.recv(4)
        context = before - info()[0]
        for address in addresses:
            ok(cuda.cuMemFree_v2(address))
        print((before - info()[0] - context) // MIB)
        ours.sendall(b"done")
        importer.wait()
        print((info()[0] - before) // MIB)
    """
    importer = (
        PRELUDE
        + SHARING
        + """
channel = socket.socket(fileno=int(sys.argv[1]))
start()
for _ in range(200):
    name, address = Handle(), c_uint64()
    ctypes.memmove(byref(name), channel.recv(64, socket.MSG_WAITALL), 64)
    ok(cuda.cuIpcOpenMemHandle_v2(byref(address), name, 1))
channel.sendall(b"open")
channel.recv(4)
"""
    )
    with Box([2 * GIB]) as box:
        assert run(box, program, importer, helpers=SHARING) == ["0", "400"]
        assert peak(box) <= 2 * GIB


@pytest.mark.parametrize(("exports", "listed"), [(3, True), (200, False)])
def test_memory_open_in_two_processes_is_charged_once(exports: int, listed: bool) -> None:
    """Its exporter dies; the driver then lists it for one of the two. Also with more exports than rows."""
    program = f"""
        channels = [socket.socketpair() for _ in range(2)]
        children = []
        for _, theirs in channels:
            children.append(os.fork())
            if children[-1]:
                continue
            start()
            for _ in range({exports}):
                name, address = Handle(), c_uint64()
                ctypes.memmove(byref(name), theirs.recv(64, socket.MSG_WAITALL), 64)
                ok(cuda.cuIpcOpenMemHandle_v2(byref(address), name, 1))
            theirs.send(b"open")
            while theirs.recv(4):
                theirs.send(b"%16d" % (compare() or info()[0]))
            os._exit(0)
        exporter = os.fork()
        if exporter == 0:
            start()
            held = []
            for _ in range({exports}):
                name = Handle()
                ok(alloc(2 * MIB, held))
                ok(cuda.cuIpcGetMemHandle(byref(name), held[-1]))
                for ours, _ in channels:
                    ours.sendall(name)
            time.sleep(100)
        for ours, _ in channels:
            ours.recv(4)
        def ask():
            for ours, _ in channels * 2:
                ours.send(b"free")
                last = int(ours.recv(16))
            return last // MIB
        print(ask())
        os.kill(exporter, 9)
        os.waitpid(exporter, 0)
        print(ask())
        os._exit([os.kill(child, 9) for child in children] and 0)
    """
    with Box([2 * GIB], costs=Costs(imports_listed=listed)) as box:
        used = 2 * exports
        done = run(box, program, helpers=SHARING)
        assert done == [str(2048 - 900 - used), str(2048 - 600 - used)]
