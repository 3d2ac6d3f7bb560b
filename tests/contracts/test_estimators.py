"""What every registered advantage estimator must survive; see cases.py for how it is called."""

from __future__ import annotations

import dataclasses
import json
import logging
from itertools import chain

import numpy as np
import pytest
import torch
from contracts.cases import (
    ESTIMATORS,
    REFERENCE_ESTIMATOR,
    REWARD_SCALE,
    Case,
    estimators,
    make_batch,
    padding,
    random_batch,
    run,
)
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from verl_ext.acr import acr_metrics
from verl_ext.groups import make_groups
from verl_ext.registry import FIELDS, METHODS, OPTIONAL_FIELDS, ConfigError, DataError

OURS = [case for case in ESTIMATORS if case.method]
SEEDS = (0, 1, 2)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def exactly(a: torch.Tensor, b: torch.Tensor) -> None:
    assert torch.equal(a, b)


def flat(batch):
    """The same entropy and log-probs on every token, so that a token-level estimator has only the rewards to see."""
    fields = {name: v if v.dim() == 1 else 0.5 * batch.mask for name, v in batch.fields.items()}
    return dataclasses.replace(batch, fields=fields)


def metrics_close(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-6), key


def test_the_suite_covers_the_recipes():
    assert {case.name for case in ESTIMATORS} >= {REFERENCE_ESTIMATOR, "avspo"}
    assert {case.name for case in OURS} == {name for name, method in METHODS.items() if method.estimator}


@estimators("row permutation")
@pytest.mark.parametrize("seed", SEEDS)
def test_row_permutation(case, seed):
    batch = random_batch(seed)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    straight, permuted = run(case, batch), run(case, batch[order])
    close(permuted.advantages, straight.advantages[order])
    metrics_close(permuted.metrics, straight.metrics)
    metrics_close(permuted.state, straight.state)


@estimators("padding rows")
@pytest.mark.parametrize("where", ["end", "start"])
def test_padding_rows(case, where):
    batch = random_batch()
    extra = padding(5, batch)
    if where == "end":
        padded, real, pads = batch + extra, slice(len(batch)), slice(len(batch), None)
    else:
        padded, real, pads = extra + batch, slice(5, None), slice(5)
    plain, got = run(case, batch), run(case, padded)
    assert torch.equal(got.advantages[real], plain.advantages)
    assert not got.advantages[pads].any()
    assert got.metrics == plain.metrics
    assert got.state == plain.state


@estimators("padding rows", OURS)
def test_a_batch_of_padding_rows_leaves_no_trace(case):
    batch, state = random_batch(), {}
    run(case, batch, state)
    before = json.dumps(state)
    empty = run(case, padding(4, batch), state)
    assert not empty.advantages.any()
    assert json.dumps(state) == before


@estimators("fully masked rows")
def test_a_fully_masked_row_moves_no_sibling(case):
    batch = random_batch()
    masked = make_batch([1.0, 1.0], ["g0", "g1"])
    masked.mask.zero_()
    got = run(case, batch + masked)
    assert torch.equal(got.advantages[: len(batch)], run(case, batch).advantages)
    assert not got.advantages[len(batch) :].any()


@estimators("mask-0 spans")
def test_tool_tokens_inside_a_response_change_nothing(case):
    compact = random_batch()
    # A tool's tokens after every token: the action tokens sit in the even columns.
    expanded = compact.clone()
    spread = lambda values: torch.stack([values, torch.zeros_like(values)], dim=-1).flatten(1)  # noqa: E731
    expanded.scores, expanded.mask = spread(compact.scores), spread(compact.mask)
    expanded.fields = {k: spread(v) if v.dim() == 2 else v for k, v in compact.fields.items()}
    want, got = run(case, compact), run(case, expanded)
    # Sums over tokens are taken in another order over twice the width.
    (close if case.token_level else exactly)(got.advantages[:, ::2], want.advantages)
    assert not got.advantages[:, 1::2].any()
    metrics_close(got.metrics, want.metrics)


@estimators("groups of one")
def test_a_group_of_one_gets_nothing_and_a_warning(case, caplog):
    batch = make_batch([1, 1, 0, 0, 0, 1, 1], ["one", *["g1"] * 4, *["g2"] * 2])
    with caplog.at_level(logging.WARNING, "verl_ext"):
        got = run(case, batch)
    assert not got.advantages[0].any()
    close(got.advantages[1:], run(case, batch[range(1, 7)]).advantages)
    assert "1 of 3 groups have one response only" in caplog.text


