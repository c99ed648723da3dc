"""Run one check of `gpushare doctor` in this process; the command runs all of them."""

from __future__ import annotations

from gpushare import doctor
from gpushare.engines.base import Settings

from .host import BIN, Node


def finding(node: Node, name: str) -> doctor.Result:
    settings = Settings(str(BIN / "gpushare-runtime"), str(BIN / "gpushare-hook"), state_dir=str(node.state))
    (check,) = (check for check in doctor.CHECKS if check.name == name)
    return doctor.answer(check, doctor.probe(str(node.config), str(node.state), settings))
