"""The configuration file: one table of keys, and errors that name file, line, key and value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from gpushare.config import config, keys, sharing
from gpushare.core import constants
from gpushare.core.errors import ConfigError
from gpushare.core.model import Config, Policy, Quota, SharingRule


def test_sample_equals_defaults() -> None:
    assert config.parse_config(config.sample(), "sample") == Config()
    assert config.parse_config("version: 1", "minimal") == Config()


def test_missing_default_file_means_defaults_but_named_file_must_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="none.yaml: no such file; "):
        config.load_config(path)
    monkeypatch.setattr(constants, "CONFIG_PATH", path)
    assert config.load_config(path) == Config()


def objects(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        schema,
        *(found for item in schema["properties"].values() if "properties" in item for found in objects(item)),
    ]


def test_schema_is_closed_and_documented() -> None:
    schema = config.schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for item in objects(schema):
        assert item["additionalProperties"] is False
        for key, value in item["properties"].items():
            assert value["description"].endswith("."), key
            assert "default" in value, key
            assert key == key.lower() or "NVIDIA's device plugin" in str(value)  # NVIDIA's spelling is kept


EVERYTHING = """
version: 1
driver: {root: /run/nvidia/driver/, libraries: /opt/nvidia/, dev: /run/./dev}
kubernetes: {kubelet_dir: /data/kubelet/, claims_dir: /run/cdi}
shim_dir: /x/../shim
runtime: {path: /opt/runc}
memory_overcommit: 1.5
oversubscription: {host_memory: " 64Gi", scaling: 1.5, turn_ms: 500, turn_memory: 4Gi}
compute_overcommit: 2
compute: {slice_us: 1500, switch_us: 80, sharing: turns, round_ms: 10}
placement: {strategy: spread}
sharing:
  split_count: 10
  memory_scaling: 0.5
  cores_scaling: 2
  overrides: [{model: A100|H100*, split_count: 7}, {devices: ["0:1", GPU-x], split_count: 0, cores_scaling: 1.5}]
policy:
  accept:
    {env: never, annotations: privileged, volume_mounts: never, cdi: privileged, switches: privileged, widening: never}
  dialects: {enabled: [hami, mps], disabled: [mps]}
  annotations: scoped
  nvidia_visible_devices: with_limit
  amounts: container
  unlimited_process: stop
  suspend: {idle: 15m, least: 1h}
  privileged_containers: [kube-system/agent]
  over_maximum: clamp
  require_limits: true
  max_memory: 50%
  max_compute: 40%
  allowed_devices: ["0", GPU-x]
  allowed_backends: [mps]
  unlimited: deny
  lending: movable
  quotas: [{user: root, memory: 16Gi}, {namespace: team-*, compute: 250%, containers: 3}]
