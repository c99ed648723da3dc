"""Each key of `policy`, applied to containers."""

from __future__ import annotations

from typing import Any, Optional

import pytest
from gpushare.allocation import placement
from gpushare.core.errors import PolicyError, RequestError
from gpushare.core.model import Request, Selection, SharingRule
from gpushare.inject import plan
from gpushare.programs import explain
from gpushare.request import policy, request

from tests.unit.pure import UUIDS, bundle, files, image, lease, node, share

PRIVILEGED = {"capabilities": {"bounding": ["CAP_SYS_ADMIN"]}}
LIMIT = "GPUSHARE_MEMORY=4Gi"
ALL = "NVIDIA_VISIBLE_DEVICES=all"


def injected(*minors: int) -> dict[str, Any]:
    """The entries that CDI adds to a spec."""
    return {"devices": [{"path": f"/dev/nvidia{minor}", "major": 195, "minor": minor} for minor in minors]}


def pod(container: str = "app", namespace: str = "ml", sandbox: str = "s1", **more: str) -> dict[str, str]:
    return {
        "io.kubernetes.cri.container-type": "container",
        "io.kubernetes.cri.container-name": container,
        "io.kubernetes.cri.sandbox-namespace": namespace,
        "io.kubernetes.cri.sandbox-id": sandbox,
        **more,
    }


def crio(container: str = "app", sandbox: str = "s1", **more: str) -> dict[str, str]:
    return {
        "io.kubernetes.cri-o.ContainerType": "container",
        "io.kubernetes.container.name": container,
        "io.kubernetes.pod.namespace": "ml",
        "io.kubernetes.cri-o.SandboxID": sandbox,
        **more,
    }


def resolve(*env: str, rules: Any = None, runtime: bool = True, privileged: bool = False, **spec: Any) -> Any:
    process = PRIVILEGED if privileged else {}
    found: Optional[Request] = request.resolve(
        bundle(*env, process=process, **spec), node(**(rules or {})), with_injected=runtime
    )
    return found


# Devices that other software injected


def test_unaccepted_injected_device_is_refused_by_hook_and_runtime() -> None:
    for runtime in (True, False):
        with pytest.raises(PolicyError, match=r"has /dev/nvidia1: .*not accepted.*; .*policy\.accept\.cdi"):
            resolve(linux=injected(1), rules={"accept_cdi": "never"}, runtime=runtime)
    assert request.mentions(bundle(linux=injected(1)))


@pytest.mark.parametrize(
    ("rules", "key"),
    [
        ({"require_limits": True}, "require_limits"),
        ({"max_memory": "4Gi", "over_maximum": "clamp"}, "max_memory"),
        ({"unlimited": "deny"}, "unlimited"),
    ],
)
@pytest.mark.parametrize("env", [(), ("GPUSHARE_DEVICES=void",), ("NVIDIA_VISIBLE_DEVICES=void",)])
def test_hook_refuses_injected_device_without_required_limit(
    env: tuple[str, ...], rules: dict[str, Any], key: str
) -> None:
    """The hook cannot remove the devices, and leaving them would grant a whole GPU without a limit."""
    with pytest.raises(PolicyError, match=rf"has /dev/nvidia1 without a memory limit, and policy\.{key} requires one"):
        resolve(*env, linux=injected(1), rules=rules, runtime=False)
    assert resolve(*env, linux=injected(1), runtime=False) is None
    assert resolve(*env, rules=rules, runtime=False) is None


def test_rule_for_all_devices_does_not_hide_injected_device() -> None:
    """docker run --device /dev/nvidia1 --device-cgroup-rule 'a *:* rwm'"""
    linux = {**injected(1), "resources": {"devices": [{"allow": True, "access": "rwm"}]}}
    assert resolve(linux=linux).selection.names == (UUIDS[1],)
    assert resolve(linux=linux, privileged=True) is None
    mount = {"destination": "/dev//nvidia1", "type": "bind", "source": "/dev/nvidia1"}
    assert resolve(mounts=[mount]).selection.names == (UUIDS[1],)


def test_hook_refuses_injected_device_with_equal_shares() -> None:
    """The hook would leave a whole GPU beside them without a limit; gpushare-runtime gives the container its equal
    share."""
    host = node()
    host = host._replace(config=host.config._replace(sharing=(SharingRule(2),)))
    with pytest.raises(PolicyError, match=r"has /dev/nvidia1 without a memory limit, and sharing requires one"):
        request.resolve(bundle(linux=injected(1)), host)
    asked = request.resolve(bundle(linux=injected(1)), host, with_injected=True)
    assert asked is not None
    (one,) = placement.grant(asked, host, placement.Ledger({}))
    assert (one.device.index, one.memory_limit_bytes, one.compute_percent) == (1, 8 << 30, 50)


def test_nvidia_variable_does_not_make_injected_device_acceptable() -> None:
    with pytest.raises(PolicyError, match="accept.cdi"):
        resolve(ALL, linux=injected(1), rules={"accept_cdi": "never"})
    with pytest.raises(PolicyError, match="accept.cdi"):
        resolve("GPUSHARE_PRIORITY=high", linux=injected(1), rules={"accept_cdi": "never"})


