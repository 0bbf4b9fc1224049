"""verl's FSDP2 engines on a CPU."""

from __future__ import annotations

from typing import Any

from wrapt import when_imported


def _register(transformer_impl: Any) -> None:
    from verl.workers.engine.base import EngineRegistry

    offload_policy = transformer_impl.CPUOffloadPolicy

    def unpinned_offload_policy(pin_memory: bool = False) -> Any:
        return offload_policy(pin_memory=False)  # pinned memory needs an accelerator build of torch

    transformer_impl.CPUOffloadPolicy = unpinned_offload_policy

    for model_type, engine in (
        ("language_model", transformer_impl.FSDPEngineWithLMHead),
        ("value_model", transformer_impl.FSDPEngineWithValueHead),
    ):
        subclass = type(
            f"{engine.__name__}CPU", (engine,), {"__doc__": f"{engine.__name__}, on a CPU."}
        )
        EngineRegistry.register(model_type=model_type, backend="fsdp2", device="cpu")(subclass)


def install() -> None:
    when_imported("verl.workers.engine.fsdp.transformer_impl")(_register)
