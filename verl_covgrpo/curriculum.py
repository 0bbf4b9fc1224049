"""SENT's curriculum: prompts in the order of their semantic entropy, arXiv 2512.04359.

Per prompt, M sampled answers are clustered by their final answer; with p_k the shares of the
clusters

    semantic entropy = - sum_k p_k log p_k

Prompts are sorted by it, ascending, and split into N stages to train in turn.

As described in secondary notes: all of it. Our choice: M = 8, N = 2, shares by counting; answers
are the same by math-verify, or by the task's own scorer for reasoning-gym; a response without a
final answer is a cluster of its own kind.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_covgrpo.errors import MethodError
from verl_covgrpo.rewards import math as boxed
from verl_covgrpo.rewards import reasoning_gym

Same = Callable[[str, str], bool]


class CurriculumError(MethodError):
    """Rollouts that do not fit the problems."""


def clusters(answers: Sequence[str | None], same: Same) -> list[int]:
    """Return the size of each cluster of answers, the first answer's first.

    An answer joins the first cluster whose first answer is the same; None joins None alone.
    """
    representatives: list[str | None] = []
    sizes: list[int] = []
    for answer in answers:
        for number, other in enumerate(representatives):
            alike = answer == other or (
                answer is not None and other is not None and same(answer, other)
            )
            if alike:
                sizes[number] += 1
                break
        else:
            representatives.append(answer)
            sizes.append(1)
    return sizes


def semantic_entropy(sizes: Sequence[int]) -> float:
    """Return the entropy of the clusters' shares, in nats."""
    count = sum(sizes)
    return 0.0 - math.fsum(n / count * math.log(n / count) for n in sizes)


def final_answer(text: str, data_source: str) -> str | None:
    """Return the answer of a response: what is boxed, or all of it for a reasoning-gym task."""
    if data_source.startswith(reasoning_gym.PREFIX):
        return text.strip() or None
    return boxed.boxed_answer(text)


def sameness(row: dict[str, Any]) -> Same:
    """Return how two answers to a problem are compared."""
    source = str(row["data_source"])
    if not source.startswith(reasoning_gym.PREFIX):
        return boxed.same_answer
    entry = json.loads((row.get("extra_info") or {}).get("entry") or "{}")

    def same(answer: str, other: str) -> bool:
        # The scorer of the task, with the other answer in the place of the reference.
        info = {"entry": json.dumps({**entry, "answer": other})}
        return reasoning_gym.compute_score(source, answer, other, info) == 1.0

    return same


@dataclass(frozen=True)
class Curriculum:
    """Problems in stages."""

    entropies: list[float]
    """Of each problem, in the order of the problems."""
    stages: list[list[int]]
    """Numbers of the problems of each stage, in ascending order of entropy."""


def arrange(
    rows: Sequence[dict[str, Any]],
    answers: Sequence[Sequence[str]],
    stages: int = 2,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Curriculum:
    """Return the curriculum of problems and the responses sampled for each.

    Raises:
        CurriculumError: the numbers differ, a problem has no response, or there are more stages
            than problems.
    """
    if len(rows) != len(answers):
        raise CurriculumError(f"{len(rows)} problems, but responses to {len(answers)}")
    if missing := [number for number, texts in enumerate(answers) if not texts]:
        raise CurriculumError(
            f"problem {missing[0]} has no response ({len(missing)} of {len(rows)} have none): "
            "sample every problem, or leave those out"
        )
    if not 1 <= stages <= len(rows):
        raise CurriculumError(f"{len(rows)} problems cannot be split into {stages} stages")
    entropies = []
    for number, (row, texts) in enumerate(zip(rows, answers, strict=True)):
        source = str(row["data_source"])
        finals = [final_answer(text, source) for text in texts]
        entropies.append(semantic_entropy(clusters(finals, sameness(row))))
        progress(number + 1, len(rows))
    order = sorted(range(len(rows)), key=lambda number: entropies[number])
    cuts = [round(k * len(rows) / stages) for k in range(stages + 1)]
    return Curriculum(entropies, [order[cuts[k] : cuts[k + 1]] for k in range(stages)])


def read_responses(path: Path, rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the responses to each problem from a file, or a folder, of JSON lines.

    Lines are those of `verl-covgrpo eval` (answers, in the order of the problems), or of verl's
    rollout dump (`trainer.rollout_data_dir`: input, output), whose input holds the problem's text.

    Raises:
        CurriculumError: no such file, or lines of another kind.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise CurriculumError(f"{path} holds no JSON lines")
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines() if line]
    if lines and all("answers" in line for line in lines):
        if len(lines) != len(rows):
            raise CurriculumError(f"{path} has {len(lines)} problems, the parquet file {len(rows)}")
        return [list(line["answers"]) for line in lines]
    if not lines or not all({"input", "output"} <= set(line) for line in lines):
        has = sorted(lines[0]) if lines else "nothing"
        raise CurriculumError(f"{path} has {has}: neither answers, nor input and output")
    of_input: dict[str, list[str]] = {}
    for line in lines:
        of_input.setdefault(line["input"], []).append(line["output"])
    texts = [str(row["prompt"][-1]["content"]).strip() for row in rows]
    found: list[list[str]] = [[] for _ in rows]
    for given, outputs in of_input.items():
        holders = [number for number, text in enumerate(texts) if text in given]
        if holders:
            found[max(holders, key=lambda number: len(texts[number]))].extend(outputs)
    return found


def write(
    curriculum: Curriculum, rows: Sequence[dict[str, Any]], output: Path, responses: int
) -> list[Path]:
    """Write stage_1.parquet and so on, report.json and report.png; return the stages' paths."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    from verl_covgrpo.data import write_parquet

    paths = []
    for number, stage in enumerate(curriculum.stages, 1):
        chosen = [_plain(rows[i]) for i in stage]
        paths.append(write_parquet(chosen, output / f"stage_{number}.parquet"))
    of_stages = [[curriculum.entropies[i] for i in stage] for stage in curriculum.stages]
    report = {
        "problems": len(rows),
        "responses": responses,
        "stages": [
            {"file": path.name, "problems": len(x), "entropy": [min(x), max(x)]}
            for path, x in zip(paths, of_stages, strict=True)
        ],
        "certain": sum(x == 0.0 for x in curriculum.entropies),
    }
    (output / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    labels = [f"stage {number}" for number in range(1, len(of_stages) + 1)]
    axes.hist(of_stages, bins=20, stacked=True, label=labels)
    axes.set(title="semantic entropy of the problems", xlabel="nats", ylabel="problems")
    axes.legend()
    figure.savefig(output / "report.png", dpi=130)
    pyplot.close(figure)
    return paths


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "prompt": [dict(message) for message in row["prompt"]]}
