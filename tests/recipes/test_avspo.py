"""AVSPO against an independent loop over plain numbers, the spec's vectors, and its reductions.

Sections and equation numbers are those of the spec (specs/avspo.md) that recipes/avspo/avspo.py names.
"""

from __future__ import annotations

import json
import math
import statistics

import numpy as np
import pytest
import torch
from contracts.cases import Batch, Case, make_batch, padding, random_batch, run
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from recipes.avspo.avspo import METHOD, AVSPOConfig, next_tau, virtual_count
from verl_ext import registry
from verl_ext.groups import make_groups
from verl_ext.registry import AdvantageInputs, ConfigError, DataError

DEFAULTS = {
    "virtual_values": "stratified", "r_anchor": 0.1, "alpha": 0.5, "trigger": "adaptive", "tau0": 0.5, "tau_eta": 0.01,
    "tau_min": 0.1, "tau_max": 0.9, "acr_source": "batch", "acr_ema_decay": 0.9, "tol": 1e-6, "ddof": 1, "r_lo": 0.0,
    "r_hi": 1.0, "acc_source": "auto",
}  # fmt: skip


def oracle(rows: list[tuple[str, float, bool, bool]], state: dict, norm_by_std: bool = True, **settings):
    """Spec sections 3 and 4 once more. rows: (uid, reward, correct, counts). -> advantages, K by group, fired, tau."""
    c = {**DEFAULTS, **settings}
    groups: dict[str, list[tuple[float, bool]]] = {}
    for uid, reward, correct, counts in rows:
        if counts:
            groups.setdefault(uid, []).append((reward, correct))

    # (3), on the raw rewards; groups of one stay out.
    comparable = {uid: g for uid, g in groups.items() if len(g) > 1}
    tied = {uid for uid, g in comparable.items() if max(r for r, _ in g) - min(r for r, _ in g) <= c["tol"]}
    acr = len(tied) / len(comparable)
    if c["acr_source"] == "ema":
        acr = acr if state.get("ema") is None else c["acr_ema_decay"] * state["ema"] + (1 - c["acr_ema_decay"]) * acr
        state["ema"] = acr
    tau = state.get("tau", c["tau0"])
    fire = c["trigger"] == "always" or acr > tau

    # (4)-(8)
    value, count = {}, {}
    for uid, g in comparable.items():
        rewards, virtual = [r for r, _ in g], []
        size, lo, hi = len(g), c["r_lo"], c["r_hi"]
        all_correct, all_wrong = all(a for _, a in g), not any(a for _, a in g)
        ddof = 1
        if fire and uid in tied and (all_correct or all_wrong):
            k = max(1, min(size, math.ceil(round(size * acr ** c["alpha"], 9))))
            own = statistics.fmean(rewards)
            lo, hi = (lo, own) if all_correct else (own, hi)
            top = hi if all_correct else lo + c["r_anchor"] * (hi - lo)
            if c["virtual_values"] == "stratified":
                k = 2 if all_correct and k == 1 else k
                virtual = [lo + (top - lo) * (1 - (i - 1) / k) for i in range(1, k + 1)]
            elif c["virtual_values"] == "stratified_open":
                virtual = [lo + (top - lo) * (1 - i / (k + 1)) for i in range(1, k + 1)]
            else:
                virtual = [lo if all_correct else hi] * k
            count[uid], ddof = k, c["ddof"]
        both = rewards + virtual
        mu = sum(both) / len(both)
        std = math.sqrt(sum((r - mu) ** 2 for r in both) / (len(both) - ddof))
        scale = std + 1e-6 if norm_by_std else 1.0
        value[uid] = [(r - mu) / scale for r in rewards]

    advantages, taken = [], dict.fromkeys(groups, 0)
    for uid, _, _, counts in rows:
        advantages.append(value[uid][taken[uid]] if counts and uid in value else 0.0)
        if counts:
            taken[uid] += 1

    # (10)
    j = statistics.fmean(r for g in groups.values() for r, _ in g)
    delta = j - state.get("j", j)
    if c["trigger"] == "adaptive":
        moved = tau + c["tau_eta"] * ((delta > 0) - (delta < 0)) * (acr - tau)
        state["tau"] = max(c["tau_min"], min(c["tau_max"], moved))
    state["j"] = j
    return advantages, count, fire, tau


