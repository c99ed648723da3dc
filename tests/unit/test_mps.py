"""The state files of an MPS daemon, and whether it can serve a container. Pure except for this process's pid."""

from __future__ import annotations

import builtins
import configparser
import fcntl
import json
import socket
import subprocess
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from gpushare.allocation import backends, placement
from gpushare.allocation.backends.base import Site
from gpushare.allocation.backends.mps import control as mps_control
from gpushare.allocation.backends.mps import daemon as mps_daemon
from gpushare.allocation.backends.mps import state as mps
from gpushare.allocation.backends.mps import status as mps_status
from gpushare.cli.facts import ALIVE
from gpushare.cli.main import main
from gpushare.cli.mps import mps_group
from gpushare.core import model
from gpushare.core.errors import CapacityError, DeviceError, KernelError
from gpushare.request import oci
from gpushare.state import leases, rebuild, shm_abi
from gpushare.system import procs, servicenotify
from hypothesis import given
from hypothesis import strategies as st

from tests.unit import pure

DEVICE = pure.node().inventory.devices[0]
DRIVER = pure.node().inventory.driver_version
GIB = 1 << 30


def ready(state_dir: Path, **changed: Any) -> mps.MpsState:
    """Write the ready file of a daemon whose process is this one."""
    me = procs.myself()
    content: dict[str, Any] = {
        "version": 1,
        "pid": me.pid,
        "start": me.start,
        "boot_id": procs.boot_id(),
        "driver_version": DRIVER,
        "build": "b",
        "thread_percent": 60,
        "memory_bytes": GIB,
        "clients": 48,
        "uid": 0,
        "shm": "own",
    }
    folder = Path(mps.directory(str(state_dir), DEVICE.uuid))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / mps.READY).write_text(json.dumps({**content, **changed}))
    return mps.state(DEVICE.uuid, str(state_dir))


def test_daemon_is_identified_by_pid_start_time_and_boot(tmp_path: Path) -> None:
    found = ready(tmp_path)
    assert found.problem == "" and found.token == found.start << 22 | found.pid and found.thread_percent == 60
    for changed in ({"start": found.start + 1}, {"boot_id": "another"}, {"pid": 1 << 22}):
        dead = ready(tmp_path, **changed)
        assert "has died" in dead.problem and dead.was_running and "mps start" in dead.hint
    none = mps.state("GPU-none", str(tmp_path))
    assert "not running" in none.problem and not none.was_running


@pytest.mark.parametrize(
    "changed",
    [{"version": 2}, {"pid": "1"}, {"pid": True}, {"start": -1}, {"uid": 1 << 63}, {"shm": None}, {"build": 1}],
)
def test_damaged_ready_file_is_a_problem(tmp_path: Path, changed: dict[str, Any]) -> None:
    assert ready(tmp_path, **changed).problem == "its ready file is damaged"


@given(st.text(max_size=200))
def test_arbitrary_ready_file_is_parsed_or_rejected(text: str) -> None:
    found = mps.parse(text)
    assert found is None or found["version"] == 1


def site(tmp_path: Path, state: dict[str, Any], request: model.Request, leases: int = 0) -> Site:
    ready(tmp_path, **state)
    node = pure.node()
    node = node._replace(config=node.config._replace(state_dir=str(tmp_path)))
    share = pure.share(0, 0, GIB)._replace(compute_backend="mps")
    live = [pure.lease(share, container_id=f"c{n}") for n in range(leases)]
    return Site(DEVICE, request, node, placement.ledger_of(live, node.config.policy))


