"""The edited ld.so.cache, judged by the image's own ldconfig and loader, in Debian's and Fedora's layout."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from gpushare.core.model import LdEntry
from gpushare.core.ops import LdCache, Link, Mount, Op, Plan
from gpushare.inject import cachefile
from gpushare.system import ldcache

from tests.integration import ns_util

FLAGS = {"x86_64": 0x0303, "aarch64": 0x0A03}[os.uname().machine]
RO = ("ro", "nosuid", "nodev")
LAYOUTS = {"multiarch": ns_util.LIBDIR, "lib64": "/usr/lib64"}
LOADER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
int main(int argc, char **argv) {
    (void)argc;
    void *handle = dlopen(argv[1], RTLD_NOW);
    struct link_map *map = 0;
    if (!handle || dlinfo(handle, RTLD_DI_LINKMAP, &map)) {
        puts(dlerror());
        return 1;
    }
    int (*answer)(void) = (int (*)(void))dlsym(handle, "answer");
    printf("%s %d\\n", map->l_name, answer());
    return 0;
}
"""


def compiled(directory: Path) -> Path:
    """`load` (dlopens its argument and prints the path) and three builds of libgsprobe.so.1 whose `answer` is 1, 2,
    3."""
    (directory / "load.c").write_text(LOADER)
    subprocess.run(["gcc", "-o", directory / "load", directory / "load.c", "-ldl"], check=True)
    for answer in (1, 2, 3):
        (directory / "probe.c").write_text(f"int answer(void) {{ return {answer}; }}")
        output = directory / f"libgsprobe{answer}.so"
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-Wl,-soname,libgsprobe.so.1", "-o", output, directory / "probe.c"], check=True
        )
    return directory


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory, programs: Path) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("images")
    tools = (*ns_util.TOOLS, str(programs / "load"))
    return {layout: ns_util.make_image(directory / layout, layout, tools) for layout in LAYOUTS}


@pytest.fixture(params=sorted(LAYOUTS))
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def libdir(layout: str) -> str:
    return LAYOUTS[layout]


@pytest.fixture
def image(layout: str, images: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(images[layout], tmp_path / "rootfs", symlinks=True))


def run(box: ns_util.Sandbox, *command: str) -> str:
    """Run a program in the container and return its output."""
    return str(box.enter(lambda: subprocess.run(command, capture_output=True, text=True, errors="replace").stdout))


def listed(box: ns_util.Sandbox) -> dict[str, list[str]]:
    """Name -> "(attributes) path" lines of the image's own `ldconfig -p`."""
    found: dict[str, list[str]] = {}
    for line in run(box, "/sbin/ldconfig", "-p").splitlines():
        name, arrow, path = line.strip().partition(" => ")
        if arrow:
            found.setdefault(name.split(" ")[0], []).append(f"{name.partition(' ')[2]} {path}")
    return found


def plan(programs: Path, libdir: str) -> Plan:
    """The plan's ops for a driver library: the file, its soname link, its cache entry."""
    ops: tuple[Op, ...] = (
        Mount(str(programs / "libgsprobe1.so"), f"{libdir}/libgsprobe.so.535.1", "file", RO, "library"),
        Link(f"{libdir}/libgsprobe.so.1", "libgsprobe.so.535.1", "soname"),
        LdCache((LdEntry("libgsprobe.so.1", f"{libdir}/libgsprobe.so.1", FLAGS),)),
    )
    return Plan("test", ops)


def hidden(path: str) -> Plan:
    """A plan with only a cache entry: `path` is outside the loader's default directories."""
    return Plan("test", (LdCache((LdEntry("libgsprobe.so.1", path, FLAGS),)),))


