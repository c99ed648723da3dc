#!/usr/bin/env python3
"""Write the manual pages, one for each command: man_pages.py DIRECTORY. `make man` writes them to build/man/man1.

Source: man-pages(7) for the sections, groff_man(7) for the macros.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

from gpushare import doctor

from tools.commands import COMMON, EXAMPLES, EXIT_CODES, NOTE_ON_ONE, Command, walk

FILES = (
    ("/etc/gpushare/config.yaml", "the configuration"),
    ("/run/gpushare", "leases and shares; for a user without rights over the host $XDG_RUNTIME_DIR/gpushare"),
)
NOTES = {
    "runtime": "The program gpushare-runtime, which stands in front of runc, takes the command line of runc and crun.",
}


def escaped(text: str) -> str:
    """Escape text for groff, also where a line would start like a groff request."""
    text = (
        text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\(ga").replace("'", "\\(aq").replace("^", "\\(ha")
    )
    text = text.replace("~", "\\(ti")
    return f"\\&{text}" if text.startswith(".") else text


def page_name(command: Command) -> str:
    return "-".join(("gpushare", *command.words))


def items(pairs: tuple[tuple[str, str], ...] | list[tuple[str, str]]) -> str:
    return "".join(f".TP\n.B {escaped(term)}\n{escaped(text)}\n" for term, text in pairs)


def page(command: Command, everything: list[Command]) -> str:
    name = page_name(command)
    version = metadata.version("gpushare")
    body = f'.TH {escaped(name.upper())} 1 "" "gpushare {version}" "gpushare"\n.nh\n.ad l\n'
    body += f".SH NAME\n{escaped(name)} \\- {escaped(command.summary[:1].lower() + command.summary[1:])}\n"
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
    if command.name in NOTES:
        body += f".SH NOTES\n{escaped(NOTES[command.name])}\n"
    body += ".SH EXIT STATUS\n" + items([(str(code), when) for code, _, when in EXIT_CODES])
    body += f".PP\n{escaped(NOTE_ON_ONE)}.\n.SH FILES\n" + items(FILES)
    others = sorted(page_name(one) for one in everything if one.words and page_name(one) != name)
    see = ["gpushare"] if command.words else others
    body += ".SH SEE ALSO\n" + "".join(f".BR {escaped(other)} (1){'' if other == see[-1] else ','}\n" for other in see)
    return body


def write(directory: Path) -> list[Path]:
    """Write all pages and delete other gpushare pages."""
    folder = directory / "man1"
    folder.mkdir(parents=True, exist_ok=True)
    everything = list(walk())
    pages = {f"{page_name(command)}.1": page(command, everything) for command in everything}
    for old in folder.glob("gpushare*.1"):
        if old.name not in pages:
            old.unlink()
    for name, text in pages.items():
        (folder / name).write_text(text)
    return sorted(folder / name for name in pages)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
