"""make matrix: its table of parts, counts from pytest's XML, and the page that is made from them."""

from __future__ import annotations

import fnmatch
import json
import subprocess
from pathlib import Path

import pytest

from tests.support.host import TREE
from tools import matrix, matrix_docs, matrix_vm

XML = """<testsuites><testsuite>
<testcase classname="tests.integration.test_engines" name="test_limit[docker, runtime]"/>
<testcase classname="tests.integration.test_engines" name="test_limit[podman with crun, hook]"><failure/></testcase>
<testcase classname="tests.integration.test_engines" name="test_limit[podman with crun, hook]"><error/></testcase>
<testcase classname="tests.integration.test_podman_cgroups" name="test_v1[podman, hook]"><skipped/></testcase>
<testcase classname="tests.integration.test_systemd_cgroups" name="test_reload[cdi-crun]"/>
<testcase classname="tests.integration.test_systemd_engines" name="test_reload[crun-docker-cdi any]"/>
<testcase classname="tests.integration.test_node_life" name="test_first_start_installs[crio]"/>
<testcase classname="tests.unit.test_plan" name="test_plan"/>
</testsuite></testsuites>"""


def test_counts_are_those_of_the_xml(tmp_path: Path) -> None:
    (tmp_path / "x.xml").write_text(XML)
    found = matrix.outcomes(tmp_path / "x.xml")
    assert matrix.count([result for _, result in found]) == {"passed": 5, "failed": 1, "skipped": 1}
    assert [tuple(row.values()) for row in matrix.by_engine(found)] == [
        ("crio", "cgroupfs", "installer", 1, 0, 0),
        ("crun", "systemd", "cdi", 1, 0, 0),
        ("docker", "cgroupfs", "runtime", 1, 0, 0),
        ("docker with crun", "systemd", "cdi", 1, 0, 0),
        ("podman", "cgroupfs", "hook", 0, 0, 1),
        ("podman with crun", "cgroupfs", "hook", 0, 1, 0),
    ]


def test_parts_run_every_test_once() -> None:
    files = subprocess.run(["git", "ls-files", "tests/**/test_*.py"], cwd=TREE, capture_output=True, text=True)
    for file in files.stdout.split():
        ran = []
        for part in matrix.PARTS:
            words = part.script.split()
            ignored = [word.strip("'").partition("=")[2] for word in words if "ignore-glob" in word]
            chosen = [word for word in words if word.startswith("tests/")]
            if any(file.startswith(f"{word}/") or fnmatch.fnmatch(file, word) for word in chosen):
                ran += [part.name] if not any(fnmatch.fnmatch(file, word) for word in ignored) else []
        assert len(ran) == 1, f"{file}: {ran}"


@pytest.mark.parametrize("words, said", [(["hamm"], "SUITE='hamm'"), (["sid", "unti"], "no part 'unti'")])
def test_unknown_word_is_quoted(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        matrix.main(words)
    assert said in capsys.readouterr().err


def test_page_lists_versions_and_failures() -> None:
    row = {"engine": "podman with crun", "cgroups": "cgroupfs", "way": "hook", "passed": 8, "failed": 1, "skipped": 0}
    part = {"when": "2026-11-24", "commit": "abc", "passed": 9, "failed": 1, "skipped": 0, "engines": [row],
            "failures": ["tests/x.py::test_a"]}  # fmt: skip
    versions = {
        "kernel": "6",
        "gcc": "14",
        "libc": "2.41",
        "python": "3.13",
        "systemd": "257",
        "podman": "5.4",
        "crun": "1.21",
    }
    ran = {"when": "2026-11-25", "commit": "1a2c"}
    pythons = [
        {"python": "3.10.13", "passed": 7, "failed": 1, "skipped": 0, "failures": ["tests/y.py::test_b"], **ran},
        {"python": "3.9.18", "broken": "exit code 4", "left_out": {"tests/z.py": "no wheel"}, **ran},
    ]
    text = matrix_docs.page([{"suite": "trixie", "versions": versions, "parts": {"engines": part}}], pythons)
    assert "| podman 5.4 with crun 1.21 | trixie | cgroupfs | hook | 8 | 1 | 0 | 2026-11-24 | `abc` |" in text
    assert "* trixie: `tests/x.py::test_a`\n* Python 3.10.13: `tests/y.py::test_b`" in text
    broken = "| 3.9.18 | exit code 4 | exit code 4 | exit code 4 | 2026-11-25 | `1a2c` |"
    assert f"{broken}\n| 3.10.13 | 7 | 1 | 0 | 2026-11-25 | `1a2c` |" in text
    assert "\n\n* Python 3.9.18 does not run tests/z.py: no wheel.\n\n" in text


@pytest.mark.parametrize("ended", [True, False])
def test_virtual_machine_that_stops_early_has_not_passed(
    ended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = matrix.Root(tmp_path, "sid", "-vm")
    monkeypatch.setattr(matrix.Root, "versions", lambda root: {"docker": "28.5.2"})
    tested = {"test": "limit_holds", "result": "passed", "detail": "", "seconds": 3}
    rows = [tested, {**tested, "engine": "docker", "way": "cdi", "cgroups": "systemd"}]
    assert matrix_vm.report(root, [*rows, *([{"end": True, "kernel": "7.2"}] if ended else [])], "1a2b") == int(
        not ended
    )
    (part,) = json.loads(root.result.read_text())["parts"].values()
    assert (part["passed"], part.get("broken")) == (2, None if ended else "the machine stopped after 2 tests")
    assert part["engines"] == [
        {"engine": "docker", "cgroups": "systemd, v2", "way": "cdi", "passed": 1, "failed": 0, "skipped": 0}
    ]


def test_virtual_machine_reports_the_version_of_cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = matrix.Root(tmp_path, "bookworm", "-vm")
    monkeypatch.setattr(matrix.Root, "versions", lambda root: {"runc": "1.1.5"})
    tested = {"test": "device_rules_persist", "engine": "runc", "way": "hook", "cgroups": "systemd"}
    rows = [{**tested, "result": "passed", "detail": "", "seconds": 3}, {"end": True, "kernel": "6.1"}]
    assert matrix_vm.report(root, rows, "1a2b", 1) == 0
    parts = json.loads(root.result.read_text())["parts"]
    assert parts["vm, cgroup v1"]["engines"][0]["cgroups"] == "systemd, v1"


def test_virtual_machine_reports_whole_lines_only(tmp_path: Path) -> None:
    (tmp_path / "results").write_text('{"test": "a"}\r\n{"test": "b')
    assert matrix_vm._lines(tmp_path / "results") == ['{"test": "a"}']