def test_own_request_replaces_unaccepted_injected_device() -> None:
    found = resolve(LIMIT, linux=injected(1), rules={"accept_cdi": "never"})
    assert found.selection == Selection("any", count=1)
    assert found.ignored == ("/dev/nvidia1 in config.json: GPUSHARE_MEMORY names the devices",)


def test_void_with_injected_device_is_refused() -> None:
    with pytest.raises(RequestError, match='GPUSHARE_DEVICES="void", but config.json has /dev/nvidia0'):
        resolve("GPUSHARE_DEVICES=void", linux=injected(0))
    assert resolve("GPUSHARE_DEVICES=void") is None


def test_nvidia_variable_ignored_for_injected_device_is_reported() -> None:
    found = resolve(ALL, linux=injected(1))
    assert found.selection.names == (UUIDS[1],)
    assert found.ignored == ('NVIDIA_VISIBLE_DEVICES="all": config.json has /dev/nvidia1',)
    text = explain.explain_text(found, plan.make_plan(bundle(), found, node(), lease(), image(), files()))
    assert 'ignored      NVIDIA_VISIBLE_DEVICES="all": config.json has /dev/nvidia1' in text


@pytest.mark.parametrize("name", ["1", UUIDS[1], UUIDS[1].lower(), UUIDS[1][:14], "nvidia.com/gpu=1", "/var/run/x"])
def test_variable_naming_injected_device_is_accepted(name: str) -> None:
    assert resolve(f"NVIDIA_VISIBLE_DEVICES={name}", linux=injected(1)).selection.names == (UUIDS[1],)


def test_variable_naming_other_device_is_refused() -> None:
    with pytest.raises(
        RequestError, match=r'NVIDIA_VISIBLE_DEVICES="0" and /dev/nvidia1 in config.json name different'
    ):
        resolve("NVIDIA_VISIBLE_DEVICES=0", linux=injected(1))
    with pytest.raises(RequestError, match="name different"):
        resolve("NVIDIA_VISIBLE_DEVICES=0,1", LIMIT, linux=injected(1))


# Accepted sources of requests

DEVICE_0 = {"destination": "/var/run/nvidia-container-devices/0", "source": "/dev/null"}
# key of policy.accept -> the container, and whether it is refused (otherwise the request is ignored)
REQUEST_SOURCES: dict[str, tuple[dict[str, Any], bool]] = {
    "env": ({"env": [LIMIT]}, True),
    "annotations": ({"annotations": {"gpushare.io/memory": "4Gi"}}, True),
    "volume_mounts": ({"mounts": [DEVICE_0]}, False),
    "cdi": ({"linux": injected(0)}, True),
}


@pytest.mark.parametrize("privileged", [False, True])
@pytest.mark.parametrize("setting", ["always", "privileged", "never"])
@pytest.mark.parametrize("key", REQUEST_SOURCES)
def test_request_source_is_accepted_by_policy(key: str, setting: str, privileged: bool) -> None:
    asked, refuses = REQUEST_SOURCES[key]
    env = asked.get("env", [])
    rest = {name: value for name, value in asked.items() if name != "env"}
    rules = {f"accept_{key}": setting, "privileged_containers": ("*",)}
    is_accepted = setting == "always" or (setting == "privileged" and privileged)
    if is_accepted or not refuses:
        assert (resolve(*env, rules=rules, privileged=privileged, **rest) is not None) is is_accepted
        return
    with pytest.raises(PolicyError, match=rf"policy\.accept\.{key}"):
        resolve(*env, rules=rules, privileged=privileged, **rest)


# NVIDIA_VISIBLE_DEVICES, annotations


@pytest.mark.parametrize("env", [(ALL,), ("NVIDIA_VISIBLE_DEVICES=none",), (ALL, "GPUSHARE_PRIORITY=high")])
def test_nvidia_visible_devices_without_limit_grants_nothing(env: tuple[str, ...]) -> None:
    assert resolve(*env) is not None
    assert resolve(*env, rules={"nvidia_visible_devices": "with_limit"}) is None


def test_nvidia_visible_devices_selects_devices_of_limit() -> None:
    found = resolve("NVIDIA_VISIBLE_DEVICES=1", LIMIT, rules={"nvidia_visible_devices": "with_limit"})
    assert found.selection.names == ("1",)


@pytest.mark.parametrize("of", [pod, crio])
def test_scoped_policy_refuses_unscoped_annotation(of: Any) -> None:
    rules = {"annotations": "scoped"}
    unscoped = of(**{"gpushare.io/memory": "4Gi"})
    assert resolve(ALL, annotations=unscoped).memory
    with pytest.raises(PolicyError, match=r'gpushare.io/memory="4Gi": only .*; write app\.gpushare\.io/memory'):
        resolve(ALL, annotations=unscoped, rules=rules)
    assert resolve(annotations=of(**{"app.gpushare.io/memory": "4Gi"}), rules=rules).memory
    assert resolve(annotations=unscoped, rules=rules) is None  # a sidecar that names no device


