"""A hook of MkDocs (packaging/mkdocs.yml): links from docs/ to other files of the tree.

The site has no such files. Their text, without a link, stays; a link to a file that does not exist is left alone, and
`--strict` reports it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Called by MkDocs for each page. Return its text with the links replaced."""
    docs = Path(config["docs_dir"]).resolve()
    folder = (docs / page.file.src_uri).parent

    def replaced(found: re.Match[str]) -> str:
        target = (folder / found[2]).resolve()
        outside = target.exists() and docs not in target.parents
        return f"{found[1]} (`{target.relative_to(docs.parent)}`)" if outside else found[0]

    return LINK.sub(replaced, markdown)
