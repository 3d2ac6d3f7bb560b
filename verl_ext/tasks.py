"""Arithmetic with a difficulty dial, so that the share of collapsed groups can be driven up or down.

Levels of the tiny model's task (sums of two numbers from 10 to 99, ``57+68=``, answer ``125``):

    easy     no column carries
    medium   one column carries
    hard     both columns carry
    mixed    a third of each

The tiny model is supervised on *careless* answers (:func:`slips`): each carry is forgotten with a known probability,
the larger the more the column's sum exceeds ten. So it can add, but makes a mistake that reinforcement learning can
unlearn: easy groups come out all correct, many hard ones all wrong, and what is learnt on one helps on the next.

Level ``steps`` adds :data:`ADDENDS` one-digit numbers to a two-digit number and writes the running sums out:
``37+8+5+9+4=``, answer ``45;50;59;63#63``. Its careless answers (:func:`careless_steps`) forget units' carries and go
on from the wrong running sum. So each part of a response means something: it raises or lowers the chance of the answer.

Level ``words`` asks one-digit questions in words, for a general instruct model.

The splits ``sft``, ``train`` and ``val`` never share a problem, whatever the seed and the level: a+b goes where b+a
goes, and a sum in steps where all orders of its one-digit numbers go. The module imports nothing heavy: verl calls
:func:`arithmetic_score` in its reward workers
(``reward.custom_reward_function.path=pkg://verl_ext.tasks``, ``name=arithmetic_score``).

    python -m verl_ext.tasks --level hard --out data/hard --train 512 --val 128
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import random
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any, NamedTuple

CARRIES = {"easy": 0, "medium": 1, "hard": 2}
LEVELS = (*CARRIES, "mixed", "words", "steps")
SPLITS = ("sft", "train", "val")
SOURCE, WORDS_SOURCE, STEPS_SOURCE = "arithmetic", "arithmetic_words", "arithmetic_steps"

# Probability that a careless answer keeps the carry of a column: falls linearly from a sum of 10 to a sum of 18.
KEEP_AT_10, KEEP_AT_18, KEEP_MIN = 0.5, 0.05, 0.02
STEP_KEEP_AT_10, STEP_KEEP_AT_18 = 0.9, 0.05  # the same for the units' carry of a sum in steps

ADDENDS = 4  # one-digit numbers of a sum in steps
CUE = "#"  # stands before the answer of a sum in steps

_OPERATORS = {"plus": lambda a, b: a + b, "minus": lambda a, b: a - b, "times": lambda a, b: a * b}
_TEMPLATES = (
    "What is {} {} {}? Answer with the number only.",
    "Calculate {} {} {}. Reply with just the number.",
    "How much is {} {} {}? Give only the number.",
)


class Problem(NamedTuple):
    """One question with its integer answer. ``kind`` is its level, the operator of a word question, or the number of
    carries of a sum in steps."""

    question: str
    answer: int
    kind: str


def carries(a: int, b: int) -> int:
    """Number of carries (0 to 2) in the sum of two two-digit numbers."""
    return int(a % 10 + b % 10 >= 10) + int(a + b >= 100)


def keep_probability(column_sum: int, at_10: float = KEEP_AT_10, at_18: float = KEEP_AT_18) -> float:
    """Probability in [KEEP_MIN, at_10] that a careless answer keeps the carry of a column (10 <= sum <= 19)."""
    return max(KEEP_MIN, at_10 + (at_18 - at_10) * (column_sum - 10) / 8)


def slips(a: int, b: int) -> dict[str, float]:
    """Answers a careless pupil gives to a + b (two-digit numbers), with their probabilities (they sum to 1).

    Each carry is kept or forgotten on its own: 57 + 68 is 125, 115 (the units' carry forgotten), 25 (the tens') or 15.
    """
    units = a % 10 + b % 10
    answers: dict[str, float] = {}
    for units_kept, p_units in _keep_or_forget(units):
        tens = a // 10 + b // 10 + (units_kept and units >= 10)
        for tens_kept, p_tens in _keep_or_forget(tens):
            answer = str(10 * (tens if tens_kept else tens % 10) + units % 10)
            answers[answer] = answers.get(answer, 0.0) + p_units * p_tens
    return answers


def _keep_or_forget(column_sum: int) -> list[tuple[bool, float]]:
    if column_sum < 10:
        return [(True, 1.0)]
    keep = keep_probability(column_sum)
    return [(True, keep), (False, 1 - keep)]


def steps_question(start: int, addends: Sequence[int]) -> str:
    """The tiny model's prompt for a two-digit number plus one-digit numbers."""
    return f"{start}+{'+'.join(map(str, addends))}="


