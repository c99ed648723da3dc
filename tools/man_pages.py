#!/usr/bin/env python3
"""Write the manual pages: man_pages.py DIRECTORY. `make man` writes them to build/man.

man1 has a page for each command, man8 one for each of the programs that engines start, and man5 gpushare.yaml.

Source: man-pages(7) for the sections, groff_man(7) for the macros.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from gpushare import doctor
from gpushare.config import keys

from tools import config_docs
from tools.commands import COMMON, EXAMPLES, EXIT_CODES, NOTE_ON_ONE, Command, walk

FILES = (
    ("/etc/gpushare/config.yaml", "the configuration"),
    ("/run/gpushare", "leases and shares; without root: $XDG_RUNTIME_DIR/gpushare"),
)


class Program(NamedTuple):
    """A program that engines start: its page in section 8."""

    summary: str
    synopsis: tuple[str, ...]
    paragraphs: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]
    examples: tuple[tuple[str, str], ...]


ASKED = (
    (
        "GPUSHARE_MEMORY, GPUSHARE_COMPUTE, GPUSHARE_DEVICES",
        "The request, from the container's environment.",
    ),
    ("NVIDIA_VISIBLE_DEVICES", "Devices for the container, if GPUSHARE_DEVICES is not set."),
)
PROGRAMS = {
    "gpushare-runtime": Program(
        "OCI runtime that gives containers a share of a GPU",
        ("[--gpushare-config FILE] [--gpushare-state DIR] [--gpushare-cri] RUNC-OR-CRUN-COMMAND-LINE",),
        (
            "gpushare-runtime takes every command line of runc(8) and crun(1). It executes that low-level runtime, "
            "and changes only what concerns GPUs.",
            "create and run: it parses the request of the container, checks policy, reserves memory and compute, "
            "writes devices, mounts and a hook into config.json, and then becomes the low-level runtime. A container "
            "that requests nothing is not changed. If the share cannot be granted, it prints one line with the reason "
            "and exits.",
            "delete: it runs the low-level runtime, and then releases the share.",
            "restore: it refuses a container with a request, because a checkpoint has addresses of its old device.",
            "It passes every other command through. runtime.path of gpushare.yaml(5) selects the low-level runtime.",
            "gpushare-runtime-cri is the same program for containerd and CRI-O: it adds --gpushare-cri. "
            "gpushare-runtime-configure(1) writes the entries of engines.",
        ),
        (
            ("--gpushare-config FILE", "Read this configuration. Default: /etc/gpushare/config.yaml."),
            ("--gpushare-state DIR", "Keep leases here. Default: /run/gpushare."),
            ("--gpushare-cri", "The engine is a CRI: trust its annotations to name the container and its pod."),
        ),
        ASKED,
        (("docker run --runtime gpushare -e GPUSHARE_MEMORY=4Gi IMAGE nvidia-smi", "Start a container with 4 GiB."),),
    ),
    "gpushare-hook": Program(
        "OCI hook that gives a container a share of a GPU",
        ("[--config FILE] [--state DIR] [--cri] [--nri LOCK] prestart|createRuntime|poststop|adopt",),
        (
            "A low-level runtime starts gpushare-hook because config.json or a hooks directory names it. The runtime "
            "writes the state of the container to its standard input, in the format of the OCI specification.",
            "prestart and createRuntime: it reads the request from config.json, checks policy, reserves the share, and "
            "places devices, the driver and the shim into the container. If it fails, it undoes everything, prints "
            "one line with the reason, and exits with a code other than 0: the container does not start.",
            "poststop: it releases the share. It can run twice, and always exits with 0.",
            "adopt: gpushare-runtime(8) adds this stage to config.json. It takes the steps that config.json cannot "
            "express, and ties the share to the container's first process.",
            "gpushare-hook reads neither its environment nor its working directory, because an image can set both.",
        ),
        (
            ("--config FILE", "Read this configuration. Default: /etc/gpushare/config.yaml."),
            ("--state DIR", "Keep leases here. Default: /run/gpushare."),
            ("--cri", "The engine is a CRI: trust its annotations to name the container and its pod."),
            ("--nri LOCK", "The NRI plugin added this hook: give no GPU unless the plugin holds that lock."),
        ),
        ASKED,
        (('"prestart": [{"path": "/usr/bin/gpushare-hook", "args": ["gpushare-hook", "prestart"]}]', "config.json"),
         ('"poststop": [{"path": "/usr/bin/gpushare-hook", "args": ["gpushare-hook", "poststop"]}]', "config.json")),
    ),
}  # fmt: skip


def escaped(text: str) -> str:
    """Escape text for groff, also where a line would start like a groff request."""
    text = (
        text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\(ga").replace("'", "\\(aq").replace("^", "\\(ha")
    )
    text = text.replace("~", "\\(ti").replace('"', "\\(dq")  # macros such as .B remove a plain quotation mark
    return f"\\&{text}" if text.startswith(".") else text


def page_name(command: Command) -> str:
    return "-".join(("gpushare", *command.words))


def items(pairs: tuple[tuple[str, str], ...] | list[tuple[str, str]]) -> str:
    return "".join(f".TP\n.B {escaped(term)}\n{escaped(text)}\n" for term, text in pairs)


def page(command: Command, everything: list[Command]) -> str:
    name = page_name(command)
    body = _title(name, 1, command.summary[:1].lower() + command.summary[1:])
    body += f".SH SYNOPSIS\n.B {escaped(' '.join(('gpushare', *command.words)))}\n"
    body += f"{escaped(' '.join(command.click.collect_usage_pieces(command.context)))}\n.SH DESCRIPTION\n"
    body += ".PP\n".join(f"{escaped(part)}\n" for part in command.paragraphs())
    if command.words == ():
        mine = [(" ".join(one.words), f"{one.summary}.") for one in everything if one.words and not one.subcommands()]
        body += ".SH COMMANDS\n" + items(mine)
    for sub in command.subcommands() if command.words else ():
        (found,) = (one for one in everything if one.words == (*command.words, sub))
        body += f".TP\n.B {escaped(sub)}\n{escaped(found.summary)}.\n"
    if command.name == "doctor":
        body += ".SH CHECKS\n" + items([(check.name, f"It is ok when {check.meaning}.") for check in doctor.CHECKS])
    common = COMMON if command.has_format() else COMMON[2:] if command.words else COMMON[1:]
    options = [*command.options(), *common]
    body += ".SH OPTIONS\n" + items(options)
    if command.name in EXAMPLES:
        body += ".SH EXAMPLES\n" + items([(line, what) for line, what in EXAMPLES[command.name]])
    body += _exit_status() + ".SH FILES\n" + items(FILES)
    others = sorted(page_name(one) for one in everything if one.words and page_name(one) not in (name, *PROGRAMS))
    see = [f"{other} 1" for other in (["gpushare"] if command.words else others)]
    return body + see_also([*see, "gpushare-hook 8", "gpushare-runtime 8", "gpushare.yaml 5"])


# Neither hyphens nor wider spaces; groff 1.24 sets .nh and .ad again in each paragraph, from the other two
PLAIN_LINES = ".nh\n.ad l\n.nr HY 0\n.ds AD l\n"


def _title(name: str, section: int, summary: str) -> str:
    version = metadata.version("gpushare")
    head = f'.TH {escaped(name.upper())} {section} "" "gpushare {version}" "gpushare"\n{PLAIN_LINES}'
    return f"{head}.SH NAME\n{escaped(name)} \\- {escaped(summary)}\n"


def _exit_status() -> str:
    codes = items([(str(code), when) for code, _, when in EXIT_CODES])
    return f".SH EXIT STATUS\n{codes}.PP\n{escaped(NOTE_ON_ONE)}.\n"


def see_also(pages: list[str]) -> str:
    """`pages`: each a name, a space and a section."""
    found = [one.split() for one in pages]
    lines = [f".BR {escaped(name)} ({section})" for name, section in found]
    return ".SH SEE ALSO\n" + ",\n".join(lines) + "\n"


def program_page(name: str) -> str:
    """Return the page of one of PROGRAMS."""
    one = PROGRAMS[name]
    body = _title(name, 8, one.summary) + ".SH SYNOPSIS\n"
    body += "".join(f".B {escaped(name)}\n{escaped(line)}\n" for line in one.synopsis) + ".SH DESCRIPTION\n"
    body += ".PP\n".join(f"{escaped(part)}\n" for part in one.paragraphs)
    body += ".SH OPTIONS\n" + items(one.options) + ".SH ENVIRONMENT\n" + items(one.environment)
    body += ".SH EXAMPLES\n" + items(one.examples)
    codes = [(str(code), when) for code, error, when in EXIT_CODES if error]
    after = ".PP\nAfter it has become the low-level runtime, the exit code is that of the low-level runtime.\n"
    body += ".SH EXIT STATUS\n" + items(codes) + (after if name == "gpushare-runtime" else "")
    other = next(page for page in PROGRAMS if page != name)
    return body + ".SH FILES\n" + items(FILES) + see_also(["gpushare 1", f"{other} 8", "gpushare.yaml 5"])


def config_page() -> str:
    """Return gpushare.yaml(5)."""
    rows = []
    for key in keys.KEYS:
        kind = config_docs.values(key.schema).replace("`", "")
        rows.append((key.path, f"{key.description} Values: {kind}. Default: {json.dumps(key.default)}."))
    return (
        _title("gpushare.yaml", 5, "configuration of gpushare")
        + ".SH SYNOPSIS\n/etc/gpushare/config.yaml\n.SH DESCRIPTION\n"
        + f"{escaped(CONFIG_TEXT)}\n.SH KEYS\n{items(rows)}.SH EXAMPLES\n"
        + ".nf\nversion: 1\nsharing:\n  split_count: 4\n.fi\n"
        + ".SH FILES\n" + items(FILES) + see_also(["gpushare 1", "gpushare-hook 8", "gpushare-runtime 8"])
    )  # fmt: skip


CONFIG_TEXT = (
    "A host has one configuration file, in YAML. Only the key version is required, and its value is 1. An unknown "
    "key is an error. A dot in the names below stands for a nested key. A changed file applies to containers that "
    "start after the change; running containers keep their limits. gpushare-config(1) checks the file. "
    "gpushare-runtime-configure(1) with --profile writes a first file."
)


def write(directory: Path) -> list[Path]:
    """Write all pages and delete other gpushare pages."""
    everything = list(walk())
    pages = {f"man1/{page_name(one)}.1": page(one, everything) for one in everything if page_name(one) not in PROGRAMS}
    pages |= {f"man8/{name}.8": program_page(name) for name in PROGRAMS}
    pages["man5/gpushare.yaml.5"] = config_page()
    for old in directory.glob("man?/gpushare*"):
        if str(old.relative_to(directory)) not in pages:
            old.unlink()
    for name, text in pages.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return sorted(directory / name for name in pages)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
