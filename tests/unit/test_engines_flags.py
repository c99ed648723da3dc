"""Flags of a daemon that win over its file or clash with it, and what the engine itself reports of its default
handler."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from gpushare.config import oci_runtime
from gpushare.core.errors import ConfigError
from gpushare.core.model import Config
from gpushare.engines import configure, containerd, crio, daemon, docker, podman, record, unread
from gpushare.engines.base import Proposal, Settings
from gpushare.engines.host import Host
from gpushare.system import procs, syscalls

from tests.unit import configurehost
from tests.unit.enginehost import applied, configured, withdrawn
from tools.engine_snippets import SETTINGS, Tree

programs = configurehost.programs
UNIT = "/usr/lib/systemd/system/docker.service"
DROP_INS = "/etc/systemd/system/docker.service.d"
START = "[Service]\nExecStart=/usr/sbin/dockerd -H fd:// {}\n"


@pytest.mark.parametrize(
    ("files", "running", "flag", "where"),
    [
        ({UNIT: START.format("--default-runtime runc")}, [], "runc", UNIT),
        ({UNIT: START.format("\\\n  --default-runtime=runc \\\n  --debug")}, [], "runc", UNIT),
        (
            {
                UNIT: START.format(""),
                f"{DROP_INS}/a.conf": "[Service]\nExecStart=\nExecStart=-/bin/dockerd --default-runtime 'my run'\n",
            },
            [],
            "my run",
            f"{DROP_INS}/a.conf",
        ),
        (
            {UNIT: START.format("$DOCKER_OPTS ${MORE}"), f"{DROP_INS}/a.conf": "[Service]\nEnvironment=MORE=--debug\n",
             f"{DROP_INS}/b.conf": "[Service]\nEnvironmentFile=-/etc/default/docker\n",
             "/etc/default/docker": '# comment\nDOCKER_OPTS="--dns 1.1.1.1 --default-runtime kata"\n'},
            [], "kata", "/etc/default/docker",
        ),
        ({"/etc/default/docker": "DOCKER_OPTS='--default-runtime=kata'\n"}, [], "kata", "/etc/default/docker"),
        ({}, [["/usr/bin/dockerd", "--default-runtime", "x"]], "x", "process 100"),
        ({UNIT: START.format("--default-runtime runc")}, [["dockerd", "--default-runtime", "runc"]], "runc", UNIT),
        ({UNIT: START.format("")}, [["containerd", "--default-runtime", "runc"]], "", ""),
        ({UNIT: "[Service]\nExecStart=/usr/bin/other --default-runtime runc\n"}, [], "", ""),
        ({f"{DROP_INS[:-2]}": START.format(""), UNIT: START.format("--default-runtime a")}, [], "", ""),
    ],
)  # fmt: skip
def test_flags_of_unit_drop_ins_defaults_and_process(
    files: dict[str, str], running: list[list[str]], flag: str, where: str
) -> None:
    tree = Tree(files, running=running)
    found = daemon.value(daemon.flags("dockerd", ("docker",), tree), "default-runtime")
    assert (found.value, found.where) == (flag, where) if flag else found is None
    if not flag:
        return
    with pytest.raises(ConfigError) as caught:  # shared/cases/engines/03
        docker.propose(SETTINGS._replace(default=True), tree)
    shown = f'dockerd gets --default-runtime "{flag}" from {where}, and does not start with that key in its file'
    assert str(caught.value) == f"{shown}; remove that flag, or leave out --default"
    after = applied(docker.propose(SETTINGS, tree), {})
    assert docker.ignored(SETTINGS, Tree({**files, **after}, running=running), [docker.FILE]) == ""
    clash = {**files, docker.FILE: after[docker.FILE].replace("{", '{"default-runtime": "runc",', 1)}
    assert shown in docker.ignored(SETTINGS, Tree(clash, running=running), [docker.FILE])


def test_reload_would_forget_runtimes_of_flags() -> None:
    tree = Tree({UNIT: START.format("--add-runtime nvidia=/usr/bin/nvidia-container-runtime")})
    assert docker.reload(SETTINGS, tree) == docker.forget(SETTINGS, tree, []) == "systemctl restart docker"
    assert docker.reload(SETTINGS, Tree({UNIT: START.format("")})) == "systemctl reload docker"
    with pytest.raises(ConfigError, match=f'--add-runtime "gpushare=/x" from {UNIT}; remove that flag'):
        docker.propose(SETTINGS, Tree({UNIT: START.format("--add-runtime gpushare=/x")}))


def test_file_of_the_running_dockerd_is_used() -> None:
    running = [["/snap/docker/1/bin/dockerd", "--config-file=/var/snap/docker/1/config/daemon.json"]]
    tree = Tree({}, running=running)
    assert set(configured_paths(docker, SETTINGS, tree)) == {"/var/snap/docker/1/config/daemon.json"}
    assert docker.reload(SETTINGS, tree) == "snap restart docker.dockerd"
    assert "dockerd was started with --config-file" in docker.ignored(SETTINGS, tree, [docker.FILE])


def configured_paths(engine: Any, settings: Settings, tree: Tree) -> list[str]:
    return [change.path for change in engine.propose(settings, tree).changes]


@pytest.mark.parametrize("answers", [True, False])
def test_docker_s_default_runtime_is_copied(answers: bool) -> None:
    """Its arguments belong to the low-level runtime, which gpushare-runtime passes them to."""
    runtimes = {
        "mine": {"path": "/opt/crun", "runtimeArgs": ["--debug"]},
        "nvidia": {"path": "nvidia", "runtimeArgs": ["x"]},
    }
    info = json.dumps({"DefaultRuntime": "mine", "Runtimes": runtimes})
    files = {docker.FILE: json.dumps({} if answers else {"default-runtime": "mine", "runtimes": runtimes})}
    proposal = docker.propose(SETTINGS, Tree(files, {" ".join(docker._INFO): info} if answers else {}))
    table = json.loads(applied(proposal, files)[docker.FILE])["runtimes"]["gpushare"]
    assert (
        table == {"path": "/usr/bin/gpushare-runtime", "runtimeArgs": ["--debug"]} and proposal.low_level == "/opt/crun"
    )
    files = {docker.FILE: json.dumps({"default-runtime": "nvidia", "runtimes": runtimes})}
    assert docker.propose(SETTINGS, Tree(files)).low_level == ""
    assert '"runtimeArgs": []' in configured(docker, files)[docker.FILE]


TYPED = {"runtimeType": "io.containerd.runc.v2", "options": {"binaryName": "/opt/crun", "Root": "/run/x", "IoUid": 5}}


def test_docker_s_typed_runtime_is_copied() -> None:
    """docker 23 and later. `docker info` shows such a runtime with an empty path."""
    files = {docker.FILE: json.dumps({"default-runtime": "mine", "runtimes": {"mine": TYPED}})}
    info = {" ".join(docker._INFO): json.dumps({"DefaultRuntime": "mine", "Runtimes": {"mine": {"path": ""}}})}
    ours = {**TYPED, "options": {"Root": "/run/x", "IoUid": 5, "BinaryName": "/usr/bin/gpushare-runtime"}}
    for answers in (info, {}):
        proposal = docker.propose(SETTINGS._replace(default=True), Tree(files, answers))
        after = applied(proposal, files)
        value = json.loads(after[docker.FILE])
        assert (value["runtimes"]["gpushare"], proposal.low_level) == (ours, "/opt/crun")
        assert docker.entry(docker.FILE, after[docker.FILE]) == "/usr/bin/gpushare-runtime"
        again = docker.propose(SETTINGS._replace(default=True), Tree(after))
        assert (list(again.changes), again.low_level) == ([], None)
        assert withdrawn(docker, after, files) == files
    proposal = docker.propose(SETTINGS._replace(config="/c"), Tree(files))
    assert proposal.notes == [
        "docker passes no arguments to a runtime with options, so those of the default runtime are not copied"
    ]
    assert "options" not in json.loads(applied(proposal, files)[docker.FILE])["runtimes"]["gpushare"]
    kata = json.dumps({"default-runtime": "k", "runtimes": {"k": {**TYPED, "runtimeType": "io.containerd.kata.v2"}}})
    proposal = docker.propose(SETTINGS, Tree({docker.FILE: kata}))
    ours = json.loads(applied(proposal, {docker.FILE: kata})[docker.FILE])["runtimes"]["gpushare"]
    assert (ours, proposal.low_level) == ({"path": "/usr/bin/gpushare-runtime", "runtimeArgs": []}, "")


MINE = """\
[crio.runtime]
default_runtime = "crun"

