"""HölderPO: one importance ratio per response, the power mean of its tokens' ratios, with an exponent p that falls
during training (arXiv 2605.12058, specs holderpo; equation numbers are the spec's).

How it differs from GRPO and GSPO: GSPO takes the geometric mean (p = 0), clips it once per response and differentiates
as if by token; here p is a setting of the step, the ratio is differentiated fully, and the outer mean is over
responses. At ratio 1 every p gives the same gradient, so p acts from the second update of a rollout batch on.

It assumes one advantage for each response and the trainer's own old log-probs. A pure policy loss: at a constant p it
works under any trainer; a schedule of p needs the global step, which our trainer modes hand over.
"""

from __future__ import annotations

import logging
import math

import torch

from verl_ext.losses import NOT_HANDED_OVER, loss_inputs, loss_settings, record, record_share
from verl_ext.registry import METHODS, ConfigError, Method, refuse_rollout_log_probs, updates_per_batch
from verl_ext.schedules import cosine, cubic, linear, power

logger = logging.getLogger("verl_ext")

# (11): shape, and whether p rises. `quad` has the exponent `holder_p_power`. [authors' code]
SCHEDULES = {
    "linear": (linear, True),
    "linear_dec": (linear, False),
    "quad": (power, True),
    "quad_dec": (power, False),
    "cubic": (cubic, True),
    "cubic_dec": (cubic, False),
    "sin": (cosine, True),
    "cos": (cosine, False),
}
LIMIT = 1e-20  # below it in size p counts as 0: float32 could not divide by it
# verl's estimators whose advantages differ between the tokens of a response.
TOKEN_LEVEL = {"gae", "reinforce_plus_plus", "optimal_token_baseline", "tir_optimal_token_baseline"}


def exponent(settings, step: int, total_steps: int) -> float:
    """p of (11) at global step 1, 2, ...; after `holder_p_schedule_steps` it stays at its end. [authors' code]"""
    if settings.holder_p_schedule == "constant":
        return settings.holder_p
    shape, rises = SCHEDULES[settings.holder_p_schedule]
    s = min(1.0, max(0, step) / (settings.holder_p_schedule_steps or total_steps))
    ends = (settings.holder_p_min, settings.holder_p_max)
    start, end = ends if rises else ends[::-1]
    return shape(start, end, s, settings.holder_p_power) if shape is power else shape(start, end, s)


def log_holder_mean(log_ratio: torch.Tensor, mask: torch.Tensor, p: float, small_p: float = 0.05) -> torch.Tensor:
    """(b,) log of the power mean (2) of the ratios of each row, in the stable form (13); 0 for an empty row.

    Args:
        log_ratio: (b, T), float32 or better. mask: (b, T) bool. p: any real number; 0 is the geometric mean.
        small_p: below it in size the centred form, which keeps the digits that log-sum-exp loses there.
    """
    n = mask.sum(-1)
    count = n.clamp(min=1).to(log_ratio.dtype)
    d = log_ratio.masked_fill(~mask, 0.0)
    if abs(p) < LIMIT:
        return d.sum(-1) / count
    if abs(p) < small_p:
        centre = (d.sum(-1) / count).detach()
        z = (p * (d - centre[:, None])).clamp(max=60.0)
        return centre + torch.log1p(torch.expm1(z).masked_fill(~mask, 0.0).sum(-1) / count) / p
    z = (p * d).masked_fill(~mask & (n > 0)[:, None], -torch.inf)
    log_sum = torch.where(n > 0, torch.logsumexp(z, -1), 0.0)
    return (log_sum - count.log()) / p


