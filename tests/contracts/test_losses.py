"""What every registered policy loss must survive, called through verl's actor loss as its engines do."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable

import pytest
import torch
from contracts.cases import (
    AGG_MODES,
    LOSSES,
    REFERENCE_LOSS,
    WHOLE,
    Case,
    Split,
    accepted,
    add_fields,
    fsdp_backward,
    gradient,
    loss_function,
    losses,
    make_loss_batch,
    prepare,
    scalars_of,
)
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, agg_loss

from verl_ext.losses import loss_inputs
from verl_ext.registry import METHODS

SPLITS = [Split(size=1), Split(size=4), Split(sizes=(1, 2, 5)), Split(sizes=(6, 1, 1)), Split(tokens=20)]


def deviation(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def compute(loss: Case, batch, agg_mode: str | None = None, **how):
    return gradient(add_fields(loss, batch), loss_function(loss, agg_mode), scalars=scalars_of(loss), **how)


def test_the_suite_covers_the_losses():
    assert {loss.name for loss in LOSSES} == {REFERENCE_LOSS} | {n for n, m in METHODS.items() if m.policy_loss}


@losses("micro-batch invariance", agg_modes=True)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_micro_batches(loss, agg_mode, split):
    batch = make_loss_batch()
    want_loss, want = compute(loss, batch, agg_mode)
    got_loss, got = compute(loss, batch, agg_mode, split=split)
    assert deviation(got, want) < 1e-7
    assert got_loss == pytest.approx(want_loss, rel=1e-7)


@losses("data-parallel invariance", agg_modes=True)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("split", [Split(size=2), Split(tokens=20)], ids=str)
def test_ranks(loss, agg_mode, ranks, split):
    batch = make_loss_batch(seed=1)
    tokens = batch.data["loss_mask"].offsets().diff().view(ranks, -1).sum(1)
    assert len(set(tokens.tolist())) > 1  # uneven
    assert (
        deviation(compute(loss, batch, agg_mode, split=split, ranks=ranks)[1], compute(loss, batch, agg_mode)[1]) < 1e-7
    )


def megatron_backward(context_parallel: int) -> Callable:
    """verl's Megatron engine without a model: its post-processing, Megatron's scaling, and the average over ranks."""
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules", reason="needs megatron-core")
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    engine = types.SimpleNamespace(
        prepare_model_outputs=lambda output, data: output,
        get_data_parallel_group=lambda: None,
        engine_config=types.SimpleNamespace(
            dynamic_context_parallel=False, context_parallel_size=context_parallel, use_remove_padding=True
        ),
        tf_config=types.SimpleNamespace(calculate_per_token_loss=False),
    )
    schedule_config = types.SimpleNamespace(timers=None, calculate_per_token_loss=False)

    def backward(loss, model_output, micro_batch, num_micro_batches, ranks):
        from verl.utils import tensordict_utils as tu

        tu.assign_non_tensor(micro_batch, num_micro_batch=num_micro_batches)
        postprocess = functools.partial(
            MegatronEngineWithLMHead.postprocess_micro_batch_func,
            engine,
            data=micro_batch,
            forward_only=False,
            loss_function=loss,
        )
        total = 0.0
        for _ in range(context_parallel):  # every context-parallel rank computes the loss on the gathered log-probs
            value, _ = schedules.forward_step_calc_loss(
                None, model_output, postprocess, schedule_config, None, False, num_micro_batches, [],
                cp_group_size=context_parallel, is_last_stage=True,
            )  # fmt: skip
            # DDP averages over data- and context-parallel ranks; the gather's backward shares out among the latter.
            value = value / (ranks * context_parallel) / context_parallel
            value.backward(retain_graph=True)
            total += float(value.detach())
        return total

    return backward


@losses("FSDP = Megatron", agg_modes=True)
@pytest.mark.parametrize(("size", "ranks", "context_parallel"), [(2, 1, 1), (1, 4, 1), (2, 2, 2)])
def test_fsdp_and_megatron_agree(loss, agg_mode, size, ranks, context_parallel):
    batch, split = make_loss_batch(), Split(size=size)
    fsdp = compute(loss, batch, agg_mode, split=split, ranks=ranks)[1]
    megatron = compute(loss, batch, agg_mode, split=split, ranks=ranks, backward=megatron_backward(context_parallel))[1]
    assert deviation(megatron, fsdp) < 1e-7


@pytest.fixture
def wrong_loss(monkeypatch):
    """The control: normalised by the micro-batch at hand, as a loss must not be."""

    def local_mean(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
        ratio = (log_prob - old_log_prob).exp()
        return -(ratio * advantages * response_mask).sum() / response_mask.sum(), {}

    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "wrong", local_mean)
    return Case("wrong")


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_the_suite_catches_a_loss_normalised_per_micro_batch(wrong_loss, engine):
    batch = make_loss_batch(seed=1)
    backward = fsdp_backward if engine == "fsdp" else megatron_backward(1)
    want = compute(wrong_loss, batch, backward=backward)[1]
    assert deviation(compute(wrong_loss, batch, split=Split(size=2), backward=backward)[1], want) > 0.5
    assert deviation(compute(wrong_loss, batch, split=WHOLE, backward=backward)[1], want) < 1e-7


def test_the_suite_catches_a_loss_that_picks_tokens_per_micro_batch(monkeypatch):
    """As verl's own kl_cov does, which ranks the tokens of the micro-batch at hand (verl#7829)."""

    def top_token(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
        values = -(log_prob - old_log_prob).exp() * advantages
        top = values.detach() >= values.detach()[response_mask].max()
        return agg_loss(values * top, response_mask, loss_agg_mode, **config.global_batch_info), {}

    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "wrong", top_token)
    batch = make_loss_batch()
    wrong = Case("wrong")
    assert deviation(compute(wrong, batch, split=Split(size=2))[1], compute(wrong, batch)[1]) > 0.1