[crio.runtime.runtimes.crun]
runtime_path = "/usr/libexec/crio/crun"
runtime_root = "/run/crun"
monitor_path = "/usr/libexec/crio/conmon"
"""
COPY = {"runtime_path": "/usr/bin/gpushare-runtime-cri", "runtime_type": "oci"}


def crio_copy(files: dict[str, str], answers: dict[str, str] | None = None) -> tuple[Any, Proposal]:
    """(gpushare's handler, the proposal with it) with these files and answers of CRI-O."""
    proposal = crio.propose(SETTINGS, Tree(files, answers))
    text = applied(proposal, files)[crio.FILE]
    return tomlkit.parse(text).unwrap()["crio"]["runtime"]["runtimes"]["gpushare"], proposal


def test_crio_s_default_handler_is_copied() -> None:
    """shared/cases/engines/02: without monitor_path CRI-O does not start where conmon is in no directory of PATH."""
    files = {"/etc/crio/crio.conf.d/10-crio.conf": MINE}
    configured(crio, files)
    table, proposal = crio_copy(files)
    assert table == {**COPY, "runtime_root": "/run/crun", "monitor_path": "/usr/libexec/crio/conmon"}
    assert proposal.low_level == "/usr/libexec/crio/crun"
    assert proposal.notes == ["`crio config` did not run, so the default handler is as the files of CRI-O have it"]
    files["/etc/crio/crio.conf.d/20"] = '[crio.runtime.runtimes.crun]\nmonitor_path = "/x"\n'
    assert crio_copy(files)[0] == {**COPY, "monitor_path": "/x"}  # one table


BUILT_IN = """\
[crio.runtime]
default_runtime = "crun"
[crio.runtime.runtimes.crun]
runtime_path = ""
runtime_type = "oci"
runtime_root = "/run/crun"
inherit_default_runtime = false
runtime_config_path = ""
container_min_memory = "500KiB"
monitor_cgroup = "system.slice"
privileged_without_host_devices = false
allowed_annotations = ["io.containers.trace-syscall", "devices.crio.io"]
hostnetwork_disable_selinux = true
disable_hostport_mapping = false
timezone = ""
"""


def test_crio_config_wins_over_its_files() -> None:
    """Built-in handlers are in no file. `crio config` prints only the handlers that differ from the built-in ones."""
    answers = {"crio config --default": BUILT_IN, "crio config": "[crio.runtime]\nlog_level = 'debug'\n"}
    assert crio_copy({}, answers)[0] == {
        **COPY,
        "runtime_root": "/run/crun",
        "container_min_memory": "500KiB",
        "monitor_cgroup": "system.slice",
        "privileged_without_host_devices": False,
        "allowed_annotations": ["io.containers.trace-syscall", "devices.crio.io"],
    }
    answers["crio config"] = MINE.replace('"/run/crun"', '"/run/other"')
    assert crio_copy({}, answers)[0]["runtime_root"] == "/run/other"
    kata = '[crio.runtime.runtimes.kata]\nruntime_type = "vm"\nruntime_root = "/k"\n'
    table, proposal = crio_copy({}, {**answers, "crio config": MINE.replace('"crun"', '"kata"') + kata})
    assert table["runtime_root"] == "/run/crun"
    assert proposal.notes == ['the default handler "kata" runs no OCI runtime, so "crun" is copied']
    assert crio_copy({crio._MAIN: f'[crio.runtime]\ndefault_runtime = "kata"\n{kata}'})[0] == COPY


def test_keys_that_crio_config_leaves_out_are_copied() -> None:
    """Otherwise gpushare's containers would run without the seccomp profile of the default handler."""
    keys = 'seccomp_profile = "/etc/crio/strict.json"\ncontainer_create_timeout = 300\n'
    files = {"/etc/crio/crio.conf.d/10-crio.conf": MINE + keys}
    answers = {"crio config --default": BUILT_IN, "crio config": MINE}
    table, proposal = crio_copy(files, answers)
    assert (table["seccomp_profile"], table["container_create_timeout"]) == ("/etc/crio/strict.json", 300)
    after = applied(proposal, files)  # gpushare becomes the default, and `crio config` leaves the keys out again
    after["/etc/crio/crio.conf.d/20"] = '[crio.runtime]\ndefault_runtime = "gpushare"\n'
    handler = '[crio.runtime.runtimes.gpushare]\nruntime_path = "/g"\n'
    answers["crio config"] = after["/etc/crio/crio.conf.d/20"] + handler
    assert crio_copy(after, answers)[0] == table


def test_flags_of_crio_are_read() -> None:
    options = "CRIO_CONFIG_OPTIONS=--config-dir /opt/crio.d --default-runtime other"
    start = f'[Service]\nEnvironment="{options}"\nExecStart=/usr/bin/crio $CRIO_CONFIG_OPTIONS\n'
    files = {"/usr/lib/systemd/system/crio.service": start}
    files["/opt/crio.d/1"] = '[crio.runtime.runtimes.other]\nruntime_path = "/o"\nmonitor_path = "/m"\n'
    after = applied(crio.propose(SETTINGS, Tree(files)), files)
    assert 'monitor_path = "/m"' in after["/opt/crio.d/99-gpushare.conf"]
    assert "started with --config-dir /opt/crio.d" in crio.ignored(SETTINGS, Tree(after), [crio.FILE])
    assert crio.ignored(SETTINGS, Tree(after), ["/opt/crio.d/99-gpushare.conf"]) == ""
    for flag, settings, effect in (
        ("--hooks-dir /h", SETTINGS._replace(hook_only=True), "it does not read hooks_dir"),
        ("--runtimes gpushare:/x", SETTINGS, "it overrides the handler gpushare"),
    ):
        tree = Tree({}, running=[["crio", *flag.split()]])
        with pytest.raises(ConfigError, match=f'CRI-O gets {flag.split()[0]} ".*" from process 100: {effect}'):
            crio.propose(settings, tree)


@pytest.mark.parametrize(
    ("engine", "command", "answers"),
    [
        (crio, "crio config", {"crio config": "[crio.runtime.runtimes.other]\n"}),
        (docker, f"dockerd --validate --config-file={docker.FILE}", {}),
    ],
)
def test_change_that_the_engine_refuses_is_an_error(engine: Any, command: str, answers: dict[str, str]) -> None:
    engine.verify(SETTINGS, Tree({}))
    with pytest.raises(ConfigError, match="refuses the change: it is bad; fix that, then run the command again"):
        engine.verify(SETTINGS, Tree({}, complaints={command: "level=info\nit is bad\n"}))
    if answers:
        with pytest.raises(ConfigError, match=f"`{command}` shows no handler gpushare after the change"):
            engine.verify(SETTINGS, Tree({}, answers))
    else:
        engine.verify(SETTINGS, Tree({}, complaints={command: "unknown flag: --validate\nSee 'dockerd --help'."}))


@pytest.mark.parametrize(
    ("complaint", "reason"),
    [
        ('level=info msg="reads x"\nit is bad\n', "it is bad"),
        (
            'time="2026-11-28T11:06:27.2Z" level=info msg=reads\n'
            r'time="2026-11-28T11:06:27.3Z" level=fatal msg="/x: \"many\" is no number" id=1',
            '/x: "many" is no number',
        ),
        ('level=fatal msg="validating runtime config: no such file"', "validating runtime config: no such file"),
    ],
)
def test_reason_of_a_refusal_is_the_message(complaint: str, reason: str) -> None:
    """With the time in it, an earlier refusal of the same files would seem to be another one."""
    assert daemon.reason(complaint) == reason


def test_running_daemon_that_has_not_read_its_file_is_reported() -> None:
    """As the daemon itself answers. Without a running daemon the files alone count."""
    files, info = configured(docker, {}), " ".join(docker._INFO)
    for runtimes, why in (({"runc": {}}, f"dockerd has not read {docker.FILE}: run `systemctl reload docker`"),
                          ({"gpushare": {}}, "")):  # fmt: skip
        answers = {info: json.dumps({"Runtimes": runtimes})}
        assert docker.ignored(SETTINGS, Tree(files, answers, [["dockerd"]]), [docker.FILE]) == why
        assert docker.ignored(SETTINGS, Tree(files, answers), [docker.FILE]) == ""
    files, answers = configured(crio, {}), {"crio status config": MINE}
    why = crio.ignored(SETTINGS, Tree(files, answers, [["crio"]]), [crio.FILE])
    assert f"CRI-O has not read {crio.FILE}" in why and "systemctl restart crio" in why
    answers["crio status config"] += "[crio.runtime.runtimes.gpushare]\nruntime_path = '/x'\n"
    assert crio.ignored(SETTINGS, Tree(files, answers, [["crio"]]), [crio.FILE]) == ""


@pytest.mark.parametrize(
    ("cgroup", "counts"),
    [
        ("/system.slice/containerd.service", True),
        ("/system.slice/k3s.service/x", True),
        ("/system.slice/snap.microk8s.daemon-containerd.service", True),
        ("/../../system.slice/containerd.service", True),  # as a pod with a cgroup namespace sees it
        ("/", False),
        ("/system.slice/docker-0a.scope", False),  # docker in docker
        ("/user.slice/user-1000.slice/user@1000.service/docker.service", False),  # rootless
        ("/user.slice/user-1000.slice/user@1000.service/system.slice/docker.service", False),
        ("/system.slice/snap.docker.x/y/docker.service", False),
        ("/system.slice/ci-runner.service", False),
    ],
)
def test_only_daemons_of_the_host_count(monkeypatch: pytest.MonkeyPatch, cgroup: str, counts: bool) -> None:
    me = os.getpid()
    monkeypatch.setattr(procs, "cgroup_of", lambda pid: cgroup)
    name = os.path.basename(procs.command(me)[0])
    assert (me in dict(Host().processes(name))) is counts and Host("/nowhere").processes(name) == []


@pytest.mark.parametrize(
    ("become", "counts"),
    [
        (lambda: None, True),
        (lambda: os.setresuid(65534, 65534, 65534), False),  # root owns its files in /proc: it cannot be dumped
        (lambda: os.setresuid(65534, 0, 0), False),  # as a program with the set-user-ID bit
        (lambda: syscalls.unshare(syscalls.CLONE_NEWNS, "mount namespace"), False),
        (lambda: os.chroot("/usr"), False),
    ],
)
def test_only_root_processes_of_the_host_count(
    monkeypatch: pytest.MonkeyPatch, become: Callable[[], None], counts: bool
) -> None:
    """The command line of another process could name any file and any program."""
    monkeypatch.setattr(procs, "cgroup_of", lambda pid: "/system.slice/containerd.service")
    name = os.path.basename(procs.command(os.getpid())[0])
    (ready, told), (ends, end) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(end)
            become()
            os.write(told, b"x")
            os.read(ends, 1)
        finally:
            os._exit(0)
    os.close(told)
    try:
        assert os.read(ready, 1) == b"x"
        command, read = procs.command, []
        monkeypatch.setattr(procs, "command", lambda one: read.append(one) or command(one))
        assert (pid in dict(Host().processes(name))) is counts
        assert (pid in read) is counts  # a command line can be in memory that makes its reader wait
    finally:
        for fd in (end, ready, ends):
            os.close(fd)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("place", ["program", "folder", "writable", "link"])
def test_program_that_another_user_can_replace_is_not_run(place: str, tmp_path: Path) -> None:
    """Its path can come from a command line. Root's programs run."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program, asked = folder / "containerd", folder / "containerd"
    program.write_text("#!/bin/sh\necho answer\necho wrong >&2\nexit $1\n")
    program.chmod(0o755)
    assert Host().ask(str(program), "0") == "answer\n" and Host().complaint(str(program), "1") == "wrong"
    if place == "link":
        other = tmp_path / "other"
        other.mkdir()
        os.chown(other, 65534, 65534)
        asked = other / "containerd"
        asked.symlink_to(program)
    elif place == "writable":
        folder.chmod(0o777)
    else:
        os.chown(program if place == "program" else folder, 65534, 65534)
    assert Host().ask(str(asked), "0") is None and Host().complaint(str(asked), "1") == ""


@pytest.mark.parametrize(
    ("path", "recorded"),
    [
        ("/opt/crun", "/opt/crun\n"),
        ("/usr/bin/runc", "/usr/bin/runc\n"),
        ("crun", None),  # gpushare-runtime finds it in PATH
        ("/usr/bin/nvidia-container-runtime", None),  # it would edit config.json again
        ("", None),
    ],
)
def test_only_low_level_runtimes_are_recorded(path: str, recorded: str | None) -> None:
    file = f"{record.FOLDER}/docker{oci_runtime.OF_HANDLER}"
    (change,) = record.low_level(Tree({file: "/old/runc\n"}), "docker", path)
    assert (change.path, change.after) == (file, recorded)


@pytest.mark.parametrize(
    ("name", "path", "low_level"),
    [
        ("crun", "/opt/crun", "/opt/crun"),
        ("crun", "/usr/bin/crun", ""),
        ("gpushare", "/usr/bin/gpushare-runtime", None),
    ],
)
def test_podman_reports_its_low_level_runtime(name: str, path: str, low_level: str | None) -> None:
    answers = {" ".join(podman._INFO): f"4.3.1 {name} {path}\n"}
    assert podman.propose(SETTINGS, Tree({}, answers)).low_level == low_level


JSON, NO_CGROUP = podman._SUPPORTS["runtime_supports_json"], podman._SUPPORTS["runtime_supports_nocgroup"]
ADDED = ["gpushare", {"append": True}]


@pytest.mark.parametrize(
    ("version", "path", "text", "wanted"),
    [
        (
            "4.3.1",
            "/opt/crun",
            "",
            {
                "runtime_supports_json": [*JSON, "gpushare"],
                "runtime_supports_nocgroup": [*NO_CGROUP, "gpushare"],
            },
        ),
        ("5.8.6", "/opt/crun", "", {"runtime_supports_json": ADDED, "runtime_supports_nocgroup": ADDED}),
        ("4.3.1", "/usr/bin/crun", 'runtime_supports_json = ["runc"]', {"runtime_supports_json": ["runc", "gpushare"]}),
        ("4.3.1", "/opt/crun", "runtime_supports_json = []\nruntime_supports_nocgroup = []", {}),
        (
            "5.8.6",
            "/opt/crun",
            'runtime_supports_json = []\nruntime_supports_kvm = ["crun", {append = true}]\n'
            'runtimes_flags = {crun = ["debug"], runc = ["root=/x"]}',
            {
                "runtime_supports_nocgroup": ADDED,
                "runtime_supports_kvm": ADDED,
                "runtimes_flags": {"gpushare": ["debug"]},
            },
        ),
    ],
)
def test_podman_s_runtime_can_what_the_one_behind_it_can(
    version: str, path: str, text: str, wanted: dict[str, Any]
) -> None:
    """Without runtime_supports_json podman shows a refusal as a line of runc's log. Behind gpushare, runc comes first:
    it cannot do all that podman's default, crun, can."""
    answers = {" ".join(podman._INFO): f"{version} crun {path}\n"}
    files = {"/usr/sbin/runc": "", podman._MAIN[1]: f"[engine]\n{text}\n"}
    after = applied(podman.propose(SETTINGS, Tree(files, answers)), files)
    table = tomlkit.parse(after[podman.FILE]).unwrap()["engine"]
    assert {key: one for key, one in table.items() if key not in ("hooks_dir", "runtimes")} == wanted
    answers = {" ".join(podman._INFO): f"{version} gpushare /usr/bin/gpushare-runtime\n"}
    assert podman.propose(SETTINGS, Tree(after, answers)).changes == []
    assert withdrawn(podman, after, files) == files


def test_low_level_runtime_of_the_default_handler_is_found(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """shared/cases/engines/02: CRI-O's crun is in no directory of PATH. The configuration file wins; a program other
    than runc and crun, such as NVIDIA's, is no low-level runtime."""
    host = Host(str(tmp_path / "root"))
    monkeypatch.setattr(oci_runtime, "FOLDER", str(tmp_path / f"root{record.FOLDER}"))
    settings = Settings(str(programs / "gpushare-runtime"), str(programs / "gpushare-hook"))
    usual = oci_runtime.find(Config())
    for name, used in (("crun", True), ("nvidia-container-runtime", False)):
        low_level = programs / name
        low_level.write_text("#!/bin/sh\n")
        low_level.chmod(0o755)
        file = tmp_path / "root/etc/crio/crio.conf.d/10-crio.conf"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(MINE.replace("/usr/libexec/crio/crun", str(low_level)))
        configure.configure(crio, settings, host)
        assert oci_runtime.find(Config()) == (str(low_level) if used else usual)
        configure.configure(crio, settings, host)
        assert oci_runtime.find(Config(runtime="/bin/true")) == "/bin/true"
    configure.undo(crio, settings, host)
    assert oci_runtime.find(Config()) == usual and not host.has(record.FOLDER)


HANDLERS = """\
version = 3
[plugins.'io.containerd.cri.v1.runtime'.containerd]
  default_runtime_name = '{}'
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.mine]
    runtime_type = 'io.containerd.runc.v2'
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.mine.options]
      BinaryName = '/opt/crun'
      SystemdCgroup = true
"""
REQUIRED = SETTINGS._replace(require_nri=True)
DOCKER = {"default-runtime": "mine", "runtimes": {"mine": {"path": "/opt/crun", "runtimeArgs": ["--debug"]}}}


@pytest.mark.parametrize("hook_only", [False, True])
@pytest.mark.parametrize(
    ("engine", "files", "as_default"),
    [
        (docker, {docker.FILE: json.dumps(DOCKER)}, lambda text: text.replace('"mine"', '"gpushare"', 1)),
        (
            containerd,
            {containerd.FILE: 'imports = ["/etc/containerd/conf.d/*.toml"]\n' + HANDLERS.format("mine")},
            lambda text: text.replace("'mine'", "'gpushare'"),
        ),
        (crio, {crio._MAIN: MINE}, lambda text: text.replace('_runtime = "crun"', '_runtime = "gpushare"')),
    ],
)
def test_entry_stays_when_gpushare_is_the_default(
    engine: Any, files: dict[str, str], as_default: Callable[[str], str], hook_only: bool
) -> None:
    """The entry is a copy of the former default handler, which the engine no longer names. Without the recorded path
    no container could start."""
    settings = SETTINGS._replace(engine_version="2.1")
    assert engine.propose(settings, Tree(files)).low_level in ("/opt/crun", "/usr/libexec/crio/crun")
    after = applied(engine.propose(settings, Tree(files)), files)
    (main,) = files
    after[main] = as_default(after[main])
    again = engine.propose(settings, Tree(after))
    assert (
        again.low_level is None
        and not again.changes
        and not any("gpushare's handler runs" in one for one in again.notes)
    )
    if hook_only and engine is not docker:
        hooked = engine.propose(settings._replace(hook_only=True), Tree(after))
        assert hooked.low_level is None and "gpushare-runtime" not in applied(hooked, after).get(engine.FILE, "")


@pytest.mark.parametrize(
    ("engine", "settings", "files"),
    [
        (podman, SETTINGS, {}),  # `podman info` fails
        (containerd, REQUIRED._replace(engine_version="2.2"), {containerd.FILE: HANDLERS.format("mine")}),
        (crio, REQUIRED._replace(engine_version="1.34"), {}),
    ],
)
def test_recorded_runtime_stays_if_the_default_one_is_not_known(
    engine: Any, settings: Settings, files: dict[str, str], tmp_path: Path
) -> None:
    host = Host(str(tmp_path))
    record_of = f"{record.FOLDER}/{engine.NAME}.runtime"
    for path, text in {**files, record_of: "/opt/crun\n"}.items():
        (tmp_path / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path.lstrip("/")).write_text(text)
    configure.configure(engine, settings, host)
    assert host.read(record_of) == "/opt/crun\n"
    configure.undo(engine, settings, host)
    assert not host.has(record_of)


def test_arguments_of_gpushare_s_own_entry_follow_the_command() -> None:
    files = configured(docker, {docker.FILE: json.dumps(DOCKER)}, SETTINGS._replace(config="/c"))
    files[docker.FILE] = files[docker.FILE].replace('"mine"', '"gpushare"', 1)
    after = json.loads(configured(docker, files, SETTINGS._replace(state_dir="/s"))[docker.FILE])
    assert after["runtimes"]["gpushare"]["runtimeArgs"] == ["--gpushare-state", "/s", "--debug"]


SECOND = "/etc/d2/daemon.json"
SECOND_UNIT = "/etc/systemd/system/docker2.service"


@pytest.mark.parametrize("default_of", [docker.FILE, SECOND])
def test_each_of_two_dockerds_has_its_own_flags(default_of: str) -> None:
    """The main daemon has no flag for its file. The flag --default-runtime of one daemon concerns only that one."""
    flags = {docker.FILE: "", SECOND: f"--config-file {SECOND}"}
    flags[default_of] += " --default-runtime mine --add-runtime mine=/opt/crun"
    units = {UNIT: START.format(flags[docker.FILE]), SECOND_UNIT: START.format(flags[SECOND])}
    running = [["dockerd", *flags[path].split()] for path in (docker.FILE, SECOND)]
    info = json.dumps({"DefaultRuntime": "runc", "Runtimes": {"runc": {"path": "/opt/runc"}, "gpushare": {}}})
    tree = Tree(units, {" ".join(docker._INFO): info}, running)
    assert docker.located(SETTINGS, tree).config_file == docker.FILE
    for path, unit in ((docker.FILE, "docker"), (SECOND, "docker2")):
        named = SETTINGS._replace(config_file=path)
        has_flags = path == default_of
        assert docker.reload(named, tree) == f"systemctl {'restart' if has_flags else 'reload'} {unit}"
        assert docker.forget(SETTINGS, tree, [path]) == f"systemctl restart {unit}"
        if has_flags:
            with pytest.raises(ConfigError, match="dockerd gets --default-runtime"):
                docker.propose(named._replace(default=True), tree)
        else:
            assert configured_paths(docker, named._replace(default=True), tree) == [path]
        told = {docker.FILE: "/opt/runc", SECOND: None if has_flags else ""}[path]
        assert docker.propose(named, tree).low_level == told
        files = {**units, **configured(docker, {}, named)}
        assert docker.ignored(SETTINGS, Tree(files, tree.answers, running), [path]) == ""
    assert docker.forget(SETTINGS, tree, [docker.FILE, SECOND]) == "systemctl restart docker docker2"
    other = docker.ignored(SETTINGS, Tree(files, {}, running), ["/etc/d3.json"])
    assert other == f"dockerd was started with --config-file {docker.FILE}, so it does not read /etc/d3.json"


def test_containerd_of_docker_s_snap_is_not_the_host_s() -> None:
    running = [["containerd", "--config", "/run/snap.docker/containerd/containerd.toml"]]
    assert containerd.located(SETTINGS, Tree({}, running=running)).config_file == containerd.FILE


def test_unread_files_of_several_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest time counts. A unit that does not run reads its files when it starts."""
    times = {"docker": "ActiveState=active\nExecMainStartTimestampMonotonic=7\n", "d2": "ActiveState=inactive\n",
             "d3": "ActiveState=active\nExecMainStartTimestampMonotonic=5\n"}  # fmt: skip
    host = Host()
    monkeypatch.setattr(host, "runs_systemd", lambda: True)
    monkeypatch.setattr(host, "ask", lambda *words: times[words[-1]])
    for units, last in (("docker", 7), ("docker d2 d3", 5), ("d2", None)):
        assert unread._last_read(f"systemctl restart {units}", host) == last


def with_handler(line: str) -> dict[str, str]:
    text = HANDLERS.format("mine").replace("    runtime_type", f"    {line}\n    runtime_type")
    return {containerd.FILE: text}


K3S = "/var/lib/rancher/k3s/agent/etc/containerd/config.toml"


@pytest.mark.parametrize(
    ("engine", "files", "more", "message"),
    [
        (docker, {docker.FILE: json.dumps(DOCKER).replace('["--debug"]', "5")}, {}, '"runtimeArgs" of "mine" must'),
        (docker, {docker.FILE: json.dumps(DOCKER).replace('["--debug"]', '"x"')}, {}, '"runtimeArgs" of "mine" must'),
        (
            docker,
            {docker.FILE: json.dumps({"default-runtime": "m", "runtimes": {"m": {**TYPED, "options": []}}})},
            {},
            '"options" of a runtime must be an object, not list',
        ),
        (crio, {crio._MAIN: '[crio.runtime]\ndefault_runtime = ["x"]\n'}, {}, "default_runtime must be text, not list"),
        (crio, {crio._MAIN: MINE.replace('"/usr/libexec/crio/crun"', "4")}, {}, "runtime_path must be text, not int"),
        (
            containerd,
            {containerd.FILE: HANDLERS.format("mine").replace("'/opt/crun'", "4")},
            {},
            "BinaryName must be text, not int",
        ),
        (containerd, with_handler("base_runtime_spec = 5"), {"hook_only": True}, "base_runtime_spec must be text, not"),
        (containerd, with_handler("pod_annotations = 5"), {}, "pod_annotations must be a list of strings"),
        (
            containerd,
            {**with_handler("base_runtime_spec = '/b'"), "/b": '{"hooks": [1]}'},
            {"hook_only": True},
            '/b: "hooks" must be an object of lists of objects',
        ),
        (containerd, {K3S: 'version = "3"\n'}, {"config_file": K3S}, 'config.toml: unknown version "3"'),
        (containerd, {containerd.FILE: "version = [3]\n"}, {}, "config.toml: unknown version"),
    ],
)  # fmt: skip
def test_value_of_a_wrong_type_is_refused(engine: Any, files: dict[str, str], more: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        engine.propose(SETTINGS._replace(engine_version="2.1", **more), Tree(files))
    assert message in str(caught.value)


def test_version_of_a_wrong_type_does_not_stop_undo() -> None:
    settings = SETTINGS._replace(config_file=K3S)
    assert containerd.paths(settings, Tree({K3S: 'version = "3"\n'}))[0] == K3S


@pytest.mark.parametrize(
    ("engine", "words"),
    [(docker, ["dockerd", "--config-file", "x"]), (containerd, ["containerd", "-c", "x"]), (crio, ["crio", "-d", "x"])],
)
def test_relative_path_of_a_running_daemon_is_refused(engine: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        engine.propose(SETTINGS, Tree({}, running=[words]))
    assert f'{words[1].lstrip("-")} "x" from process 100 is not an absolute path' in str(caught.value)


def test_program_outside_path_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `Host.program` finds it, for example in /usr/local/bin."""
    program = tmp_path / "containerd"
    program.write_text("#!/bin/sh\necho answer; echo wrong >&2; exit $1\n")
    program.chmod(0o755)
    host = Host()
    monkeypatch.setattr(host, "program", lambda name: str(program))
    assert host.ask("containerd", "0") == "answer\n" and host.complaint("containerd", "1") == "wrong"
