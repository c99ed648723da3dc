"""Who may ask for what: each key of `policy`, applied to containers."""

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
    """What CDI puts into a spec."""
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


# Devices that others injected


def test_injected_devices_that_policy_does_not_take_are_refused_by_both_ways() -> None:
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
def test_a_hook_refuses_injected_devices_where_limits_are_required(
    env: tuple[str, ...], rules: dict[str, Any], key: str
) -> None:
    """It cannot take them out, and left in they are a whole GPU without a limit."""
    with pytest.raises(PolicyError, match=rf"has /dev/nvidia1 without a memory limit, and policy\.{key} requires one"):
        resolve(*env, linux=injected(1), rules=rules, runtime=False)
    assert resolve(*env, linux=injected(1), runtime=False) is None
    assert resolve(*env, rules=rules, runtime=False) is None


def test_a_rule_for_all_devices_does_not_hide_a_device_of_an_ordinary_container() -> None:
    """docker run --device /dev/nvidia1 --device-cgroup-rule 'a *:* rwm'"""
    linux = {**injected(1), "resources": {"devices": [{"allow": True, "access": "rwm"}]}}
    assert resolve(linux=linux).selection.names == (UUIDS[1],)
    assert resolve(linux=linux, privileged=True) is None
    mount = {"destination": "/dev//nvidia1", "type": "bind", "source": "/dev/nvidia1"}
    assert resolve(mounts=[mount]).selection.names == (UUIDS[1],)


def test_a_hook_refuses_injected_devices_where_there_are_equal_shares() -> None:
    """A whole GPU beside them would be without a limit; gpushare-runtime gives the container its share."""
    host = node()
    host = host._replace(config=host.config._replace(sharing=(SharingRule(2),)))
    with pytest.raises(PolicyError, match=r"has /dev/nvidia1 without a memory limit, and sharing requires one"):
        request.resolve(bundle(linux=injected(1)), host)
    asked = request.resolve(bundle(linux=injected(1)), host, with_injected=True)
    assert asked is not None
    (one,) = placement.grant(asked, host, placement.Ledger({}))
    assert (one.device.index, one.memory_limit_bytes, one.compute_percent) == (1, 8 << 30, 50)


def test_injected_devices_by_privilege() -> None:
    rules = {"accept_cdi": "privileged"}
    assert resolve(linux=injected(1), rules=rules, privileged=True).dialect == "injected"
    with pytest.raises(PolicyError, match="accept.cdi"):
        resolve(linux=injected(1), rules=rules)


def test_nvidia_s_words_do_not_make_injected_devices_acceptable() -> None:
    with pytest.raises(PolicyError, match="accept.cdi"):
        resolve(ALL, linux=injected(1), rules={"accept_cdi": "never"})
    with pytest.raises(PolicyError, match="accept.cdi"):
        resolve("GPUSHARE_PRIORITY=high", linux=injected(1), rules={"accept_cdi": "never"})


def test_our_own_request_replaces_injected_devices_that_policy_does_not_take() -> None:
    found = resolve(LIMIT, linux=injected(1), rules={"accept_cdi": "never"})
    assert found.selection == Selection("any", count=1)
    assert found.ignored == ("/dev/nvidia1 in config.json: GPUSHARE_MEMORY says which",)


def test_a_void_that_would_leave_a_device_in_is_refused() -> None:
    with pytest.raises(RequestError, match='GPUSHARE_DEVICES="void", but config.json has /dev/nvidia0'):
        resolve("GPUSHARE_DEVICES=void", linux=injected(0))
    assert resolve("GPUSHARE_DEVICES=void") is None


def test_injected_devices_before_nvidia_s_words_is_said() -> None:
    found = resolve(ALL, linux=injected(1))
    assert found.selection.names == (UUIDS[1],)
    assert found.ignored == ('NVIDIA_VISIBLE_DEVICES="all": config.json has /dev/nvidia1',)
    text = explain.explain_text(found, plan.make_plan(bundle(), found, node(), lease(), image(), files()))
    assert 'ignored      NVIDIA_VISIBLE_DEVICES="all": config.json has /dev/nvidia1' in text


@pytest.mark.parametrize("name", ["1", UUIDS[1], UUIDS[1].lower(), UUIDS[1][:14], "nvidia.com/gpu=1", "/var/run/x"])
def test_words_that_name_the_same_device_in_another_way_do_not_contradict(name: str) -> None:
    assert resolve(f"NVIDIA_VISIBLE_DEVICES={name}", linux=injected(1)).selection.names == (UUIDS[1],)


def test_words_that_name_another_device_contradict_and_both_are_named() -> None:
    with pytest.raises(
        RequestError, match=r'NVIDIA_VISIBLE_DEVICES="0" and /dev/nvidia1 in config.json name different'
    ):
        resolve("NVIDIA_VISIBLE_DEVICES=0", linux=injected(1))
    with pytest.raises(RequestError, match="name different"):
        resolve("NVIDIA_VISIBLE_DEVICES=0,1", LIMIT, linux=injected(1))


# Who is listened to

DEVICE_0 = {"destination": "/var/run/nvidia-container-devices/0", "source": "/dev/null"}
# key of policy.accept -> the container, and whether it is refused (or is as if it had not asked)
WAYS_TO_ASK: dict[str, tuple[dict[str, Any], bool]] = {
    "env": ({"env": [LIMIT]}, True),
    "annotations": ({"annotations": {"gpushare.io/memory": "4Gi"}}, True),
    "volume_mounts": ({"mounts": [DEVICE_0]}, False),
    "cdi": ({"linux": injected(0)}, True),
}


