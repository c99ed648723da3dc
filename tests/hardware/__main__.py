"""Check what holds on this machine's GPU, and measure what it costs.

    python3 -m tests.hardware [--short] [--simulated] [--only NAME,...] [--out FILE] [--list]

Exit code 0 when every promise held, 1 when one did not, 2 when nothing could be checked.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "hook"))

from tests.hardware import assumptions, machine, processes, report
from tests.hardware.checks import CHECKS, HARDWARE, TORCH, Check
from tests.hardware.checks_product import has_torch
from tests.hardware.place import TREE
from tests.hardware.session import Result, Session

FORMAT = 2  # version of the JSON
BUDGET_S = 350.0
ALWAYS = "context"  # runs first: the limits of other checks depend on its result
REST_S, STAY_S = 3.0, 0.3
LEAST_S = 5.0  # do not start a check with less time left
GRACE_S = 3.0  # after its time limit, a check itself is ended


def interrupted(number: int, _: Any) -> None:
    """Treat SIGTERM and SIGHUP like Ctrl-C, so that all cleanup runs."""
    raise KeyboardInterrupt


def perform(check: Check, session: Session) -> Result:
    """Run a check and return its result, whatever happens."""
    began = time.monotonic()
    try:
        if check.needs == HARDWARE and session.machine.simhost:
            raise processes.Absent("needs a GPU: the simulator runs no code")
        if check.needs == TORCH and session.machine.simhost:
            raise processes.Absent("needs a GPU: PyTorch refuses a simulated driver")
        if check.needs == TORCH and not has_torch():
            raise processes.Absent("no PyTorch for this python3")
        if session.deadline - began < LEAST_S:
            return Result("not run", "no time was left", {})
        with processes.time_limit(session.deadline + GRACE_S):
            result = check.function(session)
    except processes.Absent as error:
        result = Result("absent", str(error), {})
    except processes.Failed as error:
        result = Result("failed", str(error), {}, stderr=error.stderr)
    except Exception as error:  # a faulty check must not stop the others
        result = Result("failed", f"{type(error).__name__}: {error}"[:300], {}, stderr=traceback.format_exc())
    return result._replace(seconds=round(time.monotonic() - began, 2))


def content(
    found: machine.Machine, first: dict[str, Any], rows: list[tuple[str, str, Result]], took_s: float, short: bool
) -> dict[str, Any]:
    """Return the content of the JSON file."""
    limits = {check.name: check.limit_s for check in CHECKS}
    checks = {
        name: {
            "what": what,
            "verdict": result.verdict,
            "note": result.note,
            "seconds": result.seconds,
            "limit_s": limits[name],
            "values": result.values,
            **({"stderr": result.stderr} if result.stderr else {}),
        }
        for name, what, result in rows
    }
    return {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "simulated": found.simhost is not None,
        "short": short,
        "driver": found.driver_version,
        "cuda": f"{found.cuda_version // 1000}.{found.cuda_version % 1000 // 10}",
        "gpu": {**found.facts(), "used_before_bytes": first["used_bytes"], "used_source": first["source"]},
        "host": machine.host_facts(found),
        "took_s": round(took_s, 1),
        "checks": checks,
        "assumptions": {finding.assumption.id: finding.facts() for finding in assumptions.findings(checks)},
    }


def names(text: str) -> list[str]:
    """Parse names of checks. Raises ArgumentTypeError."""
    words = text.split(",")
    unknown = [word for word in words if word not in {check.name for check in CHECKS}]
    if unknown:
        known = ", ".join(check.name for check in CHECKS)
        raise argparse.ArgumentTypeError(f"no check is called {unknown[0]!r}; there are {known}")
    return words


def check_all(options: argparse.Namespace, work: Path) -> int:
    began = time.monotonic()
    found = machine.find(options.shim, options.simulated, work)
    if found.simhost:
        print(
            f"gpu-check: no GPU is used ({found.why_simulated}): this is the simulator, so no figure is about hardware"
        )
    print(f"{found.model}, driver {found.driver_version}, {options.out}", flush=True)
    deadline = time.monotonic() + machine.FIND_S
    with processes.Tenant("meter", deadline, library=found.libcuda, nvml=found.libnvml, uuid=found.uuid) as meter:
        first = _at_rest(meter)
        with imported_in_background(found, began + options.budget):
            return _each(options, work, found, began, meter, first)


def imported_in_background(found: machine.Machine, deadline: float) -> contextlib.AbstractContextManager[Any]:
    """Import PyTorch in another process while the first checks run: from a slow disk that takes up to a minute."""
    wanted = has_torch() and not found.simhost
    return processes.Tenant("imports", deadline) if wanted else contextlib.nullcontext()


def _at_rest(meter: processes.Tenant) -> dict[str, Any]:
    """Return the meter's reading once it is stable: memory of a process that just ended is freed with a delay."""
    first: dict[str, Any] = meter.receive()
    until = time.monotonic() + REST_S
    while time.monotonic() < until:
        time.sleep(STAY_S)
        meter.go()
        again: dict[str, Any] = meter.receive()
        if again == first:
            break
        first = again
    return first


