"""Reproducible rollouts: verl's single-turn agent loop with a sampling seed per response.

Select it with `actor_rollout_ref.rollout.agent.default_agent_loop=seeded_single_turn_agent`. The seed is a function of
`data.seed`, the global step, the prompt's `extra_info.index` (else its text) and the number of the response.
So a run repeats itself, a resumed run continues as if it had not been cut, and two methods started with one seed sample
alike until they differ. verl's own `rollout.full_determinism` gives every request of a server one seed, which makes a
group's responses equal.
"""

from __future__ import annotations

import hashlib
from numbers import Integral
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

NAME = "seeded_single_turn_agent"


def response_seed(*parts) -> int:
    """A 31-bit seed from the parts, the same on every machine and in every process."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") >> 1


@register(NAME)
class SeededSingleTurnAgentLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        index = (kwargs.get("extra_info") or {}).get("index")
        if isinstance(index, Integral):
            index = int(index)
        elif index is None:  # verl numbers every prompt 0 then
            index = str(list(kwargs["raw_prompt"]))
        seed = response_seed(
            self.config.data.get("seed", None), int(kwargs["global_steps"]), index, int(kwargs["session_id"])
        )
        return await super().run({**sampling_params, "seed": seed}, **kwargs)
