"""Run one Python target under atheris: python -m tests.fuzz.guided MODULE:FUNCTION bytes|json [libFuzzer options]."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def main() -> None:
    import atheris

    function, kind = sys.argv.pop(1), sys.argv.pop(1)
    module, _, name = function.partition(":")
    with atheris.instrument_imports(include=["gpushare"], enable_loader_override=False):
        target = getattr(importlib.import_module(f"tests.fuzz.{module}"), name)
    options: dict[str, Any] = {}
    if kind == "json":
        from tests.fuzz.mutate import mutator
        from tests.fuzz.words import words

        options["custom_mutator"] = mutator(lambda data, most: bytes(atheris.Mutate(data, most)), words())
    atheris.Setup(sys.argv, target, **options)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
