"""Settings of the policy loss `holderpo`, as verl's workers read them: `actor.policy_loss`. Imports verl."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from verl.workers.config import PolicyLossConfig

from recipes.holderpo.holderpo import SCHEDULES
from verl_ext.registry import Checks, ConfigError


@dataclass
class HolderPOLossConfig(Checks, PolicyLossConfig):
    """Switches of `actor_rollout_ref.actor.policy_loss` (spec section 4) beside verl's; the defaults are the spec's."""

    prefix: ClassVar[str] = "actor_rollout_ref.actor.policy_loss"

    loss_mode: str = "holderpo"
    clip_level: str = "sequence"
    holder_p_schedule: str = "linear_dec"
    holder_p_max: float = 2.0
    holder_p_min: float = -2.0
    holder_p: float | None = None
    holder_p_power: float = 2.0
    holder_p_schedule_steps: int | None = None
    small_p: float = 0.05
    log_rho_cap: float = 20.0

    def __post_init__(self):
        self.choice("clip_level", "sequence", "token", "clamped")
        self.choice("holder_p_schedule", "constant", *SCHEDULES)
        for key in ("holder_p_max", "holder_p_min"):
            self.number(key, -math.inf, math.inf, low_open=True, high_open=True)
        self.number("holder_p_power", 0, math.inf, low_open=True, high_open=True)
        self.number("small_p", 0, 1)
        self.number("log_rho_cap", 0, 80, low_open=True)
        if self.holder_p_schedule_steps is not None:
            self.whole("holder_p_schedule_steps", 1)
        if self.holder_p is not None:
            self.number("holder_p", -math.inf, math.inf, low_open=True, high_open=True)
        if self.holder_p_min > self.holder_p_max:
            raise ConfigError(
                f"{self.prefix}.holder_p_min={self.holder_p_min} is above {self.prefix}.holder_p_max="
                f"{self.holder_p_max}; a falling schedule is holder_p_schedule=linear_dec"
            )
        if self.holder_p_schedule == "constant" and self.holder_p is None:
            raise ConfigError(
                f"{self.prefix}.holder_p_schedule=constant needs the exponent: set {self.prefix}.holder_p=1"
            )
        if self.holder_p is not None and self.holder_p_schedule != "constant":
            raise ConfigError(
                f"{self.prefix}.holder_p={self.holder_p} has no effect with"
                f" holder_p_schedule={self.holder_p_schedule}: set {self.prefix}.holder_p_schedule=constant"
            )
