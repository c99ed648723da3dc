"""A program that finds the driver's own libcuda, by an LD_LIBRARY_PATH that is set after the start, is reported."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from simulator.simhost import LIBDIR
from tests.support.host import Node
from tests.support.programs import ENVIRONMENT, PYTHON, words

pytestmark = pytest.mark.usefixtures("pruned")
CUDA = "import ctypes, sys; print(ctypes.CDLL('libcuda.so.1').cuInit(0), flush=True); sys.stdin.read()"


def test_program_with_another_libcuda_is_reported(node: Node, simhost: Path) -> None:
    """A program with the shim, and one with the libcuda that its entry script chose."""
    assert node.cli("refresh").returncode == 0
    chosen = f"{simhost}/{LIBDIR}"
    programs = [
        subprocess.Popen(
            [*words(node, "--memory", "1Gi", "--"), *before, PYTHON, "-c", CUDA],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=ENVIRONMENT,
        )
        for before in ((), ("env", f"LD_LIBRARY_PATH={chosen}"))
    ]
    try:
        for one in programs:
            assert one.stdout is not None and one.stdout.readline() == b"0\n"
        listed = {one["init_pid"]: one["note"] for one in json.loads(node.cli("list", "--format", "json").stdout)}
        assert listed[programs[0].pid] == ""
        assert f"process {programs[1].pid} (" in listed[programs[1].pid] and chosen in listed[programs[1].pid]
        metrics = node.cli("export", "--once").stdout
        assert sorted(line[-3:] for line in metrics.splitlines() if line.startswith("gpushare_unlimited_")) == [
            "0.0",
            "1.0",
        ]
        rows = json.loads(node.cli("doctor", "--format", "json").stdout)
        (row,) = (one for one in rows["checks"] if one["name"] == "processes")
        assert row["result"] == "warn" and chosen in row["detail"]
    finally:
        for one in programs:
            one.communicate()
