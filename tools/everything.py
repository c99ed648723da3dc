"""Run every test in its long form, for hours: make test-all.

python -m tools.everything [--list] [PART]...

Each part is a command whose output goes to build/test-all/<part>.log. A line reports when the part starts and how it
ends. A failing part does not stop the others. A summary at the end (also in build/test-all/summary) contains the
command that reruns the parts that did not pass; the exit code is 1 if there are any. `kills` continues where an earlier
run was interrupted.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple, TypeVar

from tests.support.host import BUILD, TREE

LOGS = BUILD / "test-all"
FUZZ_S = 600  # per target
RACES = 200  # starts of each race per way to start a container; a test may take 5 s for each
TSAN_S = 600
SOAK_MINUTES = 10


class Part(NamedTuple):
    name: str
    about: str
    command: tuple[str, ...]
    env: dict[str, str] = {}


def _make(*words: str) -> tuple[str, ...]:
    return ("make", "--no-print-directory", *words)


def _attacks(name: str, runtime: str) -> Part:
    about = f"every attack with {runtime}, and with the engines of its test; each race for {RACES} starts"
    arguments = f"--runtime {runtime} --timeout {RACES * 5}"
    return Part(name, about, _make("test-attacks", f"ATTACK_ARGS={arguments}"), {"GPUSHARE_RACES": str(RACES)})


T = TypeVar("T")

PARTS = (
    Part("test", "every test of make test, also its long forms, with every NRI test under every engine",
         _make("test", "PYTEST_ARGS=-m ''"), {"GPUSHARE_NRI_ENGINES": "all"}),
    _attacks("attacks", "runc"),
    _attacks("attacks-crun", "crun"),
    Part("dist", "end-to-end tests with the programs of the bundle", _make("test-dist")),
    Part("kills", "kill -9 at every point", _make("test-kills")),
    Part("clients", "clients of the driver API from the package index", _make("test-clients")),
    Part("recipes", "Slurm, JupyterHub and docker with CDI in clean Debian systems", _make("test-recipes")),
    Part("newcomer", "README.md in clean Debian systems", _make("newcomer")),
    Part("asan", "the shim under AddressSanitizer and UBSan", _make("test-asan")),
    Part("tsan", f"the shim under ThreadSanitizer, {TSAN_S} s", _make("test-tsan", f"SECONDS={TSAN_S}")),
    Part("fuzz", f"every fuzz target, {FUZZ_S} s each", _make("fuzz", f"SECONDS={FUZZ_S}")),
    Part("models", "limits and the simulator itself with each GPU model", _make("test-models")),
    Part("aarch64", "the snapshot for aarch64 under qemu-user", _make("test-aarch64")),
    Part("elsewhere", "tests from clones in other directories", _make("test-elsewhere")),
    Part("matrix", "lint and tests in roots of three releases of Debian", _make("matrix")),
    Part("matrix-vm", "engines and units of Debian sid in a virtual machine", _make("matrix-vm")),
    Part("matrix-vm-v1", "device rules of cgroup v1 in a virtual machine of Debian 12",
         _make("matrix-vm", "SUITE=bookworm", "CGROUP=1")),
    Part("soak", f"{SOAK_MINUTES} minutes of starts and kills", _make("soak", f"MINUTES={SOAK_MINUTES}")),
)  # fmt: skip


def log_of(part: Part) -> Path:
    return LOGS / f"{part.name}.log"


def last_words(path: Path) -> str:
    """Return the last informative line of a log."""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    wanted = [line for line in lines if not line.startswith("make")]
    return wanted[-1][:160] if wanted else ""


def run(part: Part) -> int:
    """Run a part in its own process group, which an interruption of this program stops too. Return the exit code."""
    with open(log_of(part), "wb") as log:
        one = subprocess.Popen(
            part.command,
            cwd=TREE,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **part.env},
            start_new_session=True,
        )
        try:
            return one.wait()
        except BaseException:
            os.killpg(one.pid, signal.SIGINT)
            one.wait()
            raise


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def run_all(parts: list[Part]) -> int:
    LOGS.mkdir(parents=True, exist_ok=True)
    results: dict[str, tuple[int, float]] = {}
    try:
        for number, part in enumerate(parts, 1):
            say(f"{number}/{len(parts)}  {part.name}: {part.about}; build/test-all/{part.name}.log")
            began = time.monotonic()
            code = run(part)
            results[part.name] = code, time.monotonic() - began
            say(f"{number}/{len(parts)}  {part.name}: {last_words(log_of(part)) if code else 'passed'}")
    except KeyboardInterrupt:
        say("interrupted")
    (LOGS / "summary").write_text(summary(parts, results))
    print(f"\n{summary(parts, results)}", end="")
    return int(any(results.get(part.name, (-1,))[0] for part in parts))


def summary(parts: list[Part], results: dict[str, tuple[int, float]]) -> str:
    """Return a line for each part, and the command that reruns the parts that did not pass.

    `results`: (exit code, seconds).
    """
    lines = []
    again = []
    for part in parts:
        code, seconds = results.get(part.name, (-1, 0.0))
        outcome = "passed" if code == 0 else "FAILED" if part.name in results else "not run"
        lines.append(f"{part.name:14} {outcome:8} {seconds / 60:6.1f} min  {part.about}")
        again += [part.name] if code else []
    if again:
        lines += ["", f"What has not passed, again: make test-all PARTS={shlex.quote(' '.join(again))}"]
    return "\n".join(lines) + "\n"


def chosen(parser: argparse.ArgumentParser, names: list[str], parts: dict[str, T]) -> list[T]:
    """Return the parts of these names, or all parts. Exit with a message if a name is wrong."""
    unknown = [name for name in names if name not in parts]
    if unknown:
        parser.error(f"PARTS={' '.join(names)!r}: no part {unknown[0]!r}; there are {' '.join(parts)}")
    return [parts[name] for name in names] or list(parts.values())


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make test-all")
    parser.add_argument("--list", action="store_true", help="print the names of the parts")
    parser.add_argument("parts", nargs="*", metavar="PART")
    options = parser.parse_args(argv)
    if options.list:
        for part in PARTS:
            print(f"{part.name:14} {part.about}")
        return 0
    return run_all(chosen(parser, options.parts, {part.name: part for part in PARTS}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
