"""A method as a user would write it, in a package of its own: an estimator that hands fields to the loss and keeps a
state, and a loss that reads the fields and a number of the step. It is verl's GRPO with extra luggage.
"""

from __future__ import annotations

from verl_ext.losses import loss_inputs, record_share
from verl_ext.outcomes import grpo
from verl_ext.registry import AdvantageInputs, AdvantageOutput, Method, MethodConfig, register_method


def toy_advantage(inputs: AdvantageInputs, config: MethodConfig, state: dict) -> AdvantageOutput:
    """Advantages (B,)."""
    advantages, mask = grpo(inputs), inputs.response_mask
    if not bool(inputs.groups.counted.any()):
        return AdvantageOutput(advantages)
    state["calls"] = state.get("calls", 0) + 1
    entropy = inputs.fields["entropy"] * mask
    use = inputs.groups.counted[:, None] * mask
    return AdvantageOutput(
        advantages,
        metrics={"toy/calls": state["calls"], "toy/entropy": float((entropy * use).sum() / use.sum())},
        loss_fields={"toy_row": inputs.rewards, "toy_token": entropy},
    )


def toy_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config=None, rollout_is_weights=None):
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla

    inputs = loss_inputs()
    row, token = inputs.fields["toy_row"], inputs.fields["toy_token"]
    assert row.shape == log_prob.shape[:1] and token.shape == log_prob.shape
    loss, metrics = compute_policy_loss_vanilla(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
    )
    rows = (response_mask.sum(1) > 0).float()
    record_share("toy/row", (row * rows).sum(), rows.sum())
    record_share("toy/token", (token * response_mask).sum(), response_mask.sum())
    metrics["toy_scalar"] = inputs.scalars["toy_scalar"]
    return loss, metrics


METHOD = Method(
    name="toy",
    needs=("entropy",),
    estimator=toy_advantage,
    stateful=True,
    provides=("toy_row", "toy_token"),
    neutral={},
    policy_loss=toy_loss,
    loss_needs=("toy_row", "toy_token"),
    step_scalars=lambda settings, step, total: {"toy_scalar": step / total},
)
register_method(METHOD)
