"""GRPO-VPS against an independent loop over plain numbers, the spec's vectors, and its reductions.

Sections and equation numbers are those of the spec (specs/grpo_vps.md) that recipes/grpo_vps/grpo_vps.py names. What a
real model says at the cuts is tested in tests/verl_ext/test_probe.py and tests/e2e; here the policy is a formula.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from contracts.cases import Case, make_batch, padding, random_batch, run
from contracts.test_config import composed
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.grpo_vps.grpo_vps import METHOD, GRPOVPSConfig, cut_points, probe
from verl_ext.entropy import quantile, segments
from verl_ext.groups import make_groups
from verl_ext.preflight import check_methods
from verl_ext.probe import ActorProbe
from verl_ext.registry import (
    AdvantageContext,
    AdvantageInputs,
    ConfigError,
    DataError,
    advantage_context,
    verl_estimator,
)
from verl_ext.rewards import canonical_answer

DEFAULTS = {
    "alpha": 1.2, "n": 4, "percentile": 97.0, "max_segments": 8, "cut_rule": "response", "max_prob": 0.9,
    "probe_suffix": "\n\nTherefore, the final answer is \\boxed{", "probe_close": "}", "score_close": False,
    "prob": "joint", "probe_layout": "batched", "answer_tokens": "segment", "answer_cue": "\\boxed{",
    "with_filter": "refuse", "tol": 1e-6,
}  # fmt: skip
END = "~"  # of a turn


def log_prob(context: list[int], token: int) -> float:
    """The policy: a number that depends on everything before the token."""
    return -(((sum(context) * 7 + token * 3 + len(context)) % 11) + 1) / 10


# -- the method once more, over plain numbers --------------------------------------------------------------------------


def percentile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    place = q / 100 * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def half_even(numerator: int, denominator: int) -> int:
    whole, rest = divmod(numerator, denominator)
    return whole + (2 * rest > denominator or (2 * rest == denominator and whole % 2 == 1))


def oracle(rows: list[tuple], policy, **changed):
    """rows: (uid, reward, mask, entropies, old log-probs, prompt, response, answer), texts as strings.

    -> advantages as B lists of T numbers, beliefs of each row (None: not probed).
    """
    s = {**DEFAULTS, **changed}
    codes = lambda text: [ord(letter) for letter in text]  # noqa: E731
    groups: dict[str, list[int]] = {}
    for i, (uid, _, mask, *_) in enumerate(rows):
        if any(mask) and not uid.startswith("pad"):
            groups.setdefault(uid, []).append(i)
    groups = {uid: g for uid, g in groups.items() if len(g) > 1}
    length = {}
    for g in groups.values():
        for i in g:
            response = rows[i][6]
            length[i] = len(response.rstrip(END))
            if s["answer_tokens"] == "outcome" and s["answer_cue"] in response[: length[i]]:
                length[i] = response[: length[i]].rindex(s["answer_cue"])
    text = {i: [t for t in range(length[i]) if rows[i][2][t]] for i in length}

    out, beliefs = [[0.0] * len(row[2]) for row in rows], [None] * len(rows)
    for g in groups.values():
        average = sum(rows[i][1] for i in g) / len(g)
        for i in g:
            _, reward, mask, h, old, prompt, response, answer = rows[i]
            scope = {"response": [i], "group": g, "batch": list(text), "prob": []}[s["cut_rule"]]
            values = [rows[j][3][t] for j in scope for t in text[j]]
            tau = percentile(values, s["percentile"]) if values else math.inf  # (1)
            if s["cut_rule"] == "prob":
                cuts = [t for t in text[i] if math.exp(old[t]) < s["max_prob"]]
            else:
                cuts = [t for t in text[i] if h[t] >= tau]
            m = min(s["max_segments"], math.ceil(len(cuts) / s["n"])) if len(cuts) >= s["n"] else 1
            starts = [0, *(cuts[half_even(k * len(cuts), m)] for k in range(1, m))]  # (2)
            asked = answer + (s["probe_close"] if s["score_close"] else "")
            c = []
            for end in [*starts, length[i]]:  # (3)
                context, total = codes(prompt + response[:end] + s["probe_suffix"]), []
                for token in codes(asked):
                    total.append(policy(context, token))
                    context = [*context, token]
                c.append(
                    {
                        "joint": math.exp(sum(total)),
                        "geo_mean": math.exp(sum(total) / len(total)),
                        "mean_prob": sum(map(math.exp, total)) / len(total),
                    }[s["prob"]]
                )
            beliefs[i] = c
            for t, on in enumerate(mask):
                if not on:
                    continue
                k = sum(t >= start for start in starts) - 1
                credit = c[k + 1] - c[k]  # (4)
                if s["answer_tokens"] == "outcome" and t >= length[i]:
                    credit = 0.0
                out[i][t] = reward - average + s["alpha"] * credit  # (5), (6)
    return out, beliefs


# -- the same batch through the recipe ---------------------------------------------------------------------------------


class Letters:
    all_special_ids = (ord(END),)

    def encode(self, text, add_special_tokens=True):
        return [ord(letter) for letter in text]

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(int(i)) for i in ids)


def forward(data):
    pieces = []
    for ids in data["input_ids"].unbind():
        ids = ids.tolist()
        pieces.append([log_prob(ids[: k + 1], ids[k + 1]) if k + 1 < len(ids) else 0.0 for k in range(len(ids))])
    return {"log_probs": torch.nested.as_nested_tensor([torch.tensor(p) for p in pieces], layout=torch.jagged)}


def actor_of(rows) -> ActorProbe:
    letters = lambda text: torch.tensor([ord(letter) for letter in text], dtype=torch.long)  # noqa: E731
    return ActorProbe(
        forward=forward,
        prompts=[letters(row[5]) for row in rows],
        responses=[letters(row[6]) for row in rows],
        references=[row[7] for row in rows],
        uid=np.array([row[0] for row in rows], dtype=object),
        tokenizer=Letters(),
    )


def inputs_of(rows) -> AdvantageInputs:
    mask = torch.tensor([row[2] for row in rows])
    scores = torch.zeros(mask.shape)
    scores[torch.arange(len(rows)), (mask.sum(1) - 1).clamp(min=0)] = torch.tensor([float(row[1]) for row in rows])
    fields = {
        "entropy": torch.tensor([row[3] for row in rows]),
        "old_log_probs": torch.tensor([row[4] for row in rows]),
    }
    uid = np.array([row[0] for row in rows], dtype=object)
    return AdvantageInputs(scores, mask, make_groups(uid, mask), fields, norm_by_std=False)


def through_the_recipe(rows, **changed):
    inputs, config = inputs_of(rows), GRPOVPSConfig(**changed)
    probed = probe(inputs, config, actor_of(rows))
    context = AdvantageContext(METHOD, config, {}, dict(inputs.fields) | probed.fields)
    with advantage_context(context):
        advantages, _ = verl_estimator(METHOD)(
            inputs.token_level_rewards,
            inputs.response_mask,
            config={"norm_adv_by_std_in_grpo": False},
            index=np.array([row[0] for row in rows], dtype=object),
        )
    return advantages, probed, context.output.metrics


def make_rows(seed: int, sizes=(4, 3, 2, 1), width: int = 30) -> list[tuple]:
    """Responses of letters with answers in a box, some cut off, one of nothing but the end of its turn."""
    rng = np.random.default_rng(seed)
    rows = []
    for g, size in enumerate(sizes):
        for k in range(size):
            words = "".join(rng.choice(list("abc +="), rng.integers(0, 18)))
            answer = str(rng.integers(0, 120))
            closed = rng.random() < 0.7
            response = (words + ("\\boxed{" + answer + "}" + END if closed else ""))[:width] or END
            if g == 1 and k == 0:
                response = END
            mask = [1] * len(response) + [0] * (width - len(response))
            h = [float(x) for x in np.round(rng.exponential(0.3, width) * (rng.random(width) < 0.5), 2)]
            old = [-float(x) for x in np.round(rng.exponential(0.3, width), 2)]
            rows.append(
                (f"g{g}", float(rng.integers(0, 2)), mask, h, old, "q" * int(rng.integers(1, 4)), response, answer)
            )
    nothing = ("pad0", 0.0, [0] * width, [0.0] * width, [0.0] * width, "q", "", "1")
    return [*rows, nothing]


VARIANTS = [
    {"n": 1},
    {"n": 2, "percentile": 60.0},
    {"n": 1, "percentile": 0.0, "max_segments": 5},
    {"cut_rule": "group", "percentile": 80.0, "n": 2},
    {"cut_rule": "batch", "percentile": 80.0, "n": 1, "prob": "geo_mean"},
    {"cut_rule": "prob", "max_prob": 0.8, "n": 3, "prob": "mean_prob"},
    {"n": 1, "percentile": 70.0, "score_close": True},
    {"n": 1, "percentile": 70.0, "probe_suffix": "", "alpha": 0.3},
    {"n": 1, "percentile": 70.0, "answer_tokens": "outcome"},
]


@pytest.mark.parametrize("changed", [{}, *VARIANTS], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_oracle(seed, changed):
    rows = make_rows(seed)
    want, beliefs = oracle(rows, log_prob, **changed)
    got, probed, metrics = through_the_recipe(rows, **changed)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)
    shown = probed.segments()
    assert [entry.row for entry in shown] == [i for i, c in enumerate(beliefs) if c]
    for entry in shown:
        np.testing.assert_allclose(entry.beliefs, beliefs[entry.row], atol=2e-6)
        assert sum(entry.gains) == pytest.approx(entry.beliefs[-1] - entry.beliefs[0])  # section 7
        assert all(abs(gain) <= 1 for gain in entry.gains)
    outcome, _ = oracle(rows, log_prob, **{**changed, "alpha": 0.0})
    credit = np.abs(np.array(want) - np.array(outcome)).sum()
    assert metrics["vps/dc_share"] == pytest.approx(credit / np.abs(want).sum(), rel=1e-4)


def test_the_metrics_of_the_probe():
    rows = make_rows(1)
    _, beliefs = oracle(rows, log_prob, n=1, percentile=60.0)
    _, probed, _ = through_the_recipe(rows, n=1, percentile=60.0)
    known, right = [(c, rows[i][1] == 1) for i, c in enumerate(beliefs) if c], probed.metrics
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    assert right["vps/segments_mean"] == pytest.approx(mean([len(c) - 1 for c, _ in known]))
    assert right["vps/segments_max"] == max(len(c) - 1 for c, _ in known) > 2
    assert right["vps/c0"] == pytest.approx(mean([c[0] for c, _ in known]), abs=1e-6)
    assert right["vps/c1"] == pytest.approx(mean([c[1] for c, _ in known]), abs=1e-6)
    for name, flag in (("correct", True), ("wrong", False)):
        mine = [c for c, is_right in known if is_right == flag]
        assert right[f"vps/cM_{name}"] == pytest.approx(mean([c[-1] for c in mine]), abs=1e-6)
        rises = [b > a for c in mine for a, b in pairwise(c)]
        assert right[f"vps/dc_pos_frac_{name}"] == pytest.approx(mean(rises))
    assert right["vps/prob_underflow_frac"] == 0 and right["vps/probe_tokens"] > 0 and right["vps/probe_seconds"] > 0


def test_beliefs_that_are_no_signal_are_counted():
    """An answer of 40 tokens has a joint probability of about 0; its mean has not."""
    rows = [(*row[:7], "7" * 40) for row in make_rows(0)]
    assert through_the_recipe(rows)[1].metrics["vps/prob_underflow_frac"] == 1
    assert through_the_recipe(rows, prob="geo_mean")[1].metrics["vps/prob_underflow_frac"] == 0


def test_section_7_token_advantages_of_the_example():
    right, wrong = [0.10, 0.25, 0.20, 0.70], [0.10, 0.05, 0.02, 0.01]
    batch = make_batch([1, 0, 1, 0], ["g"] * 4, T=3)
    batch.mask[:] = 1
    batch.fields["belief_gain"] = torch.tensor([right, wrong, right, wrong]).diff(dim=1)
    got = run(Case("grpo_vps"), batch, norm_by_std=False).advantages
    np.testing.assert_allclose(got[0], [0.680, 0.440, 1.100], atol=1e-6)
    np.testing.assert_allclose(got[1], [-0.560, -0.536, -0.512], atol=1e-6)
    all_wrong = run(Case("grpo_vps"), batch.with_scores(batch.scores * 0), norm_by_std=False).advantages
    np.testing.assert_allclose(all_wrong[1], [-0.060, -0.036, -0.012], atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_section_7_alpha_zero_is_mean_centred_grpo_bit_for_bit(seed):
    batch = random_batch(seed) + padding(3, random_batch(seed))
    want = run(Case("grpo"), batch, norm_by_std=False).advantages
    assert torch.equal(run(Case("grpo_vps", {"alpha": 0.0}), batch, norm_by_std=False).advantages, want)


def test_section_7_collapsed_groups_train():
    batch = make_batch([1] * 4 + [0] * 4, ["a"] * 4 + ["b"] * 4)
    got = run(Case("grpo_vps"), batch, norm_by_std=False).advantages
    torch.testing.assert_close(got, 1.2 * batch.fields["belief_gain"] * batch.mask)


@pytest.mark.parametrize(
    ("tokens", "q", "number", "points"),
    [
        (tokens, q, m, u)
        for tokens, row in {
            400: {80: (20, 80), 90: (10, 40), 95: (5, 20), 96: (4, 16), 97: (3, 12), 98: (2, 8)},
            600: {80: (30, 120), 90: (15, 60), 95: (8, 30), 96: (6, 24), 97: (5, 18), 98: (3, 12)},
            900: {80: (45, 180), 90: (23, 90), 95: (12, 45), 96: (9, 36), 97: (7, 27), 98: (5, 18)},
            1500: {80: (75, 300), 90: (38, 150), 95: (19, 75), 96: (15, 60), 97: (12, 45), 98: (8, 30)},
        }.items()
        for q, (m, u) in row.items()
    ],
)
def test_section_7_table_of_segments(tokens, q, number, points):
    rng = torch.Generator().manual_seed(tokens)
    h = torch.empty(1, tokens).exponential_(1 / 0.3, generator=rng) * (torch.arange(tokens) % 2)
    text = torch.ones(1, tokens, dtype=torch.long)
    cut = cut_points(h, h, text, torch.zeros(1, dtype=torch.long), GRPOVPSConfig(percentile=float(q)))
    _, m = segments(cut, 4, 10_000)
    assert (int(m), int(cut.sum())) == (number, points)


@pytest.mark.parametrize(
    ("points", "n", "most", "counts"), [(30, 1, 8, [4, 4, 3, 4, 4, 3, 4, 4]), (5, 2, 8, [2, 1, 2])]
)
def test_section_7_cut_rule(points, n, most, counts):
    cut = torch.zeros(1, 2 * points + 2, dtype=torch.bool)
    cut[0, 1 : 2 * points : 2] = True
    segment, m = segments(cut, n, most)
    assert torch.bincount(segment[cut]).tolist() == counts and int(m) == len(counts)
    if n == 2:
        assert torch.bincount(segment[0]).tolist() == [5, 2, 5]  # [1, 5], [6, 7], [8, 12]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(1, 6), st.integers(1, 9))
def test_section_7_every_token_lies_in_one_segment(cuts, n, most):
    segment, m = segments(torch.tensor([cuts]), n, most)
    steps = segment[0].diff()
    assert int(segment[0, 0]) == 0 and int(segment.max()) == int(m) - 1 and int(m) <= most
    assert bool(((steps == 0) | (steps == 1)).all())
    counts = torch.bincount(segment[torch.tensor([cuts])], minlength=int(m))
    assert int(counts.max() - counts.min()) <= 1
    starts = (steps == 1).nonzero()[:, 0] + 1
    assert all(cuts[int(start)] for start in starts)  # a segment starts at a high-entropy token


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 5), min_size=1, max_size=40), st.floats(0, 1))
def test_quantile_is_numpys(values, q):
    got = quantile(torch.tensor([values, values], dtype=torch.float64), torch.ones(2, len(values)), q)
    np.testing.assert_allclose(got[:, 0], np.quantile(values, q), atol=1e-9)


def test_one_segment_is_one_advantage():
    """Section 4: fewer cut points than n give M = 1; section 7: constant advantage over the response."""
    rows = make_rows(2)
    got, probed, _ = through_the_recipe(rows, n=1000)
    assert probed.metrics["vps/segments_max"] == 1
    for row, mask in zip(got, (r[2] for r in rows), strict=True):
        assert len(set(row[torch.tensor(mask) > 0].tolist())) <= 1


def test_tool_tokens_are_no_cuts_and_get_no_advantage():
    rows = make_rows(3, sizes=(4,))
    tool = [(*r[:2], [m if t % 3 else 0 for t, m in enumerate(r[2])], *r[3:]) for r in rows]
    want, _ = oracle(tool, log_prob, n=1, percentile=50.0)
    got, _, _ = through_the_recipe(tool, n=1, percentile=50.0)
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_outputs_of_a_session_before_the_last_are_not_probed():
    rows = make_rows(0, sizes=(4,))[:4]
    inputs = inputs_of(rows)
    final = torch.tensor([1, 1, 2, 3])
    counted = final == torch.arange(4)
    uid = np.array([row[0] for row in rows], dtype=object)
    inputs = dataclasses.replace(inputs, groups=make_groups(uid, inputs.response_mask, counted), final_row=final)
    probed = probe(inputs, GRPOVPSConfig(), actor_of(rows))
    assert not probed.fields["belief_gain"][0].any() and [s.row for s in probed.segments()] == [1, 2, 3]


def test_a_batch_of_padding_asks_nothing():
    rows = make_rows(0)[-1:] * 3
    probed = probe(inputs_of(rows), GRPOVPSConfig(), actor_of(rows))
    assert probed.metrics == {} and probed.segments() == [] and not probed.fields["belief_gain"].any()


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("42", "42"), (42, "42"), (" $1,200 ", "1200"), ("\\boxed{\\dfrac{1}{2}}", "\\frac{1}{2}"), (["7", "8"], "7"),
        ("east", "east"), ("50\\%", "50\\%"), ("5.", "5"), ("\\$7", "7"),
    ],
)  # fmt: skip
def test_references_are_written_as_a_response_would(reference, answer):
    assert canonical_answer(reference) == answer


@pytest.mark.parametrize("reference", [None, "", " ", "$", ".", [], {"a": 1}])
def test_a_row_without_an_answer_is_named(reference):
    rows = make_rows(0)
    rows[2] = (*rows[2][:7], reference)
    with pytest.raises(DataError, match=r"row 2 \(uid g0\) has no answer to ask for.*reward_model\.ground_truth"):
        probe(inputs_of(rows), GRPOVPSConfig(), actor_of(rows))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"algorithm.norm_adv_by_std_in_grpo": True}, "Set algorithm.norm_adv_by_std_in_grpo=False"),
        ({"algorithm.rollout_correction.bypass_mode": True}, "bypass_mode"),
        ({"trainer.v1.trainer_mode": "sync"}, "trainer_mode=recipe_sync"),
        ({"algorithm.filter_groups.enable": True}, "with_filter=allow"),
        ({"algorithm.grpo_vps.score_close": True, "algorithm.grpo_vps.probe_close": ""}, "probe_close is empty"),
        ({"actor_rollout_ref.rollout.temperature": 0}, "temperature=0"),
        (
            {
                "trainer.v1.trainer_mode": "recipe_separate_async",
                "trainer.v1.separate_async.parameter_sync_step": 4,
            },
            "parameter_sync_step=1",
        ),
        ({"actor_rollout_ref.actor.policy_loss.loss_mode": "holderpo"}, "token"),
        ({"algorithm.grpo_vps.answer_tokens": "outcome", "algorithm.grpo_vps.answer_cue": ""}, "answer_cue"),
    ],
)
def test_runs_that_make_no_sense_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        check_methods(composed("grpo_vps", overrides))


def test_a_filter_can_be_allowed():
    check_methods(
        composed("grpo_vps", {"algorithm.filter_groups.enable": True, "algorithm.grpo_vps.with_filter": "allow"})
    )


def test_the_defaults_are_the_specs():
    assert dataclasses.asdict(GRPOVPSConfig()) == DEFAULTS
