"""Start CUDA and print the result with MPS in one line of JSON; then wait for the end of standard input if requested.

mpsclient.py [hold | again | child] [bytes of one allocation]
mpsclient.py crowd N

crowd: the results of N processes, which all stay until then
child: after a line of input, the same in a child of this program instead
again: after a line of input, once more; the driver was initialised before
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys

import taker  # in the same directory

WORDS = ("PIPE_DIRECTORY", "ACTIVE_THREAD_PERCENTAGE", "PINNED_DEVICE_MEM_LIMIT")


def crowd(number: int) -> None:
    ends, said = os.pipe(), []
    for _ in range(number):
        mine = os.pipe()
        if os.fork() == 0:
            os.close(ends[1])
            os.write(mine[1], ctypes.CDLL("libcuda.so.1").cuInit(0).to_bytes(4, "little"))
            os.read(ends[0], 1)  # until the first process ends
            os._exit(0)
        said.append(int.from_bytes(os.read(mine[0], 4), "little"))
    print(json.dumps(said), flush=True)
    sys.stdin.read()
    os.close(ends[1])
    for _ in range(number):
        os.wait()


def main(words: list[str]) -> int:
    if "crowd" in words:
        crowd(int(words[1]))
        return 0
    if {"again", "child"} & set(words):
        print(json.dumps(ctypes.CDLL("libcuda.so.1").cuInit(0)), flush=True)
        sys.stdin.readline()
    if "child" in words:
        return subprocess.run([sys.executable, __file__, *words[1:]]).returncode
    cuda, libc = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    said: dict[str, object] = {"cuInit": cuda.cuInit(0)}
    if said["cuInit"] == 0:
        said["multiprocessors"], said["context"] = taker.begin(cuda)
        said["allocations"] = [taker.taken(cuda, size) for size in taker.sizes_of(words)]
    for word in WORDS:
        value = libc.getenv(b"CUDA_MPS_" + word.encode())
        said[word] = value.decode() if value else None
    return taker.end(said, words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
