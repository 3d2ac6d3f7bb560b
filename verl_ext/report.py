"""What a run's metrics file says: a short table, a picture, and several runs side by side.

verl's `file` logger writes one line per step, {"step": n, "data": {name: value}}; NaN becomes null. A run that was
resumed has recorded some steps twice, or in an earlier part of the file (`metrics.1.jsonl` beside `metrics.jsonl`, kept
by `verl_ext.main`): the later record of a step wins, and steps beyond the point of resumption are dropped.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

SERIES = {  # what we show: verl's (or our) metric names, the first present one counts
    "reward": ("critic/score/mean", "critic/rewards/mean"),
    "collapse rate, raw": ("acr/rate",),
    "collapse rate, after injection": ("acr/post",),
    "all-wrong groups": ("acr/wrong",),
    "all-correct groups": ("acr/correct",),
    "tied otherwise": ("acr/tied_other",),
    "rows with non-zero advantage": ("acr/rows_nonzero",),
    "entropy": ("actor/entropy",),
    "gradient norm": ("actor/grad_norm",),
    "response length": ("response_length/mean",),
    "seconds per step": ("timing_s/step", "perf/time_per_step"),
}
SPLIT = {  # parts of a step, seconds
    "rollout": ("timing_s/gen",),
    "old log-prob": ("timing_s/old_log_prob",),
    "reference": ("timing_s/ref",),
    "advantage": ("timing_s/adv",),
    "update": ("timing_s/update_actor",),
    "weight sync": ("timing_s/update_weights",),
    "checkpoint": ("timing_s/save_checkpoint",),
}
TABLE = [name for name in SERIES if name not in ("tied otherwise", "response length")]


class MetricsError(ValueError):
    """A metrics file that cannot be read; the message names file, line and what to do."""


def pick(data: dict, keys: Sequence[str]) -> float | None:
    """The first of `keys` that holds a finite number in one step's data, else None."""
    for key in keys:
        value = data.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def validation(data: dict) -> dict[str, float]:
    """Validation means of one step, by short name: `val-core/gsm8k/acc/mean@1` becomes `gsm8k acc mean@1`."""
    keys = [key for key in data if key.startswith("val-core/") and "/mean@" in key]
    found = {" ".join(key.split("/")[1:]): pick(data, (key,)) for key in keys}
    return {name: value for name, value in found.items() if value is not None}


@dataclass
class Run:
    """One run: `data[i]` holds the metrics recorded for step `steps[i]` (ascending)."""

    label: str
    steps: list[int]
    data: list[dict]
    notes: list[str] = field(default_factory=list)

    def series(self, keys: Sequence[str]) -> tuple[list[int], list[float]]:
        """Steps and finite values of the first of `keys` that a step has; steps without one are left out."""
        pairs = [(step, pick(data, keys)) for step, data in zip(self.steps, self.data, strict=True)]
        pairs = [(step, value) for step, value in pairs if value is not None]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def validations(self) -> dict[str, tuple[list[int], list[float]]]:
        """Name -> (steps, values) of every validation mean."""
        out: dict[str, tuple[list[int], list[float]]] = {}
        for step, data in zip(self.steps, self.data, strict=True):
            for name, value in validation(data).items():
                out.setdefault(name, ([], []))[0].append(step)
                out[name][1].append(value)
        return out

    def split(self) -> dict[str, float]:
        """Mean seconds per step of each part, without the first step (it warms things up) when there are others."""
        rows = [data for data in self.data if pick(data, SERIES["seconds per step"]) is not None]
        rows = rows[1:] or rows
        if not rows:
            return {}
        out = {name: fmean(pick(row, keys) or 0.0 for row in rows) for name, keys in SPLIT.items()}
        out = {name: seconds for name, seconds in out.items() if seconds > 0}
        total = fmean(pick(row, SERIES["seconds per step"]) for row in rows)
        return {**out, "rest": max(total - sum(out.values()), 0.0)}


def is_record(line) -> bool:
    """Is a decoded line what verl's `file` logger writes for a step?"""
    return isinstance(line, dict) and isinstance(line.get("step"), int) and isinstance(line.get("data"), dict)


def _records(path: Path, notes: list[str]) -> Iterator[tuple[int, dict]]:
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:  # JSON or UTF-8
            if number == len(lines):  # no newline at its end: the writer was stopped in the middle of it
                notes.append(f"{path}:{number}: incomplete last line left out (the run was stopped while writing it)")
                return
            raise MetricsError(f"{path}:{number}: not JSON ({error}); expected lines of verl's `file` logger") from None
        if not is_record(record):
            raise MetricsError(
                f'{path}:{number}: expected {{"step": int, "data": {{...}}}} as of verl\'s `file` logger'
            )
        yield record["step"], record["data"]


