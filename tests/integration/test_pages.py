"""Activity files of containers on one device: each container reads all, writes its own, and no other."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpushare.state import activity_files, shm_abi

from tests.integration.apart import allow_traversal, chown_root, with_user_namespace
from tests.support import programs
from tests.support.host import Node
from tests.support.runc import Container

MakeContainer = Callable[..., Container]
ONE_GIB = {"GPUSHARE_MEMORY": "1Gi"}
PAGES, PEERS = "/usr/lib/gpushare/pages", "/usr/lib/gpushare/peers"
SECRET = 4096 + 100  # offset in a file where only a test writes


def shell(one: Container, script: str) -> str:
    done = one.exec("sh", "-c", script)
    assert done.returncode == 0, f"{script}: {done.stderr}"
    return done.stdout.strip()


def fails(one: Container, script: str) -> bool:
    return one.exec("sh", "-c", script).returncode != 0


def share_of(node: Node, one: Container) -> dict[str, Any]:
    lease = json.loads((node.state / "containers" / one.id / "lease.json").read_text())
    share: dict[str, Any] = lease["shares"][0]
    return share


def own_activity_file(node: Node, one: Container) -> tuple[str, int]:
    """(uuid, number) from lease.json; asserts that the limits file agrees."""
    share = share_of(node, one)
    limits = shm_abi.read_limits((node.state / "containers" / one.id / "share" / "limits").read_bytes())
    assert limits.devices[0].page == share["page"]
    return share["device"]["uuid"], share["page"]


def write_mark(one: Container, uuid: str, word: str) -> None:
    shell(one, f"printf {word} | dd of={PAGES}/{uuid} bs=1 seek={SECRET} conv=notrunc 2>/dev/null")


def read_mark(one: Container, uuid: str, number: int) -> str:
    return shell(one, f"dd if={PEERS}/{uuid}/{number} bs=1 skip={SECRET} count=5 2>/dev/null | tr -d '\\000'")


def used(one: Container, uuid: str) -> int:
    """The first word of the index, from inside the container."""
    at = shm_abi.offset("gs_peers", "used")
    return int(shell(one, f"od -An -tu8 -j{at} -N8 {PEERS}/{uuid}/index"))


def libdirs(one: Container) -> list[Path]:
    return list((one.rootfs / "usr/lib").glob("*-linux-gnu"))


@pytest.mark.parametrize("users", ["host", "own"])
def test_containers_see_each_other_in_any_start_order(
    container: MakeContainer, node: Node, way: str, users: str, tmp_path: Path
) -> None:
    allow_traversal(tmp_path)

    def start() -> Container:
        edit = with_user_namespace if users == "own" else None
        one = container(["sleep", "inf"], env=ONE_GIB, edit=edit, **node.way(way))
        if edit:
            chown_root(one)
        return one.start()

    first = start()
    uuid, mine = own_activity_file(node, first)
    assert used(first, uuid) == 1 << mine
    second = start()
    assert own_activity_file(node, second) == (uuid, mine + 1)
    assert used(first, uuid) == used(second, uuid) == 0b11
    write_mark(first, uuid, "one")
    write_mark(second, uuid, "two")
    for one in (first, second):
        assert (read_mark(one, uuid, mine), read_mark(one, uuid, mine + 1)) == ("one", "two")
        seen = shell(one, f"stat -c '%a %s' {PAGES}/{uuid} {PEERS}/{uuid}/index; ls {PEERS}/{uuid}; ls {PAGES}")
        assert seen.split() == ["666", str(activity_files.PAGE_SIZE), "444", "4096", "0", "1", "index", uuid]
    second.kill()
    second.wait()
    second.delete()
    assert used(first, uuid) == 1 and shell(first, f"ls {PEERS}/{uuid}").split() == ["0", "index"]
    third = start()
    assert own_activity_file(node, third) == (uuid, mine + 1)
    assert read_mark(first, uuid, mine + 1) == "" and used(first, uuid) == 0b11  # nothing of the previous container


def test_root_cannot_write_foreign_activity_files(container: MakeContainer, node: Node, way: str) -> None:
    first, second = (container(["sleep", "inf"], env=ONE_GIB, **node.way(way)).start() for _ in range(2))
    uuid, number = own_activity_file(node, first)
    write_mark(first, uuid, "mine")
    before = {path.name: path.stat().st_ino for path in Path(node.state, "devices", uuid).iterdir()}
    for attempt in (
        f"echo x > {PEERS}/{uuid}/{number}",
        f"truncate -s 0 {PEERS}/{uuid}/{number}",
        f"chmod 0 {PEERS}/{uuid}/{number}",
        f"touch {PEERS}/{uuid}/{number}",
        f"rm {PEERS}/{uuid}/{number}",
        f"mv {PEERS}/{uuid}/1 {PEERS}/{uuid}/{number}",
        f"echo x > {PEERS}/{uuid}/index",
        f"chmod 666 {PEERS}/{uuid}/index",
        f"touch {PEERS}/{uuid}/200",
        f"mkdir {PEERS}/{uuid}/more",
        f"ln {PEERS}/{uuid}/index {PEERS}/{uuid}/more",
        f"rm {PAGES}/{uuid}",
        f"mv {PAGES}/{uuid} {PAGES}/x",
        f"touch {PAGES}/more",
        f"ls {PAGES}/{uuid}/../{number}",
    ):
        assert fails(second, attempt), attempt
    assert read_mark(first, uuid, number) == "mine" and used(first, uuid) == 0b11
    assert {path.name: path.stat().st_ino for path in Path(node.state, "devices", uuid).iterdir()} == before
    lines = [line for line in Path(f"/proc/{second.pid}/mountinfo").read_text().splitlines() if f"/{uuid}" in line]
    found = {line.split(" ")[4]: set(line.split(" ")[5].split(",")) for line in lines}
    assert found.keys() == {f"{PAGES}/{uuid}", f"{PEERS}/{uuid}"}
    assert all({"nosuid", "nodev", "noexec"} <= flags for flags in found.values())
    assert "rw" in found[f"{PAGES}/{uuid}"] and "ro" in found[f"{PEERS}/{uuid}"]
    assert not [line for line in lines if "shared:" in line or "master:" in line]


ATTACKS = {
    "truncate": "truncate -s 0 {page}",
    "grow": "truncate -s 1T {page}",
    "fill": "dd if=/dev/zero of={page} bs=64k oflag=append conv=notrunc || true",
    "behind the end": "fallocate -n -o 81920 -l 8M {page}",
    "punch": "fallocate -p -o 0 -l 81920 {page}",
    "chmod": "chmod 0 {page}",
    "lock": "flock -x {page} sleep inf & while flock -n {page} true; do :; done",
    "garbage": "head -c 81920 /dev/urandom | dd of={page} conv=notrunc bs=81920 iflag=fullblock",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_corrupt_activity_file_affects_no_start_or_release(container: MakeContainer, node: Node, name: str) -> None:
    """Also for later containers: there is room for all, and the attacker's number can be reused."""
    attacker, other = (container(["sleep", "inf"], env=ONE_GIB, hook=node.hook()).start() for _ in range(2))
    uuid, number = own_activity_file(node, attacker)
    write_mark(other, uuid, "kept")
    attack = ATTACKS[name].format(page=f"{PAGES}/{uuid}")
    done = attacker.exec("sh", "-c", f"{{ {attack}; }} >/dev/null 2>&1 </dev/null")
    assert done.returncode == 0, done.stderr
    late = container(["sleep", "inf"], env=ONE_GIB, hook=node.hook()).start()
    assert own_activity_file(node, late) == (uuid, 2)
    status = os.stat(node.state / "devices" / uuid / "2")
    assert (status.st_size, status.st_blocks * 512) == (activity_files.PAGE_SIZE, activity_files.PAGE_SIZE)
    assert read_mark(late, uuid, 1) == "kept" and node.cli("list").stderr == ""
    attacker.kill()
    attacker.wait()
    attacker.delete()
    again = container(["sleep", "inf"], env=ONE_GIB, hook=node.hook()).start()
    assert own_activity_file(node, again) == (uuid, number) and read_mark(other, uuid, number) == ""
    assert shell(again, f"stat -c '%a %s' {PAGES}/{uuid}").split() == ["666", str(activity_files.PAGE_SIZE)]


