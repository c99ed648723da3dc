"""packaging/helm: real helm renders the chart, and what it renders matches the API and the plain manifests."""

from __future__ import annotations

import http.server
import json
import subprocess
import threading
import urllib.parse
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from gpushare.cli import dra, k8s_plugin
from gpushare.cli.options import IGNORED_XIDS
from gpushare.config import profiles

from tests.support import helm
from tests.support.host import TREE, version
from tests.unit.test_packaging import patched

CHART = TREE / "packaging" / "helm" / "gpushare"
KUBERNETES = TREE / "packaging" / "kubernetes"
REGISTRY = ("--set", "image.registry=registry.site/gpu")
API = "1.30"
COMPLETING = ("MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding")
OTHERS = ("NodeFeatureRule", "PodMonitor", "ServiceMonitor", "PrometheusRule")  # not Kubernetes' own APIs


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
            newest = one["kind"] in ("DeviceClass", *COMPLETING)  # newer than the oldest version
            if one["kind"] in COMPLETING:  # the schemas have an earlier version, with the same fields
                one = {**one, "apiVersion": "admissionregistration.k8s.io/v1beta1"}
            kubernetes_validate.validate(one, kubernetes_validate.latest_version() if newest else API, strict=True)
        found[one["kind"], one["metadata"]["name"]] = one
    return found


def plain(path: str) -> Any:
    return yaml.safe_load((KUBERNETES / path).read_text())


def test_lint_finds_nothing() -> None:
    done = call("lint", "--strict", CHART, *REGISTRY)
    assert done.returncode == 0 and "0 chart(s) failed" in done.stdout, done.stdout + done.stderr


def test_files_of_the_chart_are_links_to_the_manifests() -> None:
    """A copy would be out of date after the next change."""
    files = list((CHART / "files").iterdir())
    assert files and [path.name for path in files if not path.is_symlink() or not path.exists()] == []


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
        ("image.digests.installer=0.1.0", "digests/installer"),
        ("image.architecture=riscv64", "architecture"),
        ("folder=/opt", "folder"),
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
    set_of["metadata"].pop("annotations", None)  # of Helm
    container = expected["spec"]["template"]["spec"]["containers"][0]
    container["image"] = f"registry.site/gpu/{container['image']}:{version()}"
    assert set_of == expected


def variables(pod: Any) -> dict[str, str]:
    (container,) = pod["containers"]
    return {one["name"]: one["value"] for one in container["env"]}


K3S = {"name": "containerd", "configFile": "/var/lib/rancher/k3s/agent/etc/containerd/config.toml"}


def test_values_reach_the_pods() -> None:
    values = {
        "image": {"tag": "9", "pullSecrets": ["site"], "pullPolicy": "Always"},
        "engines": [{"name": "crio", "nodeSelector": {"engine": "crio"}}, K3S],
        "profile": "workstation",
        "plugin": {"enabled": True, "memoryUnit": "256Mi"},
        "exporter": {"enabled": True, "podMonitor": True, "tolerations": [], "resources": {}},
    }
    found = rendered(
        *(word for name, value in values.items() for word in ("--set-json", f"{name}={json.dumps(value)}"))
    )
    assert {name for kind, name in found if kind == "DaemonSet"} == {
        "gpushare-installer", "gpushare-installer-containerd", "gpushare-plugin", "gpushare-exporter",
        "gpushare-remove",
    }  # fmt: skip
    first = found["DaemonSet", "gpushare-installer"]["spec"]["template"]["spec"]
    (container,) = first["containers"]
    assert first["nodeSelector"] == {"engine": "crio", "kubernetes.io/arch": "amd64"} and first["imagePullSecrets"] == [
        {"name": "site"}
    ]
    assert (container["args"], container["image"]) == (["install"], "registry.site/gpu/gpushare-installer:9")
    assert container["imagePullPolicy"] == "Always"
    assert variables(first) == {
        "GPUSHARE_ENGINE": "crio",
        "GPUSHARE_PROFILE": "workstation",
        "GPUSHARE_REQUIRE_CDI": "no",
    }
    second = found["DaemonSet", "gpushare-installer-containerd"]["spec"]
    assert variables(second["template"]["spec"])["GPUSHARE_CONFIG_FILE"] == K3S["configFile"]
    assert second["selector"]["matchLabels"] == second["template"]["metadata"]["labels"]
    assert second["selector"] != found["DaemonSet", "gpushare-installer"]["spec"]["selector"]
    (plugin,) = found["DaemonSet", "gpushare-plugin"]["spec"]["template"]["spec"]["containers"]
    k8s_plugin.k8s_plugin.make_context("k8s-plugin", plugin["args"][1:])
    assert "--memory-unit=256Mi" in plugin["args"]
    assert found["DaemonSet", "gpushare-exporter"]["spec"]["template"]["spec"]["tolerations"] == []
    assert ("PodMonitor", "gpushare-exporter") in found and ("Service", "gpushare-exporter") in found


