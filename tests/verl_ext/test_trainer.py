"""Our trainer modes without Ray: what verl branches on, row bookkeeping, state files. The runs are in tests/e2e."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf, open_dict
from tensordict import NonTensorStack, TensorDict

import verl_ext.trainer as trainer
from verl_ext.acr import AcrWatch
from verl_ext.registry import ConfigError, DataError


@pytest.fixture
def config():
    with initialize_config_module("recipes.avspo.config", version_base=None):
        config = compose("avspo")
    with open_dict(config):
        config.actor_rollout_ref.rollout.n = 8
        config.actor_rollout_ref.rollout.nnodes = 1
        config.actor_rollout_ref.rollout.n_gpus_per_node = 1
        config.actor_rollout_ref.rollout.checkpoint_engine.backend = "nccl"
        config.data.train_batch_size = 4 * config.actor_rollout_ref.actor.ppo_mini_batch_size
    return config


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_each_mode_gets_the_replay_buffer_and_branches_of_verls_mode(config, mode):
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

    config.trainer.v1.trainer_mode = f"recipe_{mode}"
    ours = get_trainer_cls(f"recipe_{mode}")(config)
    assert isinstance(ours, get_trainer_cls(mode))
    assert ours.trainer_mode == mode
    assert type(ours.replay_buffer) is (ReplayBuffer if mode == "sync" else ReplayBufferAsync)
    assert ours.parameter_sync_step == (4 if mode == "separate_async" else 1)


def test_a_mode_name_of_our_own_would_count_as_asynchronous(config):
    """Why the class fixes `trainer_mode`. Fails when verl stops branching on the name: the property can go then."""
    from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    config.trainer.v1.trainer_mode = "recipe_sync"
    assert type(PPOTrainerSync(config).replay_buffer) is ReplayBufferAsync


def test_the_actors_worker_is_ours_only_where_the_loss_asks_for_more(config):
    """At verl's own seams: `role_worker_mapping` of the trainer, `actor_worker_cls` of its worker."""
    from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

    from verl_ext.worker import RecipeActorRolloutRefWorker, RecipeTrainingWorker

    assert ActorRolloutRefWorker.actor_worker_cls is TrainingWorker
    assert RecipeActorRolloutRefWorker.actor_worker_cls is RecipeTrainingWorker
    for loss, wanted in (("vanilla", ActorRolloutRefWorker), ("mcpo", RecipeActorRolloutRefWorker)):
        config.actor_rollout_ref.actor.policy_loss.loss_mode = loss
        ours = trainer.RecipeTrainerSync(config)
        ours._init_resource_pool_mgr()
        [worker] = ours.role_worker_mapping.values()
        assert worker.__ray_actor_class__ is wanted


def test_the_actors_worker_is_ours_in_separate_async_as_well(config):
    """There verl puts a worker of its own in place before ours."""
    from verl.experimental.separation.engine_workers import DetachActorWorker

    from verl_ext.worker import RecipeTrainingWorker

    config.actor_rollout_ref.actor.policy_loss.loss_mode = "mcpo"
    ours = trainer.RecipeTrainerSeparateAsync(config)
    ours._init_resource_pool_mgr()
    actors = [worker.__ray_actor_class__ for worker in ours.role_worker_mapping.values()]
    assert any(issubclass(cls, DetachActorWorker) for cls in actors)
    assert all(cls.actor_worker_cls is RecipeTrainingWorker for cls in actors)


def test_a_probe_gets_the_ranks_temperature_and_tokens_of_the_actor(config, monkeypatch):
    from types import SimpleNamespace

    ids = torch.nested.as_nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=torch.jagged)
    entries = NonTensorStack({"ground_truth": "7"}, {"ground_truth": "8"})
    data = TensorDict({"prompts": ids, "responses": ids, "reward_model": entries}, batch_size=2)
    monkeypatch.setattr(trainer, "_fetch", lambda batch, fields: data)
    seen = []
    config.actor_rollout_ref.rollout.temperature = 0.7
    config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu = 1234
    group = SimpleNamespace(_dispatch_info={"actor": [0, 0, 1, 1, 2, 2]}, compute_log_prob=lambda data: "asked")
    method = SimpleNamespace(probe=lambda inputs, settings, actor: seen.append(actor))
    ours = SimpleNamespace(
        config=config, actor_rollout_wg=group, tokenizer=None, method=method, method_config=None, global_steps=1
    )
    batch_rows = SimpleNamespace(uid=np.array(["a", "b"]), fields={}, inputs=lambda step, t: None)
    trainer.RecipeTrainerMixin._probe(ours, None, batch_rows, 0.0)
    [actor] = seen
    assert (actor.ranks, actor.temperature, actor.max_tokens) == (3, 0.7, 1234)
    assert actor.references == ["7", "8"] and actor.forward(None) == "asked" and actor.packed_refusal is None
    assert [row.tolist() for row in actor.responses] == [[1, 2], [3]]
    batch_rows.fields["entropy"] = torch.tensor([[0.1], [float("nan")]])
    with pytest.raises(DataError, match=r"entropy is not finite in row 1 \(uid b\)"):
        trainer.RecipeTrainerMixin._probe(ours, None, batch_rows, 0.0)


