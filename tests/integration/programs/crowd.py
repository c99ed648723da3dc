"""Make thousands of mounts and dozens of roots in new namespaces, as an unprivileged user or a container's root can:
unshare -Urm python3 crowd.py MOUNTS PROCESSES. Print a line when all exist, and keep them until the input ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_MS_BIND, _MS_REC = 4096, 16384
_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str, flags: int) -> None:
    if _libc.mount(source.encode(), target.encode(), kind.encode(), flags, None) != 0:
        raise OSError(ctypes.get_errno(), f"mount {source} {target}")


def main(mounts: int, processes: int) -> None:
    base = "/tmp"
    mount("crowd", base, "tmpfs", 0)
    copies = 1
    for step in range(64):
        if copies >= mounts:
            break
        os.mkdir(f"{base}/{step}")
        mount(base, f"{base}/{step}", "none", _MS_BIND | _MS_REC)  # the recursive bind doubles the number
        copies *= 2
    children = []
    ready, done = os.pipe()
    for number in range(processes):
        root = f"{base}/root{number}"
        os.mkdir(root)
        child = os.fork()
        if child == 0:
            os.chroot(root)
            os.write(done, b".")
            signal.pause()
        children.append(child)
    for _ in children:
        os.read(ready, 1)
    print(os.getpid(), *children, flush=True)
    sys.stdin.read()
    for child in children:
        os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
