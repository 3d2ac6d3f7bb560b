from __future__ import annotations

import hashlib
import json
import random
import re
import subprocess
import sys
from collections import Counter
from itertools import accumulate

import pytest

from verl_ext import tasks

SUMS = ("easy", "medium", "hard", "mixed")


def operands(row: dict) -> tuple[int, int]:
    a, b = row["prompt"][0]["content"].removesuffix("=").split("+")
    return int(a), int(b)


# ---- generator


def test_rows_depend_on_the_seed_only():
    assert tasks.make_rows("mixed", "train", 60, seed=3) == tasks.make_rows("mixed", "train", 60, seed=3)
    assert tasks.make_rows("mixed", "train", 60, seed=3) != tasks.make_rows("mixed", "train", 60, seed=4)


def test_rows_are_the_same_in_another_process():
    code = "from verl_ext import tasks; print([r['prompt'][0]['content'] for r in tasks.make_rows('hard', 'val', 5)])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == str([r["prompt"][0]["content"] for r in tasks.make_rows("hard", "val", 5)])


@pytest.mark.parametrize(
    ("level", "start"),
    [
        ("easy", "e968badda1d52dc3"),
        ("medium", "329e931da941ddc2"),
        ("hard", "86112a8b363fa6ba"),
        ("mixed", "a25d6a134275399c"),
        ("words", "750f57c114532a96"),
    ],
)
def test_rows_are_those_that_measurements_were_made_on(level, start):
    rows = [tasks.make_rows(level, split, 40, seed=1) for split in tasks.SPLITS]
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest().startswith(start)


@pytest.mark.parametrize("level", tasks.LEVELS)
def test_splits_share_no_problem_and_no_mirror_image(level):
    def keys(split: str) -> set:
        if level == "words":
            return {p.question for p in tasks.problems(level, split)}
        if level == "steps":
            numbers = (tasks.steps_numbers(p.question) for p in tasks.problems(level, split))
            return {(start, *sorted(addends)) for start, addends in numbers}
        pairs = (p.question[:-1].split("+") for p in tasks.problems(level, split))
        return {tuple(sorted(pair)) for pair in pairs}

    sft, train, val = (keys(split) for split in tasks.SPLITS)
    assert not sft & train and not sft & val and not train & val
    assert len(sft) > len(train) > len(val) > 20


def test_all_sums_of_two_digit_numbers_are_in_some_split():
    pairs = [pair for split in tasks.SPLITS for pair in tasks.sums(split)]
    assert sorted(pairs) == [(a, b) for a in range(10, 100) for b in range(10, 100)]


def test_words_keep_both_orders_of_a_commutative_operation_in_one_split():
    where = {p.question: split for split in tasks.SPLITS for p in tasks.problems("words", split)}
    for word in ("plus", "times"):
        for a in range(10):
            for b in range(10):
                ask = "What is {} {} {}? Answer with the number only.".format
                assert where[ask(a, word, b)] == where[ask(b, word, a)]


@pytest.mark.parametrize("level", SUMS)
def test_answers_and_levels_are_right(level):
    rows = tasks.make_rows(level, "train", 300)
    assert len({r["prompt"][0]["content"] for r in rows}) == 300
    for row in rows:
        a, b = operands(row)
        assert 10 <= a <= 99 and 10 <= b <= 99
        assert row["reward_model"] == {"style": "rule", "ground_truth": str(a + b)}
        kind = row["extra_info"]["kind"]
        assert tasks.carries(a, b) == {"easy": 0, "medium": 1, "hard": 2}[kind]
        assert kind == level or level == "mixed"


def test_mixed_is_a_third_of_each():
    kinds = [r["extra_info"]["kind"] for r in tasks.make_rows("mixed", "val", 100)]
    assert [kinds.count(k) for k in ("easy", "medium", "hard")] == [34, 33, 33]


def test_word_answers_are_right():
    ops = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}
    for row in tasks.make_rows("words", "train", 200):
        words = row["prompt"][0]["content"].replace("?", "").replace(".", "").split()
        i = next(i for i, w in enumerate(words) if w in ops)
        expected = ops[words[i]](int(words[i - 1]), int(words[i + 1]))
        assert row["reward_model"]["ground_truth"] == str(expected) and expected >= 0


