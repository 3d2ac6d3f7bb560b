"""GRPO-VPS: process supervision from the model's own belief in the answer (arXiv 2604.20659, specs grpo_vps; equation
numbers are the spec's).

How it differs from GRPO: each response is cut into segments at high-entropy tokens; at every cut the actor is asked how
likely the reference answer is (`probe`, verl_ext/probe.py), and the tokens of a segment get the mean-centred outcome
reward plus alpha times the rise of that belief over the segment. The loss is verl's own.

It assumes a known, short answer per prompt (`reward_model.ground_truth`), written as the model would write it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch

from verl_ext.acr import TOL, binary_accuracy
from verl_ext.entropy import quantile, segments
from verl_ext.outcomes import grpo
from verl_ext.probe import KINDS, LAYOUTS, ActorProbe, Probed, Segments
from verl_ext.registry import (
    AdvantageInputs,
    AdvantageOutput,
    ConfigError,
    Method,
    MethodConfig,
    Text,
    refuse_rollout_log_probs,
)

UNDERFLOW = 1e-6  # a belief below it is no signal, spec section 11


@dataclass(frozen=True)
class GRPOVPSConfig(MethodConfig):
    """Switches of `algorithm.grpo_vps` (spec section 4); the defaults are the spec's."""

    prefix: ClassVar[str] = "algorithm.grpo_vps"

    alpha: float = 1.2
    n: int = 4
    percentile: float = 97.0
    max_segments: int = 8
    cut_rule: str = "response"
    max_prob: float = 0.9
    probe_suffix: Text = "\n\nTherefore, the final answer is \\boxed{"
    probe_close: Text = "}"
    score_close: bool = False
    prob: str = "joint"
    probe_layout: str = "batched"
    answer_tokens: str = "segment"
    answer_cue: Text = "\\boxed{"
    with_filter: str = "refuse"
    tol: float = TOL

    def __post_init__(self):
        self.number("alpha", 0, math.inf, high_open=True)
        self.whole("n", 1)
        self.number("percentile", 0, 100)
        self.whole("max_segments", 1)
        self.choice("cut_rule", "response", "group", "batch", "prob")
        self.number("max_prob", 0, 1, low_open=True)
        self.flag("score_close")
        self.choice("prob", *KINDS)
        self.choice("probe_layout", *LAYOUTS)
        self.choice("answer_tokens", "segment", "outcome")
        self.choice("with_filter", "refuse", "allow")
        self.number("tol", 0, math.inf, high_open=True)
        for key in ("probe_suffix", "probe_close", "answer_cue"):
            self.text(key)
        if self.score_close and not self.probe_close:
            raise ConfigError(f"{self.prefix}.score_close=true, but {self.prefix}.probe_close is empty")
        if self.answer_tokens == "outcome" and not self.answer_cue:
            raise ConfigError(
                f"{self.prefix}.answer_tokens=outcome needs {self.prefix}.answer_cue, the text that an answer follows"
            )


def cut_points(
    entropy: torch.Tensor, old_log_probs: torch.Tensor, text: torch.Tensor, group: torch.Tensor, config: GRPOVPSConfig
) -> torch.Tensor:
    """(B, T) bool: U of (1), the tokens where a response may be cut.

    Args:
        entropy, old_log_probs: (B, T). text: (B, T) 1 on the tokens that count. group: (B,) int64.
    """
    if config.cut_rule == "prob":
        return (old_log_probs < math.log(config.max_prob)) & (text > 0)
    q = config.percentile / 100
    if config.cut_rule == "response":
        threshold = quantile(entropy, text, q)
    else:
        scope = group if config.cut_rule == "group" else torch.zeros_like(group)
        threshold = torch.full_like(entropy[:, :1], math.inf)
        for number in scope.unique():
            rows = scope == number
            threshold[rows] = quantile(entropy[rows].view(1, -1), text[rows].view(1, -1), q)
    return (entropy >= threshold) & (text > 0)