def rows_of(batch: Batch) -> list[tuple[str, float, bool, bool]]:
    counts = (batch.mask.sum(1) > 0) & torch.tensor([not u.startswith("pad") for u in batch.uid])
    rewards, acc = batch.scores.double().sum(1).tolist(), batch.fields["acc"].bool().tolist()
    return list(zip(batch.uid, rewards, acc, counts.tolist(), strict=True))


def avspo(batch: Batch, state: dict | None = None, norm_by_std: bool = True, **settings):
    return run(Case("avspo"), batch, state, norm_by_std=norm_by_std, **settings)


def per_row(result) -> torch.Tensor:
    """(B,): a row's advantage is the same on each of its tokens."""
    return result.advantages[:, 0]


# -- oracle -----------------------------------------------------------------------------------------------------------


@st.composite
def groups(draw, lo: float, hi: float):
    """(reward, correct) of each row of a group: mixed, collapsed at an end or inside the range, or shaped."""
    size = draw(st.integers(2, 7))
    kind = draw(
        st.sampled_from(["mixed", "wrong", "correct", "wrong inside", "correct inside", "tied other", "shaped"])
    )
    inside = lo + (hi - lo) * draw(st.sampled_from([0.125, 0.25, 0.75]))
    flags = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    if kind == "shaped":
        steps = draw(st.lists(st.integers(0, 16), min_size=size, max_size=size))
        return [(lo + (hi - lo) * s / 16, f) for s, f in zip(steps, flags, strict=True)]
    if kind == "mixed":
        return [(hi if f else lo, f) for f in flags]
    if kind == "tied other":
        return [(inside, f) for f in flags]
    correct = kind.startswith("correct")
    return [(inside if "inside" in kind else hi if correct else lo, correct)] * size


@st.composite
def problems(draw):
    """Settings and three batches in a row."""
    lo, hi = draw(st.sampled_from([(0.0, 1.0), (-1.0, 1.0), (2.0, 10.0)]))
    settings = {
        "r_lo": lo,
        "r_hi": hi,
        "virtual_values": draw(st.sampled_from(["stratified", "stratified_open", "opposite"])),
        "trigger": draw(st.sampled_from(["adaptive", "fixed", "always"])),
        "acr_source": draw(st.sampled_from(["batch", "ema"])),
        "acr_ema_decay": draw(st.sampled_from([0.0, 0.5, 0.9])),
        "ddof": draw(st.sampled_from([0, 1])),
        "alpha": draw(st.sampled_from([0.25, 0.5, 1.0])),
        "r_anchor": draw(st.sampled_from([0.01, 0.1, 1.0])),
        "tau0": draw(st.sampled_from([0.15, 0.4, 0.5, 0.85])),
        "tau_eta": draw(st.sampled_from([0.01, 0.7])),
    }
    batches = []
    for step in range(3):
        rewards, acc, uid = [], [], []
        for number, group in enumerate(draw(st.lists(groups(lo, hi), min_size=2, max_size=6))):
            rewards += [r for r, _ in group]
            acc += [f for _, f in group]
            uid += [f"g{number}"] * len(group)
        if draw(st.booleans()) and len(uid) + 1 >= 2 * (len(set(uid)) + 1):
            rewards, acc, uid = [*rewards, hi], [*acc, True], [*uid, "alone"]
        batch = make_batch(rewards, uid, acc, seed=step)
        batch.scores = torch.zeros(batch.mask.shape, dtype=torch.float64)
        batch.scores[:, 0] = torch.tensor(rewards, dtype=torch.float64)
        if draw(st.booleans()):
            masked = batch[[0]]
            masked.mask.zero_()
            batch = batch + masked
        batch = batch + padding(draw(st.integers(0, 3)), batch)
        order = draw(st.permutations(range(len(batch))))
        batches.append(batch[list(order)])
    return settings, draw(st.booleans()), batches


@given(problems())
def test_agrees_with_an_independent_loop(problem):
    settings, norm_by_std, batches = problem
    state, mine = {}, {}
    for batch in batches:
        tau_before = state.get("tau", settings["tau0"])
        got = avspo(batch, state, norm_by_std, **settings)
        want, count, fire, tau = oracle(rows_of(batch), mine, norm_by_std, **settings)
        torch.testing.assert_close(
            per_row(got)[batch.mask[:, 0] > 0],
            torch.tensor(want, dtype=torch.float64)[batch.mask[:, 0] > 0],
            rtol=1e-8,
            atol=1e-9,
        )
        assert got.metrics["avspo/fire"] == fire
        assert got.metrics["avspo/tau"] == tau == tau_before
        assert got.metrics["avspo/injected_groups"] == len(count)
        assert got.metrics["avspo/k"] == pytest.approx(statistics.fmean(count.values()) if count else 0)
        assert state["reward_mean"] == pytest.approx(mine["j"], rel=1e-12)
        assert state["tau"] == pytest.approx(mine.get("tau", settings["tau0"]), rel=1e-12)
        if settings["acr_source"] == "ema":
            assert state["acr_ema"] == pytest.approx(mine["ema"], rel=1e-12)
            assert got.metrics["acr/ema"] == state["acr_ema"]