reconcile: {action: stop}
usage: {journal: /data/usage.log, journal_size: " 8Mi"}
log: {decisions: /var/log/gpushare.log}
"""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ('"off"', "off"),
        ("false", "off"),
        ("on", "suspend"),
        ('"on"', "suspend"),
        ("evict", "evict"),
    ],
)
def test_lending_is_switched_off_and_on(text: str, value: str) -> None:
    """YAML reads off as false, and on as true. On means suspend, which ends a borrower only if the driver cannot."""
    assert config.parse_config(f"version: 1\npolicy: {{lending: {text}}}\n", "f").policy.lending == value


@pytest.mark.parametrize("text", ["yes please", "movables", "0", "1"])
def test_wrong_lending_is_refused(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"f:2: policy.lending: .* is wrong.*xpected one of off, on, movable, evict, suspend"
    ):
        config.parse_config(f"version: 1\npolicy: {{lending: {text}}}\n", "f")


@pytest.mark.parametrize("text", ["15 m", "-1s", "1w", '""'])
def test_wrong_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"f:2: policy.suspend.idle: .* is wrong.*such as 15m"):
        config.parse_config(f"version: 1\npolicy: {{suspend: {{idle: {text}}}}}\n", "f")


def test_every_key_sets_its_field() -> None:
    policy = Policy("never", "privileged", True, "50%", 40, ("0", "GPU-x"), ("mps",), "deny", "never")
    policy = policy._replace(accept_cdi="privileged", annotations="scoped", nvidia_visible_devices="with_limit")
    policy = policy._replace(privileged_containers=("kube-system/agent",), over_maximum="clamp")
    policy = policy._replace(accept_switches="privileged", enabled_dialects=("hami", "mps"), accept_widening="never")
    policy = policy._replace(disabled_dialects=("mps",), lending="movable", amounts="container")
    policy = policy._replace(unlimited_process="stop", suspend_idle_s=900, suspend_least_s=3600)
    policy = policy._replace(quotas=(Quota("0", "", "16Gi"), Quota("", "team-*", "", 250, 3)))
    path = Config().state_dir
    log, runtime = "/var/log/gpushare.log", "/opt/runc"
    sharing = (
        SharingRule(7, 1.0, 1.0, "A100|H100*"),
        SharingRule(0, 1.0, 1.5, "", ("0:1", "GPU-x")),
        SharingRule(10, 0.5, 2.0),
    )
    expected = Config("/run/nvidia/driver", path, "/shim", 1.5, "spread", policy, log, runtime, 2.0, 1500, 80, sharing)
    expected = expected._replace(usage_journal="/data/usage.log", usage_journal_size="8Mi")
    expected = expected._replace(host_memory="64Gi", oversubscribe_scaling=1.5, turn_ms=500)
    expected = expected._replace(turn_memory="4Gi")
    expected = expected._replace(reconcile="stop", compute_sharing="turns", round_ms=10)
    expected = expected._replace(driver_libraries="/opt/nvidia", driver_dev="/run/dev")
    expected = expected._replace(kubelet_dir="/data/kubelet", claims_dir="/run/cdi")
    assert config.parse_config(EVERYTHING, "f") == expected
    untouched = [
        name
        for one, default in ((expected, Config()), (expected.policy, Policy()))
        for name, value, other in zip(one._fields, one, default)
        if value == other
    ]
    assert untouched == ["state_dir"]  # --state sets it; every other key has an effect


@pytest.mark.parametrize("text", ["version: 1", EVERYTHING])
def test_effective_values_parse_to_same_config(text: str) -> None:
    loaded = config.parse_config(text, "f")
    values = keys.effective(loaded)
    assert list(values) == [key.path for key in keys.KEYS]
    assert config.parse_config(config.rendered(values, ()), "f") == loaded


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f.yaml: the file: "),
        ("[]", 'f.yaml: the file: "[]" is wrong; expected indented keys, one per line'),
        ("driver: {}", "f.yaml: the file: no version"),
        ("version: 2", 'f.yaml:1: version: "2" is wrong; expected one of 1, v1'),
        ("version: 1\nplacment: x", "f.yaml:2: placment: unknown key; did you mean placement?"),
        ("version: 1\nzebra: x", "f.yaml:2: zebra: unknown key; known here: version, driver, "),
        ("version: 1\npolicy:\n  unlimted: deny", "f.yaml:3: policy.unlimted: unknown key; did you mean policy.unl"),
        ("version: 1\nmax_memory: 4Gi", "f.yaml:2: max_memory: unknown key; did you mean policy.max_memory?"),
        ("version: 1\nsplit-count: 4", "f.yaml:2: split-count: unknown key; did you mean sharing.split_count?"),
        ("version: 1\npolicy: {Unlimited: deny}", "did you mean policy.unlimited?"),
        ("version: 1\npolicy: {unlimited: Exclusive}", '"Exclusive" is wrong; did you mean exclusive? Expected one of'),
        ("version: 1\nlog: {decisions: journald}", '"journald" is wrong; expected syslog, none, or an absolute path'),
        ("version: 1\nmemory_overcommit: 99", '"99" is wrong; expected at most 16'),
        ("version: 1\npolicy: {allowed_backends: []}", '"[]" is wrong; expected at least one'),
        ("version: 1\nplacement: {strategy: random}", "is wrong; expected one of binpack, spread"),
        ("version: 1\nshim_dir: relative", "f.yaml:2: shim_dir: "),
        ("version: 1\nmemory_overcommit: 0", "f.yaml:2: memory_overcommit: "),
        ("version: 1\noversubscription: {scaling: .nan}", 'oversubscription.scaling: "NaN" is wrong'),
        ("version: 1\noversubscription: {turn_memory: ''}", 'oversubscription.turn_memory: ""'),
        ("version: 1\noversubscription:\n  host_memory: 0", "f.yaml:3: oversubscription.host_memory: "),
        ("version: 1\noversubscription:\n  host_memory: 101%", "f.yaml:3: oversubscription.host_memory: "),
        ("version: 1\ncompute_overcommit: 17", "f.yaml:2: compute_overcommit: "),
        ("version: 1\nmemory_overcommit: '1'", "expected a number"),
        ("version: 1\nmemory_overcommit: .nan", 'f.yaml:2: memory_overcommit: "NaN" is wrong; expected a number'),
        ("version: 1\nshim_dir: 2024-01-01", "f.yaml:2: shim_dir: "),
        ("version: !!binary aGk=", "f.yaml:1: version: "),
        ("version: 1\npolicy: {allowed_devices: !!set {a}}", "f.yaml:2: policy.allowed_devices: "),
        ("version: 1\npolicy:\n  max_memory: banana", 'f.yaml:3: policy.max_memory: "banana": not an amount'),
        ("version: 1\npolicy:\n  max_memory: 4", "expected text, in quotes"),
        ("version: 1\npolicy: {allowed_devices: &a [*a]}", 'policy.allowed_devices[0]: "..." is wrong; '),
        ("version: 1\npolicy:\n  max_compute: 200%", 'f.yaml:3: policy.max_compute: "200%": out of range'),
        ("version: 1\npolicy:\n  allowed_devices: [0]", "f.yaml:3: policy.allowed_devices[0]: "),
        ("version: 1\npolicy:\n  allowed_devices: ['']", "is wrong; expected an index such as 0 or a whole uuid"),
        ("version: 1\npolicy:\n  allowed_devices: [all]", 'f.yaml:3: policy.allowed_devices[0]: "all" is wrong'),
        ("version: 1\npolicy:\n  allowed_devices: ['0 ']", "expected an index such as 0 or a whole uuid"),
        ("version: 1\nmemory_overcommit: " + "9" * 5000, "f.yaml:"),  # newer Pythons cannot read it
        ("version: 1\nshim_dir: 2024-13-01", "f.yaml: not valid YAML: month must be"),
        ("version: 1\0", "f.yaml: not valid YAML: special characters are not allowed"),
        ("version: 1\npolicy:", 'f.yaml:2: policy: "null" is wrong; expected indented keys, one per line'),
        ("version: 1\npolicy: {require_limits: 1}", 'policy.require_limits: "1" is wrong; expected true or false'),
        (
            "version: 1\npolicy: {allowed_devices: '0'}",
            'policy.allowed_devices: "0" is wrong; expected a list such as [a, b]',
        ),
        ('version: 1\ncompute: {round_ms: "20"}', '"20" is wrong; expected a whole number, without quotes'),
        (
            "version: 1\ncompute.sharing: turns",
            "f.yaml:2: compute.sharing: unknown key; write sharing in a line of its own, indented below compute:",
        ),
        ("version: 1\nsharing: {split_count: 1.5}", 'sharing.split_count: "1.5" is wrong; expected a whole number'),
        (
            "version: 1\n\tx: 1",
            "f.yaml:2: not valid YAML: found character '\\t' that cannot start any token; write it as key: value",
        ),
        ("version: 1\nversion: 1", "f.yaml:2: version: given twice (first in line 1)"),
        ("version: 1\nlog: {decisions: none, decisions: none}", "f.yaml:2: log.decisions: given twice"),
        ("version: 1\n  x: [", "f.yaml:2: not valid YAML"),
        ("version: 1\n? [a, b]\n: c", "f.yaml"),
        ("version: !!python/object:os.system {}", "f.yaml:1: not valid YAML"),
        ('version: 1\nshim_dir: "/a\\0b"', "f.yaml:2: shim_dir: "),
        ("version: 1\nstate_dir: /s", "f.yaml:2: state_dir: unknown key"),
        ("- " * 5000, "f.yaml: "),
        ("version: 1\na: &a {b: *a}", "f.yaml:2: a: unknown key"),
    ],
)
def test_error_names_line_key_and_value(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse_config(text, "f.yaml")
    assert message.replace('\\"', '"') in str(caught.value).replace('\\"', '"')
    assert str(caught.value).isprintable()


def test_every_error_of_a_file_is_listed_by_line() -> None:
    text = """\
