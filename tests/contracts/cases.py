"""Random batches, and one way to call whatever is registered.

`ESTIMATORS` and `LOSSES` are read from METHODS when pytest collects, so a new method is covered by being registered.
verl's own `grpo` and `vanilla` run along as the reference: they show that a row of the suite asks nothing impossible.
Where the reference is known to break a row, DEVIATIONS says why and the row must fail (strict xfail).
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import verl  # noqa: F401  loads the plug-in, which registers the methods
from hydra.utils import get_class
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric, reduce_metrics
from verl.utils.py_functional import append_to_dict, rename_dict
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.engine.utils import prepare_micro_batches
from verl.workers.utils.padding import no_padding_2_padding, response_to_nested

from verl_ext.groups import make_groups
from verl_ext.losses import SCALARS_KEY, MiniBatch, RecipeLoss, loss_settings, recorded_metrics
from verl_ext.registry import METHODS, AdvantageContext, AdvantageInputs, AdvantageOutput, advantage_context

REFERENCE_ESTIMATOR, REFERENCE_LOSS = "grpo", "vanilla"

# Settings beside the defaults under which the suite runs an estimator.
VARIANTS: dict[str, tuple[dict, ...]] = {
    "avspo": (
        {"trigger": "always"},
        {"trigger": "always", "virtual_values": "stratified_open", "ddof": 0},
        {"trigger": "fixed", "tau0": 0.3, "virtual_values": "opposite"},
        {"acr_source": "ema"},
    ),
    "cov_grpo": (
        {"scope": "batch"},
        {"normalise": False, "ddof": 0, "sigma_floor": 0.01},
        {"logp": "current"},
    ),
    "ep_grpo": (
        {"stat_scope": "response", "bucket_norm": "scale", "anchor_order": "before", "gate_renorm": "mean1"},
        {"stat_scope": "batch", "bucket_norm": "none", "gate_progress": False, "K": 3, "ddof": 0},
        {"bucket_coord": "position", "eta_warmup_steps": 4, "sigma_floor": 0.0},
    ),
    "mcpo": ({"ddof": 0, "reweight_threshold": 0.7}, {"reweight": False}),
    "grpo_vps": ({"alpha": 0.5},),
}

# The same for losses: settings of `algorithm.<name>`, or of the loss's own configuration.
LOSS_VARIANTS: dict[str, tuple[dict, ...]] = {
    "mcpo": ({"hkl_norm": "mastered", "hkl_beta": 7.0},),
    "cov_grpo": ({"logp": "current", "scope": "batch"}, {"logp": "current", "normalise": False}),
    "holderpo": (
        {"clip_level": "token"},
        {"clip_level": "clamped", "holder_p_schedule": "cos"},
        {"holder_p_schedule": "constant", "holder_p": 0.0},
        {"holder_p_schedule": "constant", "holder_p": -3.0},
    ),
}
# Settings with which a loss can be called where the defaults leave nothing for it to do.
LOSS_DEFAULTS = {"cov_grpo": {"logp": "current"}}

# r -> a r + b leaves the advantages unchanged with these settings added (the paper has to say so).
REWARD_SCALE: dict[str, Callable[[float, float], dict]] = {
    "grpo": lambda a, b: {},
    "avspo": lambda a, b: {"r_lo": b, "r_hi": a + b},
    "cov_grpo": lambda a, b: {},
    "ep_grpo": lambda a, b: {"r_lo": b, "r_hi": a + b},
    "grpo_vps": lambda a, b: {},
    "mcpo": lambda a, b: {"r_lo": b, "r_hi": a + b},
}

# (name, row of the suite) -> why it cannot hold.
DEVIATIONS = {
    ("grpo", "fully masked rows"): "verl counts a fully masked row in its group's statistics (verl#6452)",
    ("grpo", "groups of one"): "verl gives a lone response its own reward as advantage",
    ("grpo", "mean group size"): "verl accepts a batch in which nothing can be compared",
    ("grpo", "not finite"): "verl passes NaN and Inf on",
    ("grpo", "bfloat16"): "verl takes the statistics in the rewards' dtype",
    ("cov_grpo", "on-policy"): "the loss cov_grpo multiplies the advantages by its weights",
}


@dataclass(frozen=True)
class Case:
    """A registered estimator (None: verl's own) and its settings."""

    name: str
    settings: dict = field(default_factory=dict)

    @property
    def method(self):
        return METHODS.get(self.name)

    @property
    def token_level(self):
        return bool(self.method and self.method.token_level)

    def __str__(self):
        return " ".join([self.name, *(f"{k}={v}" for k, v in self.settings.items())])


ESTIMATORS = [Case(REFERENCE_ESTIMATOR)] + [
    Case(name, settings)
    for name, method in METHODS.items()
    if method.estimator
    for settings in ({}, *VARIANTS.get(name, ()))
]
LOSSES = [Case(REFERENCE_LOSS)] + [
    Case(name, {**LOSS_DEFAULTS.get(name, {}), **settings})
    for name, method in METHODS.items()
    if method.policy_loss
    for settings in ({}, *LOSS_VARIANTS.get(name, ()))
]


def estimators(row: str, cases: Iterable[Case] = ESTIMATORS):
    """Parametrise a test over the estimators; a declared deviation must fail."""
    return pytest.mark.parametrize("case", [_param(case, case.name, row) for case in cases], ids=str)


def losses(row: str, agg_modes: bool = False):
    """Parametrise a test over the losses, with `agg_modes` over each aggregation that the loss accepts."""
    pairs = [(case, mode) for case in LOSSES for mode in (accepted(case) if agg_modes else ("token-mean",))]
    if not agg_modes:
        return pytest.mark.parametrize("loss", [_param(case, case.name, row) for case, _ in pairs], ids=str)
    params = [pytest.param(case, mode, marks=_param(case, case.name, row).marks) for case, mode in pairs]
    return pytest.mark.parametrize(("loss", "agg_mode"), params, ids=str)


def _param(value, name: str, row: str):
    reason = DEVIATIONS.get((name, row))
    return pytest.param(value, marks=pytest.mark.xfail(strict=True, reason=reason) if reason else ())


# -- advantage stage --------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """What the advantage stage sees. scores, mask: (B, T); uid: (B,); fields: all of registry.FIELDS."""

    scores: torch.Tensor
    mask: torch.Tensor
    uid: np.ndarray
    fields: dict[str, torch.Tensor]
    final_row: torch.Tensor | None = None

    def __len__(self):
        return len(self.uid)

    def __getitem__(self, rows) -> Batch:
        rows = torch.as_tensor(rows)
        return Batch(
            self.scores[rows], self.mask[rows], self.uid[rows.numpy()], {k: v[rows] for k, v in self.fields.items()}
        )

    def __add__(self, other: Batch) -> Batch:
        return Batch(
            torch.cat([self.scores, other.scores]),
            torch.cat([self.mask, other.mask]),
            np.concatenate([self.uid, other.uid]),
            {k: torch.cat([v, other.fields[k]]) for k, v in self.fields.items()},
        )

    def clone(self) -> Batch:
        return self[torch.arange(len(self))]

    def with_scores(self, scores: torch.Tensor) -> Batch:
        return dataclasses.replace(self, scores=scores)


def make_batch(
    rewards: Iterable[float], uid: Iterable[str], acc: Iterable[float] | None = None, T: int = 6, seed: int = 0
) -> Batch:
    """A batch with these outcome rewards (on each row's last token), random lengths 1..T and random token fields."""
    rng = torch.Generator().manual_seed(seed)
    rewards = torch.tensor(list(rewards), dtype=torch.float32)
    lengths = torch.randint(1, T + 1, (len(rewards),), generator=rng)
    mask = (torch.arange(T) < lengths[:, None]).long()
    scores = torch.zeros(len(rewards), T)
    scores[torch.arange(len(rewards)), lengths - 1] = rewards
    flags = (rewards > 0.5).float() if acc is None else torch.tensor(list(acc), dtype=torch.float32)

    def tokens():
        return torch.rand(len(rewards), T, generator=rng) * mask

    fields = {"acc": flags, "entropy": tokens(), "old_log_probs": -tokens(), "ref_log_prob": -tokens()}
    fields["belief_gain"] = tokens() / 8  # less than a reward's distance to its mean
    return Batch(scores, mask, np.array(list(uid), dtype=object), fields)


def random_batch(seed: int = 0, sizes: Iterable[int] = (4, 4, 4, 4, 8, 2, 3), T: int = 6) -> Batch:
    """Binary rewards; of the groups every other one is mixed, the rest all wrong or all correct. Rows are shuffled."""
    rng = np.random.default_rng(seed)
    rewards, uid = [], []
    for group, size in enumerate(sizes):
        r = np.full(size, group % 4 // 2) if group % 2 else np.r_[0, 1, rng.integers(0, 2, max(0, size - 2))][:size]
        rewards += list(r)
        uid += [f"g{group}"] * size
    return make_batch(rewards, uid, T=T, seed=seed)[rng.permutation(len(uid))]


def padding(rows: int, like: Batch) -> Batch:
    """Rows as verl's V1 trainer appends them: mask 0, reward 0, one uid that starts with `pad`, no flag."""
    zeros = torch.zeros(rows, like.mask.shape[1])
    fields = {k: torch.zeros(rows, *v.shape[1:]) for k, v in like.fields.items()}
    return Batch(zeros, zeros.long(), np.array(["pad0123"] * rows, dtype=object), fields)


@dataclass
class Result:
    advantages: torch.Tensor
    output: AdvantageOutput | None  # None for verl's own
    state: dict

    @property
    def metrics(self) -> dict:
        return self.output.metrics if self.output else {}


def run(
    case: Case, batch: Batch, state: dict | None = None, step: int = 1, norm_by_std: bool = True, **settings
) -> Result:
    """Call an estimator as verl does, with what our trainer modes hand over; advantages (B, T)."""
    state = {} if state is None else state
    if case.method is None:
        return Result(_verl_advantages(case.name, batch, norm_by_std), None, state)
    algorithm = {"norm_adv_by_std_in_grpo": norm_by_std, case.name: {**case.settings, **settings}}
    context = AdvantageContext(
        method=case.method,
        config=case.method.config(algorithm),
        state=state,
        fields={name: batch.fields[name] for name in case.method.needs},
        final_row=batch.final_row,
        step=step,
    )
    with advantage_context(context):
        advantages, returns = get_adv_estimator_fn(case.name)(
            token_level_rewards=batch.scores, response_mask=batch.mask, config=algorithm, index=batch.uid
        )
    assert torch.equal(advantages, returns)
    return Result(advantages, context.output, state)


def _verl_advantages(name: str, batch: Batch, norm_by_std: bool) -> torch.Tensor:
    data = DataProto.from_dict(
        {"token_level_rewards": batch.scores, "response_mask": batch.mask}, non_tensors={"uid": batch.uid}
    )
    final = torch.arange(len(batch)) if batch.final_row is None else batch.final_row
    # Rows of one session share a key; the final row comes last.
    keys = [f"u_{int(last)}_{int(row == last)}" for row, last in enumerate(final)]
    algorithm = {"norm_adv_by_std_in_grpo": norm_by_std}
    data = compute_advantage_for_multi_trajectories(
        data, keys, name, num_repeat=1, norm_adv_by_std_in_grpo=norm_by_std, config=algorithm
    )
    return data.batch["advantages"]


# -- actor loss -------------------------------------------------------------------------------------------------------

AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


def accepted(loss: Case) -> tuple[str, ...]:
    """The aggregations a loss accepts."""
    return (loss.method and loss.method.agg_modes) or AGG_MODES


@dataclass
class LossBatch:
    """A mini-batch in the layout of verl's V1 trainer: jagged tensors. log_probs: (all tokens,), float64 leaf."""

    data: TensorDict
    log_probs: torch.Tensor

    @property
    def offsets(self) -> torch.Tensor:
        return self.data["input_ids"].offsets()

    def tokens(self, rows: Iterable[int]) -> torch.Tensor:
        return torch.cat([self.log_probs[self.offsets[row] : self.offsets[row + 1]] for row in rows])

    def __getitem__(self, rows: list[int]) -> LossBatch:
        leaf = self.tokens(rows).detach().requires_grad_()
        return LossBatch(tu.index_select_tensor_dict(self.data, rows), leaf)

    def response(self, row: int, values: torch.Tensor) -> torch.Tensor:
        """Of values over all tokens, the row's response (verl shifts log-probs left by one)."""
        end, length = int(self.offsets[row + 1]), len(self.data["responses"][row])
        return values[end - length - 1 : end - 1]


def make_loss_batch(
    rows: int = 8,
    seed: int = 0,
    masks: list[list[int]] | None = None,
    log_ratio: Callable[[torch.Tensor], torch.Tensor] | None = None,
    dtype: torch.dtype = torch.float64,
) -> LossBatch:
    """Random mini-batch. masks: response mask of each row (default: ones, ragged lengths 1..7).

    log_ratio: makes the log-ratios from uniform numbers in (-1, 1); by default within +-0.5, clip points on both sides.
    """
    rng = torch.Generator().manual_seed(seed)
    if masks is None:
        masks = [[1] * (1 + (3 * row + seed) % 7) for row in range(rows)]
    rows = len(masks)
    prompts = [2 + row % 3 for row in range(rows)]
    lengths = [len(mask) for mask in masks]
    total = sum(prompts) + sum(lengths)
    log_ratio = log_ratio or (lambda u: u / 2)
    uniform = torch.rand(total, generator=rng, dtype=torch.float64) * 2 - 1
    old = -5 - torch.rand(total, generator=rng, dtype=torch.float64)
    ends = torch.tensor([p + n for p, n in zip(prompts, lengths, strict=True)]).cumsum(0).tolist()

    def jagged(pieces):
        return torch.nested.nested_tensor(pieces, layout=torch.jagged)

    def response(values):
        return jagged([values[end - n - 1 : end - 1] for end, n in zip(ends, lengths, strict=True)])

    advantages = torch.randn(rows, generator=rng, dtype=torch.float64)
    tensors = {
        "input_ids": jagged([torch.ones(p + n, dtype=torch.long) for p, n in zip(prompts, lengths, strict=True)]),
        "prompts": jagged([torch.ones(p, dtype=torch.long) for p in prompts]),
        "responses": jagged([torch.ones(n, dtype=torch.long) for n in lengths]),
        "response_mask": jagged([torch.tensor(mask) for mask in masks]),
        "loss_mask": jagged([torch.tensor(mask) for mask in masks]),
        "old_log_probs": response(old.to(dtype)),
        "advantages": jagged(
            [a * torch.tensor(mask, dtype=dtype) for a, mask in zip(advantages.to(dtype), masks, strict=True)]
        ),
    }
    leaf = (old + log_ratio(uniform)).to(dtype).requires_grad_()
    return LossBatch(TensorDict(tensors, batch_size=rows), leaf)


def actor_config(loss: Case, agg_mode: str) -> ActorConfig:
    method = loss.method
    own = get_class(method.loss_config) if method and method.loss_config else PolicyLossConfig
    return ActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=agg_mode,
        # Without it verl divides by the width of the micro-batch at hand, which differs between micro-batches.
        loss_scale_factor=7 if agg_mode == "seq-mean-token-sum-norm" else None,
        policy_loss=own(loss_mode=loss.name, **(loss.settings if own is not PolicyLossConfig else {})),
    )


def loss_function(loss: Case, agg_mode: str | None = None, needs: tuple[str, ...] = ()) -> RecipeLoss:
    """verl's actor loss with this policy loss, as its engines call it: (model_output, data, dp_group)."""
    method = loss.method
    config = actor_config(loss, agg_mode or accepted(loss)[0])
    if method is None:
        return RecipeLoss(config, needs)
    own = {} if method.loss_config else loss.settings
    return RecipeLoss(config, method.loss_needs, method.mini_batch, method.config({loss.name: own}))


def scalars_of(loss: Case) -> dict[str, float]:
    """Numbers of the step for a loss that declares them, at step 2 of 10."""
    method = loss.method
    if not method or not method.step_scalars:
        return {}
    settings = loss_settings(method, actor_config(loss, accepted(loss)[0])) if method.loss_config else None
    return method.step_scalars(settings, 2, 10)


def add_fields(loss: Case, batch: LossBatch) -> LossBatch:
    """Give the mini-batch the fields that the loss reads, as the trainer does: from the method's own functions.

    Rows 0 and 1 form a group, 2 and 3 the next one, and so on; every other group is all correct.
    """
    method = loss.method
    if not method or not method.loss_needs or all(name in batch.data for name in method.loss_needs):
        return batch
    mask = batch.data["response_mask"].to_padded_tensor(0)
    n = len(mask)
    correct = torch.tensor([float(row // 2 % 2 == 0 or row % 2) for row in range(n)])
    scores = torch.zeros(mask.shape).index_put((torch.arange(n), torch.zeros(n, dtype=torch.long)), correct)
    noise = torch.rand(mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    fields = {"acc": correct, "entropy": noise, "old_log_probs": -noise, "ref_log_prob": -noise / 2}
    uid = np.array([f"g{min(row, n - n % 2 - 1) // 2}" for row in range(n)], dtype=object)  # nobody is alone
    if method.row_fields:
        inputs = AdvantageInputs(scores, mask, make_groups(uid, mask), {k: fields[k] for k in method.needs}, step=2)
        found = method.row_fields(inputs, method.config({loss.name: loss.settings}))
    else:
        found = run(Case(loss.name), Batch(scores, mask, uid, fields)).output.loss_fields
    for name in method.loss_needs:
        value = found[name].double()
        nested = response_to_nested(value, batch.data["response_mask"]) if value.dim() == 2 else value
        batch.data[name] = nested
    return batch


@dataclass(frozen=True)
class Split:
    """How a mini-batch is cut: an equal micro-batch size, explicit sizes, or (`tokens`) verl's dynamic batching; with
    none of them, not at all."""

    size: int | None = None
    sizes: tuple[int, ...] = ()
    tokens: int | None = None

    def __str__(self):
        return (
            f"size {self.size}"
            if self.size
            else f"sizes {self.sizes}"
            if self.sizes
            else f"dynamic {self.tokens} tokens"
            if self.tokens
            else "whole"
        )

    def __call__(self, data: TensorDict) -> list[tuple[TensorDict, list[int]]]:
        """Micro-batches with the rows each holds."""
        if self.sizes:
            assert sum(self.sizes) == len(data)
            ends = np.cumsum(self.sizes)
            rows = [list(range(end - size, end)) for end, size in zip(ends, self.sizes, strict=True)]
            return [(tu.index_select_tensor_dict(data, r), r) for r in rows]
        size = self.size or len(data)
        tu.assign_non_tensor(data, use_dynamic_bsz=self.tokens is not None)
        tu.assign_non_tensor(data, micro_batch_size_per_gpu=size, max_token_len_per_gpu=self.tokens)
        micro_batches, rows = prepare_micro_batches(data)
        if rows is None:
            rows = torch.arange(len(data)).split(size)
        return [(td, [int(i) for i in r]) for td, r in zip(micro_batches, rows, strict=True)]


WHOLE = Split()


class Ranks:
    """Data-parallel ranks as threads, with the collectives that verl's worker has: each gets everybody's value."""

    def __init__(self, n: int):
        self.barrier, self.slots = threading.Barrier(n, timeout=60), [None] * n

    def run(self, work: Callable[[int], None]) -> None:
        with ThreadPoolExecutor(len(self.slots)) as pool:
            for done in [pool.submit(work, rank) for rank in range(len(self.slots))]:
                done.result()

    def all_gather(self, rank: int, value) -> list:
        self.slots[rank] = value
        self.barrier.wait()
        everything = list(self.slots)
        self.barrier.wait()
        return everything


def prepare(loss: RecipeLoss, batch: LossBatch, pieces: list[TensorDict]) -> None:
    """What verl_ext.worker does before a mini-batch, on every rank."""
    ranks, n = Ranks(len(pieces)), len(batch.data)

    def work(rank):
        first = rank * n // len(pieces)
        rows = range(first, first + len(pieces[rank]))
        output = torch.nested.nested_tensor_from_jagged(
            batch.tokens(rows).detach(), pieces[rank]["input_ids"].offsets()
        )
        loss.prepare(
            MiniBatch(
                pieces[rank],
                lambda value: ranks.all_gather(rank, value),
                rank,
                lambda: no_padding_2_padding(output, pieces[rank]),
            )
        )

    ranks.run(work)


def gradient(
    batch: LossBatch,
    loss: Callable,
    split: Split = WHOLE,
    ranks: int = 1,
    backward: Callable | None = None,
    scalars: dict | None = None,
) -> tuple[float, torch.Tensor]:
    """Loss and gradient (all tokens,) of the mini-batch, accumulated over micro-batches and averaged over ranks.

    backward(loss_function, model_output, micro_batch, number of micro-batches, ranks) -> loss of the micro-batch: how
    an engine scales and differentiates; by default as verl's FSDP engine does (FSDP averages over the ranks).
    """
    backward = backward or fsdp_backward
    leaf = batch.log_probs
    leaf.grad = None
    total, n = 0.0, len(batch.data)
    tokens = int(batch.data["loss_mask"].values().sum())
    pieces = tu.chunk_tensordict(batch.data, ranks)
    for data in pieces:
        tu.assign_non_tensor(data, dp_size=ranks, batch_num_tokens=tokens, global_batch_size=n)
        tu.assign_non_tensor_data(data, SCALARS_KEY, scalars or {})
    prepare(loss, batch, pieces)
    for rank, data in enumerate(pieces):
        first = rank * n // ranks
        micro_batches = split(data)
        for micro_batch, rows in micro_batches:
            values = batch.tokens(first + row for row in rows)
            output = {"log_probs": torch.nested.nested_tensor_from_jagged(values, micro_batch["input_ids"].offsets())}
            total += backward(loss, output, micro_batch, len(micro_batches), ranks)
    return total, leaf.grad.clone()


def fsdp_backward(loss, model_output, micro_batch, num_micro_batches: int, ranks: int) -> float:
    value, _ = loss(model_output=model_output, data=micro_batch)
    (value / ranks).backward()
    return float(value.detach()) / ranks


def logged(
    loss: RecipeLoss,
    mini_batches: Iterable[LossBatch],
    split: Split = WHOLE,
    ranks: int = 1,
    scalars: dict | None = None,
) -> dict[str, float]:
    """What the trainer logs of a step with these mini-batches: reduced over micro-batches, ranks and mini-batches by
    verl's own functions, as its workers and trainer do, then read by `recorded_metrics`."""
    step: dict = {}
    for batch in mini_batches:
        seen: list[dict] = []  # micro-batches of rank 0, then of rank 1, ...

        def keep(function, model_output, micro_batch, num_micro_batches, ranks, seen=seen):
            value, metrics = function(model_output=model_output, data=micro_batch)
            seen.append(metrics)
            value.backward()
            return 0.0

        gradient(batch, loss, split, ranks, backward=keep, scalars=scalars)
        number = len(seen) // ranks
        of_ranks = []
        for rank in range(ranks):
            lists = {key: metric.init_list() for key, metric in seen[0].items() if isinstance(metric, Metric)}
            for metrics in seen[rank * number : (rank + 1) * number]:
                for key, metric in lists.items():
                    metric.append(metrics[key])
            of_ranks.append(lists)
        append_to_dict(step, {key: Metric.aggregate_dp([lists[key] for lists in of_ranks]) for key in of_ranks[0]})
    return recorded_metrics(reduce_metrics(rename_dict(step, "actor/")))
