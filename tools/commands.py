"""The commands of `gpushare` as data, for docs/cli.md and the manual pages.

It combines what click knows with what it does not: examples, JSON keys and exit codes. Tests compare all of it with the
commands' behaviour.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import click
from gpushare.cli.main import PROGRAM, group
from gpushare.core import errors

from tools.config_docs import WHEN

_COMMON = {"--help", "--no-color"}
_FORMATS = ["table", "json"]
COMMON = (
    ("--format [table|json]", "For people, or for programs. [default: table]"),
    ("--no-color", "No colour, as with NO_COLOR=1."),
    ("-h, --help", "Show the help of a command and exit."),
)


def _is_format(one: click.Parameter) -> bool:
    """True for the --format option of most commands; the one of `cdi generate` is a file format."""
    return "--format" in one.opts and list(getattr(one.type, "choices", ())) == _FORMATS


class Command(NamedTuple):
    """A command. `words` are the words after "gpushare"; empty for the program itself."""

    words: tuple[str, ...]
    click: click.Command
    context: click.Context

    @property
    def name(self) -> str:
        return " ".join(self.words)

    @property
    def summary(self) -> str:
        """Return the first paragraph of the help without its full stop."""
        return self.paragraphs()[0].rstrip(".")

    def paragraphs(self) -> list[str]:
        return [" ".join(part.split()) for part in (self.click.help or "").split("\n\n")]

    def usage(self) -> str:
        return " ".join([PROGRAM, *self.words, *self.click.collect_usage_pieces(self.context)])

    def options(self) -> list[tuple[str, str]]:
        """Return (syntax, meaning) for each option except those that all commands have."""
        wanted = (one for one in self.click.get_params(self.context) if isinstance(one, click.Option))
        mine = (one for one in wanted if not {*one.opts} & _COMMON and not _is_format(one))
        found = (one.get_help_record(self.context) for one in mine)
        return [(names, " ".join(text.split())) for names, text in filter(None, found)]

    def has_format(self) -> bool:
        return any(map(_is_format, self.click.params))

    def subcommands(self) -> list[str]:
        return self.click.list_commands(self.context) if isinstance(self.click, click.Group) else []


def walk() -> Iterator[Command]:
    """Yield all commands, each group before its commands."""

    def below(words: tuple[str, ...], command: click.Command, parent: click.Context | None) -> Iterator[Command]:
        context = click.Context(command, parent, info_name=words[-1] if words else PROGRAM)
        yield Command(words, command, context)
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None
                yield from below((*words, name), found, context)

    return below((), group, None)


# command -> (command line, what it does)
EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "list": (("gpushare list --format json", "for a program"),),
    "top": (
        ("gpushare top --sort compute", "the busiest first"),
        ("gpushare top --format json --interval 10", "an object every ten seconds, one in a line"),
    ),
    "export": (
        ("gpushare export --once", "what Prometheus would be told now"),
        ("gpushare export --listen 0.0.0.0 --port 9878", "for everybody who reaches this host (docs/metrics.md)"),
    ),
    "inspect": (("gpushare inspect 3f2a", "the container whose id begins so"),),
    "explain": (("gpushare explain .", "the bundle in this directory"),),
    "limit set": (
        ("gpushare limit set 3f2a --memory 6Gi --compute 40", "of all its devices"),
        ("gpushare limit set 3f2a --device 0 --memory +1Gi --dry-run", "what would change"),
    ),
    "pause": (("gpushare pause 3f2a", "until `gpushare resume 3f2a`"),),
    "prune": (("gpushare prune --dry-run", "what would be removed"),),
    "run": (("gpushare run --memory 4Gi --compute 30% -- python train.py", "a program without a container"),),
    "config check": (("gpushare config check new.yaml", "before it is put in place"),),
    "runtime configure": (
        ("gpushare runtime configure docker --dry-run", "the changes as a diff"),
        ("gpushare runtime configure docker --profile workstation", "docker, and a configuration file to begin with"),
    ),
    "labels": (("gpushare labels --dry-run", "what Kubernetes would be told"),),
    "cdi generate": (
        (
            "gpushare cdi generate --output /etc/cdi/gpushare.yaml",
            "then `podman run --device gpushare.io/share=any ...`",
        ),
    ),
    "k8s-plugin": (
        ("gpushare k8s-plugin", "gpushare.io/memory-mib, in units of 1 MiB"),
        ("gpushare k8s-plugin --memory-unit 1Gi --whole 0", "gpushare.io/memory-gib, and GPU 0 as gpushare.io/gpu"),
    ),
    "mps start": (
        ("gpushare mps start --device 0", "containers may ask for GPUSHARE_BACKEND=mps on that GPU"),
        ("gpushare mps start --compute 60 --memory 20Gi", "no container gets more than that"),
    ),
    "mps status": (("gpushare mps status --format json", "for monitoring; 1 when something is wrong"),),
    "uninstall": (("gpushare uninstall --dry-run", "what would be taken away"),),
    "completion": (("gpushare completion bash", "the script, for `source <(...)`"),),
}

# command -> (description of the document, its keys). `a.b`: key b of the objects in list a.
JSON: dict[str, tuple[str, dict[str, str]]] = {
    "list": (
        "an array of containers, the oldest first",
        {
            "id": "whole id",
            "state": "`starting`, `running`, `paused`, `ended` (a program of `gpushare run`), `dead`, `damaged`",
            "note": "why it is ended, dead or damaged, what its page warns of; else empty",
            "created": "seconds since 1970, null of a damaged lease",
            "init_pid": "0 while it starts, null of a damaged lease",
            "command": "of programs that `gpushare run` started, else null",
            "process_count": "processes that use the GPU",
            "shares": "one object for each device",
            "shares.slot": "number of the device in the container",
            "shares.device": "index of the GPU on this host",
            "shares.uuid": "of the GPU or MIG device",
            "shares.mig_index": "null unless a MIG device",
            "shares.parent_uuid": "the GPU of a MIG device, else null",
            "shares.memory_used_bytes": "of all its processes",
            "shares.memory_limit_bytes": "null: no limit",
            "shares.memory_virtual_bytes": "of an oversubscribed share, on device and host together; else null",
            "shares.memory_host_bytes": "what of it lies on the host",
            "shares.compute_percent": "limit; null: none",
            "shares.compute_mode": "`hard`, `soft`",
            "shares.memory_backend": "who holds the limit: `shim`, `dmem` (docs/backends.md)",
            "shares.compute_backend": "`shim`, `mps`",
            "shares.priority": "0 normal, 1 high",
            "shares.paused": "true: its launches wait for `gpushare resume`",
            "shares.compute_used_percent": "of the device's time, over the last second; null: not known",
            "shares.compute_busy_ns": "device time since its start",
            "shares.compute_throttled_ns": "held back by its limit since its start, summed over threads",
            "shares.page": "number of its page of this device",
            "shares.clamped_from": "what was asked where policy gave less, else null",
            "shares.refused": "allocations refused since its start",
        },
    ),
    "top": (
        "an object for each look, in one line",
        {
            "time": "seconds since 1970",
            "note": "why there are no devices, else null",
            "devices": "as of `gpushare devices`, and:",
            "devices.memory_used_bytes": "sum of what containers use",
            "devices.compute_used_percent": "the same, over the last second",
            "containers": "as of `gpushare list`, and:",
            "containers.shares.compute_throttled_percent": "since the look before, summed over threads",
        },
    ),
    "inspect": (
        "a container as of `gpushare list`, and:",
        {
            "last_refusal": "null: none",
            "bundle": "its directory, or the command line of `gpushare run`",
            "cgroup": "where its processes are",
            "dialect": "which kind of request was used",
            "driver": "version at its start",
            "processes": "those that use the GPU",
            "processes.pid": "on this host, null where it cannot be told",
            "processes.container_pid": "in the container",
            "processes.memory_used_bytes": "an array, by slot",
        },
    ),
    "devices": (
        "an array of GPUs and MIG devices, in PCI order",
        {
            "name": "as in requests: `0`, `0:1`",
            "index": "of the GPU",
            "uuid": "of the GPU or MIG device",
            "minor": "of its node in /dev",
            "bus_id": "PCI address",
            "model": "as the driver says",
            "memory_bytes": "0: not known",
            "grantable_bytes": "memory times `memory_overcommit`",
            "granted_bytes": "sum of limits",
            "free_bytes": "what the next container can ask for",
            "compute_granted_percent": "sum of hard limits",
            "compute_grantable_percent": "100 times `compute_overcommit`",
            "compute_free_percent": "what the next hard limit can be",
            "containers": "how many have a share",
            "state": "`open`, `exclusive`, `divided` (into MIG devices), `unknown use`",
        },
    ),
    "explain": (
        "an object",
        {
            "request": "what the container asks for; null: nothing",
            "plan": "what would be done; null: nothing",
            "plan.container_id": "",
            "plan.ops": "in their order: each with `op`, `needs`, `text` and its own fields",
            "plan.notes": "what is left out, and why",
            "placed": "why each device was chosen, and others not",
            "held": "who holds the limits, and why they",
            "withheld": "whether NVIDIA's devices are withheld from a privileged container",
            "unused": "words that do not count, each with why",
        },
    ),
    "limit show": (
        "an object",
        {
            "id": "whole id",
            "state": "`starting`, `running`, `paused`",
            "shares": "one object for each device",
            "shares.slot": "number of the device in the container",
            "shares.device": "index of the GPU on this host",
            "shares.uuid": "of the GPU or MIG device",
            "shares.memory_used_bytes": "of all its processes; null: not known",
            "shares.over_bytes": "in use beyond the limit; null: not known",
            "shares.before": "limits before the change, named as by `gpushare list`",
            "shares.after": "limits now",
        },
    ),
    "limit set": (
        "as of `gpushare limit show` without the state, and:",
        {"changed": "false: they were so already", "dry_run": "true: nothing was done"},
    ),
    "pause": ("an object", {"id": "whole id", "paused": "true", "changed": "false: it was already"}),
    "resume": ("an object", {"id": "whole id", "paused": "false", "changed": "false: it was not paused"}),
    "prune": (
        "an object",
        {
            "dry_run": "",
            "items": "what was, or would be, removed",
            "items.kind": "`lease`, `start`, `files`, `limits`, `refusal`, `damaged`",
            "items.id": "of the container, or a name in trash/",
            "items.why": "",
            "items.removed": "false: kept",
            "problems": "what could not be removed",
        },
    ),
    "config check": (
        "an object",
        {
            "file": "null: there is none",
            "valid": "true, or false (exit code 78)",
            "config": "only where valid: as the file nests it",
            "errors": "only where not valid: a list of `line` (0: of the whole file), `key`, `problem`, `hint`",
        },
    ),
    "config show": (
        "an object",
        {
            "file": "null: there is none",
            "state": "the state directory",
            "config": "as the file nests it",
            "changed": "keys that differ from their default, with dots",
        },
    ),
    "runtime status": (
        "an array of engines",
        {
            "engine": "",
            "found": "its program; empty: not installed",
            "configured": "",
            "program": "what our entry names",
            "files": "with our entries",
            "problem": "why it will not work, else empty",
        },
    ),
    "runtime configure": (
        "an object; without an engine as of `gpushare runtime status`",
        {
            "engine": "null: none was named",
            "dry_run": "",
            "changes": "one object for each file",
            "changes.path": "",
            "changes.action": "`create`, `change`, `remove`",
            "changes.diff": "as of diff -u",
            "next": "the command after which the engine knows; null: none",
            "notes": "what you should know",
        },
    ),
    "labels": (
        "an object",
        {
            "dry_run": "",
            "file": "where it is written",
            "action": "`create`, `change`; null: nothing to do",
            "features": "name and value",
        },
    ),
    "cdi generate": (
        "a CDI specification",
        {
            "cdiVersion": "the oldest that has what is in it",
            "kind": "`gpushare.io/share`",
            "devices": "one object for each",
            "devices.name": "`any`, or a uuid",
            "devices.containerEdits": "its variable, and our hooks",
        },
    ),
    "mps start": (
        "an array, an object for each device",
        {
            "device": "index",
            "uuid": "",
            "how": "`started`, `adopted` (it listened already, its limits were set now), `running` (as asked)",
            "pid": "of the control daemon",
        },
    ),
    "mps stop": ("an array, an object for each device", {"uuid": "", "stopped": "false: it was not running"}),
    "mps status": (
        "an array, an object for each device",
        {
            "device": "index",
            "uuid": "",
            "state": "`running`, `stopped`, `dead`, `changed` (it has other limits than it was given)",
            "note": "why it is dead or changed, or which of its servers has died; else empty",
            "pid": "of the control daemon; null unless it runs, as the next three",
            "uid": "whose processes it serves; null also: anybody's",
            "compute_percent": "no client gets more",
            "memory_bytes": "no process gets more; null also: no limit",
            "clients": "pids of processes that use it",
            "clients_max": "how many it takes; null unless it runs",
            "servers": "pids",
            "containers": "ids of those that have it",
            "restart": "ids of those that were started with a daemon that is gone",
        },
    ),
    "uninstall": ("an object", {"dry_run": "", "steps": "one text each", "next": "commands to run then"}),
    "refresh": (
        "an object",
        {
            "driver_version": "",
            "cuda_version": "the highest that the driver supports; empty: not known",
            "root": "the driver root",
            "simulated": "",
            "devices": "GPUs, each with the fields of `model.Device`",
            "mig": "MIG devices, the same",
            "recovered": "containers whose lease was found again after the state directory was lost",
            "changes": "since the last time; null: nothing was known then",
            "outdated": "containers that were started with another driver, or whose device is gone",
        },
    ),
    "doctor": (
        "an object",
        {
            "checks": "in the order of the table",
            "checks.name": "",
            "checks.result": "`ok`, `warn`, `fail`, `skip`",
            "checks.detail": "",
            "checks.hint": "what to do; empty: nothing",
            "failures": "how many",
            "warnings": "how many",
        },
    ),
    "version": ("an object", {"version": "", "abi": "of the memory that is shared with the library"}),
}

# code -> (name, when)
EXIT_CODES: tuple[tuple[int, str, str], ...] = tuple(
    sorted(
        [
            (0, "", "it is done; also when a reader such as `head` has seen enough"),
            (2, "", "the command line is wrong"),
            (126, "", "of `gpushare run`: the command cannot be executed"),
            (127, "", "of `gpushare run`: the command is not found"),
            (128, "", "and the signal's number: `gpushare top` was ended by it; 130 for Ctrl-C in any command"),
            *((getattr(errors, name).exit_code, name, when) for name, when in WHEN.items()),
        ]
    )
)
NOTE_ON_ONE = (
    "1 is also what `doctor` gives when a check fails, `mps status` when a daemon is dead or changed, and `prune` when "
    "something could not be removed"
)
