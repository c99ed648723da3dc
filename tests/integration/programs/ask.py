"""Allocate the container's request, and free it, again and again. Its events are those of demo/tenant.py.

ASK=N    bytes of each allocation; one that is refused is repeated, as a program would whose patience is endless
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cuda

OK, OUT_OF_MEMORY = cuda.CUresult.CUDA_SUCCESS, cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY


def main(directory: Path) -> int:
    with open(directory / "events", "w") as events, open(directory / "go") as go:

        def tell(**event: Any) -> None:
            print(json.dumps(event), file=events, flush=True)

        assert cuda.cuInit(0)[0] == OK
        error, context = cuda.cuDevicePrimaryCtxRetain(0)
        assert error == OK, error
        assert cuda.cuCtxSetCurrent(context)[0] == OK
        tell(event="seen")
        while go.readline():
            refused = 0
            error, pointer = cuda.cuMemAlloc(int(os.environ["ASK"]))
            while error == OUT_OF_MEMORY:
                refused += 1
                error, pointer = cuda.cuMemAlloc(int(os.environ["ASK"]))
            assert error == OK, error
            tell(event="full", refused=refused)
            go.readline()
            assert cuda.cuMemFree(pointer)[0] == OK
            tell(event="freed")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
