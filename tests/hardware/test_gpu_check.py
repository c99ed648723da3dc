"""Run `make gpu-check` on the simulator in its short form: it completes, and it detects a shim without a limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hardware import __main__ as program
from tests.hardware import docs, machine, processes
from tests.hardware.assumptions import ASSUMPTIONS
from tests.hardware.checks import CHECKS
from tests.hardware.place import TREE
from tests.support.host import BUILD

pytestmark = pytest.mark.usefixtures("no_leaks")
COMMAND = [sys.executable, "-m", "tests.hardware", "--simulated"]
VERDICTS = {"held", "missed", "measured", "absent", "failed", "not run"}
MEMORY = ("memory.plain", "memory.async", "memory.vmm", "memory.managed", "memory.processes", "memory.nvml")
# Checks that need a GPU or a framework, or functions that the simulated driver does not have
ABSENT = {"green", *(check.name for check in CHECKS if check.needs and not check.named)}


def gpu_check(tmp_path: Path, *options: str, env: dict[str, str] | None = None) -> tuple[int, dict[str, Any], str]:
    """Return (exit code, JSON, output)."""
    out = tmp_path / "gpu-check.json"
    command = [*COMMAND, "--short", "--out", str(out), *options]
    done = subprocess.run(
        command, cwd=TREE, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=200
    )
    assert out.exists(), done.stderr
    return done.returncode, json.loads(out.read_text()), done.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, dict[str, Any], str]]:
    yield gpu_check(tmp_path_factory.mktemp("whole"), "--all")


def test_turns_are_measured_by_name(tmp_path: Path) -> None:
    """Against time slices, in one run; the machine of a test is too noisy for a verdict."""
    names = ["turns.30_70", "turns.beside_1", "turns.killed", "turns.outsider"]
    code, content, printed = gpu_check(tmp_path, "--only", ",".join(names))
    assert code in (0, 1), printed
    rows = content["checks"]
    for name in names:
        assert rows[name]["verdict"] in ("held", "missed"), rows[name]["note"]
    values = {name: rows[name]["values"] for name in names}
    assert values["turns.30_70"]["round_ms"] == 20 and len(values["turns.30_70"]["slices"]["got_percent"]) == 2
    assert len(values["turns.beside_1"]["delay_ms"]) == 2
    assert len(values["turns.killed"]["throughput_percent"]) == 2
    assert len(values["turns.outsider"]["slices"]) == 3


def test_every_check_has_a_result(whole: tuple[int, dict[str, Any], str]) -> None:
    _, content, printed = whole
    assert list(content["checks"]) == [check.name for check in CHECKS if not check.named]
    assert {"format", "date", "simulated", "driver", "cuda", "gpu", "host", "took_s"} <= set(content)
    assert content["simulated"] and content["gpu"]["model"] == "NVIDIA Simulated A16"
    for name, check in content["checks"].items():
        assert check["verdict"] in VERDICTS and check["note"], name
        assert name in printed
    absent = {name for name, check in content["checks"].items() if check["verdict"] == "absent"}
    assert absent == ABSENT
    assert content["all"] and content["costs"] == content["checks"]["costs"]["values"]["rows"]


def lost_in_slices(name: str, check: dict[str, Any]) -> bool:
    """Whether two containers got less work than their limits: the device's time slices lose a tenth, as on hardware."""
    return "compute" in name or (name == "containers" and check["note"].startswith("compute: "))


