#!/usr/bin/env python
"""MATH (Hendrycks et al. 2021, MIT) as parquet files for verl.

    python scripts/data/math_dataset.py --local_save_dir data/math
    python scripts/data/math_dataset.py --local_save_dir data/math --local_dataset_path DIR --levels 3,4,5

The source needs the columns problem, solution, level and type. The reference answer is the last ``\\boxed{}`` of the
solution, not an ``answer`` column: copies of the set exist in which that column lost backslashes and spaces. Dropped,
with a count: rows whose solution has no such answer, and train problems that also stand in test (there is one).

(Not named math.py: Python would import that instead of its own module of this name.)
"""

from __future__ import annotations

import argparse
import re
import sys

from rows import DataError, arguments, instruction, load, row, run, save, say

from verl_ext.rewards import extract_answer

# One of several hub copies; under this name verl knows the set too.
SOURCE = "DigitalLearningGmbH/MATH-lighteval"
LEVELS = (1, 2, 3, 4, 5)


def level_of(value: object) -> int:
    """Difficulty from "Level 5", 5 or 5.0; 0 if there is none ("Level ?", NaN)."""
    digit = re.search(r"[1-5]", str(value))
    return int(digit[0]) if digit else 0


def wanted_levels(text: str) -> set[int]:
    levels = [part.strip() for part in text.split(",")]
    if not all(level.isdigit() and int(level) in LEVELS for level in levels):
        raise DataError(f"--levels {text!r}: must be some of 1,2,3,4,5, separated by commas")
    return {int(level) for level in levels}


def build(options: argparse.Namespace) -> None:
    """Make train.parquet and test.parquet from ``options``."""
    ask = instruction(options.template)
    levels = wanted_levels(options.levels) if options.levels else None
    items = load(options, ("problem", "solution", "level", "type"), config="default")
    tested = {" ".join((item["problem"] or "").split()) for item in items["test"]}
    splits = {}
    for split in items:
        rows, dropped = (
            [],
            {"without a problem or a \\boxed{} answer": 0, "that also stand in test": 0, "of other levels": 0},
        )
        for index, item in enumerate(items[split]):
            problem, solution, level = item["problem"] or "", item["solution"] or "", level_of(item["level"])
            truth = extract_answer(solution, strict_box=True)
            if truth is None or not problem:
                dropped["without a problem or a \\boxed{} answer"] += 1
            elif split == "train" and " ".join(problem.split()) in tested:
                dropped["that also stand in test"] += 1
            elif levels and level not in levels:
                dropped["of other levels"] += 1
            else:
                extra = {"level": level, "type": item["type"]}
                rows.append(row(SOURCE, split, index, ask(problem), truth, problem, solution, **extra))
        for reason, count in dropped.items():
            if count:
                say(f"{split}: dropped {count} rows {reason}")
        splits[split] = rows
    save(splits, options)


def command_line() -> argparse.ArgumentParser:
    parser = arguments(__doc__, SOURCE, "boxed")
    parser.add_argument("--levels", help="keep these difficulties only, in both splits: 3,4,5 (default: all)")
    return parser


if __name__ == "__main__":
    sys.exit(run(build, command_line()))
