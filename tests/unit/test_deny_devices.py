"""The device numbers that a container with a rule for all devices is denied."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from gpushare.core.errors import PolicyError
from gpushare.core.model import Config, Policy
from gpushare.inject import spec_record
from gpushare.request import deny_devices
from gpushare.request.dialects import cdi_devices

from tests.unit.pure import bundle

DEVICES = (
    "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n234 nvidia-caps\n510 nvidia-uvm\n"
    "\nBlock devices:\n  9 nvidiablk\n"
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for directory in ("proc", "dev/nvidia-caps"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "proc/devices").write_text(DEVICES)
    for name, major, minor in (
        ("nvidia0", 195, 0), ("nvidia100", 195, 100), ("nvidia-uvm", 510, 0), ("nvidia-uvm-tools", 510, 1),
        ("nvidia-caps/nvidia-cap1", 234, 1), ("nvidia-caps/nvidia-cap2", 234, 2), ("nvidia-fs0", 240, 0), ("mem", 1, 1),
    ):  # fmt: skip
        os.mknod(tmp_path / "dev" / name, 0o666 | stat.S_IFCHR, os.makedev(major, minor))
    return tmp_path


def test_ungranted_major_is_denied_as_a_whole(root: Path) -> None:
    assert deny_devices.numbers(str(root), ()) == [(195, -1), (234, -1), (240, 0), (510, -1)]


def test_partly_granted_major_is_denied_by_minor(root: Path) -> None:
    granted = [(195, 0), (195, 255), (510, 0), (234, 2)]
    denied = deny_devices.numbers(str(root), granted)
    assert not set(denied) & set(granted)
    assert {(195, 1), (195, 63), (195, 100), (195, 254), (510, 1), (234, 1), (240, 0)} <= set(denied)
    # no rule for a major with a granted minor: cgroup v1 could not allow that minor again
    assert all(minor >= 0 for _, minor in denied)
    assert not any(major == 1 for major, _ in denied)


def test_host_without_driver_denies_nothing(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/devices").write_text("Character devices:\n  1 mem\n")
    assert not deny_devices.is_there(str(tmp_path))


def test_wide_rule_is_narrowed_to_other_majors() -> None:
    def of(**rule: object) -> object:
        return deny_devices.narrower({"allow": True, "type": "c", "access": "rwm", **rule}, {195, 510})

    for every in ({}, {"major": None}, {"major": -1, "minor": -1}, {"minor": 7}):
        made = of(**every)
        assert isinstance(made, list)
        assert {rule["major"] for rule in made} == set(range(512)) - {195, 510}
        assert all(
            {**rule, "major": 0} == {"allow": True, "type": "c", "access": "rwm", **every, "major": 0} for rule in made
        )
    assert of(major=195) == of(major=195, minor=3) == of(major=510, minor=0) == []
    assert of(major=10) is None
    assert of(allow=False) is of(type="b") is of(type="a") is deny_devices.narrower("rule", {195}) is None


def test_major_rule_has_no_minor() -> None:
    assert "minor" not in spec_record.denial(195, -1)
    assert spec_record.denial(195, 0)["minor"] == 0


def test_engine_default_rules_do_not_reach_nvidia() -> None:
    def of(**rule: object) -> bool:
        return cdi_devices.reaches({"allow": True, "type": "c", "major": 10, "minor": 229, "access": "rwm", **rule})

    assert not of() and not of(major=194) and not of(major=0)
    assert not of(type="b", major=-1) and not of(major=-1, access="m") and not of(allow=False, major=195)
    assert of(major=195) and of(major=195, access="r") and of(major=195, access="wm") and of(major=510)
    assert of(major=-1) and of(major=None) and of(major="195") and of(major=True) and of(major=195.0)
    assert of(type="a") and of(type=None) and of(type="") and of(type="u") and of(type="C")
    assert of(major=-1, access="") and of(major=-1, access=None) and of(major=1 << 32 | 195)
    assert cdi_devices.reaches({"allow": True, "major": 1, "minor": 3})  # without a type, a rule covers all types
    assert not cdi_devices.reaches("rule") and not cdi_devices.reaches({"type": "c", "major": 195})


def test_rule_with_truncatable_number_is_dropped() -> None:
    for major in (1 << 32 | 195, 4096, -2, 195 - (1 << 32), True, 195.0, "195"):
        assert deny_devices.narrower({"allow": True, "type": "c", "major": major, "access": "rwm"}, {195}) == []


@pytest.mark.parametrize("rule", [{"major": 195}, {"major": 510, "minor": 0}, {}, {"type": "a"}], ids=str)
def test_rules_are_narrowed_with_and_without_privileges(root: Path, rule: dict[str, object]) -> None:
    rules = [{"allow": False, "access": "rwm"}, {"allow": True, "type": "c", "access": "rwm", **rule}]
    admin = {"process": {"capabilities": {"bounding": ["CAP_SYS_ADMIN"]}}}
    plain = bundle(linux={"resources": {"devices": rules}})
    privileged = bundle(linux={"resources": {"devices": rules}}, **admin)

    def config(*entries: str) -> Config:
        return Config(driver_root=str(root), policy=Policy(privileged_containers=entries))

    for one in (plain, privileged):
        assert deny_devices.may_apply(one) and deny_devices.applies(one, config())
        assert not deny_devices.applies(one, config(one.id))
    assert deny_devices.applies(plain, config("*")) and not deny_devices.applies(privileged, config("*"))
    with pytest.raises(PolicyError, match="could open any GPU"):
        deny_devices.refuse(plain, config("*"))


def test_rule_for_other_vendor_is_kept(root: Path) -> None:
    one = bundle(linux={"resources": {"devices": [{"allow": True, "type": "c", "major": 226, "access": "rwm"}]}})
    config = Config(driver_root=str(root), policy=Policy())
    assert deny_devices.may_apply(one) and not deny_devices.applies(one, config)
    deny_devices.refuse(one, config)


def test_hook_accepts_privileged_container(root: Path) -> None:
    admin = {"process": {"capabilities": {"bounding": ["CAP_SYS_ADMIN"]}}}
    one = bundle(linux={"resources": {"devices": [{"allow": True, "access": "rwm"}]}}, **admin)
    deny_devices.refuse(one, Config(driver_root=str(root), policy=Policy(privileged_containers=())))