def earlier_parts(path: Path) -> list[Path]:
    """`metrics.1.jsonl`, `metrics.2.jsonl`, ... beside `metrics.jsonl`, oldest first."""
    parts = [part for part in path.parent.glob(f"{path.stem}.*{path.suffix}") if part.suffixes[-2][1:].isdigit()]
    return sorted(parts, key=lambda part: int(part.suffixes[-2][1:]))


def load_run(path: str | Path, label: str | None = None) -> Run:
    """Read a metrics file, and the earlier parts it continues when it does not begin at the start.

    Raises:
        MetricsError: missing or empty file, a line that is not a record.
    """
    path = Path(path)
    if not path.is_file():
        raise MetricsError(f"{path}: no such file; a run writes it when trainer.logger contains `file`")
    notes: list[str] = []
    records = list(_records(path, notes))
    if not records:
        raise MetricsError(f"{path}: no steps recorded; the run stopped before its first step, see its log")
    for part in reversed(earlier_parts(path)):
        if records[0][0] <= 1:
            break
        notes.append(f"{path}: begins at step {records[0][0]}; continues {part}")
        records = list(_records(part, notes)) + records
    steps: dict[int, dict] = {}
    for step, data in records:
        for undone in [s for s in steps if s > step]:  # resumed from a checkpoint before these
            del steps[undone]
        steps[step] = {**steps.get(step, {}), **data}
    return Run(label or path.parent.name or path.stem, list(steps), list(steps.values()), notes)


