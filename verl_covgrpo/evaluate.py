"""Evaluation: k answers per prompt through vLLM, scored as in training; pass@k and avg@k.

With n answers to a prompt, c of them right:

    avg@n  = c / n
    pass@k = 1 - C(n - c, k) / C(n, k)      unbiased, arXiv 2107.03374

Both are averaged over prompts; the intervals are percentiles of a bootstrap over prompts, each with
all of its answers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl_covgrpo.errors import MethodError, did_you_mean

RESAMPLES = 10_000
LEVEL = 0.95


class EvaluationError(MethodError):
    """A model, a problem file or a setting that cannot be evaluated."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that k of n answers, drawn without replacement, hold one of c right.

    Raises:
        EvaluationError: k is not in [1, n], or c not in [0, n].
    """
    if not 1 <= k <= n or not 0 <= c <= n:
        raise EvaluationError(f"pass@{k} of {n} answers, {c} of them right, is not defined")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, and the interval of its bootstrap."""

    mean: float
    low: float
    high: float


def estimate(values: Sequence[float], seed: int = 0) -> Estimate:
    """Return the mean and its 95 % bootstrap interval."""
    x = np.asarray(values, dtype=float)
    generator = np.random.default_rng(seed)
    means = [
        x[generator.integers(0, len(x), size=(100, len(x)))].mean(axis=1)
        for _ in range(RESAMPLES // 100)
    ]
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(np.concatenate(means), [tail, 100 - tail])
    return Estimate(float(x.mean()), float(low), float(high))


def summarise(
    right: Sequence[Sequence[bool]], ks: Iterable[int], seed: int = 0
) -> dict[str, Estimate]:
    """Return avg@n and pass@k of the answers to each prompt, all n of them.

    Raises:
        EvaluationError: prompts with different numbers of answers, or k larger than that.
    """
    sizes = {len(answers) for answers in right}
    if len(sizes) != 1:
        raise EvaluationError(f"prompts have different numbers of answers: {sorted(sizes)}")
    (n,) = sizes
    found = {f"avg@{n}": estimate([sum(answers) / n for answers in right], seed)}
    for k in sorted(set(ks)):
        found[f"pass@{k}"] = estimate([pass_at_k(n, sum(answers), k) for answers in right], seed)
    return found


# Reading


def model_folder(path: str) -> str:
    """Return what vLLM loads: a model of the hub, a folder of one, or that of a verl checkpoint.

    Raises:
        EvaluationError: a checkpoint of verl without weights in Hugging Face's format.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        return path
    if steps := sorted(folder.glob("global_step_*"), key=_step):
        folder = steps[-1]
    for candidate in (folder, folder / "huggingface", folder / "actor" / "huggingface"):
        if list(candidate.glob("*.safetensors")) or list(candidate.glob("*.bin")):
            return str(candidate)
    actor = folder / "actor" if (folder / "actor").is_dir() else folder
    raise EvaluationError(
        f"{folder} holds no weights in Hugging Face's format: save them with "
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model], or run "
        f"python3 -m verl.model_merger merge --backend fsdp --local_dir {actor} --target_dir FOLDER"
    )


def _step(path: Path) -> int:
    digits = path.name.rpartition("_")[2]
    return int(digits) if digits.isdigit() else -1


def read_problems(path: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """Return the rows of a parquet file in verl's schema.

    Raises:
        EvaluationError: no such file, no rows, or other columns.
    """
    import pandas

    if not path.is_file():
        raise EvaluationError(f"no file {path}: verl-covgrpo data NAME writes one")
    rows = pandas.read_parquet(path).to_dict("records")[:limit]
    needed = {"data_source", "prompt", "reward_model"}
    if not rows or not needed <= set(rows[0]):
        has = sorted(rows[0]) if rows else "no rows"
        raise EvaluationError(f"{path} has {has}; verl's schema has {sorted(needed)}")
    return rows


def scorer(reward: str | None, rows: Sequence[dict[str, Any]]) -> Callable[..., Any]:
    """Return a reward function: the one named, or the one that fits the problems.

    Raises:
        EvaluationError: an unknown name.
    """
    from verl_covgrpo.rewards import accuracy_format, reasoning_gym
    from verl_covgrpo.rewards import math as boxed

    if reward is None:
        gym = str(rows[0]["data_source"]).startswith(reasoning_gym.PREFIX)
        reward = "reasoning_gym" if gym else "math"
    functions: dict[str, Callable[..., Any]] = {
        "math": boxed.compute_score,
        "accuracy_format": accuracy_format.compute_score,
        "reasoning_gym": reasoning_gym.compute_score,
    }
    if reward not in functions:
        raise EvaluationError(
            f"unknown reward {reward!r}{did_you_mean(reward, functions)}; "
            f"known: {', '.join(functions)}"
        )
    return functions[reward]


def is_right(score: Any) -> bool:
    """Return whether a reward function's result means a right answer."""
    if isinstance(score, dict):
        score = score.get("acc", score["score"])
    return float(score) > 0.5


# Sampling


def sample(
    model: str,
    rows: Sequence[dict[str, Any]],
    n: int,
    temperature: float,
    top_p: float,
    max_tokens: int,
    seed: int,
    **engine: Any,
) -> list[list[str]]:
    """Return n answers to each prompt, sampled through vLLM with its progress bar."""
    from vllm import LLM, SamplingParams

    # The seed is the engine's: one per request needs generators that vLLM's CPU sampler lacks.
    llm = LLM(model=model, seed=seed, **engine)
    parameters = SamplingParams(n=n, temperature=temperature, top_p=top_p, max_tokens=max_tokens)
    prompts: Any = [list(row["prompt"]) for row in rows]
    outputs = llm.chat(prompts, parameters)
    return [[answer.text for answer in output.outputs] for output in outputs]


def evaluate(
    model: str,
    problems: Path,
    output: Path,
    n: int = 8,
    ks: Sequence[int] = (1, 8),
    reward: str | None = None,
    temperature: float = 0.7,
    top_p: float = 1.0,
    max_tokens: int = 2048,
    limit: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda *_: None,
    **engine: Any,
) -> dict[str, dict[str, Estimate]]:
    """Sample, score and summarise; return {data source: {"avg@8": ..., "pass@1": ...}}.

    Writes `samples.jsonl` (one line per prompt, with answers and scores) and `summary.json` into
    the folder `output`.

    Args:
        progress: called with (answers scored, answers in all).
        engine: for vLLM's `LLM`.

    Raises:
        EvaluationError: see `model_folder`, `read_problems`, `scorer`, and k larger than n.
    """
    if too_large := [k for k in ks if not 1 <= k <= n]:
        raise EvaluationError(
            f"pass@{too_large[0]} needs at least that many samples; there are {n}"
        )
    rows = read_problems(problems, limit)
    score = scorer(reward, rows)
    folder = model_folder(model)
    answers = sample(folder, rows, n, temperature, top_p, max_tokens, seed, **engine)
    right: dict[str, list[list[bool]]] = {}
    output.mkdir(parents=True, exist_ok=True)
    with (output / "samples.jsonl").open("w") as file:
        for number, (row, texts) in enumerate(zip(rows, answers, strict=True)):
            source, extra = str(row["data_source"]), row.get("extra_info")
            truth = str(row["reward_model"]["ground_truth"])
            scores = [score(source, text, truth, extra) for text in texts]
            right.setdefault(source, []).append([is_right(value) for value in scores])
            line = {
                "data_source": source,
                "ground_truth": truth,
                "answers": texts,
                "scores": scores,
            }
            file.write(json.dumps(line) + "\n")
            progress((number + 1) * n, len(rows) * n)
    found = {source: summarise(of_source, ks, seed) for source, of_source in right.items()}
    summary = {
        "model": folder,
        "problems": str(problems),
        "settings": {"n": n, "temperature": temperature, "top_p": top_p, "seed": seed}
        | {"max_tokens": max_tokens, "prompts": len(rows)},
        "results": {
            source: {name: vars(value) for name, value in results.items()}
            for source, results in found.items()
        },
    }
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return found
