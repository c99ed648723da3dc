"""What one thread of a program reads while another one changes it: judged by the simulated driver, which says when
something that is gone was used."""

from __future__ import annotations

from tests.shim.box import GIB, Box
from tests.shim.inside import run
from tests.shim.launches import HELPERS


def test_a_context_that_is_said_to_go_while_others_work_in_it() -> None:
    """And does not go: the driver destroys no primary context by that name. The events in it are gone by then."""
    program = """
    context, function, stop = start(), kernel("spin_us_100"), threading.Event()

    def work():
        ok(cuda.cuCtxSetCurrent(context))
        stream = new_stream()
        while not stop.is_set():
            ok(launch(function, stream))
            ok(cuda.cuStreamSynchronize(stream))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 1
    while time.monotonic() < end:
        assert cuda.cuCtxDestroy_v2(context) == 201
        time.sleep(0.002)
    stop.set()
    for thread in threads:
        thread.join()
    print("ok")
    """
    with Box([GIB], compute=[100]) as box:
        assert run(box, program, helpers=HELPERS) == ["ok"]
