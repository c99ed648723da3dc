"""linux.resources.unified entries of gpushare-runtime for the kernel's dmem controller, with real runtimes on a real
cgroup v2. Few kernels have the controller: for crun its files are plain ones (programs/dmem_mirror.c)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpushare.allocation import backends
from gpushare.allocation.backends.dmem import regions as dmem
from gpushare.core import model
from gpushare.core.errors import GpushareError

from tests.support.host import TREE
from tests.support.rootfs import run
from tests.support.runc import Container, RuntimeFailed
from tests.unit.pure import device
from tests.unit.test_dmem import GIB, REAL, REGION, edited

MIRROR = TREE / "tests/integration/programs/dmem_mirror.c"
V2 = ("unshare", "-m", "sh", "-c", 'umount -R /sys/fs/cgroup && mount -t cgroup2 v2 /sys/fs/cgroup && exec "$@"', "sh")
SHARE = model.Share(0, device(0, uuid=REAL.uuid), GIB, memory_backend="dmem")


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Callable[..., Container]]:
    """limited(runtime, prefix, has_limit) -> a container of the edited config.json, with or without its limit. (It
    has no device rules: their program needs more rights than some machines give root.)"""
    made: list[Container] = []
    spec, _ = edited(tmp_path, {}, REAL)

    def make(low: str, *args: str, has_limit: bool = True) -> Container:
        def edit(config: dict[str, Any]) -> None:
            config["linux"]["resources"] = {"unified": spec["linux"]["resources"]["unified"]} if has_limit else {}

        one = Container(tmp_path / "c", ["sleep", "inf"], runtime=low, prefix=(*V2, *args), edit=edit)
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()
        run(*V2, "sh", "-c", f"rmdir /sys/fs/cgroup/{one.id} 2>/dev/null || test ! -e /sys/fs/cgroup/{one.id}")


@pytest.mark.parametrize("low", ["runc", "crun"])
def test_missing_controller_or_region_refuses_the_container(limited: Callable[..., Container], low: str) -> None:
    one = limited(low)
    with pytest.raises(RuntimeFailed, match="dmem"):
        one.create()


def test_hook_refuses_a_cgroup_without_the_limit(limited: Callable[..., Container], tmp_path: Path) -> None:
    """For a runtime that does not write it, such as a version before `unified`."""
    one = limited("runc", has_limit=False)
    one.start()
    record = tmp_path / dmem.RECORD
    with pytest.raises(GpushareError, match=r"dmem\.max"):
        dmem.enforce(one.pid, [REAL._replace(record=str(record))])
    assert not record.exists()


def test_runtime_writes_the_limit_and_limit_set_changes_it(limited: Callable[..., Container], tmp_path: Path) -> None:
    """Both files have the limit before the hook reads them; then the hook and `gpushare limit set` change them."""
    library, tree = tmp_path / "mirror.so", tmp_path / "tree"
    flags = ("-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")
    subprocess.run(["gcc", *flags, "-o", library, MIRROR, "-ldl"], check=True)
    one = limited("crun", "env", f"LD_PRELOAD={library}", f"DMEM_TREE={tree}")
    (tree / one.id).mkdir(parents=True)
    files = [tree / one.id / name for name in (dmem.MAX, dmem.MIN)]
    for file in files:
        file.write_text("")
    one.start()
    assert [file.read_text() for file in files] == [f"{REGION} {GIB}"] * 2
    assert f"0::/{one.id}\n" in Path(f"/proc/{one.pid}/cgroup").read_text()
    times = [os.stat(file).st_mtime_ns for file in files]
    undo = dmem.enforce(one.pid, [REAL._replace(record=str(tmp_path / dmem.RECORD), tree=str(tree))])
    assert [file.read_text() for file in files] == [f"{REGION} {GIB}"] * 2
    assert all(os.stat(file).st_mtime_ns > before for file, before in zip(files, times)), "it was not written again"
    backends.change((SHARE,), (SHARE._replace(memory_limit_bytes=2 * GIB),), str(tmp_path))
    assert [file.read_text() for file in files] == [f"{REGION} {2 * GIB}"] * 2
    undo()
    assert [file.read_text() for file in files] == [f"{REGION} max", f"{REGION} 0"]
