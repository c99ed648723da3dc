"""node.json: compiled once, read fast, and ignored after an input changed or another user could write it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpushare.cli import main
from gpushare.config import node
from gpushare.core import constants
from gpushare.core.errors import ConfigError, DeviceError
from gpushare.core.model import Node

UUID = "GPU-00000000-0000-0000-0000-000000000000"


class Host:
    """A driver root without libraries, a configuration file, a state directory."""

    def __init__(self, directory: Path) -> None:
        self.root, self.config, self.state = directory / "root", directory / "config.yaml", directory / "state"
        (self.root / "sys/module/nvidia").mkdir(parents=True)
        self.set_version("535.261.03")
        self.add_gpu("0000:01:00.0")
        self.write_config("memory_overcommit: 2.0")

    def set_version(self, text: str) -> None:
        (self.root / "sys/module/nvidia/version").write_text(text + "\n")

    def add_gpu(self, bus: str) -> None:
        directory = self.root / "proc/driver/nvidia/gpus" / bus
        directory.mkdir(parents=True)
        (directory / "information").write_text(f"Model: X\nGPU UUID: {UUID}\nDevice Minor: 0\n")

    def write_config(self, line: str) -> None:
        self.config.write_text(f"version: 1\ndriver: {{root: {self.root}}}\n{line}\n")

    def load(self) -> Node:
        return node.load_node(str(self.config), str(self.state))

    def fresh(self) -> Any:
        return node.read_node(str(self.config), str(self.state))

    @property
    def file(self) -> Path:
        return self.state / "node.json"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_waiting_start_reads_file_of_previous_start(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that waited for the lock reads the file that the previous start wrote."""
    host.load()
    written = host.file.read_bytes()
    host.file.unlink()
    # Another start compiles while this one waits.
    monkeypatch.setattr(node.filelock, "take", lambda fd, path: host.file.write_bytes(written))
    monkeypatch.setattr(node, "compile_node", lambda *_: pytest.fail("compiled a second time"))
    assert host.load() == host.fresh()


def test_node_is_compiled_once_and_then_read(host: Host) -> None:
    assert host.fresh() is None
    first = host.load()
    assert first.config.memory_overcommit == 2.0
    assert first.config.state_dir == str(host.state)
    assert first.inventory.devices[0].uuid == UUID
    assert host.fresh() == first
    assert (host.file.stat().st_mode & 0o777) == 0o644
    assert os.listdir(host.state) == ["node.json"]


@pytest.mark.parametrize("mask", [0o000, 0o077, 0o777])
def test_umask_of_a_command_of_root_does_not_matter(host: Host, mask: int) -> None:
    """`gpushare refresh` has the umask of its user. All users may read the inventory, and only root may write it."""
    host.state.mkdir()
    before = os.umask(mask)
    try:
        host.load()
    finally:
        os.umask(before)
    assert [oct((host.state / name).stat().st_mode) for name in ("node.json", "launcher")] == ["0o100644"] * 2


def test_all_values_survive_round_trip(host: Host) -> None:
    host.write_config(
        "policy: {allowed_devices: ['0'], max_memory: 4Gi, unlimited: deny}\n"
        "sharing: {split_count: 3, overrides: [{model: A100, devices: ['0', '1'], split_count: 7}]}"
    )
    assert [rule.devices for rule in host.load().config.sharing] == [("0", "1"), ()]
    assert node.node_of(json.loads(json.dumps(node.node_json(host.load(), [], [])))) == host.load()


def test_last_node_of_the_previous_schema_is_known(host: Host) -> None:
    """A pod that is upgraded before its node's installer cannot compile. The file of schema 7 has shorter records."""
    host.write_config("sharing: {split_count: 3}")
    first, value = host.load(), json.loads(host.file.read_text())
    value["config"]["sharing"] = [rule[:5] for rule in value["config"]["sharing"]]
    for fields, names in (
        (value["config"], ("driver_libraries", "driver_dev")),
        (value["inventory"], ("libraries", "dev")),
    ):
        for name in names:
            del fields[name]
    value["schema"] = 7
    host.file.write_text(json.dumps(value))
    probe = ["--state", str(host.state), "dra", "--check"]
    assert main(probe) == 0
    known = node.last(str(host.state))
    assert known is not None and known.config.sharing == first.config.sharing
    assert known.inventory.devices == first.inventory.devices and host.fresh() is None
    host.file.write_text(json.dumps({**value, "schema": 6}))
    assert node.last(str(host.state)) is None and main(probe) == 1