def test_scoped_policy_refuses_annotation_outside_pod() -> None:
    with pytest.raises(PolicyError, match="<container>.gpushare.io/memory"):
        resolve(annotations={"gpushare.io/memory": "4Gi"}, rules={"annotations": "scoped"})


# Privileged containers


@pytest.mark.parametrize(
    ("entries", "allowed"),
    [
        (("*",), True),
        (("ml/app",), True),
        (("ml/*",), True),
        (("*/app",), True),
        ((), False),
        (("ml",), False),
        (("app",), False),
        (("ml/other", "other/app"), False),
        (("c1",), False),
    ],
)
def test_privileged_container_needs_entry(entries: tuple[str, ...], allowed: bool) -> None:
    rules = {"privileged_containers": entries}
    for found in (pod(), crio()):
        one = bundle(LIMIT, annotations=found, process=PRIVILEGED)
        assert policy.listed(one, node(**rules).config.policy) is allowed
        if allowed:
            assert resolve(LIMIT, annotations=found, privileged=True, rules=rules)
        else:
            with pytest.raises(
                PolicyError, match=r'GPUSHARE_MEMORY="4Gi": .* privileged .*CAP_SYS_ADMIN.*; add "ml/app" there'
            ):
                resolve(LIMIT, annotations=found, privileged=True, rules=rules)
        assert resolve(LIMIT, annotations=found, rules=rules)  # an unprivileged container needs no entry


def test_privileged_container_outside_pod_is_listed_by_id() -> None:
    assert resolve(LIMIT, privileged=True, rules={"privileged_containers": ("c1",)})
    with pytest.raises(PolicyError, match='add "c1" there'):
        resolve(LIMIT, privileged=True, rules={"privileged_containers": ("c2", "*/*")})


# One annotation, two containers of a pod


@pytest.mark.parametrize("of", [pod, crio])
def test_pod_annotation_counts_for_one_container(of: Any) -> None:
    annotation = {"gpushare.io/memory": "4Gi"}

    def asked(container: str, sandbox: str, container_id: str, key: str = "gpushare.io/memory") -> Any:
        one = bundle(ALL, annotations=of(container, sandbox=sandbox, **{key: "4Gi"}), container_id=container_id)
        return request.resolve(one, node()), one

    first, one = asked("a", "s1", "c1")
    held = lease(share(0, 0, 4 << 30))._replace(sandbox=policy.pod_wide(first, one))
    assert held.sandbox == "s1"
    with pytest.raises(
        RequestError, match=r"gpushare.io/memory .* container c1 already has .*; write b\.gpushare\.io/memory"
    ):
        policy.refuse_second(*asked("b", "s1", "c2"), [held])
    policy.refuse_second(*asked("b", "s2", "c2"), [held])  # another pod
    policy.refuse_second(*asked("a", "s1", "c1"), [held])  # its own lease
    policy.refuse_second(*asked("b", "s1", "c2", "b.gpushare.io/memory"), [held])
    policy.refuse_second(*asked("b", "s1", "c2"), [held._replace(sandbox="")])  # that lease came from a scoped request
    alone = bundle(ALL, annotations={**annotation, "io.kubernetes.cri.sandbox-id": "s1"})
    assert policy.pod_wide(request.resolve(alone, node()), alone) == ""  # type: ignore[arg-type]  # not None


# Misspelt names


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("GPUSHAREMEMORY", "GPUSHARE_MEMORY"),
        ("GPU_SHARE_MEMORY", "GPUSHARE_MEMORY"),
        ("gpu_share_memory", "GPUSHARE_MEMORY"),
        ("GPUSHARE-MEMORY", "GPUSHARE_MEMORY"),
        ("GPUSHARE_MEMROY", "GPUSHARE_MEMORY"),
        ("GPUSHAREDEVICES", "GPUSHARE_DEVICES"),
        ("GPU_SHARE_COMPUTE_MODE", "GPUSHARE_COMPUTE_MODE"),
    ],
)
def test_misspelt_variable_is_refused(name: str, meant: str) -> None:
    assert request.mentions(bundle(f"{name}=4Gi"))
    with pytest.raises(RequestError, match=rf'{name}="4Gi": unknown name; did you mean {meant}\?'):
        resolve(f"{name}=4Gi")


@pytest.mark.parametrize("name", ["GPUSHARED_PATH", "GPUSHARE-HOOK", "GPU_SHARED_DIR", "GPU_SHARE", "GPUSHARE"])
def test_similar_unrelated_variable_is_ignored(name: str) -> None:
    assert resolve(f"{name}=x") is None
    assert resolve(f"{name}=x", ALL)


def test_clamped_amount_is_shown_by_explain() -> None:
    held = lease(share(0, 0, 4 << 30)._replace(clamped="5Gi of memory"))
    asked = resolve("GPUSHARE_MEMORY=5Gi")
    text = explain.explain_text(asked, plan.make_plan(bundle(), asked, node(), held, image(), files()))
    assert "clamped from 5Gi of memory" in text
    assert "note: slot 0: 5Gi of memory was requested, policy allows less" in text
