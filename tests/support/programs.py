"""Programs under `gpushare run`, and their inherited state."""

from __future__ import annotations

import os
import subprocess
from typing import Any

from .host import BUILD, TREE, Node

PYTHON = str(BUILD / "venv" / "bin" / "python")
GRAB = (PYTHON, str(TREE / "tests" / "integration" / "programs" / "grab.py"))
TENANT = (PYTHON, str(TREE / "demo" / "tenant.py"))
ENVIRONMENT = {"PATH": os.environ["PATH"], "PYTHONPATH": str(TREE / "demo")}

# Prints everything that a program inherits, as one JSON text
DUMP = (
    PYTHON,
    "-c",
    """
import json, os
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
here = os.stat(".")
print(json.dumps({
    "environ": open("/proc/self/environ", "rb").read().decode("latin-1"),
    "cwd": os.getcwd(), "umask": status["Umask"], "parent": os.getppid(), "limits": open("/proc/self/limits").read(),
    "signals": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt")],
    "ids": [status[name] for name in ("Uid", "Gid", "Groups", "CapEff", "CapPrm", "CapInh", "CapAmb", "NoNewPrivs")],
    "files": sorted((int(n), os.readlink(f"/proc/self/fd/{n}")) for n in os.listdir("/proc/self/fd")
                    if os.path.exists(f"/proc/self/fd/{n}")),
    "group": os.getpgrp(), "session": os.getsid(0), "nice": os.nice(0), "scheduler": os.sched_getscheduler(0),
    "argv": os.sys.argv, "threads": status["Threads"], "namespaces": {
        name: os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net", "ipc", "uts", "user", "cgroup")},
}))
""",
)


def words(node: Node, *arguments: str) -> list[str]:
    """The command line of `gpushare run` against a node."""
    program = BUILD / "bin" / "gpushare"
    return [str(program), "--config", str(node.config), "--state", str(node.state), "run", *arguments]


def run(node: Node, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `gpushare run` to its end."""
    options = {"stdin": subprocess.DEVNULL, "env": ENVIRONMENT, "timeout": 90, **options}
    return subprocess.run(words(node, *arguments), capture_output=True, text=True, **options)
