"""Belief probes: how likely is an answer, after any prefix of a response, under a policy?

At each cut point of a response a probe is `prefix + before + scored`: `before` is a cue such as "Therefore, the final
answer is ", `scored` the ids of the answer. One forward pass without gradient gives the log-probs of `scored`. Source:
arXiv 2604.20659, spec grpo_vps section 3 (3) and section 4 ("probe_layout"); nothing here knows of one method.

    probes = make_probes(prompts, responses, ends, before, scored, layout="packed", ranks=2)
    output = compute_log_prob(probes.data(max_tokens=16384))        # verl's worker group, or one worker
    beliefs = probes.beliefs(output["log_probs"], "joint")          # one number for each probe

Two layouts with the same result. `batched`: one row for each probe. `packed`: one row for each response, prompt +
prefix followed by a copy of `before + scored` for each cut; a copy sees its own prefix and itself only, and its
positions go on from there. A copy begins with the last token of its prefix once more, so that whatever comes first
after the prefix is predicted inside the copy.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from verl_ext.registry import DataError

LAYOUTS = ("packed", "batched")
KINDS = ("joint", "geo_mean", "mean_prob")
# What the worker looks for; see `packed_attention_mask`.
COPY, SEES = "probe_copy", "probe_sees"


@dataclass(frozen=True)
class Probes:
    """Rows of one forward pass and where the scored tokens of each probe lie in them.

    ids, positions: for each row (L,) int64. copies, sees: the same for the packed layout, else empty; a token sees the
    first `sees` tokens of its row and the tokens before it that have its copy number. row, start, length: (P,) int64,
    one for each probe, in the order of the responses and of their cuts. counts: (B,) probes of each response. ranks:
    data-parallel size.
    """

    ids: list[torch.Tensor]
    positions: list[torch.Tensor]
    copies: list[torch.Tensor]
    sees: list[torch.Tensor]
    row: torch.Tensor
    start: torch.Tensor
    length: torch.Tensor
    counts: torch.Tensor
    ranks: int = 1

    @property
    def tokens(self) -> int:
        return sum(len(row) for row in self.ids)

    def data(self, max_tokens: int = 0, temperature: float = 1.0) -> TensorDict:
        """The batch that verl's `compute_log_prob` takes.

        Args:
            max_tokens: of a micro-batch on one rank; a longer row gets one of its own.
            temperature: that the log-probs are taken at.
        """
        from verl.utils import tensordict_utils as tu

        jagged = lambda rows: torch.nested.as_nested_tensor([rows[i] for i in self.sent], layout=torch.jagged)  # noqa: E731
        ids = jagged(self.ids)
        ones = torch.nested.nested_tensor_from_jagged(torch.ones_like(ids.values()), ids.offsets())
        tensors = {"input_ids": ids, "position_ids": jagged(self.positions), "loss_mask": ones}
        settings = {"compute_loss": False, "calculate_entropy": False, "temperature": temperature}
        settings |= {"use_dynamic_bsz": True, "max_token_len_per_gpu": max(max_tokens, *map(len, self.ids))}
        if self.copies:
            tensors |= {COPY: jagged(self.copies), SEES: jagged(self.sees)}
            settings["use_remove_padding"] = False  # the mask below is for padded rows
        return tu.get_tensordict(tensors, settings)

    @cached_property
    def sent(self) -> list[int]:
        """Row numbers as they are sent: as many and about as many tokens for each rank, the first row again to fill."""
        rows = list(range(len(self.ids))) + [0] * (-len(self.ids) % self.ranks)
        if self.ranks == 1:
            return rows
        from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

        parts = get_seqlen_balanced_partitions([len(self.ids[i]) for i in rows], self.ranks, equal_size=True)
        return [rows[i] for part in parts for i in part]

    def log_probs(self, log_probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the scored tokens: log-probs (N,) float64 one probe after the other, and each token's probe (N,) int64.

        log_probs: jagged (rows, L), as `compute_log_prob` returns them: at a token that of the next one. Of a
        repeated row one is read.
        """
        place = torch.empty(len(self.ids), dtype=torch.long)
        place[torch.tensor(self.sent)] = torch.arange(len(self.sent))
        first = log_probs.offsets()[place[self.row]] + self.start - 1
        probe = torch.repeat_interleave(torch.arange(len(self.length)), self.length)
        within = torch.arange(len(probe)) - (self.length.cumsum(0) - self.length)[probe]
        return log_probs.values()[first[probe] + within].double(), probe

    def beliefs(self, log_probs: torch.Tensor, kind: str = "joint") -> torch.Tensor:
        """(P,) float64 in [0, 1]: the probability of each probe's scored tokens. Spec grpo_vps, section 4, `prob`.

        joint: exp(sum log p), equation (3) to the letter. geo_mean: exp(mean log p). mean_prob: mean p.

        Raises:
            ValueError: an unknown kind, or a log-prob that is not finite.
        """
        if kind not in KINDS:
            raise ValueError(f"prob={kind!r} is not one of {', '.join(KINDS)}")
        values, probe = self.log_probs(log_probs)
        if not bool(torch.isfinite(values).all()):
            bad = int(probe[~torch.isfinite(values)][0])
            raise ValueError(f"the log-probs of probe {bad} (row {int(self.row[bad])}) are not finite")
        zeros = torch.zeros(len(self.length), dtype=torch.float64)
        if kind == "mean_prob":
            return zeros.index_add(0, probe, values.exp()) / self.length
        total = zeros.index_add(0, probe, values)
        return (total if kind == "joint" else total / self.length).clamp(max=0).exp()

    def by_response(self, values: torch.Tensor) -> torch.Tensor:
        """(P,) -> (B, most probes of a response); what a response does not have is its last value again."""
        ends = self.counts.cumsum(0)
        slot = torch.arange(int(self.counts.max())).expand(len(self.counts), -1)
        return values[(ends - self.counts)[:, None] + torch.minimum(slot, self.counts[:, None] - 1)]


