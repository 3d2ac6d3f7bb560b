"""Reading metrics files in every state a run can leave them, the tables, and that pictures show what they should."""

from __future__ import annotations

import importlib.util
import json
import math
import random
from pathlib import Path

import pytest

from verl_ext import report
from verl_ext.report import SERIES, MetricsError, Run, load_run, main, number, plot, render, summary, table

ROOT = Path(__file__).resolve().parents[2]


def write(path: Path, records, tail: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"step": s, "data": d}) + "\n" for s, d in records) + tail)
    return path


def training(steps: int, seed: int = 0, bonus: float = 0.0):
    """A made-up run with everything we show: (step, data) from 0, validated at the start, in the middle, at the end."""
    draw = random.Random(seed)
    yield 0, {"val-core/sums/acc/mean@1": 0.5, "val-aux/num_turns/min": 2}
    for step in range(1, steps + 1):
        wrong, correct = 0.25 + draw.uniform(-0.1, 0.1), 0.125 + draw.uniform(-0.1, 0.1)
        data = {
            "critic/score/mean": 0.3 + bonus * step / steps + draw.uniform(-0.02, 0.02),
            "acr/rate": wrong + correct,
            "acr/wrong": wrong,
            "acr/correct": correct,
            "acr/tied_other": 0.0,
            "acr/post": 0.0,
            "acr/rows_nonzero": 1.0,
            "actor/entropy": 1.0 - step / steps / 2,
            "actor/grad_norm": None if step == 3 else 2.0,
            "timing_s/gen": 20.0 if step == 1 else 2.0,
            "timing_s/old_log_prob": 0.5,
            "timing_s/adv": 0.1,
            "timing_s/update_actor": 1.0,
            "timing_s/update_weights": 0.05,
            "timing_s/step": 22.0 if step == 1 else 4.0,
        }
        if step in (steps // 2, steps):
            data["val-core/sums/acc/mean@1"] = 0.5 + bonus * step / steps
        yield step, data


def test_reads_values_and_leaves_out_what_is_not_finite(tmp_path):
    run = load_run(write(tmp_path / "run" / "metrics.jsonl", training(10)))
    assert run.label == "run" and run.steps == list(range(11)) and run.notes == []
    assert run.series(SERIES["gradient norm"]) == ([s for s in range(1, 11) if s != 3], [2.0] * 9)
    assert run.series(["nothing"]) == ([], [])
    assert run.validations() == {"sums acc mean@1": ([0, 5, 10], [0.5, 0.5, 0.5])}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "text", True, [1.0]])
def test_pick_takes_finite_numbers_only(value):
    assert report.pick({"a": value, "b": 2}, ("a", "b")) == 2.0


def test_reward_falls_back_to_the_second_name():
    run = Run("x", [1], [{"critic/rewards/mean": 0.5}])
    assert run.series(SERIES["reward"]) == ([1], [0.5])


def test_truncated_last_line_is_left_out_with_a_note(tmp_path):
    path = write(tmp_path / "m.jsonl", training(3), tail='{"step": 4, "da')
    run = load_run(path)
    assert run.steps == [0, 1, 2, 3] and run.notes == [
        f"{path}:5: incomplete last line left out (the run was stopped while writing it)"
    ]


def test_empty_lines_do_not_matter(tmp_path):
    assert load_run(write(tmp_path / "m.jsonl", training(3), tail="\n\n")).steps == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "no steps recorded"),
        ("\n", "no steps recorded"),
        ('{"step": 1, "da\n{"step": 2, "data": {}}\n', "m.jsonl:1: not JSON"),
        ('{"step": 1, "data": {}}\n[1]\n', "m.jsonl:2: expected"),
        ('{"data": {}}\n', "m.jsonl:1: expected"),
        ('{"step": "1", "data": {}}\n', "m.jsonl:1: expected"),
    ],
)
def test_bad_files_are_named_with_their_line(tmp_path, text, message):
    path = tmp_path / "m.jsonl"
    path.write_text(text)
    with pytest.raises(MetricsError, match=message):
        load_run(path)


def test_missing_file(tmp_path, capsys):
    assert main([str(tmp_path / "none.jsonl")]) == 1
    assert "no such file" in capsys.readouterr().err


def test_resume_in_one_file_takes_the_later_record_and_drops_what_was_undone(tmp_path):
    first = [(s, {"v": 1, "only_first": 1}) for s in range(1, 8)]
    again = [(4, {"val-core/x/acc/mean@1": 0.5}), (5, {"v": 2})]
    run = load_run(write(tmp_path / "m.jsonl", first + again))
    assert run.steps == [1, 2, 3, 4, 5]
    assert run.data[3] == {"v": 1, "only_first": 1, "val-core/x/acc/mean@1": 0.5} and run.data[4] == {"v": 2}


def test_resume_in_a_new_file_continues_the_earlier_parts(tmp_path):
    write(tmp_path / "m.1.jsonl", [(s, {"v": 1}) for s in range(0, 5)])
    write(tmp_path / "m.2.jsonl", [(s, {"v": 2}) for s in range(3, 9)])
    run = load_run(write(tmp_path / "m.jsonl", [(s, {"v": 3}) for s in range(7, 12)]))
    assert run.steps == list(range(12)) and [d["v"] for d in run.data] == [1] * 3 + [2] * 4 + [3] * 5
    assert len(run.notes) == 2 and "continues" in run.notes[0]


