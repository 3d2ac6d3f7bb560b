"""MCPO against an independent loop over plain numbers, the spec's vectors, and its reductions.

Sections and equation numbers are those of the spec (specs/mcpo.md) that recipes/mcpo/mcpo.py names.
"""

from __future__ import annotations

import logging
import math
from statistics import fmean

import numpy as np
import pytest
import torch
from contracts.cases import (
    AGG_MODES,
    WHOLE,
    Batch,
    Case,
    LossBatch,
    Split,
    gradient,
    logged,
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
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from recipes.mcpo.mcpo import METHOD, MCPOConfig, count_mastered, group_accuracy, hinge, mastered_rows, scale
from verl_ext.groups import make_groups
from verl_ext.losses import MiniBatch
from verl_ext.preflight import check_methods
from verl_ext.registry import AdvantageInputs, ConfigError, DataError

DEFAULTS = {
    "reweight": True, "reweight_threshold": 0.5, "hkl_beta": 1.0, "hkl_delta": 0.01, "hkl_norm": "sequences",
    "one_update": "refuse", "ddof": 1, "r_lo": 0.0, "r_hi": 1.0, "acc_source": "auto",
}  # fmt: skip
LOW, HIGH, DUAL = 0.2, 0.28, 3.0


def oracle(rows: list[tuple[str, float, bool, bool]], **settings):
    """Spec (1), (8), (9) and section 4 once more. rows: (uid, reward, correct, counts).

    -> advantages and `mastered` of each row; p and query weight of each group that is compared.
    """
    c = {**DEFAULTS, **settings}
    members: dict[str, list[int]] = {}
    for row, (uid, _, _, counts) in enumerate(rows):
        if counts:
            members.setdefault(uid, []).append(row)
    advantages, mastered, accuracy, weight = [0.0] * len(rows), [0.0] * len(rows), {}, {}
    for uid, group in members.items():
        if len(group) < 2:
            continue
        right = sum(rows[row][2] for row in group)
        p = right / len(group)
        accuracy[uid] = p
        factor = 1.0
        if c["reweight"] and c["reweight_threshold"] < p < 1:
            factor = max(2 * math.sqrt(p * (1 - p)), 1e-6)
        weight[uid] = math.sqrt(p * (1 - p)) / factor
        mean = math.fsum(rows[row][1] for row in group) / len(group)
        std = math.sqrt(math.fsum((rows[row][1] - mean) ** 2 for row in group) / (len(group) - c["ddof"]))
        for row in group:
            mastered[row] = float(right == len(group))
            if right < len(group) or not c["reweight"]:
                advantages[row] = (rows[row][1] - mean) / (std * factor + 1e-6)
    return advantages, mastered, accuracy, weight


def oracle_loss(rows: list[dict], mode: str, **settings):
    """Spec (4)-(7), (10) once more. rows: old, new, advantage and mask of each token, mastered.

    -> loss, gradient for each token of each row, value of (7), drifts of the tokens of mastered rows.
    """
    c = {**DEFAULTS, **settings}
    real = [row for row in rows if any(row["mask"])]
    tokens, anchors = sum(sum(row["mask"]) for row in rows), sum(row["mastered"] for row in real)
    normaliser = len(real) if c["hkl_norm"] == "sequences" else max(anchors, 1)
    delta = c["hkl_delta"]
    loss, hkl, gradients, drifts = 0.0, 0.0, [], []
    for row in rows:
        n = sum(row["mask"])
        gradients.append([0.0] * len(row["mask"]))
        for t, (old, new, a, m) in enumerate(zip(row["old"], row["new"], row["advantage"], row["mask"], strict=True)):
            if not m:
                continue
            d = min(max(new - old, -20.0), 20.0)
            ratio = math.exp(d)
            share = 1 / tokens if mode == "token-mean" else 1 / (n * len(real))
            # s+ = min(rho, 1 + high), s- = max(rho, 1 - low), and verl's dual clip.
            if a >= 0:
                used, moves = min(ratio, 1 + HIGH), ratio <= 1 + HIGH
            else:
                used, moves = min(max(ratio, 1 - LOW), DUAL), 1 - LOW <= ratio <= DUAL
            loss -= a * used * share
            gradients[-1][t] -= a * ratio * share if moves else 0.0
            if row["mastered"]:
                drifts.append(d)
                if abs(d) > delta:
                    edge = math.copysign(delta, d)
                    phi = (math.exp(d) - d - 1) - (math.exp(edge) - edge - 1)
                    hkl += phi / (n * normaliser)
                    gradients[-1][t] += c["hkl_beta"] * (math.exp(d) - 1) / (n * normaliser)
    return loss + c["hkl_beta"] * hkl, gradients, hkl, drifts


# -- helpers ----------------------------------------------------------------------------------------------------------


def rows_of(batch: Batch) -> list[tuple[str, float, bool, bool]]:
    counts = (batch.mask.sum(1) > 0) & torch.tensor([not u.startswith("pad") for u in batch.uid])
    rewards, acc = batch.scores.double().sum(1).tolist(), batch.fields["acc"].bool().tolist()
    return list(zip(batch.uid, rewards, acc, counts.tolist(), strict=True))


def mcpo(batch: Batch, norm_by_std: bool = True, **settings):
    return run(Case("mcpo"), batch, norm_by_std=norm_by_std, **settings)


def per_row(result) -> torch.Tensor:
    return (result if isinstance(result, torch.Tensor) else result.advantages)[:, 0]


def inputs_of(batch: Batch, final_row: torch.Tensor | None = None, acc: bool = True) -> AdvantageInputs:
    counted = None if final_row is None else final_row == torch.arange(len(batch))
    groups = make_groups(batch.uid, batch.mask, counted)
    fields = {"acc": batch.fields["acc"]} if acc else {}
    return AdvantageInputs(batch.scores, batch.mask, groups, fields, final_row)


def mastered(batch: Batch, **settings) -> list[float]:
    return mastered_rows(inputs_of(batch), MCPOConfig(**settings))["mastered"].tolist()


def group_of(correct: int, size: int) -> list[float]:
    return [1.0] * correct + [0.0] * (size - correct)


def with_mastered(batch: LossBatch, flags: list[float]) -> LossBatch:
    batch.data["mastered"] = torch.tensor(flags, dtype=torch.float64)
    return batch


def loss_rows(batch: LossBatch) -> list[dict]:
    """A mini-batch as plain numbers."""
    return [
        {
            "old": batch.data["old_log_probs"][row].tolist(),
            "new": batch.response(row, batch.log_probs.detach()).tolist(),
            "advantage": batch.data["advantages"][row].tolist(),
            "mask": batch.data["response_mask"][row].tolist(),
            "mastered": bool(flag),
        }
        for row, flag in enumerate(batch.data["mastered"].tolist())
    ]


def actor_loss(mode: str = "seq-mean-token-mean", **settings):
    function = loss_function(Case("mcpo", settings), mode)
    object.__setattr__(function.config, "clip_ratio_high", HIGH)
    return function


def vanilla(mode: str = "seq-mean-token-mean"):
    function = loss_function(Case("vanilla"), mode)
    object.__setattr__(function.config, "clip_ratio_high", HIGH)
    return function


def hinge_alone(batch: LossBatch, split: Split = WHOLE, ranks: int = 1, **settings):
    """Value and gradient of beta times (7): the loss without the policy gradient, whose advantages are set to 0."""
    batch.data["advantages"].values().zero_()
    return gradient(batch, actor_loss(**settings), split=split, ranks=ranks)


def by_row(batch: LossBatch, values: torch.Tensor) -> list[list[float]]:
    return [batch.response(row, values).tolist() for row in range(len(batch.data))]


def flat(rows) -> list[float]:
    return [value for row in rows for value in row]


# -- oracle: advantages -----------------------------------------------------------------------------------------------


@st.composite
def problems(draw):
    lo, hi = draw(st.sampled_from([(0.0, 1.0), (-1.0, 1.0), (2.0, 10.0)]))
    settings = {
        "r_lo": lo,
        "r_hi": hi,
        "reweight": draw(st.sampled_from([True, True, False])),
        "reweight_threshold": draw(st.sampled_from([0.5, 0.6, 0.75, 1.0])),
        "ddof": draw(st.sampled_from([0, 1])),
    }
    rewards, acc, uid = [], [], []
    for number in range(draw(st.integers(2, 6))):
        size = draw(st.integers(2, 9))
        flags = draw(
            st.one_of(st.lists(st.booleans(), min_size=size, max_size=size), st.just([True] * size))
            if number
            else st.just([True] * (size - 1) + [False])
        )
        # A penalty for length, a bonus for format: the reward is not the flag.
        shaping = draw(st.lists(st.sampled_from([0.0, 0.125, 0.25]), min_size=size, max_size=size))
        shaped = draw(st.booleans())
        for flag, change in zip(flags, shaping, strict=True):
            change = change * (hi - lo) * shaped
            rewards.append(hi - change if flag else lo + change)
        acc, uid = acc + flags, uid + [f"g{number}"] * size
    if draw(st.booleans()) and len(uid) + 1 >= 2 * (len(set(uid)) + 1):
        rewards, acc, uid = [*rewards, hi], [*acc, True], [*uid, "alone"]
    batch = make_batch(rewards, uid, acc)
    batch.scores = torch.zeros(batch.mask.shape, dtype=torch.float64)
    batch.scores[:, 0] = torch.tensor(rewards, dtype=torch.float64)
    if draw(st.booleans()):
        masked = batch[[0]]
        masked.mask.zero_()
        batch = batch + masked
    batch = batch + padding(draw(st.integers(0, 3)), batch)
    return settings, batch[list(draw(st.permutations(range(len(batch)))))]


@given(problems())
def test_advantages_agree_with_an_independent_loop(problem):
    settings, batch = problem
    want, flags, accuracy, weight = oracle(rows_of(batch), **settings)
    mask = batch.mask
    for dtype, rtol in ((torch.float64, 1e-8), (torch.float32, 2e-4)):
        got = mcpo(batch.with_scores(batch.scores.to(dtype)), **settings)
        expected = torch.tensor(want, dtype=torch.float64)[:, None] * mask
        torch.testing.assert_close(got.advantages.double(), expected, rtol=rtol, atol=1e-12 if rtol < 1e-6 else 2e-5)
        # Section 11, the driver's half.
        near = lambda value, rtol=rtol: pytest.approx(value, rel=max(rtol, 1e-6), abs=1e-6)  # noqa: E731
        p = list(accuracy.values())
        counted = [a for a, row in zip(want, rows_of(batch), strict=True) if row[3]]
        assert got.metrics == {
            "mcpo/mastered_frac": near(fmean(value == 1 for value in p)),
            "mcpo/majority_frac": near(fmean(0.5 < value < 1 for value in p)),
            "mcpo/p_mean": near(fmean(p)),
            "mcpo/query_weight": near(fmean(weight.values())),
            "mcpo/adv_min": pytest.approx(min(counted), rel=max(rtol, 1e-6), abs=2e-5),
            "mcpo/adv_abs_mean": pytest.approx(fmean(map(abs, counted)), rel=max(rtol, 1e-6), abs=2e-5),
        }
    own = {key: settings[key] for key in ("r_lo", "r_hi")}
    assert mastered(batch, **own) == flags


# -- oracle: loss -----------------------------------------------------------------------------------------------------


@st.composite
def loss_problems(draw):
    masks = draw(st.lists(st.lists(st.sampled_from([1, 1, 1, 0]), min_size=1, max_size=6), min_size=2, max_size=7))
    masks[0][0] = 1
    masks += [[0]] * draw(st.integers(0, 2))  # padding rows
    size = draw(st.sampled_from([0.005, 0.05, 0.5, 2.0]))
    flags = draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=len(masks), max_size=len(masks)))
    # A row without a response is never mastered (it is not real).
    flags = [flag * any(mask) for flag, mask in zip(flags, masks, strict=True)]
    settings = {
        "hkl_beta": draw(st.sampled_from([0.3, 1.0, 25.0])),
        "hkl_delta": draw(st.sampled_from([0.01, 0.001, 0.2])),
        "hkl_norm": draw(st.sampled_from(["sequences", "mastered"])),
    }
    mode = draw(st.sampled_from(["seq-mean-token-mean", "token-mean"]))
    return masks, draw(st.integers(0, 1000)), size, flags, settings, mode


