"""Responses cut into their segments, with the belief in the answer at each boundary and the credit of each segment.

    python -m verl_ext probe FOLDER_OR_FILE [--step N] [--uid TEXT] [--only right|wrong] [--limit 5] [--html FILE]

Reads what a method with belief probes writes to `<trainer.rollout_data_dir>/probe/<step>.jsonl` (verl_ext.probe.dump):
green segments raised the belief, red ones lowered it.
"""

from __future__ import annotations

import argparse
import html
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from verl_ext.acr_offline import RolloutError, rows_of

NUMBERS = ("beliefs", "gains", "advantages")
STYLE = """
body { font: 15px/1.6 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #1b1b1b }
.response { border: 1px solid #ccc; border-radius: 6px; padding: .6em 1em; margin: 1.2em 0 }
.prompt { white-space: pre-wrap; color: #555 }
.text { white-space: pre-wrap; font-family: ui-monospace, monospace }
.belief { font: 11px system-ui; background: #e8e8e8; border-radius: 3px; padding: 1px 4px; margin: 0 2px }
.segment { border-radius: 3px; padding: 1px 0 }
"""


def read(path: Path) -> list[dict]:
    """The rows of a file, of a folder of such files, or of a rollout folder with `probe/` in it.

    Raises:
        RolloutError: naming file and line.
    """
    folder = path / "probe" if (path / "probe").is_dir() else path
    rows = []
    for place, row in rows_of(folder):
        if not _is_probe(row):
            raise RolloutError(
                f"{place}: not a probe's row (step, uid, prompt, answer, score, texts, and as many finite gains and"
                " advantages, and one belief more); give the folder probe/ of trainer.rollout_data_dir"
            )
        rows.append(row)
    if not rows:
        raise RolloutError(f"{folder}: no rows")
    return rows


def _is_probe(row: dict) -> bool:
    number = lambda value: isinstance(value, int | float) and math.isfinite(value)  # noqa: E731
    texts = row.get("texts")
    if not isinstance(texts, list) or not all(isinstance(row.get(key), str) for key in ("uid", "prompt", "answer")):
        return False
    columns = [row.get(key) for key in NUMBERS]
    right = all(isinstance(values, list) and all(map(number, values)) for values in columns)
    right = right and all(isinstance(text, str) for text in texts) and number(row.get("score")) and number(row["step"])
    return right and [len(values) - len(texts) for values in columns] == [1, 0, 0]


def select(rows: Iterable[dict], step: int | None, uid: str | None, only: str | None, limit: int) -> list[dict]:
    """The first `limit` different responses that match; without a step those of the last one."""
    rows = list(rows)
    if step is None and rows:
        step = max(row["step"] for row in rows)
    found = [row for row in rows if row["step"] == step and (uid is None or uid in row["uid"])]
    if only:
        found = [row for row in found if (row["score"] > 0) == (only == "right")]
    once: dict[tuple, dict] = {}  # samples of a prompt often agree
    for row in found:
        same = once.setdefault((row["uid"], *row["texts"]), row | {"times": 0})
        same["times"] += 1
    return list(once.values())[:limit]


def headline(row: dict) -> str:
    times = f"  {row['times']} times" if row.get("times", 1) > 1 else ""
    return f"step {row['step']}  uid {row['uid']}  score {row['score']:g}  answer {row['answer']}{times}"


def shade(gain: float) -> float:
    """Strength of a colour in [0, 1] for a gain in [-1, 1]: the square root shows small ones."""
    return math.sqrt(min(1.0, abs(gain)))


def in_terminal(row: dict, color: bool) -> str:
    """A response as text: [belief] segment [belief] segment ..., then the credit of each segment."""
    parts = [headline(row), row["prompt"].strip(), f"[{row['beliefs'][0]:.3f}]"]
    for text, belief, gain in zip(row["texts"], row["beliefs"][1:], row["gains"], strict=True):
        if color and shade(gain) > 0.05:
            dark = int(40 + 120 * shade(gain))
            red, green = (0, dark) if gain > 0 else (dark, 0)
            text = f"\033[97;48;2;{red};{green};0m{text}\033[0m"
        parts[-1] += f"{text}[{belief:.3f}]"
    credit = [f"{gain:+.3f} -> {adv:+.3f}" for gain, adv in zip(row["gains"], row["advantages"], strict=True)]
    return "\n".join([*parts, f"rise -> advantage of each segment: {', '.join(credit)}"])


def as_html(rows: Iterable[dict], title: str) -> str:
    """One page without outside parts. What the model wrote is escaped."""
    out = [f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"]
    out.append(f"<h1>{html.escape(title)}</h1><p>Grey: belief in the answer. Green raised it, red lowered it.</p>")
    for row in rows:
        out.append(f"<div class=response><b>{html.escape(headline(row))}</b>")
        out.append(f"<div class=prompt>{html.escape(row['prompt'].strip())}</div><div class=text>")
        out.append(f"<span class=belief>{row['beliefs'][0]:.3f}</span>")
        columns = (row["texts"], row["beliefs"][1:], row["gains"], row["advantages"])
        for text, belief, gain, advantage in zip(*columns, strict=True):
            hue = "0,140,60" if gain > 0 else "200,30,30"
            out.append(
                f'<span class=segment style="background:rgba({hue},{shade(gain):.2f})"'
                f' title="rise {gain:+.4f}, advantage {advantage:+.4f}">{html.escape(text)}</span>'
                f"<span class=belief>{belief:.3f}</span>"
            )
        out.append("</div></div>")
    return "".join(out)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verl_ext probe", description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="trainer.rollout_data_dir, its probe/ folder, or one file of it")
    parser.add_argument("--step", type=int, help="training step (default: the last one)")
    parser.add_argument("--uid", help="only responses whose uid contains this")
    parser.add_argument("--only", choices=("right", "wrong"), help="only responses with (without) a positive score")
    parser.add_argument("--limit", type=int, default=5, help="responses shown (default: %(default)s)")
    parser.add_argument("--html", type=Path, help="write a page instead of printing")
    parser.add_argument("--no-color", action="store_true", help="plain text (also: NO_COLOR, or not a terminal)")
    args = parser.parse_args(argv)
    if args.limit < 1:
        parser.error(f"--limit is {args.limit}; it must be at least 1")
    try:
        rows = read(args.path)
    except (RolloutError, UnicodeDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    shown = select(rows, args.step, args.uid, args.only, args.limit)
    if not shown:
        steps = sorted({row["step"] for row in rows})
        print(f"error: no response matches; the steps are {steps[0]} to {steps[-1]}", file=sys.stderr)
        return 2
    if args.html:
        try:
            args.html.parent.mkdir(parents=True, exist_ok=True)
            args.html.write_text(as_html(shown, f"Belief probes of {args.path.name}"), encoding="utf-8")
        except OSError as error:
            print(f"error: --html {args.html}: {error.strerror}", file=sys.stderr)
            return 2
        print(f"{len(shown)} responses  {args.html}")
        return 0
    color = sys.stdout.isatty() and not args.no_color and "NO_COLOR" not in os.environ
    print("\n\n".join(in_terminal(row, color) for row in shown))
    return 0
