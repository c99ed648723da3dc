"""Check gpushare as users run it."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from typing import Any

from tests.hardware import checks_busy as busy
from tests.hardware import processes
from tests.hardware.checks_memory import limit_of
from tests.hardware.place import TREE
from tests.hardware.session import Result, Session, size, verdict

GPUSHARE = TREE / "build" / "bin" / "gpushare"
BUNDLED = TREE / "build" / "dist" / "gpushare" / "bin" / "gpushare"
PACKAGES = ("click", "yaml", "jsonschema")  # packages that gpushare's command line needs
START = "from gpushare.cli import main; sys.exit(main())"


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def gpushare() -> list[str]:
    """Return the command of gpushare.

    That is the program built here; otherwise the bundle, which is self-contained; otherwise the source tree under this
    python3.
    """
    if (TREE / "build" / ".setup").exists() and GPUSHARE.exists():
        return [str(GPUSHARE)]
    if BUNDLED.exists():
        return [str(BUNDLED)]
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise processes.Absent(f"this python3 has no {', '.join(missing)}, and build/dist is not here")
    return [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(TREE / 'hook')!r})\n{START}"]


def under_run(session: Session, flags: list[str], program: list[str]) -> dict[str, Any]:
    """Return the JSON line of a program started by `gpushare run`. Raises Absent or Failed."""
    session.need_shim()
    config = session.work / "config.yaml"
    root = str(session.machine.simhost or "/")
    config.write_text(json.dumps({"version": 1, "driver": {"root": root}, "shim_dir": str(session.machine.shim)}))
    command = [*gpushare(), "--config", str(config), "--state", str(session.work / "state"), "run"]
    if os.geteuid() == 0:
        command = ["unshare", "-m", *command]  # so that the mounts of the state directory end with it
    code, out, err = processes.run([*command, *flags, "--", *program], session.deadline)
    lines = (err.strip() or out.strip()).splitlines()
    if code or not out.startswith("{"):
        raise processes.Failed(f"gpushare run: {lines[-1][:200] if lines else code}")
    said: dict[str, Any] = json.loads(out)
    return said


def run(session: Session) -> Result:
    """Check that `gpushare run` itself finds the driver and injects the shim."""
    limit = limit_of(session)
    program = [sys.executable, "-m", "tests.hardware.tenant", "device", json.dumps({"library": "libcuda.so.1"})]
    seen = under_run(session, ["--memory", str(limit)], program)
    wrong = []
    if seen.get("total_bytes") != limit:
        wrong.append(f"the program saw {seen}, not a device of {size(limit)}")
    return verdict(wrong, f"the program saw a device of {size(limit)}", seen)


def run_compute(session: Session) -> Result:
    """The same check with a compute limit."""
    program = busy.program(session)
    options = ["--kernel", "1000", "--seconds", "1" if session.short else "2"]
    said = under_run(session, ["--compute", str(busy.LIMIT)], [program, *options])
    got = 100 * busy.share_of(said)
    note = f"limit {busy.LIMIT} %: got {got:.2f} %"
    return verdict([note] if abs(got - busy.LIMIT) > busy.POINTS else [], note, said)
