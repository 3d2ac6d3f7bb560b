"""EP-GRPO against an independent loop over plain numbers, the spec's vectors, and its reductions.

Sections and equation numbers are those of the spec (specs/ep_grpo.md) that recipes/ep_grpo/ep_grpo.py names.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from contracts.cases import Batch, Case, make_batch, padding, random_batch, run
from contracts.test_config import composed
from hypothesis import given
from hypothesis import strategies as st

from recipes.ep_grpo.ep_grpo import METHOD, EPGRPOConfig, anchor, standardise
from verl_ext.groups import make_groups
from verl_ext.preflight import check_methods
from verl_ext.registry import AdvantageInputs, ConfigError, DataError

DEFAULTS = {
    "gamma": 5.0, "eta": 0.2, "lam": 0.1, "K": 10, "theta_reward": None, "stat_scope": "group", "bucket_norm": "zscore",
    "anchor_order": "after", "gate_progress": True, "gate_renorm": "none", "sigma_floor": 1e-3, "eta_warmup_steps": 0,
    "bucket_coord": "entropy", "ddof": 1, "tol": 1e-6, "r_lo": 0.0, "r_hi": 1.0,
}  # fmt: skip
METRICS = {
    "gate_mean", "progress_ratio", "flip_frac", "floored_buckets", "eta", "logratio_abs",
    *(f"gate_decile_{i}" for i in range(10)),
}  # fmt: skip


def moments(values: list[float], ddof: int) -> tuple[float, float]:
    """Mean and std; a std of too few values is 0."""
    mean = sum(values) / len(values)
    if len(values) <= ddof:
        return mean, 0.0
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - ddof))


def sign(x: float) -> int:
    return (x > 0) - (x < 0)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def oracle(rows: list[tuple], step: int = 1, norm_by_std: bool = True, **settings):
    """Spec sections 3, 4 and 11. rows: (uid, reward, mask, H, old log-probs, reference log-probs), lists of T.

    -> advantages as B lists of T numbers, metrics.
    """
    s = {**DEFAULTS, **settings}
    theta = (s["r_lo"] + s["r_hi"]) / 2 if s["theta_reward"] is None else s["theta_reward"]
    eta = s["eta"] * (min(1.0, step / s["eta_warmup_steps"]) if s["eta_warmup_steps"] else 1.0)
    groups: dict[str, list[int]] = {}
    for i, (uid, _, mask, *_) in enumerate(rows):
        if any(mask) and not uid.startswith("pad"):
            groups.setdefault(uid, []).append(i)
    groups = {uid: g for uid, g in groups.items() if len(g) > 1}
    tokens = {i: [t for t, m in enumerate(rows[i][2]) if m] for g in groups.values() for i in g}
    out = [[0.0] * len(row[2]) for row in rows]

    seen, cells, zeroed = [], 0, 0  # seen: (H, W, outcome, progress, log-ratio, A) of each token
    for g in groups.values():
        rewards = [rows[i][1] for i in g]
        tied = max(rewards) - min(rewards) <= s["tol"]
        mean, std = moments(rewards, s["ddof"])
        a = {i: 0.0 if tied else (rows[i][1] - mean) / (std + 1e-6 if norm_by_std else 1.0) for i in g}  # (1)
        d = {i: sign(rows[i][1] - theta) if tied else sign(a[i]) for i in g}  # (5)

        w, ratio, signal, bucket = {}, {}, {}, {}
        for i in g:
            _, _, mask, h, old, ref = rows[i]
            scope = {"response": [i], "group": g, "batch": list(tokens)}[s["stat_scope"]]
            mu, sigma = moments([rows[j][3][t] for j in scope for t in tokens[j]], s["ddof"])
            for t in tokens[i]:
                w[i, t] = sigmoid(s["gamma"] * (h[t] - mu) / (sigma + 1e-6))  # (3)
            if s["gate_renorm"] == "mean1":
                average = sum(w[i, t] for t in tokens[i]) / len(tokens[i])
                for t in tokens[i]:
                    w[i, t] /= average
            total, reached = sum(h[t] for t in tokens[i]), 0.0
            for number, t in enumerate(tokens[i], 1):
                ratio[i, t] = old[t] - ref[t]
                signal[i, t] = s["lam"] * ratio[i, t] * (d[i] if s["anchor_order"] == "before" else 1)  # (4)
                reached += h[t]
                by_position = s["bucket_coord"] == "position" or total == 0
                tau = number / len(tokens[i]) if by_position else min(1.0, reached / total)  # (6)
                if t == tokens[i][-1]:
                    tau = 1.0
                bucket[i, t] = min(math.floor(s["K"] * tau), s["K"] - 1)

        standardised = {}
        for k in range(s["K"]):  # (7)
            inside = [token for token in signal if bucket[token] == k]
            mu, sigma = moments([signal[token] for token in inside], s["ddof"]) if inside else (0.0, 0.0)
            nothing = s["bucket_norm"] != "none" and (len(inside) < 2 or sigma <= s["sigma_floor"])
            cells, zeroed = cells + 1, zeroed + nothing
            for token in inside:
                if s["bucket_norm"] == "none":
                    standardised[token] = signal[token]
                elif nothing:
                    standardised[token] = 0.0
                else:
                    shift = mu if s["bucket_norm"] == "zscore" else 0.0
                    standardised[token] = (signal[token] - shift) / (sigma + 1e-6)
        for token in signal:  # (8), (2)
            i, t = token
            direction = d[i] if s["anchor_order"] == "after" else abs(d[i])  # a row without a sign gets no progress
            progress = eta * (w[token] if s["gate_progress"] else 1.0) * direction * standardised[token]
            outcome = w[token] * a[i]
            out[i][t] = outcome + progress
            seen.append((rows[i][3][t], w[token], outcome, progress, ratio[token], a[i]))

    n = len(seen)
    if not n:
        return out, {"ep/eta": eta}
    signed = [(o + p, a) for _, _, o, p, _, a in seen if a != 0]
    metrics = {
        "ep/eta": eta,
        "ep/gate_mean": sum(x[1] for x in seen) / n,
        "ep/floored_buckets": zeroed / cells,
        "ep/logratio_abs": sum(abs(x[4]) for x in seen) / n,
        "ep/flip_frac": sum(sign(final) != sign(a) for final, a in signed) / len(signed) if signed else 0.0,
    }
    outcome = sum(abs(x[2]) for x in seen)
    if outcome:
        metrics["ep/progress_ratio"] = sum(abs(x[3]) for x in seen) / outcome
    gates, start = [x[1] for x in sorted(seen)], 0
    for i in range(10):
        size = n // 10 + (i < n % 10)
        if size:
            metrics[f"ep/gate_decile_{i}"] = sum(gates[start : start + size]) / size
        start += size
    return out, metrics


def rows_of(batch: Batch) -> list[tuple]:
    fields = [batch.fields[name].double().tolist() for name in ("entropy", "old_log_probs", "ref_log_prob")]
    return list(zip(batch.uid, batch.scores.double().sum(1).tolist(), batch.mask.tolist(), *fields, strict=True))


def ep(batch: Batch, step: int = 1, norm_by_std: bool = True, **settings):
    return run(Case("ep_grpo"), batch, step=step, norm_by_std=norm_by_std, **settings)


def grpo(batch: Batch, norm_by_std: bool = True) -> torch.Tensor:
    return run(Case("grpo"), batch, norm_by_std=norm_by_std).advantages


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    fields = {name: value.to(dtype) for name, value in batch.fields.items()}
    return dataclasses.replace(batch, scores=batch.scores.to(dtype), fields=fields)


def with_fields(batch: Batch, **fields: torch.Tensor) -> Batch:
    return dataclasses.replace(batch, fields={**batch.fields, **fields})


def synthetic(rewards, T: int = 300, ratio: float = 0.2, seed: int = 0, uid=None) -> Batch:
    """The spec's synthetic data: entropies exponential with mean 0.3, log-ratios normal. float64, full length."""
    rng = np.random.default_rng(seed)
    shape = (len(rewards), T)
    old = torch.tensor(-rng.exponential(0.5, shape))
    scores = torch.zeros(shape, dtype=torch.float64)
    scores[:, 0] = torch.tensor(rewards, dtype=torch.float64)
    fields = {
        "acc": (scores[:, 0] > 0.5).double(),
        "entropy": torch.tensor(rng.exponential(0.3, shape)),
        "old_log_probs": old,
        "ref_log_prob": old - torch.tensor(rng.normal(0, ratio, shape)),
    }
    names = np.array(uid if uid is not None else ["g"] * len(rewards), dtype=object)
    return Batch(scores, torch.ones(shape, dtype=torch.int64), names, fields)