@losses("row permutation", agg_modes=True)
def test_row_permutation(loss, agg_mode):
    batch = make_loss_batch()
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0)).tolist()
    want = compute(loss, batch, agg_mode)
    got = compute(loss, batch, agg_mode, split=Permuted(order))
    assert got[0] == pytest.approx(want[0], rel=1e-9)
    torch.testing.assert_close(got[1], want[1], rtol=1e-9, atol=1e-12)


class Permuted(Split):
    """One micro-batch whose rows stand in another order."""

    def __init__(self, order):
        super().__init__(size=len(order))
        object.__setattr__(self, "order", order)

    def __call__(self, data):
        from verl.utils import tensordict_utils as tu

        return [(tu.index_select_tensor_dict(data, self.order), self.order)]


@losses("fully masked rows", agg_modes=True)
def test_fully_masked_rows_give_no_gradient(loss, agg_mode):
    """Padding rows are such rows too. Beside others and in a micro-batch of their own, they add 0 and no more."""
    batch = make_loss_batch(masks=[[1] * 3, [1] * 5, [1], [1] * 4, [0], [0, 0, 0]])
    want_loss, want = compute(loss, batch[[0, 1, 2, 3]], agg_mode, split=Split(size=4))
    for split in (Split(size=6), Split(sizes=(4, 2)), Split(size=1)):
        got_loss, got = compute(loss, batch, agg_mode, split=split)
        assert got_loss == pytest.approx(want_loss, rel=1e-9)
        torch.testing.assert_close(got[: len(want)], want, rtol=1e-9, atol=1e-12)
        assert bool((got[len(want) :] == 0).all())


@losses("mask-0 spans", agg_modes=True)
def test_tool_tokens_inside_a_response_change_nothing(loss, agg_mode):
    compact = make_loss_batch(masks=[[1, 1, 1, 1], [1, 1], [1, 1, 1]])
    expanded = make_loss_batch(masks=[[1, 0, 0, 1, 1, 1], [1, 0, 1], [1, 1, 0, 1]], seed=5)
    # The same numbers on the action tokens.
    with torch.no_grad():
        for row in range(3):
            action = expanded.data["response_mask"][row].bool()
            expanded.response(row, expanded.log_probs)[action] = compact.response(row, compact.log_probs)
            for name in ("old_log_probs", "advantages"):
                expanded.data[name][row][action] = compact.data[name][row]
    want_loss, want = compute(loss, compact, agg_mode, split=Split(size=3))
    got_loss, got = compute(loss, expanded, agg_mode, split=Split(size=3))
    assert got_loss == pytest.approx(want_loss, rel=1e-9)
    for row in range(3):
        action = expanded.data["response_mask"][row].bool()
        torch.testing.assert_close(
            expanded.response(row, got)[action], compact.response(row, want), rtol=1e-9, atol=1e-12
        )
        assert not expanded.response(row, got)[~action].any()


