"""The table of gpushare's assumptions about hardware, and how a measurement confirms or refutes each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Optional

from tests.hardware.session import size

CONFIRMED, REFUTED, UNCLEAR = "confirmed", "refuted", "unclear"
MIB = 1 << 20
BLOCK = 2 * MIB
UNLISTED = 16 * MIB  # of a context; 8.8 MiB on an H100
RESERVED_SLACK = 64 * MIB
FRAMEWORK_SLACK = 256 * MIB
UNINTERRUPTED = "no switch was seen between kernels that never stop"
OVERCHARGE = 2.0  # a charge of more than so many times what is used is refuted
SWITCH_US = (50, 500)
SLICE_MS = (0.5, 30.0)

Values = Mapping[str, Any]
Judgement = tuple[Optional[bool], str]  # None: unclear; and the figure, or the reason


class Assumption(NamedTuple):
    """`relies_on`: the file to change if the sentence is refuted. `judge`: called with the values of the check.

    `by_verdict`: the check's own result, "held" or "missed", decides.
    """

    id: str
    sentence: str
    check: str
    relies_on: str
    judge: Optional[Callable[[Values], Judgement]] = None


class Finding(NamedTuple):
    assumption: Assumption
    verdict: str
    figure: str

    def facts(self) -> dict[str, str]:
        """Return the content for the JSON."""
        row = self.assumption
        names = {"sentence": row.sentence, "check": row.check, "relies_on": row.relies_on}
        return {**names, "verdict": self.verdict, "figure": self.figure}


def context_estimate(values: Values) -> Judgement:
    took, estimate = values["first_bytes"], values["estimate_bytes"]
    return took <= estimate, f"{size(took)} of an estimated {size(estimate)}"


def context_listed(values: Values) -> Judgement:
    listed, took = values["process_bytes"], values["first_bytes"]
    if listed is None:
        return None, "NVML does not list the process"
    return -BLOCK <= took - listed <= UNLISTED, f"{size(listed)} listed, {size(took)} taken from the device"


def module_steps(values: Values) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield (way of loading, native figures, figures under the shim) for each number of modules."""
    for way, seen in values.items():
        for native, shim in zip(seen["native"]["steps"], seen["shim"].get("steps", ())):
            yield way, native, shim


def nothing_under_the_shim(values: Values) -> str:
    return next(
        (seen["shim"]["missing"] for seen in values.values() if "missing" in seen["shim"]), "nothing was loaded"
    )


def modules_covered(values: Values) -> Judgement:
    rows = list(module_steps(values))
    if not rows:
        return None, nothing_under_the_shim(values)
    short = [row for row in rows if row[2]["used_bytes"] < row[1]["used_bytes"]]
    way, native, shim = short[0] if short else rows[-1]
    figure = f"{native['modules']} modules ({way}) take {size(native['used_bytes'])}, are charged "
    return not short, figure + size(shim["used_bytes"])


def modules_exact(values: Values) -> Judgement:
    rows = list(module_steps(values))
    if not rows:
        return None, nothing_under_the_shim(values)

    def factor(row: tuple[str, dict[str, Any], dict[str, Any]]) -> float:
        native, shim = (int(seen["used_bytes"]) for seen in row[1:])
        return shim / max(BLOCK, native)

    way, native, shim = worst = max(rows, key=factor)
    figure = f"{native['modules']} modules ({way}) are charged {factor(worst):.2f} times "
    return factor(worst) <= OVERCHARGE, figure + f"what they take, {size(native['used_bytes'])}"


def modules_lazy(values: Values) -> Judgement:
    last = values["lazy"]["native"]["steps"][-1]
    figure = f"{size(last['loaded_bytes'])} at the load, {size(last['used_bytes'])} once used"
    if last["used_bytes"] <= BLOCK:
        return None, f"{figure}: not more than a block"
    return last["loaded_bytes"] <= last["used_bytes"] // 4, figure


def local_charged(values: Values) -> Judgement:
    if "used_bytes" not in values["shim"]:
        return None, values["shim"]["missing"]
    used, charged = values["native"]["used_bytes"], values["shim"]["used_bytes"]
    return charged >= used, f"{size(used)} used, {size(charged)} charged"


