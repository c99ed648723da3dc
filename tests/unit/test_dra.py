"""gpushare dra: the slice, claims, parameters and messages, without a cluster."""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from gpushare.core.errors import GpushareError, RequestError
from gpushare.core.model import SharingRule
from gpushare.engines.base import Settings
from gpushare.integrations.dra import apiserver, claims, driver, parameters, protocol, service, slices

from tests.support.apiserver import NODE, NODE_UID, Call, call_of, compared
from tests.support.dra import ApiServer, Kubelet, Refused, check_slice, edits
from tests.support.host import TREE
from tests.unit import pure

SETTINGS = Settings("/usr/bin/gpushare-runtime", "/usr/bin/gpushare-hook", cri=True)
GIB = 1 << 30
FIRST = slices.device_name(pure.device(0))


def claim(*results: dict[str, Any], config: Any = ()) -> dict[str, Any]:
    devices = {"results": [{"driver": "gpushare.io", "pool": "n", "request": "r", **one} for one in results]}
    return {
        "metadata": {"namespace": "ml", "name": "c", "uid": "u"},
        "status": {"allocation": {"devices": {**devices, "config": list(config)}}},
    }


def consumed(memory: str = "4Gi", compute: str = "30", **more: Any) -> dict[str, Any]:
    return {"device": FIRST, "consumedCapacity": {"memory": memory, "gpushare.io/compute": compute}, **more}


@pytest.mark.parametrize("version", slices.VERSIONS)
def test_slice_is_accepted(version: str) -> None:
    node = pure.node()
    offers = slices.devices(node)
    check_slice(slices.slice_of("n", "u", offers, 1, version), version)
    shared = node._replace(config=node.config._replace(sharing=(SharingRule(4),)))
    value = slices.slice_of("n", "u", slices.devices(shared), 1, version)
    check_slice(value, version)
    assert "validValues" in json.dumps(value)


def test_stand_in_refuses_what_the_api_server_refuses() -> None:
    def changed(change: Any) -> None:
        value = slices.slice_of("n", "u", slices.devices(pure.node()), 1, "v1")
        change(value, value["spec"]["devices"][0])
        with pytest.raises(Refused):
            check_slice(value, "v1")

    changed(lambda value, device: value["spec"].update(more=1))
    changed(lambda value, device: device.update(name="GPU-A"))
    changed(lambda value, device: device.update(allowMultipleAllocations=False))
    changed(lambda value, device: device["capacity"]["memory"]["requestPolicy"].update(default="1"))
    changed(lambda value, device: device["capacity"]["memory"]["requestPolicy"]["validRange"].update(max="9Ti"))
    changed(lambda value, device: value["spec"]["pool"].update(resourceSliceCount=0))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4Gi", 4 * GIB),
        ("30", 30),
        ("0", 0),
        ("1500m", 2),
        ("2e3", 2000),
        ("1.5Gi", 3 * GIB // 2),
        ("4k", 4000),
        ("1E", 10**18),
    ],
)
def test_quantity(text: str, value: int) -> None:
    assert slices.quantity(text) == value


@pytest.mark.parametrize("text", ["", "4GiB", "-1", "x", "4 Gi"])
def test_wrong_quantity_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="is not a quantity of Kubernetes"):
        slices.quantity(text)


def test_claim_becomes_cdi_specification() -> None:
    node = pure.node()
    offers = slices.devices(node)
    given = {"apiVersion": "gpushare.io/v1", "kind": "ShareParameters", "memoryLimit": "6Gi", "priority": "high"}
    config = [{"source": "FromClaim", "requests": ["r"], "opaque": {"driver": "gpushare.io", "parameters": given}}]
    shares = claims.shares_of(claim(consumed(shareID="s"), config=config), "n", offers)
    value = claims.document("u-1", shares, node, SETTINGS)
    schema = json.loads((TREE / "tests/schemas/cdi.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(value)
    (device,) = value["devices"]
    text = f"{pure.UUIDS[0]};memory={4 * GIB}..{6 * GIB};compute=30;priority=high"
    assert device["containerEdits"]["env"] == [f"GPUSHARE_CLAIM_u_1_0={text}"]
    assert "--cri" in value["containerEdits"]["hooks"][0]["args"]
    assert claims.consumed(value) == [(pure.UUIDS[0], 4 * GIB, 30)]


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ({"metadata": {}, "status": {}}, "is not allocated"),
        (claim(consumed(pool="other")), 'has a device of pool "other"'),
        (claim(consumed(device="gone")), 'device "gone" is not on this node'),
        (claim(consumed(memory="9Ti")), "cannot be given"),
        (claim(consumed(memory="0")), "cannot be given"),
        (claim(consumed(compute="101")), "cannot be given"),
        (claim(consumed(adminAccess=True)), "adminAccess"),
        (claim(consumed(driver="other.io")), "has no device of gpushare.io"),
    ],
)
def test_wrong_claim_is_refused(found: dict[str, Any], line: str) -> None:
    with pytest.raises(GpushareError, match=line):
        claims.shares_of(found, "n", slices.devices(pure.node()))


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ({"more": 1}, 'unknown key "more"'),
        ({"priority": "low"}, 'priority is "low" in the parameters; write normal or high'),
        ({"memoryLimit": "lots"}, 'memoryLimit is "lots"'),
        ({"apiVersion": "v2"}, 'apiVersion is "v2" in the parameters; write gpushare.io/v1'),
    ],
)
def test_wrong_parameters_are_quoted(value: dict[str, Any], line: str) -> None:
    with pytest.raises(RequestError, match=line):
        parameters.checked("claim ml/c", {"apiVersion": "gpushare.io/v1", "kind": "ShareParameters", **value})


