"""Each file of build/packages: its metadata, its contents, and the same bytes in a second build."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support import elf
from tests.support.host import TREE, version
from tests.support.rootfs import run

from .conftest import PACKAGES

VERSION = version()
MACHINES = {"x86_64": elf.X86_64, "aarch64": elf.AARCH64}


def test_all_packages_exist() -> None:
    sums = dict(line.split()[::-1] for line in (PACKAGES / "SHA256SUMS").read_text().splitlines())
    assert sums == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in PACKAGES.iterdir()
        if path.name != "SHA256SUMS"
    }
    assert sorted(sums) == [
        f"gpushare-{VERSION}-1.x86_64.rpm",
        f"gpushare-{VERSION}-linux-x86_64.tar.gz",
        f"gpushare-{VERSION}-py3-none-manylinux2014_aarch64.whl",
        f"gpushare-{VERSION}-py3-none-manylinux2014_x86_64.whl",
        f"gpushare-chart-{VERSION}.tgz",
        f"gpushare-installer-{VERSION}.tar.gz",
        f"gpushare-plugin-{VERSION}.tar.gz",
        f"gpushare_{VERSION}_amd64.deb",
    ]


def test_rpm_and_deb_have_the_same_files(tmp_path: Path) -> None:
    """The files that rpm2cpio unpacks from an rpm, and its header."""
    (rpm,), (deb,) = PACKAGES.glob("*.rpm"), PACKAGES.glob("*.deb")
    folders = {"rpm": f"rpm2cpio {rpm} | cpio -idm --quiet", "deb": f"dpkg-deb -x {deb} ."}
    found = {}
    for name, command in folders.items():
        (tmp_path / name).mkdir()
        subprocess.run(command, shell=True, cwd=tmp_path / name, check=True, timeout=60)
        found[name] = tree(tmp_path / name)
    zsh = {"usr/share/zsh/vendor-completions/_gpushare": "usr/share/zsh/site-functions/_gpushare"}
    assert found["rpm"] == {zsh.get(path, path): what for path, what in found["deb"].items()}

    def query(text: str) -> str:
        return run("rpm", "--query", "--package", "--nosignature", "--queryformat", text, rpm)

    assert query("%{name} %{version} %{arch} %{license}") == f"gpushare {VERSION} x86_64 Apache-2.0"
    flags = dict(
        line.split() for line in query("[%{filenames} %{fileflags:fflags}\n]").splitlines() if len(line.split()) == 2
    )
    assert flags == {"/etc/gpushare/config.yaml": "cn"}  # configuration, kept after an edit
    owners = set(query("[%{fileusername}:%{filegroupname}\n]").split())
    assert owners == {"root:root"}
    # rpm reports a conflict if another package has the same directory with another mode.
    folders_of = {path for path, mode in re.findall(r"(\S+) (\d+)\n", query("[%{filenames} %{filemodes}\n]"))
                  if stat.S_ISDIR(int(mode))}  # fmt: skip
    assert {path for path in folders_of if "gpushare" not in path} == set()


def tree(top: Path) -> dict[str, tuple[int, str]]:
    """Path -> mode, and digest of the content or link target; of files and links."""
    found = {}
    for folder, folders, names in os.walk(top):
        for path in (Path(folder, name) for name in [*names, *folders]):
            if path.is_symlink():
                found[str(path.relative_to(top))] = (0, os.readlink(path))
            elif path.is_file():
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                found[str(path.relative_to(top))] = (stat.S_IMODE(path.stat().st_mode), digest)
    return found


@pytest.mark.parametrize("machine", MACHINES)
def test_shim_needs_only_an_old_glibc(machine: str, tmp_path: Path) -> None:
    (wheel,) = PACKAGES.glob(f"*_{machine}.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    for name in ("libcuda.so", "libnvidia-ml.so"):
        path = tmp_path / f"gpushare-{VERSION}.data/data/libexec/gpushare/shim" / name
        assert elf.machine(path) == MACHINES[machine]
        assert elf.glibc(path) <= (2, 17)
    for path in tmp_path.glob("gpushare-*.data/scripts/gpushare-*[a-z]"):
        if path.suffix != ".py":
            assert elf.machine(path) == MACHINES[machine]
            assert "INTERP" not in run("readelf", "--program-headers", path)  # static


@pytest.mark.parametrize("package", ["archive", "wheel"])
def test_notices_cover_the_static_programs(package: str, tmp_path: Path) -> None:
    """The linker listed the files that it used, and the distribution knows their packages. .deb and .rpm have the same
    files as the archive."""
    if package == "wheel":
        (wheel,) = PACKAGES.glob("*_x86_64.whl")
        with zipfile.ZipFile(wheel) as files:
            files.extractall(tmp_path)
    else:
        (archive,) = PACKAGES.glob(f"gpushare-{VERSION}-linux-*.tar.gz")
        run("tar", "-C", tmp_path, "-xzf", archive)
    (readme,) = tmp_path.rglob("licenses/README")
    explained = readme.read_text()
    assert "make build" in explained and "Lesser General Public License" in explained
    for part in ("libpython3.11", "libc6", "libffi", "libexpat1", "zlib1g", "libgcc-12", "musl"):
        notice = readme.with_name(f"{part}-dev").read_bytes()
        assert notice == Path(f"/usr/share/doc/{part}-dev/copyright").read_bytes()
        assert part == "musl" or f" {part}-dev " in explained


def test_installer_image_has_the_bundle_and_one_program() -> None:
    (context,) = PACKAGES.glob("gpushare-installer-*.tar.gz")
    (bundle,) = PACKAGES.glob(f"gpushare-{VERSION}-linux-*.tar.gz")
    with tarfile.open(context) as archive, tarfile.open(bundle) as other:
        names = {member.name for member in archive.getmembers()}
        expected = {
            "gpushare" + member.name[len(f"gpushare-{VERSION}-linux-x86_64") :] for member in other.getmembers()
        }
    assert names == {"Dockerfile", "install.py", *expected}


@pytest.mark.timeout(1500)
def test_packages_are_reproducible(tmp_path: Path) -> None:
    """Build in another directory with another umask, time zone and locale, from scratch, and again for a commit that
    differs in its date. The date is that of the built files: a later commit may change other files only."""
    copy = tmp_path / "another"
    (archive,) = PACKAGES.glob("gpushare-*-linux-*.tar.gz")
    with tarfile.open(archive) as made_before:
        dated = made_before.getmembers()[0].mtime
    files = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=TREE).split("\0")
    for name in filter(None, files):
        source, target = TREE / name, copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.exists():
            shutil.copy2(source, target, follow_symlinks=False)
    environment = {
        **{name: text for name, text in os.environ.items() if not name.startswith(("GPUSHARE", "MAKE", "MFLAGS"))},
        "TZ": "Pacific/Auckland",
        "LC_ALL": "C.UTF-8",
    }
    for date in ("1700000000", str(dated)):
        done = subprocess.run(
            "umask 077; exec make --no-print-directory packages",
            shell=True,
            cwd=copy,
            env={**environment, "SOURCE_DATE_EPOCH": date},
            capture_output=True,
            text=True,
            timeout=1200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    made, again = PACKAGES, copy / "build" / "packages"
    assert {path.name: path.read_bytes() == (again / path.name).read_bytes() for path in sorted(made.iterdir())} == {
        path.name: True for path in sorted(made.iterdir())
    }
