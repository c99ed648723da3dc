"""NVIDIA's variables about the driver: parsed with any request, and refused if invalid."""

from __future__ import annotations

from typing import Any

import pytest
from gpushare.core.errors import DeviceError, GpushareError, PolicyError, RequestError
from gpushare.core.model import Request
from gpushare.request import request
from gpushare.request.dialects import nvidia_driver_env

from tests.unit.pure import bundle, node

ADMIN = {"capabilities": {"bounding": ["CAP_SYS_ADMIN"]}}


def resolved(*env: str, host: Any = None, **spec: Any) -> Request:
    found = request.resolve(bundle("NVIDIA_VISIBLE_DEVICES=0", *env, **spec), host or node())
    assert found is not None
    return found


def volume(name: str) -> dict[str, str]:
    return {"destination": f"/var/run/nvidia-container-devices/{name}", "source": "/dev/null"}


def test_request_without_driver_variables_has_none() -> None:
    found = resolved()
    assert (found.features, found.imex_channels, found.mig_access, found.requirements) == ((), (), (), ())


def test_feature_needs_value_enabled() -> None:
    found = resolved("NVIDIA_GDS=enabled", "NVIDIA_MOFED=disabled", "NVIDIA_GDRCOPY=1", "NVIDIA_NVSWITCH=enabled")
    assert found.features == ("gds", "nvswitch")
    assert found.ignored == ('NVIDIA_GDRCOPY="1": only the value enabled switches it on',)
    assert ("NVIDIA_GDS", "enabled") in found.sources


@pytest.mark.parametrize(
    ("value", "channels"),
    [("", ()), ("0", ("0",)), ("1, 0,1", ("0", "1")), ("all", ("all",)), ("0,all", ("all",)), ("2047", ("2047",))],
)
def test_imex_channels_are_parsed(value: str, channels: tuple[str, ...]) -> None:
    assert resolved(f"NVIDIA_IMEX_CHANNELS={value}").imex_channels == channels


@pytest.mark.parametrize("value", ["x", "-1", "2048", "0-3", "../x", "²"])
def test_bad_imex_channel_is_refused(value: str) -> None:
    with pytest.raises(RequestError, match="is not an IMEX channel"):
        resolved(f"NVIDIA_IMEX_CHANNELS={value}")


def test_imex_mount_is_no_device() -> None:
    found = request.resolve(bundle(mounts=[volume("0"), volume("imex/3")]), node())
    assert found is not None
    assert (found.selection.names, found.imex_channels) == (("0",), ("3",))
    assert not request.mentions(bundle(mounts=[volume("imex/3")]))


@pytest.mark.parametrize("name", nvidia_driver_env.MIG_RIGHTS)
def test_mig_rights_are_parsed(name: str) -> None:
    assert resolved(f"{name}=all", process=ADMIN).mig_access == (nvidia_driver_env.MIG_RIGHTS[name],)
    assert resolved(f"{name}=0", process=ADMIN).mig_access
    assert resolved(f"{name}=none").mig_access == resolved(f"{name}=").mig_access == ()
    with pytest.raises(PolicyError, match=f'{name}="all": only a privileged container'):
        resolved(f"{name}=all")
    with pytest.raises(DeviceError, match=f'{name}="7": no device'):
        resolved(f"{name}=7", process=ADMIN)


def test_requirements_apply_to_every_request() -> None:
    """Also for requests in gpushare's variables, and where policy does not accept environment requests: the image
    states its needs."""
    expected = (("NVIDIA_REQUIRE_CUDA", "cuda>=12"), ("NVIDIA_REQUIRE_OTHER", "driver>=1"))
    lines = [f"{name}={value}" for name, value in expected]
    assert resolved(*reversed(lines)).requirements == expected
    found = request.resolve(
        bundle(*lines, "NVIDIA_GDS=enabled", annotations={"gpushare.io/memory": "1Gi"}), node(accept_env="never")
    )
    assert found is not None
    assert (found.requirements, found.features) == (expected, ())


@pytest.mark.parametrize(("value", "off"), [("1", True), ("true", True), ("T", True), ("0", False), ("", False)])
def test_requirements_can_be_switched_off(value: str, off: bool) -> None:
    found = resolved("NVIDIA_REQUIRE_CUDA=cuda>=99", f"NVIDIA_DISABLE_REQUIRE={value}")
    assert (found.requirements == ()) is off


@pytest.mark.parametrize("line", ["NVIDIA_REQUIRE_CUDA=banana", "NVIDIA_REQUIRE_X=cuda>="])
def test_invalid_requirement_is_refused(line: str) -> None:
    with pytest.raises(RequestError, match="is not a term"):
        resolved(line)


def test_requirements_apply_to_driver_files_alone() -> None:
    lines = ("NVIDIA_VISIBLE_DEVICES=none", "NVIDIA_REQUIRE_CUDA=driver>=999")
    with pytest.raises(GpushareError, match="NVIDIA_REQUIRE_CUDA.* is not met: driver is 535"):
        request.resolve(bundle(*lines), node())


def test_only_known_variables_may_not_contradict() -> None:
    with pytest.raises(RequestError, match="NVIDIA_GDS is given twice"):
        resolved("NVIDIA_GDS=enabled", "NVIDIA_GDS=disabled")
    assert resolved("NVIDIA_PRODUCT_NAME=a", "NVIDIA_PRODUCT_NAME=b")
