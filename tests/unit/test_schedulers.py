"""Requests of other schedulers: when they are parsed, which count, and that they never raise a limit.

tests/golden/dialects has the meaning of each.
"""

from __future__ import annotations

from typing import Any, Optional

import pytest
from gpushare.allocation import placement
from gpushare.core.errors import DeviceError, GpushareError, PolicyError, RequestError
from gpushare.core.model import Inventory, Node, Request, Selection
from gpushare.request import candidates, policy, request
from gpushare.request.dialects import registry
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.pure import UUIDS, bundle, device, lease, ledger, node, share
from tests.unit.test_mig import HOST as MIG_HOST
from tests.unit.test_policy import PRIVILEGED, injected, pod

ASKING = [
    word.name for row in registry.SCHEDULERS for word in row.variables if word.name.startswith(registry.BEGINNINGS)
]
SCOPED = [f"{registry.SCOPE}train.{key.name}" for row in registry.SCHEDULERS for key in row.scoped]
NVIDIA = "NVIDIA_VISIBLE_DEVICES=1"


def resolve(*env: str, rules: Any = None, runtime: bool = False, host: Any = None, **spec: Any) -> Optional[Request]:
    return request.resolve(bundle(*env, **spec), host or node(**(rules or {})), with_injected=runtime)


def asked(*env: str, **more: Any) -> Request:
    found = resolve(*env, **more)
    assert found is not None
    return found


# Containers whose variables are parsed


@pytest.mark.parametrize("name", ASKING)
@pytest.mark.parametrize("number", ["", "_0"])
def test_requesting_variable_is_always_found(name: str, number: str) -> None:
    """Neither the launcher, which searches the text, nor the hook misses it."""
    assert request.mentions(bundle(f"{name}{number}=1"))
    assert any(trigger.lower() in f"{name}{number}".lower() for trigger in request.RAW_TRIGGERS)


@pytest.mark.parametrize("key", sorted(registry.KEYS) + SCOPED)
def test_annotation_is_always_found(key: str) -> None:
    assert request.mentions(bundle(annotations={key: "1"}))
    assert any(trigger.lower() in key.lower() for trigger in request.RAW_TRIGGERS)


@pytest.mark.parametrize(
    "line",
    [
        "CUDA_MPS_PIPE_DIRECTORY=/tmp/mps",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50",
        "CGPU_DISABLE=1",
        "GPU_MEM_PER_DEVICE=1",
    ],
)
def test_variable_without_request_is_ignored(line: str) -> None:
    assert not request.mentions(bundle(line))
    assert resolve(line) is None


def test_every_row_has_a_module() -> None:
    for row in registry.SCHEDULERS:
        assert callable(registry.reader(row)), row.name
    assert len({row.name for row in registry.ROWS}) == len(registry.ROWS)
    assert set(candidates.DIALECTS) == {row.name for row in registry.ROWS} - {row.name for row in registry.SCHEDULERS}


def test_triggers_fit_launcher_search() -> None:
    for trigger in request.RAW_TRIGGERS:
        assert len(trigger) < 64
        assert all(c.isascii() and (c.isalnum() or c in "._-/") for c in trigger), trigger


# Devices that config.json has already


def test_limit_applies_to_injected_device() -> None:
    """HAMi with CDI: the device is injected, and the variable is void."""
    env = ("NVIDIA_VISIBLE_DEVICES=void", "CUDA_DEVICE_MEMORY_LIMIT_0=3000m", "CUDA_DEVICE_SM_LIMIT=30")
    found = asked(*env, runtime=True, linux=injected(1))
    assert found.dialect == "injected+hami"
    assert found.selection == Selection("list", names=(UUIDS[1],))
    assert (found.memory[0][1].limit_bytes, found.compute) == (3000 << 20, ((None, 30),))


def test_indexed_limit_applies_to_injected_device() -> None:
    assert asked("CUDA_MEM_LIMIT_1=2g", runtime=True, linux=injected(1)).dialect == "injected+vgpu-manager"
    with pytest.raises(
        RequestError, match=r'GPU_DEVICES_UUID="GPU-aaaa.*" and .*config.json"="/dev/nvidia1" name diff'
    ):
        resolve(f"GPU_DEVICES_UUID={UUIDS[0]}", "CUDA_MEM_LIMIT=2g", runtime=True, linux=injected(1))


def test_limit_for_other_device_is_refused() -> None:
    with pytest.raises(
        RequestError, match='CUDA_MEM_LIMIT_0="2g": a limit for another device, but this container gets'
    ):
        resolve("CUDA_MEM_LIMIT_0=2g", runtime=True, linux=injected(1))


# MIG, unknown sizes


