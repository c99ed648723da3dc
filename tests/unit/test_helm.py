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
from tests.unit.test_packaging import patched

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
            newest = one["kind"] == "DeviceClass"  # newer than the oldest version
            kubernetes_validate.validate(one, kubernetes_validate.latest_version() if newest else API, strict=True)
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
        ("plugin.resourceNames.cores=nvidia.com/gpucores", "cores"),
        ("plugin.resourceNames.memory=gpumem", "resourceNames/memory"),
        ("plugin.xid.ignore={x}", "xid/ignore"),
        ("profiles.small.policy=x", "version"),
        ("profiles.a/b.version=1", "a/b"),
        ("plugin.enabled=true,dra.enabled=true", "would count the same memory twice"),
        ("nri.required=true", "nri.required needs nri.enabled"),
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
        (("dra.enabled=true",), "gpushare-dra", "dra/daemonset.yaml"),
        (("nri.enabled=true",), "gpushare-nri", "nri/daemonset.yaml"),
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


def bare(one: Any) -> Any:
    """A DaemonSet without the image, which the chart prefixes with the registry."""
    (container,) = one["spec"]["template"]["spec"]["containers"]
    for key in ("image", "imagePullPolicy"):
        container.pop(key, None)
    return one


def test_xid_and_resource_names_reach_the_plugin() -> None:
    """With `xid`, the DaemonSet is that of the kustomization's component."""
    on = ("--set", "plugin.enabled=true,plugin.xid.enabled=true")
    found = bare(rendered(*on)["DaemonSet", "gpushare-plugin"])
    args = found["spec"]["template"]["spec"]["containers"][0]["args"]
    usual = ",".join(map(str, k8s_plugin.IGNORED_XIDS))
    assert args.pop() == f"--ignore-xid={usual}"
    assert found == bare(patched(plain("plugin/daemonset.yaml"), "plugin/xid/kustomization.yaml"))
    names = {"memory": "nvidia.com/gpumem", "devices": "nvidia.com/gpu"}
    more = ("--set-json", f"plugin.resourceNames={json.dumps(names)}", "--set-json", "plugin.xid.ignore=[]")
    pod = rendered(*on, *more, "--set", "plugin.xid.folder=/usr/lib64")["DaemonSet", "gpushare-plugin"]["spec"]
    (container,) = pod["template"]["spec"]["containers"]
    given = k8s_plugin.k8s_plugin.make_context("k8s-plugin", container["args"][1:]).params
    assert given["resources"] == tuple(f"{kind}={name}" for kind, name in sorted(names.items()))
    assert (given["nvml"], given["ignored"]) == ("/driver/libnvidia-ml.so.1", "none")
    assert pod["template"]["spec"]["volumes"][-1]["hostPath"]["path"] == "/usr/lib64"


def test_dra_driver_is_rendered_for_the_namespace() -> None:
    on = ("--set", "dra.enabled=true")
    found = rendered(*on)
    for path in ("dra/rbac.yaml", "dra/node.yaml", "dra/deviceclass.yaml"):
        for one in yaml.safe_load_all((KUBERNETES / path).read_text()):
            assert found[one["kind"], one["metadata"]["name"]] == one
    assert ("NodeFeatureRule", "gpushare") not in found  # the slices count the memory
    other = rendered(*on, "--namespace", "gpus")
    assert "system:serviceaccount:gpus:gpushare-dra" in json.dumps(other["ValidatingAdmissionPolicy", "gpushare-dra"])
    (subject,) = other["ClusterRoleBinding", "gpushare-dra"]["subjects"]
    places = {one["metadata"]["namespace"] for one in other.values() if "namespace" in one["metadata"]}
    assert {subject["namespace"]} == places == {"gpus"}
    done = call("template", "gpushare", CHART, *REGISTRY, *on, "--kube-version", "1.33.0")
    assert "dra.enabled needs Kubernetes 1.34" in done.stderr
    assert ("DaemonSet", "gpushare-dra") not in rendered(*on, "--set", "remove=true")


def test_nri_plugin_leaves_the_engine_alone() -> None:
    """As with packaging/kubernetes/nri; pods have no RuntimeClass, so no policy may require it."""
    found = rendered("--set", "nri.enabled=true")
    assert bare(found["DaemonSet", "gpushare-installer"]) == bare(
        patched(plain("installer/daemonset.yaml"), "nri/kustomization.yaml")
    )
    assert not {"RuntimeClass", "ValidatingAdmissionPolicy"} & {kind for kind, _ in found}
    assert ("DaemonSet", "gpushare-nri") not in rendered("--set", "nri.enabled=true,remove=true")


def test_nri_plugin_can_be_required() -> None:
    """As with packaging/kubernetes/nri-required."""
    found = rendered("--set", "nri.enabled=true,nri.required=true")
    for name, path in (("installer", "installer/daemonset.yaml"), ("nri", "nri/daemonset.yaml")):
        set_of = found["DaemonSet", f"gpushare-{name}"]
        expected = plain(path)
        if name == "installer":
            expected = patched(expected, "nri/kustomization.yaml")
        assert bare(set_of) == bare(patched(expected, "nri-required/kustomization.yaml"))


def test_profiles_reach_the_installer() -> None:
    """With the profiles of packaging/kubernetes/profiles, the objects are those of its component."""
    config_map = plain("profiles/profiles.yaml")
    wanted = {name.removesuffix(".yaml"): yaml.safe_load(text) for name, text in config_map["data"].items()}
    found = rendered("--set-json", f"profiles={json.dumps(wanted)}")
    assert bare(found["DaemonSet", "gpushare-installer"]) == bare(
        patched(plain("installer/daemonset.yaml"), "profiles/kustomization.yaml")
    )
    for one in yaml.safe_load_all((KUBERNETES / "profiles/rbac.yaml").read_text()):
        assert found[one["kind"], one["metadata"]["name"]] == one
    data = found["ConfigMap", "gpushare-profiles"].pop("data")
    assert config_map.pop("data") and found["ConfigMap", "gpushare-profiles"] == config_map
    assert {name: yaml.safe_load(text) for name, text in data.items()} == {f"{key}.yaml": wanted[key] for key in wanted}


@pytest.mark.parametrize(("plugin", "path"), [(False, "admissionpolicy.yaml"), (True, "plugin/admissionpolicy.yaml")])
def test_policy_and_counting_match_the_plugin(plugin: bool, path: str) -> None:
    """Memory is counted once: by node-feature-discovery, or by the plugin."""
    found = rendered("--set", f"plugin.enabled={str(plugin).lower()}")
    expected = {one["kind"]: one for one in yaml.safe_load_all((KUBERNETES / path).read_text())}
    assert {kind: one for (kind, _), one in found.items() if kind in expected} == expected
    assert (("NodeFeatureRule", "gpushare") in found) is not plugin
    assert found["RuntimeClass", "gpushare"] == plain("runtimeclass.yaml")
    least = rendered("--set", "runtimeClass.enabled=false,admissionPolicy.enabled=false,installer.enabled=false")
    assert {kind for kind, _ in least} == {"NodeFeatureRule"}


def test_chart_has_our_version_and_profiles() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == version()
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(schema["properties"]["profile"]["enum"]) == set(profiles.NAMES)
