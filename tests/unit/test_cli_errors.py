"""Whatever is wrong around a command is said in one line: no traceback, and no "internal error": that is for bugs."""

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

# Each looks at the state directory, and none needs a driver that is there
COMMANDS = [
    ["list"],
    ["top", "--once"],
    ["inspect", "c1"],
    ["devices"],
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


def said_well(command: list[str], code: int, text: str, error: str) -> None:
    """What every end of a command has in common."""
    everything = text + error
    assert "Traceback" not in everything and "internal error" not in everything, everything
    assert 0 <= code < 128, code
    lines = error.splitlines()
    assert all(line.startswith("gpushare: ") for line in lines), error
    if code and command[0] not in ("doctor",):  # whose rows say it
        assert len(lines) == 1 and text == "", (code, everything)


@pytest.mark.parametrize("format_", ["table", "json"])
@pytest.mark.parametrize("command", COMMANDS, ids=IDS)
@pytest.mark.parametrize(
    "fault", ["missing", "file", "broken folders", "loop", "config is a directory", "config is binary"]
)
def test_places_that_are_not_what_they_should_be(
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
    said_well(command, code, text, error)
    subprocess.run(["umount", "--recursive", "--lazy", state], capture_output=True)


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
def test_lease_that_cannot_be_read_is_shown_as_damaged(
    cli: Callable[..., Any], start: Callable[..., Path], state: Path, content: str
) -> None:
    start("good", pure.share(0, 0, GIB))
    start("c1", pure.share(0, 0, GIB))
    path = state / "containers" / "c1" / "lease.json"
    path.unlink()
    LEASES[content](path)
    for command in LOOKING:
        if command != ["prune"]:
            said_well(command, *cli(*command))
    states = {one["id"]: one["state"] for one in json.loads(cli("list", "--format", "json")[1])}
    assert states == {"good": "running", "c1": "damaged"}


@pytest.mark.parametrize(
    "field", ["state", "shares", "created", "init_pid", "boot_id", "driver_version", "bundle", "id"]
)
@pytest.mark.parametrize("value", [None, "x\x1b[31m", -1, [], {}, 1e308, 10**25, float("inf")], ids=repr)
def test_lease_with_a_field_that_makes_no_sense(
    cli: Callable[..., Any], start: Callable[..., Path], state: Path, field: str, value: Any
) -> None:
    start("c1", pure.share(0, 0, GIB))
    path = state / "containers" / "c1" / "lease.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    for command in (["list"], ["top", "--once"], ["inspect", "c1"], ["devices"], ["prune", "--dry-run"]):
        code, text, error = cli(*command)
        said_well(command, code, text, error)
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
def test_numbers_that_cannot_be_are_nobodys_room(
    cli: Callable[..., Any], start: Callable[..., Path], state: Path, field: str, value: int
) -> None:
    """A lease with less than nothing would let others have more than there is."""
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
def test_output_that_cannot_be_written(tmp_path: Path, command: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = run(command, tmp_path, stdout=full)
    assert (done.returncode, done.stderr) == (1, "gpushare: standard output: No space left on device\n")


@pytest.mark.parametrize(
    "command", [["list"], ["top", "--once"], ["config", "show"], ["doctor"], ["--help"]], ids=" ".join
)
def test_reader_that_has_gone(tmp_path: Path, command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = run(command, tmp_path, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", ["0<&-", ">&-", "2>&-", "0<&- >&- 2>&-"])
@pytest.mark.parametrize("command", ["list", "config show", "top --once", "nothing", "--help"])
def test_standard_files_that_are_closed(tmp_path: Path, closed: str, command: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$0" --state "$1" {command} {closed}', BIN / "gpushare", tmp_path / "none"],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"]},
    )
    assert done.returncode == (2 if command == "nothing" else 0), done
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert (done.stderr == "") == (command != "nothing" or "2>&-" in closed)


def test_words_that_the_terminal_cannot_show(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    output.write_line(f"é → {output.bar(3, 4)}")
    sys.stdout.flush()
    assert written.getvalue() == b"\xe9 \\u2192 #######...  75%\n"


def points(command: list[str], state: Path, tmp_path: Path) -> list[str]:
    """The calls by which the program opens files."""
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


def test_ctrl_c_at_any_point(tmp_path: Path) -> None:
    """SIGINT at every seventh file that is opened, from the interpreter's own to the last. While the interpreter opens
    the program itself, its own handler is in place and nothing of ours has run yet."""
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


def test_ctrl_c_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """As with nohup, or in the background of a script."""
    inject = "inject=openat:signal=INT:when=60"
    words = ["strace", "-f", "-o", "/dev/null", "-e", "trace=openat", "-e", inject, str(BIN / "gpushare"), "list"]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", COMMANDS, ids=IDS)
def test_user_without_rights(command: list[str], state: Path, tmp_path: Path) -> None:
    """Over root's state directory. `env -i`: no session of his own either."""
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
        said_well(command, done.returncode, done.stdout, done.stderr)
        if state_dir == state and command[0] in ("list", "top", "inspect"):
            assert done.returncode and "run as root" in done.stderr


# Options whose empty value is refused by whoever reads the value, as that of the variable of the same meaning would be
READERS = {"run", "mps start --uid", "mps start --device", "mps stop --device", "mps status --device"} | {
    "export --listen",
    "k8s-plugin --memory-unit",
    "k8s-plugin --whole",
}


def text_options(command: click.Command, name: str) -> Iterator[tuple[str, click.Command, str]]:
    """(name of the command, itself, option) of each that takes any text."""
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


def test_an_empty_value_is_refused_wherever_it_can_be_typed() -> None:
    """`--memory "$LIMIT"` of a script where nobody has set LIMIT: it means neither all, nor this directory."""
    seen = set()
    for name, command, option in text_options(group, ""):
        if not {name, f"{name} {option}"} & READERS or option == "--name":
            with pytest.raises(click.BadParameter, match="it is empty"):
                command.make_context(name or "gpushare", [option, " "])
            seen.add(f"{name} {option}".strip())
    assert {"--state", "run --name", "mps start --memory", "cdi generate --output", "labels --output"} <= seen


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("mps start --uid " + "9" * 5000, 'gpushare: --uid "9'),
        ("mps start --uid 4294967295", 'gpushare: --uid "4294967295" is no number of a user'),
        ("export --interval nan", "invalid value for '--interval': 'nan' is not a number"),
        ("top --once --interval nan", "invalid value for '--interval': 'nan' is not a number"),
        ("k8s-plugin --memory-unit 25%", 'unknown unit "%"; write 1Mi, 64Mi or 1Gi'),
        ("k8s-plugin --memory-unit 0", "zero is not a limit; write 1Mi, 64Mi or 1Gi"),
        ("export --socket /tmp/" + "a" * 200, "AF_UNIX path too long"),
        ("export --socket /", "it is there, and is no socket; give another --socket"),
        ("export --socket /dev/null", "it is there, and is no socket; give another --socket"),
    ],
    ids=lambda text: text[:30],
)
def test_values_that_are_none(cli: Callable[..., Any], words: str, message: str) -> None:
    code, text, error = cli(*words.split())
    said_well(words.split(), code, text, error)
    assert code and message in error


@pytest.mark.parametrize("words", [["--config", "c.yaml", "list"], ["config", "check", "f"], ["run", "true"]])
def test_a_directory_that_is_gone(words: list[str], tmp_path: Path) -> None:
    script = 'mkdir gone; cd gone; rmdir ../gone; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, "-", BIN / "gpushare", *words], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode and done.stderr.startswith("gpushare: the directory of this process: No such file or dir")
    assert done.stderr.endswith("; cd to one that exists\n") and done.stderr.count("\n") == 1


def test_a_file_in_the_place_of_a_socket_is_left_alone(cli: Callable[..., Any], tmp_path: Path) -> None:
    """To connect to a file is refused by the kernel in the same words as to a socket of a server that was killed."""
    file, link = tmp_path / "notes", tmp_path / "link"
    file.write_text("precious")
    link.symlink_to(file)
    for path in (file, link):
        assert cli("export", "--socket", str(path))[0] == 1
    assert file.read_text() == "precious" and link.is_symlink()