def test_a_new_run_does_not_take_the_parts_of_an_old_one(tmp_path):
    write(tmp_path / "m.1.jsonl", [(s, {"v": 1}) for s in range(1, 30)])
    assert load_run(write(tmp_path / "m.jsonl", [(1, {"v": 2}), (2, {"v": 2})])).steps == [1, 2]


def test_summary_numbers():
    run = Run("x", *map(list, zip(*training(20, bonus=0.4), strict=True)))
    out = summary(run)
    rewards = run.series(SERIES["reward"])[1]
    assert out["steps"] == 20
    assert out["reward, first 10"] == pytest.approx(sum(rewards[:10]) / 10)
    assert out["reward, last 10"] == pytest.approx(sum(rewards[-10:]) / 10)
    assert (out["sums acc mean@1, first"], out["sums acc mean@1, last"]) == (0.5, pytest.approx(0.9))
    assert out["seconds per step"] == pytest.approx(4.0), "without the first step, which warms things up"
    assert out["  rollout, s"] == 2.0 and out["  rest, s"] == pytest.approx(0.35)
    parts = sum(value for name, value in out.items() if name.startswith("  "))
    assert parts == pytest.approx(out["seconds per step"])


def test_windows_of_short_runs_do_not_overlap():
    assert [report.window(range(n)) for n in (1, 2, 7, 19, 20, 500)] == [1, 1, 3, 9, 10, 10]


def test_table_of_one_run():
    text = table(Run("x", *map(list, zip(*training(20, bonus=0.4), strict=True))))
    rows = {line[:30].strip(): line.split() for line in text.splitlines()}
    assert rows["validation sums acc mean@1"][-5:] == ["0.500", "@0", "0.900", "@20", "+0.400"]
    assert float(rows["reward"][-1]) == pytest.approx(0.2, abs=0.03)
    assert "seconds per step 4.00: rollout 2.00 (50%)" in text


def test_table_survives_a_run_without_our_metrics():
    text = table(Run("x", [1, 2], [{"critic/score/mean": 0.5}, {"critic/score/mean": math.nan}]))
    assert "collapse rate, raw" in text and text.splitlines()[3].split()[-5:] == ["-"] * 5


def test_render_and_number():
    assert render(["a", "b"], [["xx", "1"], ["y", "22"]]).splitlines() == ["a    b", "--  --", "xx   1", "y   22"]
    assert [number(v) for v in (None, 3, 0.12345, 123.456, -0.5)] == ["-", "3", "0.123", "123.5", "-0.500"]
    assert number(0.5, signed=True) == "+0.500"


def drawn(figure):
    """Titles of a figure's panels that say `not recorded`."""
    return {
        axis.get_title(loc="left") for axis in figure.axes if any("not recorded" in t.get_text() for t in axis.texts)
    }


@pytest.fixture
def figures(monkeypatch):
    """The figures that `plot` makes, still open when it closes them."""
    import matplotlib.pyplot as plt

    kept = []
    monkeypatch.setattr(plt, "close", kept.append)
    yield kept
    monkeypatch.undo()
    plt.close("all")


def test_picture_of_one_run_stacks_the_causes(tmp_path, figures):
    run = Run("x", *map(list, zip(*training(30), strict=True)))
    out = plot([("x", [run])], tmp_path / "deep" / "curves.png", "title")
    assert out.stat().st_size > 20_000 and out.read_bytes()[:4] == b"\x89PNG"
    assert drawn(figures[0]) == set()
    labels = figures[0].axes[1].get_legend_handles_labels()[1]
    assert labels == ["all-wrong groups", "all-correct groups", "raw rate", "after injection"]
    raw = figures[0].axes[1].lines[0].get_ydata()
    assert list(raw) == run.series(SERIES["collapse rate, raw"])[1]


def test_picture_says_what_was_not_recorded(tmp_path, figures):
    plot([("x", [Run("x", [1, 2], [{"critic/score/mean": 0.5}, {"critic/score/mean": 0.6}])])], tmp_path / "c.png")
    assert len(drawn(figures[0])) == 5


def test_picture_of_seeds_shows_mean_and_band(tmp_path, figures):
    runs = [Run(str(b), *map(list, zip(*training(15, seed=1, bonus=b), strict=True))) for b in (0.0, 0.3, 0.6)]
    plot([("a", runs), ("b", runs[:2])], tmp_path / "c.png")
    reward = figures[0].axes[0]
    values = [[data["critic/score/mean"] for data in run.data[1:]] for run in runs]
    assert list(reward.lines[0].get_ydata()) == pytest.approx([sum(v) / 3 for v in zip(*values, strict=True)])
    band = reward.collections[0].get_paths()[0].vertices
    assert band[:, 1].max() == pytest.approx(max(map(max, values)))
    assert reward.get_legend_handles_labels()[1] == ["a", "b"]


