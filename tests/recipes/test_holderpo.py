"""HölderPO against an independent loop over plain numbers, the spec's vectors, and its reductions.

Sections and equation numbers are those of the spec (specs/holderpo.md) that recipes/holderpo/holderpo.py names.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from decimal import Decimal, localcontext
from types import SimpleNamespace

import pytest
import torch
from contracts.cases import Case, LossBatch, Split, actor_config, gradient, logged, loss_function, make_loss_batch
from contracts.test_config import composed
from hypothesis import given
from hypothesis import strategies as st
from verl.utils import tensordict_utils as tu
from verl.workers.config import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from recipes.holderpo.holderpo import METHOD, SCHEDULES, exponent, log_holder_mean, sequence_losses
from recipes.holderpo.loss_config import HolderPOLossConfig
from verl_ext.losses import SCALARS_KEY
from verl_ext.preflight import check_methods
from verl_ext.registry import ConfigError

MODE = "seq-mean-token-mean"
LEVELS = ("sequence", "token", "clamped")
EXPONENTS = [-2.0, -1.0, -0.01, -1e-7, 0.0, 1e-4, 0.04, 0.06, 1.0, 2.0, 3.0]  # of section 7's gradient check
LOSS_KEY = "actor_rollout_ref.actor.policy_loss"


def oracle(rows: list[dict], p: float, level: str = "sequence", low: float = 0.2, high: float = 0.2, cap: float = 20.0):
    """Spec (1)-(8) once more. rows: log-ratio, mask and advantage of each token, weight of each token or None.

    -> loss, gradient for each token of each row; for each row with a response its ratio, the share that the clip gates,
    and the weights W of (5) on its raw ratios.
    """

    def power_mean(values: list[float]) -> tuple[float, list[float]]:
        """log of (2), and softmax(p x) of (5); the largest term is taken out, for exp has a range."""
        top = max(p * x for x in values)
        terms = [math.exp(p * x - top) for x in values]
        total = math.fsum(terms)
        log = math.fsum(values) / len(values) if abs(p) < 1e-6 else (top + math.log(total / len(values))) / p
        return log, [term / total for term in terms]

    real = [row for row in rows if any(row["mask"])]
    loss, gradients, ratios, gates, weights = 0.0, [], [], [], []
    for row in rows:
        gradient = [0.0] * len(row["mask"])
        gradients.append(gradient)
        where = [t for t, m in enumerate(row["mask"]) if m]
        if not where:
            continue
        raw = [row["log_ratio"][t] for t in where]
        a = math.fsum(row["advantage"][t] for t in where) / len(where)
        outer = 1.0
        if row.get("weight") is not None:
            outer = math.exp(math.fsum(math.log(row["weight"][t]) for t in where) / len(where))
        x, moves = list(raw), [1.0] * len(raw)
        if level == "token":
            bound = math.log(1 + high) if a >= 0 else math.log(1 - low)
            cut = [value > bound if a >= 0 else value < bound for value in raw]
            x = [bound if c else value for c, value in zip(cut, raw, strict=True)]
            moves = [0.0 if c else 1.0 for c in cut]
        if level == "clamped":
            bound = math.log(1 + high)
            x = [min(max(value, -bound), bound) for value in raw]
            moves = [1.0 if abs(value) <= bound else 0.0 for value in raw]
        log_rho, w = power_mean(x)
        if log_rho > cap:
            log_rho, moves = cap, [0.0] * len(moves)
        rho = math.exp(log_rho)
        used, gate = rho, 0.0
        if level == "token":
            gate = sum(cut) / len(cut)
        elif a > 0 and rho > 1 + high:
            used, gate = 1 + high, 1.0
        elif a < 0 and rho < 1 - low:
            used, gate = 1 - low, 1.0
        loss -= a * used * outer / len(real)
        if level == "token" or not gate:
            for t, weight, move in zip(where, w, moves, strict=True):
                gradient[t] = -a * rho * weight * move * outer / len(real)
        ratios.append(rho)
        gates.append(gate)
        weights.append(power_mean(raw)[1])
    return loss, gradients, ratios, gates, weights


def exact_log_rho(values: list[float], p: float) -> float:
    """log of (2) with 60 digits."""
    with localcontext() as context:
        context.prec, context.Emax, context.Emin = 60, 10**9, -(10**9)
        x, q = [Decimal(v) for v in values], Decimal(p)
        if abs(p) < 1e-20:
            return float(sum(x) / len(x))
        return float((sum((q * v).exp() for v in x) / len(x)).ln() / q)


# -- helpers ----------------------------------------------------------------------------------------------------------


def fill(batch: LossBatch, log_ratios: list[list[float]] | None = None, advantages: list | None = None) -> LossBatch:
    """Set log-ratios (the old log-probs become 0, so that they are exact) and advantages, a number or one per token."""
    for row in range(len(batch.data)):
        if log_ratios is not None:
            batch.data["old_log_probs"][row].zero_()
            with torch.no_grad():
                response = batch.response(row, batch.log_probs)
                response.copy_(torch.tensor(log_ratios[row], dtype=response.dtype))
        if advantages is not None:
            target = batch.data["advantages"][row]
            target.copy_(torch.as_tensor(advantages[row], dtype=target.dtype).expand_as(target))
    return batch


def one_row(log_ratio: list[float], advantage: float = 1.0, dtype: torch.dtype = torch.float64) -> LossBatch:
    return fill(make_loss_batch(masks=[[1] * len(log_ratio)], dtype=dtype), [log_ratio], [advantage])


def loss_rows(batch: LossBatch) -> list[dict]:
    """A mini-batch as plain numbers."""
    rows = []
    for row in range(len(batch.data)):
        old, new = batch.data["old_log_probs"][row].double(), batch.response(row, batch.log_probs.detach()).double()
        weight = batch.data["rollout_is_weights"][row].tolist() if "rollout_is_weights" in batch.data else None
        rows.append(
            {
                "log_ratio": (new - old).tolist(),
                "mask": batch.data["response_mask"][row].tolist(),
                "advantage": batch.data["advantages"][row].tolist(),
                "weight": weight,
            }
        )
    return rows


def holder(p: float, low: float = 0.2, high: float = 0.2, **settings):
    """The loss at a constant exponent, as verl's engines call it."""
    function = loss_function(Case("holderpo", {"holder_p_schedule": "constant", "holder_p": p, **settings}))
    return clipped(function, low, high)


