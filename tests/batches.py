"""Random batches with everything that decides: holes, padding rows, rejected rows, lone rows."""

from __future__ import annotations

import math
from typing import Any

import torch

REWARDS = ("binary", "fractional", "normal", "constant")


def ragged(
    seed: int,
    groups: int = 6,
    columns: int = 13,
    rewards: str = "binary",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Return the fields of a `Rollout`: nan and inf wherever the mask is 0.

    Groups have 1 to 6 rows in mixed order; one of them has equal rewards, one has one row, one row
    of a real group has no valid token, and three padding rows share a group without any.
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    sizes = [1, 4, 3, *integers(1, 7, groups).tolist()]
    group = [f"prompt-{g}" for g, size in enumerate(sizes) for _ in range(size)] + ["pad-x"] * 3
    rows = len(group)
    ends = integers(1, columns + 1, rows)
    mask = torch.arange(columns) < ends.unsqueeze(1)
    holes = torch.rand(rows, columns, generator=generator) < 0.2
    mask &= ~(holes & (integers(0, 2, rows, 1) == 1))
    mask[2] = False  # a rejected row in a real group
    mask[-3:] = False
    mask[0, 0] = True

    if rewards == "binary":
        values = integers(0, 2, rows).float()
    elif rewards == "fractional":
        values = integers(0, 4, rows).float() * 0.1
    elif rewards == "normal":
        values = torch.randn(rows, generator=generator)
    else:
        values = torch.full((rows,), 0.1)
    values[5:8] = values[5]  # the rows of the third group
    values[-3:] = 0.0

    order = torch.randperm(rows, generator=generator)
    log_probs = -torch.empty(rows, columns).exponential_(1.5, generator=generator)
    garbage = torch.tensor([torch.nan, torch.inf, -torch.inf])[integers(0, 3, rows, columns)]
    return {
        "rewards": values[order],
        "response_mask": mask[order],
        "group": [group[i] for i in order.tolist()],
        "old_log_probs": torch.where(mask, log_probs, garbage)[order].to(dtype),
    }


VOCABULARY = 50


def with_policy_fields(
    batch: dict[str, Any], seed: int = 0, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Return the batch with entropy, reference log-probs and the size of the vocabulary.

    They have the dtype of the batch's log-probs where none is given.
    """
    dtype = dtype or batch["old_log_probs"].dtype
    generator = torch.Generator().manual_seed(seed + 1)
    mask = batch["response_mask"].bool()
    entropy = torch.rand(mask.shape, generator=generator).square() * math.log(VOCABULARY)
    noise = 0.3 * torch.randn(mask.shape, generator=generator)
    kinds = torch.tensor([torch.nan, torch.inf, -torch.inf])
    garbage = kinds[torch.randint(0, 3, mask.shape, generator=generator)]
    return {
        **batch,
        "entropy": torch.where(mask, entropy, garbage).to(dtype),
        "ref_log_probs": torch.where(mask, batch["old_log_probs"] + noise, garbage).to(dtype),
        "vocab_size": VOCABULARY,
    }


def valid(x: torch.Tensor, mask: torch.Tensor) -> list[list[float]]:
    """Return the values at valid tokens, row by row, as Python floats; `x` may be (B,)."""
    x = x.unsqueeze(1) if x.ndim == 1 else x
    x = x.double().expand(mask.shape)
    return [row[keep].tolist() for row, keep in zip(x, mask.bool(), strict=True)]


def rows_of(batch: dict[str, Any], order: torch.Tensor) -> dict[str, Any]:
    """Return a batch with its rows in another order, or some of them."""
    return {
        name: value[order]
        if isinstance(value, torch.Tensor)
        else [value[i] for i in order]
        if isinstance(value, list)
        else value
        for name, value in batch.items()
    }
