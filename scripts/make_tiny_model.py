#!/usr/bin/env python
"""Trains the tiny models of the arithmetic task from scratch, on a CPU, in a minute or two.

    python scripts/make_tiny_model.py --out outputs/tiny                 # small/ and large/ in there, side by side
    python scripts/make_tiny_model.py --out outputs/tiny --size large
    python scripts/make_tiny_model.py --out outputs/tiny --size large --task steps      # large-steps/

Both sizes are Qwen2 models in float32 with one byte-level tokenizer. They are supervised on careless sums
(verl_ext.tasks) of the ``sft`` split only. Each folder holds the model, the tokenizer and ``report.json``: for each
level, how many groups of 8 samples at temperature 1 on the ``train`` split are all wrong, all correct and mixed, and
the accuracy of greedy answers on the ``val`` split.

The models of ``--task steps`` write out the running sums, carelessly. They never write the cue ``#`` early, but where
it is forced after any prefix of a response they give the answer that follows from it, as well as they can add: they are
also supervised on that, with no loss on the forced cue. Their report has the probability of the reference answer along
the responses that end correct and those that end wrong.

The weights are the same for the same seed, machine and versions. A complete model made with the same arguments is
reused. A model is written beside its place and moved there when complete: an interrupted run leaves nothing behind.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch; the sum order, and so the weights, depend on the number of threads

import argparse
import hashlib
import json
import math
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from verl_ext import tasks  # noqa: E402

# Heads of 32 (the smallest that vLLM runs on a CPU) and two key-value heads (so that two ranks can share them).
SIZES = {
    "small": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2),
    "large": dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4),
}
WARM_UP = 50
# The learning rate is constant until the loss is within the margin (nats a token) of its least value, then it decays.
TRAINING = {
    "sums": dict(batch=64, rate=3e-3, margin=0.25, decay=500),
    "steps": dict(batch=20, rate=1.5e-3, margin=0.6, decay=600),
}
GROUP = 8  # samples a prompt in the report
MAX_TOKENS = {"sums": 5, "steps": 3 * tasks.ADDENDS + 3}  # of a sampled response, with its end of turn
MIN_ACCURACY = {"sums": 0.7, "steps": 0.3}  # of the easy sums, of the sums in steps

# One message is <|im_start|>content<|im_end|>\n. The role is not spelt out: it would double the tokens of a prompt.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)


def make_tokenizer():
    """Byte-level Qwen2 tokenizer without merges: 256 bytes, 4 special tokens (an even number), every digit a token."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    vocab = {token: i for i, token in enumerate(sorted(ByteLevel.alphabet()))}
    for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|reserved|>"):
        vocab[token] = len(vocab)
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=None,
        additional_special_tokens=["<|im_start|>", "<|reserved|>"],
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(size: str, tokenizer, seed: int):
    """Untrained Qwen2 model of a size, float32."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    shape = SIZES[size]
    return Qwen2ForCausalLM(
        Qwen2Config(
            **shape,
            num_key_value_heads=2,
            vocab_size=len(tokenizer),
            max_position_embeddings=512,
            # With the usual 0.02 and 10,000 a model this narrow, on prompts this short, takes several times as long.
            initializer_range=shape["hidden_size"] ** -0.5,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype="float32",
        )
    )


def encode_prompts(tokenizer, questions: list[str]):
    """Prompt ids (N, P) int64; every prompt of a task is equally long (P is 10 for sums, 15 for sums in steps)."""
    import torch

    head, tail = tokenizer.apply_chat_template(
        [{"role": "user", "content": "{}"}], tokenize=False, add_generation_prompt=True
    ).split("{}")
    texts = [head + question + tail for question in questions]
    return torch.tensor(tokenizer(texts)["input_ids"])


def supervised_set(tokenizer):
    """The ``sft`` split as prompts (N, 10), careless answers (N, 4, 4) padded with -100, their probabilities (N, 4)."""
    import torch

    pairs = list(tasks.sums("sft"))
    answers, weights = torch.full((len(pairs), 4, 4), -100), torch.zeros(len(pairs), 4)
    for i, (a, b) in enumerate(pairs):
        for j, (answer, probability) in enumerate(tasks.slips(a, b).items()):
            ids = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
            answers[i, j, : len(ids)] = torch.tensor(ids)
            weights[i, j] = probability
    return encode_prompts(tokenizer, [tasks.question(a, b) for a, b in pairs]), answers, weights


def sums_objective(model, tokenizer, seed: int):
    """Function that draws a batch of careless sums and returns its loss, and the least loss (nats a token)."""
    import torch
    import torch.nn.functional as F

    prompts, answers, weights = supervised_set(tokenizer)
    tokens = (weights[..., None] * (answers != -100)).sum().item()
    floor = -torch.xlogy(weights, weights).sum().item() / tokens
    rng = torch.Generator().manual_seed(seed)

    def loss():
        rows = torch.randint(len(prompts), (TRAINING["sums"]["batch"],), generator=rng)
        target = answers[rows, torch.multinomial(weights[rows], 1, generator=rng)[:, 0]]
        inputs = torch.cat([prompts[rows], target[:, :-1].clamp(min=0)], dim=1)
        # Right-padded and causal, so no attention mask is needed.
        logits = model(input_ids=inputs, logits_to_keep=target.size(1), use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)

    return loss, floor


def steps_batch(tokenizer, questions: list[str], responses: list[str], truths: list[str] | None = None):
    """Sums in steps, each with the answer asked for after every prefix of its response, as one row a response.

    The answer is the one that follows from the prefix, or that of ``truths``. A row is prompt, response and end of turn
    (N, P + T), then T branches of cue and answer's first digit: branch j goes on from the first j characters of the
    response, sees nothing else, and has the positions it would have there.

    Returns:
        The row's ids (N, P + 3T), targets (N, P + 3T): the next tokens of the response, in the branches the answer's
        digits, -100 for the prompt and the cue; mask (1, 1, P + 3T, P + 3T) bool and positions (1, P + 3T).
    """
    import torch

    prompts = encode_prompts(tokenizer, questions)
    cue, end = tokenizer(tasks.CUE)["input_ids"][0], tokenizer.eos_token_id
    written = torch.tensor([[*ids, end] for ids in tokenizer(responses)["input_ids"]])
    n, start, length = len(prompts), prompts.size(1), written.size(1)
    if truths is None:
        pairs = zip(questions, responses, strict=True)
        asked = [str(tasks.answer_after(q, r[:j])) for q, r in pairs for j in range(length)]
    else:
        asked = [truth for truth in truths for _ in range(length)]
    answers = torch.tensor(tokenizer.convert_tokens_to_ids(list("".join(asked)))).view(n, length, 2)
    branches = torch.stack([torch.full((n, length), cue), answers[..., 0]], dim=2)
    ids = torch.cat([prompts, written, branches.flatten(1)], dim=1)
    targets = torch.full_like(ids, -100)
    targets[:, start - 1 : start + length - 1] = written
    targets[:, start + length :] = answers.flatten(1)

    total, trunk = ids.size(1), start + length
    position = torch.arange(total)
    branch = torch.arange(length).repeat_interleave(2)  # of each token behind the response
    position[trunk:] = start + branch + torch.arange(2).repeat(length)
    mask = torch.ones(total, total, dtype=torch.bool).tril()
    mask[trunk:, :trunk] = torch.arange(trunk) < start + branch[:, None]
    mask[trunk:, trunk:] &= branch == branch[:, None]
    return ids, targets, mask[None, None], position[None]


def steps_objective(model, tokenizer, seed: int):
    """As :func:`sums_objective`, for sums in steps: loss of the careless responses plus loss of the answers asked for
    after each of their prefixes. The least loss is the former's: the answer is certain given the prefix."""
    import torch.nn.functional as F

    pool = [tasks.steps_numbers(problem.question) for problem in tasks.problems("steps", "sft")]
    rng, length = random.Random(seed), MAX_TOKENS["steps"]
    keep = [
        tasks.step_keep(c) for start, addends in pool for c in tasks.step_carries(tasks.steps_question(start, addends))
    ]
    entropy = -sum(p * math.log(p) + (1 - p) * math.log(1 - p) for p in keep) / len(pool)

    def loss():
        drawn = [rng.choice(pool) for _ in range(TRAINING["steps"]["batch"])]
        questions = [tasks.steps_question(start, rng.sample(addends, len(addends))) for start, addends in drawn]
        responses = [tasks.careless_steps(question, rng) for question in questions]
        ids, targets, mask, positions = steps_batch(tokenizer, questions, responses)
        logits = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=3 * length + 1, use_cache=False
        ).logits.split([length, 1, 2 * length], dim=1)
        targets = targets[:, -3 * length - 1 :].split([length, 1, 2 * length], dim=1)
        return sum(F.cross_entropy(logits[i].flatten(0, 1), targets[i].flatten()) for i in (0, 2))

    return loss, entropy / length