@given(problems())
def test_float32_agrees_with_the_loop(problem):
    settings, _, batches = problem
    batch = batches[0]
    want, *_ = oracle(rows_of(batch), {}, **settings)
    got = per_row(avspo(batch.with_scores(batch.scores.float()), **settings))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.tensor(want) * (batch.mask[:, 0] > 0), rtol=2e-4, atol=2e-5)


# -- vectors of the spec ----------------------------------------------------------------------------------------------

TABLE = {
    ("stratified", "wrong", 0): [-0.3536, -0.4685, -0.5523, -0.6202, -0.6776, -0.7276, -0.7718, -0.8115],
    ("stratified", "correct", 0): [0.3333, 0.3333, 0.4423, 0.5222, 0.5872, 0.6425, 0.6908, 0.7338],  # K = 1: the guard
    ("stratified_open", "either", 0): [0.3536, 0.4685, 0.5523, 0.6202, 0.6776, 0.7276, 0.7718, 0.8115],
    ("opposite", "either", 0): [0.3536, 0.5000, 0.6124, 0.7071, 0.7906, 0.8660, 0.9354, 1.0000],
    ("stratified", "wrong", 1): [-0.3333, -0.4445, -0.5266, -0.5938, -0.6510, -0.7011, -0.7457, -0.7857],
    ("stratified", "correct", 1): [0.3162, 0.3162, 0.4217, 0.5000, 0.5642, 0.6192, 0.6674, 0.7105],
    ("stratified_open", "either", 1): [0.3333, 0.4445, 0.5266, 0.5938, 0.6510, 0.7011, 0.7457, 0.7857],
    ("opposite", "either", 1): [0.3333, 0.4743, 0.5839, 0.6770, 0.7596, 0.8345, 0.9037, 0.9682],
}
VECTORS = [
    (form, side, ddof, k, abs(values[k - 1]) * (1 if side == "correct" else -1))
    for (form, kind, ddof), values in TABLE.items()
    for side in (["wrong", "correct"] if kind == "either" else [kind])
    for k in range(1, 9)
]


def one_collapsed(side: str, size: int, groups: int = 32) -> Batch:
    """One collapsed group of `size` and mixed pairs: ACR = 1 / groups. The collapsed group comes first."""
    pairs = groups - 1
    uid = ["c"] * size + [f"m{i // 2}" for i in range(2 * pairs)]
    return make_batch([float(side == "correct")] * size + [0.0, 1.0] * pairs, uid)


def alpha_for(k: int, size: int, acr: float) -> float:
    """An alpha for which (4) gives k: size * acr^alpha in the middle of (k - 1, k]."""
    return math.log((k - 0.5) / size) / math.log(acr)


@pytest.mark.parametrize(("form", "side", "ddof", "k", "want"), VECTORS)
def test_spec_section_7_advantages(form, side, ddof, k, want):
    settings = {"virtual_values": form, "ddof": ddof, "alpha": alpha_for(k, 8, 1 / 32), "trigger": "always"}
    got = avspo(one_collapsed(side, 8), **settings)
    assert got.metrics["avspo/k"] == (2 if form == "stratified" and side == "correct" and k == 1 else k)
    assert got.metrics["avspo/injected_groups"] == 1
    # The table has eps -> 0; at r_anchor = 0.1 eps = 1e-6 moves the fifth digit.
    assert per_row(got)[:8].tolist() == pytest.approx([want] * 8, abs=1e-4)
    assert got.metrics[f"avspo/adv_{side}"] == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize(
    ("acr", "k"), [(0.1, 3), (0.15, 4), (0.2, 4), (0.3, 5), (0.4, 6), (0.5, 6), (0.6, 7), (0.8, 8), (1, 8)]
)
def test_spec_section_7_number_of_virtual_rewards(acr, k):
    assert virtual_count(8, acr, 0.5) == k


