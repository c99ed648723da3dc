"""The plan's rules. tests/golden compares the whole text of usual plans."""

from __future__ import annotations

from typing import Any

import pytest
from gpushare.core import constants
from gpushare.core.errors import RequestError
from gpushare.core.model import Share
from gpushare.core.ops import (
    DeviceNode,
    LdCache,
    Link,
    Mount,
    Plan,
    WriteLimits,
    needs,
)
from gpushare.inject import plan
from gpushare.programs import explain
from gpushare.request import request

from tests.unit.pure import UUIDS, VERSION, bundle, device, files, image, lease, node, share

LIBDIR = "/usr/lib/x86_64-linux-gnu"
SHIM = "/usr/lib/gpushare"
UUID = UUIDS[0]
LIMITED = (share(0, 0, 4 << 30)._replace(page=5),)


def make(*env: str, shares: tuple[Share, ...] = LIMITED, host: Any = None, driver: Any = None, **facts: Any) -> Plan:
    env = env or ("GPUSHARE_MEMORY=4Gi",)
    container = bundle(*env)
    host = host or node()
    asked = request.resolve(container, host)
    assert asked
    return plan.make_plan(container, asked, host, lease(*shares) if shares else None, image(**facts), driver or files())


def mounts(made: Plan) -> dict[str, str]:
    found = [(op.target, op.source) for op in made.ops if isinstance(op, Mount)]
    assert len(dict(found)) == len(found), "two mounts at one target"
    return dict(found)


def kinds(made: Plan) -> list[str]:
    return list(dict.fromkeys(type(op).__name__ for op in made.ops))


def test_activity_file_has_the_number_of_the_share() -> None:
    assert mounts(make())[f"{constants.PAGES_DIR}/{UUID}"] == f"/run/gpushare/devices/{UUID}/5"


def test_limits_have_configured_times() -> None:
    host = node()
    host = host._replace(config=host.config._replace(slice_us=1500, switch_us=80))
    first = make(host=host).ops[0]
    assert isinstance(first, WriteLimits) and (first.slice_us, first.switch_us) == (1500, 80)
    assert first.describe().endswith("; slice 1500 us; switch 80 us")


@pytest.mark.parametrize(("sharing", "round_ms"), [("slices", 0), ("turns", 30)])
def test_limits_have_a_round_only_with_turns(sharing: str, round_ms: int) -> None:
    host = node()
    host = host._replace(config=host.config._replace(compute_sharing=sharing, round_ms=30))
    first = make(host=host).ops[0]
    assert isinstance(first, WriteLimits) and first.round_ms == round_ms
    assert first.describe().endswith("; round of turns 30000 us") == (sharing == "turns")


def test_real_driver_is_only_in_private_directory() -> None:
    real = {f"{LIBDIR}/libcuda.so.{VERSION}", f"{LIBDIR}/libnvidia-ml.so.{VERSION}"}
    made = make(other_drivers=(("/usr/local/cuda/compat/libcuda.so.1", "libcuda.so.1"),))
    assert {target for target, source in mounts(made).items() if source in real} == {
        constants.REAL_CUDA,
        constants.REAL_NVML,
    }


def test_mig_devices_of_one_gpu_share_its_node() -> None:
    shares = tuple(Share(slot, device(slot, minor=3), 1 << 30) for slot in (0, 1))
    nodes = [op.target for op in make(shares=shares).ops if isinstance(op, DeviceNode)]
    assert nodes.count("/dev/nvidia3") == 1


def test_driver_files_are_read_only() -> None:
    for op in make(driver=files(firmware=("/lib/firmware/nvidia/1/gsp_tu10x.bin",))).ops:
        if isinstance(op, Mount) and op.target not in (constants.RW_DIR, f"{constants.PAGES_DIR}/{UUID}"):
            assert {"ro", "nosuid", "nodev"} <= set(op.flags), op


def test_other_driver_copies_are_covered_once() -> None:
    made = make(
        other_drivers=(
            ("/usr/local/cuda/compat/libcuda.so.550.54", "libcuda.so.1"),
            ("/opt/x/libnvidia-ml.so.1", "libnvidia-ml.so.1"),
            (f"{LIBDIR}/libcuda.so.{VERSION}", "libcuda.so.1"),
        )
    )
    found = mounts(made)
    assert found["/usr/local/cuda/compat/libcuda.so.550.54"] == f"{SHIM}/libcuda.so"
    assert found["/opt/x/libnvidia-ml.so.1"] == f"{SHIM}/libnvidia-ml.so"


