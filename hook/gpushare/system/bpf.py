"""Allow and deny devices on cgroup v2, through its BPF_CGROUP_DEVICE programs.

Every program of a cgroup must allow an access, so adding a program cannot allow a device. Instead, each attached
program is read back from the kernel and replaced atomically by a copy behind a prefix. The prefix allows the granted
devices and falls through for all others. Copying the instructions, rather than regenerating them from the spec, keeps
what runtimes add on their own (default devices, mknod, /dev/net/tun, `systemd` properties) and changes no other
device. This works because the verifier does not translate programs of this type (nor their context). `reusable`
refuses every instruction that it may have changed after all.

Context of such a program (linux/bpf.h, struct bpf_cgroup_dev_ctx): u32 access_type (low half: 1 block, 2 character;
high half: 1 mknod, 2 read, 4 write), u32 major, u32 minor. It returns 1 to allow.
"""

import errno
import os
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..core.errors import KernelError
from ..core.quoting import shown
from . import syscalls

Rule = tuple[int, int]

_PROG_LOAD, _PIN, _GET_PINNED, _PROG_ATTACH, _GET_FD_BY_ID, _GET_INFO, _PROG_QUERY = 5, 6, 7, 8, 13, 15, 16
_TYPE_CGROUP_DEVICE = 15
_ATTACH_CGROUP_DEVICE = 6
_F_ALLOW_MULTI, _F_REPLACE = 2, 4
_MAX_PROGRAMS = 64
_MAX_RULES = 512
_RACES = 8
_PINS = "/sys/fs/bpf/crun"

_NAME = b"gpushare_dev"
_MARK = 0x67730000  # immediate of the prefix's first instruction, with the prefix's length in the low half
_INSTRUCTION = struct.Struct("<BBhi")  # opcode, dst | src << 4, offset, immediate


class Instruction(NamedTuple):
    code: int
    registers: int  # destination | source << 4
    offset: int
    immediate: int


Program = tuple[Instruction, ...]

_HEAD = 8  # instructions of the prefix before its rules
_PER_RULE = 4


# Building and parsing programs


def with_rules(program: Program, rules: Sequence[Rule]) -> Program:
    """`program` behind a prefix that allows reading and writing the character devices `rules`, but not mknod."""
    if not rules:
        return program
    if len(rules) > _MAX_RULES:
        raise KernelError(f"{len(rules)} device rules are too many for one program (maximum {_MAX_RULES})")
    length = _HEAD + _PER_RULE * len(rules)
    prefix = [
        Instruction(0xB7, 0, 0, _MARK | length),  # r0 = mark: identifies the prefix for `split`
        Instruction(0x61, 0x12, 0, 0),  # r2 = access_type
        Instruction(0xBF, 0x23, 0, 0),  # r3 = r2
        Instruction(0x57, 3, 0, 0xFFFF),  # r3 &= 0xffff
        Instruction(0x55, 3, length - 5, 2),  # not a character device: continue with the program
        Instruction(0x45, 2, length - 6, 0x10000),  # mknod: continue with the program
        Instruction(0x61, 0x13, 4, 0),  # r3 = major
        Instruction(0x61, 0x14, 8, 0),  # r4 = minor
    ]
    for major, minor in rules:
        if not (0 <= major < 1 << 12 and 0 <= minor < 1 << 20):
            raise KernelError(f"device number {major}:{minor} is out of range")
        prefix += [
            Instruction(0x55, 3, 3, major),  # another major: next rule
            Instruction(0x55, 4, 2, minor),
            Instruction(0xB7, 0, 0, 1),  # return 1
            Instruction(0x95, 0, 0, 0),
        ]
    return (*prefix, *program)


def denying(rules: Sequence[Rule]) -> Program:
    """A program that refuses all access to the character devices `rules`, also mknod, and allows all other devices."""
    if len(rules) > _MAX_RULES:
        raise KernelError(f"{len(rules)} device rules are too many for one program (maximum {_MAX_RULES})")
    program = [
        Instruction(0x61, 0x12, 0, 0),  # r2 = access_type
        Instruction(0x57, 2, 0, 0xFFFF),  # r2 &= 0xffff
        Instruction(0x55, 2, 2 + _PER_RULE * len(rules), 2),  # not a character device: allowed
        Instruction(0x61, 0x13, 4, 0),  # r3 = major
        Instruction(0x61, 0x14, 8, 0),  # r4 = minor
    ]
    for major, minor in rules:
        program += [
            Instruction(0x55, 3, 3, major),
            Instruction(0x55, 4, 2, minor),
            Instruction(0xB7, 0, 0, 0),  # return 0
            Instruction(0x95, 0, 0, 0),
        ]
    return (*program, Instruction(0xB7, 0, 0, 1), Instruction(0x95, 0, 0, 0))


