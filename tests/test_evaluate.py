"""pass@k and avg@k: the estimators, what they read, and what they refuse."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from verl_covgrpo import data, evaluate
from verl_covgrpo.evaluate import (
    EvaluationError,
    estimate,
    is_right,
    model_folder,
    pass_at_k,
    read_problems,
    scorer,
    summarise,
)


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_all_draws_that_hold_a_right_answer(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        answers = [True] * c + [False] * (n - c)
        draws = list(itertools.combinations(answers, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_is_unbiased() -> None:
    """The mean over many prompts is 1 - (1 - p)^k, where 1 - (1 - c/n)^k would be too low."""
    generator = random.Random(0)
    p, n, k = 0.3, 6, 4
    counts = [sum(generator.random() < p for _ in range(n)) for _ in range(40_000)]
    expected = 1 - (1 - p) ** k
    assert sum(pass_at_k(n, c, k) for c in counts) / len(counts) == pytest.approx(
        expected, abs=0.004
    )
    plugged_in = sum(1 - (1 - c / n) ** k for c in counts) / len(counts)
    assert abs(plugged_in - expected) > 0.02


def test_many_samples_do_not_overflow() -> None:
    assert pass_at_k(2048, 1, 1024) == pytest.approx(0.5)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 0), (4, 1, 5), (4, 5, 1), (4, -1, 1)])
def test_what_is_not_defined_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(EvaluationError, match="is not defined"):
        pass_at_k(n, c, k)


def test_the_interval_covers_as_often_as_it_says() -> None:
    generator = random.Random(1)
    covered = 0
    for trial in range(200):
        values = [float(generator.random() < 0.4) for _ in range(150)]
        found = estimate(values, seed=trial)
        assert found.low <= found.mean <= found.high
        covered += found.low <= 0.4 <= found.high
    assert 0.88 <= covered / 200 <= 0.99


def test_a_summary() -> None:
    right = [[True, False], [False, False], [True, True]]
    found = summarise(right, [2, 1])
    assert list(found) == ["avg@2", "pass@1", "pass@2"]
    assert found["avg@2"].mean == found["pass@1"].mean == pytest.approx(0.5)
    assert found["pass@2"].mean == pytest.approx(2 / 3)
    assert summarise(right, [1]) == summarise(right, [1])


def test_prompts_with_different_numbers_of_answers_are_refused() -> None:
    with pytest.raises(EvaluationError, match=r"different numbers of answers: \[1, 2\]"):
        summarise([[True], [True, False]], [1])


@pytest.mark.parametrize(
    ("score", "right"),
    [
        (1.0, True),
        (0.5, False),
        ({"score": 0.5, "acc": 0.0}, False),
        ({"score": 1.0, "acc": 1.0}, True),
        ({"score": 1.0}, True),
    ],
)
def test_what_counts_as_right(score: Any, right: bool) -> None:
    assert is_right(score) is right


# What is read


def test_a_checkpoint_of_verl_is_found(tmp_path: Path) -> None:
    for step in (5, 40, 200):
        folder = tmp_path / f"global_step_{step}" / "actor" / "huggingface"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").touch()
    newest = str(tmp_path / "global_step_200" / "actor" / "huggingface")
    assert model_folder(str(tmp_path)) == newest
    assert model_folder(str(tmp_path / "global_step_200")) == newest
    assert model_folder(str(tmp_path / "global_step_200" / "actor")) == newest
    assert model_folder(newest) == newest
    assert model_folder("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"


def test_a_checkpoint_without_such_weights_says_how_to_merge(tmp_path: Path) -> None:
    (tmp_path / "global_step_5" / "actor").mkdir(parents=True)
    with pytest.raises(EvaluationError, match=r"hf_model\].*verl.model_merger merge"):
        model_folder(str(tmp_path))


def test_problems_are_checked(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(EvaluationError, match="verl-covgrpo data NAME writes one"):
        read_problems(tmp_path / "none.parquet")
    pandas.DataFrame({"question": ["?"]}).to_parquet(tmp_path / "other.parquet")
    with pytest.raises(EvaluationError, match=r"has \['question'\]; verl's schema has"):
        read_problems(tmp_path / "other.parquet")


def test_the_reward_fits_the_problems() -> None:
    gym = scorer(None, [{"data_source": "reasoning_gym/chain_sum"}])
    assert gym.__module__ == "verl_covgrpo.rewards.reasoning_gym"
    assert scorer(None, [{"data_source": "openai/gsm8k"}]).__module__ == "verl_covgrpo.rewards.math"
    with pytest.raises(EvaluationError, match="did you mean 'math'"):
        scorer("mth", [{"data_source": "x"}])


def test_from_answers_to_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    entries = data.problems("chain_sum", 4, seed=0)
    path = data.write_parquet(
        data.reasoning_rows("chain_sum", entries, "test"), tmp_path / "p.parquet"
    )
    truths = [str(entry["answer"]) for entry in entries]
    answers = [[truth, "wrong"] if i % 2 else ["wrong", "wrong"] for i, truth in enumerate(truths)]
    monkeypatch.setattr(evaluate, "sample", lambda *_, **__: answers)
    told: list[tuple[int, int]] = []
    found = evaluate.evaluate(
        "m", path, tmp_path / "out", n=2, ks=(1, 2), progress=lambda *x: told.append(x)
    )
    results = found["reasoning_gym/chain_sum"]
    assert results["pass@1"].mean == 0.25
    assert results["pass@2"].mean == 0.5
    assert told[-1] == (8, 8)
    lines = (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["scores"] for line in lines] == [[0, 0], [1, 0], [0, 0], [1, 0]]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["results"]["reasoning_gym/chain_sum"]["pass@2"]["mean"] == 0.5
    assert summary["settings"]["prompts"] == 4


def test_more_than_there_are_samples_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(
        EvaluationError, match="pass@16 needs at least that many samples; there are 8"
    ):
        evaluate.evaluate("m", tmp_path / "none.parquet", tmp_path, n=8, ks=(1, 16))
