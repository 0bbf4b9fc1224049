"""The demo's models and tasks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ModelName = Literal["tiny", "smollm2"]

OUTPUT = Path("covgrpo-demo")
RECIPE = "cpu_demo"

VALIDATION_SEED = 2
WARM_START_SEED = 7
WARM_START_CHECK_SEED = 99
TRAIN_SEED = 1000
"""Seeds of the problem sets; a run's own seed is added to the last."""


@dataclass(frozen=True)
class Task:
    """A reasoning-gym task."""

    name: str
    config: dict[str, Any]
    """For `reasoning_gym.create_dataset`."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """For the reward function."""


@dataclass(frozen=True)
class Demo:
    """One of the demo's models, its task, and the length of a run."""

    name: ModelName
    task: Task
    steps: int
    response_length: int
    validation_prompts: int
    overrides: tuple[str, ...] = ()
    """What it changes in the recipe."""


@dataclass(frozen=True)
class WarmStart:
    """Size and supervised warm start of the tiny model; its cache is keyed by these."""

    hidden_size: int = 128
    layers: int = 2
    heads: int = 4
    batch_size: int = 64
    learning_rate: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's. With 0.999, and a learning rate of 3e-3, it takes about twice as many steps."""
    rise_steps: int = 50
    check_every: int = 25
    wordy_answers: float = 0.4
    """Share of its examples that say "it is 7" where the reward wants "7": a form to unlearn."""
    target_accuracy: float = 0.36
    most_steps: int = 3000
    seed: int = 0
    task: Task = field(
        default_factory=lambda: Task(
            "basic_arithmetic",
            {
                "min_terms": 2,
                "max_terms": 2,
                "min_digits": 1,
                "max_digits": 1,
                "operators": ["+", "-"],
                "allow_parentheses": False,
                "allow_negation": False,
            },
        )
    )


TINY = Demo(name="tiny", task=WarmStart().task, steps=40, response_length=8, validation_prompts=512)

SMOLLM2 = Demo(
    name="smollm2",
    task=Task(
        "chain_sum",
        {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
        {"last_number": True},  # it answers in sentences
    ),
    steps=6,
    response_length=24,
    validation_prompts=64,
    overrides=(
        "data.train_batch_size=8",
        "data.max_response_length=24",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=256",
    ),
)

DEMOS: dict[str, Demo] = {demo.name: demo for demo in (TINY, SMOLLM2)}


def recipes_folder() -> Path:
    """The recipes beside the package in a clone, inside it in a wheel."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "recipes", package.parent / "recipes"):
        if (folder / RECIPE).is_dir():
            return folder
    raise FileNotFoundError(f"no recipes found in {package} or beside it: reinstall verl-covgrpo")
