"""Time the first steps of a new user, as README.md has them: make newcomer.

python -m tools.newcomer [--suite NAME]... [--no-clone] [REPOSITORY]

1. A clone of REPOSITORY (this tree): `make demo`, and a docker container with a share in the playground.
2. A clean Debian 12 and a clean Debian 13 that have docker: build/packages' .deb, containers with a share, one of them
   by its name, another limit for it, and the removal. Before it, 50 starts are refused, and short IDs of the running
   containers must still work. At the end docker, the files, mounts and processes must be as before.

The commands of the second part, and what `gpushare` prints, come from README.md; IMAGE is an image with a program that
keeps the GPU busy. The GPU is simulated, so the configuration names its driver; this is not timed, and neither are
debootstrap and apt-get. The roots stay in build/debian, so later runs are quick.

Prints each step with its time, then a table, and writes build/newcomer.json. The exit code is 1 if a command fails, if
it prints a line that is not expected, if something is left, or if the steps of one place take longer than five minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from demo.playground import IMAGE, IMPORT_OPTIONS, image
from simulator.simhost import make_simhost
from tests.docs.blocks import Command, commands
from tests.docs.session import agrees
from tests.support.debian import DOCKER, RELEASES, Debian, Docker
from tests.support.engines.image import make_tar
from tests.support.host import BUILD, TREE, enter_private_mounts
from tests.support.rootfs import run

RESULT = BUILD / "newcomer.json"
GIB = 1 << 30
LIMIT_S = 300
FILES = ("/etc", "/usr", "/opt", "/var/lib/gpushare", "/var/log")
# Files that dpkg and docker write at any time
VOLATILE = re.compile(r"/(etc/docker/key\.json|var/log/(dpkg|dockerd)\.log)")
PLAYGROUND = f"""
gpushare runtime configure docker
systemctl reload docker
docker run --rm --runtime gpushare -e GPUSHARE_MEMORY=4Gi {IMAGE} nvidia-smi | grep "/    4096MiB"
"""
REFUSED = 50
# A start that is refused; prints the ID of its container
REFUSE = f"""
! docker run --rm --cidfile /tmp/id --runtime gpushare -e GPUSHARE_MEMORY=17Gi {IMAGE} true || exit 1
echo; cat /tmp/id; rm /tmp/id
"""


class Step(NamedTuple):
    where: str
    command: str
    seconds: float


class Expected(NamedTuple):
    """A command of README.md, by its beginning. Each line that it prints must match one of the patterns, and each
    pattern a line. A command whose output README.md shows has none: its output must be that one."""

    begins: str
    lines: tuple[str, ...] = ()


ID = r"[0-9a-f]{64}"
FACT = "bundle|cgroup|init pid|dialect|driver|user"
INSTALL = (
    Expected("dpkg -i", (
        r"Selecting previously unselected package gpushare\.",
        r"\(Reading database \.\.\. .*\d+ files and directories currently installed\.\)",
        r"Preparing to unpack \S*/gpushare_\S+ \.\.\.",
        r"Unpacking gpushare \(\S+\) \.\.\.",
        r"Setting up gpushare \(\S+\) \.\.\.",
        r"gpushare is installed and changed no engine\. Next: gpushare doctor, .*",
    )),
    Expected("gpushare runtime configure docker --profile", (
        r"change /etc/gpushare/config\.yaml",
        r"(create|change) /etc/docker/daemon\.json",
        r"gpushare: now run: systemctl reload docker",
    )),
)  # fmt: skip
USE = (
    Expected("docker run --rm --runtime gpushare -e GPUSHARE_MEMORY=4Gi IMAGE", (
        r"NVIDIA-SMI \(simulated\) .*", r"\|   0 .* 0MiB / +4096MiB \|   0% \|")),
    Expected("docker run -d --name train", (ID,)),
    Expected("docker run -d --name serve", (ID,)),
    Expected("gpushare list"),
    Expected("gpushare inspect serve", (
        rf"id +{ID}",
        r"name +serve",
        r"state +running",
        r"age +\d+s",
        rf"({FACT}) +\S.*",
        r"SLOT  .*|",
        r"   0       0 .*  4 GiB        0 .* of 30% .*",
        r"   0 .* s  .* s .* h .*",
        r" *PID  IN CONTAINER +SLOT 0",
        r" *\d+ +\d+  +\d.*B",
    )),
    Expected("gpushare devices"),
    Expected("gpushare limit set serve"),
)  # fmt: skip
REMOVE = (
    Expected("docker rm --force train serve", (r"train", r"serve")),
    Expected("dpkg --purge gpushare", (
        r"\(Reading database \.\.\. .*\d+ files and directories currently installed\.\)",
        r"Removing gpushare \(\S+\) \.\.\.",
        r"Purging configuration files for gpushare \(\S+\) \.\.\.",
        r"(remove|change) /etc/docker/daemon\.json",
        r"unmount /run/gpushare",
        r"gpushare: now run: systemctl restart docker",
    )),
    Expected("systemctl restart docker"),
)  # fmt: skip


class Trouble(Exception):
    """A command of README.md does not do what the page promises."""


def find(begins: str) -> Command:
    """Return the first command of README.md that begins so, in a block or in a sentence."""
    text = (TREE / "README.md").read_text()
    inline = [Command("README.md", 0, one, (), False) for one in re.findall(r"`([^`\n]+)`", text)]
    found = [one for one in (*commands("README.md"), *inline) if one.text.startswith(begins)]
    if not found:
        raise Trouble(f"README.md has no command that begins with {begins!r}")
    return found[0]


def unexpected(output: str, lines: tuple[str, ...]) -> list[str]:
    """Return what is wrong with the output: lines that match no pattern, and patterns without a line."""
    printed = output.splitlines()
    wrong = [f"an unexpected line: {one}" for one in printed if not any(re.fullmatch(rule, one) for rule in lines)]
    return wrong + [
        f"no line that matches {rule}" for rule in lines if not any(re.fullmatch(rule, one) for one in printed)
    ]


def shortest(one: str, ids: list[str]) -> str:
    """Return the shortest beginning of an ID that no other ID has."""
    return next(one[:end] for end in range(1, len(one) + 1) if sum(other.startswith(one[:end]) for other in ids) == 1)


class Watch:
    """Runs steps, prints a line for each, and remembers their times."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def step(self, where: str, command: str, action: Callable[[], str]) -> str:
        began = time.monotonic()
        output = action()
        self.steps.append(Step(where, command, round(time.monotonic() - began, 2)))
        print(f"{self.steps[-1].seconds:8.1f} s  {where}: {command}", flush=True)
        return output

    def totals(self) -> dict[str, float]:
        """Place -> seconds of its steps."""
        found: dict[str, float] = {}
        for one in self.steps:
            found[one.where] = round(found.get(one.where, 0.0) + one.seconds, 2)
        return found

    def seconds(self, where: str, until: str) -> float:
        """Return the time of the steps of a place, up to the first one that begins with `until`."""
        mine = [one for one in self.steps if one.where == where]
        end = next((at for at, one in enumerate(mine, 1) if one.command.startswith(until)), len(mine))
        return round(sum(one.seconds for one in mine[:end]), 2)


