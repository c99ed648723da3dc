"""Check what holds on this machine's GPU, and measure what it costs.

    python3 -m tests.hardware [--all] [--resume FILE] [--short] [--simulated] [--only NAME,...] [--out FILE] [--list]

Without --all only the quick checks run, which show in two minutes whether gpushare works here. The results are saved
after each check, and --resume goes on from such a file.

Exit code 0 when every promise held, 1 when one did not, 2 when nothing could be checked.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import fnmatch
import itertools
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "hook"))

from tests.hardware import assumptions, machine, processes, report
from tests.hardware.checks import CHECKS, HARDWARE, TORCH, Check
from tests.hardware.checks_product import has_torch
from tests.hardware.place import TREE
from tests.hardware.session import Result, Session

FORMAT = 3  # version of the JSON; 2 lacks `all` and `costs`, and judges compute by throughput
BUDGET_S, QUICK_BUDGET_S = 350.0, 150.0
NO_UUID = "GPU-00000000-0000-0000-0000-000000000000"  # stands in published files, without the card's own uuid
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


class Run(NamedTuple):
    """The machine, and the results so far. `rows`: check -> result."""

    options: argparse.Namespace
    found: machine.Machine
    first: dict[str, Any]
    began: float
    rows: dict[str, Result]
    took_before_s: float

    def content(self) -> dict[str, Any]:
        """Return the content of the JSON file."""
        checks: dict[str, Any] = {
            check.name: {
                "what": check.what,
                "verdict": result.verdict,
                "note": result.note,
                "seconds": result.seconds,
                "limit_s": check.limit_s,
                "values": result.values,
                **({"stderr": result.stderr} if result.stderr else {}),
            }
            for check, result in ((check, self.rows.get(check.name)) for check in CHECKS)
            if result
        }
        found = self.found
        return {
            "format": FORMAT,
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "simulated": found.simhost is not None,
            "short": self.options.short,
            "all": self.options.all,
            "driver": found.driver_version,
            "cuda": f"{found.cuda_version // 1000}.{found.cuda_version % 1000 // 10}",
            "gpu": {
                **found.facts(),
                "used_before_bytes": self.first["used_bytes"],
                "used_source": self.first["source"],
            },
            "host": machine.host_facts(found),
            "took_s": round(self.took_before_s + time.monotonic() - self.began, 1),
            "checks": checks,
            "costs": checks.get("costs", {}).get("values", {}).get("rows", []),
            "assumptions": {finding.assumption.id: finding.facts() for finding in assumptions.findings(checks)},
        }


def earlier(path: Path, found: machine.Machine) -> tuple[dict[str, Result], float]:
    """Return the results of an interrupted run, and the seconds that it took. Raises Failed."""
    try:
        content = json.loads(path.read_text())
        of = f"{content['gpu']['model']} with driver {content['driver']}"
        uuid, version, simulated = content["gpu"]["uuid"], content["format"], content["simulated"]
        checks = content["checks"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise processes.Failed(f"{path} is no result of gpu-check that can be resumed: {error!r}") from None
    if version != FORMAT:
        raise processes.Failed(f"{path} has format {version}, and this gpu-check writes {FORMAT}: run without --resume")
    here = f"{found.model} with driver {found.driver_version}"
    other = uuid not in (found.uuid, NO_UUID) and not found.simhost  # each simulator has another uuid
    if of != here or other or simulated != bool(found.simhost):
        which = f"{of} ({uuid}), this is {here} ({found.uuid})" if of == here else f"{of}, this is {here}"
        raise processes.Failed(f"{path} is of {which}: run without --resume")
    rows = {
        name: Result(one["verdict"], one["note"], one["values"], one["seconds"], one.get("stderr", ""))
        for name, one in checks
        if one["verdict"] != "not run"
    }
    return rows, content["took_s"]


def learned(found: machine.Machine, name: str, result: Result) -> machine.Machine:
    """Return the machine with what the result of a check adds, for later checks."""
    if name == ALWAYS and result.values:
        found = found._replace(context_bytes=max(0, result.values["first_bytes"]))
    if name == "slices" and "slice_ns" in result.values:
        slice_ns, switch_ns = result.values["slice_ns"]["median"], result.values["switch_ns"]
        found = found._replace(slices_ns=(int(slice_ns), max(0, int(switch_ns))))
    return found


def names(text: str) -> list[str]:
    """Parse names of checks, or patterns such as turns.*. Raises ArgumentTypeError."""
    words = {word: fnmatch.filter([check.name for check in CHECKS], word) for word in text.split(",")}
    unknown = [word for word, found in words.items() if not found]
    if unknown:
        known = ", ".join(check.name for check in CHECKS)
        raise argparse.ArgumentTypeError(f"no check is called {unknown[0]!r}; there are {known}")
    return list(itertools.chain(*words.values()))


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
    rows, took_s = earlier(options.resume, found) if options.resume else ({}, 0.0)
    if os.geteuid() != 0:
        print("gpu-check: as an ordinary user: shares are in user namespaces, where the host allows them")
    run = Run(options, found, first, began, rows, took_s)
    report.write(options.out, run.content())
    for check in CHECKS:
        if check.name in rows and check.name not in options.only:
            run = run._replace(found=learned(run.found, check.name, rows[check.name]))
            continue
        if not wanted(check, options):
            continue
        deadline = min(time.monotonic() + check.limit_s, began + options.budget)
        result = perform(check, Session(run.found, deadline, options.short, work, meter, first["used_bytes"]))
        rows[check.name] = result
        run = run._replace(found=learned(run.found, check.name, result))
        said = run.content()
        report.write(options.out, said)
        print(f"  {check.name}: {result.verdict}", flush=True)
        report.tell([one for one in assumptions.findings(said["checks"]) if one.assumption.check == check.name])
    shown = [(check.name, check.what, rows[check.name]) for check in CHECKS if check.name in rows]
    report.show(shown)
    tally = collections.Counter(result.verdict for _, _, result in shown)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(tally.items()))
    print(f"gpu-check: {counts}, in {time.monotonic() - began:.0f} s; all figures are in {options.out}")
    more = sum(wanted(check, argparse.Namespace(all=True, only=())) and check.name not in rows for check in CHECKS)
    if more and not options.only:
        print(f"gpu-check: GPU_ARGS='--all --resume {options.out}' runs the {more} other checks")
    verdicts = set(tally)
    return 2 if verdicts <= {"absent", "not run"} else 1 if verdicts & {"missed", "failed"} else 0


def wanted(check: Check, options: argparse.Namespace) -> bool:
    """Return whether a check without a result runs."""
    if options.only:
        return check.name in (ALWAYS, *options.only)
    return bool(options.all or check.quick) and not check.named


def main(arguments: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu-check", description="What holds on this machine's GPU.")
    parser.add_argument("--all", action="store_true", help="every check, within 6 minutes; otherwise the quick ones")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep the results in this file, and add the others")
    parser.add_argument("--short", action="store_true", help="short stretches: to see that it works")
    parser.add_argument("--simulated", action="store_true", help="on the simulator, also where there is a GPU")
    parser.add_argument(
        "--only", type=names, default=(), help="names of checks, with commas; turns.*: all of that name"
    )
    parser.add_argument("--list", action="store_true", help="list the checks and their time limits")
    parser.add_argument(
        *("--out", "--json"), type=Path, help="the file for all figures (build/gpu-check.json, or that of --resume)"
    )
    parser.add_argument(
        "--shim",
        type=lambda text: Path(text).resolve(),
        default=TREE / "build" / "shim",
        help="directory of the two libraries",
    )
    parser.add_argument(
        "--budget", type=float, help=f"seconds in all ({QUICK_BUDGET_S:.0f}, with --all {BUDGET_S:.0f})"
    )
    options = parser.parse_args(arguments)
    options.out = options.out or options.resume or TREE / "build" / "gpu-check.json"
    if options.budget is None:
        options.budget = BUDGET_S if options.all or options.only else QUICK_BUDGET_S
    if options.list:
        for check in CHECKS:
            notes = ", ".join(
                filter(None, ("quick" if check.quick else "", "only by name" if check.named else "", check.needs))
            )
            print(f"{check.name:<20} {check.limit_s:>4.0f} s  {check.what}{f' ({notes})' if notes else ''}")
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
