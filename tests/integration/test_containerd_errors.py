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
        (
            {"GPUSHARE_MEMORY": "17Gi"},
            ("no device fits 17 GiB of memory", "GPU 0: 16 GiB of 16 GiB free", "ask for less"),
        ),
        # a device plugin's variable that kubelet did not set
        ({"GPUSHARE_ALLOCATED_MEMORY": "0=1Gi"}, ('GPUSHARE_ALLOCATED_MEMORY="0=1Gi"', "kubelet did not give")),
    ],
    ids=str,
)
def test_invalid_value_is_quoted(containerd: Containerd, env: dict[str, str], words: tuple[str, ...]) -> None:
    detail = refusal(containerd, env)
    for word in words:
        assert word in detail


@pytest.mark.parametrize("text", ["version: [", "version: 1\nmemory_overcomit: 2\n"], ids=["syntax", "key"])
def test_invalid_configuration_refuses_only_containers_with_a_request(containerd: Containerd, text: str) -> None:
    """Nothing is granted, the message names the place, and containers without a request start as before."""
    with configured(containerd, text):
        assert str(containerd.node.config) in refusal(containerd, {"GPUSHARE_MEMORY": "1Gi"})
        with containerd.pod() as pod:
            assert pod.run(Want(("id",))).wait().code == 0