@estimators("mean group size")
def test_less_than_two_responses_per_group_is_refused(case):
    with pytest.raises(DataError, match=r"rollout\.n >= 2"):
        run(case, make_batch([1, 0, 1, 0], ["a", "b", "c", "c"]))


@estimators("group sizes")
@pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 3, 8, 5, 16), (7,)], ids=str)
def test_groups_do_not_see_each_other(case, sizes):
    """Same collapse rate (all groups mixed), so a group's advantages are those it gets beside any others."""
    rewards = [[1.0] + [0.0] * (size - 1) for size in sizes]
    uid = [[f"g{i}"] * size for i, size in enumerate(sizes)]
    batch = make_batch(chain.from_iterable(rewards), chain.from_iterable(uid))
    if case.settings.get("scope") == "batch" or case.settings.get("stat_scope") == "batch":
        batch = flat(batch)  # statistics over the batch's tokens are what the switch is for
    together = run(case, batch).advantages
    for i in range(len(sizes)):
        rows = range(sum(sizes[:i]), sum(sizes[: i + 1]))
        one = run(case, batch[rows]).advantages
        close(together[rows], one)
        assert one.abs().amax(1).min() > 0


def sessions(batch, outputs: np.random.Generator):
    """Every row becomes a session of one to three outputs, its own the last; shuffled. -> batch, row of each."""
    of = np.repeat(np.arange(len(batch)), outputs.integers(1, 4, len(batch)))
    outputs.shuffle(of)
    last = {session: row for row, session in enumerate(of)}
    many = batch[of]
    # Earlier outputs of a session: other rewards, which must not enter.
    earlier = torch.tensor([last[s] != row for row, s in enumerate(of)])
    many.scores[earlier] = 0.25 * many.mask[earlier]
    many.final_row = torch.tensor([last[s] for s in of])
    return many, of


@estimators("several outputs per session")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_session_counts_once(case, seed):
    batch = random_batch(seed)
    many, of = sessions(batch, np.random.default_rng(seed))
    once, got = run(case, batch), run(case, many)
    close(got.advantages.abs().amax(1), once.advantages.abs().amax(1)[of])
    assert bool(((got.advantages != 0) <= (many.mask != 0)).all())
    metrics_close(got.metrics, once.metrics)


@estimators("float ties")
@pytest.mark.parametrize(("value", "size"), [(1 / 3, 8), (0.9, 7), (0.1, 7)])
def test_rewards_equal_up_to_float_noise_are_one_value(case, value, size):
    batch = make_batch(
        [value] * size + [1, 0, 0, 1], ["tied"] * size + ["mixed"] * 4, acc=[value > 0.5] * size + [1, 0, 0, 1]
    )
    tied = run(case, flat(batch)).advantages[:size, 0]
    assert float(tied.max() - tied.min()) == 0
    rewards = batch.scores.sum(-1)
    groups = make_groups(batch.uid, batch.mask)
    assert acr_metrics(groups, rewards)["acr/rate"] == 0.5


@estimators("float ties")
def test_a_small_spread_is_not_crushed(case):
    batch = make_batch([0.5, 0.50001] * 4, ["g"] * 8, acc=[0, 1] * 4)
    advantages = run(case, flat(batch)).advantages[:, 0]
    advantages = advantages - advantages.mean()
    assert torch.all(advantages[::2] < -0.3) and torch.all(advantages[1::2] > 0.3)


@estimators("reward scale", [case for case in ESTIMATORS if case.name in REWARD_SCALE])
@pytest.mark.parametrize(("a", "b"), [(2.0, -1.0), (7.0, 3.0), (0.25, 0.5)])
def test_reward_scale(case, a, b):
    batch = random_batch()
    last = batch.scores.new_zeros(batch.scores.shape).scatter_(1, (batch.mask.sum(1) - 1)[:, None], 1.0)
    mapped = batch.with_scores(a * batch.scores + b * last)
    want, got = run(case, batch), run(case, mapped, **REWARD_SCALE[case.name](a, b))
    # The epsilon under the standard deviation does not scale with it.
    torch.testing.assert_close(got.advantages, want.advantages, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.estimator and m.neutral is not None])
@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_neutral_setting_is_grpo_bit_for_bit(name, norm_by_std, seed):
    batch = random_batch(seed)
    batch = batch + padding(3, batch)
    batch, _ = sessions(batch, np.random.default_rng(seed))
    want = run(Case(REFERENCE_ESTIMATOR), batch, norm_by_std=norm_by_std)
    got = run(Case(name, dict(METHODS[name].neutral)), batch, norm_by_std=norm_by_std)
    assert torch.equal(got.advantages, want.advantages)


