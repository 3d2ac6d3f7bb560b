"""The recipes as users start them, on the real stack: verl's trainer, Ray, FSDP2, vLLM. Metrics files are asserted."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from contracts.outside import install, with_path

import recipes
from verl_ext.registry import METHODS

pytestmark = pytest.mark.e2e

HERE = Path(__file__).parent


def mean(metrics: dict[int, dict], key: str, steps: range) -> float:
    return sum(metrics[s][key] for s in steps) / len(steps)


def validation(data: dict) -> float:
    [value] = [v for k, v in data.items() if k.startswith("val-core/") and "/acc/mean@" in k]
    return value


STEPS = 24
FIRST, LAST = range(1, 10), range(STEPS - 8, STEPS + 1)


# verl's own grpo in the same harness is run by the tests below.
@pytest.mark.parametrize("recipe", [name for name in recipes.names() if name in METHODS])
def test_recipe_learns(recipe, recipe_run, tmp_path):
    """The command of the README, smaller; the rise seen is several times the margins asked for here."""
    metrics = recipe_run(recipe, tmp_path, env={"STEPS": str(STEPS), "BATCH": "16"})
    assert sorted(metrics) == list(range(STEPS + 1))
    assert mean(metrics, "critic/score/mean", LAST) > mean(metrics, "critic/score/mean", FIRST) + 0.03
    assert validation(metrics[STEPS]) > validation(metrics[0]) + 0.03
    for step in range(1, STEPS + 1):
        data = metrics[step]
        assert data["acr/groups"] == 16 and data["acr/group_size_min"] == 8
        assert data["acr/rate"] == pytest.approx(data["acr/wrong"] + data["acr/correct"] + data["acr/tied_other"])
        assert data["actor/grad_norm"] > 0
        assert not any("recipe:" in key for key in data)
    # The task mixes both kinds of collapse, or methods for collapsed groups would have nothing to do.
    assert 0 < mean(metrics, "acr/wrong", FIRST) < 1 and 0 < mean(metrics, "acr/correct", LAST) < 1
    for made in ("curves.png", "train.log", f"checkpoints/global_step_{STEPS}/recipe_state.json"):
        assert (tmp_path / made).exists(), made
    PREDICTIONS[recipe](metrics)


# -- what the specification predicts of a method's own metrics ---------------------------------------------------------


def avspo(metrics):
    """run_cpu.sh injects in every step: no group is left without a gradient."""
    for step in range(1, STEPS + 1):
        data = metrics[step]
        assert data["acr/post"] == pytest.approx(0.0 if data["avspo/fire"] else data["acr/rate"])
    assert any(metrics[step]["avspo/fire"] for step in range(1, STEPS + 1))


def cov_grpo(metrics):
    """Weights average to one, far tokens are damped, and the groups without a covariance are the collapsed ones."""
    for step in range(1, STEPS + 1):
        data = metrics[step]
        assert data["cov/weight_mean"] == pytest.approx(1, abs=1e-5)
        assert data["cov/top_neg"] <= 0 <= data["cov/top_pos"]
        assert 0 < data["cov/damped_frac"] < 0.5 and data["cov/w_min"] < 0.1
        assert data["cov/sigma_floor_groups"] == pytest.approx(data["acr/rate"] * data["acr/groups"])
        assert data["acr/post"] == pytest.approx(data["acr/rate"])


def ep_grpo(metrics):
    """Silent where policy and reference are the same; then collapsed groups train too."""
    start = metrics[1]
    assert start["ep/logratio_abs"] < 1e-5 and start["ep/floored_buckets"] == 1 and start["ep/flip_frac"] == 0
    assert start["acr/post"] == pytest.approx(start["acr/rate"])
    assert mean(metrics, "ep/logratio_abs", LAST) > 10 * metrics[2]["ep/logratio_abs"]
    for step in LAST:
        data = metrics[step]
        assert data["acr/post"] < data["acr/rate"] or data["acr/rate"] == 0
        assert 0 < data["ep/gate_mean"] < 0.6 and data["ep/progress_ratio"] > 0
        assert data["ep/gate_decile_0"] < data["ep/gate_decile_9"]
    assert mean(metrics, "ep/flip_frac", LAST) > 0


def mcpo(metrics):
    """Four updates on each rollout batch: the hinge wakes up as soon as the policy drifts on what it has mastered."""
    for step in range(1, STEPS + 1):
        data = metrics[step]
        assert data["mcpo/mastered_frac"] == pytest.approx(data["acr/correct"])
        assert data["mcpo/query_weight"] <= 0.5 and data["hkl/loss"] >= 0
        if "hkl/active_frac" in data:  # there were mastered groups
            assert (data["hkl/active_frac"] > 0) == (data["hkl/loss"] > 0)
    assert sum("hkl/active_frac" in metrics[step] for step in LAST) >= 5
    # It falls asleep again where the mastered prompts are answered with certainty.
    assert sum(metrics[step]["hkl/loss"] > 0 for step in range(1, STEPS + 1)) >= 2


def holderpo(metrics):
    """p falls from 2 to -2 in a line, from the global step alone; ratios leave 1 within a rollout batch."""
    for step in range(1, STEPS + 1):
        data = metrics[step]
        assert data["holder/p"] == pytest.approx(2 - 4 * step / STEPS)
        assert data["holder/delta_min"] <= 0 <= data["holder/delta_max"]
        assert data["holder/rho_min"] <= data["holder/rho_mean"] <= data["holder/rho_max"]
        assert data["holder/empty_rows"] == 0
    assert mean(metrics, "holder/delta_max", LAST) > 0.01


def grpo_vps(metrics):
    """The belief rises over a correct response and not over a wrong one; collapsed groups train."""
    for step in range(1, STEPS + 1):
        data = metrics[step]
        assert data["vps/probe_tokens"] > 0 and data["vps/probe_seconds"] < data["timing_s/step"]
        assert 1 < data["vps/segments_mean"] <= data["vps/segments_max"] <= 8
        assert data["vps/cM_correct"] > data["vps/c0"]
        assert data["acr/post"] == 0 and 0.1 < data["vps/dc_share"] < 2
    for steps in (FIRST, LAST):
        steps = [step for step in steps if "vps/cM_wrong" in metrics[step]]  # there were wrong responses
        rise = mean(metrics, "vps/cM_correct", steps) - mean(metrics, "vps/c0", steps)
        assert rise > 0.3 and mean(metrics, "vps/cM_wrong", steps) < mean(metrics, "vps/c0", steps) - 0.05
        rising = {name: mean(metrics, f"vps/dc_pos_frac_{name}", steps) for name in ("correct", "wrong")}
        assert rising["correct"] > rising["wrong"] + 0.2


PREDICTIONS = {f.__name__: f for f in (avspo, cov_grpo, ep_grpo, mcpo, holderpo, grpo_vps)}


def test_resume_continues_as_if_it_had_not_been_cut(recipe_run, tmp_path):
    """Same seeds: step k after a resume equals step k of the run that was not cut, and so does the method's state."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    overrides = ["trainer.save_freq=2", "trainer.test_freq=-1", "trainer.val_before_train=False"]
    reference = recipe_run("avspo", whole, *overrides, env={"STEPS": "4", "BATCH": "16"})
    shutil.copytree(whole / "checkpoints" / "global_step_2", cut / "checkpoints" / "global_step_2")
    (cut / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = recipe_run("avspo", cut, *overrides, env={"STEPS": "4", "BATCH": "16"})
    assert sorted(resumed) == [3, 4]
    keys = [k for k in reference[3] if k.startswith(("acr/", "avspo/", "critic/", "response_length/"))]
    keys += ["actor/entropy", "actor/pg_loss", "actor/grad_norm"]
    for step in (3, 4):
        for key in keys:
            assert resumed[step][key] == pytest.approx(reference[step][key], rel=2e-3, abs=1e-5), (step, key)
    state = "checkpoints/global_step_4/recipe_state.json"
    assert (cut / state).read_text() == (whole / state).read_text()


def test_fields_and_step_scalars_reach_the_actor_loss(recipe_run, tmp_path):
    """A method in a package of its own (tests/toy_recipe), with loss fields, a number of the step and a state."""
    path = with_path(install(tmp_path / "package"))["PYTHONPATH"]
    run = tmp_path / "run"
    run.mkdir()
    metrics = recipe_run(
        "grpo",
        run,
        "algorithm.adv_estimator=toy",
        "actor_rollout_ref.actor.policy_loss.loss_mode=toy",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
        f"+ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH={path}",
        env={"STEPS": "2", "PYTHONPATH": path},
    )
    for step in (1, 2):
        data = metrics[step]
        assert data["toy/calls"] == step
        assert data["toy/toy_scalar"] == data["actor/toy_scalar"] == step / 2
        assert data["toy/row"] == pytest.approx(data["critic/score/mean"], abs=1e-6)
        assert data["toy/token"] == pytest.approx(data["toy/entropy"], rel=1e-4)
        assert not any("recipe:" in key for key in data)


def test_colocated_asynchronous_mode_and_a_hinge_that_sleeps(recipe_run, tmp_path):
    """avspo's advantages with mcpo's loss, one update per rollout batch: the policy has not moved, the hinge is 0."""
    metrics = recipe_run(
        "avspo",
        tmp_path,
        "trainer.v1.trainer_mode=recipe_colocate_async",
        "algorithm.avspo.trigger=always",
        "actor_rollout_ref.actor.policy_loss.loss_mode=mcpo",
        "+algorithm.mcpo.one_update=warn",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
        env={"STEPS": "2"},
    )
    assert sorted(metrics) == [1, 2]
    for step in (1, 2):
        data = metrics[step]
        assert data["acr/groups"] == 32 and data["acr/post"] == 0
        assert data["training/off_policy/trajectory_staleness_worst/max"] >= 0
        assert data["mcpo/mastered_rows"] == 8 * 32 * data["acr/correct"] > 0
        assert data["hkl/active_frac"] == data["hkl/loss"] == 0
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
