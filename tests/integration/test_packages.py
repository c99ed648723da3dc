"""The contents of .deb and .rpm made of the current bundle. `make test-packages` installs them and builds all twice."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support import elf
from tests.support.host import BUILD, TREE, version
from tests.support.rootfs import run

BUNDLE = BUILD / "dist" / "gpushare"
VERSION = version()


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Extension -> package, built with a restrictive umask, and without compression, which takes 15 s."""
    directory = tmp_path_factory.mktemp("packages")
    packages = directory / "packages"
    packages.mkdir()
    environment = {
        **os.environ,
        "STAGE": str(directory / "stage"),
        "VERSION": VERSION,
        "SOURCE_DATE_EPOCH": "1700000000",
    }
    text = (TREE / "packaging/nfpm.yaml").read_text()
    config = directory / "nfpm.yaml"
    config.write_text(text.replace("compression: gzip:9", "compression: gzip:1").replace("gzip\n", "none\n"))
    for command in (["stage", BUNDLE, directory / "stage"], ["nfpm", packages, config]):
        program, *words = command
        subprocess.run([TREE / "packaging" / program, *words], env=environment, check=True, umask=0o077)
    return {path.suffix: path for path in packages.iterdir()}


def test_shim_runs_on_old_distributions() -> None:
    for name in ("libcuda.so", "libnvidia-ml.so"):
        path = BUNDLE / "shim" / name
        assert elf.machine(path) == elf.X86_64
        assert elf.glibc(path) <= (2, 17), path
        assert "RPATH" not in run("readelf", "--dynamic", path)
        assert str(TREE).encode() not in path.read_bytes()


def test_deb_has_the_bundle_s_files(packages: dict[str, Path]) -> None:
    deb = packages[".deb"]
    fields = run("dpkg-deb", "--field", deb, "Package", "Version", "Architecture")
    assert fields.split() == ["Package:", "gpushare", "Version:", VERSION, "Architecture:", "amd64"]
    assert run("dpkg-deb", "--info", deb, "conffiles") == "/etc/gpushare/config.yaml\n"
    listing = run("dpkg-deb", "--contents", deb).splitlines()
    found = {line.split(maxsplit=5)[5].split(" -> ")[0][1:]: line.split(maxsplit=5) for line in listing}
    assert {fields[1] for fields in found.values()} == {"root/root"}
    assert not [name for name, fields in found.items() if re.match(r"[-d].{4}w|[-d].{7}w|.{3}[sS]|.{6}[sS]", fields[0])]
    wanted = {
        *(f"/usr/bin/{name}" for name in ("gpushare", "gpushare-hook", "gpushare-runtime", "gpushare-runtime-cri")),
        *(f"/usr/lib/systemd/system/{path.name}" for path in (TREE / "packaging/systemd").iterdir()),
        *(f"/usr/share/man/{path.parent.name}/{path.name}.gz" for path in (BUILD / "man").glob("man?/*")),
        *(f"/usr/share/doc/gpushare/{path.relative_to(TREE)}" for path in (TREE / "docs").rglob("*.md")),
        "/usr/share/doc/gpushare/README.md",
        "/usr/share/doc/gpushare/docs/pictures/architecture.svg",
        "/usr/share/doc/gpushare/examples/config.yaml",
        "/usr/share/doc/gpushare/kubernetes/installer/daemonset.yaml",
        "/etc/gpushare/config.yaml",
        "/usr/lib/udev/rules.d/60-gpushare.rules",
        "/usr/share/bash-completion/completions/gpushare",
        "/usr/share/fish/vendor_completions.d/gpushare.fish",
        "/usr/share/zsh/vendor-completions/_gpushare",
        "/usr/share/licenses/gpushare/LICENSE",
        "/usr/libexec/gpushare/shim/libcuda.so",
        "/usr/libexec/gpushare/libexec/_internal/python3",
    }
    assert wanted - found.keys() == set()
    ours = ("/usr/libexec/gpushare/", *wanted, "/usr/share/doc/gpushare/")
    assert [name for name in found if not name.endswith("/") and not name.startswith(ours)] == []


def test_rpm_can_be_read_by_rpm(packages: dict[str, Path]) -> None:
    query = ("rpm", "--query", "--package", "--nosignature", packages[".rpm"])
    assert run(*query, "--configfiles") == "/etc/gpushare/config.yaml\n"
    assert run(*query, "--queryformat", "%{name} %{version} %{license}") == f"gpushare {VERSION} Apache-2.0"
    scripts = run(*query, "--scripts")
    for path in (TREE / "packaging" / "scripts").iterdir():
        assert path.read_text().strip() in scripts, path.name


def test_packages_have_no_made_up_address(packages: dict[str, Path]) -> None:
    """Maintainer and home page are the builder's; without a home page there is no such field."""
    deb = run("dpkg-deb", "--field", packages[".deb"])
    assert "Maintainer: gpushare maintainers\n" in deb and "Homepage:" not in deb and ".invalid" not in deb
    query = ("rpm", "--query", "--package", "--nosignature", packages[".rpm"])
    assert run(*query, "--queryformat", "%{url}") == "(none)"


def test_wrong_home_page_is_refused(tmp_path: Path) -> None:
    environment = {**os.environ, "STAGE": str(tmp_path), "VERSION": VERSION, "HOMEPAGE": "example"}
    done = subprocess.run(["packaging/nfpm", tmp_path], cwd=TREE, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "HOMEPAGE=example is no URL" in done.stderr, done.stderr


def test_shipped_manifests_name_the_registry(packages: dict[str, Path], tmp_path: Path) -> None:
    environment = {**os.environ, "REGISTRY": "registry.site/gpu", "SOURCE_DATE_EPOCH": "0"}
    subprocess.run(["packaging/stage", BUNDLE, tmp_path], cwd=TREE, env=environment, check=True)
    shipped = tmp_path / "usr/share/doc/gpushare/kubernetes"
    for path in shipped.rglob("kustomization.yaml"):
        for image in yaml.safe_load(path.read_text()).get("images", []):
            assert image["newName"] == f"registry.site/gpu/{image['name']}", path
    chart = tmp_path / "usr/share/doc/gpushare/helm/gpushare/files/installer.yaml"
    assert not chart.is_symlink() and chart.read_bytes() == (shipped / "installer/daemonset.yaml").read_bytes()


def test_installation_configures_nothing() -> None:
    script = (TREE / "packaging/scripts/postinstall").read_text()
    commands = re.findall(r"^\s*(?:/usr/bin/)?((?:gpushare (?:runtime )?|systemctl )[a-z-]+)", script, re.MULTILINE)
    assert set(commands) == {
        "gpushare runtime status",
        "gpushare refresh",
        "systemctl daemon-reload",
        "systemctl try-restart",
    }
    assert "gpushare-" not in "".join(path.name for path in (TREE / "packaging").glob("*preset*"))
