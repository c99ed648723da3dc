"""Generated files agree with what they are made from, and `make docs` writes all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.host import TREE
from tools import generated


@pytest.mark.parametrize("name", generated.GENERATED)
def test_generated_file_is_up_to_date(name: str) -> None:
    assert (TREE / name).read_text() == generated.GENERATED[name](), f"{name} is out of date: run `make docs`"


def test_files_out_of_date_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generated, "TREE", tmp_path)
    monkeypatch.setattr(generated, "GENERATED", dict.fromkeys(("same", "other", "missing"), lambda: "new\n"))
    (tmp_path / "same").write_text("new\n")
    (tmp_path / "other").write_text("old\n")
    generated.main()
    assert capsys.readouterr().out == "other\nmissing\n"
    assert {path.read_text() for path in tmp_path.iterdir()} == {"new\n"}
