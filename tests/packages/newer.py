"""The release as a later version: its shim and its reported version differ."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

from tests.support.host import BUILD, TREE, version
from tests.support.rootfs import run

from .conftest import PACKAGES

VERSION = "1000.0.0"  # later than any version of this tree
METADATA = "libexec/_internal/lib/python3*/gpushare-*.dist-info/METADATA"


def packages(directory: Path) -> Path:
    """Return a directory with .deb and .rpm."""
    stage, made = directory / "stage", directory / "packages"
    shutil.copytree(BUILD / "stage", stage, symlinks=True)
    _change(stage / "usr/libexec/gpushare")
    made.mkdir()
    environment = {**os.environ, "STAGE": str(stage), "VERSION": VERSION, "SOURCE_DATE_EPOCH": "1"}
    subprocess.run([TREE / "packaging" / "nfpm", made], env=environment, check=True)
    return made


def archive(directory: Path) -> Path:
    (old,) = PACKAGES.glob(f"gpushare-{version()}-linux-*.tar.gz")
    run("tar", "-C", directory, "-xzf", old)
    name = old.name.removesuffix(".tar.gz").replace(version(), VERSION)
    (directory / name.replace(VERSION, version())).rename(directory / name)
    _change(directory / name)
    run("tar", "-C", directory, "-czf", directory / f"{name}.tar.gz", name)
    return directory / f"{name}.tar.gz"


def _change(bundle: Path) -> None:
    with open(bundle / "shim/libcuda.so", "ab") as file:
        file.write(VERSION.encode())
    (metadata,) = bundle.glob(METADATA)
    metadata.write_text(metadata.read_text().replace(f"\nVersion: {version()}\n", f"\nVersion: {VERSION}\n"))


def wheel(directory: Path) -> Path:
    (old,) = PACKAGES.glob("*_x86_64.whl")
    new = directory / old.name.replace(version(), VERSION)
    names = f"gpushare-{version()}.", f"gpushare-{VERSION}."  # names of metadata and program directories
    with zipfile.ZipFile(old) as source, zipfile.ZipFile(new, "w") as target:
        for info in source.infolist():
            data = source.read(info)
            if info.filename.endswith("/RECORD"):
                data = data.decode().replace(*names).encode()
            elif info.filename.endswith("/METADATA"):
                data = data.replace(f"\nVersion: {version()}\n".encode(), f"\nVersion: {VERSION}\n".encode())
            elif info.filename.endswith("/shim/libcuda.so"):
                data += VERSION.encode()
            info.filename = info.filename.replace(*names)
            target.writestr(info, data)
    return new