@pytest.mark.parametrize(("delta", "tau"), [(0.2, 0.498), (-0.2, 0.502), (0.0, 0.5)])
def test_spec_section_7_threshold(delta, tau):
    assert next_tau(0.5, 0.3, delta, AVSPOConfig()) == pytest.approx(tau, abs=1e-12)


@pytest.mark.parametrize(("collapsed", "tau"), [([1, 1, 1], 0.498), ([0, 0, 1], 0.502), ([1, 0, 1], 0.5)])
def test_spec_section_7_threshold_over_two_steps(collapsed, tau):
    """ACR 0.3 in both steps; the mean reward rises, falls or stays."""

    def step(collapsed):
        rewards = [float(c) for c in collapsed for _ in range(2)] + [0, 1] * 7
        return make_batch(rewards, [f"g{i // 2}" for i in range(20)])

    state = {}
    first = avspo(step([0, 1, 1]), state)
    assert state["tau"] == 0.5 and first.metrics["avspo/delta_j"] == 0
    second = avspo(step(collapsed), state)
    assert second.metrics["avspo/tau"] == 0.5  # the new one counts from the next step
    assert second.metrics["avspo/delta_j"] == pytest.approx((sum(collapsed) - 2) / 10)
    assert state["tau"] == pytest.approx(tau, abs=1e-12)


@pytest.mark.parametrize(("size", "want"), [(4, 0.447), (8, 0.333), (16, 0.243)])
@pytest.mark.parametrize("side", ["wrong", "correct"])
def test_spec_section_7_released_code(size, want, side):
    settings = {"virtual_values": "opposite", "trigger": "always", "alpha": 1.0}
    got = avspo(one_collapsed(side, size, groups=16), **settings)
    assert got.metrics["avspo/k"] == 1
    sign = 1 if side == "correct" else -1
    assert per_row(got)[:size].tolist() == pytest.approx([sign / math.sqrt(size + 1)] * size, abs=2e-6 * size)
    assert abs(float(per_row(got)[0])) == pytest.approx(want, abs=5e-4)


@pytest.mark.parametrize(("size", "border"), [(2, 1 / 4), (3, 1 / 9), (4, 1 / 16), (8, 1 / 64)])
def test_spec_section_6_borders_of_a_single_virtual_reward(size, border):
    assert virtual_count(size, border, 0.5) == 1
    assert virtual_count(size, border / 2, 0.5) == 1
    assert virtual_count(size, border * 1.01, 0.5) == 2


def test_spec_section_6_border_in_a_batch():
    """Three responses, one of nine groups collapsed: ACR is 1/9 exactly; with one of eight, K is 2."""
    assert avspo(one_collapsed("wrong", 3, groups=9), trigger="always").metrics["avspo/k"] == 1
    assert avspo(one_collapsed("wrong", 3, groups=8), trigger="always").metrics["avspo/k"] == 2


@pytest.mark.parametrize(("size", "acr", "alpha", "k"), [(25, 7 / 25, 1.0, 7), (35, 9 / 49, 0.5, 15)])
def test_float_noise_does_not_add_a_virtual_reward(size, acr, alpha, k):
    assert size * acr**alpha > k  # in floating point; exactly, they are equal
    assert virtual_count(size, acr, alpha) == k


@given(st.integers(1, 64), st.integers(0, 64), st.sampled_from([0.1, 0.3, 0.5, 1.0]))
def test_the_number_of_virtual_rewards_stays_within_bounds_and_grows_with_acr(size, collapsed, alpha):
    acr = collapsed / 64
    k = virtual_count(size, acr, alpha)
    assert 1 <= k <= size
    assert k <= virtual_count(size, min(1.0, acr + 1 / 64), alpha)
    exact = size * acr**alpha
    assert k == max(1, min(size, math.ceil(exact))) or abs(exact - round(exact)) < 1e-9


# -- reductions and invariances, spec section 7 -----------------------------------------------------------------------


@pytest.mark.parametrize("form", ["stratified", "stratified_open", "opposite"])
@pytest.mark.parametrize("side", ["wrong", "correct"])
@pytest.mark.parametrize(("size", "k"), [(size, k) for size in (2, 3, 8) for k in range(1, size + 1)])
def test_bound_with_population_std(form, side, size, k):
    settings = {"virtual_values": form, "ddof": 0, "trigger": "always", "alpha": alpha_for(k, size, 1 / 64)}
    got = avspo(one_collapsed(side, size, groups=64), **settings)
    used, value = got.metrics["avspo/k"], abs(float(per_row(got)[0]))
    assert 0 < value <= math.sqrt(used / size) + 1e-6
    if form == "opposite":
        assert value == pytest.approx(math.sqrt(used / size), rel=1e-4)