def clipped(function, low: float, high: float):
    object.__setattr__(function.config, "clip_ratio_low", low)
    object.__setattr__(function.config, "clip_ratio_high", high)
    return function


def verls(name: str, low: float = 0.2, high: float = 0.2):
    return clipped(loss_function(Case(name), MODE), low, high)


UNCLIPPED = {"low": 0.999999, "high": 1e9}


def by_row(batch: LossBatch, values: torch.Tensor) -> list[list[float]]:
    return [batch.response(row, values).tolist() for row in range(len(batch.data))]


def flat(rows) -> list[float]:
    return [value for row in rows for value in row]


def log_rho(values: list[float], p: float, dtype: torch.dtype = torch.float64, small_p: float = 0.05) -> float:
    row = torch.tensor([values], dtype=dtype)
    return float(log_holder_mean(row, torch.ones_like(row, dtype=torch.bool), p, small_p))


# -- oracle -----------------------------------------------------------------------------------------------------------


@st.composite
def problems(draw):
    masks = draw(st.lists(st.lists(st.sampled_from([1, 1, 1, 0]), min_size=1, max_size=7), min_size=1, max_size=6))
    masks[0][0] = 1
    masks += [[0]] * draw(st.integers(0, 2))  # padding rows
    size = draw(st.sampled_from([0.01, 0.3, 1.5, 6.0]))
    settings = {
        "level": draw(st.sampled_from(LEVELS)),
        "low": draw(st.sampled_from([0.2, 0.05])),
        "high": draw(st.sampled_from([0.2, 0.28])),
        "cap": draw(st.sampled_from([20.0, 2.0])),
    }
    p = draw(st.sampled_from([*EXPONENTS, -30.0]) | st.floats(-4, 4))
    return masks, draw(st.integers(0, 1000)), size, p, settings, draw(st.booleans()), draw(st.booleans())


@given(problems())
def test_loss_and_gradient_agree_with_an_independent_loop(problem):
    masks, seed, size, p, settings, weighted, by_token = problem
    # The plain loop divides by p, and loses digits where p is small.
    double = 1e-6 if 0 < abs(p) < 1e-3 else 1e-8
    for dtype, tolerance in ((torch.float64, double), (torch.float32, 2e-5)):
        batch = make_loss_batch(seed=seed, masks=masks, log_ratio=lambda u: size * u, dtype=dtype)
        rng = torch.Generator().manual_seed(seed)
        if by_token:  # A of a row is the masked mean of its tokens'
            fill(batch, advantages=[torch.randn(len(m), generator=rng) for m in masks])
        if weighted:
            weights = [0.5 + torch.rand(len(m), generator=rng).to(dtype) for m in masks]
            batch.data["rollout_is_weights"] = torch.nested.nested_tensor(weights, layout=torch.jagged)
        function = holder(
            p, settings["low"], settings["high"], clip_level=settings["level"], log_rho_cap=settings["cap"]
        )
        value, got = gradient(batch, function)
        want_value, want, *_ = oracle(loss_rows(batch), p, **settings)
        # In float32 a ratio of e^6 has an error of its own, in proportion.
        assert value == pytest.approx(want_value, rel=10 * tolerance, abs=tolerance)
        scale = max(map(abs, flat(want)), default=0.0)
        torch.testing.assert_close(
            torch.tensor(flat(by_row(batch, got)), dtype=torch.float64),
            torch.tensor(flat(want), dtype=torch.float64),
            rtol=10 * tolerance,
            atol=tolerance * max(scale, 1.0) if dtype == torch.float32 else tolerance * scale / 10 + 1e-15,
        )
        # Nothing outside the responses.
        assert float(got.abs().sum()) == pytest.approx(sum(map(abs, flat(by_row(batch, got)))), rel=1e-5)


# -- section 7: the table of ratios -----------------------------------------------------------------------------------

