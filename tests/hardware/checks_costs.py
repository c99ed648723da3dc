"""Measure what modules and local memory take natively and are charged under the shim, and what can be allocated."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any, Optional

from tests.hardware import processes
from tests.hardware.checks_memory import GIB, MOST_SHARE
from tests.hardware.place import TREE
from tests.hardware.session import Result, Session, size

ROOM = 4 * GIB  # of a share: more than any program here needs
COUNTS = (1, 10, 100)
SHORT_COUNTS = (1, 10)
LOADING = ("LAZY", "EAGER")
PTXAS = ("/usr/local/cuda*/bin/ptxas", "triton/backends/nvidia/bin/ptxas", "nvidia/*/bin/ptxas")


def in_place(
    session: Session, what: str, percent: Optional[int] = None, memory_bytes: Optional[int] = ROOM, **arguments: Any
) -> dict[str, Any]:
    """Return a program's report from a share; {"missing": reason} if there is none, so that native figures remain."""
    if memory_bytes:
        memory_bytes = min(memory_bytes, session.machine.total_bytes // MOST_SHARE)
    try:
        with session.place(memory_bytes, percent) as place:
            return dict(session.ask(what, place, **arguments))
    except processes.Absent as error:
        return {"missing": str(error)}
    except processes.Failed as error:
        return {"missing": str(error), "stderr": error.stderr}


def both(session: Session, what: str, **arguments: Any) -> dict[str, Any]:
    """Return a program's reports, native and under the shim."""
    session.idle_bytes()
    return {"native": session.ask(what, **arguments), "shim": in_place(session, what, **arguments)}


def modules(session: Session) -> Result:
    """Load 1, 10 and 100 small modules, lazily and eagerly, natively and under the shim."""
    counts = SHORT_COUNTS if session.short else COUNTS
    values: dict[str, Any] = {}
    for loading in LOADING:
        values[loading.lower()] = both(session, "modules", loading=loading, counts=counts)
    cubin = assembled(session)
    if cubin:
        values["cubin"] = both(session, "modules", loading="LAZY", counts=counts, cubin=cubin)
    notes = []
    for kind, seen in values.items():
        last = seen["native"]["steps"][-1]
        note = f"{kind}: {last['modules']} take {size(last['used_bytes'])} ({size(last['loaded_bytes'])} before use)"
        if "steps" in seen["shim"]:
            note += f", are charged {size(seen['shim']['steps'][-1]['used_bytes'])}"
        notes.append(note)
    return Result("measured", "; ".join(notes), values)


def assembled(session: Session) -> Optional[str]:
    """Return a cubin of 8 KiB of code for this device; None where there is no ptxas that knows it."""
    found = shutil.which("ptxas")
    program = found or next((str(path) for pattern in PTXAS for path in located(pattern)), None)
    if program is None or session.machine.simhost:  # the simulator names no real architecture
        return None
    ptx, cubin = session.work / "module.ptx", session.work / "module.cubin"
    processes.ask("write_module", session.deadline, path=str(ptx))
    arch = "sm_{}{}".format(*session.machine.capability)
    try:
        code, _, _ = processes.run([program, f"-arch={arch}", ptx, "-o", cubin], session.deadline)
    except (OSError, processes.Failed):
        return None
    return str(cubin) if code == 0 else None


def located(pattern: str) -> list[Path]:
    """Return files by a pattern: an absolute path, or one below this tree or a directory of Python packages."""
    roots = ["/"] if pattern.startswith("/") else [str(TREE), *(path for path in sys.path if path)]
    return [found for root in roots for found in sorted(Path(root).glob(pattern.lstrip("/")))]


def local(session: Session) -> Result:
    """Launch a kernel that needs 8 KiB of local memory per thread."""
    values = both(session, "local_memory")
    seen, charged = values["native"], values["shim"].get("used_bytes")
    note = f"{size(seen['bytes_per_thread'])} per thread takes {size(seen['used_bytes'])}"
    note += "" if charged is None else f", is charged {size(charged)}"
    return Result("measured", note, values)


def reserved(session: Session) -> Result:
    """Compare NVML's two totals, the driver's, and what can be allocated by cuMemAlloc in steps down to 2 MiB."""
    session.idle_bytes()
    values = session.ask("reserved", nvml=session.machine.libnvml, uuid=session.machine.uuid)
    session.idle_bytes()  # the next check starts with a free device
    parts = []
    if "v1_total" in values:
        parts.append(f"NVML v1 {size(values['v1_total'])}")
    if "v2_total" in values:
        parts.append(f"v2 {size(values['v2_total'])} with {size(values['v2_reserved'])} reserved")
    parts.append(f"cuDeviceTotalMem {size(values['cuda_total'])}")
    got = values["got_bytes"]
    parts.append(
        "not filled: the device is in use, or NVML does not tell" if got is None else f"{size(got)} could be allocated"
    )
    return Result("measured", ", ".join(parts), values)
