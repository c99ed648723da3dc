"""Attacks on the paths that we touch as root in a tenant's file system. Each asserts that the host is unchanged, and
either a refusal that names what is wrong (after which nothing of the plan is left) or a share that is right all the
same."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpushare import apply, inroot, rootfs
from gpushare.errors import GpushareError
from gpushare.model import LdEntry
from gpushare.mountpoint import is_library_path
from gpushare.ops import DeviceNode, LdCache, Link, Mount, Op, Plan

from tests.e2e import ns_util

LIBDIR = ns_util.LIBDIR
NAME = f"{LIBDIR}/libcuda.so.535.1"
RO = ("ro", "nosuid", "nodev")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ns_util.make_image(tmp_path_factory.mktemp("base") / "rootfs")


@pytest.fixture
def image(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "rootfs", symlinks=True))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.mkdir()
    (path / "shim.so").write_text("the shim")
    (path / "share").mkdir()
    os.mknod(path / "nvidia0", 0o020666, os.makedev(195, 0))
    return path


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Path]:
    """A directory of the host, beside the rootfs, that attacks aim at. It and the mount table must stay as they are."""
    path = tmp_path / "host"
    (path / "lib").mkdir(parents=True)
    (path / "passwd").write_text("the host's")
    before, mounts = ns_util.snapshot(path), ns_util.host_mounts()
    yield path
    assert ns_util.snapshot(path) == before
    assert ns_util.host_mounts() == mounts


def shim(source: Path, target: str = NAME) -> Mount:
    return Mount(str(source / "shim.so"), target, "file", RO, "shim")


def read(path: str) -> Callable[[], str]:
    def reader() -> str:
        with open(path) as file:
            return file.read()

    return reader


# Links


@pytest.mark.parametrize(
    "text",
    [
        "/etc/passwd",
        "../../../etc/passwd",
        "../../../../../../../../etc/passwd",
        "/bin/sh",
        "/dev/link",
        "{host}/passwd",
    ],
)
def test_a_leaf_link_out_of_the_library_directories(image: Path, source: Path, host: Path, text: str) -> None:
    (image / "dev/link").write_text("")
    (image / str(host)[1:]).mkdir(parents=True)
    (image / str(host)[1:] / "passwd").write_text("the container's")
    os.symlink(text.format(host=host), image / NAME[1:])
    with ns_util.sandbox(image) as box:
        message = box.refuses(shim(source))
    assert message.startswith(f"{NAME!r} is a link to ")
    assert "not in a library directory" in message


@pytest.mark.parametrize("text", ["../../host/passwd", "../../../../../../..{host}/passwd", "nothing"])
def test_a_leaf_link_to_nothing_inside(image: Path, source: Path, host: Path, text: str) -> None:
    os.symlink(text.format(host=host), image / NAME[1:])
    with ns_util.sandbox(image) as box:
        assert box.refuses(shim(source)) == f"{NAME!r} is a link to nothing; remove it from the image"


@pytest.mark.parametrize("text", ["/usr/local/lib/a.so", "../../local/lib/a.so", "/../../lib/../local/lib/a.so"])
def test_a_leaf_link_within_the_library_directories_is_a_share(
    image: Path, source: Path, host: Path, text: str
) -> None:
    (image / "usr/local/lib").mkdir(parents=True)
    (image / "usr/local/lib/a.so").write_text("another")
    os.symlink(text, image / NAME[1:])
    with ns_util.sandbox(image) as box:
        box.apply(Plan("test", (shim(source),)))
        assert box.enter(read(NAME)) == "the shim"
        assert box.enter(read("/usr/local/lib/a.so")) == "the shim"
    assert (image / "usr/local/lib/a.so").read_text() == "another"


@pytest.mark.parametrize("text", ["{host}", "../../../host", "../../../../../../../../..{host}"])
def test_a_parent_link_towards_the_host_ends_in_the_container(image: Path, source: Path, host: Path, text: str) -> None:
    text = text.format(host=host)
    os.symlink(text, image / "usr/lib/gpushare")
    inside = image / os.path.normpath("/usr/lib/" + text if not text.startswith("/") else text).lstrip("/")
    with ns_util.sandbox(image) as box:
        if text.startswith("../../../host"):
            (image / "host").mkdir()
        elif not inside.exists():
            inside.mkdir(parents=True)
        box.apply(Plan("test", (Mount(str(source / "share"), "/usr/lib/gpushare/driver", "dir", RO, "share"),)))
        assert len(box.mounts()) == 1
    assert not (host / "driver").exists()


def test_a_parent_link_to_nothing(image: Path, source: Path, host: Path) -> None:
    os.symlink("nothing", image / "usr/lib/gpushare")
    with ns_util.sandbox(image) as box:
        message = box.refuses(Mount(str(source / "share"), "/usr/lib/gpushare/driver", "dir", RO, "share"))
    assert message.startswith("'/usr/lib/gpushare' is a link to nothing")


def test_loops(image: Path, source: Path, host: Path) -> None:
    os.symlink("gpushare", image / "usr/lib/gpushare")
    os.symlink(os.path.basename(NAME), image / NAME[1:])
    with ns_util.sandbox(image) as box:
        for op in (shim(source), shim(source, "/usr/lib/gpushare/x/y")):
            assert "magic link or a loop" in box.refuses(op)


@pytest.mark.parametrize("where", ["leaf", "parent"])
@pytest.mark.parametrize("magic", ["root", "cwd", "fd/0", "ns/mnt", "exe"])
def test_magic_links(image: Path, source: Path, host: Path, where: str, magic: str) -> None:
    target = NAME if where == "leaf" else "/usr/lib/gpushare/file"
    os.symlink(f"/proc/self/{magic}", image / (NAME if where == "leaf" else "/usr/lib/gpushare")[1:])
    with ns_util.sandbox(image, f"mount -t proc proc {image}/proc") as box:
        assert "magic link or a loop" in box.refuses(shim(source, target))


def test_a_links_text_never_leads_us(image: Path, source: Path, host: Path) -> None:
    """Our own links are names, not places: `Link` writes through no existing link."""
    os.symlink("../../../host/lib", image / "usr/lib/there")
    with ns_util.sandbox(image) as box:
        message = box.refuses(Link("/usr/lib/there/libcuda.so.1", f"{host}/passwd", "name"))
    assert message.startswith("'/usr/lib/there' is a link to nothing")


def test_a_link_name_that_is_a_link_to_passwd(image: Path, source: Path, host: Path) -> None:
    os.symlink("/etc/passwd", image / LIBDIR[1:] / "libcuda.so.1")
    with ns_util.sandbox(image) as box:
        message = box.refuses(shim(source), Link(f"{LIBDIR}/libcuda.so.1", "libcuda.so.535.1", "name"))
    assert message.startswith(
        f"'{LIBDIR}/libcuda.so.1' is a link to '/etc/passwd', which is not in a library directory"
    )


@pytest.mark.parametrize(
    ("path", "is_one"),
    [
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.1", True),
        ("/lib64/a", True),
        ("/usr/local/cuda-12.4/compat/libcuda.so.1", True),
        ("/opt/cuda/lib64/a", True),
        ("/usr/libexec/sudo", False),
        ("/lib", False),
        ("/library/a", False),
        ("/etc/passwd", False),
        ("/usr/bin/sh", False),
        ("/home/usr/lib/a", False),
        ("", False),
    ],
)
def test_library_directories(path: str, is_one: bool) -> None:
    assert is_library_path(path) == is_one


# Things that are not files


@contextlib.contextmanager
def laid(path: Path, kind: str) -> Iterator[None]:
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "character device":
        os.mknod(path, 0o020666, os.makedev(1, 3))
    elif kind == "block device":
        os.mknod(path, 0o060666, os.makedev(7, 0))
    else:
        server = socket.socket(socket.AF_UNIX)
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path has at most 108 bytes
        server.bind(path.name)
        os.chdir(here)
        server.close()
    yield


KINDS = ("FIFO", "directory", "character device", "block device", "socket")


@pytest.mark.parametrize("kind", KINDS)
def test_a_special_file_at_a_mount_target(image: Path, source: Path, host: Path, kind: str) -> None:
    with laid(image / NAME[1:], kind), ns_util.sandbox(image) as box:
        assert box.refuses(shim(source)) == f"{NAME!r} is a {kind} where a file must be; remove it from the image"


@pytest.mark.parametrize("kind", KINDS)
def test_a_special_file_at_a_links_name(image: Path, source: Path, host: Path, kind: str) -> None:
    name = f"{LIBDIR}/libcuda.so.1"
    with laid(image / name[1:], kind), ns_util.sandbox(image) as box:
        message = box.refuses(shim(source), Link(name, "libcuda.so.535.1", "name"))
    assert message == f"{name!r} is a {kind} where a link must be; remove it from the image"


@pytest.mark.parametrize("kind", KINDS)
def test_a_special_file_behind_a_links_name(image: Path, source: Path, host: Path, kind: str) -> None:
    name = f"{LIBDIR}/libcuda.so.1"
    os.symlink("libodd.so", image / name[1:])
    with laid(image / LIBDIR[1:] / "libodd.so", kind), ns_util.sandbox(image) as box:
        assert f"is a {kind} where a " in box.refuses(shim(source), Link(name, "libcuda.so.535.1", "name"))


@pytest.mark.parametrize("kind", ["FIFO", "directory", "socket", "block device"])
def test_a_special_file_at_a_device_target(image: Path, source: Path, host: Path, kind: str) -> None:
    with laid(image / "dev/nvidia0", kind), ns_util.sandbox(image) as box:
        message = box.refuses(DeviceNode(str(source / "nvidia0"), "/dev/nvidia0", 195, 0, False))
    assert message.startswith(f"'/dev/nvidia0' is a {kind} where a file must be")


def test_a_file_where_a_directory_must_be(image: Path, source: Path, host: Path) -> None:
    (image / "usr/lib/gpushare").write_text("x")
    with ns_util.sandbox(image) as box:
        message = box.refuses(Mount(str(source / "share"), "/usr/lib/gpushare", "dir", RO, "share"))
        assert message.startswith("'/usr/lib/gpushare' is a regular file where a directory must be")
        message = box.refuses(shim(source, "/usr/lib/gpushare/a/b"))
        assert "is not a directory" in message


def test_a_hard_link_to_another_file_is_covered_not_changed(image: Path, source: Path, host: Path) -> None:
    os.link(image / "etc/passwd", image / NAME[1:])
    before = (image / "etc/passwd").read_text()
    with ns_util.sandbox(image) as box:
        box.apply(Plan("test", (shim(source),)))
        assert box.enter(read("/etc/passwd")) == before
    assert (image / "etc/passwd").read_text() == before


def test_an_immutable_directory(image: Path, source: Path, host: Path) -> None:
    subprocess.run(["chattr", "+i", image / LIBDIR[1:]], check=True)
    try:
        with ns_util.sandbox(image) as box:
            message = box.refuses(shim(source))
    finally:
        subprocess.run(["chattr", "-i", image / LIBDIR[1:]], check=True)
    assert message == f"create {NAME!r}: Operation not permitted"


# Volumes of the user's


def test_nothing_is_created_in_a_volume(image: Path, source: Path, host: Path) -> None:
    with ns_util.sandbox(image, f"mount --bind {host}/lib {image}{LIBDIR}/") as box:
        message = box.refuses(shim(source))
    where = f"(on the host: {str(host / 'lib')!r})"
    assert message.startswith(f"{NAME!r} would be created in the volume at {LIBDIR!r} {where}")


def test_a_link_is_not_created_in_a_volume(image: Path, source: Path, host: Path) -> None:
    (image / "opt/v").mkdir(parents=True)
    with ns_util.sandbox(image, f"mount --bind {host}/lib {image}/opt/v") as box:
        message = box.refuses(Link("/opt/v/libcuda.so.1", "x", "name"))
    assert message.startswith("'/opt/v/libcuda.so.1' would be created in the volume at '/opt/v'")


def test_a_volume_over_a_parent_is_a_share_when_the_file_is_there(image: Path, source: Path, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "libcuda.so.535.1").write_text("the user's")
    (image / "opt/v").mkdir(parents=True)
    mounts = ns_util.host_mounts()
    for options in ("", f" && mount -o remount,bind,ro {image}/opt/v"):
        with ns_util.sandbox(image, f"mount --bind {volume} {image}/opt/v{options}") as box:
            box.apply(Plan("test", (shim(source, "/opt/v/libcuda.so.535.1"),)))
            assert box.enter(read("/opt/v/libcuda.so.535.1")) == "the shim"
            assert ns_util.host_mounts() == mounts
    assert (volume / "libcuda.so.535.1").read_text() == "the user's"


def test_a_shared_volume_does_not_carry_our_mount_to_the_host(image: Path, source: Path, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "file").write_text("the user's")
    (image / "opt/v").mkdir(parents=True)
    for path in (volume, image / "opt/v"):
        subprocess.run(["mount", "--bind", volume, path], check=True)
        subprocess.run(["mount", "--make-shared", path], check=True)
    try:
        mounts = ns_util.host_mounts()
        with ns_util.sandbox(image, f"mount --rbind {image} {image} && mount --make-private {image}", True) as box:
            box.apply(Plan("test", (shim(source, "/opt/v/file"),)))
            assert box.enter(read("/opt/v/file")) == "the shim"
            assert [m for m in ns_util.host_mounts() if "source/shim.so" in m] == []
            assert (volume / "file").read_text() == "the user's"
        assert len(ns_util.host_mounts()) == len(mounts)
    finally:
        for path in (image / "opt/v", volume):
            subprocess.run(["umount", path], check=True)


def test_a_directory_that_the_runtime_made_may_be_written(image: Path, source: Path, host: Path) -> None:
    """/dev and /run are fresh file systems of the container, although they are mounts of their own."""
    with ns_util.sandbox(image, f"mount -t tmpfs none {image}/dev") as box:
        box.apply(Plan("test", (DeviceNode(str(source / "nvidia0"), "/dev/nvidia0", 195, 0, False),)))
        assert box.enter(lambda: os.stat("/dev/nvidia0").st_rdev) == os.makedev(195, 0)


def test_devices_of_the_host_are_not_added_to(image: Path, source: Path, host: Path) -> None:
    """`-v /dev:/dev`: what we made there would be a file in the host's /dev."""
    before = sorted(os.listdir("/dev"))
    with ns_util.sandbox(image, f"mount --rbind /dev {image}/dev") as box:
        message = box.refuses(DeviceNode(str(source / "nvidia0"), "/dev/nvidia0-gpushare", 195, 0, False))
    assert "would be created in the volume at '/dev'" in message
    assert sorted(os.listdir("/dev")) == before


