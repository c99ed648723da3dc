"""A process under the shim that another one, outside, suspends with the checkpoint API."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulator.ledger import Ledger
from simulator.simhost import CHECKPOINTS, make_simhost
from tests.conformance import driver as d
from tests.shim.box import GIB, Box
from tests.shim.inside import PRELUDE, usage
from tests.support.remote import Remote

PROGRAM = """
start()
kept = []
ok(alloc(GIB, kept))
ok(cuda.cuMemcpyHtoD_v2(kept[0], b"pattern", c_size_t(7)))
print(os.getpid(), flush=True)
sys.stdin.readline()
back = ctypes.create_string_buffer(7)
ok(cuda.cuMemcpyDtoH_v2(back, kept[0], c_size_t(7)))
print(back.raw.decode(), fill() // MIB, info()[1] // MIB)
"""


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    simhost = make_simhost(tmp_path / "host", memory_bytes=16 * GIB, late_return_ms=0, driver=CHECKPOINTS)
    with Box([4 * GIB], simhost=simhost) as made:
        yield made


def test_suspended_process_keeps_its_charge_and_goes_on(box: Box) -> None:
    """Its memory is free on the device, and still charged to its share."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with box.popen(["python3", "-c", PRELUDE + PROGRAM], **pipes) as process, Remote(box.simhost) as caller:
        assert process.stdin and process.stdout and process.stdout.readline() == "1\n"
        pid = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        charged = usage(box).used_bytes(0)
        caller.do("cuda.init()")
        with Ledger(box.device()) as ledger:
            held = ledger.used_bytes
            for operation, used in {"Lock": held, "Checkpoint": 0, "Restore": held, "Unlock": held}.items():
                assert caller.get(f"cuda.checkpoint({operation!r}, {pid})") == d.SUCCESS
                assert ledger.used_bytes == used
                assert usage(box).used_bytes(0) == charged >= held >= GIB
        said, _ = process.communicate("\n")
    assert said == f"pattern {4 * 1024 - 300 - 1024} 4096\n"
