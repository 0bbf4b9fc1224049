r"""Boxed-answer maths: right or wrong, by math-verify.

In a launch:
    reward.custom_reward_function.path=pkg://verl_covgrpo.rewards.math
    reward.custom_reward_function.name=compute_score

verl's reward workers call a reward function from threads, where math-verify's own timeout (an alarm
signal) cannot work. Here the comparison runs in a process of its own, which is ended when it takes
too long; any number of threads may ask.
"""

from __future__ import annotations

import atexit
import multiprocessing
import re
import threading
from concurrent.futures import TimeoutError as Late
from functools import lru_cache
from typing import Any

BOX = re.compile(r"\\(?:boxed|fbox)\s*")
LONGEST_ANSWER = 2000
"""Characters; nothing longer is compared."""

_lock = threading.Lock()


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    timeout: float = 10.0,
    **_: Any,
) -> float:
    r"""Return 1.0 where the last box of a response holds the reference answer, else 0.0.

    Args:
        data_source: not looked at.
        solution_str: the response.
        ground_truth: the reference answer, LaTeX or plain, in a \boxed{} or without.
        extra_info: not looked at.
        timeout: seconds for one comparison; one that takes longer counts as wrong.
    """
    answer = boxed_answer(solution_str)
    return float(answer is not None and same_answer(answer, str(ground_truth), timeout))


def boxed_answer(text: str) -> str | None:
    r"""Return what stands in the last \boxed of a text; None where there is none, or it is cut off.

    Of nested boxes that is the innermost.
    """
    matches = list(BOX.finditer(text))
    if not matches:
        return None
    rest = text[matches[-1].end() :]
    if not rest.startswith("{"):
        token = re.match(r"[^\s${}]+", rest)  # \boxed 5
        return token.group().rstrip(".,;") if token else None
    depth = 0
    for position, character in enumerate(rest):
        if character in "{}" and (position == 0 or rest[position - 1] != "\\"):
            depth += 1 if character == "{" else -1
            if depth == 0:
                return rest[1:position].strip()
    return None


def same_answer(answer: str, reference: str, timeout: float = 10.0) -> bool:
    """Return whether two answers are mathematically the same; False where that takes too long."""
    reference = (boxed_answer(reference) or reference).strip()
    answer = answer.strip()
    if answer == reference:
        return bool(reference)
    if not answer or len(answer) > LONGEST_ANSWER:
        return False
    from pebble import ProcessExpired

    try:
        return bool(_judge().schedule(_verify, args=(answer, reference), timeout=timeout).result())
    except (Late, ProcessExpired):
        return False


@lru_cache(maxsize=1)
def _pool() -> Any:
    from pebble import ProcessPool

    # spawn: forking a process that has threads can leave locks held for ever.
    pool = ProcessPool(max_workers=1, context=multiprocessing.get_context("spawn"))
    atexit.register(_close, pool)
    return pool


def _judge() -> Any:
    with _lock:
        return _pool()


def _close(pool: Any) -> None:
    pool.stop()
    pool.join()


@lru_cache(maxsize=4096)
def _parsed(answer: str) -> list[Any]:
    from math_verify import parse

    for text in (f"\\boxed{{{answer}}}", answer):
        if found := parse(text, parsing_timeout=None):
            return found
    return []


def _verify(answer: str, reference: str) -> bool:
    """Compare, in the process of its own; what math-verify cannot read is wrong."""
    import logging

    from math_verify import verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    try:
        return bool(verify(_parsed(reference), _parsed(answer), timeout_seconds=None))
    except Exception:
        return False