def v1_counts_reserved(values: Values) -> Judgement:
    if values["got_bytes"] is None or "v2_total" not in values:
        return None, "the device was in use, or NVML has no v2"
    beyond = values["v1_total"] - values["cuda_total"]
    figure = (
        f"NVML v1 counts {size(beyond)} more than the driver, and v2 reports {size(values['v2_reserved'])} reserved"
    )
    return abs(beyond - values["v2_reserved"]) <= RESERVED_SLACK, figure


def reserved_is_exact(values: Values) -> Judgement:
    if values["got_bytes"] is None or "v2_total" not in values:
        return None, "the device was in use, or NVML has no v2"
    free = values["free_with_context"]
    hidden = values["v2_total"] - values["v2_reserved"] - values["cuda_total"]
    lost = free - values["got_bytes"]
    figure = f"{size(values['got_bytes'])} allocated of {size(free)} free; cuDeviceTotalMem is {size(abs(hidden))} "
    figure += f"{'below' if hidden >= 0 else 'above'} NVML's total without the reserved memory"
    return abs(hidden) <= RESERVED_SLACK and lost <= RESERVED_SLACK, figure


def preempts(values: Values) -> Judgement:
    return values["interruptions"] > 0, f"{values['interruptions']} interruptions of kernels that never stop"


def slice_length(values: Values) -> Judgement:
    if "slice_ns" not in values:
        return None, UNINTERRUPTED
    ms = values["slice_ns"]["median"] / 1e6
    return SLICE_MS[0] <= ms <= SLICE_MS[1], f"{ms:.3f} ms"


def within(values: Optional[Values]) -> Judgement:
    """Judge a distribution of switch costs."""
    if not values:
        return None, UNINTERRUPTED
    us = values["median"] / 1e3
    return SWITCH_US[0] <= us <= SWITCH_US[1], f"{us:.0f} us (p90 {values['p90'] / 1e3:.0f})"


def switches_alike(values: Values) -> Judgement:
    preempt, idle = values["preempt_ns"]["median"] / 1e3, values["idle_ns"]["median"] / 1e3
    figure = f"{preempt:.0f} us by preemption, {idle:.0f} us from idle"
    return max(preempt, idle) <= 2 * max(1.0, min(preempt, idle)), figure


def probes_wait(values: Values) -> Judgement:
    seen = values["in_a_turn_of_the_neighbour"]
    figure = f"{seen['told']} of {sum(seen.values())} probes completed when their own context got the device"
    return values["holds"], figure


def not_told_apart(values: Values) -> Judgement:
    links = {one["link"] for one in values["descriptors"]}
    return not values["distinct"], f"{len(links)} different links, such as {min(links)}"


def kept_for_children(values: Values) -> Judgement:
    killed = values["killed"]
    return 2 * killed["left_bytes"] > killed[
        "held_bytes"
    ], f"{size(killed['left_bytes'])} are left while its child lives"


def freed_at_exit(values: Values) -> Judgement:
    exited = values["exited"]
    return 2 * exited["left_bytes"] < exited[
        "held_bytes"
    ], f"{size(exited['left_bytes'])} are left while its child lives"


def nothing_left(values: Values) -> Judgement:
    if "lost_bytes" not in values["after_cycles"]:
        return None, values["after_cycles"]["missing"]
    lost = values["after_cycles"]["lost_bytes"]
    return lost <= BLOCK, f"{size(lost)} after {values['cycles']} exports and frees"


def runtime_charged(old: bool) -> Callable[[Values], Judgement]:
    """Return a judge of the modules that libcudart 11 and older, or newer ones, load."""

    def judge(values: Values) -> Judgement:
        seen = {major: one for major, one in values["runtimes"].items() if (int(major) <= 11) is old}
        worked = {m: one for m, one in seen.items() if not any(one.get("shim", {}).get("steps", {"": 1}).values())}
        if not worked:
            there = ", ".join(sorted(values["runtimes"])) or "none"
            return None, f"no such libcudart works here (versions on this machine: {there})"
        short = [m for m, one in worked.items() if one["shim"]["taken_bytes"] < one["shim"]["table_bytes"]]
        figures = (f"libcudart {m}: {size(one['shim']['taken_bytes'])}" for m, one in worked.items())
        return not short, ", ".join(figures)

    return judge