def test_images_can_be_named_by_digest_and_for_another_machine() -> None:
    digest = "sha256:" + "0" * 64
    found = rendered("--set", f"image.digests.plugin={digest},image.architecture=arm64,dra.enabled=true")
    pods = {name: one["spec"]["template"]["spec"] for (kind, name), one in found.items() if kind == "DaemonSet"}
    assert pods["gpushare-dra"]["containers"][0]["image"] == f"registry.site/gpu/gpushare-plugin@{digest}"
    assert pods["gpushare-installer"]["containers"][0]["image"].endswith(f"gpushare-installer:{version()}")
    assert {pod["nodeSelector"]["kubernetes.io/arch"] for pod in pods.values()} == {"arm64"}


def test_folder_of_the_programs_is_the_same_in_every_pod() -> None:
    """Container-Optimized OS can write and run programs below /home/kubernetes/bin only."""
    folder = "/home/kubernetes/bin/gpushare"
    on = "dra.enabled=true,nri.enabled=true,exporter.enabled=true"
    found = rendered("--set", f"folder={folder},{on}")
    assert "/opt/gpushare" not in json.dumps([one for (kind, _), one in found.items() if kind == "DaemonSet"])
    for name in ("installer", "remove", "exporter"):
        (container,) = found["DaemonSet", f"gpushare-{name}"]["spec"]["template"]["spec"]["containers"]
        assert {"name": "GPUSHARE_FOLDER", "value": folder} in container["env"]
    for name in ("dra", "nri"):
        assert f"{folder}/current/bin/gpushare-hook" in json.dumps(found["DaemonSet", f"gpushare-{name}"])
    assert folder in json.dumps(found["DaemonSet", "gpushare-nri"]["spec"]["template"]["spec"]["volumes"])


@pytest.mark.parametrize("options", ["", "plugin.enabled=true,exporter.enabled=true,installer.enabled=false"])
def test_quota_admits_pods_of_the_priority_class(options: str) -> None:
    """GKE creates pods of system-node-critical outside of kube-system only in a namespace with such a quota. It goes
    with the release, so the pods that are left after it have no such class."""
    found = rendered("--set", options) if options else rendered()
    (selected,) = found["ResourceQuota", "gpushare-critical"]["spec"]["scopeSelector"]["matchExpressions"]
    classes = {
        name: one["spec"]["template"]["spec"].get("priorityClassName")
        for (kind, name), one in found.items()
        if kind == "DaemonSet"
    }
    assert classes.pop("gpushare-remove", None) is None
    assert set(classes.values()) - {None} == set(selected["values"])


