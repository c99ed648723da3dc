"""The short form of a test run: which tests `make test` leaves to `make test-all`.

    omitted(nodeids)   those of a run that the short form omits
    CostsFile          option --record-costs: writes COSTS, the tests that take much processor time (make test-costs)

`make test` is for each edit, so it omits what repeats a test that stays under another release or
branch, in the other way into a container, or with another value, and what takes long beside a shorter test of the same
file. tests/security/table.py omits some attacks that resemble others. A test that notices a planted fault always stays:
tests/planted has the proof that its faults are found without the others.
"""

from __future__ import annotations

import os
import re
import zlib
from collections import defaultdict
from collections.abc import Generator, Iterable
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
COSTS = Path(__file__).with_name("costs.txt")
HEAD = "# Processor seconds of the dearest value of each test that takes one or more: make test-costs\n"

WAY = re.compile(r"(?<=[\[ -])(hook|runtime)(?=[\],-])")
# Branches of the real driver after the first, and engines of other releases
OTHER = re.compile(
    r"\[(550|555)[\]-]|test_engines\.py::(?!test_limit_is_visible).*\[(newest|trixie) |test_docker_checks_the_change"
)

# Processor seconds from which one value of a test's parameters stays, and from which none does
ONE_VALUE_S, COSTLY_S = 1.0, 4.0
# As if costly. Shares of a device by a real clock: tests/limiter has all values in virtual time.
FEW_VALUES = re.compile(r"tests/integration/|tests/hardware/|tests/shim/test_compute(?!_cost)")
# A start by each engine, each attack, each target
EVERY_VALUE = re.compile(r"test_engines\.py::test_limit_is_visible|test_attacks\.py::test_attack|test_fuzz\.py::")

# Costly tests that stay, by file: those for which no shorter test of the file stands. The cheapest test of a file stays
# anyway.
STAYS = {
    "hardware/test_gpu_check.py": "promises_hold_on_the_simulator",
    "integration/test_adopt.py": "adoption_killed_at_any_call_leaves_nothing",
    "integration/test_borrower_ends.py": "borrower_that_ends_by_itself_was_not_evicted",
    "integration/test_capacity.py": "quarters_of_nvml_s_total_all_fit",
    "integration/test_cli.py": "list_shows_a_container_s_use_from_start_to_end",
    "integration/test_containerd.py": "sandbox_does_not_get_its_pod_s_request"
    " pods_of_other_schedulers_get_their_shares nodes_of_other_gpus_cannot_be_opened"
    " pod_gets_the_device_that_kubelet_chose",
    "integration/test_docker.py": "share_follows_the_container_after_a_daemon_restart",
    "integration/test_docker_devices.py": "injection_by_nvidia_s_runtime_is_replaced",
    "integration/test_doctor.py": "wrong_shim_library_is_reported",
    "integration/test_dra.py": "claim_from_slice_to_refused_allocation",
    "integration/test_effective_handlers.py": "podman_keeps_its_default_runtime_and_reads_ours"
    " handler_equals_the_default_one_in_every_other_key",
    "integration/test_engines.py": "limit_is_visible_reached_and_enforced two_shares_stay_within_the_device",
    "integration/test_export.py": "only_a_bypassing_container_is_reported_once",
    "integration/test_installer.py": "pod_installs_and_removes_gpushare nri_plugin_is_required_when_it_runs"
    " label_of_the_node_chooses_its_profile",
    "integration/test_k8s_plugin.py": "plugin_registers_allocates_and_follows_kubelet",
    "integration/test_lending.py": "agent_ends_a_borrower_for_another_request",
    "integration/test_lies.py": "corrupt_activity_files_leave_peers_and_host_working",
    "integration/test_lifecycle.py": "start_killed_at_any_point_leaves_nothing"
    " concurrent_starts_do_not_exceed_the_device",
    "integration/test_limits.py": "bypass_attempts_get_no_more_than_the_limit",
    "integration/test_live_limits.py": "allocations_stay_within_the_current_limit",
    "integration/test_lost_state.py": "removed_limits_block_the_device living_containers_keep_their_shares",
    "integration/test_mig.py": "mig_device_can_be_oversubscribed",
    "integration/test_mps.py": "sum_over_processes_stays_within_the_limit"
    " only_granted_containers_see_the_pipe_directory",
    "integration/test_mps_daemon.py": "start_after_a_daemon_s_death_is_clean",
    "integration/test_node_life.py": "upgrade_restarts_the_engine_once failed_restart_of_an_upgrade_is_undone"
    " removal_waits_while_something_uses",
    "integration/test_nri.py": "pod_gets_its_share",
    "integration/test_oversubscribe.py": "two_containers_hold_more_than_the_device",
    "integration/test_podman.py": "containers_of_a_pod_have_separate_shares",
    "integration/test_podman_seen.py": "cdi_device_gets_a_share",
    "integration/test_policy.py": "device_rules_open_no_other_gpu",
    "integration/test_rootless_docker.py": "limit_is_visible_reached_and_enforced",
    "integration/test_rootless_podman.py": "limit_is_visible_reached_and_enforced",
    "integration/test_suspend.py": "memory_of_a_suspended_container_is_free_for_another"
    " idle_container_makes_room borrower_is_suspended_and_not_killed",
    "integration/test_swarm.py": "swarm_places_services_by_gpu_memory",
    "integration/test_unlimited.py": "program_with_another_libcuda_is_reported",
    "limiter/test_matrix.py": "every_unlisted_cell_holds",
    "shim/test_compute_cost.py": "prepaid_launch_costs_few_instructions",
    "shim/test_overhead.py": "device_never_counts_more_than_the_limit overhead_is_exact_while_threads_allocate",
    "shim/test_real_driver.py": "every_look_up_returns_the_wrapper",
}
_STAYS = tuple(f"tests/{file}::test_{name}" for file, names in STAYS.items() for name in names.split())


