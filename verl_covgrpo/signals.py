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

from verl_covgrpo import groups, stats
from verl_covgrpo.rollout import Rollout

EPSILON = 1e-6
ENTROPY_FLOOR = 1e-6
SIGNAL_FLOOR = 1e-2


def inverse_std(variance: torch.Tensor, floor: float) -> torch.Tensor:
    """Return 1 / (std + 1e-6), and 0 where std is below the floor."""
    std = variance.clamp(min=0).sqrt()
    return torch.where(std < floor, 0.0, 1 / (std + EPSILON))


def entropy_gate(rollout: Rollout, gamma: float) -> list[torch.Tensor]:
    """Return W = sigmoid(gamma z(H)) of every chunk, (r, w), 0 where the mask is 0.

    A group whose entropy does not vary has W = 1/2.
    """
    tokens, H_BT = rollout.tokens, rollout.require("entropy")
    scopes = groups.of(rollout)
    rows = stats.row_moments(H_BT, tokens)
    mean_B = scopes.mean(rows)[scopes.index]
    slope_B = (gamma * inverse_std(scopes.variance(rows), ENTROPY_FLOOR))[scopes.index]
    scratch = stats.Scratch(torch.float64, H_BT.device)
    W = tokens.pack(H_BT)
    for chunk, H_rw in zip(tokens.chunks, W, strict=True):
        z_rw = scratch.copy(H_rw).sub_(mean_B[chunk.rows, None]).mul_(slope_B[chunk.rows, None])
        chunk.mask_(H_rw.copy_(z_rw).sigmoid_(), 0.0)
    return W


def log_ratios(rollout: Rollout) -> list[torch.Tensor]:
    """Return s = log pi_old - log pi_ref of every chunk, (r, w), 0 where the mask is 0."""
    tokens, ref_BT = rollout.tokens, rollout.require("ref_log_probs")
    s = tokens.pack(rollout.require("old_log_probs"))
    for chunk, s_rw in zip(tokens.chunks, s, strict=True):
        chunk.mask_(s_rw.sub_(chunk.take(ref_BT)), 0.0)
    return s


@dataclass(frozen=True)
class Buckets:
    """A cut of every response into K runs of columns, some of them empty."""

    size: int
    of_column: list[torch.Tensor]
    """Chunks, (r, w) int16 in [0, K), not decreasing along a row; a masked token may have any."""


MOST_BUCKETS = 1000


def buckets_by_rank(rollout: Rollout, size: int) -> Buckets:
    """Return floor(K rank / n), rank the token's place among its response's n valid tokens."""
    tokens = rollout.tokens
    of_column = []
    for chunk in tokens.chunks:
        # The quotient of two integers below 2^53, rounded once, has the right floor.
        share_rw = (size * chunk.ranks).double() / tokens.count[chunk.rows, None]
        of_column.append(share_rw.clamp_(0, size - 1).to(torch.int16))
    return Buckets(size, of_column)


def buckets_by_progress(rollout: Rollout, size: int) -> Buckets:
    """Return min(floor(K p), K - 1), p the share of the response's entropy up to the token.

    A response without entropy has p = 0. An entropy below 0, which is rounding, counts as 0.
    """
    tokens, H_BT = rollout.tokens, rollout.require("entropy")
    scratch = stats.Scratch(torch.float64, H_BT.device)
    of_column = []
    for chunk in tokens.chunks:
        H_rw = chunk.mask_(chunk.take(H_BT), 0.0).clamp_(min=0)
        spent_rw = scratch.like(H_rw)
        torch.cumsum(H_rw, dim=1, dtype=torch.float64, out=spent_rw)
        whole_r1 = spent_rw[:, -1:].clone()
        whole_r1[whole_r1 == 0] = 1.0
        # Exact where it is whole, which the product with a rounded reciprocal is not.
        of_column.append(spent_rw.mul_(size).div_(whole_r1).clamp_(0, size - 1).to(torch.int16))
    return Buckets(size, of_column)


