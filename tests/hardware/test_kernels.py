"""The counting kernel's own instructions, executed one by one: no GPU is needed to see that they add up device time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from tests.hardware.tenants import cuda

COUNTER, CLOCK = 0x1000, 0x2000
Registers = dict[str, int]


def lines_of(ptx: str) -> tuple[list[str], dict[str, int]]:
    """Return the instructions of a kernel's body, and the index that each label stands for."""
    body = ptx[ptx.index("{") + 1 : ptx.rindex("}")]
    lines, labels = list[str](), dict[str, int]()
    for line in map(str.strip, body.splitlines()):
        if line.endswith(":"):
            labels[line[:-1]] = len(lines)
        elif line and not line.startswith("."):
            lines.append(line.rstrip(";"))
    return lines, labels


class Thread:
    """One thread, with a memory of 64-bit words and a device clock."""

    def __init__(self, ptx: str, parameters: dict[str, int], tid: int, ctaid: int, clock: Iterator[int]) -> None:
        self.lines, self.labels = lines_of(ptx)
        self.registers: Registers = {"%tid.x": tid, "%ctaid.x": ctaid}
        self.parameters, self.clock = parameters, clock
        self.memory = dict.fromkeys((COUNTER, COUNTER + 8, CLOCK), 0)

    def value(self, word: str) -> int:
        if word == "%globaltimer":
            return next(self.clock)
        return self.registers[word] if word.startswith("%") else int(word)

    def address(self, word: str) -> int:
        base, _, offset = word.strip("[]").partition("+")
        return self.value(base) + int(offset or 0)

    def run(self) -> Thread:
        at = 0
        while True:
            line, at = self.lines[at], at + 1
            guard = re.match(r"@(!?)(%\w+) (.*)", line)
            if guard:
                if bool(self.registers[guard[2]]) == bool(guard[1]):
                    continue
                line = guard[3]
            name, _, rest = line.partition(" ")
            words = [word.strip() for word in rest.split(",")]
            if name == "ret":
                return self
            if name == "bra":
                at = self.labels[words[0]]
            else:
                self.execute(name.split("."), words)

    def execute(self, name: list[str], words: list[str]) -> None:
        compute: dict[str, Callable[..., int]] = {
            "add": lambda a, b: a + b,
            "sub": lambda a, b: a - b,
            "and": lambda a, b: a & b,
            "or": lambda a, b: a | b,
            "mad": lambda a, b, c: a * b + c,
            "mov": lambda a: a,
            "cvta": lambda a: a,
        }
        compare: dict[str, Callable[[int, int], bool]] = {
            "eq": lambda a, b: a == b,
            "ne": lambda a, b: a != b,
            "lt": lambda a, b: a < b,
        }
        out, *inputs = words
        bits = 32 if name[-1] in ("u32", "b32") else 64
        if name[0] in compute:
            self.registers[out] = compute[name[0]](*map(self.value, inputs)) % (1 << bits)
        elif name[0] == "setp":
            holds = compare[name[1]](*map(self.value, inputs[:2]))
            self.registers[out] = holds and (name[2] != "and" or bool(self.value(inputs[2])))
        elif name[:2] == ["ld", "param"]:
            self.registers[out] = self.parameters[inputs[0].strip("[]")]
        elif name[0] == "ld":
            self.registers[out] = self.memory[self.address(inputs[0])]
        elif name[0] == "st":
            self.memory[self.address(out)] = self.value(inputs[0])
        elif name[0] == "atom":
            self.memory[self.address(inputs[0])] += self.value(inputs[1])
        else:
            assert name == ["membar", "sys"], name


def executed(rounds: int, clock: Iterator[int], clock_at: int = CLOCK, tid: int = 0, ctaid: int = 0) -> dict[int, int]:
    """Run the kernel in one thread; return the memory."""
    ptx = cuda.counting(100)[0].decode()
    return Thread(ptx, {"counter": COUNTER, "rounds": rounds, "clock": clock_at}, tid, ctaid, clock).run().memory


def ticking(step_ns: int, pauses: dict[int, int] | None = None) -> Iterator[int]:
    """Yield readings of the clock; before the reading with a number in `pauses`, another context has the device."""
    now, number = 1 << 60, 0
    while True:
        yield now
        number += 1
        now += step_ns + (pauses or {}).get(number, 0)


def test_kernel_counts_its_rounds_and_its_device_time() -> None:
    memory = executed(1000, ticking(5000))
    readings = 1 + 1000 // 128 + 1
    assert memory[COUNTER] == 1000 and memory[CLOCK] == 5000 * (readings - 1)


def test_time_of_another_context_is_left_out() -> None:
    """Two pauses of 2 ms: the intervals of 5 us around them are lost, and nothing else."""
    memory = executed(1000, ticking(5000, {2: 2_000_000, 5: 2_000_000}))
    assert memory[CLOCK] == 5000 * (1000 // 128 + 1 - 2)


@pytest.mark.parametrize(("tid", "ctaid", "clock_at"), [(1, 0, CLOCK), (0, 1, CLOCK), (0, 0, 0)])
def test_only_one_thread_counts_time(tid: int, ctaid: int, clock_at: int) -> None:
    memory = executed(1000, ticking(5000), clock_at, tid, ctaid)
    assert memory[CLOCK] == 0
    assert memory[COUNTER] == (1000 if tid == 0 else 0), "one thread of each block counts the rounds"