@losses("gradcheck", agg_modes=True)
def test_gradcheck(loss, agg_mode):
    """In float64, away from the clip points 0.8, 1.2 and 3 of the ratio."""

    def away(u):
        return torch.where(u.abs() < 0.5, 0.05 + u.abs() / 5, 0.3 + u.abs() / 2) * u.sign()

    batch = make_loss_batch(rows=4, log_ratio=away)
    function, leaf = loss_function(loss, agg_mode), add_fields(loss, batch).log_probs
    data = batch.data
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=int(data["loss_mask"].values().sum()), global_batch_size=4)
    tu.assign_non_tensor_data(data, "recipe_scalars", scalars_of(loss))
    prepare(function, batch, [data])

    def value(log_probs):
        output = {"log_probs": torch.nested.nested_tensor_from_jagged(log_probs, batch.offsets)}
        return function(model_output=output, data=data)[0]

    assert torch.autograd.gradcheck(value, (leaf,))


@losses("extremes", agg_modes=True)
@pytest.mark.parametrize("size", [50.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_extreme_ratios_give_finite_numbers(loss, agg_mode, size, dtype):
    batch = make_loss_batch(log_ratio=lambda u: size * u.sign(), dtype=dtype)
    value, got = compute(loss, batch, agg_mode)
    assert math.isfinite(value) and bool(torch.isfinite(got).all())


@losses("bfloat16")
def test_bfloat16_log_probs_are_accepted(loss):
    batch = make_loss_batch(dtype=torch.float32)
    _, want = compute(loss, batch)
    half = make_loss_batch(dtype=torch.float32)
    half.log_probs = batch.log_probs.detach().bfloat16().requires_grad_()
    half.data["old_log_probs"] = batch.data["old_log_probs"].bfloat16()
    got_loss, got = compute(loss, half)
    # bfloat16 holds a log-prob of -5 to 0.016, hence a ratio to about 3 %.
    assert math.isfinite(got_loss)
    assert deviation(got.float(), want) < 0.3


@losses("no side effects")
def test_inputs_are_not_changed(loss):
    batch = make_loss_batch()
    kept = {k: v.values().clone() for k, v in batch.data.items() if isinstance(v, torch.Tensor) and v.is_nested}
    leaf = batch.log_probs.detach().clone()
    compute(loss, batch)
    assert torch.equal(batch.log_probs.detach(), leaf)
    for name, values in kept.items():
        assert torch.equal(batch.data[name].values(), values), name


@losses("closed form")
def test_an_aggregation_that_is_unknown_or_not_the_losss_own_is_refused(loss):
    batch = make_loss_batch()
    for mode in {"no-such-mode", *AGG_MODES} - set(accepted(loss)):
        function = loss_function(loss)
        object.__setattr__(function.config, "loss_agg_mode", mode)
        with pytest.raises(ValueError, match=mode):
            gradient(add_fields(loss, batch), function, scalars=scalars_of(loss))


@losses("on-policy")
def test_on_policy_the_gradient_is_minus_the_advantage(loss):
    """At ratio 1 every loss here is the policy gradient: -A of each token over the number of tokens, or over the
    number of responses and the response's own tokens."""
    batch = make_loss_batch(log_ratio=torch.zeros_like)
    mode = accepted(loss)[0]
    _, got = compute(loss, batch, mode)
    tokens = int(batch.data["loss_mask"].values().sum())
    for row in range(8):
        advantages = batch.data["advantages"][row]
        n = tokens if mode == "token-mean" else 8 * len(advantages)
        torch.testing.assert_close(batch.response(row, got), -advantages / n)


def test_a_loss_finds_its_fields_and_numbers_in_every_micro_batch(monkeypatch):
    """Row fields (b,), token fields (b, T) and scalars follow the rows through micro-batches and ranks."""

    def weighted(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
        inputs = loss_inputs()
        weight = inputs.fields["row"][:, None] * inputs.fields["token"] * inputs.scalars["p"]
        values = -(log_prob - old_log_prob).exp() * advantages * weight
        return agg_loss(values, response_mask, loss_agg_mode, **config.global_batch_info), {}

    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "weighted", weighted)
    batch = make_loss_batch(log_ratio=torch.zeros_like)
    batch.data["row"] = torch.arange(1.0, 9.0, dtype=torch.float64)
    lengths = batch.data["responses"].offsets().diff().tolist()
    batch.data["token"] = torch.nested.nested_tensor(
        [torch.arange(n, dtype=torch.float64) for n in lengths], layout=torch.jagged
    )
    function = loss_function(Case("weighted"), "token-mean", needs=("row", "token"))
    for how in ({}, {"split": Split(size=1)}, {"split": Split(size=2), "ranks": 2}, {"split": Split(tokens=20)}):
        _, got = gradient(batch, function, scalars={"p": 3.0}, **how)
        for row, n in enumerate(lengths):
            want = -batch.data["advantages"][row] * (row + 1) * torch.arange(n) * 3.0 / sum(lengths)
            torch.testing.assert_close(batch.response(row, got), want)
