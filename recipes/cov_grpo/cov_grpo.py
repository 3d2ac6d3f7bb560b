"""Covariance-aware GRPO: Gaussian-kernel weights for the advantages (arXiv 2605.11538, specs cov_grpo; equation numbers
are the spec's).

How it differs from GRPO: the advantage of each token is multiplied by a weight in which the token's covariance between
log-prob and advantage counts: tokens far from zero in either direction are damped, and the weights of a group average
to one. Ratio, clip and KL term stay verl's.

It assumes the trainer's own old log-probs. The weights are constants for the optimiser.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from verl_ext.groups import Groups
from verl_ext.losses import MiniBatch, loss_inputs
from verl_ext.outcomes import grpo
from verl_ext.registry import (
    METHODS,
    AdvantageInputs,
    AdvantageOutput,
    ConfigError,
    Method,
    MethodConfig,
    refuse_rollout_log_probs,
)

TAIL = 1e-4  # spec section 11: the 0.01 % most extreme tokens of each sign


@dataclass(frozen=True)
class CovGRPOConfig(MethodConfig):
    """Switches of `algorithm.cov_grpo` (spec section 4); the defaults are the spec's."""

    prefix: ClassVar[str] = "algorithm.cov_grpo"

    scope: str = "group"
    logp: str = "old"
    normalise: bool = True
    ddof: int = 1
    sigma_floor: float = 1e-8

    def __post_init__(self):
        self.choice("scope", "group", "batch", "microbatch")
        self.choice("logp", "old", "current")
        self.flag("normalise")
        self.ddof_and_range()
        self.number("sigma_floor", 0, math.inf, high_open=True)

    @property
    def on_the_driver(self) -> bool:
        """Are the weights part of the advantages? Otherwise the policy loss `cov_grpo` computes them."""
        return self.scope != "microbatch" and self.logp == "old"


class Weights(NamedTuple):
    """For n groups.

    covariance: (n, G, T) c of (3), 0 outside the response. kernel: (n, G, T) w of (4) over its largest value `top`
    (n,), so that it cannot underflow as a whole; 0 outside the response. inverse: (n,) 1 / sigma, 0 at the floor.
    factor: (n,) what `kernel` is multiplied with to give the weights: N / sum(kernel) of (5), `top` without (5).
    floored: number of groups without a spread.
    """

    covariance: torch.Tensor
    kernel: torch.Tensor
    top: torch.Tensor
    inverse: torch.Tensor
    factor: torch.Tensor
    floored: torch.Tensor


def kernel_weights(
    log_probs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, counted: torch.Tensor, config: CovGRPOConfig
) -> Weights:
    """Equations (3)-(5) for n groups of equal size at once. [second-hand; means over tokens: inferred]

    Args:
        log_probs: (n, G, T); changed in place, it becomes the covariance. advantages: (n, G). mask: (n, G, T) float,
            0 or 1. counted: (n, G) float, rows that enter the statistics; the others get weights by them.
    """
    tokens = mask.sum(2)
    n = (tokens * counted).sum(1)  # N of (5)
    lp = log_probs.mul_(mask)
    # What rounding leaves of a sigma that is 0: c is a product of two differences of such numbers.
    rounding = 4 * torch.finfo(lp.dtype).eps * lp.abs().amax((1, 2)) * advantages.abs().amax(1)
    mean_lp = (lp.sum(2) * counted).sum(1) / n
    mean_a = (advantages * tokens * counted).sum(1) / n
    c = lp.sub_(mean_lp[:, None, None]).mul_((advantages - mean_a[:, None])[:, :, None]).mul_(mask)
    # The std of c is about its own mean; c itself is not centred in (4).
    mean_c = (c.sum(2) * counted).sum(1) / n
    squares = (((c - mean_c[:, None, None]) * mask).square().sum(2) * counted).sum(1)
    sigma = (squares / (n - config.ddof).clamp(min=1)).sqrt()
    floored = sigma <= rounding.clamp(min=config.sigma_floor)
    inverse = torch.where(floored, torch.zeros_like(sigma), 1 / sigma)  # weight exp(0) = 1 at the floor
    exponent = (c * inverse[:, None, None]).square_().mul_(-0.5).masked_fill_(mask == 0, -math.inf)
    top = exponent.amax((1, 2))
    w = exponent.sub_(top[:, None, None]).exp_()
    top = top.exp()
    factor = n / (w.sum(2) * counted).sum(1) if config.normalise else top
    return Weights(c, w, top, inverse, factor, floored.sum())


