"""SENT's curriculum: clusters, semantic entropy, stages."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("math_verify")
pytest.importorskip("pandas")

from verl_covgrpo import curriculum, data, evaluate
from verl_covgrpo.curriculum import CurriculumError, arrange, clusters, semantic_entropy

PROBLEMS = [data.row("m", f"Problem {i}?", "1", "train", i, "math") for i in range(4)]
ANSWERS = [
    [r"\boxed{1}", r"\boxed{2}", r"\boxed{3}", "no box"],  # four clusters
    [r"\boxed{\frac12}", r"\boxed{0.5}", r"\boxed{1/2}", r"so \boxed{.5}"],  # one
    [r"\boxed{1}", r"\boxed{1}", r"\boxed{2}", r"\boxed{2}"],  # two halves
    ["none", "none at all", "nothing", r"\boxed{1}"],  # three without an answer, one with
]
ENTROPIES = [math.log(4), 0.0, math.log(2), 0.75 * math.log(4 / 3) + 0.25 * math.log(4)]


def test_clusters_are_those_of_equal_answers() -> None:
    same = lambda a, b: a.lower() == b.lower()  # noqa: E731
    assert clusters(["a", "B", "A", None, "b", "c", None], same) == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("sizes", "entropy"), [([8], 0.0), ([4, 4], math.log(2)), ([1] * 8, math.log(8))]
)
def test_semantic_entropy(sizes: list[int], entropy: float) -> None:
    assert semantic_entropy(sizes) == pytest.approx(entropy)
    assert math.copysign(1.0, semantic_entropy([8])) == 1.0


def test_problems_are_sorted_by_entropy_and_split() -> None:
    told: list[tuple[int, int]] = []
    found = arrange(PROBLEMS, ANSWERS, stages=2, progress=lambda *x: told.append(x))
    assert found.entropies == pytest.approx(ENTROPIES)
    assert found.stages == [[1, 3], [2, 0]]
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert arrange(PROBLEMS, ANSWERS, stages=4).stages == [[1], [3], [2], [0]]
    assert [len(stage) for stage in arrange(PROBLEMS, ANSWERS, stages=3).stages] == [1, 2, 1]


def test_a_reasoning_gym_task_is_clustered_by_its_own_scorer() -> None:
    pytest.importorskip("reasoning_gym")
    entries = data.problems("chain_sum", 1, seed=0)
    rows = data.reasoning_rows("chain_sum", entries, "train")
    found = arrange(rows, [["7", "7.0", " 7", "8"]], stages=1)
    assert found.entropies == pytest.approx([0.75 * math.log(4 / 3) + 0.25 * math.log(4)])


@pytest.mark.parametrize(
    ("answers", "stages", "words"),
    [
        (ANSWERS[:3], 2, "4 problems, but responses to 3"),
        ([*ANSWERS[:3], []], 2, "problem 3 has no response"),
        (ANSWERS, 5, "4 problems cannot be split into 5 stages"),
    ],
)
def test_what_does_not_fit_is_refused(answers: Any, stages: int, words: str) -> None:
    with pytest.raises(CurriculumError, match=words):
        arrange(PROBLEMS, answers, stages)


def test_the_samples_of_eval_are_read(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps({"answers": texts}) + "\n" for texts in ANSWERS))
    assert curriculum.read_responses(path, PROBLEMS) == ANSWERS


def test_verls_rollout_dump_is_read(tmp_path: Path) -> None:
    lines = [
        {"input": f"user\nProblem {i}?\nassistant\n", "output": text, "score": 0.0, "step": 1}
        for i, texts in enumerate(ANSWERS)
        for text in texts
    ]
    for step in (0, 1):
        (tmp_path / f"{step}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines[step::2])
        )
    found = curriculum.read_responses(tmp_path, PROBLEMS)
    assert [sorted(texts) for texts in found] == [sorted(texts) for texts in ANSWERS]


@pytest.mark.parametrize("text", ["", '{"question": 1}\n'])
def test_lines_of_another_kind_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(CurriculumError, match="neither answers, nor input and output"):
        curriculum.read_responses(tmp_path / "x.jsonl", PROBLEMS)
    with pytest.raises(CurriculumError, match="holds no JSON lines"):
        curriculum.read_responses(tmp_path / "none.jsonl", PROBLEMS)


def command(*arguments: str) -> tuple[int, str]:
    from typer.testing import CliRunner

    from verl_covgrpo.cli import app

    done = CliRunner().invoke(app, ["curriculum", *arguments], env={"COLUMNS": "200"})
    return done.exit_code, done.output


def test_the_command_writes_stages_and_a_report(tmp_path: Path) -> None:
    problems = data.write_parquet(PROBLEMS, tmp_path / "p.parquet")
    samples = tmp_path / "samples.jsonl"
    samples.write_text("".join(json.dumps({"answers": texts}) + "\n" for texts in ANSWERS))
    out = tmp_path / "out"
    status, text = command(str(problems), "--rollouts", str(samples), "--output", str(out))
    assert status == 0, text
    assert "0.000 to 0.562" in text
    stages = [evaluate.read_problems(out / f"stage_{number}.parquet") for number in (1, 2)]
    indices = [[row["extra_info"]["index"] for row in stage] for stage in stages]
    assert indices == [[1, 3], [2, 0]]
    report = json.loads((out / "report.json").read_text())
    assert (report["problems"], report["responses"], report["certain"]) == (4, 16, 1)
    assert (out / "report.png").stat().st_size > 5000


def test_the_command_wants_one_source(tmp_path: Path) -> None:
    problems = data.write_parquet(PROBLEMS, tmp_path / "p.parquet")
    status, text = command(str(problems))
    assert status == 1
    assert "give either --rollouts or --model" in text