def test_promises_hold_on_the_simulator(whole: tuple[int, dict[str, Any], str]) -> None:
    checks = whole[1]["checks"]
    for name in (*MEMORY, "loader", "run", "mps", "suspend", "compute.uncapped", "compute.waiting"):
        assert checks[name]["verdict"] == "held", checks[name]["note"]
    for name in ("containers", "compute.30_70"):
        assert checks[name]["verdict"] == "held" or lost_in_slices(name, checks[name]), checks[name]["note"]
    assert checks["context"]["values"]["first_bytes"] == 300 << 20, "what the simulator takes for a context"
    assert checks["memory.plain"]["values"]["device_bytes"] == checks["memory.plain"]["values"]["limit_bytes"]
    assert set(checks["conformance"]["values"].values()) == {"as modelled"}
    assert checks["latency"]["values"]["launch"]["native_ns"] > 0
    looks = checks["looks"]["values"]
    assert looks["holds"] and looks["in_a_turn_of_the_neighbour"]["told"] > 5, checks["looks"]["note"]
    assert looks["waited"]["beside_without_work"]["p50_ns"] > looks["waited"]["alone_with_work"]["p50_ns"]
    assert looks["cost"]["median_ns"] > 0 and "percent" in looks["neighbour_lost"]
    queues = checks["queues"]["values"]
    assert queues["itself"] and queues["delayed"] == {"same": 0, "highest": 0}, "each stream has its own queue"
    assert "12 of 12 answers as assumed" in checks["mps.words"]["note"]
    own, inside = checks["count"]["values"]["own"], checks["count"]["values"]["in_pid_namespace"]
    assert (own["times_by_own_pid"], inside["pid"], inside["times_by_own_pid"]) == (1, 1, 1)
    assert own["bytes"] >= checks["context"]["values"]["first_bytes"]
    assert set(checks["count"]["values"]["query"]) == {"idle", "a kernel runs", "contexts are created"}
    costs = {row["item"]: row for row in checks["costs"]["values"]["rows"]}
    assert costs["a second context"]["device_bytes"] == checks["context"]["values"]["first_bytes"]
    assert not [row for row in costs.values() if "failed" in row]
    lazy = checks["modules"]["values"]["lazy"]
    assert lazy["native"] == lazy["shim"] and lazy["native"]["left_bytes"] == 0, "charged what the driver took"
    assert lazy["native"]["steps"][-1]["used_bytes"] > 0
    reserved, context = checks["reserved"]["values"], checks["context"]["values"]
    assert reserved["got_bytes"] == reserved["v2_total"] - reserved["v2_reserved"] - context["first_bytes"]
    descriptors = checks["descriptors"]["values"]
    assert not descriptors["distinct"] and descriptors["after_cycles"]["lost_bytes"] == 0
    for runtime in checks["private-loader"]["values"]["runtimes"].values():
        assert runtime["native"]["steps"]["cudaRuntimeGetVersion"] == 0, "NVIDIA's own library took the fat binary"


def test_assumptions_are_judged(whole: tuple[int, dict[str, Any], str]) -> None:
    _, content, printed = whole
    found = content["assumptions"]
    assert list(found) == [row.id for row in ASSUMPTIONS]
    for name in ("context.estimate", "context.listed", "reserved.v1", "reserved.v2", "descriptors"):
        assert found[name]["verdict"] == "confirmed", found[name]
    assert found["slice"]["verdict"] == "unclear"
    assert "  confirms context.estimate: A context costs" in printed


def test_compute_ratios_are_near_the_limits(whole: tuple[int, dict[str, Any], str], tmp_path: Path) -> None:
    """Short runs are imprecise beside other load, but native speed and no speed are far outside these bounds. One delay
    of 50 ms is enough for a wrong ratio, so a run is repeated."""
    values = {name: check["values"] for name, check in whole[1]["checks"].items() if name.startswith("compute.")}
    for name, least, most in (("30", 0.2, 0.4), ("graph", 0.2, 0.4), ("5", 0.02, 0.1)):
        assert least < values[f"compute.{name}"]["ratio"] < most, whole[2]
    low, high = values["compute.30_70"]["got_percent"]
    for _ in range(2):
        if not low < 45 < 55 < high:
            content = gpu_check(tmp_path, "--only", "compute.30_70")[1]
            low, high = content["checks"]["compute.30_70"]["values"]["got_percent"]
    assert low < 45 < 55 < high, whole[2]


