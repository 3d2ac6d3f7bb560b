"""verl_ext.probe: the rows of both layouts against a language model asked prefix by prefix."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl_ext.probe import (
    COPY,
    KINDS,
    LAYOUTS,
    SEES,
    ActorProbe,
    Segments,
    dump,
    make_probes,
    packed_attention_mask,
    packed_refusal,
)

VOCABULARY = 50


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
        attn_implementation="sdpa",
    )
    return Qwen2ForCausalLM(config).eval()


def compute_log_prob(model, data):
    """What verl's worker returns: at each token the log-prob of the next one, jagged."""
    ids = data["input_ids"]
    positions = data["position_ids"].to_padded_tensor(0)
    if COPY in data.keys():
        mask = packed_attention_mask(data[COPY], data[SEES])
    else:
        mask = (torch.arange(positions.shape[1]) < ids.offsets().diff()[:, None]).long()
    with torch.no_grad():
        logits = model(ids.to_padded_tensor(0), attention_mask=mask, position_ids=positions, use_cache=False).logits
    rows = [row[: int(n)] for row, n in zip(logits.log_softmax(-1), ids.offsets().diff(), strict=True)]
    pieces = [lp.gather(1, i.roll(-1)[:, None])[:, 0] for lp, i in zip(rows, ids.unbind(), strict=True)]
    return {"log_probs": torch.nested.as_nested_tensor(pieces, layout=torch.jagged)}


def oracle(model, prompts, responses, ends, before, scored):
    """Token log-probs of each probe: one forward pass for each, in float64."""
    found = []
    for prompt, response, cuts, answer in zip(prompts, responses, ends, scored, strict=True):
        for cut in cuts:
            ids = torch.cat([prompt, response[:cut], before, answer])[None]
            with torch.no_grad():
                log_probs = model.double()(ids).logits.log_softmax(-1)[0]
            model.float()
            first = ids.shape[1] - len(answer)
            found.append([float(log_probs[first + k - 1, token]) for k, token in enumerate(answer)])
    return found