# -- oracle -----------------------------------------------------------------------------------------------------------


@st.composite
def problems(draw):
    """Settings and a batch: ragged groups, ties, a group of one, mask-0 spans, masked rows, padding rows, shuffled."""
    lo, hi = draw(st.sampled_from([(0.0, 1.0), (-1.0, 1.0), (2.0, 10.0)]))
    settings = {
        "r_lo": lo,
        "r_hi": hi,
        "gamma": draw(st.sampled_from([0.0, 1.0, 5.0])),
        "eta": draw(st.sampled_from([0.0, 0.2, 1.5])),
        "lam": draw(st.sampled_from([0.1, 1.0])),
        "K": draw(st.sampled_from([1, 3, 7])),  # no token lies on an edge but the last
        "theta_reward": draw(st.sampled_from([None, None, lo + (hi - lo) * 0.3, hi])),
        "stat_scope": draw(st.sampled_from(["group", "response", "batch"])),
        "bucket_norm": draw(st.sampled_from(["zscore", "zscore", "scale", "none"])),
        "anchor_order": draw(st.sampled_from(["after", "before"])),
        "gate_progress": draw(st.booleans()),
        "gate_renorm": draw(st.sampled_from(["none", "mean1"])),
        "sigma_floor": draw(st.sampled_from([0.0, 1e-3, 0.02])),
        "eta_warmup_steps": draw(st.sampled_from([0, 5])),
        "bucket_coord": draw(st.sampled_from(["entropy", "entropy", "position"])),
        "ddof": draw(st.sampled_from([0, 1])),
    }
    rewards, uid = [], []
    for number, size in enumerate(draw(st.lists(st.integers(2, 6), min_size=1, max_size=4))):
        steps = draw(st.lists(st.integers(0, 16), min_size=size, max_size=size))
        rewards += [lo + (hi - lo) * x / 16 for x in ([steps[0]] * size if draw(st.booleans()) else steps)]
        uid += [f"g{number}"] * size
    if draw(st.booleans()) and len(uid) + 1 >= 2 * (len(set(uid)) + 1):
        rewards, uid = [*rewards, hi], [*uid, "alone"]
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    T = 7
    mask = np.arange(T) < rng.integers(1, T + 1, len(uid))[:, None]
    if draw(st.booleans()):  # tool output inside the responses
        mask[:, 1:] &= rng.random((len(uid), T - 1)) < 0.7
    entropy = rng.exponential(0.3, mask.shape)
    if draw(st.booleans()):
        entropy[0] = 0.0  # deterministic text
    old = -rng.exponential(0.5, mask.shape)
    ref = old - rng.normal(0, 0.3, mask.shape)
    scores = np.zeros(mask.shape)
    scores[:, 0] = rewards
    fields = {"entropy": entropy, "old_log_probs": old, "ref_log_prob": ref}
    batch = Batch(
        torch.tensor(scores),
        torch.tensor(mask).long(),
        np.array(uid, dtype=object),
        {name: torch.tensor(value) for name, value in fields.items()},
    )
    if draw(st.booleans()):
        masked = batch[[0]]
        masked.mask.zero_()
        batch = batch + masked
    batch = batch + padding(draw(st.integers(0, 2)), batch)
    step = draw(st.sampled_from([1, 3, 9]))
    return settings, step, draw(st.booleans()), batch[list(draw(st.permutations(range(len(batch)))))]


