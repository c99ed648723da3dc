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
    ("-o, --format [table|json]", "Output format. [default: table]"),
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
        """Return (syntax, meaning) for each option, without the options that all commands have."""
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
        context = click.Context(command, parent, info_name=words[-1] if words else PROGRAM, **group.context_settings)
        yield Command(words, command, context)
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None
                yield from below((*words, name), found, context)

    return below((), group, None)


# command -> (command line, what it does)
EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "list": (
        ("gpushare list --format json", "for a program"),
        ("gpushare list --filter name=web --filter status=running", "by name and state"),
    ),
    "help": (("gpushare help limit set", "the same as `gpushare limit set --help`"),),
    "top": (
        ("gpushare top --sort compute", "sort by compute use"),
        ("gpushare top --format json --interval 10", "one object per line every ten seconds"),
    ),
    "export": (
        ("gpushare export --once", "print the current metrics"),
        ("gpushare export --listen 0.0.0.0 --port 9878", "reachable from other hosts (docs/metrics.md)"),
    ),
    "agent": (("gpushare agent", "lend memory until it is stopped (docs/lending.md)"),),
    "inspect": (
        ("gpushare inspect web", "the container that docker calls web"),
        ("gpushare inspect 3f2a", "the container whose ID starts with 3f2a"),
    ),
    "usage": (
        ("gpushare usage --since 7d --by namespace", "the last seven days"),
        ("gpushare usage --since 2026-11-01 --format csv", "for a spreadsheet"),
    ),
    "explain": (("gpushare explain .", "explain the bundle in this directory"),),
    "limit set": (
        ("gpushare limit set 3f2a --memory 6Gi --compute 40", "on all its devices"),
        ("gpushare limit set 3f2a --memory 4Gi..12Gi", "request and limit (docs/lending.md)"),
        ("gpushare limit set 3f2a --device 0 --memory +1Gi --dry-run", "show what would change"),
    ),
    "pause": (("gpushare pause 3f2a", "until `gpushare resume 3f2a`"),),
    "suspend": (("gpushare suspend web --timeout 10", "its work has 10 seconds to end (docs/suspend.md)"),),
    "prune": (("gpushare prune --dry-run", "show what would be removed"),),
    "run": (("gpushare run --memory 4Gi --compute 30% -- python train.py", "run a program without a container"),),
    "config check": (("gpushare config check new.yaml", "check a file before installing it"),),
    "runtime configure": (
        ("gpushare runtime configure docker --dry-run", "show the changes as a diff"),
        ("gpushare runtime configure docker --profile workstation", "configure docker and create a configuration file"),
    ),
    "labels": (("gpushare labels --dry-run", "show the labels for Kubernetes"),),
    "cdi generate": (
        (
            "gpushare cdi generate --output /etc/cdi/gpushare.yaml",
            "then `podman run --device gpushare.io/share=any ...`",
        ),
        (
            "gpushare cdi generate --nvidia-names --output /etc/cdi/gpushare-nvidia.yaml",
            "then `podman run --gpus all ...`",
        ),
    ),
    "k8s-plugin": (
        ("gpushare k8s-plugin", "gpushare.io/memory-mib, in units of 1 MiB"),
        ("gpushare k8s-plugin --memory-unit 1Gi --whole 0", "gpushare.io/memory-gib, and GPU 0 as gpushare.io/gpu"),
        ("gpushare k8s-plugin --resource memory=nvidia.com/gpumem", "the same under the name that HAMi uses"),
    ),
    "nri": (("gpushare nri", "give shares to pods of an engine whose configuration is unchanged"),),
    "dra": (("gpushare dra --program /opt/gpushare/current/bin/gpushare-hook", "in the driver's pod (docs/dra.md)"),),
    "mps start": (
        ("gpushare mps start --device 0", "containers can request GPUSHARE_BACKEND=mps on that GPU"),
        ("gpushare mps start --compute 60 --memory 20Gi", "limits for each container"),
    ),
    "mps status": (("gpushare mps status --format json", "for monitoring; exit code 1 on a problem"),),
    "uninstall": (("gpushare uninstall --dry-run", "show what would be removed"),),
    "completion": (("gpushare completion bash", "print the script for `source <(...)`"),),
}