def test_gpushare_run_has_an_activity_file(container: MakeContainer, node: Node) -> None:
    one = container(["sleep", "inf"], env=ONE_GIB, hook=node.hook()).start()
    uuid, _ = own_activity_file(node, one)
    write_mark(one, uuid, "hello")
    script = (
        f"dd if={PEERS}/{uuid}/0 bs=1 skip={SECRET} count=5 2>/dev/null; echo; ls {PEERS}/{uuid}; "
        f"echo x >>{PAGES}/{uuid} && echo own; echo x >{PEERS}/{uuid}/0 || echo ro"
    )
    done = programs.run(node, "--memory", "1Gi", "--", "sh", "-c", script)
    assert done.stdout.split() == ["hello", "0", "1", "index", "own", "ro"], done.stderr
    node.cli("prune")
    assert used(one, uuid) == 1 and not (node.state / "devices" / uuid / "1").exists()


def test_containers_see_each_other_across_a_lost_state_directory(
    container: MakeContainer, node: Node, way: str
) -> None:
    first, second = (container(["sleep", "inf"], env=ONE_GIB, **node.way(way)).start() for _ in range(2))
    uuid, _ = own_activity_file(node, first)
    write_mark(second, uuid, "old")
    first.kill()
    first.wait()
    first.delete()
    subprocess.run(["umount", "-l", node.state], check=True)
    third, fourth = (container(["sleep", "inf"], env=ONE_GIB, **node.way(way)).start() for _ in range(2))
    assert [own_activity_file(node, one)[1] for one in (third, fourth)] == [0, 2]
    assert share_of(node, second)["page"] == 1
    write_mark(fourth, uuid, "new")
    for one in (second, third, fourth):
        assert (used(one, uuid), read_mark(one, uuid, 1), read_mark(one, uuid, 2)) == (0b111, "old", "new")
    assert fails(third, f"touch {PEERS}/{uuid}/more")
    place = f"{node.state}/devices/{uuid}"
    (line,) = (line for line in Path("/proc/self/mountinfo").read_text().splitlines() if line.split(" ")[4] == place)
    assert {"rw", "nosuid", "nodev", "noexec"} <= set(line.split(" ")[5].split(",")) and "shared:" not in line
    for one in (second, third, fourth):
        one.delete()
    assert node.left() == []


