"""A method in somebody else's package, installed beside ours, is covered by the same suite: tests/toy_recipe."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from contracts.outside import install, with_path

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    return with_path(install(tmp_path_factory.mktemp("outside")))


def run(*command: str, env: dict) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command], env=env, cwd=HERE.parents[1], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_its_entry_point_alone_registers_it(env):
    code = (
        "import json, verl; from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY as a, POLICY_LOSS_REGISTRY"
        " as b; print(json.dumps(['toy' in a, 'toy' in b, 'avspo' in a]))"
    )
    assert json.loads(run("-c", code, env=env).splitlines()[-1]) == [True, True, True]


def test_the_whole_suite_runs_on_it(env):
    files = [str(HERE / f"test_{name}.py") for name in ("estimators", "losses", "registration")]
    out = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not e2e", "-k", "toy", *files, env=env)
    listed = run("-m", "pytest", "-q", "--collect-only", "-m", "not e2e", "-k", "toy", *files, env=env)
    passed = int(re.search(r"(\d+) passed", out).group(1))
    assert "failed" not in out and "skipped" not in out and "xfailed" not in out
    assert passed == listed.count("::") > 80
    # A row for each kind of promise.
    for name in ("test_padding_rows", "test_micro_batches", "test_ranks", "test_fsdp_and_megatron", "test_gradcheck"):
        assert f"{name}" in listed, name


def test_a_broken_method_does_not_pass(env, tmp_path):
    """The control: the same package with statistics over all rows, padding included."""
    broken = install(tmp_path, lambda text: text.replace("grpo(inputs), inputs", "naive(inputs), inputs") + NAIVE)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-k", "toy", str(HERE / "test_estimators.py")],
        env=with_path(broken),
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )
    failed = set(re.findall(r"FAILED \S+::(test_\w+)", done.stdout))
    assert {"test_a_fully_masked_row_moves_no_sibling", "test_the_neutral_setting_is_grpo_bit_for_bit"} <= failed


NAIVE = """

def naive(inputs):
    rewards, index = inputs.rewards, inputs.groups.index
    mean = rewards.new_zeros(len(inputs.groups)).index_add_(0, index, rewards)
    mean = mean / rewards.new_zeros(len(inputs.groups)).index_add_(0, index, rewards * 0 + 1)
    return rewards - mean[index]
"""
