"""Find the container that a mount table belongs to."""

from __future__ import annotations

import pytest
from gpushare.state import mounttables, place, rebuild
from gpushare.system import mountns, procs

STATE = "/run/gpu share"
ROOT = "22 1 0:20 / / rw - overlay overlay rw"


def share(root: str = "/containers/a1/share", point: str = "/usr/lib/gpushare", kind: str = "tmpfs") -> str:
    return f"30 22 0:31 {root} {point} ro,nosuid - {kind} /run/gpu\\040share rw,size=9k"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([ROOT, share()], (("a1", "0:31"),)),
        ([ROOT, share("/containers/a1/share//deleted")], (("a1", "0:31"),)),
        ([ROOT, share("/containers/with\\040space/share")], (("with space", "0:31"),)),
        ([ROOT, share(), "31 30 0:40 / /usr/lib/gpushare/rw rw - tmpfs x rw"], (("a1", "0:31"),)),
        ([ROOT, "29 22 8:1 /vol /usr/lib/gpushare rw - ext4 /dev/sda1 rw", share()], (("a1", "0:31"),)),
        ([ROOT, share(), "31 30 8:1 /vol /usr/lib/gpushare rw - ext4 /dev/sda1 rw"], (("a1", "0:31"),)),
        (
            [ROOT, share(), share("/containers/b2/share").replace("0:31", "0:50")],
            (("a1", "0:31"), ("b2", "0:50")),
        ),
        ([ROOT], ()),
        ([ROOT, share(kind="ext4")], ()),
        ([ROOT, share(point="/var/bundle/rootfs/usr/lib/gpushare")], ()),
        ([ROOT, share("/containers/../share")], ()),
        ([ROOT, share("/containers//share")], ()),
        ([ROOT, share("/containers/a/b/share")], ()),
        ([ROOT, share("/elsewhere/a1/share")], ()),
        ([ROOT, share().replace("/run/gpu\\040share", "/run/other")], ()),
        (["", "garbage", "- -", "1 2 3 4 /usr/lib/gpushare -"], ()),
    ],
)
def test_allocation_mounts_are_found_in_mount_table(lines: list[str], found: tuple[tuple[str, str], ...]) -> None:
    assert rebuild.shared_mounts("\n".join(lines).encode(), STATE) == found


def test_container_belongs_to_its_oldest_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process of a container can have a mount namespace with the share; only the init lives as long as it."""
    mountinfo = f"{ROOT}\n{share()}\n".encode()
    ages = ((300, 7), (100, 9), (200, 5))  # start, pid
    tables = [mounttables.Table(procs.Process(pid, start, "S", 1), 0, mountinfo) for start, pid in ages]
    monkeypatch.setattr(mounttables, "read", lambda last: mounttables.Found(tuple(tables), ""))
    (found,) = rebuild.containers(STATE)
    assert (found.id, found.init.pid) == ("a1", 9)


HOME = "31 22 0:31 / /run/gpu\\040share rw - tmpfs /run/gpu\\040share rw"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([ROOT, HOME], "0:20 /run/gpu share"),
        ([ROOT, "25 22 0:25 / /run rw - tmpfs run rw", HOME.replace("31 22", "31 25")], "0:25 /gpu share"),
        ([ROOT.replace("/ / ", "/node / "), HOME], "0:20 /node/run/gpu share"),
        ([HOME], ""),
        ([ROOT, "25 22 0:25 / /elsewhere rw - tmpfs run rw", HOME.replace("31 22", "31 25")], ""),
    ],
    ids=["in the root", "in a tmpfs", "in a chroot", "out of view", "not below"],
)
def test_place_is_file_system_and_path_in_it(lines: list[str], found: str) -> None:
    mounts = mountns.parse_mounts(lines)
    assert place.place_of(mounts, mounts[-1]) == found
