"""The collapse rate: its causes, its running forms, the warning."""

from __future__ import annotations

import json
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.acr import AcrWatch, acr_metrics, binary_accuracy, collapse, expected_rate, watch
from verl_ext.groups import make_groups


def groups_of(uid, masked=()):
    mask = torch.ones(len(uid), 2)
    for row in masked:
        mask[row] = 0
    return make_groups(np.array(list(uid), dtype=object), mask)


REWARDS = torch.tensor([0.0, 0, 0, 1, 1, 1, 0, 1, 1, 0.5, 0.5, 0])
UID = "aaabbbcccddx"
ACC = torch.tensor([0, 0, 0, 1, 1, 1, 0, 1, 1, 0, 1, 0]).bool()


def test_causes_of_collapse():
    kinds = collapse(groups_of(UID), REWARDS, ACC)
    assert {k: v.tolist() for k, v in kinds.items()} == {
        "any": [True, True, False, True, False],
        "wrong": [True, False, False, False, False],
        "correct": [False, True, False, False, False],
        "tied_other": [False, False, False, True, False],  # equal rewards, mixed accuracy
    }


def test_without_flags_nobody_is_called_wrong():
    kinds = collapse(groups_of(UID), REWARDS, None)
    assert not kinds["wrong"].any() and not kinds["correct"].any()
    assert torch.equal(kinds["tied_other"], kinds["any"])


@given(
    st.lists(
        st.tuples(st.sampled_from("abcde"), st.sampled_from([0.0, 0.5, 1.0]), st.booleans()), min_size=1, max_size=30
    )
)
def test_metrics_are_those_of_a_loop(rows):
    uid, rewards = [u for u, *_ in rows], torch.tensor([r for _, r, _ in rows])
    acc = torch.tensor([a for *_, a in rows])
    got = acr_metrics(groups_of(uid), rewards, acc)
    of: dict = {}
    for u, r, a in rows:
        of.setdefault(u, []).append((r, a))
    many = [g for g in of.values() if len(g) > 1]
    tied = [g for g in many if len({r for r, _ in g}) == 1]
    share = lambda n: n / len(many) if many else 0.0  # noqa: E731
    want = {
        "acr/rate": share(len(tied)),
        "acr/wrong": share(sum(not any(a for _, a in g) for g in tied)),
        "acr/correct": share(sum(all(a for _, a in g) for g in tied)),
        "acr/groups": len(many),
        "acr/groups_of_one": len(of) - len(many),
        "acr/group_size_min": min(map(len, of.values())),
        "acr/group_size_mean": statistics.fmean(map(len, of.values())),
        "acr/reward_std_mean": statistics.fmean(statistics.stdev(r for r, _ in g) for g in many) if many else 0.0,
    }
    want["acr/tied_other"] = want["acr/rate"] - want["acr/wrong"] - want["acr/correct"]
    assert got == pytest.approx(want, abs=1e-9)


def test_padding_and_masked_rows_change_nothing():
    """A rate that counts V1's padding rows as a group would read 1/3 here instead of 0."""
    rewards = torch.tensor([0.0, 1, 1, 0])
    want = acr_metrics(groups_of("aabb"), rewards, rewards.bool(), torch.ones(4, 2))
    padded = groups_of(["a", "a", "b", "b", "pad7", "pad7", "b"], masked=(4, 5, 6))
    more = torch.cat([rewards, torch.zeros(3)])
    got = acr_metrics(padded, more, more.bool(), torch.cat([torch.ones(4, 2), torch.zeros(3, 2)]))
    assert got == want and got["acr/rate"] == 0 and got["acr/rows_nonzero"] == 1


def test_what_is_left_after_the_estimator():
    advantages = torch.zeros(12, 2)
    advantages[3:6] = 0.3  # the all-correct group got a signal
    advantages[7, 1] = -1.0  # one row of the mixed group, and only its second token
    got = acr_metrics(groups_of(UID), REWARDS, ACC, advantages)
    assert got["acr/rate"] == 0.75 and got["acr/post"] == 0.5
    assert got["acr/rows_nonzero"] == pytest.approx(4 / 12)


@pytest.mark.parametrize(("uid", "masked"), [("", ()), ("abc", ()), ("aab", (0, 1, 2)), (["pad1", "pad1"], ())])
def test_a_batch_without_a_comparable_group(uid, masked):
    n = len(uid)
    got = acr_metrics(groups_of(uid, masked), torch.zeros(n), torch.zeros(n).bool(), torch.zeros(n, 2))
    assert got["acr/groups"] == 0
    assert all(np.isfinite(v) for v in got.values())
    assert got["acr/rate"] == got["acr/post"] == got["acr/reward_std_mean"] == 0


