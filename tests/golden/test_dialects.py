"""Requests of other schedulers and their results: dialects/<row>.txt, one block for each container.

    == the purpose of this case
    NAME=value            a variable
    @key=value            an annotation
    !key=value            a field of Policy, or else of Config, JSON
    --
    dialect ...           the output of `gpushare explain` above the plan, or the refusal

On this host index, minor and the slot inside a container differ for every device. After an intended change run
`GOLDEN_WRITE=1 build/venv/bin/python -m pytest tests/golden` and read the difference.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from gpushare.allocation import placement
from gpushare.core.errors import GpushareError
from gpushare.core.model import Device, Inventory, Lease, Node, Policy
from gpushare.inject import plan
from gpushare.programs import explain
from gpushare.request import request
from gpushare.request.dialects import registry

from tests.unit import pure

HERE = Path(__file__).parent / "dialects"
FILES = sorted(HERE.glob("*.txt"))
UUIDS = tuple(f"GPU-{letter * 8}-0000-0000-0000-000000000000" for letter in "abc")
MINORS = (2, 0, 1)  # minors of the devices by index
DEVICES = tuple(
    Device(index, uuid, MINORS[index], f"0000:0{index + 1}:00.0", "Test GPU", 16 << 30, 512 << 20)
    for index, uuid in enumerate(UUIDS)
)


class Case(NamedTuple):
    title: str
    given: list[str]
    expected: str


def cases(path: Path) -> list[Case]:
    found = []
    for block in path.read_text().split("== ")[1:]:
        head, _, expected = block.partition("--\n")
        title, *given = head.splitlines()
        found.append(Case(title, [line for line in given if line], expected.strip("\n")))
    return found


def _rule(line: str) -> tuple[str, Any]:
    name, _, value = line[1:].partition("=")
    return name, json.loads(value)


def explained(case: Case) -> str:
    env = [line for line in case.given if line[0] not in "@!"]
    annotations = dict(line[1:].split("=", 1) for line in case.given if line[0] == "@")
    rules: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in (_rule(line) for line in case.given if line[0] == "!")
    }
    config = {key: rules.pop(key) for key in tuple(rules) if key not in Policy._fields}
    node = Node(pure.node(**rules).config._replace(**config), Inventory("/", pure.VERSION, DEVICES))
    bundle = pure.bundle(*env, annotations=annotations)
    try:
        asked = request.resolve(bundle, node) if request.mentions(bundle) else None
        if asked is None:
            return explain.explain_text(None, None).rstrip("\n")
        shares = placement.grant(asked, node, pure.ledger())
        lease = Lease(bundle.id, "reserved", "boot", "/bundle", shares, 1, 1)
        made = plan.make_plan(bundle, asked, node, lease if shares else None, pure.image(), pure.files())
    except GpushareError as error:
        return f"refused ({pure.kind(error)}): {error}"
    text = explain.explain_text(asked, made).partition("\n\nplan for")[0]
    return "\n".join(line for line in text.splitlines() if not line.startswith("capabilities"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_requests_match_golden_file(path: Path) -> None:
    found = cases(path)
    made = [case._replace(expected=explained(case)) for case in found]
    text = "\n".join("\n".join((f"== {case.title}", *case.given, "--", case.expected)) + "\n" for case in made)
    if os.environ.get("GOLDEN_WRITE"):
        path.write_text(text)
    for before, after in zip(found, made):
        assert after.expected == before.expected, f"{before.title}: GOLDEN_WRITE=1 writes {path.name}"
    assert text == path.read_text(), f"{path.name} differs: GOLDEN_WRITE=1 writes it"


def test_every_dialect_has_accepted_and_refused_cases() -> None:
    """An emptied file must not pass either."""
    assert {path.stem for path in FILES} == {row.name for row in registry.SCHEDULERS} | {"together"}
    for path in FILES:
        texts = [case.expected for case in cases(path)]
        assert len(texts) >= 4, path.stem
        assert any("gets" in text for text in texts), path.stem
        assert any("refused (RequestError)" in text and '="' in text for text in texts), path.stem


@pytest.mark.parametrize("row", registry.SCHEDULERS, ids=lambda row: row.name)
def test_every_variable_and_annotation_has_a_case(row: registry.Row) -> None:
    given_text = "\n".join(line for case in cases(HERE / f"{row.name}.txt") for line in case.given)
    words = (*row.variables, *row.annotations, *row.scoped)
    assert [word.name for word in words if word.name not in given_text] == []
