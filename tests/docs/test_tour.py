"""README.md, docs/tour.md and the pages of engines, run in the playground, with docker, podman and docker-compose.
GOLDEN_WRITE=1 writes the output into the tour."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import INDENT, Command, blocks, commands
from tests.docs.session import Done, Session, agrees
from tests.support.host import TREE
from tools import pictures

TOUR = "docs/tour.md"
WRITE = bool(os.environ.get("GOLDEN_WRITE"))
# Text of README.md -> the command that runs here
INSTEAD = {
    " --profile workstation": "",  # the playground has a configuration, which names the simulated driver
    " IMAGE ": " demo ",
}
CONFIGURE = "gpushare runtime configure docker && systemctl reload docker"
UNDO = (
    "docker rm -f $(docker ps -aq); gpushare runtime configure docker --undo; gpushare runtime configure podman --undo"
)
IMPORT = "podman import ${DOCKER_CONFIG%/client}/image.tar demo"
# Pages whose every command runs, and the commands before them
TYPED = {
    "docs/docker.md": "true",
    "docs/podman.md": IMPORT,
    "docs/limits.md": f"{CONFIGURE} && docker run -d --runtime gpushare -e GPUSHARE_MEMORY=4Gi demo busy --seconds 600",
    "docs/run.md": "true",
    "docs/engines.md": IMPORT,
}
# Command on a page -> the command that runs
HERE = {
    r" IMAGE( nvidia-smi)?$": " demo nvidia-smi",
    r" ID\b": " $(docker ps -q)",
    r" python train\.py$": " build/sim/nvidia-smi",
    r"^gpushare uninstall$": "gpushare uninstall --yes",  # no user can answer the question
    r"^podman run (--rm )?": "podman run --rm --pull never ",
}
COMPANY = """
begin() {
    docker run -d --name $1 --runtime gpushare -e GPUSHARE_MEMORY=$2 -e GPUSHARE_COMPUTE=$3 demo busy --seconds 600
}
begin train 6Gi 60% && begin serve 4Gi 30%
"""


@pytest.fixture(autouse=True)
def _no_leftovers(no_leaks: None) -> None:
    """No mount or process is left."""


@pytest.fixture(scope="module")
def playground() -> Iterator[Session]:
    with Session() as session:
        yield session


def judge(command: Command, done: Done) -> None:
    """The output matches the page; a failure prints a gpushare message that is on the page."""
    page = "\n".join(command.output)
    assert done.code == 0 or "gpushare: " in page, f"{command.place}: exit code {done.code}\n{done.out}"
    assert WRITE or agrees(done.out, command.output, sizes=command.page == TOUR), (
        f"{command.place}\n{done.out}\n-- and on the page:\n{page}"
    )


def test_readme_commands_print_shown_output(playground: Session) -> None:
    """Runs the docker and `gpushare` commands of the page; test_commands.py lists where the others are tested."""
    wanted = ("gpushare runtime", "docker run", "gpushare list", "gpushare devices", "gpushare limit")
    todo = [one for one in commands("README.md") if one.text.startswith(wanted)]
    assert len(todo) == len(wanted)
    started = False
    for one in todo:
        if one.shown and not started:
            started = playground.run(COMPANY).code == 0
        text = one.text
        for word, other in INSTEAD.items():
            text = text.replace(word, other)
        done = playground.run(text)
        if one.shown:
            judge(one, done)
        assert done.code == 0, f"{one.place}: {done}"
        if text.startswith("gpushare runtime"):
            assert playground.run("systemctl reload docker").code == 0
        if text.startswith("docker run"):
            assert "/    4096MiB" in done.out
    assert playground.run("docker rm -f train serve && gpushare runtime configure docker --undo").code == 0


def typed(one: Command) -> str:
    """The command that runs here for it."""
    text = one.text
    for pattern, here in HERE.items():
        text = re.sub(pattern, here, text)
    return text


@pytest.mark.parametrize("page", TYPED)
def test_page_commands_succeed(playground: Session, page: str) -> None:
    """Each command succeeds, and the container that it starts gets the requested memory."""
    todo = commands(page)
    assert len(todo) > 0
    before = playground.run(TYPED[page])
    assert before.code == 0, before
    try:
        for one in todo:
            done = playground.run(typed(one))
            assert done.code == 0, f"{one.place}\n{typed(one)}\n{done.out}"
            asked = re.search(r"(?:GPUSHARE_MEMORY=|run --memory )(\d+)Gi", one.text)
            assert not asked or f"/{1024 * int(asked[1]):8}MiB" in done.out, f"{one.place}\n{done.out}"
    finally:
        playground.run(UNDO)


def test_compose_service_gets_its_share(playground: Session, tmp_path: Path) -> None:
    """docker-compose: a service of that file gets its share."""
    page = (TREE / "docs/docker.md").read_text()
    (lines,) = (lines for _, lines in blocks(page) if lines[0] == "services:")
    path = tmp_path / "compose.yaml"
    path.write_text("\n".join(lines).replace("image: IMAGE\n", "image: demo\n    command: nvidia-smi\n"))
    compose = f"docker-compose -f {path}"
    done = playground.run(f"{CONFIGURE} && {compose} up --exit-code-from train && {compose} down")
    playground.run(UNDO)
    assert done.code == 0 and "/    4096MiB" in done.out, done.out


def test_tour_commands_print_shown_output(playground: Session) -> None:
    todo = [one for one in commands(TOUR) if one.shown]
    assert len(todo) > 15
    done = {one.line: playground.run(one.text) for one in todo}
    if WRITE:
        write(todo, done)
    for one in todo:
        judge(one, done[one.line])


def test_picture_of_top_is_up_to_date() -> None:
    """tests/integration/test_demo.py compares the picture of the demo, which it runs anyway."""
    assert pictures.texts(pictures.draw("top")) == pictures.drawn("top"), "run `make pictures`"


def write(todo: list[Command], done: dict[int, Done]) -> None:
    """Write the outputs into the page, except where it has `...`."""
    lines = (TREE / TOUR).read_text().splitlines()
    for one in reversed(todo):
        if not any("..." in line for line in one.output):
            printed = [f"{INDENT}{line}".rstrip() for line in done[one.line].out.splitlines()]
            lines[one.line : one.line + len(one.output)] = printed
    (TREE / TOUR).write_text("\n".join(lines) + "\n")