def test_steps_problems_are_all_sums_below_a_hundred_once():
    problems = [p for split in tasks.SPLITS for p in tasks.problems("steps", split)]
    found = [(start, *sorted(addends)) for start, addends in (tasks.steps_numbers(p.question) for p in problems)]
    expected = [
        (start, a, b, c, d)
        for start in range(10, 100)
        for a in range(1, 10)
        for b in range(a, 10)
        for c in range(b, 10)
        for d in range(c, 10)
        if start + a + b + c + d < 100
    ]
    assert sorted(found) == sorted(expected)
    assert {len(p.question) for p in problems} == {len("37+8+5+9+4=")}
    # The order of the one-digit numbers is the hash's, not the ascending one.
    ascending = [addends == sorted(addends) for _, addends in (tasks.steps_numbers(p.question) for p in problems)]
    assert sum(ascending) < 0.2 * len(ascending)


def test_steps_answers_and_kinds_are_right():
    rows = tasks.make_rows("steps", "train", 300)
    assert len({r["prompt"][0]["content"] for r in rows}) == 300
    for row in rows:
        assert row["data_source"] == "arithmetic_steps" and row["ability"] == "math"
        sums = list(accumulate(map(int, row["prompt"][0]["content"][:-1].split("+"))))
        assert row["reward_model"] == {"style": "rule", "ground_truth": str(sums[-1])}
        count = sums[-1] // 10 - sums[0] // 10
        assert row["extra_info"]["kind"] == ("1 carry" if count == 1 else f"{count} carries")


# ---- careless answers


def test_slips_by_hand():
    keep = tasks.keep_probability
    answers = tasks.slips(57, 68)
    # Units 7 + 8 = 15; tens 5 + 6 = 11, with the carry 12.
    assert answers["125"] == pytest.approx(keep(15) * keep(12))
    assert answers["115"] == pytest.approx((1 - keep(15)) * keep(11))
    assert answers["25"] == pytest.approx(keep(15) * (1 - keep(12)))
    assert answers["15"] == pytest.approx((1 - keep(15)) * (1 - keep(11)))
    assert tasks.slips(23, 45) == {"68": 1.0}
    # The tens reach ten by the units' carry alone: forgotten, there is nothing left to forget.
    assert tasks.slips(57, 48) == pytest.approx(
        {"105": keep(15) * keep(10), "5": keep(15) * (1 - keep(10)), "95": 1 - keep(15)}
    )


def test_slips_are_distributions_with_the_truth_in_them():
    for a in range(10, 100):
        for b in range(10, 100):
            answers = tasks.slips(a, b)
            assert sum(answers.values()) == pytest.approx(1)
            assert len(answers) <= 4 and answers[str(a + b)] > 0


def test_levels_order_the_expected_collapse():
    """With careless answers, p^G + (1-p)^G: easy all correct; hard mostly all wrong, more so than medium."""

    def expected(level: str) -> tuple[float, float, float]:
        ps = [
            tasks.slips(*operands(r))[r["reward_model"]["ground_truth"]] for r in tasks.make_rows(level, "train", 400)
        ]
        return sum(ps) / 400, sum((1 - p) ** 8 for p in ps) / 400, sum(p**8 for p in ps) / 400

    assert expected("easy") == (1, 0, 1)
    (medium, medium_wrong, _), (hard, hard_wrong, hard_correct) = expected("medium"), expected("hard")
    assert 0.25 < medium < 0.45 and medium_wrong < 0.15
    assert 0.05 < hard < 0.15 and 0.4 < hard_wrong < 0.6 and hard_correct < 0.001


def test_supervised_rows_hold_careless_answers():
    rows = tasks.make_rows("hard", "sft", 1000)
    wrong = 0
    for row in rows:
        user, assistant = row["messages"]
        assert [user] == row["prompt"] and assistant["role"] == "assistant"
        assert assistant["content"] in tasks.slips(*operands(row))
        wrong += assistant["content"] != row["reward_model"]["ground_truth"]
    assert 0.8 < wrong / len(rows) < 0.95