RATIOS = [0.5, 0.9, 1.0, 1.1, 2.0]
TABLE = [
    # p, rho, sequence loss at A = +1 and -1, token-clip loss at A = +1 and -1, rho of the clamped variant
    (-2, 0.826982252, (-0.826982, 0.826982), (-0.802937, 1.012894), 0.981009),
    (-1, 0.905763952, (-0.905764, 0.905764), (-0.854185, 1.048174), 0.989406),
    (0, 0.997991952, (-0.997992, 0.997992), (-0.901067, 1.096355), 0.997992),
    (1, 1.100000000, (-1.100000, 1.100000), (-0.940000, 1.160000), 1.006667),
    (2, 1.205819224, (-1.200000, 1.205819), (-0.970567, 1.237740), 1.015327),
    (3, 1.307842144, (-1.200000, 1.307842), (-0.994166, 1.322755), 1.023872),
]
DELTAS = [math.log(r) for r in RATIOS]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("p", "rho", "sequence", "token", "clamped"), TABLE)
def test_spec_section_7_ratios(p, rho, sequence, token, clamped, dtype):
    assert math.exp(log_rho(DELTAS, p, dtype)) == pytest.approx(rho, abs=2e-9 if dtype == torch.float64 else 2e-6)
    value = lambda a, level: gradient(one_row(DELTAS, a, dtype), holder(p, clip_level=level))[0]  # noqa: E731
    assert [value(a, "sequence") for a in (1, -1)] == pytest.approx(sequence, abs=2e-6)
    assert [value(a, "token") for a in (1, -1)] == pytest.approx(token, abs=2e-6)
    assert [value(a, "clamped") for a in (1, -1)] == pytest.approx([-clamped, clamped], abs=2e-6)


@pytest.mark.parametrize(
    ("p", "weights"),
    [
        (2, [0.034388, 0.111417, 0.137552, 0.166437, 0.550206]),
        (-2, [0.547120, 0.168864, 0.136780, 0.113041, 0.034195]),
    ],
)
def test_spec_section_7_weights(p, weights):
    """W of (5): the gradient of log rho."""
    row = torch.tensor([DELTAS], dtype=torch.float64, requires_grad=True)
    log_holder_mean(row, torch.ones_like(row, dtype=torch.bool), p).sum().backward()
    assert row.grad[0].tolist() == pytest.approx(weights, abs=2e-6)
    # And through the loss: -A rho W.
    batch = one_row(DELTAS, -1.0)
    _, got = gradient(batch, holder(p))
    assert batch.response(0, got).tolist() == pytest.approx(
        [math.exp(log_rho(DELTAS, p)) * w for w in weights], abs=3e-6
    )


# -- section 7: reductions and invariances ----------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.2, 3e-4])
def test_spec_section_7_p_0_is_verls_gspo(clip):
    """Loss and gradient of verl's own gspo with the same clip, which bites on both sides here."""
    batch = make_loss_batch(rows=16, log_ratio=lambda u: u)
    want, got = gradient(batch, verls("gspo", clip, clip)), gradient(batch, holder(0.0, clip, clip))
    assert got[0] == pytest.approx(want[0], rel=1e-12)
    torch.testing.assert_close(got[1], want[1], rtol=1e-12, atol=1e-15)
    gated = [gate for gate in oracle(loss_rows(batch), 0.0, low=clip, high=clip)[3]]
    assert 0 < sum(gated) < len(gated)
    assert not torch.allclose(gradient(batch, holder(2.0, clip, clip))[1], want[1])


def test_spec_section_7_p_1_without_the_clip_is_the_arithmetic_mean():
    """Equal to seq-mean-token-mean GRPO without clip: vanilla, whose clip does not bite here."""
    batch = make_loss_batch(log_ratio=lambda u: u / 6)
    want, got = gradient(batch, verls("vanilla")), gradient(batch, holder(1.0))
    assert got[0] == pytest.approx(want[0], rel=1e-10)
    torch.testing.assert_close(got[1], want[1], rtol=1e-10, atol=1e-14)
    # Section 10: with the clip the two differ, for it acts on the mean.
    batch = make_loss_batch()
    assert not torch.allclose(gradient(batch, holder(1.0))[1], gradient(batch, verls("vanilla"))[1])


def test_spec_section_7_token_p_1_is_grpo():
    """verl's vanilla with seq-mean-token-mean; ratios below 3, where its dual clip starts."""
    for low, high in ((0.2, 0.2), (0.1, 0.28)):
        batch = make_loss_batch(rows=16, log_ratio=lambda u: u)
        want = gradient(batch, verls("vanilla", low, high))
        got = gradient(batch, holder(1.0, low, high, clip_level="token"))
        assert got[0] == pytest.approx(want[0], rel=1e-10)
        torch.testing.assert_close(got[1], want[1], rtol=1e-10, atol=1e-14)
        assert (want[1] == 0).sum() > batch.data["prompts"].values().numel()  # some tokens are clipped


