"""Failed starts: one line for the user, the same line on the host, and nothing left behind."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import rootfs
from tests.support.host import BIN, BUILD, TREE, Node
from tests.support.runc import Container, RuntimeFailed

MakeContainer = Callable[..., Container]
HOOK = BIN / "gpushare-hook"
SHARE = {"GPUSHARE_MEMORY": "4Gi"}


def refused(one: Container) -> str:
    """The last line of what the runtime printed."""
    with pytest.raises(RuntimeFailed) as failed:
        one.create()
    assert "Traceback" not in failed.value.message
    return failed.value.last_line


def assert_nothing_left(node: Node) -> None:
    assert node.left() == []


def changed_hook(tmp_path: Path, change: str) -> Path:
    """Return a hook that runs a test's statements before main()."""
    site = next((BUILD / "venv" / "lib").glob("python3*/site-packages"))
    program = tmp_path / "changed-hook"
    program.write_text(
        "#!/usr/bin/python3 -ISs\nimport sys\n"
        f"sys.path.insert(0, {str(TREE / 'hook')!r})\nsys.path.append({str(site)!r})\n"
        f"from gpushare.programs import hook\n{change}\nsys.exit(hook.main())\n"
    )
    program.chmod(0o755)
    return program


def test_refusal_is_kept_until_the_next_success(container: MakeContainer, node: Node) -> None:
    one = container(["true"], env={"GPUSHARE_MEMORY": "17Gi"}, hook=node.hook())
    line = refused(one)
    assert "17 GiB requested, 16 GiB free of 16 GiB" in line
    kept = (node.state / "errors" / one.id).read_text()
    assert kept.startswith("gpushare: ") and kept.strip() in line and kept.count("\n") == 1
    shown = node.cli("inspect", one.id)
    assert shown.returncode == 0 and "17 GiB requested" in shown.stdout and "refused" in shown.stdout
    assert_nothing_left(node)

    one.spec["process"]["env"].append("GPUSHARE_MEMORY=4Gi")
    one.spec["process"]["env"].remove("GPUSHARE_MEMORY=17Gi")
    (one.bundle / "config.json").write_text(json.dumps(one.spec))
    assert one.run() == 0
    assert not (node.state / "errors" / one.id).exists()