@pytest.mark.parametrize("privileged", [False, True])
@pytest.mark.parametrize("who", ["always", "privileged", "never"])
@pytest.mark.parametrize("key", WAYS_TO_ASK)
def test_each_way_to_ask_is_heard_from_whom_policy_says(key: str, who: str, privileged: bool) -> None:
    asked, refuses = WAYS_TO_ASK[key]
    env = asked.get("env", [])
    rest = {name: value for name, value in asked.items() if name != "env"}
    rules = {f"accept_{key}": who, "privileged_containers": ("*",)}
    heard = who == "always" or (who == "privileged" and privileged)
    if heard or not refuses:
        assert (resolve(*env, rules=rules, privileged=privileged, **rest) is not None) is heard
        return
    with pytest.raises(PolicyError, match=rf"policy\.accept\.{key}"):
        resolve(*env, rules=rules, privileged=privileged, **rest)


# NVIDIA_VISIBLE_DEVICES, annotations


@pytest.mark.parametrize("env", [(ALL,), ("NVIDIA_VISIBLE_DEVICES=none",), (ALL, "GPUSHARE_PRIORITY=high")])
def test_nvidia_visible_devices_alone_grants_nothing(env: tuple[str, ...]) -> None:
    assert resolve(*env) is not None
    assert resolve(*env, rules={"nvidia_visible_devices": "with_limit"}) is None


def test_nvidia_visible_devices_names_the_devices_of_a_limit() -> None:
    found = resolve("NVIDIA_VISIBLE_DEVICES=1", LIMIT, rules={"nvidia_visible_devices": "with_limit"})
    assert found.selection.names == ("1",)


@pytest.mark.parametrize("of", [pod, crio])
def test_only_scoped_annotations(of: Any) -> None:
    rules = {"annotations": "scoped"}
    unscoped = of(**{"gpushare.io/memory": "4Gi"})
    assert resolve(ALL, annotations=unscoped).memory
    with pytest.raises(PolicyError, match=r'gpushare.io/memory="4Gi": only .*; write app\.gpushare\.io/memory'):
        resolve(ALL, annotations=unscoped, rules=rules)
    assert resolve(annotations=of(**{"app.gpushare.io/memory": "4Gi"}), rules=rules).memory
    assert resolve(annotations=unscoped, rules=rules) is None  # a sidecar that names no device


def test_outside_of_pods_no_annotation_is_scoped() -> None:
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
def test_privileged_containers_need_an_entry(entries: tuple[str, ...], allowed: bool) -> None:
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
        assert resolve(LIMIT, annotations=found, rules=rules)  # without privileges nobody needs one


def test_a_privileged_container_outside_of_pods_is_listed_by_its_id() -> None:
    assert resolve(LIMIT, privileged=True, rules={"privileged_containers": ("c1",)})
    with pytest.raises(PolicyError, match='add "c1" there'):
        resolve(LIMIT, privileged=True, rules={"privileged_containers": ("c2", "*/*")})


# One annotation, two containers of a pod


@pytest.mark.parametrize("of", [pod, crio])
def test_an_annotation_for_the_pod_counts_once(of: Any) -> None:
    annotation = {"gpushare.io/memory": "4Gi"}

    def asked(container: str, sandbox: str, container_id: str, key: str = "gpushare.io/memory") -> Any:
        one = bundle(ALL, annotations=of(container, sandbox=sandbox, **{key: "4Gi"}), container_id=container_id)
        return request.resolve(one, node()), one

    first, one = asked("a", "s1", "c1")
    held = lease(share(0, 0, 4 << 30))._replace(sandbox=policy.pod_wide(first, one))
    assert held.sandbox == "s1"
    with pytest.raises(RequestError, match=r"gpushare.io/memory .* c1 of this pod .*; write b\.gpushare\.io/memory"):
        policy.refuse_second(*asked("b", "s1", "c2"), [held])
    policy.refuse_second(*asked("b", "s2", "c2"), [held])  # another pod
    policy.refuse_second(*asked("a", "s1", "c1"), [held])  # its own
    policy.refuse_second(*asked("b", "s1", "c2", "b.gpushare.io/memory"), [held])
    policy.refuse_second(*asked("b", "s1", "c2"), [held._replace(sandbox="")])  # that one was asked by name
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
def test_misspelt_variables_are_refused(name: str, meant: str) -> None:
    assert request.mentions(bundle(f"{name}=4Gi"))
    with pytest.raises(RequestError, match=rf'{name}="4Gi": unknown name; did you mean {meant}\?'):
        resolve(f"{name}=4Gi")


def test_misspelt_annotations_are_refused() -> None:
    with pytest.raises(RequestError, match=r"unknown annotation; did you mean gpushare\.io/memory\?"):
        resolve(annotations={"gpushare.io/memroy": "4Gi"})
    with pytest.raises(RequestError, match=r"did you mean app\.gpushare\.io/compute-mode\?"):
        resolve(annotations=pod(**{"app.gpushare.io/computemode": "hard"}))


@pytest.mark.parametrize("name", ["GPUSHARED_PATH", "GPUSHARE-HOOK", "GPU_SHARED_DIR", "GPU_SHARE", "GPUSHARE"])
def test_other_people_s_names_are_left_alone(name: str) -> None:
    assert resolve(f"{name}=x") is None
    assert resolve(f"{name}=x", ALL)


def test_more_than_the_maximum_is_seen_where_people_look() -> None:
    held = lease(share(0, 0, 4 << 30)._replace(clamped="5Gi of memory"))
    asked = resolve("GPUSHARE_MEMORY=5Gi")
    text = explain.explain_text(asked, plan.make_plan(bundle(), asked, node(), held, image(), files()))
    assert "clamped from 5Gi of memory" in text
    assert "note: slot 0: 5Gi of memory was asked, policy allows less" in text
