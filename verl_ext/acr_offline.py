"""The Advantage Collapse Rate of runs made with plain verl, from the rollouts it dumped.

    python -m verl_ext acr FOLDER_OR_FILE ... [--out acr.png] [--json]

verl's `trainer.rollout_data_dir` holds one `<step>.jsonl` per step, a row per response: input, output, gts, score,
step, uid (`{uid}_{session}_{output}`), and what else of the reward function's values is kept (`acc`). Statistics are
those of `verl_ext.acr`: groups are the rows of one uid; groups of one and padding rows stay out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

PAD = "pad"  # uid prefix of the rows verl's V1 trainer appends to fill a batch


class RolloutError(ValueError):
    """A dump that cannot be read; the message names file, line and what to do."""


def rows_of(path: Path) -> Iterator[tuple[str, dict]]:
    """(place, row) for every line of a file, or of every `*.jsonl` of a folder in the order of the steps."""
    if not path.exists():
        raise RolloutError(f"{path}: no such file or folder; verl writes rollouts with trainer.rollout_data_dir=FOLDER")
    files = [path]
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"), key=lambda file: (not file.stem.isdigit(), file.stem.zfill(12)))
        if not files:
            raise RolloutError(f"{path}: no *.jsonl in this folder; set trainer.rollout_data_dir to it and run again")
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise RolloutError(
                    f"{file}:{number}: not JSON ({error}); delete the line if a run was killed there"
                ) from None
            if not isinstance(row, dict):
                raise RolloutError(f"{file}:{number}: expected an object with input, score, step, uid, got {line[:60]}")
            if "step" not in row:
                if not file.stem.isdigit():
                    raise RolloutError(f"{file}:{number}: no `step`, and the file is not named <step>.jsonl")
                row["step"] = int(file.stem)
            yield f"{file}:{number}", row


def finite(row: dict, key: str, place: str) -> float:
    """A finite number from a row; RolloutError names the place otherwise."""
    value = row.get(key)
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    raise RolloutError(f"{place}: `{key}` must be a finite number, got {value!r}")


def split_key(key: str) -> tuple[str, str, int]:
    """`{uid}_{session}_{output}` -> (uid, session, output). A key of another form is a uid with sessions of its own."""
    parts = key.rsplit("_", 2)
    if len(parts) == 3 and parts[1].isdigit() and parts[2].isdigit():
        return parts[0], parts[1], int(parts[2])
    return key, "", 0


def collapse_by_step(
    rows: Iterator[tuple[str, dict]], tol: float, threshold: float | None = None
) -> tuple[dict[int, dict[str, float]], list[str]]:
    """Statistics of each step, and notes on what had to be assumed.

    Args:
        rows: (place, row) as `rows_of` yields them.
        tol: largest max - min of the scores of a collapsed group.
        threshold: a response is correct above it; None: by `acc`, or by the middle of the scores' range in the data.

    Raises:
        RolloutError: no row at all, or a row without a finite score.
    """
    import numpy as np
    import torch

    from verl_ext.acr import acr_metrics
    from verl_ext.groups import make_groups

    steps: dict[int, dict] = {}  # step -> {response: (uid, output number, score, acc)}
    by_input = False
    for place, row in rows:
        score = finite(row, "score", place)
        acc = finite(row, "acc", place) if row.get("acc") is not None else None
        responses = steps.setdefault(int(finite(row, "step", place)), {})
        key = row.get("uid")
        if key is None:
            if "input" not in row:
                raise RolloutError(f"{place}: neither `uid` nor `input`: nothing says which rows share a prompt")
            by_input = True
            uid, response, output = "input " + str(row["input"]), len(responses), 0
        else:
            uid, session, output = split_key(str(key))
            if uid.startswith(PAD):
                continue
            response = (uid, session) if session else len(responses)  # several outputs of a session: the last counts
        if response not in responses or output >= responses[response][1]:
            responses[response] = (uid, output, score, acc)
    steps = {step: responses for step, responses in sorted(steps.items()) if responses}
    if not steps:
        raise RolloutError("no rows to count: the files are empty, or hold padding rows only")
    notes, known = [], True
    if by_input:
        notes.append(
            "rows without a uid are grouped by `input`: a prompt that occurs twice in a step counts as one group"
        )
    everything = [values for responses in steps.values() for values in responses.values()]
    if threshold is None and any(values[3] is None for values in everything):
        scores = [values[2] for values in everything]
        threshold = (min(scores) + max(scores)) / 2
        notes.append(f"no `acc` in every row: correct means score > {threshold:g}, the middle of the scores' range")
        known = min(scores) < max(scores)
        if not known:
            notes.append(f"every score is {scores[0]:g}: whether that is wrong or correct is unknown; give --threshold")
    out = {}
    for step, responses in steps.items():
        uid, _, score, acc = zip(*responses.values(), strict=True)
        scores = torch.tensor(score, dtype=torch.float64)
        correct = torch.tensor(acc) > 0.5 if threshold is None else scores > threshold
        groups = make_groups(np.array(uid, dtype=object), torch.ones(len(uid), 1))
        metrics = acr_metrics(groups, scores, correct if known else None, tol=tol)
        out[step] = {**metrics, "rows": float(len(uid)), "reward_mean": fmean(score)}
    return out, notes


def overall(steps: dict[int, dict[str, float]]) -> dict[str, float]:
    """Means over the steps; group sizes are extremes, counts are sums."""
    out = {key: fmean(step[key] for step in steps.values() if key in step) for key in next(iter(steps.values()))}
    for key in ("rows", "acr/groups", "acr/groups_of_one"):
        out[key] = sum(step[key] for step in steps.values())
    return {**out, "acr/group_size_min": min(step["acr/group_size_min"] for step in steps.values())}


def plot(runs: dict[str, dict[int, dict[str, float]]], out: Path) -> Path:
    """A column for each run: the causes stacked up to the rate, and the mean reward below. Returns `out` (a PNG)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from verl_ext.report import BLUE, GREEN, GREY, RED

    figure, axes = plt.subplots(
        2,
        len(runs),
        figsize=(1.5 + 5.5 * len(runs), 6),
        layout="constrained",
        sharex="col",
        sharey="row",
        squeeze=False,
    )
    for column, (label, steps) in enumerate(runs.items()):
        rate, reward = axes[:, column]
        x, style = list(steps), {"marker": "o", "ms": 4} if len(steps) < 15 else {}
        causes = {
            "all-wrong": ("acr/wrong", RED),
            "all-correct": ("acr/correct", GREEN),
            "tied": ("acr/tied_other", GREY),
        }
        values = [[step[key] for step in steps.values()] for key, _ in causes.values()]
        shades = [color for _, color in causes.values()]
        if len(x) > 1:
            rate.stackplot(x, *values, labels=list(causes), colors=shades, alpha=0.45, lw=0)
        else:
            for i, (name, color) in enumerate(zip(causes, shades, strict=True)):
                rate.bar(
                    x, values[i], bottom=sum(v[0] for v in values[:i]), width=0.4, color=color, alpha=0.45, label=name
                )
        rate.plot(
            x, [step["acr/rate"] for step in steps.values()], color="#333333", lw=1.3, label="collapse rate", **style
        )
        reward.plot(x, [step["reward_mean"] for step in steps.values()], color=BLUE, lw=1.8, **style)
        rate.set_title(f"{label}\ncollapsed groups, share", loc="left", fontsize=10)
        rate.set_ylim(0, 1.02)
        rate.legend(fontsize=8, framealpha=0.7, edgecolor="none")
        reward.set_title("mean reward", loc="left", fontsize=10)
        reward.set_xlabel("step", fontsize=8)
        reward.xaxis.get_major_locator().set_params(integer=True)
        for axis in (rate, reward):
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(alpha=0.25)
            axis.margins(x=0.02)
            axis.tick_params(labelsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    plt.close(figure)
    return out


COLUMNS = {
    "rate": "acr/rate",
    "wrong": "acr/wrong",
    "correct": "acr/correct",
    "tied other": "acr/tied_other",
    "groups": "acr/groups",
    "size": "acr/group_size_mean",
    "mean reward": "reward_mean",
}


def main(argv: Sequence[str] | None = None) -> int:
    from verl_ext.acr import TOL
    from verl_ext.report import render

    parser = argparse.ArgumentParser(prog="python -m verl_ext acr", description="Collapse rate of dumped rollouts.")
    parser.add_argument("paths", nargs="+", type=Path, help="folder of trainer.rollout_data_dir, or jsonl files")
    parser.add_argument("--out", type=Path, help="write a picture (PNG) there")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--tol", type=float, default=TOL, help="largest max - min of a collapsed group (default %(default)g)"
    )
    parser.add_argument("--threshold", type=float, help="a response is correct when its score is above this")
    args = parser.parse_args(argv)
    try:
        found = {str(path): collapse_by_step(rows_of(path), args.tol, args.threshold) for path in args.paths}
    except (RolloutError, UnicodeDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps({p: {"steps": s, "overall": overall(s), "notes": notes} for p, (s, notes) in found.items()}))
    for path, (steps, notes) in found.items():
        for note in notes:
            print(f"note: {path}: {note}", file=sys.stderr)
        if not args.json:
            lines = {**{str(step): values for step, values in steps.items()}, "all": overall(steps)}
            cells = [
                [name, *(f"{row[key]:g}" if key == "acr/groups" else f"{row[key]:.3f}" for key in COLUMNS.values())]
                for name, row in lines.items()
            ]
            print(f"\n{path}\n\n{render(['step', *COLUMNS], cells)}")
    if args.out:
        picture = plot({path: steps for path, (steps, _) in found.items()}, args.out)
        print(f"picture  {picture.resolve()}", file=sys.stderr if args.json else sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
