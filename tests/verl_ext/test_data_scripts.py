"""scripts/data: verl's schema out of hub-like folders, and errors that name the fix."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from verl_ext.rewards import compute_score

SCRIPTS = Path(__file__).parents[2] / "scripts" / "data"
DATA = Path(os.environ.get("VERL_RECIPES_DATA", Path(__file__).parents[3] / "shared" / "data"))

GSM8K = [
    {"question": f"What is {n} plus {n}?", "answer": f"{n} + {n} = <<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n:,}"}
    for n in (3, 700, 41)
]
MATH = [
    {
        "problem": "Halve $1$.",
        "solution": r"First \boxed{2}, no: $\boxed{\frac{1}{2}}$.",
        "level": "Level 2",
        "type": "A",
    },
    {
        "problem": "Find $x$.",
        "solution": r"$x=\boxed{\begin{pmatrix}1\\2\end{pmatrix}}$",
        "level": "Level 5",
        "type": "B",
    },
    {"problem": "Shared   problem.", "solution": r"\boxed{3}", "level": "Level 5", "type": "B"},
    {"problem": "Nothing.", "solution": r"It is \boxed{}.", "level": "Level ?", "type": "B"},
]
MATH_TEST = [
    {"problem": "Shared\nproblem.", "solution": r"\boxed{3}", "level": "Level 4", "type": "B"},
    {"problem": "Add.", "solution": r"\boxed{7}", "level": "Level 1", "type": "C"},
]


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Run a script in this process: ``run(name, *options) -> (exit status, frames by split, printed text)``."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(SCRIPTS)

    def call(name: str, *options: str):
        module = importlib.import_module(name)
        rows = importlib.import_module("rows")
        out = tmp_path / "out"
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--local_save_dir", str(out), *map(str, options)])
        parser = module.command_line()
        status = rows.run(module.build, parser)
        printed = capsys.readouterr()
        frames = {path.stem: pd.read_parquet(path) for path in sorted(out.glob("*.parquet"))}
        assert not [path for path in out.glob(".*")], "a temporary file is left"
        return status, frames, printed.out + printed.err

    yield call
    for name in ("rows", "gsm8k", "math_dataset"):
        sys.modules.pop(name, None)


def write(folder: Path, train: list[dict], test: list[dict], kind: str = "jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in (("train", train), ("test", test)):
        frame = pd.DataFrame(rows)
        if kind == "jsonl":
            frame.to_json(folder / f"{split}.jsonl", orient="records", lines=True)
        else:
            frame.to_parquet(folder / f"{split}.parquet" if kind == "parquet" else folder / kind.format(split=split))
    return folder


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "{split}-00000-of-00001.parquet"])
def test_gsm8k_schema(run, tmp_path, kind):
    source = write(tmp_path / "in", GSM8K, GSM8K[:2], kind)
    status, frames, text = run("gsm8k", "--local_dataset_path", source)
    assert status == 0
    assert {split: len(frame) for split, frame in frames.items()} == {"train": 3, "test": 2}
    first = frames["train"].iloc[1].to_dict()
    assert set(first) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert first["data_source"] == "openai/gsm8k"
    assert first["prompt"].tolist() == [
        {
            "role": "user",
            "content": 'What is 700 plus 700? Let\'s think step by step and output the final answer after "####".',
        }
    ]
    assert first["reward_model"] == {"style": "rule", "ground_truth": "1400"}
    assert first["extra_info"] == {"split": "train", "index": 1, **GSM8K[1]}
    assert "3 rows" in text
    assert "2 rows" in text
    assert "example answer: 6" in text


def test_gsm8k_rows_are_scored_as_the_reward_expects(run, tmp_path):
    source = write(tmp_path / "in", GSM8K, GSM8K)
    _, frames, _ = run("gsm8k", "--local_dataset_path", source)
    for item in frames["train"].to_dict("records"):
        arguments = item["data_source"], item["extra_info"]["answer"], item["reward_model"]["ground_truth"]
        assert compute_score(*arguments)["score"] == 1.0


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("boxed", "What is 3 plus 3? Let's think step by step and output the final answer within \\boxed{}."),
        ("{question} Answer in \\boxed{}.", "What is 3 plus 3? Answer in \\boxed{}."),
    ],
)
def test_template_and_max_rows(run, tmp_path, template, content):
    source = write(tmp_path / "in", GSM8K, GSM8K)
    _, frames, _ = run("gsm8k", "--local_dataset_path", source, "--template", template, "--max_rows", 1)
    assert [len(frame) for frame in frames.values()] == [1, 1]
    assert frames["train"].prompt[0][0]["content"] == content


def test_gsm8k_drops_rows_without_an_answer_and_says_so(run, tmp_path):
    broken = [
        {"question": "?", "answer": "no idea"},
        {"question": "?", "answer": "#### none"},
        {"question": None, "answer": "#### 1"},
    ]
    source = write(tmp_path / "in", [*broken, *GSM8K], GSM8K)
    status, frames, text = run("gsm8k", "--local_dataset_path", source)
    assert status == 0
    assert [info["index"] for info in frames["train"].extra_info] == [3, 4, 5]
    assert "train: dropped 3 rows without a question or a final '#### <number>'" in text


def test_math_schema_answers_and_overlap(run, tmp_path):
    source = write(tmp_path / "in", MATH, MATH_TEST, "parquet")
    status, frames, text = run("math_dataset", "--local_dataset_path", source)
    assert status == 0
    train = frames["train"].to_dict("records")
    assert [item["reward_model"]["ground_truth"] for item in train] == [
        r"\frac{1}{2}",
        r"\begin{pmatrix}1\\2\end{pmatrix}",
    ]
    assert train[0]["data_source"] == "DigitalLearningGmbH/MATH-lighteval"
    assert train[0]["prompt"][0]["content"].endswith("within \\boxed{}.")
    assert train[0]["extra_info"] == {
        "split": "train",
        "index": 0,
        "question": MATH[0]["problem"],
        "answer": MATH[0]["solution"],
        "level": 2,
        "type": "A",
    }
    assert len(frames["test"]) == 2  # the shared problem is dropped from train only
    assert "train: dropped 1 rows that also stand in test" in text
    assert "train: dropped 1 rows without a problem or a \\boxed{} answer" in text


@pytest.mark.parametrize("levels", [["Level 2", "Level 5"], [2, 5], [2.0, 5.0]])
def test_math_levels(run, tmp_path, levels):
    train = [{**item, "level": level} for item, level in zip(MATH, levels, strict=False)]
    test = [{**item, "level": level} for item, level in zip(MATH_TEST, levels, strict=False)]
    source = write(tmp_path / "in", train, test, "parquet")
    _, frames, text = run("math_dataset", "--local_dataset_path", source, "--levels", "4,5")
    assert [info["level"] for info in frames["train"].extra_info] == [5]
    assert "train: dropped 1 rows of other levels" in text


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gsm8k", ["--local_dataset_path", "absent"], "--local_dataset_path absent: no such folder"),
        ("gsm8k", ["--local_dataset_path", SCRIPTS], "holds no train.parquet, train.jsonl or train.json; it holds"),
        ("gsm8k", ["--max_rows", "0"], "--max_rows 0: must be at least 1"),
        ("gsm8k", ["--template", "boxy"], "--template 'boxy': neither one of ['boxed', 'hashes'] nor a text with"),
        ("math_dataset", ["--levels", "3,6"], "--levels '3,6': must be some of 1,2,3,4,5"),
    ],
)
def test_bad_options_are_named(run, name, options, message):
    status, frames, text = run(name, *options)
    assert status == 1
    assert frames == {}
    assert message in text


def test_missing_columns_are_named(run, tmp_path):
    source = write(tmp_path / "in", MATH, MATH_TEST)
    status, frames, text = run("gsm8k", "--local_dataset_path", source)
    assert status == 1
    assert frames == {}
    assert "columns ['question', 'answer'] are missing" in text
    assert "found ['problem', 'solution', 'level', 'type'], wanted ['question', 'answer']" in text


def test_no_usable_row_leaves_an_earlier_result_alone(run, tmp_path):
    source = write(tmp_path / "in", GSM8K, GSM8K)
    run("gsm8k", "--local_dataset_path", source)
    write(source, GSM8K[:1], [{"question": "?", "answer": "none"}])
    status, frames, text = run("gsm8k", "--local_dataset_path", source)
    assert status == 1
    assert "test: no row is left" in text
    assert [len(frame) for frame in frames.values()] == [3, 3]


def test_a_damaged_file_is_named(run, tmp_path):
    source = write(tmp_path / "in", GSM8K, GSM8K)
    (source / "test.jsonl").write_text('{"question": "cut o')
    status, frames, text = run("gsm8k", "--local_dataset_path", source)
    assert status == 1
    assert frames == {}
    assert "cannot load test" in text
    assert "test.jsonl" in text


def test_without_a_hub_the_fix_is_named(tmp_path):
    command = [sys.executable, SCRIPTS / "gsm8k.py", "--local_save_dir", tmp_path / "out"]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, env=offline, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "gsm8k.py: cannot load train from openai/gsm8k" in done.stderr
    assert "--local_dataset_path DIR" in done.stderr
    assert "Traceback" not in done.stderr


def real(name: str) -> Path:
    if not (DATA / name).is_dir():
        pytest.skip(f"{DATA / name} is not there (set VERL_RECIPES_DATA to a folder with {name}/)")
    return DATA / name


def test_real_gsm8k(run):
    status, frames, _ = run("gsm8k", "--local_dataset_path", real("gsm8k"))
    assert status == 0
    assert {split: len(frame) for split, frame in frames.items()} == {"train": 7473, "test": 1319}
    first = json.loads((real("gsm8k") / "train.jsonl").read_text().splitlines()[0])
    assert frames["train"].extra_info[0]["answer"] == first["answer"]
    for item in frames["train"][::50].to_dict("records"):
        arguments = item["data_source"], item["extra_info"]["answer"], item["reward_model"]["ground_truth"]
        assert compute_score(*arguments)["score"] == 1.0


def test_real_math(run):
    status, frames, text = run("math_dataset", "--local_dataset_path", real("math"))
    assert status == 0
    # 7,500 train problems: two with \boxed 2, two with an empty box, one that test has too.
    assert {split: len(frame) for split, frame in frames.items()} == {"train": 7495, "test": 5000}
    assert "train: dropped 1 rows that also stand in test" in text
    truths = frames["train"].reward_model.map(lambda entry: entry["ground_truth"])
    assert truths.str.contains(r"\\", regex=False).sum() > 20  # row separators of matrices survive
