"""The collapse rate from rollout dumps: grouping, padding, sessions, and errors that name file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl_ext.__main__ import main as verl_ext_main
from verl_ext.acr_offline import RolloutError, collapse_by_step, main, overall, plot, rows_of, split_key

TOL = 1e-6


def group(uid: str, scores, step: int = 1, **more) -> list[dict]:
    """Rows as verl's V1 trainer dumps them."""
    return [
        {"input": f"q {uid}", "output": "o", "gts": "1", "score": s, "step": step, "uid": f"{uid}_{i}_0", **more}
        for i, s in enumerate(scores)
    ]


def dump(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def statistics(rows: list[dict], **options):
    return collapse_by_step(((f"x:{i}", row) for i, row in enumerate(rows)), TOL, **options)


def test_causes_are_counted():
    rows = group("a", [0, 0, 0, 0]) + group("b", [1, 1, 1, 1]) + group("c", [0, 1, 0, 0]) + group("d", [1, 0, 1, 1])
    steps, notes = statistics(rows)
    one = steps[1]
    assert (one["acr/rate"], one["acr/wrong"], one["acr/correct"], one["acr/tied_other"]) == (0.5, 0.25, 0.25, 0)
    assert (one["acr/groups"], one["acr/group_size_min"], one["rows"], one["reward_mean"]) == (4, 4, 16, 0.5)
    assert len(notes) == 1 and "score > 0.5" in notes[0]


def test_padding_rows_and_groups_of_one_stay_out():
    rows = group("a", [0, 1]) + group("b", [1, 1]) + group("pad0123", [0, 0, 0]) + group("alone", [1])
    steps, _ = statistics(rows)
    assert (steps[1]["acr/rate"], steps[1]["acr/groups"], steps[1]["acr/groups_of_one"]) == (0.5, 2, 1)
    assert steps[1]["rows"] == 5


def test_several_outputs_of_a_session_count_once_with_the_last():
    rows = [
        {"score": 0, "step": 1, "uid": "a_0_0"}, {"score": 1, "step": 1, "uid": "a_0_2"},
        {"score": 0, "step": 1, "uid": "a_0_1"}, {"score": 1, "step": 1, "uid": "a_1_0"},
        {"score": 0, "step": 1, "uid": "b_0_0"}, {"score": 1, "step": 1, "uid": "b_1_0"},
    ]  # fmt: skip
    steps, _ = statistics(rows)
    assert (steps[1]["acr/correct"], steps[1]["acr/groups"], steps[1]["rows"]) == (0.5, 2, 4)


def test_the_same_uid_in_two_steps_is_two_groups():
    steps, _ = statistics(group("a", [0, 0], step=2) + group("a", [0, 1], step=1))
    assert list(steps) == [1, 2] and (steps[1]["acr/rate"], steps[2]["acr/rate"]) == (0, 1)


@pytest.mark.parametrize(
    "key, parts",
    [
        ("182b124f-be5a_3_0", ("182b124f-be5a", "3", 0)),
        ("a_b_3_12", ("a_b", "3", 12)),
        ("plain", ("plain", "", 0)),
        ("a_x_1", ("a_x_1", "", 0)),
    ],
)
def test_split_key(key, parts):
    assert split_key(key) == parts


def test_uids_of_another_form_have_every_row_counted():
    steps, _ = statistics([{"score": s, "step": 1, "uid": "prompt"} for s in (1, 1, 1)] + group("b", [0, 1]))
    assert (steps[1]["acr/rate"], steps[1]["rows"]) == (0.5, 5)


def test_without_uid_rows_are_grouped_by_input_and_it_says_so():
    rows = [{k: v for k, v in row.items() if k != "uid"} for row in group("a", [0, 0]) + group("b", [0, 1])]
    steps, notes = statistics(rows)
    assert steps[1]["acr/rate"] == 0.5 and any("grouped by `input`" in note for note in notes)


def test_acc_decides_when_it_is_there():
    rows = group("a", [0.3, 0.3], acc=True) + group("b", [0.3, 0.3], acc=0) + group("c", [0.1, 0.9], acc=1.0)
    steps, notes = statistics(rows)
    assert notes == [] and steps[1]["acr/correct"] == pytest.approx(1 / 3) == steps[1]["acr/wrong"]


def test_float_noise_is_a_tie_and_a_small_spread_is_not():
    noisy = [1 / 3, 1 / 3 + 1e-9, 0.1 + 0.2 + 1 / 30]
    steps, _ = statistics(group("a", noisy) + group("b", [0.5, 0.50001]) + group("c", [0, 1]))
    assert steps[1]["acr/rate"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("scores, low, high", [((-1, 1), "wrong", "correct"), ((0, 10), "wrong", "correct")])
def test_middle_of_the_range_divides(scores, low, high):
    steps, _ = statistics(group("a", [scores[0]] * 2) + group("b", [scores[1]] * 2))
    assert steps[1][f"acr/{low}"] == 0.5 == steps[1][f"acr/{high}"]


def test_one_value_only_is_neither_wrong_nor_correct_until_a_threshold_says_so():
    steps, notes = statistics(group("a", [0, 0]))
    assert steps[1]["acr/tied_other"] == 1 and any("give --threshold" in note for note in notes)
    assert statistics(group("a", [0, 0]), threshold=0.5)[0][1]["acr/wrong"] == 1
    assert statistics(group("a", [1, 1]), threshold=0.5)[0][1]["acr/correct"] == 1


def test_overall_adds_counts_and_means_rates():
    steps, _ = statistics(group("a", [0, 0]) + group("b", [0, 1, 1], step=2) + group("c", [1, 1], step=2))
    total = overall(steps)
    assert (total["acr/rate"], total["acr/groups"], total["rows"], total["acr/group_size_min"]) == (0.75, 3, 7, 2)


def test_folder_is_read_in_the_order_of_steps(tmp_path):
    for step in (2, 10, 1):
        dump(tmp_path / f"{step}.jsonl", [{k: v for k, v in row.items() if k != "step"} for row in group("a", [0, 1])])
    assert list(dict.fromkeys(row["step"] for _, row in rows_of(tmp_path))) == [1, 2, 10]


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", r"1.jsonl:3: not JSON"),
        ("[1]", r"1.jsonl:3: expected an object"),
        ('{"uid": "a_0_0", "step": 1}', r"1.jsonl:3: `score` must be a finite number, got None"),
        ('{"uid": "a_0_0", "step": 1, "score": NaN}', r"1.jsonl:3: `score` must be a finite number, got nan"),
        ('{"uid": "a_0_0", "step": 1, "score": "1"}', r"1.jsonl:3: `score` must be a finite number, got '1'"),
        ('{"uid": "a_0_0", "step": 1, "score": 1, "acc": "yes"}', r"1.jsonl:3: `acc` must be a finite number"),
        ('{"step": 1, "score": 1}', r"1.jsonl:3: neither `uid` nor `input`"),
    ],
)
def test_bad_lines_are_named(tmp_path, capsys, line, message):
    path = dump(tmp_path / "1.jsonl", group("a", [0, 1]))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(RolloutError, match=message):
        collapse_by_step(rows_of(path), TOL)
    assert main([str(path)]) == 1 and "1.jsonl:3" in capsys.readouterr().err


