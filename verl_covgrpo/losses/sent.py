"""sent: semantic and token entropy, arXiv 2512.04359; the policy loss.

With H the entropy of the full softmax, c = (l - mean l)(A - mean A) as in covgrpo over the batch,
and quantiles over the valid tokens of the whole batch:

    T_low = tokens with H < the 0.8 quantile of H
    beta  = beta_high on those of T_low with c > the 0.8 quantile of c within T_low
            beta_low  on the rest of T_low
            0         elsewhere
    loss  = verl's clipped loss + beta KL(pi_theta || pi_ref),  KL = exp(d) - d - 1, d = lref - l

Where this comes from
    As described in secondary notes: the two entropies, T_low, the two coefficients, the KL.
    Our choice: the numbers (0.8, 0.8, 0.2, 0.05), linear quantiles, strict comparisons; the
    thresholds come from the whole batch, under pi_old. An empty T_low gives 0 everywhere; d is
    bounded to [-20, 20], against overflow; rollout correction's weights leave the KL alone.

Its authors' code exists, and differs from the text. The curriculum is a command of its own.

Shape suffixes: B responses, T columns, r rows and w columns of a chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from verl_covgrpo.covariance import covariances
from verl_covgrpo.micro_batch import Loss, MicroBatch
from verl_covgrpo.registry import Method, parameter, register
from verl_covgrpo.rollout import Reweighted, Rollout

BETA = "sent_beta_BT"


@register("sent")
@dataclass(frozen=True, kw_only=True)
class SENT(Method):
    """Hold tokens of low entropy to the reference policy, those of high covariance more.

    Metrics
        low_entropy_share: tokens in T_low, as a share of all. held_share: those with beta_high.
        entropy_threshold, covariance_threshold: the two quantiles; 0 where T_low is empty.
        tokens: valid tokens. seconds: the time taken.
    Metrics of the loss, of each micro-batch
        sent_kl: mean of beta KL over all tokens.
    """

    needs = ("entropy", "old_log_probs", "ref_log_probs")
    loss_mode = "sent"
    own_kl = True

    entropy_quantile: float = parameter(0.8, low=0.0, high=1.0)
    covariance_quantile: float = parameter(0.8, low=0.0, high=1.0)
    beta_high: float = parameter(0.2, low=0.0)
    beta_low: float = parameter(0.05, low=0.0)

    def reweight(self, rollout: Rollout) -> Reweighted:
        """Return A, and (B, T) float32, beta of every token."""
        A, tokens = self.base_advantages(rollout), rollout.tokens
        H = tokens.pack(rollout.require("entropy"))
        valid = [chunk.take(tokens.mask) for chunk in tokens.chunks]
        below = quantile(H, valid, self.entropy_quantile)
        low = [(H_rw < below) & is_rw for H_rw, is_rw in zip(H, valid, strict=True)]
        c = covariances(rollout, A)
        lows = sum(int(low_rw.sum()) for low_rw in low)
        above = quantile(c, low, self.covariance_quantile) if lows else 0.0
        beta_BT = tokens.zeros()
        held = 0
        for chunk, c_rw, low_rw in zip(tokens.chunks, c, low, strict=True):
            high_rw = low_rw & (c_rw > above)
            held += int(high_rw.sum())
            beta_rw = low_rw * self.beta_low + high_rw * (self.beta_high - self.beta_low)
            chunk.put(beta_rw.float(), beta_BT)
        count = int(tokens.count.sum())
        metrics = {
            "low_entropy_share": lows / count,
            "held_share": held / count,
            "entropy_threshold": below if lows else 0.0,
            "covariance_threshold": above,
            "tokens": float(count),
        }
        return Reweighted(
            advantages=tokens.spread(A),
            metrics=metrics,
            loss_fields={BETA: beta_BT},
        )

    def policy_loss(self, micro: MicroBatch) -> Loss:
        """Return verl's clipped loss + beta KL."""
        loss, metrics = micro.clipped_loss(micro.advantages)
        d = (micro.fields["ref_log_prob"] - micro.log_probs).clamp(-20.0, 20.0)
        kl = micro.fields[BETA] * (d.exp() - d - 1)
        return loss + micro.aggregate(kl, corrected=False), {**metrics, "sent_kl": micro.mean(kl)}


def quantile(parts: list[torch.Tensor], where: list[torch.Tensor], q: float) -> float:
    """Return the linear quantile of the values of chunks at the places given."""
    values = np.concatenate(
        [x_rw.cpu().numpy()[is_rw.cpu().numpy()] for x_rw, is_rw in zip(parts, where, strict=True)]
    )
    place = q * (len(values) - 1)
    low = math.floor(place)
    values.partition(low)
    below = float(values[low])
    above = float(values[low + 1 :].min()) if low + 1 < len(values) else below
    return below + (place - low) * (above - below)