@given(loss_problems())
def test_loss_and_gradient_agree_with_an_independent_loop(problem):
    masks, seed, size, flags, settings, mode = problem
    for dtype, tolerance in ((torch.float64, 1e-8), (torch.float32, 1e-5)):
        batch = make_loss_batch(seed=seed, masks=masks, log_ratio=lambda u: size * u, dtype=dtype)
        with_mastered(batch, flags)
        value, got = gradient(batch, actor_loss(mode, **settings))
        want_value, want, *_ = oracle_loss(loss_rows(batch), mode, **settings)
        assert value == pytest.approx(want_value, rel=tolerance, abs=tolerance)
        torch.testing.assert_close(
            torch.tensor(flat(by_row(batch, got)), dtype=torch.float64),
            torch.tensor(flat(want), dtype=torch.float64),
            rtol=tolerance,
            atol=1e-12 if dtype == torch.float64 else 1e-5,
        )
        # Nothing outside the responses.
        assert float(got.abs().sum()) == pytest.approx(sum(map(abs, flat(by_row(batch, got)))), rel=1e-5)


def test_gradient_of_the_hinge_is_e_to_the_d_minus_one():
    """Section 6: -0.39 at d = -0.5, +0.65 at d = +0.5, over the length and the sequences."""
    batch = with_mastered(make_loss_batch(masks=[[1, 1], [1]], log_ratio=torch.zeros_like), [1.0, 0.0])
    with torch.no_grad():
        batch.response(0, batch.log_probs).copy_(
            batch.data["old_log_probs"][0] + torch.tensor([0.5, -0.5], dtype=torch.float64)
        )
    _, got = hinge_alone(batch)
    want = [(math.exp(0.5) - 1) / 4, (math.exp(-0.5) - 1) / 4]
    assert batch.response(0, got).tolist() == pytest.approx(want, rel=1e-9)
    assert [4 * value for value in want] == pytest.approx([0.6487, -0.3935], abs=1e-4)


