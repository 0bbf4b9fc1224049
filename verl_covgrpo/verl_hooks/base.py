"""The estimator under a weighting: our own `grpo`, or one of verl's that needs rewards alone."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from verl_covgrpo import registry
from verl_covgrpo.errors import MethodError, did_you_mean

_GIVEN = {"token_level_rewards", "response_mask", "index", "config"}
_NEED_MORE = {"grpo_passk", "gdpo"}  # a group-level choice and per-dimension rewards


def check(base: str, where: str) -> None:
    """Refuse a base that cannot stand under a weighting.

    Raises:
        MethodError: unknown to verl, one of ours, or in need of more than rewards, mask and groups.
    """
    if base == "grpo":
        return
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    known = sorted(set(ADV_ESTIMATOR_REGISTRY) - set(registry.names()))
    if base in registry.names():
        raise MethodError(
            f"{where}={base}: a weighting cannot stand on another one; use one of verl's own "
            "estimators, for example grpo or rloo"
        )
    if base not in ADV_ESTIMATOR_REGISTRY:
        raise MethodError(
            f"{where}={base}: verl has no such estimator{did_you_mean(base, known)}; "
            f"known: {', '.join(known)}"
        )
    required = {
        name
        for name, parameter in inspect.signature(ADV_ESTIMATOR_REGISTRY[base]).parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    }
    if required - _GIVEN or base in _NEED_MORE:
        more = ", ".join(sorted(required - _GIVEN)) or "more than the rewards"
        raise MethodError(
            f"{where}={base} needs {more}: only an estimator of token_level_rewards, response_mask "
            "and index can stand under a weighting; use for example grpo, rloo or opo"
        )


def compute(
    base: str,
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[Any],
    config: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, returns), (B, T) each, of one of verl's registered estimators."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    return get_adv_estimator_fn(base)(
        token_level_rewards=token_level_rewards,
        response_mask=response_mask,
        index=index,
        config=config,
    )