@estimators("extremes", [case for case in ESTIMATORS if case.name in REWARD_SCALE])
def test_large_rewards_give_finite_advantages(case):
    rewards = [-1e6, 1e6, -1e6, -1e6, *[1e6] * 4, *[-1e6] * 4]
    batch = make_batch(rewards, ["a"] * 4 + ["b"] * 4 + ["c"] * 4)
    advantages = run(case, batch, **REWARD_SCALE[case.name](2e6, -1e6)).advantages
    assert bool(torch.isfinite(advantages).all()) and float(advantages.abs().max()) < 10


@estimators("not finite")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_is_refused(case, value):
    batch = random_batch()
    batch.scores[11, 0] = value
    with pytest.raises(DataError, match=rf"token_level_rewards is not finite in row 11 \(uid {batch.uid[11]}\)"):
        run(case, batch)


@pytest.mark.parametrize("case", [c for c in OURS if c.method.needs], ids=str)
def test_a_field_that_is_not_finite_is_refused(case):
    for name in case.method.needs:
        batch = random_batch()
        batch.fields[name][11] = float("nan")
        with pytest.raises(DataError, match=rf"{name} is not finite in row 11"):
            run(case, batch)


@estimators("no side effects")
def test_inputs_are_not_changed_and_no_gradient_flows(case):
    batch = random_batch()
    batch.scores.requires_grad_()
    kept = [
        batch.scores.detach().clone(),
        batch.mask.clone(),
        {k: v.clone() for k, v in batch.fields.items()},
        batch.uid.copy(),
    ]
    got = run(case, batch)
    assert not got.advantages.requires_grad
    assert torch.equal(batch.scores, kept[0]) and torch.equal(batch.mask, kept[1]) and list(batch.uid) == list(kept[3])
    assert all(torch.equal(batch.fields[k], v) for k, v in kept[2].items())


@estimators("bfloat16")
def test_statistics_are_taken_in_float32_or_better(case):
    batch = random_batch()
    want = run(case, batch)
    got = run(case, batch.with_scores(batch.scores.bfloat16()))
    assert got.advantages.dtype == torch.float32
    close(got.advantages, want.advantages)
    assert run(case, batch.with_scores(batch.scores.double())).advantages.dtype == torch.float64


@estimators("masked tokens")
def test_tokens_outside_the_response_get_no_advantage(case):
    batch = random_batch()
    advantages = run(case, batch).advantages
    assert advantages.shape == batch.mask.shape
    assert not advantages[batch.mask == 0].any()


@estimators("resume", OURS)
def test_a_run_that_was_cut_gives_the_same_metrics(case):
    """State goes through JSON, as in the checkpoint. The cut falls after each of six steps in turn."""
    batches = [random_batch(seed) for seed in range(6)]

    def go(first, state):
        return [run(case, batches[i], state, step=i + 1).metrics for i in range(first, 6)]

    whole = go(0, {})
    for cut in range(1, 6):
        state = {}
        head = [run(case, batches[i], state, step=i + 1).metrics for i in range(cut)]
        assert head + go(cut, json.loads(json.dumps(state))) == whole
    if not case.method.stateful:
        assert state == {}


@estimators("metrics", OURS)
def test_metrics_are_plain_finite_numbers(case):
    metrics = run(case, random_batch()).metrics
    assert all(type(value) in (float, int) and np.isfinite(value) for value in metrics.values()), metrics
    assert all(key.split("/")[0] in (case.method.prefix, "acr") for key in metrics), metrics


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.estimator])
def test_a_trainer_that_is_not_ours(name, capsys):
    """Without our context: the same numbers, or an error that names what is missing and the line that fixes it."""
    method, batch = METHODS[name], random_batch()
    call = lambda: get_adv_estimator_fn(name)(  # noqa: E731
        token_level_rewards=batch.scores, response_mask=batch.mask, config={}, index=batch.uid
    )
    missing = [need for need in method.needs if need not in OPTIONAL_FIELDS]
    if missing:
        with pytest.raises(ConfigError, match=rf"{', '.join(missing)}.*trainer\.v1\.trainer_mode=recipe_sync"):
            call()
    else:
        assert torch.equal(call()[0], run(Case(name), batch).advantages)


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.estimator])
def test_no_uid_is_refused(name):
    batch = random_batch()
    with pytest.raises(DataError, match="no `uid`"):
        get_adv_estimator_fn(name)(token_level_rewards=batch.scores, response_mask=batch.mask, config={})


@pytest.mark.parametrize("name", list(METHODS))
def test_needs_are_known(name):
    assert set(METHODS[name].needs) <= set(FIELDS)
