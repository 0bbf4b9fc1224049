"""reasoning-gym's own scorer as a verl reward function.

In a launch:
    reward.custom_reward_function.path=pkg://verl_covgrpo.rewards.reasoning_gym
    reward.custom_reward_function.name=compute_score
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

PREFIX = "reasoning_gym/"


@cache
def _task(name: str) -> Any:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(name)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **_: Any,
) -> float:
    """Score of one answer, between 0 and 1, by the task's own scorer; partial credit counts as 0.

    Args:
        data_source: "reasoning_gym/TASK".
        solution_str: the response, without special tokens.
        ground_truth: the task's reference answer.
        extra_info: "entry" holds the task's metadata as JSON, which some scorers read.
    """
    if not data_source.startswith(PREFIX):
        raise ValueError(f"data_source {data_source!r}: expected {PREFIX}TASK")
    entry = json.loads((extra_info or {}).get("entry") or "{}")
    entry.setdefault("answer", ground_truth)
    score = _task(data_source.removeprefix(PREFIX))(solution_str.strip(), entry)
    return float(score == 1.0)
