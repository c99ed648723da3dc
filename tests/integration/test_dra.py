"""`gpushare dra` from ResourceSlice to refused allocation: stand-ins for the cluster, real runc."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gpushare.state.storage import read_limits

from tests.integration.test_k8s_plugin import DEADLINE_S, program
from tests.support import host
from tests.support.apiserver import NODE, compared
from tests.support.dra import ApiServer, Kubelet, Refused, inject
from tests.support.host import Node
from tests.support.rbac import access, built
from tests.support.runc import Container, RuntimeFailed
from tests.support.tenant import Tenant

GIB = 1 << 30


class Driver:
    """The running program; `lines` are its output so far."""

    def __init__(self, node: Node, folder: Path, api: ApiServer) -> None:
        (folder / "cdi").mkdir(exist_ok=True)
        words = ["--kubelet", folder, "--cdi", folder / "cdi", "--server", api.url, "--account", api.account]
        words += ["--program", host.BIN / "gpushare-hook", "--interval", "0.1"]
        command = [program(), "--config", node.config, "--state", node.state, "dra", *words]
        self.process = subprocess.Popen(
            [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def expect(self, pattern: str) -> None:
        with self._changed:
            found = self._changed.wait_for(lambda: any(re.search(pattern, one) for one in self.lines), DEADLINE_S)
            assert found, self.lines

    def end(self, number: int = signal.SIGTERM) -> int:
        if self.process.returncode is None:
            self.process.send_signal(number)
        code = self.process.wait(DEADLINE_S)
        self._thread.join(DEADLINE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@pytest.fixture
def folder() -> Iterator[Path]:
    """kubelet's directory; the path of a socket must be short."""
    with tempfile.TemporaryDirectory(prefix="gpushare-", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def two(make_host: Callable[..., Path], make_node: Callable[..., Node], folder: Path) -> Node:
    node = make_node(make_host(gpus=2, memory_bytes=16 * GIB), kubernetes={"claims_dir": str(folder / "cdi")})
    assert node.cli("refresh").returncode == 0
    return node


@pytest.fixture
def drive(two: Node, folder: Path) -> Iterator[Callable[[ApiServer], Driver]]:
    made: list[Driver] = []

    def start(api: ApiServer) -> Driver:
        made.append(Driver(two, folder, api))
        made[-1].expect("serving 2 devices")
        return made[-1]

    yield start
    for one in made:
        if one.process.returncode is None:
            one.end(signal.SIGKILL)


def share(node: Node, one: Container) -> tuple[int, Any]:
    """(bytes, percent) that the hook granted."""
    lease = json.loads((node.state / "containers" / one.id / "lease.json").read_text())
    return sum(item["memory_limit_bytes"] for item in lease["shares"]), [
        item["compute_percent"] for item in lease["shares"]
    ]


def test_claim_from_slice_to_refused_allocation(
    two: Node, folder: Path, drive: Callable[[ApiServer], Driver], container: Callable[..., Container], tmp_path: Path
) -> None:
    """A claim of 4 GiB and 30 %: published, allocated, prepared, granted; more than that is refused everywhere."""

    def start(names: list[str], **env: str) -> Container:
        one = container(["sleep", "600"], env=env, edit=lambda spec: inject(spec, folder / "cdi", names))
        return one.start()

    with ApiServer(tmp_path / "account") as api, Kubelet(folder) as kubelet:
        driver = drive(api)
        kubelet.register()
        driver.expect("registered with kubelet")
        next((folder / "plugins_registry").iterdir()).unlink()  # kubelet's directory was emptied
        driver.expect("serving on new ones")
        kubelet.register()
        wanted = {"gpu": {"memory": "4Gi", "compute": "30"}}
        claim = api.allocate("a", wanted)
        names = kubelet.prepare(claim)
        assert kubelet.prepare(claim) == names  # kubelet has restarted
        one = start(names)
        assert share(two, one) == (4 * GIB, [30])
        with pytest.raises(RuntimeFailed, match="already has the share of this claim"):
            start(names)
        for variable, value in (("GPUSHARE_MEMORY", "16Gi"), ("GPUSHARE_COMPUTE", "50")):
            other = kubelet.prepare(api.allocate("b", wanted))
            with pytest.raises(RuntimeFailed, match=f"{variable}=.*{value}.*, and the claim has .*: they contradict"):
                start(other, **{variable: value})
            kubelet.unprepare(api.claims["b"])
            api.release("b")

        # the first device has 12 GiB and 70 % left
        assert api.allocate("b", {"gpu": {"memory": "12Gi", "compute": "70"}}) is not None
        first, second = ({one["device"] for one in api._results()}, api.slices)
        assert len(first) == 1 and len(second) == 1
        with pytest.raises(Refused, match="no device has room"):
            api.allocate("c", {"gpu": {"memory": "17Gi"}})
        # a driver is the last that notices two claims for the same memory
        forged = json.loads(json.dumps(api.claims["b"]))
        forged["metadata"].update(name="d", uid="99999999-0000-0000-0000-000000000000")
        api.claims["d"] = forged
        kubelet.prepare(api.claims["b"])
        with pytest.raises(Refused, match="the claims of GPU-.* add up to 28 GiB and 170 %"):
            kubelet.prepare(forged)

        # a restart keeps claims, and changes no slice
        before = json.dumps(api.slices)
        assert driver.end() == 0
        driver = drive(api)
        kubelet.register()
        assert json.dumps(api.slices) == before
        assert kubelet.prepare(claim) == names
        with pytest.raises(Refused, match="add up to"):
            kubelet.prepare(forged)
        one.close()
        kubelet.unprepare(claim)
        kubelet.unprepare(claim)
        assert len(list((folder / "cdi").iterdir())) == 1
        # another configuration changes the slice
        config = json.loads(two.config.read_text())
        two.config.write_text(json.dumps({**config, "compute_overcommit": 2.0}))
        assert two.cli("refresh").returncode == 0
        driver.expect("published 2 devices")
        assert json.dumps(api.slices) != before
        assert driver.end() == 0
    rights = access(built(host.TREE / "packaging/kubernetes/dra"))["gpushare-dra"].rights
    assert compared(api.calls, rights) == (set(), set())


def test_claim_with_memory_limit_borrows_above_its_memory(
    make_host: Callable[..., Path], make_node: Callable[..., Node], folder: Path, tmp_path: Path
) -> None:
    """Two claims of 4 GiB with a limit of 12 GiB on a device of 12 GiB. The scheduler, the driver and the ledger count
    the requests, NVML and the limits file show the limit, and each program allocates 12 GiB."""
    request, limit = 4 * GIB, 12 * GIB
    node = make_node(
        make_host(memory_bytes=limit),
        policy={"lending": "movable"},
        oversubscription={"host_memory": "24Gi"},
        kubernetes={"claims_dir": str(folder / "cdi")},
    )
    assert node.cli("refresh").returncode == 0
    tenants: list[Tenant] = []
    with ApiServer(tmp_path / "account") as api, Kubelet(folder) as kubelet:
        driver = Driver(node, folder, api)
        try:
            driver.expect("serving 1 devices")
            kubelet.register()
            for name, text in (("a", "12Gi"), ("b", "13Gi")):  # the device has 12
                config = [parameters(memoryLimit=text)]
                devices = kubelet.prepare(api.allocate(name, {"gpu": {"memory": "4Gi", "compute": "30"}}, config))
                edit = partial(inject, folder=folder / "cdi", names=devices)
                tenants.append(Tenant(tmp_path / "tenants", name, {}, None, edit=edit))
                tenants[-1].container.start()
            rows = {row["id"]: row["shares"][0] for row in json.loads(node.cli("list", "--format", "json").stdout)}
            for one in tenants:
                share = rows[one.container.id]
                assert (share["memory_request_bytes"], share["memory_limit_bytes"]) == (request, limit)
                (found,) = read_limits(str(node.state / "containers" / one.container.id / "share/limits")).devices
                assert (found.memory_limit_bytes, found.virtual_bytes, found.lending) == (request, limit, "movable")
                seen = one.expect("seen")
                assert (seen["nvml_total_bytes"], seen["cuda_total_bytes"]) == (limit, limit)
                one.go()
                assert one.expect("full")["got_bytes"] > limit - GIB
            # 4 GiB are left for other requests, although both programs hold 12 GiB
            (device,) = json.loads(node.cli("devices", "--format", "json").stdout)
            assert (device["granted_bytes"], device["free_bytes"]) == (2 * request, limit - 2 * request)
            with pytest.raises(Refused, match="no device has room"):
                api.allocate("c", {"gpu": {"memory": "5Gi"}})
            assert kubelet.prepare(api.allocate("c", {"gpu": {"memory": "4Gi"}}))
            api.release("c")
        finally:
            for one in tenants:
                one.close()
            driver.end()


def parameters(**values: str) -> dict[str, Any]:
    """An entry of the claim's configuration, for all requests."""
    value = {"apiVersion": "gpushare.io/v1", "kind": "ShareParameters", **values}
    return {"source": "FromClaim", "requests": [], "opaque": {"driver": "gpushare.io", "parameters": value}}


def test_several_devices_and_parameters(
    two: Node, folder: Path, drive: Callable[[ApiServer], Driver], container: Callable[..., Container], tmp_path: Path
) -> None:
    with ApiServer(tmp_path / "account") as api, Kubelet(folder) as kubelet:
        drive(api)
        kubelet.register()
        claim = api.allocate(
            "a",
            {"one": {"memory": "12Gi", "compute": "30"}, "two": {"memory": "8Gi", "compute": "20"}},
            [parameters(priority="high")],
        )
        names = kubelet.prepare(claim)
        assert len(names) == 2 and kubelet.prepare(claim, "two") == names[1:]
        one = container(["sleep", "600"], edit=lambda spec: inject(spec, folder / "cdi", names)).start()
        assert share(two, one) == (20 * GIB, [30, 20])
        wrong = api.allocate("b", {"one": {"memory": "1Gi"}}, [parameters(prio="high")])
        with pytest.raises(Refused, match='claim ml/b: unknown key "prio" in the parameters; use .*priority'):
            kubelet.prepare(wrong)


@pytest.mark.parametrize(
    ("versions", "kubelets", "consumable"),
    [(("v1beta2", "v1beta1"), "v1", True), (("v1beta1",), "v1beta1", True), (("v1",), "v1", False)],
)
def test_older_servers(
    two: Node,
    folder: Path,
    drive: Callable[[ApiServer], Driver],
    tmp_path: Path,
    versions: tuple[str, ...],
    kubelets: str,
    consumable: bool,
) -> None:
    """The newest offered version is used; without consumable capacity a claim gets a whole device."""
    with ApiServer(tmp_path / "account", versions, consumable) as api, Kubelet(folder, kubelets) as kubelet:
        driver = drive(api)
        kubelet.register()
        driver.expect(f"published 2 devices .resource.k8s.io/{versions[0]}")
        kubelet.prepare(api.allocate("a", {"gpu": {"memory": "4Gi"}}))
        (path,) = (folder / "cdi").iterdir()
        size = 4 * GIB if consumable else 16 * GIB
        assert f";memory={size}" in path.read_text()
        if not consumable:
            driver.expect("dropped allowMultipleAllocations")
        api.token = "other"
        with pytest.raises(Refused, match="401"):
            kubelet.prepare(api.claims["a"])
    assert NODE in json.dumps(api.slices)
