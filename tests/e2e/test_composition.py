"""Estimators and policy losses compose: every pair through verl's real FSDP2 worker, on one rank and on two.

engine_probe.py makes the runs; each pair gets four updates (two mini-batches, twice) from the same weights.
"""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import verl  # noqa: F401  loads the plug-in, which registers the methods

from verl_ext.registry import METHODS

pytestmark = pytest.mark.e2e

HERE = Path(__file__).parent
VERL_LOSSES = ["vanilla", "gspo", "cispo"]
ESTIMATORS = ["grpo", *(name for name, m in METHODS.items() if m.estimator)]
LOSSES = VERL_LOSSES + [name for name, m in METHODS.items() if m.policy_loss]
CURRENT = {"algorithm.cov_grpo.logp": "current"}


def probe(folder: Path, model: Path, ranks: int, environment) -> tuple[dict, dict]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    out = folder / f"{ranks}.json"
    command = [sys.executable, "-W", "ignore", str(HERE / "engine_probe.py"), str(model), str(out)]
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    logs = [(folder / f"{ranks}.{rank}.log").open("w+") for rank in range(ranks)]
    running = [
        subprocess.Popen(
            command,
            env=environment(**shared, MASTER_PORT=port, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    codes = [process.wait(300) for process in running]
    for log in logs:
        log.seek(0)
    assert codes == [0] * ranks, "".join(log.read()[-3000:] for log in logs)
    found = json.loads(out.read_text())
    runs = {(run["estimator"], run["loss"], tuple(sorted(run["settings"].items()))): run for run in found["runs"]}
    return runs, found["beliefs"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("composition")


@pytest.fixture(scope="module")
def model(folder):
    from e2e.test_cpu_stack import make_model

    make_model(folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def found(folder, model, cpu_environment):
    return {ranks: probe(folder, model, ranks, cpu_environment) for ranks in (1, 2)}


@pytest.fixture(scope="module")
def one(found):
    return found[1][0]


@pytest.fixture(scope="module")
def two(found):
    return found[2][0]


def find(runs: dict, estimator: str, loss: str, **settings) -> dict:
    """The run of this pair; without `settings`, the pair with the settings that the probe gives it."""
    for (e, found_loss, found_settings), run in runs.items():
        if (e, found_loss) == (estimator, loss) and settings.items() <= dict(found_settings).items():
            return run
    raise KeyError((estimator, loss, settings))


def gradients(run: dict) -> list[np.ndarray]:
    return [np.array(g) for g in run["gradients"]]


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def is_refused(estimator: str, loss: str) -> str | None:
    """Pairs that make no sense, and a part of the reason that must be given."""
    token_level = estimator in METHODS and METHODS[estimator].token_level
    if loss == "holderpo" and token_level:
        return f"algorithm.adv_estimator={estimator} gives each token an advantage of its own"
    if loss == "cov_grpo" and token_level and estimator != "cov_grpo":
        return f"but {estimator} gives each token its own"
    if estimator == "cov_grpo" and loss not in (*VERL_LOSSES, "cov_grpo", "mcpo"):
        return "gives each token"
    return None


def test_all_pairs_were_tried(one):
    assert {key[:2] for key in one} == {(e, loss) for e in ESTIMATORS for loss in LOSSES}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_pair_trains_or_is_refused_with_the_reason(one, estimator, loss):
    run, reason = find(one, estimator, loss), is_refused(estimator, loss)
    if reason:
        assert reason in run["refused"]
        return
    assert len(run["gradients"]) == 4
    assert all(np.isfinite(g).all() and np.linalg.norm(g) > 0 for g in gradients(run))
    assert all(math.isfinite(x) for values in run["metrics"].values() for x in values if abs(x) != math.inf)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_on_policy_all_losses_are_the_policy_gradient(one, estimator):
    """In the first update the ratio is 1: the losses differ from the second one on."""
    want = gradients(find(one, estimator, "vanilla"))
    for loss in LOSSES:
        run = find(one, estimator, loss)
        if "refused" in run or loss == "cov_grpo":  # which has weights of its own
            continue
        got = gradients(run)
        assert distance(got[0], want[0]) < 1e-5, loss
        if loss != "vanilla":
            assert distance(got[1], want[1]) > 1e-3 or distance(got[2], want[2]) > 1e-3, loss


def test_estimators_give_different_gradients(one):
    firsts = {e: np.concatenate(gradients(find(one, e, "vanilla"))[:2]) for e in ESTIMATORS}
    for a in ESTIMATORS:
        for b in ESTIMATORS:
            assert a == b or distance(firsts[a], firsts[b]) > 1e-2, (a, b)


def test_the_exponent_acts_from_the_second_update_on(one):
    """holderpo at p = 1.96 against gspo (p = 0), from the same weights."""
    holder, gspo = gradients(find(one, "grpo", "holderpo")), gradients(find(one, "grpo", "gspo"))
    assert distance(holder[0], gspo[0]) < 1e-5
    assert distance(holder[1], gspo[1]) > 1e-2


def test_the_hinge_sleeps_on_policy_and_wakes_with_drift(one):
    """Mastered rows are in the first and third mini-batch."""
    metrics = find(one, "mcpo", "mcpo")["metrics"]
    assert metrics["mcpo/mastered_rows"] == [4, 0, 4, 0]
    assert metrics["hkl/loss"][0] == 0 and metrics["hkl/active_frac:part"][0] == 0
    assert metrics["hkl/loss"][2] > 0 and metrics["hkl/active_frac:part"][2] > 0


def test_current_log_probs_are_the_old_ones_in_the_first_update(one):
    """Mini-batches hold whole groups here, so the weights of loss and driver agree until the weights move."""
    in_the_loss, driver = find(one, "cov_grpo", "cov_grpo", **CURRENT), find(one, "cov_grpo", "vanilla")
    assert distance(gradients(in_the_loss)[0], gradients(driver)[0]) < 1e-5
    assert distance(gradients(in_the_loss)[2], gradients(driver)[2]) > 1e-2


def test_weights_that_belong_to_the_driver_are_refused_in_the_loss(one):
    [run] = [run for key, run in one.items() if key == ("cov_grpo", "cov_grpo", ())]
    assert "these weights are part of the advantages" in run["refused"]


def test_two_ranks_give_the_gradients_of_one(one, two):
    """Normalisers, totals and gathered rows are those of the whole mini-batch; verl's own losses run along."""
    assert one.keys() == two.keys()
    for key, run in one.items():
        if "refused" in run:
            assert two[key]["refused"] == run["refused"]
            continue
        deviations = [distance(b, a) for a, b in zip(gradients(run), gradients(two[key]), strict=True)]
        if ("algorithm.cov_grpo.scope", "microbatch") in key[2]:
            assert deviations[0] > 1e-2, "this scope depends on the split: that is what it is there to show"
        else:
            # Rounding grows through the updates (Adam divides by small numbers); a wrong normaliser is off by 2.
            assert deviations[0] < 1e-5 and max(deviations) < 1e-2, (key, deviations)


@pytest.mark.parametrize("ranks", [1, 2])
def test_belief_probes_of_both_layouts_say_what_the_model_says(found, model, ranks):
    """verl's FSDP2 engine, micro-batches and ranks, against one forward pass of the model for each probe."""
    import torch
    from e2e.engine_probe import asked
    from transformers import AutoModelForCausalLM

    language_model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    want = []
    for prompt, response, ends, before, answer in zip(*asked()[:3], [asked()[3]] * 9, asked()[4], strict=True):
        for end in ends:
            ids = torch.cat([prompt, response[:end], before, answer])
            with torch.no_grad():
                log_probs = language_model(ids[None]).logits[0].log_softmax(-1)
            want.append(float(log_probs[-len(answer) - 1 : -1].gather(1, answer[:, None]).sum().exp()))
    beliefs = found[ranks][1]
    for layout in ("batched", "packed", "again"):
        np.testing.assert_allclose(beliefs[layout], want, rtol=1e-5, atol=1e-7, err_msg=layout)