def boundaries(segment: torch.Tensor, number: torch.Tensor, length: torch.Tensor) -> list[list[int]]:
    """Prefix lengths at which each response is probed, (2) and (3): before it, at each later segment's first token, and
    at its end. segment: (R, T) int64 from 0, number: (R,) segments, length: (R,) tokens."""
    later = torch.arange(1, int(number.max())).expand(len(segment), -1).contiguous()
    first, counts, lengths = torch.searchsorted(segment, later).tolist(), number.tolist(), length.tolist()
    return [[0, *starts[: m - 1], end] for starts, m, end in zip(first, counts, lengths, strict=True)]


def probe(inputs: AdvantageInputs, config: GRPOVPSConfig, actor: ActorProbe) -> Probed:
    """(1) to (4): cut the responses, ask for the answer at each cut, credit each segment with the rise of the belief.

    Once per rollout batch, with the weights that made the old log-probs. Padding rows, rows that are not their
    session's last output and groups of one are not probed; their gain is 0.
    """
    groups, mask = inputs.groups, inputs.response_mask
    gain = torch.zeros(mask.shape)
    rows = (groups.counted & groups.comparable[groups.index]).nonzero()[:, 0]
    if not len(rows):
        return Probed({"belief_gain": gain}, {}, list)

    length = torch.tensor([_text_length(actor, int(row), config) for row in rows])
    text = mask[rows] * (torch.arange(mask.shape[1]) < length[:, None])
    entropy, old = inputs.fields["entropy"][rows], inputs.fields["old_log_probs"][rows]
    cut = cut_points(entropy, old, text, groups.index[rows], config)
    segment, number = segments(cut, config.n, config.max_segments)
    ends = boundaries(segment, number, length)

    answers = [actor.answer(int(row)) for row in rows]
    asked = [answer + config.probe_close for answer in answers] if config.score_close else answers
    belief = actor.beliefs(rows.tolist(), ends, config.probe_suffix, asked, config.prob, config.probe_layout)
    rise = belief.diff(dim=-1)  # dC of (4); 0 beyond a response's last segment
    spread = rise.gather(1, segment)
    if config.answer_tokens == "outcome":
        spread = spread * text
    gain[rows] = spread.float() * mask[rows]

    def for_people() -> list[Segments]:
        decode, scores = actor.tokenizer.decode, inputs.rewards.tolist()
        table = zip(rows.tolist(), answers, ends, belief.tolist(), strict=True)
        return [
            Segments(
                row=row,
                uid=str(actor.uid[row]),
                prompt=decode(actor.prompts[row], skip_special_tokens=True),
                answer=answer,
                score=scores[row],
                texts=[decode(actor.responses[row][a:b]) for a, b in pairwise(cuts)],
                starts=cuts[:-1],
                beliefs=beliefs[: len(cuts)],
                gains=[after - before for before, after in pairwise(beliefs[: len(cuts)])],
            )
            for row, answer, cuts, beliefs in table
        ]

    acc = inputs.fields.get("acc")
    acc = binary_accuracy(inputs.rewards, groups.counted) if acc is None else acc.bool()
    metrics = _metrics(belief, rise, number, cut, None if acc is None else acc[rows])
    metrics |= {f"vps/{name}": value for name, value in actor.metrics.items()}
    return Probed({"belief_gain": gain}, metrics, for_people)


def _text_length(actor: ActorProbe, row: int, config: GRPOVPSConfig) -> int:
    """Tokens of a response that are cut into segments: without the end of turn, and up to the last cue if the answer's
    tokens are to get the outcome's advantage alone."""
    length = actor.stripped_length(row)
    if config.answer_tokens == "segment":
        return length
    ids, decode = actor.responses[row], actor.tokenizer.decode
    start = decode(ids[:length]).rfind(config.answer_cue)
    if start < 0:
        return length
    low, high = 0, length  # the longest prefix that ends before the cue
    while low < high:
        middle = (low + high + 1) // 2
        if len(decode(ids[:middle])) <= start:
            low = middle
        else:
            high = middle - 1
    return low


