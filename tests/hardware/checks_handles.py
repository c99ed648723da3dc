"""Check exported descriptors, green contexts, and how NVIDIA's runtime library loads modules."""

from __future__ import annotations

import os
import re
from typing import Any

from tests.hardware import processes
from tests.hardware.checks_costs import both, in_place, located
from tests.hardware.session import Result, Session, size

CYCLES, SHORT_CYCLES = 300, 50
PERCENT = 30
RUNTIMES = (
    "build/gpu/libcudart.so.*",  # carried here
    "nvidia/*/lib/libcudart.so.*",
    "torch/lib/libcudart*.so*",
    "/usr/local/cuda*/lib64/libcudart.so.*",
    "/usr/local/cuda*/targets/*/lib/libcudart.so.*",
    "/usr/lib/*/libcudart.so.*",
)
OLD = 11  # the last major version that may load modules through a private table


def descriptors(session: Session) -> Result:
    """Check whether descriptors of different memory are different files, as the shim tells exports apart."""
    values: dict[str, Any] = session.ask("descriptors")
    seen = values["descriptors"]
    ids = {tuple(one["id"]) for one in seen}
    of_each: dict[int, set[tuple[int, ...]]] = {}
    for one in seen:
        of_each.setdefault(one["memory"], set()).add(tuple(one["id"]))
    values["distinct"] = len(ids) >= len(of_each)
    values["stable"] = all(len(found) == 1 for found in of_each.values())
    values["cycles"] = SHORT_CYCLES if session.short else CYCLES
    values["after_cycles"] = in_place(session, "export_cycles", cycles=values["cycles"])
    note = f"{len(of_each)} blocks of memory have {len(ids)} ids ({seen[0]['link']}); "
    note += f"{'the same' if values['stable'] else 'another'} id for a second export of a block"
    if "lost_bytes" in values["after_cycles"]:
        note += f"; {values['cycles']} exports and frees leave {size(values['after_cycles']['lost_bytes'])} charged"
    return Result("measured", note, values)


def green(session: Session) -> Result:
    """Check whether events of the primary context work in a green context's stream, and whether launches go at 30 %."""
    kernel_us, run_s = 100, 0.3 if session.short else 0.6
    arguments: dict[str, Any] = {"kernel_us": kernel_us, "rounds": 1, "run_s": run_s}
    if not session.machine.simhost:
        arguments["rounds"] = session.ask("calibrate", kernel_us=kernel_us)["rounds"]
    values: dict[str, Any] = {"native": session.ask("green", **arguments)}
    values["shim"] = in_place(session, "green", PERCENT, None, **arguments)
    failed = [f"{name}: {code}" for name, code in values["native"]["codes"].items() if code]
    note = f"refused natively: {', '.join(failed) or 'nothing'}"
    if "launched" in values["shim"]:
        refused = sum(values["shim"]["refused"].values())
        values["percent"] = 100 * values["shim"]["per_s"] / max(1e-9, values["native"]["per_s"])
        note += f"; at {PERCENT} %: {refused} launches refused, {values['percent']:.1f} % of native speed"
    return Result("measured", note, values)


def runtimes() -> dict[int, str]:
    """Map each major version of libcudart on this machine to a file."""
    found: dict[int, str] = {}
    for pattern in RUNTIMES:
        for path in located(pattern):
            version = re.search(r"libcudart(?:-[0-9a-f]+)?\.so\.(\d+)", path.name)
            if version:
                found.setdefault(int(version.group(1)), os.path.realpath(path))
    return found


def private_loader(session: Session) -> Result:
    """Check whether modules that libcudart loads are charged, and which private tables the driver has."""
    there = runtimes()
    values: dict[str, Any] = {**session.ask("tables"), "searched": list(RUNTIMES), "runtimes": {}}
    notes = [f"{sum(not one['code'] for one in values['tables'].values())} of {len(values['tables'])} private tables"]
    for major, path in sorted(there.items()):
        try:
            seen = both(session, "runtime", path=path)
        except processes.Failed as error:
            seen = {"failed": str(error), "stderr": error.stderr}
        values["runtimes"][str(major)] = {"path": path, **seen}
        notes.append(f"libcudart {major}: {charged(seen)}")
    if OLD not in there:
        notes.append(f"no libcudart {OLD} on this machine, so nothing is known of it")
    return Result("measured", "; ".join(notes), values)


def charged(seen: dict[str, Any]) -> str:
    """Return a sentence about a module that a runtime library loaded."""
    if "failed" in seen:
        return str(seen["failed"])
    words = []
    for way, verb in (("native", "takes"), ("shim", "is charged")):
        one = seen[way]
        if "missing" in one:
            continue
        wrong = [f"{call} gave {code}" for call, code in one["steps"].items() if code]
        words.append(wrong[0] if wrong else f"a module of {size(one['table_bytes'])} {verb} {size(one['taken_bytes'])}")
    return ", ".join(words)
