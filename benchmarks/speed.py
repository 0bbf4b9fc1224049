"""The cost of each method beside verl's own grpo estimator, and the memory it takes.

    python benchmarks/speed.py            prints the table
    python benchmarks/speed.py --check    also exits with 1 where a promise is broken

Times are ratios to verl's `compute_grpo_outcome_advantage` on the same batch: each measurement runs
verl's function and ours right after one another, in changing order, and the ratio is taken pair by
pair, so that a busy machine disturbs both. torch has one thread, as in verl's driver, to which Ray
gives OMP_NUM_THREADS=1; with more verl's function gains, and ours does not. Memory is the peak of
what torch and numpy hold beside the result, in units of one (B, T) float32 field.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

os.environ["VERL_USE_EXTERNAL_PLUGINS"] = "none"

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from verl_covgrpo import Rollout, build, methods

Run = Callable[[], Any]

WEIGHTS_LIMIT = 0.6
STAGE_LIMIT = 0.9
MEMORY_LIMIT = 1.5
OTHER_STAGE_LIMIT = 3.0
VOCABULARY = 151_936


def batch(size: int, columns: int, group: int, seed: int) -> dict[str, Any]:
    """Return a ragged batch as verl's V1 trainer gives it: (B, T) float32, an int64 mask, uids.

    The rows are in random order, as after verl's balancing of the load.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths_B = torch.randint(1, columns + 1, (size,), generator=generator)
    mask_BT = (torch.arange(columns) < lengths_B.unsqueeze(1)).long()
    log_probs_BT = -torch.empty(size, columns).exponential_(2.0, generator=generator) * mask_BT
    rewards_BT = torch.zeros(size, columns)
    right_B = (torch.rand(size, generator=generator) < 0.5).float()
    rewards_BT[torch.arange(size), lengths_B - 1] = right_B
    order_B = torch.randperm(size, generator=generator).tolist()
    uid = np.array([f"prompt-{row // group:08d}" for row in order_B], dtype=object)
    noise_BT = torch.randn(size, columns, generator=generator)
    return {
        "mask": mask_BT,
        "log_probs": log_probs_BT,
        "ref_log_probs": (log_probs_BT + 0.3 * noise_BT) * mask_BT,
        "entropy": torch.rand(size, columns, generator=generator) * 2 * mask_BT,
        "rewards": rewards_BT,
        "judge": torch.randint(1, 11, (size,), generator=generator).float(),
        "uid": uid,
    }


def naive(data: dict[str, Any], advantages_BT: torch.Tensor) -> torch.Tensor:
    """The formula as one writes it down, for the batch scope."""
    mask_BT = data["mask"].bool()
    A = advantages_BT[mask_BT].double()
    log_probs = data["log_probs"][mask_BT].double()
    c = (log_probs - log_probs.mean()) * (A - A.mean())
    w = torch.exp(-c.square() / (2 * c.var(correction=0)))
    weighted_BT = torch.zeros_like(advantages_BT)
    weighted_BT[mask_BT] = (w / w.mean() * A).float()
    return weighted_BT


def rollout(
    data: dict[str, Any], needs: Sequence[str] = ("old_log_probs",), **fields: Any
) -> Rollout:
    """Return the checked rollout with the fields that a method needs."""
    held = {
        "old_log_probs": data["log_probs"],
        "ref_log_probs": data["ref_log_probs"],
        "entropy": data["entropy"],
        "vocab_size": VOCABULARY,
    }
    return Rollout(
        rewards=data["rewards"].sum(-1),
        response_mask=data["mask"],
        group=data["uid"],
        **{name: held[name] for name in needs if name in held},
        **fields,
    )


def stage(name: str, data: dict[str, Any]) -> Run:
    """Return the whole stage of a method with its defaults: checks, base, weights, metrics."""
    judged = name == "dagrpo"
    method = build(name, **{"score_key": "judge"} if judged else {})
    extras = {"judge": data["judge"]} if judged else {}
    return lambda: method(rollout(data, method.needs, extras=extras))


