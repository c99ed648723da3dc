"""Every row of the table, with hook and runtime."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import runc
from tests.support.host import Node
from tests.support.runc import Container, RuntimeFailed

from . import proof, rules, table
from .scene import Scene

# Python 3.12 and newer reads lists as deep as Go does, so nothing is left to refuse. A snapshot has Python 3.11.
DEEP = "lists 9000 deep"


@pytest.fixture
def scene(no_leaks: None, tmp_path: Path, way: str, node: Node) -> Iterator[Scene]:
    one = Scene(tmp_path, way, node)
    yield one
    one.close()


def rows(some: tuple[table.Attack, ...] | tuple[table.Race, ...]) -> list[object]:
    omitted = table.resembling()
    found: list[object] = []
    for row in some:
        marks = [pytest.mark.cve(*row.cves), *([pytest.mark.long] if row.name in omitted else [])]
        found.append(pytest.param(row, marks=marks, id=row.name.replace("/", "|")))
    return found


def names_of_ours(one: Container) -> set[str]:
    """Driver files in the image's own layer."""
    upper = one.bundle / "disk" / "upper"
    return {str(path) for path in upper.rglob("*") if re.search("nvidia|libcuda|gpushare", path.name)}


@pytest.mark.parametrize("attack", rows(table.ATTACKS))
def test_attack(attack: table.Attack, scene: Scene, record_property: Callable[[str, object], None]) -> None:
    attack.prepare(scene)
    scene.write_spec()
    before, mounts = proof.host_state(scene.node, scene.host), proof.mount_table(scene.node)
    image = names_of_ours(scene.one)
    expected = attack.expected(scene.way, runc.LOW_LEVEL)
    if attack.name == DEEP and sys.version_info >= (3, 12):
        expected = table.SHARE
    error = scene.start()
    if error is not None and table.NULL_IS_CHECKED in error.message:
        expected = table.RUNC
    try:
        record_property("outcome", outcome_of(error, expected))
        if isinstance(expected, table.Other):
            if expected == table.NO_GPU:
                assert error is None, error
                proof.require_no_gpu(scene.one)
            elif expected == table.DENIED:
                assert error is None, error
                rules.opens_no_gpu(scene.one)
        elif expected is None:
            assert error is None, error
            for act in scene.inside:
                act(scene.one)
            proof.require_share(scene.node, scene.one)
        else:
            assert error is not None, "the container has started"
            proof.require_refusal(error, expected.words, expected.by)
    finally:
        scene.end()
    if error is not None:
        scene.node.after_failed_create()
    assert proof.differences(before, proof.host_state(scene.node, scene.host)) == {}
    assert proof.mount_table(scene.node) == mounts
    proof.require_nothing_left(scene.node)
    if error is not None and ours_alone(scene.way, error):
        assert names_of_ours(scene.one) == image


def outcome_of(error: RuntimeFailed | None, expected: table.Verdict) -> str:
    """Return the refusal's message or the start's outcome, for the report."""
    if error is not None:
        return error.last_line
    return expected.words if isinstance(expected, table.Other) else "share"


def ours_alone(way: str, error: RuntimeFailed) -> bool:
    """Whether gpushare refused before the low-level runtime made its mount points: empty files in the image."""
    by_low_level = ("runc create failed", "error executing hook")
    return "gpushare: " in error.message and (way == "hook" or not any(word in error.message for word in by_low_level))


@pytest.mark.parametrize("race", rows(table.RACES))
def test_race(race: table.Race, scene: Scene, record_property: Callable[[str, object], None]) -> None:
    before, mounts = proof.host_state(scene.node, scene.host), proof.mount_table(scene.node)
    shares, refusals = race.run(scene)
    record_property("outcome", f"{shares} shares, {refusals} refusals")
    assert shares + refusals >= 3
    assert proof.differences(before, proof.host_state(scene.node, scene.host)) == {}
    assert proof.mount_table(scene.node) == mounts
    proof.require_nothing_left(scene.node)
