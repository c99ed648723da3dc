"""Start several processes at the same moment."""

from __future__ import annotations

import os
from collections.abc import Callable

from gpushare.core.errors import GpushareError


def at_once(*works: Callable[[], object]) -> list[int]:
    """Run each function in its own process and return the exit codes: 0, that of a gpushare error, or 1."""
    reader, writer = os.pipe()
    children = []
    for work in works:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(writer)
                os.read(reader, 1)  # returns in all processes when the parent closes its end
                work()
                code = 0
            except GpushareError as error:
                code = error.exit_code
            finally:
                os._exit(code)
        children.append(pid)
    os.close(reader)
    os.close(writer)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
