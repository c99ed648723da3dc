"""Run the tests of container engines with programs of other releases: make engines ENGINES=DIR.

python -m tools.engines [--record] DIR

Each folder of DIR has the programs of one release, as its archive has them; the tests find them first in PATH:

    dockerd, docker-proxy, docker, docker-buildx, containerd, ...       docker
    crio, pinns                                          CRI-O
    containerd, containerd-shim-runc-v2, ctr             containerd

A program that the folder lacks, such as runc or conmon, is this machine's own; docker 29 needs a newer runc than 1.1.5.
Counts go to build/engines; --record copies them to tests/matrix, from which docs/versions.md is made.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.host import BUILD, TREE
from tests.support.rootfs import run
from tools import matrix

FOLDER = BUILD / "engines"
# Program -> engine in the names of tests. A folder is that of its first program here: docker's also has containerd
ENGINES = {"dockerd": "docker", "crio": "crio", "containerd": "containerd"}
_CHANGED = ("--", ".", ":!tests/matrix")  # the records of the releases before are no change of the tree
FILES = ("engines", "effective_handlers", "node_life")  # of all engines; the others have the engine's name


def of_folder(folder: Path) -> tuple[str, str]:
    """(engine, its version) of a release's programs; ends the command if there is none."""
    for program, engine in ENGINES.items():
        if (folder / program).exists():
            text = subprocess.run([folder / program, "--version"], capture_output=True, text=True, check=True).stdout
            number = re.search(r"\d+\.\d+\.\d+[^\s,]*", text)
            return engine, number[0] if number else "unknown"
    sys.exit(f"gpushare: {folder} has no {', '.join(ENGINES)}: each folder has the programs of one release")


def tests_of(folder: Path, engine: str, version: str) -> dict[str, Any]:
    """Run the engine's tests; return an entry like those of tools/matrix.py."""
    xml = FOLDER / f"{folder.name}.xml"
    xml.unlink(missing_ok=True)
    files = [f"tests/integration/test_{name}.py" for name in FILES]
    files += [str(path.relative_to(TREE)) for path in sorted(TREE.glob(f"tests/integration/test_{engine}*.py"))]
    chosen = f"{engine} and not newest and not trixie"
    words = [sys.executable, "-m", "pytest", "-q", "--junitxml", str(xml), "-k", chosen, *files]
    path = f"{folder.resolve()}:{os.environ['PATH']}"
    code = subprocess.run(words, cwd=TREE, env={**os.environ, "PATH": path}).returncode
    if code not in (0, 1):
        sys.exit(f"gpushare: pytest ended with {code}")
    found = matrix.outcomes(xml)
    commit = run("git", "rev-parse", "--short=8", "HEAD", cwd=TREE).strip()
    entry = {
        "when": time.strftime("%Y-%m-%d"),
        "commit": commit + "+" * bool(run("git", "status", "--porcelain", *_CHANGED, cwd=TREE).strip()),
        **matrix.count([one.result for one in found]),
        "failures": [one.test for one in found if one.result == "failed"],
        "engines": matrix.by_engine(found),
    }
    return {"suite": matrix.this_suite(), "versions": {engine: version}, "parts": {f"{engine} {version}": entry}}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make engines")
    parser.add_argument("--record", action="store_true", help="copy the results to tests/matrix")
    parser.add_argument("folder", type=Path, help="the folder with a folder for each release")
    options = parser.parse_args(argv)
    folders = sorted(path for path in options.folder.iterdir() if path.is_dir()) if options.folder.is_dir() else []
    releases = [(path, *of_folder(path)) for path in folders]
    if not releases:
        parser.error(f"{options.folder} has no folder; ENGINES=DIR, where DIR/NAME has containerd, crio or dockerd")
    FOLDER.mkdir(exist_ok=True)
    failed = 0
    for folder, engine, version in releases:
        matrix.say(f"{engine} {version} of {folder}")
        result = tests_of(folder, engine, version)
        file = FOLDER / f"engines-{engine}-{version}.json"
        file.write_text(json.dumps(result, indent=1) + "\n")
        (entry,) = result["parts"].values()
        matrix.say(f"{engine} {version}: {matrix.summary(entry)}; {file}")
        failed += entry["failed"]
        if options.record:
            shutil.copy(file, matrix.RECORDS)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
