"""Every estimator with every policy loss through verl's real training worker: FSDP2, gloo, a small language model.

    python engine_probe.py <model folder> <out.json>      RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT as for torchrun

One rollout batch of 16 responses is made up once; for each pair its advantages are computed as the trainer does, and
`train_mini_batch` makes four updates: two mini-batches, twice. Rank 0 writes the metrics and gradients of each update,
and what belief probes of both layouts say.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial

import numpy as np
import torch
import verl  # noqa: F401  loads the plug-in
from hydra import compose, initialize_config_dir
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.py_functional import rename_dict
from verl.workers.config import TrainingWorkerConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding, response_to_nested

import recipes
from verl_ext.groups import make_groups
from verl_ext.losses import MARK, SCALARS_KEY, RecipeLoss, loss_settings
from verl_ext.probe import LAYOUTS, make_probes
from verl_ext.registry import METHODS, AdvantageContext, AdvantageInputs, advantage_context
from verl_ext.worker import RecipeTrainingWorker

ROWS, GROUP, WIDTH, PROMPT = 16, 4, 7, 3
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
# Groups: mixed, all correct, all wrong, three of four correct.
REWARDS = [1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 0]
# A rank's rows are consecutive, and it takes half of its rows into each mini-batch: so that both mini-batches are the
# same for one rank and for two.
ORDER = list(range(16)) if RANKS == 1 else [*range(0, 4), *range(8, 12), *range(4, 8), *range(12, 16)]

# (estimator, loss, settings): all pairs, and the switches whose loss depends on the whole mini-batch.
ESTIMATORS = ["grpo", *sorted(name for name, m in METHODS.items() if m.estimator)]
LOSSES = ["vanilla", "gspo", "cispo", *sorted(name for name, m in METHODS.items() if m.policy_loss)]
# Where the defaults leave nothing to see: no trigger in this batch; weights on the driver.
SETTINGS = {
    "avspo": {"algorithm.avspo.trigger": "always"},
    "grpo_vps": {"algorithm.norm_adv_by_std_in_grpo": False},
}
LOSS_SETTINGS = {"cov_grpo": {"algorithm.cov_grpo.logp": "current"}}
EXTRA = [
    ("mcpo", "mcpo", {"algorithm.mcpo.hkl_norm": "mastered", "algorithm.mcpo.hkl_beta": 5.0}),
    ("cov_grpo", "cov_grpo", {}),
    ("cov_grpo", "cov_grpo", {"algorithm.cov_grpo.logp": "current", "algorithm.cov_grpo.scope": "batch"}),
    ("cov_grpo", "cov_grpo", {"algorithm.cov_grpo.scope": "microbatch"}),
]


def configuration(estimator: str, loss: str, settings: dict, model: str):
    overrides = [
        "+scale=cpu",
        f"algorithm.adv_estimator={estimator}",
        f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_coef=0",
        "actor_rollout_ref.actor.optim.lr=0.0005",
        "actor_rollout_ref.actor.optim.clip_grad=1000",
        "actor_rollout_ref.rollout.n=4",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    ]
    method = METHODS.get(loss)
    if method and method.loss_config:
        overrides.append(f"actor_rollout_ref.actor.policy_loss._target_={method.loss_config}")
    overrides += [f"++{key}={value}" for key, value in settings.items()]
    with initialize_config_dir(str(recipes.ROOT / "grpo" / "config"), version_base=None):
        return compose("grpo", overrides=overrides)


class Probe:
    def __init__(self, model: str):
        config = configuration("grpo", "vanilla", {}, model).actor_rollout_ref
        actor = omega_conf_to_dataclass(config.actor)
        actor.engine.use_dynamic_bsz, actor.engine.micro_batch_size_per_gpu = False, 2 * RANKS
        actor.engine.infer_micro_batch_size_per_gpu = 4
        self.worker = RecipeTrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=omega_conf_to_dataclass(config.model),
                engine_config=actor.engine,
                optimizer_config=actor.optim,
                checkpoint_config=actor.checkpoint,
            )
        )
        self.worker.reset()
        engine = self.worker.engine
        self.weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        self.gradients: list[list[float]] = []
        engine.optimizer.register_step_pre_hook(lambda *_: self.gradients.append(self._gradient()))
        self.batch = self._batch()

    def _gradient(self) -> list[float]:
        full = [p.grad.full_tensor().flatten() for p in self.worker.engine.module.parameters()]
        return torch.cat(full).double().tolist()

    def _batch(self) -> TensorDict:
        rng = torch.Generator().manual_seed(0)
        lengths = torch.randint(1, WIDTH + 1, (ROWS,), generator=rng)
        ids = [torch.randint(2, 60, (PROMPT + int(n),), generator=rng) for n in lengths]
        jagged = lambda pieces: torch.nested.as_nested_tensor(pieces, layout=torch.jagged)  # noqa: E731
        ones = [torch.ones(int(n), dtype=torch.long) for n in lengths]
        data = TensorDict(
            {
                "input_ids": jagged(ids),
                "position_ids": jagged([torch.arange(len(row)) for row in ids]),
                "prompts": jagged([row[:PROMPT] for row in ids]),
                "responses": jagged([row[PROMPT:] for row in ids]),
                "response_mask": jagged(ones),
                "loss_mask": jagged(ones),
            },
            batch_size=ROWS,
        )
        pass_through = data.copy()
        tu.assign_non_tensor(pass_through, compute_loss=False, calculate_entropy=True, temperature=1.0)
        output = self.worker.infer_batch(pass_through)
        for name, key in (("log_probs", "old_log_probs"), ("entropy", "entropy")):
            padded = no_padding_2_padding(output[name], data)
            data[key] = response_to_nested(padded, data["response_mask"])
        noise = torch.randn(padded.shape, generator=rng) * 0.3
        reference = data["old_log_probs"].to_padded_tensor(0.0) + noise
        data["ref_log_prob"] = response_to_nested(reference, data["response_mask"])
        return data

    def run(self, estimator: str, loss: str, settings: dict, model: str) -> dict:
        from verl_ext.preflight import check_methods
        from verl_ext.registry import ConfigError

        config = configuration(estimator, loss, settings, model)
        try:
            check_methods(config)
        except ConfigError as error:
            return {"refused": str(error)}
        data = self.batch.copy()
        padded = {k: v.to_padded_tensor(0) for k, v in data.items() if isinstance(v, torch.Tensor)}
        mask = padded["response_mask"]
        scores = torch.zeros(mask.shape)
        scores[torch.arange(ROWS), mask.sum(1) - 1] = torch.tensor(REWARDS, dtype=torch.float32)
        uid = np.array([f"g{row // GROUP}" for row in range(ROWS)], dtype=object)
        fields = padded | {"acc": torch.tensor(REWARDS, dtype=torch.float32), "belief_gain": padded["entropy"] / 20}

        method, loss_method = METHODS.get(estimator), METHODS.get(loss)
        context = None
        if method:
            own = {name: fields[name] for name in method.needs}
            context = AdvantageContext(method, method.config(config.algorithm), {}, own, step=1)
        with advantage_context(context):
            advantages, _ = get_adv_estimator_fn(estimator)(
                token_level_rewards=scores, response_mask=mask, config=config.algorithm, index=uid
            )
        data["advantages"] = response_to_nested(advantages, data["response_mask"])

        actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        function = partial(ppo_loss, config=actor)
        scalars = {}
        if loss_method:
            own = loss_method.config(config.algorithm)
            function = RecipeLoss(actor, loss_method.loss_needs, loss_method.mini_batch, own)
            inputs = AdvantageInputs(scores, mask, make_groups(uid, mask), fields, step=1)
            if loss_method.row_fields:
                data.update(loss_method.row_fields(inputs, own))
            if loss_method.step_scalars:
                scalars = loss_method.step_scalars(loss_settings(loss_method, actor), 1, 100)
        return self._update(data, function, scalars)

    def _update(self, data: TensorDict, function, scalars: dict) -> dict:
        engine = self.worker.engine
        with torch.no_grad():
            for name, p in engine.module.named_parameters():
                p.copy_(self.weights[name])
        engine.optimizer.state.clear()
        self.gradients.clear()
        self.worker.set_loss_fn(function)
        data = tu.index_select_tensor_dict(data, torch.tensor(ORDER))
        data = tu.chunk_tensordict(data, RANKS)[RANK]
        tu.assign_non_tensor(data, temperature=1.0, global_batch_size=8, mini_batch_size=8, epochs=2, seed=0)
        tu.assign_non_tensor_data(data, SCALARS_KEY, scalars)
        tu.assign_non_tensor_data(data, "dataloader_kwargs", {"shuffle": False})
        metrics = rename_dict(tu.get(self.worker.train_mini_batch(data), "metrics"), "")
        clean = lambda key: key.replace(MARK, "").removeprefix("actor/")  # noqa: E731
        return {
            "metrics": {clean(key): [float(x) for x in np.atleast_1d(value)] for key, value in metrics.items()},
            "gradients": [list(g) for g in self.gradients],
        }


def asked() -> tuple:
    """What belief probes ask: prompts, responses, cuts, cue, answers. Nine responses of 0 to 24 tokens."""
    rng = torch.Generator().manual_seed(1)
    draw = lambda n: torch.randint(2, 60, (n,), generator=rng)  # noqa: E731
    lengths = [24, 0, 1, 17, 9, 24, 5, 12, 3]
    ends = [sorted({0, length // 3, length // 2, length}) for length in lengths]
    return [draw(4) for _ in lengths], [draw(n) for n in lengths], ends, draw(3), [draw(1 + i % 4) for i in range(9)]


def beliefs(worker, layout: str) -> list[float]:
    """Through verl's worker, every rank with its share of the rows, in several micro-batches."""
    probes = make_probes(*asked(), layout, RANKS)
    mine = tu.chunk_tensordict(probes.data(max_tokens=70), RANKS)[RANK]
    pieces = [None] * RANKS
    torch.distributed.all_gather_object(pieces, list(worker.infer_batch(mine)["log_probs"].unbind()))
    log_probs = torch.nested.as_nested_tensor([row for piece in pieces for row in piece], layout=torch.jagged)
    return probes.beliefs(log_probs, "joint").tolist()


def main(model: str, out: str) -> None:
    torch.manual_seed(0)
    probe = Probe(model)
    probed = {layout: beliefs(probe.worker, layout) for layout in LAYOUTS}
    probed["again"] = beliefs(probe.worker, "batched")  # the packed pass leaves nothing behind
    pairs = [(e, loss, SETTINGS.get(e, {}) | LOSS_SETTINGS.get(loss, {})) for e in ESTIMATORS for loss in LOSSES]
    found = []
    for estimator, loss, settings in pairs + EXTRA:
        result = probe.run(estimator, loss, settings, model)
        found.append({"estimator": estimator, "loss": loss, "settings": settings, **result})
    if RANK == 0:
        with open(out, "w") as file:
            json.dump({"runs": found, "beliefs": probed}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
