"""Build and judge tests/shim/stress.c."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.host import BUILD, TREE

FAMILIES = "plain,pitch,managed,array,mipmap,async,pool,vmm,graph,module"
BLOCK = 2 << 20


class Books(NamedTuple):
    """The simulated device's own figures, in bytes."""

    used: int
    peak: int  # the maximum of all containers


def build(directory: Path) -> Path:
    """Compile the program, linked against libcuda.so.1 by name."""
    out = directory / "stress"
    flags = ("-O2", "-Wall", "-Wextra", "-Werror", f"-I{BUILD}/include/cuda")
    driver = next((BUILD / "sim").glob("libcuda.so.*"))
    subprocess.run(["gcc", *flags, "-o", str(out), str(TREE / "tests/shim/stress.c"), str(driver)], check=True)
    return out


def books(device: Path) -> Books:
    """Read the ledger in a separate process: this one may have the simulated driver loaded."""
    command = [sys.executable, str(TREE / "simulator/ledger.py"), str(device), "--format", "json"]
    said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return Books(said["used_bytes"], max(group["peak_bytes"] for group in said["groups"]))


def judge(report: dict[str, Any], seen: Books, limit_bytes: int, survivors: int) -> None:
    """Assert that the limit was reached and never exceeded, and that all reports equal the device's, to the byte."""
    assert report["wrong"] == []
    assert seen.peak <= limit_bytes
    assert limit_bytes - seen.used < BLOCK
    assert report["used"] == [seen.used] * survivors
