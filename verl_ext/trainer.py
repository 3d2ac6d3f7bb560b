"""Our trainer modes: verl's V1 trainers, with what a method declares it needs.

`trainer.v1.trainer_mode=recipe_sync | recipe_colocate_async | recipe_separate_async` is verl's trainer of that mode
plus: the collapse rate of every estimator, the fields that a method asks for at the advantage stage, the method's
metrics, its fields and numbers in the actor loss, and its state in the checkpoint. Every step is verl's own; the
overrides below call it.

A project with its own trainer mixes `RecipeTrainerMixin` in before its trainer class and sets `base_mode`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import ClassVar

import numpy as np
import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.padding import response_to_nested

from verl_ext import preflight
from verl_ext.acr import TOL, acr_metrics, binary_accuracy, watch
from verl_ext.groups import make_groups
from verl_ext.losses import SCALARS_KEY, RecipeLoss, loss_settings, recorded_metrics
from verl_ext.probe import ActorProbe, dump, packed_refusal
from verl_ext.registry import (
    METHODS,
    PROBED_FIELDS,
    AdvantageContext,
    AdvantageInputs,
    DataError,
    MethodConfig,
    advantage_context,
    check_finite,
)
from verl_ext.schedules import progress
from verl_ext.worker import OURS

STATE_FILE = "recipe_state.json"


class RecipeTrainerMixin:
    """Mix in before a verl V1 trainer. `base_mode` is the name of the verl mode underneath."""

    base_mode: ClassVar[str]

    @property
    def trainer_mode(self) -> str:
        # verl branches on this name (trainer_base.py: replay buffer, refill, checkpoints of the queue) and reads
        # trainer.v1.<name>; a name it does not know would count as asynchronous.
        return self.base_mode

    @trainer_mode.setter
    def trainer_mode(self, configured: str) -> None:
        """verl assigns the configured name (`recipe_*`); the mode underneath is fixed by the class."""

    def __init__(self, config):
        preflight.check_methods(config)
        algorithm = config.algorithm
        self.method = METHODS.get(algorithm.adv_estimator)
        self.method_config = self.method.config(algorithm) if self.method else None
        loss_method = METHODS.get(config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla"))
        self.loss_method = loss_method if loss_method and loss_method.loss_asks_for_more else None
        self.loss_config = self.loss_method.config(algorithm) if self.loss_method else None
        self.method_state: dict = {}
        self.acr_watch = watch(algorithm)
        super().__init__(config)

    # -- the loss's part: worker, loss function -------------------------------------------------------------------

    def _init_resource_pool_mgr(self):
        super()._init_resource_pool_mgr()
        if self.loss_method or (self.method and self.method.probe):
            for role, worker in self.role_worker_mapping.items():
                if issubclass(worker.__ray_actor_class__, ActorRolloutRefWorker):
                    self.role_worker_mapping[role] = ray.remote(OURS[worker.__ray_actor_class__])

    def on_init_end(self):
        if self.loss_method:
            self.actor_config = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
            loss = RecipeLoss(
                self.actor_config, self.loss_method.loss_needs, self.loss_method.mini_batch, self.loss_config
            )
            self.actor_rollout_wg.set_loss_fn(loss)
        super().on_init_end()

    # -- advantage stage ------------------------------------------------------------------------------------------

    def _compute_advantage(self, batch, metrics):
        needs = {need for method in (self.method, self.loss_method) if method for need in method.needs}
        rows = _Rows(batch, needs=tuple(sorted(needs)), settings=self.method_config or self.loss_config)
        t = progress(self.global_steps, max(self.global_steps, self.total_training_steps))
        context, probed = None, None
        if self.method:
            if self.method.probe:
                probed = self._probe(batch, rows, t)
                rows.fields |= probed.fields
                metrics.update(probed.metrics)
            context = AdvantageContext(
                method=self.method,
                config=self.method_config,
                state=self.method_state,
                fields={name: rows.fields[name] for name in self.method.needs if name in rows.fields},
                final_row=rows.final_row,
                step=self.global_steps,
                progress=t,
            )
        with advantage_context(context):
            batch = super()._compute_advantage(batch, metrics)

        advantages = _padded(_fetch(batch, ["advantages"])["advantages"])
        if probed is not None and self.config.trainer.get("rollout_data_dir", None):
            dump(self.config.trainer.rollout_data_dir, self.global_steps, probed.segments(), advantages)
        acr = acr_metrics(rows.groups, rows.rewards, rows.acc, advantages, rows.tol)
        acr.update(self.acr_watch.update(acr["acr/rate"]))
        metrics.update(acr)
        warning = self.acr_watch.warning(acr)
        if warning:
            print(f"verl_ext: step {self.global_steps}: {warning}", flush=True)

        loss_fields = {}
        if context is not None:
            metrics.update(context.output.metrics)
            loss_fields |= context.output.loss_fields
            self._step_scalars = context.output.loss_scalars
        if self.loss_method and self.loss_method.row_fields:
            loss_fields |= self.loss_method.row_fields(rows.inputs(self.global_steps, t), self.loss_config)
        if loss_fields:
            nested = {
                name: response_to_nested(value, rows.response_mask) if value.dim() == 2 else value
                for name, value in loss_fields.items()
            }
            # The batch that comes back names the new fields; workers fetch what their batch names.
            batch = tq.kv_batch_put(
                keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(nested, batch_size=len(batch))
            )
        return batch

    def _probe(self, batch, rows: _Rows, t: float):
        """The method's `probe` on this batch: a forward pass of the actor through verl's own `compute_log_prob`."""
        for name, values in rows.fields.items():
            check_finite(name, values.sum(-1) if values.dim() == 2 else values, rows.uid)
        config, group = self.config.actor_rollout_ref, self.actor_rollout_wg
        data = _fetch(batch, ["prompts", "responses", "reward_model"])
        actor = ActorProbe(
            forward=group.compute_log_prob,
            prompts=list(data["prompts"].unbind()),
            responses=list(data["responses"].unbind()),
            references=[(entry or {}).get("ground_truth") for entry in _values(data["reward_model"])],
            uid=rows.uid,
            tokenizer=self.tokenizer,
            ranks=max(group._dispatch_info["actor"]) + 1,  # as verl's _balance_batch, which has filled it
            max_tokens=config.rollout.log_prob_max_token_len_per_gpu,
            temperature=config.rollout.temperature,
            packed_refusal=packed_refusal(config.actor),
        )
        return self.method.probe(rows.inputs(self.global_steps, t), self.method_config, actor)

    def _update_actor(self, batch, metrics):
        if self.loss_method:
            scalars = dict(getattr(self, "_step_scalars", {}))
            if self.loss_method.step_scalars:
                settings = self.loss_settings()
                scalars |= self.loss_method.step_scalars(settings, self.global_steps, self.total_training_steps)
            batch.extra_info[SCALARS_KEY] = scalars
            metrics.update({f"{self.loss_method.prefix}/{name}": value for name, value in scalars.items()})
        batch = super()._update_actor(batch, metrics)
        if self.loss_method:
            plain = recorded_metrics(metrics)
            metrics.clear()
            metrics.update(plain)
        return batch

    def loss_settings(self):
        """What `Method.step_scalars` gets: the loss's part of the actor's configuration, else `algorithm.<name>`."""
        return loss_settings(self.loss_method, self.actor_config) if self.loss_method.loss_config else self.loss_config

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def _state_path(self) -> Path:
        """State of the checkpoint at `self.global_steps`, beside verl's own files."""
        if self.config.trainer.resume_mode == "resume_path" and not getattr(self, "_resumed", False):
            return Path(self.config.trainer.resume_from_path).absolute() / STATE_FILE
        return Path(self.config.trainer.default_local_dir).absolute() / f"global_step_{self.global_steps}" / STATE_FILE

    def _save_checkpoint(self):
        path = self._state_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "estimator": self.config.algorithm.adv_estimator,
            "global_step": self.global_steps,
            "method": self.method_state,
            "acr": self.acr_watch.state_dict(),
        }
        scratch = path.with_suffix(".tmp")
        scratch.write_text(json.dumps(state, indent=1))
        os.replace(scratch, path)  # before verl names this checkpoint the latest one
        super()._save_checkpoint()

    def _load_checkpoint(self):
        super()._load_checkpoint()
        path, self._resumed = self._state_path(), True
        if self.global_steps == 0:
            return
        name = self.config.algorithm.adv_estimator
        if not path.exists():
            if self.method and self.method.stateful:
                raise FileNotFoundError(
                    f"{path} is missing: the checkpoint was not written by a recipe trainer mode, so the state of"
                    f" {name} cannot be restored. Start it afresh with trainer.resume_mode=disable and"
                    " actor_rollout_ref.model.path=<the checkpoint's merged model>."
                )
            print(f"verl_ext: {path} is missing; acr/* running values start afresh", flush=True)
            return
        state = json.loads(path.read_text())
        self.acr_watch.load_state_dict(state["acr"])
        if state["estimator"] == name:
            self.method_state = state["method"]
        elif self.method and self.method.stateful:
            print(
                f"verl_ext: the checkpoint was trained with {state['estimator']}; {name} starts with a fresh state",
                flush=True,
            )


