"""The verl-covgrpo command."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

app = typer.Typer(
    help="Covariance-aware GRPO and its family, as a plugin for verl.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class DemoModel(str, enum.Enum):
    """What the demo trains."""

    tiny = "tiny"
    smollm2 = "smollm2"


@app.command()
def demo(
    method: Annotated[
        str, typer.Option(help="What to train with: grpo, or any method of this package.")
    ] = "covgrpo",
    compare: Annotated[
        bool, typer.Option("--compare", help="Train with grpo too, the same seed, one plot.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps.", show_default="40; smollm2: 6")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and sampling.")] = 0,
    ranks: Annotated[int, typer.Option(min=1, max=2, help="Actor ranks, each with a vLLM.")] = 1,
    model: Annotated[DemoModel, typer.Option(help="What to train.")] = DemoModel.tiny,
) -> None:
    """Train a small language model through the stock verl pipeline, without a GPU."""
    # Before torch is loaded: threads that spin while they wait crawl on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TQDM_DISABLE", "1")  # one progress bar, ours
    from verl_covgrpo import MethodError, registry
    from verl_covgrpo.demo.launch import RunFailed
    from verl_covgrpo.demo.run import check_installed, run_demo

    console = Console()
    try:
        if method != "grpo":
            registry.get(method)
        methods = ["grpo", method] if compare and method != "grpo" else [method]
        check_installed()
        run_demo(methods, model.value, steps, seed, ranks, console)
    except KeyboardInterrupt:
        console.print("stopped; no process of the run is left")
        raise typer.Exit(130) from None
    except MethodError as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except (RunFailed, RuntimeError) as error:
        console.print(f"the demo failed: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None


@app.command()
def doctor(
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Ask every node of the running Ray cluster.")
    ] = False,
) -> None:
    """Check that the plugin is where verl will look for it. Exit status 1 where it is not."""
    from verl_covgrpo.cli.doctor import examine

    raise typer.Exit(examine(cluster, Console()))


@app.command()
def check(
    recipe: Annotated[
        str, typer.Argument(help="A recipe's name, a path to a YAML, or verl for verl's own.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides as in the launch, +method=NAME too.")
    ] = None,
    gpu_memory: Annotated[float, typer.Option(min=1.0, help="GiB of one GPU.")] = 80.0,
) -> None:
    """Check a launch before it is paid for: what is wrong, what it takes, what it changes."""
    from verl_covgrpo.cli.check import examine

    raise typer.Exit(examine(recipe, overrides or [], gpu_memory, Console()))


@app.command()
def data(
    name: Annotated[
        str, typer.Argument(help="gsm8k, math, open_rs, dapo_math_17k, or a reasoning-gym task.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="The folder.", show_default="data/NAME")
    ] = None,
    source: Annotated[
        Path | None, typer.Option(help="A local copy of the source, instead of its hub.")
    ] = None,
    instruction: Annotated[
        str | None, typer.Option(help="What follows each question.", show_default="boxed answer")
    ] = None,
    size: Annotated[int, typer.Option(min=1, help="Problems of a reasoning-gym task.")] = 2048,
    test_size: Annotated[int, typer.Option(min=1, help="Test problems of such a task.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Seed of such a task.")] = 0,
    setting: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE of such a task; may be repeated.")
    ] = None,
) -> None:
    """Write a problem set as parquet files in verl's schema."""
    from rich.progress import Progress

    from verl_covgrpo import data as sets

    console = Console()
    folder = output or Path("data") / name
    try:
        with Progress(console=console) as progress:
            bars: dict[str, Any] = {}

            def say(split: str, done: int, of: int) -> None:
                if split not in bars:
                    bars[split] = progress.add_task(f"{name} {split}", total=of)
                progress.update(bars[split], completed=done)

            if name in sets.SOURCES:
                text = sets.INSTRUCTION if instruction is None else instruction
                counts = sets.write(name, folder, source, text, say)
            else:
                config = dict(_key_value(item) for item in setting or [])
                counts = sets.write_reasoning(name, folder, size, test_size, seed, config, say)
    except sets.DataError as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    for split, count in counts.items():
        console.print(f"{count:>8,}  {folder / split}.parquet", markup=False, soft_wrap=True)


def _key_value(item: str) -> tuple[str, Any]:
    import yaml

    key, separator, value = item.partition("=")
    if not separator:
        raise typer.BadParameter(f"{item!r}: give KEY=VALUE")
    return key, yaml.safe_load(value)