def train(model, tokenizer, name: str, seed: int, max_steps: int, task: str = "sums") -> tuple[int, float, float]:
    """Supervised training in place. Returns steps, smoothed loss and its lower bound (nats a token)."""
    import torch

    rate, margin, decay = (TRAINING[task][key] for key in ("rate", "margin", "decay"))
    batch_loss, floor = {"sums": sums_objective, "steps": steps_objective}[task](model, tokenizer, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    start, told = time.monotonic(), -math.inf
    smooth, stop = math.log(len(tokenizer)), max_steps
    step = 0
    while step < stop:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / WARM_UP, (stop - step) / decay)
        loss = batch_loss()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        smooth += 0.03 * (loss.item() - smooth)
        if smooth < floor + margin:
            stop = min(stop, step + decay)
        if time.monotonic() - told > 3 or step == stop:
            told = time.monotonic()
            print(
                f"{name:5}  step {step:5}  loss {smooth:.3f} (at best {floor:.3f})  {told - start:3.0f} s", flush=True
            )
    return step, smooth, floor


def sample(model, tokenizer, prompts, greedy: bool, rng=None, max_tokens: int = MAX_TOKENS["sums"]) -> list[str]:
    """One answer for each prompt, at temperature 1 unless greedy; text up to the end of the turn."""
    import torch

    ids = prompts
    with torch.inference_mode():
        for _ in range(max_tokens):
            logits = model(input_ids=ids, logits_to_keep=1, use_cache=False).logits[:, -1]
            new = logits.argmax(-1, True) if greedy else torch.multinomial(logits.softmax(-1), 1, generator=rng)
            ids = torch.cat([ids, new], dim=1)
    return tokenizer.batch_decode(ids[:, prompts.size(1) :])


