"""Installation to removal of a .deb and an .rpm in a fresh Debian, with real containers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.engines.image import PROBE
from tests.support.host import TREE, version

from . import newer
from .cleanroot import CleanRoot
from .conftest import PACKAGES
from .held import GIB, IN_CONTAINER, Held, listed, use_simulated_gpu

HOME = "/usr/libexec/gpushare"
SHIM = f"{HOME}/shim/libcuda.so"
UNREAD = "/run/gpushare-unread.docker"  # until docker is restarted
AFTER_INSTALLING = ["daemon-reload", "try-restart gpushare-exporter.service"]  # starts no disabled unit


class Kind(NamedTuple):
    """A package manager's commands."""

    pattern: str
    install: tuple[str, ...]
    upgrade: tuple[str, ...]
    remove: tuple[str, ...]
    version: tuple[str, ...]
    kept: str  # the path of an edited configuration after the removal


KINDS = {
    "deb": Kind(
        "gpushare_*_amd64.deb",
        ("dpkg", "--install"),
        ("dpkg", "--install"),
        ("dpkg", "--remove", "gpushare"),
        ("dpkg-query", "--show", "--showformat", "${db:Status-Status} ${Version}", "gpushare"),
        "/etc/gpushare/config.yaml",
    ),
    "rpm": Kind(  # rpm has no other package there, so dependencies cannot be met
        "gpushare-*.x86_64.rpm",
        ("rpm", "--nodeps", "--force-debian", "--install"),
        ("rpm", "--nodeps", "--force-debian", "--upgrade"),
        ("rpm", "--force-debian", "--erase", "gpushare"),
        ("rpm", "--query", "--queryformat", "installed %{version}", "gpushare"),
        "/etc/gpushare/config.yaml.rpmsave",
    ),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def held(clean_root: CleanRoot) -> Iterator[Callable[..., Held]]:
    made: list[Held] = []

    def make(name: str, runtime: str = "/usr/bin/gpushare-runtime", **asked: Any) -> Held:
        made.append(Held(clean_root, name, runtime, **asked))
        return made[-1]

    yield make
    for one in made:
        one.kill()


def use_systemd(root: CleanRoot) -> None:
    """Fake a running systemd that writes down its commands."""
    (root.path / "run/systemd/system").mkdir(parents=True)
    (root.path / "usr/bin/systemctl").unlink()
    root.put("/usr/bin/systemctl", '#!/bin/sh\necho "$*" >>/called\n')
    (root.path / "usr/bin/systemctl").chmod(0o755)


def systemctl_calls(root: CleanRoot) -> list[str]:
    """systemctl's arguments since the last call, without questions."""
    called = root.path / "called"
    lines = called.read_text().splitlines() if called.exists() else []
    called.unlink(missing_ok=True)
    return [line for line in lines if not line.startswith("show ")]


def removed(root: CleanRoot, kind: Kind) -> list[str]:
    """Remove the package, and return the messages of gpushare."""
    done = root.call(*kind.remove)
    said = (done.stdout + done.stderr).splitlines()
    assert done.returncode == 0, said
    return [line for line in said if line.startswith("gpushare: ")]


JOURNAL = "/var/lib/gpushare/usage.log"  # outlives the program, since users are charged by it


def test_package_is_installed_used_upgraded_and_removed(
    kind: Kind, clean_root: CleanRoot, held: Callable[..., Held], tmp_path: Path
) -> None:
    root = clean_root
    (package,) = PACKAGES.glob(kind.pattern)
    shutil.copy(package, root.path / "srv")
    use_systemd(root)
    before = root.files("/etc", "/usr/lib/systemd", "/run", "/var/lib/systemd")
    root.run(*kind.install, f"/srv/{package.name}")

    # The installation configures nothing: one file of its own, no started unit, no state.
    after = root.files("/etc", "/usr/lib/systemd", "/run", "/var/lib/systemd")
    assert {path: text for path, text in after.items() if path in before} == before
    units = {f"/usr/lib/systemd/system/{path.name}" for path in (TREE / "packaging/systemd").iterdir()}
    assert set(after) - set(before) == {"/etc/gpushare/config.yaml", *units}
    assert systemctl_calls(root) == AFTER_INSTALLING
    assert root.run("gpushare", "version").startswith(f"gpushare {version()},")
    verified = root.call("systemd-analyze", "verify", "--man=no", *sorted(units))
    assert not [line for line in verified.stderr.splitlines() if "gpushare" in line], verified.stderr
    assert "_GPUSHARE_COMPLETE" in root.run("cat", "/usr/share/bash-completion/completions/gpushare").upper()
    assert (root.path / "usr/share/man/man1/gpushare.1.gz").is_file()

    # On request: a profile replaces the empty file, and an engine is configured.
    root.put("/etc/docker/daemon.json", '{"debug": false}\n')
    root.run("gpushare", "runtime", "configure", "docker", "--profile", "workstation")
    daemon = json.loads(root.run("cat", "/etc/docker/daemon.json"))
    assert daemon["runtimes"]["gpushare"]["path"] == f"{HOME}/bin/gpushare-runtime"
    use_simulated_gpu(root)
    edited = (root.path / "etc/gpushare/config.yaml").read_bytes()

    first = held("first")
    assert first.said["total_bytes"] == first.said["nvml_total_bytes"] == GIB and first.said["refused"] == 2
    old, mounts = os.stat(first.view / IN_CONTAINER), first.mounts()
    content = (first.view / IN_CONTAINER).read_bytes()
    assert old.st_ino == os.stat(root.path / SHIM[1:]).st_ino

    # The upgrade leaves the container unchanged: the same mounts, files and limit.
    (package,) = newer.packages(tmp_path).glob(kind.pattern)
    shutil.copy(package, root.path / "srv")
    root.run(*kind.upgrade, f"/srv/{package.name}")
    assert root.run(*kind.version).split() == ["installed", newer.VERSION]
    assert (root.path / "etc/gpushare/config.yaml").read_bytes() == edited
    assert json.loads(root.run("cat", "/etc/docker/daemon.json")) == daemon
    assert systemctl_calls(root) == AFTER_INSTALLING
    assert root.run("gpushare", "version").startswith(f"gpushare {newer.VERSION},")
    assert first.process.poll() is None and first.mounts() == mounts
    now = os.stat(first.view / IN_CONTAINER)
    assert (now.st_dev, now.st_ino) == (old.st_dev, old.st_ino)
    assert (first.view / IN_CONTAINER).read_bytes() == content
    again = root.call("gpushare-runtime", "exec", first.name, PROBE)
    assert json.loads(again.stdout) == {"failed": "cuDevicePrimaryCtxRetain", "code": 2}, again.stdout + again.stderr
    assert listed(root) == ["first"]

    # A new container has the new version, beside the old one.
    second = held("second")
    assert second.said["got_bytes"] == first.said["got_bytes"] and listed(root) == ["first", "second"]
    assert (second.view / IN_CONTAINER).read_bytes() == content + newer.VERSION.encode()
    first.end()
    assert listed(root) == ["second"]

    # The removal is refused while a container needs the package; then it is complete.
    refused = root.call(*kind.remove)
    assert refused.returncode != 0 and "1 container holds a share: second" in refused.stdout + refused.stderr
    assert root.run(*kind.version).split() == ["installed", newer.VERSION] and listed(root) == ["second"]
    assert systemctl_calls(root) in (
        [],
        AFTER_INSTALLING,
    )  # dpkg configures it again; nothing was stopped
    assert json.loads(root.run("cat", "/etc/docker/daemon.json")) == daemon
    second.end()
    assert removed(root, kind)[-1:] == ["gpushare: now run: systemctl restart docker"]
    *ended, last = systemctl_calls(root)
    assert [line.split()[0] for line in ended] == ["disable", "disable", "stop"] and last == "daemon-reload"
    assert {word.partition(".")[0].rstrip("*") for line in ended for word in line.split() if "gpushare" in word} == {
        path.stem.partition(".")[0] for path in (TREE / "packaging/systemd").iterdir()
    }
    assert root.run("cat", "/etc/docker/daemon.json") == '{"debug": false}\n'
    assert (root.path / kind.kept[1:]).read_bytes() == edited
    left = [path for path in root.files("/etc", "/usr", "/run", "/var/lib/gpushare") if "gpushare" in path]
    assert [path for path in left if not path.startswith(("/etc/gpushare/", "/var/lib/dpkg/"))] == [UNREAD, JOURNAL]
    assert " /run/gpushare " not in root.run("cat", "/proc/self/mountinfo")
    if kind is KINDS["deb"]:
        root.run("dpkg", "--purge", "gpushare")
        assert not (root.path / "etc/gpushare").exists() and not (root.path / "var/lib/gpushare").exists()


def test_archive_is_unpacked_used_upgraded_and_removed(
    clean_root: CleanRoot, held: Callable[..., Held], tmp_path: Path
) -> None:
    """docs/install.md: a newer version is unpacked beside the old one, which is removed after its containers."""
    root, link = clean_root, "/usr/local/bin/gpushare"
    (old,) = PACKAGES.glob("gpushare-*-linux-x86_64.tar.gz")
    homes = []
    for archive in (old, newer.archive(tmp_path)):
        homes.append("/opt/" + archive.name.removesuffix(".tar.gz"))
        shutil.copy(archive, root.path / "srv")
    before = root.files("/etc", "/opt", "/usr", "/run", "/var/lib")
    root.put("/etc/docker/daemon.json", '{"debug": false}\n')
    shims: list[bytes] = []
    for home in homes:
        root.run("tar", "-C", "/opt", "-xzf", f"/srv/{home[5:]}.tar.gz")
        root.run("ln", "-sfn", f"{home}/bin/gpushare", link)
        root.run("gpushare", "runtime", "configure", "docker", *(["--profile", "workstation"] if not shims else []))
        daemon = json.loads(root.run("cat", "/etc/docker/daemon.json"))
        assert daemon["runtimes"]["gpushare"]["path"] == f"{home}/bin/gpushare-runtime"
        if home == homes[0]:
            use_simulated_gpu(root)
            first = held("first", f"{home}/bin/gpushare-runtime")
            shims.append((first.view / IN_CONTAINER).read_bytes())
            mounts = first.mounts()
    assert root.run("gpushare", "version").startswith(f"gpushare {newer.VERSION},")
    assert first.process.poll() is None and first.mounts() == mounts
    second = held("second", f"{homes[1]}/bin/gpushare-runtime")
    assert (first.view / IN_CONTAINER).read_bytes() == shims[0]
    assert (second.view / IN_CONTAINER).read_bytes() == shims[0] + newer.VERSION.encode()
    assert listed(root) == ["first", "second"]
    first.end()
    root.run("rm", "-r", homes[0])
    assert listed(root) == ["second"]
    refused = root.call("gpushare", "uninstall", "--yes")
    assert refused.returncode != 0 and "1 container holds a share: second" in refused.stderr
    second.end()
    root.run("gpushare", "uninstall", "--yes", "--purge")
    root.run("rm", "-r", homes[1], link)
    assert root.run("cat", "/etc/docker/daemon.json") == '{"debug": false}\n'
    (root.path / "etc/docker/daemon.json").unlink()
    shutil.rmtree(root.path / "opt/driver")
    assert root.files("/etc", "/opt", "/usr", "/run", "/var/lib") == before
    assert " /run/gpushare " not in root.run("cat", "/proc/self/mountinfo")