def test_binary_accuracy():
    counted = torch.tensor([True, True, False])
    assert binary_accuracy(torch.tensor([0.0, 1, 0.3]), counted).tolist()[:2] == [False, True]
    assert binary_accuracy(torch.tensor([0.0, 0.5, 0.3]), counted) is None
    assert binary_accuracy(torch.tensor([-1.0, 1, 1]), counted).tolist() == [False, True, True]
    assert binary_accuracy(torch.tensor([0.0, 1, 1]), counted, ((0.0, 5.0),)) is None
    assert binary_accuracy(torch.tensor([0.0, 5, 1]), counted, ((0.0, 5.0),)).tolist()[:2] == [False, True]


@pytest.mark.parametrize(("p", "size"), [(0.5, 8), (0.9, 4), (0.05, 2), (0.0, 8), (1.0, 3)])
def test_expected_rate_is_what_sampling_gives(p, size):
    draws = torch.rand(200_000, size, generator=torch.Generator().manual_seed(1)) < p
    simulated = float((draws.all(1) | (~draws).all(1)).double().mean())
    assert float(expected_rate(torch.tensor(p, dtype=torch.float64), size)) == pytest.approx(simulated, abs=4e-3)


def test_running_forms():
    watch = AcrWatch(window=3)
    rates = [0.1, 0.5, 0.9, 0.2]
    out = [watch.update(rate) for rate in rates]
    assert [m["acr/mean_100"] for m in out] == pytest.approx([0.1, 0.3, 0.5, 0.425])
    assert [m["acr/std_window"] for m in out] == pytest.approx(
        [0, statistics.pstdev(rates[:2]), statistics.pstdev(rates[:3]), statistics.pstdev(rates[1:])]
    )
    assert [m["acr/steps_above"] for m in out] == [0, 1, 2, 0]
    for _ in range(200):
        last = watch.update(1.0)
    assert last["acr/mean_100"] == pytest.approx((sum(rates) + 96) / 100)  # the first 100 steps only


def test_the_warning_comes_once_per_episode():
    watch = AcrWatch(warn_above=0.35, warn_steps=3)
    metrics = {"acr/rate": 0.6, "acr/wrong": 0.5, "acr/correct": 0.1}

    def told(rate):
        watch.update(rate)
        return watch.warning(metrics)

    assert [bool(told(rate)) for rate in [0.6] * 6] == [False, False, True, False, False, False]
    assert not told(0.35)  # at the threshold is not above it
    assert [bool(told(rate)) for rate in [0.6] * 4] == [False, False, True, False]


@pytest.mark.parametrize(("wrong", "correct", "says"), [(0.5, 0.1, "too hard"), (0.1, 0.5, "are solved")])
def test_the_warning_names_cause_advice_and_keys(wrong, correct, says):
    watch = AcrWatch(warn_steps=1)
    watch.update(0.6)
    text = watch.warning({"acr/rate": 0.6, "acr/wrong": wrong, "acr/correct": correct})
    for part in (says, "avspo", "algorithm.acr.warn_above", "algorithm.acr.warn_steps", "0.60"):
        assert part in text


@pytest.mark.parametrize("settings", [{"above": 5}, 3, {"warn_above": "abc"}, {"warn_steps": True}])
def test_the_watch_takes_its_three_numbers_only(settings):
    assert watch({"acr": {"warn_above": 0.5}}).warn_above == 0.5 and watch({}) == AcrWatch()
    with pytest.raises(ValueError, match=r"algorithm\.acr"):
        watch({"acr": settings})


def test_ties_of_unknown_cause_are_called_that():
    alarm = AcrWatch(warn_above=0.1, warn_steps=1)
    alarm.update(0.9)
    assert "unknown accuracy" in alarm.warning({"acr/rate": 0.9, "acr/tied_other": 0.9})


def test_the_watch_survives_a_checkpoint():
    rates = [i % 7 / 7 for i in range(40)]
    whole, head, resumed = AcrWatch(window=5), AcrWatch(window=5), AcrWatch(window=5)
    want = [whole.update(rate) for rate in rates]
    first = [head.update(rate) for rate in rates[:17]]
    resumed.load_state_dict(json.loads(json.dumps(head.state_dict())))
    assert first + [resumed.update(rate) for rate in rates[17:]] == want


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"warn_above": -0.1}, "warn_above=-0.1"),
        ({"warn_above": 2}, "warn_above=2"),
        ({"warn_steps": 0}, "warn_steps=0"),
        ({"window": 1}, "window=1"),
    ],
)
def test_settings_are_checked(settings, key):
    with pytest.raises(ValueError, match=f"algorithm.acr.{key}"):
        AcrWatch(**settings)
