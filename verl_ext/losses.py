"""The actor loss with more than verl hands to it: per-row fields, numbers of the step, totals of the mini-batch.

verl calls a registered policy loss with log-probs, advantages and mask only. `RecipeLoss` is the loss function that our
trainer modes install with `set_loss_fn` when a registered loss asks for more (`Method.loss_asks_for_more`): it puts
what was asked for where the policy loss finds it (`loss_inputs()`), then calls verl's `ppo_loss`. What depends on the
whole mini-batch is computed before it is split into micro-batches (`worker.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

# Keys under which numbers travel with a batch (non-tensors of verl's TensorDict).
SCALARS_KEY = "recipe_scalars"
TOTALS_KEY = "recipe_totals"
# Marks fields of the mini-batch, and the metrics recorded here: verl puts `actor/` before every name of a metric, our
# trainer modes take both off again.
MARK = "recipe:"


@dataclass(frozen=True)
class LossInputs:
    """What a policy loss may read.

    fields: (b,) or (b, T) tensors of this micro-batch. scalars: numbers of the step. totals: numbers of the mini-batch,
    over all ranks. settings: `algorithm.<name>` of the loss's method.
    """

    fields: Mapping[str, torch.Tensor] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    totals: Mapping[str, float] = field(default_factory=dict)
    settings: Any = None
    recorded: list[tuple[str, str, torch.Tensor]] = field(default_factory=list)


_INPUTS: ContextVar[LossInputs | None] = ContextVar("verl_ext_loss_inputs", default=None)

NOT_HANDED_OVER = (
    "this policy loss needs fields or scalars that the trainer did not hand over: "
    "set trainer.v1.trainer_mode=recipe_sync (or recipe_colocate_async, recipe_separate_async)"
)


def loss_inputs(required: bool = True) -> LossInputs | None:
    """The fields and numbers of the micro-batch whose loss is being computed.

    Raises:
        RuntimeError: `required`, and called under a trainer that does not hand them over (None otherwise).
    """
    inputs = _INPUTS.get()
    if inputs is None and required:
        raise RuntimeError(NOT_HANDED_OVER)
    return inputs


def record(name: str, value: torch.Tensor, how: str) -> None:
    """Log a number of this micro-batch as `name`; nothing happens under a trainer that is not ours.

    how: `min`, `max`: over all micro-batches and ranks of the step. `sum`: over the micro-batches of a mini-batch, mean
    over ranks, then mean over the mini-batches of the step: for a value that is normalised over the mini-batch, as
    agg_loss does. Every micro-batch must record the same names; with nothing to say, +inf, -inf or 0.
    """
    inputs = _INPUTS.get()
    if inputs is not None:
        inputs.recorded.append((name, how, value.detach().float()))


def record_share(name: str, part: torch.Tensor, whole: torch.Tensor) -> None:
    """Log sum(part) / sum(whole) over all micro-batches, ranks and mini-batches of the step as `name`."""
    record(f"{name}:part", part, "sum")
    record(f"{name}:whole", whole, "sum")


def recorded_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """What `record` logged, with its own names again and the shares divided, beside verl's metrics as they are.

    A share of nothing, or an extreme over nothing, is left out.
    """
    out, marked = {}, {}
    for key, value in metrics.items():
        _, mark, name = key.partition(MARK)
        (marked if mark else out)[name if mark else key] = value
    for name, value in marked.items():
        stem, _, kind = name.rpartition(":")
        if kind == "part":
            if marked[f"{stem}:whole"]:
                out[stem] = value / marked[f"{stem}:whole"]
        elif kind != "whole" and abs(value) != float("inf"):
            out[name] = value
    return out


class MiniBatch:
    """What `Method.mini_batch` sees: this rank's rows of one mini-batch, and sums and rows over all ranks.

    data: verl's TensorDict of the mini-batch. all_gather(object) -> one object for each data-parallel rank; rank: which
    of them is this one's. current_log_probs() -> (b, T) of the weights as they are now, without gradient: one forward
    pass.
    """

    def __init__(self, data, all_gather: Callable[[Any], list], rank: int, current_log_probs: Callable):
        self.data, self.current_log_probs = data, current_log_probs
        self._all_gather, self._rank = all_gather, rank

    def field(self, name: str) -> torch.Tensor:
        """(b,) or (b, T) field of this rank's rows; 0 beyond a row's length."""
        return _padded(self.data[name])

    def sum(self, value: torch.Tensor) -> float:
        """Sum of a number over the ranks."""
        return float(sum(self._all_gather(float(value))))

    def gather(self, values: torch.Tensor) -> tuple[torch.Tensor, slice]:
        """(b, ...) -> the rows of all ranks, padded with 0 to one length, and which of them are this rank's."""
        pieces = self._all_gather(values.detach())
        if values.dim() == 2:
            width = max(piece.shape[1] for piece in pieces)
            pieces = [torch.nn.functional.pad(piece, (0, width - piece.shape[1])) for piece in pieces]
        first = sum(len(piece) for piece in pieces[: self._rank])
        return torch.cat([piece.to(values.device) for piece in pieces]), slice(first, first + len(values))