# -- section 7 --------------------------------------------------------------------------------------------------------

ADVANTAGES = [
    # G, correct, (A+, A-) with ddof 0, with ddof 1, of GRPO with ddof 0
    (8, 4, (1.000, -1.000), None, (1.000, -1.000)),
    (8, 5, (0.800, -1.333), (0.748, -1.247), (0.775, -1.291)),
    (8, 6, (0.667, -2.000), (0.624, -1.871), (0.577, -1.732)),
    (8, 7, (0.571, -4.000), (0.535, -3.742), (0.378, -2.646)),
    (16, 15, (0.533, -8.000), (0.516, -7.746), (0.258, -3.873)),
]


@pytest.mark.parametrize(("size", "correct", "population", "unbiased", "grpo"), ADVANTAGES)
def test_spec_section_7_advantages(size, correct, population, unbiased, grpo):
    batch = make_batch(group_of(correct, size), ["a"] * size)
    ends = lambda **settings: per_row(mcpo(batch, **settings))[[0, -1]].tolist()  # noqa: E731
    assert ends(ddof=0) == pytest.approx(population, abs=6e-4)
    assert ends(ddof=0, reweight=False) == pytest.approx(grpo, abs=6e-4)
    if unbiased:
        assert ends() == pytest.approx(unbiased, abs=6e-4)
    else:  # "as GRPO"
        assert torch.equal(mcpo(batch).advantages, run(Case("grpo"), batch).advantages)