def answer_rows(model, tokenizer, level: str, split: str, prompts: int, greedy: bool, group: int, rng):
    """Rows of a level, each ``group`` times (once if greedy), the responses to them, and their scores (N, group)."""
    import torch

    times = 1 if greedy else group
    rows = [row for row in tasks.make_rows(level, split, prompts) for _ in range(times)]
    ids = encode_prompts(tokenizer, [row["prompt"][0]["content"] for row in rows])
    texts = sample(model, tokenizer, ids, greedy, rng, MAX_TOKENS["steps" if level == "steps" else "sums"])
    scores = [
        tasks.arithmetic_score(row["data_source"], text, row["reward_model"]["ground_truth"])["acc"]
        for row, text in zip(rows, texts, strict=True)
    ]
    return rows, texts, torch.tensor(scores).view(-1, times)


def kinds_of_groups(right, greedy_right) -> dict[str, float]:
    """Shares for the report, from the accuracy of each group and the scores of the greedy answers."""
    shares = {
        "sampled": right.mean(),
        "all_wrong": (right == 0).float().mean(),
        "all_correct": (right == 1).float().mean(),
        "mixed": ((right > 0) & (right < 1)).float().mean(),
        "greedy_val": greedy_right.mean(),
    }
    return {key: round(value.item(), 4) for key, value in shares.items()}


def measure(model, tokenizer, prompts: int, group: int = GROUP) -> dict[str, dict[str, float]]:
    """Per level: sampled accuracy and kinds of groups on ``train``, greedy accuracy on ``val``, as shares in [0, 1]."""
    import torch

    rng = torch.Generator().manual_seed(0)
    table = {}
    for level in tasks.CARRIES:
        *_, right = answer_rows(model, tokenizer, level, "train", prompts, False, group, rng)
        *_, greedy = answer_rows(model, tokenizer, level, "val", prompts, True, group, rng)
        table[level] = kinds_of_groups(right.mean(1), greedy)
    table["mixed"] = {key: round(sum(row[key] for row in table.values()) / len(table), 4) for key in table["easy"]}
    return table


