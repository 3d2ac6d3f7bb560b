from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.schedules import SHAPES, progress, value


@pytest.mark.parametrize(
    ("step", "total", "want"),
    [(1, 11, 0.0), (6, 11, 0.5), (11, 11, 1.0), (12, 11, 1.0), (1, 1, 1.0), (1, 2, 0.0), (2, 2, 1.0)],
)
def test_progress(step, total, want):
    assert progress(step, total) == want


@pytest.mark.parametrize(("step", "total"), [(0, 10), (-1, 10), (1, 0)])
def test_progress_refuses_what_is_no_step(step, total):
    with pytest.raises(ValueError, match=rf"step={step} and total_steps={total}"):
        progress(step, total)


@given(st.floats(-10, 10), st.floats(-10, 10), st.sampled_from(sorted(SHAPES)))
def test_ends(start, end, shape):
    assert value(shape, start, end, 0.0) == pytest.approx(start, abs=1e-12)
    assert value(shape, start, end, 1.0) == pytest.approx(start if shape == "constant" else end, abs=1e-12)


@pytest.mark.parametrize("t", [0.0, 0.1, 0.25, 0.5, 0.9])
def test_shapes(t):
    assert value("constant", 2.0, -1.0, t) == 2.0
    assert value("linear", 2.0, -1.0, t) == pytest.approx(2 - 3 * t)
    assert value("cosine", 2.0, -1.0, t) == pytest.approx(-1 + 3 * math.cos(math.pi * t / 2) ** 2)


def test_cosine_is_flat_at_both_ends():
    for t in (0.0, 0.999):
        assert abs(value("cosine", 1.0, 0.0, t) - value("cosine", 1.0, 0.0, t + 0.001)) < 1e-5


def test_bad_input():
    with pytest.raises(ValueError, match="'step' is not one of constant, linear, cosine"):
        value("step", 0, 1, 0.5)
    for t in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="outside"):
            value("linear", 0, 1, t)


def test_power_and_cubic():
    """Shapes of HölderPO's exponent; its recipe tests them against the specification's table."""
    from verl_ext.schedules import cubic, power

    assert [power(2, -2, t) for t in (0, 0.25, 0.5, 1)] == [2, 1.75, 1, -2]
    assert power(0, 1, 0.5, 3) == 0.125
    assert [cubic(2, -2, t) for t in (0, 0.25, 0.5, 0.75, 1)] == [2, 0.25, 0, -0.25, -2]