@app.command(name="eval")
def evaluate(
    model: Annotated[
        str, typer.Argument(help="A model's folder or hub name, or a verl checkpoint.")
    ],
    problems: Annotated[Path, typer.Argument(help="A parquet file in verl's schema.")],
    samples: Annotated[int, typer.Option(min=1, help="Answers per prompt.")] = 8,
    k: Annotated[
        list[int] | None, typer.Option(help="pass@k; may be repeated.", show_default="1, samples")
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            help="math, accuracy_format or reasoning_gym.", show_default="by the data source"
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.7,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 2048,
    limit: Annotated[int | None, typer.Option(min=1, help="The first prompts alone.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs of one replica.")] = 1,
    max_model_len: Annotated[int | None, typer.Option(min=1)] = None,
    output: Annotated[Path, typer.Option(help="The folder of samples and summary.")] = Path("eval"),
) -> None:
    """Sample answers through vLLM, score them as in training, report pass@k and avg@k."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from rich.progress import Progress
    from rich.table import Table

    from verl_covgrpo import evaluate as evaluation

    console = Console()
    engine: dict[str, Any] = {"tensor_parallel_size": tensor_parallel}
    if max_model_len is not None:
        engine["max_model_len"] = max_model_len
    try:
        with Progress(console=console) as progress:
            bar = progress.add_task("scoring", total=None)
            found = evaluation.evaluate(
                model,
                problems,
                output,
                n=samples,
                ks=k or (1, samples),
                reward=reward,
                temperature=temperature,
                top_p=top_p,
                max_tokens=max_tokens,
                limit=limit,
                seed=seed,
                progress=lambda done, of: progress.update(bar, completed=done, total=of),
                **engine,
            )
    except evaluation.EvaluationError as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    table = Table("", "", "mean", "95 % interval", title=model)
    for source, results in found.items():
        for name, value in results.items():
            interval = f"{value.low:.3f} to {value.high:.3f}"
            table.add_row(source, name, f"{value.mean:.3f}", interval)
    console.print(table)
    console.print(f"samples  {output / 'samples.jsonl'}", markup=False, soft_wrap=True)


@app.command()
def curriculum(
    problems: Annotated[Path, typer.Argument(help="A parquet file in verl's schema.")],
    rollouts: Annotated[
        Path | None,
        typer.Option(help="samples.jsonl of eval, or verl's rollout dump (file or folder)."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Sample through vLLM from this model instead.")
    ] = None,
    stages: Annotated[int, typer.Option(min=1, help="Stages, trained in turn.")] = 2,
    samples: Annotated[int, typer.Option(min=1, help="Responses per problem, with --model.")] = 8,
    temperature: Annotated[float, typer.Option(min=0.0)] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1)] = 2048,
    max_model_len: Annotated[int | None, typer.Option(min=1)] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    output: Annotated[Path, typer.Option(help="The folder of stages and report.")] = Path(
        "curriculum"
    ),
) -> None:
    """Order problems by the semantic entropy of sampled answers, in stages (SENT)."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from rich.progress import Progress
    from rich.table import Table

    from verl_covgrpo import curriculum as ordering
    from verl_covgrpo import evaluate as evaluation
    from verl_covgrpo.errors import MethodError

    console = Console()
    try:
        if (rollouts is None) == (model is None):
            raise MethodError("give either --rollouts or --model")
        rows = evaluation.read_problems(problems)
        if rollouts is not None:
            answers = ordering.read_responses(rollouts, rows)
        else:
            engine = {} if max_model_len is None else {"max_model_len": max_model_len}
            folder = evaluation.model_folder(str(model))
            answers = evaluation.sample(
                folder, rows, samples, temperature, 1.0, max_tokens, seed, **engine
            )
        with Progress(console=console) as progress:
            bar = progress.add_task("clustering", total=len(rows))
            found = ordering.arrange(
                rows, answers, stages, lambda done, of: progress.update(bar, completed=done)
            )
        paths = ordering.write(found, rows, output, sum(map(len, answers)))
    except MethodError as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    table = Table("stage", "problems", "semantic entropy", title=str(problems))
    for path, stage in zip(paths, found.stages, strict=True):
        span = [found.entropies[i] for i in stage]
        table.add_row(path.name, str(len(stage)), f"{min(span):.3f} to {max(span):.3f}")
    console.print(table)
    console.print(f"report  {output / 'report.png'}", markup=False, soft_wrap=True)
