"""`make site`: MkDocs builds docs/ without a warning, and a broken link is an error."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.host import TREE

CONFIG = "packaging/mkdocs.yml"


def build(tree: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", CONFIG, "--site-dir", str(target)]
    return subprocess.run(
        command, cwd=tree, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("docs", "packaging/mkdocs.yml", "tools/site_links.py", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        source, target = TREE / name, tmp_path / "tree" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)
    return tmp_path / "tree"


def test_site_has_every_page_search_and_dark_mode(tmp_path: Path) -> None:
    """No page loads a file from another host. Material loads mermaid's script from one for a page with a diagram."""
    done = build(TREE, tmp_path)
    assert done.returncode == 0, done.stderr
    for page in (TREE / "docs").rglob("*.md"):
        at = page.relative_to(TREE / "docs").with_suffix("")
        name = at.parent / "index.html" if at.name == "README" else at / "index.html"
        assert (tmp_path / name).is_file(), page
    index = json.loads((tmp_path / "search/search_index.json").read_text())
    assert any("glossary" in entry["location"] for entry in index["docs"])
    assert 'data-md-color-scheme="slate"' in (tmp_path / "index.html").read_text()
    for page in tmp_path.rglob("*.html"):
        text = page.read_text()
        assert re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="https?://|class="mermaid"', text) == [], page


def test_broken_links_and_lost_pages_fail_the_build(copy: Path, tmp_path: Path) -> None:
    with (copy / "docs/glossary.md").open("a") as page:
        page.write("\n[a](gone.md) [b](cli.md#no-such-heading) [c](../no-such-file)\n")
    (copy / "docs/not-in-menu.md").write_text("# New\n")
    done = build(copy, tmp_path / "site")
    assert done.returncode != 0
    for problem in ("gone.md", "no-such-heading", "no-such-file", "not-in-menu.md"):
        assert problem in done.stderr, done.stderr
