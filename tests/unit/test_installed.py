"""The shim directory of a program, for each way to install it."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpushare.core import constants, installed


@pytest.mark.parametrize(
    "program, beside, shim",
    [
        ("libexec/gpushare-hook", "libexec/_internal", "shim"),  # the bundle
        ("bin/../libexec/gpushare-hook", "libexec/_internal", "shim"),  # as its launcher writes that path
        ("bin/gpushare-hook.py", "libexec/gpushare/shim", "libexec/gpushare/shim"),  # a wheel
        ("bin/gpushare", "libexec/gpushare/shim", "libexec/gpushare/shim"),
        ("libexec/gpushare-hook", "shim", None),  # a source tree: build/shim has objects
        ("bin/gpushare", "lib", None),  # `pip install --editable`
    ],
)
def test_shim_dir_follows_installation(program: str, beside: str, shim: str | None, tmp_path: Path) -> None:
    (tmp_path / beside).mkdir(parents=True)
    expected = constants.SHIM_DIR if shim is None else str(tmp_path / shim)
    assert installed.shim_dir(str(tmp_path / program)) == expected
