"""The package as others get it: a built wheel in another environment finds its recipes, scripts and entry point."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import recipes

ROOT = Path(__file__).parents[2]

PROBE = """
import importlib.metadata as md, pathlib, sys
import recipes, verl_ext
target = pathlib.Path(sys.argv[1])
assert pathlib.Path(verl_ext.__file__).is_relative_to(target), verl_ext.__file__
import verl
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
assert get_adv_estimator_fn("avspo")
from hydra import compose, initialize_config_module
for name in recipes.names():
    with initialize_config_module(f"recipes.{name}.config", version_base=None):
        config = compose(name, overrides=["+scale=cpu"])
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    assert name in (config.algorithm.adv_estimator, loss) and config.trainer.device == "cpu"
    assert (recipes.ROOT / name / "run_qwen7b.sh").exists() and (recipes.ROOT / name / "README.md").exists()
assert (recipes.ROOT / "common" / "qwen7b.sh").exists()
entry_points = [e for e in md.entry_points(group="verl.plugins") if e.value == "verl_ext.plugin"]
assert entry_points, "no entry point"
print("names", ",".join(recipes.names()))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    source = base / "source"
    files = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in files:  # a copy, because the build writes beside its sources
        if name.startswith(("verl_ext/", "recipes/")) or name in ("pyproject.toml", "README.md", "LICENSE"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(base), str(source)]
    done = subprocess.run(wheel, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [built] = base.glob("*.whl")
    target = base / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(built)], check=True, capture_output=True)
    return target


def test_a_built_wheel_works_in_another_environment(installed, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(installed)],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert f"names {','.join(recipes.names())}\n" in done.stdout


def test_run_cpu_says_that_it_needs_a_clone(installed, tmp_path):
    done = subprocess.run(
        ["bash", str(installed / "recipes/avspo/run_cpu.sh")], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1 and "needs a clone" in done.stderr and "verl_ext.main" in done.stderr
