"""Suspend a container: move its device memory to the host, and back (docs/suspend.md). Not on the start path.

    Site(state_dir, node).suspend(id, timeout_s)  -> Outcome
    Site(state_dir, node).resume(id, timeout_s)   -> Outcome    also undoes a command that was killed
    refusal(lease, usage)                         -> why this container cannot be suspended; "" if it can

A container passes through the phases of Share.phase. While it has one, its processes wait before they call the driver
(shim/core/suspend.c):

    ""  -> suspending   its processes are locked and checkpointed one by one; what it was granted still counts
        -> suspended    its device memory is in host memory, and its grant is free for others
        -> resuming     its grant counts again, and the driver has the memory; its processes are restored
        -> ""

So at no point is memory granted twice, wherever a command is killed. A flock on the container's directory keeps two
commands apart. Everything that can be known is checked before a process is locked, since the driver may end a process
that it cannot checkpoint, and never restores one again that it had no memory for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Optional

from ..core import constants
from ..core.errors import CapacityError, DeviceError, GpushareError, KernelError, PolicyError, RequestError, of_file
from ..core.model import Lease, Node, Share
from ..core.quantity import human
from ..core.quoting import shown
from ..gpu import checkpoint, driverfiles, nvml_usage
from ..state import leases, leftover, shm_abi, storage
from ..state import ledger as books
from ..state.usage_reader import DOES_EXCHANGE, DOES_MANAGE, DOES_WAIT, Usage
from ..system import cgroup, procs
from . import admission, backends, limit_update, oversubscribing

SPARE_BYTES = 64 << 20  # free memory of a device that a restore may not get
_EMPTY_BYTES = 8 << 20  # that the driver counts on a device that no process uses
_NVML_S = 5.0
_POLL_S = 0.05
_SEEN_S = 5.0  # until each process has seen that it is suspended: its thread for this wakes at once
_MOST = 4096  # processes of a container: each costs a millisecond, in which the agent serves no other container
_HOST_SPARE = 20  # this fraction of host memory stays available


class Outcome(NamedTuple):
    """`size_bytes` moved in `seconds`, of `processes` processes. `changed`: False if nothing was to do."""

    id: str
    changed: bool
    size_bytes: int = 0
    processes: int = 0
    seconds: float = 0.0


class Taken(KernelError):
    """Another command suspends or resumes the container."""


def refusal(lease: Lease, usage: Optional[Usage]) -> str:
    """Return why the container cannot be suspended, as far as lease and usage tell; "" if it can."""
    why = refusal_of_shares(lease.shares) or ("" if usage else "its usage file cannot be read")
    if why or usage is None:
        return why
    for bit, why in (
        (DOES_MANAGE, "has allocated managed memory, which the driver cannot move away"),
        (DOES_EXCHANGE, "has shared memory or events with another process"),
    ):
        slot = next((slot for slot in usage.slots if slot.does & bit), None)
        if slot is not None:
            return f"its process {slot.pid} {why}"
    return ""


def refusal_of_shares(shares: Sequence[Share]) -> str:
    """The same, by its shares alone."""
    for share in shares:
        names = (share.compute_backend, share.memory_backend)
        backend = next((name for name in names if not backends.BACKENDS[name].suspends), "")
        if backend:
            return f"its limits are enforced by the backend {backend}"
        if share.has_host_part:
            return "part of its memory is managed memory, which the driver cannot move away"
    return ""


def unable(node: Node) -> str:
    """Return why the driver of this node can suspend no process; "" if it can."""
    try:
        _driver_of(node)
    except DeviceError as error:
        return error.message
    return ""


def _driver_of(node: Node, meanwhile: Optional[Callable[[], None]] = None) -> checkpoint.Driver:
    version = node.inventory.driver_version
    return checkpoint.Driver(driverfiles.cuda_library(node.inventory.files_root, version), version, meanwhile)


class Site:
    """A state directory, its node, and the driver there. `say` gets a line for each step. `meanwhile`: called ten times
    a second while the driver works."""

    def __init__(
        self,
        state_dir: str,
        node: Node,
        say: Callable[[str], None] = lambda line: None,
        meanwhile: Optional[Callable[[], None]] = None,
    ) -> None:
        self._state_dir, self._node, self._say = state_dir, node, say
        self._driver = _driver_of(node, meanwhile)
        self._nvml = driverfiles.nvml_library(node.inventory.files_root, node.inventory.driver_version)

    # Suspend

    def suspend(self, container_id: str, timeout_s: float) -> Outcome:
        """Suspend a running container; its work has `timeout_s` to end. After an error it runs as before. Raise
        RequestError, PolicyError or DeviceError if it cannot be suspended, CapacityError if the host has no room,
        checkpoint.Busy if it works."""
        with self._alone(container_id):
            began = time.monotonic()
            lease = self._lease(container_id)
            if lease.shares[0].phase == constants.SUSPENDED:
                return Outcome(container_id, False)
            if lease.shares[0].phase:
                self._finish(lease, timeout_s)
            self._require(lease)
            self._enter(container_id, constants.SUSPENDING)
            touched: list[int] = []
            try:
                self._wait_seen(lease)
                sizes = self._sizes(lease)
                self._promise(lease, sizes)
                for pid in sizes:
                    _require_own(lease, sizes)
                    self._say(f"waiting for the work of pid {pid}")
                    touched.append(pid)  # a lock that does not return in time may still be granted
                    self._driver.lock(pid, max(0.001, began + timeout_s - time.monotonic()))
                _require_own(lease, sizes)  # from here the driver refuses a process that is not locked
                self._require(lease)  # again: until the lock, its calls could do what cannot be moved
                for pid, by_uuid in sizes.items():
                    self._say(f"moving {human(sum(by_uuid.values()))} of pid {pid} to the host")
                    self._driver.checkpoint(pid, sum(by_uuid.values()))
                self._enter(container_id, constants.SUSPENDED)
            except BaseException as error:
                self._undo(lease, touched, error)
                raise
            total = sum(sum(by_uuid.values()) for by_uuid in sizes.values())
            return Outcome(container_id, True, total, len(sizes), time.monotonic() - began)

    def _require(self, lease: Lease) -> None:
        name = shown(constants.short(lease.id))
        try:
            usage: Optional[Usage] = storage.read_usage(self._state_dir, lease.id, len(lease.shares))
        except shm_abi.RegionError:
            usage = None
        why = refusal(lease, usage)
        if why:
            raise PolicyError(f"container {name} cannot be suspended: {why}", "stop it instead")
        _require_processes(lease)

    def _wait_seen(self, lease: Lease) -> None:
        """Wait until no process enters the driver any more."""
        until = time.monotonic() + _SEEN_S
        while True:
            try:
                slots = storage.read_usage(self._state_dir, lease.id, len(lease.shares)).slots
            except shm_abi.RegionError:
                slots = ()
            late = next((slot for slot in slots if not slot.does & DOES_WAIT), None)
            if late is None:
                return
            if time.monotonic() > until:
                raise DeviceError(
                    f"process {late.pid} of container {shown(constants.short(lease.id))} does not notice that it is "
                    "to be suspended",
                    "start the container again: it may have a library of an earlier version",
                )
            time.sleep(_POLL_S)

    def _sizes(self, lease: Lease) -> dict[int, dict[str, int]]:
        """Return the device memory of each process that uses CUDA, by uuid, from the driver."""
        pids = _pids(lease)
        states = self._driver.states(pids)
        other = next((pid for pid, state in states.items() if state != checkpoint.RUNNING), 0)
        if other:
            raise DeviceError(
                f"pid {other} is {checkpoint.NAMES[states[other]]} already, and not by gpushare", "stop the container"
            )
        used = storage.read_usage(self._state_dir, lease.id, len(lease.shares)).slots
        if sum(any(slot.bytes) for slot in used) > len(states):
            raise DeviceError(
                f"container {shown(constants.short(lease.id))} has more processes that use CUDA than the {len(states)} "
                "in its cgroup",
                "stop it instead",
            )
        sizes: dict[int, dict[str, int]] = {pid: {} for pid in states}
        for uuid, gpu in self._read().items():
            for process in gpu.processes:
                if process.pid in sizes:
                    if process.used_bytes is None:
                        raise DeviceError(
                            f"the driver does not tell the memory of pid {process.pid}", "stop it instead"
                        )
                    sizes[process.pid][uuid] = process.used_bytes
        return sizes

    def _read(self) -> dict[str, nvml_usage.Gpu]:
        found = nvml_usage.read(self._nvml, _NVML_S)
        if found is None:
            raise DeviceError("the driver does not answer how much memory is in use", "see `gpushare doctor`")
        return found

    def _promise(self, lease: Lease, sizes: dict[int, dict[str, int]]) -> None:
        """Promise the container the host memory that the copies take. Refuse if it is not there, also for the copies of
        other containers that are being made."""
        total = sum(sum(by_uuid.values()) for by_uuid in sizes.values())
        name = shown(constants.short(lease.id))
        hint = "stop it instead"
        rooms = [room for room in map(cgroup.memory_room, sizes) if room is not None]
        if rooms and total > min(rooms):
            raise CapacityError(
                f"container {name} needs {human(total)} of host memory, and the memory limit of its cgroup leaves "
                f"{human(min(rooms))}",
                "raise the container's memory limit, such as `docker update --memory`",
            )

        def require(live: tuple[Lease, ...]) -> None:
            others = [one for one in live if one.id != lease.id]
            budget = oversubscribing.budget_bytes(self._node.config, self._node.inventory)
            free = max(0, budget - books.ledger_of(others, self._node.config.policy).host_bytes)
            if budget and total > free:
                raise CapacityError(
                    f"container {name} needs {human(total)} of host memory, {human(free)} free of {human(budget)} "
                    f"({oversubscribing.KEY})",
                    hint,
                )
            available, size = procs.host_memory()
            shares = [share for one in others for share in one.shares if share.phase == constants.SUSPENDING]
            available = max(0, available - sum(share.suspended_bytes for share in shares))
            if total > max(0, available - size // _HOST_SPARE):
                raise CapacityError(
                    f"container {name} needs {human(total)} of host memory, and this host has {human(available)}", hint
                )

        moved: dict[str, int] = {}
        for by_uuid in sizes.values():
            for uuid, size in by_uuid.items():
                moved[uuid] = moved.get(uuid, 0) + size
        self._enter(lease.id, constants.SUSPENDING, moved, require)

    def _undo(self, lease: Lease, touched: Sequence[int], error: BaseException) -> None:
        """Let the container run again."""
        try:
            if touched:
                self._wait_free(self._lease(lease.id), time.monotonic() + _SEEN_S)
                self._restore(lease, touched)
            self._enter(lease.id, "", {share.device.uuid: 0 for share in lease.shares})
        except GpushareError as second:
            if isinstance(error, GpushareError):
                error.draft += f"; and the container could not go on: {second.message}"

    # Resume

    def resume(self, container_id: str, timeout_s: float, phase: str = "") -> Outcome:
        """Let a suspended container run; wait up to `timeout_s` for its memory. Also complete or undo a change that was
        killed. With `phase`, only if it has that phase still. Raise CapacityError without room; then the container
        stays suspended."""
        with self._alone(container_id):
            lease = self._lease(container_id)
            now = lease.shares[0].phase
            if not now or (phase and now != phase):
                return Outcome(container_id, False)
            return self._finish(lease, timeout_s)

    def _finish(self, lease: Lease, timeout_s: float) -> Outcome:
        began = time.monotonic()
        size = sum(share.suspended_bytes for share in lease.shares)
        _require_processes(lease)
        if lease.shares[0].phase == constants.SUSPENDED:
            self._regain(lease.id, began + timeout_s)
        try:
            self._wait_free(lease, began + timeout_s)
        except BaseException:
            self._enter(lease.id, lease.shares[0].phase)
            raise
        restored = self._restore(lease, _pids(lease))
        self._enter(lease.id, "", {share.device.uuid: 0 for share in lease.shares})
        return Outcome(lease.id, True, size, restored, time.monotonic() - began)

    def _regain(self, container_id: str, until: float) -> None:
        """Take back what the container was granted."""

        def decide(lease: Lease, live: tuple[Lease, ...], seen: leases.View) -> tuple[Share, ...]:
            others = (one for one in live if one.id != lease.id)
            ledger = books.ledger_of(others, self._node.config.policy, seen.blocked(self._node))
            for share in lease.shares:
                admission.regain(share, self._node, ledger)
            return tuple(share._replace(phase=constants.RESUMING) for share in lease.shares)

        while True:
            try:
                limit_update.change(self._state_dir, container_id, decide)
                return
            except CapacityError:
                if time.monotonic() >= until:
                    raise
            self._say("waiting for memory")
            time.sleep(_POLL_S)

    def _wait_free(self, lease: Lease, until: float) -> None:
        """Wait until the driver has the memory: a restore that fails without it loses the process. Nothing is lent on
        the devices from here on, as long as the container has its phase."""
        limit_update.stop_lending(self._state_dir)
        sizes = {share.device.uuid: share.suspended_bytes or self._used_bytes(lease, share) for share in lease.shares}
        pids = _pids(lease)
        while checkpoint.CHECKPOINTED in self._driver.states(pids).values():
            gpus = self._read()
            short = next((uuid for uuid, size in sizes.items() if not _has_room(gpus.get(uuid), size, pids)), "")
            if not short:
                return
            if time.monotonic() >= until:
                raise CapacityError(
                    f"the device of container {shown(constants.short(lease.id))} has less than the "
                    f"{human(sizes[short])} free that it used",
                    "try again, or stop a container that has borrowed memory",
                )
            self._say("waiting for memory")
            time.sleep(_POLL_S)

    def _used_bytes(self, lease: Lease, share: Share) -> int:
        """Return what its processes count: after the state directory was lost, nothing else tells what they had."""
        try:
            return storage.read_usage(self._state_dir, lease.id, len(lease.shares)).used_bytes(share.slot)
        except shm_abi.RegionError:
            return 0

    def _restore(self, lease: Lease, pids: Sequence[int]) -> int:
        """Let these processes run again, whatever state they are in. Return how many were checkpointed."""
        states, restored = self._driver.states(pids), 0
        errors = []
        for pid, state in states.items():
            try:
                if state == checkpoint.CHECKPOINTED:
                    self._say(f"restoring pid {pid}")
                    self._driver.restore(pid, sum(share.suspended_bytes for share in lease.shares))
                    restored += 1
                if state in (checkpoint.CHECKPOINTED, checkpoint.LOCKED):
                    self._driver.unlock(pid)
            except DeviceError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return restored

    # Shared

    @contextlib.contextmanager
    def _alone(self, container_id: str) -> Iterator[None]:
        path = storage.container_dir(self._state_dir, container_id)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise of_file(error, path) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise Taken(
                f"container {shown(constants.short(container_id))} is being suspended or resumed already",
                "wait for that command",
            ) from None
        finally:
            os.close(fd)

    def _lease(self, container_id: str) -> Lease:
        for lease in leases.view(self._state_dir).live:
            if lease.id == container_id and lease.state == "held" and lease.shares:
                return lease
        raise RequestError(
            f"no running container {shown(container_id)}", "`gpushare list` shows containers with a share"
        )

    def _enter(
        self,
        container_id: str,
        phase: str,
        moved: Optional[dict[str, int]] = None,
        require: Callable[[tuple[Lease, ...]], None] = lambda live: None,
    ) -> None:
        def decide(lease: Lease, live: tuple[Lease, ...], seen: leases.View) -> tuple[Share, ...]:
            require(live)
            return tuple(
                share._replace(
                    phase=phase,
                    suspended_bytes=share.suspended_bytes if moved is None else moved.get(share.device.uuid, 0),
                )
                for share in lease.shares
            )

        limit_update.change(self._state_dir, container_id, decide)


def _has_room(gpu: Optional[nvml_usage.Gpu], size_bytes: int, pids: Sequence[int]) -> bool:
    """Whether the device has room for what these processes do not have on it now."""
    if gpu is None or gpu.memory_bytes is None or gpu.used_bytes is None:
        return True
    needed = size_bytes - sum(one.used_bytes or 0 for one in gpu.processes if one.pid in pids)
    spare = SPARE_BYTES if gpu.used_bytes > _EMPTY_BYTES else 0  # it may have had nearly all of the device
    return needed <= 0 or gpu.memory_bytes - gpu.used_bytes >= needed + spare


def _require_processes(lease: Lease) -> None:
    """Refuse a container that has too many processes, or one that is stopped: the driver would wait for it."""
    name, pids = shown(constants.short(lease.id)), _pids(lease)
    if len(pids) > _MOST:
        raise RequestError(f"container {name} has {len(pids)} processes, {_MOST} at most", "end some of them first")
    frozen = cgroup.first_frozen(pids)
    if frozen:
        raise RequestError(f"container {name}: pid {frozen} is stopped or paused", "let it go on first")


def _pids(lease: Lease) -> list[int]:
    """Return the processes of the container on this host: those of its own cgroup, or else of its pid namespace."""
    found = leftover.pids(lease)
    init = procs.living(lease.init_pid, lease.init_start)
    if lease.cgroup_id <= 0:
        namespaces = {pid: _namespace(pid) for pid in procs.pids_by_container_pid(lease.cgroup).values()}
        theirs = _namespace(init)
        found = [pid for pid, one in namespaces.items() if one == theirs != _namespace(os.getpid())]
    return sorted({*found, init} - {0, os.getpid()})


def _require_own(lease: Lease, pids: Iterable[int]) -> None:
    """Raise DeviceError if one of these processes is not the container's any more. It chooses when it ends, and the
    kernel then gives its number to a process of any container."""
    gone = set(pids).difference(_pids(lease))
    if gone:
        name = shown(constants.short(lease.id))
        raise DeviceError(f"process {min(gone)} of container {name} has ended meanwhile", "try again")


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:  # it has ended
        return ""
