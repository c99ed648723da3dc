"""The kernel's dmem controller on a tree of plain files: limits found, written, changed and removed."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import pytest
from gpushare.allocation import backends, lending, placement
from gpushare.allocation.backends.dmem import regions as dmem
from gpushare.core import constants, model, quantity
from gpushare.core.errors import CapacityError, DeviceError, GpushareError, KernelError, RequestError
from gpushare.core.ops import KernelLimit, Plan
from gpushare.gpu import nvmllimits
from gpushare.inject import plan, specedit
from gpushare.inject.spectree import SpecTree
from gpushare.request import oci
from gpushare.state import agentlock, shm_abi
from gpushare.system import syscalls

from tests.unit.pure import bundle, device, files, image, lease

GIB = 1 << 30
GPU = device(0)
REGION = f"nvidia/{GPU.bus_id}/vidmem"
CAPACITY = f"drm/{GPU.bus_id}/vram0 17179869184\nnvidia/0000:0a:00.0/vidmem 1\n{REGION} 17179869184\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A simulated driver root; the cgroup of this process can limit devices."""
    root = tmp_path / "sys/fs/cgroup"
    own = next(line[3:].strip() for line in Path("/proc/self/cgroup").read_text().splitlines() if line[:3] == "0::")
    leaf = root / own.strip("/")
    leaf.mkdir(parents=True)
    (root / "dmem.capacity").write_text(CAPACITY)
    for name in ("dmem.max", "dmem.min"):
        (leaf / name).write_text("")
    return leaf


def inventory(tmp_path: Path, **changes: Any) -> model.Inventory:
    return model.Inventory(str(tmp_path), "615", (GPU, device(1)), simulated=True)._replace(**changes)


def limits(tmp_path: Path, *shares: model.Share) -> list[KernelLimit]:
    found = shares or (model.Share(0, GPU, 4 * GIB),)
    return list(dmem.ops(found, inventory(tmp_path), str(tmp_path)))


def written(leaf: Path) -> tuple[str, str]:
    return (leaf / "dmem.max").read_text(), (leaf / "dmem.min").read_text()


@pytest.mark.parametrize(
    ("bus_id", "capacity", "found"),
    [
        (GPU.bus_id, CAPACITY, REGION),
        ("00000000:01:00.0", CAPACITY, REGION),
        ("0000:0A:00.0", CAPACITY, "nvidia/0000:0a:00.0/vidmem"),
        ("0000:02:00.0", CAPACITY, ""),
        ("0001:01:00.0", CAPACITY, ""),
        (GPU.bus_id, f"drm/{GPU.bus_id}/vidmem 5\n", ""),
        (GPU.bus_id, f"nvidia/{GPU.bus_id}/sysmem 5\n", ""),
        (GPU.bus_id, "", ""),
        ("", "nvidia//vidmem 5\n", ""),
        ("?", "nvidia/?/vidmem 5\n", ""),
    ],
)
def test_region_is_found_by_bus_id(bus_id: str, capacity: str, found: str) -> None:
    assert dmem.region_of(device(0, bus_id=bus_id), capacity) == found


@pytest.mark.parametrize(
    ("capacity", "reason"),
    [(None, "the kernel has no dmem controller"), ("", "the driver has no region for 0000:01:00.0"), (CAPACITY, None)],
)
def test_support_follows_kernel_capacity_file(
    tree: Path, tmp_path: Path, capacity: Optional[str], reason: Optional[str]
) -> None:
    path = tmp_path / "sys/fs/cgroup/dmem.capacity"
    path.unlink() if capacity is None else path.write_text(capacity)
    found = dmem.unsupported(GPU, inventory(tmp_path))
    assert (found or "").startswith(reason or "") and (found is None) == (reason is None)


def test_host_without_controller_is_unsupported() -> None:
    """The kernel under this test may have the controller, but has no such device."""
    found = dmem.unsupported(GPU, model.Inventory("/", "615", (GPU,)))
    assert found is not None and ("no dmem controller" in found or "no region" in found)


