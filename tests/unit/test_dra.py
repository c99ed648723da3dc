"""gpushare dra: the slice, claims, parameters and messages, without a cluster."""

from __future__ import annotations

import json
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Optional

import jsonschema
import kubernetes_validate
import pytest
import yaml
from gpushare.cli import main
from gpushare.core.errors import GpushareError, RequestError
from gpushare.core.model import Node, SharingRule
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
    value = claims.document("u-1", shares, node, SETTINGS, "5ec")
    schema = json.loads((TREE / "tests/schemas/cdi.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(value)
    (device,) = value["devices"]
    text = f"{pure.UUIDS[0]};memory={4 * GIB}..{6 * GIB};compute=30;priority=high"
    assert device["containerEdits"]["env"] == [f"GPUSHARE_CLAIM_u_1_0_5ec={text}"]
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
    (device,) = claims.document("u", shares, node, SETTINGS, "5ec")["devices"]
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


@pytest.mark.parametrize(
    ("policy", "most", "compute"),
    [
        ({}, "16Gi", {"default": "0", "validRange": {"min": "0", "max": "100", "step": "1"}}),
        (
            {"max_memory": "50%", "max_compute_percent": 40},
            "8Gi",
            {"default": "40", "validRange": {"min": "1", "max": "40", "step": "1"}},
        ),
    ],
)
def test_scheduler_allocates_no_more_than_policy_grants(
    tmp_path: Path, policy: dict[str, Any], most: str, compute: dict[str, Any]
) -> None:
    """Otherwise a claim is allocated that the node always refuses."""
    node = pure.node(memory_bytes=16 * GIB, **policy)
    offers = slices.devices(node)
    with ApiServer(tmp_path / "account") as api:
        server = apiserver.Server(api.url, str(api.account))
        driver.Publisher(server, *server.node(), len).publish(offers)
        (first, _) = api.slices[slices.slice_name(NODE)]["spec"]["devices"]
        assert first["capacity"]["memory"]["requestPolicy"]["default"] == most
        assert first["capacity"]["compute"]["requestPolicy"] == compute
        claim = api.allocate("a", {"r": {"memory": most}})
        claims.shares_of(claim, NODE, offers)
        with pytest.raises(Refused, match="no device has room"):
            api.allocate("b", {"r": {"memory": "17Gi" if most == "16Gi" else "9Gi"}})


def attributes_of(offer: slices.Offer) -> dict[str, Any]:
    (device,) = slices.slice_of("n", "u", {"d": offer}, 1, "v1")["spec"]["devices"]
    return {key: next(iter(value.values())) for key, value in device["attributes"].items()}


def test_slice_has_what_users_select_by(tmp_path: Path) -> None:
    """The names are those of NVIDIA's driver and of Kubernetes, so that selectors and constraints apply to both."""
    device = pure.device(0, arch="8.6", brand="tesla")
    bus = tmp_path / f"sys/devices/pci0000:3a/0000:3a:00.0/{device.bus_id}"
    link = tmp_path / "sys/bus/pci/devices" / device.bus_id
    for path in (bus, link.parent, tmp_path / "sys/module/nvidia"):
        path.mkdir(parents=True)
    (bus / "numa_node").write_text("1\n")
    link.symlink_to(bus)
    node = pure.node()
    host = node.inventory._replace(devices=(device,), cuda_version="12.2")
    node = Node(node.config._replace(driver_root=str(tmp_path)), host)
    with ExitStack() as stack:
        offers, _ = driver._State(driver.Settings("", "", 1.0), print, stack).of(node)
    assert attributes_of(*offers.values()) == {
        "uuid": device.uuid, "model": "Test GPU", "brand": "tesla", "index": 0, "mig": False,
        "driverVersion": "535.261.3", "cudaDriverVersion": "12.2.0", "cudaComputeCapability": "8.6.0",
        "resource.kubernetes.io/pciBusID": device.bus_id, "resource.kubernetes.io/pcieRoot": "pci0000:3a",
        "resource.kubernetes.io/numaNode": 1,
    }  # fmt: skip
    check_slice(slices.slice_of("n", "u", offers, 1, "v1"), "v1")
    assert "driverVersion" not in attributes_of(next(iter(offers.values()))._replace(driver="535.x"))


@pytest.mark.parametrize("effect", ["NoSchedule", "NoExecute"])
def test_broken_device_has_a_taint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, effect: str) -> None:
    """After a Xid error, and if the driver no longer has the device."""
    node = pure.node()
    version = tmp_path / "sys/module/nvidia/version"
    gpus = [tmp_path / "proc/driver/nvidia/gpus" / one.bus_id / "information" for one in node.inventory.devices]
    for path in (version, *gpus):
        path.parent.mkdir(parents=True)
        path.write_text(pure.VERSION)
    errors: dict[str, int] = {}

    class Watch:
        def __init__(self, *words: Any) -> None:
            pass

        def errors(self) -> dict[str, int]:
            return errors

        def close(self) -> None:
            pass

    monkeypatch.setattr(driver, "XidWatch", Watch)
    lines: list[str] = []
    node = node._replace(config=node.config._replace(driver_root=str(tmp_path)))
    settings = driver.Settings("", "", 1.0, "libnvidia-ml.so.1", (), effect)
    with ExitStack() as stack:
        state = driver._State(settings, lines.append, stack)
        assert state.of(node)[1] == {} and lines == []
        errors[pure.UUIDS[0]] = 79
        gpus[1].unlink()
        gpus[1].parent.rmdir()
        taints = state.of(node)[1]
        assert state.of(node)[1] == taints
    assert taints == {
        pure.UUIDS[0]: slices.Taint("gpushare.io/xid", "79", effect),
        pure.UUIDS[1]: slices.Taint("gpushare.io/gone", "", effect),
    }
    assert sorted(lines) == sorted(f"device {uuid}: taint {one.key}={one.value}" for uuid, one in taints.items())


def test_taints_are_published_once_and_go(tmp_path: Path) -> None:
    """A restarted driver does not write the slice again: the API server has added a time."""
    offers, broken = slices.devices(pure.node()), {pure.UUIDS[1]: slices.Taint("gpushare.io/xid", "79", "NoSchedule")}

    def tainted() -> dict[str, Any]:
        return {one["name"]: one.get("taints") for one in api.slices[slices.slice_name(NODE)]["spec"]["devices"]}

    with ApiServer(tmp_path / "account") as api:
        server = apiserver.Server(api.url, str(api.account))
        for _ in range(2):
            driver.Publisher(server, *server.node(), len).publish(offers, broken)
            (first, _), (_, (taint,)) = tainted().items()
            assert taint.keys() == {"key", "value", "effect", "timeAdded"} and tainted()[first] is None
            assert api.slices[slices.slice_name(NODE)]["spec"]["pool"]["generation"] == 1
        driver.Publisher(server, *server.node(), len).publish(offers)
        assert set(tainted().values()) == {None}


def test_broken_device_is_left_out_where_taints_are_off(tmp_path: Path) -> None:
    offers, broken = slices.devices(pure.node()), {pure.UUIDS[1]: slices.Taint("gpushare.io/xid", "79", "NoSchedule")}
    lines: list[str] = []
    with ApiServer(tmp_path / "account", taints=False) as api:
        server = apiserver.Server(api.url, str(api.account))
        publisher = driver.Publisher(server, *server.node(), lines.append)
        for taints, names in ((broken, [FIRST]), ({}, list(offers)), (broken, [FIRST])):
            publisher.follow(offers, taints)
            assert [one["name"] for one in api.slices[slices.slice_name(NODE)]["spec"]["devices"]] == names
    assert sum("dropped taints" in line for line in lines) == 1


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


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[ApiServer, Kubelet, Path]]:
    """The API server, kubelet, and the folder of CDI specifications."""
    (tmp_path / "cdi").mkdir()
    short = tempfile.TemporaryDirectory(prefix="gpushare-", dir="/tmp")
    with short as folder, ApiServer(tmp_path / "account") as api, Kubelet(Path(folder)) as kubelet:
        yield api, kubelet, tmp_path / "cdi"


