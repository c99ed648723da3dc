"""The text of docs/cli.md, generated from the commands: a row of generated.py."""

from __future__ import annotations

import textwrap

from gpushare import doctor

from tools.commands import EXAMPLES, EXIT_CODES, JSON, NOTE_ON_ONE, Command, walk

HEAD = """\
# Commands

Generated from the commands by `make docs`; a test fails if the page is out of date. The manual pages
(`make man`; in the archive below `share/man`) and `--help` have the same content.

* `--config` and `--state` precede the command. All commands but `run`, `export`, `help` and
  `completion` have `-o`, `--format table|json` and `--no-color`. A FILE of `--config` must exist.
* On a terminal the output has colours and bars; columns that do not fit are listed below the table. In a pipe it is
  plain aligned text and never cut. `--no-color`, `NO_COLOR=1` and `TERM=dumb` turn colours off. Programs should read
  `--format json`: one document, or for `top` one per line.
* An error is one line on standard error that begins with `gpushare: ` and ends with what to do. Bytes are numbers in
  JSON, and use powers of 1024 in tables.
* ID is an ID or any unambiguous prefix of one; the name in docker or podman; a Compose service as `SERVICE` or
  `PROJECT/SERVICE`; or a Kubernetes pod as `POD`, `NAMESPACE/POD` or `NAMESPACE/POD/CONTAINER`. gpushare reads names
  from files of the engine, so they are known while its daemon hangs. Podman's files have no Compose services. An ID
  as `gpushare list` shows it comes before a name.
* `source <(gpushare completion bash)` enables completion of commands, options and IDs (also for zsh and fish).
* Most commands need root, because leases belong to root. For other users they show the user's own shares
  ([run.md](run.md)).
"""


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def section(command: Command) -> str:
    mark = "##" if len(command.words) < 2 else "###"
    text = f"\n{mark} {' '.join(('gpushare', *command.words))}\n\n```text\n{command.usage()}\n```\n\n"
    text += "\n\n".join(textwrap.fill(part, 120, break_on_hyphens=False) for part in command.paragraphs()) + "\n"
    options = command.options()
    if options:
        text += "\n| option | meaning |\n|---|---|\n"
        text += "".join(f"| `{escaped(names)}` | {escaped(what)} |\n" for names, what in options)
    if command.name in EXAMPLES:
        lines = EXAMPLES[command.name]
        width = max(len(line) for line, _ in lines)
        text += "\n```sh\n" + "".join(f"{line:<{width}}  # {what}\n" for line, what in lines) + "```\n"
    if command.name == "doctor":
        text += "\n| check | ok when |\n|---|---|\n"
        text += "".join(f"| {check.name} | {escaped(check.meaning)} |\n" for check in doctor.CHECKS)
    if command.name in JSON:
        what, keys = JSON[command.name]
        text += f"\nJSON: {what}\n\n| key | value |\n|---|---|\n"
        text += "".join(f"| `{key}` | {escaped(meaning)} |\n" for key, meaning in keys.items())
    return text


def text() -> str:
    codes = "".join(f"| {code} | {name} | {when} |\n" for code, name, when in EXIT_CODES)
    tail = f"\n## Exit codes\n\n{NOTE_ON_ONE}.\n\n| code | error | when |\n|---:|---|---|\n{codes}"
    return HEAD + "".join(section(command) for command in walk()) + tail