@pytest.mark.parametrize("p", EXPONENTS)
def test_spec_section_7_gradient_without_clip(p):
    """-A rho softmax(p Delta) / N."""
    batch = make_loss_batch(rows=6)
    _, got = gradient(batch, holder(p, **UNCLIPPED))
    for row, numbers in enumerate(loss_rows(batch)):
        d, a = numbers["log_ratio"], numbers["advantage"][0]
        rho = math.exp(exact_log_rho(d, p))
        total = math.fsum(math.exp(p * x) for x in d)
        want = [-a * rho * math.exp(p * x) / total / 6 for x in d]
        assert batch.response(row, got).tolist() == pytest.approx(want, rel=1e-8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("p", [-2.0, -0.01, 0.0, 0.01, 1.0, 2.0])
@pytest.mark.parametrize("size", [50.0, 80.0, 1e4])
@pytest.mark.parametrize("level", LEVELS)
def test_spec_section_7_extremes_are_finite(level, size, p, dtype):
    """One token far up, one far down, all of them: the direct form of the power mean gives NaN here."""
    rows = [[size, 0.0, 0.1], [-size, 0.0, 0.1], [size, -size], [size] * 3, [-size] * 3]
    for a in (1.0, -1.0):
        batch = fill(make_loss_batch(masks=[[1] * len(row) for row in rows], dtype=dtype), rows, [a] * 5)
        value, got = gradient(batch, holder(p, clip_level=level))
        assert math.isfinite(value) and bool(torch.isfinite(got).all())
        if size <= 80:
            want = oracle(loss_rows(batch), p, level)
            assert value == pytest.approx(want[0], rel=1e-4)


@pytest.mark.parametrize("how", [{"split": Split(size=1)}, {"split": Split(sizes=(1, 5))}, {"ranks": 2}], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_spec_section_7_micro_batches_sum_to_the_batch(level, how):
    """Padding rows stand in some of them and count in no denominator."""
    masks = [[1] * 3, [1], [1, 0, 1, 1], [0], [1] * 5, [0, 0]]
    batch = make_loss_batch(masks=masks)
    want, got = gradient(batch, holder(-2.0, clip_level=level)), gradient(batch, holder(-2.0, clip_level=level), **how)
    assert got[0] == pytest.approx(want[0], rel=1e-10)
    torch.testing.assert_close(got[1], want[1], rtol=1e-10, atol=1e-15)
    assert want[0] == pytest.approx(oracle(loss_rows(batch), -2.0, level)[0], rel=1e-9)


@pytest.mark.parametrize("level", LEVELS)
def test_spec_section_7_at_ratio_1_the_gradient_is_the_same_for_all_p(level):
    """Section 6, the first mini-batch of every round."""
    batch = make_loss_batch(log_ratio=torch.zeros_like)
    _, want = gradient(batch, verls("gspo"))
    for p in (*EXPONENTS, -30.0):
        torch.testing.assert_close(gradient(batch, holder(p, clip_level=level))[1], want, rtol=1e-12, atol=1e-16)


@given(
    st.lists(st.floats(-5, 5), min_size=1, max_size=8),
    st.lists(st.floats(-10, 10) | st.sampled_from(EXPONENTS), min_size=2, max_size=5),
)
def test_spec_section_7_rho_rises_with_p_and_lies_between_the_ratios(deltas, exponents):
    found = [log_rho(deltas, p) for p in sorted(exponents)]
    slack = 1e-9
    assert all(low <= high + slack for low, high in itertools.pairwise(found))
    assert all(min(deltas) - slack <= value <= max(deltas) + slack for value in found)


def test_rho_rises_strictly_where_the_ratios_differ():
    found = [log_rho(DELTAS, p) for p in (-2, -1, -0.04, -1e-5, 0, 1e-5, 0.04, 0.06, 1, 2)]
    assert all(low < high for low, high in itertools.pairwise(found))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("p", [-2.0, 0.0, 0.01, 2.0])
def test_spec_section_7_a_row_with_an_empty_mask_changes_nothing(level, p):
    batch = make_loss_batch(masks=[[1] * 3, [1] * 2, [1] * 4, [0], [0, 0, 0]])
    want_value, want = gradient(batch[[0, 1, 2]], holder(p, clip_level=level))
    got_value, got = gradient(batch, holder(p, clip_level=level))
    assert got_value == pytest.approx(want_value, rel=1e-12)
    torch.testing.assert_close(got[: len(want)], want, rtol=1e-12, atol=0)
    assert not got[len(want) :].any()


# -- section 7: schedules ---------------------------------------------------------------------------------------------


def settings_of(**settings) -> HolderPOLossConfig:
    return HolderPOLossConfig(**settings)


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        ("linear_dec", [2, 1, 0, -1, -2]),
        ("quad_dec", [2, 1.75, 1, -0.25, -2]),
        ("cubic_dec", [2, 0.25, 0, -0.25, -2]),
        ("cos", [2, 1.414, 0, -1.414, -2]),
    ],
)
def test_spec_section_7_schedules(schedule, values):
    settings = settings_of(holder_p_schedule=schedule, holder_p_schedule_steps=400)
    assert [exponent(settings, step, 7) for step in (0, 100, 200, 300, 400)] == pytest.approx(values, abs=5e-4)
    assert exponent(settings, 10_000, 7) == values[-1] == exponent(settings, 401, 7)


def test_spec_section_7_linear_dec_over_500_rounds():
    """Round 1 is not the start: oat counts from 1. Without `holder_p_schedule_steps` the training's length counts."""
    for settings, total in ((settings_of(holder_p_schedule_steps=500), 3), (settings_of(), 500)):
        found = [exponent(settings, step, total) for step in (1, 250, 500, 501, 2000)]
        assert found == pytest.approx([1.992, 0, -2, -2, -2], abs=1e-12)


