"""The repository of `make repo`: apt and dnf in a clean Debian accept it, and refuse one that was changed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.host import TREE, version
from tests.support.rootfs import run

from .cleanroot import DNF, CleanRoot
from .conftest import PACKAGES

URL = "file:///repo"
APT = ("apt-get", "-o", "Dir::Etc::sourcelist=/repo/gpushare.sources", "-o", "Dir::Etc::sourceparts=-")
DNF_WORDS = ("dnf", "--assumeyes", "--quiet", "--setopt=reposdir=/repo", "--releasever=1")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A keyring with two keys, `right` and `wrong`."""
    home = tmp_path_factory.mktemp("gpg")
    home.chmod(0o700)
    env = {"GNUPGHOME": str(home), "PATH": os.environ["PATH"]}
    for name in ("right", "wrong"):
        words = ["gpg", "--batch", "--passphrase", "", "--quick-gen-key", f"{name}@example.org", "rsa3072", "sign"]
        subprocess.run(words, env=env, check=True, capture_output=True)
    yield env
    subprocess.run(["gpgconf", "--kill", "all"], env=env, check=True)


def make(environment: dict[str, str], target: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(TREE / "packaging/repo"), *words]
    return subprocess.run(command, env=environment, cwd=target, capture_output=True, text=True)


@pytest.fixture
def root(request: pytest.FixtureRequest, environment: dict[str, str], tmp_path: Path) -> Iterator[CleanRoot]:
    """A clean Debian with the repository in /repo; the parameter is one more package of it."""
    done = make(environment, tmp_path, str(PACKAGES), "repo", "right@example.org", URL)
    assert done.returncode == 0 and done.stdout.startswith("repo: signed by "), done.stderr
    made = CleanRoot(tmp_path / "debian", request.param)
    try:
        shutil.copytree(tmp_path / "repo", made.path / "repo")
        made.run("mkdir", "-p", "/var/cache/apt/archives/partial")  # the archive has no caches
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("root", [""], indirect=True)
def test_apt_installs_from_the_repository(root: CleanRoot) -> None:
    root.put("/etc/apt/keyrings/gpushare.asc", (root.path / "repo/gpushare.asc").read_text())
    root.run(*APT, "update")
    root.run(*APT, "install", "--yes", "gpushare")
    assert root.run("gpushare", "version").startswith(f"gpushare {version()}")
    for path in (root.path / "repo/apt/dists/stable/main").glob("binary-*/Packages*"):
        path.write_bytes(path.read_bytes() + b"\n")
    root.run("sh", "-c", "rm -r /var/lib/apt/lists/*")
    changed = root.call(*APT, "update", "--error-on=any")
    assert changed.returncode and "Hash Sum mismatch" in changed.stderr, changed.stderr


@pytest.mark.parametrize("root", [""], indirect=True)
def test_apt_refuses_another_key(root: CleanRoot, environment: dict[str, str]) -> None:
    words = ["gpg", "--batch", "--armor", "--export", "wrong@example.org"]
    key = subprocess.run(words, env=environment, check=True, capture_output=True, text=True).stdout
    root.put("/etc/apt/keyrings/gpushare.asc", key)
    refused = root.call(*APT, "update", "--error-on=any")
    assert refused.returncode and "NO_PUBKEY" in refused.stderr, refused.stderr


@pytest.mark.parametrize("root", [DNF], indirect=True)
def test_dnf_installs_from_the_repository(root: CleanRoot) -> None:
    root.run(*DNF_WORDS, "install", "gpushare")
    assert root.run("gpushare", "version").startswith(f"gpushare {version()}")
    (package,) = (root.path / "repo/rpm").glob("*.rpm")
    assert "signatures OK" in root.run("rpmkeys", "--checksig", f"/repo/rpm/{package.name}")
    metadata = root.path / "repo/rpm/repodata/repomd.xml"
    metadata.write_text(metadata.read_text() + "\n")
    root.run(*DNF_WORDS, "clean", "all")
    refused = root.call(*DNF_WORDS, "repoquery", "gpushare")
    # the agents of dnf's keyrings outlive it
    root.run("sh", "-c", "for home in /var/cache/dnf/*/pubring; do gpgconf --homedir $home --kill all; done")
    assert refused.returncode and "GPG signature" in refused.stderr, refused.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((str(PACKAGES), "repo", ""), "make repo KEY=FINGERPRINT"),
        ((str(PACKAGES), "repo", "absent@example.org"), 'gpg has no secret key "absent@example.org"'),
        ((str(PACKAGES), "repo", "right@example.org", "example.org"), 'URL="example.org" is no URL'),
        (("/proc/sys/none", "repo", "right@example.org"), 'no .deb in "/proc/sys/none"'),
    ],
)
def test_wrong_value_is_one_line(
    environment: dict[str, str], tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    done = make(environment, tmp_path, *words)
    assert done.returncode == 1 and done.stderr.startswith("gpushare: ") and message in done.stderr
    assert done.stderr.count("\n") == 1 and run("ls", tmp_path) == ""