@given(problems())
def test_agrees_with_an_independent_loop(problem):
    settings, step, norm_by_std, batch = problem
    got = ep(batch, step, norm_by_std, **settings)
    want, metrics = oracle(rows_of(batch), step, norm_by_std, **settings)
    assert got.advantages.dtype == torch.float64 and got.state == {}
    torch.testing.assert_close(got.advantages, torch.tensor(want, dtype=torch.float64), rtol=1e-8, atol=1e-9)
    assert set(got.metrics) == set(metrics)
    deciles = {name for name in metrics if "decile" in name}
    for name in set(metrics) - (deciles if not bool((batch.fields["entropy"] > 0).all()) else set()):
        assert got.metrics[name] == pytest.approx(metrics[name], rel=1e-6, abs=1e-8), name


@given(problems())
def test_float32_agrees_with_the_loop(problem):
    settings, step, _, batch = problem
    single = cast(batch, torch.float32)
    got = ep(single, step, **settings)
    want, _ = oracle(rows_of(single), step, **settings)
    assert got.advantages.dtype == torch.float32
    scale = max(1.0, max(abs(x) for row in want for x in row))
    torch.testing.assert_close(got.advantages, torch.tensor(want), rtol=2e-3, atol=2e-4 * scale)


# -- vectors of the spec ----------------------------------------------------------------------------------------------

SETTINGS = {"K": 2}
# token (row, column): H, old log-prob, ref log-prob, tau, k, s, W, s~
TOKENS = {
    (0, 0): (0.2, -0.3, -0.5, 0.100, 0, 0.02, 0.024864, 0.707082),
    (0, 1): (1.0, -1.2, -0.9, 0.600, 1, -0.03, 0.999779, -1.311574),
    (0, 2): (0.1, -0.1, -0.1, 0.650, 1, 0.0, 0.005597, -0.456200),
    (0, 3): (0.7, -0.9, -1.3, 1.000, 1, 0.04, 0.979866, 0.684300),
    (1, 0): (0.3, -0.6, -0.4, 0.273, 0, -0.02, 0.103556, -0.707082),
    (1, 1): (0.6, -0.2, -0.3, 0.818, 1, 0.01, 0.914835, -0.171075),
    (1, 2): (0.2, -0.5, -1.1, 1.000, 1, 0.06, 0.024864, 1.254549),
}
OUTCOME = [[0.017582, 0.706950, 0.003957, 0.692869], [-0.073225, -0.646885, -0.017582]]
PROGRESS = [[0.003516, -0.262257, -0.000511, 0.134104], [0.014645, 0.031301, -0.006239]]
CASES = {
    "final": ([1, 0], {}, [[0.021098, 0.444693, 0.003447, 0.826973], [-0.058581, -0.615584, -0.023820]]),
    "all right": ([1, 1], {}, [PROGRESS[0], [-x for x in PROGRESS[1]]]),
    "all wrong": ([0, 0], {}, [[-x for x in PROGRESS[0]], PROGRESS[1]]),
    "ddof 0": (
        [1, 0],
        {"ddof": 0},
        [[0.022379, 0.706643, 0.003325, 1.135914], [-0.070855, -0.893012, -0.023881]],
    ),
}
PROGRESS_CASES = {
    "progress": ({}, PROGRESS),
    "scale": (
        {"bucket_norm": "scale"},
        [[0.003516, -0.171037, 0, 0.223507], [0.014645, -0.052168, -0.008507]],
    ),
    "before": (
        {"anchor_order": "before"},
        [[0, -0.097238, 0.000363, 0.275314], [0, 0.009886, -0.006449]],
    ),
    "gate_progress off": (
        {"gate_progress": False},
        [[0.141416, -0.262315, -0.091240, 0.136860], [0.141416, 0.034215, -0.250910]],
    ),
}


def example(rewards) -> Batch:
    """The worked example, float64; the padding holds numbers that must not count."""
    values = torch.full((3, 2, 5), 9.0, dtype=torch.float64)
    mask = torch.zeros(2, 5, dtype=torch.int64)
    for (i, t), (h, old, ref, *_) in TOKENS.items():
        values[:, i, t], mask[i, t] = torch.tensor([h, old, ref], dtype=torch.float64), 1
    scores = torch.zeros(2, 5, dtype=torch.float64)
    scores[:, 0] = torch.tensor(rewards, dtype=torch.float64)
    names = ("entropy", "old_log_probs", "ref_log_prob")
    return Batch(scores, mask, np.array(["g", "g"], dtype=object), dict(zip(names, values, strict=True)))