def green_events(values: Values) -> Judgement:
    codes = values["native"]["codes"]
    name = "event of primary in stream of green"
    return codes[name] == 0, f"cuEventRecord gave {codes[name]}"


def green_launches(values: Values) -> Judgement:
    if "launched" not in values["shim"]:
        return None, values["shim"]["missing"]
    if not values["native"]["launched"]:
        return None, "the driver itself refuses them with the primary context current"
    refused = sum(values["shim"]["refused"].values())
    return not refused, f"{refused} refused, {values['shim']['launched']} launched, {values['percent']:.1f} % of native"


def charged_in_framework(values: Values) -> tuple[int, int, str]:
    """Return what a framework that has worked uses, and what it is charged, and a phrase about both."""
    charged = values.get("charged_bytes", values["total_bytes"] - values["free_bytes"])  # format 2 has only the latter
    used = values["used_bytes"]
    return used, charged, f"{size(used)} used, {size(charged)} charged"


def framework_covered(values: Values) -> Judgement:
    used, charged, figure = charged_in_framework(values)
    return charged >= used, figure


def framework_exact(values: Values) -> Judgement:
    used, charged, figure = charged_in_framework(values)
    return charged <= used + FRAMEWORK_SLACK, figure


def two_ranks(values: Values) -> Judgement:
    """Judge two processes with a rank each. A result of format 2 also has two ranks together, which NCCL refuses."""
    wrong = [one for one in values.get("two_ranks", ()) if one["sum"] != one["right"]]
    if "two_ranks" in values and not wrong:
        return True, "two ranks on one GPU"
    alone = [one["error"] for one in values["alone"] if one["sum"] != one["right"]]
    return not alone, f"a rank of its own: {alone[0]}" if alone else "a rank of its own works in each process"


def _limit(check: str, name: str) -> Assumption:
    return Assumption(check, f"{name} gets exactly its memory limit, and continues at the limit.", check, "shim/memory")


def _shares(check: str, name: str) -> Assumption:
    return Assumption(check, f"{name} get the shares that they are limited to.", check, "shim/limiter")


