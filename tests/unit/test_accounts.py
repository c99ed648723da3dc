"""Accounts of shares: amounts multiplied by time, over changes, and bounded whatever a container writes."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gpushare.core.model import Bundle, Device, Lease, Share
from gpushare.state import accounts, leases, shm_abi, storage, usage_reader

from tests.unit.clihost import GIB, compute, init, start, state

__all__ = ["init", "start", "state"]  # fixtures
S = 10**9
DEVICE = Device(0, "GPU-" + "0" * 8 + "-0000-0000-0000-" + "0" * 12, 0, "0000:01:00.0", "Sim", 16 * GIB, 0)


def lease(*shares: Share, began_ns: int = 100 * S) -> Lease:
    return Lease("web", "held", "boot", "/b", shares, 1, 2, began_ns=began_ns)


def test_grant_is_the_limit_multiplied_by_time() -> None:
    (one,) = accounts.accounts(lease(Share(0, DEVICE, 4 * GIB, 30)), None, 110 * S)
    assert (one.granted_ns, one.granted_byte_ns) == (3 * S, 40 * GIB * S)
    assert (one.used_ns, one.used_byte_ns, one.peak_bytes, one.refused, one.throttled_ns) == (None,) * 5


def test_share_without_limits_is_granted_the_whole_device() -> None:
    (one,) = accounts.accounts(lease(Share(0, DEVICE, None)), None, 110 * S)
    assert (one.granted_ns, one.granted_byte_ns) == (10 * S, 160 * GIB * S)


def test_changed_limits_count_from_their_change_on() -> None:
    before = accounts.counted(lease(Share(0, DEVICE, 4 * GIB, 50)), 110 * S)
    share = before.shares[0]._replace(memory_limit_bytes=2 * GIB, compute_percent=10, draining_bytes=3 * GIB)
    (one,) = accounts.accounts(before._replace(shares=(share,)), None, 120 * S)
    assert (one.granted_ns, one.granted_byte_ns) == (6 * S, 70 * GIB * S)  # what it still holds is not free


def test_counting_twice_changes_nothing() -> None:
    once = accounts.counted(lease(Share(0, DEVICE, 4 * GIB, 50)), 110 * S)
    assert accounts.counted(once, 110 * S) == once
    assert accounts.counted(once, 90 * S) == once  # a time before the last one


def test_lease_of_an_earlier_version_counts_from_its_creation() -> None:
    old = lease(Share(0, DEVICE, None), began_ns=0)._replace(created=time.time() - 50)
    (one,) = accounts.accounts(old, None, accounts.now_ns())
    assert 49 * S < one.granted_ns < 52 * S


def test_change_of_limits_keeps_what_was_granted(state: Path, start: Callable[..., Path]) -> None:
    from gpushare.allocation import limit_update

    start("web", Share(0, DEVICE, 4 * GIB))
    found = leases.find(str(state), "web")
    assert found is not None
    leases.rewrite(str(state), found._replace(began_ns=accounts.now_ns() - 100 * S))
    changed = limit_update.change(
        str(state), "web", lambda one, live, seen: (one.shares[0]._replace(memory_limit_bytes=GIB),)
    )
    (one,) = accounts.accounts(changed.after, None, changed.after.counted_ns + 10 * S)
    assert 410 * GIB * S <= one.granted_byte_ns < 450 * GIB * S


@pytest.mark.parametrize("byte", [b"\xff", b"\x7f"])
def test_false_numbers_in_the_usage_file_are_bounded(state: Path, start: Callable[..., Path], byte: bytes) -> None:
    page = start("web", Share(0, DEVICE, 4 * GIB, 30))
    data = bytearray(page.read_bytes())
    for field in ("refused", "bucket", "account", "slot"):
        at = shm_abi.offset("gs_usage", field)
        data[at : at + 128] = byte * 128
    page.write_bytes(data)
    found = leases.find(str(state), "web")
    assert found is not None
    found = found._replace(began_ns=accounts.now_ns() - 10 * S)
    for one in (
        *accounts.accounts(found, storage.read_usage(str(state), "web", 1), accounts.now_ns()),
        *accounts.closed(str(state), found, known=False).accounts,
    ):
        assert one.used_ns is not None and one.used_ns <= 11 * S
        assert one.used_byte_ns is not None and one.used_byte_ns <= one.granted_byte_ns <= 44 * GIB * S
        assert one.peak_bytes is not None and one.peak_bytes <= DEVICE.memory_bytes
        assert one.throttled_ns is not None and one.throttled_ns <= 11 * S * shm_abi.MAX_SLOTS
        assert one.refused is not None and one.refused <= 11 * S // 100


def account(page: Path, until_ns: int, held_gib_ns: int, peak_bytes: int) -> None:
    data = bytearray(page.read_bytes())
    struct.pack_into("<QQQ", data, shm_abi.offset("gs_usage", "account"), until_ns, held_gib_ns, peak_bytes)
    page.write_bytes(data)


def test_unreported_end_is_the_last_sign_of_life(state: Path, start: Callable[..., Path]) -> None:
    page = start("web", Share(0, DEVICE, 4 * GIB))
    account(page, time.monotonic_ns() - 30 * S, 5 * S, GIB)
    compute(page, 0, 0, waited_ns=S, busy_ns=2 * S)
    found = leases.find(str(state), "web")
    assert found is not None
    found = found._replace(began_ns=accounts.now_ns() - 100 * S)
    final = accounts.closed(str(state), found, known=False)
    assert 69 * S < final.end_ns - found.began_ns < 72 * S and not final.known
    (one,) = final.accounts
    assert one.used_byte_ns == 5 * GIB * S and one.peak_bytes == GIB and one.used_ns == 2 * S
    assert 99 * S < accounts.closed(str(state), found, known=True).end_ns - found.began_ns < 102 * S


@pytest.mark.parametrize("until_ns", [0, 1, (1 << 64) - 1])
def test_claimed_end_is_within_the_life_of_the_lease(state: Path, start: Callable[..., Path], until_ns: int) -> None:
    page = start("web", Share(0, DEVICE, 4 * GIB))
    account(page, until_ns, 0, 0)
    found = leases.find(str(state), "web")
    assert found is not None
    found = found._replace(began_ns=accounts.now_ns() - 10 * S)
    final = accounts.closed(str(state), found, known=False)
    assert found.began_ns <= final.end_ns <= accounts.now_ns()


def test_only_annotations_of_a_cri_name_a_pod_and_an_image() -> None:
    said = {
        "io.kubernetes.cri.sandbox-namespace": "team",
        "io.kubernetes.cri.sandbox-name": "pod",
        "io.kubernetes.cri.container-name": "main",
        "io.kubernetes.cri.image-name": "registry/image:" + "x" * 1000,
    }
    bundle = Bundle("id", 1, "/b", "/", (), said, "", "", "main", False, {})
    found = accounts.labels(bundle, 7)
    assert {**found, "image": ""} == {"uid": 7, "namespace": "team", "pod": "pod", "container": "main", "image": ""}
    assert len(found["image"]) == 256
    assert set(accounts.labels(bundle._replace(annotations={}), 0).values()) == {0, ""}


def test_time_that_the_usage_file_lacks_counts_while_memory_is_held() -> None:
    assert usage_reader.Memory(0, 0, 0).since_ns(5) == 0
    assert usage_reader.Memory(3, 0, 0).since_ns(5) == 2
    assert usage_reader.Memory(9, 0, 0).since_ns(5) == 0
