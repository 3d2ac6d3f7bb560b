"""`python -m verl_ext.main`: verl's `main_ppo`, preceded by our checks.

    python -m verl_ext.main --config-path pkg://recipes.avspo.config --config-name avspo [overrides]

Everything from Ray on is verl's own `run_ppo` and TaskRunner; the trainer mode in the configuration is ours.
`python -m verl.trainer.main_ppo` runs the same configuration without the checks.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hydra
from omegaconf import OmegaConf


def keep_previous_metrics(path: str | None) -> None:
    """verl's file logger truncates its file; move what an earlier run wrote to the next free `<stem>.<n>.jsonl`."""
    file = Path(path) if path else None
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
    if file and file.exists() and file.stat().st_size:
        n = 1
        while file.with_suffix(f".{n}{file.suffix}").exists():
            n += 1
        file.rename(file.with_suffix(f".{n}{file.suffix}"))


@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def main(config) -> None:
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    from verl_ext import preflight
    from verl_ext.registry import ConfigError

    try:
        auto_set_device(config)
        preflight.check_run(config)
        validate_config(
            config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
        )
    except (ConfigError, ValueError, TypeError, AssertionError) as error:
        sys.exit(f"verl_ext: {error}")
    print(preflight.describe(config), flush=True)
    metrics_file = os.environ.get("VERL_FILE_LOGGER_PATH")
    keep_previous_metrics(metrics_file)
    if metrics_file:  # the logger runs in a Ray worker, which on a cluster that is already up has another environment
        key = "ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH"
        OmegaConf.update(config, key, os.path.abspath(metrics_file), force_add=True)
    run_ppo(config, task_runner_class=TaskRunnerV1)


if __name__ == "__main__":
    main()
