"""cuMemFreeAsync of memory from cuMemAlloc."""

from __future__ import annotations

from collections.abc import Callable

from simulator.ledger import Ledger
from tests.simulator.test_engine import PREPARE
from tests.simulator.test_ledger import MIB
from tests.support.remote import Remote

Start = Callable[..., Remote]
FREE = "cuda.code('cuMemFreeAsync', {}, {})"


def busy(start: Start) -> Remote:
    """A process whose stream is busy, with two allocations in two blocks."""
    p = start()
    p.do(PREPARE)
    p.do("a, b = cuda.alloc(64 << 20), cuda.alloc(1000); [cuda.launch(slow, stream) for _ in range(20)]")
    return p


def test_memory_returns_when_earlier_work_has_ended(start: Start, ledger: Ledger) -> None:
    p = busy(start)
    before = ledger.used_bytes
    assert [p.get(FREE.format(name, "stream")) for name in "ab"] == [0, 0]
    assert ledger.used_bytes == before
    p.do("cuda.ok('cuStreamSynchronize', stream)")
    assert ledger.used_bytes == before - 66 * MIB
    assert p.get("[cuda.code('cuMemFree_v2', one) for one in (a, b)]") == [1, 1]


def test_memory_is_freed_once(start: Start, ledger: Ledger) -> None:
    p = busy(start)
    before = ledger.used_bytes
    assert p.get(FREE.format("a + 512", "stream")) == 1  # not the start of an allocation
    assert [p.get(FREE.format("a", "stream")) for _ in range(2)] == [0, 1]
    p.do("cuda.synchronize(); again = cuda.alloc(64 << 20)")
    assert p.get("again == a") and ledger.used_bytes == before
    assert p.get(FREE.format("again", "0")) == 0
    p.do("cuda.synchronize()")
    assert ledger.used_bytes == before - 64 * MIB


def test_idle_stream_frees_at_once(start: Start, ledger: Ledger) -> None:
    p = busy(start)
    p.do("cuda.synchronize()")
    before = ledger.used_bytes
    assert p.get(FREE.format("a", "stream")) == 0 and ledger.used_bytes == before - 64 * MIB


def test_context_ends_with_a_late_free(start: Start, ledger: Ledger) -> None:
    p = busy(start)
    assert p.get(FREE.format("a", "stream")) == 0
    p.do("cuda.ok('cuDevicePrimaryCtxReset_v2', 0)")
    assert ledger.used_bytes == 0
    p.do("cuda.context(); a = cuda.alloc(64 << 20); before = cuda.free_bytes()")
    assert p.get(FREE.format("a", "0")) == 0
    p.do("cuda.synchronize()")
    assert p.get("cuda.free_bytes() - before") == 64 * MIB
