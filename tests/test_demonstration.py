"""A verified demonstration in the place of one sampled response."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from verl_fixtures import verl  # noqa: F401  loads the plugin

pytestmark = pytest.mark.verl


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from verl_covgrpo.demo.model import byte_tokenizer

    return byte_tokenizer()


def loop_of(tokenizer: Any, monkeypatch: pytest.MonkeyPatch, response_length: int = 16) -> Any:
    """Return the agent loop with a server that is not there: sampling says so."""
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

    from verl_covgrpo.verl_hooks.demonstration import DemonstrationAgentLoop

    async def sampled(self: Any, sampling_params: Any, priority: int = 0, **_: Any) -> str:
        return "sampled"

    async def tokens(messages: list[dict[str, str]]) -> list[int]:
        return tokenizer.encode(messages[0]["content"])

    monkeypatch.setattr(SingleTurnAgentLoop, "run", sampled)
    made = object.__new__(DemonstrationAgentLoop)
    made.tokenizer, made.response_length = tokenizer, response_length
    made.ct_build_initial_tokens = tokens
    return made


def run(loop: Any, session: int, demonstration: str | None) -> Any:
    extra_info = {} if demonstration is None else {"demonstration": demonstration}
    return asyncio.run(
        loop.run(
            {},
            raw_prompt=[{"role": "user", "content": "1 + 1"}],
            session_id=session,
            extra_info=extra_info,
            global_steps=7,
        )
    )


def test_the_first_session_takes_the_demonstration(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(loop_of(tokenizer, monkeypatch), 0, "it is 2")
    assert tokenizer.decode(found.prompt_ids) == "1 + 1"
    assert tokenizer.decode(found.response_ids[:-1]) == "it is 2"
    assert found.response_ids[-1] == tokenizer.eos_token_id
    assert found.response_mask == [1] * len(found.response_ids)
    assert len(found.response_logprobs) == len(found.response_ids)
    assert found.extra_fields["min_global_steps"] == found.extra_fields["max_global_steps"] == 7
    assert {"prompts", "responses", "response_mask"} <= set(found.as_dict())


@pytest.mark.parametrize(("session", "demonstration"), [(1, "it is 2"), (0, None), (0, "")])
def test_everything_else_is_sampled(
    session: int,
    demonstration: str | None,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run(loop_of(tokenizer, monkeypatch), session, demonstration) == "sampled"


def test_a_long_demonstration_is_cut(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(loop_of(tokenizer, monkeypatch, response_length=4), 0, "it is 2")
    assert tokenizer.decode(found.response_ids) == "it i"


def test_verl_knows_the_loop_by_name() -> None:
    import hydra
    from verl.experimental.agent_loop import agent_loop

    from verl_covgrpo.verl_hooks.agent_loops import DEMONSTRATION
    from verl_covgrpo.verl_hooks.demonstration import DemonstrationAgentLoop

    target = agent_loop._agent_loop_registry[DEMONSTRATION]["_target_"]
    assert hydra.utils.get_class(target) is DemonstrationAgentLoop
