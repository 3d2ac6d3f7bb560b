"""Runs on the real stack. One tiny model and one data set serve all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def environment(**more: str) -> dict[str, str]:
    from verl_ext.cpu import environment as cpu

    return {**os.environ, **cpu(), "PATH": f"{BIN}:{os.environ['PATH']}", **more}


def read_metrics(path: Path) -> dict[int, dict]:
    return {row["step"]: row["data"] for row in map(json.loads, path.read_text().splitlines())}


def run_recipe(
    recipe: str, out: Path, *overrides: str, env: dict | None = None, timeout: float = 600
) -> dict[int, dict]:
    """`bash recipes/<recipe>/run_cpu.sh` into `out`; returns its metrics by step, shows the log's end on failure."""
    done = subprocess.run(
        ["bash", str(ROOT / "recipes" / recipe / "run_cpu.sh"), *overrides],
        env=environment(RUN_DIR=str(out), **(env or {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    (out / "console.txt").write_text(done.stdout)
    log = (out / "train.log").read_text()[-6000:] if (out / "train.log").exists() else ""
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n--- train.log\n{log}"
    return read_metrics(out / "metrics.jsonl")


@pytest.fixture(scope="session")
def recipe_run() -> Callable[..., dict[int, dict]]:
    return run_recipe


@pytest.fixture(scope="session")
def cpu_environment() -> Callable[..., dict[str, str]]:
    return environment
