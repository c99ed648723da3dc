"""Combine requests of several dialects into one, and apply policy."""

from __future__ import annotations

from typing import Any, Optional

import pytest
from gpushare.core import constants
from gpushare.core.errors import DeviceError, PolicyError, RequestError
from gpushare.core.model import Request, Selection
from gpushare.programs import session
from gpushare.request import request

from tests.unit import pure
from tests.unit.pure import bundle, node

SANDBOX = {"io.kubernetes.cri.container-type": "sandbox"}
PRIVILEGED = {"capabilities": {"bounding": ["CAP_SYS_ADMIN"]}}


def resolve(
    *env: str, annotations: Any = None, process: Any = None, policy: Any = None, **spec: Any
) -> Optional[Request]:
    return request.resolve(bundle(*env, annotations=annotations, process=process or {}, **spec), node(**(policy or {})))


def selection(*env: str, **more: Any) -> Optional[Selection]:
    found = resolve(*env, **more)
    return found and found.selection


@pytest.mark.parametrize(
    "env",
    [
        (),
        ("PATH=/bin",),
        ("NVIDIA_VISIBLE_DEVICES=",),
        ("NVIDIA_VISIBLE_DEVICES=void",),
        ("NVIDIA_DRIVER_CAPABILITIES=all",),
        ("GPUSHARE_DEVICES=void",),
        ("GPUSHARE_DEVICES=void", "NVIDIA_VISIBLE_DEVICES=all"),
        ("GPUSHARE_PRIORITY=high",),
        ("GPUSHARE_DEVICES=",),
    ],
)
def test_container_without_request_resolves_to_none(env: tuple[str, ...]) -> None:
    assert resolve(*env) is None


@pytest.mark.parametrize(
    ("env", "dialect", "expected"),
    [
        (("NVIDIA_VISIBLE_DEVICES=all",), "nvidia", Selection("all")),
        (("NVIDIA_VISIBLE_DEVICES=none",), "nvidia", Selection("none")),
        (("GPUSHARE_MEMORY=4Gi",), "own", Selection("any", count=1)),
        (("GPUSHARE_COMPUTE=30%",), "own", Selection("any", count=1)),
        (("GPUSHARE_MEMORY=4Gi", "GPUSHARE_DEVICES="), "own", Selection("any", count=1)),
        (("GPUSHARE_DEVICES=any:2",), "own", Selection("any", count=2)),
        (("GPUSHARE_MEMORY=4Gi", "NVIDIA_VISIBLE_DEVICES=1"), "own+nvidia", Selection("list", names=("1",))),
        (("GPUSHARE_PRIORITY=high", "NVIDIA_VISIBLE_DEVICES=1"), "own+nvidia", Selection("list", names=("1",))),
        # gpushare's variables win, also over void, and despite any fault of the others
        (("GPUSHARE_MEMORY=4Gi", "NVIDIA_VISIBLE_DEVICES=void"), "own", Selection("any", count=1)),
        (("GPUSHARE_MEMORY=4Gi", "NVIDIA_VISIBLE_DEVICES=none"), "own", Selection("any", count=1)),
        (("GPUSHARE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=1"), "own", Selection("list", names=("0",))),
        (("GPUSHARE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=7"), "own", Selection("list", names=("0",))),
        (("GPUSHARE_DEVICES=none", "NVIDIA_VISIBLE_DEVICES=all"), "own", Selection("none")),
    ],
)
def test_combination_selects_dialect_and_devices(env: tuple[str, ...], dialect: str, expected: Selection) -> None:
    found = resolve(*env)
    assert found is not None
    assert (found.dialect, found.selection) == (dialect, expected)


@pytest.mark.parametrize("policy", [{}, {"accept_env": "never"}])
def test_request_of_any_dialect_has_capabilities(policy: dict[str, Any]) -> None:
    found = resolve("NVIDIA_DRIVER_CAPABILITIES=utility", annotations={"gpushare.io/memory": "4Gi"}, policy=policy)
    assert found and found.capabilities == ("utility",)


@pytest.mark.parametrize("word", ["void", "none"])
def test_limit_without_device_is_refused(word: str) -> None:
    with pytest.raises(RequestError, match=f'GPUSHARE_MEMORY="4Gi": sets a limit, but GPUSHARE_DEVICES is {word}'):
        resolve("GPUSHARE_MEMORY=4Gi", f"GPUSHARE_DEVICES={word}")


def test_sandbox_request_is_ignored() -> None:
    assert resolve("GPUSHARE_MEMORY=banana", annotations=SANDBOX) is None
    assert not request.mentions(bundle("GPUSHARE_MEMORY=4Gi", annotations=SANDBOX))


@pytest.mark.parametrize(
    ("env", "annotations", "expected"),
    [
        (("PATH=/bin",), {}, False),
        (("NVIDIA_VISIBLE_DEVICES=all",), {}, True),
        (("gpushare_memory=4Gi",), {}, True),
        (("GPU\u017fHARE_MEMORY=4Gi",), {}, False),  # the launcher compares bytes
        ((), {"gpushare.io/memory": "4Gi"}, True),
        ((), {"train.gpushare.io/memory": "4Gi"}, True),
    ],
)
def test_mentions_finds_requests(env: tuple[str, ...], annotations: dict[str, str], expected: bool) -> None:
    assert request.mentions(bundle(*env, annotations=annotations)) is expected