class _Rows:
    """What the advantage stage knows of the batch's rows, read once from the TransferQueue."""

    def __init__(self, batch, needs: tuple[str, ...], settings: MethodConfig | None):
        tensors = [name for name in needs if name != "acc" and name not in PROBED_FIELDS]
        data = _fetch(batch, ["uid", "response_mask", "rm_scores", "extra_fields", "acc", *tensors])
        missing = [name for name in tensors if name not in data]
        if missing:
            raise DataError(f"the batch has no {', '.join(missing)}; it holds {sorted(data.keys())}")
        self.response_mask = data["response_mask"]
        mask = _padded(self.response_mask)
        self.uid = uid = np.array(_values(data["uid"]), dtype=object)
        padding = torch.tensor([bool(tag.get("is_padding", False)) for tag in batch.tags])
        self.final_row = _final_rows(batch.keys)
        counted = ~padding & (self.final_row == torch.arange(len(padding)))
        self.groups = make_groups(uid, mask, counted)
        self.scores = _padded(data["rm_scores"])
        self.rewards = self.scores.sum(-1)
        check_finite("rm_scores", self.rewards, uid)  # whatever the estimator
        flags = _accuracy_flags(data, padding)
        self.acc = flags
        if flags is None:
            own = ((settings.r_lo, settings.r_hi),) if hasattr(settings, "r_lo") else ()
            self.acc = binary_accuracy(self.rewards, self.groups.counted, *([own] if own else []))
        self.tol = getattr(settings, "tol", TOL)
        self.fields = {name: _padded(data[name]) for name in tensors}
        if "acc" in needs and flags is not None:
            self.fields["acc"] = flags

    def inputs(self, step: int, t: float) -> AdvantageInputs:
        """The advantage stage as an estimator sees it, on the rewards before any KL term."""
        return AdvantageInputs(
            self.scores, _padded(self.response_mask), self.groups, self.fields, self.final_row, step=step, progress=t
        )