def test_a_read_only_parent(image: Path, source: Path, host: Path) -> None:
    setup = f"mount -t tmpfs none {image}/opt && mkdir {image}/opt/x && mount -o remount,ro {image}/opt"
    (image / "opt").mkdir()
    with ns_util.sandbox(image, setup) as box:
        message = box.refuses(shim(source), shim(source, "/opt/x/file"))
    assert message.startswith(
        "create '/opt/x/file': Read-only file system; the image is read-only: create an empty file"
    )


# Names


@pytest.mark.parametrize("target", ["/", "/usr/lib/..", "/usr/lib/.", ""])
def test_targets_that_are_no_name(image: Path, source: Path, host: Path, target: str) -> None:
    with ns_util.sandbox(image) as box:
        box.refuses(shim(source, target))


def test_a_target_with_dots_stays_inside(image: Path, source: Path, host: Path) -> None:
    with ns_util.sandbox(image) as box:
        box.apply(Plan("test", (shim(source, "/../../../../host-of-the-container/file"),)))
        assert box.enter(read("/host-of-the-container/file")) == "the shim"


# Races: a second container that shares the directory swaps components while we work


SWAPPER = """
import os, sys
directory, link, name = sys.argv[1:]
os.chdir(directory)
os.write(1, b"r")
while True:
    os.rename(name, name + ".away")
    os.rename(link, name)
    os.rename(name, link)
    os.rename(name + ".away", name)
"""


