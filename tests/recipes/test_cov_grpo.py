"""Cov-GRPO against an independent loop over plain numbers, the spec's vectors, its reductions, and its policy loss.

Sections and equation numbers are those of the spec (specs/cov_grpo.md) that recipes/cov_grpo/cov_grpo.py names.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from contracts.cases import (
    Batch,
    Case,
    LossBatch,
    Split,
    add_fields,
    gradient,
    loss_function,
    make_batch,
    make_loss_batch,
    padding,
    random_batch,
    run,
)
from contracts.test_config import composed
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile
from verl.workers.utils.padding import response_to_nested

from recipes.cov_grpo.cov_grpo import METHOD, CovGRPOConfig, kernel_weights, token_weights
from verl_ext.groups import make_groups
from verl_ext.preflight import check_methods
from verl_ext.registry import AdvantageInputs, ConfigError

DEFAULTS = {"scope": "group", "logp": "old", "normalise": True, "ddof": 1, "sigma_floor": 1e-8}
METRICS = ("mean", "std", "top_pos", "top_neg", "w_min", "w_mean", "weight_mean", "damped_frac", "sigma_floor_groups")


def spread(values: list[float], ddof: int) -> tuple[float, float]:
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / max(1, len(values) - ddof))


def oracle_weights(rows: list[tuple[float, list[float]]], ddof: int = 1, sigma_floor: float = 1e-8, normalise=True):
    """(3)-(5) for one scope. rows: (A, log-probs of the valid tokens). -> c, w, w~, each row by row; floored."""
    tokens = [(a, lp) for a, lps in rows for lp in lps]
    mean_lp = sum(lp for _, lp in tokens) / len(tokens)
    mean_a = sum(a for a, _ in tokens) / len(tokens)
    c = [[(lp - mean_lp) * (a - mean_a) for lp in lps] for a, lps in rows]
    _, sigma = spread([x for row in c for x in row], ddof)
    if sigma <= sigma_floor:
        one = [[1.0] * len(lps) for _, lps in rows]
        return c, one, one, True
    z = [[-x * x / (2 * sigma * sigma) for x in row] for row in c]
    w, top = [[math.exp(x) for x in row] for row in z], max(x for row in z for x in row)
    # (5) is a quotient: the largest exponent cancels, so w may be too small for a float.
    total = sum(math.exp(x - top) for row in z for x in row)
    return c, w, [[math.exp(x - top) * len(tokens) / total for x in row] for row in z] if normalise else w, False


def oracle(rows: list[tuple[str, float, list[float], list[int]]], norm_by_std: bool = True, **settings):
    """Spec sections 3, 4 and 11. rows: (uid, reward, log-probs, mask). -> (B, T) advantages as lists, metrics."""
    s = {**DEFAULTS, **settings}
    groups: dict[str, list[int]] = {}
    for i, (uid, _, _, mask) in enumerate(rows):
        if any(mask) and not uid.startswith("pad"):
            groups.setdefault(uid, []).append(i)
    groups = {uid: g for uid, g in groups.items() if len(g) > 1}

    a = [0.0] * len(rows)
    for g in groups.values():
        mean, std = spread([rows[i][1] for i in g], s["ddof"])
        for i in g:
            a[i] = (rows[i][1] - mean) / (std + 1e-6 if norm_by_std else 1.0)
    out = [[a[i] * m for m in mask] for i, (_, _, _, mask) in enumerate(rows)]
    if s["scope"] == "microbatch" or s["logp"] == "current":
        return out, {}

    scopes = list(groups.values()) if s["scope"] == "group" else [sorted(i for g in groups.values() for i in g)]
    every_c, every_w, every_weight, floored = [], [], [], 0
    for g in scopes:
        valid = {i: [t for t, m in enumerate(rows[i][3]) if m] for i in g}
        inputs = [(a[i], [rows[i][2][t] for t in valid[i]]) for i in g]
        c, w, weight, flat = oracle_weights(inputs, s["ddof"], s["sigma_floor"], s["normalise"])
        for i, row in zip(g, weight, strict=True):
            for t, x in zip(valid[i], row, strict=True):
                out[i][t] = a[i] * x
        every_c += [x for row in c for x in row]
        every_w += [x for row in w for x in row]
        every_weight += [x for row in weight for x in row]
        floored += flat
    return out, metrics_of(every_c, every_w, every_weight, floored)


def metrics_of(c: list[float], w: list[float], weight: list[float], floored: int) -> dict[str, float]:
    """Section 11."""
    mean, std = spread(c, 0)

    def top(values):
        return sum(sorted(values)[-math.ceil(1e-4 * len(values)) :]) / math.ceil(1e-4 * len(values)) if values else 0.0

    return {
        "cov/mean": mean,
        "cov/std": std,
        "cov/top_pos": top([x for x in c if x > 0]),
        "cov/top_neg": -top([-x for x in c if x < 0]),
        "cov/w_min": min(w),
        "cov/w_mean": sum(w) / len(w),
        "cov/weight_mean": sum(weight) / len(weight),
        "cov/damped_frac": sum(x < 0.5 for x in w) / len(w),
        "cov/sigma_floor_groups": floored,
    }


def rows_of(batch: Batch) -> list[tuple[str, float, list[float], list[int]]]:
    rewards, lps = batch.scores.double().sum(1).tolist(), batch.fields["old_log_probs"].double().tolist()
    return list(zip(batch.uid, rewards, lps, batch.mask.tolist(), strict=True))


def cov(batch: Batch, norm_by_std: bool = True, **settings):
    return run(Case("cov_grpo"), batch, norm_by_std=norm_by_std, **settings)


def grpo(batch: Batch, norm_by_std: bool = True) -> torch.Tensor:
    return run(Case("grpo"), batch, norm_by_std=norm_by_std).advantages


def ragged(rewards, log_probs, uid=None) -> Batch:
    """Rows of these log-probs, float64; the padding holds numbers that must not count."""
    T = max(map(len, log_probs)) + 1
    lp = torch.full((len(rewards), T), -77.0, dtype=torch.float64)
    mask = torch.zeros(len(rewards), T, dtype=torch.int64)
    for i, row in enumerate(log_probs):
        lp[i, : len(row)], mask[i, : len(row)] = torch.tensor(row, dtype=torch.float64), 1
    scores = torch.zeros(len(rewards), T, dtype=torch.float64)
    scores[:, 0] = torch.tensor(rewards, dtype=torch.float64)
    return Batch(scores, mask, np.array(uid or ["g"] * len(rewards), dtype=object), {"old_log_probs": lp})


def double(batch: Batch) -> Batch:
    return Batch(batch.scores.double(), batch.mask, batch.uid, {k: v.double() for k, v in batch.fields.items()})


def weights_of(batch: Batch, **settings) -> torch.Tensor:
    """w~ where A is not 0, NaN elsewhere."""
    return cov(batch, **settings).advantages / grpo(batch)


# -- oracle -----------------------------------------------------------------------------------------------------------


@st.composite
def problems(draw):
    """Settings and a batch: ragged groups, ties, a group of one, mask-0 spans, masked rows, padding rows, shuffled."""
    settings = {
        "scope": draw(st.sampled_from(["group", "group", "batch", "microbatch"])),
        "logp": draw(st.sampled_from(["old", "old", "old", "current"])),
        "normalise": draw(st.booleans()),
        "ddof": draw(st.sampled_from([0, 1])),
        "sigma_floor": draw(st.sampled_from([1e-8, 1e-8, 0.05, 0.3])),
    }
    rewards, uid = [], []
    for number, size in enumerate(draw(st.lists(st.integers(2, 6), min_size=1, max_size=5))):
        steps = draw(st.lists(st.integers(0, 16), min_size=size, max_size=size))
        rewards += [steps[0] / 16] * size if draw(st.booleans()) else [s / 16 for s in steps]
        uid += [f"g{number}"] * size
    if draw(st.booleans()) and len(uid) + 1 >= 2 * (len(set(uid)) + 1):
        rewards, uid = [*rewards, 1.0], [*uid, "alone"]
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    T = 7
    mask = np.arange(T) < rng.integers(2, T + 1, len(uid))[:, None]
    if draw(st.booleans()):  # tool output inside the responses
        mask[:, 1:] &= rng.random((len(uid), T - 1)) < 0.7
    lp = -rng.exponential(draw(st.sampled_from([0.05, 1.0])), mask.shape)  # also where the mask is 0
    lp[rng.random(lp.shape) < 0.05] *= 30
    scores = np.zeros(mask.shape)
    scores[:, 0] = rewards
    batch = Batch(
        torch.tensor(scores),
        torch.tensor(mask).long(),
        np.array(uid, dtype=object),
        {"old_log_probs": torch.tensor(lp)},
    )
    if draw(st.booleans()):
        masked = batch[[0]]
        masked.mask.zero_()
        batch = batch + masked
    batch = batch + padding(draw(st.integers(0, 2)), batch)
    return settings, draw(st.booleans()), batch[list(draw(st.permutations(range(len(batch)))))]


@given(problems())
def test_agrees_with_an_independent_loop(problem):
    settings, norm_by_std, batch = problem
    got = cov(batch, norm_by_std, **settings)
    want, metrics = oracle(rows_of(batch), norm_by_std, **settings)
    assert got.advantages.dtype == torch.float64 and got.state == {}
    torch.testing.assert_close(got.advantages, torch.tensor(want, dtype=torch.float64), rtol=1e-8, atol=1e-10)
    assert set(got.metrics) == set(metrics)
    for name, value in metrics.items():
        assert got.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


@given(problems())
def test_float32_agrees_with_the_loop(problem):
    settings, _, batch = problem
    single = Batch(
        batch.scores.float(), batch.mask, batch.uid, {"old_log_probs": batch.fields["old_log_probs"].float()}
    )
    got = cov(single, **settings)
    want, metrics = oracle(rows_of(single), **settings)
    assert got.advantages.dtype == torch.float32
    torch.testing.assert_close(got.advantages, torch.tensor(want), rtol=5e-4, atol=5e-5)
    for name, value in metrics.items():
        assert got.metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


# -- vectors of the spec ----------------------------------------------------------------------------------------------

LOG_PROBS = [[-0.1, -0.5, -3.0], [-0.2, -1.0, -2.0], [-0.05, -0.4]]
# token (row, column): c, w, w~, w~ A
TABLE = {
    (0, 0): (0.523675, 0.808703, 1.141502, 0.659047),
    (0, 1): (0.263867, 0.947520, 1.337446, 0.772175),
    (0, 2): (-1.359931, 0.238858, 0.337153, 0.194656),
    (1, 0): (-0.764538, 0.636000, 0.897728, -1.036607),
    (1, 1): (0.101487, 0.992057, 1.400311, -1.616940),
    (1, 2): (1.184019, 0.337764, 0.476762, -0.550517),
    (2, 0): (0.556151, 0.787041, 1.110926, 0.641393),
    (2, 1): (0.328819, 0.919696, 1.298171, 0.749500),
}
POPULATION = [[1.148427, 1.376357, 0.284964], [0.872703, 1.450538, 0.423409], [1.113338, 1.330264]]


@pytest.mark.parametrize(("token", "row"), TABLE.items(), ids=str)
def test_spec_section_7_worked_example(token, row):
    batch = ragged([1, 0, 1], LOG_PROBS)
    i, t = token
    c, w, weight, final = row
    # The table has eps -> 0; eps = 1e-6 moves A and c by less than 2e-6 of themselves, w~ not at all.
    assert float(cov(batch).advantages[i, t]) == pytest.approx(final, abs=4e-6)
    assert float(weights_of(batch)[i, t]) == pytest.approx(weight, abs=1e-6)
    a = torch.tensor([[0.577350, -1.154701, 0.577350]], dtype=torch.float64)
    parts = kernel_weights(
        batch.fields["old_log_probs"][None].clone(), a, batch.mask[None].double(), torch.ones_like(a), CovGRPOConfig()
    )
    assert float(parts.covariance[0, i, t]) == pytest.approx(c, abs=2e-6)
    assert float(parts.kernel[0, i, t] * parts.top[0]) == pytest.approx(w, abs=2e-6)
    assert float(parts.kernel[0, i, t] * parts.factor[0]) == pytest.approx(weight, abs=2e-6)


def test_spec_section_7_worked_example_means_and_sigma():
    batch = ragged([1, 0, 1], LOG_PROBS)
    assert grpo(batch)[:, 0].tolist() == pytest.approx([0.577350, -1.154701, 0.577350], abs=3e-6)
    got = cov(batch).metrics
    mean = sum(c for c, *_ in TABLE.values()) / 8
    assert got["cov/mean"] == pytest.approx(mean, abs=2e-6)
    assert got["cov/std"] == pytest.approx(0.803614 * math.sqrt(7 / 8), abs=3e-6)  # sigma has ddof 1


def test_spec_section_7_worked_example_with_population_std():
    batch = ragged([1, 0, 1], LOG_PROBS)
    a = (0.707107, -1.414214, 0.707107)
    got = cov(batch, ddof=0)
    for i, row in enumerate(POPULATION):
        assert got.advantages[i, : len(row)].tolist() == pytest.approx([a[i] * w for w in row], abs=5e-6)
    assert got.metrics["cov/std"] == pytest.approx(0.920655, abs=3e-6)


# -- checks of the spec, section 7 ------------------------------------------------------------------------------------


def rows_in(batch: Batch, uid: str) -> torch.Tensor:
    return torch.tensor([u == uid for u in batch.uid])


@pytest.mark.parametrize("scope", ["group", "batch"])
def test_spec_section_7_the_weights_average_to_one_in_every_scope(scope):
    batch = double(random_batch(3, sizes=(4, 5, 6)))
    rewards = torch.rand(len(batch), 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = batch.with_scores(torch.nn.functional.pad(rewards, (0, batch.mask.shape[1] - 1)))
    a, groups = grpo(batch)[:, 0], make_groups(batch.uid, batch.mask)
    config = CovGRPOConfig(scope=scope)
    scopes = groups if scope == "group" else groups.whole()
    parts = token_weights(batch.fields["old_log_probs"], a[:, None] * batch.mask, batch.mask, scopes, config)
    for rows in [rows_in(batch, u) for u in set(batch.uid)] if scope == "group" else [slice(None)]:
        valid = batch.mask[rows] > 0
        assert float(parts[rows][valid].mean()) == pytest.approx(1, rel=1e-12)
        assert float(parts[rows][valid].std()) > 0.1
    assert torch.allclose(parts * a[:, None] * batch.mask, cov(batch, scope=scope).advantages, rtol=1e-12, atol=1e-15)


def test_spec_section_7_sign_and_scale_of_the_advantages_do_not_matter():
    batch = double(random_batch(1, sizes=(4, 5, 2)))
    want = weights_of(batch)
    use = grpo(batch) != 0
    flipped = batch.with_scores(-batch.scores)
    assert torch.allclose(weights_of(flipped)[use], want[use], rtol=1e-9)
    assert torch.allclose(grpo(flipped), -grpo(batch))
    scaled = cov(batch, norm_by_std=False).advantages / grpo(batch, norm_by_std=False)
    assert torch.allclose(scaled[use], want[use], rtol=1e-9)
    assert float((want[use] - 1).abs().max()) > 0.1


def test_spec_section_7_a_constant_on_all_log_probs_does_not_matter():
    batch = double(random_batch(1, sizes=(4, 5, 2)))
    want = cov(batch).advantages
    for uid in set(batch.uid):  # the scope is the group: each may have its own
        batch.fields["old_log_probs"][rows_in(batch, uid)] += len(uid) - 3.5
        batch.fields["old_log_probs"][rows_in(batch, uid)] -= float(uid[1:])
    torch.testing.assert_close(cov(batch).advantages, want, rtol=1e-9, atol=1e-12)


def test_in_batch_scope_the_log_probs_of_other_groups_matter():
    batch = double(random_batch(1, sizes=(4, 5, 2)))
    inside, outside = rows_in(batch, "g0"), rows_in(batch, "g2")
    before = {scope: cov(batch, scope=scope).advantages[inside] for scope in ("group", "batch")}
    batch.fields["old_log_probs"][outside] *= 3
    assert torch.equal(cov(batch, scope="group").advantages[inside], before["group"])
    assert float((cov(batch, scope="batch").advantages[inside] - before["batch"]).abs().max()) > 1e-3


@pytest.mark.parametrize("scope", ["group", "batch"])
def test_spec_section_7_padding_and_order_have_no_influence(scope):
    batch = random_batch(2)
    want = cov(batch, scope=scope)
    wild = Batch(batch.scores, batch.mask, batch.uid, {"old_log_probs": batch.fields["old_log_probs"].clone()})
    wild.fields["old_log_probs"][batch.mask == 0] = -1e4
    got = cov(wild, scope=scope)
    torch.testing.assert_close(got.advantages, want.advantages, rtol=1e-6, atol=1e-7)
    assert got.metrics == pytest.approx(want.metrics, rel=1e-5, abs=1e-7)
    extra = padding(3, wild)
    extra.fields["old_log_probs"].fill_(-1e4)
    order = torch.randperm(len(batch) + 3, generator=torch.Generator().manual_seed(0))
    got = cov((wild + extra)[order], scope=scope).advantages[order.argsort()]
    torch.testing.assert_close(got[: len(batch)], want.advantages, rtol=1e-5, atol=1e-6)
    assert not got[len(batch) :].any()


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_spec_section_7_equal_rewards_give_weight_one_and_advantage_zero(reward, dtype):
    batch = double(make_batch([reward] * 7 + [0, 1], [*"aaaaaaa", *"bb"], T=9))
    batch = Batch(
        batch.scores.to(dtype),
        batch.mask,
        batch.uid,
        {"old_log_probs": batch.fields["old_log_probs"].to(dtype) * 20},
    )
    got = cov(batch)
    assert torch.equal(got.advantages[:7], grpo(batch)[:7])  # w~ = 1: also the rounding noise of A keeps its bits
    assert float(got.advantages[:7].abs().max()) < 0.1
    if reward in (0.0, 1.0):
        assert not got.advantages[:7].any()
    assert got.metrics["cov/sigma_floor_groups"] == 1


def test_spec_section_7_a_single_outlier_is_damped_and_the_others_gain():
    log_probs = [[-1 - 0.01 * t for t in range(10)] for _ in range(4)]
    log_probs[0][4] = -30.0
    weight = weights_of(ragged([1, 0, 1, 0], log_probs))[:, :10]
    outlier = float(weight[0, 4])
    assert outlier < 0.05
    rest = weight.flatten()[[i for i in range(40) if i != 4]]
    assert bool((rest > 1).all()) and float(rest.max()) < 1.1


@pytest.mark.parametrize("settings", [{}, {"normalise": False}, {"scope": "batch"}], ids=str)
@pytest.mark.parametrize("norm_by_std", [True, False])
def test_spec_section_7_weight_one_is_grpo_bit_for_bit(settings, norm_by_std):
    """No switch is neutral, but a floor above every sigma is the limit sigma -> infinity: w = 1."""
    for seed in range(3):
        batch = random_batch(seed)
        got = cov(batch, norm_by_std, sigma_floor=1e30, **settings)
        assert torch.equal(got.advantages, grpo(batch, norm_by_std))
        assert not torch.equal(cov(batch, norm_by_std, **settings).advantages, got.advantages)


def test_earlier_outputs_of_a_session_are_weighted_but_enter_no_statistic():
    batch = double(random_batch(1, sizes=(4, 5)))
    want = cov(batch)
    extra = batch[[0, 1]]
    extra.fields["old_log_probs"] = extra.fields["old_log_probs"] * 5 - 1
    both = batch + extra
    both.final_row = torch.cat([torch.arange(len(batch)), torch.tensor([0, 1])])
    got = cov(both)
    torch.testing.assert_close(got.advantages[: len(batch)], want.advantages, rtol=1e-9, atol=1e-12)
    assert got.metrics == pytest.approx(want.metrics)
    assert bool((got.advantages[len(batch) :].sign() == grpo(batch)[:2].sign()).all())


# -- traps of section 6 -----------------------------------------------------------------------------------------------


def test_spec_section_6_gaussian_contributions():
    """Gaussian c: E[w] = .707; w(1 sigma) = .607, w(2 sigma) = .135, w(3 sigma) = .011."""
    n = 20001
    z = torch.distributions.Normal(0.0, 1.0).icdf((torch.arange(n, dtype=torch.float64) + 0.5) / n)
    # c = (lp - mean)(A - mean A) with A = +-a: rows of opposite A whose log-probs both have mean 0.
    parts = kernel_weights(
        torch.stack([z, z])[None].clone(),
        torch.tensor([[1.0, -1.0]], dtype=torch.float64),
        torch.ones(1, 2, n, dtype=torch.float64),
        torch.ones(1, 2, dtype=torch.float64),
        CovGRPOConfig(),
    )
    kernel = parts.kernel * parts.top
    assert float(kernel.mean()) == pytest.approx(1 / math.sqrt(2), abs=2e-3)
    for sigmas, w in [(1, 0.607), (2, 0.135), (3, 0.011)]:
        at = int((z - sigmas).abs().argmin())
        assert float(kernel[0, 0, at]) == pytest.approx(w, abs=1e-3)
    assert float(parts.factor[0] / parts.top[0]) == pytest.approx(math.sqrt(2), abs=4e-3)


def test_spec_section_6_both_signs_are_damped_alike():
    lp = [[-1.0, -1.0, 9.0, -11.0], [-1.0, -1.0, 9.0, -11.0]]
    weight = weights_of(ragged([1, 0], lp))[:, :4]
    assert torch.allclose(weight[:, 2], weight[:, 3]) and torch.allclose(weight[0], weight[1])
    assert float(weight[0, 2]) < 0.7 < 1.3 < float(weight[0, 0])


def test_spec_section_6_heavy_tails_leave_most_weights_near_one():
    rng = np.random.default_rng(0)
    lp = -np.abs(rng.standard_cauchy((8, 400)))
    weight = weights_of(ragged([1, 0] * 4, lp.tolist()))[:, :400]
    assert float(weight.median()) == pytest.approx(1.0, abs=0.05)
    assert float(weight.min()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_contributions_are_a_spread_of_zero(dtype):
    """Two responses of one token, or two answers of one token each given by half of the group: all c are equal, so
    sigma is 0 and w~ = 1 (spec section 4). What rounding leaves of sigma must not become weights, nor 0 / 0."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        right, wrong = (-rng.exponential(3.0, 2)).tolist()
        for half in (1, 2, 4):
            batch = ragged([0.9] * half + [0.2] * half, [[right]] * half + [[wrong]] * half)
            batch = Batch(
                batch.scores.to(dtype),
                batch.mask,
                batch.uid,
                {"old_log_probs": batch.fields["old_log_probs"].to(dtype)},
            )
            torch.testing.assert_close(cov(batch).advantages, grpo(batch), rtol=1e-6, atol=1e-7)