def cov_grpo_advantage(inputs: AdvantageInputs, config: CovGRPOConfig, state: dict) -> AdvantageOutput:
    """Advantages (B, T): w~ A of (6); plain A (B,) when the loss applies the weights."""
    advantages = inputs.of_session(grpo(inputs, config.ddof))
    if not config.on_the_driver:
        return AdvantageOutput(advantages)
    lp, mask = inputs.fields["old_log_probs"], inputs.response_mask
    groups = inputs.groups if config.scope == "group" else inputs.groups.whole()
    dtype = torch.promote_types(torch.promote_types(lp.dtype, advantages.dtype), torch.float32)
    out = torch.zeros(lp.shape, dtype=dtype, device=lp.device)
    seen = Statistics(tokens=int(mask.sum()))
    for _, rows in groups.blocks(lp.shape[1]):
        m, counted = mask[rows].to(dtype), groups.counted[rows].to(dtype)
        a = advantages[rows].to(dtype)
        weights = kernel_weights(lp[rows].to(dtype), a, m, counted, config)
        seen.add(weights, m.sum(2), counted)
        out[rows] = weights.kernel.mul_((a * weights.factor[:, None])[:, :, None])
    return AdvantageOutput(out, seen.metrics())


class Statistics:
    """The spec's section 11 over the tokens that count, gathered block by block. tokens: at most that many."""

    def __init__(self, tokens: int):
        self.keep, self.floored, self.farthest = math.ceil(TAIL * tokens), 0, 0.0
        self.sums: torch.Tensor | float = 0.0
        self.tails = [torch.zeros(0), torch.zeros(0)]  # largest and smallest c so far

    def add(self, weights: Weights, tokens: torch.Tensor, counted: torch.Tensor) -> None:
        """tokens: (n, G) length of each response. counted: (n, G) float. Sums over tokens first, in the cache."""
        c, w = weights.covariance, weights.kernel
        high = (w >= (0.5 / weights.top)[:, None, None]).sum(2)
        scaled = w.sum(2) * weights.top[:, None]
        final = w.sum(2) * weights.factor[:, None]
        totals = (
            tokens, c.sum(2), torch.linalg.vector_norm(c, dim=2).square(), scaled, tokens - high, (c > 0).sum(2),
            (c < 0).sum(2), final,
        )  # fmt: skip
        self.sums = self.sums + torch.stack([(total * counted).sum(dtype=torch.float64) for total in totals])
        self.floored = self.floored + weights.floored
        largest, smallest = c.amax(2), c.amin(2)
        far = (torch.maximum(largest, -smallest) * weights.inverse[:, None] * counted).max()
        self.farthest = far.clamp(min=self.farthest)  # in units of sigma
        for i, sign in enumerate((1, -1)):
            tail = self.tails[i]
            top = largest if sign == 1 else -smallest
            # Only rows that reach into the tail as it is can change it.
            reach = (top > (tail[-1] if len(tail) == self.keep else -math.inf)) & (counted > 0)
            new = (sign * c[reach]).flatten()
            merged = torch.cat([tail.to(new), new.topk(min(self.keep, len(new))).values])
            self.tails[i] = merged.topk(min(self.keep, len(merged))).values

    def metrics(self) -> dict[str, float]:
        if isinstance(self.sums, float):
            return {}
        n, *sums, positive, negative, final = self.sums.tolist()
        c, squares, w, low = (total / n for total in sums)
        top = [
            float(tail[: math.ceil(TAIL * count)].mean()) if count else 0.0
            for tail, count in zip(self.tails, (positive, negative), strict=True)
        ]
        return {
            "cov/mean": c,
            "cov/std": math.sqrt(max(0.0, squares - c * c)),
            "cov/top_pos": top[0],
            "cov/top_neg": -top[1],
            "cov/w_min": math.exp(-0.5 * float(self.farthest) ** 2),
            "cov/w_mean": w,
            "cov/weight_mean": final / n,
            "cov/damped_frac": low,
            "cov/sigma_floor_groups": float(self.floored),
        }


# -- loss side: the comparison switches scope=microbatch and logp=current ----------------------------------------------


def token_weights(
    log_probs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, groups: Groups, config: CovGRPOConfig
) -> torch.Tensor:
    """(b, T) weights w~ of the rows at hand, with statistics over each of `groups`; 1 where there are none.

    log_probs, advantages, mask: (b, T).
    """
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    mask, out = mask.to(dtype), torch.ones_like(log_probs, dtype=dtype)
    row_advantages = (advantages.to(dtype) * mask).sum(1) / mask.sum(1).clamp(min=1)
    for _, rows in groups.blocks(log_probs.shape[1]):
        m = mask[rows]
        lp = log_probs.detach()[rows].to(dtype)
        weights = kernel_weights(lp, row_advantages[rows], m, groups.counted[rows].to(dtype), config)
        out[rows] = weights.kernel * weights.factor[:, None, None]
    return out