def test_cgroup_v1_beside_v2_is_unsupported(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There, runc and crun refuse a config.json with the limit."""
    (tmp_path / "sys/fs/cgroup").rename(tmp_path / "sys/fs/unified")
    monkeypatch.setattr(dmem, "_tree", lambda _: str(tmp_path / "sys/fs/unified"))
    assert "not at /sys/fs/cgroup" in (dmem.unsupported(GPU, inventory(tmp_path)) or "")


def test_limit_is_written_verified_changed_and_removed(tree: Path, tmp_path: Path) -> None:
    undo = dmem.enforce(os.getpid(), limits(tmp_path))
    assert written(tree) == (f"{REGION} {4 * GIB}",) * 2
    before = (model.Share(0, GPU, 4 * GIB, memory_backend="dmem"),)
    for size, text in ((5 * GIB, str(5 * GIB)), (GIB, str(GIB))):
        after = (before[0]._replace(memory_limit_bytes=size),)
        backends.change(before, after, str(tmp_path))
        assert written(tree) == (f"{REGION} {text}",) * 2
        before = after
    (tree / "dmem.max").write_text("untouched")
    backends.change(before, (before[0]._replace(compute_percent=5),), str(tmp_path))
    assert written(tree)[0] == "untouched", "the memory limit is unchanged"
    backends.change((), before, str(tmp_path))
    assert written(tree)[0] == f"{REGION} {GIB}", "a killed change is completed from any state"
    backends.change(before, (before[0]._replace(memory_limit_bytes=None),), str(tmp_path))
    assert written(tree) == (f"{REGION} max", f"{REGION} 0")
    undo()
    assert written(tree) == (f"{REGION} max", f"{REGION} 0")


def lent_share(request_bytes: int = 4 * GIB, limit_bytes: int = 12 * GIB) -> model.Share:
    return model.Share(0, GPU, request_bytes, memory_backend="dmem", virtual_bytes=limit_bytes, lending=constants.EVICT)


def test_lent_share_has_request_as_soft_limit(tree: Path, tmp_path: Path) -> None:
    """dmem.min protects the request, and dmem.max allows what is borrowed; a live change sets both."""
    before = lent_share()
    (op,) = limits(tmp_path, before)
    assert op.describe() == f"kernel   dmem.max {REGION} {12 * GIB} and dmem.min {4 * GIB}"
    dmem.enforce(os.getpid(), [op])
    assert written(tree) == (f"{REGION} {12 * GIB}", f"{REGION} {4 * GIB}")
    for request_gib, limit_gib in ((4, 6), (2, 6), (3, 3)):
        after = lent_share(request_gib * GIB, limit_gib * GIB)
        backends.change((before,), (after,), str(tmp_path))
        assert written(tree) == (f"{REGION} {limit_gib * GIB}", f"{REGION} {request_gib * GIB}")
        before = after
    assert not limits(tmp_path, before)[0].request_bytes, "its request is its limit"


def test_refused_change_restores_both_limits(tree: Path, tmp_path: Path, failing: dict[bytes, int]) -> None:
    """The kernel accepts the hard limit and refuses the soft one."""
    before = lent_share()
    dmem.enforce(os.getpid(), limits(tmp_path, before))
    failing[f"{REGION} {2 * GIB}".encode()] = errno.EINVAL
    with pytest.raises(syscalls.SyscallError):
        backends.change((before,), (lent_share(2 * GIB, 8 * GIB),), str(tmp_path))
    assert written(tree) == (f"{REGION} {12 * GIB}", f"{REGION} {4 * GIB}")


@pytest.mark.parametrize(
    ("mode", "runs", "note"),
    [
        ("evict", True, ""),
        ("evict", False, "gpushare agent does not run"),
        ("movable", True, "backend dmem cannot lend with policy.lending movable"),
    ],
)
def test_dmem_share_is_lent_only_with_the_agent(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, runs: bool, note: str
) -> None:
    """Where nothing takes the memory back in a known time, dmem.max is the request."""
    monkeypatch.setattr(agentlock, "is_held", lambda *_: runs)
    rules = model.Policy(allowed_backends=("dmem", "shim"), lending=mode)
    host = model.Node(model.Config(policy=rules, host_memory="64Gi"), inventory(tmp_path))
    wanted = quantity.amount_or_range("GPUSHARE_MEMORY", "4Gi..12Gi")
    request = model.Request("own", model.Selection("list", names=("0",)), ("compute",), ((None, wanted),))
    (share,) = placement.grant(request, host, placement.Ledger({}))
    assert (share.memory_backend, share.memory_limit_bytes) == ("dmem", 4 * GIB)
    (op,) = dmem.ops((share,), host.inventory, str(tmp_path))
    assert (op.limit_bytes, op.soft_bytes) == ((4 if note else 12) * GIB, 4 * GIB)
    notes = lending.notes(request, (share,), host.config)
    assert [note in line for line in notes] == ([True] if note else [])


def test_shim_allocation_touches_no_cgroup(tree: Path, tmp_path: Path) -> None:
    shares = (model.Share(0, GPU, 4 * GIB),)
    backends.change(shares, (shares[0]._replace(memory_limit_bytes=1),), str(tmp_path))
    assert written(tree) == ("", "") and not (tmp_path / dmem.RECORD).exists()


def test_missing_controller_in_container_cgroup_refuses_start(tree: Path, tmp_path: Path) -> None:
    (tree / "dmem.max").unlink()
    with pytest.raises(KernelError, match=r"dmem\.max\" does not exist: .*; write \+dmem to cgroup.subtree_control"):
        dmem.enforce(os.getpid(), limits(tmp_path))
    assert not (tmp_path / dmem.RECORD).exists()


def test_cgroup_with_foreign_process_is_refused(tree: Path, tmp_path: Path) -> None:
    (tree / "cgroup.procs").write_text(f"{os.getpid()}\n1\n")
    with pytest.raises(KernelError, match="not the container's own cgroup: process 1 is in it"):
        dmem.enforce(os.getpid(), limits(tmp_path))
    assert written(tree) == ("", "")
    (tree / "cgroup.procs").write_text(f"{os.getpid()}\n")
    dmem.enforce(os.getpid(), limits(tmp_path))


def test_limit_that_does_not_read_back_is_refused(tree: Path, tmp_path: Path) -> None:
    """A kernel or file that accepts every write and stores nothing."""
    (tree / "dmem.max").unlink()
    (tree / "dmem.max").symlink_to("/dev/null")
    with pytest.raises(KernelError):
        dmem.enforce(os.getpid(), limits(tmp_path))
    (tree / "dmem.max").unlink()
    os.mknod(tree / "dmem.max", 0o666 | 0o020000, os.makedev(1, 3))  # /dev/null by another name
    with pytest.raises(KernelError, match="does not contain"):
        dmem.enforce(os.getpid(), limits(tmp_path))
    assert not (tmp_path / dmem.RECORD).exists()


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[bytes, int]]:
    """Writes of these texts fail with this errno."""
    fails: dict[bytes, int] = {}
    real = os.write

    def write(fd: int, data: bytes) -> int:
        if bytes(data) in fails:
            raise OSError(fails[bytes(data)], os.strerror(fails[bytes(data)]))
        return real(fd, data)

    monkeypatch.setattr(dmem.os, "write", write)
    yield fails


def test_refused_change_changes_nothing(tree: Path, tmp_path: Path, failing: dict[bytes, int]) -> None:
    (tmp_path / "sys/fs/cgroup/dmem.capacity").write_text(f"{CAPACITY}nvidia/{device(1).bus_id}/vidmem 5\n")
    both = tuple(model.Share(slot, device(slot), 4 * GIB, memory_backend="dmem") for slot in (0, 1))
    (tree / "dmem.max").write_text("")
    one = dmem.ops(both[:1], inventory(tmp_path), str(tmp_path))
    dmem.enforce(os.getpid(), one)
    (tmp_path / dmem.RECORD).write_text(
        f'{{"directory": "{tree}", "regions": {{"{GPU.uuid}": "{REGION}", "{device(1).uuid}": "other"}}}}'
    )
    failing[f"other {GIB}".encode()] = errno.EBUSY
    with pytest.raises(CapacityError, match="in use; free it first"):
        backends.change(both, tuple(share._replace(memory_limit_bytes=GIB) for share in both), str(tmp_path))
    assert written(tree)[0].split()[1] == str(4 * GIB), "the first device has its limit again"
    failing[f"other {GIB}".encode()] = errno.EINVAL
    with pytest.raises(syscalls.SyscallError, match="Invalid argument"):
        backends.change(both, tuple(share._replace(memory_limit_bytes=GIB) for share in both), str(tmp_path))


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"directory": "/x", "regions": {}}', '{"directory": 1}'])
def test_damaged_record_changes_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / dmem.RECORD).write_text(text)
    before = (model.Share(0, GPU, 4 * GIB, memory_backend="dmem"),)
    with pytest.raises(KernelError, match="start it again"):
        backends.change(before, (before[0]._replace(memory_limit_bytes=5),), str(tmp_path))


# Limits that the driver enforces, through NVML


@pytest.fixture
def nvml_dir(tmp_path: Path, tree: Path) -> Path:
    """The library directory of a host without the controller whose driver enforces limits itself."""
    (tmp_path / "sys/fs/cgroup/dmem.capacity").unlink()
    libdir = tmp_path / "usr/lib/x86_64-linux-gnu"
    libdir.mkdir(parents=True)
    source = Path(__file__).with_name("nvml615.c")
    flags = ("-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")
    subprocess.run(["gcc", *flags, "-o", libdir / "libnvidia-ml.so.615.71", source, "-ldl"], check=True)
    return libdir


def test_newer_driver_is_limited_through_nvml(nvml_dir: Path, tmp_path: Path, tree: Path) -> None:
    newer = inventory(tmp_path, driver_version="615.71")
    assert dmem.unsupported(GPU, newer) is None
    assert "no limits of its own" in (dmem.unsupported(GPU, inventory(tmp_path, driver_version="590.1")) or "")
    assert "no limits of its own" in (dmem.unsupported(GPU, inventory(tmp_path, driver_version="615.99")) or "")
    both = tuple(model.Share(slot, device(slot), 4 * GIB, memory_backend="dmem") for slot in (0, 1))
    wanted = list(dmem.ops(both, newer, str(tmp_path)))
    assert "through NVML: 4294967296" in wanted[0].describe()
    undo = dmem.enforce(os.getpid(), wanted)
    backends.change(both, (both[0]._replace(memory_limit_bytes=GIB), both[1]), str(tmp_path))
    backends.change((), both, str(tmp_path))
    undo()
    calls = [line.split() for line in (nvml_dir / "limits").read_text().splitlines()]
    assert {line[1] for line in calls} == {str(tree)}
    most, none = [str(4 * GIB)] * 2, ["0", str((1 << 64) - 1)]
    first, second = GPU.uuid, device(1).uuid
    assert [[line[0], *line[2:]] for line in calls] == [
        *([first, *most], [second, *most], [first, str(GIB), str(GIB)]),
        *([first, *most], [second, *most], [first, *none], [second, *none]),
    ]


def test_lent_share_has_both_limits_in_nvml(nvml_dir: Path, tmp_path: Path, tree: Path) -> None:
    (op,) = dmem.ops((lent_share(),), inventory(tmp_path, driver_version="615.71"), str(tmp_path))
    assert op.describe().endswith(f"through NVML: {12 * GIB}, soft {4 * GIB}")
    dmem.enforce(os.getpid(), [op])
    backends.change((lent_share(),), (lent_share(limit_bytes=6 * GIB),), str(tmp_path))
    calls = [line.split()[2:] for line in (nvml_dir / "limits").read_text().splitlines()]
    assert calls == [[str(4 * GIB), str(12 * GIB)], [str(4 * GIB), str(6 * GIB)]]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("broken", "4", "nvmlDeviceSetMemoryLimits_v1 returned 4; use the backend shim"),
        ("deaf", "", "returned 18446744073709551615, not 4294967296"),
        ("mute", "", "returned 0, not 4294967296"),
        ("hangs", "", "no answer in 0 s"),
    ],
)
def test_driver_that_rejects_limit_refuses_start(
    nvml_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str, message: str
) -> None:
    monkeypatch.setattr(nvmllimits, "DEADLINE_S", 0.3 if file == "hangs" else 10.0)
    wanted = dmem.ops((model.Share(0, GPU, 4 * GIB),), inventory(tmp_path, driver_version="615.71"), str(tmp_path))
    (nvml_dir / file).write_text(text)
    with pytest.raises(DeviceError, match=message):
        dmem.enforce(os.getpid(), wanted)
    assert not (tmp_path / dmem.RECORD).exists()


def test_library_without_function_is_named(nvml_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="libc.so.6 has no nvmlDeviceSetMemoryLimits_v1"):
        nvmllimits.put("libc.so.6", GPU.uuid, "/cgroup", GIB, GIB)
    with pytest.raises(DeviceError, match="nvmlDeviceGetHandleByUUID returned 3"):
        nvmllimits.put(str(nvml_dir / "libnvidia-ml.so.615.71"), "MIG-1", "/cgroup", GIB, GIB)


# The plan and config.json


def plan_of(tmp_path: Path, **changes: Any) -> Plan:
    host = model.Node(
        model.Config(policy=model.Policy(allowed_backends=("dmem", "shim"))), inventory(tmp_path, **changes)
    )
    memory = ((None, model.Amount(GIB, None, "1Gi")),)
    request = model.Request("own", model.Selection("list", names=("0",)), ("compute",), memory)
    shares = placement.grant(request, host, placement.Ledger({}))
    return plan.make_plan(bundle(), request, host, lease(*shares), image(), files())


def test_plan_has_limit_before_devices(tree: Path, tmp_path: Path) -> None:
    kinds = [type(op).__name__ for op in plan_of(tmp_path).ops]
    assert kinds.index("WriteLimits") < kinds.index("KernelLimit") < kinds.index("DeviceNode")
    (op,) = (op for op in plan_of(tmp_path).ops if isinstance(op, KernelLimit))
    assert op.describe() == f"kernel   dmem.max and dmem.min {REGION} {GIB}"
    assert op.record == "/run/gpushare/containers/c1/dmem"


def edited(tmp_path: Path, spec: dict[str, Any], *ops: KernelLimit) -> tuple[dict[str, Any], Any]:
    from gpushare.inject import spec_record

    (tmp_path / "rootfs").mkdir(exist_ok=True)
    editor = specedit.Editor(spec, leased=True)
    one = oci.bundle_of(oci.State("c", 0, "", str(tmp_path), {}), {**editor.spec, "root": {"path": "rootfs"}})
    with SpecTree(one) as rootfs:
        made = editor.put_in(Plan("c", ops), rootfs, ("/opt/gpushare-hook",), "")
    record = spec_record.record_of(made)
    assert record is not None and spec_record.remaining(record) == ops
    assert spec_record.stripped(made) == spec
    return made, spec_record


REAL = KernelLimit("GPU-1", REGION, GIB, "/run/gpushare/containers/c/dmem")


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"linux": {"resources": {"unified": None}}},
        {"linux": {"resources": {"unified": {}}}},
        {"linux": {"resources": {"unified": {"dmem.max": None}}}},
        {"linux": {"resources": {"unified": {"memory.high": "1"}}}},
        {"linux": {"resources": {"unified": {"dmem.max": f"{REGION} max", "io.max": "x"}}}},
    ],
)
def test_unified_limit_is_added_and_stripped(tmp_path: Path, spec: dict[str, Any]) -> None:
    made, _ = edited(tmp_path, spec, REAL)
    unified = made["linux"]["resources"]["unified"]
    assert unified["dmem.max"] == unified["dmem.min"] == f"{REGION} {GIB}"
    others = (spec.get("linux", {}).get("resources", {}).get("unified") or {}).keys() - {"dmem.max"}
    assert unified.keys() == {"dmem.max", "dmem.min", *others}


def test_unified_limits_of_a_lent_share_differ(tmp_path: Path) -> None:
    made, _ = edited(tmp_path, {}, REAL._replace(request_bytes=GIB // 2))
    unified = made["linux"]["resources"]["unified"]
    assert (unified["dmem.max"], unified["dmem.min"]) == (f"{REGION} {GIB}", f"{REGION} {GIB // 2}")


def test_second_device_is_left_to_hook(tmp_path: Path) -> None:
    """Each write has one region, and a runtime writes a file once."""
    made, _ = edited(tmp_path, {}, REAL, REAL._replace(uuid="GPU-2", region="nvidia/0000:02:00.0/vidmem"))
    assert made["linux"]["resources"]["unified"]["dmem.max"] == f"{REGION} {GIB}"


def test_simulated_tree_is_not_in_config(tmp_path: Path) -> None:
    made, _ = edited(tmp_path, {}, REAL._replace(tree="/sim"))
    assert "unified" not in made["linux"]["resources"]


def test_limits_file_names_enforcer() -> None:
    """A lost state directory must not lose the enforcer."""
    share = model.Share(0, GPU, 4 * GIB, memory_backend="dmem")
    (limit,) = shm_abi.read_limits(shm_abi.pack_limits((share,), 1)).devices
    assert limit.flags & shm_abi.DEVICE_MEMORY_DMEM and limit.memory_limit_bytes == 4 * GIB
    (limit,) = shm_abi.read_limits(shm_abi.pack_limits((share._replace(memory_backend="shim"),), 1)).devices
    assert not limit.flags


def test_program_without_container_cannot_use_dmem(tmp_path: Path) -> None:
    host = model.Node(model.Config(policy=model.Policy(allowed_backends=("dmem", "shim"))), inventory(tmp_path))
    request = model.Request("own", model.Selection("any", 1), ())
    assert backends.for_programs(request, host).config.policy.allowed_backends == ("shim",)
    with pytest.raises(RequestError, match="no cgroup of its own"):
        backends.for_programs(request._replace(backend="dmem"), host)
    assert issubclass(RequestError, GpushareError)
