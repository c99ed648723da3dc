"""Races: a second container that shares a directory swaps a component in a loop, over many starts of the first one.

Each start must end as a share or as a refusal, and the host's targets of the swap must stay unchanged.
GPUSHARE_RACES=n makes the loop n starts long; without it a race takes at most RACE_S.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.host import Node
from tests.support.runc import Container, RuntimeFailed

from . import proof
from .scene import LIBCUDA, VERSION, Scene

RACE_S = 2.0  # seconds for one race and way in `make test`
AT_LEAST = 3  # starts, on a machine of any speed
SHOWN = f"{proof.LIMIT >> 20}MiB"

# Runs in a container, or on the host for the image's own directory. RENAME_EXCHANGE: the name always exists.
SWAPPER = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
os.chdir(sys.argv[1])
one, other = (name.encode() for name in sys.argv[2:])
failures = 0  # one after the other
for turn in range(1 << 60):
    away = one + b".away%d" % turn
    try:
        if libc.renameat2(-100, one, -100, other, 2):
            raise OSError(ctypes.get_errno(), "renameat2")
        failures = 0
        if turn % 50 == 0:  # for a moment there is nothing
            os.rename(one, away)
            os.rename(away, one)
    except OSError:
        # In that moment the start made something there, or took it away again.
        failures += 1
        if failures == 1000:
            raise
        if not os.path.lexists(one):
            os.rename(away, one) if os.path.lexists(away) else os.mkdir(one)
    if turn == 50:
        print("ready", flush=True)
"""


class Race(NamedTuple):
    """The swap of two names below a directory, which is a volume at `target` or (no target) in the image."""

    directory: Path
    name: str
    evil: str
    target: str = ""


@contextlib.contextmanager
def swapping(scene: Scene, race: Race) -> Iterator[None]:
    """Run the second container; it shares the volume, or the image's own directory."""
    words = ["/usr/bin/python3", "-c", SWAPPER, "/opt/swapped", race.name, race.evil]
    swapper = scene.container(words, env={}, name="swapper", hook=None, runtime="")
    try:
        entry = {"type": "bind", "source": str(race.directory), "destination": "/opt/swapped", "options": ["rbind"]}
        swapper.spec["mounts"].append(entry)
        scene.write_of(swapper)
        swapper.start()
        _until_ready(swapper)
        yield
        swapper.kill()  # fails when it has ended: then nothing was swapped
        swapper.wait()
        swapper.delete()
    finally:
        swapper.close()