def test_careless_steps_by_hand():
    rng = random.Random(0)
    n = 20_000
    counts = Counter(tasks.careless_steps("37+8+1+6=", rng) for _ in range(n))
    # 7 + 8 = 15 carries; 5 + 1 does not; 6 + 6 = 12 carries.
    first, last = tasks.step_keep(15), tasks.step_keep(12)
    expected = {
        "45;46;52#52": first * last,
        "45;46;42#42": first * (1 - last),
        "35;36;42#42": (1 - first) * last,
        "35;36;32#32": (1 - first) * (1 - last),
    }
    assert {text: count / n for text, count in counts.items()} == pytest.approx(expected, abs=0.015)
    assert tasks.careless_steps_right("37+8+1+6=") == pytest.approx(first * last)
    assert tasks.careless_steps("20+1+2+3+3=", rng) == "21;23;26;29#29"
    assert tasks.careless_steps_right("20+1+2+3+3=") == 1


def test_careless_steps_end_right_as_often_as_stated():
    rng = random.Random(0)
    right = stated = 0.0
    for problem in tasks.problems("steps", "train"):
        response = tasks.careless_steps(problem.question, rng)
        assert re.fullmatch(r"\d\d;\d\d;\d\d;\d\d#\d\d", response)
        right += response.endswith(f"#{problem.answer}")
        stated += tasks.careless_steps_right(problem.question)
    assert right == pytest.approx(stated, rel=0.03)


def test_careless_steps_make_mixed_groups():
    ps = [tasks.careless_steps_right(r["prompt"][0]["content"]) for r in tasks.make_rows("steps", "train", 480)]
    right, wrong = sum(p**8 for p in ps) / 480, sum((1 - p) ** 8 for p in ps) / 480
    assert 0.25 < sum(ps) / 480 < 0.5
    assert right > 0.02 and wrong > 0.02 and right + wrong < 0.4


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("", 63),
        ("3", 53),
        ("4", 63),
        ("45", 63),
        ("45;", 63),
        ("35;", 53),
        ("45;4", 53),
        ("45;40", 53),
        ("45;40;4", 53),
        ("45;40;39;", 43),
        ("45;50;59;63", 63),
        ("45;50;59;63#", 63),
        ("45;50;59;63#6", 63),
        ("35;40;49;43#43", 43),
    ],
)
def test_answer_that_follows_from_a_prefix(written, answer):
    assert tasks.answer_after("37+8+5+9+4=", written) == answer


def test_answer_of_the_whole_response_is_the_one_it_states():
    for row in tasks.make_rows("steps", "sft", 200):
        ask, said = (message["content"] for message in row["messages"])
        assert tasks.answer_after(ask, said) == int(said.split("#")[1])
        assert tasks.answer_after(ask, "") == int(row["reward_model"]["ground_truth"])


def test_supervised_rows_in_steps_hold_careless_responses():
    rows = tasks.make_rows("steps", "sft", 1000)
    right = 0
    for row in rows:
        user, assistant = row["messages"]
        assert [user] == row["prompt"] and assistant["role"] == "assistant"
        right += assistant["content"].endswith("#" + row["reward_model"]["ground_truth"])
    assert 0.25 < right / len(rows) < 0.55


# ---- files


@pytest.mark.parametrize("level", ["mixed", "words", "steps"])
def test_parquet_has_verls_schema(tmp_path, level):
    import datasets

    rows = tasks.make_rows(level, "train", 30)
    path = tasks.write_parquet(tmp_path / "new" / "train.parquet", rows)
    loaded = datasets.load_dataset("parquet", data_files=str(path), cache_dir=str(tmp_path / "cache"))["train"]
    assert loaded.to_list() == rows
    assert set(loaded.column_names) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert loaded[7]["prompt"] == rows[7]["prompt"] and loaded[7]["extra_info"]["index"] == 7
    assert loaded[0]["extra_info"]["split"] == "train" and loaded[0]["extra_info"]["level"] == level
    assert sorted(p.name for p in path.parent.iterdir()) == ["train.parquet"]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tasks.write_parquet(tmp_path / "a.parquet", [{"x": 1}])
    before = path.read_bytes()
    with pytest.raises(Exception, match=r"convert|type"):
        tasks.write_parquet(path, [{"x": 1}, {"x": object()}])
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["a.parquet"]
    with pytest.raises(ValueError, match="no rows"):
        tasks.write_parquet(path, [])


