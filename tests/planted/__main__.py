"""Plant faults in a copy of the tree, one after the other, and run the test that must notice each: `make planted`.

    python -m tests.planted [NAME...] [--list] [--format text|json]

A NAME is a fault, or the beginning of a file's path such as shim/. The copy is build/planted. Results of a fault:

    caught            the test failed
    survived          the test passed: it must be made stricter
    fails anyway      the test fails without the fault, so it shows nothing
    does not apply    the text to replace is not there, or not once
    does not build    the fault breaks the build

Exit code: 0 if every fault is caught, otherwise 1.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

from tests.planted import TREE, Fault, faults

COPY = TREE / "build" / "planted"
# Folders of build/ that the tests only read, and what the copy has no use for
LINKED = re.compile(r"venv|include|zstd|userland-\d+|newest|trixie|helm|kubectl")
LEFT_OUT = re.compile(r"planted|matrix|plugin|test-all|fuzz|site|.*_cache|.*\.lock|\.tests-.*|shim-(?!asan).*")
SECONDS = 300  # of one test
IN_PROCESS = ("tests/unit/", "tests/golden/", "tests/integration/test_apply")  # their tests import Python code


def make_copy() -> None:
    """Copy the files of the working tree, and what is built of them. Programs in build/ name their tree: make them
    again."""
    if COPY.exists():
        shutil.rmtree(COPY)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=TREE,
        stdout=subprocess.PIPE,
        check=True,
    )
    for name in os.fsdecode(listed.stdout).split("\0"):
        if name and os.path.lexists(TREE / name):
            (COPY / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(TREE / name, COPY / name, follow_symlinks=False)
    (COPY / "build").mkdir()
    for path in (TREE / "build").iterdir():
        to = COPY / "build" / path.name
        if LINKED.fullmatch(path.name):
            to.symlink_to(path)
        elif not LEFT_OUT.fullmatch(path.name):
            subprocess.run(["cp", "-a", "--reflink=auto", str(path), str(to)], check=True)
    for name in ("bin/gpushare", "libexec/gpushare-hook", "libexec/gpushare-runtime"):
        (COPY / "build" / name).unlink(missing_ok=True)


def build(snapshot: bool) -> str:
    """Build the copy; return the errors."""
    command = ["make", "-s", "build", "gpu-programs", f"SNAPSHOT={'yes' if snapshot else 'no'}"]
    done = subprocess.run(command, cwd=COPY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout if done.returncode else ""


def run(tests: Sequence[str]) -> tuple[int, str]:
    """Run these tests in the copy; return the exit code and the output."""
    python = COPY / "build" / "venv" / "bin" / "python"
    command = [str(python), "-m", "pytest", "-q", "--no-header", "-rfE", *tests]
    environment = {**os.environ, "PYTHONPATH": f"{COPY}/hook:{COPY}", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=COPY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS * len(tests),
        )
    except subprocess.TimeoutExpired as error:
        return 1, f"{error}\n"
    return done.returncode, done.stdout


def needs_build(fault: Fault) -> bool:
    """Whether the fault is in something that is built, and its test runs that."""
    python = fault.file.startswith("hook/gpushare/") and fault.test.startswith(IN_PROCESS)
    return fault.file.startswith(("hook/", "shim/")) and not python


def try_one(fault: Fault) -> tuple[str, str]:
    """Return the result of a fault, and the output."""
    path = COPY / fault.file
    before = path.read_text()
    try:
        after = fault.planted_in(before)
    except ValueError as error:
        return "does not apply", str(error)
    try:
        path.write_text(after)
        shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)
        errors = build(fault.file.startswith("hook/snapshot/")) if needs_build(fault) else ""
        if errors:
            return "does not build", errors
        code, output = run([fault.test])
        return {0: "survived", 1: "caught"}.get(code, "does not build"), output
    finally:
        path.write_text(before)
        shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)


def failing(chosen: Sequence[Fault]) -> set[str]:
    """Return the tests that fail without a fault."""
    tests = sorted({fault.test for fault in chosen})
    code, output = run(tests)
    if code > 1:
        sys.exit(f"{output}\nplanted: the tests of faults.yaml cannot be run")
    return {test for test in tests if re.search(rf"^(FAILED|ERROR) {re.escape(test)}", output, re.MULTILINE)}


def selected(names: Sequence[str]) -> list[Fault]:
    every = faults()
    unknown = [name for name in names if not any(name == one.name or one.file.startswith(name) for one in every)]
    if unknown:
        sys.exit(f"planted: no fault {unknown[0]!r}; --list shows the names")
    return [one for one in every if not names or any(name == one.name or one.file.startswith(name) for name in names)]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description="Plant faults that tests must notice.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a fault, or the beginning of a path; default: all")
    parser.add_argument("--list", action="store_true", help="list the faults and plant none")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    options = parser.parse_args(arguments)
    chosen = selected(options.names)
    if options.list:
        for one in chosen:
            print(f"{one.name}: {one.breaks}\n    {one.file}\n    {one.test}")
        return 0
    progress = sys.stderr if options.format == "json" else sys.stdout
    print(f"planted: copying the tree to {COPY.relative_to(TREE)}, building it", file=progress, flush=True)
    make_copy()
    errors = build(snapshot=False)
    if errors:
        sys.exit(f"{errors}\nplanted: the copy of the tree cannot be built")
    print(f"planted: running the {len({one.test for one in chosen})} tests without a fault", file=progress, flush=True)
    anyway = failing(chosen)
    results: list[dict[str, object]] = []
    for number, one in enumerate(chosen, 1):
        begun = time.monotonic()
        result, output = ("fails anyway", "") if one.test in anyway else try_one(one)
        seconds = round(time.monotonic() - begun, 1)
        results.append({"name": one.name, "file": one.file, "test": one.test, "result": result, "seconds": seconds})
        print(f"{number:3}/{len(chosen)}  {result:14} {one.name}  ({seconds} s)", file=progress, flush=True)
        if result != "caught":
            print("\n".join(output.splitlines()[-15:]), file=progress, flush=True)
    counts = collections.Counter(str(one["result"]) for one in results)
    if options.format == "json":
        print(json.dumps({"faults": results, "results": counts}, indent=1))
    print("planted: " + ", ".join(f"{count} {result}" for result, count in counts.items()), file=progress)
    return 0 if set(counts) <= {"caught"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
