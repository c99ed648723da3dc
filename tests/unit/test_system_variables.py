"""Variables that only the system may write: all are classified, and count only with the record of their writer."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
from gpushare.core import constants
from gpushare.core.errors import GpushareError, RequestError
from gpushare.core.model import Bundle, Request
from gpushare.integrations.dra import claims
from gpushare.integrations.kubelet import protocol
from gpushare.programs import session
from gpushare.request import request

from tests.unit import pure
from tests.unit.test_dra import SETTINGS, claim, consumed
from tests.unit.test_dra import slices as offers

UID = "1b7c1f0e-8f6d-4c53-9d3a-0a4b5c6d7e8f"
SECRET = "0123456789abcdef0123456789abcdef"
SYSTEMD = f"kubepods-burstable-pod{UID.replace('-', '_')}.slice:cri-containerd:c1"
CGROUPFS = f"/kubepods/burstable/pod{UID}/c1"
MEMORY = (constants.ENV_ALLOCATED_MEMORY, f"{pure.UUIDS[0]}=4096Mi")
CRI = {"io.kubernetes.cri.container-name": "app"}


def resolved(
    folder: Path, *env: str, cgroups_path: str = SYSTEMD, annotations: Any = None, **policy: Any
) -> Request | None:
    node = pure.node(**policy)
    node = node._replace(config=node.config._replace(kubelet_dir=str(folder), claims_dir=str(folder)))
    annotations = CRI if annotations is None else annotations
    bundle = pure.bundle(*env, annotations=annotations, linux={"cgroupsPath": cgroups_path})
    start = session.resolve(bundle, lambda: node)
    return start and start.request


# The table


def test_every_variable_is_classified() -> None:
    names = {value for name, value in vars(constants).items() if name.startswith("ENV_")}
    assert names == constants.WRITERS.keys()
    assert set(constants.ALLOCATED) <= set(constants.OF_PLUGINS)
    assert set(constants.WRITERS.values()) == {constants.POD, constants.ENGINE, constants.PLUGIN}


@pytest.mark.parametrize("name", constants.OF_PLUGINS)
def test_variable_alone_is_refused(name: str, tmp_path: Path) -> None:
    """In any container: of a pod, an image or a debugger."""
    for noted in (CRI, {}):
        with pytest.raises(RequestError, match=rf"^{name}.*; leave it out"):
            resolved(tmp_path, f"{name}={MEMORY[1]}", annotations=noted)


def test_sandbox_with_such_a_variable_starts(tmp_path: Path) -> None:
    """It gets nothing, and the image of a pause container may be any."""
    kind = {"io.kubernetes.cri.container-type": "sandbox"}
    assert resolved(tmp_path, "=".join(MEMORY), annotations=kind) is None


# Claims


def prepare(folder: Path, secret: str = SECRET) -> str:
    """Prepare a claim of 4 GiB like the driver; return its variable."""
    node = pure.node()
    shares = claims.shares_of(claim(consumed()), "n", offers.devices(node))
    value = claims.document(UID, shares, node, SETTINGS, secret)
    (folder / (constants.CLAIM_FILE % UID)).write_text(json.dumps(value))
    return str(value["devices"][0]["containerEdits"]["env"][0])


def test_prepared_claim_is_believed(tmp_path: Path) -> None:
    found = resolved(tmp_path, prepare(tmp_path))
    assert found is not None and found.selection.names == (pure.UUIDS[0],)


@pytest.mark.parametrize(
    "change",
    [
        ("4294967296", "8589934592"),  # more than the claim has
        (pure.UUIDS[0], pure.UUIDS[1]),
        (SECRET, SECRET[::-1]),  # another pod, which knows the uid and the value
        (f"_{SECRET}", ""),
        (f"_0_{SECRET}", ""),
        ("GPUSHARE_CLAIM_1b7c1f0e", "GPUSHARE_CLAIM_../1b7c1f0e"),
        ("GPUSHARE_CLAIM_1b7c1f0e", "GPUSHARE_CLAIM_"),
    ],
    ids=str,
)
def test_other_variable_than_the_prepared_one_is_refused(tmp_path: Path, change: tuple[str, str]) -> None:
    text = prepare(tmp_path)
    assert change[0] in text
    with pytest.raises(RequestError, match="no claim that is prepared"):
        resolved(tmp_path, text.replace(*change))


def test_two_invented_claims_do_not_multiply_an_amount(tmp_path: Path) -> None:
    """The pod's limit gpushare.io/memory-mib counts 4 GiB once."""
    env = [f"GPUSHARE_CLAIM_{slot}={uuid};memory=4Gi" for slot, uuid in enumerate(pure.UUIDS)]
    with pytest.raises(RequestError, match="no claim that is prepared"):
        resolved(tmp_path, "GPUSHARE_MEMORY=4Gi", *env)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"devices": [{"containerEdits": {}}]}', "[" * 100_000])