ONE = model.Request("own", model.Selection("list", names=("0",)), (), backend="mps")
CASES = [
    ({}, ONE, 0, None),
    ({}, ONE, 47, None),
    ({}, ONE, 48, "serves 48 processes at most, and 48 containers use it"),
    ({"clients": 60}, ONE, 48, None),
    ({"clients": 60}, ONE, 60, "serves 60 processes at most"),
    ({}, ONE._replace(compute=((None, 60),)), 0, None),
    ({}, ONE._replace(compute=((None, 61),)), 0, "for at most 60% of compute"),
    ({"driver_version": "1.2"}, ONE, 0, f"driver 1.2, and {DRIVER} is loaded"),
    ({}, ONE._replace(uid=7), 0, "one user at a time, uid 0, and this container runs as uid 7"),
    ({"uid": mps.ANY_UID}, ONE._replace(uid=7), 0, None),
    ({"start": 1}, ONE, 0, "has died"),
    ({"shm": "host"}, ONE, 0, "the container's /dev/shm is not the host's (--ipc=host)"),
    ({"shm": "host"}, ONE._replace(shm="/"), 0, "the container's /dev/shm is not the host's"),
    ({"shm": "host"}, ONE._replace(shm="/dev/shm"), 0, None),
    ({}, ONE._replace(selection=model.Selection("list", names=("0", "1"))), 0, "asks for several"),
    ({}, ONE._replace(selection=model.Selection("all")), 0, "asks for several"),
    ({}, ONE._replace(selection=model.Selection("any", 2)), 0, "asks for several"),
    ({}, ONE._replace(selection=model.Selection("any", 1)), 0, None),
]


@pytest.mark.parametrize("state, request_, leases, reason", CASES)
def test_daemon_serves_container_or_gives_reason(
    tmp_path: Path, state: Any, request_: model.Request, leases: int, reason: str | None
) -> None:
    found = mps.unsupported(site(tmp_path, state, request_, leases))
    assert found is None if reason is None else reason in (found or "")


@pytest.mark.parametrize(
    "before, after, refused", [(30, 60, False), (30, 61, True), (None, 100, True), (90, 80, False), (80, None, False)]
)
def test_changed_limit_must_be_possible_for_daemon(
    tmp_path: Path, before: int | None, after: int | None, refused: bool
) -> None:
    """A limit from before can always be lowered, even above the maximum of a daemon that started since."""
    ready(tmp_path)
    old, new = (
        pure.share(0, 0, GIB)._replace(compute_backend="mps", compute_percent=percent) for percent in (before, after)
    )
    with pytest.raises(CapacityError, match="at most 60% of compute") if refused else nullcontext():
        backends.change((old,), (new,), f"{tmp_path}/containers/c1")
    backends.change((), (new,), f"{tmp_path}/containers/c1")


def test_container_gets_ops_and_limits(tmp_path: Path) -> None:
    share = pure.share(0, 0, GIB)._replace(compute_backend="mps", compute_percent=30)
    found = ready(tmp_path)
    config = model.Config(state_dir=str(tmp_path))
    pipe, shm = mps.ops((share,), config)
    assert (pipe.target, shm.target) == (f"/usr/lib/gpushare/mps/{DEVICE.uuid}", "/dev/shm")  # type: ignore[union-attr]
    assert "ro" in pipe.flags and pipe.source.endswith("/share")  # type: ignore[union-attr]
    assert ready(tmp_path, shm="host").shm == "host" and mps.ops((share,), config) == (pipe,)
    grant = backends.in_limits((share,), str(tmp_path), 5)
    assert grant == mps.Grant(1, found.token, 5)
    limits = shm_abi.read_limits(shm_abi.pack_limits((share,), 1, mps=grant))
    assert (limits.mps_device, limits.mps_token, limits.devices[0].compute_percent) == (1, found.token, 30)
    assert rebuild._share(0, limits.devices[0], DEVICE, limits.mps_device).compute_backend == "mps"
    assert rebuild._share(1, limits.devices[0], DEVICE, limits.mps_device).compute_backend == "shim"
    assert backends.in_limits((pure.share(0, 0, GIB),), str(tmp_path), 5) == mps.Grant()
    ready(tmp_path, start=1)
    with pytest.raises(DeviceError, match="MPS: its control daemon .* has died; .*mps start"):
        backends.in_limits((share,), str(tmp_path), 5)


