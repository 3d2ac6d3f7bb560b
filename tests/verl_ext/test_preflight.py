"""Bad input is told before Ray starts: the key, the value, the fix, and all problems at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import open_dict

from verl_ext import preflight, tasks
from verl_ext.main import keep_previous_metrics
from verl_ext.registry import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path):
    """A configuration that passes: a small model's files, a small data set, the arithmetic reward."""
    import torch
    from safetensors.torch import save_file

    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 512}')
    save_file({"embed.weight": torch.zeros(300, 1024), "norm.weight": torch.zeros(8)}, model / "model.safetensors")
    assert tasks.main(["--level", "easy", "--out", str(tmp_path / "data"), "--train", "64", "--val", "8"]) == 0
    with initialize_config_module("recipes.avspo.config", version_base=None):
        config = compose("avspo", overrides=["+scale=cpu"])
    with open_dict(config):
        config.actor_rollout_ref.model.path = str(model)
        config.data.train_files = str(tmp_path / "data" / "train.parquet")
        config.data.val_files = str(tmp_path / "data" / "val.parquet")
        config.trainer.default_local_dir = str(tmp_path / "checkpoints")
        config.reward.custom_reward_function.path = "pkg://verl_ext.tasks"
        config.reward.custom_reward_function.name = "arithmetic_score"
    return config


def test_a_good_configuration_passes(config):
    preflight.check_run(config)


BAD = [
    ("algorithm.adv_estimator", "avsop", r"algorithm\.adv_estimator='avsop' is not registered; known: avspo.*doctor"),
    ("algorithm.avspo.trigger", "never", r"algorithm\.avspo\.trigger='never' is not one of adaptive, fixed, always"),
    ("algorithm.avspo.alpha", 0, r"algorithm\.avspo\.alpha=0 must be a number in \(0, 1\]"),
    ("algorithm.avspo.alhpa", 0.5, r"algorithm\.avspo\.alhpa is unknown; the keys are .*alpha"),
    ("algorithm.avspo.r_lo", 2, r"algorithm\.avspo\.r_lo=2 must be below algorithm\.avspo\.r_hi"),
    ("algorithm.acr.warn_above", 35, r"algorithm\.acr\.warn_above=35: must be a share"),
    ("algorithm.use_kl_in_reward", True, r"algorithm\.use_kl_in_reward=True.*use_kl_loss=True"),
    ("algorithm.filter_groups.enable", True, r"algorithm\.filter_groups\.enable=True.*=False"),
    ("actor_rollout_ref.rollout.n", 1, r"actor_rollout_ref\.rollout\.n=1.*at least two.*n=8"),
    ("actor_rollout_ref.model.path", "/no/such/model", r"model\.path=/no/such/model: there is no such folder"),
    (
        "data.train_files",
        "/no/train.parquet",
        r"data\.train_files=/no/train\.parquet: there is no such file.*scripts/data",
    ),
    ("data.train_batch_size", 65, r"has 64 rows, fewer than data\.train_batch_size=65"),
    ("actor_rollout_ref.rollout.n", "abc", r"rollout\.n='abc' must be a whole number"),
    ("data.train_batch_size", None, r"data\.train_batch_size=None must be a whole number of at least 1"),
    ("trainer.n_gpus_per_node", 0, r"trainer\.n_gpus_per_node=0 must be a whole number of at least 1"),
    ("trainer.total_training_steps", "abc", r"trainer\.total_training_steps='abc' must be a whole number"),
    ("trainer.v1.trainer_mode", "foo", r"trainer\.v1\.trainer_mode='foo' is not one of recipe_sync"),
    ("trainer.resume_mode", "foo", r"trainer\.resume_mode='foo' is not one of auto, disable, resume_path"),
    ("trainer.nnodes", 3, r"8 x rollout\.n=8 = 64 rows do not divide over 3 data-parallel ranks"),
    ("algorithm.avspo", 3, r"algorithm\.avspo=3 must hold keys"),
    ("algorithm.acr.foo", 1, r"algorithm\.acr=.*the keys are warn_above, warn_steps, window"),
    ("algorithm.acr.warn_above", "abc", r"algorithm\.acr\.warn_above='abc' must be a number"),
    ("actor_rollout_ref.rollout.max_model_len", 9999, r"max_model_len=9999, but the model at .* has 512 positions"),
    ("reward.custom_reward_function.name", "nope", r"custom_reward_function\.path=pkg://verl_ext\.tasks, name=nope"),
    (
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
        1,
        r"update_weights_bucket_megabytes=1 is smaller than the weight embed\.weight \(1 MB\).*Set it to 64",
    ),
]


@pytest.mark.parametrize(("key", "value", "message"), BAD, ids=[f"{k}={v}" for k, v, _ in BAD])
def test_bad_value_is_refused_with_key_and_fix(config, key, value, message):
    from omegaconf import OmegaConf

    with open_dict(config):
        OmegaConf.update(config, key, value, force_add=True)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        preflight.check_run(config)


