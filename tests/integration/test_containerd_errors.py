"""The text of the gRPC status when a container does not start: kubelet shows it in the pod's events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.engines.base import SLEEP, Want
from tests.support.engines.containerd import Containerd
from tests.support.engines.cri import CriError
from tests.support.host import write_config


@contextmanager
def configured(containerd: Containerd, text: str = "", **config: object) -> Iterator[None]:
    """Use another config.yaml: `text`, or these keys."""
    before = containerd.node.config.read_text()
    if text:
        containerd.node.config.write_text(text)
    else:
        write_config(containerd.node.config, containerd.node.driver_root, **config)
    try:
        yield
    finally:
        containerd.node.config.write_text(before)


def refusal(containerd: Containerd, env: dict[str, str]) -> str:
    """Return the error text of a container start with `env`."""
    with containerd.pod() as made, pytest.raises(CriError) as failed:
        made.run(Want(SLEEP, env))
    detail = failed.value.detail
    assert "Traceback" not in detail
    assert "StartContainer" in str(failed.value)
    return detail


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"GPUSHARE_MEMORY": "lots"}, ('GPUSHARE_MEMORY="lots"', "4Gi")),
        ({"GPUSHARE_MEMORY": "17Gi"}, ('GPUSHARE_MEMORY="17Gi"', "GPU 0: 16 GiB of 16 GiB free", "ask for less")),
        ({"GPUSHARE_MEMROY": "1Gi"}, ('GPUSHARE_MEMROY="1Gi"', "did you mean GPUSHARE_MEMORY?")),
        # a device plugin's variable beside the pod's own
        ({"GPUSHARE_ALLOCATED_MEMORY": "0=1Gi", "GPUSHARE_MEMORY": "2Gi"}, ('GPUSHARE_MEMORY="2Gi"', 'gave "1Gi"')),
        ({"GPUSHARE_DEVICES": "7", "GPUSHARE_MEMORY": "1Gi"}, ('GPUSHARE_DEVICES="7"',)),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-none", "GPUSHARE_MEMORY": "1Gi"}, ('NVIDIA_VISIBLE_DEVICES="GPU-none"',)),
    ],
    ids=str,
)
def test_invalid_value_is_quoted(containerd: Containerd, env: dict[str, str], words: tuple[str, ...]) -> None:
    detail = refusal(containerd, env)
    for word in words:
        assert word in detail


def test_refusal_for_lack_of_memory_names_the_holder(containerd: Containerd) -> None:
    ten = {"GPUSHARE_DEVICES": "0", "GPUSHARE_MEMORY": "10Gi"}
    with containerd.pod() as pod:
        one = pod.run(Want(SLEEP, ten))
        detail = refusal(containerd, ten)
        assert f"held by {one.id[:12]} " in detail
        assert "10Gi" in detail


def test_policy_refusal_names_the_policy_key(containerd: Containerd) -> None:
    with configured(containerd, policy={"accept": {"env": "never"}}):
        detail = refusal(containerd, {"GPUSHARE_MEMORY": "1Gi"})
    assert 'GPUSHARE_MEMORY="1Gi": requests in env are not accepted on this node' in detail
    assert "set policy.accept.env" in detail
    with configured(containerd, policy={"require_limits": True}):
        assert "policy.require_limits" in refusal(containerd, {"NVIDIA_VISIBLE_DEVICES": "all"})


@pytest.mark.parametrize("text", ["version: [", "version: 1\nmemory_overcomit: 2\n"], ids=["syntax", "key"])
def test_invalid_configuration_refuses_only_containers_with_a_request(containerd: Containerd, text: str) -> None:
    """Nothing is granted, the message names the place, and containers without a request start as before."""
    with configured(containerd, text):
        assert str(containerd.node.config) in refusal(containerd, {"GPUSHARE_MEMORY": "1Gi"})
        with containerd.pod() as pod:
            assert pod.run(Want(("id",))).wait().code == 0


def test_missing_low_level_runtime_is_reported(containerd: Containerd) -> None:
    if containerd.way == "hook":  # containerd itself reports it then
        return
    with configured(containerd, runtime={"path": "/no/such/runc"}), pytest.raises(CriError) as failed:
        containerd.pod()
    assert 'runtime.path "/no/such/runc" is not a program' in failed.value.detail
    assert "set it to runc or crun" in failed.value.detail