def test_no_collapsed_group_is_grpo_bit_for_bit():
    batch = make_batch([0, 1, 1, 0, 0, 1, 0.25, 0.5, 0.125], [*"aaa", *"bbb", *"ccc"], acc=[0, 1, 1, 0, 0, 1, 0, 1, 0])
    for norm in (True, False):
        want = run(Case("grpo"), batch, norm_by_std=norm).advantages
        for trigger in ("adaptive", "fixed", "always"):
            assert torch.equal(avspo(batch, norm_by_std=norm, trigger=trigger).advantages, want)


@pytest.mark.parametrize("size", [2, 3, 5, 8, 16, 33])
def test_real_valued_rewards_are_grpo_bit_for_bit(size):
    rng = torch.Generator().manual_seed(size)
    batch = make_batch(torch.rand(size * 40, generator=rng).tolist(), [f"g{i % 40}" for i in range(size * 40)])
    assert torch.equal(avspo(batch).advantages, run(Case("grpo"), batch).advantages)


@pytest.mark.parametrize("form", ["stratified", "stratified_open", "opposite"])
def test_groups_that_are_not_collapsed_never_change(form):
    for seed in range(5):
        batch = random_batch(seed)
        want, got = run(Case("grpo"), batch).advantages, avspo(batch, trigger="always", virtual_values=form).advantages
        rewards = batch.scores.sum(1)
        for uid in set(batch.uid):
            rows = torch.tensor([u == uid for u in batch.uid])
            if rewards[rows].max() > rewards[rows].min():
                assert torch.equal(got[rows], want[rows])
            else:
                values = got[rows][:, 0]
                assert len(set(values.tolist())) == 1
                assert float(values[0]) * (1 if rewards[rows][0] > 0.5 else -1) > 0.1


@pytest.mark.parametrize("form", ["stratified", "stratified_open", "opposite"])
@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize(("reward", "correct"), [(0.1, False), (0.3, False), (0.9, False), (0.1, True), (0.7, True)])
def test_the_sign_follows_correctness_also_inside_the_range(form, norm_by_std, reward, correct):
    """A format bonus for a wrong answer, a length penalty on a right one: wrong is pushed down, right is pushed up."""
    batch = make_batch([reward] * 4 + [0, 1], [*"aaaa", *"bb"], acc=[correct] * 4 + [0, 1])
    got = per_row(avspo(batch, norm_by_std=norm_by_std, trigger="always", virtual_values=form))[:4]
    assert bool((got > 0).all() if correct else (got < 0).all())


def test_a_tie_of_mixed_correctness_counts_but_gets_nothing():
    batch = make_batch([0.5] * 4 + [0, 0, 1, 1], [*"aaaa", *"bb", *"cc"], acc=[1, 0, 1, 0, 0, 0, 1, 1])
    got = avspo(batch, trigger="always")
    assert not per_row(got)[:4].any()
    assert got.metrics["avspo/injected_groups"] == 2
    assert bool((per_row(got)[4:].abs() > 0.3).all())
    assert got.metrics["avspo/k"] == 2  # ACR = 1: the tie counts


def test_float_noise_is_a_tie_and_one_value():
    batch = make_batch([1.0, 1.0 - 1e-7, 1.0, 1.0, 0.0, 1.0], [*"aaaa", *"bb"], acc=[1, 1, 1, 1, 0, 1])
    got = per_row(avspo(batch, trigger="always"))[:4]
    assert len(set(got.tolist())) == 1 and got[0] > 0.3


@pytest.mark.parametrize(("tol", "injected"), [(1e-6, 0), (1e-3, 1)])
def test_tol_says_what_a_tie_is(tol, injected):
    batch = make_batch([0.0, 1e-4, 0.0, 1.0], [*"aa", *"bb"], acc=[0, 0, 0, 1])
    assert avspo(batch, trigger="always", tol=tol).metrics["avspo/injected_groups"] == injected


