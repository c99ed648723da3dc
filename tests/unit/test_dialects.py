"""The request dialects: their whole grammar, and that a misspelt limit never means no limit."""

from __future__ import annotations

from typing import Any, Optional

import pytest
from gpushare.core import constants
from gpushare.core.errors import DeviceError, GpushareError, RequestError
from gpushare.core.model import Amount, Inventory, Request, Selection
from gpushare.request import dialects
from gpushare.request.dialects import gpushare_env, nvidia
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.pure import UUIDS, bundle, device, node

HOST = node().inventory
NAME = "NVIDIA_VISIBLE_DEVICES"
KEY = "io.kubernetes.cri.container-name"


def read_nvidia(*env: tuple[str, str], spec: Any = None) -> Optional[Request]:
    return nvidia.read(bundle(**(spec or {}))._replace(env=env), HOST)


def read_own(*env: tuple[str, str], annotations: Any = None, inventory: Inventory = HOST) -> Optional[Request]:
    return gpushare_env.read(bundle(annotations=annotations)._replace(env=env), inventory)


@pytest.mark.parametrize(
    ("value", "selection"),
    [
        ("all", Selection("all")),
        ("0,all", Selection("all")),
        ("none", Selection("none")),
        ("", None),
        ("  ", None),
        ("void", None),
        ("0,void", None),
        ("all,void", None),
        ("void,banana", None),
        ("0", Selection("list", names=("0",))),
        ("1,0", Selection("list", names=("1", "0"))),
        ("0,0,00", Selection("list", names=("0",))),
        (UUIDS[1], Selection("list", names=(UUIDS[1],))),
        (UUIDS[1].upper(), Selection("list", names=(UUIDS[1].upper(),))),
        (f"1,{UUIDS[1]}", Selection("list", names=("1",))),
        ("GPU-aaaaaaaa", Selection("list", names=("GPU-aaaaaaaa",))),
    ],
)
def test_visible_devices_are_parsed(value: str, selection: Optional[Selection]) -> None:
    found = read_nvidia((NAME, value))
    assert (found and found.selection) == selection


def test_unset_variable_requests_nothing() -> None:
    assert read_nvidia() is None
    assert read_nvidia(("NVIDIA_DRIVER_CAPABILITIES", "all")) is None


@pytest.mark.parametrize(
    ("value", "error", "what"),
    [
        ("2", DeviceError, 'no device "2"; this host has 0'),
        ("99999999999999999999", DeviceError, "no device"),
        ("GPU-cccccccc", DeviceError, "no device"),
        ("MIG-cccccccc-0000-0000-0000-000000000000", DeviceError, "no MIG device"),
        ("0:1", DeviceError, 'no MIG device "0:1"'),
        ("banana", RequestError, '"banana" does not name a device'),
        ("-1", RequestError, "does not name a device"),
        ("0,", RequestError, "an empty device name"),
        ("0,none", RequestError, "none cannot be combined"),
        ("all,none", RequestError, "none cannot be combined"),
        ("GPU-", RequestError, "does not name a device"),
        ("any", RequestError, "does not name a device"),
        ("²", RequestError, "does not name a device"),
        ("no-gpu-has-1024MiB-to-run", RequestError, "the scheduler found no device"),
        ("void,no-gpu-has-1024MiB-to-run", RequestError, "the scheduler found no device"),
    ],
)
def test_bad_devices_are_refused_with_name_and_value(value: str, error: type[GpushareError], what: str) -> None:
    with pytest.raises(error) as caught:
        read_nvidia((NAME, value))
    assert str(caught.value).startswith(f'{NAME}="{value}": ')
    assert what in str(caught.value)


@pytest.mark.parametrize("value", ["gpu0", "0,", "0,none"])
def test_hint_offers_any_only_for_own_variable(value: str) -> None:
    with pytest.raises(RequestError) as ours:
        read_own(("GPUSHARE_DEVICES", value))
    with pytest.raises(RequestError) as others:
        read_nvidia((NAME, value))
    assert ours.value.hint.startswith("write any, all,") and others.value.hint.startswith("write all,")


def test_ambiguous_uuid_is_refused() -> None:
    twins = Inventory("/", "1", (device(0), device(1, uuid="GPU-aaaaaaaa-9999-0000-0000-000000000000")))
    with pytest.raises(RequestError, match="more than one device"):
        dialects.parse_devices("N", "GPU-aaaaaaaa", twins, any_allowed=False)