def test_contributions_far_from_zero_beside_their_spread_are_finite():
    """The kernel is not centred: w underflows in float32 where all c lie many sigmas from 0, w~ does not."""
    lp = [[-1.0], [-1.1], [-6.0], [-6.01]]
    _, w, _, _ = oracle_weights([(1.0, lp[0]), (1.0, lp[1]), (-1.0, lp[2]), (-1.0, lp[3])])
    assert max(x for row in w for x in row) < 1e-46  # 0 in float32
    batch = ragged([1, 1, 0, 0], lp)
    batch.fields["old_log_probs"] = batch.fields["old_log_probs"].float()
    single = batch.with_scores(batch.scores.float())
    want, _ = oracle(rows_of(single))
    torch.testing.assert_close(cov(single).advantages, torch.tensor(want), rtol=1e-2, atol=1e-6)
    assert float(cov(single).advantages.abs().max()) > 1


# -- switches of section 4 --------------------------------------------------------------------------------------------


def test_every_switch_changes_the_result():
    batch = double(random_batch(4, sizes=(4, 5, 6)))
    results = [cov(batch, **s).advantages for s in ({}, {"scope": "batch"}, {"normalise": False}, {"ddof": 0})]
    results.append(cov(batch, sigma_floor=1e3).advantages)
    for i, one in enumerate(results):
        for other in results[:i]:
            assert float((one - other).abs().max()) > 1e-3


