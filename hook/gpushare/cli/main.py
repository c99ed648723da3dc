"""The group of commands, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, Optional

import click

from .. import log, names, rootless
from ..errors import GpushareError
from . import config, containers, devices, explain, labels, node, prune, run, runtime, uninstall
from .options import Paths


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", default=names.CONFIG_PATH, show_default=True, metavar="FILE", help="Configuration file.")
@click.option("--state", show_default=names.STATE_DIR, metavar="DIR", help="State directory.")
@click.version_option(node.installed(), "--version", message="%(prog)s %(version)s", help="Print the version and exit.")
@click.pass_context
def group(context: click.Context, config: str, state: Optional[str]) -> None:
    """Exact shares of a GPU for containers: who has what, what a container would get, and why one was refused."""
    context.obj = Paths(os.path.abspath(config), os.path.abspath(state or rootless.state_dir()))


for command in (
    containers.list_,
    containers.inspect,
    devices.devices,
    explain.explain,
    prune.prune,
    run.run,
    config.config,
    runtime.runtime,
    labels.labels,
    uninstall.uninstall,
    node.refresh,
    node.version,
):
    group.add_command(command)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs one command; returns its exit code. 2 = wrong usage, else as in errors.py."""
    try:
        result: Any = group.main(args=argv, prog_name="gpushare", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except PermissionError as error:
        return _fail(GpushareError(f"{error.filename!r}: {error.strerror}", "run as root"))
    except Exception as error:
        return _fail(error)


def _fail(error: Exception) -> int:
    line, code = log.line_of(error)
    log.to_stderr(line)
    return code