def test_index_of_divided_gpu_means_all_mig_devices() -> None:
    host = Node(node().config, MIG_HOST)
    gpu = MIG_HOST.mig[0].index
    found = asked(f"CUDA_MEM_LIMIT_{gpu}=1g", f"NVIDIA_VISIBLE_DEVICES={gpu}", host=host)
    shares = placement.grant(found, host, ledger())
    assert len(shares) == len([mig for mig in MIG_HOST.mig if mig.index == gpu]) > 1
    assert {share.memory_limit_bytes for share in shares} == {1 << 30}


def test_fraction_of_unknown_size_is_refused() -> None:
    unknown = Node(node().config, Inventory("/", "1", (device(0, memory_bytes=0),)))
    found = asked("GPU_PORTION=0.5", "CUDA_DEVICE_MEMORY_LIMIT=1g", "NVIDIA_VISIBLE_DEVICES=0", host=unknown)
    with pytest.raises(DeviceError, match="its memory size is not known"):
        placement.grant(found, unknown, ledger())


def test_missing_device_is_reported_before_limits() -> None:
    words = ("CUDA_DEVICE_MEMORY_LIMIT_0=1g", "NVIDIA_VISIBLE_DEVICES=all")
    for host, why in ((node(0), "no NVIDIA device on this host"), (node(allowed_devices=("7",)), "not among")):
        with pytest.raises((DeviceError, PolicyError), match=why):
            placement.grant(asked(*words, host=host), host, ledger())


def test_fraction_applies_to_each_device_size() -> None:
    host = Node(node().config, Inventory("/", "1", (device(0), device(1, memory_bytes=8 << 30))))
    found = asked("GPU_PORTION=0.5", "NVIDIA_VISIBLE_DEVICES=all", host=host)
    assert [share.memory_limit_bytes for share in placement.grant(found, host, ledger())] == [8 << 30, 4 << 30]
    picked = asked("GPU_PORTION=0.5", host=host)  # the device is not chosen yet
    assert placement.grant(picked, host, ledger())[0].memory_limit_bytes == 8 << 30


def test_fraction_and_amount_must_agree_on_every_device() -> None:
    sizes = (device(0), device(1, memory_bytes=8 << 30))
    host = Node(node().config, Inventory("/", "1", sizes))
    words = ("GPU_PORTION=0.5", "CUDA_DEVICE_MEMORY_LIMIT=8g")
    assert asked(*words, "NVIDIA_VISIBLE_DEVICES=0", host=host).memory[0][1].limit_bytes == 8 << 30
    for where in (("NVIDIA_VISIBLE_DEVICES=1",), ()):
        with pytest.raises(RequestError, match='MEMORY_LIMIT="8g" and GPU_PORTION="0.5" set different limits'):
            resolve(*words, *where, host=host)


# Pods, policy


def test_fraction_annotation_is_for_one_container_of_a_pod() -> None:
    """KAI's variable beside it reaches only one container."""
    annotations = pod("b", **{"gpu-fraction": "0.5"})
    for env in ([], ["GPU_PORTION=0.50"]):
        one = bundle(NVIDIA, *env, annotations=annotations)
        found = request.resolve(one, node())
        assert found is not None and policy.pod_wide(found, one) == ("" if env else "s1")
        if not env:
            held = lease(share(0, 1, 8 << 30), container_id="a")._replace(sandbox="s1")
            message = r"gpu-fraction .* container a already has .*; write b\.gpushare\.io/memory"
            with pytest.raises(RequestError, match=message):
                policy.refuse_second(found, one, [held])


@pytest.mark.parametrize(("privileged", "memory"), [(False, True), (True, False)])
def test_switch_is_accepted_only_from_privileged_container(privileged: bool, memory: bool) -> None:
    process = PRIVILEGED if privileged else {}
    words = (NVIDIA, "CUDA_DEVICE_MEMORY_LIMIT=1g", "CUDA_DISABLE_CONTROL=true")
    assert bool(asked(*words, rules={"accept_switches": "privileged"}, process=process).memory) is memory


def test_disabled_limit_does_not_satisfy_required_limit() -> None:
    words = (NVIDIA, "CUDA_DEVICE_MEMORY_LIMIT=1g", "CUDA_DISABLE_CONTROL=true")
    host = node(accept_switches="always", require_limits=True)
    with pytest.raises(PolicyError, match="no memory limit is requested"):
        placement.grant(asked(*words, host=host), host, ledger())


def unused(*env: str, rules: Any = None, **spec: Any) -> tuple[str, ...]:
    one, host = bundle(*env, **spec), node(**(rules or {}))
    assert request.resolve(one, host) is None
    return request.unused(one, host)


