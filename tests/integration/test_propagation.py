"""Containers whose config.json makes mounts propagate (`linux.rootfsPropagation`), on a host where all mounts are
shared, as with systemd: gpushare's mounts appear only in the container, and so do the container's mounts over them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.security import proof
from tests.security.scene import GRAB, LIBCUDA
from tests.support.host import Node, python_mounts
from tests.support.rootfs import mount_points
from tests.support.tenant import PROGRAM

MakeContainer = Callable[..., Any]
RUNTIMES = {"runc": "/usr/sbin/runc", "crun": "/usr/bin/crun"}
OURS = "/usr/lib/gpushare"
# All kinds of sources that gpushare mounts from the host: files, directories, a tmpfs
PLACES = (
    f"/{LIBCUDA}",
    f"{OURS}/limits",
    f"{OURS}/driver",
    f"{OURS}/rw",
    f"{OURS}/pages",
    f"{OURS}/peers",
    "/dev/nvidia0",
)

COVER = """
of() { grep -c " $1 " /proc/self/mountinfo; }
for place; do
    [ -d $place ] && source=/dev/shm || source=/etc/hostname
    before=$(of $place); mount --bind $source $place; [ $(of $place) -gt $before ] && echo $place
done
"""


@pytest.fixture
def shared_host() -> Iterator[None]:
    """Share all mounts of this run's own mount namespace, which does not propagate to the machine's."""
    subprocess.run(["mount", "--make-rslave", "/"], check=True)
    subprocess.run(["mount", "--make-rshared", "/"], check=True)
    yield
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def with_propagation(word: str) -> Callable[[dict[str, Any]], None]:
    """The container may also mount: where the kernel does not stop propagation, the place of gpushare's mounts must."""

    def edit(spec: dict[str, Any]) -> None:
        spec["linux"]["rootfsPropagation"] = word
        for capabilities in spec["process"]["capabilities"].values():
            capabilities.append("CAP_SYS_ADMIN")

    return edit


@pytest.mark.usefixtures("no_leaks", "no_hybrid_cgroups", "shared_host")
@pytest.mark.parametrize("word", ["slave", "shared", "rshared"])
@pytest.mark.parametrize("low", RUNTIMES)
def test_mounts_of_a_share_do_not_propagate_to_the_host(
    container: MakeContainer, make_node: Callable[..., Node], simhost: Path, way: str, low: str, word: str
) -> None:
    """A second container of the same device checks that its neighbour's mounts do not appear in it."""
    node = make_node(simhost, runtime={"path": RUNTIMES[low]})
    front = {"runtime": node.runtime()} if way == "runtime" else {"hook": node.hook(), "runtime": RUNTIMES[low]}
    one, other = (
        container(
            ["sleep", "inf"],
            env={"GPUSHARE_MEMORY": "2Gi"},
            mounts=python_mounts(PROGRAM, GRAB),
            edit=with_propagation(word),
            **front,
        )
        for _ in range(2)
    )
    before = proof.mount_table(node)
    one.start()
    assert proof.mount_table(node) == before
    other.start()
    state = [point for point in mount_points() if point.startswith(f"{node.state}")]
    covered = one.exec("sh", "-c", COVER, "sh", *PLACES).stdout.split()
    assert covered == list(PLACES), "the premise: it can mount over what we have put there"
    assert proof.mount_table(node) == before
    assert [point for point in mount_points() if point.startswith(f"{node.state}")] == state
    proof.require_share(node, other)
    for each in (one, other):
        each.kill()
        each.wait()
        each.delete()
    assert proof.mount_table(node) == before
    proof.require_nothing_left(node)
