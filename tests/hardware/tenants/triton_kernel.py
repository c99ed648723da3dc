"""A kernel in Triton's language, which reads it from this file."""

from typing import Any

import triton
import triton.language as tl


@triton.jit  # type: ignore[misc]
def _add_one(values, length, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < length
    tl.store(values + at, tl.load(values + at, mask=inside) + 1, mask=inside)


def add_one(values: Any) -> Any:
    """Add 1 to each number of a tensor on the device."""
    _add_one[(values.numel() // 256,)](values, values.numel(), block=256)
    return values