def peak_fields(run: Run, result_bytes: int, field_bytes: int) -> float:
    """Return the peak of what a run holds beside its result, in (B, T) fields.

    The peaks of torch's memory and of numpy's are added up, which is an upper bound.
    """
    from torch.profiler import ProfilerActivity, profile

    held, torch_peak = 0, 0
    tracemalloc.start()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    _, numpy_peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            torch_peak = max(torch_peak, held)
    del result
    return (torch_peak + numpy_peak - result_bytes) / field_bytes


def seconds(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def ratios(runs: dict[str, Run], yardstick: Run, pairs: int) -> dict[str, list[float]]:
    """Return, for each run, its time over the yardstick's, pair by pair."""
    for run in (yardstick, *runs.values()):
        run()
    measured: dict[str, list[float]] = {name: [] for name in runs}
    for pair in range(pairs):
        for name, run in runs.items():
            if pair % 2:
                ours, theirs = seconds(run), seconds(yardstick)
            else:
                theirs, ours = seconds(yardstick), seconds(run)
            measured[name].append(ours / theirs)
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--responses", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=2048, help="longest response")
    parser.add_argument("--group", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="exit with 1 on a broken promise")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    data = batch(args.responses, args.tokens, args.group, args.seed)

    def verl_grpo() -> torch.Tensor:
        return compute_grpo_outcome_advantage(data["rewards"], data["mask"], data["uid"])[0]

    base_B = verl_grpo()[:, 0].clone()
    base_BT = base_B.unsqueeze(1) * data["mask"]
    ready = rollout(data, base_advantages=base_B)
    scopes = {scope: build("covgrpo", scope=scope) for scope in ("batch", "group")}
    runs: dict[str, Run] = {
        "covgrpo, weights alone, batch": lambda: scopes["batch"](ready),
        "covgrpo, weights alone, group": lambda: scopes["group"](ready),
        "covgrpo, batch": lambda: scopes["batch"](rollout(data)),
        "covgrpo, group": lambda: scopes["group"](rollout(data)),
        "covgrpo, naive formula, batch": lambda: naive(data, base_BT),
    }
    time_limits = dict.fromkeys(list(runs)[:2], WEIGHTS_LIMIT)
    time_limits |= dict.fromkeys(list(runs)[2:4], STAGE_LIMIT)
    memory_limits = dict.fromkeys(list(runs)[:4], MEMORY_LIMIT)
    others = [name for name in methods() if not name.startswith("covgrpo")]
    runs |= {name: stage(name, data) for name in others}
    time_limits |= dict.fromkeys(others, OTHER_STAGE_LIMIT)
    measured = ratios(runs, verl_grpo, args.pairs)
    field_bytes = args.responses * args.tokens * 4

    shape = f"{args.responses} responses of up to {args.tokens} tokens"
    table = Table(title=f"{shape}, {args.pairs} pairs")
    for column in ("", "time / verl's grpo", "quartiles", "promise", "memory", "promise"):
        table.add_column(column, justify="left" if not column else "right")
    kept = True
    for name, values in measured.items():
        ratio = statistics.median(values)
        low, _, high = statistics.quantiles(values, n=4)
        time_limit, memory_limit = time_limits.get(name), memory_limits.get(name)
        fields = peak_fields(runs[name], field_bytes, field_bytes)
        kept &= time_limit is None or ratio <= time_limit
        kept &= memory_limit is None or fields <= memory_limit
        table.add_row(
            name,
            f"{ratio:.2f}",
            f"{low:.2f} to {high:.2f}",
            f"{time_limit:.1f}" if time_limit else "",
            f"{fields:.2f}",
            f"{memory_limit:.1f}" if memory_limit else "",
        )
    console = Console()
    console.print(table)
    theirs = statistics.median(seconds(verl_grpo) for _ in range(5))
    console.print(
        f"verl's grpo: {theirs * 1e3:.0f} ms, torch threads: {args.threads}. "
        "Memory: (B, T) float32 fields beyond the result."
    )
    return 1 if args.check and not kept else 0


if __name__ == "__main__":
    sys.exit(main())
