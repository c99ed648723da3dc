"""Paths in a container that does not exist yet: its root file system under the mounts of its spec."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpushare.core.errors import KernelError
from gpushare.inject import rootfs
from gpushare.inject.spectree import SpecTree
from gpushare.request import oci
from gpushare.system import imagefiles, inroot

MakeTree = Callable[..., SpecTree]


@pytest.fixture
def make(tmp_path: Path) -> MakeTree:
    """make(mounts, files) -> the tree. Files are below rootfs/ or volume/; a name with a final / is a directory, and a
    (path, text) pair is a link."""

    def build(mounts: list[dict[str, Any]], *files: Any) -> SpecTree:
        for name in ("rootfs/", "volume/", *files):
            path = tmp_path / (name if isinstance(name, str) else name[0])
            path.parent.mkdir(parents=True, exist_ok=True)
            if not isinstance(name, str):
                path.symlink_to(name[1])
            elif name.endswith("/"):
                path.mkdir(exist_ok=True, parents=True)
            else:
                path.write_text(name)
        spec = {"root": {"path": "rootfs"}, "mounts": mounts}
        return SpecTree(oci.bundle_of(oci.State("c", 0, "", str(tmp_path), {}), spec))

    return build


def bind(target: str, source: str = "volume") -> dict[str, Any]:
    return {"destination": target, "type": "bind", "source": source, "options": ["rbind"]}


def tmpfs(target: str) -> dict[str, Any]:
    return {"destination": target, "type": "tmpfs", "source": "tmpfs"}


def read(tree: SpecTree, path: str) -> tuple[str, str, bool]:
    """(content, which is the file's original name; path in the container; whether it is on a mount)"""
    fd = inroot.open_regular(tree, path)
    if fd < 0:
        return "", "", False
    try:
        return os.read(fd, 100).decode(), inroot.path_of(tree, fd), inroot.is_mounted_over(tree, fd)
    finally:
        os.close(fd)


def test_paths_resolve_in_image(make: MakeTree) -> None:
    with make(
        [], "rootfs/usr/lib/a", ("rootfs/lib", "usr/lib"), ("rootfs/abs", "/lib/a"), ("rootfs/up", "../../../lib/a")
    ) as t:
        for path in ("/usr/lib/a", "/lib/a", "/abs", "/up", "/lib/../lib/./a", "//usr//lib/a"):
            assert read(t, path) == ("rootfs/usr/lib/a", "/usr/lib/a", False), path
        for path in ("/usr/lib/b", "/b/a", "/usr/lib/a/x", "/usr/lib"):
            assert read(t, path)[0] == ""


def test_later_mount_covers_earlier(make: MakeTree) -> None:
    mounts = [bind("/lib"), tmpfs("/var"), bind("/usr/lib/deep/x", "rootfs/f")]
    with make(mounts, ("rootfs/lib", "usr/lib"), "rootfs/usr/lib/a", "volume/v", "rootfs/var/a", "rootfs/f") as tree:
        assert read(tree, "/usr/lib/v") == ("volume/v", "/usr/lib/v", True)
        assert read(tree, "/lib/v") == ("volume/v", "/usr/lib/v", True)
        assert read(tree, "/usr/lib/a")[0] == ""
        assert read(tree, "/var/a")[0] == ""
        assert read(tree, "/lib/deep/x") == ("rootfs/f", "/usr/lib/deep/x", True)


def test_mount_point_missing_in_image_resolves(make: MakeTree) -> None:
    with make([bind("/opt/vendor/lib")], "volume/libcuda.so.1", ("rootfs/link", "/opt/vendor/lib")) as tree:
        for path in ("/opt/vendor/lib/libcuda.so.1", "/link/libcuda.so.1", "/opt/vendor/../vendor/lib/libcuda.so.1"):
            assert read(tree, path) == ("volume/libcuda.so.1", "/opt/vendor/lib/libcuda.so.1", True), path


def test_links_in_volume_resolve_from_container_root(make: MakeTree) -> None:
    """Never from the host's: the container does not see the host's /etc/hostname."""
    links = (("volume/abs", "/etc/x"), ("volume/out", "../../../../etc/x"), ("volume/loop", "loop"))
    with make([bind("/v")], "rootfs/etc/x", *links) as tree:
        assert read(tree, "/v/abs") == read(tree, "/v/out") == ("rootfs/etc/x", "/etc/x", False)
        assert read(tree, "/v/loop")[0] == ""
        with pytest.raises(KernelError, match="loop of links"):
            tree.place("/v/loop/a", "file")


def test_probe_reads_mounted_cache(make: MakeTree) -> None:
    with make([bind("/etc")], "rootfs/etc/ld.so.cache", "volume/ld.so.cache") as tree:
        cache, note = rootfs.read_cache(tree)
        assert cache is None and "malformed" in note
    with make([tmpfs("/etc")]) as tree:
        assert rootfs.read_cache(tree) == (None, "no /etc/ld.so.cache in the image")


# Where mounts go


def test_mount_targets_are_placed(make: MakeTree) -> None:
    files = (
        "rootfs/usr/lib/libcuda.so.550",
        ("rootfs/usr/lib/libcuda.so.1", "libcuda.so.550"),
        ("rootfs/lib", "usr/lib"),
    )
    with make([bind("/v"), bind("/usr/bin/tool", "volume/tool")], "volume/tool", "volume/there", *files) as tree:
        assert tree.place("/usr/lib/new", "file") == "/usr/lib/new"
        assert tree.place("/lib/new", "file") == "/usr/lib/new"
        assert tree.place("/new/dir/ectory", "dir") == "/new/dir/ectory"
        assert tree.place("/usr/lib/libcuda.so.1", "file") == "/usr/lib/libcuda.so.550"
        assert tree.place("/v/there", "file") == "/v/there"  # in a volume, but no mount point must be made
        assert tree.place("/usr/bin/tool", "file") == "/usr/bin/tool"


@pytest.mark.parametrize(
    ("target", "kind", "reason"),
    [
        ("/v/new", "file", r"\"/v/new\" would be created in the volume at \"/v\" \(on the host: \".*/volume\"\)"),
        ("/v/a/b", "dir", r"in the volume at \"/v\""),
        ("/to-v/new", "file", r"in the volume at \"/v\""),
        ("/passwd", "file", r"link to \"/etc/passwd\", which is not in a library directory"),
        ("/usr/lib/nowhere", "file", "is a link to nothing"),
        ("/usr/lib", "file", "is a folder where a file must be"),
        ("/etc/passwd", "dir", "is a regular file where a directory must be"),
        ("/etc/passwd/x", "file", 'a parent of "/etc/passwd/x" is not a directory'),
        ("/usr/lib/fifo", "file", "is a FIFO where a file must be"),
    ],
)
def test_unsafe_mount_target_is_refused(make: MakeTree, tmp_path: Path, target: str, kind: str, reason: str) -> None:
    files = ("rootfs/etc/passwd", "rootfs/usr/lib/", ("rootfs/passwd", "/etc/passwd"), ("rootfs/to-v", "/v"))
    with make([bind("/v")], *files, ("rootfs/usr/lib/nowhere", "/none")) as tree:
        os.mkfifo(tmp_path / "rootfs/usr/lib/fifo")
        with pytest.raises(KernelError, match=reason):
            tree.place(target, kind)


def test_mount_points_inside_own_mounts_are_allowed(make: MakeTree, tmp_path: Path) -> None:
    with make([bind("/usr/lib/gpushare")], "share/driver/real") as tree:
        assert tree.place("/usr/lib/gpushare", "dir") == "/usr/lib/gpushare"
        tree.add("/usr/lib/gpushare", str(tmp_path / "share"))
        assert tree.place("/usr/lib/gpushare/driver/real", "file") == "/usr/lib/gpushare/driver/real"


def test_tree_leaks_no_descriptors(make: MakeTree) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with make([bind("/v"), bind("/w")], "volume/a", "rootfs/b", ("rootfs/c", "/v/a")) as tree:
        for path in ("/v/a", "/w/a", "/b", "/c", "/none", "/v/none"):
            read(tree, path)
            tree.place("/usr" + path, "file")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("flag", "refused"), [("shared", True), ("rshared", True), ("rslave", False), ("rw", False)])
