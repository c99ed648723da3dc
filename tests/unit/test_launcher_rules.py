"""Device rules that the launcher passes to Python: rules that could open a GPU, but no engine's defaults."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from gpushare.engines import basespec
from gpushare.request.dialects import cdi_devices

from tests.support.launcher import LOW_LEVEL_RAN, PYTHON_RAN, Installed, install


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(tmp_path_factory.mktemp("installed"))


def create(installed: Installed, config: bytes) -> int:
    """The exit code of `create` for a container with this config.json."""
    installed.bundle(config)
    return installed.runtime("create", "c", cwd=installed.directory / "bundle")[0]


def with_rules(*rules: bytes) -> bytes:
    return b'{"linux": {"resources": {"devices": [%s]}}}' % b", ".join(rules)


# As engines and runtimes write them: never for NVIDIA's devices
DEFAULT_RULES = (
    b'{"allow": false, "access": "rwm"}',
    b'{"allow":true,"type":"c","major":10,"minor":229,"access":"rwm"}',
    b'{"allow":true,"type":"c","major":194,"access":"rwm"}',
    b'{"allow": true, "type": "c", "major": -1, "minor": -1, "access": "m"}',
    b'{"allow": true, "type": "b", "major": -1, "minor": -1, "access": "m"}',
    b'{"allow": true, "type": "b", "major": 259, "access": "rwm"}',
    b'{ "access" : "m" , "allow" : true ,\n\t"type" : "c" }',
    b'{"allow":false,"type":"c","major":195,"access":"rwm"}'.replace(b"195", b"510"),
)
REACHING_RULES = (
    b'{"allow": true, "access": "rwm"}',
    b'{"allow":true,"type":"a","access":"rwm"}',
    b'{"allow":true,"type":"c","major":510,"minor":0,"access":"r"}',
    b'{"allow":true,"type":"c","major":-1,"access":"rwm"}',
    b'{"type":"c","access":"wm","allow":true}',
    b'{"allow":true,"type":"c","access":"mr"}',
    b'{"type":"c","major":null,"access":"rw","allow":true}',
    b'{"allow":true,"type":"c","major":1950,"access":"rwm"}',
    b'{"allow":true,"type":"c","major":4294967491,"access":"rwm"}',
    b'{"allow":true,"type":"C","major":10,"access":"rwm"}',
    b'{"allow":true,"type":"c","major":510,"access":"m "}',
    b'{"allow":true,"type":"c","major":1e1,"access":"rwm"}',
    b'{"allow":true,"type":"c","major":-1}',
    b'{"allow":false,"allow":true,"type":"c","access":"rwm"}',
    b'{"allow":true,"type":"b","access":"m","type":"c","access":"rwm"}',
)  # fmt: skip
# Unusual rules: Python checks them and accepts them
ODD_RULES = (
    b'{"allow":true,"type":"c","major":10,"access":"rwm","x":{"y":1}}',
    b'{"x":{},"allow":true,"type":"c","major":10,"access":"rwm"}',
    b'{"allow":true,"type":"c","major":10,"access":"rwm","note":"n"}',
)


@pytest.mark.parametrize("rule", [*DEFAULT_RULES, *REACHING_RULES, *ODD_RULES], ids=bytes.decode)
def test_rule_that_could_reach_gpu_starts_python(installed: Installed, rule: bytes) -> None:
    for text in (with_rules(rule), with_rules(DEFAULT_RULES[0], rule, DEFAULT_RULES[1])):
        assert create(installed, text) == (LOW_LEVEL_RAN if rule in DEFAULT_RULES else PYTHON_RAN)
        assert cdi_devices.rules_reach(json.loads(text)) == (rule in REACHING_RULES)


def test_default_rules_do_not_start_python(installed: Installed, tmp_path: Path) -> None:
    """The tests of each engine check the defaults of docker, podman and containerd."""
    subprocess.run(["runc", "spec"], cwd=tmp_path, check=True)
    assert create(installed, (tmp_path / "config.json").read_bytes()) == LOW_LEVEL_RAN
    assert create(installed, json.dumps(basespec.default()).encode()) == LOW_LEVEL_RAN
