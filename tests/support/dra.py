"""Stand-ins for a cluster with dynamic resource allocation: API server, scheduler and kubelet's plugin manager.

    with ApiServer(folder) as api:             https with a token; refuses what the real one refuses
        api.allocate("claim", {...})           like the scheduler, from the published slices
    with Kubelet(folder) as kubelet:
        kubelet.register()                     calls the registration socket
        kubelet.prepare(claim)                 -> CDI device ids; raises Refused

The rules are those of Kubernetes' pkg/apis/resource/validation and dynamic-resource-allocation/structured.
"""

from __future__ import annotations

import json
import re
import uuid
from pathlib import Path
from typing import Any, Optional

import grpc
from gpushare.integrations.dra import protocol
from gpushare.integrations.dra.slices import quantity

from tests.support import apiserver
from tests.support.apiserver import NODE, failed

GROUP = "/apis/resource.k8s.io"
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
_QUALIFIED = re.compile(rf"([a-z0-9.-]{{1,63}}/)?{_IDENTIFIER.pattern}")
_SEMVER = re.compile(r"(0|[1-9][0-9]*)(\.(0|[1-9][0-9]*)){2}")
_FIELDS = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "metadata": {"name", "ownerReferences", "resourceVersion"},
    "spec": {"driver", "nodeName", "pool", "devices"},
    "pool": {"name", "generation", "resourceSliceCount"},
    "device": {"name", "attributes", "capacity", "allowMultipleAllocations", "taints"},
    "taint": {"key", "value", "effect", "timeAdded"},
    "policy": {"default", "validRange", "validValues"},
    "range": {"min", "max", "step"},
}


