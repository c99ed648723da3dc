"""A signal that another thread receives still ends the main thread's wait; a signal for an ended child is not
forwarded."""

from __future__ import annotations

import subprocess
import sys

from tests.support.host import TREE

SERVES = """
import select, signal, threading
from gpushare.system import sigterm

with sigterm.readable() as end:
    def takes() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    threading.Timer(0.2, takes).start()
    print("ended" if select.select([end], [], [], 30)[0] else "timed out")
print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, signal.set_wakeup_fd(-1))
"""

SOAKS = """
import os, signal, threading
from tests.soak.__main__ import end_once

stopped, may_go = threading.Event(), threading.Event()
end_once(stopped)

def takes() -> None:
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    print("ended" if stopped.wait(30) else "timed out", flush=True)
    may_go.set()

threading.Timer(0.2, takes).start()
try:
    may_go.wait()
except KeyboardInterrupt:
    print("interrupted")
"""

# The lease is released between the exit of the low-level runtime and that of gpushare-runtime.
DELETES = """
import os, signal
from gpushare.programs import runtime

print(runtime._child("/bin/sh", ["-c", "exit 3"]))
os.kill(os.getpid(), signal.SIGTERM)
print(signal.SIGTERM in signal.sigpending())
"""


def output_of(text: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", text], cwd=TREE, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_sigterm_ends_server() -> None:
    assert output_of(SERVES) == ["ended", "True -1"]


def test_sigterm_ends_soak() -> None:
    assert output_of(SOAKS)[0] == "ended"


def test_delete_forwards_no_signal_to_ended_runtime() -> None:
    assert output_of(DELETES) == ["3", "True"]
