"""docs/kubernetes.md, "Beside NVIDIA's programs": no name of gpushare is one of theirs, and nothing removes what is
theirs. The names of NVIDIA are those of its device plugin, GPU feature discovery, DRA driver and GPU Operator."""

from __future__ import annotations

import re

import pytest
import yaml
from gpushare.engines import base
from gpushare.integrations import cdi, dra, labels
from gpushare.integrations.dra import claims, service
from gpushare.integrations.kubelet import offers, plugin

from tests.support.host import TREE
from tests.unit import pure

MANIFESTS = TREE / "packaging" / "kubernetes"
NVIDIA = re.compile(r"(^|[./-])nvidia\b")


def documented() -> dict[str, tuple[str, str]]:
    """The table of the page: what -> the names of gpushare and those of NVIDIA."""
    page = (TREE / "docs/kubernetes.md").read_text()
    rows = page.partition("## Beside NVIDIA's programs")[2].partition("\n* ")[0].splitlines()
    cells = [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in rows if row.startswith("| ")]
    return {what: (ours, theirs) for what, ours, theirs in cells[1:]}


def of_manifests(kind: str) -> set[str]:
    """The names of all objects of this kind."""
    texts = (path.read_text() for path in MANIFESTS.rglob("*.yaml") if "/chart/" not in str(path))
    found = (one for text in texts for one in yaml.safe_load_all(text) if isinstance(one, dict))
    return {one["metadata"]["name"] for one in found if one.get("kind") == kind}


NAMES = {
    "file for node-feature-discovery": {labels.FILE.rpartition("/")[2]},
    "CDI devices": {cdi.KIND, claims.KIND},
    "RuntimeClass and handler": {*of_manifests("RuntimeClass"), base.RUNTIME},
    "DRA driver": {dra.DRIVER},
    "kubelet's sockets": {"gpushare-all-0123abcd.sock", service.REGISTRATION_SOCKET},
    "resources": set(offers.resources(1, {}).values()),
}


@pytest.mark.parametrize("what", NAMES)
def test_no_name_is_one_of_nvidia_s(what: str) -> None:
    ours, theirs = documented()[what]
    for name in NAMES[what]:
        assert not NVIDIA.search(name)
        begin = re.split(r"[-./]", name)[0]
        assert begin in ours and f"`{name}`" not in theirs


def test_labels_of_a_node_are_gpushare_s() -> None:
    lines = [line for line in labels.feature_file(pure.node()).splitlines() if not line.startswith("#")]
    assert lines and all(line.startswith("gpushare.io/") for line in lines)
    assert documented()["labels of nodes"] == ("`gpushare.io/...`", "`nvidia.com/...`")


def test_sockets_of_nvidia_s_plugin_are_not_taken_for_older_ones() -> None:
    for name in ("nvidia-gpu.sock", "nvidia-mig-1g.10gb.sock", "gpu.nvidia.com-reg.sock", "kubelet.sock"):
        assert not plugin._SOCKET_NAME.fullmatch(name)
