"""verl's actor worker with two additions, at verl's own seam: `actor_worker_cls` of ActorRolloutRefWorker, and
`role_worker_mapping` of the trainer.

The loss sees a whole mini-batch before it is split: verl's engines hand a loss one micro-batch at a time, and what must
be counted over the mini-batch and all ranks (the mastered rows of mcpo, the rows that are not padding) is counted here.

Packed probes (verl_ext/probe.py) get their attention mask.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from transformers import PreTrainedModel
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.padding import no_padding_2_padding

from verl_ext.losses import MiniBatch, RecipeLoss
from verl_ext.probe import COPY, SEES, packed_attention_mask
from verl_ext.registry import ConfigError


class RecipeTrainingWorker(TrainingWorker):
    def train_batch(self, data):
        if isinstance(self.loss_fn, RecipeLoss):
            group = self.engine.get_data_parallel_group()
            batch = MiniBatch(
                data,
                all_gather=lambda value: _all_gather(value, group),
                rank=self.engine.get_data_parallel_rank(),
                current_log_probs=lambda: self._current_log_probs(data),
            )
            self.loss_fn.prepare(batch)
        return super().train_batch(data)

    def infer_batch(self, data):
        if COPY not in data.keys():
            return super().infer_batch(data)
        with packed_attention(self.engine):
            return super().infer_batch(data)

    def _current_log_probs(self, data) -> torch.Tensor:
        """(b, T) log-probs of the responses under the weights as they are now: verl's own forward pass."""
        batch = data.copy()  # shallow: what the pass assigns stays out of the mini-batch
        tu.assign_non_tensor(batch, compute_loss=False, calculate_entropy=False, disable_auto_offload=True)
        output = self.infer_batch(batch)
        return no_padding_2_padding(output["log_probs"], data).to(data["response_mask"].device)


class RecipeActorRolloutRefWorker(ActorRolloutRefWorker):
    actor_worker_cls = RecipeTrainingWorker


class RecipeDetachActorWorker(DetachActorWorker):
    actor_worker_cls = RecipeTrainingWorker


# verl's workers that hold an actor, and ours in their place.
OURS = {ActorRolloutRefWorker: RecipeActorRolloutRefWorker, DetachActorWorker: RecipeDetachActorWorker}


@contextmanager
def packed_attention(engine):
    """The rows of verl's FSDP engine (verl 0.9) are packed probes: attention by mask, through sdpa.

    The engine's `prepare_model_inputs`, which its subclasses override, is wrapped on this instance; flash attention,
    which takes no mask, is put aside by transformers' own switch.
    """
    model = next(m for m in engine.module.modules() if isinstance(m, PreTrainedModel))
    if "sliding_attention" in (getattr(model.config, "layer_types", None) or ()):
        raise ConfigError(
            f"{type(model).__name__} has layers with a sliding window, which the mask of packed probes does not keep."
            " Set probe_layout=batched."
        )
    usual, prepare = model.config._attn_implementation, engine.prepare_model_inputs

    def with_mask(micro_batch):
        inputs, output_args = prepare(micro_batch)
        inputs["attention_mask"] = packed_attention_mask(micro_batch[COPY], micro_batch[SEES])
        return inputs, output_args

    engine.prepare_model_inputs = with_mask
    if usual != "sdpa":
        model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        del engine.prepare_model_inputs
        if usual != "sdpa":
            model.set_attn_implementation(usual)


def _all_gather(value, group) -> list:
    pieces = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(pieces, value, group)
    return pieces
