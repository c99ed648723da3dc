"""A process that the runtime leaves for the hook of its container: the ordinary program does so, a snapshot does
not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from gpushare.programs import waiting

from tests.integration.programs.interrupted_hook import points, write_before, write_runtime
from tests.integration.test_adopt import upper
from tests.integration.test_lifecycle import left, use_hook
from tests.support import host, processes
from tests.support.host import Node
from tests.support.kills import Kills
from tests.support.runc import Container, RuntimeFailed

SHARE = {"GPUSHARE_MEMORY": "1Gi"}
MakeContainer = Callable[..., Container]
MakeOrdinary = Callable[..., tuple[str, ...]]


@pytest.fixture
def ordinary(node: Node, tmp_path: Path) -> MakeOrdinary:
    """ordinary(commands) -> gpushare-runtime without a snapshot. Its adopt hook begins with shell commands. $pid is the
    container's; $waiting, also in $place/waiting, is the waiting process's. $place/python exists once Python was
    started for the hook."""

    def make(commands: str = ":") -> tuple[str, ...]:
        place = tmp_path / "ordinary"
        libexec = host.BIN.parent / "libexec"
        shutil.copytree(host.BIN, place / "bin", symlinks=True)
        (place / "libexec").mkdir()
        shutil.copy(libexec / "gpushare-runtime", place / "libexec")
        if (libexec / "_internal").exists():  # a bundle
            (place / "libexec" / "_internal").symlink_to(libexec / "_internal")
            (place / "shim").symlink_to(host.SHIM)
        program = place / "libexec" / "gpushare-hook"
        program.write_text(
            f'#!/bin/sh\ncase "$*" in *adopt) touch {place}/python; esac\nexec {libexec}/gpushare-hook "$@"\n'
        )
        program.chmod(0o755)
        launcher = place / "bin" / "gpushare-hook"
        real = launcher.rename(place / "bin" / "real-hook")
        find = f"waiting=$(pgrep -f '{place}/(bin/../)?libexec/gpushare-runtime')\necho $waiting >{place}/waiting\n"
        write_before(launcher, real, f"place={place}\n{find}{commands}")
        return node.runtime(place / "bin" / "gpushare-runtime")

    return make


def test_one_start_runs_python_once(
    container: MakeContainer, node: Node, ordinary: MakeOrdinary, tmp_path: Path
) -> None:
    one = container(["true"], env=SHARE, runtime=ordinary("ls -l /proc/$waiting/fd >$place/held"))
    one.create()
    assert node.leases() == [one.id] and not (tmp_path / "ordinary" / "python").exists()
    assert waiting.SOCKET not in os.listdir(node.state / "containers" / one.id)
    held = [line.split(" -> ")[1] for line in (tmp_path / "ordinary" / "held").read_text().splitlines()[1:]]
    kinds = sorted(target.partition(":[")[0] for target in held)
    assert kinds == ["/dev/null", "/dev/null", "/dev/null", "anon_inode", "socket"]
    assert processes.wait_exit(int((tmp_path / "ordinary" / "waiting").read_text()), 10) == 0
    one.start()
    assert one.wait() == 0, one.stderr
    one.delete()
    assert left(node) == []


def test_refusal_of_the_waiting_process_is_shown(
    container: MakeContainer, node: Node, ordinary: MakeOrdinary, tmp_path: Path
) -> None:
    mounted = "awk '$5 ~ /libcuda.so.535.261.03$/ {print $5; exit}' /proc/$pid/mountinfo"
    runtime = ordinary(f'nsenter -t $pid -m mount --bind /etc/hostname "$({mounted})"')
    one = container(["true"], env=SHARE, runtime=runtime)
    with pytest.raises(RuntimeFailed, match="is not what config.json mounts there"):
        one.create()
    assert not (tmp_path / "ordinary" / "python").exists()
    assert left(node) == []


def test_hook_adopts_without_a_waiting_process(
    container: MakeContainer, node: Node, ordinary: MakeOrdinary, tmp_path: Path
) -> None:
    one = container(["true"], env=SHARE, runtime=ordinary("kill -9 $waiting"))
    assert one.run() == 0, one.stderr
    assert (tmp_path / "ordinary" / "python").exists()
    one.delete()
    assert left(node) == []


def test_death_of_the_waiting_process_refuses_the_container(
    container: MakeContainer, node: Node, ordinary: MakeOrdinary, tmp_path: Path
) -> None:
    """Its work is unknown: a container that continued would have half a share."""
    listener = tmp_path / "listener"
    listener.write_text(f"""import glob, os, socket
(address,) = glob.glob("{node.state}/containers/*/{waiting.SOCKET}")
os.unlink(address)
os.chdir(os.path.dirname(address))
listener = socket.socket(socket.AF_UNIX)
listener.bind("{waiting.SOCKET}")
listener.listen()
if os.fork() == 0:
    connection = listener.accept()[0]
    connection.sendall({waiting.BEGUN!r})
    while connection.recv(4096):
        pass
""")
    one = container(["true"], env=SHARE, runtime=ordinary(f"kill -9 $waiting; python3 {listener}"))
    with pytest.raises(RuntimeFailed, match="the hook of this container was killed; start the container again"):
        one.create()
    assert left(node) == []
    again = container(["true"], env=SHARE, runtime=node.runtime())
    assert again.run() == 0, again.stderr


def test_waiting_process_ends_with_the_low_level_runtime(
    container: MakeContainer, node: Node, ordinary: MakeOrdinary
) -> None:
    """The runtime fails before our hook."""
    one = container(["true"], env=SHARE, runtime=ordinary())
    use_hook(one, {"prestart": [{"path": "/bin/false"}]})
    with pytest.raises(RuntimeFailed, match="error running (prestart )?hook"):
        one.create()
    for pid, words in processes.children().items():
        if "libexec/gpushare-runtime" in words:
            assert processes.wait_exit(pid, 10) is not None
    one.delete()
    assert left(node) == []


def test_waiting_process_killed_at_any_point_leaves_nothing(
    container: MakeContainer, node: Node, tmp_path: Path, kills: Kills
) -> None:
    probe = container(["true"], env=SHARE, runtime=node.runtime(write_runtime(tmp_path, waits=True)))
    assert probe.run() == 0, probe.stderr
    probe.delete()
    total = points(tmp_path)
    assert total > 20
    for at in kills.some(1, total + 1, 9):
        runtime = node.runtime(write_runtime(tmp_path, at, waits=True))
        one = container(["true"], env=SHARE, name=f"at{at}", runtime=runtime)
        with pytest.raises(RuntimeFailed, match="hook of this container was killed"):
            one.create()
        one._runtime = (*node.runtime(), *one._runtime[-2:])
        assert one.run() == 0, f"point {at} of {total}: {one.stderr}"
        assert node.leases() == [one.id]
        assert not [path for path in upper(one) if path.endswith(".gpushare")], f"point {at} of {total}"
        one.delete()
        assert left(node) == [], f"point {at} of {total}"
        one.close()
