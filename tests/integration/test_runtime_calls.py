"""gpushare-runtime in place of the low-level runtime: the arguments it passes on, its exit, and its error output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.edited import config_of
from tests.support.host import Node
from tests.support.runc import Container, RuntimeFailed

MakeContainer = Callable[..., Container]
ALL = {"GPUSHARE_MEMORY": "16Gi"}  # the whole device
ONE_GIB = {"GPUSHARE_MEMORY": "1Gi"}


# A low-level runtime that writes down its arguments. Its last line is how it exits.
FAKE = """#!/bin/bash
dir={dir}
printf '%s\\n' "$@" >$dir/words
tr '\\0' '\\n' </proc/$$/environ | sort >$dir/environment
while read -r name mask; do  # without a child: glibc 2.41 blocks all signals during a fork
    [[ $name != Sig[IB]* ]] || echo "$name $mask"
done </proc/$$/status >$dir/signals
pwd >$dir/cwd
umask >$dir/umask
echo $$ >$dir/pid
cat /proc/$$/stat >$dir/stat
{end}
"""


def fake(directory: Path, end: str = "exit 0") -> Path:
    program = directory / "low-level"
    program.write_text(FAKE.format(dir=directory, end=end))
    program.chmod(0o755)
    return program


@pytest.fixture
def spy(make_node: Callable[..., Node], simhost: Path, tmp_path: Path) -> Callable[..., Node]:
    """spy(end) -> a node whose low-level runtime writes down its arguments and exits with `end`."""

    def make(end: str = "exit 0") -> Node:
        return make_node(simhost, runtime={"path": str(fake(tmp_path, end))})

    return make


def call(node: Node, *args: str, **arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [*node.runtime(), *args]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, **arguments)


# The low-level runtime


def test_other_commands_are_passed_on_unchanged(spy: Callable[..., Node], tmp_path: Path) -> None:
    node = spy()
    for words in (
        ["--root", "/x", "start", "create"],
        ["--version"],
        [],
        ["-log=/l", "--systemd-cgroup", "exec", "-t", "c", "sh", "-c", "create --bundle"],
        ["--cgroup-manager", "disabled", "state", "c"],
        ["checkpoint", "--image-path", "/i", "c"],
        ["--strange", "value", "kill", "c", "KILL"],  # cannot start a container under any interpretation
    ):
        assert call(node, *words).returncode == 0
        assert (tmp_path / "words").read_text() == "".join(f"{word}\n" for word in words or [""])


@pytest.mark.parametrize("command", ["state", "create", "asking", "delete"])
def test_runtime_inherits_the_engine_s_process_state(
    spy: Callable[..., Node], container: MakeContainer, tmp_path: Path, command: str
) -> None:
    """Environment, ignored and blocked signals, umask and directory; also the pid, as create executes runc."""
    node = spy()
    one = container(["true"], env=ONE_GIB if command == "asking" else {})
    words = {
        "state": ["state", "c"],
        "create": ["create", "--bundle", str(one.bundle), one.id],
        "asking": ["create", "--bundle", str(one.bundle), one.id],
        "delete": ["delete", one.id],
    }[command]
    environment = {"A": "1", "PATH": "/usr/bin:/bin", "UTF": "\u00e9"}

    def prepare() -> None:
        os.umask(0o027)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGUSR1})

    for _ in range(2):  # first compile the configuration, then use it
        process = subprocess.Popen([*node.runtime(), *words], env=environment, cwd=tmp_path, preexec_fn=prepare)
        assert process.wait(60) == 0
        assert (tmp_path / "pid").read_text() == f"{process.pid}\n"
        seen = dict(line.partition("=")[::2] for line in (tmp_path / "environment").read_text().splitlines())
        assert seen == environment
        blocked, ignored = (
            int(line.split()[1], 16) for line in sorted((tmp_path / "signals").read_text().splitlines())
        )
        ours = [signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE, signal.SIGXFSZ]  # bash itself changes other signals
        assert [number for number in ours if ignored >> (number - 1) & 1] == [signal.SIGHUP]
        assert [number for number in ours if blocked >> (number - 1) & 1] == [signal.SIGUSR1]
        assert (tmp_path / "umask").read_text() == "0027\n"
        assert (tmp_path / "cwd").read_text() == f"{tmp_path}\n"


@pytest.mark.parametrize(("end", "code"), [("exit 7", 7), ("kill -TERM $$", -15), ("kill -KILL $$", -9)])
@pytest.mark.parametrize("command", ["state", "create", "delete"])
def test_exit_code_or_signal_is_the_low_level_runtime_s(
    spy: Callable[..., Node], container: MakeContainer, end: str, code: int, command: str
) -> None:
    node = spy(end)
    one = container(["true"], env=ONE_GIB)
    bundle = ["--bundle", str(one.bundle)] if command == "create" else []
    if command == "delete":  # of a known container
        call(node, "create", "--bundle", str(one.bundle), one.id)
        assert node.leases() == [one.id]
    assert call(node, command, *bundle, one.id).returncode == code


def test_failed_create_of_the_low_level_runtime_leaves_no_lease(container: MakeContainer, node: Node) -> None:
    """runc calls poststop then, though its own process, which holds the reservation, is alive."""
    one = container(["/no/such/program"], env=ALL, runtime=node.runtime())
    with pytest.raises(RuntimeFailed, match="no such file"):
        one.create()
    assert node.leases() == []
    other = container(
        ["true"],
        env=ALL,
        runtime=node.runtime(),
        edit=lambda spec: spec["hooks"].update(createRuntime=[{"path": "/bin/false"}]),
    )
    with pytest.raises(RuntimeFailed):
        other.create()
    assert node.leases() == []


def test_runtime_killed_before_exec_blocks_no_memory(spy: Callable[..., Node], container: MakeContainer) -> None:
    """crun calls no poststop after a failed create: the reservation ended with its process."""
    node = spy("kill -KILL $$")
    for _ in range(2):
        one = container(["true"], env=ALL)
        assert call(node, "create", "--bundle", str(one.bundle), one.id).returncode == -9


def test_edited_configuration_applies_at_once(spy: Callable[..., Node], tmp_path: Path) -> None:
    node = spy()
    assert call(node, "state", "c").returncode == 0
    config = json.loads(node.config.read_text())
    other = tmp_path / "other"
    other.mkdir()
    config["runtime"]["path"] = str(fake(other, "exit 3"))
    node.config.write_text(json.dumps(config))
    assert call(node, "state", "c").returncode == 3
    node.config.write_text("no: yaml: at: all")
    assert call(node, "state", "c").returncode == 3  # running containers must stay manageable


# Command lines


def test_container_id_may_be_create(container: MakeContainer, node: Node) -> None:
    one = container(["true"], env=ONE_GIB, runtime=node.runtime(), id="create")
    assert one.run() == 0, one.stderr
    assert node.leases() == ["create"]
    one.delete()
    assert node.leases() == []


@pytest.mark.parametrize(
    "words",
    [
        ["--new-flag", "create"],
        ["create", "--new", "x", "--newer", "y"],
        ["create", "--bun", "."],
        ["create", "--bundle"],
    ],
    ids=" ".join,
)
def test_unclear_line_starts_no_unlimited_container(
    spy: Callable[..., Node], container: MakeContainer, tmp_path: Path, words: list[str]
) -> None:
    node = spy()
    one = container(["true"], env=ONE_GIB)
    done = call(node, *words, cwd=one.bundle)
    assert done.returncode == 64 and "is not known" in done.stderr
    assert not (tmp_path / "words").exists()


def test_unclear_line_of_a_container_without_request_is_passed_on(
    spy: Callable[..., Node], container: MakeContainer, tmp_path: Path
) -> None:
    node = spy()
    words = ["create", "--new", "x", "--newer", "y"]
    assert call(node, *words, cwd=container(["true"]).bundle).returncode == 0
    assert (tmp_path / "words").read_text().split() == words


def test_restore_of_a_share_is_refused(spy: Callable[..., Node], container: MakeContainer, tmp_path: Path) -> None:
    node = spy()
    one, plain = container(["true"], env=ONE_GIB), container(["true"])
    done = call(node, "restore", "--image-path", "/i", "--bundle", str(one.bundle), one.id)
    assert done.returncode == 64 and "GPUSHARE_MEMORY: a container with a share" in done.stderr
    assert not (tmp_path / "words").exists()
    assert call(node, "restore", "--image-path", "/i", "--bundle", str(plain.bundle), plain.id).returncode == 0


# Refusals, shown to the engine's user


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_refusal_is_written_to_the_engine_s_log(
    container: MakeContainer, node: Node, tmp_path: Path, log_format: str
) -> None:
    one = container(["true"], env={"GPUSHARE_MEMORY": 'ba"nana'})
    log = tmp_path / "log"
    log.write_text("before\n")
    flags = ["--log", str(log), "--log-format", log_format]
    done = call(node, *flags, "create", "--bundle", str(one.bundle), one.id)
    assert done.returncode == 64
    before, line = log.read_text().splitlines()
    assert before == "before"
    if log_format == "json":
        entry = json.loads(line)
        assert entry["level"] == "error" and entry["time"].endswith("Z") and entry["msg"] == done.stderr.strip()
    else:
        assert line.startswith('time="') and 'level=error msg="gpushare: GPUSHARE_MEMORY=' in line
    assert r'"ba\x22nana"' in node.cli("inspect", one.id).stdout


@pytest.mark.usefixtures("no_hybrid_cgroups")
def test_crun_shows_our_hook_s_output(container: MakeContainer, make_node: Callable[..., Node], simhost: Path) -> None:
    """Stock crun shows no hook output; gpushare-runtime gives crun an output file."""
    node = make_node(simhost, runtime={"path": "/usr/bin/crun"})
    one = container(["true"], env=ALL, runtime=node.runtime())

    spec = config_of(one)
    steal = f"rm {node.state}/containers/{one.id}/lease.json"
    spec["hooks"] = {"createRuntime": [{"path": "/bin/sh", "args": ["sh", "-c", steal]}]}  # before our hook
    (one.bundle / "config.json").write_text(json.dumps(spec))
    with pytest.raises(RuntimeFailed) as failed:
        one.create()
    assert f'gpushare: the lease of "{one.id}" is gone' in failed.value.message
