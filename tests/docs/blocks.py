"""The commands of a page: in blocks that are indented by four spaces, or fenced with the language sh or console.

    $ gpushare list            a command whose output follows, up to the next "$ " or the end of the block; a line that
                               ends in a backslash continues
    make demo                  in a block without "$ " every line is a command if it begins with the name of a program

In an output a line `...` stands for any lines, and `...` in a line for any text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from tests.support.host import TREE

PAGES = ("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "packaging/kubernetes/README.md")
PROGRAMS = (
    "gpushare", "gpushare-hook", "gpushare-runtime", "make", "docker", "podman", "kubectl", "systemctl", "journalctl",
    "dpkg", "tar", "ln", "source", "pip", "nvidia-smi", "nvidia-cuda-mps-control", "helm", "rpm",
)  # fmt: skip
INDENT = "    "
FENCED = ("sh", "console")


class Command(NamedTuple):
    page: str
    line: int  # of the command, from 1
    text: str
    output: tuple[str, ...]
    shown: bool  # has a "$ "

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def pages() -> list[str]:
    return [*PAGES, *sorted(str(path.relative_to(TREE)) for path in (TREE / "docs").rglob("*.md"))]


def fenced(text: str) -> Iterator[tuple[str, list[str]]]:
    """(language, lines) of each fenced block."""
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield found[1], found[2].splitlines()


def blocks(text: str) -> Iterator[tuple[int, list[str]]]:
    """(number of the first line, the lines without indent) of each block. As in Markdown, empty lines do not end a
    block, and an indented continuation of a list item is none."""
    block: list[str] = []
    first, before, in_list, fence = 0, "", False, None
    for number, line in enumerate([*text.splitlines(), "end"], 1):
        if fence is not None or line.startswith("```"):
            if fence is None:
                fence, first, block = line[3:], number + 1, []
            elif line.startswith("```"):
                if fence in FENCED:
                    yield first, "\n".join(block).rstrip().splitlines()
                fence, block = None, []
            else:
                block.append(line)
        elif line.startswith(INDENT) and (block or not before) and not in_list:
            first = first if block else number
            block.append(line[len(INDENT) :])
        elif line or not block:
            if block:
                yield first, "\n".join(block).rstrip().splitlines()
            block = []
            if line and not line.startswith(" "):
                in_list = line.startswith("* ")
        else:
            block.append("")
        before = line


def commands(page: str) -> list[Command]:
    found = []
    for first, block in blocks((TREE / page).read_text()):
        if any(line.startswith("$ ") for line in block):
            found += list(_shown(page, first, block))
            continue
        typed = [(first + at, text) for at, line in enumerate(block) for text in _typed(line)]
        found += [Command(page, line, text, (), False) for line, text in typed]
    return found


def _shown(page: str, first: int, block: list[str]) -> Iterator[Command]:
    starts = [at for at, line in enumerate(block) if line.startswith("$ ")]
    for at, end in zip(starts, [*starts[1:], len(block)]):
        last = next(line for line in range(at, end) if not block[line].endswith("\\"))
        text = " ".join(line.rstrip("\\").strip() for line in block[at : last + 1])
        output = "\n".join(block[last + 1 : end]).rstrip().splitlines()
        yield Command(page, first + at, text[2:], tuple(output), True)


def _typed(line: str) -> list[str]:
    """A command without its comment behind two spaces or "#"; a line may have several `make` commands."""
    parts = [part.strip() for part in re.split(r"\s+# |\s{2,}", line)]
    known = [part for part in parts if part.split(" ")[0] in PROGRAMS]
    return known if line.startswith("make ") else [part for part in parts[:1] if part in known]