def test_nothing_to_read(tmp_path):
    with pytest.raises(RolloutError, match="no such file or folder"):
        list(rows_of(tmp_path / "none"))
    with pytest.raises(RolloutError, match=r"no \*.jsonl in this folder"):
        list(rows_of(tmp_path))
    with pytest.raises(RolloutError, match="no rows to count"):
        collapse_by_step(rows_of(dump(tmp_path / "1.jsonl", group("pad1", [0, 0]))), TOL)
    with pytest.raises(RolloutError, match=r"named <step>.jsonl"):
        list(rows_of(dump(tmp_path / "all.jsonl", [{"score": 1, "uid": "a"}])))


def test_command_prints_tables_json_and_a_picture(tmp_path, capsys):
    for step in (1, 2, 3):
        dump(tmp_path / "dump" / f"{step}.jsonl", group("a", [0, step % 2, 0], step) + group("b", [1, 1, 1], step))
    assert verl_ext_main(["acr", str(tmp_path / "dump"), "--out", str(tmp_path / "acr.png")]) == 0
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines() if line[:1].isdigit() or line.startswith("all")]
    assert [row[:4] for row in rows] == [
        ["1", "0.500", "0.000", "0.500"], ["2", "1.000", "0.500", "0.500"], ["3", "0.500", "0.000", "0.500"],
        ["all", "0.667", "0.167", "0.500"],
    ]  # fmt: skip
    assert (tmp_path / "acr.png").read_bytes()[:4] == b"\x89PNG"
    assert verl_ext_main(["acr", str(tmp_path / "dump"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)[str(tmp_path / "dump")]
    assert found["steps"]["2"]["acr/rate"] == 1.0 and found["overall"]["acr/groups"] == 6


def test_picture_of_a_single_step_and_of_two_runs(tmp_path):
    steps, _ = statistics(group("a", [0, 0]) + group("b", [0, 1]))
    assert plot({"one": steps, "two": steps}, tmp_path / "new" / "p.png").stat().st_size > 10_000


def test_commands_are_listed(capsys):
    assert verl_ext_main(["--help"]) == 0 and verl_ext_main([]) == 2
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("doctor", "acr", "report", "console"))
    assert verl_ext_main(["nonsense"]) == 2 and "unknown command 'nonsense'" in capsys.readouterr().err
