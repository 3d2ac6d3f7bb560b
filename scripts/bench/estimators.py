"""Every registered estimator against verl's `grpo_vectorized`, as verl calls them, in one run.

    python scripts/bench/estimators.py [--rows 16384] [--tokens 1024] [--group 8] [--repeats 5] [--threads N]

time: ratio to grpo_vectorized, fastest of the repeats, alternating. passes: time over that of one pass over the data,
an elementwise read and write of a (rows, tokens) float32 tensor. memory: most that is held at once beside the inputs,
in such tensors; the result is one of them. Aims: outcome-only estimators no slower than grpo_vectorized; token-level
ones within three passes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from timing import alternate, machine, peak_memory, table


def batch(rows: int, tokens: int, group: int) -> dict:
    rng = torch.Generator().manual_seed(0)
    lengths = torch.randint(tokens // 4, tokens + 1, (rows,), generator=rng)
    mask = (torch.arange(tokens) < lengths[:, None]).long()
    rewards = torch.randint(0, 2, (rows,), generator=rng).float()
    rewards[: rows // 4] = 1  # a quarter of the groups is collapsed
    scores = torch.zeros(rows, tokens)
    scores[torch.arange(rows), lengths - 1] = rewards
    noise = lambda: torch.rand(rows, tokens, generator=rng) * mask  # noqa: E731
    fields = {"acc": rewards, "entropy": noise(), "old_log_probs": -noise(), "ref_log_prob": -noise()}
    order = torch.randperm(rows, generator=rng)  # verl reorders rows by length
    uid = np.array([f"uid-{row // group:08d}" for row in range(rows)], dtype=object)[order.numpy()]
    fields = {name: value[order] for name, value in fields.items()}
    return {"scores": scores[order], "mask": mask[order], "uid": uid, "fields": fields}


def calls(data: dict) -> dict:
    import verl  # noqa: F401  loads the plug-in
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    from verl_ext.registry import METHODS, AdvantageContext, advantage_context

    def verl_own(name):
        estimator = get_adv_estimator_fn(name)
        return lambda: estimator(
            token_level_rewards=data["scores"], response_mask=data["mask"], index=data["uid"], config={}
        )

    def ours(method):
        fields = {name: data["fields"][name] for name in method.needs}

        def call():
            context = AdvantageContext(method, method.config({}), {}, fields, step=1)
            with advantage_context(context):
                return verl_own(method.name)()

        return call

    methods = {name: ours(method) for name, method in METHODS.items() if method.estimator}
    return {"grpo_vectorized": verl_own("grpo_vectorized"), "grpo": verl_own("grpo"), **methods}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("rows", 16384), ("tokens", 1024), ("group", 8), ("repeats", 5), ("threads", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    data = batch(args.rows, args.tokens, args.group)
    source, target = data["fields"]["entropy"], torch.empty(args.rows, args.tokens)
    functions = calls(data)
    times = alternate({"pass": lambda: torch.mul(source, 2.0, out=target), **functions}, args.repeats)
    unit = source.numel() * 4
    from verl_ext.registry import METHODS

    rows = []
    for name, function in functions.items():
        kind = "verl" if name not in METHODS else "token-level" if METHODS[name].token_level else "outcome-only"
        rows.append(
            [
                name,
                kind,
                f"{times[name] / times['grpo_vectorized']:.2f}",
                f"{times[name] / times['pass']:.1f}",
                f"{peak_memory(function) / unit:.2f}",
            ]
        )
    print(f"{args.rows} rows x {args.tokens} tokens, groups of {args.group}; {machine()}")
    print(f"one pass {times['pass'] * 1e3:.0f} ms, grpo_vectorized {times['grpo_vectorized'] * 1e3:.0f} ms")
    print(table(["estimator", "kind", "time", "passes", "memory"], rows))


if __name__ == "__main__":
    main()
