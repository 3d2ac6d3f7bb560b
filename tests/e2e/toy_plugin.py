"""A method as a user would write it: an estimator that hands a field to the loss, and a loss that reads it and a
number.
"""

from __future__ import annotations

from verl_ext.losses import loss_inputs
from verl_ext.registry import AdvantageInputs, AdvantageOutput, Method, MethodConfig, register_method


def toy_advantage(inputs: AdvantageInputs, config: MethodConfig, state: dict) -> AdvantageOutput:
    state["calls"] = state.get("calls", 0) + 1
    mean, std = inputs.groups.mean_std(inputs.rewards)
    advantages = (inputs.rewards - mean[inputs.groups.index]) / (std[inputs.groups.index] + 1e-6)
    per_token = inputs.fields["entropy"] * inputs.response_mask
    return AdvantageOutput(
        advantages,
        metrics={"toy/calls": state["calls"], "toy/entropy": float(per_token.sum() / inputs.response_mask.sum())},
        loss_fields={"toy_row": inputs.rewards, "toy_token": per_token},
    )


def toy_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config=None, rollout_is_weights=None):
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla

    inputs = loss_inputs()
    row, token = inputs.fields["toy_row"], inputs.fields["toy_token"]
    assert row.shape == log_prob.shape[:1] and token.shape == log_prob.shape
    loss, metrics = compute_policy_loss_vanilla(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
    )
    metrics["toy_row_mean"] = row.float().mean().item()
    metrics["toy_token_mean"] = (token * response_mask).sum().item() / max(1.0, float(response_mask.sum()))
    metrics["toy_scalar"] = inputs.scalars["toy_scalar"]
    return loss, metrics


register_method(
    Method(
        name="toy",
        estimator=toy_advantage,
        policy_loss=toy_loss,
        needs=("entropy",),
        loss_needs=("toy_row", "toy_token", "toy_scalar"),
        step_scalars=lambda config, step, total: {"toy_scalar": step / total},
        stateful=True,
    )
)