def standardise_(
    rollout: Rollout, x: Sequence[torch.Tensor], buckets: Buckets, floor: float
) -> None:
    """Turn x into z(x) over each group's tokens in one bucket, in place; 0 where the mask is 0.

    Args:
        x: chunks, (r, w), 0 where the mask is 0.
        floor: the std below which z is 0.
    """
    tokens, scopes = rollout.tokens, groups.of(rollout)
    device = tokens.mask.device
    count, first, second = torch.zeros(
        3, scopes.size, buckets.size, dtype=torch.float64, device=device
    )
    bounds_K = torch.arange(1, buckets.size + 1, dtype=torch.int16, device=device)
    scratch = stats.Scratch(torch.float64, device)
    for chunk, x_rw, bucket_rw in zip(tokens.chunks, x, buckets.of_column, strict=True):
        bounds_rK = bounds_K.expand(len(chunk.rows), -1).contiguous()
        runs = Runs(torch.searchsorted(bucket_rw, bounds_rK))
        x64_rw = scratch.copy(x_rw)
        for moment, of_runs_rK in (
            (count, runs.count(tokens, chunk)),
            (first, runs.add_up(x64_rw)),
            (second, runs.add_up(x64_rw.square_())),
        ):
            moment.index_add_(0, scopes.index[chunk.rows], of_runs_rK)
    mean = first / count.clamp(min=1)
    scale = inverse_std(second / count.clamp(min=1) - mean.square(), floor)
    indices = stats.Scratch(torch.int64, device)
    for chunk, x_rw, bucket_rw in zip(tokens.chunks, x, buckets.of_column, strict=True):
        group_r, bucket64_rw = scopes.index[chunk.rows], indices.copy(bucket_rw)
        for table, apply_ in ((mean, x_rw.sub_), (scale, x_rw.mul_)):
            of_token_rw = scratch.like(x_rw)
            torch.gather(table[group_r], 1, bucket64_rw, out=of_token_rw)
            apply_(of_token_rw)
        chunk.mask_(x_rw, 0.0)


class Runs:
    """Runs of columns: those before end_1, from there to before end_2, and so on, (r, K) int64."""

    def __init__(self, end_rK: torch.Tensor) -> None:
        self.end = end_rK

    def add_up(self, x_rw: torch.Tensor) -> torch.Tensor:
        """Return the sum of each run, (r, K) float64."""
        upto_rw = torch.cumsum(x_rw, dim=1, dtype=torch.float64)
        upto_rK = upto_rw.gather(1, (self.end - 1).clamp_(min=0))
        return self._differences(torch.where(self.end > 0, upto_rK, 0.0))

    def count(self, tokens: stats.Tokens, chunk: stats.Chunk) -> torch.Tensor:
        """Return the number of valid tokens in each run, (r, K) float64."""
        if chunk.holes:
            return self.add_up(chunk.take(tokens.mask))
        return self._differences(self.end.minimum(tokens.count[chunk.rows, None]).double())

    def _differences(self, upto_rK: torch.Tensor) -> torch.Tensor:
        return upto_rK.diff(dim=1, prepend=torch.zeros_like(upto_rK[:, :1]))


def signal_metrics(
    rollout: Rollout, W: list[torch.Tensor], process: list[torch.Tensor]
) -> dict[str, float]:
    """Return the metrics that erpo and ep_grpo share; see there."""
    count = int(rollout.lengths.sum())
    counter = stats.Counter(rollout.tokens.mask.device)
    mean = stats.add_up(W) / count
    return {
        "gate": mean,
        "gate_std": max(stats.add_up_squares(W) / count - mean**2, 0.0) ** 0.5,
        "process_rms": (stats.add_up_squares(process) / count) ** 0.5,
        "process_share": sum(map(counter.nonzero, process)) / count,
        "tokens": float(count),
    }