def test_command_for_one_run_and_for_two(tmp_path, capsys):
    a = write(tmp_path / "a" / "metrics.jsonl", training(12, bonus=0.3))
    b = write(tmp_path / "b" / "metrics.jsonl", training(12, seed=5), tail="{")
    log = tmp_path / "train.log"
    log.write_text("x")
    assert main([str(a), "--title", "one", "--log", str(log), "--checkpoint", str(tmp_path / "none")]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("\none\n") and (tmp_path / "a" / "curves.png").exists()
    ends = [line.split() for line in shown.splitlines()[-4:]]
    assert [end[0] for end in ends] == ["curves", "metrics", "log", "checkpoint"]
    assert ends[3][-1] == "(missing)" and ends[2][1] == str(log)
    assert main([str(a), str(b), "--labels", "first", "second", "--out", str(tmp_path / "o")]) == 0
    shown = capsys.readouterr()
    assert "first" in shown.out and "second" in shown.out and (tmp_path / "o" / "curves.png").exists()
    assert "incomplete last line" in shown.err


def test_labels_must_match_files(tmp_path):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "a"), str(tmp_path / "b"), "--labels", "one"])


# ------------------------------------------------------------------------------------------------- scripts/compare.py


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """scripts/compare.py over a folder of made-up recipes whose run_cpu.sh copies metrics made beforehand."""
    spec = importlib.util.spec_from_file_location("compare", ROOT / "scripts" / "compare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for number_, name in enumerate(["base", "better"]):
        folder = tmp_path / "recipes" / name
        for seed in range(3):
            write(folder / f"{seed}.jsonl", training(12, seed=seed, bonus=0.3 * number_))
        (folder / "run_cpu.sh").write_text(
            f'echo "$SEED $STEPS $LEVEL $@" >> {folder}/calls; echo out > $RUN_DIR/train.log\n'
            f"cp {folder}/$SEED.jsonl $RUN_DIR/metrics.jsonl\n"
        )
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def test_compare_runs_pairs_reuses_them_and_writes_the_table(compare, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--recipes", "base,better", "--seeds", "0,2", "--steps", "12", "--level", "easy", "--out", str(out)]
    assert compare.main([*arguments, "--", "a.b=1"]) == 0
    assert (tmp_path / "recipes/base/calls").read_text() == "0 12 easy a.b=1\n2 12 easy a.b=1\n"
    result = json.loads((out / "table.json").read_text())
    cells = result["table"]["reward, last 6"]
    assert result["seeds"] == [0, 2] and cells["base"]["n"] == 2
    # The same draws with and without the bonus: each pair differs by the bonus's mean over the last six steps.
    expected = sum(0.3 * s / 12 for s in range(7, 13)) / 6
    assert cells["better"]["difference"] == pytest.approx(expected)
    assert cells["better"]["difference_min"] == pytest.approx(cells["better"]["difference_max"])
    assert cells["base"]["min"] < cells["base"]["mean"] < cells["base"]["max"]
    text = (out / "table.md").read_text()
    assert "better - base" in text and "--recipes base,better --seeds 0,2 --steps 12 --level easy -- a.b=1" in text
    assert (out / "curves.png").stat().st_size > 20_000

    assert compare.main([*arguments, "--", "a.b=1"]) == 0, "finished runs are used again"
    assert (tmp_path / "recipes/base/calls").read_text().count("\n") == 2
    (out / "base/seed0/metrics.jsonl").write_text('{"step": 1, "data": {"critic/score/mean": 0.5}}\n')
    assert compare.main([*arguments, "--", "a.b=1"]) == 0, "an unfinished one is made anew"
    assert (tmp_path / "recipes/base/calls").read_text().count("\n") == 3
    capsys.readouterr()
    with pytest.raises(SystemExit, match=r"other settings .overrides: \['a.b=1'\] there, \['a.b=2'\] wanted"):
        compare.main([*arguments, "--", "a.b=2"])


def test_compare_stops_at_a_failure_and_does_not_touch_foreign_folders(compare, tmp_path):
    (tmp_path / "recipes/base/run_cpu.sh").write_text("exit 5")
    arguments = ["--recipes", "base", "--seeds", "0", "--steps", "12", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="base, seed 0 failed with exit status 5"):
        compare.main(arguments)
    (tmp_path / "recipes/base/run_cpu.sh").write_text("exit 0")
    with pytest.raises(SystemExit, match="ended before step 12"):
        compare.main(arguments)
    foreign = write(tmp_path / "mine/base/seed0/metrics.jsonl", training(2))
    with pytest.raises(SystemExit, match="not a run of this script"):
        compare.main([*arguments[:-1], str(tmp_path / "mine")])
    assert foreign.exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--recipes", "nothere"], "there are base, better"),
        (["--recipes", "base,base"], "each value once"),
        (["--recipes", "base", "--seeds", "x"], "invalid"),
        (["--recipes", "base", "--steps", "0"], "at least 1"),
    ],
)
def test_compare_refuses_bad_arguments(compare, capsys, arguments, message):
    with pytest.raises(SystemExit) as raised:
        compare.main(arguments)
    assert raised.value.code == 2 and message in capsys.readouterr().err