# ---- reward


@pytest.mark.parametrize(
    ("response", "truth", "score", "parsed"),
    [
        ("125", "125", 1, 1),
        ("115", "125", 0, 1),
        (" 125\n", "125", 1, 1),
        ("125<|im_end|>", "125", 1, 1),
        ("125<|im_end|>\n<|im_start|>7", "125", 1, 1),
        ("125<|endoftext|>99", "125", 1, 1),
        ("12<|im_end|>5", "125", 0, 1),
        ("<|im_end|>125", "125", 0, 0),
        ("", "125", 0, 0),
        ("   ", "125", 0, 0),
        ("The answer is 125", "125", 0, 0),
        ("125.", "125", 0, 0),
        ("57+68=125", "125", 0, 0),
        ("0125", "125", 0, 1),
        ("+125", "125", 0, 0),
        ("1 25", "125", 0, 0),
        ("-7", "-7", 1, 1),
        ("7", "-7", 0, 1),
        ("١٢٥", "125", 0, 0),
        ("9" * 5000, "9" * 5000, 1, 1),
        ("9" * 5000, "125", 0, 1),
    ],
)
def test_sums_want_the_number_and_nothing_else(response, truth, score, parsed):
    result = tasks.arithmetic_score("arithmetic", response, truth, {"index": 0})
    assert result == {"score": score, "acc": score, "parsed": parsed}
    assert all(type(value) is float for value in result.values())


@pytest.mark.parametrize(
    ("response", "truth", "score", "parsed"),
    [
        ("7", "7", 1, 1),
        ("3 plus 4 is 7.", "7", 1, 1),
        ("3 + 4 = 7", "7", 1, 1),
        ("The answer is **7**!", "7", 1, 1),
        ("7 is the sum of 3 and 4", "7", 0, 1),
        ("7<|im_end|>8", "7", 1, 1),
        ("7.0", "7", 1, 1),
        ("7.5", "7", 0, 1),
        ("007", "7", 1, 1),
        ("1,000", "1000", 1, 1),
        ("3, 4", "4", 1, 1),
        ("-7", "-7", 1, 1),
        ("−7", "-7", 1, 1),
        ("3 - 10 = -7", "-7", 1, 1),
        ("10-7", "7", 1, 1),
        ("-0", "0", 1, 1),
        ("seven", "7", 0, 0),
        ("", "7", 0, 0),
        ("1" + "0" * 6000, "1" + "0" * 6000, 1, 1),
    ],
)
def test_words_take_the_last_number(response, truth, score, parsed):
    result = tasks.arithmetic_score("arithmetic_words", response, truth)
    assert result == {"score": score, "acc": score, "parsed": parsed}


@pytest.mark.parametrize(
    ("response", "truth", "score", "parsed"),
    [
        ("45;50;59;63#63", "63", 1, 1),
        ("45;50;59;63#53", "63", 0, 1),
        ("45;40;49;53#63", "63", 1, 1),
        ("#63", "63", 1, 1),
        ("45;50 # 63\n", "63", 1, 1),
        ("45;50;59;63#63<|im_end|>#9", "63", 1, 1),
        ("45#53#63", "63", 1, 1),
        ("45#63#53", "63", 0, 1),
        ("45;50;59;63", "63", 0, 0),
        ("63", "63", 0, 0),
        ("45;50;59;63#", "63", 0, 0),
        ("63#;63", "63", 0, 0),
        ("#63;", "63", 0, 0),
        ("#063", "63", 0, 1),
        ("", "63", 0, 0),
    ],
)
def test_steps_take_what_follows_the_last_cue(response, truth, score, parsed):
    result = tasks.arithmetic_score("arithmetic_steps", response, truth, {"index": 0})
    assert result == {"score": score, "acc": score, "parsed": parsed}
    assert all(type(value) is float for value in result.values())


