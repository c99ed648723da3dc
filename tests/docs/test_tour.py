"""README.md, docs/tour.md and the pages of engines, run in the playground, with docker, podman and docker-compose.
GOLDEN_WRITE=1 writes the output into the tour."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import Command, commands, fenced
from tests.docs.session import Done, Session, agrees
from tests.support.host import TREE
from tools import pictures

TOUR = "docs/tour.md"
WRITE = bool(os.environ.get("GOLDEN_WRITE"))
# Text of README.md -> the command that runs here
INSTEAD = {
    " --profile workstation": "",  # the playground has a configuration, which names the simulated driver
    " IMAGE": " demo",
}
CONFIGURE = "gpushare runtime configure docker && systemctl reload docker"
UNDO = "docker rm -f $(docker ps -aq); gpushare runtime configure docker --undo"
IMPORT = "podman import ${DOCKER_CONFIG%/client}/image.tar demo"
# Pages whose every command runs, and the commands before them
TYPED = {
    "docs/docker.md": "true",
    "docs/podman.md": IMPORT,
    "docs/limits.md": f"{CONFIGURE} && docker run -d --runtime gpushare -e GPUSHARE_MEMORY=4Gi demo busy --seconds 600",
    "docs/run.md": "true",
    "docs/recipes.md": CONFIGURE,
    "docs/engines.md": IMPORT,
}
# Commands that Debian 12 does not have: tests/recipes/check_docker.py and check_launchers.py run them, and
# tests/integration/test_swarm.py runs commands of a swarm
NEWER = re.compile(r"docker run .*(--gpus|--device (gpushare\.io|nvidia\.com))|docker service |.* apptainer ")
# Command on a page -> the command that runs
HERE = {
    r" IMAGE( nvidia-smi)?$": " demo nvidia-smi",
    r" ID\b": " $(docker ps -q)",
    r" python train\.py$": " build/sim/nvidia-smi",
    r"^gpushare uninstall$": "gpushare uninstall --yes",  # no user can answer the question
    r"^podman run (--rm )?": "podman run --rm --pull never ",
}


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
    todo.sort(key=lambda one: not one.text.startswith("gpushare runtime"))  # the page begins with a container
    assert len(todo) == len(wanted) + 4, "four are docker run, two configure docker: in the playground, and elsewhere"
    for one in todo:
        text = one.text
        for word, other in INSTEAD.items():
            text = text.replace(word, other)
        done = playground.run(text)
        if one.shown:
            judge(one, done)
        assert done.code == 0, f"{one.place}: {done}"
        if text.startswith("gpushare runtime"):
            assert playground.run("systemctl reload docker").code == 0
        if text.startswith("docker run --rm"):
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
    todo = [one for one in commands(page) if not NEWER.match(one.text)]
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
        playground.run(UNDO if page != "docs/podman.md" else "gpushare runtime configure podman --undo")


def service_files(page: str) -> list[str]:
    """The Compose files of a page, with an image that exists here."""
    found = ["\n".join(lines) for _, lines in fenced((TREE / page).read_text()) if lines[0] == "services:"]
    found = [text for text in found if "runtime: gpushare" in text]  # the others: tests/recipes/check_docker.py
    return [text.replace("image: IMAGE\n", "image: demo\n    command: nvidia-smi\n") + "\n" for text in found]


def test_services_and_dev_container_get_their_shares(playground: Session, tmp_path: Path) -> None:
    """docker-compose starts every service of the pages. An editor calls `docker run` with runArgs and containerEnv."""
    assert playground.run(CONFIGURE).code == 0
    try:
        for page in ("docs/docker.md", "docs/recipes.md"):
            (text,) = service_files(page)
            sizes = re.findall(r"GPUSHARE_MEMORY: (\d+)Gi", text)
            assert len(sizes) == text.count("image: demo") > 0
            path = tmp_path / "compose.yaml"
            path.write_text(text)
            done = playground.run(f"docker-compose -f {path} up && docker-compose -f {path} down")
            assert done.code == 0, done.out
            for size in sizes:
                assert f"/{1024 * int(size):8}MiB" in done.out, done.out
        blocks = fenced((TREE / "docs/recipes.md").read_text())
        (text,) = ("\n".join(lines) for language, lines in blocks if language == "json")
        settings = json.loads(text)
        env = [f"-e {name}={value}" for name, value in settings["containerEnv"].items()]
        done = playground.run(" ".join(["docker run --rm", *settings["runArgs"], *env, "demo nvidia-smi"]))
        assert done.code == 0 and "/    4096MiB" in done.out, done.out
    finally:
        playground.run(UNDO)


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


def test_recording_shows_demo_and_top() -> None:
    """The film has every text of both pictures, and plays for FILM_SECONDS."""
    film = set(pictures.drawn("film"))
    assert set(pictures.drawn("demo")) <= film
    headings = {text for text in pictures.drawn("top") if text.isupper()}
    assert len(headings) > 5 and headings <= film
    recording = (pictures.PICTURES / "film.svg").read_text()
    assert set(re.findall(r'dur="([\d.]+)s"', recording)) == {f"{pictures.FILM_SECONDS:.1f}"}


def test_recording_without_animation_shows_the_demo() -> None:
    recording = (pictures.PICTURES / "film.svg").read_text()
    still = re.sub(r'<g visibility="hidden">.*?</g>', "", recording, flags=re.DOTALL)
    assert pictures.texts(still) == pictures.drawn("demo")


def write(todo: list[Command], done: dict[int, Done]) -> None:
    """Write the outputs into the page, except where it has `...`."""
    lines = (TREE / TOUR).read_text().splitlines()
    for one in reversed(todo):
        if not any("..." in line for line in one.output):
            printed = [line.rstrip() for line in done[one.line].out.splitlines()]
            lines[one.line : one.line + len(one.output)] = printed
    (TREE / TOUR).write_text("\n".join(lines) + "\n")
