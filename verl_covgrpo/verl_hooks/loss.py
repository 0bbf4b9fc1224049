"""The loss hook: makes what a method froze for the whole batch available to a loss in the workers.

verl hands a registered policy loss only log-probs, advantages and mask. The frozen fields travel
with the batch; the hook holds the micro-batch's data while verl's own `ppo_loss` runs, and the
registered function reads them from there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch

from verl_covgrpo import registry
from verl_covgrpo.errors import MethodError
from verl_covgrpo.micro_batch import MicroBatch
from verl_covgrpo.registry import Method
from verl_covgrpo.seams import on_import, replace_function
from verl_covgrpo.verl_hooks import selection
from verl_covgrpo.verl_hooks.advantage import ELSEWHERE

_DATA: ContextVar[Any] = ContextVar("verl_covgrpo_micro_batch", default=None)


class FrozenFields:
    """The fields of the current micro-batch by name, padded like the log-probs."""

    def __init__(self, method: str) -> None:
        self.method = method

    def __getitem__(self, name: str) -> torch.Tensor:
        data = _DATA.get()
        if data is None or name not in data.keys():  # noqa: SIM118, a TensorDict has no `in`
            raise MethodError(f"the policy loss {self.method} has no {name}; it {ELSEWHERE}")
        value = data[name]
        return value.to_padded_tensor(0.0) if value.is_nested else value


def policy_loss(method: type[Method]) -> Callable[..., tuple[torch.Tensor, dict[str, Any]]]:
    """Return the function that verl's registry holds for a method with a loss."""
    fields = FrozenFields(str(method.loss_mode))

    def compute(
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn

        mask_BT = response_mask.bool()
        # Where the mask is 0 anything may stand, and verl's sums over responses multiply it by 0.
        log_prob = torch.where(mask_BT, log_prob, 0.0)
        old_log_prob = torch.where(mask_BT, old_log_prob, 0.0)
        if rollout_is_weights is not None:
            rollout_is_weights = torch.where(mask_BT, rollout_is_weights, 0.0)

        def clipped_loss(advantages_BT: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
            return get_policy_loss_fn("vanilla")(
                old_log_prob=old_log_prob,
                log_prob=log_prob,
                advantages=advantages_BT,
                response_mask=response_mask,
                loss_agg_mode=loss_agg_mode,
                config=config,
                rollout_is_weights=rollout_is_weights,
            )

        def aggregate(losses_BT: torch.Tensor, corrected: bool = True) -> torch.Tensor:
            if corrected and rollout_is_weights is not None:
                losses_BT = losses_BT * rollout_is_weights
            return agg_loss(
                loss_mat=torch.where(mask_BT, losses_BT, 0.0),
                loss_mask=response_mask,
                loss_agg_mode=loss_agg_mode,
                **config.global_batch_info,
            )

        given = selection.given_to_loss(method, config.policy_loss)
        loss, metrics = registry.build(method.name, **given).policy_loss(
            MicroBatch(
                log_probs=log_prob,
                old_log_probs=old_log_prob,
                advantages=advantages,
                response_mask=mask_BT,
                fields=fields,
                clipped_loss=clipped_loss,
                aggregate=aggregate,
            )
        )
        return loss, {
            key if key.startswith("actor/") else f"actor/{key}": value
            for key, value in metrics.items()
        }

    compute.__name__ = compute.__qualname__ = f"compute_policy_loss_{method.loss_mode}"
    compute.verl_covgrpo_method = method.name  # type: ignore[attr-defined]
    return compute


def _wrap_ppo_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    def ppo_loss(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        token = _DATA.set(data)
        try:
            return original(config, model_output, data, dp_group=dp_group)
        finally:
            _DATA.reset(token)

    return ppo_loss


def _register(core_algos: ModuleType) -> None:
    """Put the losses into verl's registry, under their own names."""
    for name in registry.names():
        method = registry.get(name)
        if method.loss_mode is None:
            continue
        # verl would overwrite a namesake without a word; `checks` refuses a launch that selects it.
        if method.loss_mode not in core_algos.POLICY_LOSS_REGISTRY:
            core_algos.register_policy_loss(method.loss_mode)(policy_loss(method))


def install() -> None:
    replace_function(
        "verl.workers.utils.losses",
        "ppo_loss",
        _wrap_ppo_loss,
        parameters=("config", "model_output", "data", "dp_group"),
    )
    on_import("verl.trainer.ppo.core_algos", "POLICY_LOSS_REGISTRY", _register)