def test_mentions_finds_devices_of_a_sandbox() -> None:
    device = {"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}
    assert request.mentions(bundle(annotations=SANDBOX, linux={"devices": [device]}))


def test_mentions_finds_volume_requests() -> None:
    mount = {"destination": "/var/run/nvidia-container-devices/0", "source": "/dev/null"}
    assert request.mentions(bundle(mounts=[mount]))
    assert resolve(mounts=[mount])
    assert not request.mentions(bundle(mounts=[{"source": "/dev/null"}, {**mount, "destination": 1}, 2]))


@pytest.mark.parametrize("path", ["", "/", None, ".."])
def test_request_without_own_root_is_refused(path: Any) -> None:
    assert resolve("PATH=/bin", root={"path": path}) is None
    with pytest.raises(RequestError, match="root.path"):
        resolve("GPUSHARE_MEMORY=4Gi", root={"path": path})


def test_disallowed_backend_is_refused() -> None:
    with pytest.raises(PolicyError, match='backend "mps" is not allowed on this node .*; use shim'):
        resolve("GPUSHARE_MEMORY=4Gi", "GPUSHARE_BACKEND=mps")
    with pytest.raises(PolicyError, match='backend "shim" is not allowed'):
        resolve("GPUSHARE_MEMORY=4Gi", "GPUSHARE_BACKEND=shim", policy={"allowed_backends": ("mps",)})


def test_unaccepted_own_variable_is_refused() -> None:
    """Not ignored: otherwise a limit would be lost when a device comes from another source."""
    with pytest.raises(PolicyError, match=r'GPUSHARE_MEMORY="4Gi": requests in env .*; set policy.accept.env'):
        resolve("GPUSHARE_MEMORY=4Gi", policy={"accept_env": "never"})
    with pytest.raises(PolicyError, match="policy.accept.annotations"):
        resolve(annotations={"gpushare.io/memory": "4Gi"}, policy={"accept_annotations": "privileged"})
    assert resolve(annotations={"gpushare.io/memory": "4Gi"}, policy={"accept_env": "never"})
    assert resolve("GPUSHARE_MEMORY=4Gi", policy={"accept_env": "privileged"}, process=PRIVILEGED)


def test_unaccepted_nvidia_variable_is_ignored() -> None:
    """Every CUDA image sets them."""
    assert resolve("NVIDIA_VISIBLE_DEVICES=all", policy={"accept_env": "never"}) is None
    mount = {"destination": "/var/run/nvidia-container-devices/0", "source": "/dev/null"}
    assert resolve(mounts=[mount], policy={"accept_volume_mounts": "never"}) is None
    found = resolve("NVIDIA_VISIBLE_DEVICES=all", mounts=[mount], policy={"accept_env": "privileged"})
    assert found and found.selection == Selection("list", names=("0",))


@pytest.mark.parametrize("name", ["GPUSHARE_GPU_MEM", "GPUSHARE_MEMORY_LIMIT", "gpushare_gpu_memory", "GPUSHARE_"])
def test_unknown_variable_beside_request_is_refused(name: str) -> None:
    assert resolve(f"{name}=4Gi") is None
    with pytest.raises(RequestError, match=f'{name}="4Gi": unknown name; use GPUSHARE_DEVICES, '):
        resolve("NVIDIA_VISIBLE_DEVICES=all", f"{name}=4Gi")


def test_scoped_limit_without_container_name_is_refused() -> None:
    limit = {"app.gpushare.io/memory": "4Gi"}
    assert resolve(annotations=limit) is None
    with pytest.raises(RequestError, match=r'app\.gpushare\.io/memory="4Gi": the engine does not name this'):
        resolve("NVIDIA_VISIBLE_DEVICES=all", annotations=limit)
    other = {**limit, "io.kubernetes.cri.container-name": "sidecar"}
    assert selection("NVIDIA_VISIBLE_DEVICES=all", annotations=other) == Selection("all")


@pytest.mark.parametrize("service", ["", *(name[len("GPUSHARE_") :].rstrip("_") + "_" for name in constants.WRITERS)])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SERVICE_HOST", "10.0.0.1"),
        ("SERVICE_PORT", "80"),
        ("SERVICE_PORT_HTTP", "80"),
        ("PORT", "tcp://10.0.0.1:80"),
        ("PORT_80_TCP", "tcp://10.0.0.1:80"),
        ("PORT_80_TCP_ADDR", "10.0.0.1"),
        ("X_PORT_80_TCP", f"{pure.UUIDS[0]};memory=4Gi"),
    ],
)
def test_service_link_variable_is_ignored(service: str, name: str, value: str) -> None:
    """Kubernetes adds these to all pods of the namespace, whatever the service is called. None is a claim."""
    link = f"GPUSHARE_{service}{name}={value}"
    assert resolve("NVIDIA_VISIBLE_DEVICES=0", link) == resolve("NVIDIA_VISIBLE_DEVICES=0")
    assert resolve(link) is None
    assert session.resolve(pure.bundle(link), pure.node) is None


def test_dialect_errors_pass_through() -> None:
    with pytest.raises(DeviceError):
        resolve("NVIDIA_VISIBLE_DEVICES=7")
    with pytest.raises(RequestError):
        resolve("NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_DRIVER_CAPABILITIES=banana")


def test_conflicting_hook_is_refused_by_name() -> None:
    container = bundle(
        "GPUSHARE_MEMORY=4Gi",
        hooks={"prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook"}]},
        linux={"devices": [{"path": "/dev/nvidia0", "major": 195, "minor": 0}]},
    )
    asked = request.resolve(container, node())
    assert asked
    with pytest.raises(RequestError, match="prestart hook .*nvidia-container-runtime-hook.* and 1 more"):
        request.refuse_conflicts(container, asked, node().inventory)
    request.refuse_conflicts(bundle("GPUSHARE_MEMORY=4Gi"), asked, node().inventory)
