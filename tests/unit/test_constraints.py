"""NVIDIA_REQUIRE_*: the grammar, the comparisons, and properties that the host does not know."""

from __future__ import annotations

from typing import Optional

import pytest
from gpushare.core.errors import RequestError
from gpushare.core.model import Device, Inventory
from gpushare.request import constraints
from gpushare.request.constraints import Term
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.pure import device

NAME = "NVIDIA_REQUIRE_CUDA"
GPU = device(0, brand="tesla", arch="8.6")
HOST = Inventory("/", "535.261.03", (GPU,), cuda_version="12.2")


def met(value: str, gpu: Optional[Device] = GPU, host: Inventory = HOST) -> bool:
    try:
        constraints.require(((NAME, value),), host, gpu)
    except RequestError as error:
        assert " is not met: " in str(error)
        return False
    return True


def test_terms_and_alternatives_are_parsed() -> None:
    assert constraints.parse(NAME, " cuda>=12.4  brand=tesla,driver<536 ") == (
        (Term("cuda", ">=", "12.4"),),
        (Term("brand", "=", "tesla"), Term("driver", "<", "536")),
    )
    assert constraints.parse(NAME, "") == ()


@pytest.mark.parametrize(
    ("value", "holds"),
    [
        ("cuda>=12.2", True),
        ("cuda>12.2", False),
        ("cuda>=12.10", False),  # versions, not decimals
        ("cuda>=9", True),
        ("cuda=12.2.0", True),
        ("cuda!=12.2", False),
        ("cuda==12.2", True),
        ("driver>=535", True),
        ("driver<535", False),
        ("driver<536", True),
        ("driver>=535.261.04", False),
        ("driver<=535.261.3", True),
        ("arch>=8.0,arch<9.0", True),
        ("arch>=10.0", False),
        ("brand=tesla", True),
        ("brand=Tesla", True),
        ("brand!=tesla", False),
        ("brand!=geforce", True),
        ("cuda>=13 brand=tesla,driver>=470,driver<471 brand=tesla,driver>=535,driver<536", True),
        ("cuda>=13 brand=geforce,driver>=535", False),
        ("", True),
    ],
)
def test_comparison_matches_device(value: str, holds: bool) -> None:
    assert met(value) is holds


@pytest.mark.parametrize(
    "value",
    [
        "banana",
        "cuda",
        "cuda>=",
        "cuda>=x",
        "cuda>=12..2",
        "speed>=3",
        "brand>=tesla",
        "cuda~12",
        "cuda>=-1",
        "cuda>=²",
    ],
)
def test_invalid_term_is_refused_and_quoted(value: str) -> None:
    with pytest.raises(RequestError) as caught:
        constraints.parse(NAME, value)
    assert str(caught.value).startswith(f'{NAME}="{value}": ')


def test_too_many_terms_are_refused() -> None:
    with pytest.raises(RequestError, match="more than 512 terms"):
        constraints.parse(NAME, "cuda>=1," * 600)


def test_unknown_property_meets_no_term() -> None:
    unknown = HOST._replace(cuda_version="")
    assert not met("cuda>=1.0", host=unknown) and not met("cuda!=1.0", host=unknown)
    assert not met("brand=tesla", device(0)) and not met("brand!=geforce", device(0))


def test_device_term_is_met_without_device() -> None:
    assert met("brand=geforce,arch>=9.0", None)
    assert not met("cuda>=13.0,brand=tesla", None)


def test_every_requirement_must_hold() -> None:
    with pytest.raises(RequestError, match="^NVIDIA_REQUIRE_ARCH=") as caught:
        constraints.require(((NAME, "cuda>=12"), ("NVIDIA_REQUIRE_ARCH", "arch>=9.0 brand=quadro")), HOST, GPU)
    assert "arch of device 0 is 8.6, brand of device 0 is tesla; update" in str(caught.value)


@given(st.text(alphabet="cudabrndiveh>=<!,. 0129x", max_size=40))
def test_arbitrary_text_is_evaluated_or_refused(value: str) -> None:
    try:
        alternatives = constraints.parse(NAME, value)
    except RequestError:
        return
    assert met(value) or alternatives
