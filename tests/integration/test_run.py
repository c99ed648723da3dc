"""gpushare run: a host program gets a share, and host and program are otherwise unchanged."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pty
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import fenced
from tests.integration import ns_util
from tests.support import judge, processes, programs
from tests.support.host import TREE, Node
from tests.support.programs import DUMP, ENVIRONMENT, GRAB, run, words

pytestmark = pytest.mark.usefixtures("pruned")


GIB = 1 << 30
MIB = 1 << 20
CONTEXT = 300 * MIB
CGROUPS = Path("/sys/fs/cgroup/devices")


@contextlib.contextmanager
def started(node: Node, *arguments: str, name: str = "held", **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A program that prints "ready" and is killed at the end."""
    command = words(node, "--name", name, *arguments)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT, **options
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


def listed(node: Node) -> dict[str, Any]:
    return {one["id"]: one for one in json.loads(node.cli("list", "--format", "json").stdout)}


WAYS = {"plain": GRAB, "fork": (*GRAB, "fork"), "closed": (*GRAB, "closed")}
WAYS["env -i"] = ("env", "-i", f"PYTHONPATH={ENVIRONMENT['PYTHONPATH']}", *GRAB)
WAYS["shell"] = ("sh", "-c", 'env -u LD_LIBRARY_PATH LD_PRELOAD= "$@"', "sh", *GRAB)


def test_sandbox_of_bubblewrap_keeps_the_limit(node: Node) -> None:
    """As in docs/recipes.md. With a read-only /usr/lib/gpushare nothing runs, rather than without a limit."""
    text = (TREE / "docs/recipes.md").read_text().partition("\n## bubblewrap\n")[2].partition("\n## ")[0]
    (block,) = ("\n".join(lines) for one, lines in fenced(text) if one == "sh")
    _, _, command = block.strip().removesuffix(" nvidia-smi").partition(" -- ")
    done = run(node, "--memory", "4Gi", "--", *command.split(), *GRAB)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["total_bytes"] == 4 * GIB and 4 * GIB - CONTEXT - 4 * MIB <= report["got_bytes"] <= 4 * GIB
    bare = command.replace("--bind /usr/lib/gpushare /usr/lib/gpushare", "").split()
    assert run(node, "--memory", "4Gi", "--", *bare, *GRAB).returncode != 0


@pytest.mark.parametrize("way", WAYS)
def test_limit_is_visible_reached_and_enforced(node: Node, way: str) -> None:
    done = run(node, "--memory", "4Gi", "--", *WAYS[way])
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["total_bytes"], report["nvml_total_bytes"]) == (4 * GIB, 4 * GIB)
    assert 4 * GIB - CONTEXT - 4 * MIB <= report["got_bytes"] <= 4 * GIB
    peak = judge.peak_bytes(node.driver_root, os.stat("/proc/self/ns/pid").st_ino)
    assert report["got_bytes"] <= peak <= 4 * GIB
    assert done.stderr == ""


def test_two_programs_have_separate_limits(node: Node, tmp_path: Path) -> None:
    got = {}
    with contextlib.ExitStack() as stack:
        ends = {}
        for name, gib in (("small", 5), ("large", 11)):
            channel = tmp_path / name
            channel.mkdir()
            for fifo in ("events", "go"):
                os.mkfifo(channel / fifo)
            command = words(node, "--memory", f"{gib}Gi", "--name", name, "--", *programs.TENANT, str(channel))
            process = stack.enter_context(subprocess.Popen(command, env=ENVIRONMENT))
            stack.callback(process.kill)
            ends[name] = [os.open(channel / fifo, os.O_RDWR) for fifo in ("events", "go")]  # opening must not block
            stack.callback(lambda fds: [os.close(fd) for fd in fds], ends[name])
        for step in ("seen", "full"):
            for name, (events, go) in ends.items():
                assert select.select([events], [], [], 60)[0], f"{name} is silent before {step!r}"
                report = json.loads(os.read(events, 4096))
                assert report["event"] == step
                got[name] = report.get("got_bytes", 0)
                if step == "seen":
                    os.write(go, b"\n")
        now = judge.taken(node.driver_root, os.stat("/proc/self/ns/pid").st_ino).current_bytes
        refused = run(node, "--memory", "1Gi", "--", "true")
        used = {name: one["shares"][0]["memory_used_bytes"] for name, one in listed(node).items()}
    assert 5 * GIB - CONTEXT - 4 * MIB <= got["small"] <= 5 * GIB
    assert 11 * GIB - CONTEXT - 4 * MIB <= got["large"] <= 11 * GIB
    assert sum(got.values()) <= now <= 16 * GIB
    assert used["small"] >= got["small"] and used["large"] >= got["large"]
    assert (refused.returncode, refused.stdout) == (75, "") and "0 B free" in refused.stderr


