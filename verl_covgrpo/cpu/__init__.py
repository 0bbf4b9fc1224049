"""Running verl and vLLM on a machine without an accelerator.

Used only when asked for (`VERL_PLATFORM=cpu`); with any other value nothing here is imported.

- `platform`: verl's device abstraction for "cpu", and the process group that goes with it
- `engine`: verl's FSDP engines registered for "cpu"
- `vllm_reload`: lets a vLLM server on a CPU take new weights after every update
- `replay`: a shorter wait between looks at the replay buffer, for steps of a few seconds
"""

from __future__ import annotations

import os

__all__ = ["install", "requested"]


def requested() -> bool:
    """Whether the environment asks for the CPU backend."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


def install() -> None:
    """Register the CPU backend with verl. Call once, while verl loads its plugins."""
    from verl_covgrpo.cpu import engine, platform, replay, vllm_reload

    platform.install()
    engine.install()
    replay.install()
    vllm_reload.install_distribution_name()
