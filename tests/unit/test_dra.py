"""gpushare dra: the slice, claims, parameters and messages, without a cluster."""

from __future__ import annotations

import json
import os
import socket
import stat
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

from tests.support.apiserver import NODE, NODE_UID, Call, call_of, check_strictly, compared, rights_of
from tests.support.dra import ApiServer, Kubelet, Refused, check_slice, edits
from tests.support.host import TREE
from tests.support.rbac import access, built
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
    config = [given("FromClaim", ["r"], memoryLimit="6Gi", priority="high")]
    shares = claims.shares_of(claim(consumed(shareID="s"), config=config), "n", offers)
    value = claims.document("u-1", shares, node, SETTINGS)
    schema = json.loads((TREE / "tests/schemas/cdi.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(value)
    (device,) = value["devices"]
    text = f"{pure.UUIDS[0]};memory={4 * GIB}..{6 * GIB};compute=30;priority=high"
    assert device["containerEdits"]["env"] == [f"GPUSHARE_CLAIM_u_1_0={text}"]
    assert "--cri" in value["containerEdits"]["hooks"][0]["args"]
    assert claims.consumed(value) == [(pure.UUIDS[0], 4 * GIB, 30)]


def given(source: str, requests: Any = (), driver: str = "gpushare.io", **parameters: str) -> dict[str, Any]:
    """One entry of an allocation's configuration."""
    value = {"apiVersion": "gpushare.io/v1", "kind": "ShareParameters", **parameters}
    return {"source": source, "requests": list(requests), "opaque": {"driver": driver, "parameters": value}}


@pytest.mark.parametrize(
    ("config", "once"),
    [
        (
            [given("FromClaim", priority="normal"), given("FromClass", priority="high", computeMode="soft")],
            ";compute-mode=soft;priority=normal",  # the claim overrides the class
        ),
        ([given("FromClaim", ["r"], priority="high")], ";priority=high"),  # for all subrequests of r
        ([given("FromClaim", ["r/first"], priority="high")], ";priority=high"),
        ([given("FromClaim", ["other"], priority="high")], ""),
        ([given("FromClaim", driver="other.io", unknown="x")], ""),
    ],
)
def test_parameters_of_the_request_are_taken(config: Any, once: str) -> None:
    (share,) = claims.shares_of(claim(consumed(request="r/first"), config=config), "n", slices.devices(pure.node()))
    assert share.text == f"{pure.UUIDS[0]};memory={4 * GIB};compute=30{once}"
    assert share.request == "r"  # containers name the request, not the subrequest


def test_result_without_capacity_is_the_whole_device() -> None:
    """As of an API server without consumable capacity."""
    offers = slices.devices(pure.node())
    (share,) = claims.shares_of(claim({"device": FIRST}), "n", offers)
    assert (share.memory, share.compute) == (offers[FIRST].memory, 100)


def test_claim_has_the_nodes_of_its_device(tmp_path: Path) -> None:
    """The nodes are in config.json then, so systemd keeps their rules."""
    (tmp_path / "dev").mkdir()
    for name, minor in (("nvidia0", 0), ("nvidia1", 1), ("nvidiactl", 255)):
        os.mknod(tmp_path / "dev" / name, 0o666 | stat.S_IFCHR, os.makedev(195, minor))
    node = pure.node()
    node = node._replace(inventory=node.inventory._replace(root=str(tmp_path)))
    shares = claims.shares_of(claim(consumed()), "n", slices.devices(node))
    (device,) = claims.document("u", shares, node, SETTINGS)["devices"]
    paths = {one["path"]: one["hostPath"] for one in device["containerEdits"]["deviceNodes"]}
    assert paths == {path: f"{tmp_path}{path}" for path in ("/dev/nvidia0", "/dev/nvidiactl")}


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ({"metadata": {}, "status": {}}, "is not allocated"),
        (claim(consumed(), config=[given("FromClaim", memoryLimit="1Gi")]), 'memoryLimit is "1Gi", below the 4 GiB'),
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


def test_deleted_slice_is_published_again(tmp_path: Path) -> None:
    offers = slices.devices(pure.node())
    with ApiServer(tmp_path / "account") as api:
        server = apiserver.Server(api.url, str(api.account))
        publisher = driver.Publisher(server, *server.node(), list[str]().append)
        publisher.follow(offers)
        api.slices.clear()  # as an administrator or kubelet does
        publisher.follow(offers)
        assert not api.slices
        publisher._next = 0.0  # the time of the next read has come
        publisher.follow(offers)
        assert list(api.slices) == [slices.slice_name(NODE)]
        api.versions = ("v1alpha3",)
        with pytest.raises(GpushareError, match="offers none of resource.k8s.io/v1, v1beta2, v1beta1; use Kubernetes"):
            apiserver.Server(api.url, str(api.account)).version()
        (api.account / "token").write_text("e30.e30.x")
        with pytest.raises(GpushareError, match="the service account token names no node"):
            server.node()
    with pytest.raises(GpushareError, match='--server "http://a" is not the URL of an API server'):
        apiserver.Server("http://a")


def test_certificates_without_key_identifiers_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_strictly(monkeypatch)
    with ApiServer(tmp_path / "account") as api:
        assert apiserver.Server(api.url, str(api.account)).version() == "v1"
        other = ApiServer(tmp_path / "other").account  # not the issuer
        with pytest.raises(GpushareError, match="CERTIFICATE_VERIFY_FAILED"):
            apiserver.Server(api.url, str(other)).version()


def test_slice_has_the_devices_that_policy_allows() -> None:
    assert [*slices.devices(pure.node(allowed_devices=("1",)))] == [slices.device_name(pure.device(1))]
    assert [*slices.devices(pure.node(memory_bytes=0))] == []  # of unknown size
    node = pure.node()
    many = tuple(pure.device(0, uuid=f"GPU-{number}") for number in range(slices.MAX_DEVICES + 1))
    with pytest.raises(GpushareError, match="129 devices, and a ResourceSlice has at most 128"):
        slices.devices(node._replace(inventory=node.inventory._replace(devices=many)))


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

        with serving() as one:
            modes = [oct(path.stat().st_mode & 0o777) for path in Path(short).glob("**/*.sock")]
            assert modes == ["0o600"] * 2 and one.is_reachable
            next(Path(short).glob("plugins_registry/*")).unlink()  # as in an emptied directory
            assert not one.is_reachable
            one.serve(f"{short}/plugins_registry", f"{short}/plugins")
            assert one.is_reachable and kubelet.register().name == "gpushare.io" and "registered with kubelet" in lines
            mine = api.allocate("a", {"r": {"memory": "4Gi", "compute": "30"}})
            names = kubelet.prepare(mine)
        (path,) = cdi.iterdir()
        path.with_name(path.name + ".new").touch()  # as a driver leaves it that is killed while it writes
        for name in ("plugins_registry/gpushare.io-reg.sock", "plugins/gpushare.io/dra.sock"):
            with socket.socket(socket.AF_UNIX) as left:
                left.bind(f"{short}/{name}")
        with serving():
            assert list(cdi.iterdir()) == [path]
            kubelet.register()
            full = api.allocate("full", {"r": {"memory": "12Gi", "compute": "70"}})
            assert kubelet.prepare(full) == kubelet.prepare(full)  # the second call counts nothing again
            assert kubelet.prepare(mine) == names
            kubelet.unprepare(full)
            (edit,) = [one for one in edits(cdi, names) if "env" in one]
            (line,) = edit["env"]
            assert line.endswith(f"={pure.UUIDS[0]};memory={4 * GIB};compute=30")
            forged = json.loads(json.dumps(mine))
            forged["metadata"].update(name="b", uid="b")
            result = forged["status"]["allocation"]["devices"]["results"][0]
            result["consumedCapacity"]["memory"] = "13Gi"
            api.claims["b"] = forged
            with pytest.raises(Refused, match="add up to 17 GiB and 60 %, and it has 16 GiB and 100 %"):
                kubelet.prepare(forged)
            with pytest.raises(Refused, match="was replaced by another"):
                kubelet.prepare({**mine, "metadata": {**mine["metadata"], "uid": "c"}})
            api.token = "other"
            with pytest.raises(Refused, match='401 "Unauthorized"'):
                kubelet.prepare(mine)
            kubelet.unprepare(mine)
            kubelet.unprepare(mine)
            assert list(cdi.iterdir()) == []
    rights = access(built(TREE / "packaging/kubernetes/dra"))["gpushare-dra"].rights
    assert compared(api.calls, rights) == (set(), set())


def test_calls_are_compared_with_roles() -> None:
    """A call without a right and a right without a call are found; discovery needs no right."""
    assert call_of("GET", "/apis/a.io") is None
    assert call_of("GET", "/api/v1/nodes/n") == Call("get", "", "nodes", "n")
    assert call_of("GET", "/api/v1/nodes?watch=1") == Call("watch", "", "nodes")
    made = call_of("PATCH", "/apis/a.io/v1/namespaces/x/pods/p/status")
    assert made == Call("patch", "a.io", "pods/status", "p")
    role = {"apiGroups": ["a.io"], "resources": ["pods/status"], "verbs": ["patch"], "resourceNames": ["p"]}
    more = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list"]}

    def found(*rules: Any) -> Any:
        return compared([made, Call("get", "", "nodes", "n")], rights_of(rules))

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
