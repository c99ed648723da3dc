"""Idmapped mounts that hide file owners: created once, shared by all starts, and omitted where the kernel refuses
them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from gpushare.core.errors import DeviceError
from gpushare.core.ops import Mount
from gpushare.state import storage
from gpushare.system import idmap, mountns, syscalls

from tests.unit.test_doctor_kernel import overlay

FLAGS = ("ro", "nosuid", "nodev")


@pytest.fixture
def state(state_dir: Path) -> str:
    storage.prepare(str(state_dir))
    return str(state_dir)


def share(state: str, name: str = "c1") -> Mount:
    """The mount of an allocation; its directories as a start makes them."""
    folder = Path(storage.container_dir(state, name))
    folder.mkdir(0o700)
    idmap.give(str(folder))
    path = storage.make_share_dir(state, name, ())
    limits = Path(path, "limits")
    limits.write_bytes(b"limits")
    limits.chmod(0o666)
    return Mount(path, "/usr/lib/gpushare", "dir", FLAGS, "")


@pytest.mark.parametrize(
    ("name", "hint"), [("libcuda.so", "set shim_dir"), ("libcuda.so.535.1", "is the driver loaded")]
)
def test_missing_source_is_reported_in_one_line(state: str, tmp_path: Path, name: str, hint: str) -> None:
    with pytest.raises(DeviceError, match=f'{name}": No such file or directory; .*{hint}'):
        idmap.shown(idmap.Hider(state))(Mount(str(tmp_path / name), "/x", "file", FLAGS, ""))


def below(state: str) -> list[str]:
    return sorted(mount.point for mount in mountns.read_mounts() if mount.point.startswith(f"{state}/"))


def test_allocation_is_shown_through_one_mount_without_root_owner(state: str) -> None:
    op = share(state)
    shown = Path(idmap.shown(idmap.Hider(state))(op))
    before = below(state)
    assert len(before) == 2 and str(shown).startswith(f"{state}/idmap/")
    assert idmap.shown(idmap.Hider(state))(share(state, "c2")) == str(shown.parent.with_name("c2") / "share")
    assert below(state) == before
    limits = shown / "limits"
    assert os.path.samestat(limits.stat(), Path(op.source, "limits").stat())
    assert limits.read_bytes() == b"limits"
    command = ["setpriv", "--bounding-set=-lease", "python3", "-c", LEASE]  # this test has CAP_LEASE
    for path, answer in ((str(limits), "refused\n"), (f"{op.source}/limits", "leased\n")):
        assert subprocess.run([*command, path], capture_output=True, text=True).stdout == answer
    with pytest.raises(OSError):
        os.chmod(limits, 0o644)
    tree = syscalls.open_tree(str(shown))
    try:  # as a CAP_SYS_ADMIN process remounts it writable
        syscalls.mount_setattr(tree, 0, syscalls.MS_PRIVATE, "", clear=syscalls.ATTRIBUTES["ro"])
        with pytest.raises(PermissionError):
            os.open("limits", os.O_RDWR, dir_fd=tree)
    finally:
        os.close(tree)


LEASE = """
import fcntl, os, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)
fd = os.open(sys.argv[1], os.O_RDONLY)
try:
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    print("leased")
except PermissionError:
    print("refused")
