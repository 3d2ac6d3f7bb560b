"""The reward on a golden table, in threads, on pathological answers, and through verl's own loading path."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from verl_ext import rewards
from verl_ext.rewards import compute_score, extract_answer

DATA = Path(os.environ.get("VERL_RECIPES_DATA", Path(__file__).parents[3] / "shared" / "data"))
RIGHT, WRONG, UNPARSED = (1.0, 1.0), (0.0, 1.0), (0.0, 0.0)  # (score, parsed)

# reference answer, response, outcome
GOLDEN = [
    # fractions and decimals
    (r"\frac{1}{2}", r"\boxed{\dfrac12}", RIGHT),
    (r"\frac{1}{2}", r"\boxed{0.5}", RIGHT),
    (r"\frac{3}{4}", r"\boxed{3/4}", RIGHT),
    (r"-\frac{1}{2}", r"\boxed{\frac{-1}{2}}", RIGHT),
    (r"\frac{1}{2}", r"\boxed{-\frac{1}{2}}", WRONG),
    (r"\frac{2}{3}", r"\boxed{\frac{3}{2}}", WRONG),
    (r"\frac{1}{3}", r"\boxed{0.33}", WRONG),
    ("5", r"\boxed{5.0}", RIGHT),
    ("18.90", r"\boxed{18.9}", RIGHT),
    # mixed numbers
    (r"\frac{7}{2}", r"\boxed{3\frac{1}{2}}", RIGHT),
    (r"\frac{7}{2}", r"\boxed{3 1/2}", RIGHT),
    (r"4\frac{1}{5}", r"\boxed{\frac{4}{5}}", WRONG),
    # surds, powers, constants, functions
    (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", RIGHT),
    (r"2\sqrt{3}", r"\boxed{3\sqrt{2}}", WRONG),
    (r"\frac{\sqrt{2}}{2}", r"\boxed{\frac{1}{\sqrt{2}}}", RIGHT),
    ("1024", r"\boxed{2^{10}}", RIGHT),
    (r"\pi", r"\boxed{3.14}", WRONG),
    (r"\binom{5}{2}", r"\boxed{10}", RIGHT),
    (r"\log_2 8", r"\boxed{3}", RIGHT),
    (r"1+2i", r"\boxed{2i+1}", RIGHT),
    # polynomials and equations
    (r"x^2+2x+1", r"\boxed{(x+1)^2}", RIGHT),
    (r"x^2+2x+1", r"\boxed{(x+2)^2}", WRONG),
    ("y=2x+1", r"\boxed{y-2x=1}", RIGHT),
    ("5", r"\boxed{x=5}", RIGHT),
    # sets, lists, plus-minus
    (r"\{1,2,3\}", r"\boxed{\{3,1,2\}}", RIGHT),
    (r"\{1,2,3\}", r"\boxed{\{1,2\}}", WRONG),
    ("1,2", r"\boxed{2, 1}", RIGHT),
    (r"3,-3", r"\boxed{\pm 3}", RIGHT),
    (r"\pm 3", r"\boxed{3}", WRONG),
    (r"2\pm\sqrt{3}", r"\boxed{2+\sqrt3, 2-\sqrt3}", RIGHT),
    (r"\emptyset", r"\boxed{\{\}}", RIGHT),
    ("2", r"\boxed{1, 2, 3, 4}", WRONG),  # guessing several
    ("5", r"\boxed{5 \text{ or } 7}", WRONG),
    # intervals and inequalities
    ("[1,2)", r"\boxed{\left[1, 2\right)}", RIGHT),
    ("[1,2)", r"\boxed{[1,2]}", WRONG),
    (r"(-\infty,1)\cup(2,\infty)", r"\boxed{(2,\infty)\cup(-\infty,1)}", RIGHT),
    ("x>3", r"\boxed{3<x}", RIGHT),
    ("x>3", r"\boxed{(3,\infty)}", RIGHT),
    ("x>3", r"\boxed{x\ge 3}", WRONG),
    # ordered pairs and matrices
    ("(1,2)", r"\boxed{( 1, 2 )}", RIGHT),
    ("(1,2)", r"\boxed{(2,1)}", WRONG),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\boxed{\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}}", RIGHT),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\3\end{pmatrix}}", WRONG),
    # percentages
    (r"50\%", r"\boxed{50\%}", RIGHT),
    (r"50\%", r"\boxed{50}", RIGHT),
    (r"50\%", r"\boxed{0.5}", RIGHT),
    ("0.5", r"\boxed{50\%}", RIGHT),
    ("50", r"\boxed{50\%}", RIGHT),
    (r"50\%", r"\boxed{5\%}", WRONG),
    ("0.5", r"\boxed{50}", WRONG),
    (r"33\frac{1}{3}\%", r"\boxed{\frac{100}{3}\%}", RIGHT),
    # units, degrees, currency, times
    ("5", r"\boxed{5\text{ cm}}", RIGHT),
    ("5", r"\boxed{\text{5 cm}}", RIGHT),
    (r"12\text{ inches}", r"\boxed{12}", RIGHT),
    ("90", r"\boxed{90^{\circ}}", RIGHT),
    ("90", r"\boxed{90°}", RIGHT),
    ("18", r"\boxed{\$18}", RIGHT),
    ("18", r"\boxed{\$18.00}", RIGHT),
    ("18", r"\boxed{€180}", WRONG),
    # thousands separators, signs, scientific notation
    ("1234567", r"\boxed{1,234,567}", RIGHT),
    ("10000", r"\boxed{10{,}000}", RIGHT),
    ("10000", r"\boxed{10,\!000}", RIGHT),
    ("1234", r"\boxed{1,243}", WRONG),
    ("-7", "\\boxed{\u22127}", RIGHT),
    ("-7", r"\boxed{7}", WRONG),
    ("1500", r"\boxed{1.5\times 10^{3}}", RIGHT),
    ("1500", r"\boxed{1.5e3}", RIGHT),
    ("0.001", r"\boxed{1.0 \times 10^{-3}}", RIGHT),
    ("1500", r"\boxed{1.5\times 10^{4}}", WRONG),
    # text and choices
    (r"\text{Monday}", r"\boxed{monday}", RIGHT),
    (r"\text{Monday}", r"\boxed{\text{Sunday}}", WRONG),
    (r"\text{east}", r"\boxed{seat}", WRONG),
    ("east", r"\boxed{\text{seat}}", WRONG),
    (r"\text{June 20}", r"\boxed{June 20}", RIGHT),
    (r"\text{(C)}", r"\boxed{C}", RIGHT),
    ("C", r"\boxed{\textbf{(C)}}", RIGHT),
    ("C", r"\boxed{B}", WRONG),
    # boxes: nested braces, several, fbox, empty, cut off, other text around them
    (r"\frac{1}{\sqrt{2}}", r"Thus \boxed{\frac{1}{\sqrt{2}}} is the \{value\}.", RIGHT),
    (r"\{x : x>0\}", r"\boxed{\{x : x>0\}}", RIGHT),
    ("4", r"First \boxed{3}, no: \boxed{4}.", RIGHT),
    ("3", r"First \boxed{3}, no: \boxed{4}.", WRONG),
    ("4", r"\boxed{\boxed{4}}", RIGHT),
    ("4", r"\fbox{4}", RIGHT),
    ("4", r"The answer is \boxed{}", UNPARSED),
    ("4", r"The answer is \boxed{ }", UNPARSED),
    ("4", r"The answer is \boxed{4", UNPARSED),
    ("12", r"\boxed{12}, once more: the answer is \boxed{\frac{1}{2", UNPARSED),
    ("4", r"\boxed{\{4\}", UNPARSED),
    ("4", r"\boxed{\{4}", WRONG),  # closed: \{ opens nothing
    ("6", r"\boxed{4} and 6 more", WRONG),
    # no box: GSM8K's marker, then the last number
    ("72", "48 + 24 = 72\n#### 72", RIGHT),
    ("72", "#### 72\nThat took 3 steps.", RIGHT),
    ("1200", "#### $1,200", RIGHT),
    ("5", "#### 5 apples.", RIGHT),
    ("-3", "#### -3", RIGHT),
    ("72", "#### 27", WRONG),
    ("8", "#### Step 1\nWe add 3 and 5 to get 8.", RIGHT),
    ("8", "#### 1. Adding\n3 + 5 makes 8 in all.", RIGHT),
    ("7", "So she has 12 - 5 = 7 left.", RIGHT),
    ("2", "7-5-2", RIGHT),
    ("-2", "it is -2", RIGHT),
    ("18", r"She earns -\$2 + \$20 = \$18.00 daily.", RIGHT),
    ("-18", r"the balance is -\$18", RIGHT),
    (r"\frac{1}{2}", r"so it is $\frac{1}{2}$.", RIGHT),
    ("3.5", "about 3 1/2 hours", RIGHT),
    ("20", "that is 20%", RIGHT),
    ("4", "I do not know.", UNPARSED),
    ("4", "", UNPARSED),
    ("4", "x2 y3 z4", UNPARSED),
]


def outcome(gold: str, response: str, **options) -> tuple[float, float]:
    result = compute_score("golden", response, gold, **options)
    assert result["acc"] == result["score"]
    assert result["timed_out"] == 0.0
    return result["score"], result["parsed"]


@pytest.mark.parametrize(("gold", "response", "expected"), GOLDEN)
def test_golden(gold, response, expected):
    assert outcome(gold, response) == expected


def test_right_in_threads():
    rewards._equal.cache_clear()  # or the verdicts of the test above would be read back
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda row: outcome(row[0], row[1]), GOLDEN))
    assert found == [expected for _, _, expected in GOLDEN]


def test_every_row_has_the_same_numeric_keys():
    keys = {"score", "acc", "parsed", "timed_out"}
    for response in (r"\boxed{4}", r"\boxed{5}", r"\boxed{4", r"\boxed{9^{9^{9^{9}}}}"):
        result = compute_score("any", response, "4", time_limit=0.3)
        assert set(result) == keys
        assert all(type(value) is float and value in (0.0, 1.0) for value in result.values())


def test_strict_box():
    assert outcome("72", "#### 72", strict_box=True) == UNPARSED
    assert outcome("72", "so it is 72", strict_box=True) == UNPARSED
    assert outcome("72", r"\boxed{72}", strict_box=True) == RIGHT


def test_only_the_end_of_a_long_response_is_searched():
    response = r"\boxed{4}" + " and so on" * 100
    assert extract_answer(response) == "4"
    assert outcome("4", response) == RIGHT
    assert outcome("4", response, max_chars=500) == UNPARSED
    assert outcome("4", "9" * 3_000_000 + r" \boxed{4}") == RIGHT


def test_an_answer_in_the_prompt_or_extra_info_does_not_count():
    extra = {"question": r"Is it \boxed{7}?", "answer": "#### 7"}
    assert compute_score("any", "I cannot say.", "7", extra)["parsed"] == 0.0


@pytest.mark.parametrize(
    ("answer", "times_out"),
    [
        (r"10^{10^{10^{10}}}", True),
        (r"((9!)!)!", True),
        (r"\log(\log(9^{9^{9}}))", True),
        (r"\frac{1}{" * 60 + "2" + "}" * 60, True),
        ("{" * 250 + "5x" + "}" * 250, None),  # slow to parse, how slow depends on the machine
        ("{" * 2000 + "5" + "}" * 2000, False),  # too long for an answer
        ("+".join(f"x^{{{power}}}" for power in range(2000)), False),
        ("(" * 5000, False),
    ],
    ids=["tower", "factorials", "logs", "fractions", "nested", "braces", "sum", "open"],
)
def test_pathological_answers_return_in_time(answer, times_out):
    outcome("y", r"\boxed{z}")  # a worker is up
    start = time.monotonic()
    result = compute_score("any", rf"\boxed{{{answer}}}", "5x^2", time_limit=0.5)
    assert time.monotonic() - start < 0.5 * rewards.WALL_FACTOR + 1
    assert result["score"] == 0.0
    if times_out is not None:
        assert result["timed_out"] == float(times_out)
        assert result["parsed"] == 0.0
    assert outcome(r"\frac{1}{2}", rf"\boxed{{0.5 + {len(answer)} - {len(answer)}}}") == RIGHT  # a new question


def test_pathological_answers_in_threads_do_not_mix_up_verdicts():
    rows = [(rf"\boxed{{{answer}}}", "5x^2", 0.0) for answer in (r"((9!)!)!", r"\log(\log(9^{9^{9}}))", r"((8!)!)!")]
    rows += [(rf"\boxed{{{n}x + x}}", f"{n + 1 - n % 2}x", float(n % 2 == 0)) for n in range(20)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda row: compute_score("any", row[0], row[1], time_limit=1.0), rows))
    assert [result["score"] for result in results] == [score for *_, score in rows]
    assert any(result["timed_out"] for result in results[:3])
    assert not any(result["timed_out"] for result in results[3:])


def test_a_worker_killed_from_outside_is_replaced():
    assert outcome("x+1", r"\boxed{1+x}") == RIGHT
    workers = [worker for worker in list(rewards._workers._slots.queue) if worker is not None]
    for worker in workers:
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
    assert workers
    assert outcome("x+2", r"\boxed{2+x}") == RIGHT


def run_script(body: str) -> subprocess.Popen:
    # No "if __name__ == '__main__'": a worker must not import the caller's script.
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(body)], stdout=subprocess.PIPE, text=True)


def test_forked_child_has_workers_of_its_own():
    script = run_script(
        r"""
        import os
        from verl_ext.rewards import compute_score
        ask = lambda n: compute_score("any", rf"\boxed{{{n}+x}}", f"x+{n}")["score"]
        assert ask(1) == 1.0
        child = os.fork()
        assert all(ask(10 * n + (child == 0)) == 1.0 for n in range(1, 20))
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """
    )
    script.communicate(timeout=60)
    assert script.returncode == 0


def test_no_worker_outlives_its_killed_parent():
    script = run_script(
        r"""
        import threading, time
        from verl_ext import rewards
        rewards.compute_score("any", r"\boxed{1+x}", "x+1")
        print(rewards._workers._slots.queue[-1].process.pid, flush=True)
        rewards.compute_score("any", r"\boxed{10^{10^{10^{10}}}}", "5x", time_limit=2.0)
        """
    )
    worker = int(script.stdout.readline())
    time.sleep(0.5)  # the worker computes the power: it will not look at its connection again
    script.kill()
    script.communicate()
    deadline = time.monotonic() + 2.0 * rewards.WALL_FACTOR + 5
    while Path(f"/proc/{worker}").exists() and " Z " not in Path(f"/proc/{worker}/stat").read_text():
        assert time.monotonic() < deadline, "the worker is still there"
        time.sleep(0.1)


def test_missing_math_verify_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('broken on purpose')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(rewards, "_workers", rewards._Workers(1))
    with pytest.raises(RuntimeError, match=r"math-verify does not start.*broken on purpose.*pip install"):
        compute_score("any", r"\boxed{3+x}", "x+3")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ground_truth": None}, TypeError, r"reward_model\.ground_truth.*NoneType"),
        ({"ground_truth": ["4"]}, TypeError, r"reward_model\.ground_truth.*list"),
        ({"ground_truth": " "}, ValueError, r"reward_model\.ground_truth"),
        ({"ground_truth": float("nan")}, ValueError, r"reward_model\.ground_truth"),
        ({"solution_str": 4}, TypeError, "solution_str"),
        ({"time_limit": 0}, ValueError, r"time_limit.*0"),
        ({"time_limit": "5"}, ValueError, "time_limit"),
        ({"max_chars": 0}, ValueError, "max_chars"),
        ({"strict_box": "yes"}, TypeError, "strict_box"),
        ({"strict_boxes": True}, TypeError, r"strict_boxes.*known are strict_box"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    arguments = {"data_source": "any", "solution_str": r"\boxed{4}", "ground_truth": "4"}
    with pytest.raises(error, match=message):
        compute_score(**{**arguments, **change})


def test_numeric_ground_truth():
    assert outcome(4, r"\boxed{4}") == RIGHT
    assert outcome(0.5, r"\boxed{\frac12}") == RIGHT


def test_through_verls_reward_manager():
    """verl resolves pkg://, adds reward_kwargs, decodes the response only, and hands our keys on."""
    import asyncio

    import numpy as np
    import torch
    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
    from verl.trainer.ppo.reward import get_custom_reward_fn

    class Letters:  # a tokenizer: one token a character
        @staticmethod
        def decode(ids, skip_special_tokens=True):
            return "".join(chr(int(token)) for token in ids)

    def score(prompt: str, response: str) -> dict:
        tokens = [list(text.encode()) for text in (prompt, response)]
        batch = DataProto.from_dict(
            tensors={
                "prompts": torch.tensor([tokens[0]]),
                "responses": torch.tensor([tokens[1] + [0] * 5]),
                "attention_mask": torch.tensor([[1] * len(tokens[0] + tokens[1]) + [0] * 5]),
            },
            non_tensors={
                "data_source": np.array(["any"], dtype=object),
                "reward_model": np.array([{"ground_truth": r"\frac{1}{2}"}], dtype=object),
                "extra_info": np.array([{"index": 0}], dtype=object),
            },
        )

        async def run():
            manager = NaiveRewardManager(config=config, tokenizer=Letters(), compute_score=get_custom_reward_fn(config))
            return await manager.run_single(batch)

        return asyncio.run(run())

    function = {"path": "pkg://verl_ext.rewards", "name": "compute_score", "reward_kwargs": {"strict_box": True}}
    config = OmegaConf.create({"reward": {"custom_reward_function": function}})
    right = score("What is half of 1?", r"It is \boxed{0.5}")
    assert right["reward_score"] == 1.0
    assert right["reward_extra_info"] == {"score": 1.0, "acc": 1.0, "parsed": 1.0, "timed_out": 0.0}
    leaked = score(r"Is it \boxed{\frac{1}{2}}?", "Yes, 0.5")
    assert leaked["reward_score"] == 0.0
    assert leaked["reward_extra_info"]["parsed"] == 0.0


