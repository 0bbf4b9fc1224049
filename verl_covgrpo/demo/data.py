"""Train and validation files in verl's parquet schema, from a reasoning-gym task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verl_covgrpo.demo.settings import Task
from verl_covgrpo.rewards.reasoning_gym import PREFIX


def problems(task: Task, size: int, seed: int) -> list[dict[str, Any]]:
    """`size` entries of the task (question, answer, metadata); the same for the same seed."""
    import reasoning_gym

    return list(reasoning_gym.create_dataset(task.name, size=size, seed=seed, **task.config))


def write_parquet(entries: list[dict[str, Any]], task: Task, split: str, path: Path) -> Path:
    """Write entries as rows of verl's schema."""
    import pandas

    rows = [
        {
            "data_source": PREFIX + task.name,
            "prompt": [{"role": "user", "content": entry["question"]}],
            "ability": "reasoning",
            "reward_model": {"style": "rule", "ground_truth": str(entry["answer"])},
            "extra_info": {
                "split": split,
                "index": index,
                "entry": json.dumps(
                    {"answer": entry["answer"], "metadata": entry["metadata"]}, default=str
                ),
            },
        }
        for index, entry in enumerate(entries)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(rows).to_parquet(path)
    return path