def split(program: Program) -> tuple[tuple[Rule, ...], Program]:
    """(rules of gpushare's prefix, program behind it); no rules when there is no such prefix."""
    first = program[0] if program else Instruction(0, 0, 0, 0)
    length = first.immediate & 0xFFFF
    if first != Instruction(0xB7, 0, 0, _MARK | length) or not _HEAD < length < len(program):
        return (), program
    rules = tuple(
        (program[i].immediate, program[i + 1].immediate) for i in range(_HEAD, length - _PER_RULE + 1, _PER_RULE)
    )
    if program[:length] != with_rules((), rules):
        return (), program
    return rules, program[length:]


def reusable(program: Program, what: str) -> Program:
    """Convert a program that was read from the kernel so that it can be loaded again. Raises KernelError for an
    instruction that the verifier may have translated: calls, map references, atomics, and its own registers."""
    result = []
    wide = False  # in the second half of a 16-byte load of a constant
    for instruction in program:
        code, registers = instruction.code, instruction.registers
        kind = code & 7
        good = registers & 15 <= 10 and registers >> 4 <= 10
        if wide:
            good, wide = code == 0 and registers == 0, False
        elif code == 0x18:
            good, wide = registers >> 4 == 0, True  # a plain constant, no map or address
        elif kind == 0 or code in (0x85, 0x8D):  # other legacy loads; calls
            good = False
        elif kind in (1, 2, 3):
            good = good and code & 0xE0 == 0x60  # plain memory access
        if not good:
            raise KernelError(
                f"{what} has an instruction ({code:#04x}) that gpushare cannot load again",
                "start the container with gpushare-runtime, which puts device rules into the spec",
            )
        if code == 0xBC and instruction.offset == 0 and instruction.immediate == 1:
            instruction = instruction._replace(immediate=0)  # "zero-extend", which the verifier adds on some machines
        result.append(instruction)
    return tuple(result)


# Reading and replacing programs in the kernel


def _attr(layout: str, *values: int) -> syscalls.Memory:
    """A `union bpf_attr` (linux/bpf.h), padded with zeros as the kernel requires."""
    return syscalls.buffer(struct.pack("<" + layout, *values).ljust(128, b"\0"))


def _attached(directory: int, path: str) -> tuple[list[int], int]:
    """(ids of the device programs attached to this cgroup itself, attach flags)."""
    ids = syscalls.buffer(4 * _MAX_PROGRAMS)
    attr = _attr("IIIIQI", directory, _ATTACH_CGROUP_DEVICE, 0, 0, syscalls.address(ids), _MAX_PROGRAMS)
    syscalls.bpf(_PROG_QUERY, attr, f"query {path}")
    flags, _, count = struct.unpack_from("<IQI", attr.raw, 12)
    return list(struct.unpack_from(f"<{count}I", ids.raw)), flags


def _program(identity: int, path: str) -> int:
    """A descriptor of the loaded program with this id."""
    return syscalls.bpf(_GET_FD_BY_ID, _attr("III", identity, 0, 0), f"device program {identity} of {path}")


def _read(program: int, what: str) -> Program:
    """Read the instructions of a loaded program from the kernel."""
    info = syscalls.buffer(128)  # the beginning of struct bpf_prog_info; the kernel accepts any length
    attr = _attr("IIQ", program, 128, syscalls.address(info))
    syscalls.bpf(_GET_INFO, attr, what)
    size = struct.unpack_from("<I", info.raw, 20)[0]  # xlated_prog_len
    code = syscalls.buffer(size)
    info = syscalls.buffer(struct.pack("<20xI8xQ", size, syscalls.address(code)).ljust(128, b"\0"))
    syscalls.bpf(_GET_INFO, _attr("IIQ", program, 128, syscalls.address(info)), what)
    returned, address = struct.unpack_from("<I8xQ", info.raw, 20)
    if not address or returned != size:
        raise KernelError(f"{what} cannot be read back", "set net.core.bpf_jit_harden to 0 or 1")
    return tuple(Instruction(*raw) for raw in _INSTRUCTION.iter_unpack(code.raw[:size]))


def load(program: Program, what: str) -> int:
    """Load a BPF_PROG_TYPE_CGROUP_DEVICE program; return its descriptor."""
    code = syscalls.buffer(b"".join(_INSTRUCTION.pack(*instruction) for instruction in program))
    license_ = syscalls.buffer(b"none\0")  # the program calls no helper that requires another
    numbers = (_TYPE_CGROUP_DEVICE, len(program), syscalls.address(code), syscalls.address(license_))
    head = struct.pack("<IIQQ24x16s", *numbers, _NAME)  # no log, no flags
    return syscalls.bpf(_PROG_LOAD, syscalls.buffer(head.ljust(128, b"\0")), f"load {what}")