def test_forged_activity_files_are_ignored(container: MakeContainer, node: Node) -> None:
    """In a user namespace a tenant can mount a tmpfs over its peers' files; it could truncate the index there."""
    forge = "read uuid </go && mount -t tmpfs none /usr/lib/gpushare/peers && mkdir /usr/lib/gpushare/peers/$uuid && "
    forge += "mount -t tmpfs -o mode=755 none /usr/lib/gpushare/peers/$uuid && "
    forge += "cat /old >/usr/lib/gpushare/peers/$uuid/index && chown {0}:{0} /usr/lib/gpushare/peers/$uuid/index && "
    forge += "echo >/done && exec sleep inf"

    def may_gain_rights(spec: dict[str, Any]) -> None:
        spec["process"]["noNewPrivileges"] = False

    command = ["unshare", "-Um", "sh", "-c", forge.format(activity_files.OWNER)]
    one = container(command, env=ONE_GIB, hook=node.hook(), edit=may_gain_rights)
    for name in ("go", "done"):
        os.mkfifo(one.rootfs / name)
    one.start()
    uuid, _ = own_activity_file(node, one)
    (one.rootfs / "old").write_bytes((node.state / "devices" / uuid / "index").read_bytes())
    with open(one.rootfs / "go", "w") as go:  # opened by both: it is in its user namespace
        for kind in ("uid", "gid"):
            Path(f"/proc/{one.pid}/{kind}_map").write_text("0 0 4294967295")
        go.write(f"{uuid}\n")
    done = os.open(one.rootfs / "done", os.O_RDONLY | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(done, select.POLLIN)
    assert poll.poll(30_000), one.stderr
    os.close(done)
    forged = os.stat(f"/proc/{one.pid}/root{PEERS}/{uuid}/index")
    assert (forged.st_uid, forged.st_size) == (activity_files.OWNER, 4096)
    subprocess.run(["umount", "-l", node.state], check=True)
    second = container(["sleep", "inf"], env=ONE_GIB, hook=node.hook()).start()
    assert own_activity_file(node, second) == (uuid, 1)
    assert not os.path.samestat(os.stat(node.state / "devices" / uuid / "index"), forged) and used(second, uuid) == 0b11
