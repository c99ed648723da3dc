"""A host with every backend, and a container that requests one of them (test_backends.py)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpushare.allocation import backends, placement
from gpushare.allocation.backends.base import Site
from gpushare.config import config
from gpushare.core import model
from gpushare.gpu import inventory
from gpushare.state import leases

from simulator import mpscontrol
from simulator.simhost import default_uuid, make_simhost
from tests.support import newerdriver
from tests.support.host import PYTHON, TREE, Node, python_mounts, write_config
from tests.support.judge import peak_bytes
from tests.support.processes import reap_zombies
from tests.support.rootfs import unmount_below
from tests.support.runc import Container

GIB = 1 << 30
PROGRAM = TREE / "tests" / "integration" / "programs" / "taker.py"
TAKER = (PYTHON, f"/opt/{PROGRAM.name}")
ROWS = {row.name: row for row in (*backends.BACKENDS.values(), backends.BEYOND)}
MEMORY, COMPUTE = 2 * GIB, 30
ASKED = {"GPUSHARE_DEVICES": "0", "GPUSHARE_MEMORY": "2Gi", "GPUSHARE_COMPUTE": "30%"}


class Kernel:
    """The cgroup tree of a simulated host: plain files, with a dmem controller for each container."""

    def __init__(self, root: Path, bus_ids: list[str]) -> None:
        self.tree, self.regions = root / "sys/fs/cgroup", [f"nvidia/{bus_id}/vidmem" for bus_id in bus_ids]
        self.tree.mkdir(parents=True)
        (self.tree / "dmem.capacity").write_text("".join(f"{region} {16 * GIB}\n" for region in self.regions))

    def leaf(self, container: Container) -> Path:
        spec = json.loads((container.bundle / "config.json").read_text())
        leaf: Path = self.tree / spec["linux"]["cgroupsPath"].strip("/")
        return leaf

    def make(self, container: Container) -> None:
        self.leaf(container).mkdir(parents=True)
        for name in ("dmem.max", "dmem.min"):
            (self.leaf(container) / name).write_text("")

    def limits(self, container: Container) -> set[str]:
        """All limits that the host records for the container."""
        return {text for name in ("dmem.max", "dmem.min") if (text := (self.leaf(container) / name).read_text())}


class Driver(Kernel):
    """A host without the kernel controller: the driver enforces limits of the cgroups that NVML was given."""

    def __init__(self, root: Path, bus_ids: list[str]) -> None:
        super().__init__(root, bus_ids)
        (self.tree / "dmem.capacity").unlink()
        newerdriver.renew(root)
        self.root = root

    def limits(self, container: Container) -> set[str]:
        last = {call[0]: call[2:] for call in newerdriver.calls(self.root) if call[1] == str(self.leaf(container))}
        regions = {default_uuid(number): region for number, region in enumerate(self.regions)}
        return super().limits(container) | {f"{regions[uuid]} {size}" for uuid, sizes in last.items() for size in sizes}


# How a host gets what a row needs, beside the cgroup tree, and the variable that requests it
PREPARE: dict[str, Callable[[Node], object]] = {"mps": lambda node: must(node, "mps", "start", "--device", "0")}
ASKS = {backends.BEYOND.name: {"GPUSHARE_OVERSUBSCRIBE": "true"}}


def must(node: Node, *command: str) -> str:
    done = node.cli(*command)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Stage:
    """A host with every backend, and one container that requests one of them."""

    def __init__(
        self, directory: Path, state: Path, name: str, row: str, way: str, kernel: type[Kernel], low: str
    ) -> None:
        self.name, self.row, self.way, self.low, self.directory = name, ROWS[row], way, low, directory
        self.root = make_simhost(directory / "host", gpus=2, memory_bytes=16 * GIB, late_return_ms=0)
        mpscontrol.install(self.root)
        self.node = Node(directory / "node", self.root)
        self.node.move(str(self.node.config), str(state))
        self.allow(*backends.BACKENDS)
        self.kernel = kernel(self.root, [one.bus_id for one in inventory.read_inventory(str(self.root)).devices])
        if row in PREPARE:
            PREPARE[row](self.node)
        self.main = self.container()
        self.main.start()

    def allow(self, *names: str, host_memory: str = "64Gi") -> None:
        more = {"policy": {"allowed_backends": names}, "oversubscription": {"host_memory": host_memory}}
        write_config(self.node.config, self.root, runtime={"path": shutil.which(self.low)}, **more)

    def container(self, *command: str, **env: str) -> Container:
        """Return another container, not yet created."""
        asks = ASKS.get(self.row.name, {"GPUSHARE_BACKEND": self.row.name})
        arguments = {"env": {**ASKED, **asks, **env}, "mounts": python_mounts(PROGRAM), **self.node.way(self.way)}
        one = Container(self.directory / "c", list(command) or ["sleep", "inf"], **arguments)
        self.kernel.make(one)
        return one

    @contextmanager
    def one(self, **env: str) -> Iterator[Container]:
        made = self.container(**env)
        try:
            yield made
        finally:
            made.close()

    def enforcer(self, limit: str) -> str:
        """Return the enforcer of a limit according to the table; the shim for a limit that the row does not enforce."""
        return self.row.name if limit in self.row.enforces else backends.SHIM

    def take(self, *args: str, clear: bool = False, **env: str) -> dict[str, Any]:
        """Return what a new program sees and gets."""
        prefix = ("env", "-i") if clear else ()
        options = tuple(word for pair in env.items() for word in ("--env", "=".join(pair)))
        done = self.main.exec(*prefix, *TAKER, *args, options=options)
        assert done.returncode == 0, done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    def peak_bytes(self) -> int:
        return peak_bytes(self.root, os.stat(f"/proc/{self.main.pid}/ns/pid").st_ino)

    def site(self, **fields: Any) -> Site:
        """Return the host as a start with these fields of a request sees it."""
        settings = config.load_config(str(self.node.config))._replace(state_dir=str(self.node.state))
        host = model.Node(settings, inventory.read_inventory(str(self.root)))
        request = model.Request(
            "own", **{"selection": model.Selection("list", names=("0",)), "capabilities": (), **fields}
        )
        ledger = placement.ledger_of(leases.view(str(self.node.state)).live, settings.policy)
        return Site(host.inventory.devices[0], request, host, ledger)

    def close(self) -> None:
        self.main.close()
        self.node.cli("mps", "stop", "--force")
        self.node.close()
        unmount_below(self.node.state)
        reap_zombies()