version: 2
placment: spread
shim_dir: relative
policy:
  max_memory: banana
  max_compute: 200%
  unlimited: maybe
  unlimited: deny
  allowed_devices: ["0", all, "1", none]
sharing:
  cores_scaling: .nan
  overrides:
  - {split_count: 2}
  - {model: A100,
     split_count: 101}
"""
    with pytest.raises(config.WrongConfig) as caught:
        config.parse_config(text, "f.yaml")
    found = [(problem.line, problem.key) for problem in caught.value.problems]
    assert found == [
        (1, "version"),
        (2, "placment"),
        (3, "shim_dir"),
        (5, "policy.max_memory"),
        (6, "policy.max_compute"),
        (8, "policy.unlimited"),
        (9, "policy.allowed_devices[1]"),
        (9, "policy.allowed_devices[3]"),
        (11, "sharing.cores_scaling"),
        (15, "sharing.overrides[1].split_count"),
    ]
    expected = 'f.yaml:1: version: "2" is wrong; expected one of 1, v1; 9 more errors: `gpushare config check f.yaml`'
    assert str(caught.value) == f"{expected} lists all"


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        config.load_config(str(tmp_path))
    (tmp_path / "a").write_bytes(b"version: \xff")
    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 9\)"):
        config.load_config(str(tmp_path / "a"))
    (tmp_path / "b").write_bytes(b"#" * (config.MAX_CONFIG_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than"):
        config.load_config(str(tmp_path / "b"))


def test_time_slicing_accepts_device_plugin_spelling() -> None:
    """The block from its own documentation."""
    pasted = """
