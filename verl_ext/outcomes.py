"""What a row's outcome reward says, for every group-relative method: GRPO's advantage, accuracy, range."""

from __future__ import annotations

import torch

from verl_ext.acr import TOL
from verl_ext.registry import AdvantageInputs, DataError, check_finite

EPS = 1e-6  # verl's GRPO epsilon (compute_grpo_outcome_advantage); specs: "the same std and eps"


def grpo(inputs: AdvantageInputs, ddof: int = 1, scale: torch.Tensor | None = None) -> torch.Tensor:
    """(B,) GRPO advantage (r - mean) / (std * scale + eps), with verl's bits at the defaults.

    Rows that do not count and groups of one get 0. Without `inputs.norm_by_std` the std is 1 and there is no eps.

    Args:
        ddof: 1 as verl, 0 for the population std.
        scale: (N,) a factor of each group's denominator; None: 1.
    """
    groups, rewards = inputs.groups, inputs.rewards
    mean, std = groups.mean_std(rewards, ddof)
    if inputs.norm_by_std:
        denominator = (std if scale is None else std * scale) + EPS
    else:
        denominator = torch.ones_like(std) if scale is None else scale
    advantages = (rewards - mean[groups.index]) / denominator[groups.index]
    use = groups.comparable[groups.index] & groups.counted
    return torch.where(use, advantages, torch.zeros_like(advantages))


def check_range(inputs: AdvantageInputs, r_lo: float, r_hi: float, prefix: str, tol: float = TOL) -> None:
    """Refuse a reward outside [r_lo, r_hi].

    Raises:
        DataError: naming the row, the value and the keys.
    """
    rewards, counted = inputs.rewards, inputs.groups.counted
    slack = tol + 1e-6 * max(abs(r_lo), abs(r_hi))
    bad = counted & ((rewards < r_lo - slack) | (rewards > r_hi + slack))
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise DataError(
            f"reward {float(rewards[row])} in row {row} lies outside [r_lo, r_hi] = [{r_lo}, {r_hi}]. "
            f"Set {prefix}.r_lo and {prefix}.r_hi to the ends of the reward's range."
        )


def accuracy(inputs: AdvantageInputs, r_lo: float, r_hi: float, source: str, prefix: str) -> torch.Tensor:
    """(B,) bool: is the response correct? (specs/README, "accuracy, p")

    source: `auto`: the `acc` flag when the reward function returned one, else a binary reward is read as the flag;
    `flag`: the flag, required; `threshold`: reward above the middle of [r_lo, r_hi].

    Raises:
        DataError: no flag, and the reward takes other values than r_lo and r_hi.
    """
    flag = inputs.fields.get("acc")
    rewards, counted = inputs.rewards, inputs.groups.counted
    if source == "flag" and flag is None:
        raise DataError(
            f"{prefix}.acc_source=flag, but no row carries `acc`. Return {{'score': ..., 'acc': 0 or 1}} from the"
            " reward function and use trainer.v1.trainer_mode=recipe_sync (the stock trainer does not hand the flag"
            " over)."
        )
    if flag is not None and source != "threshold":
        check_finite("acc", flag.float())
        bad = counted & (flag != 0) & (flag != 1)
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            raise DataError(f"`acc` must be 0 or 1, but is {float(flag[row])} in row {row}. Fix the reward function.")
        return flag.bool()
    if source == "auto":
        tol = 1e-6 * max(1.0, abs(r_lo), abs(r_hi))
        binary = ((rewards - r_lo).abs() <= tol) | ((rewards - r_hi).abs() <= tol)
        bad = counted & ~binary
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            raise DataError(
                f"reward {float(rewards[row])} in row {row} is neither r_lo={r_lo} nor r_hi={r_hi}, and there is no"
                " `acc` flag to say whether the response is correct. Return {'score': ..., 'acc': 0 or 1} from the"
                f" reward function (handed over in trainer.v1.trainer_mode=recipe_sync), set {prefix}.r_lo and"
                f" {prefix}.r_hi to the reward's two values, or accept the middle of the range as the border with"
                f" {prefix}.acc_source=threshold."
            )
    return rewards > (r_lo + r_hi) / 2
