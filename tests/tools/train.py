"""Which blocks of memory a start reads and writes: see hook/snapshot/snapshot.c.

python -m tests.tools.train SNAPSHOT     as root, after `make build`; their numbers to standard output

SNAPSHOT has a page for each block, and stops when it has nothing more to do: pages that it has by then were touched.
Blocks count that are touched in each of some starts.
"""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.lib import host
from tests.lib.runc import Container
from tests.sim.simhost import make_simhost

STARTS = 3
PAGE, POOL, HEADER, FRONT, FINE = 4096, 0x10000000, 8, 2 << 20, 64  # snapshot.c
LARGEST = 4 * PAGE
LARGEST_KIND = 280


def pool_in(snapshot: bytes) -> memoryview:
    first, count = struct.unpack_from("<32xQ16xH", snapshot)
    for at in range(first, first + 56 * count, 56):
        offset, address, size = struct.unpack_from("<8xQQ8xQ", snapshot, at)
        if address == POOL:
            return memoryview(snapshot)[offset : offset + size]
    raise ValueError("no pool")


def blocks_of(pool: memoryview) -> Iterator[tuple[int, int, int, int]]:
    """(number, size, first page, number of pages) of each."""
    at = HEADER + FRONT
    while at < len(pool):
        kind, number = struct.unpack_from("<II", pool, at)
        pages = 1
        if 0 < kind <= LARGEST_KIND:  # else it is no block: memory for Python's frames
            size = 16 * kind if kind <= FINE else (kind - 1) % 4 + 5 << (kind - FINE - 1) // 4 + 8
            pages = -(-size // PAGE)
            yield number, size, at // PAGE, pages
        at += pages * PAGE


def touched(command: list[str], snapshot: Path, size: int) -> set[int]:
    """The pages of the pool that a start reads or writes. The kernel maps what is in its cache around a page that is
    read, so nothing of the file is there."""
    with open(snapshot, "rb") as cached:
        os.fsync(cached.fileno())
        os.posix_fadvise(cached.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start = subprocess.Popen(command, env={"PATH": os.defpath}, stderr=subprocess.DEVNULL)
    _, status = os.waitpid(start.pid, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        raise SystemExit(f"{command[0]} ended with {status}")
    with open(f"/proc/{start.pid}/pagemap", "rb") as file:
        file.seek(POOL // PAGE * 8)
        entries = struct.unpack(f"<{size // PAGE}Q", file.read(size // PAGE * 8))
    os.kill(start.pid, signal.SIGKILL)
    start.wait()
    return {page for page, entry in enumerate(entries) if entry >> 63}


def main() -> None:
    snapshot = Path(sys.argv[1]).resolve()
    pool = pool_in(snapshot.read_bytes())
    host.enter_private_mounts()
    with tempfile.TemporaryDirectory(dir=host.BUILD) as name:
        directory = Path(name)
        shutil.copytree(host.BUILD / "bin", directory / "bin", symlinks=True)
        shutil.copytree(host.BUILD / "libexec", directory / "libexec")
        low_level = directory / "low-level"  # nobody can become this
        low_level.write_bytes(b"\0")
        low_level.chmod(0o755)
        node = host.Node(directory / "node", make_simhost(directory / "host", gpus=1), runtime={"path": str(low_level)})
        pages = []
        for one in range(1 + STARTS):
            with Container(directory, ["true"], env={"GPUSHARE_MEMORY": "1Gi"}) as container:
                runtime = node.runtime(directory / "bin" / "gpushare-runtime")
                command = [*runtime, "create", "--bundle", str(container.bundle), container.id]
                if one:
                    pages.append(touched(command, directory / "libexec" / "snapshot", len(pool)))
                else:  # compiles the configuration
                    subprocess.run(command, stderr=subprocess.DEVNULL)
                    (directory / "libexec" / "snapshot").unlink(missing_ok=True)
                    shutil.copy2(snapshot, directory / "libexec" / "snapshot")
        node.close()
    often = set.intersection(*pages)
    total = 0
    numbers = []
    for number, size, first, count in blocks_of(pool):
        if size <= LARGEST and total + size < FRONT - PAGE and not often.isdisjoint(range(first, first + count)):
            numbers.append(number)
            total += size
    numbers.sort()
    sys.stdout.buffer.write(struct.pack(f"<{len(numbers) + 1}I", *numbers, 0xFFFFFFFF))


if __name__ == "__main__":
    main()
