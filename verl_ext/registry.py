"""What a method declares, and the bridge from that to verl's registries.

A method is a `Method`: a name, a config class, an estimator and/or a policy loss, and what they need. `register_method`
makes it known here and, as soon as verl's `core_algos` is imported in this process, to verl as well. An estimator is a
plain function on tensors; it never sees DataProto, TransferQueue or Ray:

    def estimator(inputs: AdvantageInputs, config: MethodConfig, state: dict) -> AdvantageOutput

`state` is the method's own plain dict (JSON values). The estimator updates it once per call; our trainer modes save it
with verl's checkpoint.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
import torch
import wrapt

from verl_ext.groups import Groups, make_groups

logger = logging.getLogger("verl_ext")

# What a method may ask for beyond rewards, mask and uid; the trainer fetches exactly what is asked.
FIELDS = {
    "acc": "accuracy flag per row (B,): `acc` in the dict that the reward function returns",
    "entropy": "token entropies (B, T) kept from the old-log-prob pass",
    "old_log_probs": "log-probs (B, T) recomputed by the trainer",
    "ref_log_prob": "log-probs (B, T) of the reference model",
    "belief_gain": "(B, T) increase of the answer's probability over a token's segment, from the method's `probe`",
}
# What a method's own `probe` makes at the advantage stage; it is not in the batch before.
PROBED_FIELDS = frozenset({"belief_gain"})
# `acc` has a fallback that every trainer can provide (see `accuracy`); the others only our trainer modes hand over.
OPTIONAL_FIELDS = frozenset({"acc"})


class ConfigError(ValueError):
    """A configuration value that cannot work; the message names the key, the value and the fix."""


class DataError(ValueError):
    """A value in the batch that must not be passed on (NaN, a reward out of range); names the field and the row."""


Text = str  # the type of a setting for which every text makes sense


class Checks:
    """Checks of settings, for a dataclass; `prefix` is what comes before a key in the configuration."""

    prefix: ClassVar[str] = "algorithm"

    def choice(self, key: str, *allowed: str) -> None:
        value = getattr(self, key)
        if value not in allowed:
            raise ConfigError(f"{self.prefix}.{key}={value!r} is not one of {', '.join(allowed)}")

    def number(self, key: str, low: float, high: float, low_open: bool = False, high_open: bool = False) -> None:
        value = getattr(self, key)
        ok = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        ok = ok and not (low_open and value == low) and not (high_open and value == high)
        if not ok:
            bounds = f"{'(' if low_open else '['}{low}, {high}{')' if high_open else ']'}"
            raise ConfigError(f"{self.prefix}.{key}={value!r} must be a number in {bounds}")

    def flag(self, key: str) -> None:
        value = getattr(self, key)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.prefix}.{key}={value!r} must be true or false")

    def text(self, key: str) -> None:
        value = getattr(self, key)
        if not isinstance(value, str):
            raise ConfigError(f"{self.prefix}.{key}={value!r} must be text")

    def whole(self, key: str, low: int) -> None:
        value = getattr(self, key)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ConfigError(f"{self.prefix}.{key}={value!r} must be a whole number of at least {low}")

    def ddof_and_range(self) -> None:
        """The settings `ddof`, `r_lo` and `r_hi`, which several methods have."""
        if isinstance(self.ddof, bool) or self.ddof not in (0, 1):
            raise ConfigError(f"{self.prefix}.ddof={self.ddof!r} must be 0 (population) or 1 (unbiased, as verl)")
        if hasattr(self, "r_lo"):
            self.number("r_lo", -math.inf, math.inf, low_open=True, high_open=True)
            self.number("r_hi", -math.inf, math.inf, low_open=True, high_open=True)
            if not self.r_lo < self.r_hi:
                raise ConfigError(f"{self.prefix}.r_lo={self.r_lo} must be below {self.prefix}.r_hi={self.r_hi}")


@dataclass(frozen=True)
class MethodConfig(Checks):
    """Base of a method's settings, read from `algorithm.<name>`. Subclasses check their values in `__post_init__`."""

    @classmethod
    def from_algorithm(cls, algorithm: Mapping | None, name: str) -> MethodConfig:
        """Read `algorithm.<name>` (missing keys take their defaults); an unknown key is refused by its full name."""
        given = (algorithm.get(name, None) if algorithm is not None else None) or {}
        known = {f.name for f in dataclasses.fields(cls)}
        if not isinstance(given, Mapping):
            raise ConfigError(f"algorithm.{name}={given!r} must hold keys such as {', '.join(sorted(known)[:3])}")
        for key in given:
            if key not in known:
                raise ConfigError(f"algorithm.{name}.{key} is unknown; the keys are {', '.join(sorted(known))}")
        return cls(**{str(k): given[k] for k in given})