def check_rows(got: torch.Tensor, want) -> None:
    for row, values in zip(got, want, strict=True):
        assert row[: len(values)].tolist() == pytest.approx(values, abs=1.1e-6)
        assert not row[len(values) :].any()


@pytest.mark.parametrize("token", TOKENS, ids=str)
def test_spec_section_7_worked_example_gate_and_standardised_signal(token):
    (i, t), (_, _, _, _, _, _, w, standardised) = token, TOKENS[token]
    batch = example([1, 1])  # d = +1 for both rows, no outcome
    assert float(ep(batch, **SETTINGS, eta=1.0, gate_progress=False).advantages[i, t]) == pytest.approx(
        standardised, abs=1.1e-6
    )
    a = 0.707106 * (1 if i == 0 else -1)
    assert float(ep(example([1, 0]), **SETTINGS, eta=0.0).advantages[i, t]) == pytest.approx(w * a, abs=1.1e-6)


@pytest.mark.parametrize("token", TOKENS, ids=str)
def test_spec_section_7_worked_example_coordinate_bucket_and_log_ratio(token):
    from verl_ext.entropy import buckets, progress

    (i, t), (_, _, _, tau, k, s, _, _) = token, TOKENS[token]
    batch = example([1, 1])
    got = progress(batch.fields["entropy"][None], batch.mask[None].double())
    assert float(got[0, i, t]) == pytest.approx(tau, abs=5e-4)
    assert int(buckets(got, 2)[0, i, t]) == k
    raw = ep(batch, **SETTINGS, eta=1.0, gate_progress=False, bucket_norm="none").advantages
    assert float(raw[i, t]) == pytest.approx(s, abs=1e-12)