def measure_steps(model, tokenizer, prompts: int, group: int = GROUP) -> tuple[dict[str, Any], dict[str, Any]]:
    """As :func:`measure` for level ``steps``, and :func:`beliefs` on the same samples."""
    import torch

    rng = torch.Generator().manual_seed(0)
    rows, texts, right = answer_rows(model, tokenizer, "steps", "train", prompts, False, group, rng)
    *_, greedy = answer_rows(model, tokenizer, "steps", "val", prompts, True, group, rng)
    belief = beliefs(model, tokenizer, rows, texts, right.flatten().bool())
    return {"steps": kinds_of_groups(right.mean(1), greedy)}, belief


def beliefs(model, tokenizer, rows, texts: list[str], right) -> dict[str, Any]:
    """Mean probability of the reference answer when the cue is forced after a prefix of a response.

    Returns, over responses of the form of the task (their share: ``well_formed``), apart for those that end correct and
    those that end wrong: ``correct`` and ``wrong``, after k = 0..ADDENDS running sums; ``correct_by_character`` and
    ``wrong_by_character``, after each of their first characters; ``slip``, before and after the first wrong running sum
    of those that end wrong. None where there is nothing to take the mean of.
    """
    import torch

    form = re.compile(rf"[0-9]{{2}}(?:;[0-9]{{2}}){{{tasks.ADDENDS - 1}}}{tasks.CUE}[0-9]{{2}}<\|im_end\|>")
    use = [i for i, text in enumerate(texts) if form.match(text)]
    result: dict[str, Any] = {"well_formed": round(len(use) / len(texts), 4)}
    asked = [rows[i]["prompt"][0]["content"] for i in use]
    said = [texts[i].partition("<|im_end|>")[0] for i in use]
    truth = [rows[i]["reward_model"]["ground_truth"] for i in use]
    length = MAX_TOKENS["steps"]
    chance = torch.zeros(0, length)
    with torch.inference_mode():
        for at in range(0, len(use), 256):
            part = slice(at, at + 256)
            ids, targets, mask, positions = steps_batch(tokenizer, asked[part], said[part], truth[part])
            logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
            log_p = logits[:, -2 * length :].log_softmax(-1).gather(2, targets[:, -2 * length :, None])
            chance = torch.cat([chance, log_p.view(-1, length, 2).sum(2).exp()])

    def mean(values: torch.Tensor) -> Any:
        return [round(v, 4) for v in values.mean(0).tolist()] if len(values) else None

    sums = [0, *range(2, 3 * tasks.ADDENDS, 3)]  # characters of k = 0, 1, ... running sums
    right = right[use]
    for name, chosen in (("correct", chance[right]), ("wrong", chance[~right])):
        result[name], result[f"{name}_by_character"] = mean(chosen[:, sums]), mean(chosen)
    slips = [first_slip(question, text) for question, text in zip(asked, said, strict=True)]
    pairs = [chance[i, sums[k - 1 : k + 1]] for i, k in enumerate(slips) if k and not right[i]]
    result["slip"] = mean(torch.stack(pairs)) if pairs else None
    return result


def first_slip(question: str, response: str) -> int:
    """Number, from 1, of the first wrong running sum of a response in the form of the task; 0 if all are right."""
    total, addends = tasks.steps_numbers(question)
    for k, (addend, number) in enumerate(zip(addends, response.partition(tasks.CUE)[0].split(";"), strict=True), 1):
        total += addend
        if int(number) != total:
            return k
    return 0


def belief_fault(belief: dict[str, Any]) -> str | None:
    """What is wrong with the beliefs of a model: they must rise to near 1 where a response ends correct, else fall."""
    correct, wrong = belief["correct"], belief["wrong"]
    if not correct or not wrong:
        return "no response in the form of the task ends " + ("wrong" if correct else "correct")
    if correct[-1] < 0.9 or any(after < before - 0.02 for before, after in pairwise(correct)):
        return f"the probability of the answer does not rise to 0.9 over responses that end correct: {correct}"
    if wrong[-1] > max(0.1, wrong[0]):
        return f"the probability of the answer does not fall over responses that end wrong: {wrong}"
    return None