def replaced(host: Host) -> None:
    """Same size and time, another inode, as after an editor's rename."""
    status = host.config.stat()
    host.config.rename(host.config.with_suffix(".old"))
    host.write_config("memory_overcommit: 3.0")
    os.utime(host.config, ns=(status.st_atime_ns, status.st_mtime_ns))


def touched(host: Host) -> None:
    """Changed in place, same size."""
    host.write_config("memory_overcommit: 3.0")
    os.utime(host.config, ns=(1, 1))


STALE: list[Callable[[Host], Any]] = [
    replaced,
    touched,
    lambda host: host.config.unlink(),
    lambda host: host.set_version("550.54.15"),
    lambda host: host.add_gpu("0000:02:00.0"),
    lambda host: (host.root / "sys/module/nvidia/version").unlink(),
    lambda host: host.file.write_text(host.file.read_text().replace(f'"schema": {node.SCHEMA}', '"schema": 0')),
    lambda host: host.file.write_text("{"),
    lambda host: host.file.write_text("[]"),
    lambda host: host.file.write_text("[" * 100_000),
    lambda host: host.file.write_text(host.file.read_text().replace('"memory_overcommit"', '"other"')),
    lambda host: host.file.write_text(host.file.read_text().replace('"uuid"', '"other"')),
    lambda host: host.file.chmod(0o666),
    lambda host: host.file.chmod(0o664),
    lambda host: host.file.chmod(0o646),
    lambda host: os.chown(host.file, 1000, 0),
    lambda host: os.utime(host.file, ns=(1, 1)),  # without memory sizes, because NVML did not answer
    lambda host: os.utime(host.file, (1 << 32, 1 << 32)),  # the same, and the clock was set back since
    lambda host: (host.file.rename(host.state / "x"), host.file.symlink_to("x")),
    lambda host: (host.file.unlink(), os.mkfifo(host.file)),
    lambda host: os.truncate(host.file, node.MAX_NODE_BYTES + 1),
]


@pytest.mark.parametrize("change", STALE, ids=range(len(STALE)))
def test_changed_input_makes_node_stale(host: Host, change: Callable[[Host], Any]) -> None:
    host.load()
    assert host.fresh() is not None
    change(host)
    assert host.fresh() is None


def test_changed_configuration_takes_effect(host: Host) -> None:
    host.load()
    replaced(host)
    assert host.load().config.memory_overcommit == 3.0
    assert host.fresh().config.memory_overcommit == 3.0


def test_upgrade_takes_effect(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newer programs and their shim are in another directory; the configuration file is unchanged."""
    host.load()
    assert host.fresh() is not None
    monkeypatch.setattr(constants, "SHIM_DIR", "/opt/next/shim")
    assert host.fresh() is None


def test_new_configuration_file_takes_effect(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "CONFIG_PATH", str(host.config))
    text = host.config.read_text()
    host.load()
    host.config.unlink()
    with pytest.raises(DeviceError, match="no NVIDIA driver is loaded"):  # the default root has none
        host.load()
    host.config.write_text(text)
    assert host.load().config.memory_overcommit == 2.0


def test_other_configuration_file_is_other_node(host: Host, tmp_path: Path) -> None:
    host.load()
    other = tmp_path / "other.yaml"
    other.write_text(host.config.read_text())
    assert node.read_node(str(other), str(host.state)) is None


def test_compile_without_write_leaves_no_file(host: Host) -> None:
    assert node.compile_node(str(host.config), str(host.state), write=False).inventory.devices
    assert not host.state.exists()


def test_unwritable_state_directory_is_no_error(host: Host) -> None:
    host.state.write_text("a file")
    assert host.load().inventory.devices


def test_errors_are_not_cached(host: Host) -> None:
    host.write_config("banana: 1")
    with pytest.raises(ConfigError, match="banana"):
        host.load()
    assert not host.file.exists()


def test_fresh_node_loads_no_module_missing_in_snapshot(host: Host) -> None:
    host.load()
    program = f"""
import sys
before = set(sys.modules)
sys.path.insert(0, {str(Path(node.__file__).parents[2])!r})
from gpushare.gpu import driverfiles
from gpushare.config import node
from gpushare.request import oci, request
from gpushare.allocation import placement
from gpushare.inject import plan
assert node.load_node({str(host.config)!r}, {str(host.state)!r}).inventory.devices
print(*(set(sys.modules) - before))
"""
    command = [sys.executable, "-ISs", "-c", program]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert not {"gpushare.config.config", "gpushare.programs.explain", "click", "jsonschema", "pynvml", "yaml"} & set(
        output.split()
    )