def test_image_s_ldconfig_and_loader_find_the_library(image: Path, programs: Path, libdir: str) -> None:
    with ns_util.sandbox(image) as box:
        before = listed(box)
        assert "libc.so.6" in before
        assert run(box, "/bin/load", "libgsprobe.so.1").startswith("libgsprobe.so.1: cannot open")
        box.apply(plan(programs, libdir))
        expected = {**before, "libgsprobe.so.1": [f"{before['libc.so.6'][0].split(' ')[0]} {libdir}/libgsprobe.so.1"]}
        assert listed(box) == expected
        assert run(box, "/bin/load", "libgsprobe.so.1") == f"{libdir}/libgsprobe.so.1 1\n"


def test_ldconfig_in_the_container_keeps_the_library(image: Path, programs: Path, libdir: str) -> None:
    with ns_util.sandbox(image) as box:
        box.apply(plan(programs, libdir))
        assert box.enter(lambda: subprocess.run(["/sbin/ldconfig"]).returncode) == 0
        assert listed(box)["libgsprobe.so.1"][0].endswith("/libgsprobe.so.1")
        assert run(box, "/bin/load", "libgsprobe.so.1").endswith("/libgsprobe.so.1 1\n")


def test_cache_entry_alone_leads_the_loader(image: Path, programs: Path) -> None:
    (image / "opt/hidden").mkdir(parents=True)
    shutil.copy(programs / "libgsprobe2.so", image / "opt/hidden/any.so")
    with ns_util.sandbox(image) as box:
        assert "cannot open" in run(box, "/bin/load", "libgsprobe.so.1")
        box.apply(hidden("/opt/hidden/any.so"))
        assert run(box, "/bin/load", "libgsprobe.so.1") == "/opt/hidden/any.so 2\n"


def test_added_entry_replaces_the_image_s_entry(image: Path, programs: Path) -> None:
    for directory, answer in (("opt/theirs", 3), ("opt/ours", 1)):
        (image / directory).mkdir(parents=True)
        shutil.copy(programs / f"libgsprobe{answer}.so", image / directory / "libgsprobe.so.1")
    with (image / "etc/ld.so.conf").open("a") as conf:
        conf.write("/opt/theirs\n")
    subprocess.run([ns_util.LDCONFIG, "-r", image], check=True)
    with ns_util.sandbox(image) as box:
        assert run(box, "/bin/load", "libgsprobe.so.1") == "/opt/theirs/libgsprobe.so.1 3\n"
        box.apply(hidden("/opt/ours/libgsprobe.so.1"))
        assert [line.split(" ")[-1] for line in listed(box)["libgsprobe.so.1"]] == ["/opt/ours/libgsprobe.so.1"]
        assert run(box, "/bin/load", "libgsprobe.so.1") == "/opt/ours/libgsprobe.so.1 1\n"


@pytest.mark.parametrize("file_format", ["new", "compat"])
def test_hwcaps_and_generator_are_kept_in_both_formats(
    image: Path, programs: Path, libdir: str, file_format: str
) -> None:
    """Two libraries in glibc-hwcaps directories: the loader reads those names in the cache's extension."""
    variants = image / libdir[1:] / "glibc-hwcaps"
    for name, level in (("libgsother.so.1", "x86-64-v2"), ("libgsprobe.so.1", "x86-64-v2"), ("libgsprobe.so.1", "aaa")):
        (variants / level).mkdir(parents=True, exist_ok=True)
        shutil.copy(programs / "libgsprobe2.so", variants / level / name)
    subprocess.run([ns_util.LDCONFIG, "-c", file_format, "-r", image], check=True)
    content = (image / "etc/ld.so.cache").read_bytes()
    assert content.startswith(b"ld.so-1.7.0") == (file_format == "compat")
    with ns_util.sandbox(image) as box:
        before, first = listed(box), run(box, "/sbin/ldconfig", "-p").splitlines()
        box.apply(hidden("/opt/x/libgsprobe.so.1"))
        after, second = listed(box), run(box, "/sbin/ldconfig", "-p").splitlines()
        assert second[-1] == first[-1]
        assert "generated by: ldconfig" in second[-1]
        own = after["libgsprobe.so.1"].pop()
        assert own.endswith(" /opt/x/libgsprobe.so.1")
        if file_format == "new":  # in the old one ldconfig misprints names: offsets count from the new header
            assert after == before
            assert any('"x86-64-v2"' in line for line in after["libgsprobe.so.1"])
        assert run(
            box, "/bin/load", "libgsprobe.so.1"
        ) == f"{libdir}/glibc-hwcaps/x86-64-v2/libgsprobe.so.1 2\n".replace(
            libdir, before["libgsprobe.so.1"][-1].split(" ")[-1].partition("/glibc-hwcaps")[0]
        )