def test_unused_variables_without_request_are_reported() -> None:
    limit = "CUDA_DEVICE_MEMORY_LIMIT=1g"
    assert unused() == unused(limit, annotations={"io.kubernetes.cri.container-type": "sandbox"}) == ()
    assert unused(limit, rules={"disabled_dialects": ("hami",)}) == (f"{_(limit)}: policy.dialects.disabled has hami",)
    assert unused(limit, rules={"enabled_dialects": ("mps",)}) == (
        f"{_(limit)}: policy.dialects.enabled does not have hami",
    )
    assert unused(limit, rules={"accept_env": "never"}) == (f"{_(limit)}: policy.accept.env does not accept it",)
    assert unused(annotations=pod("log", **{"gpu-fraction": "0.5"})) == (
        'gpu-fraction="0.5": container "log" names no device',
    )
    off = "AMP_VGPU_ENABLE=0"
    assert unused(off, "GPU_MEM_PER_DEVICE=1000") == (
        f"{_(off)}: no device is requested",
        f"{_('GPU_MEM_PER_DEVICE=1000')}: no device is requested",
    )


def _(line: str) -> str:
    name, _, value = line.partition("=")
    return f'{name}="{value}"'


def test_hook_refuses_pod_limit_on_injected_device() -> None:
    """The hook cannot remove the device, so it refuses, with or without a device request."""
    one = bundle(linux=injected(1), annotations=pod("train", **{"gpu-fraction": "0.5"}))
    found = request.resolve(one, node())
    assert found is not None
    with pytest.raises(RequestError, match="config.json already has an NVIDIA device"):
        request.refuse_conflicts(one, found, node().inventory)


def test_unaccepted_variable_names_no_device() -> None:
    annotations = pod("log", **{"gpu-fraction": "0.5"})
    rules = {"accept_env": "never"}
    assert resolve("CUDA_DEVICE_MEMORY_LIMIT=1g", annotations=annotations, rules=rules) is None


# Memory request and limit of NVIDIA's container toolkit


@pytest.mark.parametrize(
    "value", ["", " ", "-1", "0", "4096.5", "4096Mi", "4Gi", "1e3", "0x10", "010", "9" * 30, "4\0"]
)
@pytest.mark.parametrize("name", [name for name in ASKING if name.startswith("NVIDIA_GPU_MEMORY_")])
def test_malformed_nvidia_memory_is_refused(name: str, value: str) -> None:
    """Beside a valid value of the other end, too: a malformed limit never means no limit."""
    other = name.replace("LIMIT", "REQUEST") if "LIMIT" in name else name.replace("REQUEST", "LIMIT")
    for more in ((), (f"{other}=4096",)):
        with pytest.raises(RequestError, match=f'^{name}=|holds a NUL in "{name}"'):
            resolve(NVIDIA, f"{name}={value}", *more)


@pytest.mark.parametrize("value", ["", "-4Gi", "4gi", "4Gib", "1e9x", "0", "100Ki", "4Gi\0", "banana", "4Gi..8Gi"])
def test_malformed_nvidia_memory_annotation_is_refused(value: str) -> None:
    name = "nvidia.com/container.train.gpu-memory.limit"
    with pytest.raises(RequestError, match=f"^{name}="):
        resolve(NVIDIA, annotations=pod("train", **{name: value}))


@pytest.mark.parametrize(
    ("annotation", "variable", "agrees"),
    [
        ("4Gi", 4096, True),
        ("4096M", 3907, True),
        ("4096M", 3906, True),
        ("4096M", 4096, True),
        ("4096M", 3908, False),
        ("4096M", 4097, False),
        ("4Gi", 4097, False),
        ("4Gi", 4095, False),
    ],
)
def test_nvidia_memory_variable_may_be_rounded(annotation: str, variable: int, agrees: bool) -> None:
    env = (NVIDIA, f"NVIDIA_GPU_MEMORY_REQUEST={variable}", f"NVIDIA_GPU_MEMORY_LIMIT={variable}")
    annotations = pod("train", **{"nvidia.com/container.train.gpu-memory.request": annotation})
    if agrees:
        assert asked(*env, annotations=annotations).memory[0][1].limit_bytes == variable << 20
        return
    with pytest.raises(RequestError, match="they contradict"):
        resolve(*env, annotations=annotations)


def test_nvidia_memory_keeps_its_limit_beside_a_smaller_portion() -> None:
    found = asked(NVIDIA, "NVIDIA_GPU_MEMORY_REQUEST=8192", "NVIDIA_GPU_MEMORY_LIMIT=12288", "GPU_PORTION=0.499")
    ((_, amount),) = found.memory
    assert amount.ceiling is not None and amount.limit_bytes is not None
    assert amount.limit_bytes < 8 << 30 and amount.ceiling.limit_bytes == 12 << 30