# The program's environment is unchanged


@pytest.mark.parametrize("directory", ["/", "/usr/lib", "/usr/lib/python3", "/dev/shm", "/etc"])
def test_program_inherits_everything_unchanged(node: Node, directory: str) -> None:
    environment = {**ENVIRONMENT, "LC_ALL": "C", "ODD": "\udcff =x", "EMPTY": "", "GPUSHARE_MEMORY": "2Gi"}
    reader, writer = os.pipe()
    before = (
        *("env", "--ignore-signal=HUP", "--ignore-signal=PIPE", "--block-signal=USR1"),
        *("prlimit", "--nofile=111:222", "--", "nice", "-n", "3"),
    )
    dumps = []
    try:
        for prefix in ((), words(node, "--name", "same", "--")):
            done = subprocess.run(
                [*before, *prefix, *DUMP, "--memory", "", "a b"],
                cwd=directory,
                env=environment,
                pass_fds=(reader,),
                umask=0o027,
                capture_output=True,
                stdin=reader,
                timeout=60,
            )
            assert done.returncode == 0, done.stderr
            dumps.append(json.loads(done.stdout))
    finally:
        os.close(reader)
        os.close(writer)
    for dump in dumps:
        dump["files"] = [(n, "pipe" if n in (1, 2) else path) for n, path in dump["files"]]
        assert dump.pop("parent") == os.getpid()  # no process of gpushare is in between
        dump.pop("group"), dump.pop("session")
    assert dumps[0] == dumps[1]


def test_default_sigpipe_is_kept(node: Node) -> None:
    done = run(node, "--", "sh", "-c", "yes | head -n1; grep SigIgn /proc/self/status", restore_signals=True)
    first, _, ignored = done.stdout.split()
    assert first == "y" and done.stderr == ""
    assert not int(ignored, 16) >> (signal.SIGPIPE - 1) & 1


def test_controlling_terminal_is_kept(node: Node) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(words(node)[0], words(node, "--", "sh", "-c", "tty; tty </dev/tty; test -t 2"), ENVIRONMENT)
    said = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while part := os.read(terminal, 4096):
            said += part
    name = os.ptsname(terminal) if hasattr(os, "ptsname") else said.split()[0].decode()
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert said.split() == [name.encode(), b"/dev/tty"]


ENDS = {
    "code": (("sh", "-c", "exit 7"), 7, ""),
    "signal": (("sh", "-c", "kill -TERM $$"), -signal.SIGTERM, ""),
    "not found": (("no-such",), 127, 'gpushare: "no-such": No such file or directory; no directory of PATH has it: '),
    "not found by path": (("/no/such",), 127, 'gpushare: "/no/such": No such file or directory; give the path of '),
    "not executable": (("/etc/passwd",), 126, 'gpushare: "/etc/passwd": Permission denied; name a program that '),
    "a directory": (("/etc",), 126, 'gpushare: "/etc": Permission denied; name a program'),
}