def test_host_without_devices_is_refused() -> None:
    with pytest.raises(DeviceError, match="this host has no device"):
        nvidia.read(bundle(f"{NAME}=0"), Inventory("/", "1", ()))


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, ("compute", "utility")),
        ("", ("compute", "utility")),
        ("utility", ("utility",)),
        ("utility,utility", ("utility",)),
        ("video", ("compute", "video")),
        ("display", ("display", "graphics")),
        ("all", ("compat32", "compute", "display", "graphics", "ngx", "utility", "video")),
        ("compute, utility", ("compute", "utility")),
    ],
)
def test_capabilities_are_parsed(value: Optional[str], found: tuple[str, ...]) -> None:
    assert dialects.expand_capabilities("NVIDIA_DRIVER_CAPABILITIES", value) == found


def volume(name: str, source: str = "/dev/null") -> dict[str, str]:
    return {"destination": f"/var/run/nvidia-container-devices/{name}", "source": source}


def test_volume_request_overrides_variable() -> None:
    found = read_nvidia((NAME, "all"), spec={"mounts": [volume("1"), volume("0", "/elsewhere"), 7]})
    assert found and found.selection == Selection("list", names=("1",))
    assert any("all" in line for line in found.ignored)


def test_cdi_volume_request_is_parsed() -> None:
    found = read_nvidia(spec={"mounts": [volume("cdi/nvidia.com/gpu/1")]})
    assert found is not None and found.selection == Selection("list", names=("1",))
    with pytest.raises(RequestError, match="cdi/example.com/net/0 does not name an NVIDIA GPU"):
        read_nvidia(spec={"mounts": [volume("cdi/example.com/net/0")]})


@pytest.mark.parametrize("vendor", ["nvidia.com", "k8s.device-plugin.nvidia.com"])
def test_cdi_device_names_are_parsed(vendor: str) -> None:
    """The names that NVIDIA's runtime accepts in CDI mode, and that KAI writes."""
    found = read_nvidia((NAME, f"{vendor}/gpu=1,{vendor}/gpu={UUIDS[0]}"))
    assert found is not None and found.selection == Selection("list", names=("1", UUIDS[0]))
    assert nvidia.unqualified(f"{vendor}/gpu=gpu1,{vendor}/gpu=mig0:1") == "1,0:1"
    everything = read_nvidia((NAME, f"{vendor}/gpu=all"))
    assert everything is not None and everything.selection == Selection("all")
    for odd in (f"{vendor}/gpu=", f"{vendor}/gpu", f"{vendor}/net=0", f"{vendor}/gpu=banana"):
        with pytest.raises(RequestError, match="does not name a device"):
            read_nvidia((NAME, odd))


def test_contradictory_duplicates_are_refused() -> None:
    assert read_nvidia((NAME, "0"), (NAME, "0"))
    with pytest.raises(RequestError, match=f'{NAME} is given twice: "0" and "1"'):
        read_nvidia((NAME, "0"), (NAME, "1"))
    with pytest.raises(RequestError, match='GPUSHARE_MEMORY is given twice: "4Gi" and "8Gi"'):
        read_own(("GPUSHARE_MEMORY", "4Gi"), ("GPUSHARE_MEMORY", "8Gi"))


def test_conflicting_hooks_and_mounts_are_found() -> None:
    spec = {
        "hooks": {"prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook"}, {"path": "/usr/bin/gpushare-hook"}]},
        "mounts": [{"destination": "/usr/lib/libcuda.so.1"}, {"destination": "/data"}],
        "linux": {"devices": [{"path": "/dev/nvidia0", "major": 195}, {"path": "/dev/null", "major": 1}]},
    }
    assert nvidia.conflicts(spec) == (
        'prestart hook "/usr/bin/nvidia-container-runtime-hook"',
        'mount at "/usr/lib/libcuda.so.1"',
        'device "/dev/nvidia0"',
    )
    assert nvidia.conflicts({}) == ()
    assert nvidia.conflicts({"hooks": {"prestart": 3, "poststop": [4]}, "mounts": [5], "linux": {"devices": [6]}}) == ()


@pytest.mark.parametrize(
    ("value", "selection"),
    [
        ("any", Selection("any", count=1)),
        ("any:2", Selection("any", count=2)),
        ("all", Selection("all")),
        ("1", Selection("list", names=("1",))),
        ("none", Selection("none")),
        ("void", gpushare_env.VOID),
        ("", gpushare_env.UNNAMED),
    ],
)
def test_own_device_variable_is_parsed(value: str, selection: Selection) -> None:
    found = read_own(("GPUSHARE_DEVICES", value))
    assert found and found.selection == selection