def test_spec_section_7_worked_example_outcome():
    check_rows(ep(example([1, 0]), **SETTINGS, eta=0.0).advantages, OUTCOME)
    assert grpo(example([1, 0]))[:, 0].tolist() == pytest.approx([0.707106, -0.707106], abs=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_spec_section_7_worked_example_final(name):
    rewards, settings, want = CASES[name]
    check_rows(ep(example(rewards), **SETTINGS, **settings).advantages, want)


@pytest.mark.parametrize("name", PROGRESS_CASES)
def test_spec_section_7_worked_example_progress(name):
    settings, want = PROGRESS_CASES[name]
    batch = example([1, 0])
    with_it, without = (ep(batch, **SETTINGS, **settings, eta=eta).advantages for eta in (0.2, 0.0))
    check_rows(with_it - without, want)


def test_spec_section_7_synthetic_figures():
    """8 x 300 tokens, r = 1 in 3 of 8: the spec's rounded figures, over a few draws."""
    batches = [synthetic([1, 1, 1, 0, 0, 0, 0, 0], seed=seed) for seed in range(4)]

    def average(numbers):
        return sum(map(float, numbers)) / len(batches)

    assert average(ep(b, eta=0.0).advantages.abs().mean() for b in batches) == pytest.approx(0.35, abs=0.02)
    progress = [ep(b).advantages - ep(b, eta=0.0).advantages for b in batches]
    assert average(p.abs().mean() for p in progress) == pytest.approx(0.065, abs=0.006)
    for gamma, mean in [(1.0, 0.48), (2.0, 0.45), (5.0, 0.39)]:
        assert average(ep(b, gamma=gamma).metrics["ep/gate_mean"] for b in batches) == pytest.approx(mean, abs=0.012)
    ratio = average(ep(b).metrics["ep/progress_ratio"] for b in batches)
    assert ratio == pytest.approx(0.065 / 0.35, abs=0.02)


@pytest.mark.parametrize(("gamma", "low", "high"), [(1, 0.277, 0.881), (2, 0.128, 0.982), (5, 0.008, 1.000)])
def test_spec_section_7_synthetic_quantiles_of_the_gate(gamma, low, high):
    batch = synthetic([1, 1, 1, 0, 0, 0, 0, 0])
    w = ep(batch, gamma=float(gamma), eta=0.0).advantages / grpo(batch)
    assert float(w.quantile(0.05)) == pytest.approx(low, abs=0.01)
    assert float(w.quantile(0.95)) == pytest.approx(high, abs=0.015)


# -- checks of the spec, section 7 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_spec_section_7_without_gate_and_progress_it_is_half_of_grpo(norm_by_std):
    for seed in range(3):
        batch = random_batch(seed)
        want = grpo(batch, norm_by_std)
        assert torch.equal(ep(batch, norm_by_std=norm_by_std, eta=0.0, gamma=0.0).advantages, want / 2)
        neutral = ep(batch, norm_by_std=norm_by_std, eta=0.0, gamma=0.0, gate_renorm="mean1")
        assert torch.equal(neutral.advantages, want)
        assert METHOD.neutral == {"eta": 0.0, "gamma": 0.0, "gate_renorm": "mean1"}


def inputs_of(rewards, uid) -> AdvantageInputs:
    scores = torch.tensor(rewards)[:, None]
    mask = torch.ones_like(scores)
    return AdvantageInputs(scores, mask, make_groups(np.array([*uid], dtype=object), mask))


@pytest.mark.parametrize(
    ("rewards", "settings", "want"),
    [
        ([1.0, 0.0, 1.0], {}, [1, -1, 1]),
        ([0.9, 0.8, 1.0], {}, [0, -1, 1]),  # around the mean, not theta; equal to the mean: no sign
        ([1.0, 1.0, 1.0], {}, [1, 1, 1]),
        ([0.0, 0.0, 0.0], {}, [-1, -1, -1]),
        ([0.7, 0.7, 0.7], {}, [1, 1, 1]),
        ([0.3, 0.3, 0.3], {}, [-1, -1, -1]),
        ([0.5, 0.5, 0.5], {}, [0, 0, 0]),
        ([0.3, 0.3, 0.3], {"theta_reward": 0.2}, [1, 1, 1]),
        ([0.0, 0.0, 0.0], {"r_lo": -1.0}, [0, 0, 0]),
        ([0.7, 0.7, 0.7], {"r_lo": -1.0, "r_hi": 3.0}, [-1, -1, -1]),
        ([1.0, 1.0 - 1e-7, 1.0], {}, [1, 1, 1]),  # a tie up to tol, although std > 0
        ([1.0, 0.9999, 1.0], {}, [1, -1, 1]),
        ([1.0, 0.9999, 1.0], {"tol": 1e-3}, [1, 1, 1]),
    ],
)
def test_spec_section_7_d_flips_sign_with_the_reward(rewards, settings, want):
    """(5) and its zero-variance rule."""
    got = anchor(inputs_of([*rewards, 0.0, 1.0], "aaabb"), EPGRPOConfig(**settings))
    assert got.tolist() == [*want, -1, 1]


def test_the_anchor_of_groups_of_one_and_rows_that_do_not_count_is_0():
    inputs = inputs_of([1.0, 0.0, 1.0, 1.0], ["a", "a", "alone", "pad1"])
    assert anchor(inputs, EPGRPOConfig()).tolist() == [1, -1, 0, 0]


def test_spec_section_7_under_zscore_a_bucket_sums_to_zero():
    rng = torch.Generator().manual_seed(0)
    s = torch.randn(2, 4, 50, generator=rng, dtype=torch.float64)
    use = (torch.rand(2, 4, 50, generator=rng) < 0.8).double()
    bucket = torch.randint(0, 5, (2, 4, 50), generator=rng)
    d = torch.ones(2, 4, dtype=torch.float64)
    got, zeroed = standardise(s.clone(), d, use, bucket, EPGRPOConfig(K=5))
    assert not zeroed.any()
    for g in range(2):
        for k in range(5):
            inside = got[g][(bucket[g] == k) & (use[g] > 0)]
            assert float(inside.sum()) == pytest.approx(0, abs=1e-9)
            assert float(inside.std()) == pytest.approx(1, abs=1e-4)
    scaled, _ = standardise(s.clone(), d, use, bucket, EPGRPOConfig(K=5, bucket_norm="scale"))
    assert torch.equal(scaled.sign(), s.sign())  # alternative (c) keeps the raw sign of s
    assert not torch.equal(got.sign(), s.sign())


@pytest.mark.parametrize("reward", [(0.0, 1.0), (0.2, 0.7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_spec_section_7_collapsed_groups_train_in_opposite_directions(reward, dtype):
    """Outcome 0, also where rounding makes the mean of equal rewards differ from them; progress not."""
    wrong, right = (cast(synthetic([r] * 7, T=40), dtype) for r in reward)
    got, opposite = ep(right).advantages, ep(wrong).advantages
    assert torch.equal(got, -opposite)
    assert float(got.abs().mean()) > 0.02
    for batch in (wrong, right):
        assert not ep(batch, eta=0.0).advantages.any()
        metrics = ep(batch).metrics
        assert metrics["ep/flip_frac"] == 0 and "ep/progress_ratio" not in metrics
    noisy = right.with_scores(right.scores * (1 + 1e-7))
    noisy.scores[0] -= 1e-7 / 40
    assert torch.equal(ep(noisy, theta_reward=0.5).advantages, got)


@pytest.mark.parametrize("lam", [0.01, 1.0])
def test_spec_section_7_lam_cancels_under_zscore(lam):
    batch = synthetic([1, 0, 1, 1], T=60)
    want = ep(batch, sigma_floor=0.0)
    # Up to eps: it is 5e-4 of the std of lambda times the log-ratio at lambda = 0.01.
    assert torch.allclose(ep(batch, sigma_floor=0.0, lam=lam).advantages, want.advantages, atol=1e-3)
    for norm in ("none", "scale"):
        one, other = (ep(batch, sigma_floor=0.0, bucket_norm=norm, lam=x).advantages for x in (0.1, lam))
        assert torch.allclose(one, other, atol=1e-3) == (norm == "scale")


@pytest.mark.parametrize("settings", [{}, {"stat_scope": "batch"}, {"stat_scope": "response"}], ids=str)
def test_spec_section_7_padding_and_order_have_no_influence(settings):
    batch = cast(random_batch(2), torch.float64)
    want = ep(batch, **settings)
    wild = {name: torch.where(batch.mask > 0, v, 7e3) for name, v in batch.fields.items() if name != "acc"}
    extra = padding(3, batch)
    for name in wild:
        extra.fields[name].fill_(-5e3)
    order = torch.randperm(len(batch) + 3, generator=torch.Generator().manual_seed(0))
    mixed = (with_fields(batch, **wild) + cast(extra, torch.float64))[order]
    got = ep(mixed, **settings)
    back = got.advantages[order.argsort()]
    torch.testing.assert_close(back[: len(batch)], want.advantages, rtol=1e-9, atol=1e-12)
    assert not back[len(batch) :].any()
    assert got.metrics == pytest.approx(want.metrics, rel=1e-9)


def test_spec_section_7_one_token_buckets_give_nothing():
    """Row 2's first token alone in bucket 0: entropies put all others into bucket 1."""
    batch = example([1, 1])
    entropy = torch.tensor([[1.0, 0.1, 0.1, 0.1, 9.0], [0.1, 0.6, 0.6, 9.0, 9.0]], dtype=torch.float64)
    batch = with_fields(batch, entropy=entropy)
    for norm in ("zscore", "scale"):
        got = ep(batch, **SETTINGS, bucket_norm=norm, sigma_floor=0.0)
        assert float(got.advantages[1, 0]) == 0
        assert bool((got.advantages[0, :4] != 0).any())
        assert got.metrics["ep/floored_buckets"] == 0.5
    assert float(ep(batch, **SETTINGS, bucket_norm="none").advantages[1, 0]) != 0


@pytest.mark.parametrize("rewards", [[1] * 4, [0] * 4])
def test_spec_section_7_the_anchors_order_does_not_matter_when_all_signs_agree(rewards):
    batch = synthetic(rewards, T=60)
    after, before = (ep(batch, anchor_order=order).advantages for order in ("after", "before"))
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-12)
    mixed = synthetic([1, 0, 0, 1], T=60)
    after, before = (ep(mixed, anchor_order=order).advantages for order in ("after", "before"))
    assert float((after - before).abs().max()) > 1e-2


# -- traps of section 6 -----------------------------------------------------------------------------------------------


def mean_progress(batch: Batch, **settings) -> float:
    return float((ep(batch, **settings).advantages - ep(batch, **{**settings, "eta": 0.0}).advantages).abs().mean())


def test_spec_section_6_noise_at_the_start_of_training_is_silenced_by_the_floor():
    """pi_theta = pi_ref up to 1e-3: without the floor, noise gives the progress of real ratios; with it, none."""
    rewards = [1, 1, 1, 0, 0, 0, 0, 0]
    noise, real = synthetic(rewards, ratio=1e-3), synthetic(rewards)
    assert mean_progress(noise, sigma_floor=0.0) == pytest.approx(mean_progress(real), rel=0.1)
    assert mean_progress(noise) == 0
    assert ep(noise).metrics["ep/floored_buckets"] == 1
    assert ep(real).metrics["ep/floored_buckets"] == 0
    assert torch.equal(ep(noise).advantages, ep(noise, eta=0.0).advantages)


def test_spec_section_6_the_floor_counts_after_lambda():
    """Log-ratios of 0.02: s = 0.002 at lam 0.1, above 1e-3; 0.0002 at lam 0.01, below."""
    batch = synthetic([1, 0, 1, 0], ratio=0.02)
    assert ep(batch).metrics["ep/floored_buckets"] == 0
    assert ep(batch, lam=0.01).metrics["ep/floored_buckets"] == 1
    assert mean_progress(batch, lam=0.01) == 0 < mean_progress(batch)


def test_the_reference_equal_to_the_policy_gives_no_progress_even_without_a_floor():
    batch = synthetic([1, 0, 1, 0], ratio=0.0)
    for norm in ("zscore", "scale", "none"):
        assert mean_progress(batch, sigma_floor=0.0, bucket_norm=norm) == 0


@pytest.mark.parametrize(("step", "share"), [(1, 0.25), (2, 0.5), (4, 1.0), (9, 1.0)])
def test_the_ramp_of_eta(step, share):
    batch = synthetic([1, 0, 1, 0], T=40)
    base, full = ep(batch, eta=0.0).advantages, ep(batch).advantages
    got = ep(batch, step=step, eta_warmup_steps=4)
    assert got.metrics["ep/eta"] == pytest.approx(0.2 * share)
    torch.testing.assert_close(got.advantages, base + share * (full - base), rtol=1e-9, atol=1e-12)
    assert ep(batch, step=step).metrics["ep/eta"] == 0.2  # off by default


@pytest.mark.parametrize("order", ["after", "before"])
def test_spec_section_6_a_row_at_its_groups_mean_gets_no_progress(order):
    batch = synthetic([0.0, 0.5, 1.0], T=40)
    got = ep(batch, anchor_order=order).advantages
    assert not got[1].any() and bool((got[0] != 0).all()) and bool((got[2] != 0).all())


def test_spec_section_6_mean_gate_below_one_is_not_compensated():
    batch = synthetic([1, 1, 1, 0, 0, 0, 0, 0])
    faithful, renormed = ep(batch, eta=0.0), ep(batch, eta=0.0, gate_renorm="mean1")
    assert faithful.metrics["ep/gate_mean"] == pytest.approx(0.39, abs=0.02)
    assert renormed.metrics["ep/gate_mean"] == pytest.approx(1, abs=1e-9)
    ratio = renormed.advantages / faithful.advantages
    assert torch.allclose(ratio, ratio[:, :1].expand_as(ratio))  # the mean over the response
    w = faithful.advantages / grpo(batch)
    assert torch.allclose(ratio[:, 0], 1 / w.mean(1), rtol=1e-6)


def test_deterministic_text_falls_back_to_position():
    """S_T = 0: tau is t / length, so the buckets are those of bucket_coord=position."""
    batch = synthetic([1, 0, 1, 0], T=40)
    batch.fields["entropy"].zero_()
    entropy, position = (ep(batch, bucket_coord=c).advantages for c in ("entropy", "position"))
    assert torch.equal(entropy, position)
    assert bool(torch.isfinite(entropy).all()) and float(entropy.std()) > 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entropies_that_rounding_makes_negative_do_no_harm(dtype):
    """Deterministic tokens come out as -1e-8 or so from an engine."""
    batch = cast(synthetic([1, 0, 1, 0], T=40), torch.float32)
    clean = batch.fields["entropy"].clone()
    clean[:, ::2] = 0
    noisy = clean - 1e-8 * (clean == 0)
    noisy[0] = torch.tensor([-2e-7, 3e-7] * 20)
    clean[0] = noisy[0].clamp(min=0)
    got, want = (ep(with_fields(batch, entropy=h.to(dtype))).advantages for h in (noisy, clean))
    assert bool(torch.isfinite(got).all())
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_groups_of_one_get_nothing_at_all(caplog):
    batch = synthetic([1, 0, 1, 1], T=40, uid=["a", "a", "a", "alone"])
    with caplog.at_level("WARNING", logger="verl_ext"):
        got = ep(batch)
    assert not got.advantages[3].any() and bool((got.advantages[:3] != 0).all())
    assert "1 of 2 groups have one response only; their advantage is 0" in caplog.text
    torch.testing.assert_close(got.advantages[:3], ep(batch[[0, 1, 2]]).advantages)
    assert got.metrics == pytest.approx(ep(batch[[0, 1, 2]]).metrics)


def test_earlier_outputs_of_a_session_are_guided_but_enter_no_statistic():
    batch = synthetic([1, 0, 1, 0], T=40)
    want = ep(batch)
    extra = batch[[0, 1]]
    extra.fields["ref_log_prob"] = extra.fields["ref_log_prob"] * 3 - 1
    extra.fields["entropy"] = extra.fields["entropy"] * 4
    both = batch + extra
    both.final_row = torch.tensor([0, 1, 2, 3, 0, 1])
    got = ep(both)
    torch.testing.assert_close(got.advantages[:4], want.advantages, rtol=1e-9, atol=1e-12)
    outcome = ep(both, eta=0.0).advantages
    assert bool((outcome[4] > 0).all()) and bool((outcome[5] < 0).all())
    assert bool((got.advantages[4:] != outcome[4:]).any())
    assert got.metrics["ep/logratio_abs"] == pytest.approx(want.metrics["ep/logratio_abs"])


# -- switches of section 4 --------------------------------------------------------------------------------------------


def test_every_switch_changes_the_result():
    batch = synthetic([1, 0, 0, 1, 1, 1, 0, 0], T=30, uid=[*"aaaabbcc"])
    batch.fields["entropy"][4:] *= 3
    changes = [
        {}, {"gamma": 2.0}, {"eta": 0.4}, {"K": 4}, {"theta_reward": -0.1}, {"stat_scope": "response"},
        {"stat_scope": "batch"}, {"bucket_norm": "scale"}, {"bucket_norm": "none"}, {"anchor_order": "before"},
        {"gate_progress": False}, {"gate_renorm": "mean1"}, {"sigma_floor": 0.02}, {"eta_warmup_steps": 2},
        {"bucket_coord": "position"}, {"ddof": 0}, {"tol": 1.0}, {"bucket_norm": "none", "lam": 1.0},
    ]  # fmt: skip
    results = [ep(batch, **change).advantages for change in changes]
    for i, one in enumerate(results):
        for j in range(i):
            assert float((one - results[j]).abs().max()) > 1e-3, (changes[i], changes[j])
    switched = {key for change in changes for key in change}
    assert switched | {"r_lo", "r_hi"} == set(DEFAULTS)


def test_r_lo_and_r_hi_set_theta():
    batch = synthetic([0.5] * 4, T=30)
    down, none, up = (ep(batch, r_hi=r).advantages for r in (2.0, 1.0, 0.6))
    assert torch.equal(down, -up) and not none.any() and up.any()


@pytest.mark.parametrize("value", [-0.5, 1.5])
def test_a_reward_out_of_range_is_refused_unless_theta_is_given(value):
    batch = make_batch([0, 1, value, 1], [*"aabb"])
    with pytest.raises(
        DataError, match=r"reward .* in row 2 lies outside .*Set algorithm\.ep_grpo\.r_lo and algorithm\.ep_grpo\.r_hi"
    ):
        ep(batch)
    assert ep(batch, theta_reward=0.5).metrics
    assert ep(batch, r_lo=-1.0, r_hi=2.0).metrics


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[
            (key, v)
            for key in ("stat_scope", "bucket_norm", "anchor_order", "gate_renorm", "bucket_coord")
            for v in ("nonsense", None, 1)
        ],
        *[("gate_progress", v) for v in (1, "off", None)],
        *[("K", v) for v in (0, -1, 2.5, "10", True, None)],
        *[("eta_warmup_steps", v) for v in (-1, 0.5, "200", True)],
        *[
            (key, v)
            for key in ("gamma", "eta", "sigma_floor", "tol")
            for v in (-1e-9, math.inf, math.nan, "0.5", True, None)
        ],
        *[("lam", v) for v in (0, -0.1, math.inf, math.nan, "0.1")],
        *[("theta_reward", v) for v in (math.inf, -math.inf, math.nan, "0.5")],
        *[("ddof", v) for v in (2, -1, "1", True, math.nan)],
        *[(key, v) for key in ("r_lo", "r_hi") for v in (math.inf, math.nan, "1")],
    ],
)
def test_a_value_that_cannot_work_is_refused(key, value):
    with pytest.raises(ConfigError, match=rf"algorithm\.ep_grpo\.{key}={value!r}"):
        METHOD.config({"ep_grpo": {key: value}})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"r_lo": 1.0, "r_hi": 1.0}, r"algorithm\.ep_grpo\.r_lo=1.0 must be below algorithm\.ep_grpo\.r_hi=1.0"),
        ({"k": 10}, r"algorithm\.ep_grpo\.k is unknown; the keys are K, .*theta_reward"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, text):
    with pytest.raises(ConfigError, match=text):
        METHOD.config({"ep_grpo": settings})