@pytest.mark.parametrize(("correct", "flag"), [(0, 0.0), (8, 1.0)])
@pytest.mark.parametrize("ddof", [0, 1])
def test_spec_section_7_advantages_of_collapsed_groups(correct, flag, ddof):
    batch = make_batch(group_of(correct, 8), ["a"] * 8)
    assert not mcpo(batch, ddof=ddof).advantages.any()
    assert mastered(batch, ddof=ddof) == [flag] * 8


PHI = [
    (0.01, 0.0), (-0.01, 0.0), (0.011, 1.056e-5), (-0.011, 1.045e-5), (0.05, 1.221e-3), (-0.05, 1.180e-3),
    (0.1, 5.121e-3), (-0.1, 4.788e-3), (0.5, 0.14867), (-0.5, 0.10648), (1.0, 0.71823), (-1.0, 0.36783),
]  # fmt: skip


@pytest.mark.parametrize(("d", "phi"), PHI)
def test_spec_section_7_phi(d, phi):
    assert float(hinge(torch.tensor(d, dtype=torch.float64), 0.01)) == pytest.approx(phi, rel=5e-4)
    assert float(hinge(torch.tensor(d), 0.01)) == pytest.approx(phi, rel=2e-3)


@given(st.floats(-20, 20), st.sampled_from([1e-4, 0.01, 0.3]))
def test_spec_section_7_phi_is_not_negative_and_continuous(d, delta):
    phi = lambda x: float(hinge(torch.tensor(x, dtype=torch.float64), delta))  # noqa: E731
    assert phi(d) >= 0
    assert (phi(d) == 0) == (abs(d) <= delta * (1 + 1e-12)) or abs(abs(d) - delta) < 1e-9
    for edge in (delta, -delta):
        assert phi(edge) == 0
        assert 0 < phi(edge * (1 + 1e-6)) < 2e-6 * delta * abs(math.expm1(edge)) * 1.01
    # k3 swapped would be e^-d + d - 1.
    if abs(d) > delta:
        edge = math.copysign(delta, d)
        want = (math.expm1(d) - d) - (math.expm1(edge) - edge)
        assert phi(d) == pytest.approx(want, rel=1e-9, abs=1e-15)


def test_the_constants_of_6():
    """c+ = 5.0167e-5, c- = 4.9834e-5: what k3 loses outside the dead zone."""
    for d, constant in ((0.5, 5.0167e-5), (-0.5, 4.9834e-5)):
        k3 = math.exp(d) - d - 1
        assert k3 - float(hinge(torch.tensor(d, dtype=torch.float64), 0.01)) == pytest.approx(constant, rel=1e-4)


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_spec_section_7_off_is_grpo_bit_for_bit(norm_by_std):
    rng = np.random.default_rng(0)
    shaped = make_batch(rng.random(120).tolist(), [f"g{i % 12}" for i in range(120)], acc=rng.integers(0, 2, 120))
    for batch in (*map(random_batch, range(5)), shaped):
        want = run(Case("grpo"), batch, norm_by_std=norm_by_std).advantages
        assert torch.equal(mcpo(batch, norm_by_std, reweight=False).advantages, want)


@pytest.mark.parametrize("mode", AGG_MODES)
def test_spec_section_7_beta_0_is_verls_vanilla_loss_bit_for_bit(mode):
    for dtype in (torch.float32, torch.float64):
        batch = with_mastered(make_loss_batch(log_ratio=lambda u: 2 * u, dtype=dtype), [1.0, 0.0] * 4)
        for how in ({}, {"split": Split(size=2), "ranks": 2}):
            want, got = gradient(batch, vanilla(mode), **how), gradient(batch, actor_loss(mode, hkl_beta=0.0), **how)
            assert got[0] == want[0] and torch.equal(got[1], want[1])
        # The control: with the hinge it is another loss.
        assert not torch.equal(gradient(batch, actor_loss(mode))[1], gradient(batch, vanilla(mode))[1])


