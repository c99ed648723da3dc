"""Every fault in a command's environment is one line, never a traceback or "internal error", which means a bug."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from gpushare.cli import main, output
from gpushare.cli.main import group

from tests.support.host import BIN
from tests.unit import pure
from tests.unit.clihost import GIB

# Each reads the state directory and works without a driver
COMMANDS = [
    ["list"],
    ["top", "--once"],
    ["inspect", "c1"],
    ["devices"],
    ["status"],
    ["prune", "--dry-run"],
    ["prune"],
    ["refresh"],
    ["doctor"],
    ["config", "show"],
    ["explain", "/"],
    ["labels", "--dry-run"],
    ["cdi", "generate"],
    ["runtime", "status"],
    ["mps", "status"],
    ["mps", "stop"],
    ["uninstall", "--dry-run"],
]
IDS = [" ".join(command) for command in COMMANDS]


def check_output(command: list[str], code: int, text: str, error: str) -> None:
    """Check the output that every failure and success has in common."""
    everything = text + error
    assert "Traceback" not in everything and "internal error" not in everything, everything
    assert 0 <= code < 128, code
    lines = error.splitlines()
    assert all(line.startswith("gpushare: ") for line in lines), error
    if code and command[0] not in ("doctor",):  # a table row has the error
        assert len(lines) == 1 and text == "", (code, everything)


@pytest.mark.parametrize("format_", ["table", "json"])
@pytest.mark.parametrize("command", COMMANDS, ids=IDS)
@pytest.mark.parametrize(
    "fault", ["missing", "file", "broken folders", "loop", "config is a directory", "config is binary"]
)
def test_wrong_kind_of_path_is_one_line(
    command: list[str], format_: str, fault: str, tmp_path: Path, capfd: Any
) -> None:
    state, config = tmp_path / "a-state", tmp_path / "config.yaml"
    config.write_text(f"version: 1\ndriver: {{root: {tmp_path}}}\n")
    if fault == "file":
        state.write_text("")
    elif fault == "broken folders":
        state.mkdir()
        for name in ("containers", "errors", "trash", "lock", "node.json", "devices"):
            (state / name).mkdir() if name in ("lock", "node.json") else (state / name).write_text("")
    elif fault == "loop":
        state.symlink_to(state)
    elif fault == "config is a directory":
        config.unlink()
        config.mkdir()
    elif fault == "config is binary":
        config.write_bytes(b"\xff\xfe\x00\x01" * 10)
    code = main(["--config", str(config), "--state", str(state), *command, "--format", format_])
    text, error = capfd.readouterr()
    check_output(command, code, text, error)
    subprocess.run(["umount", "--recursive", "--lazy", state], capture_output=True)


def planted(folder: Path) -> None:
    """A state directory as an ordinary user can make it, for a command of root: it would detach the mount `there/rw`
    and remove the directory `here`."""
    (folder / "there/rw").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "test", folder / "there/rw"], check=True)
    (folder / "here").mkdir()
    for name in ("containers", "errors", "trash/b"):
        (folder / "state" / name).mkdir(parents=True)
    for name in ("rootless", "lock"):
        (folder / "state" / name).touch()
    (folder / "state/trash/a").symlink_to(folder / "there")
    (folder / "state/trash/b/cgroup").write_text(str(folder / "here"))


@pytest.mark.parametrize("owner", [65534, 0])  # 0: after `chown`, which an administrator may try
@pytest.mark.parametrize("command", [["prune"], ["list"], ["refresh"]], ids=" ".join)
def test_root_command_changes_nothing_for_a_state_directory_of_a_user(
    tmp_path: Path, capfd: Any, command: list[str], owner: int
) -> None:
    planted(tmp_path)
    os.chown(tmp_path / "state", owner, owner)
    (tmp_path / "config.yaml").write_text(f"version: 1\ndriver: {{root: {tmp_path}}}\n")
    try:
        code = main(["--config", str(tmp_path / "config.yaml"), "--state", str(tmp_path / "state"), *command])
        error = capfd.readouterr().err
        assert owner == 0 or (code == 71 and "is of uid 65534" in error and error.count("\n") == 1)
        assert os.path.ismount(tmp_path / "there/rw") and (tmp_path / "here").is_dir()
    finally:
        subprocess.run(["umount", tmp_path / "there/rw"], capture_output=True)
        subprocess.run(["umount", "--recursive", "--lazy", tmp_path / "state"], capture_output=True)


LEASES: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_text(""),
    "text": lambda path: path.write_text("no lease"),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 100),
    "deep": lambda path: path.write_text("[" * 100_000),
    "large": lambda path: path.write_text('{"a": "' + "x" * (2 << 20) + '"}'),
    "array": lambda path: path.write_text("[]"),
    "object": lambda path: path.write_text("{}"),
    "number": lambda path: path.write_text("1e999"),
    "directory": lambda path: path.mkdir(),
    "fifo": lambda path: os.mkfifo(path),
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "loop": lambda path: path.symlink_to(path),
}
LOOKING = [command for command in COMMANDS if command[0] in ("list", "top", "inspect", "devices", "prune", "doctor")]


@pytest.mark.parametrize("content", LEASES)
def test_unreadable_lease_is_shown_as_damaged(
    cli: Callable[..., Any], start: Callable[..., Path], state: Path, content: str
) -> None:
    start("good", pure.share(0, 0, GIB))
    start("c1", pure.share(0, 0, GIB))
    path = state / "containers" / "c1" / "lease.json"
    path.unlink()
    LEASES[content](path)
    for command in LOOKING:
        if command != ["prune"]:
            check_output(command, *cli(*command))
    states = {one["id"]: one["state"] for one in json.loads(cli("list", "--format", "json")[1])}
    assert states == {"good": "running", "c1": "damaged"}


@pytest.mark.parametrize(
    "field", ["state", "shares", "created", "init_pid", "boot_id", "driver_version", "bundle", "id"]
)
@pytest.mark.parametrize("value", [None, "x\x1b[31m", -1, [], {}, 1e308, 10**25, float("inf")], ids=repr)
def test_lease_with_invalid_field_is_no_crash(
    cli: Callable[..., Any], start: Callable[..., Path], state: Path, field: str, value: Any
) -> None:
    start("c1", pure.share(0, 0, GIB))
    path = state / "containers" / "c1" / "lease.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    for command in (["list"], ["top", "--once"], ["inspect", "c1"], ["devices"], ["prune", "--dry-run"]):
        code, text, error = cli(*command)
        check_output(command, code, text, error)
        assert "\x1b" not in text + error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("slot", 1),
        ("memory_limit_bytes", -GIB),
        ("draining_bytes", -1),
        ("virtual_bytes", -GIB),
        ("compute_percent", -30),
    ],
)
def test_lease_with_impossible_amount_frees_no_memory(
    cli: Callable[..., Any], start: Callable[..., Path], state: Path, field: str, value: int
) -> None:
    """A lease with a negative amount would let other containers get more than the device has."""
    start("c1", pure.share(0, 0, GIB))
    path = state / "containers" / "c1" / "lease.json"
    lease = json.loads(path.read_text())
    lease["shares"][0][field] = value
    path.write_text(json.dumps(lease))
    assert json.loads(cli("list", "--format", "json")[1])[0]["state"] == "damaged"
    assert json.loads(cli("devices", "--format", "json")[1])[0]["state"] == "unknown use"


def run(command: list[str], state: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    words = [str(BIN / "gpushare"), "--state", str(state), *command]
    return subprocess.run(words, text=True, stderr=subprocess.PIPE, env={"PATH": os.environ["PATH"]}, **options)


@pytest.mark.parametrize(
    "command", [["list"], ["top", "--once"], ["config", "show"], ["doctor"], ["--help"]], ids=" ".join
)
def test_full_standard_output_is_one_line(tmp_path: Path, command: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = run(command, tmp_path, stdout=full)
    assert (done.returncode, done.stderr) == (1, "gpushare: standard output: No space left on device\n")


@pytest.mark.parametrize(
    "command", [["list"], ["top", "--once"], ["config", "show"], ["doctor"], ["--help"]], ids=" ".join
)
def test_closed_pipe_ends_quietly(tmp_path: Path, command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = run(command, tmp_path, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", ["0<&-", ">&-", "2>&-", "0<&- >&- 2>&-"])
@pytest.mark.parametrize("command", ["list", "config show", "top --once", "nothing", "--help"])
def test_closed_standard_files_are_no_crash(tmp_path: Path, closed: str, command: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$0" --state "$1" {command} {closed}', BIN / "gpushare", tmp_path / "none"],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"]},
    )
    assert done.returncode == (2 if command == "nothing" else 0), done
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert (done.stderr == "") == (command != "nothing" or "2>&-" in closed)


def test_unencodable_characters_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    output.write_line(f"é → {output.bar(3, 4)}")
    sys.stdout.flush()
    assert written.getvalue() == b"\xe9 \\u2192 #######...  75%\n"


def points(command: list[str], state: Path, tmp_path: Path) -> list[str]:
    """The system calls with which `gpushare` opens files."""
    log = tmp_path / "strace"
    words = [
        "strace",
        "-f",
        "-o",
        str(log),
        "-e",
        "trace=openat",
        str(BIN / "gpushare"),
        "--state",
        str(state),
        *command,
    ]
    subprocess.run(words, check=True, capture_output=True)
    return [line for line in log.read_text().splitlines() if "openat(" in line]


def test_ctrl_c_at_any_point_ends_without_traceback(tmp_path: Path) -> None:
    """SIGINT at every seventh file that is opened, from the interpreter's first to the last. While the interpreter
    opens the program file, only Python's own handler is set."""
    state = tmp_path / "none"
    opened = points(["list"], state, tmp_path)
    assert len(opened) > 50
    codes = set()
    for number in range(5, len(opened) + 1, 7):
        if f'"{BIN / "gpushare"}"' in opened[number - 1]:
            continue
        inject = f"inject=openat:signal=INT:when={number}"
        words = ["strace", "-f", "-o", "/dev/null", "-e", "trace=openat", "-e", inject, str(BIN / "gpushare")]
        done = subprocess.run([*words, "--state", str(state), "list"], capture_output=True, text=True)
        assert done.stderr == "", (number, done)
        codes.add(done.returncode)
    assert codes <= {0, 130, -signal.SIGINT} and codes & {130, -signal.SIGINT}