def test_file_in_place_of_link_is_covered() -> None:
    path = f"{LIBDIR}/libcuda.so.1"
    made = make(other_drivers=((path, "libcuda.so.1"),))
    assert mounts(made)[path] == f"{SHIM}/libcuda.so"
    assert path not in {op.target for op in made.ops if isinstance(op, Link)}
    linked = make(other_drivers=((path, "libcuda.so.1"),), existing_links=((path, "libcuda.so.470"),))
    assert path not in mounts(linked)
    assert path in {op.target for op in linked.ops if isinstance(op, Link)}


def test_cache_entries_are_of_the_machine() -> None:
    (cache,) = (op for op in make().ops if isinstance(op, LdCache))
    assert {entry.flags for entry in cache.entries} == {0x0303}


@pytest.mark.parametrize(
    ("facts", "note"),
    [
        ({"has_ldcache": False}, "the image has none"),
        ({"ldcache_note": "on a mount of its own"}, "on a mount of its own"),
        ({"machine": "s390x"}, "unknown machine"),
    ],
)
def test_unchanged_cache_is_noted(facts: dict[str, Any], note: str) -> None:
    made = make(**facts)
    assert "LdCache" not in kinds(made)
    assert any(note in line for line in made.notes)


def test_utility_only_covers_libcuda_of_image() -> None:
    other = (("/opt/libcuda.so.1", "libcuda.so.1"),)
    made = make(driver=files(asked_cuda=False, libraries=()), other_drivers=other)
    assert f"{LIBDIR}/libcuda.so.{VERSION}" not in mounts(made)
    assert mounts(made)["/opt/libcuda.so.1"] == f"{SHIM}/libcuda.so"
    assert constants.REAL_CUDA in mounts(made)


def test_driver_of_image_at_private_path_is_not_covered() -> None:
    """The real library has that path, and the shim must not load itself in its place."""
    made = make(other_drivers=((constants.REAL_CUDA, "libcuda.so.1"),))
    assert mounts(made)[constants.REAL_CUDA] == files().cuda.source


def test_driver_root_and_simulated_devices_are_used() -> None:
    host = node()
    host = host._replace(inventory=host.inventory._replace(root="/run/driver", simulated=True))
    made = make(host=host)
    assert next(op.source for op in made.ops if isinstance(op, DeviceNode)) == "/run/driver/dev/nvidia0"
    assert "DeviceRule" not in kinds(made)


def test_limit_without_glibc_is_refused() -> None:
    for limited in (LIMITED[0], share(0, 0, None)._replace(compute_percent=30)):
        with pytest.raises(RequestError, match=r"no glibc .*cannot enforce the limit"):
            make(shares=(limited,), libdir="")
    made = make("NVIDIA_VISIBLE_DEVICES=0", shares=(share(0, 0, None),), libdir="")
    assert kinds(made) == ["ProcMask", "DeviceNode", "DeviceRule"]
    assert any("no glibc" in note for note in made.notes)


def test_socket_mounts_are_writable() -> None:
    socket = ("/run/nvidia-persistenced/socket", "/run/nvidia-persistenced/socket")
    (op,) = (op for op in make(driver=files(sockets=(socket,))).ops if isinstance(op, Mount) and op.kind == "socket")
    assert op.flags == ("nosuid", "nodev", "noexec")


def test_ops_declare_namespace_or_spec() -> None:
    """Limits, tmpfs, cache and masks need a namespace; a spec can carry the other ops."""
    found = {type(op).__name__: needs(op) for op in make().ops}
    assert {name for name, need in found.items() if need == "namespace"} == {
        "WriteLimits",
        "TenantTmpfs",
        "LdCache",
        "ProcMask",
    }
    assert set(found.values()) == {"namespace", "either"}


def test_explain_json_is_json() -> None:
    import json

    container = bundle("GPUSHARE_MEMORY=4Gi")
    asked = request.resolve(container, node())
    value = json.loads(json.dumps(explain.explain_json(asked, make())))
    assert value["request"]["selection"] == "any:1"
    assert value["request"]["sources"] == [["GPUSHARE_MEMORY", "4Gi"]]
    assert value["plan"]["ops"][0]["op"] == "WriteLimits"
    assert value["plan"]["ops"][0]["shares"][0]["memory_limit_bytes"] == 4 << 30
    assert explain.explain_json(None, None) == {"request": None, "placed": [], "held": [], "plan": None}


def test_explain_text_is_printable() -> None:
    container = bundle("GPUSHARE_MEMORY=4Gi", "NVIDIA_VISIBLE_DEVICES=0\x1b[2J,0")
    made = make()
    asked = request.resolve(bundle("GPUSHARE_MEMORY=4Gi"), node())
    assert asked
    hostile = asked._replace(sources=container.env)
    assert explain.explain_text(hostile, made).replace("\n", "").isprintable()
