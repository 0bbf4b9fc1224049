"""The reward function of the recipes: reasoning-gym's own scorers, right or wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")

from verl_covgrpo.rewards.reasoning_gym import compute_score

SUM = "reasoning_gym/chain_sum"


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("7", 1.0),
        ("  7 ", 1.0),
        ("\n7\n", 1.0),
        ("8", 0.0),
        ("", 0.0),
        ("   ", 0.0),
        (
            "7 or 8",
            0.0,
        ),  # reasoning-gym gives partial credit for an answer that holds the right one
        ("17", 0.0),
    ],
)
def test_right_or_wrong(answer: str, score: float) -> None:
    found = compute_score(SUM, answer, "7", {"entry": json.dumps({"answer": "7"})})
    assert (found, type(found)) == (score, float)


def test_partial_credit_counts_as_wrong() -> None:
    from reasoning_gym import get_score_answer_fn

    assert 0 < get_score_answer_fn("chain_sum")("7 or 8", {"answer": "7"}) < 1
    assert compute_score(SUM, "7 or 8", "7") == 0.0


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("The final answer is 7.", 1.0),
        ("4 + 3 = 7", 1.0),
        ("4 + 3 = 7.0", 1.0),
        ("7", 1.0),
        ("The answer is 7, not 8", 0.0),
        ("-7", 0.0),
        ("10-3, or 10-7", 1.0),
        ("it is 17", 0.0),
        ("seven", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_number_of_a_sentence(response: str, score: float) -> None:
    assert compute_score(SUM, response, "7", last_number=True) == score


@pytest.mark.parametrize("answer", ["-12", "1,234", "1234", "3.5"])
def test_the_last_number_is_taken_whole(answer: str) -> None:
    assert compute_score(SUM, f"so 1 + 2 is {answer}.", answer.replace(",", ""), last_number=True)


@pytest.mark.parametrize("extra_info", [None, {}, {"entry": ""}, {"entry": "{}"}, {"index": 3}])
def test_the_ground_truth_is_enough_for_most_tasks(extra_info: dict[str, Any] | None) -> None:
    assert compute_score(SUM, "7", "7", extra_info) == 1.0
    assert compute_score(SUM, "8", "7", extra_info) == 0.0


def test_a_scorer_gets_the_metadata_of_its_task() -> None:
    from reasoning_gym import create_dataset

    entry = create_dataset("countdown", size=1, seed=0)[0]
    answer = entry["metadata"]["expression"]
    extra_info = {"entry": json.dumps({"answer": entry["answer"], "metadata": entry["metadata"]})}
    assert compute_score("reasoning_gym/countdown", answer, entry["answer"], extra_info) == 1.0
    assert compute_score("reasoning_gym/countdown", "1 + 1", entry["answer"], extra_info) == 0.0


def test_what_verl_passes_beyond_that_is_ignored() -> None:
    assert compute_score(SUM, "7", "7", {}, reward_router_address=None) == 1.0


@pytest.mark.parametrize("source", ["openai/gsm8k", "chain_sum", ""])
def test_another_data_source_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="expected reasoning_gym/TASK"):
        compute_score(source, "7", "7")
