"""rootfs.probe on small trees: ordinary images and hostile ones."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpushare.core.errors import KernelError
from gpushare.core.model import Bundle, Image, LdEntry
from gpushare.inject import rootfs
from gpushare.system import ldcache, syscalls

from tests.unit.test_elf import shared_object
from tests.unit.test_ldcache import build

MACHINE = os.uname().machine
FLAGS = {"x86_64": 0x0303, "aarch64": 0x0A03}
MULTIARCH = f"/usr/lib/{MACHINE}-linux-gnu"


class Tree:
    """A root file system under construction."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()

    def write(self, path: str, content: bytes = b"") -> None:
        target = self.path / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)

    def library(self, path: str, soname: str = "", machine: str = MACHINE) -> None:
        self.write(path, shared_object(soname or path.rpartition("/")[2], machine))

    def link(self, path: str, text: str) -> None:
        target = self.path / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        os.symlink(text, target)

    def cache(self, *libraries: tuple[str, str]) -> None:
        self.write("/etc/ld.so.cache", build(*((n, p, FLAGS[MACHINE], 0) for n, p in libraries)))

    def probe(self, *env: tuple[str, str]) -> Image:
        return rootfs.probe(str(self.path), env)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "root")


@pytest.fixture
def debian(tree: Tree) -> Tree:
    tree.library(f"{MULTIARCH}/libc.so.6")
    tree.link("/lib", "usr/lib")
    tree.cache(("libc.so.6", f"/lib/{MACHINE}-linux-gnu/libc.so.6"))
    return tree


@pytest.fixture(autouse=True)
def _nothing_blocks() -> Iterator[None]:
    signal.alarm(20)  # opening a FIFO would block forever
    yield
    signal.alarm(0)


# The libc of the image


def test_multiarch_directory_is_found_by_cache(debian: Tree) -> None:
    image = debian.probe()
    assert (image.libdir, image.machine, image.has_ldcache, image.ldcache_note) == (MULTIARCH, MACHINE, True, "")


@pytest.mark.parametrize("directory", [MULTIARCH, "/usr/lib64", "/lib64", "/usr/lib"])
def test_known_directory_is_found_without_cache(tree: Tree, directory: str) -> None:
    tree.library(f"{directory}/libc.so.6")
    image = tree.probe()
    assert (image.libdir, image.machine) == (directory, MACHINE)
    assert not image.has_ldcache
    assert "no /etc/ld.so.cache" in image.ldcache_note


def test_cache_overrides_known_directories(tree: Tree) -> None:
    tree.library("/usr/lib64/libc.so.6")
    tree.library("/opt/glibc/lib/libc.so.6")
    tree.cache(("libc.so.6", "/opt/glibc/lib/libc.so.6"))
    assert tree.probe().libdir == "/opt/glibc/lib"


def test_libc_of_other_machine_is_ignored(debian: Tree) -> None:
    debian.library("/usr/lib64/libc.so.6", machine="i386")
    assert debian.probe().machine == MACHINE
    os.remove(debian.path / MULTIARCH[1:] / "libc.so.6")
    assert (debian.probe().libdir, debian.probe().machine) == ("/usr/lib64", "i386")


def test_image_without_glibc_has_no_libdir(tree: Tree) -> None:
    tree.library("/lib/ld-musl-x86_64.so.1")
    assert tree.probe() == Image("", "", False, "no /etc/ld.so.cache in the image")


def test_script_or_fifo_is_no_libc(tree: Tree) -> None:
    tree.write("/usr/lib64/libc.so.6", b"#!/bin/sh")
    (tree.path / "lib64").mkdir()
    os.mkfifo(tree.path / "lib64/libc.so.6")
    assert tree.probe().libdir == ""


# Other copies of the driver


def drivers(image: Image) -> dict[str, str]:
    return dict(image.other_drivers)