@dataclass(frozen=True)
class AdvantageInputs:
    """One batch at the advantage stage, on the driver. B rows, T response tokens.

    token_level_rewards: (B, T) float, zero outside the response. response_mask: (B, T), 1 on the model's own tokens.
    groups: which rows belong together and which count. fields: what the method asked for (see FIELDS), (B,) or (B, T).
    final_row: (B,) int64, for each row the row of its session's last output; None: one output each.
    norm_by_std: verl's `algorithm.norm_adv_by_std_in_grpo`. step: global step from 1 (0 when unknown). progress: in
    [0, 1].
    """

    token_level_rewards: torch.Tensor
    response_mask: torch.Tensor
    groups: Groups
    fields: Mapping[str, torch.Tensor] = field(default_factory=dict)
    final_row: torch.Tensor | None = None
    norm_by_std: bool = True
    step: int = 0
    progress: float = 0.0

    def of_session(self, values: torch.Tensor) -> torch.Tensor:
        """(B,) -> (B,): each row gets the value of its session's last output, the only one that counts."""
        return values if self.final_row is None else values[self.final_row]

    @cached_property
    def rewards(self) -> torch.Tensor:
        """(B,) outcome reward: sum of the token-level rewards, in float32 or better."""
        scores = self.token_level_rewards
        return scores.to(torch.promote_types(scores.dtype, torch.float32)).sum(dim=-1)


@dataclass
class AdvantageOutput:
    """What an estimator returns.

    advantages: (B,) or (B, T); a (B,) value is given to every token of its row. metrics: logged as they are.
    loss_fields: per-row (B,) or per-token (B, T) tensors for the actor loss. loss_scalars: numbers of this step for it.
    """

    advantages: torch.Tensor
    metrics: dict[str, float] = field(default_factory=dict)
    loss_fields: dict[str, torch.Tensor] = field(default_factory=dict)
    loss_scalars: dict[str, float] = field(default_factory=dict)


Estimator = Callable[[AdvantageInputs, Any, dict], AdvantageOutput]


@dataclass(frozen=True)
class Method:
    """A method as the project knows it.

    An estimator is looked up by `algorithm.adv_estimator`, a policy loss by `actor.policy_loss.loss_mode`; the two are
    chosen independently. A policy loss finds what is below under "for the loss" in `losses.loss_inputs()`.
    """

    name: str
    # Settings under `algorithm.<name>`.
    config_class: type[MethodConfig] = MethodConfig
    estimator: Estimator | None = None
    policy_loss: Callable | None = None
    # What its metrics start with; by default the name.
    prefix: str = ""
    # Fields of FIELDS for the estimator and for `row_fields`.
    needs: tuple[str, ...] = ()
    # (whole run configuration) -> None, or ConfigError with the reason why this run makes no sense.
    check: Callable[[Any], None] | None = None

    # -- for the estimator
    # It keeps a state from step to step.
    stateful: bool = False
    # Its advantages differ between the tokens of a response.
    token_level: bool = False
    # Fields for the loss that its output carries.
    provides: tuple[str, ...] = ()
    # (inputs, settings, probe.ActorProbe) -> probe.Probed: fields that take a forward pass of the actor over rows of
    # the method's own, once per rollout batch.
    probe: Callable[[AdvantageInputs, Any, Any], Any] | None = None
    # Settings for which it is verl's grpo; None where there are none.
    neutral: Mapping[str, Any] | None = None

    # -- for the loss
    # `loss_agg_mode`s that it accepts; None: all of verl's.
    agg_modes: tuple[str, ...] | None = None
    # Import path of a subclass of verl's PolicyLossConfig, with settings that the loss reads from the worker's own
    # configuration (`actor.policy_loss._target_`): for a loss that works under any trainer.
    loss_config: str | None = None
    # Names of the (B,) or (B, T) fields that it reads. They come from `row_fields`, else from the estimator.
    loss_needs: tuple[str, ...] = ()
    # (inputs of the advantage stage, settings) -> those fields; on the driver, whatever the estimator.
    row_fields: Callable[[AdvantageInputs, Any], dict[str, torch.Tensor]] | None = None
    # (settings, global step, total steps) -> numbers of this step; a pure function.
    step_scalars: Callable[[Any, int, int], dict[str, float]] | None = None
    # (losses.MiniBatch, settings) -> (fields, totals); before each mini-batch, over all ranks.
    mini_batch: Callable[[Any, Any], tuple[dict[str, torch.Tensor], dict[str, float]]] | None = None

    def __post_init__(self):
        object.__setattr__(self, "prefix", self.prefix or self.name)
        for need in self.needs:
            if need not in FIELDS:
                raise ConfigError(f"method {self.name!r} needs {need!r}, which is not one of {', '.join(FIELDS)}")
        if PROBED_FIELDS & set(self.needs) and not self.probe:
            raise ConfigError(
                f"method {self.name!r} needs {', '.join(PROBED_FIELDS & set(self.needs))} but has no `probe`"
            )

    def config(self, algorithm: Mapping | None) -> MethodConfig:
        return self.config_class.from_algorithm(algorithm, self.name)

    @property
    def loss_asks_for_more(self) -> bool:
        """Does the policy loss read something that only our trainer modes hand over?"""
        return bool(self.loss_needs or self.step_scalars or self.mini_batch)


