"""The image of all engines: the host's own shell and a few tools, its C library, and integration/programs/probe.c."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
from pathlib import Path

from ..host import TREE
from ..rootfs import run

IMAGE = "localhost/gpushare-test:1"
PROBE = "/usr/bin/probe"
_SOURCE = TREE / "tests" / "integration" / "programs" / "probe.c"
_TOOLS = ("sh", "cat", "env", "grep", "head", "id", "ls", "mknod", "sleep", "stat", "touch", "true")
_MERGED = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
_EMPTY = ("dev", "proc", "sys", "tmp", "run", "var", "opt", "etc", "usr/bin", "usr/sbin", "usr/lib", "usr/lib64")
_LIBRARIES = "usr/lib/x86_64-linux-gnu"
_LOADED_BY_NAME = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1")
_FILES = {
    "etc/passwd": "root:x:0:0::/:/bin/sh\nuser:x:1000:1000::/:/bin/sh\n",
    "etc/group": "root:x:0:\nuser:x:1000:\n",
    "etc/ld.so.conf": f"/{_LIBRARIES}\n",
}


def make_root(root: Path) -> Path:
    """Create the image's root file system in the new directory `root`, about 15 MB. Needs gcc."""
    for name in _EMPTY:
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    for name, target in _MERGED.items():
        (root / name).symlink_to(target)
    for name, text in _FILES.items():
        (root / name).write_text(text)
    for tool in _TOOLS:
        copy_program(Path(shutil.which(tool) or tool).resolve(), root, f"usr/bin/{tool}")
    for name in _LOADED_BY_NAME:
        _copy(Path("/", _LIBRARIES, name), root, f"{_LIBRARIES}/{name}")
    _copy(Path("/lib64/ld-linux-x86-64.so.2").resolve(), root, "usr/lib64/ld-linux-x86-64.so.2")
    _copy(Path("/sbin/ldconfig"), root, "usr/sbin/ldconfig")
    run("gcc", "-std=gnu11", "-O1", "-w", "-o", root / PROBE[1:], _SOURCE, "-ldl")
    run("/sbin/ldconfig", "-r", root)
    return root


def make_tar(root: Path, archive: Path) -> Path:
    """Pack `root` in the format that engines import."""
    run("tar", "--numeric-owner", "-C", root, "-cf", archive, ".")
    return archive


def make_archive(image_root: Path, directory: Path) -> Path:
    """Write `image_root` as `docker save` would, for containerd and podman to import. Its program sleeps: a sandbox
    needs a process that stays."""
    layer = make_tar(image_root, directory / "layer.tar")
    config = directory / "image.json"
    digest = hashlib.sha256(layer.read_bytes()).hexdigest()
    path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    content = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": ["sleep", "inf"], "Env": [path]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    config.write_text(json.dumps(content))
    manifest = directory / "manifest.json"
    manifest.write_text(json.dumps([{"Config": config.name, "RepoTags": [IMAGE], "Layers": [layer.name]}]))
    archive = directory / "image.tar"
    with tarfile.open(archive, "w") as tar:
        for file in (manifest, config, layer):
            tar.add(file, file.name)
    layer.unlink()
    return archive


def _copy(source: Path, root: Path, name: str) -> None:
    target = root / name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def copy_program(program: Path, root: Path, name: str) -> None:
    _copy(program, root, name)
    for line in run("ldd", program).splitlines():
        library = next((word for word in line.split() if word.startswith("/")), "")
        if library and "ld-linux" not in library:
            _copy(Path(library), root, f"{_LIBRARIES}/{os.path.basename(library)}")
