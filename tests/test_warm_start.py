"""What the demo's warm start learns from: right answers, a known share of them in words."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")

from verl_covgrpo import data
from verl_covgrpo.demo import model
from verl_covgrpo.demo.settings import TINY, WarmStart


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return model.byte_tokenizer()


@pytest.fixture(scope="module")
def entries() -> list[dict[str, Any]]:
    return data.problems(TINY.task.name, 200, 7, TINY.task.config)


def learnt(batch: dict[str, Any], row: int, tokenizer: Any) -> str:
    """What the labels of a row teach, in text."""
    labels_T = batch["labels"][row]
    return str(tokenizer.decode(labels_T[labels_T != -100]))


def test_only_the_answer_and_its_end_are_learnt(
    tokenizer: Any, entries: list[dict[str, Any]]
) -> None:
    answers = {"{}": "{}<|im_end|>", model.WORDY: "it is {}<|im_end|>"}
    for form, expected in answers.items():
        batch = model._padded(model._supervised(tokenizer, entries, form), tokenizer.pad_token_id)
        for row, entry in enumerate(entries):
            assert learnt(batch, row, tokenizer) == expected.format(entry["answer"])
            read_T = batch["input_ids"][row][batch["attention_mask"][row] == 1]
            prompt = model.chat_prompt(tokenizer, entry["question"])
            assert tokenizer.decode(read_T) == prompt + expected.format(entry["answer"])
            learnt_T = batch["labels"][row] != -100
            assert (batch["labels"][row] == batch["input_ids"][row])[learnt_T].all()


@pytest.mark.parametrize("share", [0.0, WarmStart().wordy_answers, 1.0])
def test_the_share_of_wordy_answers(
    share: float, tokenizer: Any, entries: list[dict[str, Any]]
) -> None:
    bare = model._supervised(tokenizer, entries, "{}")
    wordy = model._supervised(tokenizer, entries, model.WORDY)
    settings = WarmStart(wordy_answers=share, batch_size=100)
    draw = random.Random(5)
    words = 0
    for _ in range(100):
        chosen = model._drawn(bare, wordy, settings, draw)
        batch = model._padded(chosen, tokenizer.pad_token_id)
        words += sum(learnt(batch, row, tokenizer).startswith("it is") for row in range(100))
    assert words / 10_000 == pytest.approx(share, abs=0.02)  # four standard errors


def test_no_question_comes_twice_in_a_batch(tokenizer: Any, entries: list[dict[str, Any]]) -> None:
    numbered = [([i], [i]) for i in range(len(entries))]
    settings = WarmStart(batch_size=len(entries))
    drawn = model._drawn(numbered, numbered, settings, random.Random(1))
    assert sorted(prompt for prompt, _ in drawn) == [[i] for i in range(len(entries))]