def test_exporter_can_be_kept_to_prometheus() -> None:
    on = "exporter.enabled=true,exporter.networkPolicy=metrics"
    policy = rendered("--set", on)["NetworkPolicy", "gpushare-exporter"]
    assert policy["spec"]["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "gpushare-exporter"}
    (rule,) = policy["spec"]["ingress"]
    labels = {"kubernetes.io/metadata.name": "metrics"}
    assert rule == {"from": [{"namespaceSelector": {"matchLabels": labels}}], "ports": [{"port": "metrics"}]}
    assert ("NetworkPolicy", "gpushare-exporter") not in rendered("--set", "exporter.enabled=true")


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
    usual = ",".join(map(str, IGNORED_XIDS))
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
            here = found[one["kind"], one["metadata"]["name"]]
            here["metadata"].pop("annotations", None)  # of Helm
            assert here == one
    assert ("NodeFeatureRule", "gpushare") not in found  # the slices count the memory
    other = rendered(*on, "--namespace", "gpus")
    assert "system:serviceaccount:gpus:gpushare-dra" in json.dumps(other["ValidatingAdmissionPolicy", "gpushare-dra"])
    (subject,) = other["ClusterRoleBinding", "gpushare-dra"]["subjects"]
    places = {one["metadata"]["namespace"] for one in other.values() if "namespace" in one["metadata"]}
    assert {subject["namespace"]} == places == {"gpus"}
    done = call("template", "gpushare", CHART, *REGISTRY, *on, "--kube-version", "1.33.0")
    assert "dra.enabled needs Kubernetes 1.34" in done.stderr


def test_dra_driver_can_watch_xid_errors_and_serve_old_names() -> None:
    """As the components of the manifests."""
    on = "dra.enabled=true,dra.xid.enabled=true,dra.taint=NoExecute,dra.nvidiaGpu=true"
    found = rendered("--set", on)
    one = bare(found["DaemonSet", "gpushare-dra"])
    del one["metadata"]["annotations"]  # of Helm
    *args, ignored, taint = one["spec"]["template"]["spec"]["containers"][0]["args"]
    given = dra.dra.make_context("dra", [*args[1:], ignored, taint]).params
    assert (given["ignored"], given["effect"]) == (",".join(map(str, IGNORED_XIDS)), "NoExecute")
    one["spec"]["template"]["spec"]["containers"][0]["args"] = args
    assert one == bare(patched(plain("dra/daemonset.yaml"), "dra/xid/kustomization.yaml"))
    classes = {name: one["spec"] for (kind, name), one in found.items() if kind == "DeviceClass"}
    names = {name: spec.pop("extendedResourceName") for name, spec in classes.items()}
    assert names == {"gpushare.io": "gpushare.io/gpu", "nvidia.gpushare.io": "nvidia.com/gpu"}
    assert classes["gpushare.io"] == classes["nvidia.gpushare.io"]


def test_claims_require_cdi() -> None:
    """As with packaging/kubernetes/dra."""
    found = rendered("--set", "dra.enabled=true")["DaemonSet", "gpushare-installer"]
    assert bare(found) == bare(patched(plain("installer/daemonset.yaml"), "dra/kustomization.yaml"))


def test_driver_outlives_the_claims() -> None:
    """Only the driver can release a prepared claim. Without the DeviceClass there are no new ones. `helm uninstall`
    keeps the driver and its rights, unless the removal came first."""
    on = ("--set", "dra.enabled=true")
    notes = {key: one["metadata"].get("annotations", {}) for key, one in rendered(*on).items()}
    policy = {key: found.get("helm.sh/resource-policy") for key, found in notes.items()}
    kept = {kind for (kind, name), value in policy.items() if value == "keep" and name == "gpushare-dra"}
    assert kept == {
        "DaemonSet", "ServiceAccount", "ClusterRole", "ClusterRoleBinding",
        "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding",
    }  # fmt: skip
    assert policy["DeviceClass", "gpushare.io"] is None
    removing = rendered(*on, "--set", "remove=true")
    assert not any("annotations" in one["metadata"] for one in removing.values())
    assert kept <= {kind for kind, name in removing if name == "gpushare-dra"}
    assert ("DeviceClass", "gpushare.io") not in removing


def test_removal_ends_what_offers_devices() -> None:
    """The installer's pods remove gpushare when nothing uses it; other pods of gpushare would use it."""
    on = "plugin.enabled=true,exporter.enabled=true,nri.enabled=true,remove=true"
    found = rendered("--set", on)
    assert {name for kind, name in found if kind == "DaemonSet"} == {"gpushare-installer"}
    assert bare(rendered("--set", "remove=true")["DaemonSet", "gpushare-installer"]) == bare(
        patched(plain("installer/daemonset.yaml"), "remove/kustomization.yaml")
    )


def test_uninstall_starts_the_removal() -> None:
    """As with packaging/kubernetes/remove, under another name, on the nodes of all engines."""
    found = rendered("--set-json", 'engines=[{"name": "crio", "nodeSelector": {"engine": "crio"}}]')
    one = bare(found["DaemonSet", "gpushare-remove"])
    assert one["metadata"].pop("annotations") == {
        "helm.sh/hook": "pre-delete", "helm.sh/hook-delete-policy": "before-hook-creation",
    }  # fmt: skip
    expected = bare(patched(plain("installer/daemonset.yaml"), "remove/kustomization.yaml"))
    expected["spec"]["template"]["spec"]["containers"][0].pop("env")
    del expected["spec"]["template"]["spec"]["priorityClassName"]  # its quota goes with the release
    text = json.dumps(expected).replace('"gpushare-installer"', '"gpushare-remove"')
    assert one == json.loads(text)


class Cluster(http.server.BaseHTTPRequestHandler):
    """An API server with the DaemonSets `names`; Helm asks it for its version, its APIs and DaemonSets."""

    names: tuple[str, ...] = ()

    def do_GET(self) -> None:
        path = urllib.parse.urlsplit(self.path).path
        group = {"name": "apps", "versions": [{"groupVersion": "apps/v1", "version": "v1"}]}
        kind = {"name": "daemonsets", "namespaced": True, "kind": "DaemonSet", "verbs": ["get"]}
        found: dict[str, Any] = {
            "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"},
            "/api": {"kind": "APIVersions", "versions": []},
            "/apis": {"kind": "APIGroupList", "groups": [group]},
            "/apis/apps/v1": {"kind": "APIResourceList", "groupVersion": "apps/v1", "resources": [kind]},
        }
        for name in self.names:
            one = {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": name}}
            found[f"/apis/apps/v1/namespaces/gpushare/daemonsets/{name}"] = one
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        self.send_response(200 if path in found else 404)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(found.get(path, status)).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("names", "option", "refused"),
    [
        ((), "remove=false", False),
        (("gpushare-remove",), "remove=false", True),
        (("gpushare-remove",), "remove=true", False),
    ],
)
def test_forgotten_removal_is_named(names: tuple[str, ...], option: str, refused: bool) -> None:
    """It would remove what a new release installs, again and again."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Here", (Cluster,), {"names": names})) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            words = ["template", "gpushare", CHART, "--namespace", "gpushare", *REGISTRY, "--set", option]
            done = call(*words, "--dry-run=server", "--kube-apiserver", f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            thread.join()
    line = "first run: kubectl delete daemonset gpushare-remove --namespace gpushare"
    rendered_line = "unable to build kubernetes objects from release manifest"  # this server has no schemas
    assert (line in done.stderr, rendered_line in done.stderr) == (refused, not refused), done.stderr


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
    assert ("NodeFeatureRule", "gpushare-one-sum") not in found  # of several GPUs
    one_sum = rendered("--set", f"plugin.enabled={str(plugin).lower()},oneSum=true")
    assert (("NodeFeatureRule", "gpushare-one-sum") in one_sum) is not plugin
    assert ("MutatingAdmissionPolicy", "gpushare") not in found
    one_line = rendered("--set", f"plugin.enabled={str(plugin).lower()},oneLine=true")
    shipped = list(
        yaml.safe_load_all((KUBERNETES / Path(path).parent / "one-line/mutatingadmissionpolicy.yaml").read_text())
    )
    assert one_line["MutatingAdmissionPolicy", "gpushare"]["spec"] == shipped[0]["spec"]
    assert found["RuntimeClass", "gpushare"] == plain("runtimeclass.yaml")
    least = rendered("--set", "runtimeClass.enabled=false,admissionPolicy.enabled=false,installer.enabled=false")
    assert {kind for kind, _ in least} == {"NodeFeatureRule", "ResourceQuota"}


def test_policy_can_warn_first_and_leaves_out_the_namespace_of_the_release() -> None:
    """As with packaging/kubernetes/audit."""
    kinds = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    policy, binding = (
        rendered("--set", "admissionPolicy.enforce=false", "--namespace", "gpus")[kind, "gpushare"] for kind in kinds
    )
    (selector,) = policy["spec"]["matchConstraints"]["namespaceSelector"]["matchExpressions"]
    assert selector["values"] == ["kube-system", "gpus"]
    assert binding == patched(rendered()[kinds[1], "gpushare"], "audit/kustomization.yaml")


@pytest.mark.parametrize(
    ("value", "path"), [("podMonitor", "podmonitor"), ("serviceMonitor", "servicemonitor"), ("rules", "prometheusrule")]
)
def test_monitors_and_rules_are_those_of_the_manifests(value: str, path: str) -> None:
    expected = plain(f"exporter/{path}.yaml")
    found = rendered("--set", f"exporter.enabled=true,exporter.{value}=true")
    assert found[expected["kind"], expected["metadata"]["name"]] == expected
    assert (expected["kind"], expected["metadata"]["name"]) not in rendered("--set", "exporter.enabled=true")


def test_values_of_an_earlier_release_are_enough() -> None:
    """`helm upgrade --reuse-values` does not add the defaults of keys that are new in the chart."""
    new = ("admissionPolicy.enforce", "exporter.podMonitor", "exporter.serviceMonitor", "exporter.rules")
    absent = [f"--set={key}=null" for key in new]
    assert rendered("--set", "exporter.enabled=true", *absent) == rendered("--set", "exporter.enabled=true")


def test_chart_has_our_version_and_profiles() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == version()
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(schema["properties"]["profile"]["enum"]) == set(profiles.NAMES)
