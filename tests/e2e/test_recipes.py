"""The recipes as users start them, on the real stack: verl's trainer, Ray, FSDP2, vLLM. Metrics files are asserted."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

HERE = Path(__file__).parent


def mean(metrics: dict[int, dict], key: str, steps: range) -> float:
    return sum(metrics[s][key] for s in steps) / len(steps)


def validation(data: dict) -> float:
    [value] = [v for k, v in data.items() if k.startswith("val-core/") and "/acc/mean@" in k]
    return value


@pytest.mark.parametrize("recipe", ["avspo", "grpo"])
def test_recipe_learns(recipe, recipe_run, tmp_path):
    metrics = recipe_run(recipe, tmp_path, env={"STEPS": "25"})
    assert sorted(metrics) == list(range(26))
    first, last = range(1, 9), range(18, 26)
    # The rise seen is several times these margins (recipes/avspo/README.md).
    assert mean(metrics, "critic/score/mean", last) > mean(metrics, "critic/score/mean", first) + 0.05
    assert validation(metrics[25]) > validation(metrics[0]) + 0.05
    for step in range(1, 26):
        data = metrics[step]
        assert data["acr/groups"] == 32 and data["acr/group_size_min"] == 8
        assert data["acr/rate"] == pytest.approx(data["acr/wrong"] + data["acr/correct"] + data["acr/tied_other"])
        assert data["actor/grad_norm"] > 0
        if recipe == "grpo":
            assert data["acr/post"] == pytest.approx(data["acr/rate"])
        else:
            assert data["acr/post"] == pytest.approx(0.0 if data["avspo/fire"] else data["acr/rate"])
    # The task mixes both kinds of collapse, or AVSPO would have nothing to do.
    assert 0 < mean(metrics, "acr/wrong", first) < 1 and 0 < mean(metrics, "acr/correct", last) < 1
    for made in ("curves.png", "train.log", "checkpoints/global_step_25/recipe_state.json"):
        assert (tmp_path / made).exists(), made


def test_resume_continues_as_if_it_had_not_been_cut(recipe_run, tmp_path):
    """Same seeds: step k after a resume equals step k of the run that was not cut, and so does the method's state."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    overrides = ["trainer.save_freq=2", "trainer.test_freq=-1", "trainer.val_before_train=False"]
    reference = recipe_run("avspo", whole, *overrides, env={"STEPS": "4"})
    shutil.copytree(whole / "checkpoints" / "global_step_2", cut / "checkpoints" / "global_step_2")
    (cut / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = recipe_run("avspo", cut, *overrides, env={"STEPS": "4"})
    assert sorted(resumed) == [3, 4]
    keys = [k for k in reference[3] if k.startswith(("acr/", "avspo/", "critic/", "response_length/"))]
    keys += ["actor/entropy", "actor/pg_loss", "actor/grad_norm"]
    for step in (3, 4):
        for key in keys:
            assert resumed[step][key] == pytest.approx(reference[step][key], rel=2e-3, abs=1e-5), (step, key)
    state = "checkpoints/global_step_4/recipe_state.json"
    assert (cut / state).read_text() == (whole / state).read_text()


def test_fields_and_step_scalars_reach_the_actor_loss(recipe_run, tmp_path):
    """A method outside this project, loaded by VERL_USE_EXTERNAL_MODULES, with loss fields, a scalar and a state."""
    modules = "toy_plugin"
    metrics = recipe_run(
        "grpo",
        tmp_path,
        "algorithm.adv_estimator=toy",
        "actor_rollout_ref.actor.policy_loss.loss_mode=toy",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
        f"+ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES={modules}",
        f"+ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH={HERE}",
        env={"STEPS": "2", "VERL_USE_EXTERNAL_MODULES": modules, "PYTHONPATH": str(HERE)},
    )
    for step in (1, 2):
        data = metrics[step]
        assert data["toy/calls"] == step
        assert data["toy/toy_scalar"] == data["actor/toy_scalar"] == step / 2
        assert data["actor/toy_row_mean"] == pytest.approx(data["critic/score/mean"], abs=1e-6)
        assert data["toy/entropy"] > 0 and data["actor/toy_token_mean"] > 0


def test_colocated_asynchronous_mode(recipe_run, tmp_path):
    metrics = recipe_run(
        "avspo",
        tmp_path,
        "trainer.v1.trainer_mode=recipe_colocate_async",
        "algorithm.avspo.trigger=always",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
        env={"STEPS": "2"},
    )
    assert sorted(metrics) == [1, 2]
    for step in (1, 2):
        assert metrics[step]["acr/groups"] == 32 and metrics[step]["acr/post"] == 0
        assert metrics[step]["training/off_policy/trajectory_staleness_worst/max"] >= 0
    assert (tmp_path / "checkpoints/global_step_2/transfer_queue").exists()  # verl's asynchronous branch was taken


def test_stock_trainer_without_ours(cpu_environment, tmp_path):
    """`algorithm.adv_estimator=avspo` in plain `verl.trainer.main_ppo`: only the installed entry point is needed."""
    root = HERE.parents[1]
    model, data = root / "outputs/tiny/large", root / "outputs/data/mixed"
    # What cpu.sh makes first; there already when other runs came before.
    make_model = [
        "python",
        str(root / "scripts/make_tiny_model.py"),
        "--size",
        "large",
        "--out",
        str(root / "outputs/tiny"),
    ]
    make_data = ["python", "-m", "verl_ext.tasks", "--level", "mixed", "--out", str(data)]
    for command in (make_model, make_data):
        subprocess.run(command, env=cpu_environment(), check=True, capture_output=True, timeout=300)
    command = (
        "python -m verl.trainer.main_ppo --config-path pkg://recipes.grpo.config --config-name grpo +scale=cpu"
        " trainer.v1.trainer_mode=sync algorithm.adv_estimator=avspo +algorithm.avspo.trigger=always"
        f" data.train_files={data}/train.parquet data.val_files={data}/val.parquet"
        f" actor_rollout_ref.model.path={model} reward.custom_reward_function.path=pkg://verl_ext.tasks"
        " reward.custom_reward_function.name=arithmetic_score trainer.total_training_steps=2 trainer.test_freq=-1"
        f" trainer.val_before_train=False trainer.default_local_dir={tmp_path}/checkpoints"
        f" hydra.run.dir={tmp_path}/hydra"
    )
    done = subprocess.run(
        command.split(),
        env=cpu_environment(VERL_FILE_LOGGER_PATH=str(tmp_path / "metrics.jsonl")),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2 and '"acr/rate"' not in lines[-1]
    # Without our trainer every collapsed group still gets its advantage, and the user is told about the state once.
    assert done.stdout.count("lives in this process only") == 1
