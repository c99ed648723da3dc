"""packaging/kubernetes: manifests have only fields of their API, and the admission policy admits the right pods.

The schemas are trimmed from the public API. Expressions are evaluated by cel-python; `quantity` is Kubernetes' own
addition to the language.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Optional

import celpy
import jsonschema
import pytest
import yaml
from celpy import celtypes
from gpushare.core import constants
from gpushare.engines.base import RUNTIME
from gpushare.integrations import labels
from gpushare.integrations.kubelet import offers

from tests.support.host import TREE
from tests.unit import pure

FOLDER = TREE / "packaging" / "kubernetes"
SCHEMAS = TREE / "tests" / "schemas"
MANIFESTS = [
    str(path.relative_to(FOLDER)) for glob in ("*.yaml", "optional/*.yaml") for path in sorted(FOLDER.glob(glob))
]
RESOURCE = "gpushare.io/memory-mib"
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def by_kind(kind: str) -> Any:
    return next(one for name in MANIFESTS for one in documents(name) if one["kind"] == kind)  # of two, the first file's


@pytest.mark.parametrize("name", [*MANIFESTS, "exporter/podmonitor.yaml"])
def test_manifests_match_their_api(name: str) -> None:
    for document in documents(name):
        schema = json.loads((SCHEMAS / f"{document['kind'].lower()}.json").read_text())
        jsonschema.Draft202012Validator(schema).validate(document)


def test_schemas_are_strict() -> None:
    for path in SCHEMAS.glob("*.json"):
        schema = json.loads(path.read_text())
        jsonschema.Draft202012Validator.check_schema(schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft202012Validator(schema).validate({"kind": path.stem, "more": 1})


def test_names_match_across_manifests() -> None:
    """Handler, label, resource and binding match the names in the other manifests."""
    runtime_class = by_kind("RuntimeClass")
    assert runtime_class["handler"] == RUNTIME
    features = dict(line.split("=") for line in labels.feature_file(pure.node()).splitlines() if line[0] != "#")
    assert runtime_class["scheduling"]["nodeSelector"].items() <= features.items()
    (rule,) = by_kind("NodeFeatureRule")["spec"]["rules"]
    assert rule["extendedResources"] == {RESOURCE: f"@local.feature.{RESOURCE}"} and RESOURCE in features
    assert list(rule["matchFeatures"][0]["matchExpressions"]) == [RESOURCE]
    assert list(by_kind("ResourceQuota")["spec"]["hard"]) == [f"requests.{RESOURCE}"]
    (tainting,) = documents("optional/taint.yaml")[0]["spec"]["rules"]
    ((taint,), (toleration,)) = tainting["taints"], runtime_class["scheduling"]["tolerations"]
    assert (taint["key"], taint["effect"]) == (toleration["key"], toleration["effect"])
    assert tainting["matchFeatures"] == rule["matchFeatures"]  # exactly the nodes that have the resource
    policy, binding = by_kind("ValidatingAdmissionPolicy"), by_kind("ValidatingAdmissionPolicyBinding")
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    assert binding["spec"]["validationActions"] == ["Deny"] and policy["spec"]["failurePolicy"] == "Fail"


def quantity(text: celtypes.StringType) -> celtypes.IntType:
    """Raises ValueError, like the function of Kubernetes."""
    match = re.fullmatch(r"(\d+)([kMG]|[KMG]i)?", text)
    if match is None:
        raise ValueError(f"quantity {text!r}")
    return celtypes.IntType(int(match[1]) * UNITS[match[2] or ""])


class Policy:
    """The policy, evaluated like the API server: variables in their order, then the validations."""

    def __init__(self, name: str = "admissionpolicy.yaml") -> None:
        spec = next(one for one in documents(name) if one["kind"] == "ValidatingAdmissionPolicy")["spec"]
        self.environment = celpy.Environment()
        self.functions: Any = {
            "quantity": quantity,
            "asInteger": lambda value: value,
            "contains": self.contains,
            "split": self.split,
        }
        self.conditions = [self.compiled(one["expression"]) for one in spec["matchConditions"]]
        self.variables = [(one["name"], self.compiled(one["expression"])) for one in spec.get("variables", [])]
        self.validations = [(one["message"], self.compiled(one["expression"])) for one in spec["validations"]]

    @staticmethod
    def contains(text: celtypes.StringType, part: celtypes.StringType) -> celtypes.BoolType:
        return celtypes.BoolType(str(part) in str(text))

    @staticmethod
    def split(text: celtypes.StringType, separator: celtypes.StringType) -> celtypes.ListType:
        return celtypes.ListType([celtypes.StringType(part) for part in str(text).split(str(separator))])

    def compiled(self, expression: str) -> celpy.Runner:
        return self.environment.program(self.environment.compile(expression), functions=self.functions)

    def refusals(self, value: dict[str, Any], request: Any = None) -> list[str]:
        """Messages of the validations that are false or fail (failurePolicy). `request`: the AdmissionRequest."""
        context: dict[str, Any] = {"object": celpy.json_to_cel(value), "variables": celtypes.MapType({})}
        context["request"] = celpy.json_to_cel(request or {})
        if not all(program.evaluate(context) for program in self.conditions):
            return []
        for name, program in self.variables:
            context["variables"][celtypes.StringType(name)] = program.evaluate(context)
        found = []
        for message, program in self.validations:
            try:
                allowed = bool(program.evaluate(context))
            except celpy.CELEvalError:
                allowed = False
            found += [] if allowed else [message]
        return found


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy()


def container(name: str = "app", mib: Any = None, **env: Optional[str]) -> dict[str, Any]:
    """A value of None comes from elsewhere (valueFrom)."""
    result: dict[str, Any] = {"name": name, "image": "i"}
    if env:
        result["env"] = [
            {"name": key, "value": value} if value is not None else {"name": key, "valueFrom": {}}
            for key, value in env.items()
        ]
    if mib is not None:
        result["resources"] = {"limits": {RESOURCE: mib, "cpu": "1"}}
    return result


def pod(*containers: dict[str, Any], runtime: Optional[str] = RUNTIME, annotations: Any = None, **spec: Any) -> Any:
    metadata: dict[str, Any] = {"name": "p"}
    if annotations is not None:
        metadata["annotations"] = annotations
    if runtime is not None:
        spec["runtimeClassName"] = runtime
    return {"metadata": metadata, "spec": {"containers": list(containers), **spec}}


SCOPED = "app.gpushare.io/memory"
ALLOWED = {
    "asks for nothing": pod(container(), runtime=None),
    "asks for nothing, other annotations": pod(container(X="1"), runtime=None, annotations={"a.io/b": "c"}),
    "another device of CDI": pod(container(), runtime=None, annotations={"cdi.k8s.io/x": "nvidia.com/gpu=0"}),
    "variable": pod(container(mib="4096", GPUSHARE_MEMORY="4Gi")),
    "variable in MiB": pod(container(mib="512", GPUSHARE_MEMORY="512Mi")),
    "limit as the API server writes it": pod(container(mib="4k", GPUSHARE_MEMORY="4000Mi")),
    "limit as a number": pod(container(mib=4096, GPUSHARE_MEMORY="4Gi")),
    "annotation": pod(container(mib="4096"), annotations={SCOPED: "4Gi"}),
    "annotation with more": pod(container(mib="4096"), annotations={SCOPED: "4Gi", "app.gpushare.io/compute": "30%"}),
    "one device": pod(container(mib="4096", GPUSHARE_MEMORY="4Gi", GPUSHARE_DEVICES="any")),
    "request and limit": pod(container(mib="4096", GPUSHARE_MEMORY="4Gi..12Gi")),
    "request and limit in an annotation": pod(container(mib="4096"), annotations={SCOPED: "4096Mi..12Gi"}),
    "both ends": pod(container(mib="4096"), annotations={f"{SCOPED}-request": "4Gi", f"{SCOPED}-limit": "12Gi"}),
    "model": pod(container(mib="4096", GPUSHARE_MEMORY="4Gi", GPUSHARE_DEVICES="any,model=A100|H100*")),
    "model and room by annotation": pod(
        container(mib="4096", GPUSHARE_MEMORY="4Gi"),
        annotations={"app.gpushare.io/devices": "any,model=H100 PCIe,memory>=40Gi,free>=20Gi,mig=no"},
    ),
    "all compute": pod(container(mib="4096", GPUSHARE_MEMORY="4Gi", GPUSHARE_COMPUTE="100%")),
    "one of two": pod(container(mib="4096", GPUSHARE_MEMORY="4Gi"), container("side")),
    "two of two": pod(container("a", "4096", GPUSHARE_MEMORY="4Gi"), container("b", "1024", GPUSHARE_MEMORY="1Gi")),
    "init container": pod(container(), initContainers=[container("i", "1024", GPUSHARE_MEMORY="1Gi")]),
    "no request but ours": pod(container(GPUSHARE_LOG="debug"), runtime=None),
    "being deleted": {"metadata": {"name": "p", "deletionTimestamp": "x"}, "spec": pod(container(mib="1"))["spec"]},
    "debugger": pod(container(mib="4096", GPUSHARE_MEMORY="4Gi"), ephemeralContainers=[container("d", X="1")]),
}
REFUSED = {
    "no runtime class": (pod(container(mib="4096", GPUSHARE_MEMORY="4Gi"), runtime=None), "runtimeClassName"),
    "other runtime class": (pod(container(mib="4096", GPUSHARE_MEMORY="4Gi"), runtime="runc"), "runtimeClassName"),
    "annotation, no runtime class": (
        pod(container(mib="4096"), annotations={SCOPED: "4Gi"}, runtime=None),
        "runtimeClassName",
    ),
    "limit, no runtime class": (pod(container(mib="4096"), runtime=None), "runtimeClassName"),
    "devices only": (pod(container(GPUSHARE_DEVICES="all"), runtime=None), "runtimeClassName"),
    "asks for more than the limit": (pod(container(mib="4096", GPUSHARE_MEMORY="8Gi")), "must be equal to the limit"),
    "asks for less": (pod(container(mib="4096", GPUSHARE_MEMORY="1Gi")), "must be equal to the limit"),
    "annotation with more than the limit": (
        pod(container(mib="4096"), annotations={SCOPED: "8Gi"}),
        "the annotation CONTAINER.gpushare.io/memory must be",
    ),
    "annotation that is no amount": (
        pod(container(mib="4096"), annotations={SCOPED: "50%"}),
        "the annotation CONTAINER.gpushare.io/memory must be",
    ),
    "no limit": (pod(container(GPUSHARE_MEMORY="4Gi")), "needs the limit"),
    "annotation without a limit": (pod(container(), annotations={SCOPED: "4Gi"}), "needs the limit"),
    "limit of another container": (
        pod(container(GPUSHARE_MEMORY="4Gi"), container("b", "4096")),
        "needs the limit",
    ),
    "limit without a request": (pod(container(mib="4096")), "must request the same amount once"),
    "both ways": (
        pod(container(mib="4096", GPUSHARE_MEMORY="4Gi"), annotations={SCOPED: "4Gi"}),
        "must request the same amount once",
    ),
    "percent": (pod(container(mib="4096", GPUSHARE_MEMORY="25%")), "must be equal to the limit"),
    "list": (pod(container(mib="4096", GPUSHARE_MEMORY="0=4Gi,1=4Gi")), "must be equal to the limit"),
    "from elsewhere": (pod(container(mib="4096", GPUSHARE_MEMORY=None)), "must be equal to the limit"),
    "nothing": (pod(container(mib="0", GPUSHARE_MEMORY="0Gi")), "must be equal to the limit"),
    "request above the limit": (pod(container(mib="4096", GPUSHARE_MEMORY="8Gi..12Gi")), "must be equal to the limit"),
    "limit as the scheduler's amount": (
        pod(container(mib="12288", GPUSHARE_MEMORY="4Gi..12Gi")),
        "must be equal to the limit",
    ),
    "no request": (pod(container(mib="4096", GPUSHARE_MEMORY="..12Gi")), "must be equal to the limit"),
    "annotated request above the limit": (
        pod(container(mib="4096"), annotations={f"{SCOPED}-request": "8Gi", f"{SCOPED}-limit": "12Gi"}),
        "the annotation CONTAINER.gpushare.io/memory must be",
    ),
    "limit alone": (
        pod(container(mib="4096", GPUSHARE_MEMORY="4Gi"), annotations={f"{SCOPED}-limit": "12Gi"}),
        "memory-limit needs",
    ),
    "no compute": (pod(container(mib="4096", GPUSHARE_MEMORY="4Gi", GPUSHARE_COMPUTE="0")), "compute must be"),
    "compute of two devices": (
        pod(container(mib="4096", GPUSHARE_MEMORY="4Gi", GPUSHARE_COMPUTE="0=30%,1=50%")),
        "compute must be",
    ),
    "compute from elsewhere": (
        pod(container(mib="4096", GPUSHARE_MEMORY="4Gi", GPUSHARE_COMPUTE=None)),
        "compute must",
    ),
    "annotated compute": (
        pod(container(mib="4096", GPUSHARE_MEMORY="4Gi"), annotations={"app.gpushare.io/compute": "101%"}),
        "compute must be",
    ),
    "two devices of a model": (
        pod(container(mib="4096", GPUSHARE_MEMORY="4Gi", GPUSHARE_DEVICES="any:2,model=A100")),
        "must select one device",
    ),
    "model and another device": (
        pod(container(mib="4096", GPUSHARE_MEMORY="4Gi", GPUSHARE_DEVICES="any,model=A100,1")),
        "must select one device",
    ),
    "two devices": (
        pod(container(mib="4096", GPUSHARE_MEMORY="4Gi", GPUSHARE_DEVICES="any:2")),
        "must select one device",
    ),
    "two devices by name": (
        pod(container(mib="1", GPUSHARE_MEMORY="1Mi", GPUSHARE_DEVICES="0,1")),
        "must select one device",
    ),
    "all devices": (
        pod(container(mib="4096", GPUSHARE_MEMORY="4Gi", GPUSHARE_DEVICES="all")),
        "must select one device",
    ),
    "all devices by annotation": (
        pod(container(mib="4096"), annotations={SCOPED: "4Gi", "app.gpushare.io/devices": "all"}),
        "must select one device",
    ),
    "device of CDI": (
        pod(container(), runtime=None, annotations={"cdi.k8s.io/x": "nvidia.com/gpu=0,gpushare.io/share=any"}),
        "cannot use the CDI device",
    ),
    "all devices, as CDI would": (pod(container(mib="1", GPUSHARE_MEMORY="1Mi", GPUSHARE_CDI_A="all")), "cannot use"),
    "as kubelet would": (pod(container(mib="1", GPUSHARE_MEMORY="1Mi", GPUSHARE_ALLOCATED_GPU="x")), "ALLOCATED_"),
    "for every container": (
        pod(container(mib="4096", GPUSHARE_MEMORY="4Gi"), annotations={"gpushare.io/memory": "4Gi"}),
        "names no container",
    ),
    "for no container": (
        pod(container(mib="4096"), annotations={SCOPED: "4Gi", "typo.gpushare.io/memory": "4Gi"}),
        "not in the pod",
    ),
    "init container": (
        pod(container(), initContainers=[container("i", "1024", GPUSHARE_MEMORY="9Gi")]),
        "must be equal to the limit",
    ),
    "debugger": (pod(container(), ephemeralContainers=[container("d", GPUSHARE_MEMORY="1Gi")]), "ephemeral"),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_policy_admits_pod(policy: Policy, case: str) -> None:
    assert policy.refusals(ALLOWED[case]) == []


@pytest.mark.parametrize("case", REFUSED)
def test_policy_refuses_pod_with_message(policy: Policy, case: str) -> None:
    refused, message = REFUSED[case]
    assert any(message in one for one in policy.refusals(refused)), policy.refusals(refused)


def test_every_validation_refuses_one_pod_alone(policy: Policy) -> None:
    """Without the validation, that pod would be admitted."""
    alone = {found[0] for one, _ in REFUSED.values() if len(found := policy.refusals(one)) == 1}
    assert alone == {message for message, _ in policy.validations}


# With the device plugin

GPUS = {"gpushare.io/gpu": 1}
PERCENT = {RESOURCE: "4096", "gpushare.io/compute": 30}


def limited(name: str = "app", limits: Any = None, **env: Optional[str]) -> dict[str, Any]:
    return {**container(name, **env), "resources": {"limits": {RESOURCE: "4096"} if limits is None else limits}}


WITH_PLUGIN = {
    "asks for nothing": (pod(container(), runtime=None), ""),
    "no request but ours": (pod(container(GPUSHARE_LOG="debug"), runtime=None), ""),
    "memory": (pod(limited()), ""),
    "memory in another unit": (pod(limited(limits={"gpushare.io/memory-64mib": 2})), ""),
    "a GPU": (pod(limited(limits=GPUS)), ""),
    "each another": (pod(limited("a"), limited("b", GPUS), container("c")), ""),
    "with more": (pod(limited(GPUSHARE_COMPUTE="30"), annotations={"app.gpushare.io/priority": "high"}), ""),
    "no runtime class": (pod(limited(), runtime=None), "needs runtimeClassName"),
    "a GPU, no runtime class": (pod(limited(limits=GPUS), runtime=None), "needs runtimeClassName"),
    "more without a limit": (pod(container(GPUSHARE_COMPUTE="30")), "with GPUSHARE_"),
    "limit of another container": (pod(limited("a"), container("b", GPUSHARE_COMPUTE="30")), "with GPUSHARE_"),
    "annotation without a limit": (pod(container(), annotations={"app.gpushare.io/compute": "30"}), "with GPUSHARE_"),
    "annotation for all": (pod(limited(), annotations={"gpushare.io/compute": "30"}), "with GPUSHARE_"),
    "both": (pod(limited(limits={**GPUS, RESOURCE: 1})), "not both"),
    "compute": (pod(limited(limits=PERCENT)), ""),
    "compute, no runtime class": (pod(limited(limits=PERCENT), runtime=None), "needs runtimeClassName"),
    "compute without memory": (pod(limited(limits={"gpushare.io/compute": 30})), "needs the limit gpushare.io/memory"),
    "compute twice": (pod(limited(limits=PERCENT, GPUSHARE_COMPUTE="30")), "already requests compute"),
    "compute twice by annotation": (
        pod(limited(limits=PERCENT), annotations={"app.gpushare.io/compute": "30"}),
        "already requests compute",
    ),
    "a memory limit": (pod(limited(GPUSHARE_MEMORY="4Gi..12Gi")), ""),
    "a memory limit by annotation": (pod(limited(), annotations={f"{SCOPED}-limit": "12Gi"}), ""),
    "a memory limit in another unit": (
        pod(limited(limits={"gpushare.io/memory-64mib": 64}, GPUSHARE_MEMORY="4Gi..12Gi")),
        "",  # the hook compares
    ),
    "another request": (pod(limited(GPUSHARE_MEMORY="8Gi..12Gi")), "kubelet sets the memory"),
    "a memory limit for a GPU": (pod(limited(limits=GPUS, GPUSHARE_MEMORY="4Gi..12Gi")), "kubelet sets the memory"),
    "a request by annotation": (pod(limited(), annotations={f"{SCOPED}-request": "4Gi"}), "kubelet sets the memory"),
    "a model": (pod(limited(GPUSHARE_DEVICES="any,model=A100")), ""),
    "a model by annotation": (pod(limited(), annotations={"app.gpushare.io/devices": "any,model=A100"}), ""),
    "two of a model": (pod(limited(GPUSHARE_DEVICES="any:2,model=A100")), "leave out GPUSHARE_DEVICES"),
    "an amount of its own": (pod(limited(GPUSHARE_MEMORY="4Gi")), "kubelet sets the memory"),
    "an amount from elsewhere": (pod(limited(GPUSHARE_MEMORY=None)), "kubelet sets the memory"),
    "an annotation of its own": (pod(limited(), annotations={SCOPED: "4Gi"}), "leave out GPUSHARE_DEVICES"),
    "a device of its own": (pod(limited(GPUSHARE_DEVICES="0")), "leave out GPUSHARE_DEVICES"),
    "as kubelet would": (pod(limited(GPUSHARE_ALLOCATED_MEMORY="x=80Gi")), "leave out GPUSHARE_DEVICES"),
    "as CDI would": (pod(limited(GPUSHARE_CDI_A="all")), "leave out GPUSHARE_DEVICES"),
    "cannot use the CDI device": (
        pod(limited(), annotations={"cdi.k8s.io/x": "gpushare.io/share=any"}),
        "leave out GPUSHARE_DEVICES",
    ),
    "init container": (pod(container(), initContainers=[limited("i", GPUSHARE_MEMORY="9Gi")]), "kubelet sets the mem"),
    "debugger": (pod(limited(), ephemeralContainers=[container("d", GPUSHARE_COMPUTE="1")]), "ephemeral"),
}


@pytest.fixture(scope="module")
def plugin_policy() -> Policy:
    return Policy("plugin/admissionpolicy.yaml")


@pytest.mark.parametrize("case", WITH_PLUGIN)
def test_plugin_policy_admits_or_refuses_pod(plugin_policy: Policy, case: str) -> None:
    asked, message = WITH_PLUGIN[case]
    refusals = plugin_policy.refusals(asked)
    assert refusals == [] if not message else len(refusals) == 1 and message in refusals[0]


def test_every_rule_of_plugin_policy_refuses_a_pod(plugin_policy: Policy) -> None:
    found = {one for asked, message in WITH_PLUGIN.values() if message for one in plugin_policy.refusals(asked)}
    assert found == {message for message, _ in plugin_policy.validations}
    both = [documents(name) for name in ("admissionpolicy.yaml", "plugin/admissionpolicy.yaml")]
    for ours, other in zip(*both):  # one policy replaces the other
        assert (ours["kind"], ours["metadata"]) == (other["kind"], other["metadata"])
    assert both[0][0]["spec"]["matchConstraints"] == both[1][0]["spec"]["matchConstraints"]
    (example,) = documents("plugin/example-plugin.yaml")
    assert plugin_policy.refusals(example) == []


# With the DRA driver

DRIVER = "system:serviceaccount:gpushare:gpushare-dra"
NODE_KEY = "authentication.kubernetes.io/node-name"
OF_NODE = {"username": DRIVER, "extra": {NODE_KEY: ["n"]}}
SLICES = {
    "of the node": ({"driver": "gpushare.io", "nodeName": "n"}, OF_NODE, True),
    "of another node": ({"driver": "gpushare.io", "nodeName": "m"}, OF_NODE, False),
    "of another driver": ({"driver": "gpu.nvidia.com", "nodeName": "n"}, OF_NODE, False),
    "of all nodes": ({"driver": "gpushare.io", "allNodes": True}, OF_NODE, False),
    "token without a node": ({"driver": "gpushare.io", "nodeName": "n"}, {**OF_NODE, "extra": {"x": ["n"]}}, False),
    "token without extra": ({"driver": "gpushare.io", "nodeName": "n"}, {"username": DRIVER}, False),
    "of another account": ({"driver": "gpu.nvidia.com", "nodeName": "m"}, {"username": "other"}, True),
}


@pytest.mark.parametrize("case", SLICES)
def test_dra_driver_can_write_only_the_slice_of_its_node(case: str) -> None:
    spec, user, allowed = SLICES[case]
    refusals = Policy("dra/node.yaml").refusals({"spec": spec}, {"userInfo": user})
    assert refusals == ([] if allowed else ["the driver can write only the ResourceSlice of its own node"])


def test_dra_policy_is_for_the_account_of_the_driver() -> None:
    policy, binding = documents("dra/node.yaml")
    account = documents("dra/rbac.yaml")[0]["metadata"]
    assert f"system:serviceaccount:{account['namespace']}:{account['name']}" == DRIVER
    assert binding["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}
    assert policy["spec"]["failurePolicy"] == "Fail"
    (rule,) = policy["spec"]["matchConstraints"]["resourceRules"]
    written = {(group, name) for one in documents("dra/rbac.yaml") if one["kind"] == "ClusterRole"
               for right in one["rules"] if set(right["verbs"]) - {"get"}
               for group in right["apiGroups"] for name in right["resources"]}  # fmt: skip
    assert {(group, name) for group in rule["apiGroups"] for name in rule["resources"]} == written
    assert set(rule["operations"]) == {"CREATE", "UPDATE"}


def test_device_class_selects_devices_of_gpushare() -> None:
    (document,) = documents("dra/deviceclass.yaml")
    (selector,) = document["spec"]["selectors"]
    environment = celpy.Environment()
    program = environment.program(environment.compile(selector["cel"]["expression"]))
    for driver, selected in (("gpushare.io", True), ("gpu.nvidia.com", False)):
        assert bool(program.evaluate({"device": celpy.json_to_cel({"driver": driver})})) is selected


@pytest.mark.parametrize("name", [name for name in MANIFESTS if name.startswith("example-")])
def test_examples_are_admitted_and_grant_their_limits(policy: Policy, name: str) -> None:
    (example,) = documents(name)
    assert policy.refusals(example) == []
    first = example["spec"]["containers"][0]
    text = json.dumps(example)
    assert (
        f'"{constants.ENV_MEMORY}"' in text or f"{first['name']}.{constants.ANNOTATIONS[constants.ENV_MEMORY]}" in text
    )


def test_readme_names_every_manifest() -> None:
    text = Path(FOLDER / "README.md").read_text()
    wanted = [name for name in MANIFESTS if not name.endswith("kustomization.yaml") and "annotation" not in name]
    assert wanted and [name for name in wanted if name not in text] == []


def test_docs_list_every_label_and_an_admitted_pod(policy: Policy, plugin_policy: Policy) -> None:
    page, _, plugin = (TREE / "docs" / "kubernetes.md").read_text().partition("## The device plugin")
    rows = set(re.findall(r"^\| `(gpushare\.io/[a-z.]+)`", page, re.MULTILINE))
    assert rows == {"gpushare.io/present", *(f"gpushare.io/{name}" for name in labels.device_labels(pure.node()))}
    (sample,), (with_plugin, *_) = (re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S) for text in (page, plugin))
    spec = yaml.safe_load(sample)["spec"]
    assert policy.refusals({"metadata": {"name": "p"}, "spec": spec}) == []
    spec["containers"][0]["env"][0]["value"] = "8Gi"
    assert policy.refusals({"metadata": {"name": "p"}, "spec": spec}) != []
    resources = set(re.findall(r"^\| `(gpushare\.io/[a-z-]+)`", plugin, re.MULTILINE))
    assert resources == set(offers.resources(1, {}).values())
    assert plugin_policy.refusals({"metadata": {"name": "p"}, "spec": yaml.safe_load(with_plugin)["spec"]}) == []
