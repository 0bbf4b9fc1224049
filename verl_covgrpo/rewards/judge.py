"""Rewards with a judge's score beside them, 1 to 10, for dagrpo.

    reward.custom_reward_function.path=pkg://verl_covgrpo.rewards.judge
    reward.custom_reward_function.name=rule_score          or server_score
    algorithm.dagrpo.score_key=judge

Both are examples: what a good response is, your task decides.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from verl_covgrpo.rewards import math, reasoning_gym

QUESTION = (
    "Rate the response below on a scale from 1 (worthless) to 10 (flawless): is the reasoning "
    "sound, complete and clear, and does it lead to the reference answer? Reply with the number "
    "alone."
)
NUMBER = re.compile(r"(?<![\d.])(10|[1-9])(?:\.\d+)?(?!\d)")


class JudgeError(RuntimeError):
    """A judge that did not answer, or not with a number from 1 to 10."""


def accuracy(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None
) -> float:
    """Return 1.0 for a right answer, by a reasoning-gym task's own scorer, else as boxed maths."""
    gym = data_source.startswith(reasoning_gym.PREFIX)
    score = reasoning_gym.compute_score if gym else math.compute_score
    return score(data_source, solution_str, ground_truth, extra_info)


def rule_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    longest: int = 4000,
    **_: Any,
) -> dict[str, float]:
    """Return {"score", "judge"}: right or wrong, and 1 to 10 by rules.

    Six points for a right answer, one each for stating exactly one boxed answer, for words beside
    it, and for not repeating a line; a point is lost beyond `longest` characters. Our choice.
    """
    right = accuracy(data_source, solution_str, ground_truth, extra_info)
    lines = [line.strip() for line in solution_str.splitlines() if line.strip()]
    points = 6 * right
    points += len(math.BOX.findall(solution_str)) == 1
    points += len(re.findall(r"[^\W\d_]{2,}", solution_str)) >= 3
    points += bool(lines) and len(set(lines)) == len(lines)
    points -= len(solution_str) > longest
    return {"score": right, "judge": float(min(max(1 + points, 1), 10))}


def server_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    url: str = "http://127.0.0.1:8000/v1",
    model: str = "judge",
    api_key: str = "none",
    timeout: float = 60.0,
    retries: int = 3,
    question: str = QUESTION,
    **_: Any,
) -> dict[str, float]:
    """Return {"score", "judge"}: right or wrong, and what an OpenAI-compatible server says.

    Args:
        url, model, api_key: of the server.
        timeout, retries: of one question.
        question: what the server is asked, above the problem (where `extra_info` has it as
            "question"), the reference answer and the response.

    Raises:
        JudgeError: it could not be reached, or answered without a number from 1 to 10.
    """
    problem = str((extra_info or {}).get("question", ""))
    parts = [question, f"Reference answer:\n{ground_truth}", f"Response:\n{solution_str}"]
    if problem:
        parts.insert(1, f"Problem:\n{problem}")
    client = _client(url, api_key, timeout, retries)
    try:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "\n\n".join(parts)}],
            temperature=0.0,
        )
    except Exception as error:
        raise JudgeError(f"the judge {model} at {url} did not answer: {error}") from error
    text = answer.choices[0].message.content or ""
    found = NUMBER.search(text)
    if found is None:
        raise JudgeError(f"the judge {model} gave no number from 1 to 10, but {text[:200]!r}")
    right = accuracy(data_source, solution_str, ground_truth, extra_info)
    return {"score": right, "judge": float(found.group().partition(".")[0])}


@cache
def _client(url: str, api_key: str, timeout: float, retries: int) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=url, api_key=api_key, timeout=timeout, max_retries=retries)
