"""In a container, beside demo/tenant.py: allocate memory until refused and print the result in one line of JSON.

grab.py [fork|closed]      fork: in a child without exec; closed: after closing every descriptor

{"total_bytes", "nvml_total_bytes", "got_bytes"} or {"refused": name of the error} if not even a context was created.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pynvml
from cuda.bindings import driver as cuda
from tenant import allocate_until_refused, call


def grab() -> dict[str, Any]:
    pynvml.nvmlInit()
    nvml_total_bytes = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total
    try:
        call(cuda.cuInit(0))
        call(cuda.cuCtxSetCurrent(call(cuda.cuDevicePrimaryCtxRetain(0))))
    except RuntimeError as error:
        return {"refused": str(error)}
    _, got_bytes, _ = allocate_until_refused()
    return {
        "total_bytes": call(cuda.cuMemGetInfo())[1],
        "nvml_total_bytes": nvml_total_bytes,
        "got_bytes": got_bytes,
    }


def main(way: str) -> int:
    if way == "closed":
        output = os.dup(1)
        os.dup2(output, 3)
        os.closerange(4, 1 << 16)
    if way == "fork" and (pid := os.fork()):
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(json.dumps(grab()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if sys.argv[1:] else ""))
