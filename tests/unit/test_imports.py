"""What a start loads, as a list: it grows only when somebody means it to. Each module of the list is paid by every
container with a GPU, as milliseconds before it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gpushare import oci

HOOK = str(Path(oci.__file__).resolve().parents[1])
# All that a start may load of the standard library, with what these load themselves
LISTED = "import __future__, _collections, _json, _signal, _ctypes, errno, fcntl, gc, os, select, stat, struct"
# What others import without a thought, and what takes longer than all else that a start does
SLOW = {
    "typing",
    "re",
    "enum",
    "json",
    "signal",
    "collections",
    "functools",
    "contextlib",
    "inspect",
    "subprocess",
    "ctypes",
}


def modules(statements: str) -> set[str]:
    """Top-level and dotted names of everything loaded by `statements` in the interpreter of an installed program."""
    text = f"import sys; before = set(sys.modules); sys.path.insert(0, {HOOK!r})\n{statements}\n"
    text += "print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-ISc", text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


STARTS = {
    "runtime": "runtime, driverfiles, leases, node, placement, plan, request, rootfs, specedit, spectree, storage",
    "adopt": "hook, adopt",
    "hook": "hook, apply, driverfiles, leases, node, placement, plan, procs, request, rootfs, storage",
}


@pytest.mark.parametrize("start", STARTS)
def test_start_loads_what_is_listed_and_nothing_else(start: str) -> None:
    loaded = modules(f"from gpushare import {STARTS[start]}")
    assert {name for name in loaded if not name.startswith("gpushare")} - modules(LISTED) == set()
    assert not loaded & SLOW
    assert "gpushare.leases" in loaded and not loaded & {"gpushare.config", "gpushare.cli", "gpushare.explain"}


def test_adopt_leaves_the_first_half_alone() -> None:
    """What the runtime found out is in the record: nothing is looked for a second time."""
    loaded = modules("from gpushare import hook, adopt")
    others = "specedit spectree plan placement driverfiles request node inventory commandline runtime lowlevel".split()
    assert not loaded & {f"gpushare.{name}" for name in others}


def test_pass_through_loads_little(tmp_path: Path) -> None:
    """`gpushare-runtime state` where the launcher could not decide."""
    state = tmp_path / "state"
    statements = f"""
from gpushare import lowlevel, runtime
class Became(BaseException): pass
def became(program, words): raise Became
lowlevel.execute = became
try: runtime._main(runtime.commandline.parse(["state", "c"]), runtime.Paths("/none/config.yaml", {str(state)!r}))
except (Became, Exception): pass
"""
    loaded = modules(statements)
    assert not loaded & {f"gpushare.{name}" for name in ("leases", "storage", "linux", "specedit", "request", "plan")}
    assert "_ctypes" not in loaded


@pytest.mark.parametrize("command", ["list", "devices", "top --once", "version", "config show"])
def test_commands_in_a_pipe_draw_nothing(command: str, tmp_path: Path) -> None:
    """rich is for terminals; engines' files and the driver are for those who ask about them."""
    text = f"""
import sys
from gpushare.cli import main
code = main({command.split()!r})
print("loaded", *sys.modules)
"""
    environment = {"PYTHONPATH": HOOK, "PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=environment)
    loaded = done.stdout.splitlines()[-1].split()[1:]
    assert "gpushare.cli.output" in loaded, done
    slow = ("rich", "tomlkit", "pynvml", "termios", "prometheus_client")
    assert not {name for name in loaded if name.partition(".")[0] in slow}


def test_gpushare_run_loads_no_other_command() -> None:
    """`gpushare run` is how programs start: only what it needs, and nothing that compiles node.json."""
    text = "import sys, gpushare.cli, gpushare.cli.run, gpushare.run; print(*sys.modules)"
    environment = {"PYTHONPATH": HOOK, "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert not loaded & {"yaml", "jsonschema", "tomlkit", "pynvml", "importlib.metadata", "gpushare.config"}
    commands = {name for name in loaded if name.startswith("gpushare.cli.")}
    assert commands == {f"gpushare.cli.{name}" for name in ("main", "options", "run")}


_GRANT = """
from gpushare import model, placement
from gpushare.dialects import parse_devices
device = model.Device(0, "GPU-0", 0, "0000:01:00.0", "NVIDIA A100", 1 << 34, 1 << 29)
host = model.Node(model.Config(sharing={sharing}), model.Inventory("/", "535", (device,)))
chosen = parse_devices("GPUSHARE_DEVICES", {value!r}, host.inventory, any_allowed=True)
memory = ((None, model.Amount(1 << 30, None, "1Gi")),) if {limited} else ()
assert placement.grant(model.Request("own", chosen, (), memory), host, placement.Ledger({{}}))
"""


@pytest.mark.parametrize(
    ("value", "sharing", "limited", "loaded"),
    [
        ("any", "()", True, set()),
        ("0", "()", False, set()),
        ("any,model=A100", "()", True, {"conditions"}),
        ("0", "(model.SharingRule(2),)", False, {"sharing"}),
    ],
)
def test_placement_costs_only_who_uses_its_words(value: str, sharing: str, limited: bool, loaded: set[str]) -> None:
    seen = modules(_GRANT.format(value=value, sharing=sharing, limited=limited))
    assert {"sharing", "conditions"} & {name.rpartition(".")[2] for name in seen} == loaded
