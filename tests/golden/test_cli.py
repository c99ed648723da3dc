"""The output of every command: a table in a pipe and on a terminal of 100 columns, JSON, and failures.

GOLDEN_WRITE=1 rewrites tests/golden/cli; read the diff. A file has command lines, each followed by its output.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpushare import doctor
from gpushare.allocation import backends, reservation
from gpushare.allocation.backends.mps import control as mps_control
from gpushare.allocation.backends.mps import daemon as mps_daemon
from gpushare.allocation.backends.mps import state as mps
from gpushare.allocation.backends.mps import status as mps_status
from gpushare.cli import cdi as cli_cdi
from gpushare.cli import node as cli_node
from gpushare.cli import runtime, sample, topscreen
from gpushare.cli.options import Paths
from gpushare.config import node
from gpushare.core.errors import CapacityError, DeviceError
from gpushare.doctor import FAIL, OK, SKIP, WARN, Result
from gpushare.gpu import driverfiles, nvml_usage
from gpushare.monitor import overuse
from gpushare.state import leases, log
from gpushare.system import procs

from tests.unit import pure
from tests.unit.clihost import GIB, LONG, MIB, charge, cli, compute, frozen, init, start, state

__all__ = ["cli", "frozen", "init", "start", "state"]  # fixtures
FOLDER = Path(__file__).parent / "cli"
NOW = 1_800_000_000.0  # unix seconds
PID = 4711
COLUMNS = 100

# name of the file -> command lines; "$" before a line: on a terminal
CASES = {
    "list": [
        *("list", "$ list", "list --format json", "list --format xml", "ls -q", "ps --no-trunc --filter name=train"),
        *("list -f status=none", "$ list -f status=none", "list -q -o json", "list --filter train"),
    ],
    "status": ["status", "$ status", "status -o json", "status now"],
    "help": ["help", "help limit set", "help nothing"],
    "top": ["top --once", "$ top --once --sort name", "top --once --format json", "top --interval 0"],
    "export": [
        *("export --once", "export --port 70000", "export --listen nowhere", "export --interval 0"),
        "export --socket /proc/none",
    ],
    "agent": ["agent --interval 0"],
    "inspect": [
        "inspect 0123",
        "$ inspect 0123",
        "inspect 0123 --format json",
        "inspect refused",
        "inspect absent",
        "inspect train",
    ],
    "limit": [
        *("limit show 0123", "$ limit show web-1", "limit show web-1 --format json", "limit show absent"),
        *("limit set 0123 --memory 2Gi --compute 40 --dry-run", "limit set 0123 --memory 2Gi --dry-run --format json"),
        *("limit set 0123", "limit set 0123 --memory 4Gy", "limit set web-1 --device 7 --memory 1Gi"),
        *("pause 0123", "list", "pause 0123", "resume 0123 --format json", "pause dead"),
        "suspend 0123",
    ],
    "usage": [
        *("usage", "$ usage --since 2h --by namespace", "usage --format json", "usage --format csv --by image"),
        *("usage --since tomorrow", "usage --by pod", "usage --format yaml"),
    ],
    "devices": ["devices", "$ devices", "devices --format json", "devices --what"],
    "prune": ["prune --dry-run", "$ prune --dry-run", "prune --dry-run --format json", "prune web-1"],
    "refresh": ["refresh", "$ refresh", "refresh --format json", "refresh now"],
    "doctor": ["doctor", "$ doctor", "doctor --format json", "doctor me"],
    "config": [
        *("config show", "$ config show", "config show --format json"),
        *(
            "config check",
            "config check --format json",
            "config check BAD",
            "config check BAD --format json",
            "config show /none.yaml",
        ),
    ],
    "runtime": [
        *("runtime status --root ROOT", "$ runtime status --root ROOT", "runtime status --root ROOT --format json"),
        *(
            "runtime configure docker --root ROOT --dry-run",
            "runtime configure docker --root ROOT --dry-run --format json",
        ),
        *("runtime configure lxc", "runtime configure --undo"),
    ],
    "labels": ["labels --dry-run", "labels --dry-run --format json", "labels --output relative/../x --format yaml"],
    "cdi": [
        *("cdi generate", "cdi generate --format json", "cdi generate --format table"),
        *("cdi generate --output x.txt", "cdi generate --output x.json --format yaml"),
    ],
    "dra": ["dra --server http://x", "dra --interval 0"],
    "k8s-plugin": [
        *("k8s-plugin --kubelet /none", "k8s-plugin --memory-unit 1000k", "k8s-plugin --memory-unit 4Gy"),
        *("k8s-plugin --whole 9", "k8s-plugin --resource gpumem=nvidia.com/gpumem", "k8s-plugin --interval 0"),
    ],
    "nri": ["nri --index 1", "nri --socket /none/sock --index x"],
    "mps": [
        *("mps status", "$ mps status", "mps status --format json", "mps start --device 0", "mps stop --device 1"),
        *("mps start --uid me", "mps start --compute 400", "mps stop --device 9"),
    ],
    "uninstall": [
        *("uninstall --root ROOT --dry-run", "uninstall --root ROOT --dry-run --force"),
        "uninstall --root ROOT --dry-run --force --format json",
    ],
    "explain": ["explain BUNDLE", "explain BUNDLE --format json", "explain EMPTY", "explain /none"],
    "version": ["version", "version --format json", "version 2"],
    "others": ["", "nothing", "lits", "list --state X", "run --memory", "run --memory 4Gi", "completion csh"],
}


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory with a path of fixed length: paths are in columns, and long ones are truncated."""
    with tempfile.TemporaryDirectory(prefix="gpushare-golden-", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def world(
    cli: Callable[..., Any],
    start: Callable[..., Path],
    state: Path,
    frozen: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[str], str]:
    """world(command line): its output on a host with known content."""
    monkeypatch.setattr(time, "time", lambda: NOW)
    page = start(LONG, pure.share(0, 0, 4 * GIB)._replace(compute_percent=30, page=2), created=NOW - 7200)
    charge(page, 0, 7, 3 * GIB, refused=2)
    compute(page, 0, 27.4, waited_ns=900 * 10**9, busy_ns=10**12)
    soft = pure.share(0, 0, GIB)._replace(compute_percent=60, soft=True, priority=1, page=3)
    page = start("web-1", soft, pure.share(1, 1, None), created=NOW - 130)
    charge(page, 0, 1, GIB, 512 * MIB)
    compute(page, 1, 55)
    start("dead", pure.share(0, 0, GIB), created=NOW - 20)
    start("torn", pure.share(0, 0, GIB), created=NOW - 10)
    for name in (LONG, "web-1", "dead"):
        path = state / "containers" / name / "lease.json"
        value = json.loads(path.read_text())
        path.write_text(json.dumps({**value, "init_pid": PID, "cgroup": f"/{name[:12]}"}))
    _name(state, tmp_path, LONG, "train")
    (state / "containers" / "torn" / "lease.json").write_text("{")
    refusal = CapacityError("device 0: 8Gi requested", "ask for less")
    log.record(str(state), "refused", "gpushare: device 0: 8Gi requested", refusal)
    monkeypatch.setattr(
        leases, "why_dead", lambda _, lease, __: "its init (pid 12) is gone" if lease.id == "dead" else ""
    )
    monkeypatch.setattr(procs, "pids_by_container_pid", lambda _: {7: PID + 1, 1: PID})
    host = pure.node()
    monkeypatch.setattr(
        node, "last", lambda _: host._replace(inventory=host.inventory._replace(driver_version="525.1"))
    )
    monkeypatch.setattr(driverfiles, "require_usable", lambda inventory: None)
    monkeypatch.setattr(node, "compile_node", lambda config, directory, write=True, **_: host)
    monkeypatch.setattr(reservation, "recover", lambda *_: ())
    monkeypatch.setattr(cli_node, "installed", lambda: "0.1.0")
    for module in (cli_cdi, runtime):
        monkeypatch.setattr(module, "check_program", lambda path: f"/opt/gpushare/bin/{os.path.basename(path)}")
        monkeypatch.setattr(module, "foreign_owners", lambda _: [])
    monkeypatch.setattr(doctor, "CHECKS", [doctor.Check(name, "", lambda _, one=one: one) for name, one in ROWS])  # type: ignore[misc]
    _with_mps(monkeypatch)
    uses = nvml_usage.Gpu(
        16 * GIB, 4 * GIB, 37, 61, 142_500, (nvml_usage.Process(PID, 5 * GIB), nvml_usage.Process(99, None))
    )
    monkeypatch.setattr(nvml_usage, "read", lambda _: {pure.UUIDS[0]: uses})
    monkeypatch.setattr(overuse, "Owners", lambda _: {PID: LONG}.get)
    for name, value in (("COLUMNS", str(COLUMNS)), ("TERM", "xterm-256color"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    places = {"ROOT": tmp_path / "root", "BUNDLE": tmp_path / "bundle", "EMPTY": tmp_path / "empty"}
    for path in places.values():
        path.mkdir()
    (tmp_path / "bundle" / "config.json").write_text('{"root": {"path": "x"}, "process": {"env": []}}')
    (tmp_path / "config.yaml").write_text("version: 1\nmemory_overcommit: 1.5\nshim_dir: /opt/gpushare/shim\n")
    places["BAD"] = tmp_path / "bad.yaml"
    places["BAD"].write_text("version: 1\nmemory_overcomit: 1.5\npolicy:\n  max_memory: banana\n")
    (places["ROOT"] / "usr/bin").mkdir(parents=True)
    (places["ROOT"] / "usr/bin/dockerd").touch()

    def run(line: str) -> str:
        terminal = line.startswith("$ ")
        monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
        words = [str(places.get(word, word)) for word in line.removeprefix("$ ").split()]
        code, text, error = cli("--config", str(tmp_path / "config.yaml"), *words)
        head = f"# gpushare {line.removeprefix('$ ')}{'  (terminal)' if terminal else ''}"
        shown = f"{head.rstrip()}\n{text}"
        shown += "".join(f"stderr: {part}\n" for part in error.splitlines()) + (f"exit code: {code}\n" if code else "")
        for name, path in (("STATE", state), *places.items(), ("TMP", tmp_path), ("SHIM", "/usr/lib/gpushare")):
            shown = shown.replace(str(path), name)
        return shown

    return run


def _name(state: Path, folder: Path, container_id: str, name: str) -> None:
    """Write the files of a container as docker does."""
    file = folder / "docker/containers" / container_id / "config.v2.json"
    for path in (file.parent, folder / "b"):
        path.mkdir(parents=True)
    file.write_text(json.dumps({"Name": f"/{name}"}))
    mounts = [{"destination": "/etc/hosts", "source": str(file.with_name("hosts"))}]
    (folder / "b" / "config.json").write_text(json.dumps({"mounts": mounts}))
    lease = state / "containers" / container_id / "lease.json"
    lease.write_text(json.dumps({**json.loads(lease.read_text()), "bundle": str(folder / "b"), "cri": False}))


def _with_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One daemon runs, and started after web-1; the other has died."""
    runs = mps.MpsState("", "", 812, 99, "535.1", "", 60, 8 * GIB, 48, 0, mps.SHM_OWN)
    died = runs._replace(problem="its control daemon (pid 811) has died", was_running=True)
    uuid = pure.node().inventory.devices[0].uuid
    answers = {"get_server_list": "900", "get_client_list 900": "71\n72"}
    answers["get_active_thread_percentage 900"] = "60.0"
    monkeypatch.setattr(mps, "state", lambda name, _: runs if name == uuid else died)
    monkeypatch.setattr(backends, "having", lambda _, live, name: live if name == uuid else ())
    monkeypatch.setattr(mps_control, "program", lambda _: "/usr/bin/nvidia-cuda-mps-control")
    monkeypatch.setattr(mps_control.Control, "ask", lambda self, command: answers[command])
    monkeypatch.setattr(mps_control, "environment", lambda *_: {})
    monkeypatch.setattr(mps_status, "limits_now", lambda _: "60.0%, 8G")
    monkeypatch.setattr(mps_status, "affected", lambda found, name, live, _: backends.having("mps", live, name)[1:])
    monkeypatch.setattr(mps_daemon, "start", lambda *_: mps_daemon.Started("started", runs))


ROWS = (
    ("rights", Result(OK, "root")),
    (
        "driver",
        Result(FAIL, "no NVIDIA driver is loaded (no version in /proc/driver/nvidia)", "load it"),
    ),
    ("driver files", Result(OK, "9 libraries", more=("not used: /usr/bin/nvidia-smi is a script",))),
    ("devices", Result(SKIP, "needs a driver")),
    (
        "engines",
        Result(
            WARN,
            "docker, containerd, podman, crio: not configured, and this row is longer than a line of the terminal",
            "x",
        ),
    ),
)


def compare(name: str, text: str) -> None:
    path = FOLDER / f"{name}.txt"
    if os.environ.get("GOLDEN_WRITE"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path} differs: GOLDEN_WRITE=1 writes it"


@pytest.mark.parametrize("name", CASES)
def test_command_output_matches_golden_file(world: Callable[[str], str], name: str) -> None:
    text = "\n".join(world(line) for line in CASES[name])
    assert "\x1b" not in text and "Traceback" not in text and "internal error" not in text
    assert not re.search(r"(?m)[ \t]$", text), "spaces at the end of a line"
    compare(name, text)


def test_every_command_has_golden_output() -> None:
    from tools.commands import walk

    shown = [line.removeprefix("$ ") for lines in CASES.values() for line in lines]
    for command in walk():
        if command.words and not command.subcommands():
            assert any(f"{line} ".startswith(f"{command.name} ") for line in shown), command.name


def test_empty_host_matches_golden_file(
    cli: Callable[..., Any], state: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A host without containers, and a host without a driver."""

    def none(*_: Any, **__: Any) -> Any:
        raise DeviceError("no NVIDIA driver is loaded", "load it")

    shown = []
    (tmp_path / "config.yaml").write_text("version: 1\n")
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("TERM", "xterm-256color")  # the caller may have none
    for driver in (True, False):
        if not driver:
            monkeypatch.setattr(node, "read_node", lambda *_: None)
            monkeypatch.setattr(node, "compile_node", none)
        for terminal in (False, True):
            monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)  # noqa: B023  # used in this round only
            for line in ("list", "top --once", "devices", "prune", "inspect x", "labels --dry-run", "refresh"):
                if driver and line == "refresh":
                    continue
                code, text, error = cli("--config", str(tmp_path / "config.yaml"), *line.split(), "--no-color")
                where = f"{'terminal' if terminal else 'pipe'}, {'no container' if driver else 'no driver'}"
                shown.append(f"# gpushare {line}  ({where})\n{text}{error}exit code: {code}\n")
    compare("nothing", "\n".join(shown))


@pytest.mark.parametrize(("width", "height"), [(200, 14), (130, 14), (100, 14), (80, 12), (60, 8)])
def test_screen_of_top_matches_golden_file(
    world: Callable[[str], str], state: Path, width: int, height: int, monkeypatch: Any
) -> None:
    from rich.console import Console

    monkeypatch.setattr(time, "localtime", time.gmtime)
    taken = sample.Sampler(Paths("/none.yaml", str(state))).take()
    console = Console(width=width, height=height, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(topscreen.draw(taken, topscreen.View(), 2, width, height))
    compare(f"top-{width}x{height}", "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))