def sequence_losses(
    log_ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, p: float, low: float, high: float, settings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(3), (7) or (8): loss of each response (b,), log of its ratio (b,), and the share of it that the clip gates (b,).

    Args:
        log_ratio: (b, T). advantages: (b,). low, high: clip below and above 1.
    """
    bottom, top = math.log1p(-low) if low < 1 else -math.inf, math.log1p(high)
    rises = (advantages >= 0)[:, None]
    if settings.clip_level == "token":
        inside = torch.where(rises, log_ratio.clamp(max=top), log_ratio.clamp(min=bottom))
        log_rho = log_holder_mean(inside, mask, p, settings.small_p).clamp(max=settings.log_rho_cap)
        share = ((inside != log_ratio) & mask).sum(-1) / mask.sum(-1).clamp(min=1)
        return -advantages * log_rho.exp(), log_rho, share
    if settings.clip_level == "clamped":
        log_ratio = log_ratio.clamp(-top, top)
    log_rho = log_holder_mean(log_ratio, mask, p, settings.small_p).clamp(max=settings.log_rho_cap)
    rho = log_rho.exp()
    free, clipped = -advantages * rho, -advantages * rho.clamp(1 - low, 1 + high)
    return torch.maximum(free, clipped), log_rho, (clipped > free).to(rho.dtype)


def holderpo_loss(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="seq-mean-token-mean", config=None,
    rollout_is_weights=None,
):  # fmt: skip
    """The policy loss `holderpo`; (b, T) as verl's losses. The mean is over the responses of the mini-batch.

    Raises:
        ConfigError: another `loss_agg_mode`. RuntimeError: a schedule of p under a trainer that does not hand p over.
    """
    from verl.trainer.ppo.core_algos import agg_loss

    check_agg_mode(loss_agg_mode)
    settings = loss_settings(METHOD, config)
    inputs = loss_inputs(required=False)
    if inputs is not None and "p" in inputs.scalars:
        p = inputs.scalars["p"]
    elif settings.holder_p_schedule == "constant":
        p = settings.holder_p
    else:
        raise RuntimeError(
            f"{NOT_HANDED_OVER}; or hold p constant with {settings.prefix}.holder_p_schedule=constant and"
            f" {settings.prefix}.holder_p=<number>"
        )
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high

    mask = response_mask.bool()
    dtype = torch.promote_types(log_prob.dtype, torch.float32)
    n = mask.sum(-1)
    real, count = n > 0, n.clamp(min=1)
    log_ratio = log_prob.to(dtype) - old_log_prob.to(dtype)
    row_advantages = (advantages.to(dtype) * mask).sum(-1) / count
    losses, log_rho, gated = sequence_losses(log_ratio, row_advantages, mask, p, low, high, settings)
    if rollout_is_weights is not None:  # one for each response: the geometric mean of its tokens' [inferred]
        weights = rollout_is_weights.to(dtype).masked_fill(~mask, 1.0)  # 0 beyond a response
        losses = losses * (weights.log().sum(-1) / count).exp()
    loss = agg_loss(losses[:, None], real[:, None], "seq-mean-token-mean", **config.global_batch_info)

    with torch.no_grad():
        ratios, use = log_ratio.detach(), real.to(dtype)
        record_metrics(ratios, mask, use, log_rho.detach(), gated, p)
        kl, clip_fraction = (
            -(ratios * mask).sum() / mask.sum().clamp(min=1),
            (gated * use).sum() / use.sum().clamp(min=1),
        )
        metrics = {"actor/ppo_kl": kl.item(), "actor/pg_clipfrac": clip_fraction.item()}
    return loss, metrics


def record_metrics(log_ratio, mask, use, log_rho, gated, p: float) -> None:
    """The spec's section 11; logged under our trainer modes. use: (b,) 1 on rows with a response."""
    if loss_inputs(required=False) is None:
        return
    rows = use.sum()
    rho, inf = log_rho.exp(), torch.inf
    weights = (p * log_ratio).masked_fill(~mask, -inf).softmax(-1).nan_to_num()  # W of (5)
    record_share("holder/rho_mean", (rho * use).sum(), rows)
    record("holder/rho_min", torch.where(use > 0, rho, inf).min(), "min")
    record("holder/rho_max", torch.where(use > 0, rho, -inf).max(), "max")
    record_share("holder/clip_frac", (gated * use).sum(), rows)
    record("holder/delta_min", log_ratio.masked_fill(~mask, inf).min(), "min")
    record("holder/delta_max", log_ratio.masked_fill(~mask, -inf).max(), "max")
    record_share("holder/hhi", weights.square().sum(), rows)
    record_share("holder/w_entropy", torch.special.entr(weights).sum(), rows)
    record("holder/empty_rows", (1 - use).sum(), "sum")


def check_agg_mode(mode: str) -> None:
    if mode != METHOD.agg_modes[0]:
        raise ConfigError(
            f"actor_rollout_ref.actor.loss_agg_mode={mode!r}: holderpo is a plain mean over responses, whatever their"
            " length. Set actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean."
        )


def check_run(config) -> None:
    """Refuse run settings under which the method means something else (spec sections 4 and 6); warn at one update."""
    actor = config.actor_rollout_ref.actor
    check_agg_mode(actor.loss_agg_mode)
    refuse_rollout_log_probs(config, "holderpo")
    schedule = actor.policy_loss.get("holder_p_schedule", "linear_dec")
    mode = config.trainer.v1.trainer_mode
    if schedule != "constant" and not mode.startswith("recipe_"):
        raise ConfigError(
            f"trainer.v1.trainer_mode={mode!r} does not hand the exponent of the step to the loss, which"
            f" actor_rollout_ref.actor.policy_loss.holder_p_schedule={schedule} needs. Set"
            f" trainer.v1.trainer_mode=recipe_{mode}, or holder_p_schedule=constant and holder_p=<number>."
        )
    estimator = config.algorithm.adv_estimator
    if estimator in TOKEN_LEVEL or (estimator in METHODS and METHODS[estimator].token_level):
        raise ConfigError(
            f"algorithm.adv_estimator={estimator} gives each token an advantage of its own, but holderpo has one ratio"
            " and one advantage for a response; their mean would undo the estimator. Set algorithm.adv_estimator to"
            " grpo, avspo or mcpo, or actor_rollout_ref.actor.policy_loss.loss_mode to vanilla, gspo or cispo."
        )
    if updates_per_batch(config) < 2:
        logger.warning(
            "data.train_batch_size=%s and actor_rollout_ref.actor.ppo_mini_batch_size=%s give one update per rollout"
            " batch: every ratio is 1 then, and the exponent of holderpo has no effect (it equals gspo). The paper"
            " makes 8 updates: set ppo_mini_batch_size to an eighth of train_batch_size.",
            config.data.train_batch_size,
            actor.ppo_mini_batch_size,
        )


def step_scalars(settings, step: int, total_steps: int) -> dict[str, float]:
    return {"p": exponent(settings, step, total_steps)}


METHOD = Method(
    name="holderpo",
    prefix="holder",
    check=check_run,
    policy_loss=holderpo_loss,
    agg_modes=("seq-mean-token-mean",),
    loss_config="recipes.holderpo.loss_config.HolderPOLossConfig",
    step_scalars=step_scalars,
)
