"""verl's own configuration, and child processes, for the tests of what touches verl.

Importing this module loads the plugin into this process as `import verl` does in a launch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import DictConfig, OmegaConf

verl = pytest.importorskip("verl")

import verl_covgrpo.verl_hooks.plugin  # noqa: E402, F401

RUNNABLE = ("actor_rollout_ref.actor.use_dynamic_bsz=True", "critic.enable=False")
"""What verl's own defaults lack to pass verl's own validation."""


def compose(*overrides: str, name: str = "ppo_trainer") -> DictConfig:
    """Compose verl's configuration as `python -m verl.trainer.main_ppo` does."""
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose(name, overrides=[*RUNNABLE, *overrides])


def validate(config: DictConfig) -> None:
    """Run verl's `validate_config` as its entry point does."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils import config as verl_config

    verl_config.validate_config(
        config=config,
        use_reference_policy=need_reference_policy(config),
        use_critic=need_critic(config),
    )


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return a nested configuration as {"a.b": value}, interpolations unresolved."""
    if isinstance(config, DictConfig):
        config = OmegaConf.to_container(config, resolve=False)
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        leaves.update(flat(value, f"{name}.") if isinstance(value, dict) else {name: value})
    return leaves


def fresh_environment() -> dict[str, str]:
    """The environment without what verl, Ray (RAY_AUTH_MODE) and Hydra have set here."""
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("VERL_", "RAY_", "HYDRA_"))
    }


def child(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python as a user would: the plugin on, no platform chosen, unless `env` says so."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**fresh_environment(), "PYTHONWARNINGS": "ignore", **env},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
