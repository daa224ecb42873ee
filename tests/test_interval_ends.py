"""A shown end, read back, lies on its side of the number: for every float, in every result that prints an interval."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from decimal import Decimal

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import lipscope
from lipscope.bounds.bound import Bound
from lipscope.rounding import above, below, interval, round_down, round_up
from lipscope.runs.fit import GrowthFit, PlateauFit
from lipscope.training.readings import Alarm, Reading, Record, Threshold

FLOATS = st.floats(allow_nan=False)
EDGES = (0.0, -0.0, 5e-324, -5e-324, 1.7976931348623157e308, -1.7976931348623157e308, 9.9999, 0.1, 99999.5, 1e-4, 9.9999e-5)


def edges(test):
    for value in EDGES:
        test = example(value=value, digits=4)(test)
    return test


@edges
@given(value=FLOATS, digits=st.integers(1, 17))
def test_digits_are_rounded_outwards_by_less_than_one_of_the_last(value: float, digits: int) -> None:
    low, high = round_down(value, digits), round_up(value, digits)
    assert float(low) <= value <= float(high)
    assert sum(c.isdigit() for c in high.split("e")[0].replace(".", "").strip("-0")) <= digits
    if math.isfinite(value):
        if abs(value) > 1e-300 and digits <= 15:
            # One of both is what ordinary rounding shows, in the same layout: tables keep their look.
            assert f"{value:.{digits}g}" in (low, high)
        step = Decimal(1).scaleb(Decimal(repr(value)).adjusted() - digits + 1)
        assert Decimal(high) - Decimal(low) in (0, step)


@given(value=FLOATS, decimals=st.integers(0, 6))
def test_decimals_are_rounded_outwards_and_zero_has_no_sign(value: float, decimals: int) -> None:
    low, high = round_down(value, decimals=decimals), round_up(value, decimals=decimals)
    assert float(low) <= value <= float(high)
    for shown in (low, high):
        if math.isfinite(value):
            assert len(shown.partition(".")[2]) == decimals
        assert float(shown) != 0 or not shown.startswith("-")


@given(value=FLOATS)
def test_the_reports_ends_lie_outside_too(value: float) -> None:
    assert float(below(value)) <= value <= float(above(value))


def test_what_is_no_number_is_said_and_few_digits_stay() -> None:
    assert (round_down(math.nan), round_up(math.nan, decimals=2), round_up(math.inf), round_down(-math.inf)) == (
        "nan", "nan", "inf", "-inf",
    )  # fmt: skip
    assert (interval(0.1, 2), interval(0, 0), interval(torch.tensor(0.5), 0.75)) == ("[0.1, 2]", "[0, 0]", "[0.5, 0.75]")
    with pytest.raises(ValueError, match="digits must be at least 1, got 0"):
        round_up(1.0, 0)


def ends(text: str) -> tuple[float, float]:
    """The first interval of a text."""
    found = re.search(r"\[([^],]+), ([^]]+)\]", text)
    assert found is not None, text
    return float(found[1]), float(found[2])


@pytest.mark.parametrize("seed", range(4))
def test_results_print_intervals_that_contain_theirs(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    layer = lipscope.Attention(*torch.randn(3, 4, 4, generator=generator, dtype=torch.float64))
    X = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    found = lipscope.local_lipschitz(layer, X)
    low, high = ends(str(found))
    assert low <= found.lower <= found.upper <= high
    # To the nearest, one of both ends would lie inside: the interval is narrower than a digit.
    assert low < found.lower or high > found.upper
    table = lipscope.bounds.table(layer, X)
    low, high = ends(str(table))
    assert low <= float(table.sigma.lower) <= float(table.sigma.upper) <= high
    for bound in table.bounds:
        if bound.kind != "limit":
            assert (float(bound.shown()) - bound.value) * (1 if bound.side == "upper" else -1) >= 0, bound.name


@given(value=st.floats(1e-6, 1e12), width=st.floats(0, 0.1))
def test_words_about_numbers_stay_true(value: float, width: float) -> None:
    upper = value * (1 + width)
    fit = GrowthFit(1.0, value, value, upper, 0.95, 1.0, 1.0, 0.0, 1.0, 8)
    plateau = PlateauFit(value, value, upper, 1.0, 0.61803, 1.41421, 1.0, 0.95)
    for text in (str(fit), str(plateau)):
        low, high = ends(text)
        assert low <= value <= upper <= high
    rate = ends(str(plateau).split("β")[1])
    assert rate[0] <= 0.61803
    assert rate[1] >= 1.41421
    above_line, below_line = Threshold("sigma", above=0.0), Threshold("sigma", below=1e13)
    assert float(re.search(r"at least ([^\s,]+)", Alarm(0, None, value, above_line).message)[1]) <= value
    assert float(re.search(r"at most ([^\s,]+)", Alarm(0, None, value, below_line).message)[1]) >= value
    bound = Bound("b", value, "set", "all", "us")
    assert float(re.search(r"≤ (\S+)", str(bound))[1]) >= value
    assert float(re.search(r"≥ (\S+)", str(replace(bound, side="lower")))[1]) <= value
    reading = Reading(0, None, value, value, upper, None, None, None, None, 3)
    text = str(Record(1, (reading,), {0: value}, {0: value}, (), "attention"))
    low, high = ends(text)
    assert low <= value <= upper <= high
    assert float(re.search(r"in training ≥ (\S+)", text)[1]) <= value
