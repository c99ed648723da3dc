"""Whole explanations, compared letter by letter: cases/<name>/config.json (+ facts.json) -> expected.txt.

host.json has the usual host, image and driver files; a case's facts.json changes parts of them and lists the leases of
other containers. After an intended change run `GOLDEN_WRITE=1 build/venv/bin/python -m pytest tests/golden` and read
the difference.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from gpushare.allocation import placement
from gpushare.core.errors import GpushareError
from gpushare.core.model import Config, Device, Image, Inventory, Lease, Node, Policy, Share, SharingRule
from gpushare.gpu.driverfiles import DataFile, DriverFiles, Library
from gpushare.gpu.driverroot import HostNode
from gpushare.inject import plan
from gpushare.programs import explain, why
from gpushare.request import oci, request

from tests.unit import pure

HERE = Path(__file__).parent
CASES = sorted(path.name for path in (HERE / "cases").iterdir())


def deep_tuple(value: Any) -> Any:
    return tuple(deep_tuple(item) for item in value) if isinstance(value, list) else value


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def facts_of(case: Path) -> tuple[Node, Image, DriverFiles, list[Lease]]:
    usual, own = read(HERE / "host.json"), read(case / "facts.json")
    host, image, files = ({**usual[key], **own.get(key, {})} for key in ("inventory", "image", "driver_files"))
    devices = tuple(Device(**device) for device in host["devices"])
    mig = tuple(devices[item["index"]]._replace(**item, parent=devices[item["index"]].uuid) for item in host["mig"])
    sharing = tuple(SharingRule(**rule) for rule in own.get("sharing", ()))
    config = Config(policy=Policy(**own.get("policy", {})), sharing=sharing, placement=own.get("placement", "binpack"))
    node = Node(config, Inventory(**{**host, "devices": devices, "mig": mig}))
    libraries = {key: Library(**{**files[key], "links": deep_tuple(files[key]["links"])}) for key in ("cuda", "nvml")}
    others = {
        key: tuple(Library(**{**item, "links": deep_tuple(item["links"])}) for item in files[key])
        for key in ("libraries", "libraries32")
    }
    data = tuple(DataFile(*item) for item in files["data"])
    nodes = tuple(HostNode(**item) if isinstance(item, dict) else HostNode(*item) for item in files["nodes"])
    plain = {key: deep_tuple(value) for key, value in files.items()}
    driver_files = DriverFiles(**{**plain, **libraries, **others, "nodes": nodes, "data": data})
    held = [
        lease(item["id"], (Share(0, devices[item["index"]], item["memory_limit_bytes"], item.get("compute_percent")),))
        for item in own.get("held", ())
    ]
    return node, Image(**{key: deep_tuple(value) for key, value in image.items()}), driver_files, held


def lease(container_id: str, shares: tuple[Share, ...]) -> Lease:
    return Lease(container_id, "reserved", "boot", "/bundle", shares, 1, 1)


def explained(case: Path) -> str:
    """Explain the case as the hook would, without effects."""
    node, image, driver_files, held = facts_of(case)
    try:
        bundle = oci.load_bundle(oci.State(case.name, 0, "created", str(case), {}), cri=True)
        asked = request.resolve(bundle, node)
        if asked is None:
            return explain.explain_text(None, None)
        request.refuse_conflicts(bundle, asked, node.inventory)
        ledger = placement.ledger_of(held, node.config.policy)
        shares = placement.grant(asked, node, ledger)
        mine = lease(bundle.id, shares) if shares else None
        made = plan.make_plan(bundle, asked, node, mine, image, driver_files)
    except GpushareError as error:
        return f"refused ({pure.kind(error)}, exit {error.exit_code}): {error}\n"
    return explain.explain_text(
        asked, made, why.placed(asked, node, ledger, shares), why.held(asked, node, ledger, shares)
    )


@pytest.mark.parametrize("name", CASES)
def test_explanation_matches_golden_file(name: str) -> None:
    case = HERE / "cases" / name
    text = explained(case)
    expected = case / "expected.txt"
    if os.environ.get("GOLDEN_WRITE"):
        expected.write_text(text)
    assert expected.exists() and text == expected.read_text(), f"{case.name} differs: GOLDEN_WRITE=1 writes it"


def test_cases_cover_every_kind() -> None:
    """An emptied directory must not pass."""
    texts = [(HERE / "cases" / name / "expected.txt").read_text() for name in CASES]
    assert len(CASES) >= 12
    for kind in ("RequestError", "PolicyError", "CapacityError", "DeviceError", "plan for", "left alone"):
        assert any(kind in text for text in texts), kind
