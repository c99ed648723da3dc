"""A kernel in Numba's Python."""

from __future__ import annotations

from typing import Any

from numba import cuda


@cuda.jit  # type: ignore[misc]
def double(values: Any) -> None:
    """Multiply each number of an array on the device by 2."""
    at = cuda.grid(1)
    if at < values.size:
        values[at] = values[at] * 2
