"""Check how this driver behaves, and whether programs get the shim."""

from __future__ import annotations

import json
import shutil
import statistics
from typing import Any

from tests.hardware import processes
from tests.hardware.place import CANNOT, TREE
from tests.hardware.session import IN_PLACE, Result, Session, verdict

LATENCY = TREE / "build" / "gpu" / "latency"
ONE_S = 20.0  # per behaviour of the conformance suite
SHORT = ("calls_before_init_fail", "content_is_kept", "kernel_takes_its_time")
TURNS = 2


def loader(session: Session) -> Result:
    """Check that a program that asks for libcuda.so.1 gets the shim, also from cuGetProcAddress."""
    native = session.ask("names")
    with session.place() as place:
        inside = session.ask("names", place)
    wrong = []
    if native["shadowed"]:
        wrong.append("a native program loaded the shim")
    if not inside["shadowed"]:
        wrong.append("the program in the share loaded the real driver")
    if inside["not_exported"] > native["not_exported"]:
        wrong.append(f"cuGetProcAddress gives addresses that nothing exports for {', '.join(inside['unknown'][:5])}")
    note = f"{native['answers']} answers of cuGetProcAddress, {native['not_exported']} of them no exported address"
    return verdict(wrong, note, {"native": native, "shim": inside})


def conformance(session: Session) -> Result:
    """Check which of the behaviours that the simulator models this driver has."""
    from tests.conformance.behaviours import BEHAVIOURS

    names = [b.check.__name__ for b in BEHAVIOURS]
    names = list(SHORT) if session.short else names
    outcome = dict.fromkeys(names, "no time left")
    with session.tenant("behaviours", names=names, one_s=ONE_S) as tenant:
        tenant.deadline -= 1  # to report what is known by then
        for _ in names:
            try:
                said = tenant.receive()
            except processes.Failed as error:
                if "timed out" not in str(error):
                    raise
                break
            outcome[said["name"]] = said["other"]
    absent = [name for name, said in outcome.items() if "ModuleNotFoundError" in said or said == "no time left"]
    other = [name for name, said in outcome.items() if said and name not in absent]
    note = f"{len(outcome) - len(other) - len(absent)} of {len(outcome)} behaviours as modelled"
    if other:
        note += f"; not: {', '.join(other)}"
    if absent:
        note += f"; without a result: {', '.join(absent)}"
    return Result("measured", note, {name: said or "as modelled" for name, said in outcome.items()})


def latency(session: Session) -> Result:
    """Measure the duration of calls, alternately native and under the shim; the lowest median of each counts."""
    if not LATENCY.exists():
        return Result("absent", "build/gpu/latency was not compiled: no C compiler", {})
    # Processes in a place may not be able to execute files of an unprivileged build directory, so use a copy
    program = session.work / "latency"
    shutil.copy(LATENCY, program)
    seen: dict[str, list[dict[str, Any]]] = {"native": [], "shim": []}
    with session.place() as place:
        for _ in range(1 if session.short else TURNS):
            for way in seen:
                command = [str(program), IN_PLACE if way == "shim" else session.machine.libcuda]
                seen[way].append(answer(place.command(command) if way == "shim" else command, session.deadline))
    values: dict[str, Any] = {}
    for name in seen["native"][0]:
        native, shim = (_best(seen[way], name) for way in ("native", "shim"))
        values[name] = {"native_ns": native, "shim_ns": shim}
        if native is not None and shim is not None:
            values[name]["added_ns"] = shim - native
    added = [v["added_ns"] for v in values.values() if "added_ns" in v]
    launch = values["launch"]
    note = f"a launch {launch['native_ns']} ns, {launch['shim_ns']} under the shim; in the median it adds"
    return Result("measured", f"{note} {statistics.median(added):.0f} ns to a call", values)


def answer(command: list[str], deadline: float) -> dict[str, Any]:
    """Run build/gpu/latency and parse its line of JSON. Raises Absent or Failed."""
    code, out, err = processes.run(command, deadline)
    if code == CANNOT:
        raise processes.Absent(f"no private mounts here ({err.strip()})")
    if code or not out.startswith("{"):
        raise processes.Failed(f"latency: ended with {code} {err.strip()[-200:]}")
    answer: dict[str, Any] = json.loads(out)
    if "failed" in answer:
        raise processes.Failed(f"latency: {answer['failed']}")
    return answer


def _best(runs: list[dict[str, Any]], name: str) -> Any:
    medians = [run[name]["median_ns"] for run in runs if "median_ns" in run[name]]
    return min(medians, default=None)