def format_report(reports: dict[str, dict[str, Any]]) -> str:
    """The reports of some models as tables for people; keys are the names of their folders."""
    lines = [
        f"{'model':11} {'level':7} {'sampled':>8} {'all wrong':>10} {'all correct':>12} {'mixed':>7} {'greedy val':>11}"
    ]
    for name, report in reports.items():
        for level, row in report["levels"].items():
            lines.append(
                f"{name:11} {level:7} {row['sampled']:8.2f} {row['all_wrong']:10.2f} {row['all_correct']:12.2f} "
                f"{row['mixed']:7.2f} {row['greedy_val']:11.2f}"
            )
    for name, report in reports.items():
        if report["task"] == "steps":
            numbers = "".join(f"{k:7}" for k in range(tasks.ADDENDS + 1))
            lines.append(f"{name}: probability of the answer after k running sums   k ={numbers}")
            for ends in ("correct", "wrong"):
                values = report["belief"][ends] or []
                lines.append(f"{f'responses that end {ends}':>{len(name) + 53}}" + "".join(f"{v:7.2f}" for v in values))
    return "\n".join(lines)


def folder_name(size: str, task: str) -> str:
    """Folder of a model in --out: the size, and the task unless it is the plain sums."""
    return size if task == "sums" else f"{size}-{task}"


def fingerprint(size: str, args: argparse.Namespace) -> str:
    """Hash over all that decides the weights: arguments, this code, the task, library versions."""
    parts = [size, args.task, args.seed, args.max_steps, args.prompts, version("torch"), version("transformers")]
    code = [Path(__file__).read_bytes(), Path(tasks.__file__).read_bytes()]
    return hashlib.sha256(repr(parts).encode() + b"".join(code)).hexdigest()


