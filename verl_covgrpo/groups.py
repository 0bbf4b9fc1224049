"""What methods that look at whole responses share: right or wrong, and the share of a group.

A session of several outputs is one response, judged by its last output. A response without a valid
token (rejected by rollout correction) counts, as in verl's base; padding rows do not.

Shape suffixes: B rows, G groups.
"""

from __future__ import annotations

import torch

from verl_covgrpo.rollout import Rollout
from verl_covgrpo.stats import Scopes


def of(rollout: Rollout) -> Scopes:
    """Return the prompt groups as scopes."""
    return Scopes(rollout.group_index, rollout.num_groups)


def right(rollout: Rollout, threshold: float) -> torch.Tensor:
    """Return whether each row's response has a raw score above the threshold, (B,) bool."""
    return rollout.require("scores")[rollout.final_row] > threshold


def responses(rollout: Rollout) -> torch.Tensor:
    """Return the rows that stand for a response, (B,) bool: the last outputs of real groups.

    A group without any valid token is padding.
    """
    rows_B = torch.arange(len(rollout.final_row), device=rollout.final_row.device)
    scopes = of(rollout)
    real_G = scopes.add(rollout.lengths) > 0
    return (rollout.final_row == rows_B) & real_G[scopes.index]


def share_right(rollout: Rollout, threshold: float) -> tuple[torch.Tensor, float]:
    """Return the share of right responses in each group, (G,) float64, and in the whole batch.

    0 for a group of padding.
    """
    scopes, counts_B = of(rollout), responses(rollout)
    right_G = scopes.add(right(rollout, threshold) & counts_B)
    count_G = scopes.add(counts_B)
    return right_G / count_G.clamp(min=1), float(right_G.sum() / count_G.sum())
