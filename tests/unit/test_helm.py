"""packaging/helm: real helm renders the chart, and what it renders matches the API and the plain manifests."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from gpushare.cli import k8s_plugin
from gpushare.config import profiles

from tests.support import helm
from tests.support.host import TREE, version

CHART = TREE / "packaging" / "helm" / "gpushare"
KUBERNETES = TREE / "packaging" / "kubernetes"
REGISTRY = ("--set", "image.registry=registry.site/gpu")
API = "1.30"
OTHERS = ("NodeFeatureRule", "PodMonitor")  # not Kubernetes' own APIs


def call(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(word) for word in (helm.program(), *words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def rendered(*options: str) -> dict[tuple[str, str], Any]:
    """(kind, name) -> document, each checked against its API."""
    done = call("template", "gpushare", CHART, "--namespace", "gpushare", *REGISTRY, *options)
    assert done.returncode == 0, done.stderr
    found = {}
    for one in filter(None, yaml.safe_load_all(done.stdout)):
        if one["kind"] in OTHERS:
            schema = json.loads((TREE / "tests/schemas" / f"{one['kind'].lower()}.json").read_text())
            jsonschema.Draft202012Validator(schema).validate(one)
        else:
            kubernetes_validate.validate(one, API, strict=True)
        found[one["kind"], one["metadata"]["name"]] = one
    return found


def plain(path: str) -> Any:
    return yaml.safe_load((KUBERNETES / path).read_text())


def test_lint_finds_nothing() -> None:
    done = call("lint", "--strict", CHART, *REGISTRY)
    assert done.returncode == 0 and "0 chart(s) failed" in done.stdout, done.stdout + done.stderr


def test_missing_registry_is_named() -> None:
    done = call("template", "gpushare", CHART)
    assert done.returncode != 0 and "set image.registry to where you pushed gpushare's images" in done.stderr


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("engines[0].name=docker", "engines/0/name"),
        ("profile=fast", "profile"),
        ("plugin.memoryUnit=1", "memoryUnit"),
        ("exportr.enabled=true", "exportr"),
        ("image.registry=registry.site/", "registry"),
    ],
)
def test_wrong_value_is_refused_by_name(option: str, message: str) -> None:
    done = call("template", "gpushare", CHART, *REGISTRY, "--set", option)
    assert done.returncode != 0 and message in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("options", "name", "path"),
    [
        ((), "gpushare-installer", "installer/daemonset.yaml"),
        (("plugin.enabled=true",), "gpushare-plugin", "plugin/daemonset.yaml"),
        (("exporter.enabled=true",), "gpushare-exporter", "exporter/daemonset.yaml"),
    ],
)
def test_defaults_equal_plain_manifests(options: tuple[str, ...], name: str, path: str) -> None:
    set_of = rendered(*(word for option in options for word in ("--set", option)))["DaemonSet", name]
    expected = plain(path)
    for one in (set_of, expected):
        one["spec"]["template"]["spec"]["containers"][0].pop("imagePullPolicy", None)
    container = expected["spec"]["template"]["spec"]["containers"][0]
    container["image"] = f"registry.site/gpu/{container['image']}:{version()}"
    assert set_of == expected


def test_values_reach_the_pods() -> None:
    values = {
        "image": {"tag": "9", "pullSecrets": ["site"], "pullPolicy": "Always"},
        "engines": [{"name": "crio", "nodeSelector": {"engine": "crio"}}, {"name": "containerd"}],
        "profile": "workstation",
        "plugin": {"enabled": True, "memoryUnit": "256Mi"},
        "exporter": {"enabled": True, "podMonitor": True, "tolerations": [], "resources": {}},
        "remove": True,
    }
    found = rendered(
        *(word for name, value in values.items() for word in ("--set-json", f"{name}={json.dumps(value)}"))
    )
    assert {name for kind, name in found if kind == "DaemonSet"} == {
        "gpushare-installer", "gpushare-installer-containerd", "gpushare-plugin", "gpushare-exporter",
    }  # fmt: skip
    first = found["DaemonSet", "gpushare-installer"]["spec"]["template"]["spec"]
    (container,) = first["containers"]
    assert first["nodeSelector"] == {"engine": "crio"} and first["imagePullSecrets"] == [{"name": "site"}]
    assert (container["args"], container["image"]) == (["remove"], "registry.site/gpu/gpushare-installer:9")
    assert container["imagePullPolicy"] == "Always"
    assert {one["name"]: one["value"] for one in container["env"]} == {
        "GPUSHARE_ENGINE": "crio",
        "GPUSHARE_PROFILE": "workstation",
    }
    second = found["DaemonSet", "gpushare-installer-containerd"]["spec"]
    assert second["selector"]["matchLabels"] == second["template"]["metadata"]["labels"]
    assert second["selector"] != found["DaemonSet", "gpushare-installer"]["spec"]["selector"]
    (plugin,) = found["DaemonSet", "gpushare-plugin"]["spec"]["template"]["spec"]["containers"]
    k8s_plugin.k8s_plugin.make_context("k8s-plugin", plugin["args"][1:])
    assert "--memory-unit=256Mi" in plugin["args"]
    assert found["DaemonSet", "gpushare-exporter"]["spec"]["template"]["spec"]["tolerations"] == []
    assert ("PodMonitor", "gpushare-exporter") in found and ("Service", "gpushare-exporter") in found


@pytest.mark.parametrize(("plugin", "path"), [(False, "admissionpolicy.yaml"), (True, "plugin/admissionpolicy.yaml")])
def test_policy_and_counting_match_the_plugin(plugin: bool, path: str) -> None:
    """Memory is counted once: by node-feature-discovery, or by the plugin."""
    found = rendered("--set", f"plugin.enabled={str(plugin).lower()}")
    expected = {one["kind"]: one for one in yaml.safe_load_all((KUBERNETES / path).read_text())}
    assert {kind: one for (kind, _), one in found.items() if kind in expected} == expected
    assert (("NodeFeatureRule", "gpushare") in found) is not plugin
    assert found["RuntimeClass", "gpushare"] == plain("runtimeclass.yaml")
    bare = rendered("--set", "runtimeClass.enabled=false,admissionPolicy.enabled=false,installer.enabled=false")
    assert {kind for kind, _ in bare} == {"NodeFeatureRule"}


def test_chart_has_our_version_and_profiles() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == version()
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(schema["properties"]["profile"]["enum"]) == set(profiles.NAMES)