version: 1
sharing:
  timeSlicing:
    renameByDefault: true
    failRequestsGreaterThanOne: true
    resources:
    - name: nvidia.com/gpu
      replicas: 4
"""
    loaded = config.parse_config(pasted, "f")
    assert loaded.sharing == (SharingRule(4, alone=True, resource=".shared"),)
    effective = keys.effective(loaded)
    assert effective["sharing.split_count"] == 4
    assert (
        effective["sharing.timeSlicing.renameByDefault"] and effective["sharing.timeSlicing.failRequestsGreaterThanOne"]
    )
    named = config.parse_config(pasted.replace("replicas: 4", "replicas: 4\n      rename: gpu.part"), "f")
    assert named.sharing == (SharingRule(4, alone=True, resource="gpushare.io/gpu.part"),)
    assert keys.effective(named)["sharing.timeSlicing.resources"] == [
        {"name": "nvidia.com/gpu", "rename": "gpushare.io/gpu.part", "replicas": 4}
    ]
    assert sharing.rules({**keys.effective(named), "sharing.split_count": 0}) == (named.sharing, [])


def test_devices_of_time_slicing_are_overrides() -> None:
    """shared/cases/engines/15, as users of NVIDIA's device plugin ask for. Devices without an entry have the replicas
    for all."""
    text = """
version: 1
sharing:
  timeSlicing:
    resources:
      - {name: nvidia.com/gpu, rename: nvidia.com/gpu.small, replicas: 8, devices: ["0"]}
      - {name: nvidia.com/gpu, rename: nvidia.com/gpu.big, replicas: 2, devices: [1, "2:0", GPU-x]}
"""
    small, big, every_other = (
        SharingRule(replicas, devices=devices, resource="nvidia.com/gpu.small")  # there is one resource
        for replicas, devices in ((8, ("0",)), (2, ("1", "2:0", "GPU-x")), (4, ()))
    )
    assert config.parse_config(text, "f").sharing == (small, big)
    assert config.without_effect(text) == [
        "sharing.timeSlicing.resources[1].rename: no effect; equal shares of all devices are offered as "
        '"nvidia.com/gpu.small"'
    ]
    assert keys.effective(config.parse_config(text, "f"))["sharing.overrides"][0]["devices"] == ["0"]
    every = text + "      - {name: nvidia.com/gpu, replicas: 4}\n"
    assert config.parse_config(every, "f").sharing == (small, big, every_other)
    assert config.parse_config(
        every.replace("sharing:", "sharing:\n  overrides: [{devices: ['0'], split_count: 3}]"), "f"
    )


PLUGIN = """
version: v1
flags:
  migStrategy: none
  nvidiaDriverRoot: /run/nvidia/driver
  plugin: {deviceListStrategy: [envvar]}