def output_of(*words: str, folder: Path) -> str:
    done = subprocess.run(words, cwd=folder, stdin=subprocess.DEVNULL, stdout=-1, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise Trouble(f"{shlex.join(words)}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def in_a_clone(watch: Watch, repository: str, work: Path) -> None:
    clone, where = work / "gpushare", "a clone"
    watch.step(where, "git clone", lambda: output_of("git", "clone", "-q", repository, str(clone), folder=work))
    watch.step(where, "make demo", lambda: output_of("make", "demo", folder=clone))
    output_of("packaging/bootstrap", "playground", folder=clone)
    words = ("build/venv/bin/python", "-m", "demo.playground", "bash", "-eo", "pipefail", "-c", PLAYGROUND)
    watch.step(where, "docker run --runtime gpushare in the playground", lambda: output_of(*words, folder=clone))
    shutil.rmtree(clone)


class Trial:
    """README.md on a clean Debian with docker."""

    def __init__(self, watch: Watch, debian: Debian) -> None:
        self.watch, self.debian, self.where = watch, debian, f"Debian {RELEASES[debian.suite]}"

    def type(self, wanted: Expected) -> None:
        """Type a command of README.md into the Debian's shell, and compare what it prints."""
        command = find(wanted.begins)
        here = re.sub(r" IMAGE\b", f" {IMAGE}", command.text)
        output = self.watch.step(self.where, command.text, lambda: self.shell(here))
        if command.shown:
            right = agrees(output.rstrip("\n"), command.output, sizes=False)
            wrong = [] if right else ["not what README.md shows:", *command.output]
        else:
            wrong = unexpected(output, wanted.lines)
        if wrong:
            raise Trouble("\n".join((f"{self.where}: {command.text} printed", output, *wrong)))

    def shell(self, command: str) -> str:
        done = self.debian.call("bash", "-c", f"cd /root\n{{ {command}\n}} 2>&1", timeout_s=LIMIT_S)
        if done.returncode:
            raise Trouble(f"{self.where}: {command}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def facts(self) -> dict[str, Any]:
        """Return what must be as before at the end."""
        info = json.loads(self.shell("docker info --format '{{json .}}'"))
        mounts = [line.split(" ")[4] for line in self.shell("cat /proc/self/mountinfo").splitlines()]
        programs = self.shell("cat /proc/[0-9]*/comm 2>/dev/null || true").split()
        files = self.debian.files(*FILES)
        return {
            "docker": {name: info[name] for name in ("Runtimes", "DefaultRuntime", "ContainersRunning", "Containers")},
            "file": {path: content for path, content in files.items() if not VOLATILE.fullmatch(path)},
            "file of /run": dict.fromkeys(self.shell("find /run -path '*gpushare*'").splitlines()),
            "mount": dict.fromkeys(mounts),
            "program": dict.fromkeys(name for name in programs if "gpushare" in name or name == "busy"),
        }

    def prepare(self, deb: Path, archive: Path) -> None:
        packages = self.debian.path / "root/build/packages"
        packages.mkdir(parents=True)
        shutil.copy(deb, packages)
        make_simhost(self.debian.path / "srv/driver", memory_bytes=16 * GIB)
        shutil.copy(archive, self.debian.path / "srv/image.tar")
        self.shell(f"docker import {shlex.join(IMPORT_OPTIONS)} /srv/image.tar {IMAGE}")

    def name_driver(self) -> None:
        """Name the simulated driver, which is not where a real one is."""
        config = self.debian.path / "etc/gpushare/config.yaml"
        value = yaml.safe_load(config.read_text())
        value.setdefault("driver", {})["root"] = "/srv/driver"
        config.write_text(yaml.safe_dump(value, sort_keys=False))

    def refuse(self) -> None:
        """Refuse many starts. The IDs of the running containers must still work, also if they are as short as the other
        running containers allow."""
        refused = [self.shell(REFUSE).splitlines()[-1] for _ in range(REFUSED)]
        for one in (refused[0], refused[-1]):
            reason = json.loads(self.shell(f"gpushare inspect {one} -o json"))["last_refusal"]
            if "17 GiB" not in str(reason):
                raise Trouble(f"{self.where}: the start of {one} was refused for another reason: {reason}")
        running = self.shell("docker ps --no-trunc --quiet").split()
        for one in running:
            for short in (one[:12], shortest(one, running)):
                found = json.loads(self.shell(f"gpushare inspect {short} -o json"))["id"]
                if found != one:
                    raise Trouble(f"{self.where}: gpushare inspect {short} must show {one}, not {found}")
        print(f"{'':8}    {self.where}: after {REFUSED} refused starts, short IDs still work", flush=True)

    def compare(self, before: dict[str, Any]) -> None:
        after = self.facts()
        wrong = [
            f"the {kind} {name} is not as before"
            for kind, was in before.items()
            for name in sorted(was.keys() | after[kind].keys())
            if was.get(name, ...) != after[kind].get(name, ...)
        ]
        if wrong:
            raise Trouble("\n".join((f"{self.where}: after the removal", *wrong)))

    def all(self) -> None:
        before = self.facts()
        for one in INSTALL:
            self.type(one)
            if one.begins.startswith("gpushare runtime"):
                self.name_driver()
        for one in USE:
            self.type(one)
        self.refuse()
        for one in REMOVE:
            self.type(one)
        self.compare(before)
        self.shell(f"docker run --rm {IMAGE} true")


def on_debian(watch: Watch, suite: str, deb: Path, archive: Path, work: Path) -> None:
    with Debian(suite, "docker", DOCKER[suite], work) as debian, Docker(debian):
        trial = Trial(watch, debian)
        trial.prepare(deb, archive)
        trial.all()


def table(steps: list[Step]) -> str:
    """Return the seconds of each step, and their sum at each place."""
    lines = [f"{'seconds':>8} {'total':>7}  {'where':10} command"]
    total, place = 0.0, ""
    for one in steps:
        total = one.seconds + (total if one.where == place else 0)
        place = one.where
        lines.append(f"{one.seconds:8.1f} {total:7.1f}  {one.where:10} {one.command}")
    return "\n".join(lines) + "\n"


def result(watch: Watch, suites: list[str]) -> dict[str, Any]:
    named = {suite: watch.seconds(f"Debian {RELEASES[suite]}", "gpushare inspect") for suite in suites}
    return {
        "when": time.strftime("%Y-%m-%d"),
        "commit": run("git", "rev-parse", "--short=8", "HEAD", cwd=TREE).strip(),
        "processors": os.cpu_count(),
        "share_by_name_s": named,
        "total_s": watch.totals(),
        "steps": [one._asdict() for one in watch.steps],
    }


def the_package() -> Path:
    found = list((BUILD / "packages").glob("gpushare_*_amd64.deb"))
    if len(found) != 1:
        raise Trouble(f"{BUILD}/packages has {len(found)} files gpushare_*_amd64.deb, and one is needed: make packages")
    return found[0]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make newcomer", epilog='for make: NEWCOMER_ARGS="--suite trixie"')
    parser.add_argument("--suite", action="append", choices=list(RELEASES), help="only this release of Debian")
    parser.add_argument("--no-clone", action="store_true", help="leave out the first part")
    parser.add_argument("repository", nargs="?", default=str(TREE), help="what is cloned (this tree)")
    options = parser.parse_args(argv)
    suites = options.suite or list(RELEASES)
    watch = Watch()
    try:
        deb = the_package()
        enter_private_mounts()
        with tempfile.TemporaryDirectory(prefix="gs-") as folder:
            work = Path(folder)
            if not options.no_clone:
                in_a_clone(watch, options.repository, work)
            archive = make_tar(image(work / "image"), work / "image.tar")
            for suite in suites:
                on_debian(watch, suite, deb, archive, work / suite)
    except KeyboardInterrupt:
        return 130
    except (AssertionError, RuntimeError, OSError, subprocess.SubprocessError, Trouble) as error:
        print(f"newcomer: {error}", file=sys.stderr)
        return 1
    found = result(watch, suites)
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\n{table(watch.steps)}\n{RESULT.relative_to(TREE)}")
    late = {place: seconds for place, seconds in found["total_s"].items() if seconds > LIMIT_S}
    for place, seconds in late.items():
        print(f"newcomer: {place} took {seconds:.0f} s, and at most {LIMIT_S} s are promised", file=sys.stderr)
    return int(bool(late))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
