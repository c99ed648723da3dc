"""packaging/: versions and names agree everywhere, and manifests match their APIs."""

from __future__ import annotations

import configparser
import json
import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from gpushare.cli import dra, export, k8s_plugin, nri
from gpushare.cli.main import COMMANDS
from gpushare.config import config, profiles
from gpushare.core import constants
from gpushare.engines import validator
from gpushare.integrations.nri import plugin as nri_plugin
from gpushare.state import storage

from tests.support import helm
from tests.support.host import TREE, version

PACKAGING = TREE / "packaging"
KUBERNETES = PACKAGING / "kubernetes"
KUSTOMIZATIONS = sorted(KUBERNETES.rglob("kustomization.yaml"))
INSTALLER = KUBERNETES / "installer"
APIS = ("1.30", kubernetes_validate.latest_version())  # the oldest version with every feature in use; the newest
PROJECT = (TREE / "pyproject.toml").read_text()
OTHERS = (
    "nodefeaturerule.yaml",
    "taint.yaml",
    "podmonitor.yaml",
    "servicemonitor.yaml",
    "prometheusrule.yaml",
    "kustomization.yaml",
)  # not Kubernetes' own APIs


def manifests() -> list[Path]:
    return sorted(path for path in KUBERNETES.rglob("*.yaml") if path.name not in OTHERS)


