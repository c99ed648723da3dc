"""The end of a container, by the poststop hook and by `delete`: releases, and leftovers after a kill."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from gpushare.state import activity_files, leases

from tests.integration.programs.interrupted_hook import write_adopt, write_runtime
from tests.integration.test_adopt import ALL, calls
from tests.support.host import Node
from tests.support.kills import Kills
from tests.support.runc import Container, RuntimeFailed

MakeContainer = Callable[..., Container]


def lease_dir(node: Node, one: Container) -> Path:
    return node.state / "containers" / one.id


def activity_numbers(node: Node) -> list[int]:
    """Numbers of the activity files of all devices, which other containers read."""
    devices = os.listdir(node.state / "devices")
    files = [name for device in devices for name in os.listdir(node.state / "devices" / device) if name.isdigit()]
    numbers = sorted(n for device in devices for n in activity_files.numbers(str(node.state), device))
    assert sorted(map(int, files)) == numbers
    return numbers


def nothing(node: Node, one: Container) -> None:
    pass


def foreign_name(node: Node, one: Container) -> None:
    """Add a file that a later version may keep there."""
    (lease_dir(node, one) / "later").write_text("")


def no_lease(node: Node, one: Container) -> None:
    (lease_dir(node, one) / "lease.json").unlink()


def mounted_over(node: Node, one: Container) -> None:
    """Mount the usage directory a second time: both mounts are removed."""
    rw = lease_dir(node, one) / "rw"
    subprocess.run(["mount", "--bind", rw, rw], check=True)


def leftover(node: Node, one: Container) -> None:
    """Add the leftover of a process that was killed before it removed it."""
    (node.state / "trash" / "1f-4194399" / "share").mkdir(parents=True)


@pytest.mark.parametrize("change", [nothing, mounted_over, foreign_name, no_lease, leftover])
def test_poststop_releases_the_share(
    container: MakeContainer, node: Node, change: Callable[[Node, Container], None]
) -> None:
    """Nothing is left, and the activity file's number is free."""
    one = container(["true"], env=ALL, runtime=node.runtime())
    assert one.run() == 0, one.stderr
    assert activity_numbers(node) == [0]
    change(node, one)
    one.delete()
    assert node.leases() == []
    if change is not no_lease:  # its number is unknown then: the next start frees it
        assert node.left() == [] and activity_numbers(node) == []


def test_delete_returns_the_runtime_s_output_and_exit_code(container: MakeContainer, node: Node) -> None:
    assert container(["true"], env=ALL, runtime=node.runtime()).run() == 0
    one = container(["sleep", "inf"], env=ALL, runtime=node.runtime()).start()
    command = [*node.runtime(), *one._runtime[-2:]]

    def delete(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, "delete", *args, one.id], capture_output=True, text=True, timeout=60)

    refused = delete()
    assert refused.returncode != 0 and refused.stderr and "gpushare" not in refused.stderr.replace(one.id, "")
    assert node.leases() == [one.id]  # the container runs
    done = delete("--force")
    assert (done.returncode, done.stderr) == (0, "")
    assert node.left() == [] and activity_numbers(node) == []


def test_delete_without_poststop_hook_releases(container: MakeContainer, node: Node) -> None:
    """runc calls no hook for a container that it no longer knows."""
    one = container(["sleep", "inf"], env=ALL, runtime=node.runtime()).start()
    lease = leases.find(str(node.state), one.id)
    assert lease is not None
    subprocess.run(["runc", *one._runtime[-2:], "kill", one.id, "KILL"], check=True)
    one.wait()
    (one.bundle / "runtime" / one.id / "state.json").unlink()
    with pytest.raises(RuntimeFailed):
        one.command("delete", one.id)
    assert node.left() == [] and activity_numbers(node) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_delete_forwards_signals_to_the_runtime(
    container: MakeContainer, make_node: Callable[..., Node], simhost: Path, tmp_path: Path, number: int
) -> None:
    """If a signal ends the runtime, it ends gpushare-runtime too."""
    program = tmp_path / "low"
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *" delete "*) touch {tmp_path}/there; exec sleep 30;; esac\nexec runc "$@"\n'
    )
    program.chmod(0o755)
    node = make_node(simhost, runtime={"path": str(program)})
    one = container(["true"], env=ALL, runtime=node.runtime())
    assert one.run() == 0, one.stderr
    ignored = signal.signal(number, signal.SIG_DFL)  # under nohup it is ignored, and child processes inherit that
    try:
        done = subprocess.Popen([*node.runtime(), *one._runtime[-2:], "delete", one.id])
    finally:
        signal.signal(number, ignored)
    while not (tmp_path / "there").exists():
        assert done.poll() is None
    done.send_signal(number)
    assert done.wait(timeout=60) == -number
    assert node.left() == []  # its program has ended, so its share is free with any runtime
    one._runtime = ("runc", *one._runtime[-2:])


def test_poststop_killed_at_any_call_is_completed_by_the_next_start(
    container: MakeContainer, node: Node, tmp_path: Path, kills: Kills
) -> None:
    """kill -9 of the hook at each system call: the next start gets the whole device, and nothing is left in the end."""
    program = write_runtime(tmp_path, hook=write_adopt(tmp_path, stage="poststop"))
    for _ in range(2):  # the first start on a host does more work
        probe = container(["true"], env=ALL, runtime=node.runtime(program))
        assert probe.run() == 0, probe.stderr
        probe.delete()
    total = len(calls(tmp_path))
    assert total > 100
    first = next(number for number, call in enumerate(calls(tmp_path)) if call.startswith("flock("))
    for at in itertools.chain(kills.some(3, first - 1, 61), kills.some(first - 1, total, 11)):
        hook = write_adopt(tmp_path, at, "poststop")
        one = container(["true"], env=ALL, name=f"at{at}", runtime=node.runtime(write_runtime(tmp_path, hook=hook)))
        assert one.run() == 0, f"call {at} of {total}: {one.stderr}"
        subprocess.run(["runc", *one._runtime[-2:], "delete", one.id], capture_output=True)
        kills.left += len(node.left())
        again = container(["true"], env=ALL, name=f"next{at}", runtime=node.runtime())
        assert again.run() == 0, f"call {at} of {total}: {again.stderr}"
        assert node.leases() == [again.id] and activity_numbers(node) == [0]
        again.delete()
        assert node.left() == [] and activity_numbers(node) == [], f"call {at} of {total}"
        for each in (one, again):
            each.close()
    kills.some_left_something()