ASSUMPTIONS = (
    Assumption(
        "context.estimate",
        "A context costs what the estimate says, or less.",
        "context",
        "hook/gpushare/gpu/inventory.py",
        context_estimate,
    ),
    Assumption(
        "context.listed",
        "NVML reports for a process at most 16 MiB less than its context takes from the device.",
        "context",
        "hook/gpushare/monitor/overuse.py",
        context_listed,
    ),
    Assumption(
        "forks.killed",
        "The driver keeps the memory of a killed process while a forked child of it lives.",
        "forks",
        "shim/core/quota.c",
        kept_for_children,
    ),
    Assumption(
        "forks.exited",
        "The driver frees the memory of a process that exits, although a forked child of it lives.",
        "forks",
        "shim/core/account.c",
        freed_at_exit,
    ),
    Assumption(
        "modules.covered",
        "The charge for modules covers what they take.",
        "modules",
        "shim/code/image.c",
        modules_covered,
    ),
    Assumption(
        "modules.exact",
        "Many small modules are charged at most twice what they take.",
        "modules",
        "shim/code/use.c",
        modules_exact,
    ),
    Assumption(
        "modules.lazy",
        "A module that is loaded lazily takes memory at its first use.",
        "modules",
        "shim/code/module.c",
        modules_lazy,
    ),
    Assumption("local.covered", "The charge for local memory covers it.", "local", "shim/code/local.c", local_charged),
    Assumption(
        "reserved.v1",
        "NVML's total (v1) includes the memory that v2 reports as reserved, which programs cannot allocate.",
        "reserved",
        "hook/gpushare/gpu/nvml.py",
        v1_counts_reserved,
    ),
    Assumption(
        "reserved.v2",
        "Programs can allocate all memory that NVML (v2) does not report as reserved, down to single blocks.",
        "reserved",
        "hook/gpushare/gpu/nvml.py",
        reserved_is_exact,
    ),
    Assumption(
        "preemption", "A running kernel is interrupted for another context.", "slices", "shim/limiter/split.c", preempts
    ),
    Assumption("slice", "A time slice lasts 0.5 to 30 ms.", "slices", "shim/limiter/split.c", slice_length),
    Assumption(
        "switch",
        "A switch between contexts takes 50 to 500 us.",
        "slices",
        "shim/limiter/throttle.c",
        lambda values: within(values.get("switches_ns")),
    ),
    Assumption(
        "switch.full",
        "A switch also takes 50 to 500 us while all threads of the device are in use.",
        "slices",
        "shim/limiter/throttle.c",
        lambda values: within(values.get("full_switches_ns")),
    ),
    Assumption(
        "switch.alike",
        "Preemption and the hand-over from an idle context cost about the same.",
        "hand-over",
        "shim/limiter/charge.c",
        switches_alike,
    ),
    Assumption(
        "probe",
        "A probe event waits for a time slice of its own context.",
        "looks",
        "shim/limiter/probe.c",
        probes_wait,
    ),
    Assumption(
        "descriptors",
        "Device and inode do not tell exported descriptors of different memory apart.",
        "descriptors",
        "shim/memory/foreign.c",
        not_told_apart,
    ),
    Assumption(
        "exports.end",
        "Exported memory that is freed and closed is no longer charged.",
        "descriptors",
        "shim/core/exports.c",
        nothing_left,
    ),
    Assumption(
        "loader.old",
        "Modules that libcudart 11 loads are charged.",
        "private-loader",
        "shim/symbols.tsv",
        runtime_charged(old=True),
    ),
    Assumption(
        "loader.new",
        "Modules that libcudart 12 or later loads are charged.",
        "private-loader",
        "shim/symbols.tsv",
        runtime_charged(old=False),
    ),
    Assumption(
        "green.events",
        "An event of the primary context can be recorded in a green context's stream.",
        "green",
        "shim/accounting/clock.c",
        green_events,
    ),
    Assumption(
        "green.launches",
        "Launches into a green context's stream work under a compute limit.",
        "green",
        "shim/driver/context_make.c",
        green_launches,
    ),
    Assumption(
        "framework.covered",
        "The charge for the context and the libraries of PyTorch covers what they take.",
        "limit.torch",
        "shim/core/overhead.c",
        framework_covered,
    ),
    Assumption(
        "framework.exact",
        "The context and the libraries of PyTorch are charged at most 256 MiB more than they take.",
        "limit.torch",
        "shim/core/overhead.c",
        framework_exact,
    ),
    _limit("limit.torch", "PyTorch"),
    _limit("limit.compiled", "A compiled PyTorch program"),
    _limit("limit.graphs", "A PyTorch program with CUDA graphs"),
    _limit("limit.expandable", "PyTorch with expandable segments"),
    _limit("limit.async", "PyTorch with cudaMallocAsync"),
    _limit("limit.triton", "A Triton program"),
    _limit("limit.cupy", "CuPy"),
    _limit("limit.numba", "Numba"),
    _limit("limit.jax", "JAX"),
    Assumption("nccl", "NCCL works in two processes of a share.", "nccl", "shim/memory/vmm.c", two_ranks),
    _shares("compute.30_70", "Two programs at 30 and 70 %"),
    _shares("compute.10_20_30_40", "Four programs at 10, 20, 30 and 40 %"),
    _shares("torch.30_70", "Two PyTorch programs at 30 and 70 %"),
    _shares("torch.10_20_30_40", "Four PyTorch programs at 10, 20, 30 and 40 %"),
)


def findings(checks: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Return what was found of each assumption. `checks`: those of the JSON file; others are left out."""
    return [_finding(row, checks[row.check]) for row in ASSUMPTIONS if row.check in checks]


def _finding(row: Assumption, check: Mapping[str, Any]) -> Finding:
    note = str(check["note"])
    if row.judge is None or check["verdict"] in ("absent", "failed", "not run"):
        verdict = {"held": CONFIRMED, "missed": REFUTED}.get(check["verdict"], UNCLEAR)
        return Finding(row, verdict, note)
    try:
        right, figure = row.judge(check["values"])
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        return Finding(row, UNCLEAR, f"the figures lack something ({type(error).__name__}: {error})")
    return Finding(row, UNCLEAR if right is None else CONFIRMED if right else REFUTED, figure)
