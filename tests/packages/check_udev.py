"""The udev rule in udev's own tools: its actions for a module and a PCI device of this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.host import TREE
from tests.support.rootfs import mount_tmpfs, unmount_below

from . import fetched

RULE = (TREE / "packaging/60-gpushare.rules").read_text()
RULES = Path("/usr/lib/udev")
PLACES = (RULES, Path("/run/udev"))  # the directories that udev reads and writes


@pytest.fixture
def folder() -> Iterator[Path]:
    """udev's empty rules directory, of this run alone."""
    made = [place for place in PLACES if not place.exists()]
    try:
        for place in PLACES:
            place.mkdir(exist_ok=True)
            mount_tmpfs(place, "size=1m")
        (RULES / "rules.d").mkdir()
        yield RULES / "rules.d"
    finally:
        for place in PLACES:
            unmount_below(place)
        for place in made:
            place.rmdir()


def would(action: str, device: Path) -> str:
    code, said = fetched.call(fetched.program("udev", "bin/udevadm"), "test", f"--action={action}", device)
    assert code == 0 and "Reading rules file" in said, said
    return said.partition("Reading rules file")[2]


def test_rule_matches_the_driver_s_module_and_devices(folder: Path) -> None:
    module = sorted(Path("/sys/module").iterdir())[0]
    device = sorted(Path("/sys/bus/pci/devices").iterdir())[0]
    seen = {name: (device / name).read_text().strip() for name in ("vendor", "class")}
    service = "gpushare-refresh.service"

    (folder / "60-gpushare.rules").write_text(RULE)  # unchanged: this machine's devices are not NVIDIA's
    for action, place in ("add", module), ("bind", device):
        said = would(action, place)
        assert service not in said and "60-gpushare.rules:" not in said, said

    ours = RULE.replace('KERNEL=="nvidia"', f'KERNEL=="{module.name}"')
    ours = ours.replace("0x10de", seen["vendor"]).replace("0x03*", seen["class"][:4] + "*")
    assert ours.count(module.name) and ours.count(seen["vendor"])
    (folder / "60-gpushare.rules").write_text(ours)
    assert service not in would("remove", module)
    assert f"SYSTEMD_WANTS={service}\n" in would("add", module)
    for action in ("bind", "unbind"):
        assert re.search(rf"^run: '/bin/systemctl --no-block start {service}'$", would(action, device), re.MULTILINE)
    assert service not in would("change", device)
