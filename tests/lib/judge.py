"""What a container really took, in the simulated device's own books."""

from __future__ import annotations

from pathlib import Path

from tests.sim.ledger import Group, Ledger


def taken(driver_root: Path, pid_namespace: int, minor: int = 0) -> Group:
    """Bytes now and at most of all processes of one pid namespace; zeros when it never used the device."""
    with Ledger(str(driver_root / "dev" / f"nvidia{minor}")) as ledger:
        found = [group for group in ledger.groups() if group.pidns == pid_namespace]
    return found[0] if found else Group(pid_namespace, 0, 0, 0, 0, 0, 0)


def peak_bytes(driver_root: Path, pid_namespace: int) -> int:
    """The most that the container ever held on the first device, contexts included."""
    return taken(driver_root, pid_namespace).peak_bytes
