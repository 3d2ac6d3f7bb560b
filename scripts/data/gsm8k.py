#!/usr/bin/env python
"""GSM8K (openai/gsm8k, MIT) as parquet files for verl.

    python scripts/data/gsm8k.py --local_save_dir data/gsm8k
    python scripts/data/gsm8k.py --local_save_dir data/gsm8k --local_dataset_path DIR --max_rows 64

The source needs the columns question and answer; an answer is a worked solution that ends in ``#### <number>``.
"""

from __future__ import annotations

import argparse
import re
import sys

from rows import arguments, instruction, load, row, run, save, say

SOURCE = "openai/gsm8k"
NUMBER = re.compile(r"####\s*(-?[\d,]*\.?\d+)\s*$")


def build(options: argparse.Namespace) -> None:
    """Make train.parquet and test.parquet from ``options``."""
    ask = instruction(options.template)
    splits = {}
    for split, items in load(options, ("question", "answer"), config="main").items():
        rows = splits[split] = []
        for index, item in enumerate(items):
            question, answer = item["question"] or "", item["answer"] or ""
            truth = NUMBER.search(answer)
            if question and truth:
                number = truth[1].replace(",", "")
                rows.append(row(SOURCE, split, index, ask(question), number, question, answer))
        if len(rows) < len(items):
            say(f"{split}: dropped {len(items) - len(rows)} rows without a question or a final '#### <number>'")
    save(splits, options)


def command_line() -> argparse.ArgumentParser:
    return arguments(__doc__, SOURCE, "hashes")


if __name__ == "__main__":
    sys.exit(run(build, command_line()))
