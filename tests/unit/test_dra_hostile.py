"""gpushare dra with hostile input: malformed messages and claims, repeated and late calls, damaged files."""

from __future__ import annotations

import copy
import http.client
import json
import os
import random
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import grpc
import pytest
from gpushare.core.errors import GpushareError
from gpushare.integrations.dra import apiserver, driver, protocol, service, slices

from tests.support.apiserver import NODE
from tests.support.dra import ApiServer, Kubelet, Refused
from tests.unit import pure
from tests.unit.test_dra import SETTINGS, given

GIB = 1 << 30
V1 = protocol.PACKAGES["v1.DRAPlugin"]
OFFERS = slices.devices(pure.node(memory_bytes=16 * GIB))
FIRST, SECOND = OFFERS


class Served(NamedTuple):
    api: ApiServer
    kubelet: Kubelet
    service: service.Service
    cdi: Path
    lines: list[str]
    endpoint: str

    def files(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in self.cdi.iterdir()}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """The driver between an API server with its slice and a kubelet; two devices of 16 GiB."""
    cdi, lines = tmp_path / "cdi", list[str]()
    cdi.mkdir()
    with tempfile.TemporaryDirectory(prefix="gpushare-", dir="/tmp") as short, ApiServer(tmp_path / "account") as api:
        server = apiserver.Server(api.url, str(api.account))
        driver.Publisher(server, *server.node(), lines.append).publish(OFFERS)
        with Kubelet(Path(short)) as kubelet, service.Service(server, SETTINGS, str(cdi), lines.append) as made:
            made.show(pure.node(memory_bytes=16 * GIB), NODE, OFFERS)
            made.serve(f"{short}/plugins_registry", f"{short}/plugins")
            yield Served(api, kubelet, made, cdi, lines, kubelet.register().endpoint)


def result(device: str = FIRST, request: str = "r", **consumed: str) -> dict[str, Any]:
    capacity = consumed or {"memory": "4Gi", "compute": "30"}
    return {
        "request": request, "driver": "gpushare.io", "pool": NODE, "device": device, "consumedCapacity": capacity
    }  # fmt: skip


def stored(served: Served, name: str, *results: Any, config: Any = ()) -> dict[str, Any]:
    """A claim with these results, as the API server has it; its uid is the name."""
    devices = {"results": list(results), "config": list(config)}
    served.api.claims[name] = {
        "metadata": {"namespace": "ml", "name": name, "uid": name},
        "status": {"allocation": {"devices": devices}},
    }
    return served.api.claims[name]


def raw(served: Served, method: str, data: bytes) -> None:
    with grpc.insecure_channel(f"unix:{served.endpoint}") as channel:
        channel.unary_unary(f"/{V1}.DRAPlugin/{method}")(data, timeout=30)


