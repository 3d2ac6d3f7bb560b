"""AVSPO: virtual rewards for collapsed groups (arXiv 2605.21125, specs avspo; equation numbers are the spec's).

How it differs from GRPO: a group whose rewards are all equal gets K scalar "virtual" rewards before its mean and std
are taken, so that its real responses get one and the same non-zero advantage: negative when all are wrong, positive
when all are correct. Everything else is verl's GRPO, bit for bit. Virtual rewards are not rows: batch size, loss
denominators and the group's responses do not change.

It assumes an outcome reward in [r_lo, r_hi] and a binary notion of "correct".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from verl_ext.acr import TOL, collapse
from verl_ext.outcomes import EPS, accuracy, check_range, grpo
from verl_ext.registry import (
    AdvantageInputs,
    AdvantageOutput,
    ConfigError,
    Method,
    MethodConfig,
    refuse_collapse_filter,
)


@dataclass(frozen=True)
class AVSPOConfig(MethodConfig):
    """Switches of `algorithm.avspo` (spec section 4); the defaults are the spec's."""

    prefix: ClassVar[str] = "algorithm.avspo"

    virtual_values: str = "stratified"
    r_anchor: float = 0.1
    alpha: float = 0.5
    trigger: str = "adaptive"
    tau0: float = 0.5
    tau_eta: float = 0.01
    tau_min: float = 0.1
    tau_max: float = 0.9
    acr_source: str = "batch"
    acr_ema_decay: float = 0.9
    tol: float = TOL
    ddof: int = 1
    r_lo: float = 0.0
    r_hi: float = 1.0
    acc_source: str = "auto"

    def __post_init__(self):
        self.choice("virtual_values", "stratified", "stratified_open", "opposite")
        self.choice("trigger", "adaptive", "fixed", "always")
        self.choice("acr_source", "batch", "ema")
        self.choice("acc_source", "auto", "flag", "threshold")
        self.number("r_anchor", 0, 1, low_open=True)
        self.number("alpha", 0, 1, low_open=True)
        self.number("tau_min", 0, 1)
        self.number("tau_max", 0, 1)
        self.number("tau0", 0, 1)
        self.number("tau_eta", 0, 1)
        self.number("acr_ema_decay", 0, 1, high_open=True)
        self.number("tol", 0, math.inf, high_open=True)
        self.ddof_and_range()
        if self.tau_min > self.tau_max:
            raise ConfigError(f"{self.prefix}.tau_min={self.tau_min} is above {self.prefix}.tau_max={self.tau_max}")
        if self.trigger == "adaptive" and not self.tau_min <= self.tau0 <= self.tau_max:
            raise ConfigError(
                f"{self.prefix}.tau0={self.tau0} lies outside [tau_min, tau_max] = [{self.tau_min}, {self.tau_max}]"
            )


def virtual_count(group_size: int, acr: float, alpha: float) -> int:
    """K of equation (4): max(1, min(G, ceil(G * ACR^alpha))). [paper, Eq 9]"""
    # 25 * (7/25) is 7.000000000000001 in floating point; without the slack K would be 8 there.
    return max(1, min(group_size, math.ceil(group_size * acr**alpha - 1e-9)))


def virtual_values(form: str, k: int, correct: bool, r_lo: float, r_hi: float, r_anchor: float) -> list[float]:
    """The K virtual rewards of a collapsed group, equations (6a)-(6c). [inferred; (6c) with K = 1: authors' code]

    `stratified`, all-correct, K = 1 would be {r_hi}: no spread, no signal; K = 2 is used there (spec section 4, guard).
    """
    if form == "opposite":
        return [r_lo if correct else r_hi] * k
    top = r_hi if correct else r_lo + r_anchor * (r_hi - r_lo)
    if form == "stratified_open":
        return [r_lo + (top - r_lo) * (1 - i / (k + 1)) for i in range(1, k + 1)]
    if correct and k == 1:
        k = 2
    return [r_lo + (top - r_lo) * (1 - (i - 1) / k) for i in range(1, k + 1)]


def next_tau(tau: float, acr: float, delta_j: float, config: AVSPOConfig) -> float:
    """Threshold of the next step, equation (10): clamp(tau + eta * sign(dJ) * (ACR - tau)). [paper, Eq 12]

    The paper's prose says the opposite for dJ < 0 and ACR < tau; the formula is what is implemented (spec section 6).
    """
    sign = (delta_j > 0) - (delta_j < 0)
    return min(max(tau + config.tau_eta * sign * (acr - tau), config.tau_min), config.tau_max)


