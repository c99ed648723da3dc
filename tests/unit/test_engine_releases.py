"""make engines: the programs of each release, the tests that run with them, and the record of their results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.unit.test_matrix import XML
from tools import engines, matrix


def release(folder: Path, **versions: str) -> Path:
    """A folder with programs that print these versions."""
    folder.mkdir(parents=True)
    for name, version in versions.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\necho '{version}'\n")
        program.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("programs", "found"),
    [
        ({"containerd": "containerd example.org/v2 2.2.7 abc"}, ("containerd", "2.2.7")),
        ({"containerd": "containerd 2.2.7", "dockerd": "Docker version 29.7.2, build x"}, ("docker", "29.7.2")),
        ({"crio": "crio version 1.36.3+dev"}, ("crio", "1.36.3+dev")),
        ({"crio": "crio version devel"}, ("crio", "unknown")),
    ],
)
def test_engine_of_a_folder_is_that_of_its_daemon(
    tmp_path: Path, programs: dict[str, str], found: tuple[str, str]
) -> None:
    assert engines.of_folder(release(tmp_path / "x", **programs)) == found


@pytest.mark.parametrize("name", ["none", "empty", "folder"])
def test_folder_without_a_release_is_refused(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    release(tmp_path / "folder/other")
    with pytest.raises(SystemExit) as caught:
        engines.main([str(tmp_path / name)])
    assert "programs of one release" in f"{caught.value}" or "has no folder" in capsys.readouterr().err


def test_tests_find_the_release_first_and_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of pytest, a script writes results, and the version of the containerd that it finds in PATH."""
    words = 'for word; do [ "$before" = --junitxml ] && xml=$word; before=$word; done'
    text = f'#!/bin/sh\n{words}\ncat > "$xml" <<"END"\n{XML}\nEND\ncontainerd > "$xml.version"\nexit 1\n'
    folder = release(tmp_path / "releases/x", containerd="containerd 2.2.7")
    (tmp_path / "python").write_text(text)
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(engines, "FOLDER", tmp_path / "results")
    monkeypatch.setattr(matrix, "RECORDS", tmp_path)
    assert engines.main(["--record", str(folder.parent)]) == 1  # one test of XML failed
    assert (tmp_path / "results/x.xml.version").read_text() == "containerd 2.2.7\n"
    record = json.loads((tmp_path / "engines-containerd-2.2.7.json").read_text())
    assert record["versions"] == {"containerd": "2.2.7"}
    entry = record["parts"]["containerd 2.2.7"]
    assert (entry["passed"], entry["failed"], len(entry["failures"])) == (5, 1, 1)
