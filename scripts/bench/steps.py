"""Overhead of a whole training step over stock GRPO, for each recipe, in one run on the CPU stack.

    python scripts/bench/steps.py [--recipes cov_grpo,ep_grpo,mcpo,holderpo,avspo] [--steps 8] [--updates 1]
                                  [--level mixed] [--out DIR]

Trains verl's grpo in verl's own `sync` mode ("stock"), grpo in `recipe_sync`, and each recipe, one after the other on
the same seed, and prints the median over the steps (the first two left out) of the step and of its parts, in seconds
for stock and as ratios to it. `--updates`: optimiser updates on each rollout batch, the same for all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
from timing import table

ROOT = Path(__file__).parents[2]
PARTS = ("step", "gen", "old_log_prob", "ref", "adv", "update_actor", "update_weights")
ALLOW_ONE_UPDATE = {"mcpo": ["algorithm.mcpo.one_update=warn"]}


def train(label: str, recipe: str, overrides: list[str], args) -> dict[str, float]:
    out = Path(args.out) / label
    settings = ["trainer.test_freq=-1", "trainer.val_before_train=False", "trainer.save_freq=-1"]
    env = {**os.environ, "RUN_DIR": str(out), "STEPS": str(args.steps), "UPDATES": str(args.updates)}
    env["LEVEL"] = args.level
    if not (out / "metrics.jsonl").exists():
        print(f"{label} ...", flush=True)
        command = ["bash", str(ROOT / "recipes" / recipe / "run_cpu.sh"), *settings, *overrides]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{label} failed:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    return medians(out / "metrics.jsonl")


def medians(path: Path) -> dict[str, float]:
    """Median of each part over the steps, the first two left out. Parts that a run does not have are left out."""
    steps = [json.loads(line)["data"] for line in path.read_text().splitlines()]
    steps = [data for data in steps if "timing_s/step" in data][2:]
    if not steps:
        sys.exit(f"{path} has no more than two steps; use --steps 5 or more")
    return {
        part: median(data[f"timing_s/{part}"] for data in steps) for part in PARTS if f"timing_s/{part}" in steps[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", default="avspo,cov_grpo,ep_grpo,mcpo,holderpo")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--level", default="mixed", help="of the arithmetic task, see recipes/common/cpu.sh")
    parser.add_argument("--out", default=str(ROOT / "outputs" / "bench_steps"))
    args = parser.parse_args()
    found = {
        "stock": train("stock", "grpo", ["trainer.v1.trainer_mode=sync"], args),
        "grpo": train("grpo", "grpo", [], args),
    }
    for recipe in args.recipes.split(","):
        found[recipe] = train(recipe, recipe, ALLOW_ONE_UPDATE.get(recipe, []), args)
    stock = found["stock"]
    parts = [part for part in PARTS if any(part in run for run in found.values())]
    rows = [["stock, s", *(f"{stock[part]:.3f}" if part in stock else "-" for part in parts)]]
    for label, run in list(found.items())[1:]:
        cells = [
            "-" if part not in run else f"{run[part]:.3f} s" if part not in stock else f"{run[part] / stock[part]:.2f}"
            for part in parts
        ]
        rows.append([label, *cells])
    print(f"{args.steps} steps, {args.updates} update(s) per rollout batch, medians without the first two steps")
    print(table(["run", *parts], rows))


if __name__ == "__main__":
    main()