def test_the_defaults_are_the_specs():
    assert METHOD.config({}) == METHOD.config(None) == EPGRPOConfig(**DEFAULTS)


# -- metrics of section 11 --------------------------------------------------------------------------------------------


def test_metrics_of_a_batch_of_several_blocks():
    batch = synthetic([1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 0, 1, 1], T=500, uid=[*"aaaabbbbccccdddd"])
    batch.mask[:, 400:] = (torch.arange(100) < torch.arange(16)[:, None] * 6).long()
    got = ep(batch).metrics
    _, want = oracle(rows_of(batch))
    assert set(got) == {f"ep/{name}" for name in METRICS}
    assert got == pytest.approx(want, rel=1e-9)


def test_metrics_by_hand():
    """Of the worked example. Its fourth-lowest entropies are tied, so of the deciles only the ends are plain."""
    got = ep(example([1, 0]), **SETTINGS).metrics
    w = [row[6] for row in TOKENS.values()]
    assert got["ep/gate_mean"] == pytest.approx(sum(w) / 7, abs=1e-6)
    outcome, progress = (sum(abs(x) for row in rows for x in row) for rows in (OUTCOME, PROGRESS))
    assert got["ep/progress_ratio"] == pytest.approx(progress / outcome, abs=1e-5)
    assert got["ep/logratio_abs"] == pytest.approx(sum(abs(r[1] - r[2]) for r in TOKENS.values()) / 7)
    assert got["ep/flip_frac"] == 0 and got["ep/floored_buckets"] == 0 and got["ep/eta"] == 0.2
    assert got["ep/gate_decile_0"] == pytest.approx(0.005597, abs=1e-6)  # seven tokens: one in each of seven deciles
    assert got["ep/gate_decile_6"] == pytest.approx(0.999779, abs=1e-6)
    assert "ep/gate_decile_7" not in got