def omitted(nodeids: Iterable[str]) -> set[str]:
    """Return the tests of a run that the short form omits."""
    names = set(nodeids)
    planted, costs = _planted(), _costs()
    kept = {one for one in names if _function(one) in planted or one in planted}
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for one in sorted(names - kept):
        if not OTHER.search(one) and not _is_other_way(one, names):
            groups[_function(one)].append(one)
    cheapest = {
        function.partition("::")[0]: function for function in sorted(groups, key=lambda one: -costs.get(one, 0))
    }
    for function, values in groups.items():
        few, cost = bool(FEW_VALUES.match(function)), costs.get(function, 0)
        stays = function.startswith(_STAYS) or (function in cheapest.values() and cost < COSTLY_S)
        if cost >= (ONE_VALUE_S if few else COSTLY_S) and not stays:
            continue
        if (few or cost >= ONE_VALUE_S) and not EVERY_VALUE.search(function):
            values = [values[zlib.crc32(function.encode()) % len(values)]]
        kept.update(values)
    return names - kept


def _function(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def _planted() -> set[str]:
    """The tests that notice planted faults: node ids, or functions with all their values."""
    return set(re.findall(r"^  test: '?(\S+?)'?$", (TESTS / "planted" / "faults.yaml").read_text(), re.MULTILINE))


def _costs() -> dict[str, float]:
    rows = (line.split() for line in COSTS.read_text().splitlines() if not line.startswith("#"))
    return {name: float(seconds) for seconds, name in rows}


def _is_other_way(nodeid: str, names: set[str]) -> bool:
    """A test that runs with the hook and the runtime is run with one of them: half of the tests with each."""
    found = WAY.search(nodeid)
    if not found:
        return False
    begin, end = nodeid[: found.start()], nodeid[found.end() :]
    leave = ("hook", "runtime")[zlib.crc32(f"{begin}{end}".encode()) % 2]
    return found[1] == leave and all(f"{begin}{way}{end}" in names for way in ("hook", "runtime"))


class CostsFile:
    """A plugin of a run in one process: COSTS of all functions that this run has run."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        before = sum(os.times()[:4])
        try:
            return (yield)
        finally:
            name = _function(item.nodeid)
            self._spent[name] = max(self._spent.get(name, 0), sum(os.times()[:4]) - before)

    def pytest_sessionfinish(self) -> None:
        costs = {name: cost for name, cost in _costs().items() if (TESTS.parent / name.partition("::")[0]).exists()}
        costs |= self._spent
        rows = [f"{costs[name]:.1f} {name}\n" for name in sorted(costs) if costs[name] >= ONE_VALUE_S]
        COSTS.write_text(HEAD + "".join(rows))
