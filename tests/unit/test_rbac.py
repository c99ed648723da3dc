"""Accounts, roles and tokens in every rendered manifest and in the rendered chart.

The calls that each program makes are in tests/integration/test_api_calls.py, and the installer's in test_installer.py.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.support.apiserver import Call
from tests.support.rbac import Access, access, built, with_component
from tests.unit.test_helm import KUBERNETES, rendered

NONE = Access(False, frozenset())
# The programs that call the API server, and the manifest with their rules
CALLERS = {"gpushare-dra": "dra/rbac.yaml", "gpushare-installer": "profiles/rbac.yaml"}
FOLDERS = sorted(
    str(path.parent.relative_to(KUBERNETES))
    for path in KUBERNETES.rglob("kustomization.yaml")
    if yaml.safe_load(path.read_text())["kind"] == "Kustomization"
)
CHARTS = {
    "as shipped": "",
    "device plugin": "plugin.enabled=true,plugin.xid.enabled=true,exporter.enabled=true",
    "DRA": "dra.enabled=true,exporter.enabled=true",
    "NRI": "nri.enabled=true,exporter.enabled=true",
    "NRI required": "nri.enabled=true,nri.required=true",
    "NRI and DRA": "nri.enabled=true,dra.enabled=true",
    "two engines": "engines[0].name=containerd,engines[1].name=crio",
    "removal": "remove=true,dra.enabled=true,nri.enabled=true,plugin.enabled=false",
}


def expected(names: Any, with_profiles: bool) -> dict[str, Access]:
    """A program without calls has no token."""
    found = {}
    for name in names:
        program = "gpushare-installer" if name.startswith("gpushare-installer") else name
        calls = program in CALLERS and (with_profiles or program != "gpushare-installer")
        found[name] = Access(True, rights(CALLERS[program])) if calls else NONE
    return found


def rights(path: str) -> frozenset[Call]:
    (role,) = (one for one in yaml.safe_load_all((KUBERNETES / path).read_text()) if one["kind"] == "ClusterRole")
    return frozenset(Call(verb, group, name) for rule in role["rules"] for group in rule["apiGroups"]
                     for name in rule["resources"] for verb in rule["verbs"])  # fmt: skip


@pytest.mark.parametrize("with_profiles", [False, True], ids=["plain", "with profiles"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_manifests_give_tokens_and_rights_to_callers_only(folder: str, with_profiles: bool) -> None:
    objects = built(KUBERNETES / folder)
    if with_profiles and any(one["metadata"]["name"] == "gpushare-installer" for one in objects):
        objects = with_component("profiles", KUBERNETES / folder)
    found = access(objects)
    assert found == expected(found, with_profiles)


@pytest.mark.parametrize("with_profiles", [False, True], ids=["plain", "with profiles"])
@pytest.mark.parametrize("chart", CHARTS)
def test_chart_gives_tokens_and_rights_to_callers_only(chart: str, with_profiles: bool) -> None:
    options = ["--set", CHARTS[chart]] if CHARTS[chart] else []
    options += ["--set-json", 'profiles={"small": {"version": 1}}'] if with_profiles else []
    found = access(rendered(*options).values())
    assert found and found == expected(found, with_profiles)


def test_every_program_is_in_a_rendering() -> None:
    names = {name for folder in FOLDERS for name in access(built(KUBERNETES / folder))}
    programs = {path.parent.name for path in KUBERNETES.rglob("daemonset.yaml")}
    assert names == {f"gpushare-{name}" for name in programs} == {f"gpushare-{name}" for name in PROGRAMS}


PROGRAMS = ("dra", "exporter", "installer", "nri", "plugin")


def test_admission_runs_in_the_api_server() -> None:
    """Its policies are expressions: no program answers them, so none needs a right for that. They read the request and
    nothing else: a policy with parameters would need an account that can read these."""
    policies = [
        one
        for path in sorted(KUBERNETES.rglob("*.yaml"))
        for one in yaml.safe_load_all(path.read_text())
        if "Webhook" in one["kind"] or one["kind"].startswith("ValidatingAdmissionPolicy")
    ]
    assert {one["kind"] for one in policies} == {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    for one in policies:
        assert "paramKind" not in one["spec"] and "paramRef" not in one["spec"]
        assert "authorizer" not in json.dumps(one) and "namespaceObject" not in json.dumps(one)


def changed(objects: list[Any], kind: str, change: Any) -> list[Any]:
    copy = json.loads(json.dumps(objects))
    change(next(one for one in copy if one["kind"] == kind))
    return list(copy)


def test_wrong_rights_are_found() -> None:
    objects = built(KUBERNETES / "dra")
    good = access(objects)["gpushare-dra"]
    wider = access(changed(objects, "ClusterRole", lambda one: one["rules"][0]["verbs"].append("list")))
    assert wider["gpushare-dra"].rights - good.rights == {Call("list", "resource.k8s.io", "resourceclaims")}
    for kind, change in (
        ("ClusterRole", lambda one: one["rules"][0]["verbs"].append("*")),
        ("ClusterRoleBinding", lambda one: one["subjects"][0].update(name="default")),
        ("ServiceAccount", lambda one: one["metadata"].update(name="other")),
    ):
        with pytest.raises((AssertionError, KeyError)):
            access(changed(objects, kind, change))
    (pod,) = (one for one in built(KUBERNETES / "plugin") if one["kind"] == "DaemonSet" and "plugin" in str(one))
    del pod["spec"]["template"]["spec"]["automountServiceAccountToken"]
    assert access([pod])["gpushare-plugin"] != NONE
