"""packaging/: what is handed out says the same of itself everywhere, and its manifests are what their APIs know."""

from __future__ import annotations

import configparser
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from gpushare.cli import export, k8s_plugin
from gpushare.cli.main import COMMANDS
from gpushare.config import config, profiles
from gpushare.core import constants

from tests.support.host import TREE, version

PACKAGING = TREE / "packaging"
KUBERNETES = PACKAGING / "kubernetes"
KUSTOMIZATIONS = sorted(KUBERNETES.rglob("kustomization.yaml"))
INSTALLER = KUBERNETES / "installer"
API = "1.30"  # the oldest that has all that we use
PROJECT = (TREE / "pyproject.toml").read_text()
OTHERS = ("nodefeaturerule.yaml", "taint.yaml", "podmonitor.yaml", "kustomization.yaml")  # not of Kubernetes itself


def manifests() -> list[Path]:
    return sorted(path for path in KUBERNETES.rglob("*.yaml") if path.name not in OTHERS)


@pytest.mark.parametrize("path", manifests(), ids=lambda path: path.name)
def test_manifests_are_what_kubernetes_published(path: Path) -> None:
    """Against the schemas of its API, as they were published; an unknown field is refused there."""
    for document in yaml.safe_load_all(path.read_text()):
        kubernetes_validate.validate(document, API, strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate({**document, "more": 1}, API, strict=True)


@pytest.mark.parametrize("path", KUSTOMIZATIONS, ids=lambda path: path.parent.name)
def test_kustomizations_name_what_is_there(path: Path) -> None:
    value = yaml.safe_load(path.read_text())
    schema = json.loads((TREE / "tests/schemas/kustomization.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(value)
    for name in value["resources"]:
        there = path.parent / name
        assert there.is_file() or (there / "kustomization.yaml").is_file(), name
        # kustomize refuses a folder that holds the one which names it
        assert there.resolve() not in path.resolve().parents


def test_no_manifest_is_forgotten() -> None:
    named = {
        (path.parent / name).resolve()
        for path in KUSTOMIZATIONS
        for name in yaml.safe_load(path.read_text())["resources"]
    }
    left = [path.name for path in KUBERNETES.rglob("*.yaml") if path.name != "kustomization.yaml" and path not in named]
    assert [name for name in left if not name.startswith("example-")] == ["podmonitor.yaml"]  # not all have its API


def daemon_set() -> Any:
    return yaml.safe_load((INSTALLER / "daemonset.yaml").read_text())


def test_the_installer_can_do_what_it_has_to() -> None:
    pod = daemon_set()["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (mount,) = container["volumeMounts"]
    program = (INSTALLER / "install.py").read_text()
    assert f'"{mount["mountPath"]}"' in program and mount["mountPropagation"] == "Bidirectional"
    assert pod["hostPID"] and container["securityContext"]["privileged"] and not pod["automountServiceAccountToken"]
    assert {one["name"] for one in container["env"]} <= set(re.findall(r'environ\.get\("(\w+)"', program))
    namespace = yaml.safe_load((INSTALLER / "namespace.yaml").read_text())["metadata"]
    assert namespace["name"] == daemon_set()["metadata"]["namespace"]
    assert namespace["labels"] == {"pod-security.kubernetes.io/enforce": "privileged"}


def pod_of(path: str) -> tuple[Any, Any]:
    """(the pod, its container) of a DaemonSet."""
    spec = yaml.safe_load((KUBERNETES / path).read_text())["spec"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    (container,) = spec["template"]["spec"]["containers"]
    return spec["template"]["spec"], container


def test_the_plugin_has_no_rights() -> None:
    """But over kubelet's directory: no privileges, no token, and of the state it reads what `refresh` has written."""
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


def test_the_exporter_and_who_asks_it() -> None:
    pod, container = pod_of("exporter/daemonset.yaml")
    (service,) = yaml.safe_load_all((KUBERNETES / "exporter/service.yaml").read_text())
    (monitor,) = yaml.safe_load_all((KUBERNETES / "exporter/podmonitor.yaml").read_text())
    labels = {"app.kubernetes.io/name": "gpushare-exporter"}
    assert service["spec"]["selector"] == monitor["spec"]["selector"]["matchLabels"] == labels
    (port,) = container["ports"]
    (served,) = service["spec"]["ports"]
    assert (port["containerPort"], port["name"]) == (export.PORT, served["targetPort"])
    assert monitor["spec"]["podMetricsEndpoints"] == [{"port": port["name"], "interval": "30s"}]
    verb, command, *words = container["args"]
    assert verb == "run" and command in COMMANDS and pod["hostPID"]
    assert export.export.make_context(command, words).params["listen"] == "0.0.0.0"


def test_removal_is_the_same_daemon_set_with_another_word() -> None:
    (patch,) = yaml.safe_load((KUBERNETES / "remove/kustomization.yaml").read_text())["patches"]
    (step,) = yaml.safe_load(patch["patch"])
    assert patch["target"] == {"kind": "DaemonSet", "name": daemon_set()["metadata"]["name"]}
    at: Any = daemon_set()
    for name in step["path"].strip("/").split("/"):
        at = at[int(name)] if isinstance(at, list) else at[name]
    assert (at, step["op"], step["value"]) == (["install"], "replace", ["remove"])


def test_version_and_licence_are_the_same_everywhere() -> None:
    (image,) = yaml.safe_load((INSTALLER / "kustomization.yaml").read_text())["images"]
    assert image == {"name": daemon_set()["spec"]["template"]["spec"]["containers"][0]["image"], "newTag": version()}
    for folder in ("plugin", "exporter"):
        (image,) = yaml.safe_load((KUBERNETES / folder / "kustomization.yaml").read_text())["images"]
        assert image == {"name": pod_of(f"{folder}/daemonset.yaml")[1]["image"], "newTag": version()}
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
def test_units_call_our_commands(path: Path) -> None:
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


@pytest.mark.parametrize("path", sorted((PACKAGING / "scripts").iterdir()), ids=lambda path: path.name)
def test_scripts_of_packages_are_posix(path: Path) -> None:
    assert path.read_text().startswith("#!/bin/sh\n")
    subprocess.run(["sh", "-n", path], check=True)


def test_the_file_that_says_nothing() -> None:
    """It is the defaults, and the only file that a profile replaces without being told to."""
    path = PACKAGING / "config.yaml"
    assert config.parse_config(path.read_text(), str(path)) == config.Config()
    assert profiles.says_nothing(path.read_text())
    texts = ("", "version: 2\n", "version: 1\nlog: {}\n", "[", "\0", json.dumps({"version": 1, "runtime": {}}))
    assert not any(map(profiles.says_nothing, texts))
    assert not any(profiles.says_nothing(profiles.text(name)) for name in profiles.NAMES)
