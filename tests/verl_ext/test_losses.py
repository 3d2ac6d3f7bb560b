"""The seam between the trainer and a policy loss that asks for more, through verl's real actor loss."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, agg_loss
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from verl_ext.losses import SCALARS_KEY, LossInputs, loss_inputs, recipe_ppo_loss

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
    value, metrics = recipe_ppo_loss(config_for("weighted"), output, data, needs=("row", "token", "p"))
    (inputs,) = weighted
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
    got, got_metrics = recipe_ppo_loss(config_for("vanilla"), output, data)
    assert torch.equal(got, want) and got_metrics.keys() == want_metrics.keys()


def test_a_missing_field_is_named_with_what_there_is(micro_batch, weighted):
    output, data = micro_batch
    with pytest.raises(KeyError, match=r"the actor loss needs 'mastered', but the batch holds \['advantages'.*'token'"):
        recipe_ppo_loss(config_for("weighted"), output, data, needs=("row", "mastered"))
    assert weighted == []


def test_outside_our_trainer_the_loss_says_what_to_set(micro_batch, weighted):
    with pytest.raises(RuntimeError, match=r"set trainer\.v1\.trainer_mode=recipe_sync"):
        ppo_loss(config_for("weighted"), *micro_batch)


def test_inputs_are_gone_afterwards_also_after_an_error(micro_batch, weighted, monkeypatch):
    output, data = micro_batch
    tu.assign_non_tensor_data(data, SCALARS_KEY, {"p": 1.0})
    recipe_ppo_loss(config_for("weighted"), output, data, needs=("row", "token", "p"))
    with pytest.raises(RuntimeError):
        loss_inputs()

    def failing(**kwargs):
        raise ArithmeticError

    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "weighted", failing)
    with pytest.raises(ArithmeticError):
        recipe_ppo_loss(config_for("weighted"), output, data, needs=("row",))
    with pytest.raises(RuntimeError):
        loss_inputs()