def test_a_bad_method_configuration_stops_the_trainer_before_it_builds_anything(config):
    with open_dict(config):
        config.algorithm.avspo.trigger = "sometimes"
    with pytest.raises(ConfigError, match=r"algorithm\.avspo\.trigger='sometimes'.*adaptive, fixed, always"):
        trainer.RecipeTrainerSync(config)


def test_final_rows_of_sessions_with_several_outputs():
    keys = ["a_0_0", "a_0_1", "b_0_0", "a_1_0", "a_0_2", "b_0_1"]
    assert trainer._final_rows(keys).tolist() == [4, 4, 5, 3, 4, 5]


def rows(infos) -> TensorDict:
    stack = NonTensorStack(*[{"reward_extra_info": info} if info is not None else {} for info in infos])
    return TensorDict({"extra_fields": stack}, batch_size=len(infos))


def test_accuracy_flags_come_from_the_reward_functions_dict():
    none = torch.zeros(3, dtype=torch.bool)
    flags = trainer._accuracy_flags(rows([{"acc": 1.0}, {"acc": False}, {"acc": np.float64(1)}]), none)
    assert flags.tolist() == [1.0, 0.0, 1.0]
    assert trainer._accuracy_flags(rows([{}, None, {"score": 1}]), none) is None
    with pytest.raises(DataError, match="row 1 has none"):
        trainer._accuracy_flags(rows([{"acc": 1.0}, {}, {"acc": 0.0}]), none)
    last_is_padding = torch.tensor([False, False, True])
    assert trainer._accuracy_flags(rows([{"acc": 1.0}, {"acc": 0.0}, {}]), last_is_padding).tolist() == [1.0, 0.0, 0.0]


class Checkpoints:
    """verl's half of saving and loading, so that ours can be seen alone."""

    def _save_checkpoint(self):
        self.latest_written_after_state = self._state_path().exists()

    def _load_checkpoint(self):
        self.global_steps = self.resume_at


class Stateful(trainer.RecipeTrainerMixin, Checkpoints):
    base_mode = "sync"

    def __init__(self, folder, name="avspo", resume_at=0):
        from verl_ext.registry import METHODS

        self.config = OmegaConf.create(
            {
                "trainer": {"default_local_dir": str(folder), "resume_mode": "auto", "resume_from_path": None},
                "algorithm": {"adv_estimator": name},
            }
        )
        self.method, self.method_state, self.acr_watch = METHODS.get(name), {}, AcrWatch()
        self.global_steps, self.resume_at = 3, resume_at


def test_state_is_written_before_verl_names_the_checkpoint_and_comes_back_exactly(tmp_path):
    saved = Stateful(tmp_path)
    saved.method_state = {"tau": 0.1 + 0.2, "reward_mean": 1 / 3, "steps": 3, "fires": 1}
    saved.acr_watch.update(0.7)
    saved._save_checkpoint()
    assert saved.latest_written_after_state
    loaded = Stateful(tmp_path, resume_at=3)
    loaded._load_checkpoint()
    assert loaded.method_state == saved.method_state
    assert loaded.acr_watch == saved.acr_watch


def test_resume_without_our_state_file_is_refused_for_a_stateful_method_only(tmp_path, capsys):
    with pytest.raises(FileNotFoundError, match=r"recipe_state\.json is missing.*state of avspo"):
        Stateful(tmp_path, resume_at=3)._load_checkpoint()
    Stateful(tmp_path, name="grpo", resume_at=3)._load_checkpoint()
    assert "start afresh" in capsys.readouterr().out
    Stateful(tmp_path, resume_at=0)._load_checkpoint()  # nothing to resume


def test_resume_path_reads_that_folder_and_saving_goes_to_the_runs_own(tmp_path):
    elsewhere, own = tmp_path / "elsewhere", tmp_path / "own"
    old = Stateful(elsewhere)
    old.method_state = {"tau": 0.7}
    old._save_checkpoint()
    ours = Stateful(own, resume_at=3)
    ours.config.trainer.resume_mode = "resume_path"
    ours.config.trainer.resume_from_path = str(elsewhere / "global_step_3")
    ours._load_checkpoint()
    assert ours.method_state == {"tau": 0.7}
    ours.global_steps = 4
    ours._save_checkpoint()
    assert (own / "global_step_4" / trainer.STATE_FILE).exists()


def test_state_of_another_method_is_not_taken_over(tmp_path, capsys):
    folder = tmp_path / "global_step_3"
    folder.mkdir()
    state = {"estimator": "other", "global_step": 3, "method": {"tau": 9}, "acr": AcrWatch().state_dict()}
    (folder / trainer.STATE_FILE).write_text(json.dumps(state))
    ours = Stateful(tmp_path, resume_at=3)
    ours._load_checkpoint()
    assert ours.method_state == {} and "trained with other" in capsys.readouterr().out
