"""Allocate memory until the driver has no more, then end without a free. Its events are those of demo/tenant.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cuda

OK, STEP_BYTES = cuda.CUresult.CUDA_SUCCESS, 64 << 20


def main(directory: Path) -> int:
    with open(directory / "events", "w") as events, open(directory / "go") as go:

        def tell(**event: Any) -> None:
            print(json.dumps(event), file=events, flush=True)

        assert cuda.cuInit(0)[0] == OK
        error, context = cuda.cuDevicePrimaryCtxRetain(0)
        assert error == OK, error
        assert cuda.cuCtxSetCurrent(context)[0] == OK
        tell(event="seen")
        go.readline()
        while cuda.cuMemAlloc(STEP_BYTES)[0] == OK:
            pass
        tell(event="full")
        go.readline()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
