from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from verl_ext import tasks

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_tiny_model.py"
# A few steps: enough to go through everything, not to learn.
SHORT = ["--max-steps", "12", "--prompts", "4", "--min-accuracy", "0"]


@pytest.fixture(scope="module")
def script():
    import torch

    threads, deterministic, omp = (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        os.environ.get("OMP_NUM_THREADS"),
    )
    spec = importlib.util.spec_from_file_location("make_tiny_model", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    os.environ.pop("OMP_NUM_THREADS") if omp is None else os.environ.update(OMP_NUM_THREADS=omp)


@pytest.fixture(scope="module")
def made(script, tmp_path_factory) -> Path:
    """Folder with a small model after a few steps."""
    out = tmp_path_factory.mktemp("tiny")
    assert script.main(["--out", str(out), "--size", "small", *SHORT]) == 0
    return out


@pytest.fixture(scope="module")
def made_steps(script, made) -> Path:
    """Folder of a small model of sums in steps after a few steps, beside that of the sums."""
    assert script.main(["--out", str(made), "--size", "small", "--task", "steps", *SHORT]) == 0
    return made


def report(out: Path, size: str = "small") -> dict:
    return json.loads((out / size / "report.json").read_text())


# ---- tokenizer and model


def test_tokenizer(script, made):
    from transformers import AutoTokenizer, Qwen2Tokenizer

    # A child of Qwen2Tokenizer, or transformers would rebuild its pre-tokenizer on loading.
    tokenizer = AutoTokenizer.from_pretrained(made / "small")
    assert isinstance(tokenizer, Qwen2Tokenizer)
    assert len(tokenizer) == len(script.make_tokenizer()) == 260
    assert len(tokenizer.encode("\n")) == 1
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert all(len(tokenizer.encode(digit)) == 1 for digit in "0123456789+=")
    for text in ("57+68=", "125<|im_end|>", "What is 3 plus 4?\n", "Größe ≤ 5, 数"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("125<|im_end|>"), skip_special_tokens=True) == "125"


def test_chat_template(script, made):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made / "small")
    chat = [{"role": "user", "content": "57+68="}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>57+68=<|im_end|>\n<|im_start|>"
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids == script.encode_prompts(tokenizer, ["57+68="])[0].tolist() and len(ids) == 10
    # The answer continues the prompt as the whole chat has it.
    whole = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": "125"}], tokenize=False)
    assert whole == prompt + "125<|im_end|>\n"


@pytest.mark.parametrize("size", ["small", "large"])
def test_model_fits_vllm_and_tensor_parallelism(script, size):
    tokenizer = script.make_tokenizer()
    model = script.make_model(size, tokenizer, seed=0)
    config = model.config
    assert config.vocab_size == len(tokenizer) and config.vocab_size % 2 == 0
    assert config.hidden_size // config.num_attention_heads >= 32
    assert config.num_key_value_heads % 2 == 0
    assert config.eos_token_id == tokenizer.eos_token_id
    assert {str(p.dtype) for p in model.parameters()} == {"torch.float32"}


def test_the_large_model_is_larger(script):
    tokenizer = script.make_tokenizer()
    small, large = (script.make_model(size, tokenizer, 0).num_parameters() for size in ("small", "large"))
    assert large > 2 * small


def test_saved_model_loads_as_it_was(script, made):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(made / "small", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.rope_parameters["rope_theta"] == 100.0
    tokenizer = AutoTokenizer.from_pretrained(made / "small")
    assert script.measure(model.eval(), tokenizer, prompts=4) == report(made)["levels"]
    logits = model(input_ids=script.encode_prompts(tokenizer, ["57+68=", "10+99="])).logits
    assert logits.shape == (2, 10, 260) and torch.isfinite(logits).all()


def test_supervised_set_is_the_sft_split_with_careless_answers(script):
    tokenizer = script.make_tokenizer()
    prompts, answers, weights = script.supervised_set(tokenizer)
    pairs = list(tasks.sums("sft"))
    assert prompts.shape == (len(pairs), 10) and answers.shape == (len(pairs), 4, 4)
    for i in range(0, len(pairs), 97):
        a, b = pairs[i]
        assert tokenizer.decode(prompts[i]) == f"<|im_start|>{a}+{b}=<|im_end|>\n<|im_start|>"
        texts = [tokenizer.decode(ids[ids >= 0]) for ids in answers[i]]
        found = {t: w for t, w in zip(texts, weights[i].tolist(), strict=True) if t}
        assert found == pytest.approx({f"{t}<|im_end|>": w for t, w in tasks.slips(a, b).items()})


def test_training_learns(script):
    """The loss falls well below that of guessing digits at random, and nears no lower than its bound."""
    tokenizer = script.make_tokenizer()
    model = script.make_model("small", tokenizer, seed=0)
    steps, loss, floor = script.train(model, tokenizer, "small", seed=0, max_steps=120)
    assert steps == 120 and 0.15 < floor < 0.25
    assert floor < loss < 2.2


def test_measure_counts_groups(script):
    """A model that always answers 125 with probability 1/2, else 115, has groups that can be counted by hand."""
    import torch

    tokenizer = script.make_tokenizer()

    class Coin(torch.nn.Module):
        def forward(self, input_ids, **_):
            logits = torch.full((len(input_ids), 1, 260), -1e9)
            for row, ids in zip(logits, input_ids, strict=True):
                a, b = tokenizer.decode(ids).split("<|im_start|>")[1].split("=")[0].split("+")
                said = ids[10:].tolist()
                truth = [*tokenizer.encode(str(int(a) + int(b))), tokenizer.eos_token_id]
                row[0, truth[min(len(said), len(truth) - 1)]] = 0.0
                if not said and tasks.carries(int(a), int(b)) == 1:
                    row[0, tokenizer.pad_token_id] = -1e-6 if int(a) % 2 else 1e9
            return type("Output", (), {"logits": logits})

    levels = script.measure(Coin(), tokenizer, prompts=16)
    sure = {"sampled": 1, "all_wrong": 0, "all_correct": 1, "mixed": 0, "greedy_val": 1}
    assert levels["easy"] == sure and levels["hard"] == sure
    rows = {split: tasks.make_rows("medium", split, 16) for split in ("train", "val")}
    odd = {split: sum(int(r["prompt"][0]["content"][1]) % 2 for r in rows[split]) / 16 for split in rows}
    medium = levels["medium"]
    # Odd first numbers: a fair coin; even ones: never right.
    assert medium["greedy_val"] == odd["val"]
    assert medium["all_wrong"] + medium["mixed"] + medium["all_correct"] == pytest.approx(1)
    assert medium["all_wrong"] == pytest.approx(1 - odd["train"], abs=0.07)
    assert medium["sampled"] == pytest.approx(odd["train"] / 2, abs=0.15)
    assert levels["mixed"]["sampled"] == pytest.approx((2 + medium["sampled"]) / 3, abs=1e-3)


# ---- sums in steps

ASKED, SAID = ["37+8+5+9+4=", "11+8+2+3+4="], ["45;40;49;53#53", "19;21;24;28#28"]


def test_steps_batch_has_every_prefix(script):
    tokenizer = script.make_tokenizer()
    ids, targets, mask, positions = script.steps_batch(tokenizer, ASKED, SAID)
    assert ids.shape == targets.shape == (2, 60) and mask.shape == (1, 1, 60, 60) and positions.shape == (1, 60)
    for row in range(2):
        text = f"<|im_start|>{ASKED[row]}<|im_end|>\n<|im_start|>{SAID[row]}<|im_end|>"
        assert tokenizer.decode(ids[row, :30]) == text
        # The response is supervised from its first token to the end of turn, and nothing before.
        assert (targets[row, :14] == -100).all() and targets[row, 29] == -100
        assert tokenizer.decode(targets[row, 14:29]) == f"{SAID[row]}<|im_end|>"
        for j in range(15):
            # A forced cue is an input, never a target; the targets are the two digits of the answer.
            at = slice(30 + 2 * j, 32 + 2 * j)
            answer = str(tasks.answer_after(ASKED[row], SAID[row][:j]))
            assert tokenizer.decode(ids[row, at]) == f"#{answer[0]}" and tokenizer.decode(targets[row, at]) == answer
    truths = script.steps_batch(tokenizer, ASKED, SAID, ["63", "28"])[1]
    assert tokenizer.decode(truths[0, 30:]) == "63" * 15 and tokenizer.decode(truths[1, 30:]) == "28" * 15


def test_steps_batch_is_the_separate_sequences(script):
    import torch

    tokenizer = script.make_tokenizer()
    model = script.make_model("small", tokenizer, 0).eval()
    ids, _, mask, positions = script.steps_batch(tokenizer, ASKED, SAID)
    with torch.no_grad():
        packed = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        torch.testing.assert_close(packed[:, :30], model(input_ids=ids[:, :30]).logits)
        for j in range(15):
            at = slice(30 + 2 * j, 32 + 2 * j)
            alone = model(input_ids=torch.cat([ids[:, : 15 + j], ids[:, at]], dim=1)).logits
            torch.testing.assert_close(packed[:, at], alone[:, -2:])


def test_beliefs_are_probabilities_of_the_reference(script):
    """Against one plain forward for each question, on an untrained model."""
    import torch

    tokenizer = script.make_tokenizer()
    model = script.make_model("small", tokenizer, 0).eval()
    texts = [f"{said}<|im_end|>" for said in SAID] + ["45;50;#63<|im_end|>"]
    rows = [
        {"prompt": [{"role": "user", "content": asked}], "reward_model": {"ground_truth": truth}}
        for asked, truth in zip([*ASKED, ASKED[0]], ["63", "28", "63"], strict=True)
    ]
    belief = script.beliefs(model, tokenizer, rows, texts, torch.tensor([False, True, True]))

    def asked_after(row: int, prefix: str) -> float:
        truth = rows[row]["reward_model"]["ground_truth"]
        tail = torch.tensor([tokenizer(f"{prefix}#{truth}")["input_ids"]])
        ids = torch.cat([script.encode_prompts(tokenizer, [ASKED[row]]), tail], dim=1)
        with torch.no_grad():
            chance = model(input_ids=ids).logits.softmax(-1)[0]
        return chance[-3, ids[0, -2]].item() * chance[-2, ids[0, -1]].item()

    assert belief["well_formed"] == pytest.approx(2 / 3, abs=1e-4)
    for name, row in (("wrong", 0), ("correct", 1)):
        every = [asked_after(row, SAID[row][:j]) for j in range(15)]
        assert belief[f"{name}_by_character"] == pytest.approx(every, abs=1e-4)
        assert belief[name] == pytest.approx([every[j] for j in (0, 2, 5, 8, 11)], abs=1e-4)
    # The second running sum of the wrong response is the first wrong one.
    assert belief["slip"] == belief["wrong"][1:3]


def test_first_slip(script):
    assert script.first_slip("37+8+5+9+4=", "45;50;59;63#63") == 0
    assert script.first_slip("37+8+5+9+4=", "35;40;49;53#53") == 1
    assert script.first_slip("37+8+5+9+4=", "45;50;59;53#53") == 4


@pytest.mark.parametrize(
    ("correct", "wrong", "fault"),
    [
        ([0.1, 0.2, 0.5, 0.7, 0.99], [0.1, 0.1, 0.05, 0.02, 0.01], None),
        ([0.1, 0.2, 0.19, 0.7, 0.99], [0.05, 0.1, 0.05, 0.02, 0.09], None),
        ([0.1, 0.2, 0.1, 0.7, 0.99], [0.1, 0.1, 0.05, 0.02, 0.01], "does not rise"),
        ([0.1, 0.2, 0.3, 0.7, 0.8], [0.1, 0.1, 0.05, 0.02, 0.01], "does not rise"),
        ([0.1, 0.2, 0.5, 0.7, 0.99], [0.2, 0.1, 0.05, 0.02, 0.3], "does not fall"),
        (None, [0.2, 0.1, 0.05, 0.02, 0.0], "ends correct"),
        ([0.1, 0.2, 0.5, 0.7, 0.99], None, "ends wrong"),
    ],
)
def test_belief_fault(script, correct, wrong, fault):
    found = script.belief_fault({"correct": correct, "wrong": wrong})
    assert found is None if fault is None else fault in found


def test_training_on_steps_learns(script, monkeypatch):
    """The loss falls below that of random digits: 1.5 nats a token of a response plus 2.3 one of a forced answer."""
    tokenizer = script.make_tokenizer()
    model = script.make_model("small", tokenizer, seed=0)
    monkeypatch.setitem(script.TRAINING["steps"], "decay", 20)  # or the learning rate of so few steps would be small
    steps, _, floor = script.train(model, tokenizer, "small-steps", seed=0, max_steps=120, task="steps")
    loss, same_floor = script.steps_objective(model, tokenizer, seed=1)
    assert steps == 120 and 0.04 < floor < 0.1 and same_floor == floor
    assert floor < loss().item() < 3.6


def test_report_and_table_of_steps(made_steps, script):
    content = report(made_steps, "small-steps")
    assert content["size"] == "small" and content["task"] == "steps" and content["steps"] == 12
    assert list(content["levels"]) == ["steps"]
    assert set(content["belief"]) >= {"well_formed", "correct", "wrong", "slip"}
    content["belief"] |= {"correct": [0.1, 0.2, 0.5, 0.7, 0.99], "wrong": None}
    table = script.format_report({"small-steps": content}).splitlines()
    assert len(table) == 5 and table[1].split()[:2] == ["small-steps", "steps"]
    assert table[2].split()[-5:] == ["0", "1", "2", "3", "4"]
    assert table[3].split()[-5:] == ["0.10", "0.20", "0.50", "0.70", "0.99"] and table[4].endswith("end wrong")


def test_the_models_of_both_tasks_stand_side_by_side(script, made_steps, tmp_path):
    assert {"small", "small-steps"} <= {p.name for p in made_steps.iterdir()}
    assert report(made_steps)["task"] == "sums" and "belief" not in report(made_steps)
    assert report(made_steps)["fingerprint"] != report(made_steps, "small-steps")["fingerprint"]
    assert script.main(["--out", str(tmp_path), "--size", "small", "--task", "steps", *SHORT]) == 0
    again = report(tmp_path, "small-steps")
    assert again["weights_sha256"] == report(made_steps, "small-steps")["weights_sha256"]
    assert [p.name for p in tmp_path.iterdir()] == ["small-steps"]


def test_a_steps_model_that_did_not_learn_is_an_error(script, tmp_path):
    flags = ["--out", str(tmp_path), "--size", "small", "--task", "steps", "--max-steps", "3", "--prompts", "4"]
    with pytest.raises(SystemExit, match=r"the small-steps model gets only 0\.0\d of the sums in steps right"):
        script.main(flags)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.e2e
def test_the_large_steps_model_meets_the_requirements(script):
    """The model that `LEVEL=steps` trains: made where recipes/common/cpu.sh keeps it, or reused."""
    out = SCRIPT.parents[1] / "outputs" / "tiny"
    assert script.main(["--out", str(out), "--size", "large", "--task", "steps"]) == 0
    content = report(out, "large-steps")
    shares, belief = content["levels"]["steps"], content["belief"]
    assert 0.25 < shares["sampled"] < 0.5 and shares["mixed"] >= 0.5
    assert shares["all_wrong"] > 0.02 and shares["all_correct"] > 0.02
    assert belief["well_formed"] > 0.98 and script.belief_fault(belief) is None
    assert belief["slip"][1] < 0.5 * belief["slip"][0]
    assert content["parameters"] == script.make_model("large", script.make_tokenizer(), 0).num_parameters()


# ---- the command


def test_same_seed_same_weights(script, made, tmp_path):
    flags = ["--size", "small", *SHORT]
    assert script.main(["--out", str(tmp_path / "again"), *flags]) == 0
    assert script.main(["--out", str(tmp_path / "other"), *flags, "--seed", "1"]) == 0
    first, again, other = report(made), report(tmp_path / "again"), report(tmp_path / "other")
    assert first["weights_sha256"] == again["weights_sha256"] != other["weights_sha256"]
    assert first["levels"] == again["levels"] and first["fingerprint"] == again["fingerprint"] != other["fingerprint"]


def test_report_and_table(made, script):
    content = report(made)
    assert content["size"] == "small" and content["steps"] == 12 and content["seed"] == 0
    assert content["parameters"] == script.make_model("small", script.make_tokenizer(), 0).num_parameters()
    assert list(content["levels"]) == ["easy", "medium", "hard", "mixed"]
    for row in content["levels"].values():
        assert row["all_wrong"] + row["all_correct"] + row["mixed"] == pytest.approx(1, abs=1e-3)
        assert all(0 <= share <= 1 for share in row.values())
    table = script.format_report({"small": content}).splitlines()
    assert len(table) == 5 and "all wrong" in table[0] and table[3].split()[:2] == ["small", "hard"]


def test_a_complete_model_is_reused(script, tmp_path, capsys):
    flags = ["--out", str(tmp_path), "--size", "small", *SHORT]
    weights = tmp_path / "small" / "model.safetensors"
    script.main(flags)
    made_at = weights.stat().st_mtime_ns
    script.main(flags)
    assert "reusing" in capsys.readouterr().out and weights.stat().st_mtime_ns == made_at
    script.main([*flags, "--force"])
    assert "reusing" not in capsys.readouterr().out and weights.stat().st_mtime_ns > made_at
    script.main([*flags, "--seed", "1"])
    assert "reusing" not in capsys.readouterr().out and report(tmp_path)["seed"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["small"]


@pytest.mark.e2e
def test_an_interrupted_run_leaves_nothing_and_the_next_one_works(script, tmp_path):
    flags = ["--max-steps", "1000000", "--prompts", "4"]
    running = subprocess.Popen(
        [sys.executable, str(SCRIPT), "--out", str(tmp_path), *flags], stdout=subprocess.PIPE, text=True
    )
    seen = set()
    for line in running.stdout:  # until both sizes are training
        seen.add(line.split()[0])
        if seen == {"small", "large"}:
            break
    assert len(list(tmp_path.glob(".*.part"))) == 2
    running.send_signal(signal.SIGTERM)
    running.stdout.close()
    assert running.wait(timeout=30) == 143
    assert list(tmp_path.iterdir()) == []

    # What a process that was killed outright left behind goes away; what a living one is writing stays.
    dead, alive = tmp_path / f".small.{running.pid}.part", tmp_path / f".small.{os.getppid()}.part"
    for folder in (dead, alive):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
    assert script.main(["--out", str(tmp_path), "--size", "small", *SHORT]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"small", alive.name}


def test_a_model_that_did_not_learn_is_an_error(script, tmp_path):
    with pytest.raises(SystemExit, match=r"gets only 0\.0\d of the easy sums right.*--seed or more --max-steps"):
        script.main(["--out", str(tmp_path), "--size", "small", "--max-steps", "3", "--prompts", "4"])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_someone_else_is_left_alone(script, tmp_path):
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "thesis.txt").write_text("mine")
    for extra in ([], ["--force"]):
        with pytest.raises(SystemExit, match="does not hold a model of this script"):
            script.main(["--out", str(tmp_path), "--size", "small", *SHORT, *extra])
    assert (tmp_path / "small" / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--size", "huge"], "invalid choice: 'huge'"),
        (["--task", "words"], "invalid choice: 'words'"),
        (["--task", "steps", "--prompts", "9999"], "--prompts is 9999; it must be between 1 and 5067"),
        (["--seed", "-1"], "--seed is -1"),
        (["--max-steps", "0"], "--max-steps is 0; it must be at least 1"),
        (["--prompts", "0"], "--prompts is 0; it must be between 1 and 308"),
        (["--prompts", "9999"], "--prompts is 9999"),
        (["--min-accuracy", "70"], "--min-accuracy is 70.0; it must be between 0 and 1"),
    ],
)
def test_bad_arguments(script, tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit) as exit_:
        script.main(["--out", str(tmp_path / "x"), *flags])
    assert exit_.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_out_is_a_file(script, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        script.main(["--out", str(tmp_path / "file")])
    assert "--out" in capsys.readouterr().err


# ---- in verl


def test_verls_dataset_reads_the_task_with_this_tokenizer(made, tmp_path):
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer
    from verl.utils.dataset.rl_dataset import RLHFDataset

    rows = tasks.make_rows("mixed", "train", 20)
    path = tasks.write_parquet(tmp_path / "train.parquet", rows)
    config = OmegaConf.create(
        {"max_prompt_length": 10, "cache_dir": str(tmp_path), "filter_overlong_prompts_workers": 1}
    )
    data = RLHFDataset([str(path)], AutoTokenizer.from_pretrained(made / "small"), config)
    assert len(data) == 20  # every prompt has exactly ten tokens
    assert data[3]["raw_prompt"] == rows[3]["prompt"] and data[3]["index"] == 3
    assert data[3]["reward_model"] == rows[3]["reward_model"] and data[3]["data_source"] == "arithmetic"


def test_verls_dataset_reads_sums_in_steps(made, tmp_path):
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer
    from verl.utils.dataset.rl_dataset import RLHFDataset

    rows = tasks.make_rows("steps", "train", 20)
    path = tasks.write_parquet(tmp_path / "train.parquet", rows)
    config = OmegaConf.create(
        {"max_prompt_length": 15, "cache_dir": str(tmp_path), "filter_overlong_prompts_workers": 1}
    )
    data = RLHFDataset([str(path)], AutoTokenizer.from_pretrained(made / "small"), config)
    assert len(data) == 20  # every prompt has exactly fifteen tokens
    assert data[3]["data_source"] == "arithmetic_steps" and data[3]["reward_model"] == rows[3]["reward_model"]