def test_drivers_in_preferred_loader_directories_are_found(debian: Tree) -> None:
    places = {
        f"{MULTIARCH}/libcuda.so.470.82.01": "libcuda.so.1",
        f"{MULTIARCH}/glibc-hwcaps/x86-64-v3/libcuda.so.1": "libcuda.so.1",
        "/usr/local/cuda-12.4/compat/libcuda.so.550.54.14": "libcuda.so.1",
        "/opt/tenant/libnvidia-ml.so.1": "libnvidia-ml.so.1",
        "/opt/tenant/glibc-hwcaps/x86-64-v2/libcuda.so.1": "libcuda.so.1",
        "/opt/tenant/tls/libcuda.so.1": "libcuda.so.1",
        "/srv/cached/libcuda.so.1": "libcuda.so.1",
    }
    for path, soname in places.items():
        debian.library(path, soname)
    debian.library("/opt/tenant/libother.so.1")
    debian.link("/usr/local/cuda-12.4/compat/libcuda.so.1", "libcuda.so.550.54.14")
    debian.link(f"{MULTIARCH}/libcuda.so.1", "libcuda.so.470.82.01")
    debian.cache(("libc.so.6", f"{MULTIARCH}/libc.so.6"), ("libcuda.so.1", "/srv/cached/libcuda.so.1"))
    image = debian.probe(("LD_LIBRARY_PATH", "/elsewhere"), ("LD_LIBRARY_PATH", "/opt/tenant:/nowhere"))
    assert drivers(image) == places
    assert image.existing_links == ((f"{MULTIARCH}/libcuda.so.1", "libcuda.so.470.82.01"),)


def test_linked_driver_is_reported_once_by_target(debian: Tree) -> None:
    debian.library("/opt/a/real.so", "libcuda.so.1")
    debian.link("/opt/a/libcuda.so.1", "real.so")
    debian.link("/opt/b", "a")
    assert drivers(debian.probe(("LD_LIBRARY_PATH", "/opt/a:/opt/b"))) == {"/opt/a/real.so": "libcuda.so.1"}


def test_link_to_unrelated_file_is_ignored(debian: Tree) -> None:
    debian.write("/etc/passwd", b"root:x:0:0")
    debian.library(f"{MULTIARCH}/libz.so.1")
    for index, text in enumerate(
        ("/etc/passwd", f"{MULTIARCH}/libz.so.1", "/proc/self/root/x", "../../../../etc/passwd")
    ):
        debian.link(f"/opt/{index}/libcuda.so.1", text)
    assert drivers(debian.probe(("LD_LIBRARY_PATH", "/opt/0:/opt/1:/opt/2:/opt/3"))) == {}


def test_empty_file_is_ignored_as_old_mount_point(debian: Tree) -> None:
    debian.write(f"{MULTIARCH}/libcuda.so.535.261.03")
    assert drivers(debian.probe()) == {}


def test_loader_tokens_are_expanded(debian: Tree) -> None:
    debian.library(f"/opt/lib/{MACHINE}-linux-gnu/libcuda.so.1")
    debian.library(f"/opt/{MACHINE}/libcuda.so.1")
    found = drivers(debian.probe(("LD_LIBRARY_PATH", "/opt/$LIB:/opt/${PLATFORM}")))
    assert sorted(found) == [f"/opt/lib/{MACHINE}-linux-gnu/libcuda.so.1", f"/opt/{MACHINE}/libcuda.so.1"]


@pytest.mark.parametrize(
    "path",
    [
        "/opt/conda/lib/libcuda.so.1",
        "/opt/conda/cuda-compat/libcuda.so.1",
        "/opt/miniforge3/envs/train/lib/libcuda.so.1",
        "/root/miniconda3/envs/train/cuda-compat/libcuda.so.1",
        "/opt/vendor/lib64/libcuda.so",
        "/opt/nvidia/hpc_sdk/Linux_x86_64/24.5/cuda/12.4/compat/libcuda.so.1",
    ],
)
def test_driver_that_a_later_library_path_names_is_found(debian: Tree, path: str) -> None:
    """conda's activate scripts and entry scripts set LD_LIBRARY_PATH after the start."""
    debian.library(path, "libcuda.so.1")
    assert drivers(debian.probe()) == {path: "libcuda.so.1"}


def test_many_environments_of_conda_are_searched_in_bounded_time(debian: Tree) -> None:
    for number in range(rootfs._MAX_LATER + 9):
        debian.library(f"/opt/conda/envs/{number:02}/lib/libcuda.so.1")
    assert len(drivers(debian.probe())) == rootfs._MAX_LATER - 1


def test_libraries_below_our_own_directory_are_not_covered(debian: Tree) -> None:
    """A mount would need mount points there, in a directory that all containers of a device see."""
    for number in range(3):
        deep = f"/usr/lib/gpushare/peers/GPU-1/{number}/a/a/libcuda.so.1"
        debian.library(deep)
        debian.link(f"{MULTIARCH}/libcuda.so.{number}", deep)
    assert drivers(debian.probe()) == {}


