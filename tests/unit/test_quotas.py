"""policy.quotas: what all containers of a user or namespace hold together, at starts and at changes of limits."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpushare.allocation import limit_request, quotas, reservation
from gpushare.config import config, keys
from gpushare.config import node as nodes
from gpushare.core.errors import CapacityError, ConfigError, GpushareError, PolicyError
from gpushare.core.model import Config, Lease, Policy, Quota, Share
from gpushare.request import request as requests
from gpushare.state import activity_files, storage

from tests.unit import pure
from tests.unit.clihost import GIB, init, start, state

__all__ = ["init", "start", "state"]  # fixtures


def held(name: str, uid: int, namespace: str, *shares: Share) -> Lease:
    return pure.lease(*shares, container_id=name)._replace(uid=uid, namespace=namespace)


A = held("a", 1000, "team-a", pure.share(0, 0, 8 * GIB))
B = held("b", 1000, "team-b", pure.share(0, 0, 4 * GIB)._replace(compute_percent=30, soft=True))
C = held("c", 2000, "team-a", pure.share(0, 1, None))  # 16 GiB and 100%
LIVE = (A, B, C)


def ask(*shares: Share, uid: int = 1000, namespace: str = "", caps: Any = (), live: Any = LIVE) -> None:
    quotas.require(uid, namespace, shares, live, Policy(quotas=tuple(caps)))


def test_quota_of_a_user_counts_all_of_its_containers_and_names_them() -> None:
    caps = [Quota("*", "", memory="16Gi")]
    ask(pure.share(0, 0, 4 * GIB), caps=caps)
    with pytest.raises(CapacityError) as refused:
        ask(pure.share(0, 0, 4 * GIB), pure.share(1, 1, GIB), caps=caps)
    assert str(refused.value) == (
        "policy.quotas[0] of user 1000: 5 GiB of memory requested, 12 GiB of 16 GiB used, "
        "held by a (8 GiB), b (4 GiB); stop one of them, or ask for less"
    )
    ask(pure.share(0, 0, 16 * GIB), uid=3000, caps=caps)  # each user has the quota for itself


def test_more_than_the_whole_quota_is_refused_by_policy() -> None:
    with pytest.raises(PolicyError) as refused:
        ask(pure.share(0, 0, 17 * GIB), uid=3000, caps=[Quota("*", "", memory="16Gi")])
    assert str(refused.value) == (
        "policy.quotas[0] of user 3000 allows 16 GiB of memory in total, and 17 GiB was requested; "
        "ask for at most 16 GiB"
    )


def test_share_without_limits_counts_as_the_whole_device() -> None:
    with pytest.raises(CapacityError, match=r"c \(16 GiB\)"):
        ask(pure.share(0, 0, GIB), uid=2000, caps=[Quota("2000", "", memory="16Gi")])
    with pytest.raises(CapacityError, match=r"100% of compute requested, 130% of 200% used, held by a \(100%\), b"):
        ask(pure.share(0, 0, GIB), caps=[Quota("*", "", compute_percent=200)])


def test_number_of_containers() -> None:
    ask(pure.share(0, 0, GIB), caps=[Quota("*", "", containers=3)])
    with pytest.raises(CapacityError) as refused:
        ask(pure.share(0, 0, GIB), caps=[Quota("*", "", containers=2)])
    assert "1 container requested, 2 of 2 used, held by a (1), b (1); stop one of them" in str(refused.value)


def test_first_entry_that_matches_applies_and_user_and_namespace_both_do() -> None:
    caps = [Quota("", "team-a", memory="32Gi"), Quota("", "team-*", memory="8Gi"), Quota("1000", "", containers=2)]
    ask(pure.share(0, 0, 8 * GIB), uid=5, namespace="team-a", caps=caps)
    with pytest.raises(CapacityError, match=r'policy.quotas\[0\] of namespace "?team-a'):
        ask(pure.share(0, 0, 9 * GIB), uid=5, namespace="team-a", caps=caps)
    with pytest.raises(CapacityError, match=r'policy.quotas\[1\] of namespace "?team-b'):
        ask(pure.share(0, 0, 5 * GIB), uid=5, namespace="team-b", caps=caps)
    with pytest.raises(CapacityError, match=r"policy.quotas\[2\] of user 1000"):
        ask(pure.share(0, 0, GIB), uid=1000, namespace="team-b", caps=caps)
    ask(pure.share(0, 0, 16 * GIB), uid=5, namespace="other", caps=caps)
    ask(pure.share(0, 0, 16 * GIB), uid=5, namespace="", caps=caps)  # no pod


def test_refusal_lists_few_containers() -> None:
    many = [held(f"c{number}", 1, "", pure.share(0, 0, GIB)) for number in range(9)]
    with pytest.raises(CapacityError, match="c3 .1 GiB. and 5 more"):
        ask(pure.share(0, 0, GIB), uid=1, live=many, caps=[Quota("*", "", memory="9Gi")])


def test_changed_limits_are_within_the_quota_and_lower_ones_always_granted() -> None:
    host = pure.node()
    host = host._replace(config=host.config._replace(policy=Policy(quotas=(Quota("*", "", memory="9Gi"),))))

    def change(text: str) -> int | None:
        return limit_request.shares(B, limit_request.parse(memory=text), host, LIVE)[0].memory_limit_bytes

    assert change("2Gi") == 2 * GIB  # 8 and 2 GiB still exceed the quota
    with pytest.raises(CapacityError, match=r"5 GiB of memory requested, 8 GiB of 9 GiB used, held by a \(8 GiB\)"):
        change("+1Gi")


def test_two_starts_at_the_edge_of_a_quota_get_it_once(state: Path) -> None:
    """All starts ask at once for all that is left; the device has room for each of them."""
    host = pure.node(memory_bytes=64 * GIB)
    policy = Policy(quotas=(Quota("*", "", memory="4Gi"),))
    host = host._replace(config=host.config._replace(state_dir=str(state), policy=policy))
    for device in host.inventory.devices:
        activity_files.prepare(str(state), device.uuid)
    (state / storage.REBUILD).unlink()
    bundles = [pure.bundle("GPUSHARE_MEMORY=4Gi", container_id=f"c{number}") for number in range(6)]
    asked = [requests.resolve(one, host) for one in bundles]

    def begin(number: int) -> int:
        one = asked[number]
        assert one is not None
        try:
            reservation.reserve(str(state), bundles[number], one, host)
        except CapacityError as error:
            assert "policy.quotas[0]" in error.message
            return 0
        return 1

    for _ in range(5):
        assert sum(together(begin, len(bundles))) == 1


def together(work: Callable[[int], int], count: int) -> list[int]:
    """Run `work` in processes that begin at the same time and live until all have ended it; return their results."""
    (gate, opened), (end, ended), (results, result) = os.pipe(), os.pipe(), os.pipe()
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            try:
                os.close(opened)
                os.close(ended)
                os.read(gate, 1)
                os.write(result, bytes([work(number)]))
                os.read(end, 1)  # a lease of a process that ended would not count
            except BaseException:
                os.write(result, b"\xff")
            finally:
                os._exit(0)
        children.append(child)
    os.close(result)
    os.close(opened)
    found = [os.read(results, 1)[0] for _ in children]
    for fd in (gate, end, ended, results):
        os.close(fd)
    for child in children:
        os.waitpid(child, 0)
    return found


# Configuration

WRONG = [
    ("{memory: 4Gi}", "policy.quotas[0]: names no user and no namespace; give one of them"),
    ("{user: root, namespace: a, memory: 4Gi}", "policy.quotas[0]: names a user and a namespace"),
    ("{user: root}", "policy.quotas[0]: caps nothing; give memory, compute or containers"),
    (
        "{user: no-such-user, memory: 4Gi}",
        'policy.quotas[0].user: "no-such-user" is not a user of this host; give its uid',
    ),
    ("{user: root, memory: 50%}", 'policy.quotas[0].memory: "50%": a percentage; a quota is on all devices together'),
    ("{user: root, memory: 4Gy}", 'policy.quotas[0].memory: "4Gy"'),
    ('{user: root, memory: "0"}', "zero is not a limit"),
    ("{user: root, compute: 12}", "policy.quotas[0].compute"),
    ("{user: root, compute: 0%}", "expected a whole percentage such as 250%"),
    ("{user: root, containers: 0}", "expected at least 1"),
    ("{user: root, container: 1}", "did you mean policy.quotas[0].containers?"),
    ("{user: 12, containers: 1}", "policy.quotas[0].user"),
    ("{namespace: Team A, containers: 1}", "expected a namespace such as team-a, or a pattern such as team-*"),
    (
        "{user: root, memory: 4Gi}, {user: '0', memory: 8Gi}",
        "policy.quotas[1]: names the user or namespace of an earlier",
    ),
]


@pytest.mark.parametrize(("items", "message"), WRONG)
def test_wrong_quota_is_refused_with_its_place(items: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        config.parse_config(f"version: 1\npolicy:\n  quotas: [{items}]\n", "f.yaml")
    assert message in str(error.value) and "f.yaml:3" in str(error.value) and "\n" not in str(error.value)


def test_quotas_of_the_file_reach_the_start_path() -> None:
    text = "quotas: [{user: root, memory: 4Gi}, {namespace: team-*, compute: 250%, containers: 3}]"
    found = config.parse_config(f"version: 1\npolicy:\n  {text}\n", "f.yaml")
    expected = (Quota("0", "", "4Gi"), Quota("", "team-*", "", 250, 3))
    assert found.policy.quotas == expected
    host = pure.node()._replace(config=found)
    again = nodes.node_of(json.loads(json.dumps(nodes.node_json(host, [], []))))
    assert again.config.policy.quotas == expected
    assert keys.effective(found)["policy.quotas"] == [
        {"user": "0", "memory": "4Gi"},
        {"namespace": "team-*", "compute": "250%", "containers": 3},
    ]
    assert Config().policy.quotas == ()


def test_every_refusal_is_one_line() -> None:
    with pytest.raises(GpushareError) as error:
        ask(pure.share(0, 0, 99 * GIB), namespace="a\nb", caps=[Quota("", "*", memory="1Gi")])
    assert "\n" not in str(error.value)
