"""The seam between the trainer and a policy loss that asks for more, through verl's real actor loss."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, agg_loss
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from verl_ext.losses import (
    MARK,
    SCALARS_KEY,
    LossInputs,
    MiniBatch,
    RecipeLoss,
    loss_inputs,
    loss_settings,
    record,
    record_share,
    recorded_metrics,
)
from verl_ext.registry import METHODS

LENGTHS = [3, 1, 2]


def config_for(name: str) -> ActorConfig:
    return ActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=PolicyLossConfig(loss_mode=name)
    )


def jagged(pieces):
    return torch.nested.nested_tensor(pieces, layout=torch.jagged)


@pytest.fixture
def micro_batch():
    """Three rows of V1's jagged layout, prompts of two tokens; (model_output, data)."""
    data = TensorDict(
        {
            "prompts": jagged([torch.ones(2, dtype=torch.long)] * 3),
            "responses": jagged([torch.ones(n, dtype=torch.long) for n in LENGTHS]),
            "response_mask": jagged([torch.ones(n, dtype=torch.long) for n in LENGTHS]),
            "old_log_probs": jagged([torch.full((n,), -1.0) for n in LENGTHS]),
            "advantages": jagged([torch.full((n,), float(i + 1)) for i, n in enumerate(LENGTHS)]),
            "row": torch.tensor([1.0, 10.0, 100.0]),
            "token": jagged([torch.arange(1.0, n + 1) for n in LENGTHS]),
        },
        batch_size=3,
    )
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=sum(LENGTHS), global_batch_size=3)
    values = torch.full((sum(LENGTHS) + 6,), -1.0, requires_grad=True)
    offsets = torch.tensor([0, *torch.tensor([n + 2 for n in LENGTHS]).cumsum(0).tolist()])
    return {"log_probs": torch.nested.nested_tensor_from_jagged(values, offsets)}, data


@pytest.fixture
def weighted(monkeypatch):
    """A loss that multiplies by a row field, a token field and a number of the step; records what it was given."""
    seen: list[LossInputs] = []

    def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
        inputs = loss_inputs()
        seen.append(inputs)
        weight = inputs.fields["row"][:, None] * inputs.fields["token"] * inputs.scalars["p"]
        values = -(log_prob - old_log_prob).exp() * advantages * weight
        return agg_loss(values, response_mask, loss_agg_mode, **config.global_batch_info), {}

    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "weighted", loss)
    return seen


def test_fields_and_scalars_reach_the_policy_loss(micro_batch, weighted):
    output, data = micro_batch
    tu.assign_non_tensor_data(data, SCALARS_KEY, {"p": 0.5, "unused": 1.0})
    value, metrics = RecipeLoss(config_for("weighted"), ("row", "token"), settings="mine")(output, data)
    (inputs,) = weighted
    assert inputs.settings == "mine" and inputs.totals == {}
    assert set(inputs.fields) == {"row", "token"} and inputs.scalars == {"p": 0.5, "unused": 1.0}
    assert inputs.fields["row"].shape == (3,) and inputs.fields["token"].tolist() == [[1, 2, 3], [1, 0, 0], [1, 2, 0]]
    want = (
        -0.5
        * sum(row * a * t for row, a, n in zip((1, 10, 100), (1, 2, 3), LENGTHS, strict=True) for t in range(1, n + 1))
        / 6
    )
    assert float(value) == pytest.approx(want)
    assert "actor/pg_loss" in metrics


def test_a_loss_that_asks_for_nothing_gets_verls_own_value(micro_batch):
    output, data = micro_batch
    want, want_metrics = ppo_loss(config_for("vanilla"), output, data)
    got, got_metrics = RecipeLoss(config_for("vanilla"))(output, data)
    assert torch.equal(got, want) and got_metrics.keys() == want_metrics.keys()


def test_a_missing_field_is_named_with_what_there_is(micro_batch, weighted):
    output, data = micro_batch
    with pytest.raises(KeyError, match=r"the actor loss needs 'mastered', but the batch holds \['advantages'.*'token'"):
        RecipeLoss(config_for("weighted"), ("row", "mastered"))(output, data)
    assert weighted == []


def test_outside_our_trainer_the_loss_says_what_to_set(micro_batch, weighted):
    with pytest.raises(RuntimeError, match=r"set trainer\.v1\.trainer_mode=recipe_sync"):
        ppo_loss(config_for("weighted"), *micro_batch)


def test_inputs_are_gone_afterwards_also_after_an_error(micro_batch, weighted, monkeypatch):
    output, data = micro_batch
    tu.assign_non_tensor_data(data, SCALARS_KEY, {"p": 1.0})
    RecipeLoss(config_for("weighted"), ("row", "token"))(output, data)
    with pytest.raises(RuntimeError):
        loss_inputs()
    assert loss_inputs(required=False) is None

    def failing(**kwargs):
        raise ArithmeticError

    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "weighted", failing)
    with pytest.raises(ArithmeticError):
        RecipeLoss(config_for("weighted"), ("row",))(output, data)
    with pytest.raises(RuntimeError):
        loss_inputs()


