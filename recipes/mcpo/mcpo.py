"""MCPO: keep what is mastered, keep learning from what nearly is (arXiv 2604.16972, specs mcpo; equation numbers are
the spec's).

How it differs from GRPO: the advantages of a majority-correct prompt are divided by 2 sqrt(p (1 - p)), so that its
query weight stays at 0.5 instead of fading (estimator `mcpo`); and the loss adds a hinge-shaped KL penalty that holds
the policy where it was on the responses of prompts solved in every rollout (policy loss `mcpo`). The rest is verl's
clipped loss with a higher upper clip.

It assumes a binary notion of "correct", the trainer's own old log-probs, and at least two updates per rollout batch:
on-policy there is no drift to penalise.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from verl_ext.losses import MiniBatch, loss_inputs, record, record_share
from verl_ext.outcomes import EPS, accuracy, grpo
from verl_ext.registry import (
    AdvantageInputs,
    AdvantageOutput,
    ConfigError,
    Method,
    MethodConfig,
    refuse_collapse_filter,
    refuse_rollout_log_probs,
    updates_per_batch,
)

logger = logging.getLogger("verl_ext")
MAX_DRIFT = 20.0  # clamp of d before exp, spec section 6


@dataclass(frozen=True)
class MCPOConfig(MethodConfig):
    """Switches of `algorithm.mcpo` (spec section 4), for estimator and loss; the defaults are the spec's."""

    prefix: ClassVar[str] = "algorithm.mcpo"

    reweight: bool = True
    reweight_threshold: float = 0.5
    hkl_beta: float = 1.0
    hkl_delta: float = 0.01
    hkl_norm: str = "sequences"
    one_update: str = "refuse"
    ddof: int = 1
    r_lo: float = 0.0
    r_hi: float = 1.0
    acc_source: str = "auto"

    def __post_init__(self):
        self.choice("hkl_norm", "sequences", "mastered")
        self.choice("one_update", "refuse", "warn")
        self.choice("acc_source", "auto", "flag", "threshold")
        self.flag("reweight")
        # Below 0.5 the scale would rise above 1 on the way to p = 0.
        self.number("reweight_threshold", 0.5, 1)
        self.number("hkl_beta", 0, float("inf"), high_open=True)
        self.number("hkl_delta", 0, 1, low_open=True)
        self.ddof_and_range()


# -- advantage stage ---------------------------------------------------------------------------------------------------


def group_accuracy(inputs: AdvantageInputs, config: MCPOConfig) -> torch.Tensor:
    """(N,) p(x) of (1): share of correct among the counted rows; 0 where there is none. [paper]"""
    correct = accuracy(inputs, config.r_lo, config.r_hi, config.acc_source, config.prefix)
    return inputs.groups.sum(correct.to(inputs.rewards.dtype)) / inputs.groups.sizes.clamp(min=1)


def mastered_groups(inputs: AdvantageInputs, p: torch.Tensor) -> torch.Tensor:
    """(N,) bool: p = 1. A group of one is never mastered (spec section 4)."""
    return (p == 1) & inputs.groups.comparable


def mastered_rows(inputs: AdvantageInputs, config: MCPOConfig) -> dict[str, torch.Tensor]:
    """The field `mastered` (B,) float for the loss: 1 on every real row of a mastered group, whatever the estimator."""
    mastered = mastered_groups(inputs, group_accuracy(inputs, config))[inputs.groups.index]
    return {"mastered": (mastered & inputs.groups.real).float()}


def scale(p: torch.Tensor, threshold: float) -> torch.Tensor:
    """(N,) scale(p) of (8): 2 sqrt(p (1 - p)) above the threshold, 1 elsewhere and at p = 1. [second-hand]"""
    high = (p > threshold) & (p < 1)
    return torch.where(high, (2 * (p * (1 - p)).sqrt()).clamp(min=EPS), torch.ones_like(p))


def mcpo_advantage(inputs: AdvantageInputs, config: MCPOConfig, state: dict) -> AdvantageOutput:
    """Advantages (B,) of (8); 0 in a mastered group, whatever its rewards."""
    groups = inputs.groups
    p = group_accuracy(inputs, config)
    factor = scale(p, config.reweight_threshold) if config.reweight else None
    advantages = grpo(inputs, config.ddof, factor)
    mastered = mastered_groups(inputs, p)
    if config.reweight:  # off: verl's GRPO, bit for bit
        advantages = torch.where(mastered[groups.index], torch.zeros_like(advantages), advantages)

    use = groups.comparable
    if not bool(use.any()):
        return AdvantageOutput(advantages)
    share = lambda flags: float((flags & use).sum() / use.sum())  # noqa: E731
    weight = (p * (1 - p)).sqrt() / (1 if factor is None else factor)  # (9)
    a = advantages[groups.counted]
    metrics = {
        "mcpo/mastered_frac": share(mastered),
        "mcpo/majority_frac": share((p > 0.5) & (p < 1)),
        "mcpo/p_mean": float(p[use].mean()),
        "mcpo/query_weight": float(weight[use].mean()),
        "mcpo/adv_min": float(a.min()),
        "mcpo/adv_abs_mean": float(a.abs().mean()),
    }
    return AdvantageOutput(advantages, metrics)