@pytest.mark.parametrize("value", ["any:0", "any:17", "any:", "any:x", "any:-1", "any,0", "any:1,any:1", "Any"])
def test_bad_any_is_refused(value: str) -> None:
    with pytest.raises(RequestError, match=f'GPUSHARE_DEVICES="{value}"'):
        read_own(("GPUSHARE_DEVICES", value))


def test_own_variables_are_parsed() -> None:
    found = read_own(
        ("GPUSHARE_MEMORY", "4Gi"),
        ("GPUSHARE_COMPUTE", "30%"),
        ("GPUSHARE_COMPUTE_MODE", "soft"),
        ("GPUSHARE_PRIORITY", "high"),
        ("GPUSHARE_BACKEND", "shim"),
        ("GPUSHARE_OVERSUBSCRIBE", "false"),
    )
    assert found is not None
    assert found.memory == ((None, Amount(4 << 30, None, "4Gi")),)
    assert found.compute == ((None, 30),)
    assert (found.compute_mode, found.priority, found.backend, found.oversubscribe) == ("soft", 1, "shim", False)
    assert found.selection == gpushare_env.UNNAMED


@pytest.mark.parametrize("variable", list(gpushare_env.ROWS))
def test_bad_value_is_quoted(variable: str) -> None:
    with pytest.raises(RequestError, match=f'^{variable}="banana": '):
        read_own((variable, "banana"))


@pytest.mark.parametrize("variable", [name for name in gpushare_env.ROWS if name != constants.ENV_DEVICES])
def test_empty_value_is_refused(variable: str) -> None:
    """`GPUSHARE_MEMORY=` from an unset shell variable must not mean no limit."""
    with pytest.raises(RequestError, match=f'^{variable}="": '):
        read_own((variable, ""))


@pytest.mark.parametrize(
    "name",
    ["GPUSHARE_MEMROY", "GPUSHARE_MEM0RY", "gpushare_memory", "GPUSHARE_MEMORYS", "Gpushare_Compute", "GPUSHARE_MEM"],
)
def test_misspelt_variable_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match=f'{name}="4Gi": unknown name; did you mean GPUSHARE_'):
        read_own((name, "4Gi"))


@pytest.mark.parametrize("name", ["GPUSHARE_LOG", "GPUSHARE_TRACE", "MEMORY"])
def test_unrelated_variable_is_ignored(name: str) -> None:
    assert read_own((name, "x")) is None


def test_misspelt_annotation_is_refused() -> None:
    with pytest.raises(RequestError, match='gpushare.io/memroy="4Gi": unknown annotation'):
        read_own(annotations={"gpushare.io/memroy": "4Gi"})
    with pytest.raises(
        RequestError, match=r"train.gpushare.io/memroy=.*annotation; did you mean train\.gpushare\.io/memory\?"
    ):
        read_own(annotations={KEY: "train", "train.gpushare.io/memroy": "4Gi"})
    assert read_own(annotations={KEY: "train", "other.gpushare.io/memroy": "4Gi"}) is None
    assert read_own(annotations={"gpushare.io/applied": "anything"}) is None


def memory(request: Optional[Request]) -> Optional[str]:
    return request.memory[0][1].text if request and request.memory else None


@pytest.mark.parametrize("variable", list(gpushare_env.ROWS))
def test_annotation_equals_variable(variable: str) -> None:
    """A value means the same as a variable and as an annotation."""
    value = {"devices": "1", "memory": "4Gi", "compute": "30%", "compute_mode": "soft", "priority": "high"}.get(
        variable[len("GPUSHARE_") :].lower(), "shim" if variable == constants.ENV_BACKEND else "1"
    )
    by_env = read_own((variable, value))
    by_annotation = read_own(annotations={constants.ANNOTATIONS[variable]: value})
    assert by_env and by_annotation and by_annotation.sources == ((constants.ANNOTATIONS[variable], value),)
    assert by_env._replace(sources=()) == by_annotation._replace(sources=())


def test_scoped_annotation_applies_only_to_its_container() -> None:
    both = {"train.gpushare.io/memory": "4Gi", "serve.gpushare.io/memory": "2Gi"}
    assert memory(read_own(annotations={KEY: "train", **both})) == "4Gi"
    assert memory(read_own(annotations={KEY: "serve", **both})) == "2Gi"
    assert read_own(annotations={KEY: "sidecar", **both}) is None


