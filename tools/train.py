"""Print the blocks of memory that a start reads or writes: see hook/snapshot/snapshot.c.

python -m tools.train SNAPSHOT     as root, after `make build`; prints the numbers of the blocks

SNAPSHOT must be built with a page for each block, and it sends itself SIGSTOP when its work is done; the start touched
the pages that are in memory then. A block counts if it is touched in every one of several starts by the runtime, by the
createRuntime hook or by the poststop hook. Blocks that several of these programs need go into the first area; each has
another area for the blocks that only it needs.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from simulator.simhost import make_simhost
from tests.support import host
from tests.support.runc import Container

STARTS = 3
SHARE = {"GPUSHARE_MEMORY": "1Gi"}
PAGE, POOL, HEADER, AREA, AREAS, FINE = 4096, 0x10000000, 8, 3 << 18, 4, 64  # as in snapshot.c
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
    """Yield (number, size, first page, number of pages) of each block."""
    at = HEADER + AREA * AREAS
    while at < len(pool):
        kind, number = struct.unpack_from("<II", pool, at)
        pages = 1
        if 0 < kind <= LARGEST_KIND:  # otherwise it is memory for Python's frames, not a block
            size = 16 * kind if kind <= FINE else (kind - 1) % 4 + 5 << (kind - FINE - 1) // 4 + 8
            pages = -(-size // PAGE)
            yield number, size, at // PAGE, pages
        at += pages * PAGE


def touched(command: list[str], snapshot: Path, size: int, says: str = "") -> set[int]:
    """Return the pages of the pool that a start touches.

    The start must end with a line that contains `says`, or print nothing. The snapshot file is dropped from the page
    cache first, because the kernel also maps cached pages around a page that is read.
    """
    with open(snapshot, "rb") as cached:
        os.fsync(cached.fileno())
        os.posix_fadvise(cached.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with tempfile.TemporaryFile() as stderr:
        # It ends with this process: runc kills a late hook, and then waits for processes that hold the hook's output.
        command = ["setpriv", "--pdeathsig", "KILL", *command]
        start = subprocess.Popen(command, env={"PATH": os.defpath}, stderr=stderr)
        _, status = os.waitpid(start.pid, os.WUNTRACED)
        stderr.seek(0)
        said = stderr.read().decode(errors="replace").strip()
    if not os.WIFSTOPPED(status) or says not in said or bool(said) != bool(says):
        raise SystemExit(f"{shlex.join(command)} ended with {status}: {said}")
    with open(f"/proc/{start.pid}/pagemap", "rb") as file:
        file.seek(POOL // PAGE * 8)
        entries = struct.unpack(f"<{size // PAGE}Q", file.read(size // PAGE * 8))
    os.kill(start.pid, signal.SIGKILL)
    start.wait()
    return {page for page, entry in enumerate(entries) if entry >> 63}


def as_hook(snapshot: Path, found: Path, program: str, words: list[str]) -> None:
    """Return the pages that the hook touches for the container's init, just after the low-level runtime created it.
    The snapshot then refuses the container."""
    pages = touched([program, *words], snapshot, len(pool_in(snapshot.read_bytes())))
    with open(found / words[-1], "a", encoding="ascii") as lines:
        lines.write(f"{json.dumps(sorted(pages))}\n")
    raise SystemExit(1)


def main() -> None:
    snapshot = Path(sys.argv[1]).resolve()
    if len(sys.argv) > 2:
        as_hook(snapshot, Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
    pool = pool_in(snapshot.read_bytes())
    inherit_nothing()
    host.enter_private_mounts()
    with tempfile.TemporaryDirectory(dir=host.BUILD) as name:
        found = often(Path(name), snapshot, len(pool))
    room = [AREA - PAGE] * AREAS
    order = []
    for number, size, first, count in blocks_of(pool):
        ways = [way for way, pages in enumerate(found) if not pages.isdisjoint(range(first, first + count))]
        area = 0 if len(ways) > 1 else 1 + sum(ways)
        if ways and size <= min(LARGEST, room[area]):
            order.append((number, area))
            room[area] -= size
    order.sort()
    words = [number | area << 30 for number, area in order]
    sys.stdout.buffer.write(struct.pack(f"<{len(words) + 1}I", *words, 0xFFFFFFFF))


def inherit_nothing() -> None:
    """Make each start the same, however this program was started: a shell lets background jobs ignore SIGINT, and then
    Python does not handle it."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o022)


def often(directory: Path, snapshot: Path, size: int) -> list[set[int]]:
    """Return the pages touched in every start: by the runtime, by its createRuntime hook, and by its poststop hook."""
    # programs under an ordinary Python; programs with the snapshot to measure
    plain, sparse = directory / "plain", directory / "sparse"
    for place in (plain, sparse):
        shutil.copytree(host.BUILD / "bin", place / "bin", symlinks=True)
        shutil.copytree(host.BUILD / "libexec", place / "libexec", ignore=shutil.ignore_patterns("snapshot"))
    sparse_snapshot = sparse / "libexec" / "snapshot"
    shutil.copy2(snapshot, sparse_snapshot)
    hook = plain / "bin" / "gpushare-hook"
    hook.unlink()
    words = [sys.executable, "-m", "tools.train", sparse_snapshot, directory, sparse / "bin" / "gpushare-hook"]
    line = " ".join(shlex.quote(str(word)) for word in words)
    hook.write_text(f'#!/bin/sh\ncd {shlex.quote(os.getcwd())} && exec {line} "$@"\n')
    hook.chmod(0o755)
    low_level = directory / "low-level"  # a file that cannot be executed
    low_level.write_bytes(b"\0")
    low_level.chmod(0o755)
    sim = make_simhost(directory / "host", gpus=1)

    def command(node: host.Node, programs: Path, container: Container) -> list[str]:
        runtime = node.runtime(programs / "bin" / "gpushare-runtime")
        return [*runtime, "create", "--bundle", str(container.bundle), container.id]

    with closing(host.Node(directory / "node", sim)) as node:
        for _ in range(STARTS):
            with Container(directory, ["true"], env=SHARE) as container:
                subprocess.run(command(node, plain, container), stderr=subprocess.DEVNULL)
    runtimes = []
    with closing(host.Node(directory / "refused", sim, runtime={"path": str(low_level)})) as node:
        with Container(directory, ["true"], env=SHARE) as container:  # this start compiles the configuration
            subprocess.run(command(node, plain, container), stderr=subprocess.DEVNULL)
        for _ in range(STARTS):
            with Container(directory, ["true"], env=SHARE) as container:
                runtimes.append(touched(command(node, sparse, container), sparse_snapshot, size, "Exec format error"))
    hooks = ([set(json.loads(line)) for line in open(directory / stage)] for stage in ("adopt", "poststop"))
    return [set.intersection(*pages) for pages in (runtimes, *hooks)]


if __name__ == "__main__":
    main()
