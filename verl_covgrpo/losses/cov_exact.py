"""clip_cov_exact and kl_cov_exact: Clip-Cov and KL-Cov over the whole batch, arXiv 2505.22617.

Over the N valid tokens of the batch, with l = log pi_old of the sampled token, A its base advantage
and r = pi_theta / pi_old:

    c = (l - mean l) (A - mean A)
    clip_cov_exact   A' = 0 for k = max(1, floor(share N)) tokens drawn among those with
                     low <= c <= high (all of them where there are fewer), else A' = A
    kl_cov_exact     loss = -A r + coef |log r| for the k = max(1, floor(share N)) largest c,
                     else -A r; nothing is clipped

Where this comes from
    [paper and its authors' code] Both rules and their defaults.
    Our choice: that the bounds low and high are included (the authors' code leaves them out); that
    tokens are chosen once, over the whole batch and under pi_old, where verl's
    `clip_cov` and `kl_cov` choose in every micro-batch of every rank, under the current policy. The
    draw is among tokens in a canonical order (by c, then l, then the place in the response, then
    the response's mean l, then the prompt's id), with a generator seeded by (seed, step): neither
    row order nor ranks matter. Dropped tokens still count in the denominator of the loss.

Shape suffixes: B responses, T columns, r rows and w columns of a chunk, K chosen tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from verl_covgrpo import stats
from verl_covgrpo.covariance import covariances
from verl_covgrpo.errors import MethodError
from verl_covgrpo.micro_batch import Loss, MicroBatch
from verl_covgrpo.registry import Method, parameter, register
from verl_covgrpo.rollout import Reweighted, Rollout

SELECTED = "kl_cov_exact_selected_BT"


@register("clip_cov_exact")
@dataclass(frozen=True, kw_only=True)
class ClipCovExact(Method):
    """Drop a few tokens of high covariance from the update.

    Metrics
        candidate_share: tokens with low <= c <= high, as a share of all.
        clipped_share: tokens dropped. clipped_covariance: their mean c, 0 where there are none.
        tokens: valid tokens. seconds: the time taken.
    """

    needs = ("old_log_probs",)
    adv_estimator = "clip_cov_exact"

    share: float = parameter(2e-4, low=0.0, high=1.0)
    """Share of the batch's tokens to drop; at least one is."""
    low: float = 1.0
    high: float = 5.0
    seed: int = parameter(0, low=0)
    """Of the draw, together with the training step."""

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise MethodError(f"clip_cov_exact.low is {self.low}, above high, {self.high}")

    def reweight(self, rollout: Rollout) -> Reweighted:
        """Return A, and 0 for the tokens drawn."""
        A = self.base_advantages(rollout)
        c = covariances(rollout, A)
        candidates = Chosen.of(rollout, c, [(c_rw >= self.low) & (c_rw <= self.high) for c_rw in c])
        k = min(how_many(rollout, self.share), len(candidates))
        generator = np.random.default_rng((self.seed, rollout.step))
        drawn = candidates[generator.choice(len(candidates), size=k, replace=False)]
        A_BT = rollout.tokens.spread(A)
        A_BT[drawn.row, drawn.column] = 0.0
        tokens = int(rollout.lengths.sum())
        metrics = {
            "candidate_share": len(candidates) / tokens,
            "clipped_share": k / tokens,
            "clipped_covariance": drawn.mean_covariance,
            "tokens": float(tokens),
        }
        return Reweighted(advantages=A_BT, metrics=metrics)


