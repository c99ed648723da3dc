"""Run one of the programs in tests/hardware/tenants:  python -m tests.hardware.tenant WHAT JSON

It prints answers as lines of JSON: {"absent": reason} if this machine lacks something, {"failed": call} if a call
failed unexpectedly.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
from typing import Any, NoReturn

# name -> module of tests/hardware/tenants and its function
TENANTS = {
    "loaded": ("device", "loaded"),
    "device": ("device", "device"),
    "meter": ("device", "meter"),
    "context": ("device", "context"),
    "names": ("device", "names"),
    "nvml": ("device", "nvml"),
    "exported": ("device", "exported"),
    "fill": ("memory", "fill"),
    "pool": ("memory", "pool"),
    "prefetch": ("memory", "prefetch"),
    "calibrate": ("work", "calibrate"),
    "work": ("work", "work"),
    "pair": ("work", "pair"),
    "requests": ("work", "requests"),
    "slices": ("slices", "slices"),
    "bursts": ("slices", "bursts"),
    "looks": ("looks", "looks"),
    "queues": ("looks", "queues"),
    "modules": ("costs", "modules"),
    "write_module": ("costs", "write_module"),
    "local_memory": ("costs", "local_memory"),
    "reserved": ("costs", "reserved"),
    "tables": ("costs", "tables"),
    "descriptors": ("handles", "descriptors"),
    "export_cycles": ("handles", "export_cycles"),
    "green": ("handles", "green"),
    "runtime": ("handles", "runtime"),
    "forked": ("forks", "forked"),
    "patterned": ("suspend", "patterned"),
    "checkpointer": ("suspend", "checkpointer"),
    "behaviours": ("behaviours", "behaviours"),
    "count": ("counts", "count"),
    "churn": ("counts", "churn"),
    "driver_costs": ("counts", "driver_costs"),
    "limit_costs": ("counts", "limit_costs"),
    "torch_costs": ("counts", "torch_costs"),
    "imports": ("frameworks", "imports"),
    "framework": ("frameworks", "framework"),
    "nccl": ("frameworks", "nccl"),
    "program": ("programs", "program"),
    "torch_work": ("pytorch", "work"),
    "torch_graph": ("pytorch", "graph"),
}


def say(**what: Any) -> None:
    """Send a line to the parent, not through stdout, because libraries print there."""
    os.write(ANSWERS, json.dumps(what).encode() + b"\n")


def listen() -> Any:
    """Return the parent's next line; exit if the parent has ended."""
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    return json.loads(line)


def begin_at(asked: dict[str, Any]) -> float:
    """Sleep until the time `at` of a line, at which all programs of a measurement begin; return that time."""
    at = float(asked["at"])
    time.sleep(max(0.0, at - time.monotonic()))
    return at


def absent(why: str) -> NoReturn:
    say(absent=why)
    sys.exit(0)


def main(what: str, arguments: str) -> int:
    from tests.conformance.driver import DriverError

    module, function = TENANTS[what]
    try:
        getattr(importlib.import_module(f"tests.hardware.tenants.{module}"), function)(**json.loads(arguments))
    except (DriverError, AssertionError, OSError, RuntimeError) as error:
        say(failed=f"{type(error).__name__}: {error}".replace("DriverError: ", "")[:300])
    return 0


ANSWERS = 1
if __name__ == "__main__":
    sys.modules["tests.hardware.tenant"] = sys.modules["__main__"]
    faulthandler.enable()  # a crash inside a library of NVIDIA names the call
    ANSWERS = os.dup(1)
    os.dup2(2, 1)
    sys.exit(main(*sys.argv[1:]))
