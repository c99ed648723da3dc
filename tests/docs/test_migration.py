"""docs/migration.md: `gpushare explain` shows the same limits before and after each migration."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.docs import blocks
from tests.support.host import TREE, Node
from tests.support.runc import Container

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _no_leftovers(no_leaks: None) -> None:
    """No mount or process is left."""


class Side(NamedTuple):
    """The environment of a container, and keys of the node's configuration."""

    env: dict[str, str]
    config: dict[str, Any]


class Step(NamedTuple):
    name: str
    before: Side
    after: Side
    memory_bytes: int
    compute_percent: int


def side(text: str) -> Side:
    """The variables of the `ini` blocks in `text`, and the configuration of the `yaml` blocks."""
    env: dict[str, str] = {}
    config: dict[str, Any] = {}
    for language, lines in blocks.fenced(text):
        if language == "ini":
            env.update({name: value for name, _, value in (line.partition("=") for line in lines)})
        else:
            assert language == "yaml"
            config.update(yaml.safe_load("\n".join(lines)))
    return Side(env, config)


def steps() -> list[Step]:
    found = []
    for section in (TREE / "docs" / "migration.md").read_text().split("\n## ")[1:]:
        if "**Before**" not in section:
            continue
        _, before, after = re.split(r"\*\*(?:Before|After)\*\*", section)
        share = re.search(r"^Share: (\d+) (GiB|MiB), (\d+) % of compute", after, re.MULTILINE)
        assert share, section
        size = int(share[1]) * MIB * (1024 if share[2] == "GiB" else 1)
        found.append(Step(section.splitlines()[0], side(before), side(after), size, int(share[3])))
    return found


def test_page_covers_all_systems() -> None:
    assert [one.name for one in steps()] == [
        "From NVIDIA's time-slicing",
        "From HAMi",
        "From 4paradigm's device plugin",
        "From NVIDIA's GPU memory limits",
    ]


@pytest.mark.parametrize("step", steps(), ids=lambda step: step.name)
def test_limits_are_equal_before_and_after(
    container: Callable[..., Container], make_node: Callable[..., Node], simhost: Path, step: Step
) -> None:
    for name, one in (("before", step.before), ("after", step.after)):
        node = make_node(simhost, name, **one.config)
        bundle = container(["true"], env=one.env, hook=node.hook()).bundle
        explained = node.cli("explain", str(bundle), "--format", "json")
        assert explained.returncode == 0, explained.stderr
        (share,) = shares(json.loads(explained.stdout))
        assert share == (step.memory_bytes, step.compute_percent), name


def shares(explained: dict[str, Any]) -> list[tuple[int, int]]:
    """(memory, compute) of each device, as the container's limits file would have them."""
    (limits,) = [op for op in explained["plan"]["ops"] if op["op"] == "WriteLimits"]
    return [(share["memory_limit_bytes"], share["compute_percent"]) for share in limits["shares"]]
