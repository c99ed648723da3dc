"""Keep a container's memory and compute on the same device. kubelet chooses them one after the other, in either order,
without the name of the container. No side effects but `recorded`; the threads of two services call it.

    pairing = Pairing(time.monotonic)
    pairing.asked(kind, available, size)  -> (beside, short)     kubelet asks for a preference
    pairing.beside(kind)                  -> keys of the devices of the other choice, for the same container
    pairing.chosen(kind, keys, ids)                              kubelet has chosen
    pairing.refused()                                            the choice was refused

kubelet admits one pod after the other and asks for all resources of a container within milliseconds. So a choice of
memory and the next choice of compute belong to one container, unless a pair is complete or too much time has passed.
A container with one of the two only ends with its choice: kubelet then writes its record (checkpoint.py), before it
asks for the next container. `recorded` tells that: the choices of two containers are never a pair.

`short`: the devices with too little of the other resource for a container that needs as much as the last one. They come
from the amounts that kubelet offered for that container, minus what it chose since.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, Optional

from .checkpoint import Holder
from .offers import COMPUTE, DIVISIBLE, MEMORY

_WITHIN_S = 2.0  # kubelet calls both for one container within this; it fails a pod whose calls take longer
_NONE: frozenset[str] = frozenset()
_NOBODY: frozenset[Holder] = frozenset()


class _Choice(NamedTuple):
    kind: str
    keys: frozenset[str]
    at: float
    unit: str  # one of its ids
    holders: frozenset[Holder]  # containers that kubelet's record had with this id at that time


def _count(ids: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for unit in ids:
        key = unit.rpartition("-")[0]
        found[key] = found.get(key, 0) + 1
    return found


class Pairing:
    def __init__(
        self, clock: Callable[[], float], recorded: Callable[[str, str], frozenset[Holder]] = lambda kind, unit: _NOBODY
    ) -> None:
        """`recorded`: the containers that have an id of this kind in kubelet's record."""
        self._clock, self._recorded = clock, recorded
        self._lock = threading.Lock()
        self._open: Optional[_Choice] = None  # a choice whose partner may follow
        self._free: dict[str, dict[str, int]] = {}  # kind -> key -> units
        self._size: dict[str, int] = {}  # kind -> units that the last container requested

    def beside(self, kind: str) -> frozenset[str]:
        one = self._open
        if kind not in DIVISIBLE or one is None or one.kind == kind or self._clock() - one.at > _WITHIN_S:
            return _NONE
        return _NONE if self._recorded(one.kind, one.unit) - one.holders else one.keys

    def refused(self) -> None:
        """The container of the last choice does not start."""
        with self._lock:
            self._open = None

    def asked(self, kind: str, available: Iterable[str], size: int) -> tuple[frozenset[str], frozenset[str]]:
        if kind not in DIVISIBLE:
            return _NONE, _NONE
        with self._lock:
            self._free[kind], self._size[kind] = _count(available), size
            other = MEMORY if kind == COMPUTE else COMPUTE
            least = self._size.get(other, 0)
            free = self._free.get(other)
            short = (key for key in self._free[kind] if free is not None and free.get(key, 0) < least)
            return self.beside(kind), frozenset(short)

    def chosen(self, kind: str, keys: Collection[str], ids: Iterable[str]) -> None:
        if kind not in DIVISIBLE:
            return
        with self._lock:
            paired = self.beside(kind)
            units = sorted(ids)
            holders = _NOBODY if paired else self._recorded(kind, units[0])
            self._open = None if paired else _Choice(kind, frozenset(keys), self._clock(), units[0], holders)
            free = self._free.get(kind, {})
            for key, number in _count(units).items():
                free[key] = max(0, free.get(key, 0) - number)