def test_reward_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match=r"data_source is 'openai/gsm8k'"):
        tasks.arithmetic_score("openai/gsm8k", "1", "1")
    for bad in ("", "1.5", "x", 7, None):
        with pytest.raises(ValueError, match=r"reward_model\.ground_truth"):
            tasks.arithmetic_score("arithmetic", "1", bad)


def test_every_row_is_solved_by_its_own_reference():
    for level in tasks.LEVELS:
        for row in tasks.make_rows(level, "val", 60):
            truth = row["reward_model"]["ground_truth"]
            said = f"#{truth}" if level == "steps" else truth
            assert tasks.arithmetic_score(row["data_source"], said, truth, row["extra_info"])["score"] == 1


def test_verl_finds_the_reward_by_its_package_path():
    from omegaconf import OmegaConf
    from verl.trainer.ppo.reward import get_custom_reward_fn

    config = OmegaConf.create(
        {"reward": {"custom_reward_function": {"path": "pkg://verl_ext.tasks", "name": "arithmetic_score"}}}
    )
    reward = get_custom_reward_fn(config)
    assert reward(data_source="arithmetic", solution_str="12", ground_truth="12", extra_info={})["acc"] == 1


def test_import_is_light():
    code = "import sys, verl_ext.tasks; print(sorted({'torch', 'verl', 'pyarrow', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


# ---- errors and command line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("brutal", "train", 5), "level is 'brutal'; it must be one of easy, medium, hard, mixed, words, steps"),
        (("easy", "test", 5), "split is 'test'; it must be one of sft, train, val"),
        (("easy", "train", 0), "train: number of rows is 0"),
        (("hard", "val", 10_000), "ask for 376 rows at most"),
        (("words", "val", 10_000), "ask for 84 rows at most"),
        (("steps", "val", 10_000), "ask for 5067 rows at most"),
    ],
)
def test_bad_arguments(args, message):
    with pytest.raises(ValueError, match=message):
        tasks.make_rows(*args)


def test_the_stated_maximum_works():
    with pytest.raises(ValueError, match="ask for") as error:
        tasks.make_rows("mixed", "val", 100_000)
    most = int(str(error.value).split("ask for ")[1].split()[0])
    assert len(tasks.make_rows("mixed", "val", most)) == most
    with pytest.raises(ValueError, match="ask for"):
        tasks.make_rows("mixed", "val", most + 3)


def test_command_line(tmp_path, capsys):
    import pyarrow.parquet as pq

    out = tmp_path / "data"
    assert tasks.main(["--level", "hard", "--out", str(out), "--train", "40", "--val", "8", "--sft", "5"]) == 0
    printed = capsys.readouterr().out
    assert "40 rows" in printed and "8 rows" in printed and "for example" in printed
    assert pq.read_table(out / "train.parquet").to_pylist() == tasks.make_rows("hard", "train", 40)
    assert pq.read_table(out / "val.parquet").num_rows == 8
    assert pq.read_table(out / "sft.parquet").to_pylist() == tasks.make_rows("hard", "sft", 5)


@pytest.mark.parametrize("level", tasks.LEVELS)
def test_command_line_defaults_fit_every_level(tmp_path, level):
    assert tasks.main(["--level", level, "--out", str(tmp_path)]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train.parquet", "val.parquet"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--level", "brutal"], "invalid choice: 'brutal'"),
        (["--train", "many"], "invalid int value: 'many'"),
        (["--train", "0"], "error: train: number of rows is 0"),
        (["--val", "-3"], "error: val: number of rows is -3"),
        (["--sft", "0"], "error: sft: number of rows is 0"),
        (["--val", "99999"], "rows at most"),
    ],
)
def test_command_line_errors_write_nothing(tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit) as exit_:
        tasks.main(["--out", str(tmp_path / "data"), *flags])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_command_line_says_that_the_folder_is_a_file(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as exit_:
        tasks.main(["--out", str(tmp_path / "file")])
    assert exit_.value.code == 2 and "file" in capsys.readouterr().err
