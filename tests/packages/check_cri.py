"""gpushare-runtime-cri in each package: containerd's handler, and an upgrade from a version without it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from . import check_install, newer
from .check_install import HOME, Kind
from .cleanroot import CleanRoot
from .conftest import PACKAGES
from .held import GIB, POD, Held, use_simulated_gpu

held, kind = check_install.held, check_install.kind  # fixtures

CONTAINERD = "/etc/containerd/config.toml"
OWN = "version = 2\n"
CONFIGURE = ("gpushare", "runtime", "configure", "containerd")
REMEDY = "run `gpushare runtime configure containerd` again, then `systemctl restart containerd`"


def handler(root: CleanRoot) -> str:
    """The program in gpushare's entry of containerd's configuration."""
    (line,) = [line for line in (root.path / CONTAINERD[1:]).read_text().splitlines() if "BinaryName" in line]
    return line.split('"')[1]


def configure(root: CleanRoot) -> str:
    """Add gpushare's handler to containerd and return its path."""
    root.put(CONTAINERD, OWN)
    root.run(*CONFIGURE, "--engine-version", "1.7")
    return handler(root)


def use_earlier_entry(root: CleanRoot) -> None:
    """Write and record the entry as version 0.1.0 did."""
    for path in (root.path / CONTAINERD[1:], *root.path.glob("var/lib/gpushare/configured/*")):
        path.write_text(path.read_text().replace("gpushare-runtime-cri", "gpushare-runtime"))


def check_pod_gets_its_share(root: CleanRoot, held: Callable[..., Held], program: str, name: str = "pod") -> None:
    """By gpushare-runtime-cri the pod's annotation is honoured, by gpushare-runtime it is refused."""
    pod = held(name, program, env={}, annotations=POD)
    assert pod.said["total_bytes"] == pod.said["nvml_total_bytes"] == GIB and pod.said["refused"] == 2
    pod.end()
    root.put(f"/srv/{name}/config.json", json.dumps(pod.config))  # without the runtime's edit
    refused = root.call(program.removesuffix("-cri"), "run", "--bundle", f"/srv/{name}", name)
    assert refused.returncode != 0 and "run `gpushare runtime configure containerd`" in refused.stderr


def test_upgrade_reports_the_entry_of_an_earlier_version(
    kind: Kind, clean_root: CleanRoot, held: Callable[..., Held], tmp_path: Path
) -> None:
    root = clean_root
    (package,) = PACKAGES.glob(kind.pattern)
    shutil.copy(package, root.path / "srv")
    root.run(*kind.install, f"/srv/{package.name}")
    for name in ("/usr/bin/gpushare-runtime-cri", f"{HOME}/bin/gpushare-runtime-cri"):
        assert root.run(name, "--version").startswith("runc version")
    assert configure(root) == f"{HOME}/bin/gpushare-runtime-cri"
    use_simulated_gpu(root)
    check_pod_gets_its_share(root, held, handler(root))

    use_earlier_entry(root)
    before = (root.path / CONTAINERD[1:]).read_text()
    (package,) = newer.packages(tmp_path).glob(kind.pattern)
    shutil.copy(package, root.path / "srv")
    upgraded = root.call(*kind.upgrade, f"/srv/{package.name}")
    assert upgraded.returncode == 0 and REMEDY in upgraded.stderr, upgraded.stderr
    assert (root.path / CONTAINERD[1:]).read_text() == before  # an upgrade configures nothing
    status = root.call("gpushare", "runtime", "status")
    assert REMEDY in status.stderr and "incomplete" in status.stdout
    checked = json.loads(root.call("gpushare", "doctor", "--format", "json").stdout)
    (engines,) = [one for one in checked["checks"] if one["name"] == "engines"]
    assert engines["result"] == "fail" and REMEDY in engines["detail"]

    configured = root.call(*CONFIGURE, "--engine-version", "1.7")
    assert "now run: systemctl restart containerd" in configured.stderr
    assert handler(root) == f"{HOME}/bin/gpushare-runtime-cri"
    assert root.call("gpushare", "runtime", "status").stderr == ""
    check_pod_gets_its_share(root, held, handler(root), "again")
    root.run(*kind.remove)
    assert (root.path / CONTAINERD[1:]).read_text() == OWN
    assert not list(root.path.glob("usr/bin/gpushare*")) and not (root.path / HOME[1:]).exists()


def test_archive_has_gpushare_runtime_cri(clean_root: CleanRoot, held: Callable[..., Held]) -> None:
    root = clean_root
    (archive,) = PACKAGES.glob("gpushare-*-linux-x86_64.tar.gz")
    home = "/opt/" + archive.name.removesuffix(".tar.gz")
    shutil.copy(archive, root.path / "srv")
    root.run("tar", "-C", "/opt", "-xzf", f"/srv/{archive.name}")
    root.run("ln", "-s", f"{home}/bin/gpushare", "/usr/local/bin/gpushare")
    assert configure(root) == f"{home}/bin/gpushare-runtime-cri"
    assert os.readlink(root.path / handler(root)[1:]) == "gpushare-runtime"
    use_simulated_gpu(root)
    check_pod_gets_its_share(root, held, handler(root))
    root.run("gpushare", "uninstall", "--yes")
    assert (root.path / CONTAINERD[1:]).read_text() == OWN
