"""The release for aarch64, run by qemu-user: the shim with the simulated driver, and the launcher."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.shim import stress_run
from tests.shim.box import GIB, LIBDIR, Box
from tests.support.host import BUILD

EMULATED = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
LIMIT_BYTES, PROCESSES = 4 * GIB, 4


def test_memory_limit_holds_on_aarch64() -> None:
    """As in tests/shim: four processes allocate and free all kinds of memory at one limit, judged by the device's own
    ledger. The release of a dead process's slot is not tested: see robust.c."""
    program, driver = BUILD / "aarch64" / "stress", BUILD / "aarch64" / "sim" / "libcuda.so.1"
    command = [*EMULATED, "-E", f"LD_LIBRARY_PATH={LIBDIR}", program, str(PROCESSES), "1000", "7", stress_run.FAMILIES]
    with Box((LIMIT_BYTES,), shim=BUILD / "shim-release" / "aarch64", driver=driver) as box:
        process = box.popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            line = process.stdout.readline()  # they keep their memory until their input ends
            assert line, process.stderr.read()
            report = json.loads(line)
            assert report["granted"] > 100 and report["refused"] > 10
            stress_run.judge(report, stress_run.books(Path(box.device())), LIMIT_BYTES, PROCESSES)
        finally:
            process.communicate(timeout=60)
        assert process.returncode == 0


@pytest.mark.parametrize("variable", ["PATH=/bin", "GPUSHARE_MEMORY=4Gi"])
def test_launcher_distinguishes_containers_with_a_request(variable: str, tmp_path: Path) -> None:
    """The launcher executes the low-level runtime for a container without a request. For another it needs Python, which
    is missing."""
    (tmp_path / "config.json").write_text(json.dumps({"process": {"env": [variable]}}))
    program = tmp_path / "gpushare-hook"
    program.write_bytes((BUILD / "wheel" / "aarch64" / "gpushare-hook").read_bytes())
    program.chmod(0o755)
    state = {"ociVersion": "1.0.2", "id": "c1", "pid": 1, "status": "creating", "bundle": str(tmp_path)}
    words = [*EMULATED, program, "--config", tmp_path / "none.yaml", "--state", tmp_path / "state", "createRuntime"]
    done = subprocess.run(list(map(str, words)), input=json.dumps(state), capture_output=True, text=True, timeout=60)
    if variable.startswith("GPUSHARE"):
        assert done.returncode != 0 and "gpushare-hook.py" in done.stderr
    else:
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