class Refused(Exception):
    """The message of the other side."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise Refused(message)


def _known(kind: str, value: dict[str, Any]) -> None:
    unknown = value.keys() - _FIELDS[kind]
    _require(not unknown, f"strict decoding error: unknown field {sorted(unknown)}")


def _check_policy(value: int, policy: dict[str, Any]) -> None:
    _known("policy", policy)
    default = quantity(policy["default"])
    if "validValues" in policy:
        _require("validRange" not in policy, "exactly one policy can be specified")
        values = [quantity(one) for one in policy["validValues"]]
        _require(values == sorted(set(values)) and default in values, "validValues: not sorted, or without the default")
        _require(len(values) <= 10 and values[-1] <= value, "validValues: too many, or larger than the capacity")
    if "validRange" in policy:
        _known("range", policy["validRange"])
        least, most, step = (quantity(policy["validRange"][key]) for key in ("min", "max", "step"))
        _require(least <= default <= most <= value, "validRange: not min <= default <= max <= value")
        _require(step > 0 and least + step <= value, "validRange: step must be above zero and fit")
        _require((default - least) % step == 0 and (most - least) % step == 0, "validRange: not a multiple of the step")


def check_slice(value: dict[str, Any], version: str) -> None:
    """Raise Refused for a slice that the API server would refuse."""
    _known("", value)
    _known("metadata", value["metadata"])
    spec = value["spec"]
    _known("spec", spec)
    _known("pool", spec["pool"])
    _require(value["apiVersion"] == f"resource.k8s.io/{version}", "apiVersion does not match the path")
    _require(spec["pool"]["resourceSliceCount"] > 0 and spec["pool"]["generation"] >= 0, "pool: out of range")
    _require(len(spec["devices"]) <= 128, "devices: more than 128")
    _require(len({one["name"] for one in spec["devices"]}) == len(spec["devices"]), "devices: duplicate name")
    for one in spec["devices"]:
        _require(_LABEL.fullmatch(one["name"]) is not None, f"name {one['name']!r} is no DNS label")
        _require(("basic" in one) == (version == "v1beta1"), "basic is of v1beta1 only")
        fields = one.get("basic") or {key: item for key, item in one.items() if key != "name"}
        _known("device", fields)
        _require(len(fields["attributes"]) + len(fields["capacity"]) <= 32, "too many attributes and capacities")
        for name, attribute in fields["attributes"].items():
            _require(_QUALIFIED.fullmatch(name) is not None and len(attribute) == 1, f"attribute {name}")
            _require(_SEMVER.fullmatch(attribute.get("version", "1.2.3")) is not None, f"attribute {name}: no semver")
            _require(len(str(attribute.get("string", ""))) <= 64, f"attribute {name}: longer than 64")
        for taint in fields.get("taints", []):
            _known("taint", taint)
            _require(taint["effect"] in ("NoSchedule", "NoExecute"), f"taint {taint['key']}: effect")
            _require(len(spec["devices"]) <= 64, "devices: more than 64 with taints")
        for name, capacity in fields["capacity"].items():
            _require(_IDENTIFIER.fullmatch(name) is not None and "value" in capacity, f"capacity {name}")
            if "requestPolicy" in capacity:
                _require(bool(fields.get("allowMultipleAllocations")), "allowMultipleAllocations must be true")
                _check_policy(quantity(capacity["value"]), capacity["requestPolicy"])


class ApiServer(apiserver.ApiServer):
    """Claims and slices of `versions` of resource.k8s.io."""

    def __init__(
        self, folder: Path, versions: tuple[str, ...] = ("v1",), consumable: bool = True, taints: bool = True
    ) -> None:
        super().__init__(folder)
        self.versions, self.consumable, self.taints = versions, consumable, taints
        self.fails: Optional[tuple[int, str]] = None  # the status and text of every answer
        self.slices: dict[str, dict[str, Any]] = {}
        self.claims: dict[str, dict[str, Any]] = {}

    def handle(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if self.fails:
            return self.fails
        if path == GROUP and not self.versions:
            return 404, "404 page not found\n"
        if path == GROUP:
            return 200, {"versions": [{"version": one} for one in self.versions]}
        version, *words = path[len(GROUP) + 1 :].split("/")
        if version not in self.versions:
            return 404, "404 page not found\n"  # plain text, as many versions answer
        if words[0] == "namespaces":
            return (200, self.claims[words[3]]) if words[3] in self.claims else failed(404, f"{words[3]} not found")
        if method == "GET":
            return (200, self.slices[words[1]]) if words[1] in self.slices else failed(404, f"{words[1]} not found")
        return self._write(method, version, body)

    def _write(self, method: str, version: str, body: Any) -> tuple[int, Any]:
        try:
            check_slice(body, version)
        except (Refused, KeyError) as error:
            return failed(422, str(error))
        name, old = body["metadata"]["name"], self.slices.get(body["metadata"]["name"])
        if (method == "POST") == (old is not None):
            return failed(409 if old else 404, f"{name}: exists, or does not")
        if old is not None:
            if body["metadata"].get("resourceVersion") != old["metadata"]["resourceVersion"]:
                return failed(409, "the object has been modified")
            for key in ("driver", "nodeName"):
                if body["spec"][key] != old["spec"][key]:
                    return failed(422, f"{key} is immutable")
            if body["spec"] != old["spec"] and body["spec"]["pool"]["generation"] <= old["spec"]["pool"]["generation"]:
                return failed(422, "a changed pool needs a higher generation")  # the contract of drivers
        stored = json.loads(json.dumps(body))
        stored["metadata"]["resourceVersion"] = str(len(self.calls))
        if not self.consumable:  # the feature gate is off
            for one in stored["spec"]["devices"]:
                one.pop("allowMultipleAllocations", None)
                for capacity in one["capacity"].values():
                    capacity.pop("requestPolicy", None)
        for one in (device.get("basic", device) for device in stored["spec"]["devices"]):
            if not self.taints:  # the feature gate is off
                one.pop("taints", None)
            for taint in one.get("taints", []):
                taint.setdefault("timeAdded", f"{len(self.calls)}")
        self.slices[name] = stored
        return 201 if old is None else 200, stored

    # Like the scheduler

    def allocate(self, name: str, requests: dict[str, dict[str, str]], config: Any = (), **more: Any) -> dict[str, Any]:
        """Allocate a claim: request -> capacity. Raises Refused if no device has room."""
        results: list[dict[str, Any]] = []
        with self.changed:
            for request, wanted in requests.items():
                results.append(self._result(request, wanted, results))
            self.claims[name] = {
                "metadata": {"name": name, "namespace": "ml", "uid": str(uuid.uuid4())},
                "status": {"allocation": {"devices": {"results": results, "config": list(config)}}},
                **more,
            }
            return self.claims[name]

    def release(self, name: str) -> None:
        with self.changed:
            del self.claims[name]

    def _result(self, request: str, wanted: dict[str, str], mine: list[dict[str, Any]]) -> dict[str, Any]:
        (found,) = self.slices.values()
        for device in found["spec"]["devices"]:
            fields = device.get("basic", device)
            consumed = {name: _consumed(one, wanted.get(name)) for name, one in fields["capacity"].items()}
            taken = [one for one in (*self._results(), *mine) if one["device"] == device["name"]]
            if not fields.get("allowMultipleAllocations"):
                if taken:
                    continue
                return {"request": request, "driver": "gpushare.io", "pool": NODE, "device": device["name"]}
            total = {name: sum(quantity(one["consumedCapacity"][name]) for one in taken) for name in consumed}
            if all(
                consumed[name] is not None and total[name] + consumed[name] <= quantity(one["value"])
                for name, one in fields["capacity"].items()
            ):
                return {
                    "request": request,
                    "driver": "gpushare.io",
                    "pool": found["spec"]["pool"]["name"],
                    "device": device["name"],
                    "shareID": str(uuid.uuid4()),
                    "consumedCapacity": {name: str(size) for name, size in consumed.items()},
                }
        raise Refused("no device has room")

    def _results(self) -> list[dict[str, Any]]:
        return [one for claim in self.claims.values() for one in claim["status"]["allocation"]["devices"]["results"]]


def _consumed(capacity: dict[str, Any], wanted: str | None) -> Any:
    """The amount that an allocation consumes; None if the policy does not allow it."""
    policy = capacity.get("requestPolicy", {})
    if wanted is None:
        return quantity(policy.get("default", capacity["value"]))
    size, within = quantity(wanted), policy.get("validRange")
    if within:
        least, most, step = (quantity(within[key]) for key in ("min", "max", "step"))
        size = max(size, least)
        size += (least - size) % step
        return size if size <= most else None
    return next((one for one in map(quantity, policy.get("validValues", [wanted])) if one >= size), None)


class Kubelet:
    """`folder`: its directory, with plugins and plugins_registry."""

    def __init__(self, folder: Path, version: str = "v1") -> None:
        self.folder, self.version = folder, version
        for name in ("plugins", "plugins_registry"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self._channels: list[Any] = []

    def __enter__(self) -> Kubelet:
        return self

    def __exit__(self, *error: object) -> None:
        for one in self._channels:
            one.close()

    def _call(
        self, channel: Any, package: str, service: str, method: str, request: str, answer: str, **fields: Any
    ) -> Any:
        asked, response = protocol.message(package, request), protocol.message(package, answer)
        function = channel.unary_unary(f"/{service}/{method}", asked.SerializeToString, response.FromString)
        return function(asked(**fields), timeout=30)

    def register(self) -> Any:
        """Find the registration socket, check what the plugin says of itself, and tell it the result."""
        (path,) = (self.folder / "plugins_registry").iterdir()
        channel = grpc.insecure_channel(f"unix:{path}")
        self._channels.append(channel)
        names = ("pluginregistration", "pluginregistration.Registration")
        info = self._call(channel, *names, "GetInfo", "InfoRequest", "PluginInfo")
        _require(info.type == "DRAPlugin" and f"{self.version}.DRAPlugin" in info.supported_versions, "wrong plugin")
        _require(_LABEL.fullmatch(info.name.split(".")[0]) is not None and len(info.name) <= 63, "bad name")
        status = "NotifyRegistrationStatus", "RegistrationStatus", "RegistrationStatusResponse"
        self._call(channel, *names, *status, plugin_registered=True)
        self._dra = grpc.insecure_channel(f"unix:{info.endpoint}")
        self._channels.append(self._dra)
        return info

    def _claims(self, name: str, claim: dict[str, Any]) -> Any:
        package = f"k8s.io.kubelet.pkg.apis.dra.{self.version}"
        meta = {key: claim["metadata"][key] for key in ("namespace", "uid", "name")}
        words = (f"{package}.DRAPlugin", name, f"{name}Request", f"{name}Response")
        answer = self._call(self._dra, package, *words, claims=[meta])
        _require(list(answer.claims) == [meta["uid"]], "the response has other claims")
        found = answer.claims[meta["uid"]]
        _require(not found.error, found.error)
        return found

    def prepare(self, claim: dict[str, Any], request: str = "") -> list[str]:
        """The CDI devices for a container that names the claim, or one request of it."""
        found = self._claims("NodePrepareResources", claim)
        results = claim["status"]["allocation"]["devices"]["results"]
        _require(len(found.devices) == len(results), "not every result has a device")
        for one, result in zip(found.devices, results):
            _require((one.pool_name, one.device_name) == (result["pool"], result["device"]), "another device")
            if self.version == "v1":
                _require(one.share_id == result.get("shareID", ""), "another share")
        chosen = [one for one in found.devices if not request or request in one.request_names]
        return [name for one in chosen for name in one.cdi_device_ids]

    def unprepare(self, claim: dict[str, Any]) -> None:
        self._claims("NodeUnprepareResources", claim)


def edits(folder: Path, names: list[str]) -> list[dict[str, Any]]:
    """The edits that an engine makes for these CDI devices: those of each specification once, then of each device."""
    described = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    found: list[dict[str, Any]] = []
    for one in described:
        devices = {f"{one['kind']}={item['name']}": item["containerEdits"] for item in one["devices"]}
        chosen = [devices[name] for name in names if name in devices]
        found += [one["containerEdits"], *chosen] if chosen else []
    return found


def inject(spec: dict[str, Any], folder: Path, names: list[str]) -> None:
    """Edit a config.json like an engine."""
    for edit in edits(folder, names):
        for line in edit.get("env", []):
            env = [one for one in spec["process"]["env"] if not one.startswith(line.partition("=")[0] + "=")]
            spec["process"]["env"] = [*env, line]
        for hook in edit.get("hooks", []):
            entry = {key: value for key, value in hook.items() if key != "hookName"}
            spec.setdefault("hooks", {}).setdefault(hook["hookName"], []).append(entry)
