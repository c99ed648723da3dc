"""`make soak`: simulate days of use in MINUTES (10). Exit code 1 on any leak or mismatch, 130 after Ctrl-C.

python -m tests.soak [--minutes N] [--json FILE] [--seed N] [--only PHASE]...
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.support import host, processes

from . import borrowers, churn, notebooks, starts, tenants
from .show import Show
from .stage import DEVICES, Stage, Stopped
from .traces import count, left

STARTS, AT_ONCE = 1000, 100  # in FULL_MINUTES, proportionally fewer in less
FULL_MINUTES = 10.0


def scaled(number: int, minutes: float) -> int:
    return max(8, round(number * min(1.0, minutes / FULL_MINUTES)))


def time_limit_s(minutes: float) -> float:
    """Time limit of the starts in a row: the full soak does all of them, on a machine of any speed."""
    return math.inf if minutes >= FULL_MINUTES else 0.5 * 60 * minutes


# Starts are a fixed number and take the time they need. The other phases share the rest, with a minimum each.
# (stage, total minutes, remaining seconds)
PHASES: dict[str, Callable[[Stage, float, float], dict[str, Any]]] = {
    "starts": lambda stage, minutes, _: starts.in_a_row(stage, scaled(STARTS, minutes), time_limit_s(minutes)),
    "at_once": lambda stage, minutes, _: starts.at_once(stage, scaled(AT_ONCE, minutes)),
    "churn": lambda stage, minutes, left_s: churn.run(stage, max(0.2 * 60 * minutes, 0.4 * left_s)),
    "borrowers": lambda stage, minutes, left_s: borrowers.run(stage, max(0.3 * 60 * minutes, 0.5 * left_s)),
    "notebooks": lambda stage, minutes, left_s: notebooks.run(stage, max(0.2 * 60 * minutes, 0.5 * left_s)),
    "tenants": lambda stage, minutes, left_s: tenants.run(stage, max(0.2 * 60 * minutes, 0.8 * left_s)),
}


def soak(stage: Stage, minutes: float, phases: Iterable[str]) -> dict[str, Any]:
    """Run those phases; the result has leaks and mismatches."""
    until = time.monotonic() + 60 * minutes
    for device in range(DEVICES):  # the first start on a device creates files that stay
        with stage.container(["true"], memory="1Gi", way="runtime", device=device) as one:
            one.run()
    stage.cli("list")
    before = count(stage.node, stage.prefix)
    result: dict[str, Any] = {name: PHASES[name](stage, minutes, until - time.monotonic()) for name in phases}
    processes.reap_zombies()
    result["left"] = left(before, count(stage.node, stage.prefix))
    result["wrong"] = stage.wrong
    return result


def end_once(stopped: threading.Event) -> None:
    """Stop the soak at Ctrl-C or SIGTERM; a second signal does not stop the cleanup.

    A thread that starts processes may receive the signal, and then the main thread, where Python would handle it, does
    not wake. So the interpreter also notifies a thread: the workers end, and the main thread waits for them.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)

    def tell() -> None:
        os.read(reader, 1)
        stopped.set()

    threading.Thread(target=tell, daemon=True).start()

    def interrupt(*_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        stopped.set()
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)


def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix=f"soak-{os.getpid()}-", dir=host.BUILD)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=FULL_MINUTES)
    parser.add_argument("--json", type=Path, default=host.BUILD / "soak.json")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--only", choices=PHASES, action="append", help="run only this phase (may be repeated)")
    options = parser.parse_args(arguments)
    host.enter_private_mounts()
    processes.become_subreaper()
    begin = time.monotonic()
    with Show() as show, _directory() as work:
        try:
            with Stage(Path(work), show, options.seed) as stage:
                end_once(stage.stopped)
                result = soak(stage, options.minutes, options.only or PHASES)
        except (KeyboardInterrupt, Stopped):
            show.note("stopped; all containers are removed")
            return 130
    result = {"minutes": options.minutes, "seed": options.seed, "took_s": round(time.monotonic() - begin), **result}
    options.json.write_text(json.dumps(result, indent=2) + "\n")
    for line in (*result["left"], *result["wrong"]):
        print(f"soak: {line}")
    verdict = "leaks or errors found" if result["left"] or result["wrong"] else "no leaks, no errors"
    print(f"soak: {verdict}; {options.json} (seed {options.seed})")
    return 1 if result["left"] or result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