def case(seed=0, rows=5, before=3):
    rng = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(0, VOCABULARY, (n,), generator=rng)  # noqa: E731
    number = lambda low, high: int(torch.randint(low, high, (1,), generator=rng))  # noqa: E731
    prompts, responses = [draw(number(1, 6)) for _ in range(rows)], [draw(number(0, 15)) for _ in range(rows)]
    ends = []
    for response in responses:
        inner = sorted({number(0, len(response) + 1) for _ in range(number(0, 6))} - {0, len(response)})
        ends.append([0, *inner, len(response)])
    return prompts, responses, ends, draw(before), [draw(number(1, 4)) for _ in range(rows)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("before", [0, 1, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_both_layouts_say_what_the_model_says(model, layout, before, ranks):
    parts = case(seed=before, before=before)
    probes = make_probes(*parts, layout, ranks)
    want = oracle(model, *parts)
    output = compute_log_prob(model, probes.data())
    got, probe = probes.log_probs(output["log_probs"])
    assert probe.tolist() == [i for i, tokens in enumerate(want) for _ in tokens]
    np.testing.assert_allclose(got, np.concatenate(want), rtol=0, atol=1e-5)
    for kind, formula in (
        ("joint", lambda t: math.exp(sum(t))),
        ("geo_mean", lambda t: math.exp(sum(t) / len(t))),
        ("mean_prob", lambda t: sum(map(math.exp, t)) / len(t)),
    ):
        beliefs = probes.beliefs(output["log_probs"], kind)
        np.testing.assert_allclose(beliefs, [formula(tokens) for tokens in want], rtol=0, atol=1e-5)


def test_a_long_answer_and_a_response_of_nothing(model):
    prompt, nothing = torch.tensor([3, 4]), torch.tensor([], dtype=torch.long)
    parts = ([prompt], [nothing], [[0, 0]], torch.tensor([7]), [torch.arange(40) % VOCABULARY])
    found = []
    for layout in LAYOUTS:
        probes = make_probes(*parts, layout)
        found.append(probes.beliefs(compute_log_prob(model, probes.data())["log_probs"], "geo_mean"))
        assert float(found[-1][0]) == pytest.approx(float(found[-1][1]), abs=1e-6)
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)


def test_probability_of_an_answer():
    """Spec section 7: token probabilities .8, .5, .9."""
    one = torch.ones(1, dtype=torch.long)
    probes = make_probes([one], [one], [[1]], one, [torch.ones(3, dtype=torch.long)], "batched")
    log_probs = torch.tensor([9.0, 9.0, 0.8, 0.5, 0.9, 9.0]).log()
    nested = torch.nested.as_nested_tensor([log_probs], layout=torch.jagged)
    for kind, want in (("joint", 0.36), ("geo_mean", 0.711379), ("mean_prob", 0.733333)):
        assert float(probes.beliefs(nested, kind)) == pytest.approx(want, abs=1e-6)
    assert set(KINDS) == {"joint", "geo_mean", "mean_prob"}
    with pytest.raises(ValueError, match="prob='median' is not one of"):
        probes.beliefs(nested, "median")
    log_probs[3] = float("nan")
    with pytest.raises(ValueError, match="probe 0"):
        probes.beliefs(torch.nested.as_nested_tensor([log_probs], layout=torch.jagged))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_rows_are_dealt_evenly_and_repeated_ones_are_not_read(layout, ranks):
    probes = make_probes(*case(rows=9), layout, ranks)
    order = probes.sent
    assert len(order) % ranks == 0 and len(order) - len(probes.ids) < ranks
    assert set(order) == set(range(len(probes.ids)))
    share = len(order) // ranks
    loads = [sum(len(probes.ids[i]) for i in order[r * share : (r + 1) * share]) for r in range(ranks)]
    assert max(loads) - min(loads) <= max(map(len, probes.ids))
    data = probes.data(max_tokens=5, temperature=0.7)
    assert data["temperature"] == 0.7 and not data["compute_loss"] and not data["calculate_entropy"]
    assert (COPY in data.keys()) == (layout == "packed") == ("use_remove_padding" in data.keys())
    assert data["max_token_len_per_gpu"] == max(map(len, probes.ids)) and len(data) == len(order)


def test_packed_costs_few_tokens():
    """Six cuts of a response of 600 tokens: the response once, and seven short copies."""
    parts = ([torch.ones(80, dtype=torch.long)], [torch.ones(600, dtype=torch.long)])
    ends = [[0, 100, 200, 300, 400, 500, 600]]
    suffix, answer = torch.ones(11, dtype=torch.long), [torch.ones(3, dtype=torch.long)]
    assert make_probes(*parts, ends, suffix, answer, "packed").tokens == 680 + 7 * 15
    assert make_probes(*parts, ends, suffix, answer, "batched").tokens == 7 * (80 + 14) + 2100


def test_by_response():
    parts = case(seed=3)
    probes = make_probes(*parts)
    values = torch.arange(len(probes.row), dtype=torch.float64)
    table, number = probes.by_response(values), 0
    for row, cuts in zip(table.tolist(), parts[2], strict=True):
        mine = list(range(number, number + len(cuts)))
        assert row == mine + [mine[-1]] * (len(row) - len(mine))
        number += len(cuts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ends": [[3, 1]]}, "must ascend"),
        ({"ends": [[0, 9]]}, r"within \[0, 4\]"),
        ({"ends": [[]]}, "must not be empty"),
        ({"scored": [torch.tensor([], dtype=torch.long)]}, "must not be empty"),
        ({"prompts": [torch.tensor([], dtype=torch.long)]}, "must not be empty"),
        ({"layout": "tree"}, "probe_layout='tree' is not one of packed, batched"),
        ({"prompts": [], "responses": [], "ends": [], "scored": []}, "no response"),
    ],
)
def test_what_cannot_be_asked_is_refused(change, message):
    one = torch.ones(4, dtype=torch.long)
    asked = {"prompts": [one], "responses": [one], "ends": [[0, 4]], "before": one, "scored": [one]} | change
    with pytest.raises(ValueError, match=message):
        make_probes(**asked)


def test_the_engines_that_take_no_mask_are_named():
    fsdp = {"strategy": "fsdp2", "ulysses_sequence_parallel_size": 1}
    assert packed_refusal(OmegaConf.create(fsdp)) is None
    for split in ({"ulysses_sequence_parallel_size": 2}, {"fsdp_config": {"ulysses_sequence_parallel_size": 2}}):
        assert "ulysses_sequence_parallel_size=2" in packed_refusal(OmegaConf.create(fsdp | split))
    assert "megatron" in packed_refusal(OmegaConf.create({"strategy": "megatron"}))


class Letters:
    """A tokenizer of letters; `.` ends a turn."""

    all_special_ids = (ord("."),)

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [ord(letter) for letter in text]


def test_packed_falls_back_to_batched_and_says_so(capsys):
    seen = []

    def forward(data):
        seen.append(COPY in data.keys())
        return {"log_probs": data["input_ids"].double() * 0 - 0.5}

    word = lambda text: torch.tensor([ord(letter) for letter in text])  # noqa: E731
    actor = ActorProbe(
        forward, [word("ab")] * 2, [word("cde.."), word("..")], ["x"] * 2, np.array(["u"] * 2), Letters()
    )
    assert [actor.stripped_length(row) for row in (0, 1)] == [3, 0]
    actor.packed_refusal = "for a test"
    for _ in range(2):
        belief = actor.beliefs([0, 1], [[0, 2, 3], [0, 0]], "=", ["x", "yz"], "joint", "packed")
    np.testing.assert_allclose(belief, np.exp([[-0.5] * 3, [-1.0] * 3]))
    assert seen == [False, False] and capsys.readouterr().out.count("batched is used: for a test") == 1
    assert actor.metrics["probe_tokens"] == 2 * (4 + 6 + 7 + 5 + 5) and actor.metrics["probe_seconds"] > 0


def test_dump(tmp_path):
    entry = Segments(1, "u", "p", "7", 1.0, ["a", "b"], [0, 2], [0.1, 0.2, 0.9], [0.1, 0.7])
    path = dump(str(tmp_path), 3, [entry], torch.tensor([[0.0] * 3, [1.0, 2.0, 3.0]]))
    [row] = map(json.loads, path.read_text().splitlines())
    assert path == tmp_path / "probe" / "3.jsonl" and row["step"] == 3
    assert row["advantages"] == [1.0, 3.0] and row["texts"] == ["a", "b"]
