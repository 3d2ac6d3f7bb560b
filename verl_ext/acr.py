"""Advantage Collapse Rate (ACR): share of groups whose rewards are all equal, so that GRPO learns nothing from them.

Source: arXiv 2605.21125, spec avspo section 3 (3): ACR_t = (1/N_t) sum_j 1[group j is collapsed]; collapse is tested as
max(r) - min(r) <= tol (spec section 6, trap "float noise"); groups of one stay out of N_t (spec section 4).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from verl_ext.groups import Groups

TOL = 1e-6


def collapse(
    groups: Groups, rewards: torch.Tensor, acc: torch.Tensor | None, tol: float = TOL
) -> dict[str, torch.Tensor]:
    """Which groups are collapsed, and why.

    Args:
        rewards: (B,) outcome rewards before any change to them.
        acc: (B,) bool accuracy flags, or None when unknown (then no group is called wrong or correct).
        tol: largest max(r) - min(r) of a collapsed group.

    Returns:
        dict of (N,) bool: `any` collapsed; `wrong` and `correct`: collapsed and every row wrong / correct;
        `tied_other`: collapsed for another reason (equal rewards, mixed or unknown accuracy).
    """
    tied = groups.collapsed(rewards, tol)
    if acc is None:
        wrong = correct = torch.zeros_like(tied)
    else:
        correct, wrong = tied & groups.all(acc.bool()), tied & groups.all(~acc.bool())
    return {"any": tied, "wrong": wrong, "correct": correct, "tied_other": tied & ~wrong & ~correct}


def binary_accuracy(
    rewards: torch.Tensor, counted: torch.Tensor, ranges: tuple[tuple[float, float], ...] = ((0.0, 1.0), (-1.0, 1.0))
) -> torch.Tensor | None:
    """(B,) bool flags when every counted reward is one of the two ends of a range; None otherwise.

    ranges: (low, high) pairs; the first that fits decides.
    """
    for low, high in ranges:
        if bool(((rewards == low) | (rewards == high) | ~counted).all()):
            return rewards == high
    return None


def expected_rate(p: torch.Tensor, group_size: int) -> torch.Tensor:
    """Collapse probability p^G + (1-p)^G of a prompt solved with probability p. p: any shape, in [0, 1]. [inferred]"""
    return p**group_size + (1 - p) ** group_size


def acr_metrics(
    groups: Groups,
    rewards: torch.Tensor,
    acc: torch.Tensor | None = None,
    advantages: torch.Tensor | None = None,
    tol: float = TOL,
) -> dict[str, float]:
    """The numbers logged in every step, for any estimator.

    Args:
        rewards: (B,) raw outcome rewards. acc: (B,) accuracy flags or None.
        advantages: (B, T) as the estimator returned them, or None; adds what is left after it.

    Returns:
        `acr/rate`, `acr/wrong`, `acr/correct`, `acr/tied_other`: shares of the comparable groups (size >= 2).
        `acr/groups`: their number; `acr/groups_of_one`; `acr/group_size_min`, `acr/group_size_mean`.
        `acr/reward_std_mean`: mean over comparable groups of the unbiased std of the rewards.
        `acr/post`: share of comparable groups whose advantages are all zero after the estimator;
        `acr/rows_nonzero`: share of counted rows with a non-zero advantage.
        With no comparable group the shares are 0 and `acr/groups` is 0.
    """
    comparable = groups.comparable
    n = int(comparable.sum())

    def share(flags: torch.Tensor) -> float:
        return float((flags & comparable).sum()) / n if n else 0.0

    kinds = collapse(groups, rewards, acc, tol)
    sizes = groups.sizes[groups.sizes > 0]
    _, std = groups.mean_std(rewards.double())
    out = {
        "acr/rate": share(kinds["any"]),
        "acr/wrong": share(kinds["wrong"]),
        "acr/correct": share(kinds["correct"]),
        "acr/tied_other": share(kinds["tied_other"]),
        "acr/groups": float(n),
        "acr/groups_of_one": float((groups.sizes == 1).sum()),
        "acr/group_size_min": float(sizes.min()) if len(sizes) else 0.0,
        "acr/group_size_mean": float(sizes.double().mean()) if len(sizes) else 0.0,
        "acr/reward_std_mean": float(std[comparable].mean()) if n else 0.0,
    }
    if advantages is not None:
        strength = advantages.abs().amax(dim=1)
        out["acr/post"] = share(groups.max(strength) <= TOL)
        rows = groups.counted
        out["acr/rows_nonzero"] = float((strength[rows] > TOL).double().mean()) if bool(rows.any()) else 0.0
    return out


def watch(algorithm: Mapping) -> AcrWatch:
    """The watch that `algorithm.acr` (warn_above, warn_steps, window) asks for.

    Raises:
        ValueError: an unknown key or a value that cannot work, by its full name.
    """
    settings = algorithm.get("acr", None) or {}
    known = ("warn_above", "warn_steps", "window")
    if not isinstance(settings, Mapping) or not set(settings) <= set(known):
        raise ValueError(f"algorithm.acr={settings!r}: the keys are {', '.join(known)}")
    for key, value in settings.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"algorithm.acr.{key}={value!r} must be a number")
    return AcrWatch(**settings)


@dataclass
class AcrWatch:
    """Running forms of the rate, and the warning when it stays high.

    The paper's earlier version reports ACR > 0.35 for more than 50 consecutive steps as stalling, and a std above 0.15
    over 25 steps as a risk of divergence (spec avspo section 3 (12), [paper]); hence the defaults.
    """

    warn_above: float = 0.35
    warn_steps: int = 50
    window: int = 25
    above: int = 0
    steps: int = 0
    first100_sum: float = 0.0
    recent: deque = field(default_factory=deque)

    def __post_init__(self):
        if not 0 <= self.warn_above <= 1:
            raise ValueError(f"algorithm.acr.warn_above={self.warn_above!r}: must be a share in [0, 1]")
        if self.warn_steps < 1 or self.window < 2:
            raise ValueError(
                f"algorithm.acr.warn_steps={self.warn_steps!r} must be >= 1 and algorithm.acr.window={self.window!r}"
                " >= 2"
            )
        self.recent = deque(self.recent, maxlen=self.window)

    def update(self, rate: float) -> dict[str, float]:
        """Take one step's rate.

        Returns:
            `acr/mean_100`: mean of the first 100 steps (the paper's ACR_100). `acr/std_window`: std over the last
            `window` steps. `acr/steps_above`: steps in a row above the threshold.
        """
        self.steps += 1
        self.above = self.above + 1 if rate > self.warn_above else 0
        if self.steps <= 100:
            self.first100_sum += rate
        self.recent.append(rate)
        return {
            "acr/mean_100": self.first100_sum / min(self.steps, 100),
            "acr/std_window": float(torch.tensor(list(self.recent), dtype=torch.float64).std(correction=0)),
            "acr/steps_above": float(self.above),
        }

    def warning(self, metrics: dict[str, float]) -> str | None:
        """A sentence for people once the rate has been high for `warn_steps` steps in a row, else None."""
        if self.above != self.warn_steps:
            return None
        wrong, correct = metrics.get("acr/wrong", 0.0), metrics.get("acr/correct", 0.0)
        if max(wrong, correct) < metrics.get("acr/tied_other", 0.0):
            cause = "mostly ties that are neither all-wrong nor all-correct, or of unknown accuracy"
            advice = "returning `acc` (0 or 1) from the reward function, which says which of the two it is"
        elif wrong >= correct:
            cause = f"mostly all-wrong groups ({wrong:.0%}): the prompts are too hard for this policy"
            advice = (
                "easier prompts, more samples per prompt (actor_rollout_ref.rollout.n), or a method that uses them"
                " (avspo)"
            )
        else:
            cause = f"mostly all-correct groups ({correct:.0%}): the prompts are solved"
            advice = "harder prompts, dynamic sampling (algorithm.filter_groups), or a method that uses them (avspo)"
        return (
            f"acr/rate has been above {self.warn_above} for {self.warn_steps} steps (now {metrics['acr/rate']:.2f}):"
            f" that share of the groups gives no gradient under GRPO; {cause}. Try {advice}. Threshold:"
            " algorithm.acr.warn_above, algorithm.acr.warn_steps."
        )

    def state_dict(self) -> dict:
        return {
            "above": self.above,
            "steps": self.steps,
            "first100_sum": self.first100_sum,
            "recent": list(self.recent),
        }

    def load_state_dict(self, state: dict) -> None:
        self.above, self.steps, self.first100_sum = state["above"], state["steps"], state["first100_sum"]
        self.recent = deque(state["recent"], maxlen=self.window)
