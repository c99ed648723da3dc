"""packaging/kubernetes: manifests have only fields of their API, and the admission policy admits the right pods.

Schemas of APIs that are not Kubernetes' own are trimmed from the public ones; tests/unit/test_packaging.py checks the
other manifests. Expressions are evaluated by cel-python; `quantity` is Kubernetes' own addition to the language.
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
from gpushare.core.model import SharingRule
from gpushare.engines.base import RUNTIME
from gpushare.integrations import cdi, dra, labels
from gpushare.integrations.dra import claims, service
from gpushare.integrations.kubelet import offers

from tests.support.host import TREE
from tests.unit import pure

FOLDER = TREE / "packaging" / "kubernetes"
SCHEMAS = TREE / "tests" / "schemas"
MANIFESTS = [
    str(path.relative_to(FOLDER)) for glob in ("*.yaml", "optional/*.yaml") for path in sorted(FOLDER.glob(glob))
]
FEATURES = ("nodefeaturerule.yaml", "one-sum/nodefeaturerule.yaml", "optional/taint.yaml")
MONITORS = [f"exporter/{name}.yaml" for name in ("podmonitor", "servicemonitor", "prometheusrule")]
RESOURCE = "gpushare.io/memory-mib"
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def by_kind(kind: str) -> Any:
    return next(one for name in MANIFESTS for one in documents(name) if one["kind"] == kind)  # of two, the first file's


@pytest.mark.parametrize("name", [*FEATURES, *MONITORS])
def test_manifests_match_their_api(name: str) -> None:
    for document in documents(name):
        schema = json.loads((SCHEMAS / f"{document['kind'].lower()}.json").read_text())
        jsonschema.Draft202012Validator(schema).validate(document)


def test_monitors_find_the_exporter_and_keep_its_labels() -> None:
    """Prometheus renames `namespace` and `pod` of a metric to exported_namespace and so on without honorLabels."""
    (pods,), (services,), (rules,) = map(documents, MONITORS)
    (service,) = documents("exporter/service.yaml")
    (exporter,) = documents("exporter/daemonset.yaml")
    labels = pods["spec"]["selector"]["matchLabels"]
    assert labels == services["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    assert labels == exporter["spec"]["template"]["metadata"]["labels"]
    (of_pods,), (of_services,) = pods["spec"]["podMetricsEndpoints"], services["spec"]["endpoints"]
    assert of_pods == of_services and of_pods["honorLabels"] and of_pods["relabelings"][0]["targetLabel"] == "instance"
    assert rules["spec"] == yaml.safe_load((TREE / "packaging/metrics/alerts.yaml").read_text())


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
    (several,) = documents("one-sum/nodefeaturerule.yaml")[0]["spec"]["rules"]
    assert several["extendedResources"] == rule["extendedResources"]
    one, more = (each["matchFeatures"][0]["matchExpressions"] for each in (rule, several))
    assert list(one) == [RESOURCE, "gpushare.io/devices"] and set(one) <= features.keys()
    # each node has one of the two rules
    assert [each.pop("gpushare.io/devices") for each in (one, more)] == [
        {"op": "Lt", "value": ["2"]},
        {"op": "Gt", "value": ["1"]},
    ]
    assert list(by_kind("ResourceQuota")["spec"]["hard"]) == [f"requests.{RESOURCE}"]
    (tainting,) = documents("optional/taint.yaml")[0]["spec"]["rules"]
    ((taint,), (toleration,)) = tainting["taints"], runtime_class["scheduling"]["tolerations"]
    assert (taint["key"], taint["effect"]) == (toleration["key"], toleration["effect"])
    assert tainting["matchFeatures"] == rule["matchFeatures"] == several["matchFeatures"]  # and any number of devices
    policy, binding = by_kind("ValidatingAdmissionPolicy"), by_kind("ValidatingAdmissionPolicyBinding")
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    assert binding["spec"]["validationActions"] == ["Deny"] and policy["spec"]["failurePolicy"] == "Fail"
    (pods,) = policy["spec"]["matchConstraints"]["resourceRules"]
    assert set(pods["operations"]) == {"CREATE", "UPDATE"} and "pods/ephemeralcontainers" in pods["resources"]
    assert (pods["apiGroups"], pods["apiVersions"]) == ([""], ["v1"])


def quantity(text: celtypes.StringType) -> celtypes.IntType:
    """Raises ValueError, like the function of Kubernetes."""
    match = re.fullmatch(r"(\d+)([kMG]|[KMG]i)?", text)
    if match is None:
        raise ValueError(f"quantity {text!r}")
    return celtypes.IntType(int(match[1]) * UNITS[match[2] or ""])


def plain(expression: str) -> str:
    """The expression with maps in place of the API server's own type, and its function without a name space."""
    words = re.sub(r"\b(op|path|value):", r'"\1":', expression.replace("JSONPatch{", "{"))
    return words.replace("jsonpatch.escapeKey", "escapeKey")


