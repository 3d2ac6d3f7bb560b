"""The entropy mapping of verl_ext/entropy.py against plain loops, and by hand."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.entropy import EPS, bucket_moments, buckets, gate, position, progress, token_moments

f64 = torch.float64


@st.composite
def blocks(draw):
    """entropy, mask (n, G, T) float64: ragged responses with holes, some without a token, some without entropy."""
    n, size, width = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 8))
    number = st.sampled_from([0.0, 0.125, 0.5, 1.0, 3.0])
    cells = st.lists(number, min_size=n * size * width, max_size=n * size * width)
    flags = st.lists(st.booleans(), min_size=n * size * width, max_size=n * size * width)
    shape = (n, size, width)
    return torch.tensor(draw(cells), dtype=f64).view(shape), torch.tensor(draw(flags), dtype=f64).view(shape)


def used(values, use):
    return [v for v, u in zip(values.flatten().tolist(), use.flatten().tolist(), strict=True) if u]


def moments(found: list[float], ddof: int) -> tuple[int, float, float]:
    mean = statistics.fmean(found) if found else 0.0
    std = math.sqrt(sum((v - mean) ** 2 for v in found) / (len(found) - ddof)) if len(found) > ddof else 0.0
    return len(found), mean, std


@given(blocks(), st.sampled_from([0, 1]))
def test_token_moments(block, ddof):
    values, use = block
    n, mean, std = token_moments(values, use, (1, 2), ddof)
    per_row = token_moments(values, use, (2,), ddof)
    assert n.shape == (len(values), 1, 1) and per_row[0].shape == (*values.shape[:2], 1)
    for i in range(len(values)):
        want = moments(used(values[i], use[i]), ddof)
        assert (float(n[i]), float(mean[i]), float(std[i])) == pytest.approx(want, abs=1e-12)
        for j in range(values.shape[1]):
            got = [float(x[i, j]) for x in per_row]
            assert got == pytest.approx(list(moments(used(values[i, j], use[i, j]), ddof)), abs=1e-12)


@given(blocks())
def test_progress_against_a_loop(block):
    entropy, mask = block
    tau, flat = progress(entropy.clone(), mask), position(mask)
    for i in range(entropy.shape[0]):
        for j in range(entropy.shape[1]):
            weights = (entropy[i, j] * mask[i, j]).tolist()
            steps = mask[i, j].tolist()
            for row, by in ((tau, weights if sum(weights) else steps), (flat, steps)):
                total, running = sum(by) or 1.0, 0.0
                for t, value in enumerate(by):
                    running += value
                    assert float(row[i, j, t]) == pytest.approx(running / total, abs=1e-12)


def test_progress_by_hand():
    entropy = torch.tensor([[[0.2, 1.0, 0.1, 0.7], [0.3, 0.6, 0.2, 9.0]]], dtype=f64)
    mask = torch.tensor([[[1, 1, 1, 1], [1, 1, 1, 0]]], dtype=f64)
    tau = progress(entropy, mask)
    assert tau[0, 0].tolist() == pytest.approx([0.1, 0.6, 0.65, 1.0])
    assert tau[0, 1].tolist() == pytest.approx([0.272727, 0.818182, 1.0, 1.0], abs=1e-6)
    assert buckets(tau, 2).tolist() == [[[0, 1, 1, 1], [0, 1, 1, 1]]]


def test_deterministic_text_falls_back_to_the_position():
    entropy = torch.zeros(1, 1, 4)
    assert progress(entropy, torch.ones(1, 1, 4)).tolist() == [[[0.25, 0.5, 0.75, 1.0]]]


def test_an_entropy_below_zero_is_rounding():
    tau = progress(torch.tensor([[[-1e-7, 0.5, 0.5]]]), torch.ones(1, 1, 3))
    assert tau.tolist() == [[[0.0, 0.5, 1.0]]]
    assert int(buckets(tau, 10).min()) == 0


def test_bucket_edges():
    tau = torch.tensor([0.0, 0.09999, 0.1, 0.5, 0.99999, 1.0], dtype=f64)
    assert buckets(tau, 10).tolist() == [0, 0, 1, 5, 9, 9]
    assert set(buckets(tau, 1).tolist()) == {0}


def test_gate():
    h = torch.tensor([0.0, 1.0, 2.0], dtype=f64)
    mean, std = torch.tensor(1.0, dtype=f64), torch.tensor(0.5, dtype=f64)
    want = [1 / (1 + math.exp(-3 * (x - 1) / (0.5 + EPS))) for x in h.tolist()]
    assert gate(h, mean, std, 3.0).tolist() == pytest.approx(want)
    assert gate(h, mean, std, 0.0).tolist() == [0.5] * 3
    assert gate(torch.ones(3, dtype=f64), mean, torch.zeros((), dtype=f64), 5.0).tolist() == [0.5] * 3
    assert h.tolist() == [0.0, 1.0, 2.0]  # the input is not changed


@given(blocks(), st.integers(1, 4), st.sampled_from([0, 1]), st.randoms(use_true_random=False))
def test_bucket_moments(block, k, ddof, random):
    values, use = block
    bucket = torch.tensor([random.randrange(k) for _ in range(values.numel())]).view(values.shape)
    n, mean, std = bucket_moments(values, use, bucket, k, ddof)
    assert n.shape == (len(values), k)
    for i in range(len(values)):
        for cell in range(k):
            want = moments(used(values[i], use[i] * (bucket[i] == cell)), ddof)
            assert (float(n[i, cell]), float(mean[i, cell]), float(std[i, cell])) == pytest.approx(want, abs=1e-12)