def test_many_packages_in_opt_are_searched_in_bounded_time(debian: Tree) -> None:
    for number in range(rootfs._MAX_LATER + 9):
        debian.library(f"/opt/{number:02}/lib/libcuda.so.1")
    assert len(drivers(debian.probe())) == rootfs._MAX_LATER


@pytest.mark.parametrize(
    "value", ["", ":::;;", "relative:../up", "$ORIGIN/../lib", "/" + "a" * 5000, ":".join(f"/d{i}" for i in
    range(20000)), "/\0x",
     "/proc/self/root:/proc/self/fd/0", "/etc/passwd:/fifo:/loop", "/\ud800:/x", "/../../../../..", "\n/x:/%s%n{}"],
    ids=lambda v: repr(v[:12]),
)  # fmt: skip
def test_hostile_library_path_is_ignored(debian: Tree, value: str) -> None:
    os.mkfifo(debian.path / "fifo")
    debian.link("/loop", "loop")
    image = debian.probe(("LD_LIBRARY_PATH", value))
    assert (image.libdir, drivers(image)) == (MULTIARCH, {})


def test_special_files_are_not_opened(debian: Tree) -> None:
    directory = debian.path / "opt"
    directory.mkdir()
    os.mkfifo(directory / "libcuda.so.1")
    (directory / "libcuda.so").mkdir()
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(directory / "libnvidia-ml.so.1"))
    assert drivers(debian.probe(("LD_LIBRARY_PATH", "/opt"))) == {}
    server.close()


def test_files_outside_root_are_ignored(debian: Tree, tmp_path: Path) -> None:
    outside = Tree(tmp_path / "outside")
    outside.library("/libcuda.so.1")
    debian.link("/opt/out", "../../outside")
    debian.link("/opt/absolute", str(outside.path))
    assert drivers(debian.probe(("LD_LIBRARY_PATH", f"/opt/out:/opt/absolute:{outside.path}"))) == {}


def test_large_directory_is_read_up_to_bound(debian: Tree) -> None:
    for index in range(5000):
        debian.link(f"{MULTIARCH}/libcuda.so.{index}", "libc.so.6")
    image = debian.probe()
    assert 1000 < len(image.existing_links) <= 4096


# The cache


@pytest.mark.parametrize(
    ("content", "note"),
    [(b"", "not an ld.so.cache"), (b"x" * 100, "not an ld.so.cache"), (build()[:40], "cut off"),
     (b"glibc-ld.so.cache1.1" + b"\xff" * 60, "malformed")],
)  # fmt: skip
def test_malformed_cache_is_not_changed(debian: Tree, content: bytes, note: str) -> None:
    debian.write("/etc/ld.so.cache", content)
    image = debian.probe()
    assert not image.has_ldcache
    assert note in image.ldcache_note
    assert image.libdir == MULTIARCH


def test_huge_cache_is_not_read(debian: Tree) -> None:
    os.truncate(debian.path / "etc/ld.so.cache", 16 << 30)
    assert "17179869184 bytes" in debian.probe().ldcache_note


@pytest.mark.parametrize("kind", ["fifo", "link", "directory"])
def test_special_file_as_cache_is_not_changed(debian: Tree, kind: str) -> None:
    path = debian.path / "etc/ld.so.cache"
    path.rename(debian.path / "etc/real.cache")
    {"fifo": os.mkfifo, "directory": os.mkdir, "link": lambda p: os.symlink("real.cache", p)}[kind](path)
    assert "not a regular file" in debian.probe().ldcache_note


def test_name_stored_as_end_of_path_is_found(debian: Tree) -> None:
    """ldconfig stores "libcuda.so.1" only once, as the end of its path."""
    debian.library("/srv/libcuda.so.1")
    cache = ldcache.parse((debian.path / "etc/ld.so.cache").read_bytes())
    cache = ldcache.extended(cache, [LdEntry("libcuda.so.1", "/srv/libcuda.so.1", FLAGS[MACHINE])])
    shared = [
        e._replace(key=cache.strings.index(b"/srv/libcuda.so.1\0") + 5) if cache.text(e.key) == b"libcuda.so.1" else e
        for e in cache.entries
    ]
    debian.write("/etc/ld.so.cache", ldcache.render(cache._replace(entries=ldcache.Entries.of(shared))))
    assert drivers(debian.probe()) == {"/srv/libcuda.so.1": "libcuda.so.1"}