def _groups(index: torch.Tensor, counted: torch.Tensor, mask: torch.Tensor) -> Groups:
    """index: (b,) a number for each row's group; rows without a response belong nowhere."""
    real = mask.sum(1) > 0
    uids = tuple(map(str, range(int(index.max()) + 1)))
    return Groups(index=index, counted=counted & real, uids=uids, real=real)


def mini_batch_weights(batch: MiniBatch, config: CovGRPOConfig) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """`logp=current`: weights by the log-probs at the start of the mini-batch, over the rows of all ranks."""
    if config.logp != "current" or config.scope == "microbatch":
        return {}, {}
    group, mine = batch.gather(batch.field("group"))
    counted, log_probs, advantages, mask = (
        batch.gather(values)[0]
        for values in (
            batch.field("counted"), batch.current_log_probs(), batch.field("advantages"), batch.field("response_mask")
        )
    )  # fmt: skip
    index = group.long() if config.scope == "group" else torch.zeros_like(group, dtype=torch.long)
    weights = token_weights(log_probs, advantages, mask, _groups(index, counted > 0, mask), config)
    width = batch.field("response_mask").shape[1]
    return {"weight": weights[mine, :width]}, {}


def cov_grpo_loss(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, rollout_is_weights=None
):
    """verl's `vanilla` on w~ A, with w~ by current log-probs or over the micro-batch at hand. (b, T) as verl's losses.

    `scope=microbatch` depends on how verl splits the mini-batch, which is what the switch is there to show.
    """
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla

    inputs = loss_inputs()
    settings: CovGRPOConfig = inputs.settings
    if settings.scope == "microbatch":
        lp = log_prob if settings.logp == "current" else old_log_prob
        real = response_mask.sum(1) > 0
        groups = _groups(torch.zeros_like(real, dtype=torch.long), real, response_mask)
        weight = token_weights(lp, advantages, response_mask, groups, settings)
    else:
        weight = inputs.fields["weight"]
    return compute_policy_loss_vanilla(
        old_log_prob, log_prob, advantages * weight, response_mask, loss_agg_mode, config, rollout_is_weights
    )


def check_run(config) -> None:
    """Refuse run settings under which the method means something else (spec sections 4 and 5)."""
    refuse_rollout_log_probs(config, "cov_grpo")
    estimator = config.algorithm.adv_estimator
    loss = config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla")
    settings = CovGRPOConfig.from_algorithm(config.algorithm, "cov_grpo")
    where = f"algorithm.cov_grpo.scope={settings.scope}, logp={settings.logp}"
    if estimator == "cov_grpo" and not settings.on_the_driver and loss != "cov_grpo":
        raise ConfigError(
            f"{where}: these weights are computed in the loss. Set"
            " actor_rollout_ref.actor.policy_loss.loss_mode=cov_grpo."
        )
    if loss == "cov_grpo":
        if settings.on_the_driver:
            raise ConfigError(
                f"{where}: these weights are part of the advantages. Set"
                " actor_rollout_ref.actor.policy_loss.loss_mode=vanilla (the loss cov_grpo is for scope=microbatch and"
                " logp=current)."
            )
        if METHODS[estimator].token_level if estimator != "cov_grpo" and estimator in METHODS else False:
            raise ConfigError(
                f"actor_rollout_ref.actor.policy_loss.loss_mode=cov_grpo weights one advantage for each response, but"
                f" {estimator} gives each token its own. Set algorithm.adv_estimator=cov_grpo."
            )
        if settings.logp == "current" and config.actor_rollout_ref.actor.strategy == "megatron":
            raise ConfigError(
                "algorithm.cov_grpo.logp=current takes a forward pass in the worker before each mini-batch, which was"
                " built for FSDP. Set algorithm.cov_grpo.logp=old, or actor_rollout_ref.actor.strategy=fsdp2."
            )


def group_of_row(inputs: AdvantageInputs, config: CovGRPOConfig) -> dict[str, torch.Tensor]:
    """For the loss: (B,) each row's group, and whether the row enters statistics as it does on the driver."""
    groups = inputs.groups
    counted = groups.counted & groups.comparable[groups.index]
    return {"group": groups.index.float(), "counted": counted.float()}


METHOD = Method(
    name="cov_grpo",
    prefix="cov",
    config_class=CovGRPOConfig,
    needs=("old_log_probs",),
    check=check_run,
    estimator=cov_grpo_advantage,
    token_level=True,
    policy_loss=cov_grpo_loss,
    loss_needs=("group", "counted"),
    row_fields=group_of_row,
    mini_batch=mini_batch_weights,
)