class Policy:
    """The policy, evaluated like the API server: variables in their order, then the validations."""

    def __init__(self, name: str = "admissionpolicy.yaml") -> None:
        spec = next(one for one in documents(name) if one["kind"].endswith("AdmissionPolicy"))["spec"]
        self.environment = celpy.Environment()
        self.functions: Any = {
            "quantity": quantity,
            "asInteger": lambda value: value,
            "contains": self.contains,
            "split": self.split,
            "escapeKey": self.escape_key,
        }
        self.conditions = [self.compiled(one["expression"]) for one in spec.get("matchConditions", [])]
        self.variables = [(one["name"], self.compiled(one["expression"])) for one in spec.get("variables", [])]
        self.validations = [(one["message"], self.compiled(one["expression"])) for one in spec.get("validations", [])]
        self.mutations = [self.compiled(plain(one["jsonPatch"]["expression"])) for one in spec.get("mutations", [])]

    @staticmethod
    def escape_key(text: celtypes.StringType) -> celtypes.StringType:
        return celtypes.StringType(str(text).replace("~", "~0").replace("/", "~1"))

    def mutated(self, value: dict[str, Any]) -> dict[str, Any]:
        """The pod after the patches, which only add."""
        found: dict[str, Any] = json.loads(json.dumps(value))
        context = {"object": celpy.json_to_cel(value), "variables": celtypes.MapType({})}
        for name, program in self.variables:
            context["variables"][celtypes.StringType(name)] = program.evaluate(context)
        for program in self.mutations:
            for patch in json.loads(json.dumps(program.evaluate(context), cls=celpy.CELJSONEncoder)):
                *above, last = (part.replace("~1", "/").replace("~0", "~") for part in patch["path"].split("/")[1:])
                at = found
                for part in above:
                    at = at[part]
                assert patch["op"] == "add" and last not in at
                at[last] = patch["value"]
        return found

    @staticmethod
    def contains(text: celtypes.StringType, part: celtypes.StringType) -> celtypes.BoolType:
        return celtypes.BoolType(str(part) in str(text))

    @staticmethod
    def split(text: celtypes.StringType, separator: celtypes.StringType) -> celtypes.ListType:
        return celtypes.ListType([celtypes.StringType(part) for part in str(text).split(str(separator))])

    def compiled(self, expression: str) -> celpy.Runner:
        return self.environment.program(self.environment.compile(expression), functions=self.functions)

    def refusals(self, value: dict[str, Any], request: Any = None, old: Any = None) -> list[str]:
        """Messages of the validations that are false or fail (failurePolicy). `request`: the AdmissionRequest; `old`:
        the object that an update changes."""
        context: dict[str, Any] = {"object": celpy.json_to_cel(value), "variables": celtypes.MapType({})}
        request = {"operation": "UPDATE" if old else "CREATE", **(request or {})}
        context["request"], context["oldObject"] = celpy.json_to_cel(request), celpy.json_to_cel(old)
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
    "no request but ours": pod(container(GPUSHARE_LOG="debug", GPUSHARE_TRACE="x"), runtime=None),
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
        "cannot name CDI devices",
    ),
    "claim of CDI": (
        pod(container(), runtime=None, annotations={"cdi.k8s.io/x": "gpushare.io/claim=u-0"}),
        "cannot name CDI devices",
    ),
    "as the system would": (pod(container(mib="1", GPUSHARE_MEMORY="1Mi", GPUSHARE_CLAIM_1="x")), "a pod can set only"),
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