def test_flip_frac_counts_final_signs_against_the_outcome():
    """With a large eta the progress term decides: the share of flipped tokens by hand; a tied group stays out."""
    batch = synthetic([1, 0, 1, 0, 1, 1], T=50, uid=[*"aaaabb"])
    for eta in (0.2, 1.0, 50.0):
        got = ep(batch, eta=eta)
        final, a = got.advantages[:4], grpo(batch)[:4]
        want = (
            sum(sign(x) != sign(y) for x, y in zip(final.flatten().tolist(), a.flatten().tolist(), strict=True)) / 200
        )
        assert got.metrics["ep/flip_frac"] == pytest.approx(want)
    assert got.metrics["ep/flip_frac"] == pytest.approx(0.5, abs=0.1)
    assert ep(batch, eta=0.0).metrics["ep/flip_frac"] == 0


def test_deciles_of_a_large_batch_come_from_a_sample():
    """More tokens than the sample: the gate's deciles still rise with the entropy and average to the mean gate."""
    batch = cast(synthetic([1, 0] * 100, T=700, uid=[f"g{i // 4}" for i in range(200)]), torch.float32)
    got = ep(batch).metrics
    deciles = [got[f"ep/gate_decile_{i}"] for i in range(10)]
    assert deciles == sorted(deciles) and deciles[0] < 0.02 and deciles[9] > 0.99
    assert sum(deciles) / 10 == pytest.approx(got["ep/gate_mean"], abs=0.01)


