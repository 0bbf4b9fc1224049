"""What a policy loss may look at: some rows of a batch, under the policy as it is now.

A loss takes no statistic of a micro-batch, so that the size of one cannot matter: what it needs of
the whole batch was frozen when the rollout was made, and stands in `fields`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

Loss = tuple[torch.Tensor, dict[str, float]]
"""A scalar, and metrics with the same keys at every call."""


class Fields(Protocol):
    """Tensors by name."""

    def __getitem__(self, name: str, /) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """Rows of a batch; B and T are those of the micro-batch. All log-probs are in nats."""

    log_probs: torch.Tensor
    """(B, T) log-prob of each token under the current policy, with its gradient."""
    old_log_probs: torch.Tensor
    """(B, T) under the policy that the update started from."""
    advantages: torch.Tensor
    """(B, T)"""
    response_mask: torch.Tensor
    """(B, T) bool"""
    fields: Fields
    """What `Reweighted.loss_fields` held, these rows of it."""
    clipped_loss: Callable[[torch.Tensor], Loss]
    """verl's own clipped loss (dual clip included) of advantages, (B, T)."""
    aggregate: Callable[..., torch.Tensor]
    """Turns token losses, (B, T), into the scalar that `loss_agg_mode` asks for.

    They are multiplied by rollout correction's weights where there are any, but for
    `corrected=False`.
    """

    def __post_init__(self) -> None:
        """Where the mask is 0 anything may stand: it reaches neither the loss nor the gradient."""
        for name in ("log_probs", "old_log_probs", "advantages"):
            cleaned_BT = torch.where(self.response_mask, getattr(self, name), 0.0)
            object.__setattr__(self, name, cleaned_BT)

    def mean(self, x_BT: torch.Tensor) -> float:
        """Return the mean over the valid tokens, for a metric; 0 where there are none."""
        added = torch.where(self.response_mask, x_BT.detach(), 0).sum()
        return float(added / self.response_mask.sum().clamp(min=1))
