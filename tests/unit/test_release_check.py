"""make release-check: one version everywhere, and notes with a date."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import release


def test_every_file_of_this_tree_names_its_version() -> None:
    assert list(release.faults()) == []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository of version 1.2.3 whose files agree."""
    for name, text in {
        "pyproject.toml": 'version = "1.2.3"\n',
        "CHANGELOG.md": "# Changelog\n\n## 1.2.3 (2026-12-01)\n\n## 1.2.2 (2026-11-01)\n",
        "docs/install.md": "dpkg -i build/packages/gpushare_1.2.3_amd64.deb; runc 1.1.7\n",
        "packaging/kustomization.yaml": "images:\n  - name: x\n    newTag: 1.2.3\n",
        "packaging/Chart.yaml": "version: 1.2.3\nappVersion: 1.2.3\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    return tmp_path


def test_tree_that_agrees_passes(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main([str(tree)]) == 0
    assert capsys.readouterr().out.startswith("release: 1.2.3 is named everywhere")


@pytest.mark.parametrize(
    ("name", "old", "new", "line"),
    [
        ("docs/install.md", "gpushare_1.2.3", "gpushare_1.2.2",
         "docs/install.md: names version 1.2.2, and pyproject.toml 1.2.3"),
        ("packaging/kustomization.yaml", "newTag: 1.2.3", "newTag: 1.2.2",
         "packaging/kustomization.yaml: names version 1.2.2, and pyproject.toml 1.2.3"),
        ("packaging/Chart.yaml", "appVersion: 1.2.3", "appVersion: 1.2.4",
         "packaging/Chart.yaml: names version 1.2.4, and pyproject.toml 1.2.3"),
        ("CHANGELOG.md", "(2026-12-01)", "(not released)",
         "CHANGELOG.md: write `## 1.2.3 (YYYY-MM-DD)` with the date of the release in place of"
         " `## 1.2.3 (not released)`"),
        ("CHANGELOG.md", "## 1.2.3 (2026-12-01)\n\n", "",
         "CHANGELOG.md: write `## 1.2.3 (YYYY-MM-DD)` with the date of the release in place of"
         " `## 1.2.2 (2026-11-01)`"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(
    tree: Path, capsys: pytest.CaptureFixture[str], name: str, old: str, new: str, line: str
) -> None:
    file = tree / name
    file.write_text(file.read_text().replace(old, new))
    assert release.main([str(tree)]) == 1
    assert capsys.readouterr().out == line + "\n"