# Updates


def changed(value: dict[str, Any], path: str, to: Any) -> dict[str, Any]:
    """A copy with another value; None removes it."""
    new = json.loads(json.dumps(value))
    at, (*parents, last) = new, path.split(".")
    for name in parents:
        at = at.setdefault(name, {})
    if to is None:
        at.pop(last, None)
    else:
        at[last] = to
    return dict(new)


BAD = pod(container(GPUSHARE_MEMORY="4Gi"), runtime=None, annotations={SCOPED: "4Gi", "a.io/b": "c"})
DEBUGGED = changed(BAD, "spec.ephemeralContainers", [container("d", GPUSHARE_MEMORY="1Gi")])
NOTES = {SCOPED: "4Gi", "a.io/b": "c"}
HARMLESS = {
    "nothing": BAD,
    "label": changed(BAD, "metadata.labels", {"a": "b"}),
    "finalizer": changed(BAD, "metadata.finalizers", ["batch.kubernetes.io/job-tracking"]),
    "status": changed(BAD, "status", {"phase": "Succeeded"}),
    "other annotation": changed(BAD, "metadata.annotations", {**NOTES, "k8s.v1.cni.cncf.io/status": "up"}),
    "no other annotation": changed(BAD, "metadata.annotations", {SCOPED: "4Gi"}),
    "image": changed(BAD, "spec.containers", [{**BAD["spec"]["containers"][0], "image": "j"}]),
    "toleration": changed(BAD, "spec.tolerations", [{"operator": "Exists"}]),
    "scheduling gate": changed(BAD, "spec.schedulingGates", []),
    "debugger": changed(BAD, "spec.ephemeralContainers", [container("d", X="1")]),
}
HARMFUL = {
    "amount": changed(BAD, "metadata.annotations", {**NOTES, SCOPED: "8Gi"}),
    "no amount": changed(BAD, "metadata.annotations", {"a.io/b": "c"}),
    "new annotation": changed(BAD, "metadata.annotations", {**NOTES, "gpushare.io/devices": "all"}),
    "device of CDI": changed(BAD, "metadata.annotations", {**NOTES, "cdi.k8s.io/x": "gpushare.io/share=any"}),
    "debugger with a share": changed(BAD, "spec.ephemeralContainers", [container("d", GPUSHARE_MEMORY="1Gi")]),
}
POLICIES = ("admissionpolicy.yaml", "plugin/admissionpolicy.yaml")


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("case", [*HARMLESS, *HARMFUL])
def test_update_of_an_older_pod_is_judged_for_what_it_changes(name: str, case: str) -> None:
    """A pod that the policy would refuse was there before the policy. It must be able to run and to end."""
    policy = Policy(name)
    assert policy.refusals(BAD)
    assert bool(policy.refusals({**HARMLESS, **HARMFUL}[case], old=BAD)) is (case in HARMFUL)


@pytest.mark.parametrize("name", POLICIES)
def test_debugger_beside_an_older_one_is_admitted(name: str) -> None:
    two = changed(DEBUGGED, "spec.ephemeralContainers", [*DEBUGGED["spec"]["ephemeralContainers"], container("e")])
    assert Policy(name).refusals(two, old=DEBUGGED) == []


