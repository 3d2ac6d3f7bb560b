#!/usr/bin/env python
"""GSM8K (openai/gsm8k, MIT) as parquet files for verl.

    python scripts/data/gsm8k.py --local_save_dir data/gsm8k
    python scripts/data/gsm8k.py --local_save_dir data/gsm8k --local_dataset_path DIR --max_rows 64

The source needs the columns question and answer; an answer is a worked solution that ends in ``#### <number>``.
"""

from __future__ import annotations

import argparse
import sys

from rows import arguments, instruction, load, row, run, save, say

SOURCE = "openai/gsm8k"
MARK = "####"


def build(options: argparse.Namespace) -> None:
    """Make train.parquet and test.parquet from ``options``."""
    ask = instruction(options.template)
    splits = {}
    for split, items in load(options, ("question", "answer"), config="main").items():
        rows = splits[split] = []
        for index, item in enumerate(items):
            question, answer = item["question"], item["answer"]
            truth = answer.rpartition(MARK)[2].strip().replace(",", "") if MARK in answer else ""
            if truth:
                rows.append(row(SOURCE, split, index, ask(question), truth, question, answer))
        if len(rows) < len(items):
            say(f"{split}: dropped {len(items) - len(rows)} rows whose answer does not end in '{MARK} <number>'")
    save(splits, options)


if __name__ == "__main__":
    sys.exit(run(build, arguments(__doc__, SOURCE, "hashes")))