def test_without_normalisation_the_advantage_shrinks_by_the_kernel():
    batch = double(random_batch(4, sizes=(4, 5, 6)))
    use = grpo(batch) != 0
    kernel = weights_of(batch, normalise=False)[use]
    assert float(kernel.max()) <= 1 and float(kernel.min()) > 0
    normalised = weights_of(batch)
    for uid in set(batch.uid):
        rows = rows_in(batch, uid)
        ratio = (normalised / weights_of(batch, normalise=False))[rows][use[rows]]
        if len(ratio):
            assert torch.allclose(ratio, ratio[0]) and float(ratio[0]) > 1


def test_at_the_floor_and_below_the_weight_is_one():
    batch = ragged([1, 0, 1], LOG_PROBS)
    sigma = 0.803614
    assert torch.equal(cov(batch, sigma_floor=sigma * 1.00001).advantages, grpo(batch))
    assert cov(batch, sigma_floor=sigma * 1.00001).metrics["cov/sigma_floor_groups"] == 1
    assert torch.equal(cov(batch, sigma_floor=sigma * 0.9999).advantages, cov(batch).advantages)


@pytest.mark.parametrize("settings", [{"scope": "microbatch"}, {"logp": "current"}], ids=str)
def test_where_the_loss_applies_the_weights_the_estimator_is_grpo(settings):
    batch = random_batch()
    got = cov(batch, **settings)
    assert torch.equal(got.advantages, grpo(batch)) and got.metrics == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[(key, v) for key in ("scope", "logp") for v in ("nonsense", None, 1)],
        *[("normalise", v) for v in (1, "yes", None)],
        *[("ddof", v) for v in (2, -1, "1", True, math.nan)],
        *[("sigma_floor", v) for v in (-1e-9, math.inf, math.nan, "0.1", True)],
    ],
)
def test_a_value_that_cannot_work_is_refused(key, value):
    with pytest.raises(ConfigError, match=rf"algorithm\.cov_grpo\.{key}={value!r}"):
        METHOD.config({"cov_grpo": {key: value}})


