"""gpushare run."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Optional

import click

from ..config import node
from ..core import constants
from ..core.errors import GpushareError, RequestError
from ..core.quoting import shown
from ..state import audit_log
from .options import Paths, given

if TYPE_CHECKING:
    from ..programs import run as programs

# option -> gpushare's variable with the same meaning
_FLAGS = {
    "memory": constants.ENV_MEMORY,
    "compute": constants.ENV_COMPUTE,
    "compute_mode": constants.ENV_COMPUTE_MODE,
    "priority": constants.ENV_PRIORITY,
    "devices": constants.ENV_DEVICES,
    "backend": constants.ENV_BACKEND,
}
# gpushare's variables -> options as the user types them
_OPTIONS = {
    **{variable: "--" + flag.replace("_", "-") for flag, variable in _FLAGS.items()},
    constants.ENV_OVERSUBSCRIBE: "--oversubscribe",
}
_NO_ID = (1 << 32) - 1


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--memory", metavar="SIZE", help="Memory limit: 4Gi, 25%, or 0=4Gi,1=8Gi.  [default: the whole device]")
@click.option("--compute", metavar="PERCENT", help="Compute limit: 30%, or 0=30%,1=50%.  [default: none]")
@click.option("--compute-mode", metavar="MODE", help="hard, or soft: also use time that is idle.  [default: hard]")
@click.option("--priority", metavar="WORD", help="normal, or high: gets idle time first.  [default: normal]")
@click.option("--devices", metavar="LIST", help="any, any:2,model=A100, all, indices or uuids.  [default: any]")
@click.option("--backend", metavar="NAME", help="What enforces the limits: shim, mps.  [default: auto]")
@click.option(
    "--oversubscribe", is_flag=True, help="Let allocations go beyond the limit into host memory (experimental)."
)
@click.option(
    "--name", callback=given, metavar="ID", help="Name in `gpushare list`.  [default: the program and its pid]"
)
@click.option("--user", metavar="USER[:GROUP]", help="Run as another user; names or numbers.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND [ARG]...")
@click.pass_obj
def run(
    paths: Paths,
    /,
    oversubscribe: bool,
    name: Optional[str],
    user: Optional[str],
    command: tuple[str, ...],
    **flags: Optional[str],
) -> None:
    """Start a program with a share of a GPU, without a container.

    The program replaces this command: signals, exit code, directory, environment and open files are those of the
    program. Its share ends with it.
    """
    from ..programs import run as programs
    from ..programs.runtime import Paths as RunPaths

    variables = [(_FLAGS[flag], value) for flag, value in flags.items() if value is not None]
    if oversubscribe:
        variables.append((constants.ENV_OVERSUBSCRIBE, "1"))
    job = programs.Job(
        name or default_name(command[0]), command, tuple(variables), None if user is None else user_of(user)
    )
    try:
        programs.start(job, RunPaths(paths.config, paths.state_dir))
    except GpushareError as error:
        if not isinstance(error, programs.CannotExecute):
            where = node.log_target(paths.config, paths.state_dir)
            audit_log.refused(where, job.name, "run", error)
        given = {variable for variable, _ in variables}
        error.draft = as_typed(error.draft, given)
        error.hint = as_typed(error.hint, _OPTIONS if given or not _has_own_variables(os.environ) else ())
        raise


def _has_own_variables(environment: Iterable[str]) -> bool:
    """Whether the environment has a GPUSHARE variable, even a misspelt one. Hints then name variables, not options."""
    return any(name.upper().replace("_", "").startswith("GPUSHARE") for name in environment)


def as_typed(text: str, given: Collection[str]) -> str:
    """`text` with options in place of the variables in `given`."""
    for variable in given:
        text = re.sub(rf"\b{variable}\b", _OPTIONS[variable], text)  # \b: GPUSHARE_COMPUTE, not GPUSHARE_COMPUTE_MODE
    return text


def default_name(program: str) -> str:
    """Name and pid of the program, such as train.py-4711: unique while it runs, and no id of an engine."""
    base = "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "_" for c in os.path.basename(program))
    return f"{base[:64].lstrip('.-') or 'program'}-{os.getpid()}"


def user_of(text: str) -> programs.User:
    """USER[:GROUP] as numbers. A user of this host gets all groups of the user, as with su(1). Raises RequestError."""
    import grp
    import pwd

    from ..programs import run as programs

    user, colon, group = text.partition(":")
    try:
        entry = pwd.getpwuid(_id(text, user)) if user.isdecimal() else pwd.getpwnam(user)
    except (KeyError, ValueError):  # ValueError: a NUL
        entry = None
    if entry is None and not user.isdecimal():
        raise RequestError(f"--user {shown(text)}: no such user", "use a user of this host")
    uid = entry.pw_uid if entry else _id(text, user)
    gid = entry.pw_gid if entry else uid
    if colon:
        try:
            gid = _id(text, group) if group.isdecimal() else grp.getgrnam(group).gr_gid
        except (KeyError, ValueError):
            raise RequestError(f"--user {shown(text)}: no such group", "use a group of this host") from None
    groups = tuple(os.getgrouplist(entry.pw_name, gid)) if entry else (gid,)
    return programs.User(uid, gid, groups)


def _id(text: str, digits: str) -> int:
    """A user or group id. Raises RequestError, also for the highest number: for the kernel it means "unchanged"."""
    if len(digits) > 10 or int(digits) >= _NO_ID:
        raise RequestError(f"--user {shown(text)}: {digits[:20]} is not an id", f"use an id below {_NO_ID}")
    return int(digits)