def test_stopping_daemon_gets_no_new_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts read the ready file under the lock of the leases."""
    ready(tmp_path)
    path = Path(mps.directory(str(tmp_path), DEVICE.uuid)) / mps.READY
    (tmp_path / "lock").touch()
    share = pure.share(0, 0, GIB)._replace(compute_backend="mps")
    live = [pure.lease(share)]
    host = pure.node()._replace(config=model.Config(state_dir=str(tmp_path)))

    def view(state_dir: str) -> leases.View:
        with open(tmp_path / "lock") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert path.exists()
        return leases.View(tuple(live), (), (), ())

    monkeypatch.setattr(leases, "view", view)
    monkeypatch.setattr(mps_control, "listening", lambda pipe: mps_control.Daemon(1 << 22, 0))
    monkeypatch.setattr(mps_daemon, "end", lambda control, pid: None)
    with pytest.raises(CapacityError, match="containers still use MPS"):
        mps_daemon.stop(host, DEVICE.uuid, False)
    assert path.exists()
    live.clear()
    assert mps_daemon.stop(host, DEVICE.uuid, False) and not path.parent.exists()


@pytest.mark.parametrize(
    "user, rows, inside, outside",
    [
        ({}, [], 0, 0),
        ({"uid": 7}, [], 7, 7),
        ({"uid": 7}, [{"containerID": 0, "hostID": 1000, "size": 7}, {"containerID": 7, "hostID": 5, "size": 1}], 7, 5),
        ({"uid": "7"}, [{"containerID": 0, "hostID": 1000, "size": 7}], 0, 1000),
        ({"uid": 9}, [{"containerID": 0, "hostID": 1000, "size": "x"}, None, 4], 9, 9),
    ],
)
def test_uid_is_mapped_to_host(user: Any, rows: Any, inside: int, outside: int) -> None:
    spec = {"process": {"user": user}, "linux": {"uidMappings": rows}}
    assert (oci.first_uid(spec), oci.uid_on_host(spec)) == (inside, outside)


@pytest.mark.parametrize(
    "size, text", [(1, "1M"), (1 << 20, "1M"), (GIB - 1, "1024M"), (GIB, "1G"), (GIB + 1, "2G"), (5 * GIB, "5G")]
)
def test_memory_text_is_never_below_request(size: int, text: str) -> None:
    assert mps_control.memory_text(size) == text


@pytest.mark.parametrize(
    "logged_at, had",
    [
        ("2026-01-31 12:00:00.123", " in c0, c1"),
        ("2026-01-31 12:00:20.0", " in c0, c1, c2"),
        ("?" * 23, " in c0, c1, c2"),
    ],
)
def test_dead_server_lists_its_containers(tmp_path: Path, logged_at: str, had: str) -> None:
    """A container that started later uses another server. If the log has no time, no container is excluded."""
    noon = time.mktime((2026, 1, 31, 12, 0, 0, 0, 0, -1))
    made = [
        pure.lease(container_id=f"c{number}")._replace(created=created)
        for number, created in enumerate((0.0, noon - 5, noon + 5))
    ]
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "control.log").write_text(f"[{logged_at} Control     7] Server 45 exited with status -9\n")
    told = f"server 45 has died (status -9): programs that used it{had} must be started again"
    assert mps_status.deaths(str(tmp_path), 7, made) == told
    assert mps_status.deaths(str(tmp_path), 7, ()) == told.replace(had, "")
    assert mps_status.deaths(str(tmp_path), 8, made) == ""


@pytest.mark.parametrize("version, clients", [("535.2", 48), ("575.1", 48), ("580.65", 60), ("615.1", 60), ("", 48)])
def test_maximum_of_clients_depends_on_driver(version: str, clients: int) -> None:
    assert mps_control.max_clients(version) == clients


@pytest.mark.parametrize(
    "text, options",
    [
        ("  -m, --multiuser   Enable multiuser mode.", ("--multiuser",)),
        ("-m, --multiuser\n-p, --protocol <2|3>  2 (legacy, default) or 3", ("--protocol", "3", "--multiuser")),
        ("-M or --multiuser-server: all users", ("--multiuser-server",)),
        ("-multiuser-server", ("-multiuser-server",)),
        ("no --no-multiuser here, and -p, --protocol", ()),
        ("", ()),
    ],
)
def test_multi_user_options_come_from_program_help(text: str, options: tuple[str, ...]) -> None:
    assert mps_control.several_users(text) == options
    assert mps_control.protocol_in(options, {}) == (3 if len(options) > 1 else 2)


def test_protocol_comes_from_environment_then_options() -> None:
    assert mps_control.protocol_in(["mps", "-d", "-p", "3"], {}) == 3
    assert mps_control.protocol_in(["mps", "-d", "-p", "3"], {"CUDA_MPS_PROTOCOL_VERSION": "2"}) == 2
    assert mps_control.protocol_in(["mps", "-d"], {"CUDA_MPS_PROTOCOL_VERSION": "3"}) == 3
    assert mps_control.protocol_of(1 << 22) == 2, "no such process"


@pytest.mark.parametrize(
    "text, pids",
    [("71\n72", (71, 72)), ("71,gpushare,0,default,python 5", (71,)), ("Server 7 not found", ()), ("", ())],
)
def test_pids_are_parsed_from_first_column(text: str, pids: tuple[int, ...]) -> None:
    assert mps_control.pids_in(text) == pids


@pytest.mark.parametrize(
    "mounts, source",
    [
        ([], ""),
        ([{"destination": "/dev/shm", "type": "tmpfs", "source": "shm"}], ""),
        ([{"destination": "/dev/shm/", "source": "/dev/shm", "options": ["bind"]}], "/dev/shm"),
        ([{"destination": "/dev", "source": "/dev", "options": ["rbind", "ro"]}], "/dev/shm"),
        ([{"destination": "/dev", "source": "/dev", "options": ["bind"]}], ""),
        ([{"destination": "/dev/shm", "source": "/dev/shm", "options": ["rbind", "ro"]}], ""),
        ([{"destination": "/dev/shm", "source": "/x", "options": ["rbind"]}, {"destination": "/dev/shm"}], ""),
        ([{"destination": "/dev/shm", "source": "/x", "options": ["rbind"]}, {"destination": "/dev/shm/y"}], "/x"),
        ([None, {"destination": 7}, {"destination": "/dev/shm", "options": ["rbind"]}], ""),
        ([{"destination": "/dev/shm", "source": "/x", "options": "rbind"}], ""),
    ],
)
def test_source_of_dev_shm_is_found(mounts: Any, source: str) -> None:
    assert oci.shm_source({"mounts": mounts}) == source


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_main_pid_is_sent_to_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    name = f"{tmp_path}/notify"
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    servicenotify.notify(7, "not sent")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(name if kind == "path" else f"\0{name}")
        monkeypatch.setenv("NOTIFY_SOCKET", name if kind == "path" else f"@{name}")
        servicenotify.notify(7, "MPS on 0")
        assert systemd.recv(100) == b"READY=1\nMAINPID=7\nSTATUS=MPS on 0"
    with pytest.raises(KernelError, match="NOTIFY_SOCKET"):
        servicenotify.notify(7, "it is gone")


def test_unit_runs_existing_command() -> None:
    """tests/integration/test_systemd.py runs it."""
    text = (Path(__file__).parents[2] / "packaging/systemd/gpushare-mps@.service").read_text()
    unit = configparser.RawConfigParser()
    unit.read_string(text)
    service = unit["Service"]
    assert service["Type"] == "notify"
    for key, action in (("ExecStart", "start"), ("ExecStop", "stop")):
        program, group, word, *words = service[key].split()
        assert (program, group, word) == ("/usr/bin/gpushare", "mps", action)
        context = mps_group.commands[action].make_context(action, [w.replace("%i", DEVICE.uuid) for w in words])
        assert context.params["wanted"] == (DEVICE.uuid,)


def listed_as(*states: str) -> str:
    return "\n".join(f'{{"state": "{state}"}}' for state in states)


@pytest.mark.parametrize(
    "listed, stopped, ends", [("[]", 0, 0), ("[]", 69, 0), ("[]", 75, 1), (listed_as("dead", "ended"), 0, 0)]
)
def test_package_removal_checks_before_stopping_mps(tmp_path: Path, listed: str, stopped: int, ends: int) -> None:
    """The units stop MPS even with clients, and units that were enabled by hand are disabled with them."""
    done, said = remove_package(tmp_path, listed, stopped)
    assert done.returncode == ends and said[0] == "gpushare mps stop"
    if ends:
        assert len(said) == 1 and done.stderr.startswith("gpushare: the package stays; stop those containers")
    else:
        disabled, mine = said.index("systemctl disable gpushare-mps@.service"), said.index("gpushare uninstall --yes")
        assert 0 < disabled < mine


@pytest.mark.parametrize(
    "listed", [*(listed_as("dead", state) for state in (*ALIVE, "starting", "damaged")), "gpushare: killed"]
)
def test_package_removal_stops_nothing_if_a_container_may_have_a_share(tmp_path: Path, listed: str) -> None:
    """The last step then refuses the removal, and the services must go on."""
    assert remove_package(tmp_path, listed, 0)[1] == ["gpushare uninstall --yes"]


def remove_package(tmp_path: Path, listed: str, stopped: int) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the script of the package. Return the result, and the commands after the first. `listed` is what `list`
    prints, which fails if that is no list."""
    script = (Path(__file__).parents[2] / "packaging/scripts/preremove").read_text()
    log = tmp_path / "log"
    for name in ("gpushare", "systemctl"):
        fails = listed.startswith("gpushare:")
        code = f'case "$*" in "mps stop") exit {stopped};; list*) echo \'{listed}\'; exit {int(fails)};; esac'
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $*" >>{log}\n{code}\n')
        (tmp_path / name).chmod(0o755)
    script = script.replace("/usr/bin/gpushare", str(tmp_path / "gpushare")).replace(
        "/run/systemd/system", str(tmp_path)
    )
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["sh", "-c", script, "preremove", "remove"], env=env, capture_output=True, text=True)
    asked, *said = log.read_text().splitlines()
    assert asked == "gpushare list --format json"
    return done, said