def _each(
    options: argparse.Namespace,
    work: Path,
    found: machine.Machine,
    began: float,
    meter: processes.Tenant,
    first: dict[str, Any],
) -> int:
    if os.geteuid() != 0:
        print("gpu-check: as an ordinary user: shares are in user namespaces, where the host allows them")
    rows: list[tuple[str, str, Result]] = []
    for check in CHECKS:
        if options.only and check.name not in (ALWAYS, *options.only):
            continue
        now = time.monotonic()
        deadline = min(now + check.limit_s, began + options.budget)
        result = perform(check, Session(found, deadline, options.short, work, meter, first["used_bytes"]))
        rows.append((check.name, check.what, result))
        if check.name == "context" and result.values:
            found = found._replace(context_bytes=max(0, result.values["first_bytes"]))
        if check.name == "slices" and "slice_ns" in result.values:
            slice_ns, switch_ns = result.values["slice_ns"]["median"], result.values["switch_ns"]
            found = found._replace(slices_ns=(int(slice_ns), max(0, int(switch_ns))))
        said = content(found, first, rows, time.monotonic() - began, options.short)
        report.write(options.out, said)
        print(f"  {check.name}: {result.verdict}", flush=True)
        report.tell([one for one in assumptions.findings(said["checks"]) if one.assumption.check == check.name])
    report.show(rows)
    tally = collections.Counter(result.verdict for _, _, result in rows)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(tally.items()))
    print(f"gpu-check: {counts}, in {time.monotonic() - began:.0f} s; all figures are in {options.out}")
    verdicts = set(tally)
    return 2 if verdicts <= {"absent", "not run"} else 1 if verdicts & {"missed", "failed"} else 0


def main(arguments: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu-check", description="What holds on this machine's GPU.")
    parser.add_argument("--short", action="store_true", help="short stretches: to see that it works")
    parser.add_argument("--simulated", action="store_true", help="on the simulator, also where there is a GPU")
    parser.add_argument("--only", type=names, help="names of checks, with commas")
    parser.add_argument("--list", action="store_true", help="list the checks and their time limits")
    parser.add_argument(
        *("--out", "--json"), type=Path, default=TREE / "build" / "gpu-check.json", help="the file for all figures"
    )
    parser.add_argument(
        "--shim",
        type=lambda text: Path(text).resolve(),
        default=TREE / "build" / "shim",
        help="directory of the two libraries",
    )
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds in all (%(default)s)")
    options = parser.parse_args(arguments)
    if options.list:
        rows = ((check, f" ({check.needs})" if check.needs else "") for check in CHECKS)
        print("\n".join(f"{check.name:<20} {check.limit_s:>4.0f} s  {check.what}{needs}" for check, needs in rows))
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    try:
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as work:
            return check_all(options, Path(work))
    except (processes.Failed, processes.Absent) as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ngpu-check: stopped", file=sys.stderr)
        return 130
    finally:
        processes.end_all()


if __name__ == "__main__":
    sys.exit(main())
