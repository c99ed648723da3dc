"""`make soak`: what days of use would bring, in MINUTES (10). Exit code 1 on any leak or mismatch, 130 after Ctrl-C.

python -m tests.soak [--minutes N] [--json FILE] [--seed N]
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.lib import host, processes

from . import churn, starts, tenants
from .show import Show
from .stage import DEVICES, Stage, Stopped
from .traces import left, look

STARTS, AT_ONCE = 1000, 100  # in FULL_MINUTES, and as much less in fewer
FULL_MINUTES = 10.0
# Parts of the time. Starts are a number; their part is where they end when the machine is slow.
STARTS_PART, CHURN_PART, TENANTS_PART = 0.4, 0.25, 0.2


def soak(stage: Stage, minutes: float) -> dict[str, Any]:
    """All phases; what was left behind and what was wrong is in the result."""
    scale = min(1.0, minutes / FULL_MINUTES)
    seconds = 60 * minutes
    for device in range(DEVICES):  # the first start on a device makes what stays
        with stage.container(["true"], memory="1Gi", way="runtime", device=device) as one:
            one.run()
    stage.cli("list")
    before = look(stage.node, stage.prefix)
    result: dict[str, Any] = {
        "starts": starts.in_a_row(stage, round(STARTS * scale), STARTS_PART * seconds),
        "at_once": starts.at_once(stage, max(8, round(AT_ONCE * scale))),
        "churn": churn.run(stage, CHURN_PART * seconds),
        "tenants": tenants.run(stage, TENANTS_PART * seconds),
    }
    processes.reap_zombies()
    result["left"] = left(before, look(stage.node, stage.prefix))
    result["wrong"] = stage.wrong
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=FULL_MINUTES)
    parser.add_argument("--json", type=Path, default=host.BUILD / "soak.json")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    host.enter_private_mounts()
    processes.become_subreaper()
    begin = time.monotonic()
    with Show() as show, tempfile.TemporaryDirectory(prefix="soak-", dir=host.BUILD) as work:
        try:
            with Stage(Path(work), show, options.seed) as stage:
                result = soak(stage, options.minutes)
        except (KeyboardInterrupt, Stopped):
            show.note("ended; what ran is removed")
            return 130
    result = {"minutes": options.minutes, "seed": options.seed, "took_s": round(time.monotonic() - begin), **result}
    options.json.write_text(json.dumps(result, indent=2) + "\n")
    for line in (*result["left"], *result["wrong"]):
        print(f"soak: {line}")
    verdict = "something was left or wrong" if result["left"] or result["wrong"] else "nothing left, nothing wrong"
    print(f"soak: {verdict}; {options.json} (seed {options.seed})")
    return 1 if result["left"] or result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
