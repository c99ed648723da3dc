"""Memory that another process of the container has open stays charged when its owner frees it or dies."""

from __future__ import annotations

import pytest

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

ours, theirs = socket.socketpair()
child = os.fork()  # before either has started the driver
if child == 0:
    exporter(sys.argv[1], theirs)
    os._exit(0)
"""


@pytest.mark.parametrize("kind", ["ipc", "fd"])
@pytest.mark.parametrize("end", ["frees", "dies"])
def test_open_shared_memory_stays_charged(kind: str, end: str) -> None:
    limit = 2 * CONTEXT_BYTES + 500 * MIB
    program = """
        start()
        close = importer(sys.argv[1], ours)
        print(info()[0] // MIB, alloc(200 * MIB))  # charged once
        if sys.argv[2] == "frees":
            ours.send(b"free")
            ours.recv(4)
        else:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        back = 300 * MIB if sys.argv[2] == "dies" else 0
        print(info()[0] // MIB - back // MIB, alloc(200 * MIB + back))
        close()
        print(alloc(450 * MIB))
    """
    with Box([limit]) as box:
        assert run(box, program, kind, end, helpers=SHARING) == ["100", "2", "100", "2", "0"]
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


def test_more_exports_than_rows_stay_charged_while_open() -> None:
    """IPC handles differ: beyond the table's rows, they are counted together."""
    program = """
        start()
        import socket
        ours, theirs = socket.socketpair()
        class Handle(ctypes.Structure):
            _fields_ = [("raw", ctypes.c_char * 64)]
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
        + """
import socket
class Handle(ctypes.Structure):
    _fields_ = [("raw", ctypes.c_char * 64)]
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
        assert run(box, program, importer) == ["0", "400"]
        assert peak(box) <= 2 * GIB
