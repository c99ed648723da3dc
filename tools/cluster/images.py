"""The images of the cluster, made from directories as `docker build` would, because no registry can be reached."""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.engines.image import make_root, make_tar
from tests.support.host import BUILD, TREE, version
from tests.support.rootfs import run
from tools.cluster import PAUSE

KUBERNETES = TREE / "packaging" / "kubernetes"
CUDA = "nvidia/cuda:12.4.1-base-ubuntu22.04"  # of the examples; here the tests' image
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
UPGRADED = f"{version()}-upgraded"


class Image(NamedTuple):
    names: tuple[str, ...]
    entrypoint: Sequence[str]
    cmd: Sequence[str] = ()
    env: Sequence[str] = (PATH,)


def from_dockerfile(path: Path, *names: str) -> Image:
    """The image that a Dockerfile describes; its files are copied by the caller."""
    words = {line.split()[0]: line.partition(" ")[2] for line in path.read_text().splitlines() if line.strip()}
    return Image(names, json.loads(words["ENTRYPOINT"]), json.loads(words["CMD"]), (PATH, words["ENV"]))


def write_archive(root: Path, image: Image, archive: Path) -> Path:
    """Write an archive as `docker save` does, for `ctr images import`."""
    layer, config, manifest = (archive.with_suffix(f".{name}") for name in ("layer", "config", "manifest"))
    make_tar(root, layer)
    digest = hashlib.sha256(layer.read_bytes()).hexdigest()
    content = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": list(image.entrypoint), "Cmd": list(image.cmd), "Env": list(image.env)},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    config.write_text(json.dumps(content))
    row = {"Config": "config.json", "RepoTags": list(image.names), "Layers": ["layer.tar"]}
    manifest.write_text(json.dumps([row]))
    with tarfile.open(archive, "w") as tar:
        for path, name in ((manifest, "manifest.json"), (config, "config.json"), (layer, "layer.tar")):
            tar.add(path, name)
            path.unlink()
    return archive


def full(name: str) -> str:
    """The name under which containerd finds an image."""
    return name if name.startswith("localhost/") else f"docker.io/{name if '/' in name else f'library/{name}'}"


def write_all(folder: Path) -> list[Path]:
    """Write the archives of all images: pods' programs, installer, its next version, and the plugins' image."""
    folder.mkdir(parents=True)
    pods = Image((PAUSE, full(CUDA)), ("sleep", "inf"))
    archives = [write_archive(make_root(folder / "pods"), pods, folder / "pods.tar")]
    for name, source, files in (
        ("installer", BUILD / "dist", ("install.py",)),
        ("plugin", BUILD / "plugin", ()),
    ):
        root = folder / name
        root.mkdir()
        run("cp", "-a", source / "gpushare", root)
        for file in files:
            shutil.copy(KUBERNETES / name / file, root)
        for tag in (version(), UPGRADED):
            image = from_dockerfile(KUBERNETES / name / "Dockerfile", full(f"gpushare-{name}:{tag}"))
            archives.append(write_archive(root, image, folder / f"{name}-{tag}.tar"))
            (root / "gpushare" / "next-version").write_text("another version\n")
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    return archives
