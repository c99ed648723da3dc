"""The usage journal: its lines survive kills, full disks and damage, and it stays within its size."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpushare.core.errors import KernelError
from gpushare.core.model import Config, Lease
from gpushare.core.ops import Plan
from gpushare.programs import deadline, session
from gpushare.request import request
from gpushare.state import accounts, journal, leaseend, leases, storage
from gpushare.system import procs

from tests.unit import pure
from tests.unit.clihost import GIB, init, start, state

__all__ = ["init", "start", "state"]  # fixtures
S = 10**9
MIB = 1 << 20


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(state_dir=str(tmp_path / "state"), log="none", usage_journal=str(tmp_path / "lib" / "usage.log"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "test", place], check=True)
    yield place
    subprocess.run(["umount", place], check=True)


def lease(container_id: str = "web") -> Lease:
    given = pure.lease(pure.share(0, 0, 4 * GIB), container_id=container_id)
    labels = {"uid": 7, "namespace": "team", "pod": "p", "container": "c", "image": "i:1"}
    return given._replace(boot_id=procs.boot_id(), began_ns=accounts.now_ns() - 10 * S, **labels)


def end(config: Config, one: Lease, by: str = "poststop") -> None:
    now = accounts.now_ns()
    closed = accounts.Closed(one, accounts.accounts(one, None, now), now, True)
    journal.ending(config, config.state_dir, by)(closed)


def begin(config: Config, one: Lease) -> None:
    fd = journal.opened(config)
    journal.started(fd, one)
    os.close(fd)


def read(config: Config) -> tuple[list[journal.Entry], int]:
    return journal.entries(journal.path_of(config))


def test_start_and_end_are_read_back(config: Config) -> None:
    begin(config, lease())
    end(config, lease())
    (first, last), unreadable = read(config)
    assert unreadable == 0 and (first.what, last.what, last.by) == (journal.START, journal.END, "poststop")
    assert (last.id, last.uid, last.namespace, last.pod, last.container, last.image) == (
        *("web", 7, "team", "p", "c", "i:1"),
    )
    assert last.shares[0].account.granted_byte_ns >= 40 * GIB * S and first.shares[0].account.granted_ns == 0
    assert os.stat(journal.path_of(config)).st_mode & 0o777 == 0o600


@pytest.mark.parametrize("torn", [b'{"v":1,"what":"end"', b"\0" * 4096, b"\xff\xfe garbage", b'{"v":1}', b"[" * 9999])
def test_torn_line_costs_only_itself(config: Config, torn: bytes) -> None:
    begin(config, lease("one"))
    with open(journal.path_of(config), "ab") as file:
        file.write(torn)
    begin(config, lease("two"))
    found, unreadable = read(config)
    assert [one.id for one in found] == ["one", "two"] and unreadable == (0 if not torn.strip(b"\0") else 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("up_ns", -1), ("began_ns", "1"), ("time", "x"), ("time", float("nan")), ("id", 1), ("uid", -2), ("v", 2)]
    + [("what", "other"), ("shares", [{}]), ("shares", None), ("end_ns", True)]
    + [("time", 10**400), ("time", "1"), ("up_ns", 10**400), ("uid", 1 << 200)],
)
def test_line_with_a_wrong_value_is_left_out(config: Config, field: str, value: object) -> None:
    begin(config, lease())
    path = Path(journal.path_of(config))
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}) + "\n")
    assert read(config) == ([], 1)


def test_full_disk_loses_no_line_of_the_reserved_space(config: Config, small_disk: Path) -> None:
    config = config._replace(usage_journal=str(small_disk / "usage.log"), usage_journal_size="64Ki")
    begin(config, lease("one"))
    with open(small_disk / "rest", "wb", 0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(b"x" * 1024)
    for number in range(20):
        begin(config, lease(f"c{number}"))
    found, unreadable = read(config)
    assert len(found) == 21 and unreadable == 0


def test_disk_that_is_full_from_the_start_stops_nothing(config: Config, small_disk: Path) -> None:
    config = config._replace(usage_journal=str(small_disk / "usage.log"))
    with open(small_disk / "rest", "wb", 0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(b"x" * 512)
    begin(config, lease("one"))
    os.unlink(small_disk / "rest")
    begin(config, lease("two"))
    found, _ = read(config)
    assert found[-1].id == "two"


def test_journal_stays_within_its_size_and_keeps_running_containers(
    config: Config, state: Path, start: Callable[..., Path]
) -> None:
    config = config._replace(state_dir=str(state), usage_journal_size="64Ki")
    start("runs", pure.share(0, 0, 4 * GIB))
    begin(config, lease("first"))
    for number in range(400):
        end(config, lease(f"c{number}"))
    path = journal.path_of(config)
    assert sum(os.path.getsize(name) for name in (path, path + ".1")) <= 66 << 10
    found, unreadable = read(config)
    ids = [one.id for one in found]
    assert unreadable == 0 and "first" not in ids and ids[-1] == "c399" and "runs" in ids


def test_file_that_another_process_has_replaced_is_not_replaced_again(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both found it full. A second replacement would remove the file before it from the host."""
    config = config._replace(usage_journal_size="4Ki")
    begin(config, lease("before"))
    while os.path.getsize(journal.path_of(config)) < 2 << 10:
        begin(config, lease("before"))
    late = journal.opened(config)
    end(config, lease("first"))
    monkeypatch.setattr(journal, "opened", lambda _: late)
    end(config, lease("second"))
    assert {"before", "first", "second"} <= {one.id for one in read(config)[0]}


