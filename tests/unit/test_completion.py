"""Completion in a real shell on a terminal, by pressing the Tab key."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpushare.cli.completion import SHELLS
from gpushare.core.errors import CapacityError
from gpushare.state import log

from tests.support.host import BIN
from tests.support.terminal import Terminal
from tests.unit import pure
from tests.unit.clihost import GIB

ENV = {"PATH": f"{BIN}:{os.environ['PATH']}", "PS1": "$ "}


@pytest.fixture
def shell(tmp_path: Path) -> Callable[[str], Terminal]:
    """shell(name): a shell without start-up files that has read the completion script."""

    def start(name: str) -> Terminal:
        commands = {
            "bash": ["bash", "--norc", "--noprofile", "-i"],
            "zsh": ["zsh", "-f", "-i"],
            "fish": ["fish", "--no-config", "-i"],
        }
        env = {**ENV, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
        one = Terminal(commands[name], 400, 40, env)  # a worker has longer paths, and a line contains one twice
        setup = {
            "bash": "source <(gpushare completion bash)",
            "zsh": "autoload -U compinit; compinit -u -D; source <(gpushare completion zsh)",
            "fish": "gpushare completion fish | source",
        }[name]
        one.press(f"{setup}; echo re''ady\r")
        try:
            one.expect("\nready")
        except BaseException:
            one.__exit__(None, None, None)
            raise
        return one

    return start


@pytest.mark.parametrize("name", SHELLS)
def test_tab_completes_commands_options_and_their_values(shell: Callable[[str], Terminal], name: str) -> None:
    with shell(name) as one:
        for typed, wanted in (
            ("gpushare insp", "gpushare inspect"),
            ("gpushare runtime conf", "gpushare runtime configure"),
            ("gpushare top --inte", "gpushare top --interval"),
            ("gpushare top --sort thr", "gpushare top --sort throttled"),
            ("gpushare runtime configure podm", "gpushare runtime configure podman"),
        ):
            one.press(f"{typed}\t")
            one.expect(wanted)
            one.press("\x15")  # Ctrl-U clears the line


def test_tab_completes_ids(
    shell: Callable[[str], Terminal], start: Callable[..., Path], state: Path, capfd: Any
) -> None:
    start("training-1", pure.share(0, 0, GIB))
    log.record(str(state), "refused-2", "gpushare: no room", CapacityError("no room"))
    with shell("bash") as one:
        for typed, wanted in (("train", "training-1"), ("ref", "refused-2")):
            one.press(f"gpushare --state {state} inspect {typed}\t")
            one.expect(f"inspect {wanted}")
            one.press("\x15")


@pytest.mark.parametrize(
    "words", ["gpushare inspect x", "gpushare --state /none inspect x", "gpushare nothing x", "gpushare"]
)
def test_completion_prints_no_errors(words: str) -> None:
    environment = {
        **ENV,
        "_GPUSHARE_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = subprocess.run([BIN / "gpushare"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_unknown_shell_is_refused(cli: Callable[..., Any]) -> None:
    code, text, error = cli("completion", "csh")
    assert (code, text) == (2, "") and "'bash', 'zsh', 'fish'" in error and error.count("\n") == 1