def test_target_on_shared_mount_is_refused(make: MakeTree, flag: str, refused: bool) -> None:
    mount = {**bind("/v"), "options": ["rbind", flag]}
    with make([mount], "volume/there", "volume/dir/") as tree:
        for path, kind in (("/v", "dir"), ("/v/there", "file")):
            if refused:
                with pytest.raises(
                    KernelError, match=r"appear on the host.* volume at \"/v\" \(on the host: \".*/volume\"\)"
                ):
                    tree.place(path, kind)
            else:
                assert tree.place(path, kind) == path
        tree.add("/v/dir", "/")  # gpushare's mount is private: mounts over it stay in the container
        assert tree.place("/v/dir", "dir") == "/v/dir"


def test_mount_over_link_affects_earlier_resolved_paths(make: MakeTree, tmp_path: Path) -> None:
    """Directories of a path are resolved once; a new mount changes their content."""
    with make([], "rootfs/usr/lib/a", ("rootfs/opt/lib", "/usr/lib"), "volume/b") as tree:
        assert tree.place("/opt/lib/a", "file") == tree.place("/opt/lib/a", "file") == "/usr/lib/a"
        tree.add("/opt", str(tmp_path / "volume"))
        assert tree.place("/opt/lib/a", "file") == "/opt/lib/a"