resources: {gpus: [{pattern: "*", name: nvidia.com/gpu}]}
sharing:
  timeSlicing:
    failRequestsGreaterThanOne: true
    resources: [{name: nvidia.com/gpu, rename: nvidia.com/gpu.shared, replicas: 4}]
imex: {}
"""


def test_whole_file_of_device_plugin_is_accepted_with_notes() -> None:
    """shared/cases/engines/15."""
    assert config.parse_config(PLUGIN, "f") == Config(
        sharing=(SharingRule(4, alone=True, resource="nvidia.com/gpu.shared"),)
    )
    assert config.without_effect(PLUGIN) == [
        "flags: no effect, only NVIDIA's device plugin uses it",
        "resources: no effect, only NVIDIA's device plugin uses it",
        'flags.nvidiaDriverRoot: no effect; write "/run/nvidia/driver" as driver.root, if it is needed',
    ]
    assert config.without_effect(config.sample()) == config.without_effect(EVERYTHING) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{memory_scaling: 17}", "f.yaml:2: sharing.memory_scaling: "),
        ("{memory_scaling: 0}", "f.yaml:2: sharing.memory_scaling: "),
        ("{memory_scaling: .nan}", 'f.yaml:2: sharing.memory_scaling: "NaN" is wrong'),
        ("{split_count: 101}", "f.yaml:2: sharing.split_count: "),
        ("{split_count: 50, cores_scaling: 0.4}", "0.4 divided by a split_count of 50 is less than 1% of compute"),
        ("{overrides: [{split_count: 2}]}", "f.yaml:2: sharing.overrides[0]: an entry without model and devices"),
        ("{overrides: [{model: '|', split_count: 2}]}", 'f.yaml:2: sharing.overrides[0]: model="|": '),
        ("{overrides: [{model: a}]}", "f.yaml:2: sharing.overrides[0]: no split_count"),
        ("{overrides: [{devices: [all], split_count: 2}]}", "expected an index such as 0 or a whole uuid"),
        ("{overrides: [{model: a, split_count: 2, x: 1}]}", "overrides[0].x: unknown key; known here: model, dev"),
        (
            "{split_count: 2, timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}",
            "f.yaml:2: sharing.split_count: the replicas of timeSlicing set the number of shares too; keep one",
        ),
        ("{timeSlicing: {resources: [{name: nvidia.com/mig-1g.5gb, replicas: 2}]}}", "expected one of nvidia.com/gpu"),
        ("{timeSlicing: {resources: [{name: gpu, replicas: 2}, {name: gpu, replicas: 3}]}}", "gpu is given twice"),
        ("{timeSlicing: {resources: [{name: gpu, replicas: 2, devices: [x]}]}}", "expected all, or a list of indexes"),
        ("{timeSlicing: {resources: [{name: gpu, replicas: 2, devices: 1}]}}", "expected all, or a list of indexes"),
        ("{timeSlicing: {resources: [{name: gpu, replicas: 2, devices: []}]}}", "expected all, or a list of indexes"),
        (
            "{timeSlicing: {resources: [{name: gpu, replicas: 2, devices: [0]}, {name: gpu, replicas: 3, devices: "
            "['0']}]}}",
            "sharing.timeSlicing.resources[1]: device 0 is given twice; keep one",
        ),
        (
            "{timeSlicing: {resources: [{name: nvidia.com/mig-1g.5gb, replicas: 2}]}}",
            "for MIG devices write sharing.overrides",
        ),
        (
            "{mps: {resources: [{name: gpu, replicas: 2}]}}",
            "sharing.mps: unknown key; write its replicas as sharing.sp",
        ),
    ],
)
def test_invalid_equal_shares_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse_config(f"version: 1\nsharing: {text}", "f.yaml")
    assert message in str(caught.value).replace('\\"', '"')


def test_sample_contains_every_key() -> None:
    assert list(config._given(yaml.safe_load(config.sample()))) == [
        key.path for key in keys.KEYS if key.path != "shim_dir"
    ]
    assert "\n# shim_dir: " in config.sample()
