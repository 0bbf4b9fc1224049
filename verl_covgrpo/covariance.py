"""The covariance of log-prob and advantage: covgrpo, clip_cov_exact and kl_cov_exact look at it.

Over the valid tokens of a scope, with l the log-prob of the sampled token and A its advantage:

    c = (l - mean l) (A - mean A),    s the std of c

The std of c needs one pass over l when A is one number per response, as for grpo, with a_i = A_i -
mean A, and l_i, m2_i the mean and the squared deviations of response i:

    N s^2 = sum_i a_i^2 m2_i + n_i (a_i (l_i - mean l) - mean c)^2

Shape suffixes: B responses, T columns, S scopes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl_covgrpo import stats
from verl_covgrpo.rollout import Rollout
from verl_covgrpo.stats import RowMoments, Scopes

STD_FLOOR = 1e-12


@dataclass(frozen=True)
class Covariance:
    """What the formula needs of each scope, as float64."""

    mean_l: torch.Tensor
    """(S,)"""
    mean_A: torch.Tensor  # noqa: N815
    """(S,)"""
    s: torch.Tensor
    """(S,) 0 where A does not vary."""
    inv_s: torch.Tensor
    """(S,) 0 where every weight is 1."""


def covariance_of(rollout: Rollout, A: torch.Tensor, scopes: Scopes) -> Covariance:
    """Return the means of l and A and the std of c over each scope; A is (B, 1) or (B, T)."""
    tokens = rollout.tokens
    l_rows = stats.row_moments(rollout.require("old_log_probs"), tokens)
    mean_l_S = scopes.mean(l_rows)
    if A.shape[1] == 1:
        A_B = A.squeeze(1).double()
        A_rows = RowMoments(l_rows.count, A_B, torch.zeros_like(A_B))
        mean_A_S = scopes.mean(A_rows)
        a_B = A_B - mean_A_S[scopes.index]
        l_B = l_rows.mean - mean_l_S[scopes.index]
        c_rows = RowMoments(l_rows.count, a_B * l_B, a_B.square() * l_rows.m2)
        has_tokens_B = tokens.count > 0
        low_B = torch.where(has_tokens_B, A_B, torch.inf)
        high_B = torch.where(has_tokens_B, A_B, -torch.inf)
    else:
        A_rows = stats.row_moments(A, tokens)
        mean_A_S = scopes.mean(A_rows)
        c_rows = product_moments(rollout, A, mean_l_S[scopes.index], mean_A_S[scopes.index])
        low_B, high_B = stats.row_extremes(A, tokens)
    constant_S = scopes.constant(low_B, high_B)
    s_S = torch.where(constant_S, 0.0, scopes.variance(c_rows).sqrt())
    inv_s_S = torch.where(s_S < STD_FLOOR, 0.0, 1 / s_S)
    return Covariance(mean_l_S, mean_A_S, s_S, inv_s_S)


def product_moments(
    rollout: Rollout, A_BT: torch.Tensor, mean_l_B: torch.Tensor, mean_A_B: torch.Tensor
) -> RowMoments:
    """Return the row moments of c where A varies within a response."""
    l_BT, tokens = rollout.require("old_log_probs"), rollout.tokens
    pivot_B = (tokens.at_first(l_BT) - mean_l_B) * (tokens.at_first(A_BT) - mean_A_B)
    moments = stats.MomentsOfRows(tokens, pivot_B)
    for chunk in tokens.chunks:
        rows = chunk.rows
        c_rw = chunk.take(l_BT).double().sub_(mean_l_B[rows, None])
        c_rw.mul_(chunk.take(A_BT).double().sub_(mean_A_B[rows, None]))
        c_rw.sub_(pivot_B[rows, None])
        moments.add(chunk.mask_(c_rw, 0.0))
    return moments.result()


def covariances(rollout: Rollout, A: torch.Tensor) -> list[torch.Tensor]:
    """Return c of every chunk over the whole batch, (r, w) float64; -inf where the mask is 0."""
    tokens = rollout.tokens
    batch = Scopes(torch.zeros_like(rollout.group_index), 1)
    covariance = covariance_of(rollout, A, batch)
    a = A.double() - covariance.mean_A
    c = []
    for chunk, l_rw in tokens.each(rollout.require("old_log_probs")):
        c_rw = l_rw.to(torch.float64, copy=True).sub_(covariance.mean_l).mul_(chunk.take(a))
        c.append(chunk.mask_(c_rw, -torch.inf))
    return c