# -- loss --------------------------------------------------------------------------------------------------------------


def hinge(d: torch.Tensor, delta: float) -> torch.Tensor:
    """phi(d) of (6), elementwise: k3(d) - k3(+-delta) outside the dead zone, 0 inside. [second-hand]

    d: log pi_new - log pi_old on tokens sampled from pi_old. Its slope is e^d - 1 outside.
    """
    edges = d.new_tensor([math.expm1(delta) - delta, math.expm1(-delta) + delta])  # k3(delta), k3(-delta)
    edge = torch.where(d > 0, edges[0], edges[1])
    return torch.where(d.abs() > delta, torch.expm1(d) - d - edge, 0.0)


def count_mastered(batch: MiniBatch, config: MCPOConfig) -> tuple[dict, dict[str, float]]:
    """Mastered sequences of the mini-batch, over all ranks: the normaliser of `hkl_norm=mastered`."""
    return {}, {"mastered": batch.sum(batch.field("mastered").sum())}


def mcpo_loss(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, rollout_is_weights=None
):
    """(10) as a loss: verl's `vanilla` (clip-higher through clip_ratio_high) plus beta times the hinge KL (7).

    Shapes (b, T) as verl's losses. `loss_agg_mode` is for the policy gradient; (7) is a mean over sequences.
    """
    from verl.trainer.ppo.core_algos import agg_loss, compute_policy_loss_vanilla

    inputs = loss_inputs()
    settings: MCPOConfig = inputs.settings
    loss, metrics = compute_policy_loss_vanilla(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
    )
    if settings.hkl_beta == 0:
        return loss, metrics
    rows = inputs.fields["mastered"].nonzero().squeeze(1)
    record("mcpo/mastered_rows", log_prob.new_tensor(inputs.totals["mastered"]), "max")
    if not len(rows):
        nothing = log_prob.new_zeros(())
        record("hkl/loss", nothing, "sum")
        record_share("hkl/active_frac", nothing, nothing)
        record_share("hkl/drift_abs", nothing, nothing)
        return loss, metrics
    mask = response_mask[rows].float()
    dtype = torch.promote_types(log_prob.dtype, torch.float32)
    d = (log_prob[rows].to(dtype) - old_log_prob[rows].to(dtype)).clamp(-MAX_DRIFT, MAX_DRIFT)
    total = agg_loss(hinge(d, settings.hkl_delta), mask, "seq-mean-token-mean", **config.global_batch_info)
    if settings.hkl_norm == "mastered":
        total = total * (config.global_batch_info["global_batch_size"] / max(1.0, inputs.totals["mastered"]))
    with torch.no_grad():
        drift, tokens = d.abs() * mask, mask.sum()
        record("hkl/loss", total, "sum")
        record_share("hkl/active_frac", (drift > settings.hkl_delta).sum(), tokens)
        record_share("hkl/drift_abs", drift.sum(), tokens)
    return loss + settings.hkl_beta * total, metrics


def check_run(config) -> None:
    """Refuse run settings under which the method means something else (spec sections 4 and 6)."""
    settings = MCPOConfig.from_algorithm(config.algorithm, "mcpo")
    loss = config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla")
    refuse_collapse_filter(config, "mcpo")
    if config.algorithm.adv_estimator == "mcpo" and settings.reweight:
        if not config.algorithm.get("norm_adv_by_std_in_grpo", True):
            raise ConfigError(
                "algorithm.norm_adv_by_std_in_grpo=False with algorithm.mcpo.reweight=True: the reweighting (8) is"
                " defined on advantages divided by the std. Set one of the two otherwise."
            )
    if loss != "mcpo" or settings.hkl_beta == 0:
        return
    refuse_rollout_log_probs(config, "mcpo")
    if updates_per_batch(config) < 2:
        problem = (
            f"data.train_batch_size={config.data.train_batch_size} and"
            f" actor_rollout_ref.actor.ppo_mini_batch_size={config.actor_rollout_ref.actor.ppo_mini_batch_size} give"
            " one update per rollout batch; the hinge KL of mcpo is zero then, for the policy has not moved yet. Set"
            " ppo_mini_batch_size to a quarter of train_batch_size or less, or"
            " actor_rollout_ref.actor.ppo_epochs >= 2; or algorithm.mcpo.hkl_beta=0 for the reweighting alone."
        )
        if settings.one_update == "refuse":
            raise ConfigError(f"{problem} algorithm.mcpo.one_update=warn lets it run.")
        logger.warning("%s", problem)


METHOD = Method(
    name="mcpo",
    config_class=MCPOConfig,
    needs=("acc",),
    check=check_run,
    estimator=mcpo_advantage,
    neutral={"reweight": False},
    policy_loss=mcpo_loss,
    loss_needs=("mastered",),
    row_fields=mastered_rows,
    mini_batch=count_mastered,
)