@pytest.mark.parametrize(
    "words",
    [("gpushare-hook", "prestart"), ("gpushare-runtime", "create", "--bundle", "/none", "c")],
    ids=lambda w: w[0],
)
def test_ctrl_c_while_a_start_loads_python_prints_no_traceback(words: tuple[str, ...]) -> None:
    """A start that has not begun ends by the signal; afterwards it is refused with one line.

    Without the snapshot, which loads nothing."""
    printed = set()
    for number in range(5, 120, 9):
        inject = f"inject=openat:signal=INT:when={number}"
        strace = ["strace", "-f", "-o", "/dev/null", "-e", "trace=openat", "-e", inject]
        line = [*strace, str(BIN.parent / "libexec" / words[0]), *words[1:]]
        printed.add(subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True).stderr)
    # Python 3.14 itself prints this one, before it runs the program
    printed = {text for text in printed if not text.startswith("Failed checking if argv[0] is an import path entry\n")}
    assert "" in printed and not [text for text in printed if text.count("\n") > 1 or "Traceback" in text]


def test_ctrl_c_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """As under nohup, or in the background of a script."""
    inject = "inject=openat:signal=INT:when=60"
    words = ["strace", "-f", "-o", "/dev/null", "-e", "trace=openat", "-e", inject, str(BIN / "gpushare"), "list"]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", COMMANDS, ids=IDS)