def test_rewards_of_minus_one_and_one_equal_zero_and_one():
    batch = random_batch()
    last = torch.zeros_like(batch.scores).scatter_(1, (batch.mask.sum(1) - 1)[:, None], 1.0)
    mapped = batch.with_scores(2 * batch.scores - last)
    want = avspo(batch, trigger="always")
    got = avspo(mapped, trigger="always", r_lo=-1.0, r_hi=1.0)
    torch.testing.assert_close(got.advantages, want.advantages, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("anchor", [0.1, 0.5])
def test_without_division_by_std_the_anchor_is_the_scale(anchor):
    batch = one_collapsed("wrong", 8)
    settings = {"trigger": "always", "alpha": alpha_for(1, 8, 1 / 32), "r_anchor": anchor}
    assert float(per_row(avspo(batch, norm_by_std=False, **settings))[0]) == pytest.approx(-anchor / 9, rel=1e-5)
    # With it, the anchor cancels but for epsilon.
    assert float(per_row(avspo(batch, **settings))[0]) == pytest.approx(-1 / 3, rel=1e-4)


def test_the_trigger():
    """fixed and adaptive fire above the threshold, not at it; always does so whatever it is."""
    batch = make_batch([0, 0, 1, 1, 0, 1, 0, 1], [*"aabbccdd"])  # ACR 0.5
    fires = lambda **settings: avspo(batch, **settings).metrics["avspo/fire"]  # noqa: E731
    assert [fires(trigger="fixed", tau0=tau) for tau in (0.49, 0.5, 0.51)] == [1, 0, 0]
    assert [fires(trigger="adaptive", tau0=tau) for tau in (0.49, 0.5, 0.51)] == [1, 0, 0]
    assert fires(trigger="always", tau0=1.0) == 1


def test_groups_of_one_stay_out_of_the_rate():
    batch = make_batch([0, 0, 0, 0, 1, 1], ["a", "a", "a", "b", "b", "alone"])
    got = avspo(batch, trigger="fixed", tau0=0.4)
    assert got.metrics["avspo/fire"] == 1  # ACR 1/2, not 1/3 nor 2/3
    assert avspo(batch, trigger="fixed", tau0=0.5).metrics["avspo/fire"] == 0
    assert float(per_row(got)[5]) == 0


# -- state ------------------------------------------------------------------------------------------------------------


def test_the_first_step_has_no_delta_and_leaves_tau():
    state = {}
    first = avspo(random_batch(), state, tau_eta=1.0)
    assert first.metrics["avspo/delta_j"] == 0
    assert state["tau"] == 0.5 and state["steps"] == 1


def test_a_step_changes_the_state_exactly_once():
    batches = [random_batch(seed) for seed in range(4)]
    state, tau, j = {}, 0.5, None
    for number, batch in enumerate(batches, 1):
        metrics = avspo(batch, state, tau_eta=0.3).metrics
        now = float(batch.scores.sum(1).double().mean())
        assert metrics["avspo/tau"] == pytest.approx(tau) and metrics["avspo/reward_mean"] == pytest.approx(now)
        acr = 3 / 7  # random_batch: groups 1, 3 and 5 of 7
        sign = 0 if j is None else (now > j) - (now < j)
        tau, j = min(max(tau + 0.3 * sign * (acr - tau), 0.1), 0.9), now
        assert state["steps"] == number and state["tau"] == pytest.approx(tau)


@pytest.mark.parametrize("settings", [{}, {"acr_source": "ema"}], ids=str)
@pytest.mark.parametrize("fault", ["range", "accuracy"])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_step_that_raises_leaves_the_state(settings, fault, steps):
    state = {}
    for _ in range(steps):
        avspo(random_batch(), state, **settings)
    before = json.dumps(state)
    batch = random_batch(1)
    if fault == "range":
        batch.scores[0, 0] = 5.0
    else:
        batch.fields["acc"][0] = 0.5
    with pytest.raises(DataError):
        avspo(batch, state, **settings)
    assert json.dumps(state) == before


def test_a_saved_state_reproduces_tau_and_delta():
    state = {}
    avspo(random_batch(0), state)
    avspo(random_batch(1), state)
    copy = json.loads(json.dumps(state))
    one, two = avspo(random_batch(2), state), avspo(random_batch(2), copy)
    assert one.metrics == two.metrics and state == copy
    assert one.metrics["avspo/delta_j"] != 0


def test_the_running_rate():
    """acr_source=ema: first the batch's rate, then decay * old + (1 - decay) * new; trigger and K see it."""
    tied = make_batch([0, 0, 1, 1], [*"aabb"])
    mixed = make_batch([0, 1, 0, 1], [*"aabb"])
    state = {}
    rates = [avspo(b, state, acr_source="ema", acr_ema_decay=0.75).metrics["acr/ema"] for b in (tied, mixed, tied)]
    assert rates == pytest.approx([1.0, 0.75, 0.8125])
    # Batch rate 1/2, running rate 3/4 * 0 + 1/4 * 1/2 = 1/8: neither fires above 0.2 nor needs more than 2 of 4.
    half = make_batch([0, 0, 0, 0, 0, 1], [*"aaaabb"])
    state = {}
    avspo(mixed, state, acr_source="ema", acr_ema_decay=0.75, trigger="fixed", tau0=0.2)
    quiet = avspo(half, dict(state), acr_source="ema", acr_ema_decay=0.75, trigger="fixed", tau0=0.2)
    assert quiet.metrics["avspo/fire"] == 0
    loud = avspo(half, dict(state), acr_source="ema", acr_ema_decay=0.75, trigger="always")
    assert loud.metrics["avspo/k"] == math.ceil(4 * 0.125**0.5)


def test_tau_stays_within_its_bounds():
    config = AVSPOConfig(tau_eta=1.0)
    assert next_tau(0.5, 0.0, 1.0, config) == 0.1
    assert next_tau(0.5, 1.0, 1.0, config) == 0.9
    # The formula, not the paper's prose: with falling reward and ACR below tau, tau rises.
    assert next_tau(0.5, 0.2, -1.0, AVSPOConfig(tau_eta=0.1)) == pytest.approx(0.53)


def test_fire_rate_counts_steps():
    state = {}
    tied, mixed = make_batch([0, 0, 1, 1], [*"aabb"]), make_batch([0, 1, 0, 1], [*"aabb"])
    rates = [avspo(b, state).metrics["avspo/fire_rate"] for b in (tied, mixed, mixed, tied)]
    assert rates == pytest.approx([1, 1 / 2, 1 / 3, 1 / 2])


def test_under_another_trainer_the_state_is_told_of_once(monkeypatch, capsys):
    monkeypatch.setattr(registry, "_PROCESS_STATE", {})
    call = get_adv_estimator_fn("avspo")
    for seed in range(3):
        batch = random_batch(seed)
        call(token_level_rewards=batch.scores, response_mask=batch.mask, config={}, index=batch.uid)
    told = capsys.readouterr().out
    assert told.count("avspo keeps a state from step to step") == 1
    assert "trainer.v1.trainer_mode=recipe_sync" in told
    assert registry._PROCESS_STATE["avspo"]["steps"] == 3


# -- configuration and data -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[(key, "nonsense") for key in ("virtual_values", "trigger", "acr_source", "acc_source")],
        *[("r_anchor", v) for v in (0, -0.1, 1.1)],
        *[("alpha", v) for v in (0, -1, 1.5)],
        *[(key, v) for key in ("tau0", "tau_min", "tau_max", "tau_eta") for v in (-0.1, 1.1)],
        *[("acr_ema_decay", v) for v in (-0.1, 1)],
        *[("tol", v) for v in (-1e-9, math.inf)],
        *[("ddof", v) for v in (2, -1)],
        *[(key, v) for key in ("r_lo", "r_hi") for v in (math.inf, -math.inf)],
        *[(f, math.nan) for f in ("r_anchor", "alpha", "tau0", "tau_eta", "tol", "r_lo", "r_hi", "acr_ema_decay")],
        *[(f, "0.5") for f in ("r_anchor", "alpha", "tau0", "tol", "r_lo", "ddof")],
    ],
)
def test_a_value_out_of_range_is_refused(key, value):
    with pytest.raises(ConfigError, match=rf"algorithm\.avspo\.{key}={value!r}"):
        METHOD.config({"avspo": {key: value}})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tau_min": 0.6, "tau_max": 0.4}, r"algorithm\.avspo\.tau_min=0.6 is above algorithm\.avspo\.tau_max=0.4"),
        ({"tau0": 0.95}, r"algorithm\.avspo\.tau0=0.95 lies outside \[tau_min, tau_max\] = \[0.1, 0.9\]"),
        ({"r_lo": 1.0, "r_hi": 1.0}, r"algorithm\.avspo\.r_lo=1.0 must be below algorithm\.avspo\.r_hi=1.0"),
        ({"alhpa": 0.5}, r"algorithm\.avspo\.alhpa is unknown; the keys are acc_source, .*alpha"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, text):
    with pytest.raises(ConfigError, match=text):
        METHOD.config({"avspo": settings})