def test_exit_code_tells_whether_all_held(whole: tuple[int, dict[str, Any], str]) -> None:
    code, content, _ = whole
    verdicts = {name: check["verdict"] for name, check in content["checks"].items()}
    assert "failed" not in verdicts.values(), whole[2]
    missed = {name: check for name, check in content["checks"].items() if check["verdict"] == "missed"}
    assert code == (1 if missed else 0)
    assert all(lost_in_slices(name, check) for name, check in missed.items()), missed


def test_unknown_check_is_reported(tmp_path: Path) -> None:
    command = [*COMMAND, "--only", "loader,memory"]
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


def test_quick_checks_come_first_and_take_at_most_their_budget() -> None:
    quick = [check for check in CHECKS if check.quick]
    assert CHECKS[0].name == "context" and {"mps", "containers", "limit.torch", "compute.30_70"} <= {
        c.name for c in quick
    }
    assert all(check.limit_s <= program.QUICK_BUDGET_S for check in CHECKS)


def verdicts(content: dict[str, Any]) -> dict[str, str]:
    return {name: check["verdict"] for name, check in content["checks"].items()}


def test_resumed_run_keeps_results_and_adds_the_others(tmp_path: Path) -> None:
    code, first, _ = gpu_check(tmp_path, "--only", "context,pool")
    path = tmp_path / "gpu-check.json"
    before = {**first, "took_s": 100.0}
    before["checks"]["pool"].update(verdict="missed", note="as it was")
    before["checks"]["local"] = {**first["checks"]["pool"], "verdict": "not run", "note": "no time was left"}
    path.write_text(json.dumps(before))
    code, content, printed = gpu_check(tmp_path, "--resume", str(path), "--only", "local,dmem")
    assert verdicts(content) == {"context": "measured", "dmem": "measured", "local": "measured", "pool": "missed"}
    assert content["checks"]["pool"]["note"] == "as it was" and content["took_s"] > 100 and code == 1
    assert content["checks"]["context"] == before["checks"]["context"]
    assert "  context:" not in printed and "  dmem: measured" in printed
    again = gpu_check(tmp_path, "--resume", str(path), "--only", "pool")[1]
    assert again["checks"]["pool"]["verdict"] == "measured", "a check that is named runs again"
    assert again["checks"]["local"] == content["checks"]["local"]


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of one check."""
    return gpu_check(tmp_path_factory.mktemp("context"), "--only", "context")[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"driver": "535.1"},
            "is of NVIDIA Simulated A16 with driver 535.1, this is NVIDIA Simulated A16 with driver 580",
        ),
        ({"gpu": {"model": "NVIDIA H100", "uuid": "GPU-1"}}, "is of NVIDIA H100 with driver 580"),
        ({"simulated": False}, "run without --resume"),
        ({"format": 2}, "has format 2, and this gpu-check writes 3: run without --resume"),
        ({"checks": None}, "is no result of gpu-check that can be resumed"),
    ],
)
def test_result_of_another_machine_is_not_resumed(
    context: dict[str, Any], tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    path, content = tmp_path / "earlier.json", context
    path.write_text(json.dumps({**content, **change}))
    command = [*COMMAND, "--short", "--resume", str(path), "--only", "pool"]
    done = subprocess.run(command, cwd=TREE, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert json.loads(path.read_text()) == {**content, **change}, "it is left alone"


def test_killed_run_can_be_resumed(tmp_path: Path) -> None:
    """SIGKILL while a check runs: the file has every check before it."""
    out = tmp_path / "gpu-check.json"
    options = ["--short", "--out", str(out), "--only", "context,pool,compute.waiting"]
    with subprocess.Popen([*COMMAND, *options], cwd=TREE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        for line in process.stdout:
            if line.startswith("  context:"):
                break
        groups = children.read_text().split()
        process.kill()
    for group in groups:
        try:
            os.killpg(int(group), signal.SIGKILL)
        except ProcessLookupError:
            pass
    assert list(json.loads(out.read_text())["checks"]) == ["context"]
    content = gpu_check(tmp_path, "--resume", str(out), "--only", "pool")[1]
    assert verdicts(content) == {"context": "measured", "pool": "measured"}


def test_checks_beyond_the_budget_are_reported(tmp_path: Path) -> None:
    code, content, _ = gpu_check(tmp_path, "--budget", "0", "--only", "context,memory.plain")
    assert code == 2, "nothing was checked"
    assert [check["verdict"] for check in content["checks"].values()] == ["not run"] * 2
    assert {one["verdict"] for one in content["assumptions"].values()} == {"unclear"}


# A driver that crashes or hangs as soon as it is loaded
BROKEN = """
#include <stdlib.h>
#include <unistd.h>
__attribute__((constructor)) static void broken(void) {
    if (write(2, "what the driver printed\\n", 24) != 24 || CRASHES)
        abort();
    for (;;)
        pause();
}
"""
# gpu-check with five checks, of which the second to the fourth fail
FAULTY = """
import os, signal, sys
from tests.hardware import __main__ as program, checks_memory, processes
from tests.hardware.checks import Check

