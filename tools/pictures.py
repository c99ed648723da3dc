"""Make the pictures of README.md: screens of real programs on a simulated GPU (`make pictures`).

    PYTHONPATH=hook:. build/venv/bin/python -m tools.pictures [demo] [top] [film]    writes docs/pictures/NAME.svg

film is a recording of both, of FILM_SECONDS, that plays in the browser.

Numbers and process ids differ from run to run; a test compares the rest with the pictures in docs/.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import NamedTuple
from xml.etree import ElementTree

from tests.support.host import TREE
from tests.support.terminal import Terminal

from . import screen_svg

PICTURES = TREE / "docs" / "pictures"
PLAYGROUND = (sys.executable, "-m", "demo.playground", "--no-docker")
# Two shares. In each, one process holds memory and another uses GPU time.
COMPANY = """
run() { name=$1 memory=$2 compute=$3 held=$4; shift 4
    gpushare run --name $name --memory $memory --compute $compute -- \\
        sh -c "sleep inf | probe hold $held & exec busy --seconds 600 $*" >/dev/null 2>&1 & }
run train 6Gi 60 5300
run serve 4Gi 30 2600 --mode pause --pause 3000
exec gpushare top --interval 1
"""


class Picture(NamedTuple):
    title: str
    command: tuple[str, ...]
    columns: int
    lines: int
    ready: Callable[[str], bool]  # is everything that belongs on the screen there?
    nice: Callable[[str], bool]  # is the screen also good enough for a picture?
    interval_s: float = 0  # of a program that draws until it is ended
    shots: int = 0  # of such a program, in the film


def both_work(text: str, least_percent: int = 1) -> bool:
    """True when each program holds its memory and used at least `least_percent` of its limit in the last second."""
    rows = [re.findall(r"(\d+)%", line) for line in text.splitlines() if line.startswith(("train ", "serve "))]
    found = [[int(value) for value in row] for row in rows if len(row) > 3]
    return len(found) == 2 and all(
        memory > 60 and 100 * used >= least_percent * limit for memory, used, limit, *_ in found
    )


def trend_is_full(text: str) -> bool:
    """True when the programs have run long enough to fill the column TREND with samples."""
    return all(int(age) > 7 for age in re.findall(r" (\d+)s *$", text, re.MULTILINE))


TABLE = {
    "demo": Picture(
        "make demo: two containers share one GPU",
        (sys.executable, "-m", "demo"),
        80,
        48,
        lambda text: "README.md" in text,
        lambda text: "README.md" in text,
    ),
    "top": Picture(
        "gpushare top: what two shares use of a GPU",
        (*PLAYGROUND, "bash", "-c", COMPANY),
        112,
        10,
        both_work,
        lambda text: both_work(text, least_percent=85) and trend_is_full(text),
        interval_s=1,
        shots=8,
    ),
}
FILM_SECONDS = 20
FILM = (("demo", FILM_SECONDS * 0.6), ("top", FILM_SECONDS * 0.4))


def draw(name: str, nice: bool = False) -> str:
    """Run the program until its screen is ready. Return the SVG, or raise AssertionError with the screen."""
    one = TABLE[name]
    with Terminal(one.command, one.columns, one.lines, env={"PYTHONPATH": f"{TREE}/hook:{TREE}"}) as terminal:
        try:
            terminal.expect(one.nice if nice else one.ready, 60)
            return screen_svg.svg(terminal.screen, one.title)
        finally:
            if terminal.process.poll() is None:
                terminal.process.terminate()  # both programs clean up on SIGTERM
            terminal.end(60)


def film() -> str:
    """Record `make demo`, then `gpushare top`. Return an SVG that plays both."""
    shots: list[tuple[float, list[str]]] = []
    for name, seconds in FILM:
        found: list[list[str]] = []
        one = TABLE[name]

        def look(text: str, found: list[list[str]] = found, one: Picture = one) -> bool:
            shown = screen_svg.rows(terminal.screen)
            if text.strip() and (not found or found[-1] != shown):
                found.append(shown)
            return one.ready(text) and (one.interval_s == 0 or len(found) > one.shots)

        with Terminal(one.command, one.columns, one.lines, env={"PYTHONPATH": f"{TREE}/hook:{TREE}"}) as terminal:
            try:
                terminal.expect(look, 90)
            finally:
                if terminal.process.poll() is None:
                    terminal.process.terminate()
                terminal.end(60)
        last = seconds / 4 if one.interval_s == 0 else 0  # time to read the result
        found = found[-one.shots :] if one.interval_s else found
        each = (seconds - last) / len(found)
        shots += [(each + (last if shown is found[-1] else 0), shown) for shown in found]
    return screen_svg.film(shots, max(TABLE[name].columns for name, _ in FILM), "make demo, then gpushare top")


def texts(picture: str) -> list[str]:
    """Return the visible texts in screen order, with every number replaced, because numbers differ between runs."""
    found = ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")
    return [re.sub(r"\d+(?:[.:]\d+)*", "0", one.text or "") for one in found]


def drawn(name: str) -> list[str]:
    """Return the texts of the stored picture."""
    return texts((PICTURES / f"{name}.svg").read_text())


def main(names: list[str]) -> None:
    PICTURES.mkdir(exist_ok=True)
    for name in names or (*TABLE, "film"):
        (PICTURES / f"{name}.svg").write_text(film() if name == "film" else draw(name, nice=True))
        print(PICTURES.relative_to(TREE) / f"{name}.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