def test_the_defaults_are_the_specs():
    assert METHOD.config({}) == METHOD.config(None) == AVSPOConfig(**DEFAULTS)


@pytest.mark.parametrize(
    ("run_settings", "text"),
    [
        ({"use_kl_in_reward": True}, r"algorithm\.use_kl_in_reward=True.*Set algorithm\.use_kl_in_reward=False"),
        (
            {"filter_groups": {"enable": True}},
            r"algorithm\.filter_groups\.enable=True.*Set algorithm\.filter_groups\.enable=False",
        ),
    ],
)
def test_run_settings_that_defeat_the_method_are_refused(run_settings, text):
    with pytest.raises(ConfigError, match=text):
        METHOD.check(OmegaConf.create({"algorithm": run_settings}))
    METHOD.check(OmegaConf.create({"algorithm": {"filter_groups": {"enable": False}, "use_kl_in_reward": False}}))
    METHOD.check(OmegaConf.create({"algorithm": {}}))


@pytest.mark.parametrize("value", [-0.5, 1.5, 1e6])
def test_a_reward_out_of_range_is_refused(value):
    batch = make_batch([0, 1, value, 1], [*"aabb"], acc=[0, 1, 0, 1])
    with pytest.raises(
        DataError,
        match=r"reward .* in row 2 lies outside .*\[0.0, 1.0\].*Set algorithm\.avspo\.r_lo and algorithm\.avspo\.r_hi",
    ):
        avspo(batch)