# command -> (description of the document, its keys). `a.b`: key b of the objects in list a.
JSON: dict[str, tuple[str, dict[str, str]]] = {
    "list": (
        "an array of containers, oldest first",
        {
            "id": "full ID",
            "name": "name in docker or podman, or `NAMESPACE/POD/CONTAINER`; null: none",
            "service": "`PROJECT/SERVICE` of Compose; null: none",
            "state": "`starting`, `running`, `paused`, `ended` (a program of `gpushare run`), `dead`, `damaged`",
            "note": "why it is ended, dead or damaged, or a warning about its activity file; else empty",
            "created": "seconds since 1970; null for a damaged lease",
            "init_pid": "0 while it starts; null for a damaged lease",
            "command": "command line of a program started by `gpushare run`, else null",
            "process_count": "number of processes that use the GPU",
            "shares": "one object for each device",
            "shares.slot": "number of the device in the container",
            "shares.device": "index of the GPU on this host",
            "shares.uuid": "UUID of the GPU or MIG device",
            "shares.mig_index": "index of the MIG device; null for a whole GPU",
            "shares.parent_uuid": "UUID of the MIG device's GPU, else null",
            "shares.memory_used_bytes": "memory in use by all its processes",
            "shares.memory_driver_bytes": "the part of it that the driver takes for contexts, code, streams and graphs",
            "shares.memory_request_bytes": "guaranteed part of the limit; null: no limit",
            "shares.memory_limit_bytes": "limit; null: none",
            "shares.memory_borrowed_bytes": "memory in use above the request",
            "shares.lending": "how that is taken back: `movable`, `evict`; null: nothing is lent (docs/lending.md)",
            "shares.memory_virtual_bytes": "total of an oversubscribed share on device and host; else null",
            "shares.memory_host_bytes": "the part of it on the host",
            "shares.compute_percent": "limit; null: none",
            "shares.compute_mode": "`hard`, `soft`",
            "shares.memory_backend": "backend that enforces the limit: `shim`, `dmem` (docs/backends.md)",
            "shares.compute_backend": "`shim`, `mps`",
            "shares.priority": "0 normal, 1 high",
            "shares.paused": "true: its launches wait for `gpushare resume`",
            "shares.compute_used_percent": "percent of device time in the last second; null: unknown",
            "shares.compute_busy_ns": "device time used since its start",
            "shares.compute_throttled_ns": "time that launches waited for the limit, summed over threads",
            "shares.page": "number of its activity file for this device",
            "shares.clamped_from": "the request, if less was granted; else null",
            "shares.refused": "allocations refused since its start",
            "shares.account": "totals since its start (docs/usage.md); null for a damaged lease",
            "shares.account.gpu_seconds_granted": "compute limit multiplied by time",
            "shares.account.gpu_seconds_used": "device time used; null here and below: unknown",
            "shares.account.memory_byte_seconds_granted": "memory granted, multiplied by time",
            "shares.account.memory_byte_seconds_used": "memory used, multiplied by time",
            "shares.account.memory_peak_bytes": "most memory used at one time",
            "shares.account.refused": "allocations refused",
            "shares.account.throttled_seconds": "time that launches waited for the limit, summed over threads",
            "shares.account.suspended_seconds": "time that the container was suspended",
        },
    ),
    "top": (
        "one object per line for each sample",
        {
            "time": "seconds since 1970",
            "note": "why there are no devices; else null",
            "devices": "as in `gpushare devices`, plus:",
            "devices.memory_used_bytes": "memory used by all containers",
            "devices.compute_used_percent": "compute used by all containers in the last second",
            "containers": "as in `gpushare list`, plus:",
            "containers.shares.compute_throttled_percent": "percent since the last sample, summed over threads",
        },
    ),
    "status": (
        "an object like one line of `gpushare top`",
        {"time": "", "note": "", "devices": "as in `gpushare top`", "containers": "as in `gpushare top`"},
    ),
    "inspect": (
        "a container as in `gpushare list`, plus:",
        {
            "last_refusal": "message of the last refusal; null: none",
            "bundle": "directory of the bundle, or the command line of `gpushare run`",
            "cgroup": "cgroup of its processes",
            "dialect": "dialect of the request that was used",
            "driver": "driver version at its start",
            "round_ms": "round of its turns (docs/compute.md) in milliseconds; 0: it takes none; null: unknown",
            "uid": "user of its first process on the host; null: unknown",
            "namespace": "namespace of its pod; null: none",
            "pod": "name of its pod; null: none",
            "container": "its name in the pod; null: none",
            "image": "image name, if the CRI reports it; null: unknown",
            "processes": "processes that use the GPU",
            "processes.pid": "pid on this host; null if unknown",
            "processes.container_pid": "pid in the container",
            "processes.memory_used_bytes": "array indexed by slot",
        },
    ),
    "usage": (
        "an object",
        {
            "since": "start of the period, seconds since 1970",
            "until": "its end: now",
            "by": "`user`, `namespace`, `image`",
            "journal": "path of the usage journal; null: none",
            "journal_since": "time of its oldest entry; null: it has none",
            "unreadable_lines": "lines of it that are damaged",
            "groups": "one object for each user, namespace or image, the largest first",
            "groups.name": "null: unknown",
            "groups.containers": "containers that ran in the period",
            "groups.running": "of these, containers that still run",
            "groups.end_unknown": "of these, containers whose end was not reported",
            "groups.use_unknown": "of these, containers whose use is not known, so 0 is counted",
            "groups.gpu_seconds_granted": "compute limit multiplied by time",
            "groups.gpu_seconds_used": "device time used",
            "groups.memory_byte_seconds_granted": "memory granted, multiplied by time",
            "groups.memory_byte_seconds_used": "memory used, multiplied by time",
            "groups.memory_peak_bytes": "most memory that one share used at one time",
            "groups.refused": "allocations refused",
            "groups.throttled_seconds": "time that launches waited for the limit, summed over threads",
            "groups.suspended_seconds": "time that the containers were suspended",
        },
    ),
    "devices": (
        "an array of GPUs and MIG devices, in PCI order",
        {
            "name": "as in requests: `0`, `0:1`",
            "index": "index of the GPU",
            "uuid": "UUID of the GPU or MIG device",
            "minor": "minor number of its node in /dev",
            "bus_id": "PCI address",
            "model": "model name from the driver",
            "memory_bytes": "what programs can allocate; 0: unknown",
            "reserved_bytes": "what the driver reserves, in addition",
            "context_bytes": "memory of one process's CUDA context",
            "context_source": "`measured`, `estimated`",
            "grantable_bytes": "memory times `memory_overcommit`",
            "granted_bytes": "sum of limits",
            "free_bytes": "largest request that still fits",
            "compute_granted_percent": "sum of hard limits",
            "compute_grantable_percent": "100 times `compute_overcommit`",
            "compute_free_percent": "largest hard limit that still fits",
            "containers": "number of containers with a share",
            "state": "`open`, `exclusive`, `divided` (into MIG devices), `unknown use`",
        },
    ),
    "explain": (
        "an object",
        {
            "request": "the container's request; null: none",
            "plan": "the operations for it; null: none",
            "plan.container_id": "",
            "plan.ops": "in order; each has `op`, `needs`, `text` and its own fields",
            "plan.notes": "what is omitted, and why",
            "placed": "why each device was chosen or rejected",
            "held": "the backends that enforce the limits, and why",
            "withheld": "whether deny rules hide NVIDIA's devices from a privileged container",
            "unused": "ignored requests, each with the reason",
        },
    ),
    "limit show": (
        "an object",
        {
            "id": "full ID",
            "state": "`starting`, `running`, `paused`",
            "shares": "one object for each device",
            "shares.slot": "number of the device in the container",
            "shares.device": "index of the GPU on this host",
            "shares.uuid": "UUID of the GPU or MIG device",
            "shares.memory_used_bytes": "memory in use by all its processes; null: unknown",
            "shares.over_bytes": "memory in use beyond the limit; null: unknown",
            "shares.before": "limits before the change, with the names of `gpushare list`",
            "shares.after": "limits after the change",
        },
    ),
    "limit set": (
        "as in `gpushare limit show` without the state, plus:",
        {"changed": "false: the limits were already as requested", "dry_run": "true: nothing was changed"},
    ),
    "pause": ("an object", {"id": "full ID", "paused": "true", "changed": "false: it was already paused"}),
    "suspend": (
        "an object",
        {
            "id": "full ID",
            "changed": "false: it was suspended already",
            "bytes": "bytes that moved to the host",
            "processes": "processes that use CUDA",
            "seconds": "time that it took",
        },
    ),
    "resume": (
        "an object",
        {
            "id": "full ID",
            "paused": "false",
            "changed": "false: it was not paused",
            "bytes": "of a suspended container: bytes that moved back",
            "processes": "of a suspended container: processes that were restored",
            "seconds": "of a suspended container: time that it took",
        },
    ),
    "prune": (
        "an object",
        {
            "dry_run": "",
            "items": "items that were, or would be, removed",
            "items.kind": "`lease`, `start`, `files`, `limits`, `refusal`, `damaged`",
            "items.id": "ID of the container, or a name in trash/",
            "items.why": "",
            "items.removed": "false: kept",
            "problems": "items that could not be removed",
        },
    ),
    "config check": (
        "an object",
        {
            "file": "path; null: no file",
            "valid": "true, or false (exit code 78)",
            "config": "the configuration, nested as in the file; only if valid",
            "errors": "a list of `line` (0: the whole file), `key`, `problem`, `hint`; only if invalid",
        },
    ),
    "config show": (
        "an object",
        {
            "file": "path; null: no file",
            "state": "the state directory",
            "config": "the configuration, nested as in the file",
            "changed": "dotted keys that differ from their default",
        },
    ),
    "runtime status": (
        "an array of engines",
        {
            "engine": "",
            "found": "path of its program; empty: not installed",
            "configured": "",
            "program": "program in gpushare's entry",
            "files": "files with gpushare's entries",
            "problem": "why it will not work; else empty",
        },
    ),
    "runtime configure": (
        "an object; without an engine as in `gpushare runtime status`",
        {
            "engine": "name of the engine; null: none given",
            "dry_run": "",
            "changes": "one object for each file",
            "changes.path": "",
            "changes.action": "`create`, `change`, `remove`",
            "changes.diff": "as from diff -u",
            "next": "command that makes the engine read this change, or an earlier one; null: none",
            "notes": "further notes",
        },
    ),
    "labels": (
        "an object",
        {
            "dry_run": "",
            "file": "path of the file",
            "action": "`create`, `change`; null: nothing to do",
            "features": "name and value",
        },
    ),
    "cdi generate": (
        "a CDI specification",
        {
            "cdiVersion": "the oldest version with all its features",
            "kind": "`gpushare.io/share`",
            "devices": "one object for each",
            "devices.name": "`any`, or a UUID",
            "devices.containerEdits": "its variable and gpushare's hooks",
        },
    ),
    "mps start": (
        "an array with an object for each device",
        {
            "device": "index",
            "uuid": "",
            "how": "`started`, `adopted` (it was running; its limits were set now), `running` (as requested)",
            "pid": "pid of the control daemon",
        },
    ),
    "mps stop": ("an array with an object for each device", {"uuid": "", "stopped": "false: it was not running"}),
    "mps status": (
        "an array with an object for each device",
        {
            "device": "index",
            "uuid": "",
            "state": "`running`, `stopped`, `dead`, `changed` (its limits are not the ones that were set)",
            "note": "why it is dead or changed, or which of its servers died; else empty",
            "pid": "pid of the control daemon; like the next three, null unless it runs",
            "uid": "user whose processes it serves; null also: all users",
            "compute_percent": "maximum for each client",
            "memory_bytes": "maximum for each process; null also: no limit",
            "clients": "pids of processes that use it",
            "clients_max": "maximum number of clients; null unless it runs",
            "servers": "pids",
            "containers": "IDs of containers that use it",
            "restart": "IDs of containers that need a restart, as their daemon has ended",
        },
    ),
    "uninstall": ("an object", {"dry_run": "", "steps": "one text per step", "next": "commands to run afterwards"}),
    "refresh": (
        "an object",
        {
            "driver_version": "",
            "cuda_version": "highest version that the driver supports; empty: unknown",
            "root": "the driver root",
            "libraries": "root of the driver's files",
            "dev": "root below which dev has the device nodes",
            "simulated": "",
            "devices": "GPUs, each with the fields of `model.Device`",
            "mig": "MIG devices, with the same fields",
            "contexts": "measured sizes of CUDA contexts, each with the fields of `model.Context`",
            "recovered": "containers whose lease was rebuilt after the state directory was lost",
            "changes": "changes since the last refresh; null: no earlier data",
            "outdated": "containers started with another driver version, or whose device is gone",
        },
    ),
    "doctor": (
        "an object",
        {
            "checks": "in table order",
            "checks.name": "",
            "checks.result": "`ok`, `warn`, `fail`, `skip`",
            "checks.detail": "",
            "checks.hint": "what to do; empty if nothing",
            "checks.more": "further lines of the detail",
            "failures": "number of such checks",
            "warnings": "number of such checks",
        },
    ),
    "version": ("an object", {"version": "", "abi": "version of the memory layout shared with the library"}),
}

# code -> (name, when)
EXIT_CODES: tuple[tuple[int, str, str], ...] = tuple(
    sorted(
        [
            (0, "", "success; also when a reader such as `head` closes the pipe"),
            (2, "", "the command line is wrong"),
            (126, "", "`gpushare run`: the command cannot be executed"),
            (127, "", "`gpushare run`: the command is not found"),
            (128, "", "plus the signal's number: a signal ended `gpushare top`; 130 for Ctrl-C in any command"),
            *((getattr(errors, name).exit_code, name, when) for name, when in WHEN.items()),
        ]
    )
)
NOTE_ON_ONE = (
    "Exit code 1 also means: a check of `doctor` failed, `mps status` found a daemon dead or changed, or `prune` "
    "could not remove something"
)
