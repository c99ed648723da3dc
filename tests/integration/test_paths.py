"""Attacks on paths that root uses in a tenant's file system. Each test asserts that the host is unchanged. It also
asserts either a refusal that names the cause and leaves nothing of the plan, or a correct share."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from gpushare.core.errors import GpushareError
from gpushare.core.ops import Link, Mount, Op, Plan
from gpushare.inject import apply
from gpushare.inject.mountpoint import is_library_path
from gpushare.system import inroot

from tests.integration import ns_util, scene
from tests.integration.scene import LIBDIR, NAME, RO, read, shim

base, image, source, host = scene.base, scene.image, scene.source, scene.host


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
def test_leaf_link_out_of_the_library_directories_is_refused(image: Path, source: Path, host: Path, text: str) -> None:
    (image / "dev/link").write_text("")
    (image / str(host)[1:]).mkdir(parents=True)
    (image / str(host)[1:] / "passwd").write_text("the container's")
    os.symlink(text.format(host=host), image / NAME[1:])
    with ns_util.sandbox(image) as box:
        message = box.refuses(shim(source))
    assert message.startswith(f'"{NAME}" is a link to ')
    assert "not in a library directory" in message


@pytest.mark.parametrize("text", ["../../host/passwd", "../../../../../../..{host}/passwd", "nothing"])
def test_dangling_leaf_link_is_refused(image: Path, source: Path, host: Path, text: str) -> None:
    os.symlink(text.format(host=host), image / NAME[1:])
    with ns_util.sandbox(image) as box:
        assert box.refuses(shim(source)) == f'"{NAME}" is a link to nothing; remove it from the image'


@pytest.mark.parametrize("text", ["/usr/local/lib/a.so", "../../local/lib/a.so", "/../../lib/../local/lib/a.so"])
def test_leaf_link_within_the_library_directories_is_followed(image: Path, source: Path, host: Path, text: str) -> None:
    (image / "usr/local/lib").mkdir(parents=True)
    (image / "usr/local/lib/a.so").write_text("another")
    os.symlink(text, image / NAME[1:])
    with ns_util.sandbox(image) as box:
        box.apply(Plan("test", (shim(source),)))
        assert box.enter(read(NAME)) == "the shim"
        assert box.enter(read("/usr/local/lib/a.so")) == "the shim"
    assert (image / "usr/local/lib/a.so").read_text() == "another"


@pytest.mark.parametrize("text", ["{host}", "../../../host", "../../../../../../../../..{host}"])
def test_parent_link_is_resolved_in_the_container(image: Path, source: Path, host: Path, text: str) -> None:
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


def test_dangling_parent_link_is_refused(image: Path, source: Path, host: Path) -> None:
    os.symlink("nothing", image / "usr/lib/gpushare")
    with ns_util.sandbox(image) as box:
        message = box.refuses(Mount(str(source / "share"), "/usr/lib/gpushare/driver", "dir", RO, "share"))
    assert message.startswith('"/usr/lib/gpushare" is a link to nothing')


def test_link_loops_are_refused(image: Path, source: Path, host: Path) -> None:
    os.symlink("gpushare", image / "usr/lib/gpushare")
    os.symlink(os.path.basename(NAME), image / NAME[1:])
    with ns_util.sandbox(image) as box:
        for op in (shim(source), shim(source, "/usr/lib/gpushare/x/y")):
            assert "magic link or a loop" in box.refuses(op)


@pytest.mark.parametrize("where", ["leaf", "parent"])
@pytest.mark.parametrize("magic", ["root", "cwd", "fd/0", "ns/mnt", "exe"])
def test_magic_links_are_refused(image: Path, source: Path, host: Path, where: str, magic: str) -> None:
    target = NAME if where == "leaf" else "/usr/lib/gpushare/file"
    os.symlink(f"/proc/self/{magic}", image / (NAME if where == "leaf" else "/usr/lib/gpushare")[1:])
    with ns_util.sandbox(image, f"mount -t proc proc {image}/proc") as box:
        assert "magic link or a loop" in box.refuses(shim(source, target))


def test_link_below_a_dangling_link_is_refused(image: Path, source: Path, host: Path) -> None:
    """`Link` makes names only: it writes through no existing link."""
    os.symlink("../../../host/lib", image / "usr/lib/there")
    with ns_util.sandbox(image) as box:
        message = box.refuses(Link("/usr/lib/there/libcuda.so.1", f"{host}/passwd", "name"))
    assert message.startswith('"/usr/lib/there" is a link to nothing')


def test_link_name_that_leads_to_passwd_is_refused(image: Path, source: Path, host: Path) -> None:
    os.symlink("/etc/passwd", image / LIBDIR[1:] / "libcuda.so.1")
    with ns_util.sandbox(image) as box:
        message = box.refuses(shim(source), Link(f"{LIBDIR}/libcuda.so.1", "libcuda.so.535.1", "name"))
    assert message.startswith(
        f'"{LIBDIR}/libcuda.so.1" is a link to "/etc/passwd", which is not in a library directory'
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
def test_library_directories_are_recognised(path: str, is_one: bool) -> None:
    assert is_library_path(path) == is_one


# Names


@pytest.mark.parametrize("target", ["/", "/usr/lib/..", "/usr/lib/.", ""])
def test_invalid_targets_are_refused(image: Path, source: Path, host: Path, target: str) -> None:
    with ns_util.sandbox(image) as box:
        box.refuses(shim(source, target))


def test_target_with_dots_stays_inside_the_root(image: Path, source: Path, host: Path) -> None:
    with ns_util.sandbox(image) as box:
        box.apply(Plan("test", (shim(source, "/../../../../host-of-the-container/file"),)))
        assert box.enter(read("/host-of-the-container/file")) == "the shim"


# Races: a second container that shares the directory swaps components meanwhile


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
def test_component_swapped_in_a_loop_is_never_followed_out(
    image: Path, source: Path, host: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory repeatedly becomes a link to the host's for a moment; no operation follows it out."""
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