def steps_numbers(question: str) -> tuple[int, list[int]]:
    """The two-digit number and the one-digit numbers of a question in steps."""
    start, *addends = map(int, question.removesuffix("=").split("+"))
    return start, addends


def step_carries(question: str) -> list[int]:
    """Sums of the units' columns that carry, in the order of the steps. A forgotten carry changes none of them."""
    start, addends = steps_numbers(question)
    columns, units = [], start % 10
    for addend in addends:
        columns.append(units + addend)
        units = (units + addend) % 10
    return [column for column in columns if column >= 10]


def careless_steps(question: str, rng: random.Random) -> str:
    """What a careless pupil writes for a sum in steps: the running sums, the cue and the last running sum again.

    In each step a carry of the units is kept with probability :func:`step_keep`; forgotten, the running sum is 10 too
    small. The next step goes on from what was written: 37 + 8 + 5 is 45;50#50, 35;40#40, 45;40#40 or 35;30#30.
    """
    total, addends = steps_numbers(question)
    sums = []
    for addend in addends:
        column = total % 10 + addend
        forgotten = column >= 10 and rng.random() >= step_keep(column)
        total += addend - 10 * forgotten
        sums.append(str(total))
    return f"{';'.join(sums)}{CUE}{sums[-1]}"


def step_keep(column_sum: int) -> float:
    """Probability that a careless step keeps the units' carry."""
    return keep_probability(column_sum, STEP_KEEP_AT_10, STEP_KEEP_AT_18)


def careless_steps_right(question: str) -> float:
    """Probability that :func:`careless_steps` ends with the right answer: every carry is kept."""
    return math.prod(map(step_keep, step_carries(question)))


def answer_after(question: str, written: str) -> int:
    """Answer of a sum in steps that follows, by right addition, from the first characters of a response.

    ``written`` may end anywhere. A running sum of which the tens alone are there gets its right units; the last running
    sum is the answer, so characters from the cue on tell nothing new.
    """
    total, addends = steps_numbers(question)
    numbers = [number for number in re.split("[;#]", written) if number][:ADDENDS]
    for number, addend in zip(numbers, addends, strict=False):
        total = int(number) if len(number) == 2 else 10 * int(number) + (total + addend) % 10
    return total + sum(addends[len(numbers) :])


def split_of(key: str) -> str:
    """Split of a problem key: about 60 % ``sft``, 25 % ``train``, 15 % ``val``, fixed for ever by a hash."""
    bucket = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % 20
    return "sft" if bucket < 12 else "train" if bucket < 17 else "val"


def sums(split: str) -> Iterator[tuple[int, int]]:
    """All pairs (a, b) of two-digit numbers that belong to a split, in ascending order."""
    for a in range(10, 100):
        for b in range(10, 100):
            if split_of(f"{min(a, b)}+{max(a, b)}") == split:
                yield a, b


def question(a: int, b: int) -> str:
    """The tiny model's prompt for a + b."""
    return f"{a}+{b}="


def problems(level: str, split: str) -> list[Problem]:
    """Every problem of a level (``mixed``: of its three levels) in a split, in a fixed order.

    The orders of a step sum's one-digit numbers are one problem; it is asked in one of them, which a hash decides.
    """
    _check("level", level, LEVELS)
    _check("split", split, SPLITS)
    if level == "words":
        return list(_word_problems(split))
    if level == "steps":
        return list(_steps_problems(split))
    wanted = CARRIES if level == "mixed" else {level: CARRIES[level]}
    names = {n: name for name, n in wanted.items()}
    return [Problem(question(a, b), a + b, names[carries(a, b)]) for a, b in sums(split) if carries(a, b) in names]


