"""EP-GRPO: entropy-gated outcome advantage plus entropy-progress guidance (arXiv 2605.04960, specs ep_grpo; equation
numbers are the spec's).

How it differs from GRPO: each token has an advantage of its own. GRPO's is multiplied by a gate W that opens with the
token's entropy; a progress term is added, made from the log-ratio between policy and reference model, standardised
inside buckets of equal accumulated entropy, with the sign of the outcome. In a collapsed group the sign comes from the
reward itself, so it trains as well.

It assumes a frozen reference model and the trainer's own log-probs. Everything is a constant for the optimiser.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from verl_ext.acr import TOL
from verl_ext.entropy import EPS, bucket_moments, buckets, gate, position, progress, token_moments
from verl_ext.outcomes import check_range, grpo
from verl_ext.registry import (
    AdvantageInputs,
    AdvantageOutput,
    ConfigError,
    Method,
    MethodConfig,
    refuse_collapse_filter,
    refuse_rollout_log_probs,
)

SAMPLE = 1 << 16  # tokens, evenly spaced, from which the entropy deciles of the metrics are taken


@dataclass(frozen=True)
class EPGRPOConfig(MethodConfig):
    """Switches of `algorithm.ep_grpo` (spec section 4); the defaults are the spec's."""

    prefix: ClassVar[str] = "algorithm.ep_grpo"

    gamma: float = 5.0
    eta: float = 0.2
    lam: float = 0.1
    K: int = 10
    theta_reward: float | None = None
    stat_scope: str = "group"
    bucket_norm: str = "zscore"
    anchor_order: str = "after"
    gate_progress: bool = True
    gate_renorm: str = "none"
    sigma_floor: float = 1e-3
    eta_warmup_steps: int = 0
    bucket_coord: str = "entropy"
    ddof: int = 1
    tol: float = TOL
    r_lo: float = 0.0
    r_hi: float = 1.0

    def __post_init__(self):
        self.choice("stat_scope", "group", "response", "batch")
        self.choice("bucket_norm", "zscore", "scale", "none")
        self.choice("anchor_order", "after", "before")
        self.choice("gate_renorm", "none", "mean1")
        self.choice("bucket_coord", "entropy", "position")
        self.flag("gate_progress")
        self.whole("K", 1)
        self.whole("eta_warmup_steps", 0)
        for key in ("gamma", "eta", "sigma_floor", "tol"):
            self.number(key, 0, math.inf, high_open=True)
        self.number("lam", 0, math.inf, low_open=True, high_open=True)
        self.ddof_and_range()
        if self.theta_reward is not None:
            self.number("theta_reward", -math.inf, math.inf, low_open=True, high_open=True)

    @property
    def border(self) -> float:
        """theta_reward of (5); by default the middle of the reward's range."""
        return (self.r_lo + self.r_hi) / 2 if self.theta_reward is None else self.theta_reward

    def eta_at(self, step: int) -> float:
        """eta in force at global step 1, 2, ...: a linear ramp over the first `eta_warmup_steps`."""
        return self.eta * min(1.0, step / self.eta_warmup_steps) if self.eta_warmup_steps else self.eta


def anchor(inputs: AdvantageInputs, config: EPGRPOConfig) -> torch.Tensor:
    """(B,) d of (5): sign of r - mean, in a collapsed group sign of r - theta_reward; 0 outside comparable groups.
    [second-hand]"""
    groups, rewards = inputs.groups, inputs.rewards
    mean, _ = groups.mean_std(rewards)
    tied = groups.collapsed(rewards, config.tol)[groups.index]
    distance = rewards - torch.where(tied, torch.full_like(rewards, config.border), mean[groups.index])
    # A reward equal to its group's mean is so up to rounding only.
    rounding = 8 * torch.finfo(rewards.dtype).eps * groups.max(rewards.abs())[groups.index]
    same = distance.abs() <= torch.where(tied, torch.full_like(rewards, config.tol), rounding)
    sign = torch.where(same, torch.zeros_like(distance), distance.sign())
    return torch.where(groups.comparable[groups.index] & groups.counted, sign, torch.zeros_like(sign))