def test_unscoped_annotation_in_pod_needs_named_device() -> None:
    pod = {KEY: "train", "gpushare.io/memory": "4Gi"}
    assert read_own(annotations=pod) is None
    assert read_own((NAME, "void"), annotations=pod) is None
    assert read_own(("GPUSHARE_DEVICES", ""), annotations=pod) is not None  # requested, but by no device:
    assert memory(read_own(("GPUSHARE_DEVICES", ""), annotations=pod)) is None
    assert memory(read_own((NAME, "all"), annotations=pod)) == "4Gi"
    assert memory(read_own(("GPUSHARE_DEVICES", "any"), annotations=pod)) == "4Gi"
    assert memory(read_own(annotations={**pod, "train.gpushare.io/devices": "0"})) == "4Gi"


def test_ignored_annotation_is_reported() -> None:
    found = read_own(("GPUSHARE_PRIORITY", "high"), annotations={KEY: "train", "gpushare.io/memory": "4Gi"})
    assert found and found.ignored == ('gpushare.io/memory="4Gi": container "train" names no device',)


def test_contradicting_variable_and_annotation_are_refused() -> None:
    assert read_own(("GPUSHARE_MEMORY", "4Gi"), annotations={"gpushare.io/memory": "4Gi"})
    with pytest.raises(RequestError, match='GPUSHARE_MEMORY="4Gi" and annotation gpushare.io/memory="8Gi" contradict'):
        read_own(("GPUSHARE_MEMORY", "4Gi"), annotations={"gpushare.io/memory": "8Gi"})


REQUEST, LIMIT = constants.MEMORY_ENDS


@pytest.mark.parametrize(
    ("annotations", "text"),
    [
        ({REQUEST: "4Gi", LIMIT: "12Gi"}, "4Gi..12Gi"),
        ({REQUEST: "4Gi"}, "4Gi"),
        ({LIMIT: "12Gi"}, "12Gi"),
        ({REQUEST: "4Gi", LIMIT: "4096Mi"}, "4Gi"),
        ({REQUEST: "25%", LIMIT: "50%"}, "25%..50%"),
        ({REQUEST: "0=4Gi,1=2Gi", LIMIT: "0=8Gi,1=2Gi"}, "0=4Gi..8Gi,1=2Gi"),
        ({REQUEST: "4Gi", LIMIT: "0=8Gi,1=12Gi"}, "0=4Gi..8Gi,1=4Gi..12Gi"),
        ({REQUEST: "4Gi", LIMIT: "12Gi", "gpushare.io/memory": "4096Mi..12Gi"}, "4Gi..12Gi"),
    ],
)
def test_memory_ends_equal_a_range(annotations: dict[str, str], text: str) -> None:
    by_ends, by_range = read_own(annotations=annotations), read_own(("GPUSHARE_MEMORY", text))
    assert by_ends and by_range
    assert [(slot, one[:2], one.ceiling) for slot, one in by_ends.memory] == [
        (slot, one[:2], one.ceiling) for slot, one in by_range.memory
    ]
    assert by_ends.sources == tuple(pair for pair in annotations.items() if pair[0] in constants.MEMORY_ENDS)


@pytest.mark.parametrize(
    ("variable", "annotations", "what"),
    [
        ("4Gi", {LIMIT: "12Gi"}, f'GPUSHARE_MEMORY="4Gi" and annotation {LIMIT}="12Gi" contradict'),
        ("4Gi..12Gi", {REQUEST: "4Gi"}, "contradict"),
        ("4Gi..12Gi", {REQUEST: "4Gi", LIMIT: "8Gi"}, f'{REQUEST}="4Gi" and {LIMIT}="8Gi" contradict'),
        ("", {REQUEST: "4Gi"}, 'GPUSHARE_MEMORY=""'),
        (None, {REQUEST: "4Gi", "gpushare.io/memory": "8Gi"}, "contradict"),
        (None, {REQUEST: "8Gi", LIMIT: "4Gi"}, f'{LIMIT}="4Gi": the memory limit "4Gi" is below'),
        (None, {REQUEST: "4Gi..8Gi"}, "not an amount of memory|unknown unit"),
        (None, {LIMIT: ""}, "not an amount of memory"),
        (None, {REQUEST: "0=4Gi", LIMIT: "0=8Gi,1=8Gi"}, f'{REQUEST}="0=4Gi": no amount for slot 1, which {LIMIT} has'),
        (None, {REQUEST: "4Gi", LIMIT: "50%"}, "are a size and a percentage"),
        (None, {"gpushare.io/memory-limits": "4Gi"}, f"did you mean {LIMIT}"),
    ],
)
def test_contradicting_or_bad_memory_ends_are_refused(
    variable: Optional[str], annotations: dict[str, str], what: str
) -> None:
    env = () if variable is None else (("GPUSHARE_MEMORY", variable),)
    with pytest.raises(RequestError, match=what):
        read_own(*env, annotations=annotations)


