"""verl's own ``main_ppo`` on the CPU platform: nothing of this project but the platform, its YAML and the plug-in.

Two runs: two steps from scratch, then a resumed run in which one rollout replica cannot take the new weights.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from verl_ext.cpu import cleanup, environment, segments
from verl_ext.cpu.leftovers import in_use

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

RANKS, STEPS = 2, 2
FAILING_REPLICA, FAILING_LOAD = 1, 3  # loads of the resumed run: the checkpoint, after step 3, after step 4

CONFIG = """
hydra:
  searchpath: [pkg://verl.trainer.config, pkg://recipes.common.config]
  output_subdir: null
  run: {dir: .}
defaults: [ppo_trainer, scale: cpu, _self_]
algorithm: {adv_estimator: grpo}
data: {train_batch_size: 8, max_prompt_length: 32, max_response_length: 8}
actor_rollout_ref:
  model: {enable_gradient_checkpointing: true}
  actor: {use_kl_loss: true, kl_loss_coef: 0.1, optim: {lr: 1.0e-2}}
  rollout: {n: 4}
trainer:
  project_name: test
  experiment_name: cpu
  total_epochs: 100
  save_freq: 2
  test_freq: 2
"""

# Pays for digits: rewards of a random model differ within a group, so there is something to learn from.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": sum(c.isdigit() for c in solution_str) / 8, "acc": 0.0}
"""

# Loaded in every process through VERL_USE_EXTERNAL_MODULES.
FAULT = f"""
import os, pathlib, time, wrapt

def spoil(module):
    load, calls = module.Qwen2ForCausalLM.load_weights, []

    def load_weights(self, weights):
        calls.append(time.time())
        if len(calls) == {FAILING_LOAD} and os.environ["VERL_REPLICA_RANK"] == "{FAILING_REPLICA}":
            pathlib.Path(os.environ["TEST_FAULT_FILE"]).write_text(str(time.time()))
            raise RuntimeError("injected fault: no room for the weights")
        return load(self, weights)

    module.Qwen2ForCausalLM.load_weights = load_weights

wrapt.register_post_import_hook(spoil, "vllm.model_executor.models.qwen2")
"""


@dataclass
class Run:
    """What a finished run left."""

    returncode: int
    output: str
    ended: float
    metrics: dict[int, dict[str, float]]


def make_model(folder: Path) -> None:
    """A random Qwen2 of 70k parameters with a byte-level vocabulary as long as its embedding."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    tokens = [*sorted(ByteLevel.alphabet()), "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[],
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'][0] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>a\n{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,  # heads of 32: the smallest that vLLM's CPU attention takes
        num_key_value_heads=1,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def make_data(path: Path, numbers: range) -> None:
    import pandas as pd

    rows = [
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": f"{n}?"}],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": str(n)},
            "extra_info": {"index": n},
        }
        for n in numbers
    ]
    pd.DataFrame(rows).to_parquet(path)


@pytest.fixture(scope="module")
def before():
    """Shared memory before the runs; what they leave is removed at the end."""
    before = segments()
    yield before
    cleanup(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, before):
    """Model, data, configuration and plug-in."""
    folder = tmp_path_factory.mktemp("cpu_stack")
    make_model(folder / "model")
    make_data(folder / "train.parquet", range(64))
    make_data(folder / "val.parquet", range(64, 72))
    for name, text in {"run.yaml": CONFIG, "reward.py": REWARD, "fault.py": FAULT}.items():
        (folder / name).write_text(textwrap.dedent(text))
    return folder


def train(folder: Path, name: str, *overrides: str, **variables: str) -> Run:
    """Run ``main_ppo`` in a process of its own with the CPU platform's environment."""
    env = {**environment(), **os.environ, "VERL_PLATFORM": "cpu", **variables}
    env["VERL_FILE_LOGGER_PATH"] = str(folder / f"{name}.jsonl")
    settings = {
        "data.train_files": folder / "train.parquet",
        "data.val_files": folder / "val.parquet",
        "actor_rollout_ref.model.path": folder / "model",
        "reward.custom_reward_function.path": folder / "reward.py",
        "trainer.n_gpus_per_node": RANKS,
        "trainer.default_local_dir": folder / "checkpoints",
    }
    command = [sys.executable, "-m", "verl.trainer.main_ppo", f"--config-path={folder}", "--config-name=run"]
    done = subprocess.run(
        [*command, *(f"{key}={value}" for key, value in settings.items()), *overrides],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    ended = time.time()
    (folder / f"{name}.log").write_text(done.stdout)
    lines = map(json.loads, Path(env["VERL_FILE_LOGGER_PATH"]).read_text().splitlines())
    return Run(done.returncode, done.stdout, ended, {line["step"]: line["data"] for line in lines})


@pytest.fixture(scope="module")
def first(folder):
    return train(folder, "first", f"trainer.total_training_steps={STEPS}")


@pytest.fixture(scope="module")
def resumed(folder, first):
    assert first.returncode == 0, first.output[-4000:]
    return train(
        folder,
        "resumed",
        f"trainer.total_training_steps={STEPS + 2}",
        "trainer.val_before_train=false",
        PYTHONPATH=str(folder),
        VERL_USE_EXTERNAL_MODULES="fault",
        TEST_FAULT_FILE=str(folder / "fault.time"),
    )


def test_two_ranks_train_validate_and_save(folder, first):
    assert first.returncode == 0, first.output[-4000:]
    assert sorted(first.metrics) == [0, 1, 2]
    for step in (0, 2):
        assert "val-core/digits/acc/mean@1" in first.metrics[step]
    saved = folder / "checkpoints" / f"global_step_{STEPS}" / "actor"
    for rank in range(RANKS):
        assert (saved / f"model_world_size_{RANKS}_rank_{rank}.pt").is_file()
    for step in (1, 2):
        assert first.metrics[step]["actor/grad_norm"] > 0


def test_rollout_follows_the_actor(first):
    """float32 on both sides, and each update reaches both replicas: their probabilities agree to rounding."""
    for step in (1, 2):
        assert first.metrics[step]["training/rollout_probs_diff_max"] < 1e-5
    # The update in between was large enough that a rollout with the old weights would stand out.
    assert first.metrics[2]["actor/kl_loss"] > 1e-3


def test_reference_model_stays_behind(first):
    """KL against the reference is nil at the first update and grows once the actor has moved."""
    assert abs(first.metrics[1]["actor/kl_loss"]) < 1e-6
    assert first.metrics[2]["actor/kl_loss"] > 1e-3


def test_resume_goes_on_where_the_checkpoint_ends(resumed):
    assert min(resumed.metrics) == STEPS + 1
    step = resumed.metrics[STEPS + 1]
    assert step["actor/kl_loss"] > 1e-3, "the actor was not loaded: it equals the reference model"
    assert step["training/rollout_probs_diff_max"] < 1e-5, "the loaded weights did not reach the rollout"


def test_failed_weight_reload_raises(folder, resumed):
    """One replica of two refuses the weights: the run ends with that cause, long before the time-out."""
    assert resumed.returncode != 0
    assert re.search("WeightSyncError: .*injected fault: no room for the weights", resumed.output), resumed.output[
        -4000:
    ]
    assert STEPS + 2 not in resumed.metrics
    assert resumed.ended - float((folder / "fault.time").read_text()) < 60


def test_nothing_stays_in_shared_memory(before, resumed):
    cleanup(before)
    left = segments() - before
    assert not left - in_use(left)