def _fetch(batch, fields: list[str]) -> TensorDict:
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)


def _values(field) -> list:
    # A non-tensor field comes back from the queue as a NonTensorStack, a LinkedList or an array.
    return field.tolist() if hasattr(field, "tolist") else list(field)


def _padded(values: torch.Tensor) -> torch.Tensor:
    return values.to_padded_tensor(0) if values.is_nested else values


def _final_rows(keys: list[str]) -> torch.Tensor:
    """(B,) int64: for each row the row of its session's last output. Keys are `{uid}_{session}_{output}`."""
    last: dict[str, tuple[int, int]] = {}
    sessions = []
    for row, key in enumerate(keys):
        session, output = key.rsplit("_", 1)
        sessions.append(session)
        last[session] = max(last.get(session, (-1, -1)), (int(output), row))
    return torch.tensor([last[session][1] for session in sessions])


def _accuracy_flags(data: TensorDict, padding: torch.Tensor) -> torch.Tensor | None:
    """(B,) float flags that the reward function returned as `acc`; None when it returns none."""
    if "acc" in data:  # a colocated reward model writes a field of its own
        return torch.as_tensor(_values(data["acc"]), dtype=torch.float32)
    if "extra_fields" not in data:
        return None
    infos = [(fields or {}).get("reward_extra_info") or {} for fields in _values(data["extra_fields"])]
    flags = [info.get("acc") for info in infos]
    known = [flag is not None or bool(pad) for flag, pad in zip(flags, padding, strict=True)]
    if not any(flag is not None for flag, pad in zip(flags, padding, strict=True) if not pad):
        return None
    if not all(known):
        raise DataError(
            f"the reward function returned `acc` for some responses only; row {known.index(False)} has none"
        )
    return torch.tensor([0.0 if flag is None else float(flag) for flag in flags])


@register_trainer("recipe_sync")
class RecipeTrainerSync(RecipeTrainerMixin, PPOTrainerSync):
    base_mode = "sync"


@register_trainer("recipe_colocate_async")
class RecipeTrainerColocateAsync(RecipeTrainerMixin, PPOTrainerColocateAsync):
    base_mode = "colocate_async"


@register_trainer("recipe_separate_async")
class RecipeTrainerSeparateAsync(RecipeTrainerMixin, PPOTrainerSeparateAsync):
    base_mode = "separate_async"