def test_unprivileged_user_gets_one_line(command: list[str], state: Path, tmp_path: Path) -> None:
    """Over root's state directory. `env -i` removes the user's session variables too."""
    words = ["setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups", str(BIN / "gpushare")]
    for folder in (tmp_path, *tmp_path.parents):
        if folder != Path("/tmp") and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    for state_dir in (state, Path("/run/user/12345/gpushare")):
        done = subprocess.run(
            [*words, "--state", str(state_dir), *command],
            capture_output=True,
            text=True,
            env={"PATH": os.environ["PATH"]},
        )
        check_output(command, done.returncode, done.stdout, done.stderr)
        if state_dir == state and command[0] in ("list", "top", "inspect"):
            assert done.returncode and "run as root" in done.stderr


# Options whose empty value the parser refuses, as it refuses the empty value of the matching variable
READERS = {"run", "mps start --uid", "mps start --device", "mps stop --device", "mps status --device"} | {
    "export --listen",
    "k8s-plugin --memory-unit",
    "k8s-plugin --whole",
    "k8s-plugin --resource",
}


def text_options(command: click.Command, name: str) -> Iterator[tuple[str, click.Command, str]]:
    """(name of the command, the command, option) for each option that takes any text."""
    for option in command.params:
        plain = isinstance(option.type, (click.types.StringParamType, click.Path))
        if isinstance(option, click.Option) and plain and not option.is_flag:
            yield name, command, option.opts[0]
    if isinstance(command, click.Group):
        context = click.Context(command)
        for word in command.list_commands(context):
            below = command.get_command(context, word)
            assert below is not None
            yield from text_options(below, f"{name} {word}".strip())


