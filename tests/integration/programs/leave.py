"""In a container, in its own user and mount namespace (unshare -Urm): make a CUDA context, then pivot_root away from
all of the container's mounts. Report it in a file of the old root, through a descriptor, and sleep."""

from __future__ import annotations

import ctypes
import os
import signal

from cuda.bindings import driver as cuda
from tenant import call

_MNT_DETACH = 2
_SYS_PIVOT_ROOT = 155 if os.uname().machine == "x86_64" else 41
_libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), what)


def main() -> None:
    said = os.open("/left", os.O_WRONLY)
    call(cuda.cuInit(0))
    call(cuda.cuCtxSetCurrent(call(cuda.cuDevicePrimaryCtxRetain(0))))
    call(cuda.cuMemAlloc(1 << 30))
    check(_libc.mount(b"new", b"/tmp", b"tmpfs", 0, None), "mount")
    os.mkdir("/tmp/old")
    check(_libc.syscall(_SYS_PIVOT_ROOT, b"/tmp", b"/tmp/old"), "pivot_root")
    os.chdir("/")
    check(_libc.umount2(b"/old", _MNT_DETACH), "umount2")
    os.write(said, f"{os.listdir('/')}\n".encode())
    os.close(said)
    signal.pause()


main()
