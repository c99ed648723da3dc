"""The text of docs/versions.md, from the results in tests/matrix: a row of generated.py.

`make matrix`, `make engines`, `make pythons` and `make cluster` copy their results there with RECORD=yes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).resolve().parents[1] / "tests" / "matrix"

HEAD = """\
# Tested versions

`make docs` generates this page from results of `make matrix`, which runs the tests in a root directory with another
release of Debian, and of `make engines`, which runs the tests of an engine with programs that you have. Nothing is
listed that did not run. The tests use a simulated GPU.

```sh
make matrix SUITE=trixie                       # bookworm, trixie or sid; the root stays in build/matrix
make matrix SUITE=sid PARTS="lint engines"     # some parts
make matrix SUITE=sid RECORD=yes               # also copy the counts to tests/matrix, for this page
make engines ENGINES=DIR RECORD=yes            # DIR/NAME has containerd, crio or dockerd of one release
```
"""
COLUMNS = ("kernel", "gcc", "libc", "python", "systemd")
LABELS = {"gcc": "gcc", "libc": "glibc", "python": "Python"}


def table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines) + "\n"


def engine(name: str, versions: dict[str, str]) -> str:
    """`name`, such as "podman rootless with crun", with versions."""
    return " ".join(f"{word} {versions[word]}" if word in versions else word for word in name.split())


class Recorded(NamedTuple):
    """The results of make matrix, make pythons and make cluster."""

    suites: list[dict[str, Any]]
    pythons: list[dict[str, Any]] = []
    clusters: list[dict[str, Any]] = []


def recorded() -> Recorded:
    files = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    pythons, clusters = files.pop("pythons", []), files.pop("cluster", [])
    return Recorded(list(files.values()), pythons, clusters)


def python_section(pythons: list[dict[str, Any]]) -> list[str]:
    """The versions of Python in the order of their numbers."""
    if not pythons:
        return []
    pythons = sorted(pythons, key=lambda row: [int(part) for part in row["python"].split(".")])
    rows: list[tuple[object, ...]] = []
    for row in pythons:
        counts = (row.get(key, row.get("broken")) for key in ("passed", "failed", "skipped"))
        rows.append((row["python"], *counts, row["when"], f"`{row['commit']}`"))
    left_out = [
        f"* Python {row['python']} does not run {name}: {reason}.\n"
        for row in pythons
        for name, reason in row.get("left_out", {}).items()
    ]
    return [
        "## Python\n",
        "`make pythons` runs the unit tests with other versions of Python. These ran on Debian 12.\n",
        table(("Python", "passed", "failed", "skipped", "date", "commit"), rows),
        *(["".join(left_out)] if left_out else []),
    ]


CLUSTER = """\
## Kubernetes

`make cluster` runs one node of a real cluster: API server, controller manager, scheduler, kubelet, etcd, and containerd
or CRI-O, with simulated GPUs. node-feature-discovery is not there; the tool itself gives the node its labels and its
memory.

```sh
make cluster KUBE=DIR                   # DIR: kube-apiserver, kubelet, kubectl and the others of one release
make cluster KUBE=DIR CONTAINERD=1.7    # Debian's containerd 1.7 in place of 2.1, or a folder
make cluster KUBE=DIR CRIO=DIR          # CRI-O of a folder with crio and pinns
```
"""


def cluster_section(clusters: Sequence[dict[str, Any]]) -> list[str]:
    """A row for each check, and a column for each cluster."""
    if not clusters:
        return []
    facts = ("containerd", "crio", "etcd", "runc", "cgroups", "kernel", "when", "commit")
    rows: list[tuple[object, ...]] = [
        (name, *(one.get(name, "") for one in clusters)) for name in facts if any(name in one for one in clusters)
    ]
    outcomes = [{check["name"]: (check["about"], check["passed"]) for check in one["checks"]} for one in clusters]
    for name, (about, _) in {name: row for one in outcomes for name, row in one.items()}.items():
        words = ("not run" if name not in one else "passed" if one[name][1] else "**failed**" for one in outcomes)
        rows.append((about, *words))
    return [CLUSTER, table(("Kubernetes", *(one["kubernetes"] for one in clusters)), rows)]


def page(results: list[dict[str, Any]], pythons: list[dict[str, Any]], clusters: Sequence[dict[str, Any]] = ()) -> str:
    suites, engines, parts, failures = [], [], [], []
    for one in results:
        suite, versions = one["suite"], one["versions"]
        if set(COLUMNS) <= set(versions):  # `make engines` has only those of the engine
            suites.append((suite, *(versions[name] for name in COLUMNS)))
        for name, part in one["parts"].items():
            run = (part["when"], f"`{part['commit']}`")
            counts = tuple(part.get(key, part.get("broken")) for key in ("passed", "failed", "skipped"))
            parts.append((suite, name, *counts, *run))
            for row in part.get("engines", ()):
                cells = (engine(row["engine"], versions), suite, row["cgroups"], row["way"])
                engines.append((*cells, row["passed"], row["failed"], row["skipped"], *run))
            failures += [f"* {suite}: `{test}`" for test in part.get("failures", ())]
    counts = ("passed", "failed", "skipped", "date", "commit")
    sections = [
        HEAD,
        "## Engines\n",
        "A test that runs by several engines or ways counts in each row.\n",
        table(("engine", "release", "cgroup driver", "way", *counts), sorted(engines)),
        "## Releases\n",
        table(("release", *(LABELS.get(name, name) for name in COLUMNS)), suites),
        "## All parts\n",
        table(("release", "part", *counts), parts),
        *cluster_section(clusters),
        *python_section(pythons),
    ]
    failures += [f"* Python {row['python']}: `{test}`" for row in pythons for test in row.get("failures", ())]
    if failures:
        sections += ["## Failed tests\n", "\n".join(failures) + "\n"]
    return "\n".join(sections)
