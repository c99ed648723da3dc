"""Write every generated file of the tree that is out of date, and print its name: `make docs`.

tests/unit/test_generated.py compares each file with its row. The text of a golden file is an output that a test
expects: GOLDEN_WRITE=1 writes those.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from gpushare.config import config

from shim import gen_symbols
from tests.hardware import docs as hardware_docs
from tests.limiter import docs as limiter_docs
from tests.security import docs as attack_docs
from tools import (
    backend_docs,
    cli_docs,
    config_docs,
    dialect_docs,
    effective_docs,
    error_docs,
    matrix_docs,
    metrics_docs,
)

TREE = Path(__file__).resolve().parents[1]
GENERATED: dict[str, Callable[[], str]] = {
    "config/config.schema.json": lambda: json.dumps(config.schema(), indent=2) + "\n",
    "config/config.yaml": config.sample,
    "docs/attacks.md": attack_docs.text,
    "docs/backends.md": backend_docs.text,
    "docs/cli.md": cli_docs.text,
    "docs/config.md": config_docs.text,
    "docs/dialects.md": dialect_docs.text,
    "docs/engines-reference.md": effective_docs.page,
    "docs/hardware.md": lambda: hardware_docs.text(hardware_docs.measurements()),
    "docs/internals/limiter.md": limiter_docs.page,
    "docs/metrics.md": metrics_docs.text,
    "docs/shim-symbols.md": lambda: gen_symbols.docs(gen_symbols.read()),
    "docs/troubleshooting.md": error_docs.text,
    "docs/versions.md": lambda: matrix_docs.page(*matrix_docs.recorded()),
}


def stale(name: str) -> bool:
    """Whether the file is missing or differs from what its row makes."""
    path = TREE / name
    return not path.exists() or path.read_text() != GENERATED[name]()


def main() -> None:
    for name, text in GENERATED.items():
        if stale(name):
            (TREE / name).write_text(text())
            print(name)


if __name__ == "__main__":
    main()