def crashes(session):
    processes.ask("device", session.deadline, library=sys.argv[1] + "/crashes.so")

def hangs(session):
    processes.ask("device", session.deadline, library=sys.argv[1] + "/hangs.so")

def hangs_itself(session):
    while True:
        signal.pause()

def is_killed(session):
    with session.tenant("fill", way="plain", most_bytes=0) as tenant:
        tenant.receive()
        os.kill(tenant.process.pid, signal.SIGKILL)
        tenant.go()
        tenant.receive()

program.LEAST_S = program.GRACE_S = 0.2
sys.argv.append("--all")
limits = {crashes: 20, hangs: 5, hangs_itself: 1, is_killed: 20}
faulty = [Check(one.__name__, "faulty", one, limit_s) for one, limit_s in limits.items()]
context, pool = (next(check for check in program.CHECKS if check.name == name) for name in ("context", "pool"))
program.CHECKS = (context, *faulty, pool)
sys.exit(program.main(sys.argv[2:]))
"""


def test_faulty_checks_stop_no_other_check(tmp_path: Path) -> None:
    for name, crashes in (("crashes", 1), ("hangs", 0)):
        library = str(tmp_path / f"{name}.so")
        command = ["gcc", "-shared", "-fPIC", f"-DCRASHES={crashes}", "-x", "c", "-", "-o", library]
        subprocess.run(command, input=BROKEN, text=True, check=True, timeout=60)
    out = tmp_path / "gpu-check.json"
    command = [sys.executable, "-c", FAULTY, str(tmp_path), "--short", "--simulated", "--out", str(out)]
    done = subprocess.run(command, cwd=TREE, capture_output=True, text=True, timeout=100)
    checks = json.loads(out.read_text())["checks"]
    assert [check["verdict"] for check in checks.values()] == ["measured", *["failed"] * 4, "measured"], done.stderr
    notes = {name: check["note"] for name, check in checks.items()}
    assert notes["crashes"].startswith("device: was killed by SIGABRT what the driver printed (in __init__.py, line ")
    assert notes["hangs"] == "device: timed out; what the driver printed"
    assert notes["hangs_itself"] == "the check itself timed out"
    assert notes["is_killed"] == "fill: was killed by SIGKILL"
    assert checks["hangs"]["stderr"] == "what the driver printed"
    assert checks["crashes"]["stderr"].startswith("what the driver printed\nFatal Python error: Aborted")
    assert checks["hangs"]["limit_s"] == 5
    assert done.returncode == 1


def test_checks_are_listed_with_their_time_limits() -> None:
    command = [sys.executable, "-m", "tests.hardware", "--list"]
    lines = subprocess.run(command, cwd=TREE, capture_output=True, text=True, timeout=100).stdout.splitlines()
    assert [line.split()[0] for line in lines] == [check.name for check in CHECKS]
    assert lines[0].split() == ["context", "30", "s", *CHECKS[0].what.split(), "(quick)"]
    assert {line.split()[0] for line in lines if "(quick" in line} == {check.name for check in CHECKS if check.quick}


def test_device_in_use_is_not_filled(tmp_path: Path) -> None:
    found, deadline = machine.find(BUILD / "shim", True, tmp_path), time.monotonic() + 60
    where = {"library": found.libcuda, "nvml": found.libnvml, "uuid": found.uuid}
    with processes.Tenant("context", deadline, library=found.libcuda) as other:
        other.receive()
        other.go()
        other.receive()
        beside = processes.ask("reserved", deadline, None, **where)
    assert (beside["got_bytes"], beside["processes"]) == (None, 1)
    alone = processes.ask("reserved", deadline, None, **where)
    assert alone["got_bytes"] == alone["free_with_context"] > 15 << 30


def test_program_is_killed_at_its_deadline(tmp_path: Path) -> None:
    with pytest.raises(processes.Failed, match="timed out"):
        processes.run(["sh", "-c", "sleep 600 & wait"], time.monotonic() + 0.2)
    tenant = processes.Tenant("work", time.monotonic() + 0.2, library="/dev/null", kernel_us=1, rounds=1, blocks=1)
    with tenant, pytest.raises(processes.Failed):
        while True:
            tenant.receive()


def test_interrupted_run_cleans_up_and_writes_results(tmp_path: Path) -> None:
    """`no_leaks` checks for remaining programs and mounts."""
    out = tmp_path / "gpu-check.json"
    command = [*COMMAND, "--json", str(out), "--only", "context,compute.30"]
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


def test_page_is_readable_from_a_file_of_format_2() -> None:
    """The figures decide about today's assumptions, not the sentences that the file has."""
    (h100,) = (one for one in docs.measurements() if one["driver"] == "580.159.04" and "H100" in one["gpu"]["model"])
    assert h100["format"] == 2
    page = docs.text([h100])
    assert "### NVIDIA H100 80GB HBM3, driver 580.159.04, 2026-11-27" in page
    assert "| Device and inode do not tell exported descriptors of different memory apart. | confirmed |" in page
    assert "| reserved, which programs cannot allocate. | refuted" not in page
    assert "throughput decided" in page, "what a file of format 2 lacks"


