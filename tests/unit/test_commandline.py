"""Parse the command line of an OCI runtime as runc and crun do, without guessing."""

from __future__ import annotations

import subprocess

import pytest
from gpushare.programs import commandline
from gpushare.programs.commandline import parse


@pytest.mark.parametrize(
    ("line", "command", "container", "bundle"),
    [
        ("create c", "create", "c", "."),
        ("create --bundle /b c", "create", "c", "/b"),
        ("create -b /b --pid-file /p c", "create", "c", "/b"),
        ("create --bundle=/b c", "create", "c", "/b"),
        ("create -bundle=/b c", "create", "c", "/b"),
        ("create c --bundle /b", "create", "c", "/b"),
        ("create --bundle /a -b /b c", "create", "c", "/b"),
        ("create -b /a --bundle=/b c", "create", "c", "/b"),
        ("create --pid-file --bundle c", "create", "c", "."),
        ("create -- -c", "create", "-c", "."),
        ("--root /r run -d --keep c", "run", "c", "."),
        ("-root /r --log=/l -log-format json --systemd-cgroup create -b /b c", "create", "c", "/b"),
        ("--root create state create", "state", "", "."),
        ("--debug=true create create", "create", "create", "."),
        ("--rootless auto --cgroup-manager systemd create c", "create", "c", "."),
        ("--criu /x restore --image-path /i -b /b c", "restore", "c", "/b"),
        ("delete -f c", "delete", "c", "."),
        ("delete --force c", "delete", "c", "."),
        ("exec -t c create --bundle /b", "exec", "", "."),
        ("--version", "", "", "."),
        ("", "", "", "."),
        ("- create", "-", "", "."),
    ],
)
def test_line_is_parsed(line: str, command: str, container: str, bundle: str) -> None:
    call = parse(line.split())
    assert (call.unknown, call.command, call.container_id, call.bundle) == ("", command, container, bundle)
    assert call.rest == tuple(line.split())


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        ("--roo /r create c", "--roo"),  # a prefix is a flag of crun's, not a new one
        ("---root /r create c", "---root"),
        ("--root", "--root"),
        ("-new create c", "-new"),
        ("create --new", "--new"),
        ("create --new a b c", "--new"),
        ("create --new a --newer b", "--new"),
        ("create --bun /b c", "--bun"),
        ("create -b/b c", "-b/b"),
        ("create -db /b c", "-db"),
        ("create c -b", "-b"),
        ("-- create c", "--"),
        ("--new exec create c", "--new"),
    ],
)
def test_line_that_is_not_clear_names_the_flag(line: str, flag: str) -> None:
    call = parse(line.split())
    assert (call.unknown, call.clear) == (flag, False)
    assert commandline.could_start(call) == ("create" in line)


@pytest.mark.parametrize(
    ("line", "command", "container", "bundle"),
    [
        ("--new create c", "create", "c", "."),
        ("--new x create -b /b c", "create", "c", "/b"),
        ("--new=x --newer create -b /b c", "create", "c", "/b"),
        ("--new create create x -b /b", "create", "x", "/b"),
        ("--new exec create c x", "exec", "", "."),
        ("--new run create -b /b c", "create", "c", "/b"),
        ("create --new c", "create", "c", "."),
        ("create --new x c", "create", "c", "."),
        ("create --new --bundle /b c", "create", "c", "/b"),
        ("create --new --bundle=/b c", "create", "c", "/b"),
        ("create --bundle /b --new x c", "create", "c", "/b"),
        ("create --bundle /b --new=x c", "create", "c", "/b"),
        ("create c --new x --bundle /b", "create", "c", "/b"),
        ("create --new x --newer y --bundle /b -- c", "create", "c", "/b"),
        ("--new x --newer run --newest y --bundle /b c", "run", "c", "/b"),
        ("delete --new c", "delete", "c", "."),
        ("delete --new x c", "delete", "c", "."),
        ("--new x state c", "state", "", "."),
        ("--new kill c", "kill", "", "."),
    ],
)
def test_line_with_new_flags_is_parsed_if_one_reading_is_left(
    line: str, command: str, container: str, bundle: str
) -> None:
    call = parse(line.split())
    assert (call.clear, call.command, call.container_id, call.bundle) == (True, command, container, bundle)
    assert call.unknown.startswith("--new")
    assert call.rest == tuple(line.split())


def test_readings_of_an_unclear_line_are_all_found() -> None:
    call = parse("create --new x --newer c --bundle /b".split())
    assert [(one.container_id, one.bundle) for one in call.readings] == [("c", "/b"), ("x", "/b")]
    many = [word for number in range(300) for word in (f"--x{number}", f"y{number}")]
    assert parse(["create", *many, "c"]).container_id == "c"
    assert len(parse(["create", *many]).readings) == 300


def test_gpushare_flags_are_removed() -> None:
    call = parse(["--gpushare-state=/s", "--gpushare-config", "/c", "--root", "/r", "state", "c"])
    assert (call.config, call.state_dir, call.rest) == ("/c", "/s", ("--root", "/r", "state", "c"))
    assert parse(["--root", "/r", "--gpushare-config", "/c", "state", "c"]).unknown == "--gpushare-config"
    assert parse(["exec", "c", "--gpushare-config"]).rest == ("exec", "c", "--gpushare-config")


def test_log_flags_are_parsed() -> None:
    call = parse(["--log", "/l", "--log-format=json", "create", "c"])
    assert (call.log, call.log_format) == ("/l", "json")
    assert parse(["--log", "/l", "create", "--new"]).log == "/l"  # the refusal of --new is written there


def flags_in_help(*command: str) -> set[str]:
    """Every flag that the program's own help lists."""
    text = subprocess.run([*command, "--help"], capture_output=True, text=True).stdout
    lines = (line.strip() for line in text.splitlines() if line.startswith((" ", "\t")))
    words = [part.split() for line in lines if line.startswith("-") for part in line.split("  ")[0].split(", ")]
    return {part[0].lstrip("-").partition("=")[0] for part in words if part and part[0].startswith("-")}


@pytest.mark.parametrize("program", ["runc", "crun"])
def test_tables_contain_every_flag_of_installed_runtimes(program: str) -> None:
    known = {*commandline.GLOBAL_VALUE, *commandline.GLOBAL_BARE}
    assert flags_in_help(program) - known == set()
    assert "root" in flags_in_help(program)
    known = {*commandline.COMMAND_VALUE, *commandline.COMMAND_BARE}
    for command in ("create", "run"):
        assert flags_in_help(program, command) - known == set()
        assert "bundle" in flags_in_help(program, command)
    assert flags_in_help(program, "delete") - set(commandline.DELETE_BARE) == set()
