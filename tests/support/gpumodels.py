"""Simulated hosts with the GPU models of simulator/models.py; GPUSHARE_MODELS=all takes each (make test-models)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from simulator import models
from simulator.simhost import VERSION, default_uuid, make_simhost

from .driverhost import MIG_UUIDS, divide

NAMES = tuple(models.MODELS) if os.environ.get("GPUSHARE_MODELS") == "all" else (models.DEFAULT,)


class ModelHost(NamedTuple):
    """A root with one device of a model, which may be a MIG device."""

    root: Path
    uuid: str
    ledger: Path
    model: models.Model


def make(path: Path, name: str, late_return_ms: float = 5.0, driver: str = VERSION) -> ModelHost:
    whole, _, profile = name.partition(" MIG ")
    root = make_simhost(path, model=whole, late_return_ms=late_return_ms, driver=driver)
    if profile:
        part, _ = divide(root, profile=name, late_return_ms=late_return_ms)
        return ModelHost(root, MIG_UUIDS[0], part, models.MODELS[name])
    return ModelHost(root, default_uuid(0), root / "dev/nvidia0", models.MODELS[name])