def test_package_removal_names_what_uninstall_names(tmp_path: Path) -> None:
    """Containers with a share, or prepared claims."""
    script = (Path(__file__).parents[2] / "packaging/scripts/preremove").read_text()
    line = "gpushare: 1 resource claim is prepared for pods: uid u; delete these pods first"
    (tmp_path / "gpushare").write_text(f'#!/bin/sh\n[ "$1" != uninstall ] || {{ echo "{line}" >&2; exit 75; }}\n')
    (tmp_path / "gpushare").chmod(0o755)
    script = script.replace("/usr/bin/gpushare", str(tmp_path / "gpushare")).replace("/run/systemd/system", "/none")
    done = subprocess.run(["sh", "-c", script, "preremove", "remove"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.splitlines() == [
        line,
        "gpushare: the package stays; end what uses it (see above) and remove it again, or first run gpushare"
        " uninstall --yes --force",
    ]


def test_stop_without_daemon_needs_no_driver(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A package can also be removed from a host whose driver is gone."""
    config = tmp_path / "config.yaml"
    config.write_text(f'{{"version": 1, "driver": {{"root": "{tmp_path}/none"}}}}')
    where = ["--config", str(config), "--state", str(tmp_path / "state")]
    assert main([*where, "mps", "stop"]) == 0
    assert capfd.readouterr() == ("MPS was not running\n", "")
    assert main([*where, "mps", "stop", "--device", "0"]) != 0
    assert "driver" in capfd.readouterr().err


def test_variables_of_other_processes_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """They can be in memory that makes the reader wait, such as a file of a FUSE server of a tenant."""
    read = []
    opened = builtins.open
    monkeypatch.setattr(
        builtins, "open", lambda path, *more, **options: read.append(path) or opened(path, *more, **options)
    )
    mps_daemon._end_orphans("/nowhere")
    monkeypatch.undo()
    assert [path for path in read if "environ" in path or "cmdline" in path] == []
