"""reco: against distributional concentration, arXiv 2607.26862.

Over a prompt's group, with pibar_i the geometric-mean token probability of response i under pi_old,
and p = pi_theta, p_old = pi_old of the sampled token:

    w_i = 1 / (G pibar_i),  divided by its mean over the group, at most `cap`
    A'  = w_i A
    r   = [p (1 - p)] / [p_old (1 - p_old)]
    loss = -sg(clip(r, ratio_low, ratio_high)) A' log p

Where this comes from
    [paper] The contribution of a response is normalised by its expected occurrence; a ratio of
    variances takes the place of the token ratio.
    As described in secondary notes: 1 / (G pibar_i), r and the loss.
    Our choice: the geometric mean; the mean over the group's responses that have a token; the cap,
    5; the stop-gradient sg (differentiated, r would turn the sign around for p > 1/2) and the clip
    to [0.8, 1.2]; 1 - p is at least 1e-6.

Shape suffixes: B responses, T columns, G groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from verl_covgrpo import groups, stats
from verl_covgrpo.errors import MethodError
from verl_covgrpo.micro_batch import Loss, MicroBatch
from verl_covgrpo.registry import Method, parameter, register
from verl_covgrpo.rollout import Reweighted, Rollout

FLOOR = 1e-6


@register("reco")
@dataclass(frozen=True, kw_only=True)
class ReCo(Method):
    """Weight responses by how rare they are, and tokens by a ratio of variances.

    Metrics
        weight_std: std of w over the responses that have a token.
        capped_share: share of them whose w was cut to the cap.
        positive_weight, negative_weight: mean w of the tokens with A > 0 and with A < 0; 1 where
            there are none.
        tokens: valid tokens. seconds: the time taken.
    Metrics of the loss, of each micro-batch
        ppo_kl: mean log p_old - log p. pg_clipfrac: share of the tokens whose r was clipped.
        reco_ratio: mean clipped r.
    """

    needs = ("old_log_probs",)
    adv_estimator = "reco"
    loss_mode = "reco"

    cap: float = parameter(5.0, low=1.0)
    """The largest weight of a response, in multiples of its group's mean."""
    ratio_low: float = parameter(0.8, low=0.0, high=1.0, of_loss=True)
    ratio_high: float = parameter(1.2, low=1.0, of_loss=True)

    def __post_init__(self) -> None:
        if self.ratio_low <= 0:
            raise MethodError(f"reco.ratio_low is {self.ratio_low}; it must be greater than 0")

    def reweight(self, rollout: Rollout) -> Reweighted:
        """Return A' = w A."""
        A, tokens = self.base_advantages(rollout), rollout.tokens
        w_B = response_weights(rollout)
        capped_B = w_B > self.cap
        w_B = w_B.clamp(max=self.cap)
        counts_B = tokens.count > 0
        responses = int(counts_B.sum())
        mean = float(w_B[counts_B].mean())
        by_sign = stats.weight_metrics(tokens, w_B.unsqueeze(1), A)
        metrics = {
            "weight_std": float((w_B[counts_B] - mean).square().mean().sqrt()),
            "capped_share": int((capped_B & counts_B).sum()) / responses,
            "positive_weight": by_sign["positive_weight"],
            "negative_weight": by_sign["negative_weight"],
            "tokens": float(tokens.count.sum()),
        }
        w_BT = tokens.spread(w_B.unsqueeze(1) * A)
        return Reweighted(advantages=w_BT, metrics=metrics)

    def policy_loss(self, micro: MicroBatch) -> Loss:
        """Return the loss, -sg(clip(r)) A log p."""
        with torch.no_grad():
            log_r = log_variance(micro.log_probs) - log_variance(micro.old_log_probs)
            low, high = math.log(self.ratio_low), math.log(self.ratio_high)
            r = log_r.clamp(low, high).exp()
        metrics = {
            "ppo_kl": micro.mean(micro.old_log_probs - micro.log_probs),
            "pg_clipfrac": micro.mean(((log_r < low) | (log_r > high)).float()),
            "reco_ratio": micro.mean(r),
        }
        return micro.aggregate(-r * micro.advantages * micro.log_probs), metrics


def response_weights(rollout: Rollout) -> torch.Tensor:
    """Return w before the cap, (B,) float64: exp(-mean l) over its mean in the group.

    In log space, since a long mean of a small probability leaves float range.
    """
    l_BT, tokens = rollout.require("old_log_probs"), rollout.tokens
    surprise_B = -stats.row_moments(l_BT, tokens).mean
    surprise_B = torch.where(tokens.count > 0, surprise_B, -torch.inf)
    scopes = groups.of(rollout)
    largest_G = scopes.greatest(surprise_B)
    # A group without a token has no largest; its rows have no weight to speak of.
    largest_B = torch.where(largest_G.isfinite(), largest_G, 0.0)[scopes.index]
    relative_B = (surprise_B - largest_B).exp()
    mean_G = scopes.add(relative_B) / scopes.add(tokens.count > 0).clamp(min=1)
    return torch.where(tokens.count > 0, relative_B / mean_G[scopes.index], 1.0)


def log_variance(log_probs: torch.Tensor) -> torch.Tensor:
    """Return log(p (1 - p)) of a log-prob, with 1 - p at least 1e-6."""
    return log_probs + (-torch.expm1(log_probs)).clamp(min=FLOOR).log()