def test_page_has_a_table_of_costs() -> None:
    (h100,) = docs.measurements()[:1]
    rows = [
        {"item": "64 streams", "device_bytes": 128 << 20, "process_bytes": 126 << 20, "left_bytes": 0},
        {"item": "a cuBLAS handle", "device_bytes": 0, "process_bytes": None},
        {"item": "a cuDNN handle", "failed": "OSError: libcudnn.so is not loaded"},
    ]
    page = docs.text([{**h100, "format": 3, "all": True, "costs": rows}])
    assert "| 64 streams | 128 MiB | 126 MiB | 0 bytes |" in page
    assert "| a cuBLAS handle | 0 bytes | unknown | |" in page
    assert "| a cuDNN handle | OSError: libcudnn.so is not loaded | | |" in page
    assert "throughput decided" not in page


def test_page_has_the_measurements(whole: tuple[int, dict[str, Any], str]) -> None:
    page = docs.text([{**whole[1], "simulated": False}])
    assert "NVIDIA Simulated A16" in page and "580.159.04" in page
    for check in CHECKS:
        assert check.what in page
    for row in ASSUMPTIONS:
        assert f"| {row.sentence} | `{row.check}` | `{row.relies_on}` |" in page
    assert "| A context costs what the estimate says, or less. | confirmed | 300 MiB of an estimated 300 MiB |" in page
    assert "| a second context | 300 MiB | 300 MiB | 0 bytes |" in page
