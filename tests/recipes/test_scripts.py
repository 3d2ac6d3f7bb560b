"""The launch scripts: their configuration composes and becomes verl's dataclasses, and they are clean shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import recipes

GPU_SCRIPTS = [p for name in recipes.names() for p in sorted((recipes.ROOT / name).glob("run_qwen7b*.sh"))]
SHELL = [*recipes.ROOT.glob("*/*.sh"), *Path(__file__).parents[2].glob("scripts/**/*.sh")]


def compose(script: Path, tmp_path: Path, *overrides: str, **variables: str):
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OUT_DIR": str(tmp_path / "out"),
        **variables,
    }
    done = subprocess.run(
        ["bash", str(script), *overrides, "--cfg", "job"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return OmegaConf.create(done.stdout)


@pytest.mark.parametrize("script", GPU_SCRIPTS, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_gpu_script_composes_and_instantiates_verls_dataclasses(script, tmp_path):
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    from verl_ext import preflight

    config = compose(script, tmp_path)
    name = script.parent.name
    assert name in (config.algorithm.adv_estimator, config.actor_rollout_ref.actor.policy_loss.loss_mode)
    assert config.trainer.v1.trainer_mode == "recipe_sync"
    assert config.trainer.n_gpus_per_node == 8
    engine = "megatron" if "megatron" in script.stem else "fsdp"
    assert config.actor_rollout_ref.actor.strategy == engine
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.optim.lr == 1e-6 and actor.loss_agg_mode in ("seq-mean-token-mean", "token-mean")
    assert omega_conf_to_dataclass(config.actor_rollout_ref.rollout).n >= 8
    assert config.data.train_batch_size % actor.ppo_mini_batch_size == 0
    validate_config(config, use_reference_policy=False, use_critic=False)
    preflight.check_methods(config)


def test_variables_and_trailing_overrides_win(tmp_path):
    script = recipes.ROOT / "avspo" / "run_qwen7b.sh"
    config = compose(script, tmp_path, "actor_rollout_ref.rollout.n=4", LR="3e-6", NNODES="2", TRIGGER="always")
    assert config.actor_rollout_ref.rollout.n == 4
    assert config.actor_rollout_ref.actor.optim.lr == 3e-6
    assert config.trainer.nnodes == 2
    assert config.algorithm.avspo.trigger == "always"


def test_shell_is_clean():
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run(
        [str(shellcheck), "-x", "-P", "SCRIPTDIR", *map(str, SHELL)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout


def test_every_recipe_has_the_same_four_scripts_and_a_card():
    for name in recipes.names():
        files = {p.name for p in (recipes.ROOT / name).iterdir()}
        assert {"run_cpu.sh", "run_qwen7b.sh", "run_qwen7b_megatron.sh", "README.md"} <= files, name
