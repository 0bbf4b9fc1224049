"""Names our agent loops in verl's registry, without importing them or verl's."""

from __future__ import annotations

from types import ModuleType

from wrapt import when_imported

DEMONSTRATION = "demonstration_agent"


def _register(agent_loop: ModuleType) -> None:
    target = "verl_covgrpo.verl_hooks.demonstration.DemonstrationAgentLoop"
    agent_loop._agent_loop_registry.setdefault(DEMONSTRATION, {"_target_": target})


def install() -> None:
    when_imported("verl.experimental.agent_loop.agent_loop")(_register)
