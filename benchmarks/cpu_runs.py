"""Every method through the stock trainer on a plain CPU, a few steps each, and one table.

    python benchmarks/cpu_runs.py                       every method, 3 steps
    python benchmarks/cpu_runs.py --methods erpo reco   some of them

It shows that each trains: finite metrics, a gradient, a loss. A few steps say nothing about which
method is better. Exit status 1 where a run failed. Needs the extra `cpu`.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from verl_covgrpo import data, methods, registry
from verl_covgrpo.demo import launch, model
from verl_covgrpo.demo.settings import DEMOS, OUTPUT, TRAIN_SEED, VALIDATION_SEED

SHOWN = {
    "reward": "critic/score/mean",
    "entropy": "actor/entropy",
    "gradient norm": "actor/grad_norm",
    "policy loss": "actor/pg_loss",
    "s/step": "timing_s/step",
}


SETTINGS = {
    "dagrpo": (
        "algorithm.dagrpo.score_key=judge",
        "algorithm.dagrpo.delta=1.0",
        "reward.custom_reward_function.path=pkg://verl_covgrpo.rewards.judge",
        "reward.custom_reward_function.name=rule_score",
    ),
    # So that there is something to scale in the first steps.
    "pos_adv": ("algorithm.pos_adv.step=0.5",),
}
"""What a method needs besides its key."""


def prepare(demo: Any, seed: int, output: Path) -> dict[str, Any]:
    """Return the arguments of a run that do not depend on the method."""
    task = demo.task
    validation = data.problems(task.name, 64, VALIDATION_SEED, task.config)
    train = data.problems(task.name, 1024, TRAIN_SEED + seed, task.config)
    return {
        "demo": demo,
        "model": model.prepare(demo.name, OUTPUT / "cache", lambda *_: None),
        "train": data.write_parquet(
            data.reasoning_rows(task.name, train, "train"), output / "train.parquet"
        ),
        "validation": data.write_parquet(
            data.reasoning_rows(task.name, validation, "validation"),
            output / "validation.parquet",
        ),
    }


def own_metrics(name: str, row: dict[str, Any]) -> dict[str, float]:
    """Return what the method itself reported in a step."""
    if name == "grpo":
        return {}
    method = registry.get(name)
    prefix = f"{method.adv_estimator or method.loss_mode}/"
    return {key: float(value) for key, value in row.items() if key.startswith(prefix)}


def examine(name: str, steps: list[dict[str, Any]], wanted: int) -> str:
    """Return what is wrong with a run; empty where nothing is."""
    if len(steps) < wanted:
        return f"{len(steps)} of {wanted} steps"
    for number, row in enumerate(steps, 1):
        values = {key: float(row[key]) for key in SHOWN.values()} | own_metrics(name, row)
        odd = [key for key, value in values.items() if not math.isfinite(value)]
        if odd:
            return f"step {number}: {', '.join(odd)} not finite"
        if values["actor/grad_norm"] <= 0:
            return f"step {number}: no gradient"
        if name != "grpo" and not own_metrics(name, row):
            return f"step {number}: no metrics of the method"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--methods", nargs="+", default=["grpo", *methods()])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--output", type=Path, default=OUTPUT / "cpu_runs")
    args = parser.parse_args()

    console = Console()
    prepared = prepare(DEMOS["tiny"], args.seed, args.output)
    table = Table(title=f"{args.steps} steps of each method, seed {args.seed}, ranks {args.ranks}")
    for column in ("method", *SHOWN):
        table.add_column(column, justify="left" if column == "method" else "right")
    table.add_column("its own metrics, last step", overflow="fold")
    table.add_column("run")
    failed = False
    for name in track(args.methods, description="training", console=console):
        arguments = {
            "method": name,
            "steps": args.steps,
            "seed": args.seed,
            "ranks": args.ranks,
            "overrides": SETTINGS.get(name, ()),
        }
        rows: list[dict[str, Any]] = []
        try:
            with launch.Run(args.output / name, **prepared, **arguments) as run:
                rows += [row["data"] for row in run.rows() if row is not None]
            steps = [row for row in rows if "actor/grad_norm" in row]
            problem = examine(name, steps, args.steps)
        except launch.RunFailed as error:
            steps, problem = [], str(error)
            console.print(f"{name}: {error}", style="red", markup=False, soft_wrap=True)
        failed |= bool(problem)
        last = steps[-1] if steps else {}
        own = {
            key.partition("/")[2]: value
            for key, value in own_metrics(name, last).items()
            if not key.endswith(("/tokens", "/seconds"))
        }
        table.add_row(
            name,
            *(f"{float(last[key]):.3f}" if key in last else "" for key in SHOWN.values()),
            "  ".join(f"{key} {value:.3g}" for key, value in own.items()),
            problem.splitlines()[0] if problem else "well",
        )
    console.print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