# -- what a loss logs -------------------------------------------------------------------------------------------------


def test_recorded_numbers_are_verls_metrics_with_their_own_aggregation(micro_batch, monkeypatch):
    def recording(log_prob, response_mask, **kwargs):
        record("toy/low", log_prob.min(), "min")
        record("toy/high", log_prob[response_mask].max(), "max")
        record("toy/total", response_mask.sum() / 10, "sum")
        record_share("toy/share", response_mask[0].sum(), response_mask.sum())
        return (log_prob * response_mask).sum(), {}

    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "weighted", recording)
    output, data = micro_batch
    _, metrics = RecipeLoss(config_for("weighted"))(output, data)
    ours = {name.removeprefix(MARK): m for name, m in metrics.items() if name.startswith(MARK)}
    assert {name: m.aggregation.value for name, m in ours.items()} == {
        "toy/low": "min", "toy/high": "max", "toy/total": "sum", "toy/share:part": "sum", "toy/share:whole": "sum",
    }  # fmt: skip
    # As verl reduces them over a mini-batch: here twice the same micro-batch.
    for metric in ours.values():
        metric.append(metric.values[0])
    reduced = {f"actor/{MARK}{name}": float(m.aggregate()) for name, m in ours.items()}
    assert recorded_metrics({**reduced, "actor/lr": 1.0}) == pytest.approx(
        {"toy/low": -1, "toy/high": -1, "toy/total": 1.2, "toy/share": 0.5, "actor/lr": 1.0}
    )


def test_outside_our_trainer_nothing_is_recorded():
    record("toy/low", torch.tensor(1.0), "min")
    record_share("toy/share", torch.tensor(1.0), torch.tensor(2.0))


def test_a_share_of_nothing_and_an_extreme_over_nothing_are_left_out():
    metrics = {f"actor/{MARK}a:part": 0.0, f"actor/{MARK}a:whole": 0.0, f"actor/{MARK}b": float("inf")}
    assert recorded_metrics(metrics) == {}


# -- the whole mini-batch ---------------------------------------------------------------------------------------------


def alone(data) -> MiniBatch:
    return MiniBatch(data, lambda value: [value], 0, lambda: None)


def test_rows_without_a_response_leave_the_denominator(micro_batch):
    _, data = micro_batch
    data["response_mask"][1][:] = 0
    RecipeLoss(config_for("vanilla")).prepare(alone(data))
    assert tu.get_non_tensor_data(data, "global_batch_size", None) == 2


def test_totals_and_fields_of_the_mini_batch_reach_the_loss(micro_batch, weighted):
    output, data = micro_batch
    tu.assign_non_tensor_data(data, SCALARS_KEY, {"p": 1.0})

    def count(batch: MiniBatch, settings):
        token = batch.field("token")
        return {"double": 2 * token, "number": batch.field("row") + settings}, {"rows": batch.sum(torch.tensor(3))}

    loss = RecipeLoss(config_for("weighted"), ("row", "token"), count, 0.5)
    loss.prepare(alone(data))
    # verl selects and pads rows on the way to a micro-batch.
    loss(output, data)
    (inputs,) = weighted
    assert inputs.totals == {"rows": 3.0}
    assert inputs.fields["double"].tolist() == [[2, 4, 6], [2, 0, 0], [2, 4, 0]]
    assert inputs.fields["number"].tolist() == [1.5, 10.5, 100.5]


def test_rows_of_all_ranks_are_padded_to_one_length():
    others = torch.tensor([[1.0, 2.0, 3.0]])
    mine = torch.tensor([[4.0], [5.0]])
    batch = MiniBatch(None, lambda value: [others, value], 1, lambda: None)
    rows, which = batch.gather(mine)
    assert rows.tolist() == [[1, 2, 3], [4, 0, 0], [5, 0, 0]] and rows[which].tolist() == [[4, 0, 0], [5, 0, 0]]
    assert MiniBatch(None, lambda value: [2.0, value], 1, lambda: None).sum(torch.tensor(3)) == 5


# -- settings of a loss -----------------------------------------------------------------------------------------------


def test_settings_are_the_workers_own_or_the_defaults():
    from recipes.holderpo.loss_config import HolderPOLossConfig

    method = METHODS["holderpo"]
    own = HolderPOLossConfig(clip_level="token")
    config = ActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=own)
    assert loss_settings(method, config) is own
    assert loss_settings(method, config_for("holderpo")) == HolderPOLossConfig(loss_mode="holderpo")