def avspo_advantage(inputs: AdvantageInputs, config: AVSPOConfig, state: dict) -> AdvantageOutput:
    """Advantages (B,) of one batch: GRPO's (1), except for the groups that (7) augments, which get (8).

    state: `tau`, `reward_mean` of the previous step, `acr_ema` (acr_source=ema), `steps`, `fires`; {} at the start.

    Raises:
        DataError: a reward outside [r_lo, r_hi]; no way to tell whether a response is correct (see `accuracy`).
    """
    groups, rewards = inputs.groups, inputs.rewards
    if not bool(groups.counted.any()):  # padding only: no J, no ACR
        return AdvantageOutput(torch.zeros_like(rewards))
    check_range(inputs, config.r_lo, config.r_hi, config.prefix, config.tol)
    acc = accuracy(inputs, config.r_lo, config.r_hi, config.acc_source, config.prefix)
    kinds = collapse(groups, rewards, acc, config.tol)
    n = int(groups.comparable.sum())
    acr = int(kinds["any"].sum()) / n if n else 0.0  # (3), on the raw rewards
    if config.acr_source == "ema":
        decay = config.acr_ema_decay
        acr = state["acr_ema"] = decay * state["acr_ema"] + (1 - decay) * acr if "acr_ema" in state else acr
    tau = state.get("tau", config.tau0) if config.trigger == "adaptive" else config.tau0
    fire = config.trigger == "always" or acr > tau

    advantages = grpo(inputs)  # (1), for everybody
    mean, _ = groups.mean_std(rewards)

    # (7), (8): mean and std over G + K values, output for the G real rows.
    injected = (kinds["wrong"] | kinds["correct"]) & fire
    value, k_used = torch.zeros_like(mean), torch.zeros_like(mean)
    for which, rows in groups.matrices():
        for kind in ("wrong", "correct"):
            hit = (injected & kinds[kind])[which]
            if not bool(hit.any()):
                continue
            real, tied = rewards[rows[hit]], mean[which[hit], None]
            k = virtual_count(real.shape[1], acr, config.alpha)
            unit = virtual_values(config.virtual_values, k, kind == "correct", 0.0, 1.0, config.r_anchor)
            # Between the group's own reward and the far end of the range: with a reward inside the range (a format
            # bonus for a wrong answer) values counted from r_lo would lie below it and turn the sign (spec section 7).
            low, high = (config.r_lo, tied) if kind == "correct" else (tied, config.r_hi)
            virtual = low + (high - low) * real.new_tensor(unit)
            both = torch.cat([real, virtual], dim=1)
            scale = both.std(1, correction=config.ddof) + EPS if inputs.norm_by_std else 1.0
            value[which[hit]] = (real.mean(1) - both.mean(1)) / scale
            k_used[which[hit]] = len(unit)
    advantages = torch.where(injected[groups.index] & groups.counted, value[groups.index], advantages)

    # (10): tau moves once per step, with the same ACR; without a previous J it stays.
    reward_mean = float(rewards[groups.counted].double().mean())
    delta_j = reward_mean - state.get("reward_mean", reward_mean)
    state["tau"] = next_tau(tau, acr, delta_j, config) if config.trigger == "adaptive" else tau
    state["reward_mean"] = reward_mean
    state["steps"], state["fires"] = state.get("steps", 0) + 1, state.get("fires", 0) + int(fire)

    def mean_over(values: torch.Tensor, which: torch.Tensor) -> float:
        return float(values[which].double().mean()) if bool(which.any()) else 0.0

    metrics = {
        "avspo/fire": float(fire),
        "avspo/fire_rate": state["fires"] / state["steps"],
        "avspo/tau": tau,
        "avspo/delta_j": delta_j,
        "avspo/reward_mean": reward_mean,
        "avspo/k": mean_over(k_used, injected),
        "avspo/injected_groups": float(injected.sum()),
        "avspo/adv_wrong": mean_over(value, injected & kinds["wrong"]),
        "avspo/adv_correct": mean_over(value, injected & kinds["correct"]),
    }
    if config.acr_source == "ema":
        metrics["acr/ema"] = acr
    return AdvantageOutput(advantages, metrics)


def check_run(config) -> None:
    """Refuse run settings under which the method means something else (spec sections 4 and 6)."""
    refuse_collapse_filter(config, "avspo")


METHOD = Method(
    name="avspo",
    config_class=AVSPOConfig,
    estimator=avspo_advantage,
    needs=("acc",),
    stateful=True,
    check=check_run,
    neutral={"trigger": "fixed", "tau0": 1.0},
)