def test_damaged_file_of_a_claim_proves_nothing(tmp_path: Path, text: str) -> None:
    variable = prepare(tmp_path)
    (tmp_path / (constants.CLAIM_FILE % UID)).write_text(text)
    with pytest.raises(RequestError, match="no claim that is prepared"):
        resolved(tmp_path, variable)


@pytest.mark.parametrize("name", [constants.CLAIM_FILE % UID, "device-plugins/kubelet_internal_checkpoint"])
def test_fifo_in_place_of_a_record_does_not_delay_the_start(tmp_path: Path, name: str) -> None:
    variables = [prepare(tmp_path), "=".join(MEMORY)]
    checkpoint(tmp_path, {"envs": dict([MEMORY])})
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(RequestError):
        resolved(tmp_path, *variables)


# kubelet


def checkpoint(folder: Path, *entries: dict[str, Any], space: str = "") -> None:
    """Write the checkpoint like kubelet: Go's encoding/json of devicemanager/checkpoint.Data."""
    defaults = {"PodUID": UID, "ContainerName": "app", "ResourceName": "gpushare.io/memory-mib"}
    rows = []
    for entry in entries:
        row = {**defaults, "DeviceIDs": {"-1": ["aaaaaaaa-1", "aaaaaaaa-2"]}, **entry}
        answer = protocol.message("ContainerAllocateResponse")(envs=row.pop("envs"))
        rows.append({**row, "AllocResp": base64.b64encode(answer.SerializeToString()).decode()})
    value = {"Data": {"PodDeviceEntries": rows, "RegisteredDevices": {}}, "Checksum": 1}
    (folder / "device-plugins").mkdir(exist_ok=True)
    text = json.dumps(value, separators=("," + space, ":" + space))
    (folder / "device-plugins/kubelet_internal_checkpoint").write_text(text)


OTHER = {"ResourceName": "nvidia.com/nic", "envs": {"X": "1"}}
COMPUTE = {"ResourceName": "gpushare.io/compute", "envs": {constants.ENV_ALLOCATED_COMPUTE: "30"}}


@pytest.mark.parametrize("path", [SYSTEMD, CGROUPFS, f"/pod-things/kubepods/pod{UID}/c1"])
def test_variable_of_kubelet_is_believed(tmp_path: Path, path: str) -> None:
    checkpoint(tmp_path, {**OTHER, "DeviceIDs": None}, COMPUTE, {"envs": dict((MEMORY, ("A" * 200, "b" * 20_000)))})
    found = resolved(tmp_path, "=".join(MEMORY), f"{constants.ENV_ALLOCATED_COMPUTE}=30", cgroups_path=path)
    assert found is not None and dict(found.compute) == {None: 30}


@pytest.mark.parametrize(
    "entry",
    [
        {"PodUID": UID[::-1]},
        {"ContainerName": "sidecar"},
        {"ContainerName": "app2"},
        {"envs": {MEMORY[0]: MEMORY[1].replace("4096", "1024")}},
        {"envs": {constants.ENV_ALLOCATED_GPU: MEMORY[1]}},
        {"envs": {"X": f"{MEMORY[0]}={MEMORY[1]}"}},
    ],
    ids=str,
)
def test_variable_that_kubelet_gave_another_container_is_refused(tmp_path: Path, entry: dict[str, Any]) -> None:
    checkpoint(tmp_path, {"envs": dict([MEMORY]), **entry})
    with pytest.raises(RequestError, match="kubelet did not give this container that"):
        resolved(tmp_path, "=".join(MEMORY))