# -- run settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"algorithm.use_kl_in_reward": True}, r"use_kl_in_reward=True.*Set algorithm\.use_kl_in_reward=False"),
        (
            {"algorithm.filter_groups.enable": True},
            r"algorithm\.filter_groups\.enable=True.*ep_grpo.*Set algorithm\.filter_groups\.enable=False",
        ),
        (
            {"algorithm.rollout_correction.bypass_mode": True},
            r"bypass_mode=True .*ep_grpo.*Set algorithm\.rollout_correction\.bypass_mode=False",
        ),
        (
            {"actor_rollout_ref.actor.use_kl_loss": False},
            r"actor_rollout_ref\.actor\.use_kl_loss=False: .*no reference model.*Set .*use_kl_loss=True",
        ),
    ],
)  # fmt: skip
def test_run_settings_that_defeat_the_method_are_refused(changes, text):
    with pytest.raises(ConfigError, match=text):
        check_methods(composed("ep_grpo", changes))


@pytest.mark.parametrize(
    "changes",
    [{}, {"actor_rollout_ref.actor.kl_loss_coef": 0.01}, {"actor_rollout_ref.actor.policy_loss.loss_mode": "gspo"}],
    ids=str,
)
def test_run_settings_that_make_sense_pass(changes):
    config = composed("ep_grpo", changes)
    assert config.actor_rollout_ref.actor.use_kl_loss is True
    check_methods(config)