def test_empty_option_value_is_refused() -> None:
    """`--memory "$LIMIT"` in a script with LIMIT unset must mean neither all memory nor the current directory."""
    seen = set()
    for name, command, option in text_options(group, ""):
        if not {name, f"{name} {option}"} & READERS or option == "--name":
            with pytest.raises(click.BadParameter, match="it is empty"):
                command.make_context(name or "gpushare", [option, " "], **group.context_settings)
            seen.add(f"{name} {option}".strip())
    assert {"--state", "run --name", "mps start --memory", "cdi generate --output", "labels --output"} <= seen


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("mps start --uid " + "9" * 5000, 'gpushare: --uid "9'),
        ("mps start --uid 4294967295", 'gpushare: --uid "4294967295" is not a user id'),
        ("export --interval nan", "invalid value for '--interval': 'nan' is not a number"),
        ("top --once --interval nan", "invalid value for '--interval': 'nan' is not a number"),
        ("k8s-plugin --memory-unit 25%", 'unknown unit "%"; write 1Mi, 64Mi or 1Gi'),
        ("k8s-plugin --memory-unit 0", "zero is not a limit; write 1Mi, 64Mi or 1Gi"),
        ("limit serve", 'no such command "serve", did you mean `gpushare limit set serve` or `gpushare limit show se'),
        ("limit serve --memory 3Gi", "did you mean `gpushare limit set serve` or `gpushare limit show serve`"),
        ("limit sett serve", 'no such command "sett", did you mean "set"'),
        ("runtime docker", "did you mean `gpushare runtime configure docker` or `gpushare runtime status docker`"),
        ("runtime configure dockr", """'docker', 'podman', did you mean "docker";"""),
        ("runtime configure Docker", """, did you mean "docker";"""),
        ("runtime configure cri-o", """, did you mean "crio";"""),
        ("limit set c1 --memory -5%", "a percentage cannot be added or subtracted; write +1Gi, -512Mi, or 25%"),
        ("limit set c1 --compute -5%", '--compute="-5%": below zero; write a whole percentage from 1% to 100%'),
        ("export --socket /tmp/" + "a" * 200, "AF_UNIX path too long"),
        ("export --socket /", "it exists and is not a socket; give another --socket"),
        ("export --socket /dev/null", "it exists and is not a socket; give another --socket"),
    ],
    ids=lambda text: text[:30],
)
def test_invalid_value_is_refused(cli: Callable[..., Any], words: str, message: str) -> None:
    code, text, error = cli(*words.split())
    check_output(words.split(), code, text, error)
    assert code and message in error


@pytest.mark.parametrize("words", [["--config", "c.yaml", "list"], ["config", "check", "f"], ["run", "true"]])
def test_deleted_working_directory_is_one_line(words: list[str], tmp_path: Path) -> None:
    script = 'mkdir gone; cd gone; rmdir ../gone; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, "-", BIN / "gpushare", *words], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode and done.stderr.startswith("gpushare: the directory of this process: No such file or dir")
    assert done.stderr.endswith("; cd to an existing directory\n") and done.stderr.count("\n") == 1


def test_file_in_place_of_socket_is_kept(cli: Callable[..., Any], tmp_path: Path) -> None:
    """The kernel refuses a connection to a plain file with the same error as to the socket of a killed server."""
    file, link = tmp_path / "notes", tmp_path / "link"
    file.write_text("precious")
    link.symlink_to(file)
    for path in (file, link):
        assert cli("export", "--socket", str(path))[0] == 1
    assert file.read_text() == "precious" and link.is_symlink()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (click.NoSuchOption("--sta", "No such option: --sta", ["--state"]), 'option "--sta", did you mean "--state"'),
        (click.NoSuchOption("--no", "No such option: --no"), 'option "--no"'),
        (click.UsageError("No such command 'lits'."), 'command "lits", did you mean one of "limit", "list"'),
        (click.UsageError("No such command '\\''."), 'command "\\x27"'),
    ],
)
def test_unknown_name_reads_the_same_with_old_click(
    error: click.UsageError, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The sentences are those of click 8.1, which quotes no option and suggests no command."""

    def refuse(*_: object) -> None:
        error.ctx = click.Context(group, info_name="gpushare")
        raise error

    monkeypatch.setattr(group, "make_context", refuse)
    assert main([]) == 2
    assert capfd.readouterr().err == f"gpushare: no such {said}; see `gpushare --help`\n"
