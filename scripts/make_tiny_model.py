#!/usr/bin/env python
"""Trains the tiny models of the arithmetic task from scratch, on a CPU, in about a minute.

    python scripts/make_tiny_model.py --out outputs/tiny                 # small/ and large/ in there, side by side
    python scripts/make_tiny_model.py --out outputs/tiny --size large

Both sizes are Qwen2 models in float32 with one byte-level tokenizer. They are supervised on careless sums
(verl_ext.tasks) of the ``sft`` split only. Each folder holds the model, the tokenizer and ``report.json``: for each
level, how many groups of 8 samples at temperature 1 on the ``train`` split are all wrong, all correct and mixed, and
the accuracy of greedy answers on the ``val`` split.

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
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
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
BATCH, LEARNING_RATE, WARM_UP, DECAY = 64, 3e-3, 50, 500
# The learning rate is constant until the loss is this close to the entropy of the careless answers, then it decays.
MARGIN = 0.25  # nats a token
GROUP = 8  # samples a prompt in the report

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


def encode_prompts(tokenizer, pairs: list[tuple[int, int]]):
    """Prompt ids (N, 10) int64; every prompt is equally long."""
    import torch

    head, tail = tokenizer.apply_chat_template(
        [{"role": "user", "content": "{}"}], tokenize=False, add_generation_prompt=True
    ).split("{}")
    texts = [head + tasks.question(a, b) + tail for a, b in pairs]
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
    return encode_prompts(tokenizer, pairs), answers, weights


def train(model, tokenizer, name: str, seed: int, max_steps: int) -> tuple[int, float, float]:
    """Supervised training in place. Returns steps, smoothed loss and its lower bound (nats a token)."""
    import torch
    import torch.nn.functional as F

    prompts, answers, weights = supervised_set(tokenizer)
    tokens = (weights[..., None] * (answers != -100)).sum().item()
    floor = -torch.xlogy(weights, weights).sum().item() / tokens
    rng = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    start, told = time.monotonic(), -math.inf
    smooth, stop = math.log(len(tokenizer)), max_steps
    step = 0
    while step < stop:
        rate = min(1.0, (step + 1) / WARM_UP, (stop - step) / DECAY)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate
        rows = torch.randint(len(prompts), (BATCH,), generator=rng)
        target = answers[rows, torch.multinomial(weights[rows], 1, generator=rng)[:, 0]]
        inputs = torch.cat([prompts[rows], target[:, :-1].clamp(min=0)], dim=1)
        # Right-padded and causal, so no attention mask is needed.
        logits = model(input_ids=inputs, logits_to_keep=target.size(1), use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        smooth += 0.03 * (loss.item() - smooth)
        if smooth < floor + MARGIN:
            stop = min(stop, step + DECAY)
        if time.monotonic() - told > 3 or step == stop:
            told = time.monotonic()
            print(
                f"{name:5}  step {step:5}  loss {smooth:.3f} (at best {floor:.3f})  {told - start:3.0f} s", flush=True
            )
    return step, smooth, floor


def sample(model, tokenizer, prompts, greedy: bool, rng=None, max_tokens: int = 5) -> list[str]:
    """One answer for each prompt, at temperature 1 unless greedy; text up to the end of the turn."""
    import torch

    ids = prompts
    with torch.inference_mode():
        for _ in range(max_tokens):
            logits = model(input_ids=ids, logits_to_keep=1, use_cache=False).logits[:, -1]
            new = logits.argmax(-1, True) if greedy else torch.multinomial(logits.softmax(-1), 1, generator=rng)
            ids = torch.cat([ids, new], dim=1)
    return tokenizer.batch_decode(ids[:, prompts.size(1) :])


def measure(model, tokenizer, prompts: int, group: int = GROUP) -> dict[str, dict[str, float]]:
    """Per level: sampled accuracy and kinds of groups on ``train``, greedy accuracy on ``val``, as shares in [0, 1]."""
    import torch

    rng = torch.Generator().manual_seed(0)

    def score(level: str, split: str, greedy: bool) -> torch.Tensor:
        rows = tasks.make_rows(level, split, prompts)
        pairs = [tuple(map(int, row["prompt"][0]["content"].rstrip("=").split("+"))) for row in rows]
        times = 1 if greedy else group
        ids = encode_prompts(tokenizer, pairs).repeat_interleave(times, dim=0)
        truth = [row["reward_model"]["ground_truth"] for row in rows for _ in range(times)]
        texts = sample(model, tokenizer, ids, greedy, rng)
        scores = [tasks.arithmetic_score(tasks.SOURCE, *pair)["acc"] for pair in zip(texts, truth, strict=True)]
        return torch.tensor(scores).view(-1, times)

    table = {}
    for level in tasks.CARRIES:
        right = score(level, "train", greedy=False).mean(1)
        shares = {
            "sampled": right.mean(),
            "all_wrong": (right == 0).float().mean(),
            "all_correct": (right == 1).float().mean(),
            "mixed": ((right > 0) & (right < 1)).float().mean(),
            "greedy_val": score(level, "val", greedy=True).mean(),
        }
        table[level] = {key: round(value.item(), 4) for key, value in shares.items()}
    table["mixed"] = {key: round(sum(row[key] for row in table.values()) / len(table), 4) for key in table["easy"]}
    return table


def format_report(reports: dict[str, dict[str, Any]]) -> str:
    """The reports of some sizes as one table for people."""
    lines = [
        f"{'model':6} {'level':7} {'sampled':>8} {'all wrong':>10} {'all correct':>12} {'mixed':>7} {'greedy val':>11}"
    ]
    for size, report in reports.items():
        for level, row in report["levels"].items():
            lines.append(
                f"{size:6} {level:7} {row['sampled']:8.2f} {row['all_wrong']:10.2f} {row['all_correct']:12.2f} "
                f"{row['mixed']:7.2f} {row['greedy_val']:11.2f}"
            )
    return "\n".join(lines)


def fingerprint(size: str, args: argparse.Namespace) -> str:
    """Hash over all that decides the weights: arguments, this code, the task, library versions."""
    parts = [size, args.seed, args.max_steps, args.prompts, version("torch"), version("transformers")]
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


def remove_leftovers(out: Path, size: str) -> None:
    """Remove unfinished models of processes that were killed outright."""
    for part in out.glob(f".{size}.*.part"):
        try:
            os.kill(int(part.name.split(".")[2]), 0)
        except ProcessLookupError:
            shutil.rmtree(part)
        except PermissionError:
            pass  # someone else's process, alive


def build(size: str, args: argparse.Namespace) -> dict[str, Any]:
    """Make one model, or reuse the one that is there. Returns its report."""
    target = args.out / size
    wanted = fingerprint(size, args)
    report = existing_report(target)
    if report and report["fingerprint"] == wanted and not args.force:
        print(f"{size:5}  reusing {target}", flush=True)
        return report

    begin = time.monotonic()
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    tokenizer = make_tokenizer()
    model = make_model(size, tokenizer, args.seed)
    remove_leftovers(args.out, size)
    part = target.with_name(f".{size}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        steps, loss, floor = train(model, tokenizer, size, args.seed, args.max_steps)
        model.eval()
        levels = measure(model, tokenizer, args.prompts)
        accuracy = levels["easy"]["sampled"]
        if accuracy < args.min_accuracy:
            raise SystemExit(
                f"error: after {steps} steps the {size} model gets only {accuracy:.2f} of the easy sums right "
                f"(--min-accuracy {args.min_accuracy}). Try another --seed or more --max-steps"
            )
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        report = {
            "size": size,
            "seed": args.seed,
            "parameters": sum(p.numel() for p in model.parameters()),
            "steps": steps,
            "loss": round(loss, 4),
            "loss_floor": round(floor, 4),
            "seconds": round(time.monotonic() - begin, 1),
            "group_size": GROUP,
            "prompts": args.prompts,
            "levels": levels,
            "weights_sha256": hashlib.sha256((part / "model.safetensors").read_bytes()).hexdigest(),
            "fingerprint": wanted,
        }
        (part / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        if target.exists():
            shutil.rmtree(target)
        part.replace(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    print(f"{size:5}  {report['parameters']} parameters, {report['seconds']:.0f} s  {target}", flush=True)
    return report


def build_both(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Each size in a process of its own (one thread each), side by side."""
    flags = ["--out", str(args.out), "--seed", str(args.seed), "--max-steps", str(args.max_steps), "--no-table"]
    flags += ["--prompts", str(args.prompts), "--min-accuracy", str(args.min_accuracy)]
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
    return {size: existing_report(args.out / size) for size in SIZES}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the tiny models of the arithmetic task from scratch.")
    parser.add_argument("--out", type=Path, required=True, help="folder that receives small/ and large/")
    parser.add_argument("--size", choices=[*SIZES, "both"], default="both", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    parser.add_argument("--max-steps", type=int, default=3000, help="of training, at most (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=128, help="per level, for the report (default: %(default)s)")
    parser.add_argument(
        "--min-accuracy",
        type=float,
        default=0.7,
        help="a model that gets fewer of the easy sums right is an error (default: %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="make the models again even if they are there")
    parser.add_argument("--no-table", action="store_true", help="do not print the table of the report")
    args = parser.parse_args(argv)
    if args.seed < 0:
        parser.error(f"--seed is {args.seed}; it must be 0 or more")
    if args.max_steps < 1:
        parser.error(f"--max-steps is {args.max_steps}; it must be at least 1")
    most = min(len(tasks.problems(level, split)) for level in tasks.CARRIES for split in ("train", "val"))
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
        reports = build_both(args) if args.size == "both" else {args.size: build(args.size, args)}
    except KeyboardInterrupt:
        return 130
    if not args.no_table:
        print(format_report(reports))
    return 0


if __name__ == "__main__":
    # A termination takes the same way out as Ctrl-C, through the `finally` blocks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