def test_concurrent_writers_rotate_once_and_lose_nothing(config: Config) -> None:
    config = config._replace(usage_journal_size="1Mi")
    children = []
    for number in range(4):
        child = os.fork()
        if child == 0:
            for one in range(150):
                end(config, lease(f"c{number}-{one}"))
            os._exit(0)
        children.append(child)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
    found, unreadable = read(config)
    assert unreadable == 0 and len({one.id for one in found}) == 600


def test_killed_writer_spoils_no_line_but_its_last(config: Config) -> None:
    for number in range(30):
        said, say = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(said)
            one = 0
            while True:
                begin(config, lease(f"c{number}-{one}"))
                os.write(say, b"x")  # blocks when the pipe is full, so the file stays small
                one += 1
        os.close(say)
        os.read(said, 1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(said)
    found, unreadable = read(config)  # the kernel can stop a write that is killed at the end of a page
    assert unreadable <= 30 and {f"c{number}-0" for number in range(30)} <= {one.id for one in found}


@pytest.mark.parametrize("kind", ["directory", "fifo", "link", "missing root"])
def test_wrong_kind_of_file_stops_nothing(config: Config, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "other"
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "target")
    else:
        (tmp_path / "file").touch()
        path = tmp_path / "file" / "usage.log"
    config = config._replace(usage_journal=str(path))
    before = len(os.listdir("/proc/self/fd"))
    assert journal.opened(config) == -1
    end(config, lease())
    journal.checkpoint(config, config.state_dir)
    assert len(os.listdir("/proc/self/fd")) == before and not (tmp_path / "target").exists()


def test_only_the_usual_state_directory_has_a_journal_by_itself() -> None:
    assert journal.path_of(Config()) == journal.PATH
    assert journal.path_of(Config(state_dir="/tmp/state")) == ""
    assert journal.path_of(Config(usage_journal="none")) == ""
    assert journal.opened(Config(usage_journal="none")) == -1


def test_release_of_a_dead_lease_is_marked_as_found(config: Config, state: Path, start: Callable[..., Path]) -> None:
    config = config._replace(state_dir=str(state))
    start("web", pure.share(0, 0, 4 * GIB))
    found = leases.find(str(state), "web")
    assert found is not None
    leases.rewrite(str(state), found._replace(init_start=1, cgroup_id=0, first=True))
    assert leaseend.sweep(str(state), ended=journal.ending(config, str(state), "prune")) == ["web"]
    ((entry,), _) = read(config)
    assert (entry.what, entry.known, entry.by) == (journal.END, False, "prune")


def test_lease_that_was_lost_gets_its_labels_and_grants_back(
    config: Config, state: Path, start: Callable[..., Path]
) -> None:
    start("web", pure.share(0, 0, 4 * GIB))
    before = leases.find(str(state), "web")
    assert before is not None
    before = before._replace(began_ns=accounts.now_ns() - 10 * S, uid=7, namespace="team")
    begin(config, before)
    again = before._replace(uid=-1, namespace="", began_ns=accounts.now_ns())
    (known,) = journal.restored(config, [again])
    assert (known.uid, known.namespace, known.began_ns) == (7, "team", before.began_ns)
    assert accounts.accounts(known, None, accounts.now_ns())[0].granted_byte_ns >= 40 * GIB * S
    end(config, before)
    assert journal.restored(config, [again]) == (again,)  # another container of the same id
    assert journal.restored(config._replace(usage_journal="none"), [again]) == (again,)


@pytest.mark.parametrize("torn", [b'{"v":1,"boot":"%s","id":"web","uid":', b"", b"\0" * 999, b"[" * 9999])
def test_damage_keeps_no_lost_lease_from_its_labels(config: Config, torn: bytes) -> None:
    begin(config, lease()._replace(namespace='","id":"db'))
    with open(journal.path_of(config), "ab") as file:
        file.write(torn.replace(b"%s", procs.boot_id().encode()))
    (known,) = journal.restored(config, [lease()._replace(namespace="", uid=-1)])
    assert (known.uid, known.namespace) == (7, '","id":"db')


def test_lost_leases_are_restored_without_parsing_the_whole_journal(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start waits for it, and ends after 20 s; 64 MiB of lines take seconds to parse."""
    lost = [lease(f"c{number}") for number in range(20)]
    for _ in range(50):
        for one in lost:
            begin(config, one)
    parsed: list[bytes] = []
    parse = journal._entry
    monkeypatch.setattr(journal, "_entry", lambda line: parsed.append(line) or parse(line))
    assert all(one.uid == 7 for one in journal.restored(config, [one._replace(uid=-1) for one in lost]))
    assert len(parsed) == len(lost)


@pytest.mark.parametrize("size", [1 << 40, 1 << 20])
def test_huge_journal_delays_no_lost_lease(config: Config, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """A file can be longer than usage.journal_size: that was lowered, or something else has extended it."""
    monkeypatch.setattr(journal, "_MOST_RESTORED", 1 << 20)
    begin(config, lease("before"))
    os.truncate(journal.path_of(config), size)
    begin(config, lease("after"))
    began = time.monotonic()
    known = journal.restored(config, [lease(one)._replace(uid=-1) for one in ("before", "after")])
    assert [one.uid for one in known] == [-1, 7] and time.monotonic() - began < 10


def test_failed_start_is_no_container(config: Config) -> None:
    fd = journal.opened(config)
    journal.started(fd, lease())
    journal.undone(fd, lease())
    os.close(fd)
    assert [one.what for one in read(config)[0]] == [journal.START, journal.END]


def test_start_that_fails_at_its_last_step_has_an_end(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the journal would count the container as running until the next boot."""

    def fails() -> None:
        raise KernelError("no runc")

    host = pure.node()._replace(config=config)
    bundle = pure.bundle("GPUSHARE_MEMORY=4Gi", container_id="web")
    asked = request.resolve(bundle, host)
    assert asked is not None
    monkeypatch.setattr(session, "place", lambda *_: session.Placed(lease(), Plan("web", (), ())))
    monkeypatch.setattr(deadline, "ignore_signals", lambda: None)
    monkeypatch.setattr(deadline, "undo", lambda *_: None)
    with pytest.raises(KernelError, match="no runc"):
        session.give(session.Start(bundle, asked, host), session.Way(), fails)
    assert [one.what for one in read(config)[0]] == [journal.START, journal.END]


def test_checkpoint_has_each_running_container(config: Config, state: Path, start: Callable[..., Path]) -> None:
    config = config._replace(state_dir=str(state))
    start("one", pure.share(0, 0, GIB))
    os.truncate(start("two", pure.share(0, 0, GIB)), 0)
    journal.checkpoint(config, str(state))
    found, _ = read(config)
    assert [(one.what, one.id, one.shares[0].account.used_ns) for one in found] == [
        (journal.SO_FAR, "one", 0),
        (journal.SO_FAR, "two", None),
    ]
    assert storage.is_ready(str(state))