@pytest.mark.parametrize("end", ENDS)
def test_exit_code_is_the_program_s(node: Node, end: str) -> None:
    command, code, said = ENDS[end]
    done = run(node, "--", *command)
    assert (done.returncode, done.stdout) == (code, "") and done.stderr.startswith(said), done.stderr
    assert done.stderr.count("\n") == bool(said)
    if said:
        assert node.leases() == []


def test_script_without_shebang_runs_in_the_shell(node: Node, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("echo $0 $*; exit 3\n")
    script.chmod(0o755)
    done = run(node, "--", str(script), "a", "--b")
    assert (done.returncode, done.stdout) == (3, f"{script} a --b\n")
    damaged = tmp_path / "damaged"
    damaged.write_text("#!/no/such/interpreter\n")
    damaged.chmod(0o755)
    done = run(node, "--", str(damaged))
    said = f'gpushare: "{damaged}": No such file or directory; its interpreter does not exist\n'
    assert (done.returncode, done.stderr) == (127, said)
    assert node.leases() == []


# Its lease


def test_list_shows_the_command_and_inspect_the_process(node: Node) -> None:
    with started(node, "--memory", "3Gi", "--", "sh", "-c", "echo ready; read x; exit 9") as process:
        one = listed(node)["held"]
        assert one["command"] == "sh -c 'echo ready; read x; exit 9'"
        assert (one["state"], one["init_pid"]) == ("running", process.pid)
        assert one["shares"][0]["memory_limit_bytes"] == 3 * GIB
        assert "command       sh -c" in node.cli("inspect", "held").stdout
        assert node.cli("list").stdout.splitlines()[1].endswith("exit 9'")
        taken = run(node, "--name", "held", "--memory", "1Gi", "--", "true")
        assert taken.returncode == 75 and '"held" already has a lease' in taken.stderr
        process.communicate(b"\n", timeout=30)
        assert process.returncode == 9


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_next_start_cleans_up_after_a_killed_program(node: Node, number: int) -> None:
    with started(node, "--", "sh", "-c", "echo ready; exec sleep 100") as process:
        assert run(node, "--memory", "1Gi", "--", "true").returncode == 75  # it has no limit: it uses the whole device
        process.send_signal(number)
        process.wait(30)
    assert listed(node)["held"]["state"] == "ended"
    rows = json.loads(node.cli("doctor", "--format", "json").stdout)["checks"]
    leftovers = next(row for row in rows if row["name"] == "leases")
    assert leftovers["result"] == "ok", leftovers  # no engine reports its end: nothing is wrong
    cgroup = (node.state / "containers" / "held" / "cgroup").read_text()
    assert os.path.isdir(cgroup)
    assert run(node, "--memory", "16Gi", "--name", "next", "--", "true").returncode == 0
    assert not os.path.exists(cgroup)
    assert node.cli("prune").returncode == 0
    assert node.leases() == [] and list((node.state / "trash").iterdir()) == []


def test_background_process_keeps_the_lease(node: Node, tmp_path: Path) -> None:
    """A program that goes into the background keeps its memory."""
    script = f"(exec sleep 100 <&- >&- 2>&-) & echo $! >{tmp_path}/pid; echo ready"
    with started(node, "--memory", "9Gi", "--", "sh", "-c", script) as process:
        assert process.wait(30) == 0
    background = int((tmp_path / "pid").read_text())
    try:
        assert listed(node)["held"]["state"] == "running"
        assert run(node, "--memory", "9Gi", "--", "true").returncode == 75
    finally:
        processes.kill_and_reap(background)  # an orphan, so it is our child
    assert run(node, "--memory", "9Gi", "--", "true").returncode == 0


def test_nested_start_is_refused(node: Node) -> None:
    done = run(node, "--memory", "2Gi", "--", *words(node, "--memory", "1Gi", "--", "true"))
    assert done.returncode == 64 and "this process is in a share of a GPU; start the command without" in done.stderr
    assert "Traceback" not in done.stderr


REFUSED = {
    "unit": (("--memory", "4Gx"), 64, '--memory="4Gx": unknown unit'),
    "no device": (("--devices", "none"), 64, "--devices: no device is requested"),
    "user": (("--user", "no-such-user"), 64, '--user "no-such-user": no such user'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_input_is_refused_in_one_line(node: Node, tmp_path: Path, case: str) -> None:
    arguments, code, said = REFUSED[case]
    done = run(node, *arguments, "--", "touch", str(tmp_path / "ran"))
    assert (done.returncode, done.stdout) == (code, "") and said in done.stderr
    assert code == 2 or done.stderr.count("\n") == 1
    assert not (tmp_path / "ran").exists() and node.leases() == []


def test_missing_command_is_a_usage_error(node: Node) -> None:
    done = run(node, "--memory", "1Gi")
    assert done.returncode == 2 and "COMMAND" in done.stderr


def test_options_override_variables(node: Node) -> None:
    environment = {**ENVIRONMENT, "GPUSHARE_MEMORY": "2Gi", "NVIDIA_VISIBLE_DEVICES": "none"}
    done = run(node, "--", *GRAB, env=environment)
    assert json.loads(done.stdout)["total_bytes"] == 2 * GIB
    done = run(node, "--memory", "25%", "--", *GRAB, env=environment)
    assert json.loads(done.stdout)["total_bytes"] == 4 * GIB


# The host


def _host() -> dict[str, tuple[int, ...]]:
    """All that a plan could change: every name, inode and time in the directories of its targets."""
    found = {}
    directories = ("/usr", "/usr/lib", ns_util.LIBDIR, "/usr/bin", "/usr/lib/firmware", "/etc", "/dev")
    for directory in filter(os.path.isdir, directories):
        for path in (directory, *(f"{directory}/{name}" for name in sorted(os.listdir(directory)))):
            status = os.lstat(path)
            times = (
                () if path.startswith("/dev/") else (status.st_mtime_ns, status.st_ctime_ns)
            )  # runc sets null's owner
            found[path] = (status.st_ino, status.st_mode, status.st_size, status.st_rdev, *times)
    for busy in ("/dev/shm", "/dev/ptmx", "/dev/pts", "/dev/tty"):
        found.pop(busy, None)
    return {**found, **{f"/{name}": () for name in os.listdir("/")}}


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def test_host_is_unchanged(node: Node) -> None:
    cache = "/etc/ld.so.cache"
    before, digest, mounts = _host(), _digest(cache), ns_util.host_mounts()
    inside = f"ls {ns_util.LIBDIR}/libcuda.so.1 /dev/nvidia0 >&2 && echo ready; read x"
    with started(node, "--memory", "4Gi", "--", "sh", "-c", inside):
        assert _host() == before and _digest(cache) == digest
        own = [line for line in ns_util.host_mounts() if line not in mounts]
        assert all(str(node.state) in line for line in own), own  # the state directory and a usage file
    assert _host() == before
    script = f"cd {ns_util.LIBDIR}; touch x; rm libcuda.so.1; touch /dev/x; : >{cache}"
    writing = run(node, "--", "bash", "-c", script)
    assert writing.stderr.count("Read-only file system") == 4 and writing.returncode != 0
    assert _host() == before and _digest(cache) == digest


def test_loader_finds_the_shim_by_each_name(node: Node) -> None:
    script = "import ctypes, json; " + "; ".join(
        f"ctypes.CDLL({name!r})" for name in ("libcuda.so.1", "libcuda.so", f"{ns_util.LIBDIR}/libnvidia-ml.so.1")
    )
    script += "; print([l.split()[-1] for l in open('/proc/self/maps') if 'libcuda' in l or 'libnvidia-ml' in l][0])"
    done = run(node, "--memory", "1Gi", "--", programs.PYTHON, "-c", script)
    assert done.returncode == 0, done.stderr
    done = run(node, "--memory", "1Gi", "--", "ldconfig", "-p")
    assert f"libcuda.so.1 (libc6,x86-64) => {ns_util.LIBDIR}/libcuda.so.1" in done.stdout