@pytest.mark.parametrize("name", POLICIES)
def test_pods_of_gpushare_and_of_the_system_are_left_out(name: str) -> None:
    """The installer's pod has GPUSHARE_ variables, so the policy would refuse it."""
    (selector,) = documents(name)[0]["spec"]["matchConstraints"]["namespaceSelector"]["matchExpressions"]
    (installer,) = documents("installer/daemonset.yaml")
    values = ["kube-system", installer["metadata"]["namespace"]]
    assert selector == {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": values}
    assert Policy(name).refusals({"metadata": {"name": "p"}, "spec": installer["spec"]["template"]["spec"]})


# With the device plugin

GPUS = {"gpushare.io/gpu": 1}
PERCENT = {RESOURCE: "4096", "gpushare.io/compute": 30}


def limited(name: str = "app", limits: Any = None, **env: Optional[str]) -> dict[str, Any]:
    return {**container(name, **env), "resources": {"limits": {RESOURCE: "4096"} if limits is None else limits}}


WITH_PLUGIN = {
    "asks for nothing": (pod(container(), runtime=None), ""),
    "no request but ours": (pod(container(GPUSHARE_LOG="debug", GPUSHARE_TRACE="x"), runtime=None), ""),
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
    "both": (pod(limited(limits={**GPUS, RESOURCE: 1})), "not more than one"),
    "a share under the other name": (pod(limited(limits={"gpushare.io/gpu.shared": 1})), ""),
    "both names": (pod(limited(limits={**GPUS, "gpushare.io/gpu.shared": 1})), "not more than one"),
    "memory and the other name": (pod(limited(limits={"gpushare.io/gpu.shared": 1, RESOURCE: 1})), "not more than one"),
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
    "as the system would": (pod(limited(GPUSHARE_CLAIM_1="x")), "a pod can set only"),
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


# Variables that only the system may write

ALL_POLICIES = (*POLICIES, "dra/admissionpolicy.yaml")


@pytest.mark.parametrize("name", ALL_POLICIES)
def test_policies_allow_only_what_a_pod_may_write(name: str) -> None:
    """Also in an init container. A name that a later version gives a meaning is refused until it is classified."""
    policy = Policy(name)
    for variable in (*constants.WRITERS, "GPUSHARE_LATER"):
        one = container("i", **{variable: "x"})
        for made in (pod(one), pod(container(), initContainers=[one])):
            refused = any("a pod can set only the GPUSHARE_" in line for line in policy.refusals(made))
            assert refused is (constants.WRITERS.get(variable) != constants.POD), variable


CLAIMING = {
    "asks for nothing": (pod(container(X="1"), runtime=None, annotations={"a.io/b": "gpushare.io/x"}), ""),
    "more for a claim": (pod(container(GPUSHARE_PRIORITY="high"), runtime=None), ""),
    "another device of CDI": (pod(container(), annotations={"cdi.k8s.io/x": "nvidia.com/gpu=0"}), ""),
    "claim of CDI": (pod(container(), annotations={"cdi.k8s.io/x": "gpushare.io/claim=u-0"}), "cannot name CDI"),
    "invented claim": (pod(container(GPUSHARE_CLAIM_1="x")), "a pod can set only"),
    "debugger": (pod(container(), ephemeralContainers=[container("d", GPUSHARE_CLAIM_1="x")]), "ephemeral"),
}


def test_dra_policy_admits_or_refuses_pod() -> None:
    policy = Policy("dra/admissionpolicy.yaml")
    refusals = {case: policy.refusals(made) for case, (made, _) in CLAIMING.items()}
    for case, (_, message) in CLAIMING.items():
        assert len(refusals[case]) == bool(message) and all(message in one for one in refusals[case]), case
    assert {one for found in refusals.values() for one in found} == {message for message, _ in policy.validations}


@pytest.mark.parametrize("case", ["invented claim", "claim of CDI", "debugger"])
def test_dra_policy_lets_an_older_pod_run_and_end(case: str) -> None:
    older, _ = CLAIMING[case]
    assert Policy("dra/admissionpolicy.yaml").refusals(changed(older, "metadata.labels", {"a": "b"}), old=older) == []


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


@pytest.mark.parametrize("folder", ["", "plugin/"])
def test_pod_with_the_limit_only_is_completed(policy: Policy, plugin_policy: Policy, folder: str) -> None:
    """Into a pod that the other policy admits. A pod without a limit stays as it is, and so does what a pod sets."""
    mutating = Policy(f"{folder}one-line/mutatingadmissionpolicy.yaml")
    wanted, other = (plugin_policy, policy) if folder else (policy, plugin_policy)
    bare = pod(container(mib=4096), container("b"), runtime=None, initContainers=[container("i", mib="1k")])
    done = mutating.mutated(bare)
    assert wanted.refusals(bare) != [] and wanted.refusals(done) == [] and other is not wanted
    assert done["spec"]["runtimeClassName"] == RUNTIME
    amounts = {"app.gpushare.io/memory": "4096Mi", "i.gpushare.io/memory": "1000Mi"}
    assert done["metadata"].get("annotations") == (None if folder else amounts)
    for same in (
        pod(container(), runtime=None),
        pod(container(mib=4096, GPUSHARE_MEMORY="4Gi")),
        pod(container(mib=4096), annotations={"app.gpushare.io/memory": "4Gi", "x": "y"}),
        pod(container(mib=4096, GPUSHARE_MEMORY="4Gi"), runtime="nvidia"),
    ):
        assert mutating.mutated(same) == same
    noted = mutating.mutated(pod(container(mib=1), annotations={"x": "y"}))
    assert noted["metadata"]["annotations"] == {"x": "y", **({} if folder else {"app.gpushare.io/memory": "1Mi"})}


@pytest.mark.parametrize("folder", ["", "plugin/"])
def test_policies_complete_and_judge_the_same_pods(folder: str) -> None:
    """The same namespaces; and the binding names the policy."""
    mutating, binding = documents(f"{folder}one-line/mutatingadmissionpolicy.yaml")
    judging = documents(f"{folder}admissionpolicy.yaml")[0]
    selectors = [one["spec"]["matchConstraints"]["namespaceSelector"] for one in (mutating, judging)]
    assert selectors[0] == selectors[1] and binding["spec"] == {"policyName": mutating["metadata"]["name"]}


@pytest.mark.parametrize("name", [name for name in MANIFESTS if name.startswith("example-")])
def test_examples_are_admitted_and_grant_their_limits(policy: Policy, name: str) -> None:
    (example,) = documents(name)
    assert policy.refusals(example) == [] and all(one["image"] for one in example["spec"]["containers"])
    first = example["spec"]["containers"][0]
    text = json.dumps(example)
    assert (
        f'"{constants.ENV_MEMORY}"' in text or f"{first['name']}.{constants.ANNOTATIONS[constants.ENV_MEMORY]}" in text
    )


def test_no_name_is_one_of_nvidias() -> None:
    """The two can then run on one node. `dra/nvidia` is for nodes without NVIDIA's plugin."""
    page = (TREE / "docs" / "kubernetes.md").read_text().partition("## Beside NVIDIA's programs")[2]
    rows = [line.split("|")[2:4] for line in page.splitlines() if line.startswith("| ")]
    cells = [
        [set(re.findall(r"`([^`]+)`", part)) for part in (ours.partition(";")[0], theirs)] for ours, theirs in rows
    ]
    assert len(cells) == 8 and all(not ours & theirs for ours, theirs in cells)
    named = set().union(*(ours for ours, _ in cells))
    assert {RUNTIME, cdi.KIND, claims.KIND, dra.DRIVER, service.REGISTRATION_SOCKET} <= named
    assert f"features.d/{labels.FILE.rpartition('/')[2]}" in named
    for path in FOLDER.rglob("*.yaml"):
        if path.parent.name != "nvidia":
            used = re.findall(r"[a-z0-9.-]*nvidia[.]com/[a-z0-9.-]+", re.sub("#.*", "", path.read_text()))
            assert used == [], path


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
    resources = set(re.findall(r"^\| `(gpushare\.io/[a-z.-]+)`", plugin, re.MULTILINE))
    names = offers.resources(1, {})
    renamed = pure.node()._replace(config=pure.node().config._replace(sharing=(SharingRule(2, resource=".shared"),)))
    assert resources == {*names.values(), offers.name_of_shares(renamed, names)}
    assert plugin_policy.refusals({"metadata": {"name": "p"}, "spec": yaml.safe_load(with_plugin)["spec"]}) == []
