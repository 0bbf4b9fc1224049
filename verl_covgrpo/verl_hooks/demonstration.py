"""dagrpo's off-policy anchor: a verified demonstration as one of a prompt's G responses.

An agent loop of verl, selected with

    actor_rollout_ref.rollout.agent.default_agent_loop=demonstration_agent

The first of a prompt's sessions takes the text under `demonstration` in the row's extra_info in the
place of a sampled response, and ends it as the model would; every other session, and a prompt
without a demonstration, samples as usual. It is scored like any response, and its advantage, masks
and old log-probs (the trainer's) are computed over the mix. Our choice: one anchor, no shaping.

There are no rollout log-probs of a text that was not sampled: zeros stand there, so the metrics
that compare rollout and actor mean nothing for these rows, and rollout correction is refused.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

KEY = "demonstration"


class DemonstrationAgentLoop(SingleTurnAgentLoop):
    """One turn, sampled or demonstrated."""

    async def run(
        self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any
    ) -> AgentLoopOutput:
        """Return the demonstration in a prompt's first session, else what is sampled."""
        text = (kwargs.get("extra_info") or {}).get(KEY)
        if not text or kwargs.get("session_id") != 0:
            return await super().run(sampling_params, priority=priority, **kwargs)
        prompt_ids = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        response_ids = demonstration_ids(self.tokenizer, str(text), self.response_length)
        step = int(kwargs.get("global_steps", 0))
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            response_mask=[1] * len(response_ids),
            response_logprobs=[0.0] * len(response_ids),
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={
                "turn_scores": [],
                "tool_rewards": [],
                "min_global_steps": step,
                "max_global_steps": step,
            },
        )


def demonstration_ids(tokenizer: Any, text: str, longest: int) -> list[int]:
    """Return the tokens of a demonstration with the end of the turn, at most `longest`."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    if tokenizer.eos_token_id is not None:
        ids = [*ids, tokenizer.eos_token_id]
    return list(ids[:longest])