def _word_problems(split: str) -> Iterator[Problem]:
    for word, op in _OPERATORS.items():
        for a in range(10):
            for b in range(10):
                # No negative answers; and the two orders of a commutative operation stay in one split.
                if word == "minus" and a < b:
                    continue
                x, y = (a, b) if word == "minus" else (min(a, b), max(a, b))
                if split_of(f"{x} {word} {y}") == split:
                    for template in _TEMPLATES:
                        yield Problem(template.format(a, word, b), op(a, b), word)


def _steps_problems(split: str) -> Iterator[Problem]:
    for addends in combinations_with_replacement(range(1, 10), ADDENDS):
        for start in range(10, 100 - sum(addends)):
            key = steps_question(start, addends)
            if split_of(key) == split:
                asked = steps_question(start, random.Random(key).sample(addends, ADDENDS))
                count = len(step_carries(asked))
                yield Problem(asked, start + sum(addends), f"{count} carr{'y' if count == 1 else 'ies'}")


def make_rows(level: str, split: str, n: int, seed: int = 0) -> list[dict[str, Any]]:
    """``n`` different problems as rows of verl's schema, in an order fixed by the seed.

    Args:
        level: one of :data:`LEVELS`; ``mixed`` takes a third from each of easy, medium, hard.
        split: one of :data:`SPLITS`. ``sft`` rows, but for ``words``, also have ``messages``: the prompt and one
            careless answer.
        n: number of rows, at least 1.
        seed: which problems are drawn, and their order.

    Raises:
        ValueError: unknown level or split, ``n < 1``, or more rows than the split has problems.
    """
    if n < 1:
        raise ValueError(f"{split}: number of rows is {n}; it must be at least 1")
    _check("level", level, LEVELS)
    _check("split", split, SPLITS)
    rng = random.Random(f"{seed}/{level}/{split}")
    parts = list(CARRIES) if level == "mixed" else [level]
    chosen: list[Problem] = []
    for i, part in enumerate(parts):
        pool, share = problems(part, split), n // len(parts) + (i < n % len(parts))
        if share > len(pool):
            raise ValueError(
                f"{split}: level {part!r} has {len(pool)} problems in this split, {share} were asked for; "
                f"ask for {len(pool) * len(parts)} rows at most"
            )
        chosen += rng.sample(pool, share)
    rng.shuffle(chosen)
    return [_row(p, level, split, index, rng) for index, p in enumerate(chosen)]


def _row(problem: Problem, level: str, split: str, index: int, rng: random.Random) -> dict[str, Any]:
    prompt = [{"role": "user", "content": problem.question}]
    row: dict[str, Any] = {
        "data_source": {"words": WORDS_SOURCE, "steps": STEPS_SOURCE}.get(level, SOURCE),
        "prompt": prompt,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
        "extra_info": {"split": split, "index": index, "level": level, "kind": problem.kind},
    }
    if split == "sft" and level == "steps":
        row["messages"] = [*prompt, {"role": "assistant", "content": careless_steps(problem.question, rng)}]
    elif split == "sft" and level != "words":
        answers = slips(*map(int, problem.question.rstrip("=").split("+")))
        answer = rng.choices(list(answers), weights=list(answers.values()))[0]
        row["messages"] = [*prompt, {"role": "assistant", "content": answer}]
    return row


