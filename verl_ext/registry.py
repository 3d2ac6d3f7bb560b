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
}
# `acc` has a fallback that every trainer can provide (see `accuracy`); the others only our trainer modes hand over.
OPTIONAL_FIELDS = frozenset({"acc"})


class ConfigError(ValueError):
    """A configuration value that cannot work; the message names the key, the value and the fix."""


class DataError(ValueError):
    """A value in the batch that must not be passed on (NaN, a reward out of range); names the field and the row."""


@dataclass(frozen=True)
class MethodConfig:
    """Base of a method's settings, read from `algorithm.<name>`. Subclasses check their values in `__post_init__`."""

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
    norm_by_std: verl's `algorithm.norm_adv_by_std_in_grpo`. step: global step from 1 (0 when unknown). progress: in
    [0, 1].
    """

    token_level_rewards: torch.Tensor
    response_mask: torch.Tensor
    groups: Groups
    fields: Mapping[str, torch.Tensor] = field(default_factory=dict)
    norm_by_std: bool = True
    step: int = 0
    progress: float = 0.0

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
    """A method as the project knows it. `check(config)` sees the whole run configuration and raises ConfigError.

    A policy loss is looked up by `actor.policy_loss.loss_mode`, an estimator by `algorithm.adv_estimator`.
    """

    name: str
    config_class: type[MethodConfig] = MethodConfig
    estimator: Estimator | None = None
    policy_loss: Callable | None = None
    needs: tuple[str, ...] = ()
    # What the policy loss reads through losses.loss_inputs(): fields of an estimator's output, or scalars.
    loss_needs: tuple[str, ...] = ()
    # (config, global step, total steps) -> numbers of this step for the loss; a pure function.
    step_scalars: Callable[[Any, int, int], dict[str, float]] | None = None
    stateful: bool = False
    check: Callable[[Any], None] | None = None
    # Settings of the method for which it is verl's grpo (or the relative it names); None where there is none.
    neutral: Mapping[str, Any] | None = None

    def __post_init__(self):
        for need in self.needs:
            if need not in FIELDS:
                raise ConfigError(f"method {self.name!r} needs {need!r}, which is not one of {', '.join(FIELDS)}")

    def config(self, algorithm: Mapping | None) -> MethodConfig:
        return self.config_class.from_algorithm(algorithm, self.name)


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
            norm_by_std=True if config is None else bool(config.get("norm_adv_by_std_in_grpo", True)),
            step=context.step,
            progress=context.progress,
        )
        check_finite("token_level_rewards", inputs.rewards, index)  # a NaN or Inf token makes the row's sum one
        output = method.estimator(inputs, context.config, context.state)
        advantages = output.advantages.detach()
        check_finite("advantages", advantages, index)
        if advantages.dim() == 1:
            if context.final_row is not None:
                advantages = advantages[context.final_row]
            advantages = advantages.unsqueeze(-1) * response_mask
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


def checked_groups(index: np.ndarray | None, response_mask: torch.Tensor, counted: torch.Tensor | None) -> Groups:
    """Groups of the batch; refuses a batch without a uid, or with less than two rows per group on average."""
    if index is None:
        raise DataError("the batch has no `uid`: a group-relative estimator cannot tell which rows share a prompt")
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
