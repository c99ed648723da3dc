"""The output of `gpushare runtime configure`, read by the engines themselves. No daemon is started."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from gpushare.engines import containerd, podman

from tests.support.host import BUILD, TREE

GPUSHARE = BUILD / "bin" / "gpushare"
CRI, CRI3 = "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"
OWN_RUNTIME = f"""\
version = 2
[plugins."{CRI}".containerd]
  default_runtime_name = "mine"
  [plugins."{CRI}".containerd.runtimes.mine]
    runtime_type = "io.containerd.runc.v2"
    [plugins."{CRI}".containerd.runtimes.mine.options]
      SystemdCgroup = true
"""


def configure(root: Path, engine: str, *options: str) -> None:
    command = [GPUSHARE, "runtime", "configure", engine, "--root", root, *options]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def runtimes(main: Path) -> dict[str, Any]:
    """The handlers that containerd reads from this file."""
    dump = ["containerd", "-c", str(main), "config", "dump"]
    done = subprocess.run(dump, check=True, capture_output=True, text=True, timeout=60)
    plugins = tomlkit.parse(done.stdout).unwrap()["plugins"]
    found: dict[str, Any] = plugins[CRI3 if CRI3 in plugins else CRI]["containerd"]["runtimes"]  # version 3 from 2.0 on
    return found


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory with a short path: podman's runroot has at most 50 characters."""
    path = Path(tempfile.mkdtemp(prefix="gs-"))
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("hook_only", [False, True])
@pytest.mark.parametrize(("text", "default"), [("version = 2\n", "runc"), (OWN_RUNTIME, "mine"), (None, "runc")])
def test_containerd_reads_our_handler_beside_its_own(tmp_path: Path, text: str, default: str, hook_only: bool) -> None:
    main = tmp_path / containerd.FILE.lstrip("/")
    if text is not None:
        main.parent.mkdir(parents=True)
        main.write_text(text)
    configure(tmp_path, "containerd", *(["--hook-only"] if hook_only else []))
    found = runtimes(main)
    assert set(found) - {"runc"} == {default, "gpushare"} - {"runc"}  # containerd 2 lists its own beside ours
    ours = found["gpushare"]
    assert ours["runtime_type"] == found[default]["runtime_type"] == "io.containerd.runc.v2"
    theirs = found[default].get("options", {})
    options = ours.get("options", {})
    assert options.get("SystemdCgroup", False) == theirs.get("SystemdCgroup", False) == (default == "mine")
    assert ours["pod_annotations"] == list(containerd.ANNOTATIONS)
    if hook_only:
        assert (ours["base_runtime_spec"], options.get("BinaryName", "")) == (containerd.BASE_SPEC, "")
    else:
        assert options["BinaryName"] == str(BUILD / "bin" / "gpushare-runtime-cri")
    configure(tmp_path, "containerd", "--undo")
    assert main.exists() == (text is not None) and not (tmp_path / containerd.BASE_SPEC.lstrip("/")).exists()
    if text is not None:
        assert main.read_text() == text


def test_base_spec_equals_containerd_s_default() -> None:
    """Hosts without ctr use this copy: it must not open anything that containerd masks or denies."""
    spec = json.loads(subprocess.run(["ctr", "oci", "spec"], check=True, capture_output=True, timeout=60).stdout)
    written = TREE / "config/engines/containerd-hook-only" / containerd.BASE_SPEC.lstrip("/")
    copy = json.loads(written.read_text())
    assert copy["process"] == spec["process"] and copy["root"] == spec["root"]
    assert copy["mounts"] == spec["mounts"] and copy["linux"]["resources"] == spec["linux"]["resources"]
    assert copy["linux"]["namespaces"] == spec["linux"]["namespaces"]
    for name in ("maskedPaths", "readonlyPaths"):
        assert set(copy["linux"][name]) >= set(spec["linux"][name])


def test_podman_reads_our_hooks_directory_and_runtime(tmp_path: Path, short: Path) -> None:
    configure(tmp_path, "podman")
    environment = {**os.environ, "CONTAINERS_CONF": str(tmp_path / podman.FILE.lstrip("/"))}

    def ask(*args: str) -> str:
        storage = ["--root", str(short / "storage"), "--runroot", str(short / "run"), "--storage-driver", "vfs"]
        command = ["podman", *storage, *args]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60)
        return done.stdout

    assert f"[/usr/share/containers/oci/hooks.d,{podman.HOOKS}]" in ask("--help")
    path = ask("--runtime", "gpushare", "info", "--format", "{{.Host.OCIRuntime.Path}}")
    assert path.strip() == str(BUILD / "bin" / "gpushare-runtime")