def window(values: Sequence) -> int:
    """How many steps `first` and `last` means take: 10, or half of a short run."""
    return max(1, min(10, len(values) // 2))


def summary(run: Run) -> dict[str, float]:
    """One number per line, for tables with a column per run; lines without data are absent."""
    out: dict[str, float] = {}
    steps, rewards = run.series(SERIES["reward"])
    if rewards:
        k = window(rewards)
        out |= {"steps": len(steps), f"reward, first {k}": fmean(rewards[:k]), f"reward, last {k}": fmean(rewards[-k:])}
    for name, (_, values) in run.validations().items():
        out |= {f"{name}, first": values[0], f"{name}, last": values[-1]}
    for name in TABLE[1:]:
        values = run.series(SERIES[name])[1]
        if name == "seconds per step":
            values = values[1:] or values
        if values:
            out[name] = fmean(values)
    return out | {f"  {name}, s": seconds for name, seconds in run.split().items()}


def render(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain-text table, first column left, the others right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [[*header], ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
    )


def number(value: float | None, signed: bool = False) -> str:
    """Three decimals, or one for large values; `-` for nothing."""
    if value is None or isinstance(value, int):
        return "-" if value is None else str(value)
    return f"{value:{'+' if signed else ''}.3f}" if abs(value) < 100 else f"{value:{'+' if signed else ''}.1f}"


def table(run: Run) -> str:
    """First, last, means of the first and last steps; and where the time of a step goes."""
    k = window(run.series(SERIES["reward"])[1])
    rows = []
    series = {"reward": run.series(SERIES["reward"]), **{f"validation {n}": v for n, v in run.validations().items()}}
    series |= {name: run.series(SERIES[name]) for name in TABLE[1:]}
    for name, (steps, values) in series.items():
        if not values:
            rows.append([name, *"-----"])
        elif name.startswith("validation"):
            first, last = f"{number(values[0])} @{steps[0]}", f"{number(values[-1])} @{steps[-1]}"
            rows.append([name, first, last, "", "", number(values[-1] - values[0], signed=True)])
        else:
            head, tail = fmean(values[:k]), fmean(values[-k:])
            rows.append([name, *map(number, (values[0], values[-1], head, tail)), number(tail - head, signed=True)])
    text = render(["", "first", "last", f"first {k}", f"last {k}", "change"], rows)
    split = run.split()
    if split:
        total = sum(split.values())
        parts = ", ".join(f"{name} {seconds:.2f} ({seconds / total:.0%})" for name, seconds in split.items())
        text += f"\n\nseconds per step {total:.2f}: {parts}"
    return text


# ------------------------------------------------------------------------------------------------------------ pictures

BLUE, ORANGE, GREEN, RED, GREY, PURPLE = "#2b6cb0", "#dd8452", "#55a868", "#c44e52", "#8c8c8c", "#8172b3"
PALETTE = [BLUE, ORANGE, GREEN, RED, PURPLE, "#937860", "#da8bc3", GREY]


def _smooth(values: Sequence[float]) -> list[float]:
    """Centred moving mean over about a tenth of the run (at most 9 steps); short runs are left as they are."""
    half = min(len(values) // 20, 4)
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _curve(axis, runs: Sequence[Run], keys: Sequence[str], color: str, label: str | None, **style) -> bool:
    """One run: its values, faint, under their moving mean. Several: mean of the moving means, and their min..max."""
    series = [run.series(keys) for run in runs]
    curves = [dict(zip(steps, _smooth(values), strict=True)) for steps, values in series if values]
    steps = sorted(set.intersection(*map(set, curves))) if curves else []
    if not steps:
        return False
    stacked = [[curve[step] for curve in curves] for step in steps]
    if len(curves) == 1:
        if len(steps) >= 20:
            axis.plot(*runs[0].series(keys), color=color, lw=0.8, alpha=0.35)
    else:
        axis.fill_between(steps, [min(v) for v in stacked], [max(v) for v in stacked], color=color, alpha=0.18, lw=0)
    axis.plot(steps, [fmean(v) for v in stacked], color=color, label=label, **{"lw": 1.9, **style})
    return True


def _validation(axis, runs: Sequence[Run], colors: Sequence[str], label: str | None) -> bool:
    names = list(dict.fromkeys(name for run in runs for name in run.validations()))
    for name, color in zip(names, colors, strict=False):
        curves = [dict(zip(*run.validations()[name], strict=True)) for run in runs if name in run.validations()]
        steps = sorted(set.intersection(*map(set, curves)))
        means = [fmean(curve[step] for curve in curves) for step in steps]
        if len(curves) > 1:
            lows, highs = zip(*[(min(c[s] for c in curves), max(c[s] for c in curves)) for s in steps], strict=True)
            axis.vlines(steps, lows, highs, color=color, alpha=0.5, lw=1.2)
        axis.plot(steps, means, "o--", color=color, ms=5, lw=1.2, label=label and f"{label} {name}")
    return bool(names)


def _collapse(axis, run: Run) -> bool:
    """One run: the causes stacked up to the raw rate, and the rate that is left after the estimator."""
    colors = {"all-wrong groups": RED, "all-correct groups": GREEN, "tied otherwise": GREY}
    raw = run.series(SERIES["collapse rate, raw"])
    if not raw[0]:
        return False
    causes = {name: run.series(SERIES[name]) for name in colors}
    causes = {name: values for name, (steps, values) in causes.items() if steps == raw[0] and any(values)}
    if causes:
        shades = [colors[name] for name in causes]
        axis.stackplot(raw[0], *causes.values(), labels=list(causes), colors=shades, alpha=0.45, lw=0)
    axis.plot(*raw, color="#333333", lw=1.2, label="raw rate")
    axis.plot(*run.series(SERIES["collapse rate, after injection"]), color=BLUE, lw=1.9, label="after injection")
    return True


def _time(axis, groups: Sequence[tuple[str, Sequence[Run]]]) -> bool:
    """Stacked bars: mean seconds per step and what they are spent on, one bar per label."""
    splits = [[run.split() for run in runs] for _, runs in groups]
    names = [name for name in [*SPLIT, "rest"] if any(split.get(name) for runs in splits for split in runs)]
    left = [0.0] * len(groups)
    for name, color in zip(names, PALETTE, strict=False):
        widths = [fmean(split.get(name, 0.0) for split in runs) if runs else 0.0 for runs in splits]
        axis.barh([label for label, _ in groups], widths, left=left, color=color, alpha=0.8, height=0.6, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, total in enumerate(left):
        axis.text(total, row, f" {total:.1f} s", va="center", fontsize=8)
    axis.set_xlim(0, max(left, default=1) * 1.15 or 1)
    axis.invert_yaxis()
    return bool(names)


def _time_area(axis, run: Run) -> bool:
    steps, total = run.series(SERIES["seconds per step"])
    if not steps:
        return False
    at = {step: data for step, data in zip(run.steps, run.data, strict=True)}
    parts = {name: [pick(at[step], keys) or 0.0 for step in steps] for name, keys in SPLIT.items()}
    parts = {name: values for name, values in parts.items() if any(values)}
    rest = [max(t - sum(values), 0.0) for t, *values in zip(total, *parts.values(), strict=True)]
    axis.stackplot(steps, *parts.values(), rest, labels=[*parts, "rest"], colors=PALETTE, alpha=0.8, lw=0)
    top = sorted(total)[int(0.95 * (len(total) - 1))] * 1.35  # a slow first step must not flatten the others
    if max(total) > top:
        axis.set_ylim(0, top)
        axis.text(0.98, 0.96, f"slowest {max(total):.1f} s", transform=axis.transAxes, ha="right", va="top", fontsize=8)
    return True


def plot(groups: Sequence[tuple[str, Sequence[Run]]], out: Path, title: str = "") -> Path:
    """Write the curves of one run in detail, or of several labels (each one or more runs, for example seeds) on top of
    each other. Returns `out` (a PNG)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    single = groups[0][1][0] if len(groups) == 1 and len(groups[0][1]) == 1 else None
    figure, axes = plt.subplots(2, 3, figsize=(14, 7.4), layout="constrained")
    (reward, collapse, nonzero), (entropy, norm, time) = axes
    seeds = max(len(runs) for _, runs in groups)
    how = f"mean of {seeds} runs, band min..max" if seeds > 1 else "moving mean" if single is None else ""
    figure.suptitle(title + (f"   ({how})" if how else ""), x=0.01, ha="left", fontsize=12, fontweight="bold")

    drawn = {axis: False for axis in axes.flat}
    for color, (label, runs) in zip(PALETTE * (len(groups) // len(PALETTE) + 1), groups, strict=False):
        many = None if single else label
        drawn[reward] |= _curve(reward, runs, SERIES["reward"], color, many or "training reward")
        dots = PALETTE[1:] if single else [color] * 8  # a colour per data set, or the run's
        drawn[reward] |= _validation(reward, runs, dots, None if many else "validation")
        if single:
            drawn[collapse] |= _collapse(collapse, single)
            drawn[time] |= _time_area(time, single)
        else:
            drawn[collapse] |= _curve(collapse, runs, SERIES["collapse rate, raw"], color, label)
            _curve(collapse, runs, SERIES["collapse rate, after injection"], color, None, ls="--", lw=1.4)
        drawn[nonzero] |= _curve(nonzero, runs, SERIES["rows with non-zero advantage"], color, many)
        drawn[entropy] |= _curve(entropy, runs, SERIES["entropy"], color, many)
        drawn[norm] |= _curve(norm, runs, SERIES["gradient norm"], color, many)
    if not single:
        drawn[time] |= _time(time, groups)

    names = {
        reward: "reward" if single else "reward (line) and validation (dots)",
        collapse: "collapsed groups, share" if single else "collapse rate: raw (solid), after injection (dashed)",
        nonzero: "rows with non-zero advantage, share", entropy: "entropy", norm: "gradient norm",
        time: "seconds per step" if single else "mean seconds per step",
    }  # fmt: skip
    for axis, name in names.items():
        axis.set_title(name, loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        if not drawn[axis]:
            axis.text(0.5, 0.5, "not recorded in this run", transform=axis.transAxes, ha="center", color=GREY)
            axis.set(xticks=[], yticks=[])
            continue
        axis.grid(alpha=0.25)
        axis.margins(x=0.02)
        if axis is not time or single:
            axis.set_xlabel("" if axis is time else "step", fontsize=8)
            axis.xaxis.get_major_locator().set_params(integer=True)
        if axis in (collapse, nonzero):
            axis.set_ylim(0, 1.02)
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12), "ncols": 4} if axis is time else {}
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8, framealpha=0.7, edgecolor="none", **below)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    plt.close(figure)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verl_ext report", description="Table and curves of runs.")
    parser.add_argument("metrics", nargs="+", type=Path, help="metrics file(s) written by verl's `file` logger")
    parser.add_argument("--labels", nargs="+", help="names of the runs, in the order of the files")
    parser.add_argument("--out", type=Path, help="folder for curves.png (default: that of the first file)")
    parser.add_argument("--title", default="")
    parser.add_argument("--log", type=Path, help="log file, only to be named at the end")
    parser.add_argument("--checkpoint", type=Path, help="checkpoint folder, only to be named at the end")
    args = parser.parse_args(argv)
    if args.labels and len(args.labels) != len(args.metrics):
        parser.error(f"{len(args.labels)} labels for {len(args.metrics)} files: give one label per file")
    labels = args.labels or [None] * len(args.metrics)
    try:
        runs = [load_run(path, label) for path, label in zip(args.metrics, labels, strict=True)]
    except MetricsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for run in runs:
        for note in run.notes:
            print(f"note: {note}", file=sys.stderr)
    if len(runs) == 1:
        body, title = table(runs[0]), args.title or runs[0].label
    else:
        columns = [summary(run) for run in runs]
        names = list(dict.fromkeys(name for column in columns for name in column))
        rows = [[name, *(number(column.get(name)) for column in columns)] for name in names]
        body, title = render(["mean over the run", *(run.label for run in runs)], rows), args.title or "runs compared"
    print(f"\n{title}\n\n{body}\n")
    picture = plot([(run.label, [run]) for run in runs], (args.out or args.metrics[0].parent) / "curves.png", title)
    paths = [("curves", picture), *(("metrics", path) for path in args.metrics)]
    paths += [(name, path) for name, path in (("log", args.log), ("checkpoint", args.checkpoint)) if path]
    for name, path in paths:
        print(f"{name:<11}{path.resolve()}{'' if path.exists() else '   (missing)'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
