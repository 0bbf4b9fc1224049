"""reasoning-gym's own scorer as a verl reward function.

In a launch:
    reward.custom_reward_function.path=pkg://verl_covgrpo.rewards.reasoning_gym
    reward.custom_reward_function.name=compute_score
and for a model that answers in sentences, where the task's answer is a number:
    +reward.custom_reward_function.reward_kwargs.last_number=true
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

PREFIX = "reasoning_gym/"

NUMBER = re.compile(r"(?:(?<!\d)-)?\d+(?:,\d{3})*(?:\.\d+)?")


@cache
def _task(name: str) -> Any:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(name)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    last_number: bool = False,
    **_: Any,
) -> float:
    """Score of one answer, between 0 and 1, by the task's own scorer; partial credit counts as 0.

    Args:
        data_source: "reasoning_gym/TASK".
        solution_str: the response, without special tokens.
        ground_truth: the task's reference answer.
        extra_info: "entry" holds the task's metadata as JSON, which some scorers read.
        last_number: score the last number in the response instead of the whole of it.
    """
    if not data_source.startswith(PREFIX):
        raise ValueError(f"data_source {data_source!r}: expected {PREFIX}TASK")
    entry = json.loads((extra_info or {}).get("entry") or "{}")
    entry.setdefault("answer", ground_truth)
    answer = solution_str.strip()
    if last_number:
        answer = (NUMBER.findall(answer) or [answer])[-1]
    score = _task(data_source.removeprefix(PREFIX))(answer, entry)
    return float(score == 1.0)
