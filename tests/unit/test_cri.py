"""CRI annotations count only under an engine that is configured as a CRI. A device in a pod's sandbox is refused."""

from __future__ import annotations

from typing import Any

import pytest
from gpushare.core import constants
from gpushare.core.errors import PolicyError, RequestError
from gpushare.request import policy, request

from tests.unit.pure import bundle, node

POD = {
    "io.kubernetes.cri.container-type": "container",
    "io.kubernetes.cri.container-name": "app",
    "io.kubernetes.cri.sandbox-namespace": "ml",
    "io.kubernetes.cri.sandbox-id": "s1",
}
SANDBOX = {"io.kubernetes.cri.container-type": "sandbox"}
CRIO_SANDBOX = {"io.kubernetes.cri-o.ContainerType": "sandbox"}
DEVICE = {"linux": {"devices": [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}]}}
RULE = {"linux": {"resources": {"devices": [{"allow": True, "type": "c", "major": 195, "access": "rw"}]}}}
ADMIN = {"capabilities": {"bounding": ["CAP_SYS_ADMIN"]}}


def test_cri_annotations_are_dropped_without_cri() -> None:
    one = bundle(annotations={**POD, **CRIO_SANDBOX, "other": "x"}, cri=False)
    assert (one.container_type, one.container_name, one.annotations) == ("", "", {"other": "x"})
    assert POD.keys() <= constants.CRI_ANNOTATIONS


@pytest.mark.parametrize("claims", [POD, SANDBOX, CRIO_SANDBOX], ids=lambda claims: next(iter(claims.values())))
def test_limit_applies_despite_forged_cri_annotations(claims: dict[str, str]) -> None:
    one = bundle("GPUSHARE_MEMORY=1Gi", annotations=claims, cri=False, **DEVICE)
    assert request.mentions(one)
    found = request.resolve(one, node(), with_injected=True)
    assert found is not None and ("GPUSHARE_MEMORY", "1Gi") in found.sources and found.memory


def test_device_is_request_despite_forged_cri_annotations() -> None:
    one = bundle(annotations=SANDBOX, cri=False, **DEVICE)
    assert request.mentions(one)
    assert request.resolve(one, node(), with_injected=True) is not None
    with pytest.raises(PolicyError, match="policy.accept.cdi"):
        request.resolve(one, node(accept_cdi="never"), with_injected=True)


@pytest.mark.parametrize("claims", [POD, SANDBOX, CRIO_SANDBOX], ids=lambda claims: next(iter(claims.values())))
@pytest.mark.parametrize("key", ["gpushare.io/memory", "app.gpushare.io/memory", "gpu-memory"])
def test_pod_annotation_without_cri_is_refused_with_remedy(claims: dict[str, str], key: str) -> None:
    """Honoured, it would give each container the whole amount; ignored, it would drop the limit."""
    one = bundle(annotations={**claims, key: "1Gi"}, cri=False)
    assert request.mentions(one)
    with pytest.raises(RequestError) as refused:
        request.resolve(one, node())
    assert "gpushare runtime configure containerd" in refused.value.hint


@pytest.mark.parametrize("rules", [{}, {"accept_cdi": "never"}, {"require_limits": True}])
def test_entry_of_a_forged_name_matters_only_where_an_entry_is_needed(rules: dict[str, Any]) -> None:
    host = node(privileged_containers=(f"{POD['io.kubernetes.cri.sandbox-namespace']}/*",), **rules)
    forged: dict[str, Any] = {"annotations": POD, "cri": False}
    assert request.resolve(bundle("NVIDIA_VISIBLE_DEVICES=0", **forged), host) is not None
    with pytest.raises(RequestError, match="would make this a container of a pod"):
        request.resolve(bundle("GPUSHARE_MEMORY=1Gi", process=ADMIN, **forged), host)


def test_podman_pod_container_annotation_counts() -> None:
    cri_annotations = {"io.kubernetes.cri-o.ContainerType": "container", "io.kubernetes.cri-o.SandboxID": "p"}
    one = bundle(annotations={**cri_annotations, "gpushare.io/memory": "1Gi"}, cri=False)
    assert request.resolve(one, node()) is not None


@pytest.mark.parametrize("more", [DEVICE, RULE], ids=["node", "rule"])
@pytest.mark.parametrize("with_injected", [False, True])
def test_device_in_sandbox_is_refused(more: dict[str, Any], with_injected: bool) -> None:
    one = bundle(annotations=SANDBOX, **more)
    assert request.mentions(one)
    with pytest.raises(RequestError, match="a pod's sandbox has"):
        request.resolve(one, node(), with_injected)


def test_pod_limit_applies_to_injected_device() -> None:
    """A device that other software injected must not replace the limit that the user set for the pod."""
    one = bundle(annotations={**POD, "gpushare.io/memory": "1Gi"}, **DEVICE)
    found = request.resolve(one, node(), with_injected=True)
    assert found is not None and ("gpushare.io/memory", "1Gi") in found.sources


def test_privileged_pod_entry_needs_cri() -> None:
    rules = node(privileged_containers=("ml/app",)).config.policy
    assert policy.listed(bundle(annotations=POD, process=ADMIN), rules)
    with pytest.raises(RequestError, match="would make this a container of a pod"):
        policy.listed(bundle(annotations=POD, process=ADMIN, cri=False), rules)
    other = {**POD, "io.kubernetes.cri.container-name": "other"}
    assert not policy.listed(bundle(annotations=other, process=ADMIN, cri=False), rules)