def test_uid_cannot_leave_the_folder() -> None:
    with pytest.raises(RequestError):
        claims.checked_uid("../../etc/passwd")


def test_messages_have_the_numbers_of_kubelet() -> None:
    """The bytes on the wire: field 5 of v1's Device is the share."""
    package = protocol.PACKAGES["v1.DRAPlugin"]
    device = protocol.message(package, "Device")(request_names=["r"], pool_name="p", share_id="s")
    assert device.SerializeToString() == b"\x0a\x01r\x12\x01p\x2a\x01s"
    assert (
        "share_id" not in protocol.message(protocol.PACKAGES["v1beta1.DRAPlugin"], "Device").DESCRIPTOR.fields_by_name
    )


def test_service_prepares_published_claims(tmp_path: Path) -> None:
    """API server, driver and kubelet in one process: publish, prepare, restart, refuse, release."""
    cdi, lines = tmp_path / "cdi", list[str]()
    cdi.mkdir()
    node = pure.node(memory_bytes=16 * GIB)
    offers = slices.devices(node)
    with ExitStack() as stack:
        short = stack.enter_context(tempfile.TemporaryDirectory(prefix="gpushare-", dir="/tmp"))
        api = stack.enter_context(ApiServer(tmp_path / "account"))
        kubelet = stack.enter_context(Kubelet(Path(short)))
        server = apiserver.Server(api.url, str(api.account))
        assert server.node() == (NODE, NODE_UID)
        publisher = driver.Publisher(server, *server.node(), lines.append)
        publisher.publish(offers)
        (stored,) = api.slices.values()
        publisher.publish(offers)
        assert "update" not in {call.verb for call in api.calls}
        publisher.publish({FIRST: offers[FIRST]})
        (changed,) = api.slices.values()
        assert changed["spec"]["pool"]["generation"] == stored["spec"]["pool"]["generation"] + 1
        publisher.publish(offers)

        def serving() -> service.Service:
            made = service.Service(server, SETTINGS, str(cdi), lines.append)
            made.show(node, NODE, offers)
            made.serve(f"{short}/plugins_registry", f"{short}/plugins")
            return made

        with serving():
            assert kubelet.register().name == "gpushare.io" and "registered with kubelet" in lines
            given = api.allocate("a", {"r": {"memory": "4Gi", "compute": "30"}})
            names = kubelet.prepare(given)
        (path,) = cdi.iterdir()
        path.with_name(path.name + ".new").touch()  # as a driver leaves it that is killed while it writes
        with serving():
            assert list(cdi.iterdir()) == [path]
            kubelet.register()
            assert kubelet.prepare(given) == names
            (edit,) = [one for one in edits(cdi, names) if "env" in one]
            (line,) = edit["env"]
            assert line.endswith(f"={pure.UUIDS[0]};memory={4 * GIB};compute=30")
            forged = json.loads(json.dumps(given))
            forged["metadata"].update(name="b", uid="b")
            result = forged["status"]["allocation"]["devices"]["results"][0]
            result["consumedCapacity"]["memory"] = "13Gi"
            api.claims["b"] = forged
            with pytest.raises(Refused, match="add up to 17 GiB and 60 %, and it has 16 GiB and 100 %"):
                kubelet.prepare(forged)
            with pytest.raises(Refused, match="was replaced by another"):
                kubelet.prepare({**given, "metadata": {**given["metadata"], "uid": "c"}})
            api.token = "other"
            with pytest.raises(Refused, match='401 "Unauthorized"'):
                kubelet.prepare(given)
            kubelet.unprepare(given)
            kubelet.unprepare(given)
            assert list(cdi.iterdir()) == []
    assert compared(api.calls, TREE / "packaging/kubernetes/dra/rbac.yaml") == (set(), set())


def test_calls_are_compared_with_roles(tmp_path: Path) -> None:
    """A call without a right and a right without a call are found; discovery needs no right."""
    assert call_of("GET", "/apis/a.io") is None
    assert call_of("GET", "/api/v1/nodes/n") == Call("get", "", "nodes", "n")
    assert call_of("GET", "/api/v1/nodes?watch=1") == Call("watch", "", "nodes")
    made = call_of("PATCH", "/apis/a.io/v1/namespaces/x/pods/p/status")
    assert made == Call("patch", "a.io", "pods/status", "p")
    role = {"apiGroups": ["a.io"], "resources": ["pods/status"], "verbs": ["patch"], "resourceNames": ["p"]}
    more = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list"]}
    path = tmp_path / "rbac.yaml"

    def found(*rules: Any) -> Any:
        path.write_text(json.dumps({"kind": "ClusterRole", "rules": rules}))
        return compared([made, Call("get", "", "nodes", "n")], path)

    assert found(role, more) == (set(), {Call("list", "", "nodes")})
    assert found({**role, "resourceNames": ["q"]}, more)[0] == {made}
    assert found(role) == ({Call("get", "", "nodes", "n")}, set())


@pytest.mark.parametrize("path", sorted((TREE / "packaging/kubernetes/dra").glob("*.yaml")), ids=lambda path: path.name)
def test_manifests_match_their_api(path: Path) -> None:
    for value in yaml.safe_load_all(path.read_text()):
        if value["kind"] != "Kustomization":  # not an object of the API
            kubernetes_validate.validate(value, kubernetes_validate.latest_version(), strict=True)


def test_page_lists_every_parameter() -> None:
    page = (TREE / "docs/dra.md").read_text()
    assert [name for name in parameters.SCHEMA["properties"] if name not in page] == []
