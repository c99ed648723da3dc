"""Record how this kernel and driver answer where only NVIDIA's documentation is known."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from gpushare.allocation.backends.mps import control as mps_control
from gpushare.allocation.backends.mps import daemon as mps_daemon
from gpushare.core.model import Device, Inventory
from gpushare.system import mountns

from tests.hardware import processes
from tests.hardware.session import Result, Session, size

CALL_S = 10.0  # per command of the control program
SINCE = 615  # the first driver whose daemon is documented to have protocol 3
CAPACITY = "dmem.capacity"
BATCH = ("cuMemPrefetchBatchAsync", "cuMemDiscardAndPrefetchBatchAsync", "cuMemDiscardBatchAsync")
LAST_PREFETCH = {-1: "the host", 0: "the device", -2: "nowhere"}  # CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION


class Step(NamedTuple):
    """A field of mps_control.Commands with a value, and the expected answer; None: any."""

    word: str
    value: str = ""
    right: Optional[Callable[[str], bool]] = None


def percent(value: float) -> Callable[[str], bool]:
    return lambda text: mps_control.percent_in(text) == value


STEPS = (
    Step("get_percent", "", percent(100)),
    Step("set_percent", "40"),
    Step("get_percent", "", percent(40)),
    Step("set_memory", "2G"),
    Step("get_memory", "", lambda text: text == "2G"),
    Step("start"),
    Step("servers", "", lambda text: len(mps_control.pids_in(text)) == 1),
    Step("get_server_percent", "", percent(40)),
    Step("set_server_percent", "20"),
    Step("get_server_percent", "", percent(20)),
    Step("set_server_memory", "1G"),
    Step("clients", "", lambda text: not text or bool(mps_control.pids_in(text))),
)
# For protocol 2 only: in protocol 3 `prepare` creates the server. Queries need a server.
START = f"start_server -uid {os.geteuid()}"


def _run(command: Sequence[str], env: dict[str, str], said: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=env, input=said, timeout=CALL_S, cwd="/", capture_output=True, text=True, errors="replace"
    )


class Daemon:
    """An nvidia-cuda-mps-control with private directories, and the answers to its commands."""

    def __init__(self, program: str, protocol: int, folder: str, env: dict[str, str], options: Sequence[str]) -> None:
        self.words = mps_control.COMMANDS[protocol]
        self.program, self.protocol, self.answers = program, protocol, list[dict[str, Any]]()
        self.pipe = f"{folder}/{protocol}"
        for path in (self.pipe, f"{folder}/log"):
            os.makedirs(path, exist_ok=True)
        self.env = {**env, "CUDA_MPS_PIPE_DIRECTORY": self.pipe, "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        self.started = self._call(*options, "-d")

    def _call(self, *words: str, said: str = "") -> dict[str, Any]:
        try:
            done = _run([self.program, *words], self.env, said)
        except subprocess.TimeoutExpired:
            return {"code": None, "out": "", "err": f"not done in {CALL_S:.0f} s"}
        return {"code": done.returncode, "out": done.stdout.strip(), "err": done.stderr.strip()}

    def ask(self, command: str, right: Optional[Callable[[str], bool]] = None) -> str:
        """Run a command and return its answer; record it, and whether it is the expected one."""
        over_pipe = self.protocol == 2
        answer = self._call(*(() if over_pipe else command.split()), said=command + "\n" if over_pipe else "")
        as_assumed = answer["code"] == 0 and (right is None or right(answer["out"]))
        self.answers.append({"asked": command, **answer, "as_assumed": as_assumed})
        return str(answer["out"])

    def ask_all(self) -> None:
        """Run every command that gpushare uses."""
        server: tuple[int, ...] = ()
        for command in self.words.prepare:
            self.ask(command)
        for word, value, right in STEPS:
            command = (START if self.protocol == 2 else "") if word == "start" else getattr(self.words, word)
            if not command:
                continue
            if "{server}" in command and not server:
                self.answers.append({"asked": command, "as_assumed": None, "skipped": "there is no server"})
                continue
            said = self.ask(command.format(value, server=server[0] if server else ""), right)
            server = mps_control.pids_in(said) if word == "servers" else server

    def end(self) -> None:
        found = mps_control.listening(self.pipe)
        if found is not None:
            mps_daemon.end(mps_control.Control(self.program, self.pipe, self.env, self.protocol), found.pid)


def answers_of(program: str, protocol: int, env: dict[str, str], options: Sequence[str]) -> dict[str, Any]:
    """Return everything that a daemon answers in one protocol, verbatim."""
    with tempfile.TemporaryDirectory(prefix="gs-", dir="/tmp") as folder:  # socket paths must be short
        daemon = Daemon(program, protocol, folder, env, options)
        try:
            if mps_control.listening(daemon.pipe) is not None:
                daemon.ask_all()
        finally:
            daemon.end()
    return {"options": list(options), "started": daemon.started, "answers": daemon.answers}


def words_of(program: str, env: dict[str, str], driver_version: str) -> tuple[str, dict[str, Any]]:
    """Return a sentence and the JSON data about a control program, in each of its protocols."""
    done = _run([program, "-h"], env)
    help_text = done.stdout + done.stderr
    values: dict[str, Any] = {"help": help_text, "protocol_2": answers_of(program, 2, env, ())}
    options = mps_control.several_users(help_text)
    major = driver_version.partition(".")[0]
    if "--protocol" in options or (major.isdigit() and int(major) >= SINCE):
        values["protocol_3"] = answers_of(program, 3, env, options if "--protocol" in options else ("-p", "3"))
    parts = []
    for number in (2, 3):
        said = values.get(f"protocol_{number}")
        if said is None:
            parts.append(f"protocol {number}: `-h` lists none, and driver {driver_version} is older than {SINCE}")
        elif not said["answers"]:
            parts.append(f"protocol {number}: no daemon: {said['started']['out'] or said['started']['err']}"[:120])
        else:
            parts.append(f"protocol {number}: {_tally(said['answers'])}")
    return "; ".join(parts), values


def _tally(answers: Sequence[dict[str, Any]]) -> str:
    other = [one["asked"] for one in answers if one["as_assumed"] is False]
    skipped = sum(one["as_assumed"] is None for one in answers)
    text = f"{len(answers) - len(other) - skipped} of {len(answers)} answers as assumed"
    text += f", {skipped} not asked: there is no server" if skipped else ""
    return text + (f"; otherwise: {', '.join(map(repr, other))}" if other else "")


def mps_words(session: Session) -> Result:
    """Record what nvidia-cuda-mps-control answers to each command that gpushare uses."""
    root = str(session.machine.simhost or "/")
    if session.machine.simhost:
        from simulator import mpscontrol as played

        played.install(session.machine.simhost)
    program = mps_control.program(Inventory(root, session.machine.driver_version, ()))
    if program is None:
        raise processes.Absent("this driver has no nvidia-cuda-mps-control")
    env = {"PATH": f"{os.path.dirname(program)}:/usr/sbin:/usr/bin:/sbin:/bin"}
    env.update((name, os.environ[name]) for name in ("LD_LIBRARY_PATH",) if name in os.environ)
    note, values = words_of(program, env, session.machine.driver_version)
    return Result("measured", note, values)


# ---- memory --------------------------------------------------------------------------------------------------------


def cgroup_tree(root: Optional[Path]) -> Optional[Path]:
    """Return the mount point of the whole cgroup v2 tree."""
    if root:
        return root / "sys/fs/cgroup"
    points = (Path(m.point) for m in mountns.read_mounts() if m.fstype == "cgroup2" and m.root == "/")
    return next(points, None)


def dmem(session: Session) -> Result:
    """Check whether the kernel's dmem controller lists this device, and otherwise whether the driver has limits."""
    from gpushare.allocation.backends.dmem import regions as backend

    machine = session.machine
    tree = cgroup_tree(machine.simhost)
    path = tree / CAPACITY if tree and (tree / CAPACITY).exists() else None
    text = path.read_text() if path else ""
    device = Device(0, machine.uuid, 0, machine.bus_id, machine.model, machine.total_bytes, 0)
    region = backend.region_of(device, text)
    nvml = session.ask("exported", names=["nvmlDeviceSetMemoryLimits_v1"], nvml=machine.libnvml)["there"]
    values: dict[str, Any] = {"cgroup2": str(tree or ""), "file": str(path or ""), "capacity": text, "region": region}
    values.update(bus_id=machine.bus_id, nvml=bool(nvml))
    if not tree:
        note = "all of cgroup v2 is mounted nowhere here, so nothing is known of the dmem controller"
    elif not path:
        note = f"no {CAPACITY} in {tree}: this kernel has no dmem controller"
    elif not region:
        note = f"{CAPACITY} has {len(text.splitlines())} regions, and none is {machine.bus_id}"
    else:
        note = f"{CAPACITY} names this device: {region}"
    note += f"; NVML has {'' if nvml else 'no '}nvmlDeviceSetMemoryLimits_v1"
    return Result("measured", note, values)


def prefetch_batch(session: Session) -> Result:
    """Check whether one call can prefetch several ranges, natively and under the shim, and moves memory."""
    native = session.ask("exported", names=BATCH)
    values: dict[str, Any] = {"native": native["there"], "procaddress": native["procaddress"]}
    try:
        with session.place() as place:
            values["shim"] = session.ask("exported", place, names=BATCH)["procaddress"]
    except processes.Absent as error:
        values["shim"] = str(error)
    if BATCH[0] not in native["procaddress"]:
        version = session.machine.cuda_version
        note = f"this driver (CUDA {version // 1000}.{version % 1000 // 10}) has no {BATCH[0]}"
        return Result("measured", note, values)
    trial = values["trial"] = session.ask("prefetch")
    came = LAST_PREFETCH.get(trial["last_location"], str(trial["last_location"]))
    has = "has it, too" if BATCH[0] in values["shim"] else "lacks it"
    note = f"{', '.join(native['procaddress'])}; the shim {has}; "
    note += f"one of {size(trial['bytes'])} gave {trial['code']}, and went to {came}"
    return Result("measured", note, values)