@given(st.sampled_from(sorted(SCHEDULES)), st.floats(-3, 3), st.floats(0, 4), st.floats(0.5, 4), st.integers(0, 700))
def test_formulas_of_11(schedule, low, spread, k, step):
    high = low + spread
    settings = settings_of(
        holder_p_schedule=schedule, holder_p_min=low, holder_p_max=high, holder_p_power=k, holder_p_schedule_steps=500
    )
    s = min(1.0, step / 500)
    mid, amp = (low + high) / 2, (high - low) / 2
    want = {
        "linear": low + (high - low) * s, "linear_dec": high - (high - low) * s,
        "quad": low + (high - low) * s**k, "quad_dec": high - (high - low) * s**k,
        "cubic": mid + amp * (2 * s - 1) ** 3, "cubic_dec": mid - amp * (2 * s - 1) ** 3,
        "sin": mid - amp * math.cos(math.pi * s), "cos": mid + amp * math.cos(math.pi * s),
    }[schedule]  # fmt: skip
    assert exponent(settings, step, 9) == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_which_schedules_rise(schedule):
    """Section 6: sin ascends, cos descends. Equal ends are a constant."""
    settings = settings_of(holder_p_schedule=schedule)
    values = [exponent(settings, step, 20) for step in range(21)]
    rises = schedule in ("linear", "quad", "cubic", "sin")
    assert sorted(values, reverse=not rises) == values and abs(values[-1] - values[0]) == 4
    flat_ = settings_of(holder_p_schedule=schedule, holder_p_min=1.5, holder_p_max=1.5)
    assert {exponent(flat_, step, 20) for step in range(21)} == {1.5}


def test_constant():
    settings = settings_of(holder_p_schedule="constant", holder_p=-0.75)
    assert {exponent(settings, step, 9) for step in (0, 1, 5, 9, 99)} == {-0.75}


def test_p_after_a_resume_is_the_same():
    """A pure function of the step: no call changes the next one, in any order."""
    settings = settings_of(holder_p_schedule="cubic_dec")
    first = {step: METHOD.step_scalars(settings, step, 40) for step in range(1, 41)}
    again = {step: METHOD.step_scalars(settings_of(holder_p_schedule="cubic_dec"), step, 40) for step in (31, 7, 40)}
    assert all(first[step] == value for step, value in again.items())
    assert set(first[1]) == {"p"}


class Updates:
    """verl's half of the actor update, so that ours can be seen alone: what reaches the workers, and their metrics."""

    def _update_actor(self, batch, metrics):
        metrics.update({"actor/recipe:holder/rho_min": 0.5, "actor/pg_loss": 1.0})
        return batch


@pytest.mark.parametrize("step", [1, 31, 40, 41])
def test_the_trainer_hands_p_to_the_workers_and_logs_it(step):
    """Step 31 is the first one after a resume at 30: nothing was counted before it."""
    from verl_ext.trainer import RecipeTrainerMixin

    class Trainer(RecipeTrainerMixin, Updates):
        base_mode = "sync"

        def __init__(self):
            self.loss_method, self.loss_config = METHOD, METHOD.config({})
            self.actor_config = actor_config(Case("holderpo"), MODE)
            self.global_steps, self.total_training_steps = step, 40

    batch, metrics = SimpleNamespace(extra_info={}), {}
    assert Trainer()._update_actor(batch, metrics) is batch
    p = 2 - 4 * min(step / 40, 1)
    assert batch.extra_info[SCALARS_KEY] == {"p": pytest.approx(p, abs=1e-12)}
    assert metrics == {"holder/p": pytest.approx(p, abs=1e-12), "holder/rho_min": 0.5, "actor/pg_loss": 1.0}