@pytest.mark.parametrize("method", ["NodePrepareResources", "NodeUnprepareResources"])
def test_malformed_messages_are_refused_and_the_next_is_answered(served: Served, method: str) -> None:
    chance = random.Random(5)
    good = protocol.message(V1, f"{method}Request")(claims=[{"namespace": "ml", "uid": "u", "name": "c"}])
    data = good.SerializeToString()
    refused = 0
    for text in (b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x02\x0a\xff", b"\x0a\x04\x12\x02\xff\xfe", data[:-1]):
        with pytest.raises(grpc.RpcError):
            raw(served, method, text)
    for _ in range(30):
        bad = bytearray(data)
        bad[chance.randrange(len(bad))] = chance.randrange(256)
        try:
            raw(served, method, bytes(bad))
        except grpc.RpcError:
            refused += 1
    assert refused and served.files() == {}
    assert served.kubelet.prepare(stored(served, "a", result()))


def test_claim_that_is_named_twice_has_one_answer(served: Served) -> None:
    claim = stored(served, "a", result())["metadata"]
    asked = protocol.message(V1, "NodePrepareResourcesRequest")(claims=[claim, claim])
    with grpc.insecure_channel(f"unix:{served.endpoint}") as channel:
        call = channel.unary_unary(
            f"/{V1}.DRAPlugin/NodePrepareResources",
            response_deserializer=protocol.message(V1, "NodePrepareResourcesResponse").FromString,
        )
        found = call(asked.SerializeToString(), timeout=30)
    assert len(found.claims["a"].devices) == 1


def test_two_requests_for_one_device_add_up(served: Served) -> None:
    fits = [result(request=name, memory="8Gi", compute="50") for name in ("one", "two")]
    names = served.kubelet.prepare(stored(served, "a", *fits))
    assert len(set(names)) == 2
    served.kubelet.unprepare(served.api.claims["a"])
    for more, line in (({"memory": "9Gi", "compute": "50"}, "17 GiB"), ({"memory": "8Gi", "compute": "51"}, "101 %")):
        with pytest.raises(Refused, match=f"the claims of GPU-.* add up to .*{line}"):
            served.kubelet.prepare(stored(served, "b", fits[0], result(request="two", **more)))
    assert served.files() == {}


@pytest.mark.parametrize(
    ("capacity", "line"),
    [
        ({"memory": "4Gi", "compute": "101"}, "4 GiB and 101 % of device"),
        ({"memory": "4Gi", "compute": "1E"}, "1000000000000000000 % of device"),
        ({"memory": "4Gi", "compute": "9" * 5000}, "has more than 40 digits"),
        ({"memory": "4Gi", "compute": "1e99"}, "cannot be given"),
        ({"memory": "4Gi", "compute": "-1"}, '"-1" is not a quantity'),
        ({"memory": "1e99", "compute": "1"}, "cannot be given"),
        ({"memory": "4Gi", "compute": ["30"]}, "is not a quantity"),
    ],
)
def test_impossible_amount_is_refused(served: Served, capacity: Any, line: str) -> None:
    with pytest.raises(Refused, match=line):
        served.kubelet.prepare(stored(served, "a", result(**capacity)))
    assert served.files() == {}


def test_claim_is_deleted_while_it_is_prepared(served: Served) -> None:
    claim = stored(served, "a", result())
    served.kubelet.prepare(claim)
    served.api.release("a")
    with pytest.raises(Refused, match='404 "a not found"'):
        served.kubelet.prepare(claim)
    assert len(served.files()) == 1  # its containers may still run
    served.kubelet.unprepare(claim)
    assert served.files() == {}


def test_unknown_claim_is_released_without_error(served: Served) -> None:
    served.kubelet.unprepare(stored(served, "a", result()))
    with pytest.raises(Refused):
        served.kubelet.prepare(stored(served, "b", result(compute="101", memory="1Gi")))
    served.kubelet.unprepare(served.api.claims["b"])  # kubelet releases what it could not prepare


@pytest.mark.parametrize(
    "uid", ["", ".", "..", "../x", "/etc/x", "a/../../x", "a\0b", "a\n", "a" * 64, "\u00e4", "a.b", "*"]
)
def test_uid_is_never_a_path(served: Served, uid: str) -> None:
    claim = stored(served, "a", result())
    claim["metadata"]["uid"] = uid
    before = sorted(str(path) for path in served.cdi.parent.rglob("*"))
    for call in (served.kubelet.prepare, served.kubelet.unprepare):
        with pytest.raises(Refused, match="is not the uid of a claim"):
            call(claim)
    assert sorted(str(path) for path in served.cdi.parent.rglob("*")) == before


def test_claim_that_was_allocated_again_gets_its_new_devices(served: Served) -> None:
    """A claim that is not of a template keeps its uid, and its last release can have been lost."""
    claim = stored(served, "a", result(memory="10Gi", compute="60"))
    served.kubelet.prepare(claim)
    before = served.files()
    assert served.kubelet.prepare(claim) and served.files() == before
    # the same device, where both amounts together would not fit
    served.kubelet.prepare(stored(served, "a", result(memory="12Gi", compute="70")))
    ((name, text),) = served.files().items()
    assert f"memory={12 * GIB};compute=70" in text and [name] == list(before)
    served.kubelet.prepare(stored(served, "a", result(SECOND, memory="1Gi", compute="0")))
    (text,) = served.files().values()
    assert f"{pure.UUIDS[1]};memory={GIB}" in text and pure.UUIDS[0] not in text


def test_repeated_and_concurrent_calls_give_one_answer(served: Served) -> None:
    """kubelet repeats a call whose answer it did not see, while the driver still works at the first one."""
    mine = stored(served, "mine", result(memory="10Gi", compute="60"))
    others = [stored(served, f"other{number}", result(memory="5Gi", compute="20")) for number in range(3)]

    def prepare(claim: dict[str, Any]) -> Any:
        try:
            return served.kubelet.prepare(claim)
        except Refused as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(prepare, [mine] * 6))
        late = list(pool.map(prepare, others * 2))
    assert answers == [["gpushare.io/claim=mine-0"]] * 6
    given_away = {name for answer in late if isinstance(answer, list) for name in answer}
    assert len(given_away) == 1 and len(served.files()) == 2
    assert {answer.count("add up to 20 GiB") for answer in late if isinstance(answer, str)} == {1}


def test_call_that_kubelet_gave_up_prepares_nothing(served: Served) -> None:
    asked = SimpleNamespace(**stored(served, "a", result())["metadata"])
    gone = SimpleNamespace(is_active=lambda: False)
    with pytest.raises(GpushareError, match="kubelet waits no longer"):
        served.service._prepare(asked, None, V1, gone)
    assert served.files() == {}


def without_secret(specification: str) -> str:
    """The random digits at the end of a claim's variable are new each time."""
    return re.sub("_[0-9a-f]{32}=", "=", specification)


