"""The actor loss with more than verl hands to it: per-row fields and numbers of the step.

verl calls a registered policy loss with log-probs, advantages and mask only. `recipe_ppo_loss` is the loss function
that our trainer modes install with `set_loss_fn` when a registered loss asks for more (`Method.loss_needs`): it puts
what was asked for where the policy loss finds it (`loss_inputs()`), then calls verl's `ppo_loss`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

# Key under which the step's numbers travel in the batch's extra_info (a non-tensor of verl's TensorDict).
SCALARS_KEY = "recipe_scalars"


@dataclass(frozen=True)
class LossInputs:
    """What a policy loss may read. fields: (b,) or (b, T) tensors of this micro-batch; scalars: numbers of the step."""

    fields: Mapping[str, torch.Tensor] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)


_INPUTS: ContextVar[LossInputs | None] = ContextVar("verl_ext_loss_inputs", default=None)


def loss_inputs() -> LossInputs:
    """The fields and scalars of the micro-batch whose loss is being computed.

    Raises:
        RuntimeError: called under a trainer that does not hand them over.
    """
    inputs = _INPUTS.get()
    if inputs is None:
        raise RuntimeError(
            "this policy loss needs fields or scalars that the trainer did not hand over: "
            "set trainer.v1.trainer_mode=recipe_sync (or recipe_colocate_async, recipe_separate_async)"
        )
    return inputs


def recipe_ppo_loss(config, model_output, data, dp_group=None, needs: tuple[str, ...] = ()):
    """verl's `ppo_loss` (verl/workers/utils/losses.py), with `loss_inputs()` set for the registered policy loss.

    data: TensorDict of one micro-batch in verl's no-padding layout; fields among `needs` are (b,) or nested (b, j).

    Raises:
        KeyError: a needed field or scalar is not in the batch.
    """
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.losses import ppo_loss

    scalars = tu.get_non_tensor_data(data, SCALARS_KEY, None) or {}
    fields = {}
    for name in needs:
        if name in scalars:
            continue
        if name not in data:
            raise KeyError(f"the actor loss needs {name!r}, but the batch holds {sorted(data.keys())}")
        value = data[name]
        fields[name] = value.to_padded_tensor(0.0) if value.is_nested else value
    token = _INPUTS.set(LossInputs(fields, scalars))
    try:
        return ppo_loss(config=config, model_output=model_output, data=data, dp_group=dp_group)
    finally:
        _INPUTS.reset(token)