@contextmanager
def serving(cluster: tuple[ApiServer, Kubelet, Path], node: Optional[Node]) -> Iterator[None]:
    api, kubelet, cdi = cluster
    server = apiserver.Server(api.url, str(api.account))
    with service.Service(server, SETTINGS, str(cdi), list[str]().append) as made:
        if node:
            made.show(node, NODE, slices.devices(node))
        made.serve(f"{kubelet.folder}/plugins_registry", f"{kubelet.folder}/plugins")
        kubelet.register()
        yield


def nothing(api: ApiServer, cdi: Path) -> None:
    pass


def uninstalled(api: ApiServer, cdi: Path) -> None:
    """`gpushare uninstall --force`, while the driver was not there."""
    for path in cdi.iterdir():
        path.unlink()


def deleted(api: ApiServer, cdi: Path) -> None:
    """`kubectl delete --force` of the pod, with the claim that was made for it."""
    api.claims.clear()


def no_server(api: ApiServer, cdi: Path) -> None:
    api.fails = (503, "etcdserver: no leader")


@pytest.mark.parametrize("devices_are_known", [True, False])
@pytest.mark.parametrize("event", [nothing, uninstalled, deleted, no_server], ids=lambda event: event.__name__)
def test_claims_outlive_driver_and_kubelet(
    cluster: tuple[ApiServer, Kubelet, Path], event: Callable[[ApiServer, Path], None], devices_are_known: bool
) -> None:
    """A driver that starts later releases the claim, so that its pod does not stay in Terminating: after a crash, a
    removal, a restart of kubelet, and on a node whose devices are not known."""
    api, kubelet, cdi = cluster
    node = pure.node(memory_bytes=16 * GIB)
    driver.Publisher(apiserver.Server(api.url, str(api.account)), NODE, NODE_UID, len).publish(slices.devices(node))
    with serving(cluster, node):
        mine = api.allocate("a", {"r": {"memory": "4Gi"}})
        names = kubelet.prepare(mine)
    with serving(cluster, node):
        kubelet.register()  # kubelet has restarted
        assert kubelet.prepare(mine) == names
    event(api, cdi)
    with serving(cluster, node if devices_are_known else None):
        if not devices_are_known and event is nothing:
            with pytest.raises(Refused, match="the devices of this node are not known yet"):
                kubelet.prepare(mine)
        kubelet.unprepare(mine)
        kubelet.unprepare(mine)
    assert list(cdi.iterdir()) == []


def test_probe_wants_an_answer_of_the_driver(cluster: tuple[ApiServer, Kubelet, Path]) -> None:
    _, kubelet, _ = cluster
    words = ["dra", "--alive", "--kubelet", str(kubelet.folder)]
    assert main(words) == 1
    with serving(cluster, None):
        assert main(words) == 0


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
