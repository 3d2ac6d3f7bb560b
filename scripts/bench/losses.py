"""Every registered policy loss, forward and backward, against verl's `vanilla` on one micro-batch, in one run.

    python scripts/bench/losses.py [--rows 16] [--tokens 1024] [--vocabulary 0] [--repeats 20] [--threads N]

time and memory: ratios to vanilla; fastest of the repeats, alternating; most that is held at once beside the inputs.
With --vocabulary the log-probs come from logits (rows, tokens, vocabulary) by a log-softmax, forward and backward,
which is what a model's head adds to any loss: the ratios are then those of head and loss together. Aim: within 1.05 in
time and 1.1 in memory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from timing import alternate, machine, peak_memory, table

SCALARS = {"p": 1.0}
CASES = [  # (label, loss, settings of algorithm.<name> or of the loss's own class, share of mastered rows)
    ("vanilla", "vanilla", {}, 0.0),
    ("gspo", "gspo", {}, 0.0),
    ("mcpo, no row mastered", "mcpo", {}, 0.0),
    ("mcpo, 25 % mastered", "mcpo", {}, 0.25),
    ("mcpo, all mastered", "mcpo", {}, 1.0),
    ("holderpo, sequence", "holderpo", {}, 0.0),
    ("holderpo, token", "holderpo", {"clip_level": "token"}, 0.0),
    ("holderpo, clamped", "holderpo", {"clip_level": "clamped"}, 0.0),
]


def call(loss: str, settings: dict, mastered: float, rows: int, tokens: int, vocabulary: int):
    """A function that computes the loss of one micro-batch as verl's actor loss does, and its gradient."""
    from hydra.utils import get_class
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig, PolicyLossConfig

    from verl_ext import losses
    from verl_ext.registry import METHODS

    method = METHODS.get(loss)
    own = get_class(method.loss_config) if method and method.loss_config else PolicyLossConfig
    config = ActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=rows,
        loss_agg_mode="seq-mean-token-mean",
        policy_loss=own(loss_mode=loss, **(settings if own is not PolicyLossConfig else {})),
    )
    rng = torch.Generator().manual_seed(0)
    lengths = torch.randint(tokens // 2, tokens + 1, (rows,), generator=rng)
    mask = torch.arange(tokens) < lengths[:, None]
    old = -torch.rand(rows, tokens, generator=rng)
    new = (old + 0.1 * torch.randn(rows, tokens, generator=rng)).requires_grad_()
    advantages = torch.randn(rows, 1, generator=rng) * mask
    config.global_batch_info.update(
        dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=rows, loss_scale_factor=None
    )
    flags = (torch.arange(rows) < mastered * rows).float()
    inputs = losses.LossInputs(
        {"mastered": flags}, SCALARS, {"mastered": float(flags.sum())}, method and method.config({}), []
    )
    if vocabulary:
        logits = torch.randn(rows, tokens, vocabulary, generator=rng).requires_grad_()
        ids = torch.randint(0, vocabulary, (rows, tokens, 1), generator=rng)
    function = get_policy_loss_fn(loss)

    def run():
        inputs.recorded.clear()
        token = losses._INPUTS.set(inputs)
        try:
            log_prob = new
            if vocabulary:
                log_prob = logits.log_softmax(-1).gather(-1, ids).squeeze(-1)
            value, _ = function(
                old_log_prob=old,
                log_prob=log_prob,
                advantages=advantages,
                response_mask=mask,
                loss_agg_mode="seq-mean-token-mean",
                config=config,
                rollout_is_weights=None,
            )
            leaf = logits if vocabulary else new
            leaf.grad = None
            value.backward()
            if inputs.recorded:
                torch.stack([v for _, _, v in inputs.recorded]).tolist()
        finally:
            losses._INPUTS.reset(token)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("rows", 16), ("tokens", 1024), ("vocabulary", 0), ("repeats", 20), ("threads", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    import verl  # noqa: F401  loads the plug-in

    functions = {
        label: call(loss, settings, share, args.rows, args.tokens, args.vocabulary)
        for label, loss, settings, share in CASES
    }
    times = alternate(functions, args.repeats)
    memory = {label: peak_memory(function) for label, function in functions.items()}
    print(f"{args.rows} rows x {args.tokens} tokens, vocabulary {args.vocabulary or 'none'}; {machine()}")
    print(f"vanilla {times['vanilla'] * 1e3:.2f} ms, {memory['vanilla'] / 2**20:.1f} MB")
    ratio = lambda found, label: f"{found[label] / found['vanilla']:.2f}"  # noqa: E731
    print(table(["loss", "time", "memory"], [[label, ratio(times, label), ratio(memory, label)] for label in times]))


if __name__ == "__main__":
    main()