@pytest.mark.parametrize("value", ["", "\ud800", "\n", "x" * 100_000])
def test_any_text_is_refused_in_one_line(tmp_path: Path, value: str) -> None:
    checkpoint(tmp_path, {"envs": dict([MEMORY])})
    prepare(tmp_path)
    for name in (MEMORY[0], f"GPUSHARE_CLAIM_{UID.replace('-', '_')}_0_{SECRET}", "GPUSHARE_CLAIM_" + value):
        with pytest.raises(RequestError) as refused:
            resolved(tmp_path, f"{name}={value}")
        str(refused.value).encode()
        assert "\n" not in str(refused.value)


def test_variable_beside_kubelet_s_is_refused(tmp_path: Path) -> None:
    """From a ConfigMap, which no admission policy sees."""
    checkpoint(tmp_path, {"envs": dict([MEMORY])})
    with pytest.raises(RequestError, match=constants.ENV_ALLOCATED_COMPUTE):
        resolved(tmp_path, "=".join(MEMORY), f"{constants.ENV_ALLOCATED_COMPUTE}=100")


@pytest.mark.parametrize("path", ["", "/kubepods/burstable", "/docker/c1", f"/x/pod{UID}"])
def test_container_outside_of_a_pod_s_cgroup_is_refused(tmp_path: Path, path: str) -> None:
    checkpoint(tmp_path, {"envs": dict([MEMORY])})
    with pytest.raises(RequestError, match="kubelet did not give"):
        resolved(tmp_path, "=".join(MEMORY), cgroups_path=path)


# One amount, several devices


def granted(*env: str, annotations: Any = None, **policy: Any) -> Request | None:
    annotations = {**CRI, **(annotations or {})}
    bundle: Bundle = pure.bundle(*env, annotations=annotations)
    return request.resolve(bundle, pure.node(**policy))


@pytest.mark.parametrize("devices", ["0,1", "all", "any:2"])
@pytest.mark.parametrize(
    ("env", "annotations"),
    [
        (("GPUSHARE_MEMORY=4Gi",), {}),
        ((), {"app.gpushare.io/memory": "4Gi"}),
        ((), {"app.gpushare.io/memory-request": "4Gi"}),
    ],
)
def test_one_amount_for_several_devices_is_refused(env: tuple[str, ...], annotations: Any, devices: str) -> None:
    with pytest.raises(RequestError, match=r"is one amount, .* 2 devices are requested; set GPUSHARE_DEVICES=any"):
        granted(*env, f"GPUSHARE_DEVICES={devices}", annotations=annotations, amounts="container")
    assert granted(*env, f"GPUSHARE_DEVICES={devices}", annotations=annotations) is not None  # the default


def test_image_that_names_all_devices_gets_one() -> None:
    env = ("GPUSHARE_MEMORY=4Gi", "NVIDIA_VISIBLE_DEVICES=all")
    found = granted(*env, amounts="container")
    assert found is not None and (found.selection.kind, found.selection.count) == ("any", 1)
    assert any("NVIDIA_VISIBLE_DEVICES: policy.amounts is container" in line for line in found.ignored)
    every = granted(*env)
    assert every is not None and every.selection.kind == "all"


@pytest.mark.parametrize("policy", [{"allowed_devices": ("1",)}, {}], ids=str)
def test_all_of_one_device_is_one(policy: dict[str, Any]) -> None:
    bundle = pure.bundle("GPUSHARE_MEMORY=4Gi", "GPUSHARE_DEVICES=all", annotations=CRI)
    node = pure.node(devices=2 if policy else 1, amounts="container", **policy)
    found = request.resolve(bundle, node)
    assert found is not None and found.selection.kind == "all"


@pytest.mark.parametrize("text", ["GPUSHARE_MEMORY=4Gi", "GPUSHARE_COMPUTE=30"])
def test_one_amount_beside_a_claim_of_two_devices_is_refused(text: str) -> None:
    env = [f"GPUSHARE_CLAIM_u_{slot}={uuid};memory=4Gi;compute=30" for slot, uuid in enumerate(pure.UUIDS)]
    with pytest.raises(GpushareError, match="is one amount, and the claim has 2 devices; leave out"):
        granted(text, *env)
    assert granted(*env, amounts="container") is not None
