"""Build gpushare and run its tests in a root directory with another release of Debian: make matrix SUITE=trixie.

python -m tools.matrix [--folder DIR] [--record] [--list] SUITE|all [PART]...

DIR/SUITE (build/matrix/SUITE) is made with debootstrap once and kept; packaging/bootstrap installs the rest there. The
root has its own mounts, /dev, /run, /tmp, process ids and, during tests, network, all of which end with the run, also
when it is killed. It shares the machine's kernel and cgroups. Each run copies the tree, with changes that are not
committed, to /root/gpushare in the root.

Counts, versions and names of failed tests go to DIR/SUITE.json, where each part replaces its earlier result. The logs
are in DIR/SUITE.logs. --record copies the JSON to tests/matrix, from which docs/versions.md is made. The exit code is 1
if a part has not passed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.host import BUILD, TREE
from tests.support.rootfs import run
from tools import everything

SUITES = ("bookworm", "trixie", "sid")
FOLDER = BUILD / "matrix"
RECORDS = TREE / "tests" / "matrix"
INSIDE = "root/gpushare"  # the tree, below the root
INCLUDED = "ca-certificates,git,make,python3"  # all that CONTRIBUTING.md expects before `make`
_ENTER = Path(__file__).with_name("matrix_enter")
ONLY = os.environ.get("PYTEST_ARGS", "")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CERTIFICATES = "etc/ssl/matrix-certificates.crt"


class Part(NamedTuple):
    name: str
    about: str
    script: str  # for bash, in the tree
    containers: bool = False  # at most one run on this machine has such a part at a time


def _tests(*words: str) -> str:
    """pytest's words, as in make test. An interrupted run must not report the results of an earlier one."""
    return (
        "rm -f build/matrix.xml; build/venv/bin/python -m pytest -q --numprocesses 3 --dist loadscope "
        f"--junitxml build/matrix.xml {' '.join(words)} $PYTEST_ARGS"
    )


# Files whose tests start containers by an engine; the rows of `engine_of`
_ENGINE_FILES = ("engines", "docker*", "podman*", "containerd*", "rootless_*", "systemd*")
ENGINES = tuple(f"tests/integration/test_{name}.py" for name in _ENGINE_FILES)

PARTS = (
    Part("lint", "all linters", "tools/lint"),
    Part("unit", "pure code, golden texts, the limiter, fuzzing",
         _tests("tests/unit tests/golden tests/limiter tests/fuzz")),
    Part("shim", "the shim and the simulator", _tests("tests/shim tests/simulator tests/conformance tests/hardware")),
    Part("engines", "docker, containerd, podman, runc, crun, systemd", _tests(*ENGINES), True),
    Part("e2e", "other end-to-end tests, attacks, commands of the docs",
         _tests("tests/integration tests/security tests/docs", *(f"'--ignore-glob={name}'" for name in ENGINES)), True),
    Part("compilers", "build with every gcc of the suite", "tools/compilers"),
)  # fmt: skip

# Every run does this first
SETUP = """
make --no-print-directory build dist gpu-programs build/.setup-test
packaging/bootstrap compilers
PYTHONPATH=. build/venv/bin/python - <<'END'
from pathlib import Path
from tests.shim import test_real_driver
from tests.support import helm
from tools import newest, nvidia_userland
helm.program("helm")
helm.program("kubectl")
test_real_driver.older_runtime()
newest.unpack(Path("build/newest"))
newest.unpack(Path("build/trixie"), "trixie")
newest.unpack(Path("build/newest-engines"), kind="engines")
newest.unpack(Path("build/trixie-engines"), "trixie", "engines")
for branch in nvidia_userland.branches():
    nvidia_userland.unpack(Path("build", f"userland-{branch}").resolve(), branch)
END
"""