METHODS: dict[str, Method] = {}


def register_method(method: Method) -> Method:
    """Make a method known here and to verl. Registering the same method again changes nothing.

    Raises:
        ValueError: the name is taken by something else, here or in verl.
    """
    known = METHODS.get(method.name)
    if known is None:
        # Called at once when verl's core_algos is loaded already, else right after it is.
        wrapt.register_post_import_hook(partial(_bind, method), "verl.trainer.ppo.core_algos")
        METHODS[method.name] = method  # not when verl has the name already: a second try must fail as well
    elif known != method:
        raise ValueError(
            f"method name {method.name!r} is already registered by {_origin(known)}; got {_origin(method)}"
        )
    return method


def _origin(method: Method) -> str:
    fn = method.estimator or method.policy_loss
    return f"{fn.__module__}.{fn.__qualname__}" if fn else repr(method)


def _bind(method: Method, core_algos) -> None:
    for registry, register, fn in (
        (core_algos.ADV_ESTIMATOR_REGISTRY, core_algos.register_adv_est, method.estimator and verl_estimator(method)),
        # register_policy_loss overwrites silently, hence the check.
        (core_algos.POLICY_LOSS_REGISTRY, core_algos.register_policy_loss, method.policy_loss),
    ):
        if fn is None:
            continue
        if method.name in registry:
            taken = registry[method.name]
            raise ValueError(
                f"{method.name!r} is already registered in verl by {taken.__module__}.{taken.__qualname__}"
            )
        register(method.name)(fn)


@dataclass
class AdvantageContext:
    """What our trainer modes add around verl's advantage stage, and what they take back.

    final_row: (B,) int64, for each row the row of its session's last output. Only that one enters statistics, and its
    advantage goes to the session's other outputs, as verl does for `grpo` alone (v1/utils.py). None: one output each.
    """

    method: Method
    config: MethodConfig
    state: dict
    fields: dict[str, torch.Tensor]
    final_row: torch.Tensor | None = None
    step: int = 0
    progress: float = 0.0
    output: AdvantageOutput | None = None


_CONTEXT: ContextVar[AdvantageContext | None] = ContextVar("verl_ext_advantage_context", default=None)
# Under a trainer that is not ours the state lives here: in this process only.
_PROCESS_STATE: dict[str, dict] = {}


@contextmanager
def advantage_context(context: AdvantageContext):
    token = _CONTEXT.set(context)
    try:
        yield context
    finally:
        _CONTEXT.reset(token)


def verl_estimator(method: Method) -> Callable:
    """The function verl calls for `algorithm.adv_estimator=<name>`, under its own trainer or under ours."""

    def compute_advantage(token_level_rewards, response_mask, config=None, index=None, **kwargs):
        if index is None:
            raise DataError("the batch has no `uid`: a group-relative estimator cannot tell which rows share a prompt")
        context = _CONTEXT.get()
        if context is None:
            context = _stock_context(method, config, kwargs)
        counted = None
        if context.final_row is not None:
            counted = context.final_row == torch.arange(len(response_mask))
        inputs = AdvantageInputs(
            token_level_rewards=token_level_rewards,
            response_mask=response_mask,
            groups=checked_groups(index, response_mask, counted),
            fields=context.fields,
            final_row=context.final_row,
            norm_by_std=True if config is None else bool(config.get("norm_adv_by_std_in_grpo", True)),
            step=context.step,
            progress=context.progress,
        )
        check_finite("token_level_rewards", inputs.rewards, index)  # a NaN or Inf token makes the row's sum one
        for name, values in context.fields.items():
            check_finite(name, values.sum(-1) if values.dim() == 2 else values, index)
        output = method.estimator(inputs, context.config, context.state)
        advantages = output.advantages.detach()
        check_finite("advantages", advantages.sum(-1) if advantages.dim() == 2 else advantages, index)
        if advantages.dim() == 1:
            # In place on a copy of the mask: the product of float and int64 would hold both.
            rows = inputs.of_session(advantages).unsqueeze(-1)
            advantages = response_mask.to(rows.dtype, copy=True).mul_(rows)
        context.output = output
        return advantages, advantages

    compute_advantage.__name__ = compute_advantage.__qualname__ = f"{method.name}_advantage"
    return compute_advantage


