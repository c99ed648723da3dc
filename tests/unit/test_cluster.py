"""tools/cluster: its arguments, its records, and the page of versions. Its checks need the programs of Kubernetes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import matrix_docs
from tools.cluster import __main__ as tool
from tools.cluster import checks
from tools.cluster.cluster import folders, with_engine, with_image


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kube", "/nonexistent"], "KUBE=/nonexistent: no program kube-apiserver kube-controller-manager"),
        ([], "KUBE=: no program"),
        (["--kube", "/", "drau"], "no check 'drau'; there are node manifests"),
    ],
)
def test_wrong_word_is_quoted(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tool.main(words)
    assert message in capsys.readouterr().err


def test_list_names_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{name} " in shown and checks.about(name) in shown for name in checks.CHECKS)


def test_record_replaces_the_result_of_the_same_releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "RECORD", tmp_path / "cluster.json")
    for kubernetes, engine, when in (
        ("1.36.0", "containerd", "2026-11-27"),
        ("1.35.1", "containerd", "2026-11-27"),
        ("1.36.0", "crio", "2026-11-27"),
        ("1.36.0", "containerd", "2026-11-28"),
    ):
        tool.record({"kubernetes": kubernetes, engine: "2.1.9", "when": when})
    rows = [(one["kubernetes"], "crio" in one, one["when"]) for one in json.loads(tool.RECORD.read_text())]
    assert rows == [
        ("1.35.1", False, "2026-11-27"),
        ("1.36.0", False, "2026-11-28"),
        ("1.36.0", True, "2026-11-27"),
    ]


def test_page_has_a_column_for_each_cluster() -> None:
    facts = dict.fromkeys(("etcd", "runc", "cgroups", "kernel", "when", "commit"), "x")
    rows = [{"name": "node", "about": "It runs", "passed": True}, {"name": "dra", "about": "Claims", "passed": False}]
    clusters = [
        {"kubernetes": "1.36.0", "containerd": "2.1.9", **facts, "checks": rows},
        {"kubernetes": "1.36.0", "crio": "1.36.3", **facts, "checks": rows[:1]},
    ]
    text = matrix_docs.page([], [], clusters)
    assert "| Kubernetes | 1.36.0 | 1.36.0 |\n" in text and "| containerd | 2.1.9 |  |\n| crio |  | 1.36.3 |\n" in text
    assert "| It runs | passed | passed |\n| Claims | **failed** | not run |\n" in text
    assert "## Kubernetes" not in matrix_docs.page([], [])


def test_other_version_changes_images_only() -> None:
    container = {"name": "x", "image": "gpushare-installer:0.1.0"}
    one = {"kind": "DaemonSet", "spec": {"template": {"spec": {"containers": [container]}}}}
    (changed,) = with_image([one], "9")
    assert changed["spec"]["template"]["spec"]["containers"] == [{"name": "x", "image": "gpushare-installer:9"}]
    assert container["image"] == "gpushare-installer:0.1.0"


def test_installer_configures_the_engine_of_the_node() -> None:
    def daemon_set(engine: str) -> dict[str, Any]:
        container = {"name": "x", "env": [{"name": "GPUSHARE_ENGINE", "value": engine}]}
        return {"kind": "DaemonSet", "spec": {"template": {"spec": {"containers": [container]}}}}

    assert with_engine([daemon_set("containerd"), daemon_set("none")], "crio") == [
        daemon_set("crio"),
        daemon_set("none"),
    ]


def test_every_folder_of_manifests_is_applied() -> None:
    assert {".", "installer", "plugin", "dra", "nri", "nri-required", "exporter", "remove"} <= set(folders())
    assert "audit" not in folders()  # a component
