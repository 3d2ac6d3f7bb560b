"""What a method declares, how it reaches verl's registries, and what verl's call becomes for it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

from verl_ext import registry
from verl_ext.groups import make_groups
from verl_ext.outcomes import accuracy
from verl_ext.registry import (
    AdvantageContext,
    AdvantageInputs,
    AdvantageOutput,
    ConfigError,
    DataError,
    Method,
    MethodConfig,
    advantage_context,
    check_finite,
    checked_groups,
    register_method,
    verl_estimator,
)


@pytest.fixture(autouse=True)
def own_registries(monkeypatch):
    """Whatever a test registers is gone afterwards."""
    for name in ("METHODS", "_PROCESS_STATE"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
    kept = dict(ADV_ESTIMATOR_REGISTRY), dict(POLICY_LOSS_REGISTRY)
    yield
    for live, saved in zip((ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY), kept, strict=True):
        live.clear()
        live.update(saved)


@dataclass(frozen=True)
class ToyConfig(MethodConfig):
    prefix: ClassVar[str] = "algorithm.toy"
    weight: float = 1.0
    shape: str = "flat"

    def __post_init__(self):
        self.number("weight", 0, 2, low_open=True)
        self.choice("shape", "flat", "round")


def toy(inputs: AdvantageInputs, config: ToyConfig, state: dict) -> AdvantageOutput:
    state["calls"] = state.get("calls", 0) + 1
    return AdvantageOutput(
        config.weight * inputs.rewards, {"toy/step": float(inputs.step)}, {"row": inputs.rewards}, {"p": 0.5}
    )


TOY = Method("toy", ToyConfig, toy)
SCORES = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 3.0], [4.0, 0.0]])
MASK = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 0]])
UID = np.array(["a", "a", "b", "b"], dtype=object)


def call(method=TOY, config=None, uid=UID, scores=SCORES, mask=MASK, **kwargs):
    return verl_estimator(method)(token_level_rewards=scores, response_mask=mask, config=config, index=uid, **kwargs)


# -- declaring and registering ----------------------------------------------------------------------------------------


def test_registering_twice_is_registering_once():
    assert register_method(TOY) is TOY
    bound = ADV_ESTIMATOR_REGISTRY["toy"]
    register_method(Method("toy", ToyConfig, toy))
    assert ADV_ESTIMATOR_REGISTRY["toy"] is bound
    assert bound.__name__ == "toy_advantage"


def test_another_method_of_the_same_name_is_an_error():
    register_method(TOY)
    with pytest.raises(ValueError, match=r"'toy' is already registered by .*\.toy; got .*lambda"):
        register_method(replace(TOY, estimator=lambda *a: None))


def theirs(**kwargs): ...


@pytest.mark.parametrize(
    ("taken", "method"),
    [(ADV_ESTIMATOR_REGISTRY, TOY), (POLICY_LOSS_REGISTRY, Method("toy", policy_loss=print))],
    ids=["estimator", "policy loss"],
)
def test_a_name_that_verl_has_is_an_error_each_time(taken, method):
    taken["toy"] = theirs
    for _ in range(2):
        with pytest.raises(ValueError, match=r"'toy' is already registered in verl by .*theirs"):
            register_method(method)
    assert taken["toy"] is theirs
    assert "toy" not in registry.METHODS


def test_verls_own_names_are_taken():
    for method in (Method("grpo", estimator=toy), Method("vanilla", policy_loss=print)):
        with pytest.raises(ValueError, match="already registered in verl"):
            register_method(method)


def test_a_policy_loss_reaches_verl_as_it_is():
    register_method(Method("toy", policy_loss=theirs))
    assert POLICY_LOSS_REGISTRY["toy"] is theirs and "toy" not in ADV_ESTIMATOR_REGISTRY


def test_an_unknown_need_is_refused():
    with pytest.raises(ConfigError, match="method 'toy' needs 'enthropy', which is not one of acc, entropy"):
        Method("toy", needs=("enthropy",))


# -- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm", [None, {}, {"toy": None}, OmegaConf.create({"toy": {}}), {"other": {"weight": 9}}]
)
def test_defaults(algorithm):
    assert TOY.config(algorithm) == ToyConfig()


def test_values_are_read():
    assert TOY.config(OmegaConf.create({"toy": {"weight": 2, "shape": "round"}})) == ToyConfig(2, "round")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"wieght": 1}, r"algorithm\.toy\.wieght is unknown; the keys are shape, weight"),
        ({"shape": "square"}, r"algorithm\.toy\.shape='square' is not one of flat, round"),
        ({"weight": 0}, r"algorithm\.toy\.weight=0 must be a number in \(0, 2\]"),
        ({"weight": 2.1}, r"algorithm\.toy\.weight=2\.1 must be a number"),
        ({"weight": "1"}, r"algorithm\.toy\.weight='1' must be a number"),
        ({"weight": True}, r"algorithm\.toy\.weight=True must be a number"),
        ({"weight": None}, r"algorithm\.toy\.weight=None must be a number"),
        ({"weight": float("nan")}, r"algorithm\.toy\.weight=nan must be a number"),
    ],
)
def test_bad_values_are_refused_by_full_name(given, text):
    with pytest.raises(ConfigError, match=text):
        TOY.config({"toy": given})


# -- verl's call ------------------------------------------------------------------------------------------------------


def test_one_value_per_row_goes_to_its_tokens():
    advantages, returns = call(config={"toy": {"weight": 2.0}})
    assert advantages.tolist() == [[2, 2], [4, 0], [6, 6], [8, 0]]
    assert torch.equal(advantages, returns)


def test_values_per_token_stay():
    method = Method("toy", estimator=lambda inputs, config, state: AdvantageOutput(inputs.token_level_rewards * 10))
    assert call(method)[0].tolist() == (SCORES * 10).tolist()


def test_the_context_brings_fields_step_state_and_takes_the_output():
    seen = []

    def spy(inputs, config, state):
        seen.append(inputs)
        return toy(inputs, config, state)

    method = Method("toy", ToyConfig, spy, needs=("entropy",))
    state: dict = {}
    context = AdvantageContext(method, ToyConfig(), state, {"entropy": MASK * 0.5}, step=7, progress=0.25)
    with advantage_context(context):
        call(method, config={"norm_adv_by_std_in_grpo": False})
    (inputs,) = seen
    assert (inputs.step, inputs.progress, inputs.norm_by_std) == (7, 0.25, False)
    assert torch.equal(inputs.fields["entropy"], MASK * 0.5)
    assert state == {"calls": 1}
    assert context.output.metrics == {"toy/step": 7.0} and context.output.loss_scalars == {"p": 0.5}
    assert context.output.loss_fields["row"].tolist() == [1, 2, 3, 4]


def test_only_the_last_output_of_a_session_counts():
    counted = []

    def spy(inputs, config, state):
        counted.append(inputs.groups.counted.tolist())
        return toy(inputs, config, state)

    method = Method("toy", ToyConfig, spy)
    # Two sessions: rows 0 and 2 (2 is last), rows 1 and 3 (1 is last).
    context = AdvantageContext(method, ToyConfig(), {}, {}, final_row=torch.tensor([2, 1, 2, 1]))
    with advantage_context(context):
        advantages, _ = call(method, uid=np.array(["a"] * 4, dtype=object))
    assert counted == [[False, True, True, False]]
    assert advantages.tolist() == [[3, 3], [2, 0], [3, 3], [2, 0]]


def test_the_context_ends_with_an_error():
    def failing(inputs, config, state):
        raise RuntimeError("broken")

    context = AdvantageContext(Method("toy", estimator=failing), MethodConfig(), {}, {})
    with pytest.raises(RuntimeError), advantage_context(context):
        call(context.method)
    call(config={"toy": {"weight": 2.0}})  # as under a stock trainer again


def test_a_stock_trainer_keeps_state_in_the_process_and_hands_over_what_it_passes(capsys):
    seen = []

    def spy(inputs, config, state):
        seen.append(inputs.fields)
        return toy(inputs, config, state)

    method = Method("toy", ToyConfig, spy, needs=("old_log_probs", "acc"), stateful=True)
    for _ in range(3):
        call(method, old_log_probs=-MASK)
    assert all(torch.equal(fields["old_log_probs"], -MASK) and "acc" not in fields for fields in seen)
    assert registry._PROCESS_STATE["toy"]["calls"] == 3
    assert capsys.readouterr().out.count("toy keeps a state") == 1


def test_a_stock_trainer_that_lacks_a_field_is_told_what_to_set():
    method = Method("toy", ToyConfig, toy, needs=("acc", "entropy", "ref_log_prob"))
    with pytest.raises(
        ConfigError, match=r"toy needs entropy, ref_log_prob, which .* Set trainer\.v1\.trainer_mode=recipe_sync"
    ):
        call(method)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_estimator_that_returns_nonsense_is_stopped(bad):
    def broken(inputs, config, state):
        return AdvantageOutput(torch.where(inputs.rewards == 3, bad, inputs.rewards))

    with pytest.raises(DataError, match=rf"advantages is not finite in row 2 \(uid b\): {bad}"):
        call(Method("toy", estimator=broken))


def test_rewards_are_summed_in_float32_or_better():
    groups = make_groups(np.array(["a"], dtype=object), torch.ones(1, 3))
    make = lambda dtype: AdvantageInputs(torch.tensor([[256.0, 1.0, 1.0]], dtype=dtype), torch.ones(1, 3), groups)  # noqa: E731
    assert make(torch.bfloat16).rewards.dtype == torch.float32 and make(torch.bfloat16).rewards.item() == 258
    assert make(torch.float64).rewards.dtype == torch.float64


# -- checks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "row", "bad"),
    [
        (torch.tensor([0.0, torch.nan, torch.inf]), 1, "nan"),
        (torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, -torch.inf]]), 2, "-inf"),
    ],
)
def test_check_finite_names_field_row_uid_and_value(values, row, bad):
    with pytest.raises(DataError, match=rf"entropy is not finite in row {row} \(uid u{row}\): {bad}\. Fix"):
        check_finite("entropy", values, np.array(["u0", "u1", "u2"]))
    with pytest.raises(DataError, match=rf"entropy is not finite in row {row}: {bad}"):
        check_finite("entropy", values)


def test_check_finite_passes_finite_and_empty():
    check_finite("x", torch.zeros(3, 2))
    check_finite("x", torch.zeros(0))


def test_checked_groups(caplog):
    with pytest.raises(DataError, match="4 groups hold 4 responses, fewer than two each on average"):
        checked_groups(np.array(list("abcd"), dtype=object), MASK, None)
    # 3 + 1 rows: two per group on average, so one is left alone with a warning.
    with caplog.at_level(logging.WARNING, "verl_ext"):
        assert checked_groups(np.array(list("aaab"), dtype=object), MASK, None).sizes.tolist() == [3, 1]
    assert "1 of 2 groups have one response only" in caplog.text
    # Sessions of several outputs: only the counted rows make the average.
    with pytest.raises(DataError, match="2 groups hold 2 responses"):
        checked_groups(UID, MASK, torch.tensor([True, False, True, False]))
    # Padding alone is no group at all.
    assert checked_groups(np.array(["pad0"] * 4, dtype=object), MASK * 0, None).sizes.tolist() == [0]


def inputs_with(rewards, acc=None, counted=None):
    rewards = torch.tensor(rewards)
    groups = make_groups(np.array(["a"] * len(rewards), dtype=object), torch.ones(len(rewards), 1), counted)
    return AdvantageInputs(
        rewards[:, None], torch.ones(len(rewards), 1), groups, {} if acc is None else {"acc": torch.tensor(acc)}
    )


def test_accuracy_sources():
    read = lambda inputs, source, lo=0.0, hi=1.0: accuracy(inputs, lo, hi, source, "algorithm.toy").tolist()  # noqa: E731
    flagged = inputs_with([0.2, 0.9, 1.0], acc=[1.0, 0.0, 1.0])
    assert read(flagged, "auto") == read(flagged, "flag") == [True, False, True]
    assert read(flagged, "threshold") == [False, True, True]
    assert read(inputs_with([-1.0, 1.0]), "auto", -1.0, 1.0) == [False, True]
    assert read(inputs_with([2.0, 6.0, 6.1, 10.0]), "threshold", 2.0, 10.0) == [False, False, True, True]
    assert read(inputs_with([0.0, 1.0 + 5e-7]), "auto") == [False, True]


def test_accuracy_of_rows_that_do_not_count_is_not_checked():
    counted = torch.tensor([True, True, False])
    assert accuracy(inputs_with([0.0, 1.0, 0.4], counted=counted), 0, 1, "auto", "p").tolist()[:2] == [False, True]
    assert accuracy(inputs_with([0.0, 1.0, 0.4], [0.0, 1.0, 0.4], counted), 0, 1, "auto", "p").tolist()[:2] == [
        False,
        True,
    ]


def test_accuracy_errors_name_row_value_and_fix():
    with pytest.raises(
        DataError, match=r"reward 0\.4.* in row 1 is neither r_lo=0 nor r_hi=1.*algorithm\.toy\.acc_source=threshold"
    ):
        accuracy(inputs_with([0.0, 0.4]), 0, 1, "auto", "algorithm.toy")
    with pytest.raises(DataError, match=r"algorithm\.toy\.acc_source=flag, but no row carries `acc`"):
        accuracy(inputs_with([0.0, 1.0]), 0, 1, "flag", "algorithm.toy")
    with pytest.raises(DataError, match=r"`acc` must be 0 or 1, but is 0\.5 in row 1"):
        accuracy(inputs_with([0.0, 1.0], acc=[1.0, 0.5]), 0, 1, "auto", "algorithm.toy")