def test_an_unknown_key_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.cov_grpo\.sigma is unknown; the keys are ddof, .*sigma_floor"):
        METHOD.config({"cov_grpo": {"sigma": 1.0}})


def test_the_defaults_are_the_specs():
    assert METHOD.config({}) == METHOD.config(None) == CovGRPOConfig(**DEFAULTS)


# -- metrics of section 11 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["group", "batch"])
def test_metrics_of_many_tokens_and_blocks(scope):
    """Several blocks of groups, so that the tails hold more than one token and come from more than one block."""
    rng = np.random.default_rng(0)
    B, T = 48, 12000
    lp = torch.tensor(-(rng.exponential(1.0, (B, T)) ** 2), dtype=torch.float32)
    mask = torch.ones(B, T, dtype=torch.int64)
    mask[:, T - 500 :] = torch.tensor(rng.random((B, 500)) < 0.5)
    scores = torch.zeros(B, T)
    scores[:, 0] = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0] * 8)
    uid = np.array([f"g{i // 6}" for i in range(B)], dtype=object)
    batch = Batch(scores, mask, uid, {"old_log_probs": lp})
    got = cov(batch, scope=scope).metrics
    _, want = oracle(rows_of(batch), scope=scope)
    assert set(got) == {f"cov/{name}" for name in METRICS}
    for name, value in want.items():
        assert got[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_metrics_by_hand():
    """Of the worked example: c from the table, one tail token of each sign, 2 of 8 weights below a half."""
    got = cov(ragged([1, 0, 1, 1, 1], [*LOG_PROBS, [-9.0], [-0.1, -2.0]], [*"ggg", *"tt"])).metrics
    c, w = [row[0] for row in TABLE.values()], [row[1] for row in TABLE.values()]
    assert got["cov/top_pos"] == pytest.approx(1.184019, abs=3e-6)
    assert got["cov/top_neg"] == pytest.approx(-1.359931, abs=3e-6)
    assert got["cov/mean"] == pytest.approx(sum(c) / 11, abs=3e-6)  # 3 tokens of the tied group have c = 0
    assert got["cov/w_min"] == pytest.approx(0.238858, abs=2e-6)
    assert got["cov/w_mean"] == pytest.approx((sum(w) + 3) / 11, abs=2e-6)
    assert got["cov/damped_frac"] == pytest.approx(2 / 11)
    assert got["cov/sigma_floor_groups"] == 1


# -- memory -----------------------------------------------------------------------------------------------------------


def large_allocations(scope: str, B: int = 1024, T: int = 1024) -> int:
    """How many times the estimator allocates a float32 (B, T) or more."""
    rng = torch.Generator().manual_seed(0)
    mask = (torch.arange(T) < torch.randint(1, T + 1, (B, 1), generator=rng)).float()
    scores = torch.zeros(B, T)
    scores[:, 0] = torch.randint(0, 2, (B,), generator=rng).float()
    groups = make_groups(np.array([f"g{i // 8}" for i in range(B)], dtype=object), mask)
    inputs = AdvantageInputs(scores, mask, groups, {"old_log_probs": -torch.rand(B, T, generator=rng)})
    config = CovGRPOConfig(scope=scope)
    METHOD.estimator(inputs, config, {})
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        METHOD.estimator(inputs, config, {})
    sizes = [event.self_cpu_memory_usage for event in profiler.events()]
    assert max(sizes) >= B * T * 4  # the result itself
    return sum(size >= B * T * 4 for size in sizes)


def test_the_estimator_keeps_its_temporaries_small():
    assert large_allocations("group") <= 2
    assert large_allocations("batch") > 2  # the control: one block for the whole batch


# -- policy loss ------------------------------------------------------------------------------------------------------

GROUPS_OF_TWO = [[0, 1], [2, 3], [4, 5], [6, 7]]


def loss_case(**settings) -> Case:
    return Case("cov_grpo", settings)


def with_advantages(batch: LossBatch, advantages: list[torch.Tensor]) -> LossBatch:
    batch.data["advantages"] = torch.nested.nested_tensor(advantages, layout=torch.jagged)
    return batch


def weighted(batch: LossBatch, scopes: list[list[int]], current: bool, **settings) -> list[torch.Tensor]:
    """w~ A of each row with plain loops, statistics over each of `scopes`."""
    advantages = list(batch.data["advantages"].unbind())
    lps = [batch.response(row, batch.log_probs.detach()) for row in range(len(advantages))]
    if not current:
        lps = list(batch.data["old_log_probs"].unbind())
    masks = [m.tolist() for m in batch.data["response_mask"].unbind()]
    out = [a.clone() for a in advantages]
    for rows in scopes:
        rows = [row for row in rows if any(masks[row])]
        valid = {row: [t for t, m in enumerate(masks[row]) if m] for row in rows}
        inputs = [(float(advantages[row][valid[row][0]]), lps[row][valid[row]].tolist()) for row in rows]
        _, _, weights, _ = oracle_weights(inputs, **settings)
        for row, weight in zip(rows, weights, strict=True):
            for t, x in zip(valid[row], weight, strict=True):
                out[row][t] *= x
    return out


def check_loss(batch, scopes, current, split, ranks=1, case=None, agg_mode="token-mean", **settings):
    case = case or loss_case(scope="microbatch", logp="current" if current else "old", **settings)
    value, grad = gradient(add_fields(case, batch), loss_function(case, agg_mode), split=split, ranks=ranks)
    plain = with_advantages(batch, weighted(batch, scopes, current, **settings))
    want, want_grad = gradient(plain, loss_function(Case("vanilla"), agg_mode), split=split, ranks=ranks)
    torch.testing.assert_close(grad, want_grad, rtol=1e-9, atol=1e-13)
    assert value == pytest.approx(want, rel=1e-9)
    return grad


@pytest.mark.parametrize("logp", ["old", "current"])
@pytest.mark.parametrize("settings", [{}, {"normalise": False}, {"ddof": 0}, {"sigma_floor": 0.4}], ids=str)
def test_scope_microbatch_takes_its_statistics_over_the_micro_batch_at_hand(logp, settings):
    """And is constant for the optimiser: the gradient is verl's `vanilla` with w~ A as a constant."""
    sizes = (1, 2, 5)
    scopes = [[0], [1, 2], [3, 4, 5, 6, 7]]
    check_loss(make_loss_batch(), scopes, logp == "current", Split(sizes=sizes), **settings)
    masks = [[1, 1, 0, 1], [1] * 5, [0] * 3, [1, 0, 0, 1, 1], [1, 1], [0, 1, 1, 1], [1, 1, 1], [1] * 6]
    check_loss(make_loss_batch(masks=masks), scopes, logp == "current", Split(sizes=sizes), **settings)


def test_scope_microbatch_depends_on_the_split_as_documented():
    case = loss_case(scope="microbatch")
    batch = add_fields(case, make_loss_batch())
    whole, halves, ones = (gradient(batch, loss_function(case), split=Split(size=n))[1] for n in (8, 4, 1))
    vanilla = gradient(batch, loss_function(Case("vanilla")))[1]
    assert float((whole - halves).norm() / whole.norm()) > 0.01
    assert torch.allclose(ones, vanilla, rtol=1e-12)  # one row has one A: c = 0
    assert float((whole - vanilla).norm() / whole.norm()) > 0.01


@pytest.mark.parametrize("scope", ["group", "batch"])
@pytest.mark.parametrize("settings", [{}, {"normalise": False, "ddof": 0}], ids=str)
@pytest.mark.parametrize(
    ("split", "ranks"),
    [(Split(size=8), 1), (Split(size=1), 1), (Split(sizes=(1, 2, 5)), 1), (Split(size=2), 2), (Split(size=1), 4)],
    ids=str,
)
def test_logp_current_depends_neither_on_micro_batches_nor_on_ranks(scope, settings, split, ranks):
    scopes = GROUPS_OF_TWO if scope == "group" else [list(range(8))]
    case = loss_case(scope=scope, logp="current", **settings)
    check_loss(make_loss_batch(seed=3), scopes, True, split, ranks, case, **settings)


def test_logp_current_is_not_logp_old_once_the_policy_has_moved():
    case = loss_case(scope="group", logp="current")
    batch = make_loss_batch()
    got = gradient(add_fields(case, batch), loss_function(case))[1]
    old = gradient(
        with_advantages(batch, weighted(batch, GROUPS_OF_TWO, current=False)), loss_function(Case("vanilla"))
    )[1]
    assert float((got - old).norm() / old.norm()) > 0.01


@pytest.mark.parametrize("scope", ["group", "batch"])
@pytest.mark.parametrize("alone", [False, True])
def test_logp_current_equals_the_drivers_weights_on_policy(scope, alone):
    """One update per rollout batch: current == old, so the loss gives what the estimator gives (spec section 4)."""
    batch = make_loss_batch(seed=5, log_ratio=torch.zeros_like)
    mask = batch.data["response_mask"].to_padded_tensor(0)
    scores = torch.zeros(mask.shape, dtype=torch.float64)
    scores[:, 0] = torch.tensor([1.0, 0.0, 0.5, 0.25, 1.0, 1.0, 0.0, 1.0])
    uid = np.array([f"g{row // 2}" for row in range(8)] if not alone else [*"aaabbccd"], dtype=object)
    driver = Batch(scores, mask, uid, {"old_log_probs": batch.data["old_log_probs"].to_padded_tensor(0.0)})
    case = loss_case(scope=scope, logp="current")
    inputs = AdvantageInputs(scores, mask, make_groups(uid, mask), driver.fields)
    plain_advantages = cov(driver, scope="microbatch").advantages  # GRPO, and 0 for a group of one
    for name, value in METHOD.row_fields(inputs, METHOD.config({"cov_grpo": case.settings})).items():
        batch.data[name] = value.double()

    def put(advantages):
        batch.data["advantages"] = response_to_nested(advantages, batch.data["response_mask"])
        return batch

    in_loss = gradient(put(plain_advantages), loss_function(case), split=Split(size=2), ranks=2)[1]
    on_driver = gradient(put(cov(driver, scope=scope).advantages), loss_function(Case("vanilla")))[1]
    plain = gradient(put(plain_advantages), loss_function(Case("vanilla")))[1]
    torch.testing.assert_close(in_loss, on_driver, rtol=1e-9, atol=1e-13)
    assert float((plain - on_driver).norm() / plain.norm()) > 0.01


@pytest.mark.parametrize("scope", ["group", "batch"])
def test_padding_rows_have_no_influence_on_the_loss(scope):
    masks = [[1] * n for n in (3, 5, 2, 4)]
    case = loss_case(scope=scope, logp="current")
    batch = make_loss_batch(masks=[*masks, [0] * 4, [0] * 2])
    scopes = [[0, 1], [2, 3]] if scope == "group" else [[0, 1, 2, 3]]
    grad = check_loss(batch, scopes, True, Split(size=3), case=case)
    assert bool(torch.isfinite(grad).all())


def test_token_weights_leave_rows_without_a_scope_alone():
    lp = torch.tensor([[-1.0, -2.0], [-0.5, -3.0], [-9.0, -1.0]])
    mask = torch.ones(3, 2)
    groups = make_groups(np.array(["a", "a", "alone"], dtype=object), mask)
    got = token_weights(lp, torch.tensor([[1.0], [-1.0], [0.0]]).expand(3, 2), mask, groups, CovGRPOConfig())
    assert got[2].tolist() == [1.0, 1.0]
    _, _, want, _ = oracle_weights([(1.0, [-1.0, -2.0]), (-1.0, [-0.5, -3.0])])
    assert got[:2].tolist() == [pytest.approx(row, rel=1e-5) for row in want]
    assert lp[0].tolist() == [-1.0, -2.0]  # not changed in place


# -- run settings -----------------------------------------------------------------------------------------------------

LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"algorithm.rollout_correction.bypass_mode": True},
            r"bypass_mode=True .*cov_grpo.*Set algorithm\.rollout_correction\.bypass_mode=False",
        ),
        (
            {"algorithm.cov_grpo.scope": "microbatch"},
            r"algorithm\.cov_grpo\.scope=microbatch, logp=old: .*Set .*policy_loss\.loss_mode=cov_grpo",
        ),
        (
            {"algorithm.cov_grpo.logp": "current"},
            r"algorithm\.cov_grpo\.scope=group, logp=current: .*Set .*policy_loss\.loss_mode=cov_grpo",
        ),
        ({LOSS: "cov_grpo"}, r"part of the advantages. Set .*policy_loss\.loss_mode=vanilla"),
        (
            {LOSS: "cov_grpo", "algorithm.cov_grpo.logp": "current", "algorithm.adv_estimator": "ep_grpo",
             "actor_rollout_ref.actor.use_kl_loss": True},
            r"loss_mode=cov_grpo weights one advantage for each response, but ep_grpo .*adv_estimator=cov_grpo",
        ),
        (
            {LOSS: "cov_grpo", "algorithm.cov_grpo.logp": "current", "actor_rollout_ref.actor.strategy": "megatron"},
            r"algorithm\.cov_grpo\.logp=current .*FSDP.*Set algorithm\.cov_grpo\.logp=old.*strategy=fsdp2",
        ),
    ],
)  # fmt: skip
def test_run_settings_that_defeat_the_method_are_refused(changes, text):
    with pytest.raises(ConfigError, match=text):
        check_methods(composed("cov_grpo", changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"algorithm.cov_grpo.scope": "batch"},
        {LOSS: "cov_grpo", "algorithm.cov_grpo.logp": "current"},
        {LOSS: "cov_grpo", "algorithm.cov_grpo.scope": "microbatch"},
        {LOSS: "cov_grpo", "algorithm.cov_grpo.logp": "current", "algorithm.adv_estimator": "grpo"},
        {LOSS: "clip_cov"},
    ],
    ids=str,
)
def test_run_settings_that_make_sense_pass(changes):
    check_methods(composed("cov_grpo", changes))