def _until_ready(swapper: Container) -> None:
    """Wait for its first line of output, as an event of the file."""
    command = ["tail", "-f", "-n", "+1", f"--pid={swapper.pid}", str(swapper.bundle / "stdout")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        line = reader.stdout.readline()
        reader.kill()
    assert line == "ready\n", swapper.stderr


class Counted(NamedTuple):
    shares: int
    refusals: int


def run(scene: Scene, race: Race, look: str = "true") -> Counted:
    """Start the container again and again while the swapper runs; `look` is a command in it that must succeed."""
    shares = refusals = 0
    if race.target:
        scene.mount(race.directory, race.target, "rbind")
    script = f"{look} && exec env -i PATH=/usr/bin:/bin nvidia-smi"
    scene.spec["process"]["args"] = ["/bin/sh", "-c", script]
    with swapping(scene, race):
        for _ in rounds():
            one = scene.again()
            try:
                one.start()
                code = one.wait()
                text = one.stdout
                # A program without its libraries ends with an error: that is less than its share, never more.
                assert code or SHOWN in text, f"{text}\n{one.stderr}"
                assert "16384MiB" not in text and "the host's" not in text, text
                shares += 1
            except RuntimeFailed as error:
                assert "Traceback" not in error.message and "internal error" not in error.message, error.message
                refusals += 1
            finally:
                with contextlib.suppress(RuntimeFailed):
                    one.delete()
                one.close()
            assert scene.node.left() == []
    return Counted(shares, refusals)


def rounds() -> Iterator[int]:
    """Count rounds up to GPUSHARE_RACES, or for RACE_S."""
    wanted = int(os.environ.get("GPUSHARE_RACES", "0"))
    until = time.monotonic() + RACE_S
    number = 0
    while number < wanted if wanted else number < AT_LEAST or time.monotonic() < until:
        yield number
        number += 1


# Targets of the swap


def _driver(node: Node) -> bytes:
    return next(node.driver_root.rglob(f"libcuda.so.{VERSION}")).read_bytes()


def leaf_in_a_volume(scene: Scene) -> Counted:
    """A covered library in a volume alternates with a link to the host's secret."""
    volume = scene.host.parent / "volume"
    volume.mkdir()
    (volume / "libcuda.so.1").write_bytes(_driver(scene.node))
    os.symlink(f"../../../../../..{scene.host}/secret", volume / "evil")
    scene.set_env("LD_LIBRARY_PATH=/opt/v")
    return run(scene, Race(volume, "libcuda.so.1", "evil", "/opt/v"))


def parent_in_a_volume(scene: Scene) -> Counted:
    """The directory of that library alternates with a link to a directory of the host."""
    volume = scene.host.parent / "volume"
    (volume / "lib").mkdir(parents=True)
    (volume / "lib" / "libcuda.so.1").write_bytes(_driver(scene.node))
    os.symlink(f"../../../../../..{scene.host}/lib", volume / "evil")
    scene.set_env("LD_LIBRARY_PATH=/opt/v/lib")
    return run(scene, Race(volume, "lib", "evil", "/opt/v"))


def _in_image(scene: Scene, directory: str) -> Path:
    path = scene.root / directory
    path.mkdir(parents=True, exist_ok=True)
    return path


def our_directory_in_a_shared_image(scene: Scene) -> Counted:
    """Two containers of one root file system: gpushare's directory in it alternates with a link to the host's."""
    directory = _in_image(scene, "usr/lib")
    (directory / "gpushare").mkdir()
    os.symlink(f"../../../../../../../..{scene.host}/share", directory / "evil")
    return run(scene, Race(directory, "gpushare", "evil"))


def library_in_a_shared_image(scene: Scene) -> Counted:
    """The mount point of libcuda itself."""
    directory = _in_image(scene, os.path.dirname(LIBCUDA))
    (scene.root / LIBCUDA).write_bytes(b"")
    os.symlink(f"../../../../../../../..{scene.host}/passwd", directory / "evil")
    return run(scene, Race(directory, os.path.basename(LIBCUDA), "evil"))


def program_in_a_shared_image(scene: Scene) -> Counted:
    """A mount point that the launcher detects, after the runtime has mounted the libraries."""
    directory = _in_image(scene, "usr/bin")
    (directory / "nvidia-smi").write_bytes(b"")
    os.symlink(f"../../../../../../../..{scene.host}/passwd", directory / "evil")
    return run(scene, Race(directory, "nvidia-smi", "evil"))


def cache_in_a_shared_image(scene: Scene) -> Counted:
    """The loader's cache, which gpushare writes, alternates with a link to the host's."""
    directory = _in_image(scene, "etc")
    (directory / "ld.so.cache").touch()
    os.symlink(f"../../../../../../../..{scene.host}/etc/ld.so.cache", directory / "evil")
    return run(scene, Race(directory, "ld.so.cache", "evil"))


def _remove(directory: Path) -> None:
    """This machine's own directory is below it, where other processes may create or remove files meanwhile."""
    while directory.exists():
        try:
            shutil.rmtree(directory)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise


def etc_in_a_shared_image(scene: Scene) -> Counted:
    """The directory of the cache."""
    directory = scene.root
    (directory / "copy").mkdir()
    shutil.copy2(directory / "etc/ld.so.cache", directory / "copy")
    _remove(directory / "etc")
    os.rename(directory / "copy", directory / "etc")  # in the upper layer alone: overlay swaps no merged directories
    os.symlink(f"../../../../../../../..{scene.host}/etc", directory / "evil")
    return run(scene, Race(directory, "etc", "evil"))


def newer_driver_in_the_image(scene: Scene) -> Counted:
    """The image's own newer driver, which is mounted at another place, alternates with a link to a secret."""
    directory = _in_image(scene, "usr/local/cuda-99/compat")
    name = "libcuda.so.999.1"
    (directory / name).write_bytes(_driver(scene.node))
    os.symlink(name, directory / "libcuda.so.1")
    os.symlink(f"../../../../../../../..{scene.host}/secret", directory / "evil")
    look = '! grep -rqs "the host\'s" /usr/lib/gpushare/driver'
    return run(scene, Race(directory, name, "evil"), look)


RACES: tuple[Callable[[Scene], Counted], ...] = (
    leaf_in_a_volume, parent_in_a_volume, our_directory_in_a_shared_image, library_in_a_shared_image,
    program_in_a_shared_image, cache_in_a_shared_image, etc_in_a_shared_image, newer_driver_in_the_image,
)  # fmt: skip


def many_starts(scene: Scene) -> Counted:
    """Without a second container: the host's mount table and the state directory stay unchanged over many starts."""
    scene.spec["process"]["args"] = ["true"]
    before = proof.mount_table(scene.node)
    shares = 0
    for _ in rounds():
        one = scene.again()
        try:
            assert one.run() == 0, one.stderr
            one.delete()
        finally:
            one.close()
        assert scene.node.left() == []
        assert proof.mount_table(scene.node) == before
        shares += 1
    return Counted(shares, 0)


def limits_of_dying(scene: Scene) -> Counted:
    """`limit set` runs again and again while the container is killed and removed. Nothing may be left; each command
    succeeds, or names why not in one line."""
    shares = refusals = 0
    for _ in rounds():
        one = scene.again()
        one.spec["process"]["args"] = ["sleep", "inf"]
        scene.write_of(one)
        try:
            one.start()
            with _changed_limits(scene.node, one.id) as outcomes:
                one.kill()
                one.wait()
                one.delete()
        finally:
            one.close()
        assert {code for code, _ in outcomes} <= {0, 64}, outcomes
        assert all(text.count("\n") <= 1 and "internal error" not in text for _, text in outcomes), outcomes
        assert scene.node.left() == []
        shares += sum(code == 0 for code, _ in outcomes)
        refusals += sum(code != 0 for code, _ in outcomes)
    return Counted(shares, refusals)


@contextlib.contextmanager
def _changed_limits(node: Node, container_id: str) -> Iterator[list[tuple[int, str]]]:
    """Change the container's limit once, and then in a thread until it is gone. Yield (exit code, stderr) of each."""
    outcomes: list[tuple[int, str]] = []

    def change() -> None:
        done = node.cli("limit", "set", container_id, "--memory", f"{1 + len(outcomes) % 2}Gi")
        outcomes.append((done.returncode, done.stderr))

    def change_until_refused() -> None:
        while outcomes[-1][0] == 0:
            change()

    change()
    thread = threading.Thread(target=change_until_refused)
    thread.start()
    try:
        yield outcomes
    finally:
        thread.join()