# name -> command that prints the version
VERSIONS = {
    "kernel": "uname -r",
    "gcc": "gcc -dumpfullversion",
    "python": "build/venv/bin/python -c 'import platform; print(platform.python_version())'",
    "libc": "getconf GNU_LIBC_VERSION",
    "systemd": "systemctl --version",
    "docker": "dockerd --version",
    "containerd": "containerd --version",
    "podman": "podman --version",
    "runc": "runc --version",
    "crun": "crun --version",
    "newest-containerd": "build/newest/bin/containerd --version",
    "newest-runc": "build/newest/bin/runc --version",
    "newest-crun": "build/newest/bin/crun --version",
}


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another run that uses {what}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Root:
    """The root of a suite. `more`: what its name has beside the suite; `included`: more packages than essential."""

    def __init__(self, folder: Path, suite: str, more: str = "", included: str = INCLUDED) -> None:
        self.suite, self.path, self.included = suite, folder / f"{suite}{more}", included
        self.tree = self.path / INSIDE
        self.logs = folder / f"{suite}{more}.logs"
        self.result = folder / f"{suite}{more}.json"
        self.lock = folder / f"{suite}{more}.lock"

    def make(self) -> None:
        """Unpack the suite, unless that is done. Packages come from this machine's own mirror."""
        if self.path.exists():
            return
        say(f"making {self.path} with debootstrap")
        new = self.path.with_name(f"{self.path.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        mirror = _mirror()
        with open(self.logs / "debootstrap.log", "wb") as log:
            words = ["debootstrap", "--variant=minbase", f"--include={self.included}", self.suite, str(new), mirror]
            if subprocess.run(words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT).returncode:
                sys.exit(f"gpushare: debootstrap failed: {self.logs}/debootstrap.log")
        sections = "main contrib non-free non-free-firmware"
        (new / "etc/apt/sources.list").write_text(f"deb {mirror} {self.suite} {sections}\n")
        daemons = new / "usr/sbin/policy-rc.d"  # an installed engine must not start
        daemons.write_text("#!/bin/sh\nexit 101\n")
        daemons.chmod(0o755)
        # Such as a proxy, and what this machine accepts of its mirror
        settings = [
            line for line in run("apt-config", "dump").splitlines() if re.match("Acquire::(?!IndexTargets)", line)
        ]
        (new / "etc/apt/apt.conf.d/90machine").write_text("\n".join(settings) + "\n")
        new.rename(self.path)

    def copy_tree(self) -> None:
        """Bring the commit, and files that differ from it. Unchanged files keep their times, so `make` skips them."""
        git = ("git", "-c", "safe.directory=*", "-C", str(self.tree))
        if not (self.tree / ".git").exists():
            self.path.joinpath("root").chmod(0o755)
            run("git", "-c", "safe.directory=*", "clone", "-q", "--no-hardlinks", TREE, self.tree)
        run(*git, "fetch", "-q", TREE, "HEAD")
        run(*git, "checkout", "-q", "--force", "--detach", "FETCH_HEAD")
        run(*git, "clean", "-fdq")
        changed = run("git", "diff", "--name-only", "-z", "HEAD", cwd=TREE)
        added = run("git", "ls-files", "--others", "--exclude-standard", "-z", cwd=TREE)
        for name in filter(None, (changed + added).split("\0")):
            source, target = TREE / name, self.tree / name
            target.unlink(missing_ok=True)
            if source.exists() or source.is_symlink():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
        self.copy_settings()

    def copy_settings(self) -> None:
        """Bring what reaches the network from this machine."""
        for name in ("etc/resolv.conf", "etc/hosts"):
            shutil.copy(f"/{name}", self.path / name)
        certificates = Path("/etc/ssl/certs/ca-certificates.crt")
        if certificates.exists():
            shutil.copy(certificates, self.path / _CERTIFICATES)

    def words(self, script: str, network: bool) -> list[str]:
        """The command that runs `script` inside."""
        kept = [f"{name}={value}" for name, value in os.environ.items() if name.lower().endswith("_proxy")]
        if (self.path / _CERTIFICATES).exists():
            kept += [f"{name}=/{_CERTIFICATES}" for name in ("PIP_CERT", "SSL_CERT_FILE")]
        fixed = ("HOME=/root", f"PATH={_PATH}", "LANG=C.UTF-8", "TERM=dumb", "DEBIAN_FRONTEND=noninteractive")
        args = f"PYTEST_ARGS={ONLY}"
        spaces = ("--mount", "--uts", "--ipc", "--pid", *(() if network else ("--net",)))
        entered = ("setpriv", "--pdeathsig", "KILL", "unshare", *spaces, "--fork", "--kill-child", "bash", str(_ENTER))
        place = f"/{INSIDE}" if self.tree.exists() else "/"
        return [
            *entered,
            str(self.path),
            place,
            "env",
            "-i",
            *fixed,
            *kept,
            args,
            "bash",
            "-euo",
            "pipefail",
            "-c",
            script,
        ]

    def call(self, name: str, script: str, network: bool = False) -> int:
        """Run `script` with its output in the logs; return its exit code."""
        with open(self.logs / f"{name}.log", "wb") as log:
            words = self.words(script, network)
            one = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
            try:
                return one.wait()
            except BaseException:
                one.kill()  # and with it all that runs inside
                one.wait()
                raise

    def ask(self, script: str) -> str:
        done = subprocess.run(self.words(script, False), stdin=subprocess.DEVNULL, capture_output=True, text=True)
        return done.stdout

    def versions(self) -> dict[str, str]:
        """Return the version of each row of VERSIONS that the root has."""
        script = "\n".join(
            f"echo {name} $({words} 2>/dev/null | head -n 1 || true)" for name, words in VERSIONS.items()
        )
        found = {}
        for line in self.ask(script).splitlines():
            name, _, text = line.partition(" ")
            number = re.search(r"\d+(\.\d+)+[^\s,)]*", text)
            found[name] = number[0] if number else ""
        return found


def this_suite() -> str:
    """This machine's release."""
    fields = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    return fields.get("VERSION_CODENAME", "").strip('"')


def _mirror() -> str:
    """This machine's own source of packages."""
    suite = this_suite()
    words = ("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", f"Codename: {suite}")
    found = run(*words).split()
    if not found:
        sys.exit(f"gpushare: apt knows no source of {suite or 'this release'}; run apt-get update")
    return found[0]


class Outcome(NamedTuple):
    test: str  # the file with its folder, and the test's name with parameters
    result: str  # passed, failed or skipped


def outcomes(path: Path) -> list[Outcome]:
    """Read pytest's XML. A test that fails in its teardown, too, is there twice."""
    worst: dict[str, str] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        tags = {child.tag for child in case}
        result = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        if worst.get(name) != "failed":
            worst[name] = result
    return [Outcome(*item) for item in sorted(worst.items())]


def count(results: list[str]) -> dict[str, int]:
    return {name: results.count(name) for name in ("passed", "failed", "skipped")}


def engine_of(test: str) -> tuple[str, str, str] | None:
    """(engine, cgroup driver, way in) of a test; None if it names none.

    The tests' docker, podman and containerd use cgroupfs, except in the tests of systemd's cgroups."""
    file, _, name = test.partition("::")
    parameters = re.findall(r"[a-z]+", name.partition("[")[2])
    newest = "newest-" if "newest" in parameters else ""
    low_level = "crun" if "crun" in parameters else "runc"
    way = next((word for word in ("runtime", "hook", "cdi") if word in parameters), "")
    way = "installer" if "test_node_life" in file else way
    if "test_systemd_cgroups" in file:
        return low_level, "systemd", way
    for engine in ("docker", "containerd", "podman", "crio"):
        if "test_systemd_engines" in file:
            if engine in parameters:
                return f"{engine} with crun" if low_level == "crun" else engine, "systemd", way
        elif engine in file or (engine in parameters and re.search("test_(engines|node_life)", file)):
            rootless = " rootless" if "rootless" in file else ""
            with_crun = " with crun" if low_level == "crun" else ""
            return (
                newest + engine + rootless + with_crun,
                "cgroupfs",
                way or ("runtime" if engine == "docker" else "hook, runtime"),
            )
    return (newest + low_level, "cgroupfs", way) if "test_engines" in file else None


def by_engine(found: list[Outcome]) -> list[dict[str, Any]]:
    """One row for each engine, cgroup driver and way, with its counts."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for test, result in found:
        row = engine_of(test)
        if row:
            rows.setdefault(row, []).append(result)
    return [
        {"engine": engine, "cgroups": driver, "way": way, **count(results)}
        for (engine, driver, way), results in sorted(rows.items())
    ]


def run_part(root: Root, part: Part) -> dict[str, Any]:
    """Return the part's entry in the JSON."""
    began = time.monotonic()
    entry: dict[str, Any] = {"when": time.strftime("%Y-%m-%d")}
    with locked(Path("/run/lock/gpushare-matrix.lock"), "containers") if part.containers else contextlib.nullcontext():
        code = root.call(part.name, part.script)
    entry["seconds"] = round(time.monotonic() - began)
    if ONLY:
        entry["only"] = ONLY
    xml = root.tree / "build/matrix.xml"
    if "matrix.xml" not in part.script:
        entry.update(count(["failed" if code else "passed"]))
    elif code in (0, 1) and xml.exists():
        found = outcomes(xml)
        entry.update(count([result for _, result in found]))
        entry["failures"] = [test for test, result in found if result == "failed"]
        if part.name == "engines":
            entry["engines"] = by_engine(found)
    else:
        entry["broken"] = f"exit code {code}"
    return entry


def summary(entry: dict[str, Any]) -> str:
    return entry.get("broken") or ", ".join(
        f"{entry[name]} {name}" for name in ("passed", "failed", "skipped") if entry[name]
    )


def run_parts(root: Root, parts: list[Part]) -> int:
    root.logs.mkdir(parents=True, exist_ok=True)
    failed = []
    result: dict[str, Any] = json.loads(root.result.read_text()) if root.result.exists() else {}
    with locked(root.lock, str(root.path)):
        root.make()
        root.copy_tree()
        say(f"{root.suite}: installing and building; {root.logs}/setup.log")
        if root.call("setup", SETUP, network=True):
            say(f"{root.suite}: the build failed; {root.logs}/setup.log")
            return 1
        commit = run("git", "rev-parse", "--short=8", "HEAD", cwd=TREE).strip()
        dirty = run("git", "status", "--porcelain", cwd=TREE).strip()
        result.update(suite=root.suite, versions=root.versions())
        for number, part in enumerate(parts, 1):
            say(f"{number}/{len(parts)}  {root.suite} {part.name}: {part.about}; {root.logs}/{part.name}.log")
            entry = run_part(root, part)
            entry["commit"] = commit + "+" * bool(dirty)
            result.setdefault("parts", {})[part.name] = entry
            root.result.write_text(json.dumps(result, indent=1) + "\n")
            say(f"{number}/{len(parts)}  {root.suite} {part.name}: {summary(entry)}")
            if entry.get("failed", 1):
                failed.append(part.name)
    print(f"\n{root.result}")
    if failed:
        print(f"What has not passed, again: make matrix SUITE={root.suite} PARTS={shlex.quote(' '.join(failed))}")
    return int(bool(failed))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make matrix")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where roots and results are kept")
    parser.add_argument("--record", action="store_true", help="copy the results to tests/matrix")
    parser.add_argument("--list", action="store_true", help="print the names of the parts")
    parser.add_argument("suite", nargs="?", metavar="SUITE", default="all")
    parser.add_argument("parts", nargs="*", metavar="PART")
    options = parser.parse_args(argv)
    if options.list:
        for part in PARTS:
            print(f"{part.name:14} {part.about}")
        return 0
    if options.suite not in (*SUITES, "all"):
        parser.error(f"SUITE={options.suite!r}: there are {' '.join(SUITES)}, and all")
    parts = everything.chosen(parser, options.parts, {part.name: part for part in PARTS})
    codes = []
    try:
        for suite in SUITES if options.suite == "all" else (options.suite,):
            root = Root(options.folder.resolve(), suite)
            codes.append(run_parts(root, parts))
            if options.record and root.result.exists():
                RECORDS.mkdir(exist_ok=True)
                shutil.copy(root.result, RECORDS)
    except KeyboardInterrupt:
        say("interrupted; the root is kept")
        return 130
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