def test_directory_made_by_mount_exists_afterwards(make: MakeTree, tmp_path: Path) -> None:
    with make([], "rootfs/etc/") as tree:
        assert tree.place("/srv/new/a", "file") == "/srv/new/a"
        tree.add("/srv/new", str(tmp_path / "volume"))
        (tmp_path / "volume/link").symlink_to("/etc/passwd")
        assert tree.place("/srv/new/a", "file") == "/srv/new/a"
        with pytest.raises(KernelError, match="link to nothing"):
            tree.place("/srv/new/link", "file")


# Processor time


def test_lookup_without_budget_is_refused(make: MakeTree, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By descriptor and through the spec's mounts. An exhausted budget is an error, not "missing", and ends with its
    context."""
    monkeypatch.setattr(inroot, "BUDGET_S", -1.0)
    root = os.open(tmp_path, os.O_PATH)
    with make([], "rootfs/a") as tree:
        for place in (root, tree):
            with pytest.raises(KernelError, match="links in the image .*/rootfs/a.* fewer chained"), inroot.budget():
                for _ in range(inroot._CHECKED):
                    inroot.exists(place, "/rootfs/a")
            for _ in range(inroot._CHECKED):
                inroot.exists(place, "/rootfs/a")
    os.close(root)


def test_followed_links_count_against_budget(make: MakeTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inroot, "BUDGET_S", -1.0)
    with make([], *((f"rootfs/l{n}", f"l{n + 1}") for n in range(30)), "rootfs/l30") as tree:
        with pytest.raises(KernelError, match="links in the image"), inroot.budget():
            tree._resolve("/l0", follow_last=True)
        assert tree._resolve("/l0", follow_last=True) == ("/l30", True)


def test_names_present_in_directory_include_links_and_mount_points(make: MakeTree) -> None:
    """A volume may be mounted at a directory that the image does not have, where its libraries then are."""
    mounts = [bind("/opt/conda/lib"), bind("/opt/conda/envs/train/lib64")]
    tree = make(mounts, "rootfs/opt/conda/other", ("rootfs/opt/conda/compat", "../elsewhere"), "rootfs/opt/file")
    assert imagefiles.present(tree, "/opt/conda", ("lib", "lib64", "compat", "envs")) == ["lib", "compat", "envs"]
    assert imagefiles.present(tree, "/opt/file", ("lib",)) == []
    assert imagefiles.present(tree, "/opt/missing", ("lib",)) == []