def gold_answers(name: str) -> list[str]:
    path = DATA / name / "test.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there (set VERL_RECIPES_DATA to a folder with {name}/test.jsonl)")
    with path.open() as lines:
        answers = [json.loads(line)["answer"] for line in lines]
    return [answer.rpartition("####")[2].strip() for answer in answers]


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow, id="all"), pytest.param(10, id="tenth")])
@pytest.mark.parametrize(("name", "rows"), [("math500", 500), ("gsm8k", 1319)])
def test_real_gold_answers_verify_against_themselves(name, rows, step):
    golds = gold_answers(name)
    assert len(golds) == rows
    # Both ways: as users meet it, and past the shortcut for equal text.
    failed = [
        gold
        for gold in golds[::step]
        if outcome(gold, rf"\boxed{{{gold}}}") != RIGHT or not rewards._workers.ask([gold], [gold], 10.0)
    ]
    assert failed == []


def test_real_solutions_score():
    path = DATA / "gsm8k" / "test.jsonl"
    golds = gold_answers("gsm8k")
    with path.open() as lines:
        solutions = [json.loads(line)["answer"] for line in lines]
    assert all(outcome(gold, solution) == RIGHT for gold, solution in zip(golds, solutions, strict=True))
    shifted = [outcome(gold, solution)[0] for gold, solution in zip(golds[1:], solutions, strict=False)]
    same = [a == b for a, b in zip(golds[1:], golds, strict=False)]
    assert shifted == [float(equal) for equal in same]