def _metrics(belief, rise, number, cut, acc) -> dict[str, float]:
    """Spec section 11. belief: (R, K), rise: (R, K - 1), number: (R,), cut: (R, T), acc: (R,) bool or None."""
    metrics = {
        "vps/segments_mean": float(number.double().mean()),
        "vps/segments_max": float(number.max()),
        "vps/cutpoints_mean": float(cut.sum(-1).double().mean()),
        "vps/c0": float(belief[:, 0].mean()),
        "vps/c1": float(belief[:, 1].mean()),
    }
    real = torch.arange(belief.shape[1]) <= number[:, None]
    metrics["vps/prob_underflow_frac"] = float((belief[real] < UNDERFLOW).double().mean())
    if acc is not None:
        for name, rows in (("correct", acc), ("wrong", ~acc)):
            if bool(rows.any()):
                metrics[f"vps/cM_{name}"] = float(belief[rows, -1].mean())
                metrics[f"vps/dc_pos_frac_{name}"] = float((rise[rows][real[rows, 1:]] > 0).double().mean())
    return metrics


def estimate(inputs: AdvantageInputs, config: GRPOVPSConfig, state: dict) -> AdvantageOutput:
    """(5) and (6): A~ = r - mean(r) + alpha dC on every token of a segment."""
    groups, mask = inputs.groups, inputs.response_mask
    outcome = inputs.of_session(grpo(inputs))
    use = inputs.of_session((groups.comparable[groups.index] & groups.counted).to(outcome.dtype))
    process = (config.alpha * inputs.fields["belief_gain"] * use[:, None]).to(outcome.dtype)
    advantages = (outcome[:, None] + process) * mask

    total, credit = ((x * mask).abs().sum(-1)[groups.counted].double().sum() for x in (advantages, process))
    return AdvantageOutput(advantages, metrics={"vps/dc_share": float(credit / total) if total else 0.0})


def check(config) -> None:
    """Refuse runs in which the method cannot be what the paper describes."""
    refuse_rollout_log_probs(config, "grpo_vps")
    updates = config.trainer.v1.get("separate_async", {}).get("parameter_sync_step", 1)
    if config.trainer.v1.trainer_mode == "recipe_separate_async" and updates > 1:
        raise ConfigError(
            f"trainer.v1.separate_async.parameter_sync_step={updates} takes old log-probs with earlier weights than the"
            " probe, which asks the actor as it is. Set trainer.v1.separate_async.parameter_sync_step=1."
        )
    if config.algorithm.get("norm_adv_by_std_in_grpo", True):
        raise ConfigError(
            "algorithm.norm_adv_by_std_in_grpo=True divides the outcome advantage by the group's std, but grpo_vps adds"
            " a rise of probability to a mean-centred reward. Set algorithm.norm_adv_by_std_in_grpo=False."
        )
    own = GRPOVPSConfig.from_algorithm(config.algorithm, "grpo_vps")
    filter_groups = config.algorithm.get("filter_groups", None)
    if own.with_filter == "refuse" and filter_groups is not None and filter_groups.get("enable", False):
        raise ConfigError(
            "algorithm.filter_groups.enable=True removes the collapsed groups, which grpo_vps trains on. Set it to"
            " False, or algorithm.grpo_vps.with_filter=allow for an ablation."
        )


METHOD = Method(
    name="grpo_vps",
    prefix="vps",
    config_class=GRPOVPSConfig,
    estimator=estimate,
    probe=probe,
    needs=("acc", "entropy", "old_log_probs", "belief_gain"),
    check=check,
    token_level=True,
    neutral={"alpha": 0.0},
)
