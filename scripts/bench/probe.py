"""What belief probes cost: `batched` and `packed` against the old-log-prob pass in one run, by verl's FSDP2 engine.

    python scripts/bench/probe.py [--responses 16] [--tokens 600] [--prompt 100] [--segments 6] [--suffix 11]
                                  [--answer 3] [--hidden 256] [--layers 4] [--vocabulary 8192] [--repeats 5]

A randomly initialised Qwen2 on one CPU rank. The old-log-prob pass also takes the entropies, as verl's trainer asks.
time: fastest of the repeats, alternating, rows built and beliefs read included. Aim: packed within 1.25 times the
old-log-prob pass at 6 segments and responses of 600 tokens.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def worker(args, folder: str):
    import torch
    from hydra import compose, initialize_config_dir
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import TrainingWorkerConfig

    import recipes
    from verl_ext.worker import RecipeTrainingWorker

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from make_tiny_model import make_tokenizer

    torch.manual_seed(0)
    heads = max(2, args.hidden // 64)
    shape = dict(hidden_size=args.hidden, intermediate_size=4 * args.hidden, num_hidden_layers=args.layers)
    model = Qwen2ForCausalLM(
        Qwen2Config(**shape, num_attention_heads=heads, num_key_value_heads=2, vocab_size=args.vocabulary)
    )
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    with initialize_config_dir(str(recipes.ROOT / "grpo" / "config"), version_base=None):
        config = compose("grpo", overrides=["+scale=cpu", f"actor_rollout_ref.model.path={folder}"]).actor_rollout_ref
    actor = omega_conf_to_dataclass(config.actor)
    actor.engine.infer_max_token_len_per_gpu = args.max_tokens
    made = RecipeTrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=omega_conf_to_dataclass(config.model),
            engine_config=actor.engine,
            optimizer_config=actor.optim,
            checkpoint_config=actor.checkpoint,
        )
    )
    made.reset()
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"responses": 16, "tokens": 600, "prompt": 100, "segments": 6, "suffix": 11, "answer": 3, "hidden": 256}
    sizes |= {"layers": 4, "vocabulary": 8192, "repeats": 5, "max-tokens": 4096}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()

    from verl_ext.cpu import environment

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    wanted = environment() | one
    if any(os.environ.get(key) != value for key, value in wanted.items()):  # set before Python imports torch
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted, "MASTER_PORT": str(port)})

    import torch
    from tensordict import TensorDict
    from timing import alternate, machine, table
    from verl.utils import tensordict_utils as tu

    from verl_ext.probe import make_probes

    with tempfile.TemporaryDirectory() as folder:
        actor = worker(args, folder)
    rng = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(0, 250, (n,), generator=rng)  # noqa: E731
    n = args.responses
    prompts, responses = [draw(args.prompt) for _ in range(n)], [draw(args.tokens) for _ in range(n)]
    ends = [[round(k * args.tokens / args.segments) for k in range(args.segments + 1)] for _ in range(n)]
    asked = (prompts, responses, ends, draw(args.suffix), [draw(args.answer) for _ in range(n)])

    def old_log_prob():
        jagged = lambda rows: torch.nested.as_nested_tensor(rows, layout=torch.jagged)  # noqa: E731
        ids = jagged([torch.cat(pair) for pair in zip(prompts, responses, strict=True)])
        positions, ones = jagged([torch.arange(args.prompt + args.tokens)] * n), torch.ones_like(ids.values())
        mask = torch.nested.nested_tensor_from_jagged(ones, ids.offsets())
        data = TensorDict({"input_ids": ids, "position_ids": positions, "loss_mask": mask}, batch_size=n)
        tu.assign_non_tensor(data, compute_loss=False, calculate_entropy=True, temperature=1.0)
        return actor.infer_batch(data)

    def probe(layout: str):
        def run():
            probes = make_probes(*asked, layout)
            return probes.beliefs(actor.infer_batch(probes.data(args.max_tokens))["log_probs"])

        return run

    functions = {"old log-probs": old_log_prob, "batched": probe("batched"), "packed": probe("packed")}
    gap = float((functions["batched"]() / functions["packed"]() - 1).abs().max())
    times = alternate(functions, args.repeats)
    tokens = {layout: make_probes(*asked, layout).tokens for layout in ("batched", "packed")}
    tokens["old log-probs"] = n * (args.prompt + args.tokens)
    print(
        f"{n} responses of {args.prompt} + {args.tokens} tokens, {args.segments} segments, suffix {args.suffix}, answer"
        f" {args.answer}; hidden {args.hidden}, {args.layers} layers, vocabulary {args.vocabulary}; {machine()}"
    )
    print(f"old log-probs and entropies {times['old log-probs']:.2f} s; packed and batched differ by {gap:.1e} at most")
    ratio = lambda found, name: f"{found[name] / found['old log-probs']:.2f}"  # noqa: E731
    print(table(["pass", "time", "tokens"], [[name, ratio(times, name), ratio(tokens, name)] for name in times]))


if __name__ == "__main__":
    main()