def attach(path: str, program: Program) -> None:
    """Add `program` to the cgroup directory `path`. The programs of its parent cgroups stay in force."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        loaded = load(program, f"a device program for {shown(path)}")
        try:
            attr = _attr("IIIII", directory, loaded, _ATTACH_CGROUP_DEVICE, _F_ALLOW_MULTI, 0)
            syscalls.bpf(_PROG_ATTACH, attr, f"attach {path}")
        finally:
            os.close(loaded)
    finally:
        os.close(directory)


def _exchange(directory: int, old: int, new: int, flags: int, path: str) -> None:
    """Attach `new` in place of `old`, atomically for every process of the cgroup."""
    replace = flags & _F_ALLOW_MULTI
    attr = _attr(
        "IIIII", directory, new, _ATTACH_CGROUP_DEVICE, flags | (_F_REPLACE if replace else 0), old if replace else 0
    )
    syscalls.bpf(_PROG_ATTACH, attr, f"attach {path}")


def _pin_again(path: str, old: int, new: int) -> None:
    """If crun has pinned the program `old` of this cgroup, pin `new` in its place. From 1.22 on crun gives systemd no
    device rules of a scope but the path of a pinned program, which systemd attaches again at each daemon-reload."""
    name = os.path.basename(path).replace(".", "_")  # the file system refuses dots
    scope, _, suffix = name.rpartition("_scope")
    for candidate in (name, scope, scope.partition("-")[2]) if not suffix else ():
        pin = f"{_PINS}/{candidate}"
        if candidate and os.path.exists(pin) and _id_of_pinned(pin) == _id(old, pin):
            _pin(new, f"{pin}_new")
            os.rename(f"{pin}_new", pin)


def _pin(program: int, path: str) -> None:
    name = syscalls.buffer(f"{path}\0".encode())
    syscalls.bpf(_PIN, _attr("QI", syscalls.address(name), program), f"pin {path}")


def _id_of_pinned(pin: str) -> int:
    name = syscalls.buffer(f"{pin}\0".encode())
    program = syscalls.bpf(_GET_PINNED, _attr("QI", syscalls.address(name), 0), pin)
    try:
        return _id(program, pin)
    finally:
        os.close(program)


def _id(program: int, what: str) -> int:
    info = syscalls.buffer(128)
    syscalls.bpf(_GET_INFO, _attr("IIQ", program, 128, syscalls.address(info)), what)
    return int(struct.unpack_from("<I", info.raw, 4)[0])


class _Exchanged(NamedTuple):
    old: int
    new: int


def _change(path: str, change: Callable[[tuple[Rule, ...]], tuple[Rule, ...]]) -> Callable[[], None]:
    """Replace the rules of each program of the cgroup `path` by `change(rules)`; return a function that undoes it."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    done: list[_Exchanged] = []
    ids, flags = _attached(directory, path)

    def undo() -> None:
        for old, new in done:
            try:
                _exchange(directory, new, old, flags, path)
                _pin_again(path, new, old)
            except syscalls.SyscallError as error:
                if error.errno != errno.ENOENT:  # ENOENT: the runtime has replaced our program since
                    raise
            finally:
                os.close(old)
                os.close(new)
        done.clear()
        os.close(directory)

    try:
        for program_id in ids:
            old = _program(program_id, path)
            try:
                done_one = _change_one(directory, old, flags, path, change)
            except BaseException:
                os.close(old)
                raise
            if done_one < 0:
                os.close(old)
            else:
                done.append(_Exchanged(old, done_one))
    except BaseException:
        undo()
        raise
    return undo


def _change_one(
    directory: int, old: int, flags: int, path: str, change: Callable[[tuple[Rule, ...]], tuple[Rule, ...]]
) -> int:
    """Change the rules of one program; return the descriptor of its replacement, or -1 when nothing changed."""
    what = f"the BPF device program of cgroup {shown(path)}"
    rules, original = split(_read(old, what))
    wanted = change(rules)
    if wanted == rules:
        return -1
    new = load(with_rules(reusable(original, what), wanted), what)
    try:
        _exchange(directory, old, new, flags, path)
        try:
            _pin_again(path, old, new)
        except BaseException:
            _exchange(directory, new, old, flags, path)
            raise
    except BaseException:
        os.close(new)
        raise
    return new


def _retried(path: str, change: Callable[[tuple[Rule, ...]], tuple[Rule, ...]]) -> Callable[[], None]:
    """`_change`, repeated when the runtime replaces a program between reading and replacing it (ENOENT)."""
    for _ in range(_RACES - 1):
        try:
            return _change(path, change)
        except syscalls.SyscallError as error:
            if error.errno != errno.ENOENT or not os.path.isdir(path):
                raise
    return _change(path, change)


def allow(path: str, rules: Sequence[Rule]) -> Callable[[], None]:
    """Allow `rules` in the cgroup directory `path`; return a function that undoes it. A cgroup without programs needs
    no change: it allows everything."""
    return _retried(path, lambda present: present + tuple(dict.fromkeys(r for r in rules if r not in present)))


def revoke(path: str, rules: Sequence[Rule]) -> None:
    """Remove `rules` from gpushare's prefix, and the prefix with its last rule."""
    _retried(path, lambda present: tuple(r for r in present if r not in rules))
