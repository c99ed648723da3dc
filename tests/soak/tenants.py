"""One container with 64 processes of 16 threads that allocate, free, launch, fork and are killed, at a memory and a
compute limit; judged by the simulated device's own ledger."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

from tests.support.host import TREE
from tests.support.runc import Container
from tests.support.spec import Mount

from .stage import GIB, MILL, Stage

PROCESSES, THREADS = 64, 16
LIMIT_BYTES = 28 * GIB  # their contexts use 19
COMPUTE_PERCENT = 30
DEVICE = 1  # the other phases use device 0
REPORT_S = 240
LOOK_S = 5.0
# Use of a process at its death is not charged, and one is killed every 50 ms.
COMPUTE_POINTS = 15.0


def books(stage: Stage, minor: int = DEVICE) -> dict[str, Any]:
    """The device's ledger, read by a separate process."""
    program, device = TREE / "simulator/ledger.py", stage.node.driver_root / f"dev/nvidia{minor}"
    command = [sys.executable, str(program), str(device), "--format", "json"]
    report: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return report


def run(stage: Stage, seconds: float) -> dict[str, Any]:
    """Run the load for `seconds`, stop it, and compare all reports."""
    stage.show.phase(f"{PROCESSES} x {THREADS} threads", seconds)
    channel = stage.directory / "channel"
    channel.mkdir()
    with ExitStack() as stack:
        ends = {}
        for name in ("in", "out"):
            os.mkfifo(channel / name)
            ends[name] = os.open(channel / name, os.O_RDWR)
            stack.callback(os.close, ends[name])
        one = stack.enter_context(
            stage.container(
                ["sh", "-c", f"exec {MILL} {PROCESSES} {THREADS} {stage.seed} </opt/channel/in >/opt/channel/out"],
                memory=str(LIMIT_BYTES),
                way="runtime",
                device=DEVICE,
                env={"GPUSHARE_COMPUTE": f"{COMPUTE_PERCENT}%"},
                mounts=[Mount(channel, "/opt/channel", ("rw",))],
            )
        )
        one.start()
        shares = work(stage, seconds, one)
        os.write(ends["in"], b"\n")
        report = read_report(ends["out"], one)
        judge(stage, report, shares)
        one.kill()
        one.wait()
        one.delete()
    for line in books(stage)["clients"]:
        if line["alive"]:
            stage.record_error(f"the device still has a client: {line}")
    result = {**{key: value for key, value in report.items() if key != "used"}, "compute_percent": shares}
    stage.show.end(", ".join(f"{value} {key}" for key, value in result.items() if key != "wrong"))
    return result


def work(stage: Stage, seconds: float, one: Container) -> list[float]:
    """Return the container's percentage of the device's time in each sample."""
    shares = []
    until = time.monotonic() + seconds
    pidfd = os.pidfd_open(one.pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        while (rest_s := until - time.monotonic()) > 0:
            stage.check_stopped()
            begin, before = time.monotonic(), books(stage)["busy_ns"]
            if poll.poll(1000 * min(LOOK_S, rest_s)):
                raise RuntimeError(f"the program has ended: {one.stdout}{one.stderr}")
            took_s = time.monotonic() - begin
            shares.append(round((books(stage)["busy_ns"] - before) / took_s / 1e7, 1))
            stage.show.advance(f"{shares[-1]} % of the device's time, limit {COMPUTE_PERCENT} %", took_s)
    finally:
        os.close(pidfd)
    return shares


def read_report(fd: int, one: Container) -> dict[str, Any]:
    text = b""
    while not text.endswith(b"\n"):
        if not select.select([fd], [], [], REPORT_S)[0]:
            raise RuntimeError(f"no report after {REPORT_S} s: {text!r} {one.stderr}")
        text += os.read(fd, 1 << 16)
    report: dict[str, Any] = json.loads(text)
    return report


def judge(stage: Stage, report: dict[str, Any], shares: list[float]) -> None:
    """While the processes keep their memory, container, host and device report the same, byte for byte."""
    seen = books(stage)
    listed = json.loads(stage.cli("list", "--format", "json"))
    used = seen["used_bytes"]
    peak = max(group["peak_bytes"] for group in seen["groups"])
    if report["wrong"]:
        stage.record_error(f"a call failed: {report['wrong']}")
    if set(report["used"]) != {used}:
        stage.record_error(f"processes report {sorted(set(report['used']))} bytes, the device {used}")
    if [row["shares"][0]["memory_used_bytes"] for row in listed] != [used]:
        stage.record_error(f"`gpushare list` reports {listed}, the device {used} bytes")
    if peak > LIMIT_BYTES:
        stage.record_error(f"the container had {peak} bytes, its limit is {LIMIT_BYTES}")
    for what in ("granted", "refused", "launched", "killed", "forks"):
        if not report[what]:
            stage.record_error(f"nothing was {what}, so the run proves nothing")
    if shares and sum(shares) / len(shares) > COMPUTE_PERCENT + COMPUTE_POINTS:
        stage.record_error(f"{shares} % of the device's time, limit {COMPUTE_PERCENT} %")