def test_scoped_memory_annotation_overrides_all_unscoped_ones() -> None:
    pod = {KEY: "train", REQUEST: "1Gi", LIMIT: "2Gi", "gpushare.io/memory": "1Gi..2Gi"}
    devices = ("GPUSHARE_DEVICES", "any")
    assert memory(read_own(devices, annotations={**pod, "train.gpushare.io/memory": "4Gi"})) == "4Gi"
    assert memory(read_own(devices, annotations={**pod, f"train.{LIMIT}": "8Gi"})) == "8Gi"
    assert memory(read_own(devices, annotations=pod)) == "1Gi..2Gi"


words = st.sampled_from(["all", "none", "void", "any", "any:2", "0", "1", UUIDS[0], "MIG-x", "0:1", "", " ", "banana"])
texts = st.lists(words | st.text(max_size=6), max_size=4).map(",".join)


@given(texts)
def test_arbitrary_device_text_is_parsed_or_refused(text: str) -> None:
    for any_allowed in (True, False):
        try:
            found = dialects.parse_devices("N", text, HOST, any_allowed)
        except (RequestError, DeviceError) as error:
            assert str(error).isprintable()
            continue
        tokens = [token.strip() for token in text.split(",")]
        if found is None:
            assert "void" in tokens or not text.strip()
        elif found.kind == "list":
            uuids = [one.uuid for name in found.names for one in dialects.find_devices("N", text, name, HOST)]
            assert uuids and len(set(uuids)) == len(uuids)
        elif found.kind == "all":
            assert "all" in tokens
        elif found.kind == "none":
            assert tokens == ["none"]


@given(st.dictionaries(st.sampled_from(list(gpushare_env.ROWS)), texts, min_size=1))
def test_arbitrary_own_values_are_parsed_or_refused(env: dict[str, str]) -> None:
    """A memory limit that was requested is also in the result."""
    try:
        found = read_own(*env.items())
    except (RequestError, DeviceError):
        return
    assert found is not None
    assert bool(found.memory) == (constants.ENV_MEMORY in env)
    assert bool(found.compute) == (constants.ENV_COMPUTE in env)


def test_renamed_injected_device_is_recognized() -> None:
    """`--device /dev/nvidia1:/dev/gpu`: the device numbers decide, not the name."""
    devices = [
        {"path": "/dev/gpu", "type": "c", "major": 195, "minor": 1},
        {"path": "/dev/b", "type": "b", "major": 195, "minor": 0},
    ]
    control = [{"path": "/dev/ctl", "type": "c", "major": 195, "minor": minor} for minor in (254, 255)]
    assert bundle(linux={"devices": [*devices, *control]}).minors == (1,)


@pytest.mark.parametrize(
    "path", ["/dev//nvidia1", "//dev/nvidia1", "dev/nvidia1", "/dev/x/../nvidia1/", "/dev/nvidia1"]
)
def test_injected_device_in_any_spelling_is_found_and_removed(path: str) -> None:
    node, mount = {"path": path, "type": "c", "major": 1, "minor": 3}, {"destination": path, "source": "/d/nvidia1"}
    assert bundle(linux={"devices": [node]}).minors == (1,) == bundle(mounts=[mount]).minors
    for source in ("/var/lib/volumes/0a1b/_data", "tmpfs", "", None, 1):  # VOLUME of an image
        assert bundle(mounts=[{**mount, "source": source}]).minors == ()
    assert nvidia.is_device(node) and nvidia.is_node_mount(mount)
    assert nvidia.is_driver_mount({"destination": "/usr/lib/libcuda.so.1/"})


@pytest.mark.parametrize("capabilities, found", [(["CAP_SYS_ADMIN"], ()), (["CAP_MKNOD"], (0,))])
def test_rule_for_all_devices_without_sys_admin_is_not_privileged(
    capabilities: list[str], found: tuple[int, ...]
) -> None:
    """Otherwise `--device-cgroup-rule 'a *:* rwm' --device /dev/nvidia0` would give a GPU without a lease."""
    devices = [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}]
    linux = {"devices": devices, "resources": {"devices": [{"allow": True, "access": "rwm"}]}}
    assert bundle(linux=linux, process={"capabilities": {"bounding": capabilities}}).minors == found