def test_cache_keeps_mode_and_owner(image: Path) -> None:
    path = image / "etc/ld.so.cache"
    os.chmod(path, 0o604)
    os.chown(path, 7, 8)
    with ns_util.sandbox(image) as box:
        box.apply(hidden("/opt/x"))
        assert box.mounts() == []
    status = path.stat()
    assert (status.st_mode & 0o7777, status.st_uid, status.st_gid) == (0o604, 7, 8)
    assert sorted(os.listdir(image / "etc")) == ["ld.so.cache", "ld.so.conf", "passwd"]


def test_leftover_of_a_killed_run_is_removed(image: Path) -> None:
    (image / "etc" / cachefile.TEMPORARY).write_text("half a cache")
    with ns_util.sandbox(image) as box:
        box.apply(hidden("/opt/x"))
        assert listed(box)["libgsprobe.so.1"]
    assert sorted(os.listdir(image / "etc")) == ["ld.so.cache", "ld.so.conf", "passwd"]


@pytest.mark.parametrize(
    ("setup", "note"),
    [
        ("rm {0}/etc/ld.so.cache", "no /etc/ld.so.cache"),
        ("mount -t tmpfs none {0}/etc && cp /etc/ld.so.cache {0}/etc/", "mount of its own"),
        ("cp /etc/ld.so.cache {0}/tmp/c && mount --bind {0}/tmp/c {0}/etc/ld.so.cache", None),
        ("mv {0}/etc/ld.so.cache {0}/tmp/ && ln -s ../tmp/ld.so.cache {0}/etc/ld.so.cache", "not a regular file"),
        ("rm {0}/etc/ld.so.cache && mkfifo {0}/etc/ld.so.cache", "not a regular file"),
        ("truncate -s 1G {0}/etc/ld.so.cache", "at most"),
        ("printf 'glibc-ld.so.cache1.1\\377\\377\\377\\377\\377' >{0}/etc/ld.so.cache", "malformed"),
    ],
)
def test_ambiguous_cache_is_not_changed(image: Path, setup: str, note: str) -> None:
    """The container still starts: the chosen library never depends on the cache."""
    with ns_util.sandbox(image, setup.format(image)) as box:
        before = box.enter(lambda: sorted(os.listdir("/etc")))
        notes = box.apply(hidden("/opt/x"), lambda applied: applied.notes)
        assert len(notes) == 1
        assert notes[0].startswith("loader cache not extended: ")
        assert (note or "mount of its own") in notes[0]
        assert box.enter(lambda: sorted(os.listdir("/etc"))) == before


def test_large_cache_with_many_additions_is_readable(tmp_path: Path) -> None:
    """A real cache of hundreds of libraries: ldconfig still reads each one."""
    with open("/etc/ld.so.cache", "rb") as file:
        cache = ldcache.parse(file.read())
    additions = [
        LdEntry(f"lib{name}.so.{n}", f"/x/lib{name}.so.{n}", FLAGS) for name in "aZ_mQ" for n in (1, 9, 10, 535)
    ]
    path = tmp_path / "cache"
    path.write_bytes(ldcache.render(ldcache.extended(cache, additions)))
    out = subprocess.run([ns_util.LDCONFIG, "-p", "-C", path], capture_output=True, text=True, check=True).stdout
    assert out.startswith(f"{len(cache.entries) + len(additions)} libs found")
    for addition in additions:
        assert f"{addition.soname} (" in out
        assert f"=> {addition.path}\n" in out
