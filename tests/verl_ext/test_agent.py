"""Seeds of responses: one for each response, the same again in another run, whatever the data set's index is."""

from __future__ import annotations

import asyncio

import pytest
from omegaconf import OmegaConf

from verl_ext.agent import SeededSingleTurnAgentLoop, response_seed


def seed_of(index, session=0, step=1, text="1+1="):
    """The seed that reaches verl's own loop."""
    seen = {}

    class Loop(SeededSingleTurnAgentLoop):
        def __init__(self):
            self.config = OmegaConf.create({"data": {"seed": 0}})

    async def run(self, sampling_params, **kwargs):
        seen.update(sampling_params)

    base, original = SeededSingleTurnAgentLoop.__mro__[1], SeededSingleTurnAgentLoop.__mro__[1].run
    base.run = run
    try:
        extra = {} if index is None else {"index": index}
        prompt = [{"role": "user", "content": text}]
        asyncio.run(
            Loop().run(
                {"temperature": 1.0},
                global_steps=step,
                session_id=session,
                extra_info=extra,
                raw_prompt=prompt,
                index=0,
            )
        )
    finally:
        base.run = original
    assert seen["temperature"] == 1.0
    return seen["seed"]


@pytest.mark.parametrize("index", [0, "uuid-1910", None])
def test_any_index_gives_a_seed_of_its_own_to_each_response(index):
    assert seed_of(index) == seed_of(index)
    assert len({seed_of(index), seed_of(index, session=1), seed_of(index, step=2)}) == 3


def test_without_an_index_the_prompts_text_tells_prompts_apart():
    assert seed_of(None, text="1+1=") != seed_of(None, text="1+2=")
    assert seed_of(0) != seed_of(1)


def test_seeds_are_the_same_on_every_machine_and_fit_vllm():
    assert response_seed(0, 1, 2, 3) == 1658923180 < 2**31