def test_every_problem_is_told_at_once(config):
    config.actor_rollout_ref.rollout.n = 1
    config.algorithm.avspo.trigger = "never"
    config.data.val_files = "/no/val.parquet"
    with pytest.raises(ConfigError) as error:
        preflight.check_run(config)
    assert str(error.value).count("\n  - ") == 3


def test_a_data_set_without_the_needed_columns_is_named(config, tmp_path):
    import pandas as pd

    bad = tmp_path / "bad.parquet"
    pd.DataFrame({"question": ["1+1"] * 64, "prompt": ["x"] * 64}).to_parquet(bad)
    config.data.train_files = str(bad)
    with pytest.raises(ConfigError, match=r"lacks the column\(s\) data_source, reward_model; it has question, prompt"):
        preflight.check_run(config)
    row = {"prompt": "1+1=", "data_source": "x", "reward_model": {"style": "rule"}}
    pd.DataFrame([row] * 64).to_parquet(bad)
    with pytest.raises(ConfigError) as error:
        preflight.check_run(config)
    assert "prompt of the first row is not a list of chat messages" in str(error.value)
    assert "reward_model of the first row is not" in str(error.value)
    bad.write_bytes(b"not parquet")
    with pytest.raises(ConfigError, match="is not a readable parquet file"):
        preflight.check_run(config)


def test_a_model_folder_without_weights_is_named(config, tmp_path):
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"holds no weights"):
        preflight.check_run(config)


def test_too_little_memory_or_disk_is_told_in_gigabytes(config, monkeypatch):
    """Both faults cannot be made otherwise: the machine's free memory and disk are reported as almost none."""
    import shutil

    import psutil

    memory, disk = psutil.virtual_memory(), shutil.disk_usage("/")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=10**9))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=10**6))
    config.trainer.save_freq = 1
    with pytest.raises(ConfigError) as error:
        preflight.check_run(config)
    assert "1.0 GB of memory are available" in str(error.value)
    assert "trainer.default_local_dir" in str(error.value) and "0.0 GB free" in str(error.value)


def test_a_resume_path_that_is_not_there_is_named(config):
    config.trainer.resume_mode, config.trainer.resume_from_path = "resume_path", "/no/global_step_3"
    with pytest.raises(ConfigError, match=r"trainer\.resume_from_path=/no/global_step_3: there is no such folder"):
        preflight.check_run(config)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"STEPS": "many"}, "STEPS=many must be a whole number"),
        ({"LEVEL": "harder"}, "LEVEL=harder is not one of easy, medium, hard, mixed, words"),
        ({"LEVEL": "words"}, "which the tiny model cannot read. Set MODEL_PATH"),
        ({"TRAIN_FILES": "/x.parquet"}, "VAL_FILES is not. Set both"),
        ({"RUN_DIR": "/tmp/lr=1"}, "holds a character that has a meaning in Hydra"),
    ],
)
def test_run_cpu_refuses_bad_variables_at_once(variables, message):
    script = ROOT / "recipes" / "avspo" / "run_cpu.sh"
    done = subprocess.run(
        ["bash", str(script)], env={**os.environ, **variables}, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 1 and message in done.stderr


def test_main_stops_before_ray_with_a_short_message(tmp_path):
    command = [sys.executable, "-m", "verl_ext.main", "--config-path", "pkg://recipes.avspo.config"]
    command += ["--config-name", "avspo", "+scale=cpu", "actor_rollout_ref.model.path=/no/model"]
    env = {**os.environ, "VERL_PLATFORM": "cpu"}
    done = subprocess.run(
        [*command, f"hydra.run.dir={tmp_path}"], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "verl_ext: the run was not started:" in done.stderr and "/no/model" in done.stderr
    assert "Traceback" not in done.stderr and "ray init" not in done.stdout


def test_metrics_of_an_earlier_start_are_kept(tmp_path):
    file = tmp_path / "metrics.jsonl"
    keep_previous_metrics(None)
    keep_previous_metrics(str(file))
    for text in ("first", "second"):
        file.write_text(text)
        keep_previous_metrics(str(file))
    assert not file.exists()
    assert (tmp_path / "metrics.1.jsonl").read_text() == "first"
    assert (tmp_path / "metrics.2.jsonl").read_text() == "second"


def test_setup_refuses_a_wrong_python(tmp_path):
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "setup.sh")],
        env={**os.environ, "PYTHON": "/bin/false", "VENV": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and "Python 3.11 is needed" in done.stderr and "PYTHON=" in done.stderr


def test_a_method_with_belief_probes_needs_an_answer_in_every_row(config):
    rows = tasks.make_rows("easy", "train", 64)
    for row, answer in ((5, ""), (9, "$")):
        rows[row]["reward_model"]["ground_truth"] = answer
    tasks.write_parquet(config.data.train_files, rows)
    preflight.check_run(config)  # avspo asks for no answer
    with open_dict(config):
        config.algorithm.adv_estimator, config.algorithm.norm_adv_by_std_in_grpo = "grpo_vps", False
    with pytest.raises(ConfigError, match=r"2 rows have no reward_model\.ground_truth that grpo_vps.*\(row 5: "):
        preflight.check_run(config)
