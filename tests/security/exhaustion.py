"""Attacks on what all containers share on the host: the state directory's room, and processor time for look-ups."""

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

STATE_BYTES = 6 << 20  # of the state directory in these attacks: what one image could take once over
_LINKS = 38  # the kernel follows 40, and there are some on the way
MAX_PROCESSOR_S = 3.0  # of a start in a maze: a tenth of it is what any start takes
MANY = 4  # containers of that image, all at once


def large_cache(root: Path) -> None:
    """The image's own loader cache, as large as any that is read, with names that no program looks up."""
    file = root / image.CACHE
    known = ldcache.parse(file.read_bytes())
    room = ldcache.MAX_BYTES - (16 << 10) - file.stat().st_size
    file.write_bytes(ldcache.render(known._replace(strings=known.strings + b"x" * room + b"\0")))
    assert file.stat().st_size > 3 << 20


def fill_the_state(scene: Scene) -> None:
    """A loader cache of 4 MiB in an image of which many containers are created at once, some of them never started.
    Each must be created, and so must an honest one; nothing of the caches stays in the state directory."""
    large_cache(scene.root)
    scene.node.cli("refresh")
    run("mount", "-o", f"remount,size={STATE_BYTES}", scene.node.state)

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
            assert (status.f_blocks - status.f_bfree) * status.f_frsize < 1 << 20
        finally:
            for other in made:
                other.close()

    scene.inside.append(attack)


def full_state(scene: Scene) -> None:
    """Somebody else's file takes all of the state directory, or leaves a little: a start has its share, or is refused
    in one line that says so, and leaves nothing."""

    def attack(_: Container) -> None:
        filler = scene.node.state / "node.filler"
        seen = set()
        for free in range(40):
            with open(filler, "wb") as file, pytest.raises(OSError) as full:
                while True:
                    file.write(bytes(1 << 20))
                    file.flush()
            assert full.value.errno == errno.ENOSPC
            os.truncate(filler, max(0, filler.stat().st_size - free * 4096))
            with scene.container(["true"], env={"GPUSHARE_MEMORY": "64Mi"}, name="late") as late:
                refused = scene.refusal_of(late)
                seen.add(refused is None)
                if (
                    refused is not None and "gpushare: " not in refused.message
                ):  # crun's own words, and no room to keep ours
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

    scene.node.cli("refresh")
    run("mount", "-o", f"remount,size={STATE_BYTES}", scene.node.state)
    scene.inside.append(attack)


def _maze(root: Path) -> str:
    """A path that costs the kernel 50,000 steps, and leads to nothing: links of PATH_MAX each, as many as may follow
    each other."""
    place = root / "m"
    (place / "a").mkdir(parents=True)
    steps = "a/../" * 800
    for number in range(_LINKS):
        os.symlink(f"{steps}l{number + 1}", place / f"l{number}")
    (place / f"l{_LINKS}").write_text("")
    return "/m/l0"


def names_in_a_maze(scene: Scene) -> None:
    """Very many names of a driver's library, each a link through a maze."""
    start = _maze(scene.root)
    for number in range(4000):
        os.symlink(start, scene.root / LIBDIR / f"libcuda.so.{number}.1")
    _bounded(scene)


def paths_in_a_maze(scene: Scene) -> None:
    """LD_LIBRARY_PATH with as many directories as are looked at, each of them behind a maze."""
    _maze(scene.root)
    (scene.root / "m" / f"l{_LINKS}").unlink()
    (scene.root / "m" / f"l{_LINKS}").mkdir()
    scene.set_env("LD_LIBRARY_PATH=" + ":".join(f"/m/l0/{'./' * number}" for number in range(1, 129)))
    _bounded(scene)


def variants_in_a_maze(scene: Scene) -> None:
    """Very many directories of variants for processors, in which libraries are looked for, each behind a maze."""
    _maze(scene.root)
    (scene.root / "m" / f"l{_LINKS}").unlink()
    (scene.root / "m" / f"l{_LINKS}").mkdir()
    hwcaps = scene.root / LIBDIR / "glibc-hwcaps"
    hwcaps.mkdir(exist_ok=True)
    for number in range(4000):
        os.symlink("/m/l1", hwcaps / f"x86-64-v{number}")
    _bounded(scene)


def _bounded(scene: Scene) -> None:
    """The start takes a few seconds of processor at most, in programs of ours and of the runtime."""
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)

    def measure() -> None:
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime
        assert spent < MAX_PROCESSOR_S, f"{spent:.1f} s of processor"

    scene.after.append(measure)
