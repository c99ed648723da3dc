"""Attacks on resources that all containers share: space in the state directory, and CPU time of path look-ups."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest
from gpushare.system import ldcache

from tests.support.rootfs import run
from tests.support.runc import Container

from . import image
from .scene import LIBDIR, Scene

STATE_BYTES = 6 << 20  # space in the state directory in these attacks: one image could fill it
_LINKS = 38  # the kernel follows 40, and the path itself has some
MAX_PROCESSOR_S = 3.0  # for a start in a maze: ten times that of any start
MANY = 4  # concurrent containers of that image


def large_cache(root: Path) -> None:
    """Make the image's own loader cache as large as the accepted maximum, with names that no program uses."""
    file = root / image.CACHE
    known = ldcache.parse(file.read_bytes())
    room = ldcache.MAX_BYTES - (16 << 10) - file.stat().st_size
    file.write_bytes(ldcache.render(known._replace(strings=known.strings + b"x" * room + b"\0")))
    assert file.stat().st_size > 3 << 20


def _small_state(scene: Scene) -> int:
    """Leave STATE_BYTES in the state directory until the attack ends; return how many bytes are used."""
    status = os.statvfs(scene.node.state)
    whole, used = (blocks * status.f_frsize for blocks in (status.f_blocks, status.f_blocks - status.f_bfree))
    scene.after.append(lambda: run("mount", "-o", f"remount,size={whole}", scene.node.state))
    run("mount", "-o", f"remount,size={used + STATE_BYTES}", scene.node.state)
    return used


def fill_the_state(scene: Scene) -> None:
    """Put a loader cache of 4 MiB into an image and create many of its containers at once; some are never started. Each
    must be created, and so must an intact container; no cache stays in the state directory."""
    large_cache(scene.root)
    used = _small_state(scene)

    def attack(one: Container) -> None:
        made = [scene.container(["sleep", "inf"], env={"GPUSHARE_MEMORY": "64Mi"}, name="many") for _ in range(MANY)]
        try:
            for other in made:
                large_cache(other.rootfs)
            running = [other.begin_create() for other in made]
            with scene.container(["true"], env={"GPUSHARE_MEMORY": "64Mi"}, name="honest") as honest:
                assert honest.run() == 0, honest.stderr
                honest.delete()
            for process, other in zip(running, made):
                assert process.wait(60) == 0, other.stderr
            for other in (one, *made):
                assert not (scene.node.state / "containers" / other.id / "ld.so.cache").exists()
                assert (other.rootfs / image.CACHE).stat().st_size > 3 << 20
            status = os.statvfs(scene.node.state)
            assert (status.f_blocks - status.f_bfree) * status.f_frsize < used + (1 << 20)
        finally:
            for other in made:
                other.close()

    scene.inside.append(attack)


def full_state(scene: Scene) -> None:
    """Fill the state directory with a foreign file, or leave a little space: a start gets its share, or is refused in
    one line with the reason, and leaves nothing."""

    def attack(_: Container) -> None:
        filler = scene.node.state / "node.filler"
        seen = set()
        for free in range(40):
            with open(filler, "wb", buffering=0) as file, pytest.raises(OSError) as full:
                while True:
                    file.write(bytes(1 << 20))
            assert full.value.errno == errno.ENOSPC
            os.truncate(filler, max(0, filler.stat().st_size - free * 4096))
            with scene.container(["true"], env={"GPUSHARE_MEMORY": "64Mi"}, name="late") as late:
                refused = scene.refusal_of(late)
                seen.add(refused is None)
                if (
                    refused is not None and "gpushare: " not in refused.message
                ):  # crun's own message, and no space to store ours
                    assert scene.way == "hook", refused
                elif refused is not None:
                    assert "internal error" not in refused.message and "Traceback" not in refused.message, refused
                    assert "No space left on device" in refused.message and "free space" in refused.message, refused
                else:
                    assert late.wait() == 0
                    late.delete()
            filler.unlink()
            if refused is None:
                break
        assert seen == {False, True}

    _small_state(scene)
    scene.inside.append(attack)


def _maze(root: Path) -> str:
    """Make a path that costs the kernel 50,000 steps and leads nowhere: links of PATH_MAX each, as many as may follow
    each other."""
    place = root / "m"
    (place / "a").mkdir(parents=True)
    steps = "a/../" * 800
    for number in range(_LINKS):
        os.symlink(f"{steps}l{number + 1}", place / f"l{number}")
    (place / f"l{_LINKS}").write_text("")
    return "/m/l0"


def names_in_a_maze(scene: Scene) -> None:
    """Make very many names of a driver library, each a link through a maze."""
    start = _maze(scene.root)
    for number in range(4000):
        os.symlink(start, scene.root / LIBDIR / f"libcuda.so.{number}.1")
    _bounded(scene)


def paths_in_a_maze(scene: Scene) -> None:
    """Fill LD_LIBRARY_PATH with the maximum number of directories, each behind a maze."""
    _maze(scene.root)
    (scene.root / "m" / f"l{_LINKS}").unlink()
    (scene.root / "m" / f"l{_LINKS}").mkdir()
    scene.set_env("LD_LIBRARY_PATH=" + ":".join(f"/m/l0/{'./' * number}" for number in range(1, 129)))
    _bounded(scene)


def variants_in_a_maze(scene: Scene) -> None:
    """Make very many directories of processor variants, which are searched for libraries, each behind a maze."""
    _maze(scene.root)
    (scene.root / "m" / f"l{_LINKS}").unlink()
    (scene.root / "m" / f"l{_LINKS}").mkdir()
    hwcaps = scene.root / LIBDIR / "glibc-hwcaps"
    hwcaps.mkdir(exist_ok=True)
    for number in range(4000):
        os.symlink("/m/l1", hwcaps / f"x86-64-v{number}")
    _bounded(scene)


def _bounded(scene: Scene) -> None:
    """Assert that the start uses a few seconds of CPU at most, in gpushare's programs and the runtime's."""
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)

    def measure() -> None:
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime
        assert spent < MAX_PROCESSOR_S, f"{spent:.1f} s of processor"

    scene.after.append(measure)