def make_probes(
    prompts: Sequence[torch.Tensor],
    responses: Sequence[torch.Tensor],
    ends: Sequence[Sequence[int]],
    before: torch.Tensor,
    scored: Sequence[torch.Tensor],
    layout: str = "packed",
    ranks: int = 1,
) -> Probes:
    """The rows that ask for `scored[i]` after `prompts[i] + responses[i][:end] + before`, for each end of `ends[i]`.

    Args:
        prompts, responses: B sequences of ids (int64, any lengths; a prompt has at least one token).
        ends: for each response the lengths of its prefixes, ascending; 0 asks before the response.
        before: (N,) ids of the cue, may be empty.
        scored: for each response the ids of the answer, at least one.
        ranks: data-parallel size of the workers that are asked.

    Raises:
        ValueError: naming the response and what is wrong with it.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"probe_layout={layout!r} is not one of {', '.join(LAYOUTS)}")
    if not len(prompts):
        raise ValueError("there is no response to probe")
    ids, positions, copies, sees, spans = [], [], [], [], []
    for i, (prompt, response, cuts, answer) in enumerate(zip(prompts, responses, ends, scored, strict=True)):
        cuts = [int(cut) for cut in cuts]
        if not len(prompt) or not len(answer) or not cuts:
            raise ValueError(f"response {i}: prompt, answer and cuts must not be empty")
        if cuts != sorted(cuts) or not 0 <= cuts[0] <= cuts[-1] <= len(response):
            raise ValueError(f"response {i}: cuts {cuts} must ascend within [0, {len(response)}]")
        tail = torch.cat([before, answer])
        if layout == "batched":
            for cut in cuts:
                spans.append((len(ids), len(prompt) + cut + len(before), len(answer)))
                ids.append(torch.cat([prompt, response[:cut], tail]))
                positions.append(torch.arange(len(ids[-1])))
            continue
        prefix = torch.cat([prompt, response[: cuts[-1]]])
        n, width = len(prefix), 1 + len(tail)
        last = torch.tensor([len(prompt) + cut - 1 for cut in cuts])  # of each prefix
        step = torch.arange(width)
        spans += [(len(ids), n + k * width + 1 + len(before), len(answer)) for k in range(len(cuts))]
        ids.append(torch.cat([prefix, *(part for at in last for part in (prefix[at : at + 1], tail))]))
        positions.append(torch.cat([torch.arange(n), (last[:, None] + step).flatten()]))
        copies.append(
            torch.cat([torch.zeros(n, dtype=torch.long), torch.arange(1, len(cuts) + 1).repeat_interleave(width)])
        )
        sees.append(torch.cat([torch.zeros(n, dtype=torch.long), last.repeat_interleave(width)]))
    row, start, length = torch.tensor(spans).T
    counts = torch.tensor([len(cuts) for cuts in ends])
    return Probes(ids, positions, copies, sees, row, start, length, counts, ranks)


def packed_attention_mask(copies: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
    """(rows, 1, L, L) bool, True where a token of a packed row may look; copies, sees: jagged (rows, L).

    A padding token looks at itself, so that its softmax is finite.
    """
    copy, seen = copies.to_padded_tensor(-1), sees.to_padded_tensor(0)
    place = torch.arange(copy.shape[1], device=copy.device)
    causal = place[:, None] >= place
    own = (copy[:, :, None] == copy[:, None, :]) & causal
    prefix = (copy[:, None, :] == 0) & (place < seen[:, :, None])
    padding = (copy < 0)[:, :, None] & (place[:, None] == place)
    return (torch.where((copy < 0)[:, :, None], padding, own | prefix))[:, None]


# -- at the advantage stage of a training run --------------------------------------------------------------------------


@dataclass
class ActorProbe:
    """What a method's `probe` gets from our trainer modes: the batch as ids, and the actor to ask.

    forward: verl's `compute_log_prob` of the actor's worker group. prompts, responses: B sequences of ids, tool tokens
    included. references: B values of `reward_model.ground_truth`. uid: (B,). ranks: data-parallel size. max_tokens: of
    a micro-batch. packed_refusal: why the packed layout cannot be used here, or None.
    """

    forward: Callable[[TensorDict], TensorDict]
    prompts: Sequence[torch.Tensor]
    responses: Sequence[torch.Tensor]
    references: Sequence
    uid: np.ndarray
    tokenizer: Any
    ranks: int = 1
    max_tokens: int = 0
    temperature: float = 1.0
    packed_refusal: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def ids(self, text: str) -> torch.Tensor:
        return torch.tensor(self.tokenizer.encode(text, add_special_tokens=False), dtype=torch.long)

    def answer(self, row: int) -> str:
        """The reference of a row as a response would write it (`rewards.canonical_answer`).

        Raises:
            DataError: there is none; names the row.
        """
        from verl_ext.rewards import canonical_answer  # not at every start of verl: it keeps worker processes

        try:
            return canonical_answer(self.references[row])
        except (TypeError, ValueError) as error:
            raise DataError(
                f"row {row} (uid {self.uid[row]}) has no answer to ask for: {error}. Give every row of the training"
                " data a short reward_model.ground_truth."
            ) from None

    def stripped_length(self, row: int) -> int:
        """Length of the response without the special tokens (end of turn, padding) at its end."""
        special, ids = set(self.tokenizer.all_special_ids), self.responses[row].tolist()
        while ids and ids[-1] in special:
            ids.pop()
        return len(ids)

    def beliefs(
        self,
        rows: Sequence[int],
        ends: Sequence[Sequence[int]],
        before: str,
        answers: Sequence[str],
        kind: str = "joint",
        layout: str = "packed",
    ) -> torch.Tensor:
        """(len(rows), most cuts) float64: the probability of `answers[i]` after `before` at each cut of response
        `rows[i]`; what a response does not have is its last value again. One forward pass, without gradient.

        `before` and the answers are encoded apart, so that the ids of an answer are exactly its span. Adds
        `probe_seconds` and `probe_tokens` to `metrics`.
        """
        if layout == "packed" and self.packed_refusal:
            _say_once(f"verl_ext: probe_layout=packed is not possible, batched is used: {self.packed_refusal}")
            layout = "batched"
        began = time.perf_counter()
        probes = make_probes(
            [self.prompts[row] for row in rows],
            [self.responses[row] for row in rows],
            ends,
            self.ids(before),
            [self.ids(answer) for answer in answers],
            layout,
            self.ranks,
        )
        output = self.forward(probes.data(self.max_tokens, self.temperature))
        beliefs = probes.beliefs(output["log_probs"], kind)
        for name, value in (("seconds", time.perf_counter() - began), ("tokens", probes.tokens)):
            self.metrics[f"probe_{name}"] = self.metrics.get(f"probe_{name}", 0.0) + value
        return probes.by_response(beliefs)


@dataclass
class Probed:
    """What a method's `probe` returns.

    fields: of registry.PROBED_FIELDS. metrics: logged as they are. segments: makes what people look at, one
    `Segments` for each row that was probed.
    """

    fields: dict[str, torch.Tensor]
    metrics: dict[str, float]
    segments: Callable[[], list[Segments]]


@dataclass(frozen=True)
class Segments:
    """A response cut into segments, for the dump and `python -m verl_ext probe`.

    texts: of the M segments. starts: their first tokens. beliefs: M + 1, the first one before the response. gains: M,
    what each segment is credited with, before its weight.
    """

    row: int
    uid: str
    prompt: str
    answer: str
    score: float
    texts: list[str]
    starts: list[int]
    beliefs: list[float]
    gains: list[float]


def packed_refusal(actor) -> str | None:
    """Why the engine of this actor configuration cannot take packed rows, or None."""
    if actor.strategy not in ("fsdp", "fsdp2"):
        return f"actor.strategy={actor.strategy} takes no attention mask from outside"
    if ulysses(actor) > 1:
        return f"actor.fsdp_config.ulysses_sequence_parallel_size={ulysses(actor)} splits a row over ranks"
    return None


def ulysses(actor) -> int:
    """Ranks that share a row under FSDP: verl's key and the deprecated one, which wins when it is set."""
    sizes = (
        actor.get("ulysses_sequence_parallel_size", 1),
        actor.get("fsdp_config", {}).get("ulysses_sequence_parallel_size", 1),
    )
    return max(size or 1 for size in sizes)


def dump(folder: str, step: int, segments: Sequence[Segments], advantages: torch.Tensor) -> Path:
    """Write `<folder>/probe/<step>.jsonl`, one response a line; advantages: (B, T), of the whole batch."""
    path = Path(folder) / "probe" / f"{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    with open(scratch, "w") as file:
        for entry in segments:
            row = {"step": step} | asdict(entry)
            row["advantages"] = [float(advantages[entry.row, start]) for start in entry.starts]
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    scratch.replace(path)
    return path


@cache
def _say_once(message: str) -> None:
    print(message, flush=True)
