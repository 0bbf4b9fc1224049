"""Names our agent loops in verl's registry, without importing them or verl's."""

from __future__ import annotations

from types import ModuleType

from verl_covgrpo.seams import on_import

DEMONSTRATION = "demonstration_agent"


def _register(agent_loop: ModuleType) -> None:
    target = "verl_covgrpo.verl_hooks.demonstration.DemonstrationAgentLoop"
    agent_loop._agent_loop_registry.setdefault(DEMONSTRATION, {"_target_": target})


def install() -> None:
    on_import("verl.experimental.agent_loop.agent_loop", "_agent_loop_registry", _register)