@pytest.mark.parametrize("where", ["leaf directory", "parent", "walk"])
def test_a_component_swapped_in_a_loop(
    image: Path, source: Path, host: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a moment the directory is a link to the host's, again and again; whatever we see, we never follow it out."""
    if where == "walk":
        monkeypatch.setattr(inroot, "_kernel_has_openat2", False)
    directory, name = (image / "usr/lib", "swapped") if where != "parent" else (image / "usr", "lib.swapped")
    (directory / name / "deep").mkdir(parents=True)
    os.symlink("../../../../../../../../../../" + str(host), directory / "evil")
    target = f"/{directory.relative_to(image)}/{name}/deep/file"
    ops: tuple[Op, ...] = (shim(source, target), Link(target + ".link", "x", "name"), shim(source))
    command = ["python3", "-c", SWAPPER, str(directory), "evil", name]
    outcomes = {"applied": 0, "refused": 0}
    with ns_util.sandbox(image) as box, subprocess.Popen(command, stdout=subprocess.PIPE) as swapper:
        assert swapper.stdout is not None
        assert swapper.stdout.read(1) == b"r"

        def attempts() -> dict[str, int]:
            for _ in range(150):
                try:
                    apply.apply(Plan("test", ops), box.bundle, box.pid).undo()
                    outcomes["applied"] += 1
                except GpushareError:
                    outcomes["refused"] += 1
            return outcomes

        try:
            done = ns_util.in_child(attempts)
        finally:
            swapper.kill()
        assert box.mounts() == []
    assert sum(done.values()) == 150
    assert done["applied"] > 0


# What the image says of itself


@pytest.mark.parametrize(
    "value",
    [
        "/proc/self/root{host}:/proc/1/root",
        "{host}:{host}/lib",
        "/lib/../../../..{host}",
        "/fifo:/socket:/loop",
        "\x00:/",
    ],
)
def test_hostile_library_paths_lead_to_nothing_outside(image: Path, host: Path, source: Path, value: str) -> None:
    shutil.copy(image / LIBDIR[1:] / "libc.so.6", host / "lib/libcuda.so.1")
    os.mkfifo(image / "fifo")
    os.symlink("loop", image / "loop")
    with ns_util.sandbox(image, f"mount -t proc proc {image}/proc") as box:

        def probe() -> list[str]:
            fd = rootfs.open_root(box.bundle, box.pid)
            return [path for path, _ in rootfs.probe(fd, [("LD_LIBRARY_PATH", value.format(host=host))]).other_drivers]

        assert ns_util.in_child(probe) == []
    (host / "lib/libcuda.so.1").unlink()


@pytest.mark.parametrize(
    "content", [b"\xff" * 5000, b"glibc-ld.so.cache1.1" + b"\xff" * 5000, b"", b"ld.so-1.7.0\0\xff\xff\xff\x7f"]
)
def test_a_malformed_cache_does_not_stop_the_share(image: Path, source: Path, host: Path, content: bytes) -> None:
    (image / "etc/ld.so.cache").write_bytes(content)
    entry = LdCache((LdEntry("libcuda.so.1", NAME, 0x0303),))
    with ns_util.sandbox(image) as box:
        notes = box.apply(Plan("test", (shim(source), entry)), lambda applied: applied.notes)
        assert "malformed" in notes[0]
        assert box.enter(read(NAME)) == "the shim"
    assert (image / "etc/ld.so.cache").read_bytes() == content


def test_the_mount_table_does_not_grow(image: Path, source: Path, host: Path) -> None:
    """Twenty starts and ends of one container leave the host's table as it was (see the fixture) and no process."""
    for _ in range(20):
        with ns_util.sandbox(image) as box:
            box.apply(Plan("test", (shim(source),)))
            assert box.mounts() == [NAME]
