"""The demo from end to end: model, data, training, table and plot."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from verl_covgrpo.demo.settings import DEMOS, OUTPUT, TRAIN_SEED, VALIDATION_SEED, Demo, ModelName

TRAIN_PROMPTS = 2048


def check_installed() -> None:
    """Refuse early where a package of the extra `cpu` is missing or broken.

    Raises:
        RuntimeError: names the package and the command that mends it.
    """
    needed = (
        "verl",
        "vllm",
        "ray",
        "transfer_queue",
        "transformers",
        "reasoning_gym",
        "matplotlib",
        "gguf",
        "psutil",
    )
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(
            f"the demo needs {', '.join(missing)}: pip install 'verl-covgrpo[cpu]' "
            "(docs/install.md has the commands for a plain CPU)"
        )
    try:
        import transformers.modeling_utils  # noqa: F401
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            f"transformers cannot be imported ({error}): an accelerator build of torchvision or "
            "torchaudio is in the way; pip uninstall -y torchvision torchaudio torchcodec"
        ) from error


def run_demo(
    methods: Sequence[str],
    model_name: ModelName,
    steps: int | None,
    seed: int,
    ranks: int,
    console: Console,
    output: Path = OUTPUT,
) -> list[Any]:
    """Train once per method and show table and plot.

    Raises:
        RunFailed: a training ended with an error.
    """
    from transformers.utils import logging as transformers_logging

    from verl_covgrpo.demo import report

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    demo = DEMOS[model_name]
    steps = steps or demo.steps
    started = time.perf_counter()
    results = []
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    ) as progress:
        bar = progress.add_task("preparing", total=None, note="")
        prepared = _prepare(demo, seed, output, progress, bar)
        for method in methods:
            out = output / f"{demo.name}-{method}-seed{seed}"
            results.append(
                _train(demo, method, out, prepared, steps, seed, ranks, progress, bar, started)
            )
            started = time.perf_counter()
        progress.update(bar, description="done", note="")
    name = f"{demo.name}-{'-vs-'.join(methods)}-seed{seed}"
    picture = report.plot(results, output / f"{name}.png")
    for result in results:
        result.save()
    title = f"{demo.name} on {demo.task.name}, {steps} steps, seed {seed}"
    console.print(report.table(results, title))
    console.print(f"plot     {picture}", soft_wrap=True)
    for result in results:
        console.print(f"metrics  {result.folder / 'metrics.jsonl'}", soft_wrap=True)
        console.print(f"log      {result.folder / 'train.log'}", soft_wrap=True)
    return results


def _prepare(
    demo: Demo, seed: int, output: Path, progress: Progress, bar: TaskID
) -> dict[str, Any]:
    """Model, problem files, and the greedy accuracy before training."""
    from verl_covgrpo import data
    from verl_covgrpo.demo import model

    def say(done: int, of: int, note: str) -> None:
        progress.update(
            bar, description="warm start", completed=done, total=of, note=note, refresh=True
        )

    progress.update(bar, description="warm start", note="the model is made once, then cached")
    folder = model.prepare(demo.name, output / "cache", say)
    files = output / "data"
    task = demo.task
    validation = data.problems(task.name, demo.validation_prompts, VALIDATION_SEED, task.config)
    train = data.problems(task.name, TRAIN_PROMPTS, TRAIN_SEED + seed, task.config)
    return {
        "model": folder,
        "train": data.write_parquet(
            data.reasoning_rows(task.name, train, "train"),
            files / f"{demo.name}-train-seed{seed}.parquet",
        ),
        "validation": data.write_parquet(
            data.reasoning_rows(task.name, validation, "validation"),
            files / f"{demo.name}-validation.parquet",
        ),
        "entries": validation,
        "greedy": model.greedy_accuracy(folder, folder, demo, validation),
    }


def _train(
    demo: Demo,
    method: str,
    out: Path,
    prepared: dict[str, Any],
    steps: int,
    seed: int,
    ranks: int,
    progress: Progress,
    bar: TaskID,
    started: float,
) -> Any:
    from verl_covgrpo.demo import launch, model, report

    rows: list[dict[str, Any]] = []
    launched = launch.Run(
        out,
        demo=demo,
        method=method,
        model=prepared["model"],
        train=prepared["train"],
        validation=prepared["validation"],
        steps=steps,
        seed=seed,
        ranks=ranks,
    )
    with launched as run:
        progress.update(
            bar,
            description=method,
            completed=0,
            total=steps,
            note=f"starting Ray, the FSDP2 actor and vLLM; full log: {run.log}",
        )
        for row in run.rows():
            if row is None:
                continue
            rows.append(row)
            values = row["data"]
            if report.REWARD in values:
                note = (
                    f"step {row['step']}/{steps}  reward {values[report.REWARD]:.2f}  "
                    f"entropy {values[report.ENTROPY]:.2f}  log: {run.log}"
                )
                progress.update(bar, completed=row["step"], note=note)
    if not rows or rows[-1]["step"] < steps:
        raise launch.RunFailed(f"the trainer stopped early; the whole log: {run.log}")
    weights = out / "checkpoint" / f"global_step_{steps}" / "actor" / "huggingface"
    greedy = model.greedy_accuracy(weights, prepared["model"], demo, prepared["entries"])
    seconds = time.perf_counter() - started
    return report.Result(method, out, rows, prepared["greedy"], greedy, seconds)
