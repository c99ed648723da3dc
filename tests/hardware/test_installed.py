"""Run gpu-check where a driver is installed: as on hardware, no path is given, and the loader alone knows it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from simulator.simhost import VERSION, make_simhost
from tests.hardware.place import STEMS, TREE
from tests.support.host import BUILD

pytestmark = pytest.mark.usefixtures("no_leaks")
MEMORY = ("memory.plain", "memory.async", "memory.vmm", "memory.managed", "memory.processes", "memory.nvml")


# The kernel refuses an overlay over two others; then every entry of /usr/lib is bind-mounted.
@pytest.mark.parametrize("overlays", [1, 2])
def test_shim_is_mounted_over_an_installed_driver(tmp_path: Path, overlays: int) -> None:
    simulated = make_simhost(tmp_path / "host", gpus=1, late_return_ms=0)
    inside: list[str] = []
    for number in range(overlays):
        scratch = tmp_path / f"scratch{number}"
        scratch.mkdir()
        inside += [sys.executable, "-m", "tests.hardware.installed", str(simulated), str(scratch)]
    out = tmp_path / "gpu-check.json"
    options = ["--short", "--json", str(out), "--only", ",".join(("context", "loader", *MEMORY, "slices"))]
    env = {**os.environ, "PYTHONPATH": f"{TREE}:{TREE}/hook"}
    done = subprocess.run(
        [*inside, sys.executable, "-m", "tests.hardware", *options],
        cwd=TREE,
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
    )
    content = json.loads(out.read_text())
    assert content["simulated"] is False, done.stdout
    assert [Path(path).name for path in content["host"]["covered"]] == [f"{stem}.so.{VERSION}" for stem in STEMS]
    verdicts = {name: check["verdict"] for name, check in content["checks"].items()}
    held = dict.fromkeys(("loader", *MEMORY), "held")
    assert verdicts == {**held, "context": "measured", "slices": "measured"}, done.stdout


# Stands in for PyTorch; its memory is the simulated driver's.
TORCH = """
import sys
from tests.hardware import fakes
sys.modules["torch"] = module = fakes.torch(fakes.Allocating())
sys.modules["torch.distributed"] = module.distributed
"""


def test_checks_of_pytorch_run_in_shares(tmp_path: Path) -> None:
    """A stand-in for PyTorch allocates from the driver up to the limit. No kernel runs, so speed is not limited."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "torch.py").write_text(TORCH)
    (tmp_path / "scratch").mkdir()
    simulated, out = make_simhost(tmp_path / "host", gpus=1, late_return_ms=0), tmp_path / "gpu-check.json"
    limits = ("limit.torch", "limit.compiled", "limit.graphs", "limit.expandable", "limit.async")
    speeds = ("torch.30_70", "torch.10_20_30_40", "torch.graph")
    only = ("context", *limits, "limit.triton", "nccl", *speeds)
    command = [sys.executable, "-m", "tests.hardware.installed", str(simulated), str(tmp_path / "scratch")]
    command += [sys.executable, "-m", "tests.hardware", "--short", "--only", ",".join(only), "--out", str(out)]
    env = {**os.environ, "PYTHONPATH": f"{TREE}:{TREE}/hook:{tmp_path}/site"}
    done = subprocess.run(command, cwd=TREE, env=env, capture_output=True, text=True, timeout=200)
    content = json.loads(out.read_text())
    verdicts = {name: check["verdict"] for name, check in content["checks"].items()}
    assert verdicts == {
        "context": "measured",
        **dict.fromkeys(limits, "held"),
        "limit.triton": "absent",
        "nccl": "held",
        **dict.fromkeys(speeds, "missed"),
    }, done.stdout
    values = content["checks"]["limit.torch"]["values"]
    assert values["device_bytes"] <= values["limit_bytes"] == 1 << 30
    assert values["used_bytes"] == content["checks"]["context"]["values"]["first_bytes"]
    assert content["assumptions"]["framework.covered"]["verdict"] == "confirmed"
    assert content["assumptions"]["nccl"]["verdict"] == "confirmed"


@pytest.fixture
def carried(tmp_path: Path) -> Path:
    """Return a copy of this tree as git has it, with the built shim and programs, but without a virtual environment."""
    tree = tmp_path / "tree"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=TREE, capture_output=True, check=True, timeout=60).stdout
    for name in filter(None, names.decode().split("\0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TREE / name, tree / name, follow_symlinks=False)
    for name in ("shim/libcuda.so", "shim/libnvidia-ml.so", "gpu/latency", "gpu/busy"):
        (tree / "build" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(BUILD / name, tree / "build" / name)
    bundle = tmp_path / "gpushare-1/bin/gpushare"
    bundle.parent.mkdir(parents=True)
    bundle.write_text("carried\n")
    (tree / "build/dist").mkdir()
    with tarfile.open(tree / "build/dist/gpushare-1-linux-x86_64.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "gpushare-1", "gpushare-1")
    return tree


def start(tmp_path: Path, tree: Path, name: str, only: str) -> tuple[dict[str, Any], str]:
    """Run tests/hardware/start with an installed driver, without a network; return the JSON and the output."""
    simulated, scratch, out = tmp_path / f"host-{name}", tmp_path / f"scratch-{name}", tmp_path / f"{name}.json"
    make_simhost(simulated, gpus=1, late_return_ms=0)
    scratch.mkdir()
    installed = ["unshare", "--net", sys.executable, "-m", "tests.hardware.installed", str(simulated), str(scratch)]
    bare = ["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", str(tree / "tests/hardware/start")]
    command = [*installed, *bare, "--short", "--only", only, "--out", str(out)]
    env = {**os.environ, "PYTHONPATH": f"{TREE}:{TREE}/hook"}
    done = subprocess.run(command, cwd=TREE, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text()), done.stdout


def test_carried_tree_needs_no_network_and_no_packages(tmp_path: Path, carried: Path) -> None:
    only = ("context", "conformance", "modules", "descriptors", "memory.plain", "latency")
    content, printed = start(tmp_path, carried, "shim", ",".join(only))
    assert "using build/shim as it was carried here" in printed
    assert (carried / "build/dist/gpushare/bin/gpushare").read_text() == "carried\n", "the archive is unpacked"
    assert content["simulated"] is False and content["host"]["executable"] == "/usr/bin/python3"
    verdicts = {name: check["verdict"] for name, check in content["checks"].items()}
    assert verdicts == {**dict.fromkeys(only, "measured"), "memory.plain": "held"}, printed
    assert "used_bytes" in content["checks"]["modules"]["values"]["lazy"]["shim"]["steps"][0]
    assert "3 of 3 behaviours as modelled" in content["checks"]["conformance"]["note"]
    shutil.rmtree(carried / "build")
    content, printed = start(tmp_path, carried, "native", ",".join(only))
    assert "without the shim only the driver itself is checked" in printed
    verdicts = {name: check["verdict"] for name, check in content["checks"].items()}
    assert verdicts == {
        **dict.fromkeys(("context", "conformance", "modules", "descriptors"), "measured"),
        **dict.fromkeys(("memory.plain", "latency"), "absent"),
    }, printed
    assert "needs the shim" in content["checks"]["modules"]["values"]["lazy"]["shim"]["missing"]
