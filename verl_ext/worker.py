"""verl's actor worker with one addition: the loss sees a whole mini-batch before it is split into micro-batches.

verl's engines hand a loss one micro-batch at a time. What must be counted over the mini-batch and all ranks (the
mastered rows of mcpo, the rows that are not padding) is counted here, at verl's own seam: `actor_worker_cls` of
ActorRolloutRefWorker, and `role_worker_mapping` of the trainer.
"""

from __future__ import annotations

import torch
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.padding import no_padding_2_padding

from verl_ext.losses import MiniBatch, RecipeLoss


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

    def _current_log_probs(self, data) -> torch.Tensor:
        """(b, T) log-probs of the responses under the weights as they are now: verl's own forward pass."""
        batch = data.copy()  # shallow: what the pass assigns stays out of the mini-batch
        tu.assign_non_tensor(batch, compute_loss=False, calculate_entropy=False, disable_auto_offload=True)
        output = self.infer_batch(batch)
        return no_padding_2_padding(output["log_probs"], data).to(data["response_mask"].device)


class RecipeActorRolloutRefWorker(ActorRolloutRefWorker):
    actor_worker_cls = RecipeTrainingWorker


def _all_gather(value, group) -> list:
    pieces = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(pieces, value, group)
    return pieces