def write_parquet(path: str | os.PathLike[str], rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows to a parquet file; a reader never sees a half-written one. Raises ValueError without rows."""
    if not rows:
        raise ValueError(f"{path}: no rows to write")
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        pq.write_table(pa.Table.from_pylist(list(rows)), part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


_STOP = re.compile(r"<\|(?:im_end|endoftext)\|>")
_INTEGER = re.compile(r"-?[0-9]+")
# In free text a minus is a sign only if nothing to subtract from stands before it; 1,000 and 7.0 are integers.
_NUMBER = re.compile(r"(?:(?<![\w.)])[-−])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


def arithmetic_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> dict[str, float]:
    """Reward of verl's ``custom_reward_function``: 1 for the right number, 0 for anything else.

    The sums of the tiny model ask for the number and nothing else (white space around it is allowed); ``words`` takes
    the last number of the response; ``steps`` what follows the last ``#``, a number and nothing else, whatever the
    running sums before it. What follows ``<|im_end|>`` or ``<|endoftext|>`` does not count.

    Returns:
        ``score`` and ``acc`` (1.0 or 0.0, equal), ``parsed`` (1.0 if the response held an answer at all).

    Raises:
        ValueError: a data source that is not of this module, or a reference that is not a plain integer.
    """
    if data_source not in (SOURCE, WORDS_SOURCE, STEPS_SOURCE):
        raise ValueError(
            f"data_source is {data_source!r}; arithmetic_score knows {SOURCE!r}, {WORDS_SOURCE!r} and "
            f"{STEPS_SOURCE!r}. Use the data of verl_ext.tasks, or another reward.custom_reward_function"
        )
    if not isinstance(ground_truth, str) or not _INTEGER.fullmatch(ground_truth):
        raise ValueError(f"reward_model.ground_truth is {ground_truth!r}; it must be a string with an integer")
    response = _STOP.split(solution_str, maxsplit=1)[0]
    if data_source == SOURCE:
        answer = response.strip()
        parsed = _INTEGER.fullmatch(answer) is not None
    elif data_source == STEPS_SOURCE:
        _, cue, answer = response.rpartition(CUE)
        answer = answer.strip()
        parsed = bool(cue) and _INTEGER.fullmatch(answer) is not None
    else:
        numbers = _NUMBER.findall(response)
        answer, parsed = (_plain(numbers[-1]) if numbers else ""), bool(numbers)
    correct = float(parsed and answer == ground_truth)
    return {"score": correct, "acc": correct, "parsed": float(parsed)}


def _plain(number: str) -> str:
    """``1,000``, ``007``, ``7.0`` as ``1000``, ``7``, ``7``. On strings: Python's int() refuses very long ones."""
    whole, _, fraction = number.replace(",", "").replace("−", "-").partition(".")
    sign, digits = ("-", whole[1:]) if whole.startswith("-") else ("", whole)
    digits, fraction = digits.lstrip("0") or "0", fraction.rstrip("0")
    sign = "" if digits == "0" and not fraction else sign
    return sign + digits + (f".{fraction}" if fraction else "")


def _check(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: writes train.parquet and val.parquet (and sft.parquet if asked). Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m verl_ext.tasks", description="Make arithmetic data for verl.")
    parser.add_argument("--level", choices=LEVELS, default="mixed", help="difficulty (default: %(default)s)")
    parser.add_argument("--out", required=True, type=Path, help="folder for the parquet files")
    parser.add_argument("--train", type=int, help="rows for training (default: 480, words: 128)")
    parser.add_argument("--val", type=int, help="rows for validation (default: 128, words: 64)")
    parser.add_argument("--sft", type=int, help="rows with a careless answer, for supervision (default: no such file)")
    parser.add_argument("--seed", type=int, default=0, help="which problems are drawn (default: %(default)s)")
    args = parser.parse_args(argv)
    counts = {"train": 128, "val": 64} if args.level == "words" else {"train": 480, "val": 128}
    counts |= {split: n for split in SPLITS if (n := getattr(args, split)) is not None}
    try:
        tables = {split: make_rows(args.level, split, n, args.seed) for split, n in counts.items()}
        paths = {split: write_parquet(args.out / f"{split}.parquet", rows) for split, rows in tables.items()}
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    for split, path in paths.items():
        print(f"{split:5} {len(tables[split]):5} rows  {path}")
    example = tables["train"][0]
    asked, answer = example["prompt"][0]["content"], example["reward_model"]["ground_truth"]
    print(f"level {args.level}, for example {asked!r} -> {answer!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
