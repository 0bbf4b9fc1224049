r"""Accuracy plus format, as the covgrpo paper uses (arXiv 2605.11538).

The paper's weights and its exact format are not known here: both are parameters, and the defaults
are our choice. With them a wrong answer in the right format scores 0.5, which is not above the
threshold at which methods take a response for right.

In a launch:
    reward.custom_reward_function.path=pkg://verl_covgrpo.rewards.accuracy_format
    reward.custom_reward_function.name=compute_score
    +reward.custom_reward_function.reward_kwargs.format_weight=0.5
"""

from __future__ import annotations

import re
from typing import Any

from verl_covgrpo.rewards import math

FORMAT = r"\s*(?:<think>)?(?:(?!</?think>).)*</think>(?:(?!</?think>).)*\\boxed\{.*\}.*"
"""Thoughts closed once by </think>, then a boxed answer; the chat template may open <think>."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    accuracy_weight: float = 1.0,
    format_weight: float = 0.5,
    format_pattern: str = FORMAT,
    timeout: float = 10.0,
    **_: Any,
) -> dict[str, float]:
    """Return {"score", "acc", "format"}: the weighted sum, and both parts as 0.0 or 1.0.

    Args:
        data_source, solution_str, ground_truth, extra_info, timeout: as in `rewards.math`.
        accuracy_weight, format_weight: the weights of the two parts.
        format_pattern: regular expression for the whole response, a dot for any character.
    """
    accuracy = math.compute_score(data_source, solution_str, ground_truth, timeout=timeout)
    in_format = float(re.fullmatch(format_pattern, solution_str, flags=re.DOTALL) is not None)
    score = accuracy_weight * accuracy + format_weight * in_format
    return {"score": score, "acc": accuracy, "format": in_format}