def _stock_context(method: Method, algorithm: Mapping | None, kwargs: dict) -> AdvantageContext:
    missing = [n for n in method.needs if n not in OPTIONAL_FIELDS and kwargs.get(n) is None]
    if missing:
        raise ConfigError(
            f"algorithm.adv_estimator={method.name} needs {', '.join(missing)}, which this trainer does not hand over."
            " Set trainer.v1.trainer_mode=recipe_sync (or recipe_colocate_async, recipe_separate_async)."
        )
    if method.name not in _PROCESS_STATE:
        _PROCESS_STATE[method.name] = {}
        if method.stateful:
            print(
                f"verl_ext: {method.name} keeps a state from step to step. Under this trainer it lives in this process"
                " only and is not in the checkpoint; trainer.v1.trainer_mode=recipe_sync saves and restores it, and"
                f" logs {method.name}/* and acr/*.",
                flush=True,
            )
    return AdvantageContext(
        method=method,
        config=method.config(algorithm),
        state=_PROCESS_STATE[method.name],
        fields={n: kwargs[n] for n in method.needs if kwargs.get(n) is not None},
    )


def updates_per_batch(config) -> int:
    """Optimiser updates that the actor makes on one rollout batch. config: the whole run configuration."""
    actor = config.actor_rollout_ref.actor
    return max(1, config.data.train_batch_size // actor.ppo_mini_batch_size) * actor.get("ppo_epochs", 1)


def refuse_collapse_filter(config, name: str) -> None:
    """ConfigError when the run drops or hides the collapsed groups that method `name` draws its signal from."""
    if config.algorithm.get("use_kl_in_reward", False):
        raise ConfigError(
            f"algorithm.use_kl_in_reward=True makes every reward different, so {name} sees no collapsed group. Set"
            " algorithm.use_kl_in_reward=False; actor_rollout_ref.actor.use_kl_loss=True keeps a KL term in the loss."
        )
    filter_groups = config.algorithm.get("filter_groups", None)
    if filter_groups is not None and filter_groups.get("enable", False):
        raise ConfigError(
            f"algorithm.filter_groups.enable=True removes the collapsed groups that {name} draws its signal from. "
            "Set algorithm.filter_groups.enable=False."
        )


def refuse_rollout_log_probs(config, name: str) -> None:
    """ConfigError when old log-probs would be the rollout engine's instead of the trainer's own."""
    correction = config.algorithm.get("rollout_correction", None)
    if correction is not None and correction.get("bypass_mode", False):
        raise ConfigError(
            f"algorithm.rollout_correction.bypass_mode=True hands the rollout engine's log-probs to {name}, which"
            " compares old with new log-probs and would take the difference between the two engines for drift. Set"
            " algorithm.rollout_correction.bypass_mode=False."
        )


def checked_groups(index: np.ndarray, response_mask: torch.Tensor, counted: torch.Tensor | None) -> Groups:
    """Groups of the batch; refuses a batch with less than two rows per group on average."""
    groups = make_groups(index, response_mask, counted)
    sizes = groups.sizes[groups.sizes > 0]
    if len(sizes) and float(sizes.double().mean()) < 2:
        raise DataError(
            f"{len(sizes)} groups hold {int(sizes.sum())} responses, fewer than two each on average, so there is"
            " nothing to compare within a group. Set actor_rollout_ref.rollout.n >= 2 (8 is usual)."
        )
    alone = int((sizes == 1).sum())
    if alone:
        logger.warning("%d of %d groups have one response only; their advantage is 0", alone, len(sizes))
    return groups


def check_finite(name: str, values: torch.Tensor, uid: np.ndarray | None = None) -> None:
    """Raise DataError naming the field and the first bad row when `values` (B, ...) holds NaN or Inf."""
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        row = int((~finite.flatten(1).all(1) if values.dim() > 1 else ~finite).nonzero()[0])
        where = f" (uid {uid[row]})" if uid is not None else ""
        bad = values[row][~finite[row]] if values.dim() > 1 else values[row]
        raise DataError(
            f"{name} is not finite in row {row}{where}: {bad.flatten()[0].item()}. Fix the function that made it."
        )
