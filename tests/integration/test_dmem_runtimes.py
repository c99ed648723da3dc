"""linux.resources.unified entries of gpushare-runtime for the kernel's dmem controller, with real runtimes on a real
cgroup v2. Few kernels have the controller: for crun its files are plain ones (programs/dmem_mirror.c). runc is a static
program, so for runc a file that each cgroup has is in their place."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpushare.allocation import backends
from gpushare.allocation.backends.dmem import regions as dmem
from gpushare.core import constants, model
from gpushare.core.errors import GpushareError

from tests.support.host import BUILD, TREE
from tests.support.rootfs import run
from tests.support.runc import Container, RuntimeFailed
from tests.unit.pure import device
from tests.unit.test_dmem import GIB, REAL, REGION, edited
from tools import newest

MIRROR = TREE / "tests/integration/programs/dmem_mirror.c"
V2 = ("unshare", "-m", "sh", "-c", 'umount -R /sys/fs/cgroup && mount -t cgroup2 v2 /sys/fs/cgroup && exec "$@"', "sh")
V1 = ("unshare", "-m", "sh", "-c", 'umount /sys/fs/cgroup/unified 2>/dev/null; exec "$@"', "sh")
SHARE = model.Share(0, device(0, uuid=REAL.uuid), GIB, memory_backend="dmem")
LENT = SHARE._replace(virtual_bytes=3 * GIB, lending=constants.EVICT)  # request and limit
RUNTIMES = ("runc", "crun", "newest runc", "newest crun")


def program(name: str) -> str:
    """The runtime of this machine, or the newest one of Debian."""
    low = name.split()[-1]
    return str(newest.unpack(BUILD / "newest") / low) if name.startswith("newest") else low


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Callable[..., Container]]:
    """limited(runtime, prefix, unified, view) -> a container of the edited config.json, or with other entries. (It
    has no device rules: their program needs more rights than some machines give root.)"""
    made: list[Container] = []
    spec, _ = edited(tmp_path, {}, REAL)
    own: dict[str, str] = spec["linux"]["resources"]["unified"]

    def make(low: str, *args: str, unified: dict[str, str] = own, view: tuple[str, ...] = V2) -> Container:
        def edit(config: dict[str, Any]) -> None:
            config["linux"]["resources"] = {"unified": unified} if unified else {}

        one = Container(tmp_path / "c", ["sleep", "inf"], runtime=program(low), prefix=(*view, *args), edit=edit)
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()
        run(*V2, "sh", "-c", f"rmdir /sys/fs/cgroup/{one.id} 2>/dev/null || test ! -e /sys/fs/cgroup/{one.id}")


@pytest.mark.parametrize("low", RUNTIMES)
def test_missing_controller_or_region_refuses_the_container(limited: Callable[..., Container], low: str) -> None:
    one = limited(low)
    with pytest.raises(RuntimeFailed, match="dmem") as refused:
        one.create()
    assert "dmem" in refused.value.last_line, "engines show the last line"


@pytest.mark.parametrize("low", RUNTIMES)
def test_cgroup_v1_refuses_the_container(limited: Callable[..., Container], low: str) -> None:
    one = limited(low, view=V1)
    with pytest.raises(RuntimeFailed, match="unified"):
        one.create()


@pytest.mark.parametrize("low", RUNTIMES)
def test_runtime_writes_unified_values_unchanged_and_only_once(limited: Callable[..., Container], low: str) -> None:
    """`docker update` and `docker pause` keep what `gpushare limit set` wrote since."""
    one = limited(low, unified={"cgroup.max.depth": "5"})
    one.start()
    assert in_cgroup(one, "cat", "cgroup.max.depth") == "5"
    in_cgroup(one, "sh", "-c", "echo 3 >cgroup.max.depth")
    resources = one.bundle / "resources"
    resources.write_text("{}")
    one.command("update", "--resources", str(resources), one.id)
    for command in ("pause", "resume"):
        one.command(command, one.id)
    assert in_cgroup(one, "cat", "cgroup.max.depth") == "3"


def in_cgroup(one: Container, *words: str) -> str:
    script = f'cd /sys/fs/cgroup/{one.id} && exec "$@"'
    done = subprocess.run([*V2, "sh", "-c", script, "sh", *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_hook_refuses_a_cgroup_without_the_limit(limited: Callable[..., Container], tmp_path: Path) -> None:
    """For a runtime that does not write it, such as a version before `unified`."""
    one = limited("runc", unified={})
    one.start()
    record = tmp_path / dmem.RECORD
    with pytest.raises(GpushareError, match=r"dmem\.max"):
        dmem.enforce(one.pid, [REAL._replace(record=str(record))])
    assert not record.exists()


@pytest.mark.parametrize("low", ["crun", "newest crun"])
@pytest.mark.parametrize("share", [SHARE, LENT], ids=["plain", "lent"])
def test_runtime_writes_the_limit_and_limit_set_changes_it(
    limited: Callable[..., Container], tmp_path: Path, low: str, share: model.Share
) -> None:
    """Both files have the limit before the hook reads them; then the hook and `gpushare limit set` change them. For a
    container that borrows, dmem.min has the request."""
    (tmp_path / "spec").mkdir()
    limit = REAL._replace(limit_bytes=share.virtual_bytes or GIB, request_bytes=GIB if share.lending else 0)
    unified = edited(tmp_path / "spec", {}, limit)[0]["linux"]["resources"]["unified"]

    def bounds(hard_bytes: int, soft_bytes: int = GIB) -> list[str]:
        return [f"{REGION} {hard_bytes}", f"{REGION} {soft_bytes}"]

    library, tree = tmp_path / "mirror.so", tmp_path / "tree"
    flags = ("-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")
    subprocess.run(["gcc", *flags, "-o", library, MIRROR, "-ldl"], check=True)
    one = limited(low, "env", f"LD_PRELOAD={library}", f"DMEM_TREE={tree}", unified=unified)
    (tree / one.id).mkdir(parents=True)
    files = [tree / one.id / name for name in (dmem.MAX, dmem.MIN)]
    for file in files:
        file.write_text("")
    one.start()
    assert [file.read_text() for file in files] == bounds(limit.limit_bytes)
    assert f"0::/{one.id}\n" in Path(f"/proc/{one.pid}/cgroup").read_text()
    times = [os.stat(file).st_mtime_ns for file in files]
    undo = dmem.enforce(one.pid, [limit._replace(record=str(tmp_path / dmem.RECORD), tree=str(tree))])
    assert [file.read_text() for file in files] == bounds(limit.limit_bytes)
    assert all(os.stat(file).st_mtime_ns > before for file, before in zip(files, times)), "it was not written again"
    backends.change((share,), (share._replace(memory_limit_bytes=2 * GIB),), str(tmp_path))
    assert [file.read_text() for file in files] == bounds(share.virtual_bytes or 2 * GIB, 2 * GIB)
    undo()
    assert [file.read_text() for file in files] == [f"{REGION} max", f"{REGION} 0"]
