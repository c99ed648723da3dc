"""Measure the worth of each part of the rate limiter: the increase of errors without it.

`python -m tests.limiter.ablation` compiles the limiter once for each part, with a line inserted that disables it, and
writes ablation.json for docs/internals/limiter.md. It takes some minutes.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.limiter import cells, test_spoof
from tests.limiter.cells import TREE, parallel
from tests.limiter.matrix import SEEDS, Cell, error, steady_cells, switch_cells

TABLE = Path(__file__).with_name("ablation.json")
COLUMNS = ("matrix", "slices and switch costs", "spoofed activity")


class Edit(NamedTuple):
    """A statement before which another one is inserted."""

    path: str
    before: str
    insert: str


CHARGE, CLAIMS, TRUST = (f"shim/limiter/{name}.c" for name in ("charge", "claims", "trust"))
PARTS: dict[str, list[Edit]] = {
    "probe events": [
        Edit(
            "tests/limiter/law.c",
            "    struct gpu *gpu = host->gpu;\n    struct context",
            "    if (stream == GS_LOOKS) return -1;\n",
        )
    ],
    "grants against reports": [Edit(CLAIMS, "    t->heard_ns = to;", "    return;\n")],
    "contradictory timestamps": [Edit(CLAIMS, "    claim->early = claim->late = 0;", "    return;\n")],
    "unexpected durations": [
        Edit(TRUST, "    if (most > DARING * ns)", "    return quantum > ns ? quantum : ns;\n"),
        Edit(TRUST, "    return longest_recent(f, now) > DARING", "    return false;\n"),
    ],
    "variance of durations": [Edit(TRUST, "    if (segment->probe || segment->work_ns <= 0 || own", "    return;\n")],
    "split by timestamps": [
        Edit("shim/limiter/split.c", "    struct timestamps s;", "    return (int64_t)(end - start) / t->contexts;\n")
    ],
    "second switch cost": [Edit(CHARGE, "    return c->over ?", "    return GS_HANDOVER;\n")],
    "early device clocks": [
        Edit(CHARGE, "    uint64_t start = segment->start_ns + t->early_ns;", "    t->early_ns = 0;\n")
    ],
    "other containers' switch costs": [
        Edit("shim/limiter/peers.c", "    return measured_by ?", "    if (!sure) return t->switch_ns;\n")
    ],
    "expected end of an interval": [Edit("shim/limiter/probe.c", "    uint64_t latest = even", "    even = false;\n")],
}


def build(folder: Path, edits: list[Edit]) -> Path:
    """Compile vt with the edits in a copy of the sources."""
    for name in ("shim", "tests/limiter"):
        shutil.copytree(TREE / name, folder / name)
    for edit in edits:
        path = folder / edit.path
        head, found, rest = path.read_text().partition(edit.before)
        assert found, edit
        path.write_text(head + edit.insert + found + rest)
    sources = [*folder.glob("tests/limiter/*.c"), *folder.glob("shim/limiter/*.c")]
    program = folder / "vt"
    flags = ("-std=gnu11", "-O2", "-w", "-ffp-contract=off", f"-I{folder}/shim")
    subprocess.run(["gcc", *flags, "-o", program, *sources, "-lm"], check=True)
    return program


def sample(chosen: list[Cell], n: int) -> list[tuple[Cell, int]]:
    """Return n of all pairs of a cell and a seed, the same ones each time."""
    return random.Random(1).sample(list(itertools.product(chosen, SEEDS)), n)


def cell_error(job: tuple[Cell, int]) -> float:
    return error(*job).mae_1s


def spoof_error(job: tuple[test_spoof.Company, str]) -> float:
    """Return the largest error of an honest container, or the gain of the other one."""
    company, spoof = job
    *honest, last = (ledger.share(test_spoof.START_MS) for ledger in test_spoof.run(company, spoof))
    errors = [abs(share - limit) for share, limit in zip(honest, company.limits)]
    return max(*errors, last - company.limits[-1])


def measure(edits: list[Edit]) -> list[list[float]]:
    """Return the errors of all runs, for each of COLUMNS."""
    with tempfile.TemporaryDirectory() as folder:
        cells.VT = build(Path(folder), edits)
        jobs = [(company, spoof) for company in test_spoof.COMPANIES for spoof in test_spoof.SPOOFS]
        return [
            parallel(sample(steady_cells(), 150), cell_error),
            parallel(sample(switch_cells(), 150), cell_error),
            parallel(jobs, spoof_error),
        ]


def main() -> None:
    base = measure([])
    table = {}
    for name, edits in PARTS.items():
        without = measure(edits)
        table[name] = [round(max(b - a for a, b in zip(*pair)), 1) for pair in zip(base, without)]
        print(name, *table[name], flush=True)
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in table.items())
    TABLE.write_text("{\n" + rows + "\n}\n")


if __name__ == "__main__":
    main()
