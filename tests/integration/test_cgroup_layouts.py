"""Cgroup layouts in which an ancestor of the container's cgroup has device rules: crun's below a systemd scope. Real
rules and real nodes; no runtime, since no systemd runs here."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from gpushare.core.errors import KernelError
from gpushare.system import bpf, cgroup

from tests.integration.device_matrix import GRANTED, View

FOREIGN = (195, 1)
VIEWS = {
    "v1": "umount /sys/fs/cgroup/unified",
    "v2": "umount -R /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup",
}
DENIED, ALLOWED = [errno.EPERM] * 3, [errno.ENXIO, errno.ENXIO, errno.EPERM]  # of GRANTED and FOREIGN


@pytest.fixture(scope="module", params=sorted(VIEWS))
def view(request: pytest.FixtureRequest) -> Iterator[View]:
    made = View(VIEWS[request.param])
    yield made
    made.close()


class Layout(NamedTuple):
    """Nested cgroups, outermost first, and a process in the innermost. `nodes`: of GRANTED and FOREIGN."""

    top: str
    cgroups: list[str]
    pid: int
    nodes: list[str]

    def opened(self, directory: str = "") -> list[int]:
        """The error of opening each node by a process in `directory`; 0: it opened."""
        answers = []
        move(os.getpid(), directory or self.cgroups[-1])
        try:
            for node in self.nodes:
                try:
                    os.close(os.open(node, os.O_RDWR))
                    answers.append(0)
                except OSError as error:
                    answers.append(error.errno or 0)
        finally:
            move(os.getpid(), self.top)
        return answers

    def rules(self) -> list[Any]:
        """The rules of each cgroup: v1's list, or the ids of its programs."""
        return [rules_of(one) for one in self.cgroups]


def rules_of(directory: str) -> Any:
    listed = Path(directory, "devices.list")
    return listed.read_text() if listed.exists() else bpf._attached(os.open(directory, os.O_RDONLY), directory)[0]


def move(pid: int, directory: str) -> None:
    Path(directory, "cgroup.procs").write_text(str(pid))


def deny(directory: str) -> None:
    if Path(directory, "devices.deny").exists():
        Path(directory, "devices.deny").write_text("a")
        Path(directory, "devices.allow").write_text("c 1:* rwm")
    else:
        bpf.attach(directory, bpf.denying([*GRANTED, FOREIGN]))


@contextlib.contextmanager
def layout(path: str, denying: tuple[str, ...], nodes: Path) -> Iterator[Layout]:
    """Make the cgroups of `path`; those of `denying` deny the nodes. In v1, cgroups below inherit that."""
    found = cgroup.find_cgroups(os.getpid())
    top = found[0] or found[1]
    unique = f"gs{os.getpid()}-"
    cgroups = [f"{top}/{unique}{path[:at]}" for at in range(1, len(path) + 1) if at == len(path) or path[at] == "/"]
    made = []
    for index, (major, minor) in enumerate([*GRANTED, FOREIGN]):
        made.append(str(nodes / str(index)))
        os.mknod(made[-1], 0o020666, os.makedev(major, minor))
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        for one in cgroups:
            os.mkdir(one)
            if os.path.basename(one).removeprefix(unique) in denying:
                deny(one)
        move(child, cgroups[-1])
        yield Layout(top, cgroups, child, made)
    finally:
        move(os.getpid(), top)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for one in reversed(cgroups):
            os.rmdir(one)


SCOPE = "machine.slice/libpod-c.scope/container"


@pytest.mark.parametrize(
    ("path", "denying", "cgroups_path"),
    [
        (SCOPE, ("libpod-c.scope", "container"), "machine.slice:libpod:c"),  # crun 1.21
        (SCOPE, ("libpod-c.scope",), "machine.slice:libpod:c"),  # crun 1.28
        (SCOPE + "/deep", ("libpod-c.scope", "deep"), ""),
        ("machine.slice/libpod-c.scope", ("libpod-c.scope",), ""),  # runc
        ("parent/c/delegated", ("c",), "/parent/c"),  # crun with run.oci.delegate-cgroup
        ("parent/c", ("c",), ""),
    ],
)
def test_rules_of_all_cgroups_of_the_container_are_changed(
    view: View, tmp_path: Path, path: str, denying: tuple[str, ...], cgroups_path: str
) -> None:
    def body() -> list[Any]:
        with layout(path, denying, tmp_path) as one:
            seen: list[Any] = [one.opened()]
            before = one.rules()
            undo = cgroup.allow_devices(one.pid, GRANTED, cgroups_path=cgroups_path)
            seen.append(one.opened())
            undo()
            seen += [one.opened(), one.rules() == before]
            cgroup.allow_devices(one.pid, GRANTED, cgroups_path=cgroups_path)
            seen.append(one.opened())
            cgroup.revoke(one.pid, GRANTED, cgroups_path)
            return [*seen, one.opened()]

    assert view.run(body) == [DENIED, ALLOWED, DENIED, True, ALLOWED, DENIED]


@pytest.mark.parametrize(
    ("path", "denying"),
    [
        ("machine.slice/libpod-c.scope", ("machine.slice",)),
        ("pod.slice/c", ("pod.slice",)),
        ("user.service/payload", ("user.service",)),
    ],
)
def test_cgroup_that_others_share_gets_no_rule(view: View, tmp_path: Path, path: str, denying: tuple[str, ...]) -> None:
    def body() -> list[Any]:
        with layout(path, denying, tmp_path) as one:
            before = one.rules()[0]
            with contextlib.suppress(KernelError):  # v1: a child cannot allow what its parent denies
                cgroup.allow_devices(one.pid, GRANTED)
            return [one.opened(), one.opened(one.cgroups[0]), one.rules()[0] == before]

    assert view.run(body) == [DENIED, DENIED, True]


def test_scope_of_the_caller_gets_no_rule(view: View, tmp_path: Path) -> None:
    """A session's scope, in which `podman run --cgroups=split` starts a container."""

    def body() -> list[Any]:
        with layout("user.slice/session-1.scope/payload", ("session-1.scope",), tmp_path) as one:
            supervisor = f"{one.cgroups[1]}/supervisor"
            os.mkdir(supervisor)
            before = one.rules()[1]
            move(os.getpid(), supervisor)
            try:
                with contextlib.suppress(KernelError):
                    cgroup.allow_devices(one.pid, GRANTED)
                return [one.rules()[1] == before, one.opened(supervisor)]
            finally:
                move(os.getpid(), one.top)
                os.rmdir(supervisor)

    assert view.run(body) == [True, DENIED]