class RecipeLoss:
    """verl's `ppo_loss` (verl/workers/utils/losses.py) with `loss_inputs()` set for the registered policy loss.

    Called by verl's engines for each micro-batch, a TensorDict in the no-padding layout: fields among `needs` are (b,)
    or nested (b, j). Pickled to the workers.

    Args:
        config: verl's ActorConfig. needs: fields that the policy loss reads. mini_batch, settings: of the method.
    """

    def __init__(self, config, needs: tuple[str, ...] = (), mini_batch: Callable | None = None, settings: Any = None):
        self.config, self.needs, self.mini_batch, self.settings = config, needs, mini_batch, settings

    def prepare(self, batch: MiniBatch) -> None:
        """Put into the mini-batch, before it is split, what its micro-batches cannot know.

        `global_batch_size` becomes the number of rows with a response: verl's is the configured size, which counts
        padding rows (specs/README: "without padding rows").
        """
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils.padding import response_to_nested

        rows = batch.sum((batch.field("response_mask").sum(1) > 0).sum())
        tu.assign_non_tensor(batch.data, global_batch_size=max(1, int(rows)))
        if self.mini_batch is None:
            return
        fields, totals = self.mini_batch(batch, self.settings)
        tu.assign_non_tensor_data(batch.data, TOTALS_KEY, totals)
        for name, value in fields.items():
            nested = response_to_nested(value, batch.data["response_mask"]) if value.dim() == 2 else value
            batch.data[MARK + name] = nested

    def __call__(self, model_output, data, dp_group=None):
        """Loss and metrics of a micro-batch.

        Raises:
            KeyError: a needed field is not in the batch.
        """
        from verl.utils import tensordict_utils as tu
        from verl.utils.metric import Metric
        from verl.workers.utils.losses import ppo_loss

        for name in self.needs:
            if name not in data:
                raise KeyError(f"the actor loss needs {name!r}, but the batch holds {sorted(data.keys())}")
        inputs = LossInputs(
            fields={name: _padded(data[name]) for name in self.needs}
            | {key[len(MARK) :]: _padded(data[key]) for key in data.keys() if key.startswith(MARK)},
            scalars=tu.get_non_tensor_data(data, SCALARS_KEY, None) or {},
            totals=tu.get_non_tensor_data(data, TOTALS_KEY, None) or {},
            settings=self.settings,
        )
        token = _INPUTS.set(inputs)
        try:
            loss, metrics = ppo_loss(config=self.config, model_output=model_output, data=data, dp_group=dp_group)
        finally:
            _INPUTS.reset(token)
        if inputs.recorded:
            values = torch.stack([value for _, _, value in inputs.recorded]).tolist()  # one transfer for all
            for (name, how, _), value in zip(inputs.recorded, values, strict=True):
                metrics[MARK + name] = Metric(how, value)
        return loss, metrics


def loss_settings(method, actor_config):
    """Settings of a loss from the worker's own configuration, `actor.policy_loss` of verl's ActorConfig.

    With verl's own class there (`_target_` not set) they are the defaults of `method.loss_config`.
    """
    from hydra.utils import get_class

    wanted = get_class(method.loss_config)
    found = actor_config.policy_loss
    return found if isinstance(found, wanted) else wanted(loss_mode=found.loss_mode)


def _padded(values: torch.Tensor) -> torch.Tensor:
    return values.to_padded_tensor(0) if values.is_nested else values
