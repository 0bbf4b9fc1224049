"""covgrpo: covariance-aware GRPO (CW-GRPO), arXiv 2605.11538.

Over the valid tokens of a scope, with l the log-prob of the sampled token and A its advantage:

    c   = (l - mean l) (A - mean A)
    w   = exp(-c^2 / (2 s^2)),     s the std of c
    w~  = w N / sum(w),            N the tokens of the scope: the mean weight is 1
    A'  = w~ A

Where this comes from
    [paper] The method has no hyper-parameter.
    As described in secondary notes: all four lines above; each token counts once in every mean, the
    kernel is centred at zero, ratio, clipping and KL stay as they are.
    Our choice: the scope, since the notes allow both readings (`batch`, the default, or `group`,
    the responses to one prompt); l is the log-prob under pi_old, equal to the current policy in the
    paper's on-policy setting; s is the population std; every weight is 1 where A does not vary over
    the scope's tokens (greatest == least), where s < 1e-12, or where the mean of w is below 1e-30
    (all c lie so far from zero, measured in s, that float32 has no kernel left to compare).

Shape suffixes: B responses, T columns, S scopes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from verl_covgrpo import stats
from verl_covgrpo.covariance import Covariance, covariance_of
from verl_covgrpo.registry import Method, register
from verl_covgrpo.rollout import Reweighted, Rollout
from verl_covgrpo.stats import Scopes

Scope = Literal["batch", "group"]

KERNEL_FLOOR = 1e-30
SUPPRESSED = 0.1


@register("covgrpo")
@dataclass(frozen=True, kw_only=True)
class CovGRPO(Method):
    """Weight each token's advantage by how ordinary its covariance is.

    Metrics
        weight_std: std of the weights w~.
        effective_share: (sum w~)^2 / (N sum w~^2), 1 where all weights are equal.
        suppressed_share: tokens with w < 0.1, as a share of all.
        covariance_std: s; for groups the mean over all tokens of their group's s.
        high_covariance_share, low_covariance_share: tokens with c > 2 s and with c < -2 s.
        positive_weight_mean, negative_weight_mean: mean w~ of the tokens with A > 0 and with A < 0;
            1 where there are none.
        tokens: valid tokens. seconds: the time taken.
    """

    needs = ("old_log_probs",)
    adv_estimator = "covgrpo"

    scope: Scope = "batch"
    """What the moments are taken over: the whole batch, or each prompt's group."""

    def reweight(self, rollout: Rollout) -> Reweighted:
        """Return A' = w~ A."""
        weighted_BT = rollout.tokens.zeros()
        weighting = weigh(rollout, self.base_advantages(rollout), self.scope, weighted_BT)
        return Reweighted(advantages=weighted_BT, metrics=weighting.metrics())


# The formula


def standardised_covariance_(
    l: torch.Tensor,  # noqa: E741
    mean_l: torch.Tensor,
    A: torch.Tensor,
    mean_A: torch.Tensor,
    inv_s: torch.Tensor,
) -> torch.Tensor:
    """Turn l into u = c / s = (l - mean l) (A - mean A) / s, in place.

    l is (B, T), or a chunk of it, float32 or float64; A has a column or as many as l, the others
    have one, float64.
    """
    # The mean in two parts: as a float32 alone it would shift all tokens by its rounding error.
    mean_high = mean_l.to(l.dtype)
    mean_low = (mean_l - mean_high).to(l.dtype)
    return l.sub_(mean_high).sub_(mean_low).mul_(((A - mean_A) * inv_s).to(l.dtype))


def kernel_(u: torch.Tensor) -> torch.Tensor:
    """Turn u = c / s into w = exp(-u^2 / 2), in place."""
    # In torch, exp2 is many times faster than exp where the result is 0, as it is for padding.
    return u.square_().mul_(-0.5 / math.log(2)).exp2_()


# The weights of a rollout


@dataclass(frozen=True)
class Weighting:
    """What the kernel adds up to in each row, (B,) float64, and in the batch."""

    rollout: Rollout
    A: torch.Tensor
    """(B, 1) or (B, T) base advantages."""
    scopes: Scopes
    covariance: Covariance
    w: torch.Tensor
    w_square: torch.Tensor
    w_positive: torch.Tensor
    """w of the tokens with A > 0."""
    w_negative: torch.Tensor
    positive: torch.Tensor
    """Number of tokens with A > 0."""
    negative: torch.Tensor
    suppressed: int
    """Tokens with w < 0.1 in the batch."""
    high: int
    """Tokens with c > 2 s in the batch."""
    low: int

    @property
    def norm(self) -> torch.Tensor:
        """(S,) N / sum(w), exactly 1 where every weight is 1."""
        norm_S = self.scopes.add(self.rollout.lengths) / self.scopes.add(self.w)
        return torch.where(self.covariance.inv_s > 0, norm_S, 1.0)

    @property
    def frozen(self) -> torch.Tensor:
        """(B, 4) float64 mean l, mean A, 1/s and N/sum(w) of each row's scope."""
        c = self.covariance
        return torch.stack((c.mean_l, c.mean_A, c.inv_s, self.norm), dim=1)[self.scopes.index]

    def metrics(self) -> dict[str, float]:
        """Return the metrics of `CovGRPO`, all but the time."""
        tokens = int(self.rollout.lengths.sum())
        count_B = self.rollout.lengths.double()
        norm_B, s_B = self.norm[self.scopes.index], self.covariance.s[self.scopes.index]
        mean = float((norm_B * self.w).sum()) / tokens
        mean_square = float((norm_B.square() * self.w_square).sum()) / tokens

        def mean_weight(w_B: torch.Tensor, count_B: torch.Tensor) -> float:
            count = float(count_B.sum())
            return float((norm_B * w_B).sum()) / count if count else 1.0

        return {
            "weight_std": max(mean_square - mean**2, 0.0) ** 0.5,
            "effective_share": mean**2 / mean_square,
            "suppressed_share": self.suppressed / tokens,
            "covariance_std": float((count_B * s_B).sum()) / tokens,
            "high_covariance_share": self.high / tokens,
            "low_covariance_share": self.low / tokens,
            "positive_weight_mean": mean_weight(self.w_positive, self.positive),
            "negative_weight_mean": mean_weight(self.w_negative, self.negative),
            "tokens": float(tokens),
        }