def test_nvidia_memory_annotation_is_for_one_container() -> None:
    name = "nvidia.com/container.train.gpu-memory.limit"
    for other in ("log", "train-2", "trai", "container.train"):
        assert resolve(annotations=pod(other, **{name: "4Gi"})) is None
    one = bundle(annotations=pod("train", **{name: "4Gi"}))
    found = request.resolve(one, node(annotations="scoped"))
    assert found is not None and policy.pod_wide(found, one) == ""
    with pytest.raises(PolicyError, match="requests in annotations are not accepted"):
        resolve(NVIDIA, annotations=pod("train", **{name: "4Gi"}), rules={"accept_annotations": "never"})


# Two schedulers


def test_overridden_devices_of_a_second_scheduler_are_no_conflict() -> None:
    """gpushare parses them although GPUSHARE_DEVICES overrides them: they number the limits of vgpu-manager."""
    own = ("GPUSHARE_DEVICES=1", "GPUSHARE_MEMORY=1Gi", "GPUSHARE_COMPUTE=30")
    theirs = (f"MANAGER_VISIBLE_DEVICES={UUIDS[0]}", "CUDA_MEM_LIMIT_0=1g", "CUDA_TASK_PRIORITY=0")
    found = asked(*own, *theirs)
    assert (found.dialect, found.selection.names, found.priority) == ("own+hami", ("1",), 1)
    with pytest.raises(RequestError, match="are of two schedulers"):
        asked(*own[:2], *theirs, "CUDA_CORE_LIMIT_0=30")


# The smallest requested limit applies

AMOUNTS = {"1g": 1 << 30, "2048m": 2 << 30, "3221225472": 3 << 30}
SWITCHES = [
    "CUDA_DISABLE_CONTROL=true",
    "CGPU_DISABLE=1",
    "DISABLE_VGPU_CONTROL=true",
    "GPU_CORE_UTILIZATION_POLICY=disable",
]
HAMI = st.sampled_from(sorted(AMOUNTS)).map(lambda text: (f"CUDA_DEVICE_MEMORY_LIMIT={text}", AMOUNTS[text]))
MANAGER = st.sampled_from(["1g", "2048m"]).map(lambda text: (f"CUDA_MEM_LIMIT_1={text}", AMOUNTS[text]))
ALIYUN = st.sampled_from([1, 2]).map(lambda gib: (f"ALIYUN_COM_GPU_MEM_CONTAINER={gib}", gib << 30))
PORTION = st.sampled_from(["0.06", "0.07", "0.13", "0.19"]).map(
    lambda text: (f"GPU_PORTION={text}", int(float(text) * (16 << 30)))
)
MPS = st.sampled_from(["1G", "2G"]).map(lambda text: (f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={text}", int(text[0]) << 30))


FRACTIONS = st.sampled_from(["REQUEST", "LIMIT", "REQUESTS", "LIMITS"]).flatmap(
    lambda end: st.sampled_from([1, 2]).map(lambda gib: (f"NVIDIA_GPU_MEMORY_{end}={gib << 10}", gib << 30))
)


@given(
    st.lists(st.one_of(HAMI, MANAGER, ALIYUN, PORTION, MPS, FRACTIONS), min_size=1, max_size=3),
    st.lists(st.sampled_from(SWITCHES), max_size=2),
    st.booleans(),
)
def test_limit_of_any_scheduler_applies(limits: Any, switches: list[str], own_device: bool) -> None:
    env = [line for line, _ in limits] + switches
    env += ["ALIYUN_COM_GPU_MEM_DEV=16"] if any(line.startswith("ALIYUN") for line in env) else []
    try:
        found = asked(*env, "GPUSHARE_DEVICES=1" if own_device else NVIDIA)
        (share,) = placement.grant(found, node(), ledger())
    except RequestError as error:
        assert any(
            text in error.message
            for text in ("set different limits", "two schedulers", "is given twice", "contradict", "below the request")
        )
        return
    assert share.memory_limit_bytes is not None
    assert share.memory_limit_bytes <= min(size for _, size in limits)


@given(
    st.sampled_from(ASKING + sorted(registry.KEYS) + SCOPED),
    st.text(alphabet='0123456789.,=gGmMkKi%:{}"-_ aé', max_size=12),
)
def test_arbitrary_value_is_parsed_or_refused(name: str, value: str) -> None:
    """Any value is understood, ignored, or refused with name and value."""
    env = () if registry.is_annotation(name) else (f"{name}={value}",)
    gate = ("AMP_VGPU_ENABLE=1",) if name.startswith("GPU_") else ()
    annotations = pod("train", **{name: value}) if name in SCOPED else {name: value}
    try:
        resolve(*env, *gate, annotations=annotations if registry.is_annotation(name) else {})
    except GpushareError as error:
        assert name in error.message
        assert "\n" not in str(error)


def test_long_value_is_shortened() -> None:
    with pytest.raises(RequestError) as caught:
        resolve(NVIDIA, f"CUDA_DEVICE_MEMORY_LIMIT={'9' * 100_000}")
    assert len(str(caught.value)) < 400