"""


def test_host_users_cannot_reach_allocation(state: str) -> None:
    op = share(state)
    shown = idmap.shown(idmap.Hider(state))(op)
    for path in (shown, f"{state}/containers/c1", f"{state}/containers"):
        done = subprocess.run(
            ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "ls", path], capture_output=True
        )
        assert done.returncode and b"Permission denied" in done.stderr, path


@pytest.mark.parametrize(
    "target, kind, flags, mode",
    [
        ("/usr/lib/gpushare/rw", "dir", ("nosuid",), 0o755),
        ("/run/nvidia/socket", "socket", FLAGS, 0o666),
        ("/usr/lib/gpushare/mps/GPU-1", "dir", FLAGS, 0o755),
        ("/usr/bin/secret", "file", FLAGS, 0o750),
        ("/usr/bin/readable", "file", FLAGS, 0o744),
    ],
)
def test_mount_that_needs_owner_keeps_it(state: str, target: str, kind: str, flags: tuple[str, ...], mode: int) -> None:
    hider = idmap.Hider(state)
    status = os.stat(state)
    try:
        assert hider.attributes(target, kind, FLAGS, os.stat_result((0o755, *status[1:]))) in (0, idmap.IDMAP)
        assert hider.attributes("/usr/bin/x", "file", FLAGS, os.stat_result((0o755, *status[1:]))) == idmap.IDMAP
        assert hider.attributes(target, kind, flags, os.stat_result((mode, *status[1:]))) == 0
    finally:
        hider.close()


def test_refusing_file_system_is_tried_once(state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk").mkdir()
    place = overlay(tmp_path / "disk")
    try:
        library = place / "libcuda.so.1"
        library.write_bytes(b"")
        library.chmod(0o644)
        op = Mount(str(library), "/usr/lib/libcuda.so.1", "file", FLAGS, "")
        assert idmap.shown(idmap.Hider(state))(op) == op.source
        monkeypatch.setattr(syscalls, "open_tree", None)
        assert idmap.shown(idmap.Hider(state))(op) == op.source
        assert any(name.startswith("refused-") for name in os.listdir(f"{state}/idmap"))
    finally:
        subprocess.run(["umount", place], check=True)


def test_replaced_directory_gets_new_mount(state: str, tmp_path: Path) -> None:
    shim = tmp_path / "shim"
    for content in (b"one", b"two"):
        shim.mkdir()
        (shim / "libcuda.so").write_bytes(content)
        op = Mount(str(shim / "libcuda.so"), "/usr/lib/libcuda.so.1", "file", FLAGS, "")
        path = idmap.shown(idmap.Hider(state))(op)
        assert path != op.source and Path(path).read_bytes() == content
        shim.rename(tmp_path / content.decode())


def test_without_user_namespaces_owners_stay_visible(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unshare(kinds: int, what: str) -> None:
        raise syscalls.SyscallError("unshare", what, 28)

    monkeypatch.setattr(syscalls, "unshare", unshare)
    op = share(state)
    assert idmap.shown(idmap.Hider(state))(op) == op.source
    monkeypatch.setattr(os, "fork", None)  # it is not tried again
    assert idmap.shown(idmap.Hider(state))(op) == op.source


def test_failure_without_descriptors_is_not_cached(state: str) -> None:
    program = "import sys; from gpushare.system import idmap; print(idmap.Hider(sys.argv[1]).fd >= 0)"
    environment = {**os.environ, "PYTHONPATH": str(Path(idmap.__file__).parents[2])}
    few = ["prlimit", "--nofile=6", "python3", "-c", program, state]
    assert subprocess.run(few, capture_output=True, text=True, env=environment).stdout == "False\n"
    mark = Path(state, "idmap", "none")
    for seconds, hidden in ((idmap.RETRY_S // 2, False), (-3600, True), (idmap.RETRY_S + 1, True)):
        mark.touch()
        when = mark.stat().st_mtime - seconds
        os.utime(mark, (when, when))
        hider = idmap.Hider(state)
        assert (hider.fd >= 0) is hidden, seconds
        hider.close()


def test_refusal_is_dropped_for_new_file_system_with_same_number(state: str) -> None:
    status = os.stat(state)
    hider = idmap.Hider(state)
    mark = Path(hider._mark(status.st_dev))
    mark.touch()
    assert not hider.can(status.st_dev)
    hider.close()
    os.utime(mark, (0, 0))
    hider = idmap.Hider(state)
    assert hider.can(status.st_dev)
    hider.close()


def test_state_directory_of_earlier_version_is_completed(state: str) -> None:
    """Version 0.1.0 made it, with directories owned by root."""
    os.chown(f"{state}/containers", 0, 0)
    shown = idmap.shown(idmap.Hider(state))(share(state))
    assert Path(shown, "limits").read_bytes() == b"limits"


def test_concurrent_starts_make_one_namespace(state: str) -> None:
    program = "import sys; from gpushare.system import idmap; print(idmap.Hider(sys.argv[1]).fd >= 0)"
    command = ["python3", "-c", program, state]
    environment = {**os.environ, "PYTHONPATH": str(Path(idmap.__file__).parents[2])}
    starts = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(8)]
    assert [start.communicate()[0] for start in starts] == ["True\n"] * 8
    assert below(state) == [f"{state}/idmap/ns"]