def standardise(
    s: torch.Tensor, d: torch.Tensor, use: torch.Tensor, bucket: torch.Tensor, config: EPGRPOConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """d s~ of (7) and (8) before gate and eta, (n, G, T), and which cells (n, K) are zero for want of spread.

    [second-hand that it happens inside each bucket; form and order: inferred]

    Args:
        s: (n, G, T) lambda times the log-ratio. d: (n, G). use: (n, G, T) float, tokens that enter the statistics.
    """
    d = d[:, :, None]
    if config.anchor_order == "before":
        s, d = s * d, d.abs()  # a row without a sign gets no progress in either order
    n, mean, std = bucket_moments(s, use, bucket, config.K, config.ddof)
    zeroed = (n < 2) | (std <= config.sigma_floor)
    if config.bucket_norm == "none":
        return d * s, torch.zeros_like(zeroed)
    cell = bucket.flatten(1)
    factor = torch.where(zeroed, torch.zeros_like(std), 1 / (std + EPS)).gather(1, cell).view_as(s)
    if config.bucket_norm == "zscore":
        s = s - mean.gather(1, cell).view_as(s)
    return s * factor * d, zeroed


def ep_grpo_advantage(inputs: AdvantageInputs, config: EPGRPOConfig, state: dict) -> AdvantageOutput:
    """Advantages (B, T) of (2): gated outcome (3) plus progress (8).

    Raises:
        DataError: a reward outside [r_lo, r_hi] while theta_reward is the middle of that range.
    """
    if config.theta_reward is None:
        check_range(inputs, config.r_lo, config.r_hi, config.prefix, config.tol)
    groups, mask = inputs.groups, inputs.response_mask
    h, old, ref = (inputs.fields[name] for name in ("entropy", "old_log_probs", "ref_log_prob"))
    # In a collapsed group GRPO's advantage is 0 up to rounding, which its epsilon of 1e-6 blows up to 0.06.
    tied = groups.collapsed(inputs.rewards, config.tol)[groups.index]
    a = inputs.of_session(grpo(inputs, config.ddof).masked_fill_(tied, 0))
    d = inputs.of_session(anchor(inputs, config))
    eta = config.eta_at(inputs.step)
    dtype = torch.promote_types(torch.promote_types(h.dtype, a.dtype), torch.float32)
    out = torch.zeros(h.shape, dtype=dtype, device=h.device)
    batch_moments = _batch_moments(inputs, config, dtype) if config.stat_scope == "batch" else None
    seen = Statistics(stride=max(1, h.numel() // SAMPLE))
    for _, rows in groups.blocks(h.shape[1]):
        m = mask[rows].to(dtype)
        counted, a_rows = groups.counted[rows].to(dtype), a[rows].to(dtype)
        use = m * counted[:, :, None]
        entropy = h[rows].to(dtype)

        if batch_moments is not None:
            mean, std = batch_moments
        else:
            over, inside = ((1, 2), use) if config.stat_scope == "group" else ((2,), m)
            _, mean, std = token_moments(entropy, inside, over, config.ddof)
        w = gate(entropy, mean, std, config.gamma)
        if config.gate_renorm == "mean1":
            w = w / ((w * m).sum(2, keepdim=True) / m.sum(2, keepdim=True).clamp(min=1))
        outcome = w * a_rows[:, :, None]

        tau = progress(entropy, m) if config.bucket_coord == "entropy" else position(m)
        log_ratio = old[rows].to(dtype) - ref[rows].to(dtype)
        signal, zeroed = standardise(config.lam * log_ratio, d[rows].to(dtype), use, buckets(tau, config.K), config)
        guided = signal.mul_(eta)
        if config.gate_progress:
            guided = guided * w
        final = outcome.add_(guided).mul_(m)
        out[rows] = final
        seen.add(final, guided, w, entropy, log_ratio, a_rows, m, counted, zeroed)
    return AdvantageOutput(out, {"ep/eta": eta, **seen.metrics()})


def _batch_moments(inputs: AdvantageInputs, config: EPGRPOConfig, dtype: torch.dtype):
    """Mean and std of the entropy over the batch, shape (1, 1, 1): `stat_scope=batch`."""
    h, use = inputs.fields["entropy"], inputs.groups.counted & inputs.groups.comparable[inputs.groups.index]
    rows = use.nonzero().squeeze(1)
    mask = inputs.response_mask[rows].to(dtype)[None]
    _, mean, std = token_moments(h[rows].to(dtype)[None], mask, (1, 2), config.ddof)
    return mean, std


class Statistics:
    """The spec's section 11 over the tokens that count, gathered block by block."""

    def __init__(self, stride: int):
        self.stride, self.sums, self.sample = stride, 0.0, []

    def add(self, final, guided, w, entropy, log_ratio, a, m, counted, zeroed) -> None:
        """Blocks (n, G, T), 0 outside the response in `final` and `m`; a, counted: (n, G). Sums over tokens first."""
        tokens, gate_sum = m.sum(2), (w * m).sum(2)
        sign = a.sign()
        # Masked tokens are 0, so they are among those that do not have the sign.
        flipped = (final * sign[:, :, None] <= 0).sum(2) - (m.shape[2] - tokens)
        norm = lambda values: torch.linalg.vector_norm(values * m, ord=1, dim=2)  # noqa: E731
        totals = (
            tokens, gate_sum, a.abs() * gate_sum, norm(guided), norm(log_ratio), flipped * sign.abs(),
            tokens * sign.abs(),
        )  # fmt: skip
        sums = torch.stack([(total * counted).sum(dtype=torch.float64) for total in totals])
        cells = sums.new_tensor([0.0, zeroed.numel()])
        cells[0] = zeroed.sum()
        self.sums = self.sums + torch.cat([sums, cells])
        every = (m.flatten()[:: self.stride] > 0).nonzero().squeeze(1) * self.stride
        every = every[counted.flatten()[every // m.shape[2]] > 0]
        self.sample.append((entropy.flatten()[every], w.flatten()[every]))

    def metrics(self) -> dict[str, float]:
        if not self.sample:
            return {}
        n, w, outcome, guided, log_ratio, flipped, signed, zeroed, cells = self.sums.tolist()
        out = {
            "ep/gate_mean": w / n,
            "ep/flip_frac": flipped / signed if signed else 0.0,
            "ep/floored_buckets": zeroed / cells,
            "ep/logratio_abs": log_ratio / n,
        }
        if outcome:
            out["ep/progress_ratio"] = guided / outcome
        entropy, weight = (torch.cat(parts) for parts in zip(*self.sample, strict=True))
        deciles = weight[entropy.argsort()].tensor_split(10)
        return out | {f"ep/gate_decile_{i}": float(part.mean()) for i, part in enumerate(deciles) if len(part)}


def check_run(config) -> None:
    """Refuse run settings under which the method means something else (spec sections 4 and 6)."""
    refuse_collapse_filter(config, "ep_grpo")
    refuse_rollout_log_probs(config, "ep_grpo")
    if not config.actor_rollout_ref.actor.get("use_kl_loss", False):
        raise ConfigError(
            "actor_rollout_ref.actor.use_kl_loss=False: verl then builds no reference model, and ep_grpo's progress"
            " term is the log-ratio to it. Set actor_rollout_ref.actor.use_kl_loss=True, with"
            " actor_rollout_ref.actor.kl_loss_coef=0 for a loss without a KL term."
        )


METHOD = Method(
    name="ep_grpo",
    prefix="ep",
    config_class=EPGRPOConfig,
    needs=("entropy", "old_log_probs", "ref_log_prob"),
    check=check_run,
    estimator=ep_grpo_advantage,
    token_level=True,
    neutral={"eta": 0.0, "gamma": 0.0, "gate_renorm": "mean1"},
)