def weigh(
    rollout: Rollout, A: torch.Tensor, scope: Scope, weighted_BT: torch.Tensor | None = None
) -> Weighting:
    """Return the weighting of a rollout under base advantages A, (B, 1) or (B, T).

    A' = w~ A of the valid tokens is written to `weighted_BT`, float32 zeros, if there is one.
    """
    if scope == "batch":
        scopes = Scopes(torch.zeros_like(rollout.group_index), 1)
    else:
        scopes = Scopes(rollout.group_index, rollout.num_groups)
    covariance = covariance_of(rollout, A, scopes)
    weighting = apply_kernel(rollout, A, scopes, covariance, weighted_BT)
    vanished_S = scopes.add(weighting.w) < KERNEL_FLOOR * scopes.add(rollout.lengths)
    if bool(vanished_S.any()):
        inv_s_S = torch.where(vanished_S, 0.0, covariance.inv_s)
        covariance = replace(covariance, inv_s=inv_s_S)
        weighting = apply_kernel(rollout, A, scopes, covariance, weighted_BT)
    if weighted_BT is not None:
        weighted_BT.mul_(weighting.norm[scopes.index].float().unsqueeze(1))
    return weighting


def apply_kernel(
    rollout: Rollout,
    A: torch.Tensor,
    scopes: Scopes,
    covariance: Covariance,
    weighted_BT: torch.Tensor | None,
) -> Weighting:
    """Return what w adds up to, and write w A to the valid tokens of `weighted_BT`."""
    tokens = rollout.tokens
    frozen_S3 = torch.stack((covariance.mean_l, covariance.mean_A, covariance.inv_s), dim=1)
    frozen_B3 = frozen_S3[scopes.index]
    count = stats.Counter(frozen_B3.device)
    scratch64 = stats.Scratch(torch.float64, frozen_B3.device)
    sums, norms, signed = [], [], []
    suppressed = high = low = masked = 0
    log_probs, frozen = tokens.each(rollout.require("old_log_probs")), tokens.split(frozen_B3)
    for (chunk, l_rw), frozen_r3 in zip(log_probs, frozen, strict=True):
        A_rw = chunk.take(A)
        mean_l_r1, mean_A_r1, inv_s_r1 = frozen_r3.split(1, dim=1)
        u_rw = standardised_covariance_(l_rw, mean_l_r1, A_rw, mean_A_r1, inv_s_r1)
        # An infinite u has the kernel 0, so that nothing below has to look at the mask.
        chunk.mask_(u_rw, -torch.inf)
        high += count.above(u_rw, 2.0)
        low += count.below(u_rw, -2.0)
        w_rw = kernel_(u_rw)
        suppressed += count.below(w_rw, SUPPRESSED)
        masked += w_rw.numel()
        w64_rw = scratch64.copy(w_rw)
        sums.append(w64_rw.sum(dim=1))
        norms.append(torch.linalg.vector_norm(w64_rw, dim=1))
        if A.shape[1] > 1:
            mask_rw = chunk.take(tokens.mask)
            signed.append(
                torch.stack(
                    [
                        ((A_rw > 0) * w64_rw).sum(dim=1),
                        ((A_rw < 0) * w64_rw).sum(dim=1),
                        ((A_rw > 0) & mask_rw).sum(dim=1),
                        ((A_rw < 0) & mask_rw).sum(dim=1),
                    ]
                )
            )
            chunk.mask_(A_rw, 0.0)
        if weighted_BT is not None:
            chunk.put(w_rw.mul_(A_rw).float(), weighted_BT)
    masked -= int(tokens.count.sum())
    w_B = tokens.unpack_rows(sums)
    if A.shape[1] > 1:
        signed_4B = [tokens.unpack_rows(parts) for parts in zip(*signed, strict=True)]
    else:
        signs_B = (A.squeeze(1) > 0, A.squeeze(1) < 0)
        signed_4B = [x_B * sign_B for x_B in (w_B, tokens.count.double()) for sign_B in signs_B]
    w_positive_B, w_negative_B, positive_B, negative_B = signed_4B
    return Weighting(
        rollout=rollout,
        A=A,
        scopes=scopes,
        covariance=covariance,
        w=w_B,
        w_square=tokens.unpack_rows(norms).square(),
        w_positive=w_positive_B,
        w_negative=w_negative_B,
        positive=positive_B,
        negative=negative_B,
        suppressed=suppressed - masked,
        high=high,
        low=low - masked,
    )
