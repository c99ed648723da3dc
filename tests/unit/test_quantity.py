"""Amounts as users write them: parsed exactly, or refused with name and value."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from gpushare.core import quantity
from gpushare.core.errors import RequestError
from gpushare.core.model import Amount
from hypothesis import given
from hypothesis import strategies as st

GI = 1 << 30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4Gi", 4 * GI),
        ("4GiB", 4 * GI),
        ("4G", 4 * 10**9),
        ("4GB", 4 * 10**9),
        ("512Mi", 512 << 20),
        ("512M", 512 * 10**6),
        ("1.5Gi", 3 * GI // 2),
        ("0.1Gi", GI // 10),
        ("1Ti", 1 << 40),
        ("1T", 10**12),
        ("1Pi", 1 << 50),
        ("1P", 10**15),
        ("2k", 2000),
        ("2K", 2000),
        ("2Ki", 2048),
        ("4294967296", 4 * GI),
        ("100B", 100),
        (" 4 Gi ", 4 * GI),
    ],
)
def test_size_is_parsed(text: str, size: int) -> None:
    assert quantity.size_bytes("X", text) == size


@pytest.mark.parametrize(
    "text",
    ["", " ", "banana", "Gi", "-4Gi", "+4Gi", "4Gi4", "0", "0Gi", "0.0000000001k", "4g", "3000m", "4gib", "1e9", ".5Gi"]
    + [
        "5.",
        "1.2.3Gi",
        "4 4Gi",
        "0x10",
        "٤Gi",
        "²Gi",
        "9" * 21,
        "9" * 5000,
        "8Pi" * 2,
        "8589934592Gi",
        "inf",
        "nan",
        "25",
    ]
    + ["4Gi\n5Gi", "1_000"],
)
def test_bad_size_is_refused_with_name_and_value(text: str) -> None:
    if text == "25":  # a bare number means bytes
        assert quantity.size_bytes("X", text) == 25
        return
    with pytest.raises(RequestError) as caught:
        quantity.size_bytes("GPUSHARE_MEMORY", text)
    assert str(caught.value).startswith(f"GPUSHARE_MEMORY={quantity.shown(text)}".replace("\n", "\\n"))
    assert caught.value.hint


def test_zero_is_refused_with_reason() -> None:
    with pytest.raises(RequestError, match="zero is not a limit"):
        quantity.amount("M", "0Gi")


@pytest.mark.parametrize(("text", "value"), [("25%", 25), ("100%", 100), ("0.5%", 0.5), (" 12.5 % ", 12.5)])
def test_percent_is_parsed(text: str, value: float) -> None:
    assert quantity.percent("X", text) == value


@pytest.mark.parametrize("text", ["0%", "150%", "100.1%", "%", "-1%", "25", "25%%", "1.0000001%", "1e1%", "banana%"])
def test_bad_percent_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="GPUSHARE_MEMORY="):
        quantity.percent("GPUSHARE_MEMORY", text)


@pytest.mark.parametrize(("text", "value"), [("30%", 30), ("30", 30), ("100%", 100), ("30.0%", 30)])
def test_whole_percent_is_parsed(text: str, value: int) -> None:
    assert quantity.whole_percent("X", text) == value


@pytest.mark.parametrize("text", ["0", "0%", "101%", "12.5%", "", "half", "-3"])
def test_bad_whole_percent_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="GPUSHARE_COMPUTE="):
        quantity.whole_percent("GPUSHARE_COMPUTE", text)


def test_amounts_by_slot_are_parsed() -> None:
    assert quantity.amounts("M", "4Gi") == ((None, Amount(4 * GI, None, "4Gi")),)
    assert quantity.amounts("M", "1=25%, 0=4Gi") == ((0, Amount(4 * GI, None, "4Gi")), (1, Amount(None, 25.0, "25%")))
    assert quantity.percents("C", "0=30%,3=40") == ((0, 30), (3, 40))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("4Gi,8Gi", "several amounts without slots"),
        ("0=4Gi,0=8Gi", "slot 0 occurs twice"),
        ("0=4Gi,8Gi", '"8Gi" does not begin with a slot'),
        ("16=4Gi", "does not begin with a slot"),
        ("-1=4Gi", "does not begin with a slot"),
        ("x=4Gi", "does not begin with a slot"),
        ("=4Gi", "does not begin with a slot"),
        ("0=", "not an amount"),
        ("0=banana", "not an amount"),
        ("0=4Gi,", "does not begin with a slot"),
        ("12Gi..4Gi", 'the memory limit "4Gi" is below the memory request "12Gi"'),
        ("50%..25%", "is below the memory request"),
        ("0=4Gi,1=8Gi..1Gi", 'in "8Gi..1Gi": the memory limit "1Gi" is below'),
        ("4Gi..50%", '"4Gi" and "50%" are a size and a percentage'),
        ("4Gi..", 'in "": not an amount of memory'),
        ("..4Gi", 'in "": not an amount of memory'),
        ("4Gi...8Gi", 'in ".8Gi": not an amount of memory'),
        ("4Gi..8Gi..12Gi", "not an amount of memory"),
        ("0..4Gi", "zero is not a limit"),
        ("-1Gi..4Gi", "below zero"),
        ("4Gi..9999999Pi", "larger than any device"),
        ("4Gi..8Gi\0", 'unknown unit "Gi\\x00"'),
        (",".join(f"{i}=1Gi" for i in range(17)), "more than 16 slots"),
    ],
)
def test_bad_amounts_by_slot_are_refused(text: str, what: str) -> None:
    with pytest.raises(RequestError, match="^M=") as caught:
        quantity.amounts("M", text)
    assert what in str(caught.value)


def test_request_and_limit_are_parsed() -> None:
    both = Amount(4 * GI, None, "4Gi..12Gi", ceiling=Amount(12 * GI, None, "12Gi"))
    assert quantity.amounts("M", "4Gi..12Gi") == quantity.amounts("M", " 4Gi .. 12Gi ") == ((None, both),)
    assert quantity.amounts("M", "0=4Gi..12Gi,1=2Gi") == ((0, both), (1, Amount(2 * GI, None, "2Gi")))
    assert quantity.amounts("M", "25%..50%")[0][1].ceiling == Amount(None, 50.0, "50%")
    assert quantity.amounts("M", "4Gi..4096Mi") == ((None, Amount(4 * GI, None, "4Gi")),)


@pytest.mark.parametrize("parse", [quantity.amount, quantity.single_amounts])
def test_range_is_refused_where_one_amount_is_needed(parse: Any) -> None:
    with pytest.raises(RequestError, match=r'^M="4Gi\.\.12Gi": '):
        parse("M", "4Gi..12Gi")


def test_percentages_round_down_to_blocks() -> None:
    total = 16 * GI + (1 << 20)  # not a multiple of a block
    quarter = quantity.bytes_of(Amount(None, 25.0, "25%"), total, 2 << 20)
    assert quarter % (2 << 20) == 0
    assert 4 * quarter <= total < 4 * (quarter + (2 << 20))
    assert quantity.bytes_of(Amount(5, None, "5"), total, 2 << 20) == 5
    assert quantity.bytes_of(Amount(None, 25.0, "25%"), 0, 2 << 20) == 0


@given(st.integers(1, 100 * 10**6), st.integers(1 << 20, 1 << 42))
def test_percentages_are_exact(micro: int, total: int) -> None:
    """The result for any percentage equals rational arithmetic, not floating point."""
    text = f"{micro // 10**6}.{micro % 10**6:06d}%"
    exact = int(Fraction(micro, 10**8) * total)
    assert quantity.bytes_of(quantity.amount("X", text), total, 1) == exact


@given(st.text())
def test_arbitrary_text_is_parsed_or_refused(text: str) -> None:
    """No other exception, no empty amount, and every error is one printable line."""
    for parse in (quantity.amounts, quantity.percents):
        try:
            found = parse("N", text)
        except RequestError as error:
            assert str(error).isprintable()
            assert str(error).startswith("N=")
        else:
            assert found
            for _, value in found:
                assert value if isinstance(value, int) else (value.limit_bytes or value.percent)


@given(st.from_regex(r"[0-9]{1,6}(\.[0-9]{1,4})?(k|K|M|G|T|Ki|Mi|Gi|Ti)?B?", fullmatch=True))
def test_sizes_match_rational_arithmetic(text: str) -> None:
    unit = text.rstrip("B").lstrip("0123456789.")
    number = Fraction(text.rstrip("B")[: len(text.rstrip("B")) - len(unit)])
    expected = int(number * quantity.UNITS[unit])
    if expected:
        assert quantity.size_bytes("X", text) == expected
    else:
        with pytest.raises(RequestError):
            quantity.size_bytes("X", text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(4 * GI, "4 GiB"), (3 * GI // 2, "1.50 GiB"), (512 << 20, "512 MiB"), (7, "7 B"), (0, "0 B"), (1 << 41, "2 TiB")],
)
def test_size_is_shown_in_binary_units(size: int, text: str) -> None:
    assert quantity.human(size) == text


def test_long_values_are_shortened() -> None:
    assert len(str(quantity.wrong("N", "x" * (1 << 20), "bad", ""))) < 200


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("4gb", "did you mean 4GB?"),
        ("4 gb", "did you mean 4GB?"),
        ("4gib", "did you mean 4GiB?"),
        ("4g", "did you mean 4G?"),
        ("512mi", "did you mean 512Mi?"),
        ("512m", "did you mean 512M?"),
        ("1.5Gib", "did you mean 1.5GiB?"),
        ("4 gigs", "use k, K, M, G, T, P, Ki, Mi, Gi, Ti, Pi"),
    ],
)
def test_unit_in_wrong_case_gets_the_right_one(text: str, hint: str) -> None:
    with pytest.raises(RequestError, match="unknown unit") as caught:
        quantity.size_bytes("GPUSHARE_MEMORY", text)
    assert caught.value.hint == hint
    if "mean" in hint:
        assert quantity.size_bytes("X", hint[len("did you mean ") : -1])


@pytest.mark.parametrize("parse", [quantity.size_bytes, quantity.percent, quantity.whole_percent])
@pytest.mark.parametrize("text", ["-5%", "-5", " -5% "])
def test_negative_amount_is_named(parse: Any, text: str) -> None:
    with pytest.raises(RequestError, match="below zero"):
        parse("GPUSHARE_COMPUTE", text)


@pytest.mark.parametrize(
    ("name", "for_containers"),
    [("GPUSHARE_MEMORY", True), ("main.gpushare.io/memory", True), ("oversubscription.host_memory", False)],
)
def test_zero_names_the_two_meanings_that_it_could_have(name: str, for_containers: bool) -> None:
    with pytest.raises(RequestError, match="zero is not a limit") as caught:
        quantity.size_bytes(name, "0")
    no_gpu = ", GPUSHARE_DEVICES=none for no GPU" if for_containers else ""
    assert caught.value.hint.startswith(f"leave it out for no limit{no_gpu}, or write a size")


@pytest.mark.parametrize(
    ("text", "size", "shown"),
    [
        ("8Gi", 8 * GI, "8 GiB"),
        ("8192Mi", 8 * GI, "8 GiB"),
        ("12.5Gi", 25 * GI // 2, "12.50 GiB"),
        ("4G", 4 * 10**9, "4 GB (3.73 GiB)"),
        ("2047Ki", 2047 << 10, "2047 KiB"),
        (" 3000 MiB ", 3000 << 20, "3000 MiB"),
        ("3000Mi..8Gi", 3000 << 20, "3000 MiB..8 GiB"),
        ("25%", 4 * GI, "25% (4 GiB)"),
        ("4Gi..12Gi", 4 * GI, "4 GiB..12 GiB"),
        ("8 GiB (4 GiB of it on the device)", 4 * GI, "8 GiB (4 GiB of it on the device)"),
    ],
)
def test_amount_is_described_in_one_kind_of_units(text: str, size: int, shown: str) -> None:
    wanted = quantity.amount_or_range("X", text) if "(" not in text else Amount(size, None, text)
    assert quantity.described(wanted, size) == shown