@pytest.mark.parametrize("size", [2, 4, 8])
def test_spec_section_7_up_to_half_correct_and_nothing_mastered_is_grpo(size):
    uid = [f"g{g}" for g in range(size // 2 + 1) for _ in range(size)]
    batch = make_batch([r for c in range(size // 2 + 1) for r in group_of(c, size)], uid)
    assert torch.equal(mcpo(batch).advantages, run(Case("grpo"), batch).advantages)
    assert not any(mastered(batch))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("norm", ["sequences", "mastered"])
def test_spec_section_7_on_policy_the_hinge_is_exactly_zero(norm, dtype):
    """The first mini-batch of a step, and anything inside the dead zone."""
    for drift in (torch.zeros_like, lambda u: 0.0099 * u):
        batch = with_mastered(make_loss_batch(log_ratio=drift, dtype=dtype), [1.0, 0.0] * 4)
        value, got = hinge_alone(batch, hkl_beta=1e6, hkl_norm=norm)
        assert value == 0 and not got.any()


def test_spec_section_7_rows_that_are_not_mastered_give_the_hinge_nothing():
    batch = with_mastered(make_loss_batch(), [1.0, 0.0] * 4)
    _, got = hinge_alone(batch)
    rows = by_row(batch, got)
    assert all(not any(rows[row]) for row in (1, 3, 5, 7))
    assert all(any(rows[row]) for row in (0, 2, 4, 6))
    # Nor does their drift enter through a normaliser.
    with torch.no_grad():
        batch.response(1, batch.log_probs).sub_(3.0)
    assert torch.equal(hinge_alone(batch)[1], got)


@pytest.mark.parametrize("norm", ["sequences", "mastered"])
@pytest.mark.parametrize(
    "how",
    [
        {"split": Split(size=1)}, {"split": Split(sizes=(1, 2, 5))}, {"split": Split(tokens=20)},
        {"split": Split(size=2), "ranks": 2}, {"split": Split(size=1), "ranks": 4},
    ],
    ids=str,
)  # fmt: skip
def test_spec_section_7_micro_batches_and_ranks_leave_the_hinge_unchanged(norm, how):
    """Mastered rows and padding rows are spread unevenly: some micro-batches and one rank hold none."""
    masks = [[1] * 3, [1] * 5, [1], [1] * 4, [1, 0, 1], [1] * 2, [0], [0, 0]]
    flags = [1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    make = lambda: with_mastered(make_loss_batch(masks=masks), flags)  # noqa: E731
    want, want_gradient = hinge_alone(make(), hkl_norm=norm)
    got, got_gradient = hinge_alone(make(), hkl_norm=norm, **how)
    assert got == pytest.approx(want, rel=1e-9) and want > 0
    torch.testing.assert_close(got_gradient, want_gradient, rtol=1e-9, atol=1e-15)


def test_spec_section_7_a_shaped_reward_at_p_1_gives_0():
    batch = make_batch([1.0, 0.5, 0.75, 1.0, 0.0, 1.0], [*"aaaabb"], acc=[1, 1, 1, 1, 0, 1])
    for ddof in (0, 1):
        got = mcpo(batch, ddof=ddof)
        assert not got.advantages[:4].any() and bool(torch.isfinite(got.advantages).all())
        assert bool(got.advantages[4:, 0].abs().min() > 0.5)
    assert mastered(batch) == [1, 1, 1, 1, 0, 0]
    # By the reward alone the group is not mastered: section 6, "p must come from the binary accuracy flag".
    assert mastered(make_batch([1.0, 0.5, 1.0, 1.0], [*"aaaa"], acc=[1, 0, 1, 1])) == [0] * 4


def test_off_leaves_grpo_also_on_a_shaped_reward_at_p_1():
    """Section 4: `reweight` off leaves plain GRPO advantages; the row is mastered all the same."""
    batch = make_batch([1.0, 0.5, 0.75, 1.0], [*"aaaa"], acc=[1, 1, 1, 1])
    got = mcpo(batch, reweight=False)
    assert torch.equal(got.advantages, run(Case("grpo"), batch).advantages) and bool(got.advantages.any())
    assert mastered(batch, reweight=False) == [1] * 4


# -- advantage stage --------------------------------------------------------------------------------------------------


@given(st.integers(2, 40), st.data())
def test_closed_form_of_8_for_binary_rewards(size, data):
    """A+ = 1 / (2p), A- = -1 / (2 (1 - p)) for p > 0.5 with the population std; mean |A| is 1."""
    correct = data.draw(st.integers(size // 2 + 1, size))
    batch = make_batch(group_of(correct, size), ["a"] * size)
    got, p = per_row(mcpo(batch, ddof=0)), correct / size
    if p == 1:
        assert not got.any()
        return
    # eps = 1e-6 in the denominator p (1 - p) * 2.
    rel = 1e-6 / (2 * p * (1 - p)) + 1e-5
    assert got[0].item() == pytest.approx(1 / (2 * p), rel=rel)
    assert got[-1].item() == pytest.approx(-1 / (2 * (1 - p)), rel=rel)
    assert got.abs().mean().item() == pytest.approx(1, rel=rel)


def test_query_weight_of_9():
    p = torch.arange(1, 16, dtype=torch.float64) / 16
    weight = (p * (1 - p)).sqrt() / scale(p, 0.5)
    assert weight[:8].tolist() == pytest.approx([math.sqrt(x / 16 * (1 - x / 16)) for x in range(1, 9)], rel=1e-12)
    assert weight[7:].tolist() == pytest.approx([0.5] * 8, rel=1e-12)
    got = mcpo(make_batch(group_of(7, 8) + group_of(1, 8), [*"a" * 8, *"b" * 8])).metrics["mcpo/query_weight"]
    assert got == pytest.approx((0.5 + math.sqrt(7) / 8) / 2)


def test_scale_of_8_is_one_up_to_the_threshold_and_at_the_ends():
    p = torch.tensor([0.0, 0.25, 0.5, 0.75, 0.9, 1.0], dtype=torch.float64)
    assert scale(p, 0.5).tolist() == pytest.approx([1, 1, 1, 2 * math.sqrt(3) / 4, 0.6, 1], rel=1e-12)
    assert scale(p, 0.75).tolist() == pytest.approx([1, 1, 1, 1, 0.6, 1], rel=1e-12)
    assert scale(torch.tensor([1 - 1e-16, 1 - 1e-15], dtype=torch.float64), 0.5).min() >= 1e-6  # the guard


@pytest.mark.parametrize(("threshold", "changed"), [(0.5, True), (0.75, False), (1.0, False)])
def test_the_threshold_is_strict(threshold, changed):
    batch = make_batch(group_of(3, 4), ["a"] * 4)
    got = mcpo(batch, reweight_threshold=threshold).advantages
    assert torch.equal(got, run(Case("grpo"), batch).advantages) != changed
    # What counts as majority-correct is (1)'s, whatever the threshold of the scale.
    assert mcpo(batch, reweight_threshold=threshold).metrics["mcpo/majority_frac"] == 1


def test_the_two_standard_deviations_differ_by_one_factor():
    """Section 6: verl's unbiased std shrinks |A| by sqrt((G - 1) / G)."""
    batch = make_batch(group_of(6, 8), ["a"] * 8)
    ratio = per_row(mcpo(batch)) / per_row(mcpo(batch, ddof=0))
    assert ratio.tolist() == pytest.approx([math.sqrt(7 / 8)] * 8, rel=1e-5)


def test_a_group_of_one_is_never_mastered_and_gets_0():
    batch = make_batch([1, 1, 1, 0, 1, 1], ["a", "a", "a", "b", "b", "alone"])
    got = mcpo(batch)
    assert mastered(batch) == [1, 1, 1, 0, 0, 0] and float(per_row(got)[5]) == 0
    assert got.metrics["mcpo/mastered_frac"] == 0.5 and got.metrics["mcpo/p_mean"] == pytest.approx(0.75)


def test_padding_rows_and_masked_rows_count_nowhere():
    batch = random_batch()
    masked = batch[[0, 1]]
    masked.mask.zero_()
    more = batch + masked + padding(3, batch)
    want, got = mcpo(batch), mcpo(more)
    assert torch.equal(got.advantages[: len(batch)], want.advantages) and got.metrics == want.metrics
    assert mastered(more) == mastered(batch) + [0.0] * 5


def test_of_a_session_with_several_outputs_the_last_one_counts_and_all_are_anchored():
    """Rows 0 and 1 are one session, and row 0 carries no verdict of its own."""
    batch = make_batch([0, 1, 1, 0, 1], [*"aaabb"], acc=[0, 1, 1, 0, 1])
    inputs = inputs_of(batch, final_row=torch.tensor([1, 1, 2, 3, 4]))
    assert group_accuracy(inputs, MCPOConfig()).tolist() == [1.0, 0.5]
    assert mastered_rows(inputs, MCPOConfig())["mastered"].tolist() == [1, 1, 1, 0, 0]


def test_the_flag_wins_over_the_reward_and_threshold_over_the_flag():
    batch = make_batch([0.0, 0.0, 0.0, 1.0], [*"aabb"], acc=[1, 1, 0, 1])
    assert mastered(batch) == mastered(batch, acc_source="flag") == [1, 1, 0, 0]
    assert mastered(batch, acc_source="threshold") == [0, 0, 0, 0]
    low = make_batch([-1.0, -1.0, 0.25, 1.0], [*"aabb"], acc=[0, 0, 0, 0])
    assert mastered(low, acc_source="threshold", r_lo=-1.0) == [0, 0, 1, 1]


def test_without_a_flag():
    binary, shaped = make_batch([1, 1, 0, 1], [*"aabb"]), make_batch([1, 1, 0.25, 1], [*"aabb"])
    flags = lambda batch, **settings: mastered_rows(inputs_of(batch, acc=False), MCPOConfig(**settings))  # noqa: E731
    assert flags(binary)["mastered"].tolist() == [1, 1, 0, 0]
    with pytest.raises(DataError, match=r"reward 0.25 in row 2.*recipe_sync.*algorithm\.mcpo\.acc_source=threshold"):
        flags(shaped)
    with pytest.raises(DataError, match=r"algorithm\.mcpo\.acc_source=flag.*recipe_sync"):
        flags(binary, acc_source="flag")
    assert flags(shaped, acc_source="threshold")["mastered"].tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("estimator", ["grpo", "avspo", "mcpo"])
def test_mastered_is_the_losss_own_whatever_the_estimator(estimator):
    """The loss with grpo or avspo: the run is accepted, and the field comes from the method of the loss."""
    check_methods(composed("mcpo", {"algorithm.adv_estimator": estimator}))
    assert METHOD.row_fields is mastered_rows and "mastered" in METHOD.loss_needs
    batch = make_batch([1, 1, 0, 1], [*"aabb"])
    field = mastered(batch)
    result = run(Case(estimator), batch)
    assert field == [1, 1, 0, 0]
    assert result.output is None or "mastered" not in result.output.loss_fields  # nobody overwrites it


def test_the_estimator_works_with_another_loss_and_another_trainer():
    check_methods(
        composed(
            "mcpo",
            {"actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla", "trainer.v1.trainer_mode": "sync"},
        )
    )
    batch = random_batch()
    stock = get_adv_estimator_fn("mcpo")(
        token_level_rewards=batch.scores, response_mask=batch.mask, config={}, index=batch.uid
    )[0]
    assert torch.equal(stock, mcpo(batch).advantages)
    # The loss needs a trainer of ours.
    with pytest.raises(ConfigError, match=r"does not hand mastered to mcpo.*Set trainer\.v1\.trainer_mode=recipe_sync"):
        check_methods(composed("mcpo", {"trainer.v1.trainer_mode": "sync"}))


# -- loss -------------------------------------------------------------------------------------------------------------


def test_the_two_normalisers():
    """hkl_norm: all sequences of the mini-batch, or its mastered ones; padding rows are neither."""
    masks = [[1] * 3, [1] * 2, [1] * 4, [1] * 2, [0], [0]]
    make = lambda: with_mastered(make_loss_batch(masks=masks), [1.0, 0.0, 0.0, 0.0, 0.0, 0.0])  # noqa: E731
    rows = loss_rows(make())
    want = oracle_loss(rows[:1], "token-mean")[2]  # one sequence, mastered: both normalisers are 1
    assert hinge_alone(make(), hkl_norm="mastered")[0] == pytest.approx(want, rel=1e-9)
    assert hinge_alone(make(), hkl_norm="sequences")[0] == pytest.approx(want / 4, rel=1e-9)


@pytest.mark.parametrize("norm", ["sequences", "mastered"])
def test_with_nothing_mastered_the_term_is_zero(norm):
    batch = with_mastered(make_loss_batch(), [0.0] * 8)
    want, got = gradient(batch, vanilla()), gradient(batch, actor_loss(hkl_norm=norm, hkl_beta=1e3))
    assert got[0] == want[0] and torch.equal(got[1], want[1])


def test_mastered_sequences_are_counted_over_the_ranks():
    pieces = [torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0]), torch.tensor([0.0, 0.0])]
    for rank, piece in enumerate(pieces):
        batch = MiniBatch({"mastered": piece}, lambda value: [float(p.sum()) for p in pieces], rank, None)
        assert count_mastered(batch, MCPOConfig()) == ({}, {"mastered": 3.0})


def test_beta_scales_and_delta_is_the_dead_zone():
    make = lambda: with_mastered(make_loss_batch(log_ratio=lambda u: 0.1 * u.sign()), [1.0] * 8)  # noqa: E731
    one, five = hinge_alone(make()), hinge_alone(make(), hkl_beta=5.0)
    assert five[0] == pytest.approx(5 * one[0], rel=1e-9)
    torch.testing.assert_close(five[1], 5 * one[1], rtol=1e-9, atol=0)
    wide = hinge_alone(make(), hkl_delta=0.11)
    assert wide[0] == 0 and not wide[1].any()
    assert hinge_alone(make(), hkl_delta=0.09)[0] > 0


def test_the_aggregation_is_the_policy_gradients_and_not_the_hinges():
    make = lambda: with_mastered(make_loss_batch(), [1.0, 0.0] * 4)  # noqa: E731
    values = {}
    for mode in ("seq-mean-token-mean", "token-mean"):
        values[mode] = gradient(make(), actor_loss(mode))[1] - gradient(make(), vanilla(mode))[1]
    torch.testing.assert_close(values["token-mean"], values["seq-mean-token-mean"], rtol=1e-9, atol=1e-12)
    assert values["token-mean"].any()
    other = gradient(make(), vanilla("token-mean"))[1]
    assert not torch.allclose(other, gradient(make(), vanilla())[1])


def test_groups_without_advantage_still_count_in_the_denominators():
    """Section 6: without Dynamic Sampling the zero-advantage rows weaken the policy gradient."""
    batch = with_mastered(make_loss_batch(), [0.0] * 8)
    half = batch[[0, 1, 2, 3]]
    for row in range(4, 8):
        batch.data["advantages"][row].zero_()
    whole = gradient(batch, actor_loss())[1]
    torch.testing.assert_close(whole[: len(half.log_probs)] * 2, gradient(half, actor_loss())[1], rtol=1e-9, atol=1e-12)


def test_only_response_tokens_enter_phi():
    """Section 6. A tool token inside a mastered response drifts far; nobody minds."""
    masks = [[1, 0, 1], [1, 1]]
    calm = with_mastered(make_loss_batch(masks=masks), [1.0, 1.0])
    wild = with_mastered(make_loss_batch(masks=masks), [1.0, 1.0])
    with torch.no_grad():
        wild.response(0, wild.log_probs)[1] -= 9.0
    want, got = hinge_alone(calm), hinge_alone(wild)
    assert got[0] == want[0] and torch.equal(got[1], want[1]) and want[0] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("d", [80.0, 1e4, -80.0, -1e4])
def test_the_drift_is_clamped_before_exp(d, dtype):
    batch = with_mastered(make_loss_batch(log_ratio=lambda u: torch.full_like(u, d), dtype=dtype), [1.0] * 8)
    value, got = hinge_alone(batch, hkl_norm="mastered")
    assert value == pytest.approx(math.expm1(math.copysign(20, d)) - math.copysign(20, d), rel=1e-4)
    assert bool(torch.isfinite(got).all())


# -- metrics of the loss ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["sequences", "mastered"])
@pytest.mark.parametrize("how", [{}, {"split": Split(size=2)}, {"split": Split(size=2), "ranks": 2}], ids=str)
def test_section_11_metrics_of_the_loss(norm, how):
    """Two mini-batches with different counts, against plain loops; any split logs the same."""
    flags = [[1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]]
    drift = lambda u: torch.where(u.abs() < 0.4, u / 100, u / 2)  # noqa: E731  some inside the dead zone
    batches = [
        with_mastered(make_loss_batch(seed=seed, log_ratio=drift), mastered_) for seed, mastered_ in enumerate(flags)
    ]
    found = logged(actor_loss(hkl_norm=norm), batches, **how)
    results = [oracle_loss(loss_rows(batch), "seq-mean-token-mean", hkl_norm=norm) for batch in batches]
    drifts = [d for result in results for d in result[3]]
    active = sum(abs(d) > 0.01 for d in drifts)
    assert 0 < active < len(drifts)
    assert found["hkl/loss"] == pytest.approx(fmean(result[2] for result in results), rel=1e-5)
    assert found["hkl/active_frac"] == pytest.approx(active / len(drifts), rel=1e-5)
    assert found["hkl/drift_abs"] == pytest.approx(fmean(map(abs, drifts)), rel=1e-5)
    assert found["mcpo/mastered_rows"] == pytest.approx(fmean([3, 1]))
    assert {"actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_loss"} <= set(found)
    assert not [name for name in found if ":" in name]


def test_with_nothing_mastered_the_shares_are_left_out():
    found = logged(actor_loss(), [with_mastered(make_loss_batch(), [0.0] * 8)], split=Split(size=2))
    assert found["hkl/loss"] == 0 and found["mcpo/mastered_rows"] == 0
    assert "hkl/active_frac" not in found and "hkl/drift_abs" not in found


# -- configuration ----------------------------------------------------------------------------------------------------


def test_the_defaults_are_the_specs():
    assert METHOD.config({}) == METHOD.config(None) == MCPOConfig(**DEFAULTS)
    actor = composed("mcpo").actor_rollout_ref.actor
    assert (actor.loss_agg_mode, actor.clip_ratio_low, actor.clip_ratio_high) == ("seq-mean-token-mean", LOW, HIGH)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[(key, "nonsense") for key in ("hkl_norm", "one_update", "acc_source", "reweight")],
        *[("reweight_threshold", v) for v in (0.4, 1.1, "0.5")],
        *[("hkl_beta", v) for v in (-1, math.inf, math.nan, "1")],
        *[("hkl_delta", v) for v in (0, -0.01, 1.5, math.nan)],
        *[("ddof", v) for v in (2, -1, True)],
        *[(key, v) for key in ("r_lo", "r_hi") for v in (math.inf, math.nan)],
        ("reweight", 1),
    ],
)
def test_a_value_out_of_range_is_refused(key, value):
    with pytest.raises(ConfigError, match=rf"algorithm\.mcpo\.{key}={value!r}"):
        METHOD.config({"mcpo": {key: value}})


ONE_UPDATE = {"data.train_batch_size": 64, "actor_rollout_ref.actor.ppo_mini_batch_size": 64}


def test_spec_section_6_one_update_for_a_rollout_batch_is_refused(caplog):
    text = r"train_batch_size=64 and .*ppo_mini_batch_size=64 give one update.*algorithm\.mcpo\.one_update=warn"
    with pytest.raises(ConfigError, match=text):
        METHOD.check(composed("mcpo", ONE_UPDATE))
    with caplog.at_level(logging.WARNING, "verl_ext"):
        METHOD.check(composed("mcpo"))  # 1024 / 256
        METHOD.check(composed("mcpo", {**ONE_UPDATE, "actor_rollout_ref.actor.ppo_epochs": 2}))
        METHOD.check(composed("mcpo", {**ONE_UPDATE, "algorithm.mcpo.hkl_beta": 0.0}))
        METHOD.check(composed("mcpo", {**ONE_UPDATE, "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla"}))
        assert caplog.text == ""
        METHOD.check(composed("mcpo", {**ONE_UPDATE, "algorithm.mcpo.one_update": "warn"}))
    assert "one update per rollout batch" in caplog.text and "hinge KL of mcpo is zero" in caplog.text


def test_spec_section_6_log_probs_of_the_rollout_engine_are_refused():
    changes = {"algorithm.rollout_correction.bypass_mode": True}
    with pytest.raises(ConfigError, match=r"bypass_mode=True.*Set algorithm\.rollout_correction\.bypass_mode=False"):
        METHOD.check(composed("mcpo", changes))
    METHOD.check(composed("mcpo", {**changes, "algorithm.mcpo.hkl_beta": 0.0}))  # nothing compares them then


@pytest.mark.parametrize(
    ("key", "loss"), [(k, m) for k in ("filter_groups.enable", "use_kl_in_reward") for m in ("mcpo", "vanilla")]
)
def test_settings_that_remove_or_hide_mastered_groups_are_refused(key, loss):
    changes = {f"algorithm.{key}": True, "actor_rollout_ref.actor.policy_loss.loss_mode": loss}
    with pytest.raises(ConfigError, match=rf"algorithm\.{key}=True.*Set algorithm\.{key}=False"):
        METHOD.check(composed("mcpo", changes))


def test_reweighting_without_division_by_the_std_is_refused():
    changes = {"algorithm.norm_adv_by_std_in_grpo": False}
    with pytest.raises(ConfigError, match=r"norm_adv_by_std_in_grpo=False with algorithm\.mcpo\.reweight=True"):
        METHOD.check(composed("mcpo", changes))
    METHOD.check(composed("mcpo", {**changes, "algorithm.mcpo.reweight": False}))
    METHOD.check(composed("mcpo", {**changes, "algorithm.adv_estimator": "grpo"}))
