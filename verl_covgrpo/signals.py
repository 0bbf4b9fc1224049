"""What erpo and ep_grpo share: the entropy gate, and a signal standardised within buckets.

With z(x) = (x - mean) / (std + 1e-6), and 0 where std is below a floor, over the valid tokens of a
prompt's group:

    W = sigmoid(gamma z(H))                          entropy gate
    s = log pi_old - log pi_ref                      the signal of a token
    z of s over the group's tokens in one bucket     buckets cut each response into K parts

As described in secondary notes: all of it but the floors, which are our choice. That of s, 0.01
nats, is there because one model in bfloat16 gives log-probs that differ by up to 0.008 between two
batch sizes: such noise must not be blown up to unit variance.

Shape suffixes: B responses, T columns, r rows and w columns of a chunk, G groups, K buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from verl_covgrpo import stats
from verl_covgrpo.rollout import Rollout
from verl_covgrpo.stats import Scopes

EPSILON = 1e-6
ENTROPY_FLOOR = 1e-6
SIGNAL_FLOOR = 1e-2


def groups(rollout: Rollout) -> Scopes:
    """Return the prompt groups as scopes."""
    return Scopes(rollout.group_index, rollout.num_groups)


def inverse_std(variance: torch.Tensor, floor: float) -> torch.Tensor:
    """Return 1 / (std + 1e-6), and 0 where std is below the floor."""
    std = variance.clamp(min=0).sqrt()
    return torch.where(std < floor, 0.0, 1 / (std + EPSILON))


def entropy_gate(rollout: Rollout, gamma: float) -> list[torch.Tensor]:
    """Return W = sigmoid(gamma z(H)) of every chunk, (r, w) float32; masked places hold anything.

    A group whose entropy does not vary has W = 1/2.
    """
    tokens, H_BT = rollout.tokens, rollout.require("entropy")
    scopes = groups(rollout)
    W = tokens.pack(H_BT)
    rows = stats.row_moments(H_BT, tokens, W)
    mean_B = scopes.mean(rows)[scopes.index]
    slope_B = (gamma * inverse_std(scopes.variance(rows), ENTROPY_FLOOR))[scopes.index]
    scratch = stats.Scratch(torch.float64, H_BT.device)
    for chunk, H_rw in zip(tokens.chunks, W, strict=True):
        z_rw = scratch.copy(H_rw).sub_(mean_B[chunk.rows, None]).mul_(slope_B[chunk.rows, None])
        H_rw.copy_(z_rw).sigmoid_()
    return W


def log_ratios(rollout: Rollout) -> list[torch.Tensor]:
    """Return s = log pi_old - log pi_ref of every chunk, (r, w) float64, 0 where the mask is 0."""
    l_BT, ref_BT = rollout.require("old_log_probs"), rollout.require("ref_log_probs")
    return [
        chunk.mask_(chunk.take(l_BT).double().sub_(chunk.take(ref_BT)), rollout.tokens.mask, 0.0)
        for chunk in rollout.tokens.chunks
    ]


@dataclass(frozen=True)
class Buckets:
    """The bucket of every token."""

    size: int
    of_token: list[torch.Tensor]
    """Chunks, (r, w) int64 in [0, size), and `size` where the mask is 0."""


def buckets_by_rank(rollout: Rollout, size: int) -> Buckets:
    """Return floor(K rank / n), rank the token's place among its response's n valid tokens."""
    tokens = rollout.tokens
    of_token = []
    for chunk in tokens.chunks:
        count_r1 = tokens.count[chunk.rows, None]
        # The quotient of two integers below 2^53, rounded once, has the right floor.
        bucket_rw = ((size * chunk.ranks(tokens.mask)).double() / count_r1).long()
        of_token.append(chunk.mask_(bucket_rw, tokens.mask, size))
    return Buckets(size, of_token)


def buckets_by_progress(rollout: Rollout, size: int) -> Buckets:
    """Return min(floor(K p), K - 1), p the share of the response's entropy up to the token.

    A response without entropy has p = 0.
    """
    tokens = rollout.tokens
    of_token = []
    for chunk, H_rw in zip(tokens.chunks, tokens.pack(rollout.require("entropy")), strict=True):
        chunk.mask_(H_rw, tokens.mask, 0.0)
        spent_rw = torch.cumsum(H_rw.double(), dim=1)
        whole_r1 = spent_rw[:, -1:].clone()
        p_rw = torch.where(whole_r1 > 0, spent_rw.div_(whole_r1), 0.0)
        bucket_rw = p_rw.mul_(size).long().clamp_(0, size - 1)
        of_token.append(chunk.mask_(bucket_rw, tokens.mask, size))
    return Buckets(size, of_token)


def standardise_(
    rollout: Rollout, x: Sequence[torch.Tensor], buckets: Buckets, floor: float
) -> torch.Tensor:
    """Turn x into z(x) over each group's tokens in one bucket, in place; 0 where the mask is 0.

    Args:
        x: chunks, (r, w) float64, 0 where the mask is 0.
        floor: the std below which z is 0.

    Returns:
        (G, K) bool: the buckets that have a signal, a std of at least the floor.
    """
    tokens, scopes = rollout.tokens, groups(rollout)
    columns = buckets.size + 1  # the last one takes what is masked
    shape = (scopes.size, columns)
    count, first, second = (
        torch.zeros(shape, dtype=torch.float64, device=tokens.mask.device) for _ in range(3)
    )
    for chunk, x_rw, bucket_rw in zip(tokens.chunks, x, buckets.of_token, strict=True):
        group_r = scopes.index[chunk.rows]
        for moment, value_rw in (
            (count, torch.ones_like(x_rw)),
            (first, x_rw),
            (second, x_rw.square()),
        ):
            per_row = torch.zeros(len(chunk.rows), columns, dtype=torch.float64, device=x_rw.device)
            moment.index_add_(0, group_r, per_row.scatter_add_(1, bucket_rw, value_rw))
    mean = first / count.clamp(min=1)
    scale = inverse_std(second / count.clamp(min=1) - mean.square(), floor)
    scale[:, -1] = 0.0
    for chunk, x_rw, bucket_rw in zip(tokens.chunks, x, buckets.of_token, strict=True):
        group_r = scopes.index[chunk.rows]
        x_rw.sub_(mean[group_r].gather(1, bucket_rw)).mul_(scale[group_r].gather(1, bucket_rw))
    return scale[:, :-1] > 0


def signal_metrics(
    rollout: Rollout, W: list[torch.Tensor], process: list[torch.Tensor]
) -> dict[str, float]:
    """Return the metrics that erpo and ep_grpo share; see there."""
    tokens = rollout.tokens
    count = int(tokens.count.sum())
    mean = tokens.add_up(W) / count
    square = tokens.add_up([W_rw.square() for W_rw in W]) / count
    return {
        "gate": mean,
        "gate_std": max(square - mean**2, 0.0) ** 0.5,
        "process_rms": (tokens.add_up([x_rw.square() for x_rw in process]) / count) ** 0.5,
        "process_share": tokens.add_up([x_rw != 0 for x_rw in process]) / count,
        "tokens": float(count),
    }