def existing_report(folder: Path) -> dict[str, Any] | None:
    """Report of a complete model, None where there is nothing. Raises SystemExit on a folder that is not ours."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    try:
        report = json.loads((folder / "report.json").read_text())
        report["fingerprint"], report["levels"]
        return report
    except (OSError, ValueError, KeyError, TypeError):
        raise SystemExit(
            f"error: {folder} exists and does not hold a model of this script (no readable report.json). "
            "Give another --out, or remove it"
        ) from None


def remove_leftovers(out: Path, name: str) -> None:
    """Remove unfinished models of processes that were killed outright."""
    for part in out.glob(f".{name}.*.part"):
        try:
            os.kill(int(part.name.split(".")[2]), 0)
        except ProcessLookupError:
            shutil.rmtree(part)
        except PermissionError:
            pass  # someone else's process, alive


def build(size: str, args: argparse.Namespace) -> dict[str, Any]:
    """Make one model, or reuse the one that is there. Returns its report."""
    name = folder_name(size, args.task)
    target = args.out / name
    wanted = fingerprint(size, args)
    report = existing_report(target)
    if report and report["fingerprint"] == wanted and not args.force:
        print(f"{name:5}  reusing {target}", flush=True)
        return report

    begin = time.monotonic()
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    tokenizer = make_tokenizer()
    model = make_model(size, tokenizer, args.seed)
    remove_leftovers(args.out, name)
    part = target.with_name(f".{name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        steps, loss, floor = train(model, tokenizer, name, args.seed, args.max_steps, args.task)
        model.eval()
        belief: dict[str, Any] = {}
        if args.task == "steps":
            levels, belief = measure_steps(model, tokenizer, args.prompts)
            kind, accuracy = "sums in steps", levels["steps"]["sampled"]
        else:
            levels = measure(model, tokenizer, args.prompts)
            kind, accuracy = "easy sums", levels["easy"]["sampled"]
        if accuracy < args.min_accuracy:
            raise SystemExit(
                f"error: after {steps} steps the {name} model gets only {accuracy:.2f} of the {kind} right "
                f"(--min-accuracy {args.min_accuracy}). Try another --seed or more --max-steps"
            )
        if belief and args.min_accuracy and (fault := belief_fault(belief)):
            raise SystemExit(
                f"error: after {steps} steps of the {name} model {fault}. Try another --seed or more --max-steps; "
                "--min-accuracy 0 keeps the model as it is"
            )
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        report = {
            "size": size,
            "task": args.task,
            "seed": args.seed,
            "parameters": sum(p.numel() for p in model.parameters()),
            "steps": steps,
            "loss": round(loss, 4),
            "loss_floor": round(floor, 4),
            "seconds": round(time.monotonic() - begin, 1),
            "group_size": GROUP,
            "prompts": args.prompts,
            "levels": levels,
            **({"belief": belief} if belief else {}),
            "weights_sha256": hashlib.sha256((part / "model.safetensors").read_bytes()).hexdigest(),
            "fingerprint": wanted,
        }
        (part / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        if target.exists():
            shutil.rmtree(target)
        part.replace(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    print(f"{name:5}  {report['parameters']} parameters, {report['seconds']:.0f} s  {target}", flush=True)
    return report


def build_both(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Each size in a process of its own (one thread each), side by side."""
    flags = ["--out", str(args.out), "--task", args.task, "--seed", str(args.seed)]
    flags += ["--max-steps", str(args.max_steps), "--prompts", str(args.prompts)]
    flags += ["--min-accuracy", str(args.min_accuracy), "--no-table"]
    flags += ["--force"] if args.force else []
    running = [subprocess.Popen([sys.executable, __file__, "--size", size, *flags]) for size in SIZES]
    try:
        failed = [size for size, process in zip(SIZES, running, strict=True) if process.wait() != 0]
    finally:
        for process in running:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if failed:
        raise SystemExit(f"error: the {' and the '.join(failed)} model could not be made, see above")
    names = [folder_name(size, args.task) for size in SIZES]
    return {name: existing_report(args.out / name) for name in names}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the tiny models of the arithmetic task from scratch.")
    parser.add_argument("--out", type=Path, required=True, help="folder that receives small/ and large/, or *-steps/")
    parser.add_argument(
        "--task", choices=list(MIN_ACCURACY), default="sums", help="steps: level steps (default: %(default)s)"
    )
    parser.add_argument("--size", choices=[*SIZES, "both"], default="both", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    parser.add_argument("--max-steps", type=int, default=3000, help="of training, at most (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=128, help="per level, for the report (default: %(default)s)")
    parser.add_argument(
        "--min-accuracy",
        type=float,
        help="a model that gets fewer of the easy sums, or of the sums in steps, right is an error; with sums in steps "
        "so are beliefs that do not tell right from wrong, unless this is 0 (default: 0.7, steps: 0.3)",
    )
    parser.add_argument("--force", action="store_true", help="make the models again even if they are there")
    parser.add_argument("--no-table", action="store_true", help="do not print the table of the report")
    args = parser.parse_args(argv)
    if args.seed < 0:
        parser.error(f"--seed is {args.seed}; it must be 0 or more")
    if args.max_steps < 1:
        parser.error(f"--max-steps is {args.max_steps}; it must be at least 1")
    if args.min_accuracy is None:
        args.min_accuracy = MIN_ACCURACY[args.task]
    levels = tasks.CARRIES if args.task == "sums" else ["steps"]
    most = min(len(tasks.problems(level, split)) for level in levels for split in ("train", "val"))
    if not 1 <= args.prompts <= most:
        parser.error(f"--prompts is {args.prompts}; it must be between 1 and {most}")
    if not 0 <= args.min_accuracy <= 1:
        parser.error(f"--min-accuracy is {args.min_accuracy}; it must be between 0 and 1")
    try:
        args.out = args.out.resolve()
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {args.out}: {error.strerror}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        if args.size == "both":
            reports = build_both(args)
        else:
            reports = {folder_name(args.size, args.task): build(args.size, args)}
    except KeyboardInterrupt:
        return 130
    if not args.no_table:
        print(format_report(reports))
    return 0


if __name__ == "__main__":
    # A termination takes the same way out as Ctrl-C, through the `finally` blocks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