def test_entries_sharing_long_path_use_little_memory(debian: Tree) -> None:
    """4 MiB of file would become 130 GB if each entry got its own copy of the path."""
    path = b"/" + b"a" * (5 << 19)
    entry = ldcache.Entry(FLAGS[MACHINE], 0, 13, 0, 0)
    strings = b"libcuda.so.1\0" + path + b"\0"
    debian.write("/etc/ld.so.cache", ldcache.render(ldcache.Cache(ldcache.Entries.of([entry] * 50_000), strings, ())))
    tracemalloc.start()
    try:
        assert debian.probe().has_ldcache
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


# The root itself


def test_missing_root_is_named(tmp_path: Path) -> None:
    missing = Bundle("x", 0, str(tmp_path), str(tmp_path / "no-root"), (), {}, "", "", "", False, {})
    with pytest.raises(KernelError, match="no-root.*No such file.*root.path"):
        rootfs.open_root(missing)


def test_probe_leaks_no_descriptors(debian: Tree) -> None:
    debian.library("/opt/libcuda.so.1")
    debian.probe(("LD_LIBRARY_PATH", "/opt"))
    before = len(os.listdir("/proc/self/fd"))
    debian.probe(("LD_LIBRARY_PATH", "/opt"))
    assert len(os.listdir("/proc/self/fd")) == before


def test_links_in_root_path_resolve_in_container_namespace(tmp_path: Path) -> None:
    """crun follows links in root.path; an absolute link opened from outside led to the host's mounts instead."""
    (tmp_path / "disk" / "root").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    mounts = f"mount -t tmpfs gpushare-test {tmp_path}/disk/root && echo ready && exec sleep 600"
    with subprocess.Popen(["unshare", "-m", "sh", "-c", mounts], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            theirs = Bundle("x", process.pid, "", str(tmp_path / "link" / "root"), (), {}, "", "", "", False, {})
            for pid, is_theirs in ((process.pid, True), (0, False)):
                fd = rootfs.open_root(theirs, pid)
                assert (os.fstat(fd).st_dev != os.stat(tmp_path).st_dev) == is_theirs
                os.close(fd)
        finally:
            process.kill()


# Package stores, and a second glibc


@pytest.mark.parametrize("store", ["/nix/store", "/gnu/store"])
def test_glibc_in_package_store_is_found(tree: Tree, store: str) -> None:
    tree.library(f"{store}/abc-glibc-2.39/lib/libc.so.6")
    tree.library(f"{store}/abc-musl-1.2/lib/libc.so.6", machine="i386")
    assert (tree.probe().libdir, tree.probe().machine) == ("/run/opengl-driver/lib", MACHINE)
    assert tree.probe(("LD_LIBRARY_PATH", "/opt/x:/usr/lib64")).libdir == "/usr/lib64"


def test_ordinary_glibc_precedes_package_store(debian: Tree) -> None:
    debian.library("/nix/store/abc-glibc-2.39/lib/libc.so.6")
    assert debian.probe().libdir == MULTIARCH


@pytest.mark.parametrize("directory", ["/usr/lib/i386-linux-gnu", "/usr/lib32"])
def test_32_bit_glibc_beside_64_bit_is_found(debian: Tree, directory: str) -> None:
    assert debian.probe().libdir32 == ""
    debian.library(f"{directory}/libc.so.6", machine="i386")
    assert (debian.probe().libdir, debian.probe().libdir32) == (MULTIARCH, directory)


def test_unlinked_compat_directory_is_searched(debian: Tree) -> None:
    debian.library("/usr/local/cuda-12.4/compat/lib.real/libcuda.so.550.54.15", "libcuda.so.1")
    debian.link("/usr/local/cuda-12.4/compat/lib.real/libcuda.so.1", "libcuda.so.550.54.15")
    assert drivers(debian.probe()) == {"/usr/local/cuda-12.4/compat/lib.real/libcuda.so.550.54.15": "libcuda.so.1"}


def test_missing_directory_is_looked_up_once(debian: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's images name two missing directories in LD_LIBRARY_PATH: one lookup each, not 32."""
    asked: list[str] = []
    real = syscalls.openat2

    def counted(dir_fd: int, path: str, *arguments: Any) -> int:
        asked.append(path)
        return real(dir_fd, path, *arguments)

    monkeypatch.setattr(syscalls, "openat2", counted)
    debian.probe(("LD_LIBRARY_PATH", "/usr/local/nvidia/lib:/usr/local/nvidia/lib64"))
    assert [path for path in asked if "nvidia" in path] == ["/usr/local/nvidia/lib", "/usr/local/nvidia/lib64"]
    assert not [path for path in asked if "/tls" in path]
