"""Recipes side by side on the same seeds: a table with the spread over seeds, and curves.

    python scripts/compare.py --recipes grpo,avspo --seeds 0,1,2 --steps 40 --level hard -- [Hydra overrides]

Runs recipes/<name>/run_cpu.sh one after the other, each in <out>/<recipe>/seed<k>; a finished run is used again, an
unfinished one is made anew. Writes table.md, table.json and curves.png into <out>. Differences to the first recipe are
taken seed by seed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":  # runs from a checkout without installation
    sys.path.insert(0, str(ROOT))

from verl_ext.report import MetricsError, Run, load_run, number, plot, summary  # noqa: E402

# What run_cpu.sh reads from the environment beside what is set here.
VARIABLES = ("LR", "BATCH", "UPDATES", "TRIGGER", "MODEL_PATH", "TRAIN_FILES", "VAL_FILES", "REWARD")


def is_finished(metrics: Path, steps: int) -> bool:
    """Did a run record its last step?"""
    try:
        return load_run(metrics).steps[-1] >= steps
    except MetricsError:
        return False


def run(recipe: str, seed: int, settings: dict, folder: Path) -> Path:
    """Train `recipe` with `seed` in `folder` unless that is done. Returns the metrics file.

    settings: steps, level, overrides; kept in the folder, so that a run is not taken for one with other settings.

    Raises:
        SystemExit: the folder holds a run with other settings or something else; the run failed (its exit status).
    """
    metrics, mark = folder / "metrics.jsonl", folder / "settings.json"
    wanted = {"recipe": recipe, "seed": seed, **settings}
    if folder.exists() and any(folder.iterdir()):
        if not mark.is_file():
            sys.exit(f"error: {folder} is not empty and not a run of this script; choose another --out")
        found = json.loads(mark.read_text())
        if found != wanted:
            different = ", ".join(
                f"{k}: {found.get(k)!r} there, {v!r} wanted" for k, v in wanted.items() if found.get(k) != v
            )
            sys.exit(
                f"error: {folder} holds a run with other settings ({different}); choose another --out or remove it"
            )
        if is_finished(metrics, settings["steps"]):
            print(f"{recipe}, seed {seed}: finished before, in {folder}", flush=True)
            return metrics
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    mark.write_text(json.dumps(wanted, indent=1))
    environment = {
        "RUN_DIR": str(folder),
        "SEED": str(seed),
        "STEPS": str(settings["steps"]),
        "LEVEL": settings["level"],
    }
    print(f"\n{recipe}, seed {seed}: {' '.join(f'{k}={v}' for k, v in environment.items())}", flush=True)
    command = ["bash", str(ROOT / "recipes" / recipe / "run_cpu.sh"), *settings["overrides"]]
    with subprocess.Popen(command, env={**os.environ, **environment}) as child:
        while True:
            try:
                status = child.wait()
                break
            except KeyboardInterrupt:  # the child has received it as well and stops; wait for that
                continue
    if status:
        sys.exit(f"error: {recipe}, seed {seed} failed with exit status {status}; log: {folder / 'train.log'}")
    if not is_finished(metrics, settings["steps"]):
        sys.exit(f"error: {recipe}, seed {seed} ended before step {settings['steps']}; log: {folder / 'train.log'}")
    return metrics


def spread(values: Sequence[float]) -> dict:
    """Mean and extremes over seeds."""
    return {"mean": fmean(values), "min": min(values), "max": max(values), "n": len(values)}


def compare(groups: dict[str, list[Run]]) -> dict[str, dict[str, dict]]:
    """Line -> recipe -> {mean, min, max, n, and against the first recipe difference, difference_min, difference_max}.

    groups: recipe -> its runs, seeds in the same order for every recipe.
    """
    columns = {recipe: [summary(run) for run in runs] for recipe, runs in groups.items()}
    lines = dict.fromkeys(line for runs in columns.values() for one in runs for line in one if line != "steps")
    first = next(iter(columns))
    out: dict[str, dict[str, dict]] = {}
    for line in lines:
        for recipe, runs in columns.items():
            if not all(line in one for one in runs):
                continue
            cell = spread([one[line] for one in runs])
            if recipe != first and all(line in one for one in columns[first]):
                pairs = spread([one[line] - base[line] for one, base in zip(runs, columns[first], strict=True)])
                cell |= {"difference": pairs["mean"], "difference_min": pairs["min"], "difference_max": pairs["max"]}
            out.setdefault(line.strip(), {})[recipe] = cell
    return out


def markdown(table: dict[str, dict[str, dict]], recipes: Sequence[str]) -> str:
    """A column `mean (min..max)` for each recipe, and one for each difference to the first."""
    first, *others = recipes

    def text(cell: dict, mean: str, low: str, high: str, signed: bool) -> str:
        if mean not in cell:
            return "-"
        spread = f" ({number(cell[low], signed)}..{number(cell[high], signed)})" if cell["n"] > 1 else ""
        return number(cell[mean], signed) + spread

    rows = [["", *recipes, *(f"{other} - {first}" for other in others)]]
    for line, cells in table.items():
        values = [text(cells.get(recipe, {}), "mean", "min", "max", False) for recipe in recipes]
        keys = ("difference", "difference_min", "difference_max")
        rows.append([line, *values, *(text(cells.get(other, {}), *keys, True) for other in others)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def comma_list(kind: type):
    """argparse type: `a,b,c` -> [kind(a), kind(b), kind(c)], without repetitions."""

    def parse(text: str) -> list:
        values = [kind(part.strip()) for part in text.split(",") if part.strip()]
        if not values or len(set(values)) != len(values):
            raise argparse.ArgumentTypeError(f"{text!r}: give each value once, separated by commas")
        return values

    return parse


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/compare.py", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--recipes", type=comma_list(str), required=True, help="names of recipes; the first is the base"
    )
    parser.add_argument("--seeds", type=comma_list(int), default=[0, 1, 2], help="default 0,1,2")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--level", default="hard", help="difficulty of the task (LEVEL of run_cpu.sh)")
    parser.add_argument("--out", type=Path, help="default outputs/compare_<level>_<steps>")
    parser.add_argument("overrides", nargs="*", help="after `--`: Hydra overrides for every run")
    args = parser.parse_args(argv)
    known = sorted(script.parent.name for script in ROOT.glob("recipes/*/run_cpu.sh"))
    for recipe in args.recipes:
        if recipe not in known:
            parser.error(f"--recipes: {recipe!r} has no run_cpu.sh; there are {', '.join(known)}")
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: must be at least 1")
    out = (args.out or ROOT / "outputs" / f"compare_{args.level}_{args.steps}").resolve()
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    settings = {"steps": args.steps, "level": args.level, "overrides": args.overrides, "variables": variables}
    groups: dict[str, list[Run]] = {recipe: [] for recipe in args.recipes}
    for seed in args.seeds:  # seed by seed, so that an interrupted comparison has whole pairs
        for recipe in args.recipes:
            metrics = run(recipe, seed, settings, out / recipe / f"seed{seed}")
            groups[recipe].append(load_run(metrics, f"{recipe}, seed {seed}"))
    table = compare(groups)
    command = [
        *(f"{name}={value}" for name, value in variables.items()),
        "python",
        "scripts/compare.py",
        "--recipes",
        ",".join(args.recipes),
        "--seeds",
        ",".join(map(str, args.seeds)),
    ]
    command += ["--steps", str(args.steps), "--level", args.level, *(["--", *args.overrides] if args.overrides else [])]
    title = f"{', '.join(args.recipes)}: level {args.level}, {args.steps} steps, {len(args.seeds)} seeds"
    spoken = "mean (min..max) over seeds; differences seed by seed" if len(args.seeds) > 1 else "one seed: no spread"
    text = f"{title}\n\n`{shlex.join(command)}`; {spoken}.\n\n{markdown(table, args.recipes)}\n"
    (out / "table.md").write_text(text)
    runs = {"recipes": args.recipes, "seeds": args.seeds, **settings}
    (out / "table.json").write_text(
        json.dumps({**runs, "command": shlex.join(command), "table": table}, indent=1) + "\n"
    )
    plot(list(groups.items()), out / "curves.png", title)
    print(f"\n{text}\ntable      {out / 'table.md'}\ncurves     {out / 'curves.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