# -- the power mean ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [1e-7, -1e-7, 1e-4, 1e-3, -0.008, 0.03, 0.0499, 0.05, -0.06])
@pytest.mark.parametrize("sigma", [0.05, 1.0])
def test_near_p_0_no_digits_are_lost(p, sigma):
    """Section 3 (13): n = 3000, sigma 0.05, where log-sum-exp in float32 is off by as much as the value."""
    deltas = (sigma * torch.randn(3000, generator=torch.Generator().manual_seed(0))).tolist()
    plain = torch.tensor(deltas, dtype=torch.float64)
    want = float((p * plain).exp().mean().log() / p) if abs(p) > 1e-5 else float(plain.mean() + p * plain.var() / 2)
    assert log_rho(deltas, p) == pytest.approx(want, abs=1e-9)
    # In float32 the centred form keeps 1e-6; at 0.05 log-sum-exp takes over with 1e-5.
    assert log_rho(deltas, p, torch.float32) == pytest.approx(want, abs=2e-6 if abs(p) < 0.05 else 2e-5)
    if abs(p) <= 1e-3:  # the control
        assert abs(log_rho(deltas, p, torch.float32, small_p=0.0) - want) > 2e-5


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=6), st.floats(-5, 5) | st.sampled_from(EXPONENTS))
def test_the_power_mean_is_exact(deltas, p):
    assert log_rho(deltas, p) == pytest.approx(exact_log_rho(deltas, p), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("small_p", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("p", [-0.5, 0.0, 0.01, 0.5, 2.0])
def test_the_threshold_changes_the_form_and_not_the_value(small_p, p):
    """Also 0, which switches the centred form off: p = 0, where the schedules pass, stays the geometric mean."""
    assert log_rho(DELTAS, p, small_p=small_p) == pytest.approx(exact_log_rho(DELTAS, p), rel=1e-9)
    batch = one_row(DELTAS)
    want, got = gradient(batch, holder(p)), gradient(batch, holder(p, small_p=small_p))
    assert got[0] == pytest.approx(want[0], rel=1e-9)
    torch.testing.assert_close(got[1], want[1], rtol=1e-9, atol=0)


def test_thm_1_and_lemma_2():
    """Entropy of W peaks at p = 0; W moves to the largest ratio for p -> inf, to the smallest one for p -> -inf."""

    def weights(p):
        row = torch.tensor([DELTAS], dtype=torch.float64, requires_grad=True)
        log_holder_mean(row, torch.ones_like(row, dtype=torch.bool), p).sum().backward()
        return row.grad[0]

    entropy = [float(torch.special.entr(weights(p)).sum()) for p in (-4, -1, -0.01, 0, 0.01, 1, 4)]
    assert entropy == sorted(entropy[:4]) + sorted(entropy[4:], reverse=True)
    assert entropy[3] == pytest.approx(math.log(5))
    assert float(weights(60)[4]) > 0.999 and float(weights(-60)[0]) > 0.999


# -- clipping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rho", "advantage", "gated"), [(1.3, 1, True), (1.3, -1, False), (0.7, 1, False), (0.7, -1, True), (1.1, 1, False)]
)
def test_the_whole_sequence_is_gated(rho, advantage, gated):
    """I_i of (6)."""
    batch = one_row([math.log(rho) + x for x in (-0.01, 0.0, 0.01)], advantage)
    value, got = gradient(batch, holder(2.0))
    assert bool((batch.response(0, got) == 0).all()) == gated
    edge = 1.2 if rho > 1 else 0.8
    assert value == pytest.approx(-advantage * (edge if gated else rho), rel=1e-3)


def test_the_clip_bounds_one_side_only_and_the_cap_bounds_the_other():
    """Section 6: A < 0 and rho >> 1 is unbounded, there is no dual clip; `log_rho_cap` caps log rho."""
    batch = one_row([5.0, 5.0], -1.0)
    assert gradient(batch, holder(1.0))[0] == pytest.approx(math.exp(5))
    value, got = gradient(batch, holder(1.0, log_rho_cap=3.0))
    assert value == pytest.approx(math.exp(3)) and not got.any()
    assert gradient(one_row([50.0], -1.0), holder(1.0))[0] == pytest.approx(math.exp(20))


def test_clip_low_and_high_are_verls_keys():
    up, down = one_row([math.log(1.5)], 1.0), one_row([math.log(0.5)], -1.0)
    for low, high in ((0.2, 0.2), (0.1, 0.3)):
        assert gradient(up, holder(1.0, low, high))[0] == pytest.approx(-(1 + high))
        assert gradient(down, holder(1.0, low, high))[0] == pytest.approx(1 - low)
    function = clipped(holder(1.0), None, None)
    object.__setattr__(function.config, "clip_ratio", 0.4)
    assert gradient(up, function)[0] == pytest.approx(-1.4)


def test_the_three_levels_put_the_clip_in_three_places():
    log_ratio = torch.tensor([DELTAS], dtype=torch.float64)
    mask = torch.ones_like(log_ratio, dtype=torch.bool)
    shares = {}
    for level in LEVELS:
        settings = settings_of(clip_level=level)
        loss, log_rho_, gated = sequence_losses(
            log_ratio, torch.ones(1, dtype=torch.float64), mask, 2.0, 0.2, 0.2, settings
        )
        assert loss.shape == log_rho_.shape == gated.shape == (1,)
        shares[level] = float(gated)
    assert shares == {"sequence": 1.0, "token": pytest.approx(0.2), "clamped": 0.0}


def test_a_response_weighs_the_same_whatever_its_length():
    """(3): a plain mean over sequences. Dividing by tokens is another method (section 6)."""
    short, long = one_row([0.1], 1.0), fill(make_loss_batch(masks=[[1], [1] * 9]), [[0.1], [0.1] * 9], [1.0, 1.0])
    assert gradient(long, holder(1.0))[0] == pytest.approx(gradient(short, holder(1.0))[0])
    _, got = gradient(long, holder(1.0))
    sums = [sum(row) for row in by_row(long, got)]
    assert sums[0] == pytest.approx(sums[1])


def test_weights_of_a_rollout_correction_become_one_for_each_response():
    """Section 4 [inferred]: the geometric mean over the response, padding and tool tokens aside."""
    batch = make_loss_batch(masks=[[1, 1, 1, 1], [1, 0, 1], [1]], log_ratio=lambda u: u / 10)
    plain = gradient(batch, holder(1.0))[1]
    weights = [[0.5, 1.0, 2.0, 0.25], [0.5, 100.0, 0.5], [1.5]]
    batch.data["rollout_is_weights"] = torch.nested.nested_tensor(
        [torch.tensor(w, dtype=torch.float64) for w in weights], layout=torch.jagged
    )
    value, got = gradient(batch, holder(1.0))
    assert math.isfinite(value)
    for row, factor in enumerate((0.25**0.25, 0.5, 1.5)):
        torch.testing.assert_close(batch.response(row, got), factor * batch.response(row, plain), rtol=1e-6, atol=0)
    batch.data["rollout_is_weights"][2].zero_()
    assert not batch.response(2, gradient(batch, holder(1.0))[1]).any()


# -- metrics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("p", [-2.0, 0.0, 2.0])
@pytest.mark.parametrize("how", [{}, {"split": Split(size=2)}, {"split": Split(size=2), "ranks": 2}], ids=str)
def test_section_11_metrics_of_the_loss(level, p, how):
    """Two mini-batches, with padding rows in one of them, against plain loops; any split logs the same."""
    masks = [[[1] * 3, [1], [1, 0, 1], [1] * 4, [1] * 2, [1] * 5, [1], [1] * 2]]
    masks.append([[1] * 2, [1] * 6, [0], [1, 1, 0, 1], [1], [0, 0], [0], [1] * 3])
    batches = [make_loss_batch(seed=seed, masks=m, log_ratio=lambda u: u) for seed, m in enumerate(masks)]
    found = logged(holder(p, clip_level=level), batches, **how)
    results = [oracle(loss_rows(batch), p, level) for batch in batches]
    rho, gates, weights = ([value for result in results for value in result[i]] for i in (2, 3, 4))
    deltas = [
        d
        for batch in batches
        for row in loss_rows(batch)
        for d, m in zip(row["log_ratio"], row["mask"], strict=True)
        if m
    ]
    near = lambda value: pytest.approx(value, rel=1e-5, abs=1e-6)  # noqa: E731
    want = {
        "holder/rho_mean": near(sum(rho) / len(rho)),
        "holder/rho_min": near(min(rho)),
        "holder/rho_max": near(max(rho)),
        "holder/clip_frac": near(sum(gates) / len(gates)),
        "holder/delta_min": near(min(deltas)),
        "holder/delta_max": near(max(deltas)),
        "holder/hhi": near(sum(w * w for row in weights for w in row) / len(weights)),
        "holder/w_entropy": near(-sum(w * math.log(w) for row in weights for w in row) / len(weights)),
        # Over the micro-batches and the mini-batches' mean; as everything summed, the mean over ranks.
        "holder/empty_rows": near(3 / 2 / how.get("ranks", 1)),
    }
    assert {name: value for name, value in found.items() if name.startswith("holder/")} == want
    assert {"actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_loss"} <= set(found)


def test_verls_own_metrics():
    batch = make_loss_batch()
    found = logged(holder(1.0), [batch])
    _, _, _, gates, _ = oracle(loss_rows(batch), 1.0)
    deltas = flat(row["log_ratio"] for row in loss_rows(batch))
    assert found["actor/pg_clipfrac"] == pytest.approx(sum(gates) / len(gates), rel=1e-6)
    assert found["actor/ppo_kl"] == pytest.approx(-sum(deltas) / len(deltas), rel=1e-6)


# -- where p comes from -----------------------------------------------------------------------------------------------


def stock_gradient(batch: LossBatch, config) -> torch.Tensor:
    """Under a trainer that is not ours: verl's ppo_loss as it is."""
    rows = len(batch.data)
    tu.assign_non_tensor(batch.data, dp_size=1, batch_num_tokens=rows, global_batch_size=rows)
    output = {"log_probs": torch.nested.nested_tensor_from_jagged(batch.log_probs, batch.offsets)}
    value, metrics = ppo_loss(config, output, batch.data)
    assert not [name for name in metrics if "holder" in name]
    return torch.autograd.grad(value, batch.log_probs)[0]


def test_under_the_stock_trainer_a_constant_exponent_works():
    config = actor_config(Case("holderpo", {"holder_p_schedule": "constant", "holder_p": -1.5}), MODE)
    batch = make_loss_batch()
    torch.testing.assert_close(stock_gradient(batch, config), gradient(batch, holder(-1.5))[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("own_class", [True, False], ids=["HolderPOLossConfig", "PolicyLossConfig"])
def test_under_the_stock_trainer_a_schedule_says_what_to_set(own_class):
    config = actor_config(Case("holderpo"), MODE)
    if not own_class:
        object.__setattr__(config, "policy_loss", PolicyLossConfig(loss_mode="holderpo"))
    text = (
        r"set trainer\.v1\.trainer_mode=recipe_sync.*holder_p_schedule=constant and"
        r" actor_rollout_ref\.actor\.policy_loss\.holder_p=<number>"
    )
    with pytest.raises(RuntimeError, match=text):
        stock_gradient(make_loss_batch(), config)


def test_verls_own_class_of_settings_gives_the_defaults():
    """Without `_target_`, under a trainer of ours, which hands over the exponent of the step."""
    batch, function = make_loss_batch(), loss_function(Case("holderpo"))
    object.__setattr__(function.config, "policy_loss", PolicyLossConfig(loss_mode="holderpo"))
    for p in (2.0, -0.5):
        want = gradient(batch, holder(p))[1]
        assert torch.equal(gradient(batch, function, scalars={"p": p})[1], want)


def test_the_exponent_of_the_step_wins():
    batch, function = make_loss_batch(), loss_function(Case("holderpo"))
    found = [gradient(batch, function, scalars={"p": p})[1] for p in (2.0, -2.0)]
    assert not torch.allclose(*found)
    torch.testing.assert_close(found[1], gradient(batch, holder(-2.0))[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
def test_another_aggregation_is_refused(mode):
    text = rf"actor_rollout_ref\.actor\.loss_agg_mode='{mode}'.*loss_agg_mode=seq-mean-token-mean"
    with pytest.raises(ConfigError, match=text):
        gradient(make_loss_batch(), loss_function(Case("holderpo"), mode))
    with pytest.raises(ConfigError, match=text):
        METHOD.check(composed("holderpo", {"actor_rollout_ref.actor.loss_agg_mode": mode}))


# -- configuration ----------------------------------------------------------------------------------------------------


def test_the_defaults_are_the_specs():
    assert settings_of() == settings_of(
        loss_mode="holderpo", clip_level="sequence", holder_p_schedule="linear_dec", holder_p_max=2.0,
        holder_p_min=-2.0, holder_p=None, holder_p_power=2.0, holder_p_schedule_steps=None, small_p=0.05,
        log_rho_cap=20.0,
    )  # fmt: skip
    actor = composed("holderpo").actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.loss_agg_mode) == (0.2, 0.2, MODE)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[(key, "nonsense") for key in ("clip_level", "holder_p_schedule")],
        *[(key, v) for key in ("holder_p_max", "holder_p_min") for v in (math.inf, -math.inf, math.nan, "2", True)],
        *[("holder_p_power", v) for v in (0, -1, math.inf, math.nan)],
        *[("holder_p_schedule_steps", v) for v in (0, -5, 1.5, True)],
        *[("small_p", v) for v in (-0.1, 1.1, math.nan)],
        *[("log_rho_cap", v) for v in (0, -1, 81, math.nan)],
    ],
)
def test_a_value_out_of_range_is_refused(key, value):
    with pytest.raises(ConfigError, match=re.escape(f"{LOSS_KEY}.{key}={value!r}")):
        settings_of(**{key: value})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"holder_p_schedule": "constant"}, r"holder_p_schedule=constant needs the exponent: set .*\.holder_p=1"),
        ({"holder_p": 1.0}, r"holder_p=1.0 has no effect.*set .*holder_p_schedule=constant"),
        ({"holder_p_schedule": "constant", "holder_p": math.nan}, r"holder_p=nan must be a number"),
        ({"holder_p_min": 2.0, "holder_p_max": 1.0}, r"holder_p_min=2.0 is above .*holder_p_max=1.0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, text):
    with pytest.raises(ConfigError, match=rf"{LOSS_KEY}\.{text}"):
        settings_of(**settings)


def test_spec_section_6_log_probs_of_the_rollout_engine_are_refused():
    with pytest.raises(ConfigError, match=r"bypass_mode=True hands the rollout engine's log-probs to holderpo"):
        METHOD.check(composed("holderpo", {"algorithm.rollout_correction.bypass_mode": True}))


@pytest.mark.parametrize("estimator", ["ep_grpo", "gae", "reinforce_plus_plus"])
def test_an_estimator_with_an_advantage_for_each_token_is_refused(estimator):
    with pytest.raises(ConfigError, match=rf"algorithm\.adv_estimator={estimator} gives each token.*Set .* to grpo"):
        METHOD.check(composed("holderpo", {"algorithm.adv_estimator": estimator}))


@pytest.mark.parametrize("estimator", ["grpo", "avspo", "mcpo", "rloo"])
def test_any_sequence_level_estimator_is_accepted(estimator):
    check_methods(composed("holderpo", {"algorithm.adv_estimator": estimator}))


def test_spec_section_6_one_update_for_a_rollout_batch_warns(caplog):
    one = {"data.train_batch_size": 64, "actor_rollout_ref.actor.ppo_mini_batch_size": 64}
    with caplog.at_level(logging.WARNING, "verl_ext"):
        METHOD.check(composed("holderpo"))  # 1024 / 128
        METHOD.check(composed("holderpo", {**one, "actor_rollout_ref.actor.ppo_epochs": 2}))
        assert caplog.text == ""
        METHOD.check(composed("holderpo", one))
    assert "train_batch_size=64" in caplog.text and "the exponent of holderpo has no effect" in caplog.text


def test_the_stock_trainer_with_a_schedule_is_refused_and_with_a_constant_accepted():
    stock = {"trainer.v1.trainer_mode": "sync"}
    text = r"trainer_mode='sync'.*holder_p_schedule=linear_dec.*recipe_sync, or holder_p_schedule=constant"
    with pytest.raises(ConfigError, match=text):
        METHOD.check(composed("holderpo", stock))
    check_methods(
        composed("holderpo", {**stock, **{f"{LOSS_KEY}.holder_p_schedule": "constant", f"{LOSS_KEY}.holder_p": 1.0}})
    )