def test_hanging_hook_ends_at_its_deadline(container: MakeContainer, node: Node, tmp_path: Path) -> None:
    """A process holds the lease lock forever: the start fails by itself and leaves nothing."""
    assert node.cli("refresh").returncode == 0  # makes the state directory
    program = changed_hook(
        tmp_path,
        "from gpushare.programs import deadline; deadline.DEADLINE_S = deadline.UNDO_DEADLINE_S = 0.3\n"
        "deadline.signal.alarm = lambda s: deadline.signal.setitimer(deadline.signal.ITIMER_REAL, s)",
    )
    hook = node.hook()._replace(program=program)
    one = container(["true"], env=SHARE, hook=hook)
    one.spec["hooks"] = {"prestart": hook.entries()["prestart"]}
    (one.bundle / "config.json").write_text(json.dumps(one.spec))
    with open(node.state / "lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "took longer than 0.3 s" in refused(one)
    assert node.cli("prune").returncode == 0
    assert_nothing_left(node)


def test_hook_ignores_python_settings_of_environment_and_directory(tmp_path: Path) -> None:
    """Modules, startup files and interpreter settings from an image or a bundle are never used."""
    trap = tmp_path / "trap"
    trap.mkdir()
    for name in ("json", "gpushare", "os", "struct", "sitecustomize", "usercustomize", "startup"):
        (trap / f"{name}.py").write_text(f"open({str(tmp_path / 'caught')!r}, 'w')\nraise SystemExit(0)\n")
    environment = {
        "PYTHONPATH": str(trap),
        "PYTHONHOME": str(trap),
        "PYTHONSTARTUP": str(trap / "startup.py"),
        "PYTHONINSPECT": "1",
        "PYTHONPLATLIBDIR": str(trap),
        "HOME": str(trap),
        "TMPDIR": str(trap),
        "GPUSHARE_MEMORY": "1Gi",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "PATH": str(trap),
    }
    (tmp_path / "config.json").write_text(json.dumps({"root": {"path": "r"}, "process": {"env": []}}))
    state = {"id": "c1", "pid": 0, "bundle": str(tmp_path)}
    done = subprocess.run(
        [HOOK, "--config", "/none", "--state", str(tmp_path / "state"), "prestart"],
        input=json.dumps(state).encode(),
        env=environment,
        cwd=trap,
        capture_output=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert not (tmp_path / "caught").exists()
    assert not (tmp_path / "state").exists()


def run_hook(node: Node, stage: str, state: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    command = [HOOK, "--config", node.config, "--state", node.state, stage]
    return subprocess.run([str(c) for c in command], input=json.dumps(state), capture_output=True, text=True)


def of_bundle(one: Container, pid: int) -> dict[str, Any]:
    return {"ociVersion": "1.0.2", "id": one.id, "status": "creating", "pid": pid, "bundle": str(one.bundle)}


EXIT_CODES: dict[int, tuple[dict[str, str], dict[str, Any], str]] = {
    64: ({"GPUSHARE_MEMORY": "banana"}, {}, "GPUSHARE_MEMORY"),
    75: ({"GPUSHARE_MEMORY": "17Gi"}, {}, "16 GiB free"),
    77: ({"NVIDIA_VISIBLE_DEVICES": "0"}, {"policy": {"require_limits": True}}, "policy.require_limits"),
    78: ({"GPUSHARE_MEMORY": "1Gi"}, {"placement": "magic"}, "placement"),
    69: ({"GPUSHARE_MEMORY": "1Gi"}, {"driver": {"root": "/nowhere"}}, "no NVIDIA driver is loaded"),
}


@pytest.mark.parametrize("code", EXIT_CODES)
def test_exit_code_names_the_cause(
    container: MakeContainer, make_node: Callable[..., Node], simhost: Path, code: int
) -> None:
    env, config, quoted = EXIT_CODES[code]
    node = make_node(simhost, f"node{code}", **config)
    one = container(["sleep", "inf"], env=env)
    one.create()  # without hooks it is only a process with a mount namespace
    done = run_hook(node, "prestart", of_bundle(one, one.pid))
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("gpushare: ") and quoted in done.stderr and done.stderr.count("\n") == 1
    assert_nothing_left(node)
    explained = node.cli("explain", str(one.bundle))
    assert (explained.returncode, explained.stderr, explained.stdout) == (code, done.stderr, "")


def test_process_without_a_mount_namespace_is_refused(container: MakeContainer, node: Node) -> None:
    """A wrong pid must never cause mounts on the host."""
    one = container(["sleep", "inf"], env=SHARE)
    one.create()
    before = rootfs.mount_points()
    done = run_hook(node, "prestart", of_bundle(one, os.getpid()))
    assert done.returncode == 71 and "no mount namespace of its own" in done.stderr
    new = [point for point in rootfs.mount_points() if point not in before]
    assert [point for point in new if not f"{point}/".startswith(f"{node.state}/")] == []
    assert_nothing_left(node)


def test_missing_container_state_is_refused_in_one_line(node: Node, tmp_path: Path) -> None:
    words = f"{HOOK} --config {node.config} --state {node.state} prestart"
    for redirection in ("<&-", f"<{tmp_path}"):
        done = subprocess.run(["sh", "-c", f"exec {words} {redirection}"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 64
        assert done.stderr.startswith("gpushare: ") and "on standard input" in done.stderr
        assert redirection != "<&-" or "not valid JSON" in done.stderr, "Python would open another file as its input"
        assert done.stderr.count("\n") == 1 and "internal" not in done.stderr


def test_hook_in_two_stages_mounts_driver_files_once(container: MakeContainer, node: Node) -> None:
    def twice(spec: dict[str, Any]) -> None:
        spec["hooks"]["createRuntime"] = spec["hooks"]["prestart"]

    env = {"NVIDIA_VISIBLE_DEVICES": "none"}
    one = container(["cat", "/proc/self/mountinfo"], env=env, hook=node.hook(), edit=twice)
    assert one.run() == 0, one.stderr
    targets = [line.split()[4] for line in one.stdout.splitlines()]
    assert any("libnvidia-ml.so" in target for target in targets)
    assert len(targets) == len(set(targets))


def test_refusal_of_an_id_with_the_traceback_suffix_is_found(container: MakeContainer, node: Node) -> None:
    one = container(["true"], env={"GPUSHARE_MEMORY": "17Gi"}, hook=node.hook(), id=f".{os.getpid()}.trace")
    refused(one)
    assert "17 GiB requested" in node.cli("inspect", f".{os.getpid()}").stdout  # found by its prefix