@pytest.mark.parametrize("path", manifests(), ids=lambda path: path.name)
@pytest.mark.parametrize("api", APIS)
def test_manifest_matches_kubernetes_schema(path: Path, api: str) -> None:
    """Validate against the published schemas of the API, where an unknown field is an error."""
    if {"dra", "one-line"} & set(path.parts):  # newer than the oldest version
        api = APIS[-1]
    for document in yaml.safe_load_all(path.read_text()):
        if document["kind"].startswith("MutatingAdmissionPolicy"):  # the schemas have an earlier version, in which
            document["apiVersion"] = "admissionregistration.k8s.io/v1beta1"  # all fields of v1 are
        kubernetes_validate.validate(document, api, strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate({**document, "more": 1}, api, strict=True)


@pytest.mark.parametrize("path", KUSTOMIZATIONS, ids=lambda path: path.parent.name)
def test_kustomization_names_existing_files(path: Path) -> None:
    value = yaml.safe_load(path.read_text())
    schema = json.loads((TREE / "tests/schemas/kustomization.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(value)
    assert value["kind"] == "Component" or value["resources"]
    for name in [*value.get("resources", []), *value.get("components", [])]:
        there = path.parent / name
        assert there.is_file() or (there / "kustomization.yaml").is_file(), name
        # kustomize refuses a folder that contains the folder naming it
        assert there.resolve() not in path.resolve().parents


def built(folder: Path) -> dict[tuple[str, str], Any]:
    """(kind, name) -> object, as kubectl applies the folder."""
    command = [helm.program("kubectl"), "kustomize", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(done.stdout)}


@pytest.mark.parametrize(
    ("folder", "components", "changed"),
    [
        (".", ("profiles",), "gpushare-installer"),
        ("dra", ("../profiles",), "gpushare-installer"),
        ("nri", ("../profiles",), "gpushare-installer"),
        ("plugin", ("../profiles",), "gpushare-installer"),
        ("plugin", ("xid",), "gpushare-plugin"),
        ("dra", ("xid",), "gpushare-dra"),
        (".", ("audit",), "gpushare"),
        ("plugin", ("../audit",), "gpushare"),
        (".", ("openshift",), "gpushare-installer"),
        ("dra", ("../openshift",), "gpushare-installer"),
    ],
)
def test_kubectl_builds_every_folder_and_its_components(
    folder: str, components: tuple[str, ...], changed: str, tmp_path: Path
) -> None:
    """kubectl applies the JSON patches as `patched` does."""
    tree = Path(shutil.copytree(KUBERNETES, tmp_path / "kubernetes"))
    for path in tree.rglob("kustomization.yaml"):
        if yaml.safe_load(path.read_text())["kind"] == "Kustomization":
            built(path.parent)
    path = tree / folder / "kustomization.yaml"
    before = built(path.parent)
    path.write_text(path.read_text() + f"components: {json.dumps(components)}\n")
    after = built(path.parent)
    (different,) = {key for key in before if before[key] != after[key]}
    assert different[1] == changed and before.keys() <= after.keys()
    name = os.path.normpath(f"{folder}/{components[0]}/kustomization.yaml")
    assert after[different] == patched(before[different], name)


def test_every_manifest_is_in_a_kustomization() -> None:
    named = {
        (path.parent / name).resolve()
        for path in KUSTOMIZATIONS
        for name in yaml.safe_load(path.read_text()).get("resources", [])
    }
    left = [path.name for path in KUBERNETES.rglob("*.yaml") if path.name != "kustomization.yaml" and path not in named]
    # Some clusters lack the APIs of Prometheus Operator; the policy names a namespace of the site.
    others = {"podmonitor.yaml", "servicemonitor.yaml", "prometheusrule.yaml", "networkpolicy.yaml"}
    assert {name for name in left if not name.startswith("example-")} == others


def daemon_set() -> Any:
    return yaml.safe_load((INSTALLER / "daemonset.yaml").read_text())


def test_installer_has_needed_rights() -> None:
    pod = daemon_set()["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (mount,) = container["volumeMounts"]
    program = (INSTALLER / "install.py").read_text()
    assert f'"{mount["mountPath"]}"' in program and mount["mountPropagation"] == "Bidirectional"
    assert pod["hostPID"] and container["securityContext"]["privileged"] and not pod["automountServiceAccountToken"]
    assert {one["name"] for one in container["env"]} <= set(re.findall(r'environ\.get\("(\w+)"', program))
    namespace = yaml.safe_load((INSTALLER / "namespace.yaml").read_text())["metadata"]
    assert namespace["name"] == daemon_set()["metadata"]["namespace"]
    assert namespace["labels"] == {
        "pod-security.kubernetes.io/enforce": "privileged",
        "security.openshift.io/scc.podSecurityLabelSync": "false",
    }


def pod_of(path: str) -> tuple[Any, Any]:
    """(the pod, its container) of a DaemonSet."""
    spec = yaml.safe_load((KUBERNETES / path).read_text())["spec"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    (container,) = spec["template"]["spec"]["containers"]
    return spec["template"]["spec"], container


def patched(value: Any, kustomization: str) -> Any:
    """The DaemonSet with the JSON patches for it."""
    value = json.loads(json.dumps(value))
    target = {"kind": value["kind"], "name": value["metadata"]["name"]}
    patches = yaml.safe_load((KUBERNETES / kustomization).read_text())["patches"]
    mine = [one for one in patches if one["target"] == target]
    assert mine
    for patch in mine:
        for step in yaml.safe_load(patch["patch"]):
            at: Any = value
            *parents, last = step["path"].strip("/").split("/")
            for word in parents:
                at = at[int(word) if isinstance(at, list) else word]
            if last == "-":
                at.append(step["value"])
            else:
                index = int(last) if isinstance(at, list) else last
                assert (step["op"] == "replace") == (index in at if isinstance(at, dict) else True), step
                at[index] = step["value"]
    return value


@pytest.mark.parametrize("name", ["installer", "nri", "plugin", "dra", "exporter"])
def test_rollout_stops_at_the_first_node_that_fails(name: str) -> None:
    spec = yaml.safe_load((KUBERNETES / f"{name}/daemonset.yaml").read_text())["spec"]
    assert spec["updateStrategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}}
    assert spec["minReadySeconds"] >= 10


def test_probes_call_the_programs_of_the_images() -> None:
    """An image has no shell."""
    (entry,) = re.findall(r"^ENTRYPOINT (.*)", (INSTALLER / "Dockerfile").read_text(), re.MULTILINE)
    _, installer = pod_of("installer/daemonset.yaml")
    assert installer["readinessProbe"]["exec"]["command"] == [*json.loads(entry), "ready"]
    commands = {"nri": nri.nri, "dra": dra.dra, "plugin": k8s_plugin.k8s_plugin}
    for name, command in commands.items():
        _, plugin = pod_of(f"{name}/daemonset.yaml")
        for kind, option in (("readiness", "check"), ("liveness", "alive" if name == "dra" else "check")):
            words = plugin[f"{kind}Probe"]["exec"]["command"]
            assert words == [*plugin["command"], plugin["args"][0], f"--{option}"]
            assert command.make_context(name, words[2:]).params[option]


def test_pods_that_are_confined_by_selinux_can_write_to_the_node() -> None:
    """A privileged pod is not confined. The images are built for one kind of machine."""
    for name in ("installer", "exporter", "nri", "plugin", "dra"):
        pod, container = pod_of(f"{name}/daemonset.yaml")
        security = container["securityContext"]
        assert security.get("privileged") or security["seLinuxOptions"] == {"type": "spc_t"}
        assert pod["nodeSelector"]["kubernetes.io/arch"] == "amd64"


def test_profiles_give_the_installer_what_it_reads() -> None:
    """Its node's name, a token, and the ConfigMap; the profile `cluster` is what the installer writes without a
    label."""
    install = runpy.run_path(str(INSTALLER / "install.py"))
    changed = patched(daemon_set(), "profiles/kustomization.yaml")
    for api in APIS:
        kubernetes_validate.validate(changed, api, strict=True)
    pod = changed["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["env"][-1] == {"name": "GPUSHARE_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    assert container["volumeMounts"][-1]["mountPath"] == install["PROFILES"] and pod["automountServiceAccountToken"]
    (shipped,) = yaml.safe_load_all((KUBERNETES / "profiles/profiles.yaml").read_text())
    assert pod["volumes"][-1]["configMap"]["name"] == shipped["metadata"]["name"]
    account = next(yaml.safe_load_all((KUBERNETES / "profiles/rbac.yaml").read_text()))["metadata"]
    assert (pod["serviceAccountName"], changed["metadata"]["namespace"]) == (account["name"], account["namespace"])
    parsed = {name: config.parse_config(text, name) for name, text in shipped["data"].items()}
    assert parsed["cluster.yaml"] == config.parse_config(profiles.text("cluster"), "cluster")
    assert parsed["equal-shares.yaml"]._replace(sharing=()) == parsed["cluster.yaml"]
    page = (TREE / "docs/kubernetes.md").read_text()
    assert f"{install['LABEL']}=equal-shares" in page


def test_installer_without_profiles_names_the_default_account() -> None:
    """The API server keeps the deprecated field `serviceAccount` when `serviceAccountName` is removed."""
    (installer,) = yaml.safe_load_all((KUBERNETES / "installer" / "daemonset.yaml").read_text())
    assert installer["spec"]["template"]["spec"]["serviceAccountName"] == "default"


@pytest.mark.parametrize("name", ["plugin", "dra", "nri"])
def test_pods_wait_for_the_state_directory_in_place_of_following_its_mount(name: str) -> None:
    """containerd refuses a propagated volume of a private mount, which the state directory is, so these pods start
    when it is mounted."""
    (one,) = yaml.safe_load_all((KUBERNETES / name / "daemonset.yaml").read_text())
    pod = one["spec"]["template"]["spec"]
    (state,) = (mount for mount in pod["containers"][0]["volumeMounts"] if mount["mountPath"] == "/run/gpushare")
    assert "mountPropagation" not in state
    marker = {"path": f"/run/gpushare/{storage._MARKER}", "type": "File"}
    assert marker in [volume["hostPath"] for volume in pod["volumes"]]


@pytest.mark.parametrize("name", ["installer", "plugin", "dra", "nri", "exporter"])
def test_kubelet_can_mount_the_file_for_the_termination_message(name: str) -> None:
    """runc creates no mount point in a read-only volume (seen with kubelet 1.36 and containerd 2.1: the DRA driver's
    container, which has the node's /dev, did not start)."""
    container = pod_of(f"{name}/daemonset.yaml")[1]
    message = container.get("terminationMessagePath", "/dev/termination-log")
    read_only = [mount["mountPath"] for mount in container.get("volumeMounts", ()) if mount.get("readOnly")]
    assert not [folder for folder in read_only if message.startswith(f"{folder}/")]


def test_nri_plugin_has_minimal_rights() -> None:
    """No privileges and no token. It writes one file of the state directory, and names the hook as on the node."""
    pod, container = pod_of("nri/daemonset.yaml")
    security = container["securityContext"]
    assert not {"hostPID", "hostNetwork", "serviceAccountName"} & pod.keys() and "privileged" not in security
    assert (security["allowPrivilegeEscalation"], security["capabilities"]) == (False, {"drop": ["ALL"]})
    assert pod["automountServiceAccountToken"] is False
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert mounts == [os.path.dirname(nri.SOCKET), constants.STATE_DIR, "/opt/gpushare"]
    assert mounts == [volume["hostPath"]["path"] for volume in pod["volumes"] if volume["name"] != "mounted"]
    given = nri.nri.make_context("nri", container["args"][1:]).params
    program = (INSTALLER / "install.py").read_text()
    assert given["hook"] == "/opt/gpushare/current/bin/gpushare-hook"
    (namespace,) = container["env"]
    assert namespace["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.namespace"}}
    assert given["ignore_namespace"] == f"$({namespace['name']})"
    assert '"GPUSHARE_FOLDER", "/opt/gpushare")' in program and 'FOLDER + "/current/bin/gpushare"' in program
    changed = patched(daemon_set(), "nri/kustomization.yaml")
    before, after = (one["spec"]["template"]["spec"]["containers"][0]["env"] for one in (daemon_set(), changed))
    assert before[0] == {"name": "GPUSHARE_ENGINE", "value": "containerd"}
    assert after == [{"name": "GPUSHARE_ENGINE", "value": "none"}, *before[1:]]


def test_pods_of_the_required_nri_plugin_start_without_it() -> None:
    """Otherwise a node could not start the plugin again. They need no network plugin, which is a pod
    as well; the installer mounts the state directory that the plugin needs."""
    patches = yaml.safe_load((KUBERNETES / "nri-required/kustomization.yaml").read_text())["patches"]
    steps = {
        (patch["target"]["name"], step["path"]): step["value"]
        for patch in patches
        for step in yaml.safe_load(patch["patch"])
        if step["op"] == "add"
    }
    installer, plugin, pod = "gpushare-installer", "gpushare-nri", "/spec/template"
    required = {"name": "GPUSHARE_REQUIRE_NRI", "value": "yes"}
    assert steps == {
        (installer, f"{pod}/spec/containers/0/env/-"): required,
        (installer, f"{pod}/spec/hostNetwork"): True,
        (plugin, f"{pod}/metadata/annotations"): {validator.OPTIONAL: "true"},
        (plugin, f"{pod}/spec/hostNetwork"): True,
    }
    for one in (daemon_set(), yaml.safe_load((KUBERNETES / "nri/daemonset.yaml").read_text())):
        assert one["metadata"]["name"] in (installer, plugin) and "hostNetwork" not in one["spec"]["template"]["spec"]
    # always: when a pod without the requirement replaces one that was killed, the engine may still require the plugin
    annotations = daemon_set()["spec"]["template"]["metadata"]["annotations"]
    assert annotations == {validator.OPTIONAL: "true", nri_plugin.IGNORED: "true"}
    assert required["name"] in (INSTALLER / "install.py").read_text()


def test_dra_driver_names_the_hook_of_the_node() -> None:
    """It stays on a node that loses its devices, because it must release claims."""
    pod, container = pod_of("dra/daemonset.yaml")
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term == {"matchExpressions": [{"key": "gpushare.io/present", "operator": "Exists"}]}
    given = dra.dra.make_context("dra", container["args"][1:]).params
    assert given["program"] == "/opt/gpushare/current/bin/gpushare-hook"


def test_plugin_has_minimal_rights() -> None:
    """No privileges and no token; it writes only kubelet's directory and reads from the state only the output of
    `refresh`."""
    pod, container = pod_of("plugin/daemonset.yaml")
    security = container["securityContext"]
    assert not {"hostPID", "hostNetwork", "serviceAccountName"} & pod.keys() and "privileged" not in security
    assert (security["allowPrivilegeEscalation"], security["capabilities"]) == (False, {"drop": ["ALL"]})
    assert pod["automountServiceAccountToken"] is False
    assert {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]} == {
        k8s_plugin.FOLDER: False,
        constants.STATE_DIR: True,
    }
    for mount, volume in zip(container["volumeMounts"], pod["volumes"]):
        assert (mount["name"], mount["mountPath"]) == (volume["name"], volume["hostPath"]["path"])
    assert container["args"][0] in COMMANDS
    k8s_plugin.k8s_plugin.make_context("k8s-plugin", container["args"][1:])
    assert 'gpushare("refresh")' in (INSTALLER / "install.py").read_text()


def test_plugin_that_watches_xid_errors_has_the_driver() -> None:
    """Privileged for the device nodes, and the driver's folder read-only; nothing else changes."""
    before, changed = (yaml.safe_load((KUBERNETES / "plugin/daemonset.yaml").read_text()) for _ in range(2))
    changed = patched(changed, "plugin/xid/kustomization.yaml")
    for api in APIS:
        kubernetes_validate.validate(changed, api, strict=True)
    pod, old = changed["spec"]["template"]["spec"], before["spec"]["template"]["spec"]
    (container,), (other,) = pod["containers"], old["containers"]
    mount, volume = container["volumeMounts"].pop(), pod["volumes"].pop()
    given = k8s_plugin.k8s_plugin.make_context("k8s-plugin", container["args"][1:]).params
    assert os.path.dirname(given["nvml"]) == mount["mountPath"] and mount["readOnly"]
    assert mount["name"] == volume["name"] and container["args"].pop().startswith("--nvml=")
    security = {"privileged": True, "runAsUser": 0, "readOnlyRootFilesystem": True}
    assert container.pop("securityContext") == security and other.pop("securityContext")
    assert changed == before


def test_exporter_service_and_monitor_match() -> None:
    pod, container = pod_of("exporter/daemonset.yaml")
    (service,) = yaml.safe_load_all((KUBERNETES / "exporter/service.yaml").read_text())
    (monitor,) = yaml.safe_load_all((KUBERNETES / "exporter/podmonitor.yaml").read_text())
    labels = {"app.kubernetes.io/name": "gpushare-exporter"}
    assert service["spec"]["selector"] == monitor["spec"]["selector"]["matchLabels"] == labels
    (port,) = container["ports"]
    (served,) = service["spec"]["ports"]
    assert (port["containerPort"], port["name"]) == (export.PORT, served["targetPort"])
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["interval"]) == (port["name"], "30s")
    verb, command, *words = container["args"]
    assert verb == "run" and command in COMMANDS and pod["hostPID"]
    assert export.export.make_context(command, words).params["listen"] == "0.0.0.0"


def test_removal_patches_the_command_and_goes_on_beside_a_node_in_use() -> None:
    """The pod of a node in use stays unready, and a DaemonSet replaces no more than maxUnavailable unready pods."""
    before, after = daemon_set(), patched(daemon_set(), "remove/kustomization.yaml")
    for api in APIS:
        kubernetes_validate.validate(after, api, strict=True)
    args = [one["spec"]["template"]["spec"]["containers"][0].pop("args") for one in (before, after)]
    most = [one["spec"]["updateStrategy"]["rollingUpdate"].pop("maxUnavailable") for one in (before, after)]
    assert (args, most) == ([["install"], ["remove"]], [1, "100%"]) and before == after


def test_version_and_licence_agree() -> None:
    (image,) = yaml.safe_load((INSTALLER / "kustomization.yaml").read_text())["images"]
    assert image == {"name": daemon_set()["spec"]["template"]["spec"]["containers"][0]["image"], "newTag": version()}
    for folder in ("plugin", "exporter"):
        (image,) = yaml.safe_load((KUBERNETES / folder / "kustomization.yaml").read_text())["images"]
        assert image == {"name": pod_of(f"{folder}/daemonset.yaml")[1]["image"], "newTag": version()}
    assert set(re.findall(r"gpushare-\w+-(\d+\.\d+\.\d+)\.t", (TREE / "docs/helm.md").read_text())) == {version()}
    files = ("installer/Dockerfile", "plugin/Dockerfile", "plugin/kustomization.yaml", "README.md")
    for name in ("README.md", "README.zh-CN.md", *(f"packaging/kubernetes/{name}" for name in files)):
        named = re.findall(r"gpushare[-_\w]*[-_:](\d+\.\d+\.\d+)", (TREE / name).read_text())
        assert named and set(named) == {version()}, name
    assert f"\n## {version()}" in (TREE / "CHANGELOG.md").read_text()
    text = (TREE / "LICENSE").read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert '\nlicense = "Apache-2.0"\n' in PROJECT
    assert yaml.safe_load((PACKAGING / "nfpm.yaml").read_text())["license"] == "Apache-2.0"


@pytest.mark.parametrize("path", sorted((PACKAGING / "systemd").iterdir()), ids=lambda path: path.name)
def test_units_run_existing_commands(path: Path) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(path)
    commands = [text for name, text in unit.items("Service") if name.startswith("Exec")] if "Service" in unit else []
    assert ("Service" in unit) == path.name.endswith(".service")
    for command in commands:
        program, name, *_ = command.split()
        assert program == "/usr/bin/gpushare"
        assert name in COMMANDS, command
    if "Path" in unit:
        assert (PACKAGING / "systemd" / unit["Path"]["Unit"]).is_file()


@pytest.mark.parametrize(
    ("arguments", "first"),
    [(["configure", ""], True), (["configure"], True), (["configure", "0.1.0"], False), (["1"], True), (["2"], False)],
)
def test_first_installation_names_the_next_step(arguments: list[str], first: bool) -> None:
    """Arguments of dpkg (Debian policy, 6.5) and of rpm."""
    script = re.sub(
        r"/usr/bin/gpushare|/(usr/libexec|run)/\S+", "/bin/true", (PACKAGING / "scripts/postinstall").read_text()
    )
    script = script.replace("[ -d /bin/true ]", "false").replace("[ -e /bin/true ]", "false")
    done = subprocess.run(["sh", "-s", *arguments], input=script, capture_output=True, text=True, check=True)
    assert ("gpushare runtime configure ENGINE" in done.stdout) == first and done.stderr == ""


@pytest.mark.parametrize("path", sorted((PACKAGING / "scripts").iterdir()), ids=lambda path: path.name)
def test_package_scripts_are_posix(path: Path) -> None:
    assert path.read_text().startswith("#!/bin/sh\n")
    subprocess.run(["sh", "-n", path], check=True)


def test_packaged_config_equals_defaults() -> None:
    """It equals the defaults, and is the only file that a profile replaces unasked."""
    path = PACKAGING / "config.yaml"
    assert config.parse_config(path.read_text(), str(path)) == config.Config()
    assert profiles.says_nothing(path.read_text())
    texts = ("", "version: 2\n", "version: 1\nlog: {}\n", "[", "\0", json.dumps({"version": 1, "runtime": {}}))
    assert not any(map(profiles.says_nothing, texts))
    assert not any(profiles.says_nothing(profiles.text(name)) for name in profiles.NAMES)