@register("kl_cov_exact")
@dataclass(frozen=True, kw_only=True)
class KLCovExact(Method):
    """Hold the tokens of the highest covariance to the old policy.

    Metrics
        penalised_share: tokens with the penalty. penalised_covariance: their mean c.
        threshold: the least c among them.
        tokens: valid tokens. seconds: the time taken.
    Metrics of the loss, of each micro-batch
        ppo_kl: mean log p_old - log p. kl_cov_exact_penalty: mean of coef |log r| over all tokens.
    """

    needs = ("old_log_probs",)
    loss_mode = "kl_cov_exact"

    share: float = parameter(2e-3, low=0.0, high=1.0)
    """Share of the batch's tokens under the penalty; at least one is. The paper: 2e-4 for 32B."""
    coef: float = parameter(1.0, low=0.0)
    """Coefficient of the penalty."""

    def reweight(self, rollout: Rollout) -> Reweighted:
        """Return A, and (B, T) bool, the tokens of the largest c."""
        A = self.base_advantages(rollout)
        c = covariances(rollout, A)
        k = how_many(rollout, self.share)
        threshold = kth_largest(c, k)
        largest = Chosen.of(rollout, c, [c_rw >= threshold for c_rw in c])
        largest = largest[np.arange(len(largest) - k, len(largest))]
        selected_BT = torch.zeros_like(rollout.response_mask)
        selected_BT[largest.row, largest.column] = True
        tokens = int(rollout.lengths.sum())
        metrics = {
            "penalised_share": k / tokens,
            "penalised_covariance": largest.mean_covariance,
            "threshold": threshold,
            "tokens": float(tokens),
        }
        return Reweighted(
            advantages=rollout.tokens.spread(A),
            metrics=metrics,
            loss_fields={SELECTED: selected_BT},
        )

    def policy_loss(self, micro: MicroBatch) -> Loss:
        """Return the loss, -A r + coef |log r| where selected."""
        log_r = micro.log_probs - micro.old_log_probs
        penalty = torch.where(micro.fields[SELECTED].bool(), self.coef * log_r.abs(), 0.0)
        metrics = {"ppo_kl": -micro.mean(log_r), "kl_cov_exact_penalty": micro.mean(penalty)}
        return micro.aggregate(-micro.advantages * log_r.exp() + penalty), metrics


def how_many(rollout: Rollout, share: float) -> int:
    """Return k = max(1, floor(share N))."""
    return max(1, math.floor(share * int(rollout.lengths.sum())))


def kth_largest(c: list[torch.Tensor], k: int) -> float:
    """Return the k-th largest c among the valid tokens."""
    flat = torch.cat([c_rw.flatten() for c_rw in c]).cpu().numpy()
    return float(np.partition(flat, len(flat) - k)[len(flat) - k])


@dataclass(frozen=True)
class Chosen:
    """Some tokens in the canonical order, all (K,)."""

    row: torch.Tensor
    column: torch.Tensor
    c: torch.Tensor

    @classmethod
    def of(cls, rollout: Rollout, c: list[torch.Tensor], keep: list[torch.Tensor]) -> Chosen:
        """Return the tokens of chunks where `keep` is true."""
        l_BT, tokens = rollout.require("old_log_probs"), rollout.tokens
        mean_B = stats.row_moments(l_BT, tokens).mean
        rows, columns, values, ranks = [], [], [], []
        for chunk, c_rw, keep_rw in zip(tokens.chunks, c, keep, strict=True):
            row, column = keep_rw.nonzero(as_tuple=True)
            rows.append(chunk.rows[row])
            columns.append(column)
            values.append(c_rw[row, column])
            ranks.append(chunk.ranks.expand(c_rw.shape)[row, column])
        row, column, value = torch.cat(rows), torch.cat(columns), torch.cat(values)
        keys = (mean_B[row], torch.cat(ranks), l_BT[row, column].double(), value)
        _, prompt_B = np.unique([str(prompt) for prompt in rollout.group], return_inverse=True)
        last_resort = prompt_B[row.cpu().numpy()]
        order = np.lexsort([last_resort, *(key.cpu().numpy() for key in keys)])
        return cls(row, column, value)[order]

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, index: np.ndarray) -> Chosen:
        i = torch.as_tensor(index, dtype=torch.int64, device=self.row.device)
        return Chosen(self.row[i], self.column[i], self.c[i])

    @property
    def mean_covariance(self) -> float:
        """Their mean c; 0 where there are none."""
        return float(self.c.mean()) if len(self) else 0.0