def test_a_reward_out_of_range_on_a_padding_row_is_nobodys_business():
    batch = random_batch()
    extra = padding(2, batch)
    extra.scores[0, 0], extra.fields["acc"][0] = -7.0, 0.5
    assert torch.equal(avspo(batch + extra).advantages[: len(batch)], avspo(batch).advantages)


def without_acc(batch: Batch, **settings):
    """As under a trainer that does not hand the flag over."""
    return get_adv_estimator_fn("avspo")(
        token_level_rewards=batch.scores, response_mask=batch.mask, config={"avspo": settings}, index=batch.uid
    )[0]


def test_without_a_flag_a_reward_that_is_not_binary_is_refused():
    batch = make_batch([0, 1, 0.25, 1], [*"aabb"])
    with pytest.raises(DataError) as error:
        without_acc(batch)
    for part in (
        "reward 0.25 in row 2",
        "r_lo=0.0",
        "r_hi=1.0",
        "`acc`",
        "recipe_sync",
        "algorithm.avspo.acc_source=threshold",
    ):
        assert part in str(error.value)
    assert bool(torch.isfinite(without_acc(batch, acc_source="threshold")).all())


def test_without_a_flag_a_binary_reward_is_the_flag(monkeypatch):
    monkeypatch.setattr(registry, "_PROCESS_STATE", {})
    batch = random_batch()
    assert torch.equal(without_acc(batch, trigger="always"), avspo(batch, trigger="always").advantages)


def test_a_required_flag_that_is_missing_is_refused():
    with pytest.raises(DataError, match=r"algorithm\.avspo\.acc_source=flag.*recipe_sync"):
        without_acc(random_batch(), acc_source="flag")


@pytest.mark.parametrize("flag", [0.5, -1.0, 2.0])
def test_a_flag_other_than_0_or_1_is_refused(flag):
    batch = random_batch()
    batch.fields["acc"][3] = flag
    with pytest.raises(DataError, match=rf"`acc` must be 0 or 1, but is {flag} in row 3. Fix the reward function"):
        avspo(batch)
    assert avspo(batch, acc_source="threshold").metrics  # the flag is not read


def test_the_flag_wins_over_the_reward_and_threshold_over_the_flag():
    batch = make_batch([0.0] * 4 + [0, 1], [*"aaaabb"], acc=[1] * 4 + [0, 1])  # correct, but no reward
    assert avspo(batch, trigger="always").metrics["avspo/adv_wrong"] == 0
    assert avspo(batch, trigger="always", acc_source="threshold").metrics["avspo/adv_wrong"] < -0.3


def test_a_fixed_trigger_takes_tau0_and_not_what_an_adaptive_run_left():
    """A run resumed with trigger=fixed compares with its own tau0 (spec section 4: `ACR > tau0 without updates`)."""
    mask = torch.ones(4, 1)
    groups = make_groups(np.array(["a", "a", "b", "b"], dtype=object), mask)
    inputs = AdvantageInputs(torch.tensor([[0.0], [0.0], [1.0], [0.0]]), mask, groups)
    state = {"tau": 0.8, "reward_mean": 0.1}
    out = METHOD.estimator(inputs, AVSPOConfig(trigger="fixed", tau0=0.3), state)
    assert out.metrics["avspo/fire"] == 1 and out.metrics["avspo/tau"] == 0.3
