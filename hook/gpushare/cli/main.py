"""The command group. `main` alone turns an error into one line on standard error and an exit code."""

from __future__ import annotations

import errno
import importlib
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import Any, Optional, cast

import click

from ..core import constants
from ..core.errors import GpushareError, what_to_do
from ..core.quoting import shown
from ..state import log
from ..system import filelock, rootless
from .options import Paths, given, require_config, with_no_color

PROGRAM = "gpushare"
COMPLETE = "_GPUSHARE_COMPLETE"  # the variable with which a shell requests completions; see completion.py
_FEW = 3  # commands of a group that an error can list
_WRITE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)  # of write(2)
# click raises it since 8.2; older versions print the help and exit with 0
_NO_ARGUMENTS: tuple[type[click.ClickException], ...] = tuple(
    getattr(click.exceptions, name) for name in ("NoArgsIsHelpError",) if hasattr(click.exceptions, name)
)
INTERRUPTED = 130  # 128 + SIGINT, as in shells

# heading of --help -> command -> (module of this package, name in the module). Only the module of the given command is
# imported, so that `gpushare run` starts programs fast.
GROUPS = {
    "Containers and programs": {
        "list": ("containers", "list_"),
        "top": ("top", "top"),
        "inspect": ("containers", "inspect"),
        "usage": ("usage", "usage"),
        "run": ("run", "run"),
        "limit": ("limit", "limit"),
        "pause": ("suspend", "pause"),
        "suspend": ("suspend", "suspend"),
        "resume": ("suspend", "resume"),
        "explain": ("explain", "explain"),
    },
    "This host": {
        "status": ("status", "status"),
        "devices": ("devices", "devices"),
        "doctor": ("doctor", "doctor"),
        "config": ("config", "config"),
        "runtime": ("runtime", "runtime"),
        "refresh": ("node", "refresh"),
        "prune": ("prune", "prune"),
        "mps": ("mps", "mps_group"),
        "uninstall": ("uninstall", "uninstall"),
    },
    "Clusters and monitoring": {
        "export": ("export", "export"),
        "agent": ("agent", "agent"),
        "cdi": ("cdi", "cdi_group"),
        "labels": ("labels", "labels"),
        "k8s-plugin": ("k8s_plugin", "k8s_plugin"),
        "nri": ("nri", "nri"),
        "dra": ("dra", "dra"),
    },
    "Help": {
        "help": ("help", "help_"),
        "completion": ("completion", "completion"),
        "version": ("node", "version"),
    },
}
COMMANDS = {name: place for commands in GROUPS.values() for name, place in commands.items()}
ALIASES = {"ls": "list", "ps": "list", "stats": "top"}  # as in docker and podman

# Shown below the commands; \b: click keeps the line breaks
_EXAMPLES = """\b
To begin:
  gpushare doctor
  gpushare runtime configure docker
  docker run --runtime gpushare -e GPUSHARE_MEMORY=4Gi IMAGE nvidia-smi
"""


class _Commands(click.Group):
    """The commands of COMMANDS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> Optional[click.Command]:
        place = COMMANDS.get(ALIASES.get(cmd_name, cmd_name))
        if place is None:
            return None
        module, name = place
        command: click.Command = getattr(importlib.import_module(f".{module}", __package__), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        limit = formatter.width - 6 - max(map(len, COMMANDS))
        for heading, commands in GROUPS.items():
            with formatter.section(heading):
                found = ((name, self.get_command(ctx, name)) for name in commands)
                formatter.write_dl([(name, one.get_short_help_str(limit)) for name, one in found if one])


def _print_version(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        from . import node

        click.echo(f"gpushare {node.installed()}")
        context.exit()


@click.group(cls=_Commands, epilog=_EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config",
    callback=given,
    type=click.Path(readable=False),
    default=constants.CONFIG_PATH,
    show_default=True,
    metavar="FILE",
    help="Configuration file.",
)
@click.option(
    "--state",
    callback=given,
    type=click.Path(file_okay=False, readable=False),
    metavar="DIR",
    help=f"State directory.  [default: {constants.STATE_DIR}]",
)
@with_no_color
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version and exit.",
)
@click.pass_context
def group(context: click.Context, config: str, state: Optional[str]) -> None:
    """Give containers exact shares of a GPU; list, change and explain these shares."""
    context.obj = Paths(os.path.abspath(config), os.path.abspath(state or rootless.state_dir()))
    filelock.refuse_foreign(context.obj.state_dir)
    if context.invoked_subcommand != "runtime":  # which can create the file; it checks this itself
        require_config(context.obj)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run one command and return its exit code, which docs/cli.md explains. Never prints a traceback."""
    _open_standard_files()
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_DFL:  # gpushare's programs set it, so that Ctrl-C before this line prints no traceback
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 0
    try:
        code = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head or less, has exited
        code = 0
        _forget_output()
    except OSError as error:  # a full disk
        code = _fail(GpushareError(f"standard output: {error.strerror}"))
        _forget_output()
    except KeyboardInterrupt:
        code = INTERRUPTED
        _forget_output()
    finally:
        signal.signal(signal.SIGINT, before)
    return code


