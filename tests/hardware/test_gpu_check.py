"""Run `make gpu-check` on the simulator in its short form: it completes, and it detects a shim without a limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simulator.simhost import VERSION, make_simhost
from tests.hardware import docs, processes
from tests.hardware.checks import CHECKS
from tests.hardware.place import STEMS, TREE
from tests.support.host import BUILD

pytestmark = pytest.mark.usefixtures("no_leaks")
VERDICTS = {"held", "missed", "measured", "absent", "failed"}
MEMORY = ("memory.plain", "memory.async", "memory.vmm", "memory.managed", "memory.processes", "memory.nvml")
# Checks that need a GPU
ABSENT = {check.name for check in CHECKS if check.needs}


def gpu_check(tmp_path: Path, *options: str, env: dict[str, str] | None = None) -> tuple[int, dict[str, Any], str]:
    """Return (exit code, JSON, output)."""
    out = tmp_path / "gpu-check.json"
    command = [sys.executable, "-m", "tests.hardware", "--short", "--simulated", "--json", str(out), *options]
    done = subprocess.run(
        command, cwd=TREE, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=200
    )
    assert out.exists(), done.stderr
    return done.returncode, json.loads(out.read_text()), done.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, dict[str, Any], str]]:
    yield gpu_check(tmp_path_factory.mktemp("whole"))


def test_every_check_has_a_result(whole: tuple[int, dict[str, Any], str]) -> None:
    _, content, printed = whole
    assert list(content["checks"]) == [check.name for check in CHECKS]
    assert {"format", "date", "simulated", "driver", "cuda", "gpu", "host", "took_s"} <= set(content)
    assert content["simulated"] and content["gpu"]["model"] == "NVIDIA Simulated A16"
    for name, check in content["checks"].items():
        assert check["verdict"] in VERDICTS and check["note"], name
        assert name in printed
    absent = {name for name, check in content["checks"].items() if check["verdict"] == "absent"}
    assert absent == ABSENT


def test_promises_hold_on_the_simulator(whole: tuple[int, dict[str, Any], str]) -> None:
    checks = whole[1]["checks"]
    for name in (*MEMORY, "loader", "run", "mps", "compute.uncapped", "compute.waiting"):
        assert checks[name]["verdict"] == "held", checks[name]["note"]
    assert checks["context"]["values"]["first_bytes"] == 300 << 20, "what the simulator takes for a context"
    assert checks["memory.plain"]["values"]["device_bytes"] == checks["memory.plain"]["values"]["limit_bytes"]
    assert set(checks["conformance"]["values"].values()) == {"as modelled"}
    assert checks["latency"]["values"]["launch"]["native_ns"] > 0
    looks = checks["looks"]["values"]
    assert looks["holds"] and looks["in_a_turn_of_the_neighbour"]["told"] > 5, checks["looks"]["note"]
    assert looks["waited"]["beside_without_work"]["p50_ns"] > looks["waited"]["alone_with_work"]["p50_ns"]
    assert looks["cost"]["median_ns"] > 0 and "percent" in looks["neighbour_lost"]
    assert "12 of 12 answers as assumed" in checks["mps.words"]["note"]


def test_compute_ratios_are_near_the_limits(whole: tuple[int, dict[str, Any], str]) -> None:
    """Short runs are imprecise beside other load, but native speed and no speed are far outside these bounds."""
    values = {name: check["values"] for name, check in whole[1]["checks"].items() if name.startswith("compute.")}
    for name, least, most in (("30", 0.2, 0.4), ("graph", 0.2, 0.4), ("5", 0.02, 0.1)):
        assert least < values[f"compute.{name}"]["ratio"] < most, whole[2]
    low, high = values["compute.30_70"]["got_percent"]
    assert low < 45 < 55 < high, whole[2]


def test_exit_code_tells_whether_all_held(whole: tuple[int, dict[str, Any], str]) -> None:
    code, content, _ = whole
    verdicts = {name: check["verdict"] for name, check in content["checks"].items()}
    assert "failed" not in verdicts.values(), whole[2]
    missed = [name for name, verdict in verdicts.items() if verdict == "missed"]
    assert code == (1 if missed else 0)
    assert all("compute" in name for name in missed), missed


def test_unknown_check_is_reported(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.hardware", "--simulated", "--only", "loader,memory"]
    done = subprocess.run(command, cwd=TREE, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "no check is called 'memory'" in done.stderr


def no_limit(directory: Path) -> Path:
    """Build shims that only load the real libraries."""
    directory.mkdir()
    for library, stub in (("libcuda", "cuda"), ("libnvidia-ml", "nvml")):
        command = ["gcc", "-shared", "-nostdlib", "-Wl,--no-as-needed", f"-Wl,-soname,{library}.so.1"]
        out = ["-o", str(directory / f"{library}.so"), "-x", "c", "/dev/null", "-x", "none"]
        subprocess.run([*command, *out, str(BUILD / "shim" / "stub" / f"{stub}.so")], check=True)
    return directory


def test_shim_without_a_limit_fails(tmp_path: Path) -> None:
    shim = no_limit(tmp_path / "shim")
    only = ",".join(("context", "loader", *MEMORY, "compute.30"))
    code, content, _ = gpu_check(tmp_path, "--shim", str(shim), "--only", only)
    verdicts = {name: check["verdict"] for name, check in content["checks"].items()}
    assert code == 1
    assert verdicts == {**dict.fromkeys(("loader", *MEMORY, "compute.30"), "missed"), "context": "measured"}


def test_checks_beyond_the_budget_are_reported(tmp_path: Path) -> None:
    code, content, _ = gpu_check(tmp_path, "--budget", "0", "--only", "context,memory.plain")
    assert code == 2, "nothing was checked"
    assert [check["note"] for check in content["checks"].values()] == ["no time was left"] * 2


def test_program_is_killed_at_its_deadline(tmp_path: Path) -> None:
    with pytest.raises(processes.Failed, match="timed out"):
        processes.run(["sh", "-c", "sleep 600 & wait"], time.monotonic() + 0.2)
    tenant = processes.Tenant("work", time.monotonic() + 0.2, library="/dev/null", kernel_us=1, rounds=1, blocks=1)
    with tenant, pytest.raises(processes.Failed):
        while True:
            tenant.receive()


# The kernel refuses an overlay over two others; then every entry of /usr/lib is bind-mounted.
@pytest.mark.parametrize("overlays", [1, 2])
def test_shim_is_mounted_over_an_installed_driver(tmp_path: Path, overlays: int) -> None:
    """As on hardware, no path is given: only the loader knows where the driver is."""
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
    assert verdicts == {**held, "context": "measured", "slices": "absent"}, done.stdout


def test_interrupted_run_cleans_up_and_writes_results(tmp_path: Path) -> None:
    """`no_leaks` checks for remaining programs and mounts."""
    out = tmp_path / "gpu-check.json"
    command = [
        sys.executable,
        "-m",
        "tests.hardware",
        "--simulated",
        "--json",
        str(out),
        "--only",
        "context,compute.30",
    ]
    with subprocess.Popen(command, cwd=TREE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            if line.startswith("  context:"):
                break
        process.terminate()
        assert process.wait(30) == 130
    assert list(json.loads(out.read_text())["checks"]) == ["context"]


def test_missing_private_mounts_are_reported(tmp_path: Path) -> None:
    """As in an engine's container: the memory checks are absent, with the reason, and the native checks run."""
    program = "import ctypes, os, sys; libc = ctypes.CDLL(None)\n"
    drop = "assert libc.prctl(24, 21, 0, 0, 0) == 0\n"  # PR_CAPBSET_DROP, CAP_SYS_ADMIN
    out = tmp_path / "gpu-check.json"
    options = ["--short", "--simulated", "--json", str(out), "--only", "context,memory.plain,pool"]
    command = [sys.executable, "-c", f"{program}{drop}os.execv(sys.argv[1], sys.argv[1:])", sys.executable]
    done = subprocess.run(
        [*command, "-m", "tests.hardware", *options], cwd=TREE, capture_output=True, text=True, timeout=100
    )
    checks = json.loads(out.read_text())["checks"]
    assert [check["verdict"] for check in checks.values()] == ["measured", "absent", "measured"], done.stderr
    assert "no private mounts here" in checks["memory.plain"]["note"]


def test_page_has_the_measurements(whole: tuple[int, dict[str, Any], str]) -> None:
    assert (TREE / "docs" / "hardware.md").read_text() == docs.text(docs.measurements()), "run `make docs`"
    page = docs.text([{**whole[1], "simulated": False}])
    assert "NVIDIA Simulated A16" in page and "535.261.03" in page
    for check in CHECKS:
        assert check.what in page