def test_damaged_file_is_named_and_written_again(served: Served) -> None:
    first, second = stored(served, "a", result()), stored(served, "b", result())
    served.kubelet.prepare(first)
    ((name, text),) = served.files().items()
    for damaged in ("", "{", "[]", '{"devices": 1}', text.replace("memory=", "m="), "\0" * 4096):
        (served.cdi / name).write_text(damaged)
        with pytest.raises(Refused, match=f"/{name}.* is damaged; delete the pod of that claim, then the file"):
            served.kubelet.prepare(second)
        served.kubelet.prepare(first)
        assert {one: without_secret(found) for one, found in served.files().items()} == {name: without_secret(text)}
    served.kubelet.prepare(second)


def test_version_is_read_again_after_the_api_server_was_upgraded(tmp_path: Path) -> None:
    with ApiServer(tmp_path / "account", ("v1beta1",)) as api:
        server = apiserver.Server(api.url, str(api.account))
        assert server.slice("x") is None and server.version() == "v1beta1"
        api.versions = ("v1",)
        assert server.slice("x") is None and server.version() == "v1"
        api.claims["a"] = {"metadata": {}}
        api.versions = ("v1beta2",)
        with pytest.raises(GpushareError, match='404 "404 page not found"'):
            server.claim("ml", "a")
        assert server.claim("ml", "a") == {"metadata": {}}


def test_errors_in_plain_text_are_shown(tmp_path: Path) -> None:
    with ApiServer(tmp_path / "account", ()) as api:
        server = apiserver.Server(api.url, str(api.account))
        with pytest.raises(GpushareError, match="offers none of resource.k8s.io/v1, v1beta2, v1beta1"):
            server.slice("x")
        api.versions = ("v1",)
        assert server.slice("x") is None
        api.fails = 503, "upstream connect error\n" + "x" * 1000
        with pytest.raises(GpushareError, match=r'503 "upstream connect error\\x0ax+[.]{3}" \(1023') as failed:
            server.slice("x")
        assert "\n" not in str(failed.value)
        api.fails = 200, "<html>"
        with pytest.raises(GpushareError, match="Expecting value"):
            server.slice("x")


def test_version_that_another_thread_forgets_is_still_in_the_path() -> None:
    class Forgetful(apiserver.Server):
        seen = ["v1", ""]

        @property
        def _version(self) -> str:
            return self.seen.pop(0)

        @_version.setter
        def _version(self, version: str) -> None:
            pass

    assert Forgetful("https://127.0.0.1:1").version() == "v1"


def test_deeply_nested_answer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server accepts parameters that are nested 10000 deep."""
    with ApiServer(tmp_path / "account") as api:
        server = apiserver.Server(api.url, str(api.account))
        server.version()
        monkeypatch.setattr(http.client.HTTPResponse, "read", lambda *_: b"[" * 100000)
        with pytest.raises(GpushareError, match="the object is nested too deeply"):
            server.claim("ml", "a")


def test_mutated_claims_have_an_answer(served: Served) -> None:
    """Each answer is devices or one line; no call fails, and nothing is prepared for a refused claim."""
    chance = random.Random(11)
    good = stored(served, "a", result(request="r/sub", compute="30", memory="4Gi"), config=[given("FromClaim", ["r"])])
    values: list[Any] = [None, 0, -1, "", "x", "9" * 400, [], {}, [[]], {"a": 1}, True, "\ud800", 1e400]
    refused = 0
    for number in range(80):
        claim = copy.deepcopy(good)
        at: Any = claim["status"]
        while True:
            key = chance.choice(list(at)) if isinstance(at, dict) else chance.randrange(len(at))
            if chance.random() < 0.35 or not isinstance(at[key], (dict, list)) or not at[key]:
                break
            at = at[key]
        at[key] = chance.choice(values)
        claim["metadata"]["uid"] = f"u{number}"
        served.api.claims["a"] = claim
        metadata = [claim["metadata"]]
        asked = protocol.message(V1, "NodePrepareResourcesRequest")(claims=metadata)
        with grpc.insecure_channel(f"unix:{served.endpoint}") as channel:
            call = channel.unary_unary(
                f"/{V1}.DRAPlugin/NodePrepareResources",
                response_deserializer=protocol.message(V1, "NodePrepareResourcesResponse").FromString,
            )
            answer = call(asked.SerializeToString(), timeout=30).claims[f"u{number}"]
        refused += bool(answer.error)
        assert bool(answer.error) != bool(answer.devices) and "\n" not in answer.error, (at, answer)
        assert bool(answer.devices) == bool(served.files())
        served.kubelet.unprepare(claim)
    assert 40 < refused < 80


def test_name_of_the_slice_is_never_too_long() -> None:
    assert slices.slice_name("n") == "n-gpushare.io"
    long = [slices.slice_name("a" * 240 + "." + tail * 9) for tail in "bc"]
    assert len(set(long)) == 2 and all(len(name) <= 253 and name.endswith("-gpushare.io") for name in long)
    assert os.path.basename(long[0]) == long[0] and ".-" not in long[0] and json.dumps(long[0]).isascii()