def _run(argv: Optional[Sequence[str]]) -> int:
    """Run one command and return its exit code. Raises BrokenPipeError, which click's own `main` would turn into exit
    code 1, and OSError if standard output cannot be written."""
    try:
        wanted = os.environ.get(COMPLETE)
        if wanted:
            from click.shell_completion import shell_complete

            return shell_complete(group, {}, PROGRAM, COMPLETE, wanted)
        with group.make_context(PROGRAM, list(sys.argv[1:] if argv is None else argv)) as context:
            result: Any = group.invoke(context)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except _NO_ARGUMENTS as error:
        error.show()
        return error.exit_code
    except click.UsageError as error:
        return _fail(_usage(error, sys.argv[1:] if argv is None else argv))
    except click.ClickException as error:
        return _fail(GpushareError(error.format_message()))
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except PermissionError as error:
        return _fail(GpushareError(f"{shown(error.filename)}: {error.strerror}", "run as root"))
    except OSError as error:
        if error.filename is None and error.errno in _WRITE_ERRNOS:
            raise
        if error.filename is None and error.errno == errno.ENOENT:  # from getcwd(3), which resolves relative paths
            return _fail(
                GpushareError(f"the directory of this process: {error.strerror}", "cd to an existing directory")
            )
        return _fail(
            GpushareError(f"{shown(error.filename)}: {error.strerror}", what_to_do(error)) if error.filename else error
        )
    except Exception as error:
        return _fail(error)


def _usage(error: click.UsageError, argv: Sequence[str]) -> GpushareError:
    """Convert click's sentences to one line in gpushare's style, without a capital letter and a full stop."""
    text = _unknown(error) or " ".join(error.format_message().split()).rstrip(".") + _meant(error)
    text = re.sub(r"is not a valid (float|integer)( range)?", "is not a number", text)
    if getattr(error, "option_name", "") in ("--config", "--state"):
        text += ", which stands before the command"
    command = error.ctx.command_path if error.ctx else _command_of(argv)
    wrong = GpushareError(text[:1].lower() + text[1:], f"see `{command} --help`")
    wrong.exit_code = error.exit_code
    return wrong


def _unknown(error: click.UsageError) -> str:
    """The sentence for an unknown option or command, else "". click's own depends on its version: 8.1 quotes no option
    and suggests no command."""
    command = re.match(r"No such command (.+?)\.( |$)", error.format_message())
    close: Sequence[str] = ()
    if isinstance(error, click.NoSuchOption):
        text, close = f"no such option {shown(error.option_name)}", sorted(error.possibilities or ())
    elif command and error.ctx and isinstance(error.ctx.command, click.Group):
        from ast import literal_eval
        from difflib import get_close_matches

        name = literal_eval(command[1])  # click prints its repr()
        text = f"no such command {shown(name)}"
        known = error.ctx.command.list_commands(error.ctx)
        close = sorted(get_close_matches(name, known))
        if not close and error.ctx.parent is not None:  # `gpushare limit serve`
            lines = [f"`{error.ctx.command_path} {one} {name}`" for one in known] if name.isprintable() else []
            return f"{text}, did you mean {' or '.join(lines)}" if 0 < len(lines) <= _FEW else text
    else:
        return ""
    if close:
        text += f", did you mean{' one of' * (len(close) > 1)} " + ", ".join(map(shown, close))
    return text


def _meant(error: click.UsageError) -> str:
    """`, did you mean "docker"` after a value that is similar to a choice of an option or argument, else ""."""
    choice = error.param.type if isinstance(error, click.BadParameter) and error.param is not None else None
    wrong = re.search(r"'([^']*)' is not one of ", error.format_message())
    if not isinstance(choice, click.Choice) or wrong is None:
        return ""
    from difflib import get_close_matches

    close = get_close_matches(wrong[1].lower(), map(str, choice.choices), 1, 0.7)
    return f", did you mean {shown(close[0])}" if close else ""


def _command_of(argv: Sequence[str]) -> str:
    """The command and subcommand in `argv`, for errors of click without a context, such as an option without a
    value."""
    path, here = [PROGRAM], cast(click.Command, group)
    for word in argv:
        found = here.get_command(click.Context(here), word) if isinstance(here, click.Group) else None
        if found is not None:
            path.append(word)
            here = found
    return " ".join(path)


def _fail(error: Exception) -> int:
    line, code = log.line_of(error)
    log.to_stderr(line)
    return code


def _open_standard_files() -> None:
    """Replace closed standard files by /dev/null, as after `gpushare list >&-`. Otherwise a file that gpushare opens
    would get their number, and Python's sys.stdout would be None."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))


def _forget_output() -> None:
    """Redirect standard output to /dev/null, so that Python reports no error when it flushes the buffer at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
