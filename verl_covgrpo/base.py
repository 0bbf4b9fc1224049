"""verl's own `grpo` advantage, equal to it to the bit, without a loop over groups.

    A_i = (R_i - mean R) / (std R + 1e-6)     over the rows of i's prompt group

The std is the unbiased one; a group of one row keeps its reward (mean 0, std 1). Every row counts,
also one without a valid token, as in verl. One exception, our choice: a group of several rows whose
rewards are all equal gets exactly 0, where verl's rounding of the mean can give up to 0.1.
"""

from __future__ import annotations

import torch

EPSILON = 1e-6
# torch.std and torch.mean split the work on longer tensors among threads, with other roundings.
_LONGEST_SERIAL = 32768


def grpo(
    rewards_B: torch.Tensor,
    group_index_B: torch.Tensor,
    num_groups: int,
    norm_by_std: bool = True,
) -> torch.Tensor:
    """Return the GRPO advantage of each response, (B,), in the dtype of the rewards.

    Args:
        rewards_B: (B,) floating, the summed token reward of each response.
        group_index_B: (B,) int64 in [0, num_groups).
        num_groups: the number of groups; groups without a row are allowed.
        norm_by_std: divide by the std; False is Dr. GRPO (arXiv 2503.20783).
    """
    sizes_G = torch.bincount(group_index_B, minlength=num_groups)
    starts_G = sizes_G.cumsum(0) - sizes_G
    order_B = group_index_B.argsort(stable=True)
    advantages_B = torch.empty_like(rewards_B)
    for size in sizes_G.unique().tolist():
        if size > 0:
            starts_K1 = starts_G[sizes_G == size].unsqueeze(1)
            rows_KG = order_B[starts_K1 + torch.arange(size, device=order_B.device)]
            advantages_B[rows_KG] = _grpo_of_equal_sizes(rewards_B[rows_KG], norm_by_std)
    return advantages_B


def _grpo_of_equal_sizes(rewards_KG: torch.Tensor, norm_by_std: bool) -> torch.Tensor:
    """Return the advantages of K groups of G rows each, (K, G)."""
    dtype = rewards_KG.dtype
    if rewards_KG.shape[1] == 1:
        if not norm_by_std:
            return rewards_KG
        # verl's mean and std of a single row are float32 whatever the rewards are.
        scale = torch.ones((), dtype=torch.float32, device=rewards_KG.device) + EPSILON
        return (rewards_KG.to(torch.promote_types(dtype, torch.float32)) / scale).to(dtype)
    mean_K1 = rewards_KG.mean(dim=1, keepdim=True)
    advantages_KG = rewards_KG - mean_K1
    if norm_by_std:
        advantages_KG = advantages_KG / (_std(rewards_KG, mean_K1) + EPSILON)
    varies_K1 = (rewards_KG != rewards_KG[:, :1]).any(dim=1, keepdim=True)
    return torch.where(varies_K1, advantages_KG, 0)


def _std(rewards_KG: torch.Tensor, mean_K1: torch.Tensor) -> torch.Tensor:
    """Return the unbiased std of each row, (K, 1), with the roundings of `torch.std(row)`.

    For float32 on the CPU that is two passes in float64, one term after the other, around the
    float32 mean. `torch.std(dim=1)` rounds in another way, and `sum` adds up in another order;
    `cumsum` adds one term after the other. Other dtypes, which verl does not use for rewards, are
    left to `torch.std` row by row.
    """
    size = rewards_KG.shape[1]
    if size > _LONGEST_SERIAL or rewards_KG.dtype != torch.float32:
        return torch.stack([row.std() for row in rewards_KG]).unsqueeze(1)
    squares_KG = (rewards_KG.double() - mean_K1.double()).square()
    variance_K1 = squares_KG.cumsum(dim=1)[:, -1:] / (size - 1)
    return variance_K1.sqrt().to(rewards_KG.dtype)
