"""Group statistics against loops over plain lists."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.groups import make_groups

ROWS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", "d", "pad01", "padded"]),  # uid
        st.floats(-100, 100, width=32),  # value
        st.integers(0, 3),  # response tokens
        st.booleans(),  # counted by the caller
    ),
    max_size=24,
)


def build(rows, counted=False):
    uid = np.array([uid for uid, *_ in rows], dtype=object)
    mask = torch.tensor([[int(t < n) for t in range(3)] for _, _, n, _ in rows]).reshape(len(rows), 3)
    values = torch.tensor([v for _, v, *_ in rows], dtype=torch.float64)
    return make_groups(uid, mask, torch.tensor([c for *_, c in rows], dtype=torch.bool) if counted else None), values


def members(rows, counted=False) -> dict[str, list[float]]:
    out: dict[str, list[float]] = {}
    for uid, value, tokens, flag in rows:
        out.setdefault(uid, [])
        if tokens and not uid.startswith("pad") and (flag or not counted):
            out[uid].append(value)
    return out


@given(ROWS, st.booleans())
def test_every_statistic_is_that_of_a_loop(rows, counted):
    groups, values = build(rows, counted)
    want = members(rows, counted)
    assert groups.uids == tuple(want) and len(groups) == len(want)
    assert groups.index.tolist() == [list(want).index(uid) for uid, *_ in rows]
    assert groups.sizes.tolist() == [len(v) for v in want.values()]
    assert groups.comparable.tolist() == [len(v) >= 2 for v in want.values()]
    assert groups.sum(values).tolist() == pytest.approx([sum(v) for v in want.values()], abs=1e-9)
    assert groups.max(values).tolist() == [max(v, default=-math.inf) for v in want.values()]
    assert groups.min(values).tolist() == [min(v, default=math.inf) for v in want.values()]
    assert groups.all(values > 0).tolist() == [bool(v) and all(x > 0 for x in v) for v in want.values()]
    for tol in (0.0, 1e-6, 50.0):
        collapsed = [len(v) >= 2 and max(v) - min(v) <= tol for v in want.values()]
        assert groups.collapsed(values, tol).tolist() == collapsed
    for ddof in (0, 1):
        mean, std = groups.mean_std(values, ddof)
        assert mean.tolist() == pytest.approx([statistics.fmean(v) if v else 0 for v in want.values()], abs=1e-9)
        spread = {0: statistics.pstdev, 1: statistics.stdev}[ddof]
        assert std.tolist() == pytest.approx([spread(v) if len(v) > ddof else 0 for v in want.values()], abs=1e-6)


@given(ROWS)
def test_matrices_hold_every_counted_row_once_in_its_order(rows):
    groups, _ = build(rows)
    seen = []
    for which, indices in groups.matrices():
        assert indices.shape == (len(which), int(groups.sizes[which[0]]))
        for group, members_ in zip(which.tolist(), indices.tolist(), strict=True):
            assert members_ == sorted(members_)
            assert all(int(groups.index[row]) == group for row in members_)
            seen += members_
    assert sorted(seen) == groups.counted.nonzero().flatten().tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 8, 17, 64])
def test_mean_and_std_have_the_bits_of_torch_on_the_group_alone(size):
    rng = torch.Generator().manual_seed(size)
    values = torch.rand(50 * size, generator=rng)
    uid = np.array([str(i % 50) for i in range(50 * size)], dtype=object)
    mean, std = make_groups(uid, torch.ones(50 * size, 1)).mean_std(values)
    for group in range(50):
        alone = values[group::50].clone()
        assert mean[group] == torch.mean(alone)
        assert std[group] == (torch.std(alone) if size > 1 else 0)


def test_a_tie_is_a_small_range_not_equal_bits():
    uid = np.array([*["third"] * 8, *["nine"] * 7, *["near"] * 2, "one"], dtype=object)
    values = torch.tensor([1 / 3] * 8 + [0.9, 0.9 - 1e-7] + [0.9] * 5 + [0.5, 0.50001, 0.0])
    groups = make_groups(uid, torch.ones(18, 1))
    assert groups.collapsed(values, 1e-6).tolist() == [True, True, False, False]
    assert groups.collapsed(values, 0.0).tolist() == [True, False, False, False]


def test_empty_and_only_padding():
    empty = make_groups(np.array([], dtype=object), torch.zeros(0, 3))
    assert len(empty) == 0 and empty.sizes.tolist() == [] and list(empty.matrices()) == []
    assert [t.tolist() for t in empty.mean_std(torch.zeros(0))] == [[], []]
    pads = make_groups(np.array(["pad1", "pad1", "x"], dtype=object), torch.tensor([[1], [1], [0]]))
    assert pads.sizes.tolist() == [0, 0] and not pads.counted.any()
    assert not pads.collapsed(torch.zeros(3), 1e-6).any() and not pads.all(torch.ones(3).bool()).any()


def test_all_rows_in_one_group():
    groups = make_groups(np.array([7] * 5), torch.ones(5, 2))
    assert groups.uids == ("7",) and groups.sizes.tolist() == [5]


def test_padding_does_not_depend_on_the_mask():
    """V1's padding rows have mask 0; a uid that starts with `pad` is enough all the same."""
    groups = make_groups(np.array(["a", "padX", "a", "spade"], dtype=object), torch.ones(4, 1))
    assert groups.counted.tolist() == [True, False, True, True]


def test_uid_and_mask_must_agree():
    with pytest.raises(ValueError, match=r"uid has shape \(3,\), but response_mask has 4 rows"):
        make_groups(np.array(["a"] * 3, dtype=object), torch.ones(4, 1))
